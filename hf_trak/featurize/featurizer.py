"""From rows to features on disk, for one set of weights.

For every shard that is missing: collate a batch of its rows, stream the per-sample gradients of the batch into the
projection, and write the shard when its last batch is projected. Shards are divided among processes; a shard has the
same bits whichever process computes it.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache

from hf_trak.curvature.maps import GradientMap
from hf_trak.errors import ConfigMismatchError, GradientEngineError, IncompleteStoreError, StoreError
from hf_trak.featurize.row_features import LateChecks, RowFeatures
from hf_trak.gradient_computers import AbstractGradientComputer, AutoGradientComputer
from hf_trak.gradient_computers.base import is_out_of_memory
from hf_trak.gradient_computers.sharded import ShardedGradientComputer
from hf_trak.modelout_functions.base import Side
from hf_trak.runtime.checks import is_int
from hf_trak.runtime.processes import share_of
from hf_trak.runtime.progress import RowProgress, log_on_interrupt
from hf_trak.store.sealed import read_sealed, write_sealed
from hf_trak.store.shard_set import ShardSet

logger = logging.getLogger(__name__)


FILE_NAME = "batch_size.json"

_FACTOR = 0.9


class BatchSizeFinder:
    """Call a function of the batch size, again with a smaller one whenever it runs out of memory.

    The size is multiplied by 0.9 after each failure, as `accelerate.utils.find_executable_batch_size` does. The size
    found is kept in `<output_dir>/batch_size.json`, where later calls, checkpoints, processes and runs begin: a run
    that is interrupted afterwards and resumed cuts its batches as it would have done without the interruption.
    Shards are computed with one batch size each; those that were finished before the first failure stay as they
    are, since batches change features by rounding only. To search again, delete the file.
    """

    def __init__(self, batch_size: int, output_dir: Path) -> None:
        """
        Args:
            batch_size: where the search begins unless a smaller size has been found before.
            output_dir: the directory of the feature store.
        """
        self.path = output_dir / FILE_NAME
        self.batch_size = min(batch_size, self._recorded() or batch_size)

    def run(self, function: Callable[[int], None]) -> None:
        """Call `function(batch_size)` until it does not run out of memory; it is to skip what it has done already.

        Raises:
            The out-of-memory error itself, if one row is too many.
        """
        while True:
            try:
                return function(self.batch_size)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if self.batch_size == 1:
                    error.add_note(
                        "Not even one row fits into memory (`per_device_batch_size='auto'`). Attribute fewer "
                        "parameters (`grad_wrt`), shorten the rows, or use a device with more memory."
                    )
                    raise
            # Only here, when the error and the frames that it refers to are gone, can their memory be given back.
            clear_device_cache(garbage_collection=True)
            smaller = max(1, int(self.batch_size * _FACTOR))
            logger.warning("Batches of %d rows do not fit into memory; trying %d.", self.batch_size, smaller)
            self.batch_size = min(smaller, self._recorded() or smaller)
            write_sealed(self.path, {"batch_size": self.batch_size})

    def _recorded(self) -> int | None:
        try:
            found = read_sealed(self.path, "Delete this file.").get("batch_size")
        except FileNotFoundError:
            return None
        if not is_int(found, 1):
            raise StoreError(f"{self.path} says {found!r}. Expected a batch size of at least 1. Delete this file.")
        return found


_PATIENCE_SECONDS = 60.0


_COMPARED_ROWS = 2

_FEATURE_TOLERANCE = {torch.float32: 1e-2, torch.float64: 1e-2}

_HALF_TOLERANCE = 0.1

"""Change of a row of features, relative to its norm, that another device or batch explains: TF32 rounds products to
10 bits, and half precision rounds at every layer. What changes a gradient changes it by more, or hardly matters."""


_LARGEST_STEPS = {8: 0.08, 4: 0.34, 2: 1.0, 1: 2.0}

"""Distance of neighbouring levels in standard deviations; for 8 bits, of rows whose largest entry is ten of them."""


@dataclass(frozen=True)
class StoredRows:
    """Features that are in the store already, and the rows they were computed from.

    Attributes:
        shards: the feature matrix.
        index: a shard that exists.
        dataset: the rows of the matrix.
        side: training rows or targets.
    """

    shards: ShardSet
    index: int
    dataset: Any
    side: Side

    @classmethod
    def find(cls, shards: ShardSet, dataset: Any, side: Side) -> "StoredRows | None":
        """Return the first shard that exists, or `None` if there is none or its rows are not at hand."""
        if getattr(dataset, "absent", False):
            return None
        index = next((index for index in range(len(shards)) if shards.exists(index)), None)
        return None if index is None else cls(shards, index, dataset, side)


class Featurizer(RowFeatures):
    """Fill the missing shards of a feature matrix with projected per-sample gradients of a model as it is now."""

    def fill(
        self,
        shards: ShardSet,
        dataset: Any,
        model_id: int,
        side: Side,
        description: str,
        part: tuple[int, int] = (0, 1),
        stored: StoredRows | None = None,
    ) -> None:
        """Compute the missing shards that fall to this process, and wait for those of the others.

        Args:
            shards: the feature matrix; row i belongs to `dataset[i]`.
            dataset: the rows.
            model_id: the checkpoint, which has a random matrix of its own.
            side: whether rows are training examples or targets.
            description: for the progress bar and for errors.
            part: `(index, count)`: of all shards only part `index` of `count`, which processes of this run divide.
            stored: features under the same checkpoint that are there already. Some rows of them are computed again
                before the first shard is written, so that a change of anything that the store cannot compare
                (versions of packages, code of the model) is noticed.

        Raises:
            ConfigMismatchError: rows of `stored` have other features now.
            NonFiniteError: a gradient is NaN or infinite; names the row.
            IncompleteStoreError: a shard has vanished.
            PeerProcessError: another process failed or died.
        """
        wanted = share_of(len(shards), *part)
        todo = self.processes.broadcast_from_main(lambda: [index for index in wanted if not shards.is_written(index)])
        mine = [todo[i] for i in self.division.share(len(todo))]
        if self.sharded and todo:
            # One process writes what the task keeps in the store, which all compute with the sharded model.
            self.prepare_task(model_id, self.args.batch_size)
            self.processes.wait_for_everyone()

        def fill(batch_size: int, computer: AutoGradientComputer | ShardedGradientComputer | None = None) -> None:
            left = mine if self.sharded else [index for index in mine if not shards.is_written(index)]
            self._fill(left, shards, dataset, model_id, side, description, batch_size, stored, computer)

        with self.processes.all_or_none():
            if mine or (self.sharded and todo):
                with log_on_interrupt(lambda: _progress(shards, wanted, description)):
                    self._fill_what_fits(fill, dataset, side)
        self.processes.broadcast_from_main(lambda: self._check_filled(shards, wanted, description))

    def _check_filled(self, shards: ShardSet, wanted: range, description: str) -> None:
        # What another node has just written may take a network file system some seconds to show.
        patience = _PATIENCE_SECONDS if self.processes.num_processes > 1 else 0.0
        deadline = time.monotonic() + patience
        while left := [index for index in wanted if not shards.is_written(index)]:
            if time.monotonic() >= deadline:
                raise IncompleteStoreError(
                    f"{len(left)} of {len(wanted)} shards of {description} are missing after every process has "
                    f"finished its part (first: {shards.path(left[0])}). Expected all, in a directory that all "
                    "processes share. Run the same command again."
                )
            time.sleep(0.5)

    def _fill_what_fits(self, fill: Callable[..., None], dataset: Any, side: Side) -> None:
        """Fill shards with batches of the size that is set or found.

        With a model that is divided over processes, there are as many passes in each as in the others.
        """
        auto = self.args.per_device_batch_size == "auto"
        if self.sharded:
            if auto:
                raise ValueError(
                    "`per_device_batch_size` is 'auto', for a model that is divided over processes. Expected a number "
                    "of rows, since memory may run out in one process while the others wait for it. Set one."
                )
            computer = self.computer()
            with self.together(computer, dataset, side):
                fill(self.args.batch_size, computer)
        elif auto:
            BatchSizeFinder(self.args.batch_size, self.store.output_dir).run(fill)
        else:
            fill(self.args.batch_size)

    def together(self, computer: AbstractGradientComputer, dataset: Any, side: Side) -> AbstractContextManager[None]:
        """Return a context in which processes that hold a sharded model may have different numbers of batches.

        Args:
            computer: the engine.
            dataset: rows. A process without a batch takes one of them, to make the passes of the others.
            side: their side.
        """
        if not isinstance(computer, ShardedGradientComputer):
            return nullcontext()

        def batch() -> Any:
            return self.in_dtype_of_model(self.batches(dataset).alone(0))

        def accompany(words: list[str]) -> None:
            computer.accompany(words, batch, side)
            if isinstance(self.projector, GradientMap):
                self.projector.accompany()

        return self.lockstep.region(accompany)

    def _fill(
        self,
        indices: Sequence[int],
        shards: ShardSet,
        dataset: Any,
        model_id: int,
        side: Side,
        description: str,
        batch_size: int,
        stored: StoredRows | None,
        computer: AutoGradientComputer | ShardedGradientComputer | None = None,
    ) -> None:
        """Compute shards one after the other, with batches of one size."""
        if computer is None:
            computer = self.computer()
            self.prepare_task(model_id, batch_size)
        batches = self.batches(dataset, side)
        ranges = [shards.plan.rows(index) for index in indices]
        # Batches never cross a shard boundary, so a shard is the same whichever others are computed in this run.
        cuts = [cut for rows in ranges for cut in batches.cuts(rows, batch_size)]
        stream = batches.iterate(cuts, batches.draws)
        total, written = sum(map(len, ranges)), list[Path]()
        late = LateChecks(total)
        with RowProgress.over(self.processes, total, description) as progress:
            for index, shard_rows in zip(indices, ranges, strict=True):
                # Project the shard batch by batch.
                grads = torch.empty(len(shard_rows), self.projector.proj_dim)
                out_to_loss = torch.empty(len(shard_rows))
                filled = 0
                while filled < len(shard_rows):
                    try:
                        rows, features, q = self._next(stream, batches, computer, model_id, side, late)
                    except GradientEngineError as error:
                        if not late.rows:
                            raise
                        for path in written:
                            path.unlink(missing_ok=True)
                        raise GradientEngineError(
                            f"The {side} rows {late.rows[0]} to {late.rows[-1]} fail a check that the first batch "
                            f"passed: {error} What this process had written of {description} is removed. Delete "
                            f"{shards.directory} if other runs or processes have written there."
                        ) from error
                    places = torch.tensor(rows) - shard_rows.start
                    grads[places], out_to_loss[places] = features, q
                    filled += len(rows)
                    self.batch_done(len(rows))
                    progress.update(len(rows))
                # Before the first shard is written, features that are stored already are compared with those that the
                # same code gives now. The engine has been chosen and checked on the batches above.
                if stored is not None:
                    self._compare(stored, computer, model_id)
                    stored = None
                # A second run on the same store may have been faster.
                if self.division.is_leader and not shards.is_written(index):
                    written.append(shards.write(index, grads, out_to_loss))

    def check(self, stored: Sequence[StoredRows], model_id: int) -> None:
        """Compute some rows of shards again, and compare them with the stored features.

        Args:
            stored: for each shard to check, where it is and which rows it has.
            model_id: the checkpoint.

        Raises:
            ConfigMismatchError: rows have other features now.
        """
        self.prepare_task(model_id, self.args.batch_size)
        computer = self.computer()
        for one in stored:
            self._compare(one, computer, model_id)

    def _compare(
        self, stored: StoredRows, computer: AutoGradientComputer | ShardedGradientComputer, model_id: int
    ) -> None:
        """Compare the first rows of one shard with an engine that has been chosen, see [`~Featurizer.check`]."""
        shard = stored.shards.read(stored.index)
        rows = range(shard.start, min(shard.stop, shard.start + _COMPARED_ROWS))
        checking = computer.self_check
        computer.self_check = computer.engine is None
        try:
            # Each row is computed alone, so that rows of different sizes need not fit into one batch.
            batches = self.batches(stored.dataset, stored.side)
            stream = batches.iterate([[row] for row in rows], batches.draws)
            for row in rows:
                _, found, _ = self._next(stream, batches, computer, model_id, stored.side)
                place = row - shard.start
                saved = shard.rows(place, place + 1).grads[0].float()
                change = float((stored.shards.kept(found)[0] - saved).norm() / saved.norm().clamp_min(1e-30))
                half = bool(getattr(computer, "half_precision", None))
                if not change <= self._tolerance(stored.shards, half):
                    raise ConfigMismatchError(
                        f"The features of {stored.side} row {row} computed now differ by {change:.1%} of their norm "
                        f"from those in {stored.shards.path(stored.index)}, which rounding does not explain. Expected "
                        "the same model, task and rows: something that cannot be compared has changed, such as the "
                        "code of the model or versions of packages. Restore it, or use another output directory."
                    )
        finally:
            computer.self_check = checking

    def _tolerance(self, shards: ShardSet, seen: bool) -> float:
        """Return the change of a stored row, relative to its norm, that rounding explains.

        A change by e before rows are encoded moves entries by about e standard deviations. A share of them,
        e·√(2/π) / step, falls on another level, which is a change of one step each: √(step·e·√(2/π)) together, with
        steps in standard deviations of the decoded row. Twice that allows for few columns.

        Args:
            shards: the stored features.
            seen: half precision was seen within `forward` (autocast).
        """
        kinds = {value.dtype for value in self.model.parameters() if value.is_floating_point()}
        half = seen or torch.is_autocast_enabled(self.device.type) or not kinds <= set(_FEATURE_TOLERANCE)
        change = _HALF_TOLERANCE if half else _FEATURE_TOLERANCE[torch.float32]
        if shards.code_format is None:
            return change + torch.finfo(shards.dtype).eps
        step = _LARGEST_STEPS[shards.code_format.bits]
        return change + 2 * math.sqrt(step * change * math.sqrt(2 / math.pi))


def _progress(shards: ShardSet, wanted: range, description: str) -> str:
    done = sum(shards.path(index).exists() for index in wanted)
    return (
        f"{done} of {len(wanted)} shards of {description} are complete in {shards.directory}. Run the same command "
        "again to compute the others, with any number of processes."
    )
