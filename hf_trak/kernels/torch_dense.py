"""The dense random maps in torch operators: independent ±1 (`rademacher-1`) or standard normal (`normal-1`) entries.

R is never stored: tiles are generated, multiplied, and dropped. `hf_trak/projectors/reference.py` defines the entries.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from hf_trak.kernels.philox import Stream, packed_words, philox_words, sign_tensor

_COLUMNS_PER_PANEL = 2**14
# Sizes of what is made at a time: bits that stay in the L2 caches, entries that stay in the L3 cache. GPUs want more.
_CALLS_PER_TILE = {"cpu": 2**16}
_ENTRIES_PER_PRODUCT = {"cpu": 2**20}
_CALLS_ELSEWHERE = 2**20
_ENTRIES_ELSEWHERE = 2**24
# BLAS libraries may add all products of a column one after the other. In sums of so many rows, whose results are added
# in turn, the rounding errors of 70,000 rows are 15 times smaller. GPUs cut long sums themselves.
_ROWS_PER_SUM = {"cpu": 1024}
_ROWS_PER_SUM_ELSEWHERE = 2**24


class DenseMap(ABC):
    """Tiling shared by the dense maps: panels of columns, tiles of rows whose bits are made together."""

    entries_per_call: int
    """Number of entries of R that come from one call of the generator."""

    column_multiple: int
    """Number of columns whose entries are made together."""

    def __init__(self, proj_dim: int, seed: int) -> None:
        """
        Args:
            proj_dim: k.
            seed: seed of the random matrix.
        """
        self.proj_dim = proj_dim
        self.seed = seed

    @abstractmethod
    def _generate(self, start: int, n: int, columns: range, model_id: int, device: torch.device) -> Tensor:
        """Generate rows `start … start + n` of some columns, in the form of the generator, `(n, …)`."""

    @abstractmethod
    def _entries(self, generated: Tensor, workspace: Tensor) -> Tensor:
        """Turn generated rows into float32 entries, with up to `column_multiple` − 1 columns too many."""

    def _tiles(
        self, start: int, n: int, columns: range, model_id: int, device: torch.device
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield tiles of R from top to bottom: the first row, relative to `start`, and entries.

        The entries hold until the next tile is made.
        """
        width = -(-len(columns) // self.column_multiple) * self.column_multiple
        calls = _CALLS_PER_TILE.get(device.type, _CALLS_ELSEWHERE)
        together = min(n, max(1, calls * self.entries_per_call // width))
        rows = min(together, max(1, _ENTRIES_PER_PRODUCT.get(device.type, _ENTRIES_ELSEWHERE) // width))
        workspace = torch.empty(rows * width, dtype=torch.int32, device=device)
        for tile in range(0, n, together):
            generated = self._generate(start + tile, min(together, n - tile), columns, model_id, device)
            for row in range(0, len(generated), rows):
                entries = self._entries(generated[row : row + rows], workspace)
                yield tile + row, entries[:, : len(columns)]

    def accumulate(self, out: Tensor, block: Tensor, start: int, model_id: int) -> None:
        """Add a block's projection, `out += block @ R[start : start + n]`.

        Args:
            out: `(B, k)`, float32, changed in place.
            block: `(B, n)`, any floating dtype and strides, on the device of `out`.
            start: position of the first column in the gradient vector.
            model_id: id of the checkpoint.
        """
        part = torch.empty(0, dtype=torch.float32, device=block.device)
        for first in range(0, self.proj_dim, _COLUMNS_PER_PANEL):
            columns = range(first, min(first + _COLUMNS_PER_PANEL, self.proj_dim))
            total = _ProductSum(out[:, columns.start : columns.stop], block.shape[1])
            for row, matrix in self._tiles(start, block.shape[1], columns, model_id, block.device):
                # Contiguous, in the same memory each time: BLAS may order its sums by the alignment of its arguments.
                if part.shape[1:] != matrix.shape[:1]:
                    part = torch.empty(len(block), len(matrix), dtype=torch.float32, device=block.device)
                part.copy_(block[:, row : row + len(matrix)])
                total.add(part, matrix)
            total.finish()

    def transposed(self, rows: Tensor, start: int, n: int, model_id: int) -> Tensor:
        """Multiply by the transposed map, `rows @ R[start : start + n]ᵀ`.

        Args:
            rows: `(B, k)`, float32.
            start: first row of R.
            n: number of rows of R.
            model_id: id of the checkpoint.

        Returns:
            `(B, n)`, float32.
        """
        found = torch.zeros(rows.shape[0], n, dtype=torch.float32, device=rows.device)
        for first in range(0, self.proj_dim, _COLUMNS_PER_PANEL):
            columns = range(first, min(first + _COLUMNS_PER_PANEL, self.proj_dim))
            part = rows[:, columns.start : columns.stop].contiguous()
            for row, matrix in self._tiles(start, n, columns, model_id, rows.device):
                found[:, row : row + len(matrix)].addmm_(part, matrix.T)
        return found

    def matrix(self, start: int, n: int, model_id: int, device: str | torch.device = "cpu") -> Tensor:
        """Generate rows `start … start + n` of the unscaled R, float32 `(n, k)`."""
        result = torch.empty(n, self.proj_dim, dtype=torch.float32, device=device)
        for row, matrix in self._tiles(start, n, range(self.proj_dim), model_id, torch.device(device)):
            result[row : row + len(matrix)] = matrix
        return result


class _ProductSum:
    """Adds products of matrices to a tensor, in sums of `_ROWS_PER_SUM` rows of the right factors."""

    def __init__(self, out: Tensor, n: int) -> None:
        """
        Args:
            out: `(B, columns)`, float32, changed in place.
            n: number of rows of all right factors together.
        """
        self._out = out
        self._limit = _ROWS_PER_SUM.get(out.device.type, _ROWS_PER_SUM_ELSEWHERE)
        self._sum = torch.empty_like(out) if n > self._limit else None
        self._rows = 0

    def add(self, left: Tensor, right: Tensor) -> None:
        """Add `left @ right`: `(B, rows)` and `(rows, columns)`."""
        if self._sum is None:
            self._out.addmm_(left, right)
            return
        for first in range(0, len(right), self._limit):
            rows = right[first : first + self._limit]
            self._sum.addmm_(left[:, first : first + self._limit], rows, beta=1 if self._rows else 0)
            self._rows += len(rows)
            if self._rows >= self._limit:
                self.finish()

    def finish(self) -> None:
        """Add what has been summed, but not yet added to the tensor."""
        if self._sum is not None and self._rows:
            self._out.add_(self._sum)
            self._rows = 0


class RademacherMap(DenseMap):
    """R[i, j] = ±1: bit j mod 128 of the generator's output at row i and column block ⌊j / 128⌋."""

    entries_per_call = 128
    column_multiple = 128

    def _generate(self, start: int, n: int, columns: range, model_id: int, device: torch.device) -> Tensor:
        blocks = torch.arange(columns.start // 128, -(-columns.stop // 128), device=device)
        words = philox_words(start, n, self.seed, model_id, Stream.RADEMACHER_1, blocks, device)
        return packed_words(words).flatten(1)

    def _entries(self, generated: Tensor, workspace: Tensor) -> Tensor:
        return sign_tensor(generated, workspace)


class NormalMap(DenseMap):
    """R[i, j] ~ N(0, 1): four rows per call of the generator, by Box and Muller's method."""

    entries_per_call = 4
    column_multiple = 1

    def _generate(self, start: int, n: int, columns: range, model_id: int, device: torch.device) -> Tensor:
        blocks = torch.arange(columns.start, columns.stop, device=device)
        first, last = start // 4, -(-(start + n) // 4)
        words = philox_words(first, last - first, self.seed, model_id, Stream.NORMAL_1, blocks, device)
        entries = torch.empty(last - first, 4, len(columns), dtype=torch.float32, device=device)
        for pair in (0, 2):
            # 24 bits are exact in float32. u lies in (0, 1]: finite logarithm, largest entry √(48 ln 2) ≈ 5.77.
            radius = (words[pair] >> 8).to(torch.float32).add_(1.0).mul_(2.0**-24).log_().mul_(-2.0).sqrt_()
            angle = (words[pair + 1] >> 8).to(torch.float32).mul_(2.0 * math.pi * 2.0**-24)
            torch.mul(radius, angle.cos(), out=entries[:, pair])
            torch.mul(radius, angle.sin_(), out=entries[:, pair + 1])
        return entries.flatten(0, 1)[start - 4 * first : start - 4 * first + n]

    def _entries(self, generated: Tensor, workspace: Tensor) -> Tensor:
        return generated
