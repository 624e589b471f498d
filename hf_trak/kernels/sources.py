"""What there is to compile: the files of `cuda_ext/` and the instances of their templates."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from hf_trak.errors import KernelError

PRELUDE = ("primitives.cu", "common.cu")
"""The files in front of every kernel file."""

_SHARED_PARTS = {
    "sjlt": ("accumulators.cu",),
    "outer": ("accumulators.cu",),
    "rademacher": ("sign_tiles.cu",),
    "rademacher_wgmma": ("wgmma.cu", "sign_tiles.cu"),
}

INPUT_TYPES = {torch.float32: "Float32", torch.bfloat16: "BFloat16", torch.float16: "Float16"}
"""The names that `common.cu` gives to the dtypes of gradients."""

TENSOR_CORE_CAPABILITY = (8, 0)
"""Where `rademacher.cu` runs: bfloat16 matrix instructions came with Ampere."""

HOPPER_CAPABILITY = (9, 0)
"""Where `rademacher_wgmma.cu` runs, and nowhere else: Blackwell has other instructions."""

ARCHITECTURES = ("75", "80", "86", "89", "90a", "100", "120")
"""What the tests compile for, and `hf_trak.kernels.build` by default."""

VOLTA = "70"
"""What CUDA 12 compiles for, too; CUDA 13 does not."""


@dataclass(frozen=True)
class Kernel:
    """One kernel function."""

    file: str
    """Without its suffix."""

    expression: str
    """What C++ calls it, such as `sjlt<BFloat16>`."""

    threads: int
    """Per block."""

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether GPUs of a compute capability have its instructions."""
        if self.file == "rademacher_wgmma":
            return capability == HOPPER_CAPABILITY
        return self.file != "rademacher" or capability >= TENSOR_CORE_CAPABILITY


REDUCE = Kernel("reduce", "reduce_partials", 256)


def sjlt_kernel(dtype: torch.dtype) -> Kernel:
    """The sparse map."""
    return Kernel("sjlt", f"sjlt<{INPUT_TYPES[dtype]}>", 512)


TOKENS = (1, 4, 8)
"""Numbers of outer products that there are instances of `outer.cu` for."""


def outer_kernel(dtype: torch.dtype, tokens: int) -> Kernel:
    """The sparse map of sums of up to `tokens` outer products per sample."""
    return Kernel("outer", f"outer<{INPUT_TYPES[dtype]}, {tokens}>", 256)


def rademacher_kernel(dtype: torch.dtype, terms: int, samples: int) -> Kernel:
    """The Rademacher map on tensor cores; `samples` is the batch per block of threads: 16, 64 or 128."""
    return Kernel("rademacher", f"rademacher<{INPUT_TYPES[dtype]}, {terms}, {samples}>", 256)


def wgmma_kernel(dtype: torch.dtype, terms: int, samples: int) -> Kernel:
    """The Rademacher map on Hopper's tensor cores; `samples` is the batch per block of threads: 16, 64 or 128."""
    return Kernel("rademacher_wgmma", f"rademacher_wgmma<{INPUT_TYPES[dtype]}, {terms}, {samples}>", 256)


def dense_kernel(dtype: torch.dtype, distribution: str, samples: int) -> Kernel:
    """A dense map (`Normal` or `Rademacher`) in float32 arithmetic; `samples` is 16 or 64."""
    return Kernel("dense", f"dense<{INPUT_TYPES[dtype]}, {distribution}, {samples}>", 256)


def all_kernels() -> list[Kernel]:
    """Every kernel that the library can launch."""
    kernels = [REDUCE, *(sjlt_kernel(dtype) for dtype in INPUT_TYPES)]
    kernels += [outer_kernel(dtype, tokens) for dtype in INPUT_TYPES for tokens in TOKENS]
    for dtype in INPUT_TYPES:
        wide = dtype == torch.float32
        for terms in (1, 2) if wide else (1,):
            kernels += [rademacher_kernel(dtype, terms, samples) for samples in ((16, 64) if wide else (16, 64, 128))]
            kernels += [wgmma_kernel(dtype, terms, samples) for samples in (16, 64, 128)]
        for distribution in ("Normal", "Rademacher"):
            kernels += [dense_kernel(dtype, distribution, samples) for samples in (16, 64)]
    return kernels


@cache
def source_directory() -> Path:
    """Where the `.cu` files are: in the installed package, or beside it in a checkout.

    Raises:
        KernelError: they are in neither place.
    """
    package = Path(__file__).resolve().parent.parent
    for directory in (package / "cuda_ext", package.parent / "cuda_ext"):
        if (directory / PRELUDE[0]).is_file():
            return directory
    raise KernelError(
        f"The kernel sources are missing: there is no `cuda_ext/{PRELUDE[0]}` in {package} or beside it. Expected the "
        "files that the wheel ships. Reinstall hf_trak, or set HF_TRAK_BACKEND=torch."
    )


def parts(file: str) -> tuple[str, ...]:
    """Names of the files that make up the program of a kernel file, in order."""
    return (*PRELUDE, *_SHARED_PARTS.get(file, ()), f"{file}.cu")


@cache
def source(file: str) -> str:
    """The whole program of a kernel file."""
    directory = source_directory()
    return "\n".join((directory / name).read_text(encoding="utf-8") for name in parts(file))
