"""`TrakAttributor`: from a `Trainer`, or from what a `Trainer` takes, to scores as columns of a dataset."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from datasets import Dataset as HFDataset
from huggingface_hub import CommitInfo
from torch import Tensor

from hf_trak.config import TrakConfig, checked_args
from hf_trak.curvature.conjugate_gradients import Refinement, checked_refinement
from hf_trak.curvature.maps import GradientMap
from hf_trak.curvature.report import CurvatureReport
from hf_trak.data.preferences import PreparingCollator, kind_of, trainer_task, training_rows
from hf_trak.data.reference_log_probs import with_references
from hf_trak.data.rows import Collator, RowPart, row_count
from hf_trak.data.text_columns import collator_of
from hf_trak.evaluation.tail_patch import PatchResult, verify_rows
from hf_trak.evaluation.trial_steps import Similarity
from hf_trak.featurize.converting import converted
from hf_trak.featurize.definition import as_list, checked_ids, sources_of
from hf_trak.featurize.exact import ExactScores
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.featurize.fidelity import (
    Fidelity,
    check_sketch,
    curvature_report,
    log_reports,
    measure_fidelity,
    whitened_map,
)
from hf_trak.featurize.predictions import predicted_rows
from hf_trak.featurize.reranking import RerankRequest, check_breakdown, check_rerank, rerank_result, two_passes
from hf_trak.featurize.revising import revise
from hf_trak.featurize.search import SearchIndex, build_search
from hf_trak.modelout_functions import AbstractModelOutput
from hf_trak.projectors import BlockProjector
from hf_trak.report.notebook import LastResult
from hf_trak.runtime.progress import log_on_interrupt
from hf_trak.scores.groups import GroupBy, RowGroups, target_groups
from hf_trak.scores.score_files import ScoreFiles
from hf_trak.scores.scored_dataset import TOP_K_COLUMNS, attach_columns, without_rerank_columns
from hf_trak.scores.scorer import PlannedScores
from hf_trak.scores.selection import (
    Criterion,
    best_rows,
    check_criterion,
    check_strata,
    group_score_columns,
    row_scores,
    selected,
    selection_size,
)
from hf_trak.scores.spans import single_labels, span_targets, with_token_scores
from hf_trak.store.atomic import safe_name
from hf_trak.store.sealed import content_digest
from hf_trak.weights.checkpoints import Checkpoint

if TYPE_CHECKING:
    from hf_trak.report.notebook import TargetDisplay


class TrakAttributor(FeaturizedModel):
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

    The constructor takes what `Trainer` takes; see [`~hf_trak.featurize.featurized.FeaturizedModel`].
    """

    _last: LastResult | None = None
    _last_exact = False
    _last_rows: RowPart | None = None
    _last_refinement: Refinement | None = None

    @classmethod
    def from_trainer(
        cls,
        trainer: Any,
        args: TrakConfig | None = None,
        task: str | AbstractModelOutput | Callable[..., Tensor] | None = None,
        train_dataset: Any = None,
    ) -> "TrakAttributor":
        """Take model, training dataset, collator and processing class from a `transformers.Trainer`.

        Trainers of preferences, rewards and policies of TRL also have a task, with the settings of their loss, and a
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
                the model.
            train_dataset (`Dataset`, *optional*):
                Rows in place of those of the trainer: the rollouts of a trainer of policies.

        Raises:
            TypeError: `trainer` is no `Trainer`, or `args` no `TrakConfig`.
            ValueError: the trainer has no training dataset, `args.output_dir` is the trainer's own, there is no task
                for the loss of a trainer of preferences, its rows are none or lack a reference model, and all of
                `TrakAttributor(...)`.
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
        return cls(
            trainer.accelerator.unwrap_model(trainer.model),
            args,
            train_dataset=with_references(trainer, rows, args.output_dir, args.use_cpu),
            data_collator=collator_of(trainer) if kind_of(trainer) is None else PreparingCollator(trainer),
            processing_class=trainer.processing_class,
            task=trainer_task(trainer, rows) if task is None else task,
            num_workers=trainer.args.dataloader_num_workers,
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
            repo_or_path (`str`):
                A dataset repo, a copy of one, or the output directory of a run.
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

    def feature_map(self, model_id: int) -> BlockProjector | GradientMap:
        """Return the map from gradients to features under the weights that the model has now.

        Args:
            model_id (`int`):
                The checkpoint that they are.
        """
        return whitened_map(self, model_id) if self.args.curvature.whitened else super().feature_map(model_id)

    def check_features(self, model_id: int) -> None:
        """Warn if whitened features do not hold the inner products of whitened gradients."""
        if self.args.curvature.whitened:
            check_sketch(self, model_id)

    def fit_curvature(
        self,
        checkpoints: Checkpoint | Sequence[Checkpoint] | None = None,
        model_ids: Sequence[int] | None = None,
    ) -> "TrakAttributor":
        """Fit the curvature of exact scores to a random sample of the training rows.

        Which one, and its damping, is set in the configuration (`curvature`). It is kept in
        `<output_dir>/curvature/<model_id>/`; the same call after an interruption goes on, with any number of
        processes. The weights of the model are the same afterwards as before. A short report is logged;
        [`~TrakAttributor.curvature_report`] gives all of it.

        Args:
            checkpoints (*optional*):
                One checkpoint or a list, as in `featurize`. By default the model's current weights.
            model_ids (`Sequence[int]`, *optional*):
                The ids under which they are kept, 0, 1, … by default.

        Returns:
            `TrakAttributor`: the attributor itself.

        Raises:
            ConfigMismatchError: the curvature that is there was fitted to other parameters or with other settings.
            CheckpointMismatchError: a `model_id` is taken by other weights.
            NonFiniteError: a gradient is NaN or infinite; names the parameter and the rows.
            TypeError: labels cannot be drawn for the task: use `CurvatureConfig(labels="empirical")`.
        """
        exact = ExactScores(self)
        exact.fit(checkpoints, model_ids)
        log_reports(exact, checked_ids(as_list(checkpoints), model_ids))
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
            ValueError: `curvature="identity"`, of which there is nothing to report.
        """
        return curvature_report(ExactScores(self), model_id)

    def fidelity(self, rows: int = 64, targets: int = 16, seed: int = 0, model_id: int | None = None) -> Fidelity:
        """Compare scores from the stored features with exact ones, on a random sample.

        Targets are training rows, too, other ones than those that are scored. The features are compared with whole
        gradients, and the scores of the index with exact ones under the curvature, which is fitted first where it is
        missing. The rest costs a pass over `rows + targets` rows, and disk space for the gradients of the targets.

        Args:
            rows (`int`, *optional*, defaults to 64):
                Number of training rows to score; fewer where there are no more.
            targets (`int`, *optional*, defaults to 16):
                Number of targets; half of the training rows at most.
            seed (`int`, *optional*, defaults to 0):
                Seed of the sample.
            model_id (`int`, *optional*):
                The checkpoint. By default the first.

        Returns:
            [`~hf_trak.featurize.fidelity.Fidelity`]: rank correlations and overlaps of the highest rows.

        Raises:
            IncompleteStoreError: nothing is featurized yet, or only in part, or the training rows are not at hand.
            ValueError: a number is out of range, or there are fewer than 4 training rows.
            All that `fit_curvature` raises.
        """
        return measure_fidelity(self, "index", rows, targets, seed, model_id)

    def first_pass_fidelity(self, first_pass_bytes: int = 512, targets: int = 16, seed: int = 0) -> Fidelity:
        """Measure what a first pass over the first bytes of every row misses, on a sample.

        Training rows are drawn as targets, and all others are scored for them from whole rows and from their first
        bytes. This takes no model.

        Args:
            first_pass_bytes (`int`, *optional*, defaults to 512):
                See [`~TrakAttributor.attribute`].
            targets (`int`, *optional*, defaults to 16):
                Number of training rows that are drawn as targets.
            seed (`int`, *optional*, defaults to 0):
                Seed of the draw.

        Returns:
            [`~hf_trak.featurize.fidelity.Fidelity`]: rank correlation of the scores, and overlap
            of the rows with the highest ones.

        Raises:
            IncompleteStoreError: nothing is featurized yet, or a checkpoint only in part.
            ValueError: the features are not codes, or a number is out of range.
        """
        return measure_fidelity(self, first_pass_bytes, targets=targets, seed=seed)

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
        exact: bool = False,
        first_pass_bytes: int | None = None,
        candidates: int | None = None,
        rerank: int | None = None,
        refine: str | Refinement | None = None,
    ) -> HFDataset:
        """Score every training row against every target, over the ensemble of featurized checkpoints.

        Args:
            eval_dataset (`Dataset`):
                The targets, with the columns of the training dataset.
            top_k (`int` or `None`, *optional*, defaults to 20):
                Number of training rows to return per target, from either end. `None` returns every score.
            name (`str`, *optional*):
                Name of the experiment, under which target features are kept. The default identifies the dataset.
            per (`str`, *optional*, defaults to `"target"`):
                `"target"` for one row per target, or `"train"` for one row per training row, whose indices and scores
                then refer to targets.
            checkpoints (*optional*):
                The featurized weights, in the order of `model_ids`. They are needed where they cannot be found again:
                state dicts or modules of another process.
            model_ids (`Sequence[int]`, *optional*):
                The checkpoints to average over. By default all in the store.
            aggregate (`str`, *optional*):
                `"mean"` scores the mean output over all targets, which is the mean of their scores, at the cost of
                one target.
            group_by (`str` or a sequence, *optional*):
                Scores the mean output of each group of targets: the name of a column, or one value per target.
            exact (`bool`, *optional*, defaults to `False`):
                Score with whole gradients under the curvature that [`~TrakAttributor.fit_curvature`] fits, instead of
                with features: one pass over the training rows, of which nothing is stored but scores. A curvature that
                is missing is fitted first.
            first_pass_bytes (`int`, *optional*):
                Look at the first so many bytes of every row, and at the whole rows of the best of these alone. For
                stores with codes; 512, 1024, 2048, … are whole blocks. The rows that it misses are those that the
                first bytes rank low; [`~TrakAttributor.first_pass_fidelity`] measures them.
            candidates (`int`, *optional*):
                Rows of the first pass whose whole features are read, for each target and end. By default 50 times
                `top_k`, and 1,000 at least.
            rerank (`int`, *optional*):
                Take so many rows from the features, for each target and end, and score these rows with whole gradients
                under the fitted curvature, as `exact=True` scores all rows. The cost does not grow with the training
                dataset.
            refine (`str` or `Refinement`, *optional*):
                `"cg"` refines the targets of exact scores by conjugate gradients on the Gauss-Newton matrix of some
                training rows, which knows all parameters together, where the fitted curvature knows layers. Options
                are in [`~hf_trak.curvature.conjugate_gradients.Refinement`].

        Returns:
            The rows (as stored, without a transform set on them, if they are a `datasets.Dataset`) with the columns
            `trak_indices`, `trak_scores`, `trak_harmful_indices`, `trak_harmful_scores`, or with `trak_scores`
            alone: a fixed-size list with one score per training row (`per="target"`) or per target (`per="train"`).
            With `aggregate` or `group_by`, targets are groups, in ascending order of their values: one row for each,
            with its value and `n_targets`, the number of its members.
            With `rerank`, `trak_index_ranks` and `trak_harmful_index_ranks` are the ranks that the features gave to
            the rows, from 1, and null for rows that they have behind the first `rerank` of the target; `trak_stage` is
            `"exact"`, or `"refined"`, or `"index"` where the training rows are not at hand and nothing was reranked.

        Raises:
            IncompleteStoreError: nothing is featurized yet, or a checkpoint only in part.
            CheckpointMismatchError: the weights at hand are not those of the features.
            ValueError: `top_k`, `name` or `per` is out of range, the dataset is empty, or `checkpoints` are not as
                many as the model ids.
            SingularGramError: the ridge is too small for these features.
        """
        if per not in ("target", "train"):
            raise ValueError(f"`per` is {per!r}. Expected 'target' or 'train'.")
        row_count(eval_dataset, "eval_dataset")
        groups = target_groups(eval_dataset, aggregate, group_by)
        if top_k is not None and (not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1):
            raise ValueError(f"`top_k` is {top_k!r}. Expected an integer of at least 1, or `None` for every score.")
        refinement = checked_refinement(refine, exact or rerank is not None)
        with log_on_interrupt(
            lambda: "Nothing half-written was left. Run the same call again; target features are kept."
        ):
            if rerank is not None:
                count = check_rerank(rerank, top_k, per, exact)
                assert top_k is not None  # `check_rerank` has looked
                given = (eval_dataset, name, checkpoints, model_ids, groups, top_k, count)
                return self._reranked(RerankRequest(*given, first_pass_bytes, candidates, refinement))
            if first_pass_bytes is not None:
                return self._attributed_in_two_passes(
                    eval_dataset, top_k, name, per, checkpoints, model_ids, groups, exact, first_pass_bytes, candidates
                )
            plan = self._planned(exact, eval_dataset, name, checkpoints, model_ids, groups, False, refinement)
            return self._attributed(plan, eval_dataset, top_k, per, model_ids, groups, exact, refinement)

    def _attributed_in_two_passes(
        self,
        eval_dataset: Any,
        top_k: int | None,
        name: str | None,
        per: str,
        checkpoints: Checkpoint | Sequence[Checkpoint] | None,
        model_ids: Sequence[int] | None,
        groups: RowGroups | None,
        exact: bool,
        first_pass_bytes: int,
        candidates: int | None,
    ) -> HFDataset:
        if top_k is None or per != "target" or exact:
            raise ValueError(
                f"`first_pass_bytes` is {first_pass_bytes}, with `top_k={top_k}`, `per={per!r}` and `exact={exact}`. "
                "A first pass finds the best rows of each target from stored features. Leave it out for other scores."
            )
        name, columns = two_passes(
            self, eval_dataset, name, checkpoints, model_ids, groups, top_k, first_pass_bytes, candidates
        )
        rows = without_rerank_columns(eval_dataset if groups is None else groups.table())
        scored = attach_columns(rows, columns)
        if groups is None:
            self._last, self._last_exact = LastResult(scored, eval_dataset, name, model_ids), False
            self._last_rows, self._last_refinement = None, None
        return scored

    @property
    def reranked_rows(self) -> RowPart | None:
        """The training rows that the last `attribute(..., rerank=...)` has scored with whole gradients, if it did."""
        return self._last_rows

    def _reranked(self, request: RerankRequest) -> HFDataset:
        result = rerank_result(self, request)
        rows = request.eval_dataset if request.groups is None else request.groups.table()
        scored = attach_columns(without_rerank_columns(rows), result.columns)
        if request.groups is None:
            self._last = LastResult(scored, request.eval_dataset, result.name, request.model_ids)
            self._last_exact, self._last_rows = result.rows is not None, result.rows
            self._last_refinement = None if result.rows is None else request.refinement
        return scored

    def _planned(
        self,
        exact: bool,
        eval_dataset: Any,
        name: str | None,
        checkpoints: Checkpoint | Sequence[Checkpoint] | None,
        model_ids: Sequence[int] | None,
        groups: RowGroups | None,
        everywhere: bool,
        refinement: Refinement | None = None,
    ) -> PlannedScores:
        """Plan scores from features or from whole gradients, of all rows or of those that fall to this process."""
        plan = ExactScores(self, refinement=refinement).plan if exact else self.plan_scores
        return plan(eval_dataset, name, checkpoints, model_ids, groups, everywhere)

    def _attributed(
        self,
        plan: PlannedScores,
        eval_dataset: Any,
        top_k: int | None,
        per: Literal["target", "train"],
        model_ids: Sequence[int] | None,
        groups: RowGroups | None,
        exact: bool,
        refinement: Refinement | None = None,
    ) -> HFDataset:
        """Write planned scores as columns, see [`~TrakAttributor.attribute`]."""
        n_targets = len(eval_dataset)
        rows = self.train_dataset if per == "train" else eval_dataset if groups is None else groups.table()
        n_targets = n_targets if groups is None else len(groups)
        length = self._train_size if per == "target" else n_targets
        # A name for each result: another one never comes to lie beneath a dataset that is still in use.
        digest = content_digest({**plan.identity, "experiment": plan.name, "per": per, "top_k": top_k})
        stem = f"per-{per}-{digest}" if top_k is None else f"per-{per}-top-{top_k}-{digest}"
        directory = self.store.output_dir / "scores" / safe_name(plan.name, "name")
        files = ScoreFiles(directory, stem, self.processes, self._train_size, n_targets)
        rows = without_rerank_columns(rows)
        scored = attach_columns(rows, files.columns(plan.blocks, None if top_k is None else min(top_k, length), per))
        if per == "target" and groups is None:
            self._last, self._last_exact = LastResult(scored, eval_dataset, plan.name, model_ids), exact
            self._last_rows, self._last_refinement = None, refinement
        return scored

    def show(self, target: int, **options: Any) -> "TargetDisplay":
        """Display one target of the last `attribute(..., per="target")` in a notebook, as a report shows it.

        The first call counts the scores of all targets for their distributions, which costs as much as `attribute`.

        Args:
            target (`int`):
                Row of the targets.
            options:
                `examples`, the number of training examples from either end, 5 by default; `image_column`,
                `text_columns`, `label_column`, `label_names`, where the defaults do not find them.

        Raises:
            IndexError: there is no such target.
            ValueError: nothing is attributed yet, or a column does not exist.
        """
        from hf_trak.report.notebook import (
            exact_distributions,  # reports need more packages than attribution does
            show_last,
        )

        last = self._last
        counted = last is None or last.distributions is not None or TOP_K_COLUMNS[0] not in last.scored.column_names
        if last is not None and self._last_exact and not counted:
            given = (last.eval_dataset, last.name, last.model_ids)
            last.distributions = exact_distributions(
                self, last.scored, *given, rows=self._last_rows, refinement=self._last_refinement
            )
        return show_last(self, self._last, target, **options)

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
        return converted(self, output_dir, feature_dtype)

    def build_search(
        self, factory: str = "SQ8", model_ids: Sequence[int] | None = None, directory: str | Path | None = None
    ) -> SearchIndex:
        """Put the training features into an index of FAISS, which answers single targets in milliseconds.

        Needs the extra `search` (`faiss-cpu`), and memory for all vectors: k numbers per row and checkpoint.

        Args:
            factory (`str`, *optional*, defaults to `"SQ8"`):
                Kind of the index, as in `faiss.index_factory`: `"Flat"` for float32 and exact scores, `"SQ8"` for 8
                bits per number, `"IVF1024,SQ8"` to look at a part of the rows.
            model_ids (`Sequence[int]`, *optional*):
                The checkpoints to average over. By default all in the store.
            directory (`str` or `Path`, *optional*):
                Where the index is kept: read if it is there and of these features, and otherwise built and saved.

        Returns:
            [`~hf_trak.featurize.search.SearchIndex`], whose method `search` takes targets.

        Raises:
            ImportError: FAISS is not installed.
            ValueError: FAISS knows no such kind of index.
            IncompleteStoreError: nothing is featurized yet, or a checkpoint only in part.
            StoreError: `directory` holds an index of other features.
        """
        return build_search(self, factory, model_ids, directory)

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
        """Score every training row against *one part* of each target, such as one word of an answer.

        Args:
            eval_dataset (`Dataset`):
                The targets, for a task that aggregates over labels.
            tokens, chars, words, mask_column, text_column, ids_column:
                The part, see [`~hf_trak.scores.spans.span_targets`].
            kwargs:
                Arguments of [`~TrakAttributor.attribute`].

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
        """Score as [`~TrakAttributor.attribute`] does, and break every score down by the label tokens of its target.

        This costs one gradient per label token, and a file of all their scores.

        Args:
            eval_dataset, top_k, name, kwargs:
                As in [`~TrakAttributor.attribute`].

        Returns:
            As [`~TrakAttributor.attribute`], with `trak_token_positions`, `trak_token_scores` and
            `trak_harmful_token_scores`: `scored[j]["trak_token_scores"][r][t]` is the part of
            `scored[j]["trak_scores"][r]` that comes from the label at `scored[j]["trak_token_positions"][t]`. The
            parts add up to the score.

        Raises:
            As [`~TrakAttributor.attribute`].
            ValueError: `rerank` is given, which scores no row for single tokens.
            TypeError: the task has one label per sample.
        """
        self.require_one_draw(eval_dataset, "Each draw may have other labels.")
        check_breakdown(kwargs.get("rerank"))
        singles = single_labels(self.task, self.featurizer().batches(eval_dataset, "target"), eval_dataset)
        scored = self.attribute(eval_dataset, top_k=top_k, name=name, **kwargs)
        parts = self.attribute(singles, top_k=None, name=None if name is None else f"{name}-tokens", **kwargs)
        return with_token_scores(scored, parts)

    def group_scores(
        self,
        eval_dataset: Any,
        train_group_by: GroupBy,
        name: str | None = None,
        checkpoints: Checkpoint | Sequence[Checkpoint] | None = None,
        model_ids: Sequence[int] | None = None,
        aggregate: Literal["mean"] | None = None,
        group_by: GroupBy | None = None,
        exact: bool = False,
    ) -> HFDataset:
        """Score whole groups of training rows (a class, a source): Σ_{i ∈ group} τ_ij for every target j.

        Args:
            eval_dataset (`Dataset`):
                The targets.
            train_group_by (`str` or a sequence):
                A column of the training dataset, or one value per training row.
            name, checkpoints, model_ids, aggregate, group_by, exact:
                As in [`~TrakAttributor.attribute`].

        Returns:
            The targets, or groups of them, with the columns `trak_groups`, `trak_group_scores` and
            `trak_group_sizes`: lists with one entry per group, the same groups in every row. The mean over a group is
            its score divided by its size.

        Raises:
            As `attribute`; ValueError or TypeError if the column is unknown or cannot form groups.
        """
        groups = target_groups(eval_dataset, aggregate, group_by)
        train_groups = RowGroups.of(self.train_dataset, train_group_by, "train_group_by")
        blocks = self._planned(exact, eval_dataset, name, checkpoints, model_ids, groups, everywhere=True).blocks
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
        exact: bool = False,
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
            group_by (`str` or a sequence, *optional*):
                First average the scores over groups of targets, so that each group counts the same: the name of a
                column, or one value per target.
            stratify_by (`str` or a sequence, *optional*):
                Let each group of training rows keep its share of the rows: a column of the training dataset, or one
                value per training row.
            name, checkpoints, model_ids, exact:
                As in [`~TrakAttributor.attribute`].

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
        blocks = self._planned(exact, eval_dataset, name, checkpoints, model_ids, groups, everywhere=True).blocks
        scores = row_scores(blocks, self._train_size, criterion)
        return selected(self.train_dataset, best_rows(scores, n, strata), scores)

    def self_influence(self, model_ids: Sequence[int] | None = None, exact: bool = False) -> Tensor:
        """Score every training row against itself: τ(z_i, z_i), shape `(n_train,)`.

        The score is high for rows that only they themselves explain, such as mislabelled ones and outliers (TRAK
        paper, Section 2, with the row as its own target).

        Args:
            model_ids (`Sequence[int]`, *optional*):
                The checkpoints to average over. By default all in the store.
            exact (`bool`, *optional*, defaults to `False`):
                With whole gradients under the fitted curvature P: q · ∇fᵀ P⁻¹ ∇f. The Gram matrix of the hybrid takes
                no part.

        Raises:
            IncompleteStoreError: nothing is featurized yet, or a checkpoint only in part.
        """
        if exact:
            return ExactScores(self).self_influence(None, model_ids)
        return self.scorer.self_influence(self.scorer.ensemble(model_ids))

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
            TypeError: the dataset has a transform or is no `datasets.Dataset`, or the task has no prediction that
                could be a label.
            ValueError: there are arguments of `generate` for a classifier, or nothing is generated.
        """
        return predicted_rows(self, dataset, generation)

    def verify(
        self,
        target: Any,
        rows: Sequence[int],
        similar: Similarity | Sequence[int] | None = "embeddings",
        draws: int = 16,
        seed: int = 0,
        checkpoints: Checkpoint | Sequence[Checkpoint] | None = None,
        model_ids: Sequence[int] | None = None,
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
                `"bm25"`, those that share tokens with it (needs `bm25s`), among 1,024 rows drawn at random, `rows`
                left out; or numbers of rows; or `None` for no such control.
            draws (`int`, *optional*, defaults to 16):
                How often as many random rows are drawn, at least 4.
            seed (`int`, *optional*, defaults to 0):
                Seed of the draws.
            checkpoints, model_ids (*optional*):
                As in [`~TrakAttributor.attribute`]. `model_ids=[2]` takes one checkpoint.

        Returns:
            [`~hf_trak.evaluation.tail_patch.PatchResult`]: the changes, and a verdict; `print` shows both.

        Raises:
            ValueError: `target` is not one row, a row number is out of range, a number is too small, or the gradients
                of all rows are zero.
            TypeError: the output of the task depends on more than one row and the weights (CLIP).
            IncompleteStoreError: the training rows are not at hand.
            CheckpointMismatchError: the weights at hand are not those of the features.
            ImportError: `"bm25"` is asked for, and `bm25s` is not installed.
        """
        return verify_rows(self, target, rows, similar, draws, seed, checkpoints, model_ids)

    def exclude(self, rows: Iterable[int]) -> "TrakAttributor":
        """Leave rows out of the training dataset. Nothing is computed again; XᵀX is corrected.

        Args:
            rows (`Iterable[int]`):
                Numbers of the rows to leave out.

        Returns:
            A new attributor. Row numbers in its results are those of its `train_dataset`, in which rows move up. This
            one is left as it is, and its store is needed as long as the new one is used.

        Raises:
            ValueError: a row number is out of range, or no row is left.
            IncompleteStoreError: nothing is featurized yet, or a checkpoint only in part.
            HfTrakError: the task's features depend on the training dataset as a whole (CLIP).
        """
        return revise(self, exclude=rows)

    def extend(self, new_rows: Any, checkpoints: Checkpoint | Sequence[Checkpoint] | None = None) -> "TrakAttributor":
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
        return revise(self, added_rows=new_rows, sources=sources_of(self.store.model_ids, checkpoints))

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

        The call goes on after an interruption, uploads only what the repo lacks, and keeps what others wrote into its
        card. All processes call it, and the main process pushes. Think first of who may see gradients of your
        training data.

        Args:
            repo_id (`str`):
                The dataset repo, created if need be.
            private (`bool`, *optional*):
                Visibility of a new repo. `True` with a public one is refused.
            token (`str` or `bool`, *optional*):
                As in `huggingface_hub`. It is passed on and never written anywhere.
            revision (`str`, *optional*):
                The branch, created if need be.
            create_pr (`bool`, *optional*, defaults to `False`):
                Open a pull request instead.
            facts:
                `model_name` and `model_revision` (the model repo), `checkpoints` (model ids to
                `"hf://user/model@revision"`), `lds`, `fidelity`, `commit_message`; `curvature=False` leaves curvatures
                out.

        Returns:
            `huggingface_hub.CommitInfo`: the commit.

        Raises:
            HfTrakError: the attributor came from `exclude` or `extend`.
            IncompleteStoreError: features are missing.
            HubAccessError: the repo cannot be written to, or the connection broke; the same call goes on.
            PeerProcessError: the main process failed.
        """
        from hf_trak.hub.push import push_attributor  # loaded by those who publish or use indexes

        return push_attributor(
            self, repo_id, private=private, token=token, revision=revision, create_pr=create_pr, **facts
        )
