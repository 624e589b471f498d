"""Launches of `outer.cu` for the sparse projection of a sum of outer products.

As in `sparse.py`, the cuts depend on the position and shape of the matrix and on k alone.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_trak.kernels.arguments import Destination, Generator, OuterArguments
from hf_trak.kernels.runtime import Launch, Runtime, reduce, workspace
from hf_trak.kernels.sources import TOKENS, outer_kernel
from hf_trak.kernels.sparse import TILE, Spans, Tiling, plan_tiles

STRIP = 2048
"""Number of columns of a block of threads, as in `outer.cu`."""

_THREADS, _COLUMNS_PER_THREAD = 256, 8
_STEPS_PER_STAGE, _MAX_ROWS_PER_STEP = 8, 16
_ELEMENTS_PER_SPLIT = 2**17  # a block costs about 10,000 elements more: clearing and folding the accumulators
_ELEMENTS_PER_OUTPUT = 64  # a block costs 8 bytes per output in the workspace
_BLOCKS_WANTED = 64  # per sample; more than that only take workspace
_MIN_WIDTH, _MAX_WIDTH = _COLUMNS_PER_THREAD * _MAX_ROWS_PER_STEP, 2**24

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_PRODUCTS = 8
"""Largest number of outer products for which this beats a matrix product and `sjlt.cu`; see cuda_ext/README."""


@dataclass(frozen=True)
class OuterPlan:
    """Sizes of the launch for one segment."""

    tiling: Tiling
    strips: int
    rows_per_step: int
    rows_per_split: int
    splits: int

    @property
    def slots(self) -> int:
        """Return the number of partial sums."""
        return self.strips * self.splits * self.tiling.parts


def plan_outer(height: int, width: int, outputs: int) -> OuterPlan:
    """Cut a matrix `(height, width)` for a segment of `outputs` outputs."""
    strips = -(-width // STRIP)
    columns = min(width, STRIP)
    rows_per_step = min(_THREADS // -(-columns // _COLUMNS_PER_THREAD), _MAX_ROWS_PER_STEP)
    stage = _STEPS_PER_STAGE * rows_per_step
    wanted = max(_ELEMENTS_PER_SPLIT, _ELEMENTS_PER_OUTPUT * outputs)
    rows = max(-(-wanted // columns), -(-height // max(1, _BLOCKS_WANTED // strips)))
    rows_per_split = -(-rows // stage) * stage
    return OuterPlan(plan_tiles(outputs), strips, rows_per_step, rows_per_split, -(-height // rows_per_split))


def worthwhile(left: Tensor, right: Tensor, segments: Spans) -> bool:
    """Tell whether projecting a sum of outer products from its factors is faster than forming it.

    Args:
        left: `(B, T, I)`.
        right: `(B, T, J)`.
        segments: see [`~hf_trak.kernels.sparse.accumulate_sjlt`].
    """
    return (
        left.dtype == right.dtype
        and left.dtype in _DTYPES
        and 0 < left.shape[1] <= _MOST_PRODUCTS
        # each of several tiles would make all elements again
        and all(plan_tiles(last - first).tiles == 1 for first, last in segments)
        # a step of a narrower matrix would leave threads idle
        and _MIN_WIDTH <= right.shape[2] <= _MAX_WIDTH
    )


def tokens_of_instance(tokens: int) -> int:
    """Choose the instance of `outer.cu` for `tokens` outer products, or the largest one if they are more."""
    return next((number for number in TOKENS if tokens <= number), TOKENS[-1])


def shared_bytes(tokens: int) -> int:
    """Compute sizeof(OuterShared): rows of a stage or words of a fold, bits of 8 steps, their places, accumulators."""
    left = max(4 * _STEPS_PER_STAGE * _MAX_ROWS_PER_STEP * tokens + 16, 2**13)
    return left + _STEPS_PER_STAGE * ((STRIP // 128 + 2) * 16 + 2 * 16) + 4 * (TILE + 32)


def accumulate_outer(
    runtime: Runtime, out: Tensor, left: Tensor, right: Tensor, start: int, seed: int, model_id: int, segments: Spans
) -> None:
    """Add a projection by the sparse map, `out[b] += vec(Σ_t left[b, t] ⊗ right[b, t]) @ R[start : start + I · J]`.

    Args:
        out: `(B, k)`, float32, columns side by side.
        left: `(B, T, I)`, any strides.
        right: `(B, T, J)` of the same dtype, any strides.
        segments: the ranges of outputs, one per nonzero entry of a row of R.
    """
    most = TOKENS[-1]
    for token in range(0, left.shape[1], most):
        part, other = left[:, token : token + most], right[:, token : token + most]
        for copy, (first, last) in enumerate(segments):
            _accumulate(runtime, out[:, first:last], part, other, start, Generator(seed, model_id), copy)


def _accumulate(
    runtime: Runtime, out: Tensor, left: Tensor, right: Tensor, start: int, generator: Generator, copy: int
) -> None:
    rows, tokens, height = left.shape
    width = right.shape[2]
    instance = tokens_of_instance(tokens)
    plan = plan_outer(height, width, out.shape[1])
    partials = workspace(plan.slots, out)
    arguments = OuterArguments(
        Destination.of(out, partials),
        left.data_ptr(),
        right.data_ptr(),
        left.stride(),
        right.stride(),
        height,
        width,
        start,
        plan.rows_per_split,
        generator,
        copy,
        plan.tiling.groups,
        plan.tiling.tile,
        tokens,
        plan.strips,
        plan.rows_per_step,
    )
    grid = (rows, plan.splits * plan.strips, plan.tiling.tiles)
    launch = Launch(outer_kernel(left.dtype, instance), grid, shared_bytes(instance), arguments)
    runtime.launch(launch, out.device)
    reduce(runtime, out, partials)
