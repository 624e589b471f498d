"""The average over checkpoints that makes scores."""

import torch
from torch import Tensor

from hf_trak.errors import NonFiniteError
from hf_trak.runtime.finite import non_finite_rows
from hf_trak.traker.score_computers import AbstractScoreComputer


class ScoreEnsemble:
    """Sums up the products and the output-to-loss gradients of checkpoints.

    Attributes:
        model_ids: the model ids that have been added.
    """

    def __init__(self, train_set_size: int, num_targets: int) -> None:
        self.model_ids: list[int] = []
        self._products = torch.zeros(train_set_size, num_targets)
        self._out_to_loss = torch.zeros(train_set_size, dtype=torch.float64)

    def add(
        self, model_id: int, computer: AbstractScoreComputer, features: Tensor, out_to_loss: Tensor, targets: Tensor
    ) -> None:
        """Add a checkpoint.

        Args:
            model_id: its id.
            computer: the score computer that multiplies.
            features: X (XᵀX + λI)⁻¹ of the train examples, `(n, k)`.
            out_to_loss: their output-to-loss gradients q, `(n,)`.
            targets: projected gradients of the targets, `(m, k)`.
        """
        computer.get_scores(features, targets, accumulator=self._products)
        self._out_to_loss += out_to_loss
        self.model_ids.append(model_id)

    def scores(self) -> Tensor:
        """Multiply the mean product by the mean output-to-loss gradient of each train row. To be called once.

        Returns:
            `torch.Tensor` of shape `(n, m)`, float32.

        Raises:
            NonFiniteError: a score is NaN or infinite; names the train row.
        """
        scores = self._products
        scores /= len(self.model_ids)
        scores *= (self._out_to_loss / len(self.model_ids)).to(scores.dtype)[:, None]
        if rows := non_finite_rows(scores):
            raise NonFiniteError(
                f"The scores of train row {rows[0]} are not finite. Pass `use_half_precision=False`, or a larger "
                "`lambda_reg`."
            )
        return scores
