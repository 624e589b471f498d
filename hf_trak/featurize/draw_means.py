"""Features of rows that are drawn at random: means over draws."""

import torch
from torch import Tensor

from hf_trak.modelout_functions.base import Side


class DrawMean:
    """The mean over D draws of the features of some rows.

    What is attributed is the expected loss over draws. Its gradient, with the opposite sign, is the mean of q_d ∇f_d.
    So training rows have

        q = (1/D) Σ_d |q_d|        x = (1/D) Σ_d q_d x_d / q

    with q x the mean of q_d x_d, and targets t = (1/D) Σ_d t_d, which belongs to the expected output. For rows with
    q = 0 in all draws, x is the plain mean. One draw is left as it is.
    """

    def __init__(self, side: Side) -> None:
        """
        Args:
            side: whether rows are training examples or targets.
        """
        self._side = side
        self._features: list[Tensor] = []
        self._weights: list[Tensor] = []

    def add(self, features: Tensor, out_to_loss: Tensor) -> None:
        """Add one draw.

        Args:
            features: x_d or t_d, `(B, k)`.
            out_to_loss: q_d, `(B,)`.
        """
        if not self._features:
            self._features, self._weights = [features], [out_to_loss]
            return
        if len(self._weights) == 1:
            self._features = [self._weighted(self._features[0], self._weights[0]), self._features[0].clone()]
        self._features[0] += self._weighted(features, out_to_loss)
        self._features[1] += features
        self._weights.append(out_to_loss)

    def result(self) -> tuple[Tensor, Tensor]:
        """Return features `(B, k)` and q `(B,)`."""
        count = len(self._weights)
        if count == 1:
            return self._features[0], self._weights[0]
        weights = torch.stack(self._weights)
        plain = self._features[1] / count
        if self._side == "target":
            return plain, weights.mean(dim=0)
        q = weights.abs().mean(dim=0)
        some = q > 0
        weighted = self._features[0] / (count * torch.where(some, q, 1.0)).unsqueeze(1)
        return torch.where(some.unsqueeze(1), weighted, plain), q

    def _weighted(self, features: Tensor, out_to_loss: Tensor) -> Tensor:
        return features * out_to_loss.unsqueeze(1)
