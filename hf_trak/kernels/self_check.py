"""Checks of kernels against torch operators, on the user's GPU, before their first result is used.

A kernel is the one part of a projection or rotation that is compiled on the user's machine. Its result for a small
block of integers is compared with that of `torch_sparse`, `torch_dense` or `torch_hadamard` on the CPU: signs and
indices must agree to the bit. This takes milliseconds, once per kernel, process and device.
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from hf_trak.errors import KernelError
from hf_trak.kernels import torch_hadamard
from hf_trak.kernels.arguments import WGMMA_VARIABLE, wgmma_wanted
from hf_trak.kernels.dense import Distribution, Instruction, accumulate_dense, fastest_instruction, tile_of_samples
from hf_trak.kernels.hadamard import TILE_BITS, rotate_blocks
from hf_trak.kernels.outer import accumulate_outer, tokens_of_instance
from hf_trak.kernels.runtime import Runtime
from hf_trak.kernels.sparse import accumulate_sjlt
from hf_trak.kernels.torch_dense import NormalMap, RademacherMap
from hf_trak.kernels.torch_sparse import SparseMap, sum_of_outer_products

logger = logging.getLogger(__name__)

_SEED, _MODEL_ID = 2**40 + 12345, 77
# of sums of 300 products of up to 8 · 5.8, whose sines and logarithms differ in the last place
_NORMAL_TOLERANCE = 1e-3

_done: set[tuple[object, ...]] = set()
_without_wgmma: set[torch.device] = set()


def require_right_sjlt(runtime: Runtime, dtype: torch.dtype, device: torch.device) -> None:
    """Check the sparse kernel of a dtype.

    Raises:
        KernelError: it cannot be run, or its result is wrong.
    """
    start = 2**33 + 5000

    def run(out: Tensor, block: Tensor) -> None:
        accumulate_sjlt(runtime, out, block, start, _SEED, _MODEL_ID, [(0, out.shape[1])])

    def reference(out: Tensor, block: Tensor) -> None:
        SparseMap(start + block.shape[1], out.shape[1], _SEED, 1).accumulate(out, block, start, _MODEL_ID)

    # One tile and two; chunks inside of the row and on its ends, and for two tiles more than a stage has.
    for outputs in (3000, 8000):
        key = ("sjlt", outputs, dtype, device)
        _require("sjlt", key, (3, 80_001), outputs, dtype, device, run, reference, 0.0)


def require_right_outer(runtime: Runtime, dtype: torch.dtype, tokens: int, device: torch.device) -> None:
    """Check the kernel that projects sums of `tokens` outer products.

    Raises:
        KernelError: it cannot be run, or its result is wrong.
    """
    instance = tokens_of_instance(tokens)
    outputs, start, height, width = 3000, 2**33 + 5001, 11, 1030

    def factors(block: Tensor) -> tuple[Tensor, Tensor]:
        """Split a block `(B, T (I + J))` into `(B, T, I)` and `(B, T, J)`."""
        left, right = block.split([instance * height, instance * width], 1)
        return left.unflatten(1, (instance, height)), right.unflatten(1, (instance, width))

    def run(out: Tensor, block: Tensor) -> None:
        accumulate_outer(runtime, out, *factors(block), start, _SEED, _MODEL_ID, [(0, outputs)])

    def reference(out: Tensor, block: Tensor) -> None:
        product = sum_of_outer_products(*factors(block))
        SparseMap(start + height * width, out.shape[1], _SEED, 1).accumulate(out, product, start, _MODEL_ID)

    key, shape = ("outer", dtype, instance, device), (3, instance * (height + width))
    _require("outer", key, shape, outputs, dtype, device, run, reference, 0.0)


def require_right_hadamard(runtime: Runtime, size: int, device: torch.device) -> None:
    """Check the kernel of the rotation: rows that fit into a tile, or rows that take several passes.

    Raises:
        KernelError: it cannot be run, or its result is wrong.
    """
    in_tile = size <= 1 << TILE_BITS
    # Sizes 2ⁿ with an odd n, where products with 1 / √p are rounded. Several rows in a tile that is not full. Four
    # passes, with all layouts: two of them end a round and begin the next.
    rows, checked = (7, 2**11) if in_tile else (2, 2**17)
    generator = torch.Generator().manual_seed(1)
    signs = torch.randint(-(2**31), 2**31, (3, checked // 32), generator=generator).to(torch.int32)

    def run(out: Tensor, block: Tensor) -> None:
        out.copy_(block)
        rotate_blocks(runtime, out, signs.to(device), checked, [0, 0, 0])

    def reference(out: Tensor, block: Tensor) -> None:
        out.copy_(block)
        torch_hadamard.rotate_blocks(out, signs, checked, [0, 0, 0])

    key = ("hadamard", in_tile, device)
    _require("hadamard", key, (rows, checked), checked, torch.float32, device, run, reference, 0.0)


def require_right_dense(
    runtime: Runtime,
    distribution: Distribution,
    dtype: torch.dtype,
    rows: int,
    device: torch.device,
    terms: int,
    instruction: Instruction,
) -> None:
    """Check the dense kernel that a batch of `rows` samples takes.

    Raises:
        KernelError: it cannot be run, or its result is wrong.
    """
    samples = tile_of_samples(rows, 128)
    outputs, start = 140, 2**32 - 101

    def run(out: Tensor, block: Tensor) -> None:
        accumulate_dense(runtime, distribution, out, block, start, _SEED, _MODEL_ID, terms, instruction)

    def reference(out: Tensor, block: Tensor) -> None:
        kind = NormalMap if distribution == "normal" else RademacherMap
        kind(out.shape[1], _SEED).accumulate(out, block, start, _MODEL_ID)

    tolerance = _NORMAL_TOLERANCE if distribution == "normal" else 0.0
    # More than a chain of float32 products in two terms. Other chains end in longer splits than a check in passing
    # has; tests on a GPU have them.
    columns = 301 if distribution == "normal" else 1101
    name, key = f"{distribution}, {instruction}", (distribution, dtype, samples, terms, instruction, device)
    _require(name, key, (samples - 1, columns), outputs, dtype, device, run, reference, tolerance)


def checked_instruction(
    runtime: Runtime, distribution: Distribution, dtype: torch.dtype, rows: int, device: torch.device, terms: int
) -> Instruction:
    """Find the fastest instruction whose kernel is right for a batch of `rows` samples.

    Where Hopper's own (`wgmma`) cannot be used, a warning says why and `mma`, which computes the same map with sums
    rounded elsewhere, takes its place on that device for the rest of the process.

    Raises:
        KernelError: no kernel runs with a right result.
        ValueError: `HF_TRAK_WGMMA` is neither 0 nor 1.
    """
    instruction = fastest_instruction(distribution, runtime.capability(device))
    if instruction == "wgmma":
        if wgmma_wanted() and device not in _without_wgmma:
            try:
                require_right_dense(runtime, distribution, dtype, rows, device, terms, instruction)
            except KernelError as error:
                _without_wgmma.add(device)
                logger.warning(
                    "The kernel of the dense map for Hopper GPUs is not used on %s; the one for all GPUs, which is "
                    "slower, takes its place. Set %s=0 to choose that without this warning. The reason: %s",
                    device, WGMMA_VARIABLE, error,
                )  # fmt: skip
            else:
                return instruction
        instruction = "mma"
    require_right_dense(runtime, distribution, dtype, rows, device, terms, instruction)
    return instruction


def _require(
    name: str,
    key: tuple[object, ...],
    shape: tuple[int, int],
    outputs: int,
    dtype: torch.dtype,
    device: torch.device,
    run: Callable[[Tensor, Tensor], None],
    reference: Callable[[Tensor, Tensor], None],
    tolerance: float,
) -> None:
    if key in _done:
        return
    if device.type == "cuda" and _is_capturing(device):
        return  # results cannot be read while a CUDA graph is recorded; the next call outside of one checks
    # Integers up to 8 are exact in every dtype, and so are their sums in float32, whatever the order.
    generator = torch.Generator().manual_seed(0)
    block = torch.randint(-8, 9, shape, generator=generator).to(dtype)
    expected = torch.zeros(shape[0], outputs)
    reference(expected, block)
    actual = torch.zeros(shape[0], outputs, device=device)
    run(actual, block.to(device))
    difference = float((actual.cpu() - expected).abs().max())
    if not difference <= tolerance:
        raise KernelError(
            f"The '{name}' kernel for {dtype} gives wrong results on {device}: that for a test block differs from the "
            f"reference by {difference}. Expected at most {tolerance}. Set HF_TRAK_BACKEND=torch, which does not use "
            "it, and please report this with the GPU's name and the versions of the driver and of torch."
        )
    _done.add(key)


def _is_capturing(device: torch.device) -> bool:
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
