"""Launches of `rademacher.cu`, `rademacher_wgmma.cu` and `dense.cu` for a dense projection.

As in `sparse.py`, the cuts along the positions depend on the block's position and length and on k alone. The order of
the sum of one output of one sample does not depend on the tile of samples that it is computed in.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hf_trak.kernels.arguments import DenseArguments, Destination, Generator
from hf_trak.kernels.runtime import Launch, Runtime, reduce, workspace
from hf_trak.kernels.sources import (
    HOPPER_CAPABILITY,
    TENSOR_CORE_CAPABILITY,
    Kernel,
    dense_kernel,
    rademacher_kernel,
    wgmma_kernel,
)

Distribution = Literal["rademacher", "normal"]

Instruction = Literal["wgmma", "mma", "fma"]
"""Instructions that multiply: Hopper's for tensor cores, those of all GPUs since Ampere, or float32 arithmetic."""

_TENSOR_CORE_COLUMNS, _TENSOR_CORE_POSITIONS = 256, 64
_COLUMNS, _POSITIONS = 128, 32
_BLOCKS_WANTED = 512  # of threads, per tile of samples: about four for each of the largest GPUs' multiprocessors
_MIN_POSITIONS = 4096  # per split
_ROWS_AT_ONCE = 512  # bounds the workspace: at most 512 KiB per sample


@dataclass(frozen=True)
class DensePlan:
    """One launch."""

    kernel: Kernel
    column_groups: int
    positions_per_split: int
    splits: int
    samples: int
    """Number of samples of a block of threads."""

    shared_bytes: int


def tile_of_samples(rows: int, largest: int) -> int:
    """Choose the number of samples per block of threads for a batch: 16, 64 or `largest`."""
    return next((samples for samples in (16, 64) if rows <= samples), largest)


def fastest_instruction(distribution: Distribution, capability: tuple[int, int]) -> Instruction:
    """Choose the fastest instructions that a GPU has for a map."""
    if distribution == "normal" or capability < TENSOR_CORE_CAPABILITY:
        return "fma"
    return "wgmma" if capability == HOPPER_CAPABILITY else "mma"


def plan_dense(
    distribution: Distribution,
    instruction: Instruction,
    rows: int,
    start: int,
    columns: int,
    outputs: int,
    dtype: torch.dtype,
    terms: int,
) -> DensePlan:
    """Cut a block `(rows, columns)` at position `start`, for `outputs` outputs.

    Args:
        instruction: the instructions that multiply.
        terms: bfloat16 terms per float32 element, 1 or 2.
    """
    if instruction != "fma":
        terms = terms if dtype == torch.float32 else 1
        width, multiple, length = _TENSOR_CORE_COLUMNS, _TENSOR_CORE_POSITIONS, columns
        samples = tile_of_samples(rows, 64 if dtype == torch.float32 and instruction == "mma" else 128)
        shared = 2 * (width // 32) * multiple * 4 + 2 * terms * samples * multiple * 2
        if instruction == "wgmma":
            kernel = wgmma_kernel(dtype, terms, samples)
            shared += samples * width * 4  # sums of chains
        else:
            kernel = rademacher_kernel(dtype, terms, samples)
    else:
        samples = tile_of_samples(rows, 64)
        kernel = dense_kernel(dtype, distribution.capitalize(), samples)
        width, multiple = _COLUMNS, _POSITIONS
        length = columns + (start % 4 if distribution == "normal" else 0)  # tiles begin where the generator's calls do
        shared = 4 * (multiple * width + multiple * 4 + multiple * (samples + 4))
    column_groups = -(-outputs // width)
    splits_wanted = max(1, _BLOCKS_WANTED // column_groups)
    positions = max(math.ceil(-(-length // splits_wanted) / multiple) * multiple, _MIN_POSITIONS)
    return DensePlan(kernel, column_groups, positions, -(-length // positions), samples, shared)


def accumulate_dense(
    runtime: Runtime,
    distribution: Distribution,
    out: Tensor,
    block: Tensor,
    start: int,
    seed: int,
    model_id: int,
    terms: int,
    instruction: Instruction | None = None,
) -> None:
    """Add a block's projection by a dense map, `out += block @ R[start : start + n]`.

    Args:
        out: `(B, k)`, float32, columns side by side.
        block: `(B, n)`, columns side by side.
        terms: bfloat16 terms that a float32 element is split into for the tensor cores: 2 for a relative error below
            10⁻⁵, 1 for speed.
        instruction: instructions of the GPU that multiply; the fastest by default.
    """
    instruction = instruction or fastest_instruction(distribution, runtime.capability(block.device))
    for first in range(0, block.shape[0], _ROWS_AT_ONCE):
        rows = block[first : first + _ROWS_AT_ONCE]
        target = out[first : first + _ROWS_AT_ONCE]
        plan = plan_dense(
            distribution, instruction, len(rows), start, block.shape[1], out.shape[1], block.dtype, terms
        )
        partials = workspace(plan.splits, target)
        arguments = DenseArguments(
            Destination.of(target, partials),
            rows.data_ptr(),
            rows.stride(0),
            rows.shape[1],
            start,
            plan.positions_per_split,
            Generator(seed, model_id),
        )
        grid = (plan.column_groups, plan.splits, -(-len(rows) // plan.samples))
        runtime.launch(Launch(plan.kernel, grid, plan.shared_bytes, arguments), block.device)
        reduce(runtime, target, partials)
