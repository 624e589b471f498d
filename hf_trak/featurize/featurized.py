"""`FeaturizedModel`: a model, its training rows, and the features of these rows in a store."""

import copy
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from hf_trak.config import TrakConfig, checked_args
from hf_trak.curvature.maps import GradientMap
from hf_trak.data.batch_limits import BatchLimits
from hf_trak.data.columns import require_class_numbers
from hf_trak.data.drawn_rows import RowDraws
from hf_trak.data.images import ImageTokens
from hf_trak.data.rows import (
    Collator,
    RowBatches,
    checked_collator,
    default_collator,
    forward_columns,
    row_count,
    rows_of_loader,
)
from hf_trak.engines.engine import Engine
from hf_trak.errors import CheckpointMismatchError, ConfigMismatchError, HfTrakError, IncompleteStoreError
from hf_trak.featurize.definition import (
    COMPARISONS,
    Checkpoints,
    check_part,
    collation_of_rows,
    feature_settings,
    mixed_precision,
    new_checkpoints,
    sources_of,
)
from hf_trak.featurize.estimation import Estimate, estimate_sizes, measured_batches
from hf_trak.featurize.featurizer import BatchSizeFinder, Featurizer, StoredRows
from hf_trak.featurize.question import Question, targets_name
from hf_trak.gradient_computers.layout import ParameterLayout
from hf_trak.identity.model_identity import model_identity
from hf_trak.identity.row_digest import fingerprint_dataset
from hf_trak.methods import Method
from hf_trak.modelout_functions import AbstractModelOutput, get_task, infer_task
from hf_trak.modelout_functions.base import Side
from hf_trak.modelout_functions.function import task_identity
from hf_trak.projectors import BlockProjector, make_projector
from hf_trak.runtime.lockstep import Lockstep
from hf_trak.runtime.processes import Processes
from hf_trak.runtime.progress import Pace, say
from hf_trak.runtime.sharding import RowDivision, is_sharded
from hf_trak.runtime.temporary import temporary_name
from hf_trak.scores.groups import GroupBy, target_features, target_groups
from hf_trak.scores.scorer import PlannedScores, Scorer
from hf_trak.scores.shortlist import PreconditionedTargets
from hf_trak.store.atomic import remove_stale, safe_name
from hf_trak.store.shard_set import ShardSet
from hf_trak.store.store import FeatureStore
from hf_trak.trajectory.summary import RunSummary
from hf_trak.weights.adapters import check_placement, without_wrappers
from hf_trak.weights.checkpoints import Checkpoint, describe, loaded
from hf_trak.weights.sharded import check_plan, classes_before_fsdp

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Revision:
    """A training dataset that came out of another one by leaving out or adding rows.

    Attributes:
        original: the featurized model of the dataset before.
        change: the entries in which the configuration of the revised store differs from the original's.
    """

    original: "FeaturizedModel"
    change: Mapping[str, Any]


class FeaturizedModel:
    """A model, its training rows, and the features of these rows in a store.

    [`TrakAttributor`] has one as `features`, and adds the questions that users ask. This class computes the features
    and plans scores; reports, published indexes and the evaluation build on it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        args: TrakConfig | None = None,
        train_dataset: Any = None,
        data_collator: Collator | None = None,
        processing_class: Any = None,
        task: str | AbstractModelOutput | Callable[..., Tensor] | None = None,
        *,
        dataloader: DataLoader[Any] | None = None,
        num_workers: int | None = None,
        store: FeatureStore | None = None,
        sources: Mapping[int, Checkpoint | None] | None = None,
        recorded_rows: Mapping[str, Any] | None = None,
        revision: Revision | None = None,
        trainer: Any = None,
    ) -> None:
        """
        Args:
            model (`torch.nn.Module`):
                The trained model, as `Trainer` takes it. Every call leaves it as it was. `torch.compile` and data
                parallelism are taken off.
            args (`TrakConfig`, *optional*):
                The configuration. The default configuration is used if it is left out.
            train_dataset (`Dataset`):
                The training rows, by index. Indices in results count its rows from 0.
            data_collator (`Callable`, *optional*):
                Turns a list of rows into a batch. The default is the one that `Trainer` would choose.
            processing_class (`PreTrainedTokenizerBase` or another processor, *optional*):
                Tokenizer, image processor, feature extractor or processor, for that choice.
            task (`str`, `AbstractModelOutput` or `Callable`, *optional*):
                The model output function: a name, an `AbstractModelOutput`, or a function
                `output_fn(model_output, batch) -> (B,)`. By default it follows from the class of the model.
            dataloader (`torch.utils.data.DataLoader`, *optional*):
                The loader of a training loop, whose rows and `collate_fn` are taken in place of `train_dataset` and
                `data_collator`.
            num_workers (`int`, *optional*):
                Number of processes that load rows. By default as many as `dataloader` has, or 0 without one.
            store (`FeatureStore`, *optional*):
                An open store to use instead of the one in `args.output_dir`, such as a published index.
            sources (`dict`, *optional*):
                Weights of featurized checkpoints, by model id. `None` stands for the model's own weights.
            recorded_rows (`dict`, *optional*):
                What an index records of its training rows, where the rows are not at hand.
            revision (`Revision`, *optional*):
                What [`~hf_trak.featurize.revising.revise`] changed, for a revised training dataset.
            trainer (`transformers.Trainer`, *optional*):
                The trainer of the run that made the model, which replays ask for the numbers of its steps.

        Raises:
            ValueError: unknown task or parameter name, empty dataset, a model whose task cannot be inferred, or one
                whose parameters are sharded over processes or offloaded.
            TypeError: `model` is no module, `args` no `TrakConfig`, or `train_dataset` or the dataset of `dataloader`
                has no rows by index.
        """
        self.args = checked_args(args)
        model = without_wrappers(model)
        self.processes = Processes(self.args.use_cpu)
        check_placement(model)
        self._lockstep: Lockstep | None = None
        self.model = model
        with classes_before_fsdp(model):
            self.task = get_task(infer_task(model) if task is None else task)
        self.task.use_seed(self.args.seed)
        self.row_draws = RowDraws(self.args.seed, self.args.num_draws)
        self._warned: set[str] = set()
        self.batch_done: Callable[[int], None] = lambda rows: None
        """Called with the number of rows after every batch of features."""
        self.num_workers = getattr(dataloader, "num_workers", 0) if num_workers is None else num_workers
        if dataloader is not None:
            train_dataset, data_collator = rows_of_loader(dataloader, train_dataset, data_collator)
        self.train_dataset = train_dataset
        self.processing_class = processing_class
        self.train_size = row_count(train_dataset, "train_dataset")
        self.data_collator = checked_collator(data_collator or default_collator(train_dataset, processing_class))
        self.layout = ParameterLayout.from_model(model, self.args.grad_wrt)
        self.sources = dict(sources or {})
        self.recorded_rows = None if recorded_rows is None else dict(recorded_rows)
        self.revision = revision
        self.trainer = trainer
        self.scored_by: Engine | None = None
        """Finds the best rows of the index in the place of this process, see `hf_trak.engines.engine`."""
        self._train_fingerprint: str | None = None
        self._rate: float | None = None
        self._store = store
        if getattr(model, "hf_device_map", None) is None and not is_sharded(model):
            model.to(self.device)

    def another(self, args: TrakConfig, **changes: Any) -> Self:
        """Build a model with these weights, task and rows, and with another configuration.

        Args:
            args: the configuration.
            changes: other arguments of the constructor, by name.
        """
        own = {
            "train_dataset": self.train_dataset,
            "data_collator": self.data_collator,
            "processing_class": self.processing_class,
            "task": self.task,
            "sources": self.sources,
        }
        return type(self)(self.model, args, **own | changes)

    def _check_division(self) -> None:
        """Check, with all processes, how they divide the parameters, and find those that have the same rows."""
        if self._lockstep is None:
            check_plan(self.model, self.processes)
            self._lockstep = Lockstep(self.processes, RowDivision.of(self.model, self.processes))

    @property
    def device(self) -> torch.device:
        """Return the device of batches: that of this process, or that of the first layer of a dispatched model."""
        if getattr(self.model, "hf_device_map", None) is not None:
            return next(self.model.parameters()).device
        return self.processes.device

    @property
    def proj_dim(self) -> int:
        """Return k, the number of features per example."""
        return self.layout.total if self.args.projection == "none" else self.args.width

    @property
    def store(self) -> FeatureStore:
        """Return the feature store, created on first use. Raises `ConfigMismatchError` if it was made otherwise."""
        if self._store is None:
            self._store = FeatureStore.open(self.args.output_dir, self.store_config(), COMPARISONS)
        return self._store

    def store_config(self) -> dict[str, Any]:
        """Describe everything that defines the features: the content of the store's `trak_config.json`."""
        if self.revision is not None:
            return {**self.revision.original.store_config(), **self.revision.change}
        algorithm = self.projector().algorithm
        with classes_before_fsdp(self.model):
            return {
                **feature_settings(self.model, self.args, self.layout, algorithm, self.proj_dim, self.train_size),
                **self._row_identity(),
                "task": task_identity(self.task, self.model),
                "mixed_precision": mixed_precision(self.model),
                "model": model_identity(self.model),
            }

    def _row_identity(self) -> dict[str, Any]:
        """Describe the training rows, and what becomes of them on the way to the model."""
        if self.recorded_rows is not None:  # an index without its rows
            return self.recorded_rows
        if self._train_fingerprint is None:
            self._train_fingerprint = fingerprint_dataset(self.train_dataset)
        return {"train_fingerprint": self._train_fingerprint, "collation": self.collation(self.train_dataset)}

    def collation(self, dataset: Any, side: Side = "train") -> dict[str, Any]:
        """Describe what dataset, transforms, tokenizer and collator make of a few rows.

        Rows that come at random are described in their first draw.

        Args:
            dataset: the rows.
            side: whether they are training examples or targets, whose draws are independent.

        Raises:
            ValueError: it is not the same each time, even with the same seeds.
        """
        return collation_of_rows(self.row_batches(dataset, side))

    def feature_map(self, model_id: int) -> BlockProjector | GradientMap:
        """Return the map from gradients to features under the weights that the model has now.

        Args:
            model_id: the checkpoint that they are.
        """
        return self.projector()

    def projector(self) -> BlockProjector:
        """Make the random projection of the features."""
        return make_projector(
            self.args.projection,
            grad_dim=self.layout.total,
            proj_dim=self.proj_dim,
            seed=self.args.seed,
            device=self.device,
            nonzeros=self.args.nonzeros,
            shapes=[slot.shape for slot in self.layout.slots],
            factored_dim=self.args.factored_dim,
        )

    def require_rows(self, purpose: str) -> None:
        """Check that the training rows are at hand.

        Args:
            purpose: what they are needed for, and why, for the error message.

        Raises:
            IncompleteStoreError: the index was loaded without them.
        """
        if getattr(self.train_dataset, "absent", False):
            raise IncompleteStoreError(
                f"The training rows of the index are not at hand. Expected them for {purpose}. Pass `train_dataset=` "
                "to `from_pretrained`."
            )

    def warn_once(self, text: str) -> None:
        """Log a warning, the first time that its text is given."""
        if self.processes.is_main_process and text not in self._warned:
            self._warned.add(text)
            logger.warning("%s", text)

    def require_one_draw(self, dataset: Any, reason: str) -> None:
        """Refuse several draws of random rows for what is no mean over draws.

        Args:
            dataset: the rows.
            reason: why, for the error message.

        Raises:
            HfTrakError: the rows come at random, and are drawn more than once.
        """
        if self.row_draws.count > 1 and self.row_batches(dataset, "train").drawn:
            raise HfTrakError(
                f"`num_draws` is {self.row_draws.count}, and rows come at random. {reason} Use another output "
                "directory with `num_draws=1`."
            )

    def row_batches(self, dataset: Any, side: Side, task: AbstractModelOutput | None = None) -> RowBatches:
        """Collate rows of a dataset, on one side, as the model and a task, by default its own, get them."""
        task = self.task if task is None else task
        columns = [*forward_columns(self.model, self.args.label_names), *task.batch_columns]
        return RowBatches(
            dataset,
            task.collator(self.data_collator),
            columns=columns if self.args.remove_unused_columns else None,
            device=self.device,
            num_workers=self.num_workers,
            pin_memory=self.device.type == "cuda",
            limits=BatchLimits.of(self.model),
            draws=self.row_draws,
            side=side,
            images=ImageTokens.of(self.model),
        )

    def featurizer(
        self, task: AbstractModelOutput | None = None, projector: BlockProjector | GradientMap | None = None
    ) -> Featurizer:
        """Build what computes features of the model as it is now.

        Args:
            task: the model output function; `None` takes that of the attribution.
            projector: the map of the gradients; `None` takes the random projection.
        """
        args = self.args if self.args.grad_wrt is not None else replace(self.args, grad_wrt=self.layout.names)
        return Featurizer(
            self.model,
            self.task if task is None else task,
            self.projector() if projector is None else projector,
            self.row_batches,
            self.train_dataset,
            args,
            self.processes,
            self.device,
            self.store,
            self._lockstep or Lockstep(self.processes),
            self.batch_done,
        )

    def estimate(
        self,
        eval_dataset: Any = 0,
        checkpoints: int = 1,
        measure: bool = False,
        method: Method = "auto",
        run: RunSummary | None = None,
    ) -> Estimate:
        """Tell what it takes to featurize and score, see [`~hf_trak.TrakAttributor.estimate`].

        Args:
            eval_dataset, checkpoints, measure, method: as there.
            run: what is known of a run that is to be replayed.

        Raises:
            ValueError: as there.
        """
        rows_per_second = self.measured_rate() if measure else None
        with classes_before_fsdp(self.model):
            return estimate_sizes(
                self.model,
                self.train_dataset,
                self.args,
                checkpoints=checkpoints,
                eval_dataset=eval_dataset,
                processes=self.processes.num_processes,
                rows_per_second=rows_per_second,
                method=method,
                run=run,
            )

    @property
    def batch_size(self) -> int:
        """Return the rows per batch; with `"auto"`, those that have been found to fit into memory."""
        size = self.args.batch_size
        if self.args.per_device_batch_size != "auto":
            return size
        return BatchSizeFinder(size, self.store.output_dir).batch_size

    def rate(self) -> float | None:
        """Return the training rows that one process featurizes per second.

        It is that of the last call of `featurize`, or measured where that had nothing to do. All processes call this
        together. It is `None` with fewer than 3 rows.
        """
        if self.train_size < 3:
            return None
        known = min(filter(None, self.processes.gather(self._rate)), default=None)
        if known is None and self.processes.is_main_process:
            size, batches = measured_batches(self.train_size, self.batch_size)
            say(logger, f"{size * batches} rows are featurized first, to measure what methods cost.")
        self._rate = self.measured_rate() if known is None else known
        return self._rate

    def measured_rate(self) -> float:
        """Featurize a few batches in a temporary directory, and return the training rows per second of one process.

        All processes call this together. The directory lies where all find it, and one process fills it.

        Raises:
            ValueError: there are fewer than 3 training rows.
        """
        size, batches = measured_batches(len(self.train_dataset), self.batch_size)
        rows = list(range(batches * size))
        dataset = self.train_dataset
        part = dataset.select(rows) if hasattr(dataset, "select") else Subset(dataset, rows)

        def made() -> str:
            if self.processes.num_processes == 1:
                return tempfile.mkdtemp(prefix="hf_trak-estimate-")
            place = Path(self.args.output_dir) / temporary_name()
            place.mkdir(parents=True)
            return str(place)

        directory = self.processes.broadcast_from_main(made)
        options = replace(
            self.args,
            output_dir=str(Path(directory) / "store"),
            per_device_batch_size=size,
            shard_size=len(rows),
            curvature=replace(self.args.curvature, whitened=False),
        )
        try:
            measured = FeaturizedModel(
                self.model, options, part, self.data_collator, self.processing_class, self.task
            ).featurize()
            self.processes.wait_for_everyone()
        finally:
            if self.processes.is_main_process:
                shutil.rmtree(directory, ignore_errors=True)
        return float(next(filter(None, self.processes.gather(measured._rate))))

    def featurize(self, checkpoints: Checkpoints = None, part: tuple[int, int] = (0, 1)) -> Self:
        """Compute the features of the training rows, see [`~hf_trak.TrakAttributor.featurize`].

        Args:
            checkpoints, part: as there.

        Raises:
            As there.
        """
        check_part(part)
        sources = new_checkpoints(checkpoints)
        if self._store is not None and self.recorded_rows is None and not hasattr(self.train_dataset, "fingerprint"):
            self._train_fingerprint = None  # rows of a list, say, may have changed since the last call
        self.processes.broadcast_from_main(self.prepare_store)
        if self.processes.is_main_process:
            logger.info("To featurize: %s", self.estimate(checkpoints=len(sources)))
        for model_id, source in sources.items():
            with self.weights(model_id, source, register=True):
                description = f"train rows, checkpoint {model_id}"
                shards = self.store.train(model_id)
                stored = StoredRows.find(shards, self.train_dataset, "train")
                featurizer, pace = self.featurizer(projector=self.feature_map(model_id)), Pace(self.batch_done)
                featurizer.batch_done = pace.count
                featurizer.fill(shards, self.train_dataset, model_id, "train", description, part, stored)
                self._rate = pace.rate or self._rate
            self.sources[model_id] = source
            if left := len(self.processes.broadcast_from_main(shards.unwritten)):
                logger.info("%s: %d shards of other parts are not there yet.", description, left)
            else:
                self.scorer.prepare(model_id)
                self.check_features(model_id)
        return self

    def check_features(self, model_id: int) -> float:
        """Look at the features of a checkpoint once they are complete. Plain ones are as they should be.

        Args:
            model_id: the checkpoint.

        Returns:
            The rank correlation of their inner products with those that they stand for, on a sample.
        """
        return 1.0

    def prepare_store(self) -> None:
        """Compare model, task, rows and settings, as they are now, with what the store was made with.

        What processes that died left in the store is removed.

        Raises:
            ConfigMismatchError: something has changed, in this process or since an earlier one.
            ValueError: rows come out at random.
        """
        self._require_layout()
        if self._store is not None:
            self._store.require_same(self.store_config(), COMPARISONS)  # as opening one does
        for one in remove_stale(self.store.output_dir):
            logger.info("Removed %s, left behind by a process that died.", one.path)

    def _require_layout(self) -> None:
        """Refuse parameters that are trained now and were not when the gradients were laid out, as of another adapter.

        Frozen ones stay attributed: a model is often frozen once it is trained.
        """
        known = {*self.layout.names}
        odd = [name for name, one in self.model.named_parameters() if one.requires_grad and name not in known]
        if odd and self.args.grad_wrt is None:
            raise ConfigMismatchError(
                f"{odd[0]!r} is trained now, and was frozen when the attributor was made, beside {len(odd) - 1} other "
                "parameters. Expected the same ones. Make a new attributor, or name parameters in `grad_wrt`."
            )

    @contextmanager
    def weights(self, model_id: int, source: Checkpoint | None, register: bool = False) -> Iterator[None]:
        """Load the weights of a checkpoint into the model for a while. They must be those that `model_id` stands for.

        Args:
            model_id: the checkpoint.
            source: its weights; `None` takes the model's current ones.
            register: tie the id to these weights if it is new.

        Raises:
            CheckpointMismatchError: the id stands for other weights.
        """
        self._check_division()
        dtype = None if self.args.model_dtype is None else getattr(torch, self.args.model_dtype)
        with loaded(self.model, source, dtype) as fingerprint:
            if register:
                self.store.register_checkpoint(model_id, fingerprint, describe(source, self.model))
            elif (expected := self.store.checkpoint_info(model_id)["fingerprint"]) != fingerprint:
                raise CheckpointMismatchError(
                    f"The weights given for model_id {model_id} ({describe(source, self.model)}) have the fingerprint "
                    f"{fingerprint}; its features were made with {expected}. Expected the same weights: pass that "
                    "checkpoint in `checkpoints=`, or featurize these weights under another model_id, "
                    "such as `featurize(checkpoints={1: weights})`."
                )
            yield

    @contextmanager
    def last_weights(self, checkpoints: Checkpoints = None) -> Iterator[None]:
        """Load the last of the checkpoints that are asked for a while, whose predictions are those to explain.

        A model without features of its own is left with the weights that it has.

        Args:
            checkpoints: see [`~hf_trak.attributor.TrakAttributor.attribute`].
        """
        ids, sources = self.chosen(checkpoints, featurized=False)
        if ids[-1] not in self.store.model_ids:
            yield
            return
        with self.weights(ids[-1], self.source_of(ids[-1], sources)):
            yield

    def as_trained(self, name: str) -> Self:
        """Return the model with a store of its own, in which checkpoint 0 is the weights that it has now.

        Ids of featurized checkpoints, or of those that are featurized later, are left alone.

        Args:
            name: directory of such stores below the output directory. Other weights have another store in it.

        Raises:
            All that opening the store raises.
        """
        self._check_division()
        with loaded(self.model, None) as fingerprint:
            found = copy.copy(self)
            found.sources = {}
            place, config = Path(self.args.output_dir) / name / fingerprint[:12], self.store_config()
        with self.processes.all_or_none():  # the main process makes it
            self.processes.broadcast_from_main(lambda: str(FeatureStore.open(place, config, COMPARISONS).output_dir))
            found._store = FeatureStore.open(place, config, COMPARISONS)
        return found

    @property
    def scorer(self) -> Scorer:
        """Return the scorer: Gram matrices, ridge systems and score blocks of the store."""
        return self.scorer_with(None)

    def scorer_with(self, lambda_relative: float | None) -> Scorer:
        """Return the scorer with a ridge; `None` for that of the configuration."""
        args = self.args
        ridge = args.lambda_relative if lambda_relative is None else lambda_relative
        return Scorer(self.store, self.processes, self.device, ridge, args.solver_kind, args.solver_rank)

    def chosen(
        self, checkpoints: Checkpoints = None, featurized: bool = True
    ) -> tuple[list[int], dict[int, Checkpoint | None]]:
        """Choose the checkpoints to average over: those given, those in the store, or the model as it is now.

        Args:
            checkpoints: see [`~hf_trak.attributor.TrakAttributor.attribute`].
            featurized: whether all have to be featurized.

        Returns:
            Ids, and weights that are given for them.

        Raises:
            IncompleteStoreError: nothing is featurized yet, or a checkpoint only in part.
            ValueError: `checkpoints` are not as many as the model ids.
        """
        known = self.store.model_ids
        ids, sources = sources_of(checkpoints, known, new=not featurized)
        return (self.scorer.ensemble(ids) if featurized else ids or known or [0]), sources

    def question(
        self,
        eval_dataset: Any,
        name: str | None = None,
        checkpoints: Checkpoints = None,
        group_by: GroupBy | None = None,
        featurized: bool = True,
    ) -> Question:
        """Check what is asked about targets, and find everything that it says without words.

        All processes call this together.

        Args:
            eval_dataset: the targets.
            name: name of the experiment; `None` takes one that identifies the dataset.
            checkpoints, group_by: see [`~hf_trak.attributor.TrakAttributor.attribute`].
            featurized: whether features of the training rows are needed.

        Raises:
            As [`chosen`] and [`prepare_store`]; ValueError or TypeError if the targets are none or cannot be grouped.
        """
        if name is not None:
            safe_name(name, "name")
        row_count(eval_dataset, "eval_dataset")
        require_class_numbers(self.train_dataset, eval_dataset, "the targets")
        if isinstance(self.train_dataset, list):
            self._train_fingerprint = None  # its rows may have been changed in place
        groups = target_groups(eval_dataset, group_by)
        self.processes.broadcast_from_main(self.prepare_store)
        fingerprint = fingerprint_dataset(eval_dataset)
        name = targets_name(fingerprint) if name is None else name
        collation = self.collation(eval_dataset, "target")
        return Question(eval_dataset, name, fingerprint, collation, *self.chosen(checkpoints, featurized), groups)

    def plan(self, question: Question, everywhere: bool = True, lambda_relative: float | None = None) -> PlannedScores:
        """Prepare the scores of training rows for the targets of a question.

        Features of the targets are computed here where they are not in the store. Scores are computed block by block
        when the blocks of the result are read.

        Args:
            question: what is asked.
            everywhere: all training rows in every process, rather than those that fall to this one.
            lambda_relative: ridge; `None` for that of the configuration.
        """
        scorer, asked = self.scorer_with(lambda_relative), self.precondition(question, lambda_relative)
        identity = {**scorer.identity(question.ids, asked.features), "groups": question.tag}
        return PlannedScores(identity, scorer.blocks(question.ids, asked.rows, everywhere))

    def precondition(self, question: Question, lambda_relative: float | None = None) -> PreconditionedTargets:
        """Compute t (XᵀX + λI)⁻¹ of the targets of a question, or of the means of groups, for every checkpoint."""
        scorer, groups = self.scorer_with(lambda_relative), question.groups
        targets, features_of_targets = [], []
        for model_id in question.ids:
            shards = self._target_shards(question, model_id)
            features_of_targets.append(shards)
            targets.append(scorer.precondition(model_id, partial(target_features, shards, groups), question.m))
        return PreconditionedTargets(features_of_targets, targets)

    def targets(self, question: Question, model_id: int) -> ShardSet:
        """Return the shards of the features of the targets for one checkpoint, `(m, k)`, written or not."""
        m, collation = len(question.eval_dataset), {"collation": question.collation}
        return self.store.targets(question.name, model_id, m, question.fingerprint, collation, COMPARISONS)

    def _target_shards(self, question: Question, model_id: int) -> ShardSet:
        """Compute the features of the targets for one checkpoint that are missing.

        Kept ones answer for the weights that they were computed with, so weights at hand are compared.
        """
        shards = self.targets(question, model_id)
        missing = bool(self.processes.broadcast_from_main(shards.unwritten))
        source = self.source_of(model_id, question.sources)
        known = model_id in {**self.sources, **question.sources} or len(question.ids) == 1
        at_hand = known if source is None else isinstance(source, Mapping | torch.nn.Module)
        if missing or at_hand or model_id in question.sources:
            with self.weights(model_id, source):
                if not missing:
                    return shards
                description = f"{question.title}, checkpoint {model_id}"
                stored = StoredRows.find(self.store.train(model_id), self.train_dataset, "train")
                self.featurizer(projector=self.feature_map(model_id)).fill(
                    shards, question.eval_dataset, model_id, "target", description, stored=stored
                )
        return shards

    def source_of(self, model_id: int, given: Mapping[int, Checkpoint | None]) -> Checkpoint | None:
        """Find the weights of a featurized checkpoint: given now, remembered, or at the path in the store."""
        for known in (given, self.sources):
            if model_id in known:
                return known[model_id]
        path = self.store.checkpoint_info(model_id)["source"]
        return path if isinstance(path, str) and path.startswith("/") else None
