"""The contract of a score computer of the `trak` API."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class AbstractScoreComputer(ABC):
    """Computes features from gradients, and scores from features.

    Args:
        dtype (`torch.dtype`):
            Dtype of the features that [`~AbstractScoreComputer.get_x_xtx_inv`] returns.
        device (`torch.device` or `str`):
            Where products are computed. It is not touched before the first product.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device | str) -> None:
        self.dtype = dtype
        self.device = device

    @abstractmethod
    def get_xtx(self, grads: Tensor) -> Tensor:
        """Compute the Gram matrix XᵀX.

        Args:
            grads (`torch.Tensor` of shape `(n, k)`):
                Projected gradients X of the train examples.

        Returns:
            `torch.Tensor` of shape `(k, k)`.
        """

    @abstractmethod
    def get_x_xtx_inv(self, grads: Tensor, xtx: Tensor) -> Tensor:
        """Compute the features X (XᵀX)⁻¹.

        Args:
            grads (`torch.Tensor` of shape `(n, k)`):
                Projected gradients X of the train examples.
            xtx (`torch.Tensor` of shape `(k, k)`):
                XᵀX.

        Returns:
            `torch.Tensor` of shape `(n, k)`.
        """

    @abstractmethod
    def get_scores(self, features: Tensor, target_grads: Tensor, accumulator: Tensor) -> None:
        """Add features · tᵀ to `accumulator`, in place.

        Args:
            features (`torch.Tensor` of shape `(n, k)`):
                Features of the train examples.
            target_grads (`torch.Tensor` of shape `(m, k)`):
                Projected gradients t of the targets.
            accumulator (`torch.Tensor` of shape `(n, m)`):
                Sum of the products of all checkpoints so far.
        """
