"""Top-k selection from a stream of score blocks: the k highest or lowest scores of every target."""

import numpy as np
import torch
from torch import Tensor

from hf_trak.runtime.checks import check_finite_rows

PADDING = -(2**63)
"""A key below that of every finite score. It fills up tables whose rows have different lengths."""

_MAX_ROWS = 2**32
_FEW = 8
"""If fewer than one score in 8 of a block can be in the result, those are picked out instead of sorting the block."""


class TopK:
    """The k best training rows of every target, updated block by block. Memory is O(m · k) plus one block.

    Equal scores are ordered by row index, lower index first, so the result is the same for any division into blocks,
    any order of blocks, and any device. (`torch.topk` alone promises no order.) To this end, a score and its row
    index are packed into one 64-bit integer key. Keys are ordered as the pairs are, and no two of them are equal.

    Only scores that reach the k-th best score of their target so far are packed. There soon are few of them, so that
    a block costs about one comparison per score.
    """

    def __init__(self, k: int, largest: bool = True) -> None:
        """
        Args:
            k: number of scores to keep per target. If there are fewer rows, all are kept.
            largest: keep the highest scores, sorted from high to low; otherwise the lowest, from low to high.
        """
        self.k = k
        self.largest = largest
        self._m: int | None = None
        self._keys: Tensor | None = None
        self._floor: Tensor | None = None
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._n_waiting = 0

    def update(self, start: int, block: Tensor) -> None:
        """Add a block of scores.

        Args:
            start: index of its first row.
            block: scores of the rows from `start` on, `(rows, m)`, float32 or narrower.

        Raises:
            ValueError: a row index is above 2³² − 1.
            NonFiniteError: a score is not finite; names its row.
        """
        self._m = block.shape[1]
        if start < 0 or start + block.shape[0] > _MAX_ROWS:
            raise ValueError(
                f"Rows {start} … {start + block.shape[0]} lie outside of 0 … {_MAX_ROWS}. Expected row indices that "
                "fit into 32 bits."
            )
        check_finite_rows(block, "score", start)
        # The floor is the k-th best score of every target so far, or, in a first large block, of the block itself.
        floor = self._floor
        if floor is None and block.shape[0] >= _FEW * self.k:
            floor = block.float().topk(self.k, dim=0, largest=self.largest).values[-1]
        if floor is not None:
            reaching = _reaching(block, floor, self.largest)
            count = int(reaching.sum()) if isinstance(reaching, Tensor) else int(np.count_nonzero(reaching))
            if count == 0:
                return
            if count <= block.numel() // _FEW:
                # Pack the few that reach the floor, and merge them once enough have come together.
                places = _places(reaching)
                rows, targets = places // block.shape[1], places % block.shape[1]
                scores = block[rows, targets]
                self._waiting.append((targets, _pack(scores if self.largest else -scores, start + rows)))
                self._n_waiting += count
                if self._n_waiting >= self.k * block.shape[1] // 4:  # early enough for the floor to rise
                    self._merge_waiting()
                return
        # Many scores can be in the result: merge the whole block.
        self._merge_waiting()
        rows = torch.arange(start, start + block.shape[0], device=block.device)
        self._merge_table(_pack(block if self.largest else -block, rows.unsqueeze(1)).T)

    @property
    def empty(self) -> bool:
        """Tell whether no score has been added yet."""
        return self._keys is None and not self._waiting

    def keys(self) -> Tensor:
        """Return the packed scores and rows kept so far, for [`~TopK.merge`] in another process.

        Returns:
            `(m, min(k, rows))`, int64, descending.

        Raises:
            ValueError: no block was added.
        """
        self._merge_waiting()
        if self._keys is None:
            raise ValueError("No scores were added. Call `update` with at least one block before `result`.")
        return self._keys

    def merge(self, keys: Tensor) -> None:
        """Add the [`~TopK.keys`] of another `TopK` with the same `largest`."""
        self._merge_waiting()
        self._merge_table(keys)

    def result(self) -> tuple[Tensor, Tensor]:
        """Return the scores and row indices kept, best first.

        Returns:
            `(scores, indices)`, each `(m, min(k, rows))`: float32 and int64.

        Raises:
            ValueError: no block was added.
        """
        scores, indices = _unpack(self.keys())
        return (scores if self.largest else -scores), indices

    def _merge_table(self, keys: Tensor) -> None:
        """Merge keys `(m, count)` into those kept, and raise the floor."""
        self._m = keys.shape[0]
        if self._keys is not None:
            keys = torch.cat([self._keys, keys.to(self._keys.device)], dim=1)
        self._keys = keys.topk(min(self.k, keys.shape[1]), dim=1, sorted=True).values
        if self._keys.shape[1] == self.k and not bool((self._keys[:, -1] == PADDING).any()):
            floor = _unpack(self._keys[:, -1])[0]
            self._floor = floor if self.largest else -floor

    def _merge_waiting(self) -> None:
        """Arrange the keys that were picked out, in any order of targets, as a padded table, and merge it."""
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
        self._merge_table(table)


# On the CPU, NumPy compares, counts and finds true values several times as fast as torch does.


def _reaching(block: Tensor, floor: Tensor, largest: bool) -> Tensor | np.ndarray:
    """Mask the scores `(rows, m)` that are at least as good as the k-th best of their target, `floor` `(m,)`.

    Scores equal to the floor count, since a lower row replaces a higher one and blocks may come in any order.
    """
    if block.device.type == "cpu":
        scores, floors = block.float().numpy(), floor.numpy()
        return scores >= floors if largest else scores <= floors
    return block >= floor if largest else block <= floor


def _places(mask: Tensor | np.ndarray) -> Tensor:
    """Return the indices of true entries in the flattened mask, ascending, `(count,)`, int64."""
    if isinstance(mask, np.ndarray):
        return torch.from_numpy(np.flatnonzero(mask))
    return mask.flatten().nonzero().squeeze(1)


def _pack(scores: Tensor, rows: Tensor) -> Tensor:
    """Pack every score and its row into an int64 key.

    The upper 32 bits are those of the float32 score, changed so that integers are ordered as the scores are; the lower
    32 bits are 2³² − 1 − row, so that of two equal scores the one of the lower row has the larger key.
    """
    bits = (scores.float() + 0.0).contiguous().view(torch.int32)  # adding 0.0 turns -0.0 into 0.0
    ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).long()
    return (ordered << 32) | (_MAX_ROWS - 1 - rows)


def _unpack(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Invert [`_pack`]: scores, float32, and rows, int64."""
    ordered = (keys >> 32).int()
    bits = torch.where(ordered >= 0, ordered, ordered ^ 0x7FFFFFFF)
    return bits.contiguous().view(torch.float32), _MAX_ROWS - 1 - (keys & (_MAX_ROWS - 1))
