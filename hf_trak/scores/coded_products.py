"""Products of rows of codes with targets, a cache-sized piece at a time.

A byte of codes holds the levels of 8/b neighbouring columns. Masks take them out one place after the other: the bytes
of a row under one mask are a *plane*, the levels of every (8/b)-th column, each multiplied by a power of two. A plane
is made by one operation per byte and needs no table. It is multiplied with the same columns of the targets, and the
products of all planes of all pieces are added up. The scale of a row is applied to its products.

On CPUs, targets are rounded to integers of 24 bits, which are three signed digits of 8 bits, and everything is
computed in integers until the end:

    x · a = scale · step · Σ_j v_j q_j,      q_j = round(a_j / step),      |q_j| ≤ 127 (1 + 256 + 256²)

The sum is exact, so that the result has the same bits for any number of threads, any division into rows and columns,
and any CPU. Half a step is 2⁻²⁴ of the largest entry of the target, so that rounding targets costs no more than
adding up float32 products does. Where the CPU has instructions for them, int8 products take an eighth of the time of
float32 products. Where it has none, they are a loop that takes 30 times as long, so integers are multiplied as float32
numbers, whose sums are as exact below 2²⁴.

On GPUs, planes are converted to float32 and multiplied with the targets as they are.
"""

import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from hf_trak.store.codes import CodedRows, CodeFormat

DIGITS = 3
"""Digits of 8 bits of the integers that targets are rounded to.

Two would take two thirds of the time, and be enough for targets like the training rows. But with a small ridge, most
of a preconditioned target is what no training row explains. Its products with the rows cancel, and 16 bits leave too
little of the rest.
"""

_ROWS = 1024
_PIECE_BYTES = 2048
"""Size of a piece. Half as many rows or bytes take a tenth more time, and twice as many no less."""

_FLOAT_PIECE_BYTES = 1024
"""Largest piece for products in float32: the sum of so many products of two numbers up to 2⁷ has at most 2²⁴."""

_GPU_PIECE_BYTES = 4096

_PRODUCTS_TOGETHER = 384
"""Columns of digits in one integer product. Times grow if there are more, or if their number is no multiple of 16."""

_SEPARATE = 3
"""Up to so many columns of digits are multiplied one by one: products with a single column have a faster kernel."""

_MOST_COLUMNS = 1 << 16
"""Levels and digits have 8 bits: the sum of so many of their products stays below 2³¹, for any bits per code."""

_HIGHEST_BIT = torch.tensor(128, dtype=torch.uint8)

_TOTALS = 1 << 24
"""Largest number of sums that are held for a group of rows."""


class CodedTargets(Protocol):
    """Targets in the form in which rows of codes are multiplied with them."""

    def product(self, coded: CodedRows) -> Tensor:
        """Compute the products of rows with all targets.

        Args:
            coded: rows of codes, with as many columns as the targets.

        Returns:
            `(rows, m)`, float32.
        """


def coded_targets(values: Tensor, form: CodeFormat) -> CodedTargets:
    """Prepare targets for products with codes.

    Args:
        values: `(m, k)`, float32, in the coordinates of the codes.
        form: form of the codes, with the same k.

    Returns:
        The targets, on the device of `values`.
    """
    return IntegerTargets(values, form) if values.device.type == "cpu" else FloatTargets(values, form)


@cache
def has_int8_products() -> bool:
    """Tell whether this CPU multiplies int8 matrices exactly, and in less time than float32 ones.

    Without instructions for 8-bit products, oneDNN has a loop, or adds pairs of them in 16 bits, which overflow for
    large entries. Results have the same bits either way.
    """
    size = 256
    for width in (1, 16, 48):  # they have kernels of their own
        for left, right in ((-128, -128), (-128, 127), (127, -128), (127, 127)):
            rows, columns = torch.full((4, size), left), torch.full((size, width), right)
            found = torch._int_mm(rows.to(torch.int8), columns.to(torch.int8))
            if not bool((found == size * left * right).all()):
                return False
    square = torch.ones(size, size)
    return _seconds(torch._int_mm, square.to(torch.int8)) < _seconds(torch.mm, square)


def _seconds(multiply: Callable[[Tensor, Tensor], Tensor], square: Tensor) -> float:
    """Return the least time of some products of a matrix with itself."""
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        multiply(square, square)
        times.append(time.perf_counter() - begun)
    return min(times)


def _pieces(form: CodeFormat, size: int) -> list[range]:
    """Divide the bytes of a row into pieces, whatever blocks they lie in."""
    return [range(first, min(first + size, form.row_bytes)) for first in range(0, form.row_bytes, size)]


def _plane(values: Tensor, form: CodeFormat, piece: range, place: int) -> Tensor:
    """Take the columns of targets that belong to one place in the bytes of a piece, `(bytes, m)`.

    The last bytes may have places after the last column, for which the result has zeros.
    """
    per_byte = 8 // form.bits
    found = values[:, piece.start * per_byte + place : piece.stop * per_byte : per_byte]
    return torch.nn.functional.pad(found, (0, len(piece) - found.shape[1])).T.contiguous()


def _segments(coded: CodedRows, piece: range) -> Iterator[tuple[slice, Tensor]]:
    """Find the bytes of a piece in the blocks: where they are in the piece, and the bytes `(rows, bytes)`."""
    start = 0
    for block in coded.blocks:
        first, last = max(piece.start, start), min(piece.stop, start + block.shape[1])
        if first < last:
            yield slice(first - piece.start, last - piece.start), block[:, first - start : last - start]
        start += block.shape[1]


class IntegerTargets:
    """Targets as integers of 8-bit digits, for products in integers. See the module."""

    def __init__(self, values: Tensor, form: CodeFormat, digits: int = DIGITS) -> None:
        """
        Args:
            values: `(m, k)`, float32, on the CPU. A target with a NaN or an infinity has products that are NaN.
            form: form of the codes.
            digits: number of digits, from 1 to 3.
        """
        self._form = form
        self._digits = digits
        self._m = values.shape[0]
        self._int8 = has_int8_products()
        largest = values.abs().amax(dim=1, keepdim=True).double()
        step = torch.where(largest > 0, largest / (127 * sum(256**digit for digit in range(digits))), 1.0)
        self._factor = torch.where(largest.isfinite(), step, torch.nan).squeeze(1) / 2 ** (8 - form.bits)
        self._chunks = _chunks(digits * self._m)
        self._masks = [
            torch.tensor((2**form.bits - 1) << place, dtype=torch.uint8) for place in range(0, 8, form.bits)
        ]
        self._scratch = threading.local()
        self._pieces = _pieces(form, _PIECE_BYTES if self._int8 else min(_PIECE_BYTES, _FLOAT_PIECE_BYTES))
        self._matrices: list[list[list[Tensor]]] = []
        self._centres = torch.zeros(self._m, dtype=torch.float64)
        for piece in self._pieces:
            planes = []
            for place in range(8 // form.bits):
                whole = (_plane(values, form, piece, place).double() / step.squeeze(1)).nan_to_num_().round_()
                planes.append(self._split(whole))
                self._centres += whole.sum(dim=0) * (self._centre(place) * 2 ** (8 - form.bits))
            self._matrices.append(planes)

    def _centre(self, place: int) -> float:
        """Return what the number of a level is above the integer that a plane holds for it.

        A level u stands for u − (2ᵇ − 1) / 2. The highest bit of every byte is flipped, which makes a signed number of
        the highest level: u − 2ᵇ⁻¹.
        """
        return 0.5 if place == 8 // self._form.bits - 1 else -(2**self._form.bits - 1) / 2

    def _split(self, whole: Tensor) -> list[Tensor]:
        """Split integers `(bytes, m)` into digits, and these into matrices of some columns each."""
        rest, columns = whole.long(), []
        for _ in range(self._digits):
            digit = ((rest + 128) & 255) - 128
            columns.append(digit.to(torch.int8 if self._int8 else torch.float32))
            rest = (rest - digit) >> 8
        joined = torch.cat(columns[::-1], dim=1)
        joined = torch.nn.functional.pad(joined, (0, self._chunks[-1].stop - joined.shape[1]))
        return [joined[:, chunk].contiguous() for chunk in self._chunks]

    def product(self, coded: CodedRows) -> Tensor:
        """Compute the products of rows with all targets, see [`CodedTargets.product`]."""
        result = torch.empty(len(coded), self._m)
        rows = max(1, min(_ROWS, _TOTALS // self._chunks[-1].stop))
        for first in range(0, len(coded), rows):
            group = coded[first : first + rows]
            sums = self._sums(group).add_(self._centres)
            result[first : first + rows] = sums.mul_(self._factor).mul_(group.scale.double().unsqueeze(1))
        return result

    def _sums(self, coded: CodedRows) -> Tensor:
        """Add up the products of all planes with all digits of the targets.

        Returns:
            `(rows, m)`, float64: integers, 2⁸⁻ᵇ times the sums.
        """
        bits, rows = self._form.bits, len(coded)
        kept = torch.int32 if self._int8 else torch.float64
        totals = self._memory("totals", (rows, self._chunks[-1].stop), kept).zero_()
        sums, columns = None, 0
        for piece, planes in zip(self._pieces, self._matrices, strict=True):
            columns += len(piece) * 8 // bits
            if columns > _MOST_COLUMNS:
                sums, columns = self._joined(totals, sums), len(piece) * 8 // bits
                totals.zero_()
            packed = self._memory("packed", (rows, len(piece)), torch.uint8)
            levels = self._memory("levels", (rows, len(piece)), torch.uint8)
            for part, found in _segments(coded, piece):
                torch.bitwise_xor(found, _HIGHEST_BIT, out=packed[:, part])
            for place, matrices in enumerate(planes):
                torch.bitwise_and(packed, self._masks[place], out=levels)
                weight, left = 2 ** (8 - bits - bits * place), levels.view(torch.int8)
                if not self._int8:
                    left = self._memory("numbers", (rows, len(piece)), torch.float32).copy_(left)
                for chunk, matrix in zip(self._chunks, matrices, strict=True):
                    if self._int8:
                        products = self._memory("products", (rows, matrix.shape[1]), torch.int32)
                        torch._int_mm(left, matrix, out=products)
                    else:
                        products = self._memory("products", (rows, matrix.shape[1]), torch.float32)
                        torch.mm(left, matrix, out=products)
                    totals[:, chunk].add_(products, alpha=weight)
        return self._joined(totals, sums)

    def _memory(self, name: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Return memory of this thread that is used again and again: new pages cost as much as small products."""
        size = shape[0] * shape[1]
        held: Tensor | None = getattr(self._scratch, name, None)
        if held is None or held.numel() < size:
            held = torch.empty(size, dtype=dtype)
            setattr(self._scratch, name, held)
        return held[:size].view(shape)

    def _joined(self, totals: Tensor, sums: Tensor | None) -> Tensor:
        """Put digits together, and add the result to earlier sums."""
        result = totals[:, : self._m].to(torch.float64, copy=True)
        for digit in range(1, self._digits):
            result = result.mul_(256).add_(totals[:, digit * self._m : (digit + 1) * self._m])
        return result if sums is None else result.add_(sums)


def _chunks(columns: int) -> list[slice]:
    """Divide columns of digits into those of one product each. The last part may go on where they end, over zeros."""
    if columns <= _SEPARATE:
        return [slice(column, column + 1) for column in range(columns)]
    count = -(-columns // _PRODUCTS_TOGETHER)
    width = -(-columns // (16 * count)) * 16
    return [slice(start, start + width) for start in range(0, columns, width)]


class FloatTargets:
    """Targets in float32, for products with planes that are converted to float32."""

    def __init__(self, values: Tensor, form: CodeFormat) -> None:
        """
        Args:
            values: `(m, k)`, float32, on any device.
            form: form of the codes.
        """
        self._form = form
        self._m = values.shape[0]
        self._pieces = _pieces(form, _GPU_PIECE_BYTES)
        self._matrices = [
            [_plane(values, form, piece, place) for place in range(8 // form.bits)] for piece in self._pieces
        ]

    def product(self, coded: CodedRows) -> Tensor:
        """Compute the products of rows with all targets, see [`CodedTargets.product`]."""
        result = torch.zeros(len(coded), self._m, device=coded.scale.device)
        for piece, matrices in zip(self._pieces, self._matrices, strict=True):
            for where, packed in _segments(coded, piece):
                for place, matrix in enumerate(matrices):
                    result.addmm_(self._numbers(packed, place), matrix[where])
        return result.mul_(coded.scale.unsqueeze(1))

    def _numbers(self, packed: Tensor, place: int) -> Tensor:
        """Return the numbers that the levels at one place stand for."""
        bits = self._form.bits
        levels = (packed >> (bits * place)).bitwise_and_(2**bits - 1)
        return levels.to(torch.float32).sub_((2**bits - 1) / 2)
