"""Codes of features: 8, 4, 2 or 1 bits per number instead of 32.

A row of features is rotated at random (`rotation.py`), after which its entries look like independent normal numbers
whatever the row was. Each entry is then rounded to a few levels, which are kept with one scale per row
(`coded_rows.py`) and packed into bytes (`packing.py`). Rotations keep inner products, so that Gram matrices,
ridge regressions and scores of rotated features are those of the features themselves, up to the rounding.

`reference.py` defines all of it entry by entry. A version is part of every name: `hadamard-1` and `levels-1`.

May import: `hf_trak.errors`, `hf_trak.runtime`, `hf_trak.kernels` and `hf_trak.kernels.ops`. Knows no files.

Start with `reference.py`, then `coded_rows.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from hf_trak.kernels.arguments import kernels_wanted
from hf_trak.kernels.ops import hadamard
from hf_trak.kernels.philox import Stream, packed_words, philox_words, sign_tensor
from hf_trak.kernels.torch_hadamard import rotate_blocks

BITS = (8, 4, 2, 1)


def packed_bytes(columns: int, bits: int) -> int:
    """Return the number of bytes that hold so many levels."""
    return -(-columns * bits // 8)


def pack(levels: Tensor, bits: int) -> Tensor:
    """Pack levels into bytes, each from its lowest bit; bits after the last level are 0.

    Args:
        levels: `(rows, k)`, uint8, below 2ᵇ.
        bits: b, a divisor of 8.

    Returns:
        `(rows, ⌈k·b / 8⌉)`, uint8.
    """
    if bits == 8:
        return levels.contiguous()
    per_byte = 8 // bits
    rows, k = levels.shape
    if k % per_byte:
        levels = torch.nn.functional.pad(levels, (0, -k % per_byte))
    places = levels.reshape(rows, -1, per_byte)
    result = places[..., 0].clone()
    for place in range(1, per_byte):
        result |= places[..., place] << (bits * place)
    return result


def level_values(bits: int) -> Tensor:
    """Return the number v = u − (2ᵇ − 1) / 2 that each level u stands for: `(2ᵇ,)`, float32."""
    return torch.arange(2**bits, dtype=torch.float32) - (2**bits - 1) / 2


@cache
def _table(bits: int, device: torch.device) -> Tensor:
    """Return the values of the levels in each byte: `(256, 8 / b)`, float32."""
    places = torch.arange(0, 8, bits)
    found = (torch.arange(256).unsqueeze(1) >> places) & (2**bits - 1)
    return level_values(bits)[found].to(device)


def unpack(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Return the numbers that packed levels stand for.

    Args:
        packed: `(rows, ⌈columns·b / 8⌉)`, uint8.
        bits: b.
        columns: number of levels per row.

    Returns:
        `(rows, columns)`, float32, without the scale of the row.
    """
    if bits == 8:
        return packed[:, :columns].to(torch.float32).sub_(127.5)
    # One row of the table, of 8/b numbers, for every byte.
    table, places = _table(bits, packed.device), packed.reshape(-1)
    if packed.device.type != "cpu":
        values = table.index_select(0, places.int())
    elif bits == 4:
        # Two numbers are one word for torch, which takes words faster than NumPy does.
        values = table.view(torch.int64).squeeze(1).index_select(0, places.int()).view(torch.float32)
    else:
        # NumPy copies rows of 16 or 32 bytes up to four times as fast as torch. No index is out of range.
        values = torch.from_numpy(np.take(table.numpy(), places.numpy(), axis=0, mode="clip"))
    return values.view(packed.shape[0], -1)[:, :columns]


def padding_is_zero(packed: Tensor, bits: int, columns: int) -> bool:
    """Tell whether the bits after the last level of every row are 0."""
    left = columns * bits % 8
    return left == 0 or not bool((packed[:, -1] >> left).any())


ROTATION = "hadamard-1"


class Rotation:
    """The rotation of rows of k features of one checkpoint: y = H·D·x / √p, thrice, in blocks of p = 2ⁱ ≤ k.

    An orthogonal map: inner products of rotated rows are those of the rows. After it, every entry is a sum of all
    entries of the row with random signs, so that any columns are a sketch of the whole row. Once would not do: of a
    row with a few large entries it makes entries of a few sizes, whose rounding errors all point the same way. After
    three times the errors are those of normal numbers, as of "structured spinners" (arXiv 1610.06209).
    """

    def __init__(self, k: int, seed: int, model_id: int) -> None:
        """
        Args:
            k: number of features, at least 1.
            seed: seed in [0, 2⁶³).
            model_id: id of the checkpoint in [0, 2³²).
        """
        self.k = k
        self.seed = seed
        self.model_id = model_id
        self._size = 1 << (k.bit_length() - 1)
        self._starts = 3 * ([0] if self._size == k else [0, k - self._size])
        self._signs: dict[torch.device, Tensor] = {}

    def apply(self, rows: Tensor) -> Tensor:
        """Rotate rows.

        Args:
            rows: `(rows, k)`, any floating dtype; finite.

        Returns:
            `(rows, k)`, float32, on the same device. The bits do not depend on the device.
        """
        result = rows.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        self._rotate(result, self._signs_on(rows.device), self._starts)
        return result

    def inverse(self, rows: Tensor) -> Tensor:
        """Undo the rotation, up to rounding. Arguments and result as those of [`~Rotation.apply`]."""
        result = rows.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        signs = self._signs_on(rows.device)
        for number, start in reversed(list(enumerate(self._starts))):
            self._rotate(result, torch.zeros_like(signs[:1]), [start])
            result[:, start : start + self._size] *= sign_tensor(signs[number])[: self._size]
        return result

    def _rotate(self, rows: Tensor, signs: Tensor, starts: list[int]) -> None:
        """Run rounds with these signs on the blocks that begin at `starts`, in place."""
        run = hadamard if kernels_wanted(rows.device) else rotate_blocks
        run(rows, signs, self._size, starts)

    def _signs_on(self, device: torch.device) -> Tensor:
        """Return the signs of all rounds, packed: `(rounds, ⌈p / 32⌉)`, int32."""
        if device not in self._signs:
            calls = -(-self._size // 128)
            rounds = torch.arange(len(self._starts))
            words = philox_words(0, calls, self.seed, self.model_id, Stream.HADAMARD_1, rounds)
            packed = packed_words(words).transpose(0, 1).flatten(1)[:, : -(-self._size // 32)]
            self._signs[device] = packed.contiguous().to(device)
        return self._signs[device]


LEVELS = "levels-1"


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
        """Return the bytes of a row, without its scale."""
        return packed_bytes(self.k, self.bits)

    @property
    def block_bytes(self) -> list[int]:
        """Return the bytes per row of each block of columns."""
        sizes, left, size = [], self.row_bytes, FIRST_BLOCK_BYTES
        while left > 0:
            sizes.append(min(size, left))
            left -= sizes[-1]
            size = sum(sizes)
        return sizes

    @property
    def names(self) -> list[str]:
        """Return the name of the tensor of each block, in the order of the columns."""
        return [f"codes.{number:02d}" for number in range(len(self.block_bytes))]

    @property
    def prefixes(self) -> list[int]:
        """Return the bytes of a row that the first 1, 2, … blocks have together."""
        return list(accumulate(self.block_bytes))

    def columns_of(self, count: int) -> int:
        """Return the number of columns in the first so many bytes of a row."""
        return min(self.k, count * 8 // self.bits)


@dataclass(frozen=True)
class CodedRows:
    """Encoded rows. Only the first blocks of columns may be at hand.

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
        """Return the tensors of a file: `scale` and the blocks by name."""
        return {"scale": self.scale, **dict(zip(self.form.names, self.blocks, strict=False))}

    @property
    def columns(self) -> int:
        """Return the number of columns at hand: k, or those of the first blocks."""
        return self.form.columns_of(sum(block.shape[1] for block in self.blocks))

    def __len__(self) -> int:
        """Return the number of rows."""
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
