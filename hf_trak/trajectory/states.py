"""The weights before every step of a run: known ones, and lines between them where some are not.

A loss that the trainer computes itself gets its scale in every step here, as its `training_step` adds them up.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hf_trak.errors import IncompleteStoreError
from hf_trak.modelout_functions.trainer_loss import TrainerLossModelOutput
from hf_trak.trajectory.hyperparameters import Hyperparameters
from hf_trak.trajectory.optimizer_steps import Moments
from hf_trak.trajectory.record import RecordedStep, RunRecord, is_known

STEP_DEVIATION, HALF_STEP_DEVIATION = 0.02, 0.2
"""By how much a step may miss the next known weights; the second for training in bfloat16. Replays of the run itself
had up to 6e-3 and .11, those with other rows, losses or learning rates .06 to 2."""


@dataclass(frozen=True)
class State:
    """What a step begins with.

    Attributes:
        weights (`torch.Tensor`): θ, `(P,)`.
        moments ([`Moments`]): those of the optimizer.
    """

    weights: Tensor
    moments: Moments


class RunPath:
    """The way of a run through its weights.

    Attributes:
        steps (`list[RecordedStep]`): the steps.
        numbers ([`Hyperparameters`]): the optimizer's numbers.
        states (`list[int]`): steps after which weights are known, the start and the end among them.
        logged (`list`): mean losses of the training, with the range of steps of each.
        again (`bool`): whether steps between known weights are to be taken again, where that leads to the next ones.
        most_missed (`float`): by how much a step that is taken again may miss the weights after it, relative to it.
    """

    def __init__(
        self,
        steps: Sequence[RecordedStep],
        numbers: Hyperparameters,
        states: Collection[int],
        read: Callable[[int], Tensor],
        logged: Sequence[tuple[range, float]],
    ) -> None:
        """
        Args:
            steps: the steps.
            numbers: the optimizer's numbers.
            states: steps after which weights are known.
            read: reads these, `(P,)`.
            logged: mean losses of the training, with the range of steps of each.

        Raises:
            IncompleteStoreError: the first or the last weights are not known.
        """
        self.steps, self.numbers, self.states = list(steps), numbers, sorted(states)
        self._read, self.logged = read, list(logged)
        self._known: dict[int, Tensor] = {}
        self.most_missed = STEP_DEVIATION
        self.again = len(self.states) < len(self.steps) + 1
        if not states or self.states[0] != 0 or self.states[-1] != len(self.steps):
            raise IncompleteStoreError(
                f"The weights after the steps {self.states} are known, of a run of {len(self.steps)} steps. Expected "
                "those before the first and after the last one. Record the run with `TrakCallback(record=True)`."
            )

    @classmethod
    def of_record(cls, record: RunRecord, device: torch.device, end: int | None = None) -> "RunPath":
        """Read the path of a recorded run.

        Args:
            record: the record.
            device: where weights go.
            end: a step after which weights are known, and the path ends; `None` for the last one.

        Raises:
            StoreError: a file is missing or damaged.
        """
        steps = record.steps()[:end]
        numbers = record.numbers([one.rates for one in steps], record.group_of.to(device))
        logged = [(range(i, i + 1), one.loss) for i, one in enumerate(steps) if is_known(one.loss)]
        states = [step for step in record.states() if step <= len(steps)]
        found = cls(steps, numbers, states, lambda step: record.weights(step).to(device), logged)
        if record.description["bf16"]:
            found.most_missed = HALF_STEP_DEVIATION
        return found

    @cached_property
    def gap(self) -> int:
        """Return the longest way from one known state to the next, in steps."""
        return max(after - before for before, after in pairwise(self.states))

    def thinned(self) -> "RunPath":
        """Return the same run on lines between every second one of its known weights, first and last among them."""
        found = RunPath(self.steps, self.numbers, {*self.states[::2], self.states[-1]}, self._read, self.logged)
        found.again = False
        return found

    def known(self, step: int) -> bool:
        """Tell whether the weights after so many steps are known."""
        return step in self.states

    def deviation(self, step: int, reached: Tensor, told: Tensor) -> float:
        """Compare known weights with those that were reached from the known ones before, `(P,)`.

        Args:
            step: the step after which they are known.
            reached: the weights that were reached.
            told: the parameters to compare, `(P,)` of bool.

        Returns:
            The distance of both, beyond what rounding of the weights makes of it, relative to the way between the
            known ones; infinite for NaN.

        Raises:
            StoreError: a file is missing or damaged.
        """
        before, after = self.weights(max(one for one in self.states if one < step)), self.weights(step)
        known, eps = after.double(), torch.finfo(after.dtype).eps
        way = torch.maximum((known - before).norm(), 1e-6 * known.norm()).clamp_min(1e-300)
        missed = (reached - known)[told].norm() - eps * known.norm()
        return float((missed / way).nan_to_num(nan=torch.inf).clamp_min(0))

    def weights(self, step: int) -> Tensor:
        """Return the weights after so many steps, `(P,)`: recorded, or on the line between the nearest recorded ones.

        Raises:
            StoreError: a file is missing or damaged.
        """
        if step in self.states:
            return self._state(step)
        before = max(one for one in self.states if one < step)
        after = min(one for one in self.states if one > step)
        return torch.lerp(self._state(before), self._state(after), (step - before) / (after - before))

    def _state(self, step: int) -> Tensor:
        if step not in self._known:
            if len(self._known) > 1:
                self._known.pop(next(iter(self._known)))
            self._known[step] = self._read(step)
        return self._known[step]


def without_losses(steps: Sequence[RecordedStep]) -> list[RecordedStep]:
    """Forget what the model returned in every step, of a trainer whose loss is of its outputs for pairs of rows."""
    return [replace(step, batches=tuple(replace(one, loss=math.nan) for one in step.batches)) for step in steps]


def with_own_loss(
    steps: Sequence[RecordedStep],
    task: TrainerLossModelOutput,
    collate: Callable[[list[int]], Any],
    processes: int,
    across: bool,
) -> list[RecordedStep]:
    """Count the items of every step, and find the factors of its passes. What the model returned is no loss of theirs.

    Args:
        steps: the steps, as recorded.
        task: the loss.
        collate: makes a batch of training rows.
        processes: how many processes trained.
        across: whether they counted their items together.
    """
    found = []
    for step in steps:
        own = len(step.batches) // processes
        parts = [step.batches] if across else [step.batches[i : i + own] for i in range(0, len(step.batches), own)]
        batches = []
        for part in parts:
            items: float | None = part[0].items
            if not is_known(part[0].items):
                items = task.items([collate(list(one.rows)) for one in part])
            scale = 1.0 / len(step.batches)
            if task.is_scaled(items):
                scale = 1.0 if across else 1.0 / processes
            known = math.nan if items is None else items
            batches += [replace(one, loss=math.nan, items=known, scale=scale) for one in part]
        found.append(replace(step, batches=tuple(batches)))
    return found
