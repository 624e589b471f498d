"""`TrakAttributor`: from a `Trainer`, or from what a `Trainer` takes, to scores as columns of a dataset."""

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from datasets import Dataset as HFDataset
from huggingface_hub import CommitInfo
from torch import Tensor
from torch.utils.data import DataLoader

from hf_trak.config import TrakConfig, checked_args
from hf_trak.curvature.report import CurvatureReport
from hf_trak.data.preferences import PreparingCollator, kind_of, training_rows
from hf_trak.data.reference_log_probs import with_references
from hf_trak.data.rows import Collator, attribute_of, row_count
from hf_trak.data.text_columns import collator_of
from hf_trak.data.trainer_tasks import task_of
from hf_trak.evaluation.retraining import ReplayCheck, check_by_retraining
from hf_trak.evaluation.review import (
    MOST_FALSE_DOUBTS,
    doubted_labels,
    repeated_rows,
    review_table,
    trained_classes,
    warn_of_price,
    with_row_labels,
)
from hf_trak.evaluation.tail_patch import PatchResult, verify_rows
from hf_trak.evaluation.trainer_retraining import TrainerRetraining, model_outputs
from hf_trak.evaluation.trial_steps import Similarity
from hf_trak.evaluation.validation_loss import has_loss, loss_question, rows_with_loss, validation_losses
from hf_trak.featurize.answering import answer, planned
from hf_trak.featurize.calibrating import calibrate
from hf_trak.featurize.calibration import Calibration, named
from hf_trak.featurize.choosing import MINUTE, Recommendation, choose, recommend, seconds_of
from hf_trak.featurize.converting import converted
from hf_trak.featurize.definition import Checkpoints, sources_of
from hf_trak.featurize.estimation import Estimate
from hf_trak.featurize.exact import ExactScores
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.featurize.fidelity import Fidelity, curvature_report, log_reports, measure_fidelity
from hf_trak.featurize.predictions import predicted_rows
from hf_trak.featurize.question import Question
from hf_trak.featurize.revising import revise
from hf_trak.featurize.run_replaying import RunReplay
from hf_trak.featurize.search import SearchIndex, build_search
from hf_trak.featurize.whitening import featurized_model
from hf_trak.methods import (
    AnyMethod,
    Exact,
    Index,
    Method,
    Replay,
    check_best_rows,
    checked_method,
    method_of_all_rows,
)
from hf_trak.modelout_functions import AbstractModelOutput
from hf_trak.modelout_functions.aggregated import labels_of
from hf_trak.modelout_functions.classification import RegressionModelOutput
from hf_trak.report.notebook import LastResult
from hf_trak.runtime.arguments import named_arguments
from hf_trak.runtime.checks import byte_size, is_int
from hf_trak.runtime.progress import duration, log_on_interrupt, say
from hf_trak.scores.groups import ALL, GroupBy, RowGroups
from hf_trak.scores.said_parts import Unit, said_parts
from hf_trak.scores.scored_dataset import attach_columns, without_rerank_columns
from hf_trak.scores.selection import (
    Criterion,
    best_rows,
    check_criterion,
    group_score_columns,
    row_scores,
    selected,
    selection_size,
)
from hf_trak.scores.spans import Span, single_labels, with_token_scores, with_tokens
from hf_trak.trajectory.summary import RunSummary

if TYPE_CHECKING:
    from hf_trak.report.notebook import TargetDisplay

logger = logging.getLogger(__name__)


@named_arguments
class TrakAttributor:
    """Find the training examples that made a model do what it did, with TRAK (arXiv 2303.14186).

    ```python
    attributor = TrakAttributor.from_trainer(trainer, args=TrakConfig(output_dir="trak"))
    attributor.featurize(checkpoints=["out/checkpoint-100", "out/checkpoint-200"])
    scored = attributor.attribute(eval_dataset, top_k=20)
    ```

    The result has one row per target. `scored[j]["trak_indices"][r]` is the row of the training dataset that helped
    target j r-th most, and `scored[j]["trak_scores"][r]` is its score. `trak_harmful_indices` and
    `trak_harmful_scores` are the most harmful rows: those with the lowest scores, which may be positive. A positive
    score says that training on the example raised the model output of the target.

    Attributes:
        features ([`~hf_trak.featurize.featurized.FeaturizedModel`]):
            The model, its training rows and their features: the store, and what computes features and scores.
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

        Raises:
            ValueError: unknown task or parameter name, empty dataset, a model whose task cannot be inferred, or one
                whose parameters are sharded over processes or offloaded.
            TypeError: `model` is no module, `args` no `TrakConfig`, or `train_dataset` or the dataset of `dataloader`
                has no rows by index.
        """
        self.features = featurized_model(
            model, args, train_dataset, data_collator, processing_class, task, dataloader=dataloader
        )
        self._last: LastResult | None = None

    @classmethod
    def _of(cls, features: FeaturizedModel) -> "TrakAttributor":
        """Make the attributor of a featurized model."""
        made = cls.__new__(cls)
        made.features, made._last = features, None
        return made

    @property
    def args(self) -> TrakConfig:
        """Return the configuration."""
        return self.features.args

    @property
    def model(self) -> torch.nn.Module:
        """Return the model."""
        return self.features.model

    @property
    def task(self) -> AbstractModelOutput:
        """Return the model output function."""
        return self.features.task

    @property
    def train_dataset(self) -> Any:
        """Return the training rows. Indices in results count them from 0."""
        return self.features.train_dataset

    @classmethod
    def from_trainer(
        cls,
        trainer: Any,
        args: TrakConfig | None = None,
        task: str | AbstractModelOutput | Callable[..., Tensor] | None = None,
        train_dataset: Any = None,
    ) -> "TrakAttributor":
        """Take model, training dataset, collator and processing class from a `transformers.Trainer`.

        Training rows are attributed by the loss that the trainer minimizes. Where that is not the loss of the model's
        task (an overridden `compute_loss`, `compute_loss_func`, label smoothing), the task is `trainer_loss`. Trainers
        of preferences, rewards and policies of TRL have a task of their own, with the settings of their loss, and a
        reference model, whose log-probabilities become columns of the rows.

        Args:
            trainer (`transformers.Trainer`):
                The trainer, before or after training. Its model is attributed as it is.
            args (`TrakConfig`, *optional*):
                The configuration. `remove_unused_columns=False` and `label_names` count here and in the arguments of
                the trainer. Columns that the trainer gives to its collator are kept, also where they are no inputs of
                the model, as in TRL's trainers.
            task (`str`, `AbstractModelOutput` or `Callable`, *optional*):
                The model output function: a name, an `AbstractModelOutput`, or a function
                `output_fn(model_output, batch) -> (B,)`. By default it follows from the trainer, or from the class of
                the model. `"trainer_loss"` takes the trainer's own loss in any case.
            train_dataset (`Dataset`, *optional*):
                Rows in place of those of the trainer: the rollouts of a trainer of policies.

        Raises:
            TypeError: `trainer` is no `Trainer`, or `args` no `TrakConfig`.
            ValueError: the trainer has no training dataset, `args.output_dir` is the trainer's own, there is no task
                for the loss of a trainer of preferences, its rows are none or lack a reference model, the loss of
                the trainer compares rows of a batch with each other, and all of `TrakAttributor(...)`.
        """
        parts = ("model", "args", "train_dataset", "data_collator", "processing_class", "accelerator")
        if missing := [name for name in parts if not hasattr(trainer, name)]:
            raise TypeError(
                f"`trainer` is a {type(trainer).__name__}, which has no {', '.join(f'`{name}`' for name in missing)}. "
                "Expected a `transformers.Trainer`. From a model and its rows: `TrakAttributor(model, args, "
                "train_dataset=...)`; from a published index or a directory: `TrakAttributor.from_pretrained(...)`."
            )
        if trainer.train_dataset is None and train_dataset is None:
            raise ValueError(
                "The trainer has no `train_dataset`. Expected the dataset that the model was trained on. Build the "
                "attributor with `TrakAttributor(model, args, train_dataset=...)`, or give the trainer its dataset."
            )
        args = checked_args(args)
        if Path(args.output_dir).resolve() == Path(trainer.args.output_dir).resolve():
            raise ValueError(
                f"`output_dir` is {args.output_dir!r}, the trainer's own, where both would write `checkpoint-…` "
                "directories, and the trainer may delete them. Expected another one, for example "
                f"{os.path.join(args.output_dir, 'trak')!r}."
            )
        args = replace(
            args,
            remove_unused_columns=args.remove_unused_columns and trainer.args.remove_unused_columns,
            label_names=trainer.args.label_names if args.label_names is None else args.label_names,
            use_cpu=args.use_cpu or trainer.args.device.type == "cpu",
        )
        rows = training_rows(trainer, train_dataset)
        model = trainer.accelerator.unwrap_model(trainer.model)
        collator = collator_of(trainer) if kind_of(trainer) is None else PreparingCollator(trainer)
        task = task_of(trainer, model, rows, collator, task)
        features = featurized_model(
            model,
            args,
            train_dataset=with_references(trainer, rows, args.output_dir, args.use_cpu),
            data_collator=collator,
            processing_class=trainer.processing_class,
            task=task,
            num_workers=trainer.args.dataloader_num_workers,
            trainer=trainer,
        )
        return cls._of(features)

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
        checkpoints: Checkpoints = None,
        **options: Any,
    ) -> "TrakAttributor":
        """Load a published index, and attribute new targets without the training data.

        Nothing of the repo is executed or unpickled, and every file is checked before it is used. Gram matrices and
        feature shards are downloaded when a call needs them, and only those.

        Args:
            repo_or_path (`str`):
                A dataset repo, a copy of one, the output directory of a run, or tables of an index
                (`hf_trak.store.tables`): a Parquet file, or a directory of such, by a path or an address of `fsspec`
                (`s3://bucket/tables`).
            model (`torch.nn.Module` or `str`, *optional*):
                The model that the index was made with: a module, a directory or a model repo. By default the repo and
                revision that the index records. Its weights are compared with the recorded fingerprints.
            revision (`str`, *optional*):
                Branch, tag or commit of the index.
            token (`str` or `bool`, *optional*):
                As in `huggingface_hub`. It is passed on and never written anywhere.
            local_files_only (`bool`, *optional*, defaults to `False`):
                Use what is in the Hub's cache, as `HF_HUB_OFFLINE` does.
            train_dataset (`Dataset` or `str`, *optional*):
                The training rows, or their repo, if they are at hand. `per="train"` then returns them. Exact
                scores need them.
            data_collator, processing_class (*optional*):
                As for `TrakAttributor`. Without training rows, the default collates mappings of tensors or numbers,
                and tuples.
            task (*optional*):
                The model output function, where it is one of your own.
            checkpoints (*optional*):
                The weights of every model id, in their order or by id, that neither the model nor a recorded repo has.
            options:
                Fields of `TrakConfig` that do not define features, such as `per_device_batch_size`, `use_cpu`, or
                `output_dir`, where target features and scores are kept (by default beside the Hub's cache). The ridge
                and the batch size are those of the index unless they are given.

        Raises:
            HubAccessError: repo, revision or file does not exist or cannot be reached.
            RefusedIndexError: the index is damaged or hostile, or of another format.
            ConfigMismatchError: model, task or training dataset are not those of the index.
            CheckpointMismatchError: the model has none of the weights that the index was made with.
            ValueError: the index names no model, or an option cannot be chosen.
        """
        from hf_trak.hub.loading import load_attributor  # loaded by those who publish or use indexes

        loaded = load_attributor(
            featurized_model,
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
        return cls._of(loaded)

    def save_pretrained(self, directory: str | Path, **facts: Any) -> None:
        """Write the index into a local directory: what [`~TrakAttributor.push_to_hub`] uploads.

        [`~TrakAttributor.from_pretrained`] loads it.

        Args:
            directory (`str` or `Path`):
                The directory, new or empty.
            facts:
                As for [`~TrakAttributor.push_to_hub`].

        Raises:
            ValueError: the directory exists and is not empty, the index is published already, or an argument is not a
                valid name of a repo or revision.
            TypeError: `facts` has another name.
            HfTrakError: the attributor came from `exclude` or `extend`.
            IncompleteStoreError: features are missing.
            StoreError: a file is damaged, or the directory cannot be written.
        """
        from hf_trak.hub.push import save_index  # loaded by those who publish indexes

        save_index(self.features, directory, **facts)

    def __repr__(self) -> str:
        rows, kind = len(self.train_dataset), type(self.model).__name__
        return f"TrakAttributor({kind}, {rows:,} training rows, output_dir={self.args.output_dir!r})"

    def featurize(self, checkpoints: Checkpoints = None, part: tuple[int, int] = (0, 1)) -> "TrakAttributor":
        """Compute the features of the training rows for one or several checkpoints, and their Gram matrices.

        Shards that are on disk already are left alone, so the same call after an interruption finishes the work.
        The weights of the model are the same afterwards as before.

        Args:
            checkpoints (*optional*):
                One checkpoint or a list: modules, state dicts, `checkpoint-N` directories, `.safetensors`, or `.pt`
                files of tensors. They have the ids 0, 1, …, or those of a mapping `{id: checkpoint}`. By default the
                model's current weights.
            part (`tuple[int, int]`, *optional*, defaults to `(0, 1)`):
                `(index, count)` computes part `index` of `count` of the shards, for independent jobs that share
                `output_dir`, such as a job array. The job that finishes last computes the Gram matrices.

        Returns:
            `TrakAttributor`: the attributor itself.

        Raises:
            ConfigMismatchError: `output_dir` holds features made with another configuration.
            CheckpointMismatchError: a model id is taken by other weights.
            NonFiniteError: a gradient is NaN or infinite; names the row.
            StoreError: a shard on disk is damaged, or a file cannot be written.
            PeerProcessError: another process of this run failed or died.
        """
        begun, features = time.monotonic(), self.features
        features.featurize(checkpoints, part)
        if features.processes.is_main_process and part == (0, 1):
            size = byte_size(sum(one.stat().st_size for one in features.store.output_dir.glob("checkpoint-*/*")))
            say(
                logger,
                f"The features of {features.train_size:,} rows are in {features.store.output_dir}: k = "
                f"{features.proj_dim:,}, {size}, {duration(time.monotonic() - begun)}.",
            )
        return self

    def fit_curvature(self, checkpoints: Checkpoints = None) -> "TrakAttributor":
        """Fit the curvature of exact scores to a random sample of the training rows.

        Which one, and its damping, is set in the configuration (`curvature`). It is kept in
        `<output_dir>/curvature/<model_id>/`; the same call after an interruption goes on, with any number of
        processes. The weights of the model are the same afterwards as before. A short report is logged;
        [`~TrakAttributor.curvature_report`] gives all of it.

        Args:
            checkpoints (*optional*):
                One checkpoint, a list or a mapping, as in `featurize`. By default the model's current weights.

        Returns:
            `TrakAttributor`: the attributor itself.

        Raises:
            ConfigMismatchError: the curvature that is there was fitted to other parameters or with other settings.
            CheckpointMismatchError: a model id is taken by other weights.
            NonFiniteError: a gradient is NaN or infinite; names the parameter and the rows.
            TypeError: labels cannot be drawn for the task: use `CurvatureConfig(labels="empirical")`.
        """
        exact = ExactScores(self.features)
        log_reports(exact, exact.fit(checkpoints))
        return self

    def curvature_report(self, model_id: int = 0) -> CurvatureReport:
        """Report on the curvature that [`~TrakAttributor.fit_curvature`] has fitted to a checkpoint.

        Args:
            model_id (`int`, *optional*, defaults to 0):
                The checkpoint.

        Returns:
            [`~hf_trak.curvature.report.CurvatureReport`]: per block the spectrum, the effective dimension, shares of
            gradients and scores, and warnings. `print` shows it as a table.

        Raises:
            StoreError: no curvature is fitted to this checkpoint, or a file of it is damaged.
            ConfigMismatchError: the curvature that is there is of another kind, or of other parameters.
            ValueError: `curvature="identity"`, which leaves nothing to report.
        """
        return curvature_report(ExactScores(self.features), model_id)

    def fidelity(
        self, of: "Literal['index'] | Index | TrakAttributor" = "index", rows: int = 64, targets: int = 16
    ) -> Fidelity:
        """Compare scores that cost little with better ones, on a random sample of the training rows.

        Targets and scored rows are disjoint samples of the training rows, the same in every call.

        Args:
            of (*optional*, defaults to `"index"`):
                `"index"` compares the features with whole gradients, and the scores of the index with exact ones under
                the curvature, which is fitted first where it is missing. The rest costs a pass over `rows + targets`
                rows, and disk space for the gradients of the targets. The first checkpoint is compared.
                `Index(first_pass_bytes=512)` compares the first bytes of every row with whole rows, and another
                attributor, such as a conversion, its features with these. Neither takes the model; all rows that are
                no targets are scored.
            rows (`int`, *optional*, defaults to 64):
                Number of training rows to score with the index; fewer if the dataset has fewer.
            targets (`int`, *optional*, defaults to 16):
                Number of targets; half of the training rows at most.

        Returns:
            [`~hf_trak.featurize.fidelity.Fidelity`]: rank correlations and overlaps of the highest rows.

        Raises:
            IncompleteStoreError: nothing is featurized yet, or only in part, or the training rows are not at hand.
            ValueError: `of` is something else, a number is out of range, there are fewer than 4 training rows, or the
                features are no codes and so have no first bytes.
            All that `fit_curvature` raises.
        """
        if isinstance(of, TrakAttributor):
            return measure_fidelity(self.features, of.features.store, rows, targets)
        if isinstance(of, Index) and of.first_pass_bytes is not None:
            return measure_fidelity(self.features, of.first_pass_bytes, rows, targets)
        if of not in ("index", Index()):
            raise ValueError(
                f"`of` is {of!r}. Expected 'index', `Index(first_pass_bytes=...)`, or an attributor of the same rows."
            )
        return measure_fidelity(self.features, "index", rows, targets)

    def attribute(
        self,
        eval_dataset: Any,
        top_k: int | None = 20,
        *,
        method: Method = "auto",
        per: Literal["target", "train"] = "target",
        group_by: GroupBy | None = None,
        name: str | None = None,
        checkpoints: Checkpoints = None,
        part: Span | None = None,
        per_token: bool = False,
    ) -> HFDataset:
        """Score every training row against every target, over the ensemble of featurized checkpoints.

        Args:
            eval_dataset (`Dataset`):
                The targets, with the columns of the training dataset.
            top_k (`int` or `None`, *optional*, defaults to 20):
                Number of training rows to return per target, from either end. `None` returns every score.
            method (`str` or a dataclass of `hf_trak.methods`, *optional*, defaults to `"auto"`):
                `"index"` scores with the stored features, `"exact"` with whole gradients under a fitted curvature,
                `"rerank"` with whole gradients those rows that the features rank first, and `"replay"` with the steps
                of the run, of the last checkpoint. [`~hf_trak.Index`], [`~hf_trak.Exact`], [`~hf_trak.Rerank`] and
                [`~hf_trak.Replay`] have options. `"auto"` takes the best that is at hand and that
                `TrakConfig(budget=...)` allows, and says what it is and why.
            per (`str`, *optional*, defaults to `"target"`):
                `"target"` for one row per target, or `"train"` for one row per training row, whose indices and scores
                then refer to targets.
            group_by (`str` or a sequence, *optional*):
                Scores the mean output of each group of targets, at the cost of one target: the name of a column, one
                value per target, or `"all"` for one group of all targets. This is the mean of their scores.
            name (`str`, *optional*):
                Name of the experiment, under which target features are kept. The default identifies the dataset.
            checkpoints (*optional*):
                The checkpoints to average over. By default all in the store. `[0, 2]` are ids of featurized
                checkpoints. Weights are needed where they cannot be found again, as state dicts or modules of another
                process: a list in the order of the ids, or a mapping `{id: checkpoint}`.
            part ([`~hf_trak.Span`], *optional*):
                Scores one part of each target, such as one word of an answer.
            per_token (`bool`, *optional*, defaults to `False`):
                Break every score down by the label tokens of its target. This costs one gradient per label token, and
                a file of all their scores.

        Returns:
            The rows (as stored, without a transform set on them, if they are a `datasets.Dataset`) with the columns
            `trak_indices`, `trak_scores`, `trak_harmful_indices`, `trak_harmful_scores`, or with `trak_scores`
            alone: a fixed-size list with one score per training row (`per="target"`) or per target (`per="train"`).
            With `group_by`, targets are groups, in ascending order of their values: one row for each, with its value
            and `n_targets`, the number of its members.
            With `"rerank"`, `trak_index_ranks` and `trak_harmful_index_ranks` are the ranks that the features gave to
            the rows, from 1, and null for rows that they have behind the shortlist of the target; `trak_stage` is
            `"exact"`, or `"refined"`, or `"index"` where the training rows are not at hand and nothing was reranked.
            With `part`, there is the column `target_mask` of the part.
            With `per_token`, there are `trak_token_positions`, `trak_token_scores` and `trak_harmful_token_scores`:
            `scored[j]["trak_token_scores"][r][t]` is the part of `scored[j]["trak_scores"][r]` that comes from the
            label at `scored[j]["trak_token_positions"][t]`. The parts add up to the score, those of refined targets to
            within the tolerance of the refinement.

        Raises:
            IncompleteStoreError: nothing is featurized yet, or a checkpoint only in part.
            CheckpointMismatchError: the weights at hand are not those of the features.
            ValueError: `top_k`, `name`, `per` or `method` is out of range, they do not go together, the dataset is
                empty, or `checkpoints` are not as many as the model ids.
            TypeError: `per_token` or `part` is set, and the task has one number per target, or `part` is no `Span`.
            SingularGramError: the ridge is too small for these features.
        """
        if per not in ("target", "train"):
            raise ValueError(f"`per` is {per!r}. Expected 'target' or 'train'.")
        if top_k is not None and not is_int(top_k, 1):
            raise ValueError(f"`top_k` is {top_k!r}. Expected an integer of at least 1, or `None` for every score.")
        check_best_rows(checked_method(method), top_k, per)
        if part is not None:
            if not isinstance(part, Span) or labels_of(self.task) is None:
                raise TypeError(
                    f"`part` is {part!r}, and the task is {type(self.task).__name__}. Expected a `Span`, such as "
                    "`Span(words='barn')`, and a task with several labels per target. Leave `part` out, or pass "
                    "`task=`, such as 'causal_lm'."
                )
            ready = attribute_of(self.features.data_collator, "ready")
            eval_dataset = part.of(eval_dataset, self.features.processing_class, ready)
        with log_on_interrupt(
            lambda: "Nothing half-written was left. Run the same call again; target features are kept."
        ):
            if per_token:
                self._check_breakdown(eval_dataset, top_k, method, per, group_by)
                batches = self.features.featurizer().batches(eval_dataset, "target")
                singles = single_labels(self.task, batches, eval_dataset)
            listed, begun = top_k if per == "target" and not per_token else None, time.monotonic()
            chosen, question = self._asked(eval_dataset, method, name, checkpoints, group_by, listed, per_token)
            scored = self._attributed(chosen, question, top_k, per, begun)
            if not per_token:
                return scored
            last, alone = last_result(self), None if name is None else f"{name}-tokens"
            begun = time.monotonic()
            parts = self._attributed(*self._asked(singles, chosen, alone, checkpoints), None, per, begun)
            self._last = replace(last, scored=with_token_scores(scored, parts))
            return self._last.scored

    def _attributed(
        self, method: AnyMethod, question: Question, top_k: int | None, per: Literal["target", "train"], begun: float
    ) -> HFDataset:
        """Attach the columns of the answer, and remember the result. The time is counted from `begun` on."""
        features = self.features
        found = answer(features, question, method, top_k, per)
        if features.processes.is_main_process:
            say(
                logger,
                f"{named(method)} scored {features.train_size:,} rows for {question.m:,} "
                f"target{'s' * (question.m != 1)} in {duration(time.monotonic() - begun)}.",
            )
        rows = self.train_dataset if per == "train" else question.rows
        scored = attach_columns(without_rerank_columns(rows), found.columns)
        if per == "target":
            self._last = LastResult(scored, question, found)
        return scored

    def _asked(
        self,
        eval_dataset: Any,
        method: Method,
        name: str | None = None,
        checkpoints: Checkpoints = None,
        group_by: GroupBy | None = None,
        top_k: int | None = None,
        per_token: bool = False,
    ) -> tuple[Any, Question]:
        """Check what is asked, and choose the method of `"auto"`.

        A replay starts from the last checkpoint, where others average over all.
        """
        features, chosen = self.features, checked_method(method)

        def question(replayed: bool) -> Question:
            ids = checkpoints
            if replayed and ids is None:
                features.processes.broadcast_from_main(features.prepare_store)
                ids = features.store.model_ids[-1:] or None
            featurized = not (replayed or isinstance(chosen, Exact))
            return features.question(eval_dataset, name, ids, group_by, featurized)

        asked = question(isinstance(chosen, Replay))
        if method == "auto":
            return choose(features, asked, lambda: question(True), top_k, per_token)
        return chosen, asked

    def _check_breakdown(
        self, eval_dataset: Any, top_k: int | None, method: Method, per: str, group_by: GroupBy | None
    ) -> None:
        """Refuse to break scores down by tokens that are no top-k result from scores of all rows."""
        method_of_all_rows(method)
        if top_k is None or per != "target" or group_by is not None:
            raise ValueError(
                f"`per_token` is set, with `top_k={top_k}`, `per={per!r}` and `group_by={group_by!r}`. Expected the "
                "best rows of each target, whose scores are broken down. Leave the others out."
            )
        self.features.require_one_draw(eval_dataset, "Each draw may have other labels.")

    def calibrate(self, eval_dataset: Any = None, targets: int = 6, by: Replay | None = None) -> Calibration:
        """Replay a few targets of the run, and find the method whose scores agree with them best.

        The index at several ridges, EK-FAC at several dampings, the hybrid and refined targets are judged, as many as
        take no longer than the replay, and weighted sums of the best of each kind. The choice is that by which scores
        of targets that are left out agree best. It is kept beside the index, published with it, and taken by
        `method="auto"` from then on, as far as `TrakConfig(budget=...)` allows, until weights, rows or the record of
        the run are others.

        Args:
            eval_dataset (`Dataset`, *optional*):
                The targets, from which some are drawn. By default they are training rows, judged without their scores
                for themselves.
            targets (`int`, *optional*, defaults to 6):
                Number of targets to replay, at least 3; all if there are fewer.
            by ([`~hf_trak.Replay`], *optional*):
                The replay that judges. By default that of the run, which `TrakCallback(record=True)` has recorded.
                `Replay()` judges by the recipe, for which the trainer is enough.

        Returns:
            [`~hf_trak.featurize.calibration.Calibration`]: the figures of all methods, and the choice; `print` shows
            them.

        Raises:
            ValueError: there are fewer than 3 targets.
            IncompleteStoreError: nothing is featurized yet, or the run has no record.
            HfTrakError: the run cannot be replayed, its replay has signs that its scores are wrong, or no method
                agrees with it.
            StoreError: the record is damaged, or the choice cannot be written.
        """
        return calibrate(self.features, eval_dataset, targets, by)

    def trajectory(self, name: str = "run") -> RunSummary:
        """Describe the run of the model: its steps, weights and rates, and what `Replay(of="run")` costs.

        Args:
            name (`str`, *optional*, defaults to `"run"`):
                Name of the record, that of the callback.

        Returns:
            [`~hf_trak.trajectory.summary.RunSummary`], which prints as text.

        Raises:
            IncompleteStoreError: there is neither a record nor the weights before the first step.
            HfTrakError: the order of the rows, their loss or the optimizer's numbers cannot be known.
            StoreError: the record is damaged.
        """
        return RunReplay(self.features, Replay(of="run", name=name)).summary(activations=True)

    def verify_replay(
        self, eval_dataset: Any, make_trainer: Callable[[Any, int], Any], share: float = 0.05
    ) -> ReplayCheck:
        """Train once more without a random share of the rows, and compare what the replay predicts for every target.

        Args:
            eval_dataset (`Dataset`):
                The targets.
            make_trainer (`Callable`):
                `make_trainer(rows, seed)` returns the trainer of the run with the weights before it, as for
                [`~hf_trak.evaluation.TrainerRetraining`]. It is to ignore `seed`, so that rows come in the same order.
            share (`float`, *optional*, defaults to 0.05):
                The share of the training rows to leave out.

        Returns:
            [`~hf_trak.evaluation.retraining.ReplayCheck`]: predicted and measured changes, R² and rank correlation,
            which the report of these scores has, too.

        Raises:
            ValueError: `share` leaves out no row, or all of them; or the loss of the trainer cannot be masked.
            All that [`~TrakAttributor.attribute`] raises.
        """
        method, ids = Replay(of="run"), self.features.chosen(None, featurized=False)[0]
        seconds = seconds_of(self.features, method, row_count(eval_dataset, "eval_dataset"), ids)
        if seconds is not None and seconds > MINUTE and self.features.processes.is_main_process:
            logger.warning("The replay of all targets takes about %s, before the training.", duration(seconds))
        scored = self.attribute(eval_dataset, top_k=None, method=method).with_format("numpy")
        given = (eval_dataset, self.task, self.features.data_collator, self.args.batch_size)
        outputs = model_outputs(self.model, *given)
        retraining = TrainerRetraining(
            make_trainer, self.train_dataset, *given[:3], batch_size=self.args.batch_size, drop="mask"
        )
        found = check_by_retraining(scored["trak_scores"][:].T, outputs, retraining, share)
        last_result(self).check = str(found)
        return found

    def sources(
        self, eval_dataset: HFDataset, part: Unit | Span = "word", top_k: int = 5, *, verify: bool = True
    ) -> HFDataset:
        """Find the training rows behind each word that a language model says, beside those that words alone find.

        `show` and `report` then display the words in three columns: the rows that made the model say a word, those
        that share the longest sequence of words with it, and what a training step on each of them does to it. BM25 is
        beside them. The method is the one that `attribute` chooses.

        Args:
            eval_dataset (`datasets.Dataset`):
                What the model says: a result of [`~TrakAttributor.predict`], chats, completions, or texts.
            part (`str` or [`~hf_trak.Span`], *optional*, defaults to `"word"`):
                `"word"` or `"sentence"` explains each of them, and a `Span`, such as `Span(words="in Ballarat")`, one
                part of each target.
            top_k (`int`, *optional*, defaults to 5):
                Training rows of each kind.
            verify (`bool`, *optional*, defaults to `True`):
                Take the training steps. That costs 16 of them for each target, and one for each row that is found; the
                time is logged.

        Returns:
            One row for each part, with the columns of [`~TrakAttributor.attribute`] and `part`, its words;
            `trak_target`, the number of its target; and `trak_words`, see [`~hf_trak.report.with_words`].

        Raises:
            TypeError: the task is that of no language model that writes.
            ValueError: `part` is something else, or nothing is said; and all that `attribute` raises.
        """
        from hf_trak.report.words import ids_column_of, with_words  # reports need more packages

        ids_column = ids_column_of(self.features)
        if isinstance(part, Span):
            scored = self.attribute(eval_dataset, top_k, part=part)
        else:
            ready = attribute_of(self.features.data_collator, "ready")
            rows = with_tokens(eval_dataset, ready, ids_column)
            parts = said_parts(rows, part, self.features.processing_class, ids_column)
            scored = self.attribute(parts, top_k)
        last = last_result(self)
        last.scored = with_words(self.features, scored, top_k, verify)
        return last.scored

    def review(self, eval_dataset: Any) -> HFDataset:
        """Tell what each training row did to validation rows, what may be wrong with it and what to do.

        The table can be edited and given to [`~hf_trak.evaluation.fixed_dataset`], which makes a dataset to train on.
        [`~hf_trak.evaluation.prove_removal`] trains without the rows that it changes. `report` then shows the rows
        that helped and harmed the validation rows most.

        Args:
            eval_dataset (`Dataset`):
                The validation rows, whose mean loss is the target, or minus their mean output where a task has none.

        Returns:
            `datasets.Dataset`: the training rows as stored, with their number `trak_index`; `effect`, the change of
            this loss by training on each, as in reports, so that positive effects harm; `reason`;
            `suggested_action`, one of `"keep"`, `"look"`, `"relabel"` and `"remove"`; and `suggested_label`, where
            rows have one label each. Columns of yours of such names are called `trak_own_effect`, say, until
            `fixed_dataset` gives them their names back.

        Raises:
            TypeError: the training rows are no `datasets.Dataset`, or the task has predictions of a regression for
                targets, without a loss.
            As `attribute`.
        """
        rows = self.train_dataset
        if not isinstance(rows, HFDataset):
            raise TypeError(
                f"The training rows are a {type(rows).__name__}. Expected a `datasets.Dataset`, to put columns beside "
                "its rows. Convert them, such as with `Dataset.from_list`."
            )
        features, begun = with_row_labels(self.features), time.monotonic()
        # The index finds few wrong labels, and scores of a hybrid are no changes of a loss.
        chosen = Exact("ekfac" if self.args.curvature.kind == "hybrid" else None)
        warn_of_price(features, chosen)
        asked, scale = self._of(features), 1.0
        if not has_loss(features) and isinstance(getattr(self.task, "of_task", self.task), RegressionModelOutput):
            raise TypeError(
                f"The task is {type(self.task).__name__}, whose targets are the predictions of a regression. Expected "
                "'regression', whose loss is known. Leave `task` out, or name that one."
            )
        if has_loss(features):
            eval_dataset = rows_with_loss(features, eval_dataset)
            question, (_, scale) = loss_question(features, eval_dataset), validation_losses(features, eval_dataset)
        else:
            question = features.question(eval_dataset, group_by=ALL, featurized=False)
        scores = asked._attributed(chosen, question, None, "target", begun)["trak_scores"][0]
        effects = -np.array(scores) / scale / len(rows)
        self._last = asked._last
        doubted, false = doubted_labels(features, np.flatnonzero(effects > 0), eval_dataset, chosen)
        label = trained_classes(features)
        repeated = repeated_rows(features.row_batches(rows, "train"), label)
        return review_table(rows, effects, label, doubted, false <= MOST_FALSE_DOUBTS, repeated)

    def show(self, target: int, **options: Any) -> "TargetDisplay":
        """Display one target of the last `attribute(..., per="target")` in a notebook, as a report shows it.

        The first call counts the scores of all targets for their distributions, which costs as much as `attribute`.

        Args:
            target (`int`):
                Row of the targets, or of the groups of them.
            options:
                `examples`, the number of training examples from either end, 5 by default; `image_column`,
                `text_columns`, `label_column`, `label_names`, where the defaults do not find them.

        Raises:
            ValueError: there is no such target, nothing is attributed yet, or a column does not exist.
        """
        from hf_trak.report.notebook import show_target  # reports need more packages than attribution does

        last = last_result(self)
        given = {"eval_dataset": last.question.rows, "distributions": last.counted()}
        return show_target(self.features, last.with_classes(self.features), target, **given, **options)

    def report(self, path: str | Path, **options: Any) -> Path:
        """Write the last `attribute(..., per="target")` as one HTML file, as `hf-trak report` writes a saved run.

        Scores of all targets are counted for their distributions first, which costs as much as `attribute`.

        Args:
            path (`str` or `Path`):
                The file.
            options:
                Fields of [`~hf_trak.report.ReportOptions`]: `title`, `examples`, `max_targets`, `image_column`,
                `text_columns`, `label_column`, `label_names`.

        Returns:
            `Path`: the file.

        Raises:
            ValueError: nothing is attributed yet, or a column does not exist.
            ImportError: jinja2 or, for images, pillow is not installed (extra `report`).
            StoreError: the file cannot be written.
        """
        from hf_trak.report.page import ReportOptions, write_report

        return write_report(last_result(self).run(self.features), path, ReportOptions(**options))

    def convert(self, output_dir: str | Path, feature_dtype: str) -> "TrakAttributor":
        """Write the features into another directory, with fewer bits per number.

        Args:
            output_dir (`str` or `Path`):
                Directory of the result.
            feature_dtype (`str`):
                Its storage, of fewer bits than now: a dtype, `"int8"`, `"int4"`, `"int2"` or `"int1"`.

        Returns:
            An attributor of the converted features.

        Raises:
            ValueError: `feature_dtype` has as many bits as now, or more.
            ConfigMismatchError: the directory holds something else than an earlier conversion of these features.
            IncompleteStoreError: not all shards are written.
            StoreError: a shard is damaged, or a file cannot be written.
        """
        return TrakAttributor._of(converted(self.features, output_dir, feature_dtype))

    def build_search(
        self, factory: str = "SQ8", directory: str | Path | None = None, checkpoints: Checkpoints = None
    ) -> SearchIndex:
        """Put the training features into an index of FAISS, for single targets: 25 ms for 290,000 rows of k = 512.

        Needs the extra `search` (`faiss-cpu`), and memory for all vectors: k numbers per row and checkpoint.

        Args:
            factory (`str`, *optional*, defaults to `"SQ8"`):
                Kind of the index, as in `faiss.index_factory`: `"Flat"` for float32 and exact scores, `"SQ8"` for 8
                bits per number, `"IVF1024,SQ8"` to look at an eighth of the rows.
            directory (`str` or `Path`, *optional*):
                Where the index is kept: read if it is there and of these features, and otherwise built and saved.
            checkpoints (*optional*):
                As in [`~TrakAttributor.attribute`].

        Returns:
            [`~hf_trak.featurize.search.SearchIndex`], whose method `search` takes targets.

        Raises:
            ImportError: FAISS is not installed.
            ValueError: FAISS knows no such kind of index.
            IncompleteStoreError: nothing is featurized yet, or a checkpoint only in part.
            StoreError: `directory` holds an index of other features.
        """
        return build_search(self.features, factory, directory, checkpoints)

    def group_scores(
        self, eval_dataset: Any, train_group_by: GroupBy, *, method: Method = "auto", group_by: GroupBy | None = None
    ) -> HFDataset:
        """Score whole groups of training rows (a class, a source): Σ_{i ∈ group} τ_ij for every target j.

        Args:
            eval_dataset (`Dataset`):
                The targets.
            train_group_by (`str` or a sequence):
                A column of the training dataset, or one value per training row.
            method, group_by:
                As in [`~TrakAttributor.attribute`]. The method scores all rows: `"index"`, `"exact"` or `"replay"`.

        Returns:
            The targets, or groups of them, with the columns `trak_groups`, `trak_group_scores` and
            `trak_group_sizes`: lists with one entry per group, the same groups in every row. The mean over a group is
            its score divided by its size.

        Raises:
            As `attribute`; ValueError or TypeError if the column is unknown or cannot form groups.
        """
        method_of_all_rows(method)
        train_groups = RowGroups.of(self.train_dataset, train_group_by, "train_group_by")
        chosen, question = self._asked(eval_dataset, method, group_by=group_by)
        sums = train_groups.sums(planned(self.features, question, chosen).blocks)
        return attach_columns(question.rows, group_score_columns(sums, train_groups))

    def select(
        self,
        n: int | float,
        eval_dataset: Any,
        criterion: Criterion = "most_helpful",
        *,
        method: Method = "auto",
        group_by: GroupBy | None = None,
        stratify_by: GroupBy | None = None,
    ) -> Any:
        """Choose the training rows that serve the targets best, ready to train on.

        Args:
            n (`int` or `float`):
                Number of rows, or the fraction of them.
            eval_dataset (`Dataset`):
                The targets.
            criterion (`str`, *optional*, defaults to `"most_helpful"`):
                `"most_helpful"` ranks rows by the mean of their scores over the targets, `"least_harmful"` by the
                minimum, so that a row is left out if it harms any target much.
            method (*optional*):
                As in [`~TrakAttributor.group_scores`].
            group_by (`str` or a sequence, *optional*):
                First average the scores over groups of targets, so that each group counts the same: the name of a
                column, or one value per target.
            stratify_by (`str` or a sequence, *optional*):
                Let each group of training rows keep its share of the rows: a column of the training dataset, or one
                value per training row.

        Returns:
            A `datasets.Dataset` of n rows, best first, with two more columns: `trak_index`, the row in the training
            dataset, and `trak_score`, the number it is ranked by. For other datasets a `torch.utils.data.Subset`.

        Raises:
            As `attribute`; ValueError if `n` or `criterion` is out of range.
        """
        n = selection_size(n, self.features.train_size)
        check_criterion(criterion)
        method_of_all_rows(method)
        strata = None if stratify_by is None else RowGroups.of(self.train_dataset, stratify_by, "stratify_by")
        if group_by is None and criterion == "most_helpful":
            group_by = ALL
        chosen, question = self._asked(eval_dataset, method, group_by=group_by)
        scores = row_scores(planned(self.features, question, chosen).blocks, self.features.train_size, criterion)
        return selected(self.train_dataset, best_rows(scores, n, strata), scores)

    def self_influence(self, method: Method = "auto") -> Tensor:
        """Score every training row against itself: τ(z_i, z_i), shape `(n_train,)`.

        The score is high for rows that only they themselves explain, such as mislabelled ones and outliers (TRAK
        paper, Section 2, with the row as its own target).

        Args:
            method (`str` or a dataclass of `hf_trak.methods`, *optional*, defaults to `"auto"`):
                `"index"`, or `"exact"` for whole gradients under the fitted curvature P: q · ∇fᵀ P⁻¹ ∇f. The Gram
                matrix of the hybrid takes no part. `"replay"` takes all training rows as targets, in groups that fit
                into memory: it costs a replay of n targets.

        Raises:
            IncompleteStoreError: nothing is featurized yet, or a checkpoint only in part.
            ValueError: the method scores the best rows of targets alone.
            All that [`~TrakAttributor.attribute`] raises.
        """
        chosen = method_of_all_rows(method)
        if isinstance(chosen, Index):
            return self.features.scorer_with(chosen.lambda_relative).self_influence(self.features.chosen(None)[0])
        if isinstance(chosen, Exact):
            return ExactScores(self.features, chosen).self_influence()
        _, question = self._asked(self.train_dataset, chosen)
        blocks = planned(self.features, question, chosen).blocks
        return torch.cat([scores[:, first:last].diagonal() for first, last, scores in blocks])

    def predict(self, dataset: HFDataset, **generation: Any) -> HFDataset:
        """Put the model's own predictions in place of labels, to ask what made it say so.

        Classifiers give the class with the highest logit. Language models continue each prompt, which is what comes
        before the first label, or the whole row where no label is masked; the answer alone is then attributed.

        Args:
            dataset (`datasets.Dataset`):
                Rows, with or without labels.
            generation:
                Arguments of `generate`, such as `max_new_tokens=32`. Without any, the answer is the likeliest next
                token at each step, as far as the model's generation config says.

        Returns:
            `datasets.Dataset`: the rows with predicted labels, and `predicted`, these as text, ready for
            [`~TrakAttributor.attribute`].

        Raises:
            TypeError: the dataset is no `datasets.Dataset`, or has a transform that makes labels of no stored column
                of labels, or the task has no prediction that could be a label.
            ValueError: there are arguments of `generate` for a classifier, or unknown ones, or an answer is empty.
        """
        return predicted_rows(self.features, dataset, generation)

    def verify(
        self,
        target: Any,
        rows: Sequence[int],
        similar: Similarity | Sequence[int] | None = "embeddings",
        draws: int = 16,
        checkpoints: Checkpoints = None,
    ) -> PatchResult:
        """Take one small training step on some rows, and compare its effect on a target with that of other rows.

        The weights are put back to the bit. Nothing has to be featurized, and the rows may come from anywhere.

        Args:
            target (`Dataset`):
                One row, such as `eval_dataset.select([0])`.
            rows (`Sequence[int]`):
                Numbers of training rows, such as `scored[0]["trak_indices"]`.
            similar (`str` or `Sequence[int]`, *optional*, defaults to `"embeddings"`):
                The rows that look like the target: those of the closest embeddings (inputs of the model's head), or
                `"bm25"`, those that share tokens with it, among 1,024 rows drawn at random, `rows`
                left out; or numbers of rows; or `None` for no such control.
            draws (`int`, *optional*, defaults to 16):
                How often as many random rows are drawn, at least 4.
            checkpoints (*optional*):
                As in [`~TrakAttributor.attribute`]. `checkpoints=[2]` takes one.

        Returns:
            [`~hf_trak.evaluation.tail_patch.PatchResult`]: the changes, and a verdict; `print` shows both.

        Raises:
            ValueError: `target` is not one row, a row number is out of range, a number is too small, or the gradients
                of all rows are zero.
            TypeError: the output of the task depends on more than one row and the weights (CLIP).
            IncompleteStoreError: the training rows are not at hand.
            CheckpointMismatchError: the weights at hand are not those of the features.
        """
        return verify_rows(self.features, target, rows, similar, draws, self.args.seed, checkpoints)

    def exclude(self, rows: Iterable[int]) -> "TrakAttributor":
        """Leave rows out of the training dataset. Nothing is computed again; XᵀX is corrected.

        Args:
            rows (`Iterable[int]`):
                Numbers of the rows to leave out.

        Returns:
            A new attributor. Row numbers in its results are those of its `train_dataset`, renumbered without
            gaps. The original attributor is unchanged, and its store is needed as long as the new one is used.

        Raises:
            TypeError: `rows` is a single number.
            ValueError: a row number is out of range, or no row is left.
            IncompleteStoreError: nothing is featurized yet, or a checkpoint only in part.
            HfTrakError: the task's features depend on the training dataset as a whole (CLIP).
        """
        return TrakAttributor._of(revise(self.features, exclude=rows))

    def extend(self, new_rows: Any, checkpoints: Checkpoints = None) -> "TrakAttributor":
        """Add rows at the end of the training dataset. Only those are featurized.

        Args:
            new_rows (`Dataset`):
                Rows with the columns of the training dataset.
            checkpoints (*optional*):
                The featurized weights, in the order of their ids, where they cannot be found again.

        Returns:
            A new attributor, as [`~TrakAttributor.exclude`] gives it. The same call after an interruption goes on.

        Raises:
            As `exclude` and `featurize`; ValueError if `checkpoints` are not as many as the featurized ones.
        """
        sources = sources_of(checkpoints, self.features.store.model_ids)[1]
        return TrakAttributor._of(revise(self.features, added_rows=new_rows, sources=sources))

    def estimate(
        self, eval_dataset: Any = 0, checkpoints: int = 1, measure: bool = False, method: Method = "auto"
    ) -> Estimate:
        """Tell what it takes to featurize and score: parameters, disk, memory, and time if it is measured.

        Args:
            eval_dataset (`Dataset` or `int`, *optional*, defaults to 0):
                The targets, or their number.
            checkpoints (`int`, *optional*, defaults to 1):
                Number of checkpoints.
            measure (`bool`, *optional*, defaults to `False`):
                Featurize a few batches in a temporary directory, to project the time.
            method (`str` or a dataclass of `hf_trak.methods`, *optional*, defaults to `"auto"`):
                As in [`~TrakAttributor.attribute`]: what reranking, refining and replaying take is counted if they are
                asked for.

        Returns:
            [`Estimate`]: sizes in bytes, times in seconds.

        Raises:
            ValueError: a number is out of range, or there are fewer than 3 training rows to measure with.
            All that [`~TrakAttributor.trajectory`] raises, for the replay of a run.
        """
        chosen = checked_method(method)
        run = None
        if isinstance(chosen, Replay) and chosen.of == "run":
            run = RunReplay(self.features, chosen).summary(activations=True)
        return self.features.estimate(eval_dataset, checkpoints, measure, chosen, run)

    def recommend(self, eval_dataset: Any) -> Recommendation:
        """Say what to take for these targets: a method for each budget, with its time, disk and expected quality.

        The quality is that of calibration, or the linear datamodeling score of models like this one on the banks. A
        few batches are featurized to measure the time.

        Args:
            eval_dataset (`Dataset` or `int`):
                The targets, or their number.

        Returns:
            [`~hf_trak.featurize.choosing.Recommendation`]: three rows and the calls to copy; `print` shows them.

        Raises:
            IncompleteStoreError: nothing is featurized yet, or a checkpoint only in part.
            StoreError: a calibration or a record is damaged.
        """
        return recommend(self.features, eval_dataset)

    def push_to_hub(self, repo_id: str, *, private: bool = True, **facts: Any) -> CommitInfo:
        """Publish the index as a dataset repo, with a card: see [`hf_trak.hub.push_index`].

        The call goes on after an interruption, uploads only what the repo lacks, and keeps what others wrote into its
        card. All processes call it, and the main process pushes. Think first of who may see gradients of your
        training data.

        Args:
            repo_id (`str`):
                The dataset repo, created if need be.
            private (`bool`, *optional*, defaults to `True`):
                Create a private repo, and refuse a public one. `False` creates a public repo.
            facts:
                `model_name` and `model_revision` (the model repo), `checkpoints` (model ids to
                `"hf://user/model@revision"`), `lds`, `fidelity`, `commit_message`; `curvature=False` leaves curvatures
                out. `token` is as in `huggingface_hub`, and never written anywhere; `revision` is the branch, created
                if need be; `create_pr=True` opens a pull request instead.

        Returns:
            `huggingface_hub.CommitInfo`: the commit.

        Raises:
            ValueError: `repo_id` is a directory (use [`~TrakAttributor.save_pretrained`]), or a public repo.
            HfTrakError: the attributor came from `exclude` or `extend`.
            IncompleteStoreError: features are missing.
            HubAccessError: the repo cannot be written to, or the connection broke; the same call goes on.
            PeerProcessError: the main process failed.
        """
        from hf_trak.hub.push import Destination, push_attributor  # loaded by those who publish or use indexes

        names = ("token", "revision", "create_pr", "commit_message")
        destination = Destination(repo_id, private, **{name: facts.pop(name) for name in names if name in facts})
        return push_attributor(self.features, destination, **facts)


def last_result(attributor: TrakAttributor) -> LastResult:
    """Return what the last `attribute(..., per="target")` of an attributor has found.

    Args:
        attributor (`TrakAttributor`):
            The attributor.

    Raises:
        ValueError: there is no such result yet.
    """
    if attributor._last is None:
        raise ValueError(
            "There is nothing to show yet. Expected a result of `attribute` with `per='target'`, its default. Call "
            "`attributor.attribute(eval_dataset)` first."
        )
    return attributor._last
