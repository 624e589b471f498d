"""Rows of codes: rotated features, rounded to levels, with one scale per row. `levels-1` of `reference.py`."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from hf_trak.codes.packing import pack, packed_bytes, padding_is_zero, unpack

ALGORITHM = "levels-1"

FIRST_BLOCK_BYTES = 512
"""Bytes of the first block of columns. It and the next have so many bytes per row, then each twice the one before, so
that the first 512, 1024, 2048, … bytes of a row are whole blocks."""

STEPS = {4: 0.3352, 2: 0.9957, 1: 1.0}
"""Distance of neighbouring levels in standard deviations; Max, IRE Transactions on Information Theory 6, 1960."""

_ENCODED_BYTES = 1 << 23
"""Size in float64 of the rows that are encoded together."""

_DECODED_BYTES = 1 << 19
"""Size in float32 of the rows of a block of columns that are decoded together on a CPU."""


@dataclass(frozen=True)
class CodeFormat:
    """The form of codes of rows of k features.

    Attributes:
        bits (`int`):
            Bits per number: 8, 4, 2 or 1.
        k (`int`):
            Number of features of a row.
    """

    bits: int
    k: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, without its scale."""
        return packed_bytes(self.k, self.bits)

    @property
    def block_bytes(self) -> list[int]:
        """Bytes per row of each block of columns."""
        sizes, left, size = [], self.row_bytes, FIRST_BLOCK_BYTES
        while left > 0:
            sizes.append(min(size, left))
            left -= sizes[-1]
            size = sum(sizes)
        return sizes

    @property
    def names(self) -> list[str]:
        """Name of the tensor of each block, in the order of the columns."""
        return [f"codes.{number:02d}" for number in range(len(self.block_bytes))]

    @property
    def prefixes(self) -> list[int]:
        """Bytes of a row that the first 1, 2, … blocks have together."""
        return list(accumulate(self.block_bytes))

    def columns_of(self, count: int) -> int:
        """Number of columns in the first so many bytes of a row."""
        return min(self.k, count * 8 // self.bits)


@dataclass(frozen=True)
class CodedRows:
    """Encoded rows, of which the first blocks of columns may be all that is at hand.

    Attributes:
        form (`CodeFormat`):
            Bits and number of features.
        scale (`torch.Tensor` of shape `(rows,)`):
            float32, not negative.
        blocks (`tuple[torch.Tensor, ...]`):
            Packed levels of the first blocks of columns, `(rows, bytes)`, uint8.
    """

    form: CodeFormat
    scale: Tensor
    blocks: tuple[Tensor, ...]

    @classmethod
    def encode(cls, rows: Tensor, form: CodeFormat) -> "CodedRows":
        """Encode rotated rows.

        Args:
            rows: `(rows, k)`, float32, finite.
            form: the form of the codes.

        Returns:
            The codes, on the device of `rows`. The bits do not depend on the device.
        """
        together = max(1, _ENCODED_BYTES // (8 * form.k))
        parts = [_levels(part, form.bits) for part in rows.to(torch.float32).split(together)]
        packed = torch.cat([pack(levels, form.bits) for levels, _ in parts])
        return cls(form, torch.cat([scale for _, scale in parts]), packed.split(form.block_bytes, dim=1))

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor], form: CodeFormat) -> "CodedRows":
        """Take codes out of the tensors of a file: `scale`, and as many blocks as there are."""
        return cls(form, tensors["scale"], tuple(tensors[name] for name in form.names if name in tensors))

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of a file: `scale` and the blocks by name."""
        return {"scale": self.scale, **dict(zip(self.form.names, self.blocks, strict=False))}

    @property
    def columns(self) -> int:
        """Number of columns at hand: k, or those of the first blocks."""
        return self.form.columns_of(sum(block.shape[1] for block in self.blocks))

    def __len__(self) -> int:
        """Number of rows."""
        return self.scale.shape[0]

    def __getitem__(self, rows: slice | Tensor) -> "CodedRows":
        """Take some of the rows: a slice without copying them, or those of a tensor of their numbers."""
        return CodedRows(self.form, self.scale[rows], tuple(block[rows] for block in self.blocks))

    def first(self, count: int) -> "CodedRows":
        """Take the blocks of the first `count` bytes of the rows: a number in `form.prefixes`, or more for all."""
        chosen = [block for block, end in zip(self.blocks, self.form.prefixes, strict=False) if end <= count]
        return CodedRows(self.form, self.scale, tuple(chosen))

    def decode(self, scaled: bool = True) -> Tensor:
        """Return the rows that the codes stand for.

        Args:
            scaled: whether to multiply each row by its scale; without it, entries are the values of levels.

        Returns:
            `(rows, columns)`, float32.
        """
        result = torch.empty((len(self), self.columns), device=self.scale.device)
        on_cpu, stop = result.device.type == "cpu", 0
        for block in self.blocks:
            start, stop = stop, min(stop + block.shape[1] * 8 // self.form.bits, self.columns)
            # Few rows at a time: their numbers are multiplied and copied while they are in the caches of a CPU.
            together = max(1, _DECODED_BYTES // (4 * (stop - start))) if on_cpu else max(1, len(self))
            for first in range(0, len(self), together):
                rows = slice(first, first + together)
                values, part = unpack(block[rows], self.form.bits, stop - start), result[rows, start:stop]
                if scaled:
                    torch.mul(values, self.scale[rows].unsqueeze(1), out=part)
                else:
                    part.copy_(values)
        return result

    def problem(self) -> str | None:
        """Name what no encoder writes, such as a negative scale or bits after the last level, or return `None`."""
        if not bool(((self.scale >= 0) & self.scale.isfinite()).all()):
            return "a scale is negative, NaN or infinite"
        if len(self.blocks) == len(self.form.names):
            last = self.form.k - sum(self.form.block_bytes[:-1]) * 8 // self.form.bits
            if not padding_is_zero(self.blocks[-1], self.form.bits, last):
                return "bits after the last number of a row are set"
        return None


def pair_sums(values: Tensor) -> Tensor:
    """Sum every row by adding its upper half to its lower half, again and again: the same bits on every device.

    Args:
        values: `(rows, k)`, float64. It is overwritten.

    Returns:
        `(rows,)`, float64.
    """
    while values.shape[1] > 1:
        half = 1 << ((values.shape[1] - 1).bit_length() - 1)
        rest = values.shape[1] - half
        values[:, :rest] += values[:, half:]
        values = values[:, :half]
    return values[:, 0].clone()


def _levels(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the levels `(rows, k)`, uint8, and the scales `(rows,)`, float32, of rotated rows."""
    wide = rows.double()
    squares = pair_sums(wide.square())
    deviation = (squares / rows.shape[1]).sqrt()
    step = wide.abs().amax(dim=1) / 127.5 if bits == 8 else deviation * STEPS[bits]
    empty = squares == 0
    divisor = torch.where(empty, 1.0, step).float().unsqueeze(1)
    found = (rows / divisor + 2.0 ** (bits - 1)).floor_().clamp_(0, 2**bits - 1)
    product = pair_sums(wide.mul_(found.double().sub_((2**bits - 1) / 2)))
    scale = torch.where(empty, 0.0, squares / torch.where(empty, 1.0, product)).float()
    return found.to(torch.uint8).mul_(~empty.unsqueeze(1)), scale
