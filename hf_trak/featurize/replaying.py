"""Replayed scores: the targets walked back through the steps of the run, and all training rows streamed past them.

    curvature/<model_id>/gradient-moments/          Σ∇ℓ and Σ(∇ℓ)² of eight parts of the training rows
    experiments/<name>/exact-<tag>/checkpoint-<model_id>/
      gradients-….safetensors                       ∇f of the targets `(m, P)`, removed when all are walked back
      replayed-….safetensors                        V = −Γ/n of the targets, as preconditioned ones are kept
      scores-….safetensors                          ⟨∇(−ℓ_i), V⟩, the effect of a weight of row i on each target

A file of targets is walked back by one process, whatever their number, so that results have the same bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import torch
from torch import Tensor

from hf_trak.curvature.curvature import Curvature
from hf_trak.curvature.maps import DenseSink, GradientMap, MapSink
from hf_trak.curvature.target_forms import LowRankForm
from hf_trak.data.rows import batch_rows
from hf_trak.errors import HfTrakError, NonFiniteError
from hf_trak.featurize.exact import ExactScores, Fitted
from hf_trak.featurize.exact_blocks import TARGET_SHARD_BYTES
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.featurize.featurizer import Featurizer
from hf_trak.featurize.question import Question
from hf_trak.gradient_computers.gauss_newton import GaussNewton, Hessian
from hf_trak.methods import Exact, Replay
from hf_trak.modelout_functions.aggregated import AggregatedModelOutput
from hf_trak.modelout_functions.base import BatchedModelOutput
from hf_trak.modelout_functions.classification import RegressionModelOutput
from hf_trak.modelout_functions.loss import LossModelOutput
from hf_trak.modelout_functions.trainer_loss import TrainerLossModelOutput
from hf_trak.runtime.processes import share_of
from hf_trak.runtime.progress import RowProgress
from hf_trak.runtime.sharding import is_sharded
from hf_trak.scores.groups import RowGroups
from hf_trak.scores.scorer import PlannedScores
from hf_trak.store.sealed import content_digest
from hf_trak.store.shard_set import ShardSet
from hf_trak.store.shards import ShardPlan
from hf_trak.trajectory.hyperparameters import Hyperparameters, hyperparameters
from hf_trak.trajectory.recipe import GradientMoments, rows_of_products, spans, walked_back

REPLAY_VERSION = 2
"""Raised whenever the same inputs give other replayed targets. It is part of their identity."""

PARTS = 8
"""Parts of the training rows for the moments of gradients. Each falls to one process."""

LARGEST_GROWTH = 100.0
"""Growth of a target's derivatives on the way back, beyond which its scores are not to be believed."""


class RowMoments(GradientMap):
    """The map of gradients to their squared norms, which adds up gradients and squares of them on the way.

    Attributes:
        sums (`torch.Tensor`): Σg and Σg², `(2, P)`, float64.
    """

    def __init__(self, numel: int, device: torch.device) -> None:
        """
        Args:
            numel: P.
            device: where gradients are.
        """
        super().__init__(1)
        self.sums = torch.zeros(2, numel, dtype=torch.float64, device=device)

    def sink(self, batch_size: int, model_id: int, device: str | torch.device) -> MapSink:
        rows = torch.zeros(batch_size, self.sums.shape[1], device=device)

        def add(start: int, block: Tensor) -> None:
            rows[:, start : start + block.shape[1]] += block

        def result() -> Tensor:
            for row in rows:
                self.sums[0] += row
                self.sums[1].addcmul_(row.double(), row.double())
            return rows.square_().sum(1, keepdim=True)

        return DenseSink(add, result)


class ReplayScores(ExactScores):
    """Walks targets back through the steps of the run, in place of a curvature. All processes call it together."""

    def __init__(self, model: FeaturizedModel, method: Replay) -> None:
        """
        Args:
            model: the model, its training rows and its store.
            method: the options.

        Raises:
            HfTrakError: the attributor was made without a trainer, its run has steps that cannot be replayed, or
                SGD had a loss of the trainer's own.
            TypeError: the task has no loss of every row.
            ValueError: the model is divided over processes.
            IncompleteStoreError: the training rows are not at hand.
        """
        super().__init__(model, Exact(curvature="identity"))
        if is_sharded(model.model):
            raise ValueError(
                "`method` is 'replay', for a model that is divided over processes. Expected a whole model, for "
                "products with its curvature. Load it unsharded, or set `method='exact'`."
            )
        if not isinstance(self.train_task, LossModelOutput):
            raise TypeError(
                f"`method` is 'replay', and the task {type(model.task).__name__} has no `per_sample_loss`. Expected "
                "one with the loss that the model was trained on. Set `method='exact'`, or write that method."
            )
        model.require_rows("`method='replay'`, which needs their gradients")
        model.require_one_draw(model.train_dataset, "Moments of gradients are those of one draw.")
        self.method = method
        self.warnings: tuple[str, ...] = ()
        self.run = trained_with(model)
        if self.run.kind == "sgd" and isinstance(model.task, TrainerLossModelOutput):
            raise HfTrakError(
                "`method` is 'replay', for SGD with a loss of the trainer's own, whose scale in a batch is not known "
                "here, and SGD's steps depend on it. Expected a loss of the model, or AdamW. Set `method='exact'`, or "
                "`Replay(of='run')`."
            )

    @property
    def damping(self) -> float:
        """Return 0: the schedule of learning rates is all the damping that there is."""
        return 0.0

    def plan(self, question: Question, everywhere: bool = True) -> PlannedScores:
        """Plan the scores of all training rows, as for exact scores, with what speaks against them."""
        return replace(super().plan(question, everywhere), warnings=self.warnings)

    def _tag(self, curvature: Curvature) -> str:
        replayed = {"version": REPLAY_VERSION, "run": self.run.describe(), "seed": self.args.seed}
        return content_digest({"replay": replayed, "method": asdict(self.method)})[:12]

    def _targets(self, at: Fitted, question: Question) -> ShardSet:
        """Compute V of the targets, or of the means over groups of them: `(question.m, P)`."""
        processes, groups, total = self.model.processes, question.groups, self.model.layout.total
        tag = "" if groups is None else f"-{groups.tag}"
        form = self.form(at.curvature)
        gradients = self._shards_of_targets(at, question, "gradients", total, torch.float32)
        plan = ShardPlan(question.m, min(question.m, max(1, TARGET_SHARD_BYTES // (4 * total))))
        found = self._shards(
            at, gradients.directory, f"{self._prefix('replayed')}{tag}", plan, form.width, self.target_dtype,
            targets=gradients.identity["targets"],
        )  # fmt: skip
        missing = processes.broadcast_from_main(found.unwritten)
        if not missing:
            self._look_at_growth(found, question)
            return found
        self._fill_gradients(gradients, question, at.model_id)
        moments, factor = self._moments(at)
        what = f"{question.title}, checkpoint {at.model_id}"
        with processes.all_or_none():
            for index in (missing[i] for i in processes.share(len(missing))):
                rows = found.plan.rows(index)
                asked = _gradients_of(gradients, groups, rows).to(self.model.device)
                walked, growth = self._walked_back(
                    asked, moments, factor, at.model_id, f"{what}, replaying {len(rows)} targets"
                )
                kept = form.compressed(walked) if isinstance(form, LowRankForm) else walked
                found.write(index, kept.cpu(), growth.float().cpu())
        processes.broadcast_from_main(lambda: _remove(gradients))
        self._look_at_growth(found, question)
        return found

    def _look_at_growth(self, found: ShardSet, question: Question) -> None:
        """Warn where derivatives grew on the way back. Beside V of each target is by how much its own did, `(m,)`."""
        growth = torch.cat([shard.out_to_loss for shard in found])
        hot = int((growth > LARGEST_GROWTH).sum())
        if hot:
            text = (
                f"Derivatives of {hot} of {len(growth)} targets grew more than {LARGEST_GROWTH:g} times on the way "
                f"back, {float(growth.max()):.3g} times at most: the run was too hot to be followed by these "
                f"products. Take more rows (`Replay(rows=...)`, now {self.method.rows}), or score with "
                "`method='exact'`."
            )
            self.warnings = (text,)
            self.model.warn_once(f"{question.title}: {text}")

    def _products(self, at: Fitted, targets: ShardSet, columns: range, groups: RowGroups | None) -> GradientMap:
        return super()._products(at, targets, columns, None)  # targets are means of groups already

    # -- the moments of gradients ------------------------------------------------------------------------------------

    def _moments(self, at: Fitted) -> tuple[GradientMoments, float]:
        """Compute mean and variance of the gradients of the trained loss, clipped.

        Returns:
            Both, and the factor by which they differ from those of the loss of a row: where the loss of a row is a sum
            over labels, training divides it by their number, as it divides a batch by its rows; and clipping.
        """
        model, n = self.model, self.model.train_size
        parts = [share_of(n, part, min(PARTS, n)) for part in range(min(PARTS, n))]
        directory, plan = self.directory(at.model_id) / "gradient-moments", ShardPlan(2 * len(parts), 2)
        shards = self._shards(at, directory, "moments", plan, model.layout.total)
        todo = model.processes.broadcast_from_main(shards.unwritten)
        mine = [todo[i] for i in model.processes.share(len(todo))]
        count = sum(len(parts[index]) for index in mine)
        what = f"gradients of the training rows, checkpoint {at.model_id}"
        with model.processes.all_or_none(), RowProgress.over(model.processes, count, what) as progress:
            for index in mine:
                shards.write(index, *self._summed(parts[index], at.model_id, progress))
        model.processes.wait_for_everyone()
        total, labels = torch.zeros(2, model.layout.total, dtype=torch.float64), 0.0
        for shard in shards:
            total += shard.grads
            labels += float(shard.out_to_loss[0])
        mean, square = total.to(model.device) / n
        rows = GradientMoments(-mean, (square - mean.square()).clamp_min(0))  # the task is minus the loss
        factor = n / labels * (2 if isinstance(model.task, RegressionModelOutput) else 1)  # of ½ (ŷ − y)²
        factor *= rows.scaled(factor).clipping(self.run)
        found = rows.scaled(factor)
        return GradientMoments(found.mean.float(), found.variance.float()), factor

    def _summed(self, rows: range, model_id: int, progress: RowProgress) -> tuple[Tensor, Tensor]:
        """Add up the gradients of some rows: Σg and Σg² `(2, P)`, and the numbers of their labels `(2,)`."""
        sums = RowMoments(self.model.layout.total, self.model.device)
        featurizer = self.model.featurizer(self.train_task, sums)
        size = max(1, min(self.args.batch_size, TARGET_SHARD_BYTES // (4 * self.model.layout.total)))
        featurizer.prepare_task(model_id, size)
        computer, batches = featurizer.computer(), featurizer.batches(self.model.train_dataset)
        labels, task = 0.0, self.model.task
        for numbers, batch in batches.iterate(batches.cuts(rows, size)):
            featurizer.let_collate_alone(computer, batches, numbers, batch)
            featurizer.features_of(numbers, batch, computer, model_id, "train")
            if isinstance(task, AggregatedModelOutput):
                labels += float(task.label_weights(batch).sum())
            else:
                labels += len(numbers)
            progress.update(len(numbers))
        return sums.sums.float().cpu(), torch.full((2,), labels)

    # -- the way back ------------------------------------------------------------------------------------------------

    def _walked_back(
        self, gradients: Tensor, moments: GradientMoments, factor: float, model_id: int, what: str
    ) -> tuple[Tensor, Tensor]:
        """Compute V of some targets from their gradients `(m, P)`, and by how much their derivatives grew, `(m,)`."""
        model, method = self.model, self.method
        n, steps = model.train_size, len(spans(self.run.steps, method.steps))
        parameters = dict(model.model.named_parameters())
        weights = torch.cat([parameters[slot.name].detach().flatten().float() for slot in model.layout.slots])
        drawn = list(rows_of_products(n, method.rows, steps, self.args.seed))
        featurizer = model.featurizer(self.train_task)
        with RowProgress.over(model.processes, sum(map(len, drawn)), what) as progress:
            multiply = self._curvature(featurizer, drawn, model_id, progress)
            found, growth = walked_back(
                gradients, weights, moments, self.run, lambda gamma: factor * multiply(gamma), method.steps
            )
        if not bool(torch.isfinite(found).all()):
            remedy = "Score with `method='exact'`, or record the run."
            if method.products != "gauss-newton" or steps < self.run.steps:
                remedy = f"Set `Replay(form='gauss-newton', steps={self.run.steps})`, or score with `method='exact'`."
            raise NonFiniteError(
                f"A target grew beyond all bounds on its way back through {self.run.steps} steps ({what}). Expected "
                f"learning rates that suit the curvature of the loss. {remedy}"
            )
        if float(growth.max()) > LARGEST_GROWTH and steps < self.run.steps:
            raise HfTrakError(
                f"Derivatives of targets grew {float(growth.max()):.3g} times on the way back in {steps} steps "
                f"({what}), which stand for {self.run.steps}: they are too large for the curvature of the loss. "
                "Expected smaller ones. Raise `steps` of `Replay(...)`."
            )
        return found * (-factor / n), growth

    def _curvature(
        self, featurizer: Featurizer, drawn: Sequence[Sequence[int]], model_id: int, progress: RowProgress
    ) -> Callable[[Tensor], Tensor]:
        """Return what multiplies `(m, P)` by the curvature of the mean loss of the rows that were drawn next."""
        featurizer.prepare_task(model_id, self.args.batch_size)
        task = featurizer.task
        assert isinstance(task, BatchedModelOutput)
        kind = Hessian if self.method.products == "hessian" else GaussNewton
        curvature = kind(self.model.model, task, self.model.layout)
        cuts = [[rows[i] for i in cut] for rows in drawn for cut in batch_rows(0, len(rows), self.args.batch_size)]
        stream, counts = featurizer.batches(self.model.train_dataset).iterate(cuts), iter(map(len, drawn))

        def multiply(directions: Tensor) -> Tensor:
            total, count, seen = torch.zeros_like(directions), next(counts), 0
            while seen < count:  # rows with images of different sizes come in several batches
                rows, batch = next(stream)
                total += curvature.products(featurizer.in_dtype_of_model(batch), directions)
                seen += len(rows)
                progress.update(len(rows))
            return total / count

        return multiply


def trained_with(model: FeaturizedModel) -> Hyperparameters:
    """Read the numbers of the steps of the run that made a model.

    Args:
        model: the model.

    Raises:
        HfTrakError: it was made without a trainer, or its run has steps that cannot be replayed.
    """
    if model.trainer is None:
        raise HfTrakError(
            "`method` is 'replay', and the attributor was not made from a trainer. Expected the trainer of the run, "
            "which knows optimizer, learning rates and batch size. Use `TrakAttributor.from_trainer(trainer)`, with "
            "the arguments of the run and the trained model, or set `method='exact'`."
        )
    return hyperparameters(model.trainer, model.model, model.layout)


def _gradients_of(gradients: ShardSet, groups: RowGroups | None, rows: range) -> Tensor:
    """Read the gradients of some targets, or of means over groups of them: `(len(rows), P)`."""
    if groups is not None:
        return groups.means((shard.start, shard.grads) for shard in gradients)[rows.start : rows.stop].float()
    first, last = gradients.plan.shard_of(rows.start), gradients.plan.shard_of(rows.stop - 1)
    start = gradients.plan.rows(first).start
    found = torch.cat([shard.grads for shard in gradients.part(range(first, last + 1))])
    return found[rows.start - start : rows.stop - start]


def _remove(gradients: ShardSet) -> None:
    """Remove what only an unfinished replay needs."""
    for index in range(len(gradients)):
        gradients.path(index).unlink(missing_ok=True)
