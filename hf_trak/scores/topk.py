"""The k highest (or lowest) scores of every target, from blocks of scores."""

import numpy as np
import torch
from torch import Tensor

from hf_trak.scores.ridge import check_finite_rows

PADDING = -(2**63)
"""A key below that of every finite score, for tables whose rows are of different lengths."""

_MAX_ROWS = 2**32
_FEW = 8
"""A block of which less than one score in so many matters is picked from instead of sorted."""


class TopK:
    """Running top-k over row blocks; memory is m · k plus one block.

    Only scores that reach the k-th best of their target so far are looked at more closely, which soon are few: a block
    then costs about one comparison per score.

    Equal scores are ordered by row index, lower first, so the result is the same for any cut into blocks, any order of
    blocks, and any device. (`torch.topk` alone promises no order.) To that end a score and its row index are packed
    into one 64-bit integer whose order is that of the pair, which leaves no ties.
    """

    def __init__(self, k: int, largest: bool = True) -> None:
        """
        Args:
            k: scores to keep for each target; with fewer rows than k, all are kept.
            largest: keep the highest, sorted from high to low; otherwise the lowest, from low to high.

        Raises:
            ValueError: k is not positive.
        """
        if k < 1:
            raise ValueError(f"`k` is {k}. Expected a number of examples ≥ 1.")
        self.k = k
        self.largest = largest
        self._m: int | None = None
        self._keys: Tensor | None = None
        self._floor: Tensor | None = None
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._n_waiting = 0

    def update(self, start: int, block: Tensor) -> None:
        """Take in the scores `(rows, m)`, float32 or narrower, of rows `start … start + rows`.

        Raises:
            ValueError: the shape does not fit, or a row index is beyond 2³² − 1.
            NonFiniteError: a score is not finite; names its row.
        """
        if block.ndim != 2 or self._m not in (None, block.shape[1]):
            expected = "m" if self._m is None else self._m
            raise ValueError(f"The block of scores has shape {tuple(block.shape)}. Expected (rows, {expected}).")
        self._m = block.shape[1]
        if start < 0 or start + block.shape[0] > _MAX_ROWS:
            raise ValueError(f"Rows {start} … {start + block.shape[0]} lie outside of 0 … {_MAX_ROWS}.")
        if block.dtype == torch.float64:
            raise ValueError(
                "The block of scores is float64. Expected float32: convert it, so that the rounding is yours."
            )
        check_finite_rows(block, "score", start)
        floor = self._floor
        if floor is None and block.shape[0] >= _FEW * self.k:
            floor = block.float().topk(self.k, dim=0, largest=self.largest).values[-1]
        if floor is not None:
            reaching = _reaching(block, floor, self.largest)
            count = int(reaching.sum()) if isinstance(reaching, Tensor) else int(np.count_nonzero(reaching))
            if count == 0:
                return
            if count <= block.numel() // _FEW:
                places = _places(reaching)
                rows, targets = places // block.shape[1], places % block.shape[1]
                scores = block[rows, targets]
                self._waiting.append((targets, _pack(scores if self.largest else -scores, start + rows)))
                self._n_waiting += count
                if self._n_waiting >= self.k * block.shape[1] // 4:  # the floor soon rises
                    self._take_in_waiting()
                return
        self._take_in_waiting()
        rows = torch.arange(start, start + block.shape[0], device=block.device)
        self._take_in(_pack(block if self.largest else -block, rows.unsqueeze(1)).T)

    @property
    def empty(self) -> bool:
        """Whether there was no block yet."""
        return self._keys is None and not self._waiting

    def keys(self) -> Tensor:
        """What is kept, packed: `(m, min(k, rows))`, int64, descending. For [`~TopK.merge`] in another process.

        Raises:
            ValueError: there was no block.
        """
        self._take_in_waiting()
        if self._keys is None:
            raise ValueError("No scores were given. Call `update` with at least one block before `result`.")
        return self._keys

    def merge(self, keys: Tensor) -> None:
        """Take in what another accumulator of the same `largest` kept, see [`~TopK.keys`]."""
        self._take_in_waiting()
        self._take_in(keys)

    def result(self) -> tuple[Tensor, Tensor]:
        """`(scores, indices)`, each `(m, min(k, rows))`: float32 scores, best first, and int64 row indices.

        Raises:
            ValueError: there was no block.
        """
        scores, indices = _unpack(self.keys())
        return (scores if self.largest else -scores), indices

    def _take_in(self, keys: Tensor) -> None:
        self._m = keys.shape[0]
        if self._keys is not None:
            keys = torch.cat([self._keys, keys.to(self._keys.device)], dim=1)
        self._keys = keys.topk(min(self.k, keys.shape[1]), dim=1, sorted=True).values
        if self._keys.shape[1] == self.k and not bool((self._keys[:, -1] == PADDING).any()):
            floor = _unpack(self._keys[:, -1])[0]
            self._floor = floor if self.largest else -floor

    def _take_in_waiting(self) -> None:
        if not self._waiting:
            return
        targets = torch.cat([targets for targets, _ in self._waiting])
        keys = torch.cat([keys for _, keys in self._waiting])
        self._waiting, self._n_waiting = [], 0
        targets, order = targets.sort()
        counts = targets.bincount(minlength=self._m or 0)
        column = torch.arange(len(targets), device=targets.device) - (counts.cumsum(0) - counts)[targets]
        table = torch.full((len(counts), int(counts.max())), PADDING, device=keys.device)
        table[targets, column] = keys[order]
        self._take_in(table)


# On the CPU, NumPy compares, counts and finds true values several times as fast as torch.


def _reaching(block: Tensor, floor: Tensor, largest: bool) -> Tensor | np.ndarray:
    """Which scores `(rows, m)` are as good as the k-th best of their target, `floor` `(m,)`. Equal ones count: of two,
    the lower row is wanted, and blocks may come in any order.
    """
    if block.device.type == "cpu":
        scores, floors = block.float().numpy(), floor.numpy()
        return scores >= floors if largest else scores <= floors
    return block >= floor if largest else block <= floor


def _places(mask: Tensor | np.ndarray) -> Tensor:
    """Where a mask is true, in its flattened form, ascending. Shape `(count,)`, int64."""
    if isinstance(mask, np.ndarray):
        return torch.from_numpy(np.flatnonzero(mask))
    return mask.flatten().nonzero().squeeze(1)


def _pack(scores: Tensor, rows: Tensor) -> Tensor:
    """One int64 for each score: its order-preserving bits above, the complement of its row index below."""
    bits = (scores.float() + 0.0).contiguous().view(torch.int32)  # adding 0.0 makes -0.0 a 0.0
    ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).long()
    return (ordered << 32) | (_MAX_ROWS - 1 - rows)


def _unpack(keys: Tensor) -> tuple[Tensor, Tensor]:
    ordered = (keys >> 32).int()
    bits = torch.where(ordered >= 0, ordered, ordered ^ 0x7FFFFFFF)
    return bits.contiguous().view(torch.float32), _MAX_ROWS - 1 - (keys & (_MAX_ROWS - 1))
