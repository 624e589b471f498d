"""Small steps of plain gradient descent on chosen rows, from weights that are put back to the bit."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_trak.data.rows import RowBatches, batch_rows
from hf_trak.data.shared_words import WordIndex
from hf_trak.errors import NonFiniteError
from hf_trak.featurize.featurizer import Featurizer
from hf_trak.gradient_computers.base import gradients_of, one_per_sample, run_model
from hf_trak.gradient_computers.environment import only_differentiating, pass_settings, removing
from hf_trak.modelout_functions.base import BatchedModelOutput, Side
from hf_trak.weights.adapters import check_not_quantized, is_quantized

_WHOLE = (torch.float32, torch.float64)


Direction = list[Tensor]

"""One tensor for each parameter that moves."""


class TrialSteps:
    """Steps of a model as it is now, and what they change of the outputs of targets.

    The model is in eval mode, without dropout: what is measured is the step, not its noise. Memory is that of three
    copies of the parameters that move, besides the forward and backward passes of a batch.
    """

    def __init__(
        self, featurizer: Featurizer, train_task: BatchedModelOutput, rows: Any, targets: Any, names: Sequence[str]
    ) -> None:
        """
        Args:
            featurizer: the model with its weights loaded, and the task of targets.
            train_task: what training on a row raises: minus its loss.
            rows: the training rows, by their numbers.
            targets: a dataset of m rows.
            names: names of the parameters that move.
        """
        self.featurizer = featurizer
        self._model = featurizer.model
        self._tasks: Mapping[Side, Any] = {"train": train_task, "target": featurizer.task}
        parameters = dict(self._model.named_parameters())
        self._moved = [parameters[name] for name in names]
        self.rows, self.targets = featurizer.batches(rows), featurizer.batches(targets, "target")
        self.batch_size = featurizer.args.batch_size
        self._cast = False
        self._target_batches = list(self.targets.iterate(batch_rows(0, len(targets), self.batch_size)))
        self._start: Direction = []
        self.start_output = np.zeros(len(targets))
        """The targets' outputs before any step, `(m,)`."""

    @contextmanager
    def opened(self) -> Iterator["TrialSteps"]:
        """Take steps in this block. Weights and buffers, whatever happens to them, are put back when it ends.

        Weights of half precision, in which small steps would round away, are float32 within the block.

        Raises:
            ValueError: the parameters that move have half precision, and the model is quantized.
        """
        tensors = [*self._model.parameters(), *self._model.buffers()]
        half = [one for one in tensors if one.is_floating_point() and one.dtype not in _WHOLE]
        self._cast = bool(half) and not is_quantized(self._model)
        if not self._cast and any(one.dtype not in _WHOLE for one in self._moved):
            names = sorted({str(one.dtype).removeprefix("torch.") for one in self._moved})
            check_not_quantized(
                self._model,
                f"The parameters that training moves are {' and '.join(names)}, in which a small step rounds away",
                "Load the adapter in float32, as `get_peft_model` does by default.",
            )
        placed = [(module, dict(module._buffers)) for module in self._model.modules() if module._buffers]
        buffers = [(buffer, buffer.detach().clone()) for buffer in self._model.buffers()]
        before = [(one, one.data) for one in half]
        moved = {id(one) for one in self._moved}
        try:
            if self._cast:
                for one in half:
                    one.data = one.data.float()
            self._start = [one.detach().clone() for one in self._moved]
            with only_differentiating(self._model, moved), pass_settings(self._model):
                self.start_output = self.output()
                yield self
        finally:
            self._back()
            self._start = []
            if self._cast:
                for one, data in before:
                    one.data = data
            for module, kept in placed:
                module._buffers.clear()
                module._buffers.update(kept)
            for buffer, saved in buffers:
                buffer.data.copy_(saved)

    @property
    def rounding(self) -> float:
        """Bound the change of a target's output that may be rounding alone."""
        kinds = [one.dtype for one in self._model.parameters() if one.is_floating_point()]
        return 8 * max(torch.finfo(kind).eps for kind in kinds) * max(1.0, float(np.abs(self.start_output).max()))

    @property
    def norm(self) -> float:
        """Compute the norm of the parameters that move."""
        return norm_of(self._start)

    def output(self) -> np.ndarray:
        """Compute the targets' outputs with the weights as they are, `(m,)`."""
        found = np.zeros_like(self.start_output)
        with torch.no_grad():
            for numbers, batch in self._target_batches:
                found[numbers] = self._values(batch, len(numbers), "target").double().cpu().numpy()
        return found

    def direction(self, rows: Sequence[int]) -> Direction:
        """Compute the direction in which a step of gradient descent on the mean loss of some rows goes.

        Raises:
            NonFiniteError: a gradient is NaN or infinite.
        """
        found = [torch.zeros_like(one) for one in self._start]
        ordered = sorted(rows)
        for numbers, batch in self.rows.iterate(_cut(ordered, self.batch_size)):
            with torch.enable_grad():
                values = self._values(batch, len(numbers), "train")
                if not values.requires_grad:
                    continue  # rows without valid labels, whose loss is a constant
                taken = gradients_of(values.sum(), self._moved)
            for total, gradient in zip(found, taken, strict=True):
                if gradient is not None:
                    total.add_(gradient.detach(), alpha=1 / len(ordered))
        if not all(bool(torch.isfinite(one).all()) for one in found):
            raise NonFiniteError(
                f"The gradient of the training rows {ordered[:5]} … is not finite. Expected finite values. Look at "
                "these rows and at the checkpoint for NaN or infinite values."
            )
        return found

    def change(self, direction: Direction, rate: float) -> np.ndarray:
        """Take a step, compute the change of the targets' outputs, `(m,)`, and put the weights back.

        Args:
            direction: see [`~TrialSteps.direction`].
            rate: the learning rate.
        """
        with torch.no_grad():
            for one, step in zip(self._moved, direction, strict=True):
                one.add_(step, alpha=rate)
        try:
            return self.output() - self.start_output
        finally:
            self._back()

    def _back(self) -> None:
        with torch.no_grad():
            for one, saved in zip(self._moved, self._start, strict=False):
                one.copy_(saved)

    def prepared(self, batch: Any) -> Any:
        """Cast the numbers of a batch to the dtype that the model has now."""
        given = self.featurizer.in_dtype_of_model(batch)
        return _in_float32(given) if self._cast else given

    def _values(self, batch: Any, size: int, side: Side) -> Tensor:
        task, given = self._tasks[side], self.prepared(batch)
        result = run_model(task, self._model, given)
        values = one_per_sample(task.output(result, given, side), size, task)
        task.out_to_loss_grad(result, given, side)  # which checks the labels
        return values


def norm_of(direction: Direction) -> float:
    """Compute the norm of a direction."""
    return float(torch.stack([one.double().square().sum().cpu() for one in direction]).sum().sqrt())


def _in_float32(batch: Any) -> Any:
    """Cast numbers of half precision; a model whose weights were cast refuses them."""

    def cast(value: Any) -> Any:
        is_half = isinstance(value, Tensor) and value.is_floating_point() and value.dtype not in _WHOLE
        return value.float() if is_half else value

    if isinstance(batch, Mapping):
        return {name: cast(value) for name, value in batch.items()}
    return type(batch)(map(cast, batch)) if type(batch) in (list, tuple) else batch


_FIRST_STEP = 1e-3

"""Norm of the first step that is tried, relative to that of the weights."""

_SMALLER, _TRIALS = 4, 6

_BENT = 0.1

"""Largest difference between a step and twice its half, relative to the step."""

_ABOVE_ROUNDING = 100


def learning_rate(steps: TrialSteps, directions: Sequence[Direction]) -> float:
    """Choose the learning rate of all sets, see [`~hf_trak.evaluation.tail_patch`].

    Args:
        steps: the model and the targets.
        directions: what some sets do.

    Raises:
        ValueError: no row has a gradient.
    """
    largest = max(norm_of(one) for one in directions)
    if largest == 0 or steps.norm == 0:
        raise ValueError(
            "Neither the given rows nor random ones have a gradient in the parameters that training moves. Expected "
            "rows with labels, and parameters that the loss depends on. Look at the labels, and at `grad_wrt`."
        )
    rate = _FIRST_STEP * steps.norm / largest
    for _ in range(_TRIALS):
        whole = np.array([steps.change(one, rate) for one in directions])
        half = np.array([steps.change(one, rate / 2) for one in directions])
        scale = float(np.abs(whole).max())
        if np.abs(whole - 2 * half).max() <= _BENT * scale or scale <= _ABOVE_ROUNDING * steps.rounding:
            break
        rate /= _SMALLER
    return rate


Similarity = Literal["embeddings", "bm25"]


def most_similar(steps: TrialSteps, how: Similarity, candidates: Sequence[int], count: int) -> list[int]:
    """Find the training rows that are most similar to a target.

    Args:
        steps: the model, the training rows, and a dataset of one target.
        how: by `"embeddings"` or `"bm25"`.
        candidates: numbers of the rows to look at.
        count: number of rows to return.

    Returns:
        Row numbers, most similar first; of equals the lower number first.

    Raises:
        ValueError: rows have no `input_ids` for BM25, or the model has no matrix for embeddings.
    """
    ordered = sorted(candidates)
    if how == "bm25":
        rows = WordIndex(" ".join(_tokens(steps.rows, row)) for row in ordered)
        similarity = rows.bm25(_tokens(steps.targets, 0))
    else:
        wanted = _embedded(steps, steps.targets, [0])
        similarity = (_embedded(steps, steps.rows, ordered) @ wanted.T).squeeze(1).double().numpy()
    return [ordered[place] for place in np.argsort(-similarity, kind="stable")[:count]]


def _cut(rows: Sequence[int], size: int) -> list[Sequence[int]]:
    return [rows[cut.start : cut.stop] for cut in batch_rows(0, len(rows), size)]


def _embedded(steps: TrialSteps, batches: RowBatches, rows: Sequence[int]) -> Tensor:
    """Compute embeddings of norm 1: `(rows, D)`."""
    model, task = steps.featurizer.model, steps.featurizer.task
    assert isinstance(task, BatchedModelOutput)  # checked by the caller
    last: list[Tensor] = []

    def keep(module: nn.Module, given: tuple[Any, ...]) -> None:
        if given and isinstance(given[0], Tensor) and given[0].ndim >= 2:
            last[:] = [given[0]]

    found: dict[int, Tensor] = {}
    matrices = [one for one in model.modules() if isinstance(one, nn.Linear | Conv1D)]
    hooks = [one.register_forward_pre_hook(keep) for one in matrices]
    with removing(hooks), torch.no_grad(), pass_settings(model):
        for numbers, batch in batches.iterate(_cut(rows, steps.batch_size)):
            last.clear()
            run_model(task, model, steps.prepared(batch))
            if not last or len(last[0]) != len(numbers):
                raise ValueError(
                    f"`similar` is 'embeddings', and the {type(model).__name__} ends in no linear layer with "
                    "one input per row, which would be the embedding. Expected one. Set `similar=None`, or "
                    "pass rows of your own."
                )
            found |= dict(zip(numbers, _pooled(last[0].float(), batch).cpu(), strict=True))
    vectors = torch.stack([found[row] for row in rows])  # batches may come in another order, by sizes of images
    return vectors / vectors.norm(dim=1, keepdim=True).clamp_min(torch.finfo(vectors.dtype).tiny)


def _pooled(states: Tensor, batch: Any) -> Tensor:
    """Average states `(B, …, D)` over all but the first and the last dimension, without padding where a mask tells."""
    if states.ndim == 2:
        return states
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if isinstance(mask, Tensor) and mask.shape == states.shape[:2] and states.ndim == 3:
        weights = mask.to(states).unsqueeze(2)
        return (states * weights).sum(1) / weights.sum(1).clamp_min(1)
    return states.flatten(1, -2).mean(1)


def _tokens(batches: RowBatches, row: int) -> list[str]:
    batch = batches.collated([row])
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, Tensor):
        raise ValueError(
            "`similar` is 'bm25', and rows have no `input_ids`. Expected tokens, whose words BM25 counts. Set "
            "`similar='embeddings'`."
        )
    mask = batch.get("attention_mask")
    flat = ids.flatten()
    kept = flat[mask.flatten() > 0] if isinstance(mask, Tensor) and mask.shape == ids.shape else flat
    return [str(one) for one in kept.tolist()]
