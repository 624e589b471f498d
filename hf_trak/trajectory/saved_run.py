"""A run without a record: its checkpoints, and the order of its rows from the trainer's own data loader.

Weights are known where `Trainer` saved them, before the first step and at the end. Rows come from the batch sampler of
the loader that the trainer makes, with the seed of the run and without the model. No pickle is read.
"""

import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import SequentialSampler

from hf_trak._compat import counted_items
from hf_trak.errors import HfTrakError, IncompleteStoreError
from hf_trak.gradient_computers.layout import ParameterLayout
from hf_trak.store.sealed import content_digest
from hf_trak.store.shards import checksum
from hf_trak.trajectory.dropout import dropout_of
from hf_trak.trajectory.hyperparameters import Hyperparameters, hyperparameters
from hf_trak.trajectory.record import MicroBatch, RecordedStep, trained_weights
from hf_trak.weights.checkpoints import Checkpoint, fingerprint_state_dict, loaded, read_state_dict

logger = logging.getLogger(__name__)

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")

_RECORD_IT = "Train with `TrakCallback(record=True)`, or score with `Replay(of='recipe')`."


class SavedRun:
    """What a trainer and its directory say about a run.

    Attributes:
        numbers ([`Hyperparameters`]): the optimizer's numbers.
        checkpoints (`dict[int, Checkpoint]`): weights that were saved, by the number of steps before them.
    """

    def __init__(
        self,
        trainer: Any,
        model: torch.nn.Module,
        layout: ParameterLayout,
        start: Checkpoint | None,
        collate: Callable[[list[int]], Any],
    ) -> None:
        """
        Args:
            trainer: the trainer of the run, or one with the same arguments.
            model: its model with the last weights, without wrappers.
            layout: the trained parameters.
            start: the weights before the first step; `None` looks for `checkpoint-0` in the trainer's directory, and
                for the directory that the model was loaded from.
            collate: makes a batch of training rows.

        Raises:
            HfTrakError: the order of the rows or the optimizer's numbers cannot be known.
            IncompleteStoreError: the weights before the first step are nowhere.
        """
        if trainer.args.world_size > 1:
            raise HfTrakError(
                f"The trainer has {trainer.args.world_size} processes, and the run has no record. Expected one "
                f"process, whose order of the rows is known. {_RECORD_IT}"
            )
        if dropped := dropout_of(model):
            logger.warning(
                "The model has dropout (%s), and what the training dropped is not recorded. Rows are followed without "
                "dropout, as in the mean over all that it could drop. %s",
                dropped,
                _RECORD_IT,
            )
        self.trainer, self.model, self.layout, self._collate = trainer, model, layout, collate
        self.numbers: Hyperparameters = hyperparameters(trainer, model, layout)
        self.checkpoints = self._found(start)
        self._last = trained_weights(dict(model.named_parameters()), layout)

    def _found(self, start: Checkpoint | None) -> dict[int, Checkpoint]:
        """Find the checkpoints of the run."""
        place = Path(self.trainer.args.output_dir)
        paths = place.glob("checkpoint-*") if place.is_dir() else ()
        matches = ((_CHECKPOINT.fullmatch(path.name), path) for path in sorted(paths))
        found: dict[int, Checkpoint] = {int(match[1]): str(path) for match, path in matches if match}
        saved, found = sorted(found), {step: path for step, path in found.items() if step < self.numbers.steps}
        loaded_from = getattr(self.model, "name_or_path", "")
        if start is not None:
            found[0] = start
        elif 0 not in found and loaded_from and Path(loaded_from).is_dir():
            found[0] = loaded_from
        if 0 not in found:
            weights = f"the weights after the steps {saved} of {self.numbers.steps}" if saved else "no checkpoint"
            untrained = "" if self.trainer.state.global_step else ", and this trainer has not trained"
            raise IncompleteStoreError(
                f"The run has no record, and {place} has {weights} and no `checkpoint-0`{untrained}. Expected the "
                "weights before the first step, too, or a record. Name them in `Replay(start=...)`, or train with "
                "`TrakCallback(record=True)`."
            )
        return found

    @cached_property
    def description(self) -> dict[str, Any]:
        """Describe everything that scores depend on, as plain JSON."""
        order = [[list(batch.rows) for batch in one.batches] for one in self.steps()]
        return {
            "checkpoints": [
                [step, fingerprint_state_dict(read_state_dict(one))] for step, one in sorted(self.checkpoints.items())
            ],
            "last": checksum({"weights": self._last}),
            "numbers": self.numbers.describe(),
            "order": order,
        }

    @property
    def digest(self) -> str:
        """Return a digest of [`description`]."""
        return content_digest(self.description)

    def states(self) -> list[int]:
        """List the steps after which weights are known."""
        return [*sorted(self.checkpoints), self.numbers.steps]

    def weights(self, step: int) -> Tensor:
        """Read the weights after so many steps, `(P,)`. Raises as [`~hf_trak.weights.checkpoints.loaded`]."""
        if step == self.numbers.steps:
            return self._last
        with loaded(self.model, self.checkpoints[step]):
            return trained_weights(dict(self.model.named_parameters()), self.layout)

    def steps(self) -> list[RecordedStep]:
        """Return the steps, with rows in the order that the trainer draws them.

        Raises:
            HfTrakError: it cannot be known.
        """
        return self._steps

    @cached_property
    def _steps(self) -> list[RecordedStep]:
        accumulated, found = self.trainer.args.gradient_accumulation_steps, list[RecordedStep]()
        rates = self.numbers.rates.tolist()
        for epoch in self._epochs():
            for first in range(0, len(epoch), accumulated):
                batches = epoch[first : first + accumulated]
                items = counted_items(self.trainer, [self._collate(rows) for rows in batches])
                known = (math.nan, 1.0 / len(batches)) if items is None else (items, 1.0)
                passes = tuple(MicroBatch(tuple(rows), math.nan, *known) for rows in batches)
                found.append(RecordedStep(passes, tuple(rates[len(found)]), math.nan))
                if len(found) == self.numbers.steps:
                    return found
        raise AssertionError  # epochs do not end

    def _epochs(self) -> Iterator[list[list[int]]]:
        """Draw the batches of one epoch after the other."""
        trainer = self.trainer
        seed = trainer.args.seed if trainer.args.data_seed is None else trainer.args.data_seed
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            loader = trainer.get_train_dataloader()
            sampler = getattr(loader, "batch_sampler", None)
            inner = getattr(sampler, "sampler", getattr(getattr(sampler, "batch_sampler", None), "sampler", None))
            if not isinstance(inner, SequentialSampler) and not hasattr(inner, "initial_seed"):
                raise HfTrakError(
                    f"The trainer draws its rows with {type(inner).__name__}, whose order depends on what was drawn "
                    f"before. Expected the default, whose order follows from the seed. {_RECORD_IT}"
                )
            epoch = 0
            while True:
                if inner is not None and hasattr(inner, "set_epoch"):
                    inner.set_epoch(epoch)
                assert sampler is not None
                yield [[int(row) for row in batch] for batch in sampler]
                epoch += 1

    def logged(self) -> list[tuple[range, float]]:
        """Return the mean losses that the trainer logged, with the range of steps of each."""
        last = Path(self.trainer.args.output_dir) / f"checkpoint-{self.numbers.steps}"
        return logged_losses(self.trainer, [*(str(one) for _, one in sorted(self.checkpoints.items())), str(last)])


def logged_losses(trainer: Any, checkpoints: Sequence[str] = ()) -> list[tuple[range, float]]:
    """Return the mean losses that a trainer logged, with the range of steps of each.

    Args:
        trainer: the trainer.
        checkpoints: directories that it saved. The last one has the log of a trainer that has not trained itself.
    """
    history = trainer.state.log_history
    if not history:
        paths = [Path(one) / "trainer_state.json" for one in checkpoints]
        states = [json.loads(path.read_text()) for path in paths if path.is_file()]
        history = states[-1]["log_history"] if states else []
    found, before = [], 0
    for entry in history:
        if "loss" in entry and entry["step"] > before:
            found.append((range(before, entry["step"]), float(entry["loss"])))
            before = entry["step"]
    return found
