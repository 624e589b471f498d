"""Steps of a run whose loss the trainer computes itself, as its `training_step` adds them up."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hf_trak.modelout_functions.trainer_loss import TrainerLossModelOutput
from hf_trak.trajectory.record import RecordedStep, is_known


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
