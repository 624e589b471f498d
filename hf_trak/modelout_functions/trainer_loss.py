"""The task `trainer_loss`: the loss that a `transformers.Trainer` minimizes, row by row.

The loss of a row is what `compute_loss` of the trainer returns for the batch of this row alone, as the trainer's own
collator makes it. Where the trainer counts items (`num_items_in_batch`), it is given 1: the loss is then the sum over
the labels of the row, its share of the loss of any batch, and not their mean. For the same reason a cross-entropy with
weights of classes is divided by the number of labels and the mean weight of some training rows: a mean that divides by
its own weights leaves none in a row alone.

The model sees a whole batch in one pass. `compute_loss` runs once up to its first call of the model, for the inputs of
the model, and afterwards once for each row, with that row of what the model returned. A loss that asks for more (one
that the model computes itself, or a second call of the model) is taken row by row.
"""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from hf_trak.modelout_functions.answered_calls import (
    SUBSTITUTED,
    Answering,
    Called,
    OfTheBatch,
    WeightsKept,
    WholeBatchError,
    WithWeights,
    divided,
    leaf,
)
from hf_trak.modelout_functions.base import Batch, BatchedModelOutput, Collator, Side, joined
from hf_trak.modelout_functions.batches import mapping_of, size_of, takes_positions, with_positions
from hf_trak.modelout_functions.draws import Draws
from hf_trak.modelout_functions.function import task_identity
from hf_trak.modelout_functions.trainer_settings import loss_settings

_OF_A_ROW = object()

_NOT_OF_THE_ANSWER = "appears to not have been used in the graph"
"""What autograd says of a loss that differentiates an answered call by what went into it."""

_SAME_SLOPE = 1e-3
"""Part of the derivative of a batch's loss that may be left over beside those of its rows."""

MOST_OUTPUTS = 64
"""Outputs of a row up to which the second derivatives of its loss are taken, one backward pass for each."""


class TrainerLossModelOutput(BatchedModelOutput):
    """The task `trainer_loss`: f is minus the trainer's own loss of a training row, and q ≡ 1.

    The f of a target is that of the task inside, or minus its loss without one. The module describes the loss.
    """

    def __init__(self, trainer: Any, of: BatchedModelOutput | None = None) -> None:
        """
        Args:
            trainer (`transformers.Trainer`):
                The trainer. Its attributes count as they are now.
            of (`BatchedModelOutput`, *optional*):
                The task of the targets. `None` takes minus their loss.

        Raises:
            TypeError: `trainer` has no method `compute_loss`.
        """
        super().__init__()
        if not callable(getattr(trainer, "compute_loss", None)):
            raise TypeError(
                f"`trainer` is a {type(trainer).__name__}. Expected a `transformers.Trainer`, whose `compute_loss` is "
                "the loss of a row. For a function of your own use `RowLossModelOutput(loss_fn)`."
            )
        self.of = None if of is None else json.dumps(task_identity(of), sort_keys=True)
        self.loss = loss_settings(trainer)
        self.labels_from: int | None = None
        """First position of the labels of a row that its loss is multiplied by the number of; `None` for no factor."""
        self.mean_weights: tuple[float, ...] = ()
        """Mean weights of the labels of a batch, by which cross-entropies with weights of classes are divided."""
        self._task = of
        self._class = type(trainer)
        self._held = dict(vars(trainer))
        args = copy.copy(trainer.args)
        args.average_tokens_across_devices = False  # which multiplies by the number of processes
        self._held |= {"args": args}
        if "accelerator" in self._held:
            self._held["accelerator"] = _alone(self._held["accelerator"])
        for logged in {"_metrics", "_stored_metrics"} & set(self._held):  # lists that TRL's trainers log
            self._held |= {logged: copy.deepcopy(self._held[logged])}
        self._model: torch.nn.Module | None = None
        self.own_columns: frozenset[str] = frozenset()
        """Columns that the collator of the trainer makes, which stay where the task of the targets has the same."""
        self.padded = False
        """Whether the dataset pads its rows on the left, over which the trainer counts their positions."""
        self._positions = False
        self._row_by_row = False

    @property
    def of_task(self) -> BatchedModelOutput | None:
        """Return the task of the targets."""
        return self._task

    @property
    def name(self) -> str:
        """Name the method that computes the loss."""
        return f"{self._class.__name__}.compute_loss"

    @property
    def row_by_row(self) -> bool:  # type: ignore[override]  # found out by the first batch
        """Tell whether a batch of several rows has shown that each has to go through the model alone."""
        return self._row_by_row

    @property
    def batch_columns(self) -> Any:  # type: ignore[override]  # those of the task inside
        """Name the columns of the inner task, see [`AbstractModelOutput`]."""
        return () if self._task is None else self._task.batch_columns

    def collator(self, collator: Collator) -> Collator:
        return collator if self._task is None else self._task.collator(collator)

    def bind(self, model: torch.nn.Module) -> None:
        self._model = model
        self._positions = takes_positions(model)
        if self._task is not None:
            self._task.bind(model)

    def label_counts(self, batch: Batch) -> Tensor | None:
        """Count the labels of every row that its loss is multiplied by the number of; `None` for no factor.

        Args:
            batch (`Batch`):
                The batch, as the trainer's collator made it.

        Returns:
            `torch.Tensor` of shape `(B,)`, *optional*: integers.
        """
        if self.labels_from is None:
            return None
        return (self._inputs(batch)["labels"][:, self.labels_from :] != -100).flatten(1).sum(1)

    def model_inputs(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def call(*args: Any, **kwargs: Any) -> Any:
            raise Called(args, kwargs)

        try:
            self._computed(call, self._inputs(batch))
        except Called as called:
            return called.inputs, with_positions(called.named) if self._positions and not self.padded else called.named
        raise TypeError(
            f"`{self.name}` returned a loss without calling `model`. Expected a method that computes the loss from "
            "the output of the model that it is given. Pass `task=`, a function of your own (model_output, batch) -> "
            "(B,)."
        )

    def per_sample_loss(self, model_output: Any, batch: Batch) -> Tensor:
        """Compute the trainer's own loss of every row, differentiable.

        Args:
            model_output (`Any`):
                What the model returned for the batch.
            batch (`Batch`):
                The batch, as the trainer's collator made it.

        Returns:
            `torch.Tensor` of shape `(B,)`.

        Raises:
            ValueError: the loss of several rows cannot be told apart, or is no number.
        """
        inputs, size = self._inputs(batch), size_of(batch) or 1
        if size == 1:
            return self._of_a_row(model_output, inputs).reshape(1)
        if not self._row_by_row:
            try:
                outputs = divided(model_output, size)
                return torch.stack([self._answered(outputs[row], rows_of(inputs, [row], size)) for row in range(size)])
            except WholeBatchError:
                self._row_by_row = True
        raise ValueError(
            f"`{self.name}` needs more than the rows of one output of the model, for a batch of {size} rows. Expected "
            'one row at a time. Set `engine="auto"`, or `per_device_batch_size=1`.'
        )

    def output(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        if side == "target" and self._task is not None:
            return self._task.output(model_output, batch, side)
        return -self.per_sample_loss(model_output, batch)

    def out_to_loss_grad(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        if side == "target" and self._task is not None:
            return torch.ones_like(self._task.out_to_loss_grad(model_output, batch, side))
        with torch.no_grad():
            return torch.ones_like(self.per_sample_loss(model_output, batch))

    def gauss_newton_weight(self, model_output: Any, batch: Batch) -> Tensor:
        """Compute h of every row, so that ∇L ∇Lᵀ / h stands for its part Jᵀ H J of the Gauss-Newton matrix.

        H is the second derivative of the loss L by the outputs of the model, and g the first: h = ‖g‖² / tr H.

        Args:
            model_output (`Any`):
                What the model returned for the batch.
            batch (`Batch`):
                The batch, as the trainer's collator made it.

        Returns:
            `torch.Tensor` of shape `(B,)`: detached.

        Raises:
            TypeError: a row has too many outputs, or the loss has no curvature in them.
        """
        _, slopes, seconds = self._derivatives(model_output, batch)
        return slopes.square().sum(1) / seconds.diagonal(dim1=1, dim2=2).sum(1).abs().clamp(min=1e-30)

    def sampled_log_likelihood(self, model_output: Any, batch: Batch, draws: Draws) -> Tensor:
        """Compute εᵀ H^½ z of every row with ε = ±1 at even odds, whose gradients have the second moment Jᵀ H J.

        Args:
            model_output (`Any`):
                What the model returned for the batch: the outputs z.
            batch (`Batch`):
                The batch, as the trainer's collator made it.
            draws (`Draws`):
                The draws of ε.

        Returns:
            `torch.Tensor` of shape `(B,)`: differentiable. Negative curvature of H counts as none.

        Raises:
            TypeError: a row has too many outputs, or the loss has no curvature in them.
        """
        outputs, _, seconds = self._derivatives(model_output, batch)
        values, vectors = torch.linalg.eigh(seconds)
        signs = torch.where(draws.uniforms(torch.ones_like(values, dtype=torch.bool)) < 0.5, -1.0, 1.0).to(values)
        along = (vectors * values.clamp(min=0).sqrt().unsqueeze(1)) @ signs.unsqueeze(2)
        return (along.squeeze(2) * outputs).sum(1)

    def _derivatives(self, model_output: Any, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the K outputs of every row that its loss depends on `(B, K)`, and two derivatives of the loss."""
        size = size_of(batch) or 1
        leaves, spec = tree_flatten(model_output)
        with torch.enable_grad():
            given = [leaf(one, size) for one in leaves]
            places = [place for place, one in enumerate(given) if one is not leaves[place]]
            losses = self.per_sample_loss(tree_unflatten(given, spec), batch).sum()
            opened = [given[place] for place in places]
            found = torch.autograd.grad(losses, opened, create_graph=True, allow_unused=True) if opened else ()
            used = [(place, slope.flatten(1)) for place, slope in zip(places, found, strict=True) if slope is not None]
            count = sum(slope.shape[1] for _, slope in used)
            inputs = [given[place] for place, _ in used]
            columns = [column for _, slope in used if count <= MOST_OUTPUTS for column in slope.unbind(1)]
            seconds = [
                torch.autograd.grad(one.sum(), inputs, retain_graph=True, allow_unused=True, materialize_grads=True)
                for one in columns
                if one.requires_grad
            ]
        if not seconds or not any(bool(part.any()) for parts in seconds for part in parts):
            raise TypeError(
                f"`{self.name}` depends on {count} outputs of the model for a row, and has no second derivatives at "
                f"hand. Expected a curved loss of at most {MOST_OUTPUTS} outputs for a Gauss-Newton matrix. Use "
                '`curvature.labels="empirical"`, or features without a curvature.'
            )
        matrix = torch.stack([torch.cat([part.flatten(1) for part in parts], 1) for parts in seconds], 1)
        outputs = torch.cat([leaves[place].flatten(1) for place, _ in used], 1)
        return outputs, torch.cat([slope for _, slope in used], 1).detach(), (matrix + matrix.mT) / 2

    def computed(self, model: torch.nn.Module, batch: Batch) -> Tensor:
        """Compute the loss of a batch as that of a row is computed, a scalar, with its graph.

        Args:
            model (`torch.nn.Module`):
                The model.
            batch (`Batch`):
                The batch. That of one row has the loss of the row.

        Raises:
            ValueError: the result is no single number.
        """
        return self._computed(model, self._inputs(batch))

    def of_batch(self, model: torch.nn.Module, batch: Batch, items: float | None) -> Tensor:
        """Compute the loss of a batch as the trainer does, with its `num_items_in_batch`: a scalar, with its graph.

        Args:
            model (`torch.nn.Module`):
                The model.
            batch (`Batch`):
                The batch.
            items (`float`, *optional*):
                The number of items; `None` where the trainer counts none.

        Raises:
            ValueError: the result is no single number.
        """
        device = next(model.parameters()).device
        count = None if items is None else torch.tensor(items, device=device)
        return self._computed(model, self._inputs(batch), count)

    def _inputs(self, batch: Batch) -> dict[str, Any]:
        """Return what the trainer's own collator made: a batch without the columns of the task of the targets."""
        expected = "of names to tensors, which a trainer takes. Use the data collator of the trainer."
        entries = mapping_of(batch, expected)
        others = {*self.batch_columns} - self.own_columns
        return {name: value for name, value in entries.items() if name not in others}

    def shares(self, model_output: Any, batch: Batch, items: float | None) -> Tensor | None:
        """Compute the factor of the loss of every row in the loss of the whole batch, as the trainer takes it.

        Both have their derivatives by the outputs of the row, and the factor is their ratio.

        Args:
            model_output (`Any`):
                What the model returned for the batch.
            batch (`Batch`):
                The batch.
            items (`float`, *optional*):
                The `num_items_in_batch` of the training.

        Returns:
            `torch.Tensor` of shape `(B,)`: float64, or `None` if the loss needs more than one output of the model.

        Raises:
            ValueError: the loss of the batch is no weighted sum of those of its rows.
        """
        inputs, size = self._inputs(batch), size_of(batch) or 1
        with torch.enable_grad():
            leaves, spec = tree_flatten(model_output)
            given = [leaf(one, size) for one in leaves]
            opened = tree_unflatten(given, spec)
            if not (used := [one for one in given if isinstance(one, Tensor) and one.requires_grad]):
                return None
            count = None if items is None else torch.tensor(items, device=used[0].device)
            rows = list[Tensor]()
            try:
                losses = [self.per_sample_loss(opened, batch).sum(), self._answered(opened, inputs, count)]
            except (ValueError, WholeBatchError):
                if self._row_by_row:
                    return None
                raise
            if self._row_by_row:  # found out by the one row of this batch
                return None
            for loss in losses:
                found = torch.autograd.grad(loss, used, retain_graph=True, allow_unused=True, materialize_grads=True)
                rows.append(torch.cat([one.reshape(size, -1) for one in found], 1).double())
        alone, together = rows
        factors = (alone * together).sum(1) / alone.square().sum(1).clamp(min=1e-300)
        left = (together - factors.unsqueeze(1) * alone).norm()
        if not float(left) <= _SAME_SLOPE * float(together.norm()):
            raise ValueError(
                f"The loss of a batch by `{self.name}` is no weighted sum of the losses of its rows: a part of "
                f"{float(left / together.norm()):.1%} of its derivative is left over. Expected a loss that is a mean "
                "or a sum over rows. Pass `task=`, a function of your own (model_output, batch) -> (B,)."
            )
        return factors

    def items(self, batches: Sequence[Batch]) -> float | None:
        """Count what the loss of some accumulated batches is divided by; `None` where each takes its own mean."""
        count = getattr(self._view(), "get_batch_samples", None)
        found = None if count is None else count(iter(batches), len(batches), torch.device("cpu"))[1]
        return None if found is None else float(found)

    def is_scaled(self, items: float | None) -> bool:
        """Tell whether the loss of a batch is its part of the loss of a step, which the trainer divides no more."""
        said = self._held.get("loss_is_scaled_for_ga", getattr(self._class, "loss_is_scaled_for_ga", None))
        if said is not None:
            return bool(said)
        counted = self._held.get("model_accepts_loss_kwargs") and items is not None
        return bool(counted or self._held.get("compute_loss_func") is not None)

    def _of_a_row(self, model_output: Any, inputs: dict[str, Any]) -> Tensor:
        """Compute the loss of one row by what the model returned for it, or by the model itself if it needs more."""
        if not self._row_by_row or self._model is None:
            try:
                return self._answered(divided(model_output, 1)[0], inputs)
            except WholeBatchError:
                if self._model is None:
                    raise
                self._row_by_row = True
        if (weights := SUBSTITUTED.get()) is not None:
            return WithWeights(self._model, lambda model: self._computed(model, inputs)).by(weights)
        return self._computed(self._model, inputs)

    def _answered(self, model_output: Any, inputs: dict[str, Any], items: Any = _OF_A_ROW) -> Tensor:
        """Compute the loss of one row, or of a batch with its `items`, whose only call of the model is answered.

        Raises:
            WholeBatchError: the answer is not enough: the model is called twice, or without derivatives, or the loss
                is that of a pass from which no row can be taken, or differentiates by the inputs of the model.
        """
        answers = [model_output]

        def call(*args: Any, **kwargs: Any) -> Any:
            if not answers or not torch.is_grad_enabled():
                raise WholeBatchError
            return answers.pop()

        try:
            with torch.enable_grad():
                return self._computed(call, inputs, items)
        except RuntimeError as error:
            if _NOT_OF_THE_ANSWER not in str(error):
                raise
            raise WholeBatchError from error

    def _view(self) -> Any:
        """Make a copy of the trainer."""
        view = object.__new__(self._class)
        vars(view).update(self._held)
        return view

    def _computed(self, call: Callable[..., Any], inputs: dict[str, Any], items: Any = _OF_A_ROW) -> Tensor:
        """Call `compute_loss` on a copy of the trainer, with a function or a module in place of the model.

        With `items`, which are `num_items_in_batch`, it is the loss of a batch, and otherwise that of a row.
        """
        view, inputs = self._view(), joined(inputs)
        model = call if isinstance(call, torch.nn.Module) else Answering(self._model, call)
        vars(view).update(model=model, model_wrapped=model)
        of_a_row = items is _OF_A_ROW
        with WeightsKept(self.mean_weights) if of_a_row else nullcontext():
            items = _item_count(view, inputs) if of_a_row else items
            loss = view.compute_loss(model, dict(inputs), num_items_in_batch=items)
        if isinstance(loss, OfTheBatch):
            raise WholeBatchError
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{loss!r:.100}"
            raise ValueError(
                f"`{self.name}` returned {given}. Expected the loss as one number. Pass `task=`, a function of your "
                "own (model_output, batch) -> (B,)."
            )
        if of_a_row and (counts := self.label_counts(inputs)) is not None:
            loss = loss * counts.sum()
        return loss.reshape(())


def _alone(accelerator: Any) -> Any:
    """Return an accelerator that gives back what a trainer gathers to log it: other processes have other rows."""
    alone = copy.copy(accelerator)
    for name in ("gather", "gather_for_metrics", "pad_across_processes", "reduce"):
        setattr(alone, name, lambda *given, **named: [*given, *named.values()][0])
    return alone


def rows_of(inputs: Mapping[str, Any], rows: Sequence[int], size: int) -> dict[str, Any]:
    """Take some rows of a batch: of its tensors, of lists of as many entries, and of mappings of these.

    Args:
        inputs (`Mapping`):
            The batch.
        rows (`Sequence[int]`):
            The positions of the rows.
        size (`int`):
            The number of rows of the batch.
    """
    taken: dict[str, Any] = {}
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == size:
            taken[name] = value[list(rows)]
        elif isinstance(value, list | tuple) and len(value) == size:
            taken[name] = [value[row] for row in rows]
        elif isinstance(value, Mapping):
            taken[name] = rows_of(value, rows, size)
        else:
            taken[name] = value
    return taken


def _item_count(trainer: Any, inputs: dict[str, Any]) -> Tensor | None:
    """Return the number of rows where the trainer counts the items of a batch, and `None` where it does not."""
    count = getattr(trainer, "get_batch_samples", None)
    device = next((value.device for value in inputs.values() if isinstance(value, Tensor)), torch.device("cpu"))
    counted = None if count is None else count(iter([inputs]), 1, device)[1]
    return None if counted is None else torch.tensor(float(size_of(inputs) or 1), device=device)
