"""The front door: from a `Trainer`, or from what a `Trainer` takes, to scores as columns of a dataset."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from datasets import Dataset as HFDataset
from huggingface_hub import CommitInfo
from torch import Tensor

from hf_trak import __version__
from hf_trak.checkpoints import Checkpoint, describe, loaded
from hf_trak.config import TrakConfig
from hf_trak.data import Collator, default_collator, fingerprint_dataset, row_count
from hf_trak.errors import CheckpointMismatchError
from hf_trak.estimation import Estimate, estimate
from hf_trak.featurizer import Featurizer
from hf_trak.gradient_computers.layout import ParameterLayout
from hf_trak.groups import GroupBy, RowGroups, target_groups
from hf_trak.modelout_functions import AbstractModelOutput, get_task, infer_task
from hf_trak.modelout_functions.identity import task_identity
from hf_trak.placement import check_placement
from hf_trak.processes import Processes
from hf_trak.projectors import BlockProjector, make_projector
from hf_trak.report.last import LastResult
from hf_trak.savers import FeatureStore, ShardSet
from hf_trak.savers.atomic import safe_name
from hf_trak.score_files import ScoreFiles
from hf_trak.scored_dataset import ScoreBlock, attach_columns
from hf_trak.scoring import Scorer
from hf_trak.selection import (
    Criterion,
    best_rows,
    check_criterion,
    check_strata,
    group_score_columns,
    row_scores,
    selected,
    selection_size,
)
from hf_trak.spans import single_labels, span_targets, with_token_scores

if TYPE_CHECKING:
    from hf_trak.report.notebook import TargetDisplay

logger = logging.getLogger(__name__)


class TrakAttributor:
    """Which training examples made a model do this: TRAK (arXiv 2303.14186) for models of the Hugging Face ecosystem.

    ```python
    attributor = TrakAttributor.from_trainer(trainer, args=TrakConfig(output_dir="trak"))
    attributor.featurize(checkpoints=["out/checkpoint-100", "out/checkpoint-200"])
    scored = attributor.attribute(eval_dataset, top_k=20)
    ```

    With one row per target, `scored[j]["trak_indices"][r]` is the row of the training dataset that helped target j
    r-th most, `scored[j]["trak_scores"][r]` its score; `trak_opponent_indices` and `trak_opponent_scores` are the
    most harmful ones. A positive score says that training on the example raised the model output of the target.
    """

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
            TypeError: `train_dataset` has no rows by index.
        """
        self.args = TrakConfig() if args is None else args
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
        self._train_fingerprint: str | None = None
        self._store: FeatureStore | None = None
        self._last: LastResult | None = None
        if getattr(model, "hf_device_map", None) is None:
            model.to(self.device)

    @classmethod
    def from_trainer(
        cls, trainer: Any, args: TrakConfig | None = None, task: str | AbstractModelOutput | None = None
    ) -> "TrakAttributor":
        """Take model, training dataset, collator and processing class from a `transformers.Trainer`.

        `remove_unused_columns` and `label_names` are the trainer's, those in `args` are not looked at.

        Raises:
            ValueError: the trainer has no training dataset, `args.output_dir` is the trainer's own, and all of
                `TrakAttributor(...)`.
        """
        if trainer.train_dataset is None:
            raise ValueError(
                "The trainer has no `train_dataset`. Expected the dataset that the model was trained on. Build the "
                "attributor with `TrakAttributor(model, args, train_dataset=...)`, or give the trainer its dataset."
            )
        args = TrakConfig() if args is None else args
        if Path(args.output_dir).resolve() == Path(trainer.args.output_dir).resolve():
            raise ValueError(
                f"`output_dir` is {args.output_dir!r}, the trainer's own, where both would write `checkpoint-…` "
                "directories, and the trainer may delete them. Expected another one, for example "
                f"{os.path.join(args.output_dir, 'trak')!r}."
            )
        args = TrakConfig(
            **{
                **args.to_dict(),
                "remove_unused_columns": trainer.args.remove_unused_columns,
                "label_names": trainer.args.label_names,
                "use_cpu": args.use_cpu or trainer.args.device.type == "cpu",
            }
        )
        return cls(
            trainer.accelerator.unwrap_model(trainer.model),
            args,
            train_dataset=trainer.train_dataset,
            data_collator=trainer.data_collator,
            processing_class=trainer.processing_class,
            task=task,
        )

    @classmethod
    def from_pretrained(
        cls,
        repo_or_path: str,
        model: torch.nn.Module | str | None = None,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        train_dataset: Any = None,
        data_collator: Collator | None = None,
        processing_class: Any = None,
        task: str | AbstractModelOutput | Callable[..., Tensor] | None = None,
        checkpoints: Checkpoint | Sequence[Checkpoint] | Mapping[int, Checkpoint] | None = None,
        **options: Any,
    ) -> "TrakAttributor":
        """Load a published index, and attribute new targets without the training data.

        Nothing of the repo is executed or unpickled, and every file is checked before it is used. Gram matrices and
        feature shards are downloaded when a call needs them, and only those.

        Args:
            repo_or_path: a dataset repo, a copy of one, or the output directory of a run.
            model: the model that the index was made with: a module, a directory or a model repo. `None` takes the repo
                and revision that the index records. Its weights are compared with the recorded fingerprints.
            revision: branch, tag or commit of the index.
            token: as in `huggingface_hub`; passed on, never written anywhere.
            local_files_only: use what is in the Hub's cache, as does `HF_HUB_OFFLINE`.
            train_dataset: the training rows, or their repo, if they are at hand: `per="train"` then returns them.
            data_collator, processing_class: as for `TrakAttributor`; without training rows, collates mappings of
                tensors or numbers, and tuples.
            task: the model output function, where it is one of yours.
            checkpoints: the weights of every model id (in their order, or by id) that neither the model nor a recorded
                repo has.
            options: fields of `TrakConfig` that do not define features, such as `per_device_batch_size`, `use_cpu`, or
                `output_dir`, where target features and scores are kept (default: beside the Hub's cache). The ridge
                and the batch size are those of the index unless given.

        Raises:
            HubAccessError: repo, revision or file does not exist or cannot be reached.
            RefusedIndexError: the index is damaged or hostile, or of another format.
            ConfigMismatchError: model, task or training dataset are not those of the index.
            CheckpointMismatchError: the model has none of the weights that the index was made with.
            ValueError: the index names no model, or an option cannot be chosen.
        """
        from hf_trak.hub.loading import load_attributor  # the Hub's room is not needed otherwise

        return load_attributor(
            cls,
            repo_or_path,
            model,
            revision=revision,
            token=token,
            local_files_only=local_files_only,
            train_dataset=train_dataset,
            data_collator=data_collator,
            processing_class=processing_class,
            task=task,
            checkpoints=checkpoints,
            **options,
        )

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
            self._store = FeatureStore.open(self.args.output_dir, self._store_config())
        return self._store

    def _store_config(self) -> dict[str, Any]:
        """Everything that defines the features (DESIGN: the store's `trak_config.json`)."""
        if self._train_fingerprint is None:
            self._train_fingerprint = fingerprint_dataset(self.train_dataset)
        config = getattr(self.model, "config", None)
        return {
            "hf_trak_version": __version__,
            "task": task_identity(self.task),
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
            "train_fingerprint": self._train_fingerprint,
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

    def _featurizer(self) -> Featurizer:
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

    # -- featurize ---------------------------------------------------------------------------------------------------

    def featurize(
        self,
        checkpoints: Checkpoint | Sequence[Checkpoint] | None = None,
        model_ids: Sequence[int] | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> "TrakAttributor":
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
        sources = _as_list(checkpoints)
        ids = _checked_ids(sources, model_ids)
        if self.processes.is_main_process:
            logger.info("To featurize: %s", self.estimate(checkpoints=len(ids)))
        for model_id, source in zip(ids, sources, strict=True):
            with self._weights(model_id, source, register=True):
                description = f"train rows, checkpoint {model_id}"
                shards = self.store.train(model_id)
                self._featurizer().fill(shards, self.train_dataset, model_id, "train", description, part)
            self._sources[model_id] = source
            if left := len(self.processes.from_main(shards.missing)):
                logger.info("%s: %d shards of other parts are not there yet.", description, left)
            else:
                self._scorer.gram(model_id)
        return self

    @contextmanager
    def _weights(self, model_id: int, source: Checkpoint | None, register: bool = False) -> Iterator[None]:
        """The model with the weights of a checkpoint, which must be those that `model_id` stands for."""
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

    # -- attribute ---------------------------------------------------------------------------------------------------

    def attribute(
        self,
        eval_dataset: Any,
        top_k: int | None = 20,
        name: str | None = None,
        per: Literal["target", "train"] = "target",
        checkpoints: Checkpoint | Sequence[Checkpoint] | None = None,
        model_ids: Sequence[int] | None = None,
        aggregate: Literal["mean"] | None = None,
        group_by: GroupBy | None = None,
    ) -> HFDataset:
        """Score every training row against every target, over the ensemble of featurized checkpoints.

        Args:
            eval_dataset: the targets, with the columns of the training dataset.
            top_k: how many training rows to return per target, from either end. `None` returns every score.
            name: name of the experiment, under which target features are kept. By default one that
                identifies the dataset.
            per: `"target"` for one row per target; `"train"` for one row per training row, whose indices and scores
                then refer to targets.
            checkpoints: the featurized weights, in the order of `model_ids`; needed where they cannot be found
                again (state dicts or modules of another process).
            model_ids: the checkpoints to average over. `None` takes all in the store.
            aggregate: `"mean"` scores the mean output over all targets, which is the mean of their scores, at the
                cost of one target.
            group_by: the same for each group of targets: the name of a column, or one value per target.

        Returns:
            The rows (as stored, without a transform set on them, if they are a `datasets.Dataset`) with the columns
            `trak_indices`, `trak_scores`, `trak_opponent_indices`, `trak_opponent_scores`, or with `trak_scores`
            alone: a fixed-size list with one score per training row (`per="target"`) or per target (`per="train"`).
            With `aggregate` or `group_by`, targets are groups, in ascending order of their values: one row for each,
            with its value and `n_targets`, the number of its members.

        Raises:
            IncompleteStoreError: nothing is featurized yet, or a checkpoint only in part.
            CheckpointMismatchError: the weights at hand are not those of the features.
            ValueError: `top_k`, `name` or `per` is out of range, or the dataset is empty.
            SingularGramError: the ridge is too small for these features.
        """
        if per not in ("target", "train"):
            raise ValueError(f"`per` is {per!r}. Expected 'target' or 'train'.")
        n_targets = row_count(eval_dataset, "eval_dataset")
        groups = target_groups(eval_dataset, aggregate, group_by)
        if top_k is not None and (not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1):
            raise ValueError(f"`top_k` is {top_k!r}. Expected an integer of at least 1, or `None` for every score.")
        name, blocks = self._score_blocks(eval_dataset, name, checkpoints, model_ids, groups, everywhere=False)
        rows = self.train_dataset if per == "train" else eval_dataset if groups is None else groups.table()
        n_targets = n_targets if groups is None else len(groups)
        length = self._train_size if per == "target" else n_targets
        stem = f"per-{per}" if groups is None else f"per-{per}-of-{groups.tag}"
        stem = stem if top_k is None else f"{stem}-top-{top_k}"
        directory = self.store.output_dir / "scores" / safe_name(name, "name")
        files = ScoreFiles(directory, stem, self.processes, self._train_size, n_targets)
        scored = attach_columns(rows, files.columns(blocks, None if top_k is None else min(top_k, length), per))
        if per == "target" and groups is None:
            self._last = LastResult(scored, eval_dataset, name, model_ids)
        return scored

    def show(self, target: int, **options: Any) -> "TargetDisplay":
        """The view that a report has of one target of the last `attribute(..., per="target")`, for a notebook.

        The first call counts the scores of all targets for their distributions, which costs as much as `attribute`.

        Args:
            target: row of the targets.
            options: `examples`, training examples from either end, 5 by default; `image_column`, `text_columns`,
                `label_column`, `label_names`, where they are not found out.

        Raises:
            IndexError: there is no such target.
            ValueError: nothing is attributed yet, or a column does not exist.
        """
        from hf_trak.report.notebook import show_last  # reports need more packages than attribution does

        return show_last(self, self._last, target, **options)

    def attribute_span(
        self,
        eval_dataset: HFDataset,
        *,
        tokens: Any = None,
        chars: Any = None,
        words: Any = None,
        mask_column: str | None = None,
        text_column: str = "text",
        ids_column: str = "input_ids",
        **kwargs: Any,
    ) -> HFDataset:
        """Which training rows made the model say *this* part of each target.

        Args:
            eval_dataset: the targets, for a task that aggregates over labels.
            tokens, chars, words, mask_column, text_column, ids_column: the part, see [`spans.span_targets`].
            kwargs: those of [`~TrakAttributor.attribute`].

        Returns:
            As [`~TrakAttributor.attribute`], with the column `target_mask` of the part.

        Raises:
            As both.
        """
        span = span_targets(
            eval_dataset,
            tokens=tokens,
            chars=chars,
            words=words,
            mask_column=mask_column,
            tokenizer=self.processing_class,
            text_column=text_column,
            ids_column=ids_column,
        )
        return self.attribute(span, **kwargs)

    def attribute_tokens(
        self, eval_dataset: HFDataset, top_k: int = 20, name: str | None = None, **kwargs: Any
    ) -> HFDataset:
        """[`~TrakAttributor.attribute`] with every score broken down by the label tokens of its target.

        Costs one gradient per label token, and a file of all scores of all of them.

        Returns:
            As [`~TrakAttributor.attribute`], with `trak_token_positions`, `trak_token_scores` and
            `trak_opponent_token_scores`: `scored[j]["trak_token_scores"][r][t]` is the part of
            `scored[j]["trak_scores"][r]` that comes from the label at `scored[j]["trak_token_positions"][t]`. The
            parts add up to the score.

        Raises:
            As [`~TrakAttributor.attribute`].
            TypeError: the task has one label per sample.
        """
        singles = single_labels(self, eval_dataset)
        scored = self.attribute(eval_dataset, top_k=top_k, name=name, **kwargs)
        parts = self.attribute(singles, top_k=None, name=None if name is None else f"{name}-tokens", **kwargs)
        return with_token_scores(scored, parts)

    def _score_blocks(
        self,
        eval_dataset: Any,
        name: str | None,
        checkpoints: Checkpoint | Sequence[Checkpoint] | None,
        model_ids: Sequence[int] | None,
        groups: RowGroups | None = None,
        everywhere: bool = True,
    ) -> tuple[str, Iterator[ScoreBlock]]:
        """The name of the experiment, and scores of training rows for m targets, or for G groups of them: of all rows,
        or (`everywhere=False`) of those that fall to this process."""
        n_targets = row_count(eval_dataset, "eval_dataset")
        fingerprint = fingerprint_dataset(eval_dataset)
        name = f"targets-{fingerprint[:12]}" if name is None else name
        scorer = self._scorer
        ids = scorer.ensemble(model_ids)
        sources = dict(zip(ids, _as_list(checkpoints), strict=True)) if checkpoints is not None else {}
        targets = []
        for model_id in ids:
            shards = self._target_shards(name, model_id, eval_dataset, n_targets, fingerprint, sources)

            def features(shards: ShardSet = shards) -> Tensor:
                if groups is None:
                    return torch.cat([shard.grads.float() for shard in shards])
                return groups.means((shard.start, shard.grads) for shard in shards)

            targets.append(scorer.precondition(model_id, features, n_targets if groups is None else len(groups)))
        return name, scorer.blocks(ids, targets, everywhere)

    def group_scores(
        self,
        eval_dataset: Any,
        train_group_by: GroupBy,
        name: str | None = None,
        checkpoints: Checkpoint | Sequence[Checkpoint] | None = None,
        model_ids: Sequence[int] | None = None,
        aggregate: Literal["mean"] | None = None,
        group_by: GroupBy | None = None,
    ) -> HFDataset:
        """Scores of whole groups of training rows (a class, a source): Σ_{i ∈ group} τ_ij for every target j.

        Args:
            eval_dataset: the targets.
            train_group_by: a column of the training dataset, or one value per training row.
            name, checkpoints, model_ids, aggregate, group_by: as in [`~TrakAttributor.attribute`].

        Returns:
            The targets, or groups of them, with the columns `trak_groups`, `trak_group_scores` and
            `trak_group_sizes`: lists with one entry per group, the same groups in every row. The mean over a group is
            its score divided by its size.

        Raises:
            As `attribute`; ValueError or TypeError if the column is unknown or cannot form groups.
        """
        groups = target_groups(eval_dataset, aggregate, group_by)
        train_groups = RowGroups.of(self.train_dataset, train_group_by, "train_group_by")
        _, blocks = self._score_blocks(eval_dataset, name, checkpoints, model_ids, groups)
        columns = group_score_columns(train_groups.sums(blocks), train_groups)
        return attach_columns(eval_dataset if groups is None else groups.table(), columns)

    def select(
        self,
        n: int | float,
        eval_dataset: Any,
        criterion: Criterion = "most_helpful",
        group_by: GroupBy | None = None,
        stratify_by: GroupBy | None = None,
        name: str | None = None,
        checkpoints: Checkpoint | Sequence[Checkpoint] | None = None,
        model_ids: Sequence[int] | None = None,
    ) -> Any:
        """The training subset that serves the targets best, ready to train on.

        Args:
            n: how many rows, or which fraction of them.
            eval_dataset: the targets.
            criterion: what rows are ranked by: `"most_helpful"`, the mean of their scores over the targets, or
                `"least_harmful"`, the minimum, so that a row is left out if it harms any target much.
            group_by: first average the scores over groups of targets, so that each group counts the same: the name of
                a column, or one value per target.
            stratify_by: let each group of training rows keep its share of the rows: a column of the training
                dataset, or one value per training row.
            name, checkpoints, model_ids: as in [`~TrakAttributor.attribute`].

        Returns:
            A `datasets.Dataset` of n rows, best first, with two more columns: `trak_index`, the row in the training
            dataset, and `trak_score`, the number it is ranked by. For other datasets a `torch.utils.data.Subset`.

        Raises:
            As `attribute`; ValueError if `n` or `criterion` is out of range.
        """
        n = selection_size(n, self._train_size)
        check_criterion(criterion)
        strata = check_strata(self.train_dataset, stratify_by)
        aggregate = "mean" if criterion == "most_helpful" else None
        groups = target_groups(eval_dataset, aggregate, group_by)
        _, blocks = self._score_blocks(eval_dataset, name, checkpoints, model_ids, groups)
        scores = row_scores(blocks, self._train_size, criterion)
        return selected(self.train_dataset, best_rows(scores, n, strata), scores)

    def self_influence(self, model_ids: Sequence[int] | None = None) -> Tensor:
        """τ(z_i, z_i) of every training row, shape `(n_train,)`: high for rows that only they themselves explain,
        such as mislabelled ones and outliers (TRAK paper, Section 2, with the row as its own target).

        Raises:
            IncompleteStoreError: nothing is featurized yet, or a checkpoint only in part.
        """
        return self._scorer.self_influence(self._scorer.ensemble(model_ids))

    def exclude(self, rows: Iterable[int]) -> "TrakAttributor":
        """The attributor of the training dataset without some rows; nothing is computed again, XᵀX is corrected.

        Args:
            rows: numbers of the rows to leave out.

        Returns:
            A new attributor. Row numbers in its results are those of its `train_dataset`, in which rows move up. This
            one is left as it is, and its store is needed as long as the new one is used. See `hf_trak.revised`.

        Raises:
            ValueError: a row number is out of range, or no row is left.
            IncompleteStoreError: nothing is featurized yet, or a checkpoint only in part.
            HfTrakError: the task's features depend on the training dataset as a whole (CLIP).
        """
        from hf_trak.revised import revise  # which imports this module

        return revise(self, exclude=rows)

    def extend(self, new_rows: Any, checkpoints: Checkpoint | Sequence[Checkpoint] | None = None) -> "TrakAttributor":
        """The attributor of the training dataset with more rows at its end; only those are featurized.

        Args:
            new_rows: rows with the columns of the training dataset.
            checkpoints: the featurized weights, in the order of their ids; needed where they cannot be found again.

        Returns:
            A new attributor, as [`~TrakAttributor.exclude`] gives it. The same call after an interruption goes on.

        Raises:
            As `exclude` and `featurize`.
        """
        from hf_trak.revised import revise

        sources = None
        if checkpoints is not None:
            sources = dict(zip(self.store.model_ids, _as_list(checkpoints), strict=True))
        return revise(self, added_rows=new_rows, sources=sources)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        **facts: Any,
    ) -> CommitInfo:
        """Publish the index as a dataset repo, with a card: see [`hf_trak.hub.push_index`].

        Resumes after an interruption, uploads only what the repo lacks, and keeps what others wrote into its card. All
        processes call this, the main process pushes. Think first of who may see gradients of your training data.

        Args:
            repo_id: the dataset repo, created if need be.
            private: visibility of a new repo; `True` with a public one is refused.
            token: as in `huggingface_hub`; passed on, never written anywhere.
            revision: the branch, created if need be.
            create_pr: open a pull request instead.
            facts: `model_name` and `model_revision` (the model repo), `checkpoints` (model ids to
                `"hf://user/model@revision"`), `lds`, `commit_message`.

        Returns:
            The commit.

        Raises:
            IncompleteStoreError: features are missing.
            HubAccessError: the repo cannot be written to, or the connection broke; the same call goes on.
            PeerProcessError: the main process failed.
        """
        from hf_trak.hub.push import push_attributor  # the Hub's room is not needed otherwise

        return push_attributor(
            self, repo_id, private=private, token=token, revision=revision, create_pr=create_pr, **facts
        )

    def _target_shards(
        self,
        name: str,
        model_id: int,
        eval_dataset: Any,
        n_targets: int,
        fingerprint: str,
        sources: Mapping[int, Checkpoint | None],
    ) -> ShardSet:
        """t of one checkpoint, `(m, k)`, computed if it is not in the store."""
        shards = self.store.targets(name, model_id, n_targets, fingerprint)
        if self.processes.from_main(shards.missing):
            with self._weights(model_id, self._source(model_id, sources)):
                description = f"{name}, checkpoint {model_id}"
                self._featurizer().fill(shards, eval_dataset, model_id, "target", description)
        return shards

    def _source(self, model_id: int, given: Mapping[int, Checkpoint | None]) -> Checkpoint | None:
        """Where the weights of a featurized checkpoint are: given now, remembered, or at the path in the store."""
        for known in (given, self._sources):
            if model_id in known:
                return known[model_id]
        path = self.store.checkpoint_info(model_id)["source"]
        return path if isinstance(path, str) and path.startswith("/") else None


def _as_list(checkpoints: Checkpoint | Sequence[Checkpoint] | None) -> list[Checkpoint | None]:
    if checkpoints is None or isinstance(checkpoints, str | os.PathLike | Mapping | torch.nn.Module):
        return [checkpoints]
    return list(checkpoints)


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
