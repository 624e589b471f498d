"""Kahneman-Tversky optimization (KTO, Ethayarajh et al., arXiv 2402.01306): single answers, desirable or not.

With y = ±1 for a desirable or undesirable answer, and the reward β r with r = log π(answer) − log π_ref(answer),

    f = y β r        L = λ_y (1 − σ(f − y β z₀))        q = −∂L/∂f = λ_y σ(f − y β z₀) σ(y β z₀ − f)

(Equation 8 of the paper). z₀ is the reference point, an estimate of the divergence between the model and its
reference. No gradient is taken through it, so features do not depend on it, only q. The trainer estimates it from the
other rows of each batch, by the mean log-ratio of answers to other prompts, 0 at least (`KL_completion_ids`); here it
is the same for all rows: that mean over a sample of rows, under the weights of the checkpoint.

`loss_type="apo_zero_unpaired"` (APO, arXiv 2408.06266) is the same with z₀ = 0.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from hf_trak.modelout_functions.base import Batch, Collator, Side, call_model, checked_choice
from hf_trak.modelout_functions.completions import (
    COMPLETION_MASK,
    CompletionModelOutput,
    as_named,
    check_finite,
    column_of,
)
from hf_trak.modelout_functions.dpo import REFERENCE_REMEDY
from hf_trak.modelout_functions.pairs import is_default, padded_completions, padding_token
from hf_trak.runtime.checks import checked_int, checked_positive

KTOLoss = Literal["kto", "apo_zero_unpaired"]

KL_PREFIX = "KL_"
"""Beginning of the names of columns with answers to other prompts, for z₀."""

REFERENCE, KL_REFERENCE = "ref_logps", "ref_KL_logps"


def _padded_rows(rows: Sequence[Mapping[str, Any]], fill: int) -> dict[str, Any]:
    """Pad rows with `prompt_ids` (if there are any), `completion_ids` and perhaps `KL_completion_ids` on the right."""
    prompts = [row.get("prompt_ids") or () for row in rows]
    made: dict[str, Any] = dict(padded_completions(prompts, [row["completion_ids"] for row in rows], fill))
    if "KL_completion_ids" in rows[0]:
        others = padded_completions(prompts, [row["KL_completion_ids"] for row in rows], fill)
        made |= {KL_PREFIX + name: value for name, value in others.items()}
    for name in ("label", REFERENCE, KL_REFERENCE):
        if name in rows[0]:
            made[name] = torch.tensor([row[name] for row in rows])
    return made


class KTOModelOutput(CompletionModelOutput):
    """The task `kto`: f = ±β (log π − log π_ref) of an answer, with its sign by the label."""

    batch_columns = ("prompt_ids", "completion_ids", "KL_completion_ids", "label", REFERENCE, KL_REFERENCE)
    own_columns: ClassVar[tuple[str, ...]] = (
        COMPLETION_MASK, "label", REFERENCE, KL_REFERENCE, "KL_input_ids", "KL_attention_mask", "KL_completion_mask",
        "KL_token_type_ids",
    )  # fmt: skip

    def __init__(
        self,
        beta: float = 0.1,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        loss_type: KTOLoss = "kto",
        kl: float | None = None,
        kl_rows: int = 256,
    ) -> None:
        """
        Args:
            beta (`float`, *optional*, defaults to 0.1):
                β.
            desirable_weight, undesirable_weight (`float`, *optional*, defaults to 1.0):
                λ of either kind of answers.
            loss_type (`str`, *optional*, defaults to `"kto"`):
                `"kto"` or `"apo_zero_unpaired"`.
            kl (`float`, *optional*):
                z₀. `None` estimates it from rows with `KL_completion_ids` and `ref_KL_logps`.
            kl_rows (`int`, *optional*, defaults to 256):
                The number of rows to estimate it from, evenly spaced.

        Raises:
            ValueError: an argument is out of range.
        """
        super().__init__()
        self.beta = checked_positive(beta, "beta")
        self.desirable_weight = checked_positive(desirable_weight, "desirable_weight")
        self.undesirable_weight = checked_positive(undesirable_weight, "undesirable_weight")
        self.loss_type = checked_choice(loss_type, "loss_type", KTOLoss)
        if kl is not None and not 0 <= kl < float("inf"):
            raise ValueError(f"`kl` is {kl}. Expected a finite number of at least 0, or `None` to estimate it.")
        self.kl = kl
        self.kl_rows = checked_int(kl_rows, "kl_rows", 1)
        self._estimated: Tensor | None = None

    def collator(self, collator: Collator) -> Collator:
        return partial(_padded_rows, fill=padding_token(collator)) if is_default(collator) else collator

    def terms(self, batch: Batch) -> Tensor | None:
        """Return 2 β |log π_ref(y)|, see [`BatchedModelOutput`]."""
        column = as_named(batch).get(REFERENCE)
        return 2 * self.beta * column.abs() if isinstance(column, Tensor) else None

    def reference_rows(self, train_size: int) -> Sequence[int]:
        if self.loss_type != "kto" or self.kl is not None:
            return ()
        count = min(self.kl_rows, train_size)
        return [place * train_size // count for place in range(count)]

    def prepare(self, model: torch.nn.Module, loader: Iterable[Any]) -> None:
        """Estimate z₀ for the weights that the model has now.

        Args:
            model (`torch.nn.Module`):
                The model.
            loader (`Iterable`):
                Batches of the rows that [`~KTOModelOutput.reference_rows`] lists.

        Raises:
            ValueError: the rows have no answers to other prompts.
        """
        self.bind(model)
        ratios = []
        with torch.no_grad():
            for batch in loader:
                entries = as_named(batch)
                if f"{KL_PREFIX}input_ids" not in entries:
                    raise ValueError(
                        f"The rows have the keys {list(entries)}, and no `{KL_PREFIX}completion_ids`, from which z₀ "
                        "is estimated. Expected the rows of the trainer. Or give z₀ as `KTOModelOutput(kl=…)`."
                    )
                its = [name for name in entries if name.startswith(KL_PREFIX)]
                others = {name.removeprefix(KL_PREFIX): entries[name] for name in its}
                sums = self.sums(call_model(model, None, None, *self.model_inputs(others)), others)
                ratios.append(sums - column_of(batch, KL_REFERENCE, sums, REFERENCE_REMEDY))
        self._estimated = torch.cat(ratios).mean().clamp(min=0).double().cpu()

    def references(self) -> dict[str, Tensor]:
        return {} if self._estimated is None else {"kl": self._estimated}

    def restore(self, model: torch.nn.Module, references: Mapping[str, Tensor]) -> None:
        kl = references.get("kl")
        if kl is None or kl.numel() != 1:
            raise ValueError(
                f"The references kept for the task 'kto' are {list(references)}. Expected `kl`, one number. Delete "
                "that file, and run the same command again."
            )
        self._estimated = kl.reshape(())
        self.bind(model)

    def output(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        sums = self.sums(model_output, batch)
        if side == "train" or REFERENCE in as_named(batch):
            sums = sums - column_of(batch, REFERENCE, sums, REFERENCE_REMEDY)
        return self.beta * self._signs(batch, sums) * sums

    def out_to_loss_grad(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        with torch.no_grad():
            self.check_completions(batch)
            values = self.output(model_output, batch, side)
            check_finite(values, "The reward")
            if side == "target":  # no score depends on it, and targets may come without a reference
                return torch.ones_like(values)
            shifted, weights = self._shifted(values, batch)
            return weights * torch.sigmoid(shifted) * torch.sigmoid(-shifted)

    def per_sample_loss(self, model_output: Any, batch: Batch) -> Tensor:
        """Compute the loss of every answer, differentiable, shape `(B,)`."""
        shifted, weights = self._shifted(self.output(model_output, batch), batch)
        return weights * torch.sigmoid(-shifted)

    def _signs(self, batch: Batch, like: Tensor) -> Tensor:
        labels = column_of(batch, "label", like, "It is true for desirable answers, and false for others.")
        return torch.where(labels != 0, 1.0, -1.0).to(like.dtype)

    def _shifted(self, values: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return f − y β z₀ and λ_y of every answer."""
        signs = self._signs(batch, values)
        shifted = values - signs * self.beta * self._reference_point().to(values)
        desirable = (1 + signs) / 2
        return shifted, self.desirable_weight * desirable + self.undesirable_weight * (1 - desirable)

    def _reference_point(self) -> Tensor:
        if self.loss_type != "kto":
            return torch.zeros(())
        if self.kl is not None:
            return torch.tensor(self.kl, dtype=torch.float64)
        if self._estimated is None:
            raise ValueError(
                "The reference point z₀ of the task 'kto' is not known. Expected a call of `prepare` with rows of the "
                "trainer, as `featurize` makes it. Or give it as `KTOModelOutput(kl=…)`."
            )
        return self._estimated
