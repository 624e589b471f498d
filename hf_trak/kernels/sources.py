"""The programs to compile: the files of `cuda_ext/` and the instances of their templates."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from hf_trak.errors import KernelError

PRELUDE = ("primitives.cu", "common.cu")
"""Files that precede every kernel file in its program."""

_SHARED_PARTS = {
    "sjlt": ("accumulators.cu",),
    "outer": ("accumulators.cu",),
    "rademacher": ("sign_tiles.cu",),
    "rademacher_wgmma": ("wgmma.cu", "sign_tiles.cu"),
}

INPUT_TYPES = {torch.float32: "Float32", torch.bfloat16: "BFloat16", torch.float16: "Float16"}
"""The names that `common.cu` gives to the dtypes of gradients."""

TENSOR_CORE_CAPABILITY = (8, 0)
"""Lowest compute capability for `rademacher.cu`: bfloat16 matrix instructions came with Ampere."""

HOPPER_CAPABILITY = (9, 0)
"""The only compute capability for `rademacher_wgmma.cu`: Blackwell has other instructions."""

ARCHITECTURES = ("75", "80", "86", "89", "90a", "100", "120")
"""Architectures that the tests compile for, and `hf_trak.kernels.build` by default."""

VOLTA = "70"
"""An architecture that CUDA 12 compiles for, too; CUDA 13 does not."""


@dataclass(frozen=True)
class Kernel:
    """One kernel function."""

    file: str
    """Name of the file without its suffix."""

    expression: str
    """Name in C++, such as `sjlt<BFloat16>`."""

    threads: int
    """Number of threads per block."""

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Tell whether GPUs of a compute capability have the kernel's instructions."""
        if self.file == "rademacher_wgmma":
            return capability == HOPPER_CAPABILITY
        return self.file != "rademacher" or capability >= TENSOR_CORE_CAPABILITY


REDUCE = Kernel("reduce", "reduce_partials", 256)

HADAMARD = Kernel("hadamard", "hadamard", 512)


def sjlt_kernel(dtype: torch.dtype) -> Kernel:
    """Name the kernel of the sparse map."""
    return Kernel("sjlt", f"sjlt<{INPUT_TYPES[dtype]}>", 512)


TOKENS = (1, 4, 8)
"""Numbers of outer products for which `outer.cu` has instances."""


def outer_kernel(dtype: torch.dtype, tokens: int) -> Kernel:
    """Name the kernel of the sparse map for sums of up to `tokens` outer products per sample."""
    return Kernel("outer", f"outer<{INPUT_TYPES[dtype]}, {tokens}>", 256)


def rademacher_kernel(dtype: torch.dtype, terms: int, samples: int) -> Kernel:
    """Name the kernel of the Rademacher map on tensor cores; `samples` per block of threads are 16, 64 or 128."""
    return Kernel("rademacher", f"rademacher<{INPUT_TYPES[dtype]}, {terms}, {samples}>", 256)


def wgmma_kernel(dtype: torch.dtype, terms: int, samples: int) -> Kernel:
    """Name the kernel of the Rademacher map on Hopper's tensor cores; arguments as in `rademacher_kernel`."""
    return Kernel("rademacher_wgmma", f"rademacher_wgmma<{INPUT_TYPES[dtype]}, {terms}, {samples}>", 256)


def dense_kernel(dtype: torch.dtype, distribution: str, samples: int) -> Kernel:
    """Name the kernel of a dense map (`Normal` or `Rademacher`) in float32 arithmetic; `samples` is 16 or 64."""
    return Kernel("dense", f"dense<{INPUT_TYPES[dtype]}, {distribution}, {samples}>", 256)


def all_kernels() -> list[Kernel]:
    """List every kernel that the library can launch."""
    kernels = [REDUCE, HADAMARD, *(sjlt_kernel(dtype) for dtype in INPUT_TYPES)]
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
    """Find the directory of the `.cu` files, in the installed package or beside it in a checkout.

    Raises:
        KernelError: the files are in neither place.
    """
    package = Path(__file__).resolve().parent.parent
    for directory in (package / "cuda_ext", package.parent / "cuda_ext"):
        if (directory / PRELUDE[0]).is_file():
            return directory
    raise KernelError(
        f"The kernel sources are missing: neither {package} nor its parent has `cuda_ext/{PRELUDE[0]}`. Expected the "
        "files that the wheel ships. Reinstall hf_trak, or set HF_TRAK_BACKEND=torch."
    )


def parts(file: str) -> tuple[str, ...]:
    """List the files that make up the program of a kernel file, in order."""
    return (*PRELUDE, *_SHARED_PARTS.get(file, ()), f"{file}.cu")


@cache
def source(file: str) -> str:
    """Read the whole program of a kernel file."""
    directory = source_directory()
    return "\n".join((directory / name).read_text(encoding="utf-8") for name in parts(file))


@cache
def cpu_source(name: str) -> str:
    """Read a file of `cuda_ext/cpu/`."""
    return (source_directory() / "cpu" / f"{name}.c").read_text(encoding="utf-8")
