"""The sparse Johnson–Lindenstrauss map `sjlt-1` in torch operators, laid out so that gradients are read sequentially.

R has s entries ±1 per row.

Kane and Nelson, "Sparser Johnson-Lindenstrauss transforms" (J. ACM 61, 2014), the block construction: the k outputs
are cut into s segments, and every coordinate has one ±1 in each. Per segment of k outputs:

1. coordinates are taken in chunks of 8192 = 16 runs of 512 consecutive ones. The generator gives every chunk an offset
   r and a step d; run a of the chunk is added, with one sign per coordinate, to K ≥ 10240 accumulators from position
   r + a·d on, wrapping at K. One strided vector addition adds a whole chunk.
2. the K accumulators, a multiple of k, are folded into k outputs: every group of k is rotated by an amount of its own.

Signs are independent, so E⟨Rx, Ry⟩ = s⟨x, y⟩ exactly, and the variance depends on nothing but the probability that
two given coordinates share an output. Two coordinates of different chunks do so with probability 1/k, two of the same
chunk with at most 1/k: for every x and y, outer products or not, the variance is at most that of independent buckets.
`hf_trak/projectors/reference.py` defines the map entry by entry; time and memory do not depend on k. On a CPU with a C
compiler, step 1 is one call of a compiled function (`hf_trak/kernels/cpu_sparse.py`) with the same bits.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from hf_trak.kernels.cpu_sparse import compiled_addition
from hf_trak.kernels.philox import Stream, packed_words, philox_words, sign_tensor
from hf_trak.runtime.operator_threads import one_core, over_samples

RUN = 512
RUNS_PER_CHUNK = 16
CHUNK = RUN * RUNS_PER_CHUNK
STEPS = 128
"""Number of different steps. The shortest is RUN."""
ACCUMULATORS = RUNS_PER_CHUNK * (RUN + STEPS)
"""K is the smallest multiple of k that is at least this, so that a chunk never overlaps itself."""

_SPAN = (RUNS_PER_CHUNK - 1) * (RUN + STEPS - 1) + RUN  # the longest stretch of accumulators that a chunk touches
_REGION = 2**23  # coordinates whose bits are generated and cached together
_CACHE_BYTES = 2**26
_SLICE = 2**17  # coordinates whose signs are expanded to floats together; on a CPU they stay in the L2 cache
_LOOP_FOLD_GROUPS = 64
_SMALLEST_SHARED = 2**21  # numbers that the compiled function adds in several threads; fewer, before another one wakes


def accumulators(outputs: int) -> int:
    """Return K, the smallest multiple of the number of outputs that is at least `ACCUMULATORS`."""
    return -(-ACCUMULATORS // outputs) * outputs


def segment_bounds(proj_dim: int, nonzeros: int) -> list[tuple[int, int]]:
    """Return the s segments of the outputs, consecutive ranges whose sizes differ by at most one, the larger first."""
    small, larger = divmod(proj_dim, nonzeros)
    starts = [segment * small + min(segment, larger) for segment in range(nonzeros + 1)]
    return list(pairwise(starts))


@dataclass(frozen=True)
class _Region:
    """Random bits of up to 2²³ coordinates: packed signs, and offset and step of every chunk."""

    origin: int
    signs: Tensor
    offsets: list[int]
    steps: list[int]

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """Return the offsets and the steps, int64."""
        return torch.tensor(self.offsets), torch.tensor(self.steps)

    @property
    def nbytes(self) -> int:
        return self.signs.numel() * 4 + len(self.offsets) * 144

    def place(self, position: int) -> tuple[int, int, int]:
        """Return a coordinate's accumulator (not yet modulo K), its chunk's step, and its index in the chunk."""
        chunk, within = divmod(position - self.origin, CHUNK)
        run, inside = divmod(within, RUN)
        return self.offsets[chunk] + run * self.steps[chunk] + inside, self.steps[chunk], within


class SparseMap:
    """The map of one seed, k and s, with the random bits of recent coordinates kept in memory."""

    def __init__(self, grad_dim: int, proj_dim: int, seed: int, nonzeros: int) -> None:
        """
        Args:
            grad_dim: P. Bits are generated for no more coordinates than these.
            proj_dim: k.
            seed: seed of the random matrix.
            nonzeros: s, 1 ≤ s ≤ k.
        """
        self.grad_dim = grad_dim
        self.seed = seed
        self.segments = segment_bounds(proj_dim, nonzeros)
        self._regions: OrderedDict[tuple[int, int, int, torch.device], _Region] = OrderedDict()
        self._rotation_cache: dict[tuple[int, int], list[int]] = {}

    def free_memory(self) -> None:
        """Drop the cached bits (one bit per coordinate and nonzero, at most 64 MiB of them)."""
        self._regions.clear()
        self._rotation_cache.clear()

    def accumulate(self, out: Tensor, block: Tensor, start: int, model_id: int) -> None:
        """Add a block's projection, `out += block @ R[start : start + n]`.

        Args:
            out: `(B, k)`, float32, changed in place.
            block: `(B, n)`, any floating dtype and strides, on the device of `out`.
            start: position of the first column in the gradient vector.
            model_id: id of the checkpoint.
        """
        for copy, (first, last) in enumerate(self.segments):
            segment = out[:, first:last]
            pieces = block.shape[1] * (1 / RUN + 1 / (last - first)) + 2
            # Below this, measured on a CPU, the pieces cost less than zeroing and folding K accumulators per sample.
            if pieces < 12 + block.shape[0] * accumulators(last - first) / 2**14:
                self._add_pieces(segment, block, start, model_id, copy)
            else:
                sums = self.empty_sums(block.shape[0], copy, block.device)
                self.add_to_sums(sums, block, start, model_id, copy)
                self.fold(segment, sums, model_id, copy)

    def transposed(self, rows: Tensor, start: int, n: int, model_id: int) -> Tensor:
        """Multiply by the transposed map, `rows @ R[start : start + n]ᵀ`: every coordinate gathers its s outputs.

        Args:
            rows: `(B, k)`, float32.
            start: first coordinate.
            n: number of coordinates.
            model_id: id of the checkpoint.

        Returns:
            `(B, n)`, float32.
        """
        found = torch.zeros(rows.shape[0], n, dtype=torch.float32, device=rows.device)
        for copy, (first_output, last_output) in enumerate(self.segments):
            segment = rows[:, first_output:last_output]
            for first, last, region in self._slices(start, n, model_id, copy, rows.device, _SLICE):
                outputs = self._outputs(region, first, last, model_id, copy).to(rows.device)
                values = segment.index_select(1, outputs)
                found[:, first - start : last - start].addcmul_(values, _signs(region, first, last))
        return found

    def _outputs(self, region: _Region, first: int, last: int, model_id: int, copy: int) -> Tensor:
        """Return the output, within its segment, of coordinates `first … last` of a region: `(last - first,)`."""
        rotations = torch.tensor(self._rotations(model_id, copy))
        outputs = self.segments[copy][1] - self.segments[copy][0]
        chunk, within = _divmod(torch.arange(first - region.origin, last - region.origin), CHUNK)
        run, inside = _divmod(within, RUN)
        places = torch.tensor(region.offsets)[chunk] + run * torch.tensor(region.steps)[chunk] + inside
        group, index = _divmod(places % (outputs * len(rotations)), outputs)
        return (index + rotations[group]) % outputs

    def empty_sums(self, batch_size: int, copy: int, device: str | torch.device) -> Tensor:
        """Make zeroed accumulators for one segment, `(B, K + span of a chunk)`: additions need not wrap at K."""
        first, last = self.segments[copy]
        return torch.zeros(batch_size, accumulators(last - first) + _SPAN, dtype=torch.float32, device=device)

    def add_to_sums(self, sums: Tensor, block: Tensor, start: int, model_id: int, copy: int) -> None:
        """Do step 1 of the map: add a block to the accumulators of [`~SparseMap.empty_sums`]."""
        if compiled_addition.usable(block):
            for first, last, region in self._slices(start, block.shape[1], model_id, copy, block.device, _REGION):
                _add_compiled(sums, block[:, first - start : last - start], first, region)
            return
        for first, last, region in self._slices(start, block.shape[1], model_id, copy, block.device, _SLICE):
            columns = block[:, first - start : last - start]
            if block.device.type == "cpu":
                _add_slice_in_threads(sums, columns, first, last, region)
            else:
                _add_slice(sums, columns, _signs(region, first, last), first, region)

    def fold(self, out: Tensor, sums: Tensor, model_id: int, copy: int) -> None:
        """Do step 2 of the map: wrap at K, rotate every group of accumulators, and add them all to a segment."""
        with one_core() if sums.device.type == "cpu" else nullcontext():
            self._fold(out, sums, model_id, copy)

    def _fold(self, out: Tensor, sums: Tensor, model_id: int, copy: int) -> None:
        outputs = out.shape[1]
        rotations = self._rotations(model_id, copy)
        size = outputs * len(rotations)
        sums[:, :_SPAN] += sums[:, size:]
        if len(rotations) > _LOOP_FOLD_GROUPS:
            index = torch.arange(outputs) - torch.tensor(rotations)[:, None]
            index = index % outputs + outputs * torch.arange(len(rotations))[:, None]
            values = sums.index_select(1, index.flatten().to(sums.device))
            out += values.view(-1, len(rotations), outputs).sum(1)
            return
        for group, rotation in enumerate(rotations):
            values = sums[:, group * outputs : (group + 1) * outputs]
            out[:, rotation:] += values[:, : outputs - rotation]
            if rotation:
                out[:, :rotation] += values[:, outputs - rotation :]

    def _add_pieces(self, out: Tensor, block: Tensor, start: int, model_id: int, copy: int) -> None:
        """Do both steps at once for a short block: a stretch of a run that stays together goes straight to `out`."""
        outputs = out.shape[1]
        rotations = self._rotations(model_id, copy)
        size = outputs * len(rotations)
        for first, last, region in self._slices(start, block.shape[1], model_id, copy, block.device, _SLICE):
            signs = _signs(region, first, last)
            position = first
            while position < last:
                place, _, within = region.place(position)
                group, index = divmod(place % size, outputs)
                output = (index + rotations[group]) % outputs
                length = min(last - position, RUN - within % RUN, outputs - index, outputs - output)
                columns = block[:, position - start : position - start + length]
                out[:, output : output + length].addcmul_(columns, signs[position - first : position - first + length])
                position += length

    def _slices(
        self, start: int, n: int, model_id: int, copy: int, device: torch.device, size: int
    ) -> Iterator[tuple[int, int, _Region]]:
        """Cut a block into slices: first coordinate, end, and the region that they lie in."""
        position = start
        while position < start + n:
            last = min(start + n, (position // size + 1) * size)
            yield position, last, self._region(position // _REGION, model_id, copy, device)
            position = last

    def _region(self, index: int, model_id: int, copy: int, device: torch.device) -> _Region:
        """Get the bits of region `index` from the cache or from the generator."""
        key = (index, model_id, copy, device)
        if (region := self._regions.get(key)) is not None:
            self._regions.move_to_end(key)
            return region
        origin = index * _REGION
        length = min(_REGION, self.grad_dim - origin)
        words = philox_words(
            origin // 128, -(-length // 128), self.seed, model_id, Stream.SJLT_1_SIGNS, copy, device=device
        )
        places = philox_words(origin // CHUNK, -(-length // CHUNK), self.seed, model_id, Stream.SJLT_1_PLACES, copy)
        first, last = self.segments[copy]
        offsets = (places[0] * accumulators(last - first)) >> 32
        steps = RUN + ((places[1] * STEPS) >> 32)
        region = _Region(origin, packed_words(words).flatten(), offsets.tolist(), steps.tolist())
        self._regions[key] = region
        kept = sum(cached.nbytes for cached in self._regions.values())
        while kept > _CACHE_BYTES and len(self._regions) > 1:
            kept -= self._regions.popitem(last=False)[1].nbytes
        return region

    def _rotations(self, model_id: int, copy: int) -> list[int]:
        """Return the rotation of each group of accumulators in the fold; the first group is not rotated."""
        key = (model_id, copy)
        if key not in self._rotation_cache:
            if len(self._rotation_cache) >= 64:
                self._rotation_cache.clear()
            first, last = self.segments[copy]
            groups = accumulators(last - first) // (last - first)
            words = philox_words(0, groups, self.seed, model_id, Stream.SJLT_1_FOLDS, copy)
            rotations = (words[0] * (last - first)) >> 32
            rotations[0] = 0
            self._rotation_cache[key] = rotations.tolist()
        return self._rotation_cache[key]


def sum_of_outer_products(left: Tensor, right: Tensor) -> Tensor:
    """Form Σ_t left[b, t, :] ⊗ right[b, t, :] in float32, also inside of an autocast region.

    Args:
        left: `(B, T, I)`.
        right: `(B, T, J)`.

    Returns:
        The flattened sums, `(B, I · J)`.
    """
    with torch.autocast(left.device.type, enabled=False):
        return torch.bmm(left.float().transpose(1, 2), right.float()).flatten(1)


def _divmod(numbers: Tensor, divisor: int) -> tuple[Tensor, Tensor]:
    return torch.div(numbers, divisor, rounding_mode="floor"), numbers % divisor


def _signs(region: _Region, first: int, last: int) -> Tensor:
    """Return ±1 for coordinates `first … last`, float32."""
    offset = first - region.origin
    word = offset // 32
    signs = sign_tensor(region.signs[word : -(-(last - region.origin) // 32)])
    return signs[offset - 32 * word : last - region.origin - 32 * word]


def _add_compiled(sums: Tensor, block: Tensor, first: int, region: _Region) -> None:
    """Do what [`_add_slice`] does by the compiled function, in threads with samples of their own."""
    offsets, steps = region.places

    def add(low: int, high: int) -> None:
        compiled_addition.add(sums[low:high], block[low:high], first - region.origin, region.signs, offsets, steps)

    if block.numel() < _SMALLEST_SHARED:
        add(0, block.shape[0])
    else:
        over_samples(add, block.shape[0])


def _add_slice_in_threads(sums: Tensor, block: Tensor, first: int, last: int, region: _Region) -> None:
    """Do what [`_add_slice`] does on a CPU, where threads take samples of their own and meet once."""
    with one_core():
        signs = _signs(region, first, last)

    def add(low: int, high: int) -> None:
        _add_slice(sums[low:high], block[low:high], signs, first, region)

    over_samples(add, block.shape[0], tiny=True)


def _add_slice(sums: Tensor, block: Tensor, signs: Tensor, first: int, region: _Region) -> None:
    """Add coordinates `first … first + n` of a region, signed, to accumulators: one operation per chunk.

    Args:
        sums: `(B, K + span)`, contiguous.
        block: `(B, n)`, any strides and dtype.
        signs: `(n,)`.
        first: first coordinate of the block.
        region: the bits.
    """
    n = block.shape[1]
    head = min(n, -first % CHUNK)
    full = (n - head) // CHUNK
    if head:
        _add_part_of_chunk(sums, block[:, :head], signs[:head], first, region)
    if full:
        # All views at once: making them one by one would take half as long as the additions.
        shape = (full, RUNS_PER_CHUNK, RUN)
        values = block[:, head : head + full * CHUNK].unflatten(1, shape).unbind(1)
        values_signs = signs[head : head + full * CHUNK].unflatten(0, shape).unbind(0)
        chunk = (first + head - region.origin) // CHUNK
        places = zip(region.offsets[chunk : chunk + full], region.steps[chunk : chunk + full], strict=True)
        size, stride, origin = (sums.shape[0], RUNS_PER_CHUNK, RUN), sums.stride(0), sums.storage_offset()
        for (offset, step), value, sign in zip(places, values, values_signs, strict=True):
            sums.as_strided(size, (stride, step, 1), origin + offset).addcmul_(value, sign)
    tail = head + full * CHUNK
    if tail < n:
        _add_part_of_chunk(sums, block[:, tail:], signs[tail:], first + tail, region)


def _add_part_of_chunk(sums: Tensor, block: Tensor, signs: Tensor, first: int, region: _Region) -> None:
    """Do the same as [`_add_slice`] for a block within one chunk: part of a run, whole runs, part of a run."""
    n = block.shape[1]
    column = 0
    while column < n:
        place, step, within = region.place(first + column)
        if within % RUN or n - column < RUN:
            runs, length = 1, min(n - column, RUN - within % RUN)
        else:
            runs, length = (n - column) // RUN, RUN
        columns = slice(column, column + runs * length)
        sums.as_strided(
            (sums.shape[0], runs, length), (sums.stride(0), step, 1), sums.storage_offset() + place
        ).addcmul_(block[:, columns].unflatten(1, (runs, length)), signs[columns].unflatten(0, (runs, length)))
        column += runs * length
