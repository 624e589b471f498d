"""The batches of training rows that a curvature is fitted to, and what it has to know of their model."""

import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_trak.curvature.fit import Stage
from hf_trak.data.rows import RowBatches
from hf_trak.featurize.estimation import FitCost, largest_share
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.featurize.featurizer import Featurizer
from hf_trak.gradient_computers import AbstractGradientComputer
from hf_trak.gradient_computers.sharded import ShardedGradientComputer
from hf_trak.modelout_functions.base import AbstractModelOutput, Batch
from hf_trak.modelout_functions.sampled import SampledLikelihood, with_rows
from hf_trak.runtime.checks import byte_size, free_bytes
from hf_trak.runtime.sharding import RowDivision, is_sharded

logger = logging.getLogger(__name__)


def warn_of_shortage(model: FeaturizedModel) -> None:
    """Log a warning if a fit will take more memory than is free, or more disk than is there, with what to do.

    Args:
        model: the model and its rows. Its weights are in memory.
    """
    found = shortages(model) if model.processes.is_main_process else []
    if not found:
        return
    share = largest_share(model.model, model.layout, model.args, model.train_size)
    logger.warning(
        "A fit of the curvature %r takes %s.%s Attribute fewer parameters (`grad_wrt`), set "
        '`curvature="diagonal"`, or divide the model over more processes.',
        model.args.curvature.fitted_kind,
        " and ".join(found),
        "" if share is None else f" {share}.",
    )


def shortages(model: FeaturizedModel) -> list[str]:
    """Say which of memory and disk a fit will take more of than is free here.

    Args:
        model: as above.
    """
    needed = FitCost.of(model.model, model.layout.slots, model.args, model.train_size)
    holders = model.processes.num_processes if is_sharded(model.model) else 1
    memory, disk = free_bytes(model.device), _free_disk(model.store.output_dir)
    taken, written = needed.memory // holders, needed.disk + needed.scratch
    found = []
    if taken > memory:
        found.append(f"about {byte_size(taken)} of memory beside the weights ({byte_size(memory)} are free)")
    if written > disk:
        found.append(f"about {byte_size(written)} of disk ({byte_size(disk)} are free)")
    return found


def _free_disk(directory: Path) -> int:
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).free


def _featurizer(model: FeaturizedModel, task: AbstractModelOutput) -> Featurizer:
    """Make what streams gradients into a fit, by the engine that `auto` chooses whichever is configured.

    Bases depend on the form in which an engine gives gradients, and the identity of a curvature names no engine.
    """
    made = model.featurizer(task)
    made.args = replace(made.args, engine="auto")
    return made


class _Forgetting:
    """Takes the gradients of a batch that is checked and nothing else, so that it is passed through the model once."""

    def __call__(self, start: int, block: Tensor) -> None:
        """Do nothing with a block."""

    def renew(self) -> None:
        """Do nothing, since nothing was kept."""


class FitBatches:
    """Batches of training rows for a fit, with the numbers of their rows where labels are drawn."""

    def __init__(
        self,
        model: FeaturizedModel,
        given: AbstractModelOutput,
        tasks: Mapping[Stage, AbstractModelOutput],
        model_id: int,
    ) -> None:
        """
        Args:
            model: the model and its rows.
            given: the task of the training rows, whose labels are those of the data.
            tasks: the tasks of the passes, which may draw labels.
            model_id: the checkpoint.
        """
        self._checked = _featurizer(model, given)
        self._featurizers = {stage: _featurizer(model, task) for stage, task in tasks.items()}
        self._batches: RowBatches = self._checked.batches(model.train_dataset)
        self._model = model
        self._model_id = model_id
        self._draws = isinstance(tasks["bases"], SampledLikelihood)
        self._prepared = False
        self._last: tuple[list[int], Batch] | None = None
        self._engine: Any = None

    def iterate(self, cuts: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], Batch]]:
        """Yield `(row numbers, batch)`."""
        if not self._prepared:
            self._prepare(max(map(len, cuts)))
        for rows, collated in self._batches.iterate(cuts):
            batch = self._checked.in_dtype_of_model(collated)
            self._last = (rows, batch)
            yield rows, with_rows(batch, rows) if self._draws else batch

    @contextmanager
    def together(self) -> Iterator[None]:
        """Return a context in which processes that hold a sharded model may stream different numbers of batches."""
        if not self._checked.sharded:
            yield
            return
        if not self._prepared:
            self._prepare(self._checked.args.batch_size)
        companion = self._gathering(self._checked.computer())
        companion.self_check = False
        with self._checked.together(companion, self._checked.train_dataset, "train"):
            yield

    def _prepare(self, batch_size: int) -> None:
        warn_of_shortage(self._model)
        for featurizer in (self._checked, *self._featurizers.values()):
            featurizer.prepare_task(self._model_id, batch_size)
        self._prepared = True

    def computer(self, stage: Stage) -> AbstractGradientComputer:
        """Make the engine of a pass. The first one is checked on the batch that was yielded last.

        The check compares gradients of given labels: rounding may change a drawn label, and then the whole gradient.
        """
        if self._engine is None:
            assert self._last is not None
            rows, batch = self._last
            checked = self._checked.computer()
            self._checked.let_collate_alone(checked, self._batches, rows, batch)
            checked.stream(batch, _Forgetting())
            self._engine = checked.engine
        computer = self._featurizers[stage].computer()
        computer.use(self._engine)
        return self._gathering(computer)

    @property
    def sharded(self) -> bool:
        """Tell whether processes hold parts of one model."""
        return self._checked.sharded

    def exchange(self, word: str) -> list[str]:
        """Tell all processes that hold parts of one model a word, and hear theirs, by rank."""
        return self._checked.lockstep.exchange(word)

    @property
    def division(self) -> RowDivision:
        """Return which processes work on the same rows."""
        return self._checked.division

    def _gathering(self, computer: Any) -> Any:
        """Let the first process of those with the same rows have whole gradients (tensor parallelism)."""
        if isinstance(computer, ShardedGradientComputer):
            computer.gathers = True
        return computer
