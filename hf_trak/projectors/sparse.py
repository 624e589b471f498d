"""The sparse Johnson–Lindenstrauss map (`sjlt`): s entries ±1 per row of R, laid out for sequential reading.

Kane and Nelson, "Sparser Johnson-Lindenstrauss transforms" (J. ACM 61, 2014), the block construction: the k outputs
are cut into s segments, and every coordinate has one ±1 in each. Per segment of k outputs:

1. coordinates are taken in chunks of 8192 = 16 runs of 512 consecutive ones. The generator gives every chunk an offset
   r and a step d; run j of the chunk is added, with one sign per coordinate, to K ≥ 16384 accumulators from position
   r + j·d on, going around at K. One strided vector addition adds a whole chunk.
2. the K accumulators, a multiple of k, are folded into k outputs: every group of k is rotated by an amount of its own.

Signs are independent, so E⟨Rx, Ry⟩ = s⟨x, y⟩ exactly, and the variance depends on nothing but the probability that
two given coordinates share an output. Two coordinates of different chunks do so with probability 1/k, two of the same
chunk with at most 1/k: for every x and y, outer products or not, the variance is at most that of independent buckets.
`reference.py` defines the map entry by entry; time and memory do not depend on k.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from hf_trak.projectors.base import BlockProjector, ProjectionType
from hf_trak.projectors.checks import check_integer
from hf_trak.projectors.philox import Stream, packed_words, philox_words, sign_tensor

RUN = 512
RUNS_PER_CHUNK = 16
CHUNK = RUN * RUNS_PER_CHUNK
ACCUMULATORS = 2 * CHUNK
"""K is the smallest multiple of k that is at least this: steps are below 2·RUN, so a chunk never overlaps itself."""

_SPAN = (RUNS_PER_CHUNK - 1) * (2 * RUN - 1) + RUN  # the longest stretch of accumulators that a chunk touches
_REGION = 2**20  # coordinates whose bits are generated and cached together
_CACHE_BYTES = 2**26
_CPU_ACCUMULATOR_FLOATS = 2**19  # rows × K at a time: what stays in the L2 caches
_PIECE_COST = 2**12  # floats that are zeroed and folded in the time of one small operation
_LOOP_FOLD_GROUPS = 64


def accumulators(outputs: int) -> int:
    """K: the smallest multiple of the number of outputs that is at least `ACCUMULATORS`."""
    return -(-ACCUMULATORS // outputs) * outputs


def segment_bounds(proj_dim: int, nonzeros: int) -> list[tuple[int, int]]:
    """The s ranges of outputs: consecutive, sizes differing by at most one, the larger first."""
    small, larger = divmod(proj_dim, nonzeros)
    starts = [segment * small + min(segment, larger) for segment in range(nonzeros + 1)]
    return list(pairwise(starts))


@dataclass(frozen=True)
class _Region:
    """Random bits of up to 2²⁰ coordinates: packed signs, and offset and step of every chunk."""

    signs: Tensor
    offsets: list[int]
    steps: list[int]

    @property
    def nbytes(self) -> int:
        return self.signs.numel() * 4 + len(self.offsets) * 128


class SparseProjector(BlockProjector):
    """R has s = `nonzeros` entries ±1 in every row, one in each of s segments of the outputs, and zeros elsewhere."""

    algorithm = "sjlt-1"

    def __init__(
        self,
        grad_dim: int,
        proj_dim: int,
        seed: int = 0,
        proj_type: str | ProjectionType = "sjlt",
        device: str | torch.device = "cpu",
        nonzeros: int = 1,
    ) -> None:
        """See [`BlockProjector`].

        Args:
            proj_type: must be `sjlt`.
            nonzeros: s, 1 ≤ s ≤ k. Costs grow with it; the variance is that of s = 1 up to the terms that s removes,
                Σ x_i² y_i² / k.
        """
        if proj_type != "sjlt":
            raise ValueError(f"`proj_type` is '{proj_type}', but {type(self).__name__} is the 'sjlt' map.")
        super().__init__(grad_dim, proj_dim, seed, proj_type, device)
        self.nonzeros = check_integer("nonzeros", nonzeros, 1, self.proj_dim + 1)
        self._regions: OrderedDict[tuple[int, int, int, torch.device], _Region] = OrderedDict()
        self._fold_cache: dict[tuple[int, int], list[int]] = {}

    @property
    def scale(self) -> float:
        """1/√s: every row of the unscaled R has norm √s."""
        return 1.0 / math.sqrt(self.nonzeros)

    def free_memory(self) -> None:
        """Drop the cached bits (at most 64 MiB of them are kept)."""
        self._regions.clear()
        self._fold_cache.clear()

    def _accumulate(self, out: Tensor, block: Tensor, start: int, model_id: int) -> None:
        for copy, (first, last) in enumerate(segment_bounds(self.proj_dim, self.nonzeros)):
            segment = out[:, first:last]
            rotations = self._rotations(model_id, copy, last - first)
            pieces = block.shape[1] * (1 / RUN + 1 / (last - first)) + 2
            if pieces * _PIECE_COST < block.shape[0] * accumulators(last - first):
                self._add_pieces(segment, block, start, model_id, copy, rotations)
            else:
                self._add_chunks(segment, block, start, model_id, copy, rotations)

    def _add_chunks(
        self, out: Tensor, block: Tensor, start: int, model_id: int, copy: int, rotations: list[int]
    ) -> None:
        """Both steps of the map on a long block: chunks into accumulators, accumulators into `out`."""
        size = accumulators(out.shape[1])
        rows = block.shape[0]
        if block.device.type == "cpu":
            rows = min(rows, max(1, _CPU_ACCUMULATOR_FLOATS // (size + _SPAN)))
        totals = torch.empty(rows, size + _SPAN, dtype=torch.float32, device=block.device)
        for row in range(0, block.shape[0], rows):
            part = block[row : row + rows]
            sums = totals[: part.shape[0]].zero_()
            for first, last, region, origin in self._parts(start, block.shape[1], model_id, copy, block.device):
                signs = _signs(region, first - origin, last - origin)
                _add_to_accumulators(sums, part[:, first - start : last - start], signs, first, region, origin)
            sums[:, :_SPAN] += sums[:, size:]
            _fold(out[row : row + rows], sums[:, :size], rotations)

    def _add_pieces(
        self, out: Tensor, block: Tensor, start: int, model_id: int, copy: int, rotations: list[int]
    ) -> None:
        """Both steps at once on a short block: every stretch of a run that stays together goes straight to `out`."""
        outputs = out.shape[1]
        size = accumulators(outputs)
        for first, last, region, origin in self._parts(start, block.shape[1], model_id, copy, block.device):
            signs = _signs(region, first - origin, last - origin)
            position = first
            while position < last:
                chunk, within = divmod(position - origin, CHUNK)
                run, inside = divmod(within, RUN)
                place = (region.offsets[chunk] + run * region.steps[chunk] + inside) % size
                group, index = divmod(place, outputs)
                output = (index + rotations[group]) % outputs
                length = min(last - position, RUN - inside, outputs - index, outputs - output)
                columns = slice(position - start, position - start + length)
                values = signs[position - first : position - first + length]
                out[:, output : output + length].addcmul_(block[:, columns], values)
                position += length

    def _parts(
        self, start: int, n: int, model_id: int, copy: int, device: torch.device
    ) -> Iterator[tuple[int, int, _Region, int]]:
        """The block cut at region boundaries: first and last coordinate, the region and its first coordinate."""
        position = start
        while position < start + n:
            index = position // _REGION
            last = min(start + n, (index + 1) * _REGION)
            yield position, last, self._region(index, model_id, copy, device), index * _REGION
            position = last

    def _region(self, index: int, model_id: int, copy: int, device: torch.device) -> _Region:
        """Bits of region `index`, from the cache or from the generator."""
        key = (index, model_id, copy, device)
        region = self._regions.get(key)
        if region is not None:
            self._regions.move_to_end(key)
            return region
        origin = index * _REGION
        length = min(_REGION, self.grad_dim - origin)
        words = philox_words(
            origin // 128, -(-length // 128), self.seed, model_id, Stream.SJLT_1_SIGNS, copy, device=device
        )
        offsets, steps = self._places(origin // CHUNK, -(-length // CHUNK), model_id, copy)
        region = _Region(packed_words(words).flatten(), offsets, steps)
        self._regions[key] = region
        kept = sum(cached.nbytes for cached in self._regions.values())
        while kept > _CACHE_BYTES and len(self._regions) > 1:
            kept -= self._regions.popitem(last=False)[1].nbytes
        return region

    def _places(self, first: int, n: int, model_id: int, copy: int) -> tuple[list[int], list[int]]:
        """Offset r in [0, K) and step d in [512, 1024) of chunks `first … first + n`."""
        bounds = segment_bounds(self.proj_dim, self.nonzeros)[copy]
        size = accumulators(bounds[1] - bounds[0])
        words = philox_words(first, n, self.seed, model_id, Stream.SJLT_1_PLACES, copy)
        offsets = (words[0] * size) >> 32
        steps = RUN + ((words[1] * RUN) >> 32)
        return offsets.tolist(), steps.tolist()

    def _rotations(self, model_id: int, copy: int, outputs: int) -> list[int]:
        """By how much each group of accumulators is rotated in the fold; the first one is not."""
        key = (model_id, copy)
        if key not in self._fold_cache:
            if len(self._fold_cache) >= 1024:
                self._fold_cache.clear()
            groups = accumulators(outputs) // outputs
            words = philox_words(0, groups, self.seed, model_id, Stream.SJLT_1_FOLDS, copy)
            rotations = (words[0] * outputs) >> 32
            rotations[0] = 0
            self._fold_cache[key] = rotations.tolist()
        return self._fold_cache[key]


def _signs(region: _Region, first: int, last: int) -> Tensor:
    """±1 for coordinates `first … last` of a region, float32."""
    word = first // 32
    signs = sign_tensor(region.signs[word : -(-last // 32)])
    return signs[first - 32 * word : last - 32 * word]


def _add_to_accumulators(sums: Tensor, block: Tensor, signs: Tensor, first: int, region: _Region, origin: int) -> None:
    """Step 1 of the map: add `first … first + n`, signed, to accumulators that do not go around yet.

    Args:
        sums: `(B, K + span)`, contiguous.
        block: `(B, n)`, any strides and dtype.
        signs: `(n,)`.
        first: first coordinate of the block.
        region: the bits.
        origin: first coordinate of the region.
    """
    position, last = first, first + block.shape[1]
    while position < last:
        chunk, within = divmod(position - origin, CHUNK)
        run, inside = divmod(within, RUN)
        place = region.offsets[chunk] + run * region.steps[chunk] + inside
        if inside or last - position < RUN:
            runs, length = 1, min(last - position, RUN - inside)
        else:
            runs, length = min((last - position) // RUN, RUNS_PER_CHUNK - run), RUN
        column = position - first
        sums.as_strided(
            (sums.shape[0], runs, length), (sums.stride(0), region.steps[chunk], 1), sums.storage_offset() + place
        ).addcmul_(
            block.as_strided(
                (block.shape[0], runs, length),
                (block.stride(0), RUN * block.stride(1), block.stride(1)),
                block.storage_offset() + column * block.stride(1),
            ),
            signs.as_strided((runs, length), (RUN, 1), signs.storage_offset() + column),
        )
        position += runs * length


def _fold(out: Tensor, sums: Tensor, rotations: list[int]) -> None:
    """Step 2 of the map: rotate every group of k accumulators and add them all to `out`."""
    outputs = out.shape[1]
    if len(rotations) > _LOOP_FOLD_GROUPS:
        index = torch.arange(outputs, device=out.device) - torch.tensor(rotations, device=out.device)[:, None]
        index = index % outputs + outputs * torch.arange(len(rotations), device=out.device)[:, None]
        out += sums.index_select(1, index.flatten()).view(-1, len(rotations), outputs).sum(1)
        return
    for group, rotation in enumerate(rotations):
        values = sums[:, group * outputs : (group + 1) * outputs]
        out[:, rotation:] += values[:, : outputs - rotation]
        if rotation:
            out[:, :rotation] += values[:, outputs - rotation :]
