"""Dense random maps: independent ±1 (`rademacher`, the paper's) or standard normal (`normal`) entries.

R is never stored: tiles are generated, multiplied, and dropped. `reference.py` defines the entries.
"""

import math
from abc import abstractmethod

import torch
from torch import Tensor

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
    """Tiling shared by the dense maps: panels of columns, tiles of rows."""

    columns_per_call: int
    """How many entries of a row come from one call of the generator."""

    @property
    def scale(self) -> float:
        """1/√k: the entries of the unscaled R have variance 1."""
        return 1.0 / math.sqrt(self.proj_dim)

    @abstractmethod
    def _random(self, start: int, n: int, column_blocks: Tensor, model_id: int) -> Tensor:
        """What the generator gives for rows `start … start + n`, before it is made into floats: int32 `(n, …)`."""

    @abstractmethod
    def _expand(self, random: Tensor, workspace: Tensor) -> Tensor:
        """float32 entries `(rows, columns_per_call · column blocks)` from what the generator gave."""

    def _accumulate(self, out: Tensor, block: Tensor, start: int, model_id: int) -> None:
        device = block.device
        calls = _CALLS_PER_TILE.get(device.type, _CALLS_ELSEWHERE)
        entries = _ENTRIES_PER_PRODUCT.get(device.type, _ENTRIES_ELSEWHERE)
        for first in range(0, self.proj_dim, _COLUMNS_PER_PANEL):
            last = min(first + _COLUMNS_PER_PANEL, self.proj_dim)
            blocks = self._column_blocks(first, last, device)
            width = len(blocks) * self.columns_per_call
            rows_per_tile = min(block.shape[1], max(1, calls // len(blocks)))
            rows_per_product = min(rows_per_tile, max(1, entries // width))
            workspace = torch.empty(rows_per_product * width, dtype=torch.int32, device=device)
            part = torch.empty(block.shape[0], rows_per_product, dtype=torch.float32, device=device)
            for tile in range(0, block.shape[1], rows_per_tile):
                tile_end = min(tile + rows_per_tile, block.shape[1])
                random = self._random(start + tile, tile_end - tile, blocks, model_id)
                for row in range(tile, tile_end, rows_per_product):
                    row_end = min(row + rows_per_product, tile_end)
                    matrix = self._expand(random[row - tile : row_end - tile], workspace)
                    # The same memory each time: BLAS may choose the order of its sums by the alignment of the block.
                    columns = part[:, : row_end - row].copy_(block[:, row:row_end])
                    out[:, first:last].addmm_(columns, matrix[:, : last - first])

    def matrix(self, start: int, n: int, model_id: int, device: str | torch.device = "cpu") -> Tensor:
        """Rows `start … start + n` of the unscaled R, float32 `(n, k)`. For tests and for matrices that fit in memory.

        Raises:
            ValueError: the rows do not lie in [0, P).
        """
        start = check_integer("start", start, 0, self.grad_dim)
        n = check_integer("n", n, 0, self.grad_dim - start + 1)
        model_id = check_model_id(model_id)
        blocks = self._column_blocks(0, self.proj_dim, torch.device(device))
        rows = max(1, _CALLS_PER_TILE["cpu"] // len(blocks))
        result = torch.empty(n, self.proj_dim, dtype=torch.float32, device=device)
        workspace = torch.empty(rows * len(blocks) * self.columns_per_call, dtype=torch.int32, device=device)
        for row in range(0, n, rows):
            random = self._random(start + row, min(rows, n - row), blocks, model_id)
            result[row : row + rows] = self._expand(random, workspace)[:, : self.proj_dim]
        return result

    def _column_blocks(self, first: int, last: int, device: torch.device) -> Tensor:
        """Numbers of the column blocks that hold columns `first … last`; `first` is a multiple of their width."""
        return torch.arange(first // self.columns_per_call, -(-last // self.columns_per_call), device=device)


class RademacherProjector(_DenseProjector):
    """R[i, j] = ±1, independent: bit j mod 128 of the generator's output at row i and column block ⌊j / 128⌋.

    All 128 bits of a call are used. The matrix for a smaller k is a prefix of the one for a larger k.
    """

    algorithm = "rademacher-1"
    columns_per_call = 128

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

    def _random(self, start: int, n: int, column_blocks: Tensor, model_id: int) -> Tensor:
        words = philox_words(start, n, self.seed, model_id, Stream.RADEMACHER_1, column_blocks, column_blocks.device)
        return packed_words(words).flatten(1)

    def _expand(self, random: Tensor, workspace: Tensor) -> Tensor:
        return sign_tensor(random, workspace)


class NormalProjector(_DenseProjector):
    """R[i, j] ~ N(0, 1), independent: four columns per call of the generator, by Box and Muller's method.

    The random bits are the same everywhere; the values agree between devices to the accuracy of their `log`, `cos` and
    `sin` (a few units in the last place).
    """

    algorithm = "normal-1"
    columns_per_call = 4

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

    def _random(self, start: int, n: int, column_blocks: Tensor, model_id: int) -> Tensor:
        words = philox_words(start, n, self.seed, model_id, Stream.NORMAL_1, column_blocks, column_blocks.device)
        return packed_words(words)

    def _expand(self, random: Tensor, workspace: Tensor) -> Tensor:
        # 24 bits are exact in float32. u lies in (0, 1]: its logarithm is finite, the largest entry √(48 ln 2) ≈ 5.77.
        parts = ((random >> 8) & 0xFFFFFF).to(torch.float32)
        radius = (parts[..., 0::2] + 1.0).mul_(2.0**-24).log_().mul_(-2.0).sqrt_()
        angle = parts[..., 1::2].mul(2.0 * math.pi * 2.0**-24)
        return torch.stack((radius * angle.cos(), radius * angle.sin()), dim=-1).flatten(1)


def _check_proj_type(cls: type, given: str | ProjectionType, expected: ProjectionType) -> None:
    if given != expected:
        raise ValueError(f"`proj_type` is '{given}', but {cls.__name__} has '{expected}' entries. Use another class.")
