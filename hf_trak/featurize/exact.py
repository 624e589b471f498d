"""Exact scores: curvatures fitted to a model, targets preconditioned once, and all training rows streamed past them.

Everything that is kept has the form of features, and is computed and stored like them: preconditioned targets are
features `(m, P)`, scores are features `(n, m)` under the map whose matrix holds the targets. So they resume, divide
over processes and are checked in the same way.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_trak.curvature.conjugate_gradients import REFINED_DAMPING, Refinement
from hf_trak.curvature.curvature import Curvature, FitPlan, identity_curvature
from hf_trak.curvature.files import CURVATURE_VERSION, CurvatureFiles
from hf_trak.curvature.fit import CurvatureFit, Stage
from hf_trak.curvature.maps import GradientMap, SelfInfluence, TargetProducts, WhitenedProjection
from hf_trak.curvature.owner_maps import OwnPreconditioning, OwnSelfInfluence
from hf_trak.curvature.target_forms import LowRankForm, TargetForm
from hf_trak.data.rows import RowPart, row_count
from hf_trak.errors import SingularGramError
from hf_trak.featurize.definition import Checkpoints, drawn_rows, new_checkpoints
from hf_trak.featurize.estimation import weights_of
from hf_trak.featurize.exact_blocks import (
    TARGET_SHARD_BYTES,
    CheckpointScores,
    mean_blocks,
    target_dtype,
    target_rank,
    target_rows,
    whole_targets,
)
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.featurize.fit_batches import FitBatches
from hf_trak.featurize.owned import OwnedPasses, TargetBlocks, begun_with, check_targets, own_form, whole_width
from hf_trak.featurize.question import Question
from hf_trak.featurize.refining import TargetRefinement, refined_identity
from hf_trak.methods import Exact
from hf_trak.modelout_functions.aggregated import AggregatedModelOutput
from hf_trak.modelout_functions.base import AbstractModelOutput, BatchedModelOutput
from hf_trak.modelout_functions.classification import RegressionModelOutput
from hf_trak.modelout_functions.loss import GaussNewtonModelOutput, HasLoss, LossModelOutput, MinusLossModelOutput
from hf_trak.modelout_functions.sampled import SampledLikelihood
from hf_trak.runtime.sharding import is_sharded
from hf_trak.scores.groups import RowGroups
from hf_trak.scores.scorer import PlannedScores
from hf_trak.store.sealed import content_digest
from hf_trak.store.shard_set import ShardSet
from hf_trak.store.shards import ShardPlan
from hf_trak.weights.checkpoints import Checkpoint

logger = logging.getLogger(__name__)

HYBRID_DAMPING, HYBRID_DAMPING_OF_TOKENS = 10.0, 0.1
"""Damping c of the hybrid for tasks with one label per row, and for those with many: what the banks of the benchmark
of quality say, see docs/curvature.md."""


@dataclass(frozen=True)
class Fitted:
    """A checkpoint, whose weights the model has now, and the curvature that was fitted to them."""

    model_id: int
    curvature: Curvature


class ExactScores:
    """Fits curvatures and plans exact scores for a featurized model. All processes call its methods together."""

    def __init__(self, model: FeaturizedModel, method: Exact | None = None, rows: RowPart | None = None) -> None:
        """
        Args:
            model: the model, its training rows and its store.
            method: the kind of curvature and the refinement of targets; `None` for those of the configuration.
            rows: the training rows to score; `None` for all.

        Raises:
            ValueError: targets of the hybrid, or of a model that is divided over processes, are to be refined.
        """
        self.model = model
        self.args = model.args
        self.rows = rows
        method = Exact() if method is None else method
        self.refinement, self._damping = method.refinement, method.damping
        curvature = model.args.curvature
        curvature = curvature if method.curvature is None else replace(curvature, kind=method.curvature)
        self.target_dtype, self.target_rank = target_dtype(model.args), target_rank(model.args)
        self.hybrid = curvature.kind == "hybrid"
        self.kind = curvature.fitted_kind
        if self.refinement is not None and is_sharded(model.model):
            raise ValueError(
                "`refine` is 'cg', for a model that is divided over processes. Expected a whole model, for "
                "products with its Gauss-Newton matrix. Leave `refine` out, or load the model unsharded."
            )
        if self.hybrid and self.refinement is not None:
            raise ValueError(
                "`curvature` is 'hybrid', with `refine='cg'`. Expected a curvature by layers, which conjugate "
                "gradients refine; the hybrid solves another system. Set `curvature='ekfac'`, or leave `refine` out."
            )
        self._owned = OwnedPasses(model) if is_sharded(model.model) and self.kind != "identity" else None

    @property
    def damping(self) -> float:
        """Return c in 1 / (Λ + c · mean Λ)."""
        if self.refinement is not None and self.refinement.damping is not None:
            return self.refinement.damping
        if self._damping is not None:
            return self._damping
        if self.args.curvature.damping is not None:
            return self.args.curvature.damping
        if self.refinement is not None:
            return REFINED_DAMPING
        if not self.hybrid:
            return self.args.curvature.whitening_damping
        return HYBRID_DAMPING_OF_TOKENS if isinstance(self.model.task, AggregatedModelOutput) else HYBRID_DAMPING

    def form(self, curvature: Curvature) -> TargetForm:
        """Return the form in which preconditioned targets are kept."""
        if self.target_rank is None:
            return TargetForm(curvature, self.damping)
        return LowRankForm(curvature, self.damping, self.target_rank)

    @property
    def train_task(self) -> AbstractModelOutput:
        """Return the training rows' side. If the task has a loss whose sum the model minimizes, it is minus that
        loss."""
        task = self.model.task
        if isinstance(task, BatchedModelOutput) and isinstance(task, HasLoss):
            return LossModelOutput(of=task)
        return task

    @property
    def scored_task(self) -> AbstractModelOutput:
        """Return the task by which training rows are scored. Those of a hybrid have the scale of a Gauss-Newton
        matrix."""
        task = self.model.task
        if not self.hybrid:
            return self.train_task
        if isinstance(task, BatchedModelOutput) and isinstance(task, HasLoss):
            return task if isinstance(task, RegressionModelOutput) else GaussNewtonModelOutput(of=task)
        return task

    # -- curvatures --------------------------------------------------------------------------------------------------

    def fit(self, checkpoints: Checkpoints) -> list[int]:
        """Fit the curvature of one or several checkpoints, see [`~hf_trak.TrakAttributor.fit_curvature`].

        Returns:
            Their ids.
        """
        sources = new_checkpoints(checkpoints)
        self.model.processes.broadcast_from_main(self.model.prepare_store)
        for model_id, source in sources.items():
            with self.model.weights(model_id, source, register=True):
                self.fitted(model_id)
            self.model.sources[model_id] = source
        return list(sources)

    def fitted(self, model_id: int, owned: bool = False) -> Curvature:
        """Read or fit the curvature of the weights that the model has now. All processes call this together.

        Args:
            model_id: the checkpoint.
            owned: whether only the blocks that this process has are read, where the model is divided over processes.

        Raises:
            IncompleteStoreError: it is not there, and the training rows are not at hand.
            SingularGramError: all gradients of the rows of its sample are zero.
        """
        if self.kind == "identity":
            return identity_curvature(self.model.layout)
        rows = self.sample()
        plan = FitPlan(
            self.kind,
            tuple(rows),
            self.model.batch_size,
            weights_of(self.model.model, nn.Embedding | nn.EmbeddingBag),
            weights_of(self.model.model, Conv1D),
            f"curvature, checkpoint {model_id}",
        )
        identity = self.identity(model_id, rows)
        purpose = "exact scores, which need their gradients"
        with self.model.processes.all_or_none():
            if self.rows is None or not self.rows.at_hand:
                self.model.require_rows(purpose)  # before anything is fetched
            files = CurvatureFiles(self.model.store.curvature_dir(model_id, identity), identity)
            if files.saved() is None:
                self.model.require_rows(purpose)
        source = FitBatches(self.model, self.train_task, self.curvature_tasks(), model_id)
        fit = CurvatureFit(plan, files, source, self.model.layout, self.model.processes, self.model.device)
        curvature = fit.run(self._owned.chosen if owned and self._owned is not None else None)
        if curvature.scale == 0:
            raise SingularGramError(
                f"The gradients of all {len(rows)} training rows that the curvature was fitted to are zero, so that "
                "every score would be 0. Expected outputs that depend on the attributed parameters. Look at the "
                "labels of the training rows and at `grad_wrt`."
            )
        return curvature

    def curvature_tasks(self) -> dict[Stage, AbstractModelOutput]:
        """Return the task of each pass of a fit."""
        if self.args.curvature.labels == "empirical":
            return {"bases": self.train_task, "squares": self.train_task}
        task, seed = self.model.task, self.args.seed
        assert isinstance(task, BatchedModelOutput)
        return {"bases": SampledLikelihood(task, seed), "squares": SampledLikelihood(task, seed, second=True)}

    def sample(self) -> list[int]:
        """Choose the rows that the curvature is fitted to."""
        n = self.model.train_size
        return drawn_rows(n, self.args.curvature.sample_size(n), self.args.seed)

    def directory(self, model_id: int) -> Path:
        """Return the directory of the curvature of one checkpoint."""
        return self.model.store.output_dir / "curvature" / str(model_id)

    def identity(self, model_id: int, rows: Sequence[int]) -> dict[str, Any]:
        """Describe everything that a curvature depends on."""
        return {
            **self.model.store.identity(model_id),
            "curvature_version": CURVATURE_VERSION,
            "kind": self.kind,
            "labels": self.args.curvature.labels,
            "rows": len(rows),
            "sample": content_digest({"rows": list(rows)}),
            "seed": self.args.seed,
        }

    # -- scores ------------------------------------------------------------------------------------------------------

    def plan(self, question: Question, everywhere: bool = True) -> PlannedScores:
        """Compute the exact scores of all training rows, and plan how they are read.

        Arguments as in [`~hf_trak.featurize.featurized.FeaturizedModel.plan`].
        """
        model, parts, described = self.model, [], list[dict[str, Any]]()
        for model_id in question.ids:
            with self._weights(model_id, question.sources):
                model.targets(question, model_id)
                at = Fitted(model_id, self.fitted(model_id, owned=True))
                targets = self._targets(at, question)
                chunks = self._scores(at, question, targets)
                whitened = self._whitened(at) if self.hybrid else None
            parts.append(CheckpointScores(chunks, whitened, self.args.curvature.hybrid_lambda))
            described.append({"model_id": model_id, "scores": [one.content_hash for one in chunks]})
            if whitened is not None:
                described[-1]["whitened"] = whitened.content_hash
        identity = {
            "checkpoints": described,
            "config": model.store.config_hash,
            "exact": CURVATURE_VERSION,
            "groups": question.tag,
            "hybrid_lambda": self.args.curvature.hybrid_lambda if self.hybrid else None,
            **({"rows": self.rows.tag} if self.rows is not None and self.rows.tag else {}),
            **({} if self.refinement is None else {"refinement": refined_identity(self.refinement)}),
        }
        count = len(parts[0].chunks[0])
        mine = range(count) if everywhere else model.processes.share(count)
        return PlannedScores(identity, mean_blocks(parts, mine))

    def self_influence(self) -> Tensor:
        """Compute q · ∇fᵀ P⁻¹ ∇f of every training row, averaged over checkpoints: `(n,)`, float32."""
        model = self.model
        model.require_one_draw(model.train_dataset, "Self-influence is no mean over draws, since it has squares.")
        model.processes.broadcast_from_main(model.prepare_store)
        ids, sources = model.chosen(None, featurized=False)
        total = torch.zeros(model.train_size)
        for model_id in ids:
            with self._weights(model_id, sources):
                at = Fitted(model_id, self.fitted(model_id, owned=True))
                shards = self._shards_of_rows(at, "self-influence", 1)
                featurizer = model.featurizer(projector=self._self_influence(at.curvature))
                what = f"self-influence, checkpoint {model_id}"
                featurizer.fill(shards, model.train_dataset, model_id, "train", what)
            for shard in shards:
                total[shard.start : shard.stop] += shard.grads[:, 0] * shard.out_to_loss
        return total / len(ids)

    def _self_influence(self, curvature: Curvature) -> GradientMap:
        """Make the map of gradients g to gᵀ P⁻¹ g."""
        if self._owned is not None:
            return self._owned.map(OwnSelfInfluence(curvature, self.damping), curvature)
        division = self.model.featurizer().division
        add = division.total if len(division.ranks) > 1 else None
        return SelfInfluence(curvature, self.damping, add, division.is_leader)

    def _weights(self, model_id: int, sources: Mapping[int, Checkpoint | None]) -> AbstractContextManager[None]:
        """Load the weights of a checkpoint, and tie them to its id if nothing has yet."""
        if model_id in self.model.store.model_ids:
            return self.model.weights(model_id, self.model.source_of(model_id, sources))
        return self.model.weights(model_id, {**self.model.sources, **sources}.get(model_id), register=True)

    def _shards(
        self,
        at: Fitted,
        directory: Path,
        prefix: str,
        plan: ShardPlan,
        width: int,
        dtype: torch.dtype = torch.float32,
        **identity: str | int,
    ) -> ShardSet:
        """Return shards of numbers that depend on a curvature."""
        own = {
            **self.model.store.identity(at.model_id),
            "kind": prefix,
            "curvature": at.curvature.digest,
            "damping": str(self.damping),
            "rows": type(self.scored_task).__name__,
        }
        return ShardSet(directory, prefix, plan, width, dtype, {**own, **identity})

    def _shards_of_rows(self, at: Fitted, prefix: str, width: int) -> ShardSet:
        """Return shards of numbers of the training rows."""
        directory = self.directory(at.model_id) / f"{prefix}-{self._tag(at.curvature)}"
        n = self.model.train_size
        return self._shards(at, directory, prefix, ShardPlan(n, self.model.store.config["shard_size"]), width)

    def _shards_of_targets(
        self, at: Fitted, question: Question, kind: str, width: int, dtype: torch.dtype
    ) -> ShardSet:
        """Return shards of numbers of the targets, `width` for each."""
        m = len(question.eval_dataset)
        plan = ShardPlan(m, max(1, min(m, TARGET_SHARD_BYTES // (dtype.itemsize * width))))
        directory, given = self._directory(at, question), self._given(question, at.model_id)
        return self._shards(at, directory, kind, plan, width, dtype, targets=given)

    def _fill_gradients(self, gradients: ShardSet, question: Question, model_id: int) -> None:
        """Compute ∇f of the targets as they are, `(m, P)`."""
        plain = TargetForm(identity_curvature(self.model.layout), 0.0).preconditioning()
        featurizer = self.model.featurizer(self._target_task(question), plain)
        what = f"{question.title}, checkpoint {model_id}, gradients"
        featurizer.fill(gradients, question.eval_dataset, model_id, "target", what)

    def _tag(self, curvature: Curvature) -> str:
        """Name what is computed with a curvature and a damping."""
        described = {**curvature.describe(), "damping": self.damping, "rows": type(self.scored_task).__name__}
        return content_digest(described)[:12]

    def _targets(self, at: Fitted, question: Question) -> ShardSet:
        """Compute P⁻¹ ∇f of the targets: `(m, P)`."""
        if self.refinement is not None:
            return self._refined(at, question, self.refinement)
        if self._owned is not None:
            return self._targets_by_block(self._owned, at, question)
        form = self.form(at.curvature)
        kind = self._prefix("preconditioned")
        shards = self._shards_of_targets(at, question, kind, form.width, self.target_dtype)
        featurizer = self.model.featurizer(self._target_task(question), form.preconditioning())
        what = f"{question.title}, preconditioned, checkpoint {at.model_id}"
        featurizer.fill(shards, question.eval_dataset, at.model_id, "target", what)
        return shards

    def _directory(self, at: Fitted, question: Question) -> Path:
        """Return the directory of what is computed for targets with a curvature."""
        place = self.model.store.experiment_dir(question.name)
        of_loss = "-of-loss" if question.of_loss else ""
        return place / f"exact-{self._tag(at.curvature)}{of_loss}" / f"checkpoint-{at.model_id}"

    def _given(self, question: Question, model_id: int) -> str:
        """Identify the targets under a checkpoint."""
        identity = dict(self.model.store.saved_targets(question.name, model_id).identity)
        return content_digest(identity | ({"of_loss": True} if question.of_loss else {}))

    def _target_task(self, question: Question) -> AbstractModelOutput:
        """Return what is asked about targets: the output of the task, or minus its loss.

        Raises:
            TypeError: the task has no loss of every row.
        """
        task = self.model.task
        if not question.of_loss:
            return task
        if isinstance(task, BatchedModelOutput) and isinstance(task, HasLoss):
            return MinusLossModelOutput(of=task)
        raise TypeError(
            f"The task {type(task).__name__} has no loss of every row, and the loss of targets is asked about. "
            "Expected a task with `per_sample_loss(model_output, batch) -> (B,)`. Name such a task, or write that "
            "method."
        )

    def _targets_by_block(self, owned: OwnedPasses, at: Fitted, question: Question) -> ShardSet:
        """Compute P⁻¹ ∇f of the targets, each block by its owner, and return what is known of every target."""
        model, curvature = self.model, at.curvature
        m, taken = len(question.eval_dataset), whole_width(curvature.blocks, self.target_rank)
        plan = ShardPlan(m, max(1, min(m, TARGET_SHARD_BYTES // (self.target_dtype.itemsize * taken))))
        directory, given = self._directory(at, question), self._given(question, at.model_id)
        summary = self._shards(at, directory, self._prefix("preconditioned-by-block"), plan, 3, targets=given)
        keeper = self._blocks_of(summary, at)
        model.processes.broadcast_from_main(lambda: keeper.forget_incomplete(summary, curvature.blocks))
        if model.processes.broadcast_from_main(summary.unwritten):
            draws = model.featurizer().batches(question.eval_dataset, "target").draws
            form = own_form(curvature, self.damping, self.target_rank)
            projector = owned.map(OwnPreconditioning(form, keeper, draws), curvature)
            what = f"{question.title}, preconditioned, checkpoint {at.model_id}"
            featurizer = model.featurizer(self._target_task(question), projector)
            featurizer.fill(summary, question.eval_dataset, at.model_id, "target", what)
        return summary

    def _blocks_of(self, summary: ShardSet, at: Fitted) -> TargetBlocks:
        """Return the files of the blocks of preconditioned targets."""
        plan, dtype, given = summary.plan, self.target_dtype, summary.identity["targets"]

        def shards(block: str, width: int) -> ShardSet:
            prefix = f"{summary.prefix}-{block}"
            return self._shards(at, summary.directory, prefix, plan, width, dtype, targets=given)

        return TargetBlocks(plan, dtype, shards)

    def _refined(self, at: Fitted, question: Question, refinement: Refinement) -> ShardSet:
        """Compute (C + D)⁻¹ ∇f of the targets by conjugate gradients: `(m, P)`."""
        form, tag = self.form(at.curvature), refined_identity(refinement)
        gradients = self._shards_of_targets(at, question, "gradients", at.curvature.numel, torch.float32)
        refined = self._shards(
            at, gradients.directory / f"refined-{tag}", self._prefix("refined"), gradients.plan, form.width,
            self.target_dtype, targets=gradients.identity["targets"], refinement=tag,
        )  # fmt: skip

        def fill() -> None:
            self._fill_gradients(gradients, question, at.model_id)

        one = TargetRefinement(self.model, self.train_task, at.curvature, form, refinement, at.model_id)
        one.run(gradients, fill, refined, f"{question.title}, checkpoint {at.model_id}")
        return refined

    def _prefix(self, kind: str) -> str:
        """Name files by the form of targets that they hold, or depend on."""
        rank = "" if self.target_rank is None else f"-rank-{self.target_rank}"
        return kind + rank + ("" if self.target_dtype == torch.float32 else "-bfloat16")

    def _scores(self, at: Fitted, question: Question, targets: ShardSet) -> list[ShardSet]:
        """Stream the training rows past the targets, as many of these at a time as fit into memory."""
        model, owned, groups, m = self.model, self._owned, question.groups, question.m
        if owned is not None:
            with model.processes.all_or_none():
                check_targets(targets, self.target_rank)
        tag = "" if groups is None else f"-{groups.tag}"
        part = self.rows
        if part is not None and part.tag:
            tag += f"-rows-{part.tag}"
        train_rows = model.train_dataset if part is None else part.of(model.train_dataset)
        prefix = f"{self._prefix('scores' if owned is None else 'scores-by-block')}{tag}"
        together = self._together(at.curvature, groups is not None, targets, prefix)
        plan = ShardPlan(row_count(train_rows, "train_dataset"), model.store.config["shard_size"])
        chunks = []
        for first in range(0, m, together):
            columns = range(first, min(first + together, m))
            name = f"{prefix}-{columns.start:06d}-{columns.stop:06d}"
            known: dict[str, Any] = {"targets": targets.content_hash, "first": first}
            shards = self._shards(at, targets.directory, name, plan, len(columns), **known)
            chunks.append(shards)
            if not model.processes.broadcast_from_main(shards.unwritten):
                continue
            products = self._products(at, targets, columns, groups)
            featurizer = model.featurizer(self.scored_task, products)
            what = f"{question.title}, {'exact scores' if part is None else 'reranking'}, checkpoint {at.model_id}"
            featurizer.fill(shards, train_rows, at.model_id, "train", what)
        return chunks

    def _together(self, curvature: Curvature, grouped: bool, targets: ShardSet, prefix: str) -> int:
        """Return how many targets, or means of them, are multiplied at a time.

        A run that goes on with another number of processes keeps to the number that the first one began with.
        """
        rank, size = (None, 4) if grouped else (self.target_rank, self.target_dtype.itemsize)
        if self._owned is None:
            width = curvature.numel if grouped else self.form(curvature).width
        else:
            begun = self.model.processes.broadcast_from_main(lambda: begun_with(targets, prefix))
            if begun is not None:
                return begun
            width = self._owned.width(curvature.blocks, rank)
        return max(1, int(self.args.curvature.memory * 2**30) // (width * size))

    def _products(self, at: Fitted, targets: ShardSet, columns: range, groups: RowGroups | None) -> GradientMap:
        """Make the map of gradients to their products with some targets, or with means over groups of them."""
        device = self.model.device
        if self._owned is None:
            form = self.form(at.curvature)
            if groups is None:
                return form.products(target_rows(targets, columns, form).to(device))
            means = groups.means(whole_targets(targets, form))[columns.start : columns.stop]
            return TargetProducts(means.float().to(device))
        with self.model.processes.all_or_none():
            own, blocks = own_form(at.curvature, self.damping, self.target_rank), self._blocks_of(targets, at)
            if groups is None:
                products = own.products(blocks.read(own, columns).to(device))
            else:
                means = blocks.means(own, groups)[columns.start : columns.stop]
                products = own_form(at.curvature, self.damping, None).products(means.float().to(device))
        return self._owned.map(products, at.curvature)

    def _whitened(self, at: Fitted) -> ShardSet:
        """Compute the sketched, whitened loss gradients of the training rows: `(n, k)`."""
        model, projector = self.model, self.model.projector()
        shards = self._shards_of_rows(at, "whitened", projector.proj_dim)
        whitening: GradientMap = WhitenedProjection(at.curvature, self.damping, projector)
        if self._owned is not None:
            whitening = self._owned.map(whitening, at.curvature)
        featurizer = model.featurizer(self.scored_task, whitening)
        what = f"whitened train rows, checkpoint {at.model_id}"
        featurizer.fill(shards, model.train_dataset, at.model_id, "train", what)
        return shards
