"""Dense random maps: independent ±1 (`rademacher`, the paper's) or standard normal (`normal`) entries.

R is never stored: tiles are generated, multiplied, and dropped. `reference.py` defines the entries.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from hf_trak.kernels.backend import float32_terms
from hf_trak.projectors.base import BlockProjector, ProjectionType
from hf_trak.projectors.checks import check_integer, check_model_id
from hf_trak.projectors.philox import Stream, packed_words, philox_words, sign_tensor

_COLUMNS_PER_PANEL = 2**14
# Sizes of what is made at a time: bits that stay in the L2 caches, entries that stay in the L3 cache. GPUs want more.
_CALLS_PER_TILE = {"cpu": 2**16}
_ENTRIES_PER_PRODUCT = {"cpu": 2**20}
_CALLS_ELSEWHERE = 2**20
_ENTRIES_ELSEWHERE = 2**24


class _DenseProjector(BlockProjector):
    """Tiling shared by the dense maps: panels of columns, tiles of rows whose bits are made together."""

    entries_per_call: int
    """How many entries of R come from one call of the generator."""

    column_multiple: int
    """Entries are made for a multiple of so many columns."""

    @property
    def scale(self) -> float:
        """1/√k: the entries of the unscaled R have variance 1."""
        return 1.0 / math.sqrt(self.proj_dim)

    @abstractmethod
    def _generate(self, start: int, n: int, columns: range, model_id: int, device: torch.device) -> Tensor:
        """Rows `start … start + n` of some columns in whatever form the generator gives, `(n, …)`."""

    @abstractmethod
    def _entries(self, generated: Tensor, workspace: Tensor) -> Tensor:
        """float32 entries, with up to `column_multiple` − 1 columns too many, of rows that were generated."""

    def _tiles(
        self, start: int, n: int, columns: range, model_id: int, device: torch.device
    ) -> Iterator[tuple[int, Tensor]]:
        """Tiles of R from top to bottom: first row, relative to `start`, and entries that hold until the next tile."""
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

    def _accumulate(self, out: Tensor, block: Tensor, start: int, model_id: int) -> None:
        part = torch.empty(0, dtype=torch.float32, device=block.device)
        for first in range(0, self.proj_dim, _COLUMNS_PER_PANEL):
            columns = range(first, min(first + _COLUMNS_PER_PANEL, self.proj_dim))
            for row, matrix in self._tiles(start, block.shape[1], columns, model_id, block.device):
                # Contiguous, in the same memory each time: BLAS may order its sums by the alignment of its arguments.
                if part.shape[1:] != matrix.shape[:1]:
                    part = torch.empty(len(block), len(matrix), dtype=torch.float32, device=block.device)
                part.copy_(block[:, row : row + len(matrix)])
                out[:, columns.start : columns.stop].addmm_(part, matrix)

    def matrix(self, start: int, n: int, model_id: int, device: str | torch.device = "cpu") -> Tensor:
        """Rows `start … start + n` of the unscaled R, float32 `(n, k)`. For tests and for matrices that fit in memory.

        Raises:
            ValueError: the rows do not lie in [0, P).
        """
        start = check_integer("start", start, 0, self.grad_dim)
        n = check_integer("n", n, 0, self.grad_dim - start + 1)
        result = torch.empty(n, self.proj_dim, dtype=torch.float32, device=device)
        columns = range(self.proj_dim)
        for row, matrix in self._tiles(start, n, columns, check_model_id(model_id), torch.device(device)):
            result[row : row + len(matrix)] = matrix
        return result


class RademacherProjector(_DenseProjector):
    """R[i, j] = ±1, independent: bit j mod 128 of the generator's output at row i and column block ⌊j / 128⌋.

    All 128 bits of a call are used. The matrix for a smaller k is a prefix of the one for a larger k.
    """

    algorithm = "rademacher-1"
    entries_per_call = 128
    column_multiple = 128

    def __init__(
        self,
        grad_dim: int,
        proj_dim: int,
        seed: int = 0,
        proj_type: str | ProjectionType = ProjectionType.rademacher,
        device: str | torch.device = "cpu",
    ) -> None:
        """See [`BlockProjector`]. `proj_type` must be `rademacher`."""
        _check_proj_type(type(self), proj_type, ProjectionType.rademacher)
        super().__init__(grad_dim, proj_dim, seed, ProjectionType.rademacher, device)

    def _generate(self, start: int, n: int, columns: range, model_id: int, device: torch.device) -> Tensor:
        blocks = torch.arange(columns.start // 128, -(-columns.stop // 128), device=device)
        words = philox_words(start, n, self.seed, model_id, Stream.RADEMACHER_1, blocks, device)
        return packed_words(words).flatten(1)

    def _entries(self, generated: Tensor, workspace: Tensor) -> Tensor:
        return sign_tensor(generated, workspace)

    def _accumulate_with_kernels(self, out: Tensor, block: Tensor, start: int, model_id: int) -> None:
        torch.ops.hf_trak.rademacher_accumulate(out, block, start, self.seed, model_id, float32_terms())


class NormalProjector(_DenseProjector):
    """R[i, j] ~ N(0, 1), independent: four rows per call of the generator, by Box and Muller's method.

    The random bits are the same everywhere; the values agree between devices to the accuracy of their `log`, `cos` and
    `sin` (a few units in the last place).
    """

    algorithm = "normal-1"
    entries_per_call = 4
    column_multiple = 1

    def __init__(
        self,
        grad_dim: int,
        proj_dim: int,
        seed: int = 0,
        proj_type: str | ProjectionType = ProjectionType.normal,
        device: str | torch.device = "cpu",
    ) -> None:
        """See [`BlockProjector`]. `proj_type` must be `normal`."""
        _check_proj_type(type(self), proj_type, ProjectionType.normal)
        super().__init__(grad_dim, proj_dim, seed, ProjectionType.normal, device)

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

    def _accumulate_with_kernels(self, out: Tensor, block: Tensor, start: int, model_id: int) -> None:
        torch.ops.hf_trak.normal_accumulate(out, block, start, self.seed, model_id)


def _check_proj_type(cls: type, given: str | ProjectionType, expected: ProjectionType) -> None:
    if given != expected:
        raise ValueError(f"`proj_type` is '{given}', but {cls.__name__} has '{expected}' entries. Use another class.")
