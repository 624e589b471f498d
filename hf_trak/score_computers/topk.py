"""The k highest (or lowest) scores of every target, from blocks of scores."""

import torch
from torch import Tensor

from hf_trak.score_computers.ridge import check_finite_rows

_MAX_ROWS = 2**32


class TopK:
    """Running top-k over row blocks; memory is m · k plus one block.

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
        self._keys: Tensor | None = None

    def update(self, start: int, block: Tensor) -> None:
        """Take in the scores `(rows, m)`, float32 or narrower, of rows `start … start + rows`.

        Raises:
            ValueError: the shape does not fit, or a row index is beyond 2³² − 1.
            NonFiniteError: a score is not finite; names its row.
        """
        if block.ndim != 2 or (self._keys is not None and block.shape[1] != self._keys.shape[0]):
            expected = "m" if self._keys is None else self._keys.shape[0]
            raise ValueError(f"The block of scores has shape {tuple(block.shape)}. Expected (rows, {expected}).")
        if start < 0 or start + block.shape[0] > _MAX_ROWS:
            raise ValueError(f"Rows {start} … {start + block.shape[0]} lie outside of 0 … {_MAX_ROWS}.")
        if block.dtype == torch.float64:
            raise ValueError(
                "The block of scores is float64. Expected float32: convert it, so that the rounding is yours."
            )
        check_finite_rows(block, "score", start)
        keys = _pack(block if self.largest else -block, start).T
        if self._keys is not None:
            keys = torch.cat([self._keys, keys.to(self._keys.device)], dim=1)
        self._keys = keys.topk(min(self.k, keys.shape[1]), dim=1, sorted=True).values

    def result(self) -> tuple[Tensor, Tensor]:
        """`(scores, indices)`, each `(m, min(k, rows))`: float32 scores, best first, and int64 row indices.

        Raises:
            ValueError: there was no block.
        """
        if self._keys is None:
            raise ValueError("No scores were given. Call `update` with at least one block before `result`.")
        scores, indices = _unpack(self._keys)
        return (scores if self.largest else -scores), indices


def _pack(scores: Tensor, start: int) -> Tensor:
    """One int64 for each score: its order-preserving bits above, the complement of its row index below."""
    bits = (scores.float() + 0.0).contiguous().view(torch.int32)  # adding 0.0 makes -0.0 a 0.0
    ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).long()
    rows = torch.arange(start, start + scores.shape[0], device=scores.device)
    return (ordered << 32) | (_MAX_ROWS - 1 - rows).unsqueeze(1)


def _unpack(keys: Tensor) -> tuple[Tensor, Tensor]:
    ordered = (keys >> 32).int()
    bits = torch.where(ordered >= 0, ordered, ordered ^ 0x7FFFFFFF)
    return bits.contiguous().view(torch.float32), _MAX_ROWS - 1 - (keys & (_MAX_ROWS - 1))
