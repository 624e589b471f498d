"""Products of rows of codes with targets.

A byte of codes holds the levels of 8/b neighbouring columns. On CPUs, targets are rounded to integers of 24 bits, and
everything is computed in integers until the end:

    x · a = scale · step · Σ_j v_j q_j,      q_j = round(a_j / step),      v_j = u_j − (2ᵇ − 1) / 2,      |q_j| < 2²³

for levels u. The sum is exact, so that the result has the same bits for any number of threads, any division into rows
and columns, and any CPU. Half a step is 2⁻²⁴ of the largest entry of the target, so that rounding targets costs no
more than adding up float32 products does. A compiled function multiplies levels as they come out of the bytes
(`hf_trak/kernels/cpu_codes.py`).

Without a C compiler, and on GPUs, the bytes of a row under one mask are a *plane*, levels of every (8/b)-th column,
which is converted to floating-point numbers and multiplied with the same columns of the targets. On CPUs that is in
float64, whose sums of these integers are exact for up to 2²² columns. On GPUs it is in float32, with the targets as
they are.
"""

from collections.abc import Iterator
from itertools import pairwise
from threading import Lock
from typing import Protocol

import torch
from torch import Tensor

from hf_trak.kernels.cpu_codes import arranged, compiled_products
from hf_trak.store.codes import CodedRows, CodeFormat

LARGEST = 2**23 - 1
"""Largest integer that a target is rounded to.

Integers of 16 bits would be enough for targets like the training rows. But with a small ridge, most of a
preconditioned target is what no training row explains. Its products with the rows cancel, and 16 bits leave too little
of the rest.
"""

_ROWS = 1024

_NUMBERS = 1 << 22
"""Largest number of levels, or of sums, of a group of rows."""

_PRODUCTS_PER_ADDITION = 8
"""Products that torch computes in the time in which it adds one number of a sparse map, to decide what is compiled."""

_PIECE_BYTES = 4096


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
    return IntegerTargets(values, form) if values.device.type == "cpu" else PlaneTargets(values, form)


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
    """Targets as integers of 24 bits, for products in integers. See the module."""

    def __init__(self, values: Tensor, form: CodeFormat) -> None:
        """
        Args:
            values: `(m, k)`, float32, on the CPU. A target with a NaN or an infinity has products that are NaN.
            form: form of the codes.
        """
        self._values, self._form = values, form
        largest = values.abs().amax(dim=1).double()
        self._step = torch.where(largest > 0, largest / LARGEST, 1.0)
        self._factor = torch.where(largest.isfinite(), self._step, torch.nan)
        self._centres = self._integers().sum(dim=1).mul_((2**form.bits - 1) / 2)
        self._made: list[Tensor] | PlaneTargets | None = None
        self._making = Lock()

    def product(self, coded: CodedRows) -> Tensor:
        """Compute the products of rows with all targets, see [`CodedTargets.product`]."""
        m, k = self._values.shape
        result = torch.empty(len(coded), m)
        rows = max(1, min(_ROWS, _NUMBERS // max(m, k)))
        for first in range(0, len(coded), rows):
            group = coded[first : first + rows]
            sums = self._sums(group).mul_(self._factor)
            result[first : first + rows] = sums.mul_(group.scale.double().unsqueeze(1))
        return result

    def _sums(self, coded: CodedRows) -> Tensor:
        """Compute Σ_j v_j q_j, `(rows, m)`, float64, without rounding."""
        m, k = self._values.shape
        compiled = compiled_products.is_there(len(coded) * m * k // _PRODUCTS_PER_ADDITION)
        with self._making:
            made = self._made
            if made is None or isinstance(made, list) != compiled:
                made = self._made = self._arranged() if compiled else PlaneTargets(self._integers(), self._form)
        if isinstance(made, PlaneTargets):
            return made.sums(coded)
        return compiled_products.sums(coded.blocks, made, self._form.bits, m).double().sub_(self._centres)

    def _arranged(self) -> list[Tensor]:
        """Return the integers of every block of columns as the compiled function takes them."""
        integers, per_byte = self._integers(), 8 // self._form.bits
        columns = [per_byte * stop for stop in (0, *self._form.prefixes)]
        blocks = [integers[:, start:stop] for start, stop in pairwise(columns) if start < integers.shape[1]]
        return [arranged(one, self._form.bits) for one in blocks]

    def _integers(self) -> Tensor:
        """Round the targets, `(m, k)`, float64."""
        return (self._values.double() / self._step.unsqueeze(1)).nan_to_num_().round_()


class PlaneTargets:
    """Targets for products with planes that are converted to their dtype."""

    def __init__(self, values: Tensor, form: CodeFormat) -> None:
        """
        Args:
            values: `(m, k)`, float32 or float64, on any device.
            form: form of the codes.
        """
        self._form, self._dtype = form, values.dtype
        self._m = values.shape[0]
        self._pieces = _pieces(form, _PIECE_BYTES)
        self._matrices = [
            [_plane(values, form, piece, place) for place in range(8 // form.bits)] for piece in self._pieces
        ]

    def product(self, coded: CodedRows) -> Tensor:
        """Compute the products of rows with all targets, see [`CodedTargets.product`]."""
        return self.sums(coded).mul_(coded.scale.unsqueeze(1))

    def sums(self, coded: CodedRows) -> Tensor:
        """Compute the products without the scales of the rows, `(rows, m)`, in the dtype of the targets."""
        result = torch.zeros(len(coded), self._m, device=coded.scale.device, dtype=self._dtype)
        for piece, matrices in zip(self._pieces, self._matrices, strict=True):
            for where, packed in _segments(coded, piece):
                for place, matrix in enumerate(matrices):
                    result.addmm_(self._numbers(packed, place), matrix[where])
        return result

    def _numbers(self, packed: Tensor, place: int) -> Tensor:
        """Return the numbers that the levels at one place stand for."""
        bits = self._form.bits
        levels = (packed >> (bits * place)).bitwise_and_(2**bits - 1)
        return levels.to(self._dtype).sub_((2**bits - 1) / 2)
