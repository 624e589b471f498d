"""The replay of a recorded run: from a question to scores of all training rows.

<output_dir>/experiments/<name>/replay-<digest>/targets-<first>-<last>/     see `trajectory.sweep`
"""

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_trak.data.preferences import kind_of
from hf_trak.data.rows import batch_rows
from hf_trak.errors import CheckpointMismatchError, HfTrakError
from hf_trak.featurize.exact import ExactScores
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.featurize.question import Question
from hf_trak.gradient_computers.base import run_model, saved_activation_bytes
from hf_trak.methods import Replay
from hf_trak.modelout_functions.base import BatchedModelOutput, Side
from hf_trak.modelout_functions.batches import evaluating
from hf_trak.modelout_functions.trainer_loss import TrainerLossModelOutput
from hf_trak.runtime.sharding import is_sharded
from hf_trak.scores.scored_dataset import ScoreBlock
from hf_trak.scores.scorer import PlannedScores
from hf_trak.store.sealed import content_digest
from hf_trak.store.shards import Identity
from hf_trak.trajectory.dropout import dropout_of, taking_masks
from hf_trak.trajectory.guards import warnings_of
from hf_trak.trajectory.passes import StepPasses
from hf_trak.trajectory.record import RECORD_FILE, RunRecord, is_known, trained_weights
from hf_trak.trajectory.saved_run import SavedRun, logged_losses
from hf_trak.trajectory.share import PRODUCTS
from hf_trak.trajectory.states import HALF_STEP_DEVIATION, RunPath, with_own_loss, without_losses
from hf_trak.trajectory.summary import RunSummary
from hf_trak.trajectory.sweep import COPIES, TOGETHER, BackwardSweep, SweepOptions, gradient_passes
from hf_trak.trajectory.swept_targets import SweepResult, SweptTargets

logger = logging.getLogger(__name__)

REPLAY_VERSION = 2
"""Raised whenever the same record gives other scores. It is part of the identity of replayed scores."""

LONG = 2.0
"""Seconds of the gradients of a step from which on no products are measured beside them."""

Planned = Sequence[Sequence[tuple[Sequence[int], SweptTargets]]]
"""What is swept together, with the numbers of its targets, one after the other."""


class RunReplay:
    """Replays the recorded run of a model. All processes call [`plan`] together, and divide the products."""

    def __init__(self, model: FeaturizedModel, method: Replay) -> None:
        """
        Args:
            model: the model after the run, its training rows and its store.
            method: the options.

        Raises:
            HfTrakError: the model is divided over processes, rows come at random or are more or fewer than the run's,
                or the task has no loss.
            IncompleteStoreError: there is no record.
            StoreError: it is damaged.
        """
        if is_sharded(model.model):
            raise HfTrakError(
                "The parameters of the model are divided over processes. Expected a whole model, whose run can be "
                "followed back. Load the model unsharded."
            )
        self.model, self.method = model, method
        task = ExactScores(model).train_task
        if task is model.task or not isinstance(task, BatchedModelOutput):
            raise HfTrakError(
                f"The task {type(model.task).__name__} has no loss of single rows. Expected a task whose loss is what "
                "the model was trained on. Name it in `task`."
            )
        self.task = task
        batches = model.featurizer(task).batches(model.train_dataset)
        if batches.drawn:
            raise HfTrakError(
                "Training rows come out of the dataset or the collator at random. Expected the rows that the run "
                "trained on. Set the augmentation or masking aside, or use `of='recipe'`."
            )
        directory = Path(model.args.output_dir) / "trajectory" / method.name
        self.record: RunRecord | SavedRun
        if model.trainer is not None and not (directory / RECORD_FILE).exists():
            self.record = SavedRun(model.trainer, model.model, model.layout, method.start, batches.collated)
        else:
            self.record = RunRecord.open(directory)
            n, trained = model.train_size, self.record.description["train_rows"]
            if n != trained:
                raise HfTrakError(
                    f"The run was trained on {trained} rows, and the training dataset has {n}. Expected the rows of "
                    "the run, in their order. Give its training dataset."
                )

        self._collated = batches.collated

    @cached_property
    def path(self) -> RunPath:
        """Return the path of the run, with the losses that its trainer computed.

        Raises:
            HfTrakError: they are not known.
            StoreError: a file is missing or damaged.
        """
        record, device = self.record, self.model.device
        if isinstance(record, RunRecord):
            across = record.description["across_devices"]
            end = record.step_of(self._own_weights()) if record.layout == self.model.layout else None
            path = RunPath.of_record(record, device, end or None)
            processes = record.description["processes"]
        else:
            numbers = replace(record.numbers, group_of=record.numbers.group_of.to(device))
            path = RunPath(
                record.steps(), numbers, record.states(), lambda step: record.weights(step).to(device), record.logged()
            )
            if dropout_of(self.model.model):  # of which nothing is known
                path.most_missed = math.inf
            elif record.trainer.args.bf16:
                path.most_missed = HALF_STEP_DEVIATION
            processes, across = 1, True
        own = getattr(self.task, "of_task", None)
        if isinstance(own, TrainerLossModelOutput):
            path.steps = with_own_loss(path.steps, own, self._collated, processes, across)
            path.logged = logged_losses(self.model.trainer) if isinstance(record, RunRecord) else path.logged
        elif isinstance(record, RunRecord) and kind_of(self.model.trainer) is not None:
            path.steps, path.logged = without_losses(path.steps), logged_losses(self.model.trainer)
        elif not path.logged and isinstance(record, RunRecord):
            trainer = self.model.trainer
            remedy = (
                "Expected the trainer, which has this loss. Make the attributor by `TrakAttributor.from_trainer`."
                if trainer is None
                else f"Expected a trainer whose loss of single rows is known, and not a {type(trainer).__name__}. Ask "
                "the index, or for exact scores."
            )
            raise HfTrakError(
                "The record has no loss: the model returned none, since the trainer computed it from the outputs. "
                f"{remedy}"
            )
        elif isinstance(record, RunRecord) and self._counts_alone(path):
            trained = TrainerLossModelOutput(self.model.trainer, own)
            first = with_own_loss(path.steps[:1], trained, self._collated, processes, across)
            if is_known(first[0].batches[0].items):
                others = with_own_loss(path.steps[1:], trained, self._collated, processes, across)
                path.steps, path.logged = [*first, *others], logged_losses(self.model.trainer)
        path.logged = [(steps, loss) for steps, loss in path.logged if steps.stop <= len(path.steps)]
        return path

    def _own_weights(self) -> Tensor:
        """Return the weights that the model has now: the last ones, or those that `load_best_model_at_end` loads."""
        return trained_weights(dict(self.model.model.named_parameters()), self.record.layout)

    def _counts_alone(self, path: RunPath) -> bool:
        """Tell whether a trainer may count the labels of several passes without giving their number to the model.

        That of TRL divides sums over tokens itself, and the loss that the model returned is the mean of one pass.
        """
        first = path.steps[0].batches
        return self.model.trainer is not None and len(first) > 1 and not is_known(first[0].items)

    def summary(self, *, activations: bool = False) -> RunSummary:
        """Describe the run.

        Args:
            activations: whether to count those of a batch for the memory of a replay, which takes a forward pass.
        """
        recorded, counted = isinstance(self.record, RunRecord), self._activations() if activations else 0
        return RunSummary.of(self.path, recorded, self.model.train_size, self.record.layout.total, counted)

    def _activations(self) -> int:
        """Count the bytes that a forward pass of the largest batch of a step keeps for its way back.

        It is 0 if that fails, for lack of memory or of rows: whatever needs the pass says so.
        """
        largest = max((one.rows for step in self.path.steps for one in step.batches), key=len)
        for rows in (largest, largest[:1]):  # a loss may turn out to take rows one at a time
            with suppress(HfTrakError, RuntimeError, ValueError, TypeError, LookupError, OSError):
                return self._kept_by(rows)
            if not self.task.row_by_row:
                break
        return 0

    def _kept_by(self, rows: Sequence[int]) -> int:
        """Count the bytes that a forward pass of some rows keeps."""
        model, task = self.model, self.task
        batch = model.featurizer(task).in_dtype_of_model(send_to_device(self._collated(list(rows)), model.device))
        with evaluating(model.model), sdpa_kernel(SDPBackend.MATH):  # attention that can be differentiated twice
            return saved_activation_bytes(lambda: task.output(run_model(task, model.model, batch), batch))

    def plan(self, question: Question) -> PlannedScores:
        """Compute the scores of all training rows for the targets of a question.

        Args:
            question: what is asked.

        Raises:
            CheckpointMismatchError: the model does not have the last weights of the run.
            HfTrakError: the training rows or their loss are not those of the run, or targets come at random and are
                drawn more than once.
            StoreError: a file is missing or damaged.
            ValueError: there are several checkpoints.
        """
        self._require_one_run(question)
        method, path = self.method, self.path
        found, coarse = self._found(question, method), None
        if len(path.states) > 2 and path.gap > 1 and bool(found.forward[1].isnan().all()):  # lines between weights
            place, digest = self._place(question, self._identity(question, method))
            one = self._targets_of(place / "every-second", range(1), {"replay": digest, "states": "every second"})
            coarse = self._swept(question, [[(range(1), one)]], method, path.thinned())[0].scores
        warnings = tuple(warnings_of(found, path, method, coarse))
        for text in warnings:
            self.model.warn_once(f"{question.title}: {text}")
        return PlannedScores(self._identity(question, method), self._blocks(question, found.scores), warnings)

    def facts(self, question: Question) -> dict[str, str]:
        """Say what the run was, and how the outputs of targets depend on its learning rates and weight decay.

        Args:
            question: what is asked, as in [`plan`], which is not computed again.
        """
        method = self.method
        texts = {
            name: f"10 % more changes the targets' outputs by {whole:+.3g} in the mean, {first:+.3g} of it in the "
            "first half of the steps"
            for name, (whole, first) in self.sensitivities(question).items()
        }
        curvature = f"{method.products} of {method.hessian_share:.0%} of the rows of each step"
        run = str(self.summary()).splitlines()[0]
        return {"projection": f"none: replay of the run, {curvature}", "run": run, **texts}

    def sensitivities(self, question: Question) -> dict[str, tuple[float, float]]:
        """Return how 10 % more learning rate and weight decay would change the mean output of the targets.

        Args:
            question: what is asked, as in [`plan`], which is not computed again.

        Returns:
            By name the change, and the part of it that the first half of the steps makes. Weight decay is missing
            where it is a part of the gradient.
        """
        change = 0.1 * self._found(question, self.method).settings.mean(2)
        half = change.shape[1] // 2
        return {
            name: (float(one.sum()), float(one[:half].sum()))
            for name, one in zip(("learning rate", "weight decay"), change, strict=True)
            if bool(one.isfinite().all())
        }

    def _found(self, question: Question, method: Replay) -> SweepResult:
        """Return what the sweeps of all targets found."""
        place, digest = self._place(question, self._identity(question, method))
        planned = [
            [(part, self._targets_of(place / f"targets-{part.start:06d}-{part.stop:06d}", part, {"replay": digest}))]
            for part in self._parts(question.m)
        ]
        return _joined(self._swept(question, planned, method, self.path))

    def _require_one_run(self, question: Question) -> None:
        """Refuse targets that a replay has no answer for."""
        if len(question.ids) > 1:
            raise ValueError(
                f"`checkpoints` are {question.ids}, and a replay follows one run back from its end. Expected the last "
                "weights alone. Leave `checkpoints` out."
            )
        self.model.require_one_draw(question.eval_dataset, "A replay follows one draw of a target back.")

    def _place(self, question: Question, identity: dict[str, Any]) -> tuple[Path, str]:
        """Return the directory of a replay, and the digest in its name."""
        digest = content_digest(identity)[:12]
        return self.model.store.experiment_dir(question.name) / f"replay-{digest}", digest

    def _targets_of(self, place: Path, numbers: Sequence[int], identity: Identity) -> SweptTargets:
        """Plan a group of targets."""
        n = self.model.train_size
        whole: Identity = {**identity, "first": numbers[0]}
        return SweptTargets(place, whole, n, len(self.path.steps), len(numbers))

    def _swept(self, question: Question, planned: Planned, method: Replay, path: RunPath) -> list[SweepResult]:
        """Sweep the groups of targets that are missing, and return what all have found."""
        processes, model = self.model.processes, self.model
        missing = processes.broadcast_from_main(
            lambda: [i for i, one in enumerate(planned) if not all(of.result_path.exists() for _, of in one)]
        )
        if missing:
            model_id = question.ids[0]
            source = {**model.sources, **question.sources}.get(model_id)
            with model.weights(model_id, source, register=model_id not in model.store.model_ids):
                self._compute(question, model_id, [planned[i] for i in missing], method, path)
        return [one.result() for group in planned for _, one in group]

    def _identity(self, question: Question, method: Replay) -> dict[str, Any]:
        store = self.model.store
        return {
            "collation": question.collation,
            "config": store.config_hash,
            "groups": question.tag,
            "form": method.products,
            "record": self.record.digest,
            "replay": REPLAY_VERSION,
            "seed": self.model.args.seed,
            "share": method.hessian_share,
            "smoothing": method.smoothing,
            "states": _checksums(self.record),
            "steps": len(self.path.steps),
            "targets": question.fingerprint,
            **({"of_loss": True} if question.of_loss else {}),
        }

    @property
    def _together(self) -> int:
        """Return the number of targets whose derivatives fit into memory together."""
        size = 4 * self.record.layout.total * COPIES
        return max(1, int(self.model.args.curvature.memory * 2**30) // size)

    def _parts(self, m: int) -> list[range]:
        """Divide targets into groups that fit into memory."""
        return [range(first, min(first + self._together, m)) for first in range(0, m, self._together)]

    def _compute(self, question: Question, model_id: int, planned: Planned, method: Replay, path: RunPath) -> None:
        """Sweep groups of targets that are planned, with the last weights in the model."""
        model = self.model
        with model.processes.all_or_none():
            last = self._own_weights()
            self._check_weights(path, last)
            passes = self._passes(model_id, path)
            targets = self._targets(question, passes)
        options = SweepOptions(method.smoothing, method.hessian_share, method.products, model.args.seed)
        try:
            for group in planned:
                numbers = [numbers for numbers, _ in group]
                what = "Replay of the run" if question.of_loss else f"{question.title}, replay of the run"
                if len(planned) > 1:
                    what += f" for the targets {numbers[0][0]} to {numbers[-1][-1]}"
                asked = [(one, targets[list(of)]) for of, one in group]
                BackwardSweep(path, options, passes, model.processes).run(asked, what)
        finally:
            passes.end(last.to(model.device))

    def _passes(self, model_id: int, path: RunPath) -> StepPasses:
        """Prepare the passes over rows of steps."""
        model = self.model
        task = taking_masks(self.task) if path.steps[0].batches[0].random is not None else self.task
        featurizer = model.featurizer(task)
        featurizer.prepare_task(model_id, model.args.batch_size)
        batches = featurizer.batches(model.train_dataset)

        def collated(cuts: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], Any]]:
            for rows in cuts:
                batch = send_to_device(batches.collated(list(rows)), model.device)
                yield list(rows), featurizer.in_dtype_of_model(batch)

        bf16 = isinstance(self.record, RunRecord) and self.record.description["bf16"]
        plain = isinstance(self.record, SavedRun) and kind_of(model.trainer) is None  # TRL's take other batches
        trained = TrainerLossModelOutput(model.trainer, getattr(self.task, "of_task", None)) if plain else None
        return StepPasses(model.model, task, model.layout, featurizer.computer(), collated, bf16, trained)

    def step_seconds(self, m: int, model_id: int) -> tuple[float, float]:
        """Measure the passes of the first step.

        Args:
            m: number of targets.
            model_id: the checkpoint that the run ended with.

        Returns:
            The seconds that the gradients of its rows take, and those of the product of one target with the curvature
            of all of them. The second is worked out from the first if that takes longer than [`LONG`]: passes are all
            that counts then.

        Raises:
            HfTrakError, StoreError: as of [`plan`].
        """
        model, path, method = self.model, self.path, self.method
        step, together = path.steps[0], min(m, TOGETHER)
        last = trained_weights(dict(model.model.named_parameters()), self.record.layout)
        passes = self._passes(model_id, path)
        draws = torch.Generator(model.device).manual_seed(model.args.seed)
        directions = torch.randn(together, len(last), generator=draws, device=model.device, dtype=last.dtype)
        kept = [range(math.ceil(method.hessian_share * len(one.rows))) for one in step.batches]

        def gradients() -> float:
            begun = time.perf_counter()
            for part in passes.rows(step.batches):
                float(part.gradients.sum())  # waits for a GPU
            return time.perf_counter() - begun

        def product() -> float:
            begun = time.perf_counter()
            float(passes.curvature(step.batches, kept, [directions], method.products)[0].sum())
            return time.perf_counter() - begun

        try:
            passes.put(path.weights(0))
            with evaluating(model.model), torch.enable_grad():
                _, rows = gradients(), gradients()  # the first finds what the second knows
                if rows > LONG:
                    return rows, rows * PRODUCTS[method.products]
                _, products = product(), product()
        finally:
            passes.end(last.to(model.device))
        return rows, products * len(step.rows) / sum(map(len, kept)) / together

    def seconds(self, m: int, step: tuple[float, float]) -> float:
        """Estimate the seconds of a replay of m targets.

        Args:
            m: number of targets.
            step: what was measured, see [`step_seconds`].
        """
        rows, product = step
        steps, width = self.path.steps, self.record.layout.total
        every = sum(len(one.rows) for one in steps)
        sweeps = gradient_passes(len(steps), -(-every // len(steps)), width, self.path.weights(0).element_size())
        product *= m * self.method.hessian_share / self.model.processes.num_processes
        return every / len(steps[0].rows) * (len(self._parts(m)) * sweeps * rows + product)

    def _check_weights(self, path: RunPath, last: Tensor) -> None:
        """Compare parameters and weights of the model with those at the end of the run."""
        if self.record.layout != self.model.layout:
            raise HfTrakError(
                f"The run trained {self.record.layout.total:,} parameters in {len(self.record.layout.slots)} tensors, "
                f"and {self.model.layout.total:,} in {len(self.model.layout.slots)} are attributed. Expected the same "
                "ones. Leave `grad_wrt` out, and give the model of the run."
            )
        if not torch.equal(path.weights(len(path.steps)).cpu(), last):
            raise CheckpointMismatchError(
                "The model does not have the weights that the recorded run ended with, nor others that are recorded. "
                "Expected some of these, from which the run is followed back. Load the last checkpoint, or name the "
                "record of this model's run in `Replay(name=...)`."
            )

    def _targets(self, question: Question, passes: StepPasses) -> Tensor:
        """Compute the gradients of the targets, or their means over groups, by the last weights: `(m, P)`."""
        model, rows = self.model, question.eval_dataset
        featurizer = model.featurizer(self.task)
        batches = featurizer.batches(rows, "target")
        side: Side = "train" if question.of_loss else "target"  # the loss is the output of training rows

        def parts() -> Iterator[tuple[int, Tensor]]:
            for cut in batch_rows(0, len(rows), model.args.batch_size):
                batch = featurizer.in_dtype_of_model(send_to_device(batches.collated(list(cut)), model.device))
                yield cut.start, passes.gradients(batch, len(cut), side)[0].cpu()

        if question.groups is not None:
            return question.groups.means(parts())
        return torch.cat([found for _, found in parts()])

    def _blocks(self, question: Question, scores: Tensor) -> Iterator[ScoreBlock]:
        """Yield the scores in blocks of training rows."""
        size, n = self.model.store.config["shard_size"], len(scores)
        for first in range(0, n, size):
            last = min(first + size, n)
            yield first, last, scores[first:last].float()


def _joined(results: Sequence[SweepResult]) -> SweepResult:
    """Join what sweeps of one path found for their targets."""
    growth = torch.stack([one.growth for one in results]).max(0).values
    settings = torch.cat([one.settings for one in results], 2)
    return SweepResult(torch.cat([one.scores for one in results], 1), growth, results[0].forward, settings)


def _checksums(record: RunRecord | SavedRun) -> list[str]:
    """Read the checksums of what is recorded; those of checkpoints are in the digest of a run without a record."""
    return [record.checksum(step) for step in record.states()] if isinstance(record, RunRecord) else []
