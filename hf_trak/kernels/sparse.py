"""Launches of `sjlt.cu` for a sparse projection.

The cuts depend on the position and length of the block and on k alone, never on the batch size or on the GPU: a sample
gives the same bits in every batch and on every GPU.
"""

from dataclasses import dataclass

from torch import Tensor

from hf_trak.kernels.arguments import Destination, Generator, SjltArguments
from hf_trak.kernels.runtime import Launch, Runtime, reduce, workspace
from hf_trak.kernels.sources import sjlt_kernel
from hf_trak.kernels.torch_sparse import ACCUMULATORS, CHUNK, RUN

Spans = list[tuple[int, int]]
"""First and last output (exclusive) of each copy of a sparse map."""

TILE = 12288
"""Number of accumulators that a block of threads holds, as in `accumulators.cu`."""

_MIN_CHUNKS, _MAX_CHUNKS = 8, 128  # per split: short ones cost a fold each, long ones leave processors idle
_SPLITS_WANTED, _MAX_SPLITS = 64, 4096
# A split costs 8 bytes per output in the workspace, and twice that where two tiles add to the same outputs. With these
# numbers of coordinates per output the workspace takes a sixteenth of the bytes of a long row of 16-bit gradients, and
# a quarter of those of a short one. A block may have few short rows, which need more splits to occupy all processors.
_COORDINATES_PER_OUTPUT, _COORDINATES_PER_OUTPUT_OF_SHORT = 64, 16
_SHORT_CHUNKS = 512


@dataclass(frozen=True)
class Tiling:
    """Division of the K accumulators of a segment of m outputs into tiles."""

    groups: int
    """K / m."""

    tile: int
    """Number of accumulators per tile."""

    tiles: int

    parts: int
    """Number of tiles that add to the same outputs."""


@dataclass(frozen=True)
class SjltPlan:
    """Sizes of the launch for one segment."""

    tiling: Tiling
    chunks_per_split: int
    splits: int

    @property
    def slots(self) -> int:
        """Return the number of partial sums."""
        return self.splits * self.tiling.parts


def plan_tiles(outputs: int) -> Tiling:
    """Cut the accumulators of a segment of `outputs` outputs."""
    groups = -(-ACCUMULATORS // outputs)
    if outputs > TILE:  # one group, cut into tiles of its outputs: each output belongs to one tile
        tiles = -(-outputs // TILE)
        return Tiling(groups, -(-outputs // tiles), tiles, 1)
    # tiles of whole groups: every tile adds to every output
    tiles = -(-groups // (TILE // outputs))
    tile = -(-groups // tiles) * outputs
    tiles = -(-groups * outputs // tile)
    return Tiling(groups, tile, tiles, tiles)


def plan_sjlt(start: int, columns: int, outputs: int) -> SjltPlan:
    """Cut a block's columns `start … start + columns` and a segment of `outputs` outputs."""
    tiling = plan_tiles(outputs)
    chunks = (start + columns - 1) // CHUNK - start // CHUNK + 1
    coordinates = _COORDINATES_PER_OUTPUT_OF_SHORT if chunks <= _SHORT_CHUNKS else _COORDINATES_PER_OUTPUT
    chunks_per_split = max(
        min(max(-(-chunks // _SPLITS_WANTED), _MIN_CHUNKS), _MAX_CHUNKS),
        -(-coordinates * outputs // CHUNK),
        -(-chunks // _MAX_SPLITS),
    )
    splits = -(-chunks // chunks_per_split)
    return SjltPlan(tiling, chunks_per_split, splits)


def shared_bytes(element_size: int) -> int:
    """Compute sizeof(SjltShared): bits of 8 chunks, places of 16, and the padded accumulators with their margins."""
    per_vector = 16 // element_size
    size = 8 * CHUNK // 8 + 16 * 8 + 4 * per_vector * ((TILE + 2 * RUN) // per_vector + 32 // per_vector)
    return -(-size // 16) * 16


def accumulate_sjlt(
    runtime: Runtime, out: Tensor, block: Tensor, start: int, seed: int, model_id: int, segments: Spans
) -> None:
    """Add a block's projection by the sparse map, `out += block @ R[start : start + n]`.

    Args:
        out: `(B, k)`, float32, columns side by side.
        block: `(B, n)`, columns side by side.
        segments: the ranges of outputs, one per nonzero entry of a row of R.
    """
    for copy, (first, last) in enumerate(segments):
        segment = out[:, first:last]
        plan = plan_sjlt(start, block.shape[1], last - first)
        partials = workspace(plan.slots, segment)
        arguments = SjltArguments(
            Destination.of(segment, partials),
            block.data_ptr(),
            block.stride(0),
            block.shape[1],
            start,
            plan.chunks_per_split,
            Generator(seed, model_id),
            copy,
            plan.tiling.groups,
            plan.tiling.tile,
        )
        grid = (block.shape[0], plan.splits, plan.tiling.tiles)
        launch = Launch(sjlt_kernel(block.dtype), grid, shared_bytes(block.element_size()), arguments)
        runtime.launch(launch, block.device)
        reduce(runtime, segment, partials)
