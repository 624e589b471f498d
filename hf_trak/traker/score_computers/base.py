"""The contract of a score computer of the seed API."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class AbstractScoreComputer(ABC):
    """Matrix products of TRAK: X (n, k) are features of train examples, t (m, k) those of targets."""

    def __init__(self, dtype: torch.dtype, device: torch.device | str) -> None:
        """
        Args:
            dtype: dtype of the features that [`~AbstractScoreComputer.get_x_xtx_inv`] returns.
            device: where products are computed. Not touched before the first one.
        """
        self.dtype = dtype
        self.device = device

    @abstractmethod
    def get_xtx(self, grads: Tensor) -> Tensor:
        """XᵀX `(k, k)` from X `(n, k)`."""

    @abstractmethod
    def get_x_xtx_inv(self, grads: Tensor, xtx: Tensor) -> Tensor:
        """X (XᵀX)⁻¹ `(n, k)` from X `(n, k)` and XᵀX `(k, k)`."""

    @abstractmethod
    def get_scores(self, features: Tensor, target_grads: Tensor, accumulator: Tensor) -> None:
        """Add features · tᵀ to `accumulator` `(n, m)`, in place, from `features` `(n, k)` and t `(m, k)`."""
