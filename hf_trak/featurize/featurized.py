"""A model, its training rows, and their features in a store: what attribution asks its questions of."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from accelerate.state import AcceleratorState
from torch import Tensor

from hf_trak.config import TrakConfig, checked_args
from hf_trak.data.rows import Collator, RowBatches, default_collator, row_count
from hf_trak.errors import CheckpointMismatchError
from hf_trak.featurize.estimation import Estimate, estimate
from hf_trak.featurize.featurizer import Featurizer, StoredRows, row_batches
from hf_trak.gradient_computers.layout import ParameterLayout
from hf_trak.identity.collation import check_repeatable, collation_changes, collation_of, probe_rows
from hf_trak.identity.function_identity import same_function
from hf_trak.identity.model_identity import model_changes, model_identity, version_changes
from hf_trak.identity.row_digest import fingerprint_dataset, fingerprint_dataset_v1
from hf_trak.modelout_functions import AbstractModelOutput, get_task, infer_task
from hf_trak.modelout_functions.identity import task_identity, task_identity_v1
from hf_trak.projectors import BlockProjector, make_projector
from hf_trak.runtime.processes import Processes
from hf_trak.scores.groups import RowGroups
from hf_trak.scores.scored_dataset import ScoreBlock
from hf_trak.scores.scorer import PlannedScores, Scorer
from hf_trak.store.atomic import differing, safe_name
from hf_trak.store.leftovers import remove_stale
from hf_trak.store.shard_set import ShardSet
from hf_trak.store.store import Comparison, FeatureStore
from hf_trak.version import __version__
from hf_trak.weights.checkpoints import Checkpoint, describe, loaded
from hf_trak.weights.placement import check_placement

logger = logging.getLogger(__name__)


class FeaturizedModel:
    """Everything that [`TrakAttributor`] does before the first question: `featurize`, and what follows from features
    alone."""

    def __init__(
        self,
        model: torch.nn.Module,
        args: TrakConfig | None = None,
        train_dataset: Any = None,
        data_collator: Collator | None = None,
        processing_class: Any = None,
        task: str | AbstractModelOutput | Callable[..., Tensor] | None = None,
    ) -> None:
        """
        Args:
            model: the trained model, as `Trainer` takes it. Left in place, as it was, after every call.
            args: the configuration; `None` takes the defaults.
            train_dataset: the training rows, map-style. Indices in results count its rows from 0.
            data_collator: turns rows into a batch; `None` chooses as `Trainer` does.
            processing_class: tokenizer, image processor, feature extractor or processor, for that choice.
            task: the model output function: a name, an `AbstractModelOutput`, or a function
                `output_fn(model_output, batch) -> (B,)`. `None` infers it from the class of the model.

        Raises:
            ValueError: unknown task or parameter name, empty dataset, a model whose task cannot be inferred, or one
                whose parameters are sharded over processes or offloaded.
            TypeError: `model` is no module, `args` no `TrakConfig`, or `train_dataset` has no rows by index.
        """
        self.args = checked_args(args)
        check_placement(model)
        self.model = model
        self.task = get_task(infer_task(model) if task is None else task)
        self.task.use_seed(self.args.seed)
        self.train_dataset = train_dataset
        self.processing_class = processing_class
        self._train_size = row_count(train_dataset, "train_dataset")
        self.data_collator = data_collator or default_collator(train_dataset, processing_class)
        self.layout = ParameterLayout.from_model(model, self.args.grad_wrt)
        self.processes = Processes(self.args.use_cpu)
        self._sources: dict[int, Checkpoint | None] = {}
        self.recorded_rows: dict[str, Any] | None = None
        """What an index says of its training rows, where they are not at hand."""
        self._train_fingerprint: str | None = None
        self._store: FeatureStore | None = None
        if getattr(model, "hf_device_map", None) is None:
            model.to(self.device)

    @property
    def device(self) -> torch.device:
        """Where batches go: the device of this process, or that of the first layer of a dispatched model."""
        if getattr(self.model, "hf_device_map", None) is not None:
            return next(self.model.parameters()).device
        return self.processes.device

    @property
    def proj_dim(self) -> int:
        """k, the number of features per example."""
        return self.layout.total if self.args.proj_type == "none" else self.args.proj_dim

    @property
    def store(self) -> FeatureStore:
        """The feature store, created on first use. Raises `ConfigMismatchError` if it was made otherwise."""
        if self._store is None:
            self._store = FeatureStore.open(
                self.args.output_dir, self.store_config(), self.first_format, self.comparisons()
            )
        return self._store

    def reopen_store(self) -> None:
        """Read the store's configuration again, which has been brought up to date."""
        self._store = None

    def require_same_inputs(self) -> None:
        """Compare model, task, rows and settings, as they are now, with what the store was made with.

        Raises:
            ConfigMismatchError: something has changed, in this process or since an earlier one.
            ValueError: rows come out at random.
        """
        if self._store is None:
            _ = self.store  # which compares
            return
        config = self.store_config() if self._store.version > 1 else self.first_format()
        self._store.require_same(config, self.comparisons())

    def store_config(self) -> dict[str, Any]:
        """Everything that defines the features: the content of the store's `trak_config.json`."""
        return {
            **self._settings(),
            **self._row_identity(),
            "task": task_identity(self.task, self.model),
            "mixed_precision": mixed_precision(self.model),
            "model": model_identity(self.model),
        }

    def first_format(self) -> dict[str, Any]:
        """[`~FeaturizedModel._store_config`] as stores of format 1 have it."""
        recorded = self.recorded_rows
        fingerprint = fingerprint_dataset_v1(self.train_dataset) if recorded is None else recorded["train_fingerprint"]
        return {**self._settings(), "task": task_identity_v1(self.task), "train_fingerprint": fingerprint}

    def _row_identity(self) -> dict[str, Any]:
        """What identifies the training rows, and what becomes of them on the way to the model."""
        if self.recorded_rows is not None:  # an index without its rows
            return self.recorded_rows
        if self._train_fingerprint is None:
            self._train_fingerprint = fingerprint_dataset(self.train_dataset)
        return {"train_fingerprint": self._train_fingerprint, "collation": self.collation(self.train_dataset)}

    def collation(self, dataset: Any) -> dict[str, Any]:
        """What dataset, transforms, tokenizer and collator make of a few rows, each collated alone, since rows of
        different sizes need not fit into one batch; or together, if the collator takes no single row.

        Raises:
            ValueError: it is not the same each time.
        """
        batches = self._row_batches(dataset)

        def alone(rows: list[int]) -> dict[str, Any]:
            return {f"row {row}": batches.collated([row]) for row in rows}

        rows = probe_rows(len(dataset), sequential=getattr(dataset, "sequential", False))
        collate: Callable[[list[int]], Any] = alone
        if len(rows) > 1:
            try:
                alone(rows[:1])
            except (
                Exception
            ) as error:  # anything that a user's collator may raise; if it takes no rows, it raises again
                logger.debug("The collator takes no single row (%r): probed rows are collated together.", error)
                collate = batches.collated
        check_repeatable(collate, rows)
        return collation_of(collate, rows)

    def comparisons(self) -> dict[str, Comparison]:
        """How to compare what need not be equal to the bit."""
        return {
            "collation": collation_changes,
            "mixed_precision": _precision_changes,
            "model": _model_changes,
            "task": _task_changes,
        }

    def _settings(self) -> dict[str, Any]:
        """What defines features besides model, task and rows."""
        config = getattr(self.model, "config", None)
        return {
            "hf_trak_version": __version__,
            "projection": self._projector().algorithm,
            "proj_dim": self.proj_dim,
            "proj_nonzeros": self.args.proj_nonzeros,
            "seed": self.args.seed,
            "parameters": self.layout.to_list(),
            "parameters_fingerprint": self.layout.fingerprint,
            "feature_dtype": self.args.feature_dtype,
            "model_dtype": self.args.model_dtype,
            "shard_size": self.args.shard_size,
            "train_size": self._train_size,
            "model_class": type(self.model).__name__,
            "model_name": getattr(config, "_name_or_path", None) or None,
            "model_revision": getattr(config, "_commit_hash", None),
        }

    def _projector(self) -> BlockProjector:
        return make_projector(
            self.args.proj_type,
            grad_dim=self.layout.total,
            proj_dim=self.proj_dim,
            seed=self.args.seed,
            device=self.device,
            nonzeros=self.args.proj_nonzeros,
        )

    def _row_batches(self, dataset: Any) -> RowBatches:
        return row_batches(self.model, self.task, self.data_collator, dataset, self.args, self.device)

    def featurizer(self) -> Featurizer:
        return Featurizer(
            self.model,
            self.task,
            self._projector(),
            self.data_collator,
            self.train_dataset,
            self.args,
            self.processes,
            self.device,
            self.store,
        )

    def estimate(self, eval_dataset: Any = 0, checkpoints: int = 1, measure: bool = False) -> Estimate:
        """What it takes to featurize and score: parameters, disk, memory, and time if a few batches may be run.

        Args:
            eval_dataset, checkpoints, measure: see [`hf_trak.estimate`].
        """
        return estimate(
            self.model,
            self.train_dataset,
            self.args,
            checkpoints=checkpoints,
            eval_dataset=eval_dataset,
            processes=self.processes.num_processes,
            measure=measure,
            data_collator=self.data_collator,
            processing_class=self.processing_class,
            task=self.task,
        )

    def featurize(
        self,
        checkpoints: Checkpoint | Sequence[Checkpoint] | None = None,
        model_ids: Sequence[int] | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> Self:
        """Compute the features of the training rows for one or several checkpoints, and their Gram matrices.

        Shards that are on disk already are left alone, so the same call after an interruption finishes the work.
        The weights of the model are the same afterwards as before.

        Args:
            checkpoints: one checkpoint or a list: modules, state dicts, `checkpoint-N` directories, `.safetensors`, or
                `.pt` files of tensors. `None` takes the model's current weights.
            model_ids: the ids under which they are kept; 0, 1, … by default.
            part: `(index, count)` computes part `index` of `count` of the shards, for independent jobs that share
                `output_dir`, such as a job array. Whichever finishes last computes the Gram matrices.

        Returns:
            The attributor itself.

        Raises:
            ConfigMismatchError: `output_dir` holds features made with another configuration.
            CheckpointMismatchError: a `model_id` is taken by other weights.
            NonFiniteError: a gradient is NaN or infinite; names the row.
            StoreError: a shard on disk is damaged, or a file cannot be written.
            PeerProcessError: another process of this run failed or died.
        """
        check_part(part)
        sources = as_list(checkpoints)
        ids = _checked_ids(sources, model_ids)
        if self._store is not None and self.recorded_rows is None and not hasattr(self.train_dataset, "fingerprint"):
            self._train_fingerprint = None  # rows of a list, say, may have changed since the last call
        self.processes.broadcast_from_main(self._prepare_store)
        if self.processes.is_main_process:
            logger.info("To featurize: %s", self.estimate(checkpoints=len(ids)))
        for model_id, source in zip(ids, sources, strict=True):
            with self.weights(model_id, source, register=True):
                description = f"train rows, checkpoint {model_id}"
                shards = self.store.train(model_id)
                stored = StoredRows.find(shards, self.train_dataset, "train")
                self.featurizer().fill(shards, self.train_dataset, model_id, "train", description, part, stored)
            self._sources[model_id] = source
            if left := len(self.processes.broadcast_from_main(shards.unwritten)):
                logger.info("%s: %d shards of other parts are not there yet.", description, left)
            else:
                self._scorer.gram(model_id)
        return self

    def _prepare_store(self) -> None:
        """Compare the inputs of a call with those of the store, and remove what processes that died left there."""
        self.require_same_inputs()
        for one in remove_stale(self.store.output_dir):
            logger.info("Removed %s, left behind by a process that died.", one.path)

    @contextmanager
    def weights(self, model_id: int, source: Checkpoint | None, register: bool = False) -> Iterator[None]:
        """The model with the weights of a checkpoint, which must be those that `model_id` stands for.

        Args:
            model_id: the checkpoint.
            source: its weights; `None` takes the model's current ones.
            register: tie the id to these weights if it is new.

        Raises:
            CheckpointMismatchError: the id stands for other weights.
        """
        dtype = None if self.args.model_dtype is None else getattr(torch, self.args.model_dtype)
        with loaded(self.model, source, dtype) as fingerprint:
            if register:
                self.store.register_checkpoint(model_id, fingerprint, describe(source, self.model))
            elif (expected := self.store.checkpoint_info(model_id)["fingerprint"]) != fingerprint:
                raise CheckpointMismatchError(
                    f"The weights given for model_id {model_id} ({describe(source, self.model)}) have the fingerprint "
                    f"{fingerprint}; its features were made with {expected}. Expected the same weights: pass that "
                    "checkpoint in `checkpoints=`, or featurize these weights under another model_id."
                )
            yield

    @property
    def _scorer(self) -> Scorer:
        return Scorer(self.store, self.processes, self.device, self.args.lambda_reg, self.args.lambda_relative)

    def _score_blocks(
        self,
        eval_dataset: Any,
        name: str | None,
        checkpoints: Checkpoint | Sequence[Checkpoint] | None,
        model_ids: Sequence[int] | None,
        groups: RowGroups | None = None,
        everywhere: bool = True,
    ) -> tuple[str, Iterator[ScoreBlock]]:
        """Name and blocks of [`~FeaturizedModel._plan_scores`]."""
        plan = self._plan_scores(eval_dataset, name, checkpoints, model_ids, groups, everywhere)
        return plan.name, plan.blocks

    def _plan_scores(
        self,
        eval_dataset: Any,
        name: str | None,
        checkpoints: Checkpoint | Sequence[Checkpoint] | None,
        model_ids: Sequence[int] | None,
        groups: RowGroups | None = None,
        everywhere: bool = True,
    ) -> PlannedScores:
        """Scores of training rows for m targets, or for G groups of them: of all rows, or (`everywhere=False`) of
        those that fall to this process. Features of the targets are computed here where they are not in the store."""
        if name is not None:
            safe_name(name, "name")
        n_targets = row_count(eval_dataset, "eval_dataset")
        self.processes.broadcast_from_main(self._prepare_store)
        old = self.store.version == 1
        fingerprint = fingerprint_dataset_v1(eval_dataset) if old else fingerprint_dataset(eval_dataset)
        name = f"targets-{fingerprint[:12]}" if name is None else name
        collation = self.collation(eval_dataset)
        scorer = self._scorer
        ids = scorer.ensemble(model_ids)
        sources = sources_of(ids, checkpoints)
        targets, features_of_targets = [], []
        for model_id in ids:
            shards = self._target_shards(name, model_id, eval_dataset, fingerprint, collation, sources)
            features_of_targets.append(shards)

            def features(shards: ShardSet = shards) -> Tensor:
                if groups is None:
                    return torch.cat([shard.grads.float() for shard in shards])
                return groups.means((shard.start, shard.grads) for shard in shards)

            targets.append(scorer.precondition(model_id, features, n_targets if groups is None else len(groups)))
        identity = {**scorer.identity(ids, features_of_targets), "groups": None if groups is None else groups.tag}
        return PlannedScores(name, identity, scorer.blocks(ids, targets, everywhere))

    def _target_shards(
        self,
        name: str,
        model_id: int,
        eval_dataset: Any,
        fingerprint: str,
        collation: Mapping[str, Any],
        sources: Mapping[int, Checkpoint | None],
    ) -> ShardSet:
        """t of one checkpoint, `(m, k)`, computed if it is not in the store."""
        shards = self.store.targets(
            name, model_id, len(eval_dataset), fingerprint, {"collation": collation}, self.comparisons()
        )
        if self.processes.broadcast_from_main(shards.unwritten):
            with self.weights(model_id, self.source_of(model_id, sources)):
                description = f"{name}, checkpoint {model_id}"
                stored = StoredRows.find(self.store.train(model_id), self.train_dataset, "train")
                self.featurizer().fill(shards, eval_dataset, model_id, "target", description, stored=stored)
        return shards

    def source_of(self, model_id: int, given: Mapping[int, Checkpoint | None]) -> Checkpoint | None:
        """Where the weights of a featurized checkpoint are: given now, remembered, or at the path in the store."""
        for known in (given, self._sources):
            if model_id in known:
                return known[model_id]
        path = self.store.checkpoint_info(model_id)["source"]
        return path if isinstance(path, str) and path.startswith("/") else None


def mixed_precision(model: torch.nn.Module) -> str:
    """The precision of the autocast context that `Accelerator.prepare` has put around `forward`, or `"no"`."""
    if not hasattr(model, "_original_forward") or not AcceleratorState._shared_state:
        return "no"
    return str(AcceleratorState().mixed_precision)


def _precision_changes(saved: str, given: str) -> list[str]:
    """An index says how its rows were computed, and whoever loads it may have no such context: that is said, no error.
    What half precision rounds is some thousandths of a gradient."""
    logger.warning(
        "The features were computed with mixed precision %r, and the model at hand runs with %r. Gradients then "
        "differ by what half precision rounds, some thousandths of their norm.",
        saved,
        given,
    )
    return []


def _task_changes(saved: Any, given: Any) -> list[str]:
    """A task that differs. The code of functions can be compared within one version of Python only."""
    same = same_function(saved, given)
    if same is None:
        logger.warning(
            "The functions of the task were compiled by another version of Python than this one, and cannot be "
            "compared with those that the features were computed with. Rows whose features are computed again, where "
            "rows are at hand, show whether they are the same."
        )
    return differing({"task": saved}, {"task": given}) if same is False else []


def _model_changes(saved: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Settings of the model that differ. Other versions of packages may have other settings of the same model: then
    they are only named, and rows that are computed again show whether features have changed."""
    lines = model_changes(saved, given)
    packages = version_changes(saved["versions"], given["versions"])
    if lines and packages:
        logger.warning(
            "The model has other settings than when its features were computed (%s), with other versions of packages "
            "(%s). Rows whose features are computed again, where rows are at hand, show whether that matters.",
            "; ".join(lines),
            "; ".join(packages),
        )
        return []
    return lines


def as_list(checkpoints: Checkpoint | Sequence[Checkpoint] | None) -> list[Checkpoint | None]:
    """One checkpoint, or several, as a list; `None`, the model's own weights, is one."""
    if checkpoints is None or isinstance(checkpoints, str | os.PathLike | Mapping | torch.nn.Module):
        return [checkpoints]
    return list(checkpoints)


def sources_of(
    model_ids: Sequence[int], checkpoints: Checkpoint | Sequence[Checkpoint] | None
) -> dict[int, Checkpoint | None]:
    """The checkpoints by model id, in the order of the ids; nothing where none are given.

    Raises:
        ValueError: they are not as many.
    """
    if checkpoints is None:
        return {}
    sources = as_list(checkpoints)
    if len(sources) != len(model_ids):
        raise ValueError(
            f"`checkpoints` has {len(sources)} entries for the model_ids {list(model_ids)}. Expected one for each, in "
            "this order: the weights that were featurized under these ids. Pass all of them, or leave `checkpoints` "
            "out where they are files that still lie where `featurize` found them."
        )
    return dict(zip(model_ids, sources, strict=True))


def _checked_ids(sources: Sequence[Checkpoint | None], model_ids: Sequence[int] | None) -> list[int]:
    ids = list(range(len(sources))) if model_ids is None else list(model_ids)
    if not sources:
        raise ValueError(
            "`checkpoints` is an empty list. Expected at least one checkpoint, or `None` for the current weights."
        )
    whole = all(isinstance(model_id, int) and not isinstance(model_id, bool) and model_id >= 0 for model_id in ids)
    if not whole or len(ids) != len(sources) or len(set(ids)) != len(ids):
        raise ValueError(
            f"`model_ids` is {ids} for {len(sources)} checkpoints. Expected one distinct integer of at "
            f"least 0 for each."
        )
    return ids


def check_part(part: tuple[int, int]) -> None:
    """Raise `ValueError` unless `part` is `(index, count)` with 0 ≤ index < count."""
    whole = isinstance(part, tuple | list) and len(part) == 2
    if not whole or any(isinstance(v, bool) or not isinstance(v, int) for v in part) or not 0 <= part[0] < part[1]:
        raise ValueError(f"`part` is {part!r}. Expected `(index, count)` with 0 ≤ index < count, such as (2, 8).")
