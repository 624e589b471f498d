"""Refined targets: (C + D)⁻¹∇f instead of P⁻¹∇f, by conjugate gradients on products with training rows.

    <directory>/gradients-….safetensors           ∇f of the targets `(m, P)`, removed when all are refined
    <directory>/refined-<options>/
      refined-….safetensors                       x of the targets, in the form of preconditioned ones
      refined-….json                              steps and residual of each, beside the file of its x
      refined-steps/                              the state after the last step, and products on the way to the next

The targets of a file are solved together. The rows of a product are cut into parts, the same for any number of
processes, and parts are added in their order, so that results have the same bits however the work was divided. A
killed run loses one step.
"""

import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor

from hf_trak.curvature.conjugate_gradients import RefinedTarget, Refinement, Solutions, damping_terms, summary
from hf_trak.curvature.curvature import Curvature
from hf_trak.curvature.target_forms import LowRankForm, TargetForm
from hf_trak.data.rows import batch_rows
from hf_trak.errors import NonFiniteError
from hf_trak.featurize.definition import drawn_rows
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.gradient_computers.base import SplitBatch
from hf_trak.gradient_computers.gauss_newton import GaussNewton
from hf_trak.modelout_functions.base import AbstractModelOutput, BatchedModelOutput
from hf_trak.runtime.progress import RowProgress
from hf_trak.store.atomic import remove_stale_temporaries
from hf_trak.store.sealed import content_digest, read_sealed, write_sealed
from hf_trak.store.shard_set import ShardSet
from hf_trak.store.shards import Identity, TensorSpec, read_tensors, write_tensors

logger = logging.getLogger(__name__)

REFINEMENT_VERSION = 1
"""Raised whenever the same inputs give other refined targets. It is part of their identity."""

PARTS = 8
"""Parts of the rows of a product. Each falls to one process."""


def refined_identity(refinement: Refinement) -> str:
    """Name everything that refined targets depend on beside the curvature, its damping and the targets."""
    return content_digest({"version": REFINEMENT_VERSION, **asdict(refinement)})[:12]


def read_refinement(refined: ShardSet) -> list[RefinedTarget]:
    """Read how far each target was solved, in the order of the targets.

    Args:
        refined (`ShardSet`): refined targets.

    Raises:
        FileNotFoundError: they are not there yet.
        StoreError: a file is damaged.
    """
    found = []
    for index in range(len(refined)):
        found += [RefinedTarget(**one) for one in read_sealed(_report_path(refined, index))["targets"]]
    return found


def _report_path(refined: ShardSet, index: int) -> Path:
    return refined.path(index).with_suffix(".json")


class TargetRefinement:
    """Refines the targets of one checkpoint, whose weights the model has. All processes call [`run`] together."""

    def __init__(
        self,
        model: FeaturizedModel,
        task: AbstractModelOutput,
        curvature: Curvature,
        form: TargetForm,
        refinement: Refinement,
        model_id: int,
    ) -> None:
        """
        Args:
            model: the model, its training rows and its store.
            task: the training rows' side, minus the loss.
            curvature: P, the preconditioner.
            form: the form in which targets are kept, with the damping.
            refinement: the options.
            model_id: the checkpoint.

        Raises:
            ValueError: the curvature has no eigenvalues that damping could be relative to.
            TypeError: the task has only the functional form of the `trak` API.
            IncompleteStoreError: the training rows are not at hand.
            HfTrakError: rows come at random, and are drawn more than once.
        """
        if curvature.kind == "identity":
            raise ValueError(
                "`curvature` is 'identity', with `refine='cg'`. Expected a fitted curvature, which the refinement "
                "starts from and is damped by. Set `curvature='ekfac'`."
            )
        if not isinstance(task, BatchedModelOutput):
            raise TypeError(
                f"The task {type(task).__name__} has only the functional form get_output(model, weights, buffers, "
                "*sample). Expected a task with a batched form for `refine`. Derive it from `BatchedModelOutput`."
            )
        model.require_rows("`refine`, which multiplies by their curvature")
        model.require_one_draw(model.train_dataset, "A refinement multiplies by the curvature of one draw.")
        self.model, self.task, self.curvature, self.form = model, task, curvature, form
        self.refinement, self.model_id = refinement, model_id
        self.rows = drawn_rows(model.train_size, refinement.rows, model.args.seed)
        count = min(PARTS, len(self.rows))
        self.parts = [self.rows[part::count] for part in range(count)]
        self.damping = damping_terms(curvature, form.damping).to(model.device)
        self._product: GaussNewton | None = None

    def run(self, gradients: ShardSet, fill: Callable[[], None], refined: ShardSet, what: str) -> None:
        """Refine the targets that are not refined yet.

        Args:
            gradients: ∇f of the targets, `(m, P)`. They are removed at the end.
            fill: computes them.
            refined: x of the targets, in the form of preconditioned ones, in shards of the same rows.
            what: names the targets, for progress bars and the log.

        Raises:
            GradientEngineError: the model cannot be differentiated along a direction.
            NonFiniteError: a product is NaN or infinite; names the rows.
            StoreError: a file is damaged or cannot be written.
            PeerProcessError: another process failed or died.
        """
        processes = self.model.processes
        missing = processes.broadcast_from_main(refined.unwritten)
        if missing:
            fill()
        for index in missing:
            chunk = _Chunk(self, gradients, refined, index)
            processes.broadcast_from_main(chunk.prepare)
            while chunk.go_on(processes.broadcast_from_main(chunk.where)):
                self._step(chunk, what)
            processes.broadcast_from_main(chunk.conclude)
        processes.broadcast_from_main(lambda: _remove_steps(refined, gradients))
        if missing and processes.is_main_process:
            logger.info("%s, refined: %s.", what, summary(read_refinement(refined)))

    def precondition(self, rows: Tensor) -> Tensor:
        """Multiply by P⁻¹. In float32, like the bases, which is enough for a preconditioner."""
        return self.curvature.precondition(rows.float(), self.form.damping).to(rows.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the iterations: that of the weights, and float32 at least."""
        name = self.model.layout.slots[0].name
        return torch.promote_types(dict(self.model.model.named_parameters())[name].dtype, torch.float32)

    def _step(self, chunk: "_Chunk", what: str) -> None:
        """Multiply the directions of all running targets, and take their step."""
        processes = self.model.processes
        rows = chunk.gradients.plan.rows(chunk.index)
        missing = processes.broadcast_from_main(lambda: chunk.missing(len(self.parts)))
        mine = [missing[i] for i in processes.share(len(missing))]
        with (
            processes.all_or_none(),
            RowProgress.over(
                processes,
                sum(len(self.parts[part]) for part in mine),
                f"{what}, refining targets {rows.start} to {rows.stop - 1}, step {chunk.step + 1}",
                announce=chunk.step == 0,
            ) as progress,
        ):
            directions = chunk.directions() if mine else torch.empty(0)
            for part in mine:
                chunk.keep(part, self._products(self.parts[part], directions, progress))
        processes.broadcast_from_main(lambda: chunk.advance(len(self.parts)))

    def _products(self, part: Sequence[int], directions: Tensor, progress: RowProgress) -> Tensor:
        """Compute Σ_b C_b v over the rows of one part, for all directions: `(m, P)`."""
        featurizer = self.model.featurizer(self.task)
        if self._product is None:
            featurizer.prepare_task(self.model_id, self.model.args.batch_size)
            of_gradients = self.model.args.curvature.labels == "empirical"
            self._product = GaussNewton(
                self.model.model, self.task, self.model.layout, of_gradients=of_gradients, form=self.refinement.form
            )
        size = self.model.args.batch_size
        cuts = [[part[i] for i in cut] for cut in batch_rows(0, len(part), size)]
        total = torch.zeros_like(directions)
        for rows, batch in featurizer.batches(self.model.train_dataset).iterate(cuts):
            SplitBatch.of_rows(batch, len(rows))  # which checks that there is one sample for each
            try:
                total += self._product.products(featurizer.in_dtype_of_model(batch), directions)
            except Exception as error:
                error.add_note(f"This happened in the batch of training rows {rows[0]} to {rows[-1]}.")
                raise
            if not bool(torch.isfinite(total.sum())):
                raise NonFiniteError(
                    f"A product with the curvature of one of the training rows {rows[0]} to {rows[-1]} is NaN or "
                    "infinite. Expected finite numbers. Look at these rows and at the checkpoint, or compute in "
                    "float32 (`model_dtype='float32'`)."
                )
            progress.update(len(rows))
        return total


class _Chunk:
    """The targets of one file, and the state of their iterations. The main process alone writes states."""

    def __init__(self, refinement: TargetRefinement, gradients: ShardSet, refined: ShardSet, index: int) -> None:
        self.of, self.gradients, self.refined, self.index = refinement, gradients, refined, index
        self.directory = _steps_directory(refined)
        self.identity: Identity = {**refined.identity, "chunk": index}
        self.size, self.width = len(gradients.plan.rows(index)), gradients.width
        self.step = 0
        self.running: list[int] = []
        self._total: Tensor | None = None
        self._state: Solutions | None = None

    def prepare(self) -> None:
        """Remove what processes that died have left, and find the state after the last step. In the main process."""
        remove_stale_temporaries(self.directory)
        self._state = self._resumed()

    def where(self) -> list[int]:
        """Return the number of the next step, and those of the targets that take it. In the main process."""
        assert self._state is not None
        return [self.step, *self._state.running.tolist()]

    def go_on(self, where: list[int]) -> bool:
        """Take over what [`where`] returned in the main process, and say whether a target is left."""
        self.step, *self.running = where
        return bool(self.running)

    def _resumed(self) -> Solutions:
        """Read the state after the last step, or make that before the first."""
        found = sorted(self.directory.glob(f"state-{self.index:05d}-*.safetensors"))
        device = self.of.model.device
        if not found:
            gradients = self.gradients.read(self.index).grads.to(device, self.of.dtype)
            state = Solutions.start(gradients, self.of.precondition)
            self._write(state)
            return state
        self.step = int(found[-1].stem.rsplit("-", 1)[1])
        read = read_tensors(found[-1], self._own(), self._specs())
        # Maps of a file are not written to, and this one is about to be replaced.
        return Solutions(**{name: tensor.clone().to(device) for name, tensor in read.items()})

    def _specs(self) -> dict[str, TensorSpec]:
        whole = TensorSpec((self.size, self.width), (self.of.dtype,))
        return {
            "found": whole,
            "residuals": whole,
            "directions": whole,
            "squares": TensorSpec((4, self.size), (torch.float64,)),
            "counts": TensorSpec((3, self.size), (torch.int64,)),
        }

    def _own(self) -> Identity:
        return {**self.identity, "step": self.step}

    def _state_path(self) -> Path:
        return self.directory / f"state-{self.index:05d}-{self.step:05d}.safetensors"

    def _write(self, state: Solutions) -> None:
        write_tensors(self._state_path(), {name: getattr(state, name) for name in self._specs()}, self._own())

    def directions(self) -> Tensor:
        """Return the directions of the targets that take another step, `(len(running), P)`."""
        if self._state is None:  # another process than the main one
            specs = {"directions": self._specs()["directions"]}
            found = read_tensors(self._state_path(), self._own(), specs)["directions"][self.running]
            return found.to(self.of.model.device)
        return self._state.directions[self.running]

    @property
    def _alone(self) -> bool:
        return self.of.model.processes.num_processes == 1

    def missing(self, parts: int) -> list[int]:
        """List the parts whose products are not there yet."""
        return [part for part in range(parts) if self._alone or not self._part_path(part).exists()]

    def _part_path(self, part: int) -> Path:
        return self.directory / f"products-{self.index:05d}-{self.step:05d}-{part:03d}.safetensors"

    def keep(self, part: int, products: Tensor) -> None:
        """Add the products of one part to those before it, or keep them in a file where another process adds."""
        if self._alone:
            self._total = products if self._total is None else self._total + products
        else:
            write_tensors(self._part_path(part), {"products": products}, {**self._own(), "part": part})

    def advance(self, parts: int) -> None:
        """Add the products of all parts in their order, and take a step. In the main process."""
        state, of = self._state, self.of
        assert state is not None
        directions = self.directions()
        total = self._total if self._total is not None else self._read(parts, directions)
        self._total = None
        total = total / len(of.rows) + (directions * of.damping).to(directions.dtype)
        state.advance(total, of.precondition, of.refinement.steps, of.refinement.tolerance)
        used = [self._state_path(), *map(self._part_path, range(parts))]
        self.step += 1
        self._write(state)
        for path in used:
            path.unlink(missing_ok=True)

    def _read(self, parts: int, directions: Tensor) -> Tensor:
        """Add the products of all parts in their order, from their files."""
        spec = {"products": TensorSpec(tuple(directions.shape), (directions.dtype,))}
        found = (
            read_tensors(self._part_path(part), {**self._own(), "part": part}, spec)["products"].to(directions.device)
            for part in range(parts)
        )
        return reduce(torch.add, found)

    def conclude(self) -> None:
        """Write the refined targets. The report comes first: their file makes both complete."""
        state = self._state
        assert state is not None
        report = [vars(one) for one in state.report()]
        write_sealed(_report_path(self.refined, self.index), {"identity": dict(self.identity), "targets": report})
        form = self.of.form
        rows = state.found.float().cpu()
        kept = form.compressed(rows) if isinstance(form, LowRankForm) else rows
        self.refined.write(self.index, kept, self.gradients.read(self.index).out_to_loss)
        self._state_path().unlink(missing_ok=True)
        self._state = None


def _steps_directory(refined: ShardSet) -> Path:
    return refined.directory / f"{refined.prefix}-steps"


def _remove_steps(refined: ShardSet, gradients: ShardSet) -> None:
    """Remove what only an unfinished refinement needs."""
    shutil.rmtree(_steps_directory(refined), ignore_errors=True)
    for index in range(len(gradients)):
        gradients.path(index).unlink(missing_ok=True)
