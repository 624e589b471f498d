"""The sweep back through the steps of a run: the derivatives of targets by the weight of every training row.

    <directory>/
      state-<step>.safetensors      what a part of the run begins with: weights and rebuilt moments
      back-<step>.safetensors       derivatives of the targets and scores, when the steps from this one on are behind
      scores.safetensors            the result

A first sweep forwards rebuilds the moments of the optimizer along the known weights. It keeps them at the first step
of each of about √T parts. Then the parts are taken from the last to the first: forwards again, and backwards. A killed
sweep goes on from the last file with the same bits.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hf_trak.errors import HfTrakError, NonFiniteError
from hf_trak.runtime.progress import RowProgress
from hf_trak.store.atomic import remove_stale_temporaries
from hf_trak.store.shards import Identity, TensorSpec, read_tensors, write_tensors
from hf_trak.trajectory.optimizer_steps import AdamStep, Cotangents, Moments, OptimizerStep
from hf_trak.trajectory.passes import CurvatureForm, StepPasses
from hf_trak.trajectory.record import is_known
from hf_trak.trajectory.states import RunPath, State

logger = logging.getLogger(__name__)

KEPT_BYTES = 2**30
"""Memory for the states of a part of the run. A run whose states all fit is one part."""

NORM_DEVIATION = 0.05
"""By how much the norm of the first gradient may differ from the training's, which half precision explains."""

_SLICE = 2**20
"""Parameters that are multiplied at a time, in float64."""


@dataclass(frozen=True)
class SweepOptions:
    """What a sweep depends on beside the run and the targets.

    Attributes:
        smoothing: κ of the smoothing, see `optimizer_steps`.
        share: the part of the rows of each step whose curvature is used.
        form: that curvature.
        seed: of the choice of these rows.
    """

    smoothing: float
    share: float
    form: CurvatureForm
    seed: int


@dataclass(frozen=True)
class SweepResult:
    """What a sweep found.

    Attributes:
        scores (`torch.Tensor`): the derivative of each target by the weight of each row, `(n, m)`, float64.
        growth (`torch.Tensor`): ‖a_t‖ before each step, the largest of all targets relative to the start, `(T,)`.
        losses (`torch.Tensor`): the loss of each step on the path, `(T,)`.
        settings (`torch.Tensor`): d f / d ln η and d f / d ln λ of every step and target, `(2, T, m)`, float64; NaN
            where weight decay is a part of the gradient.
    """

    scores: Tensor
    growth: Tensor
    losses: Tensor
    settings: Tensor


class BackwardSweep:
    """One sweep for some targets. It can be interrupted at any moment and run again."""

    def __init__(
        self,
        path: RunPath,
        options: SweepOptions,
        directory: Path,
        identity: Identity,
        train_rows: int,
    ) -> None:
        """
        Args:
            path: the run.
            options: see [`SweepOptions`].
            directory: where files are kept.
            identity: everything that the result depends on.
            train_rows: n.
        """
        self.path, self.options = path, options
        self._passes: StepPasses | None = None
        self.directory, self.identity, self.n = directory, identity, train_rows
        self.count = len(path.steps)
        first = path.weights(0)
        self.dtype, self.device, self.width = first.dtype, first.device, len(first)
        fits = 4 * self.count * self.width * first.element_size() <= KEPT_BYTES
        self.part = self.count if fits else math.ceil(math.sqrt(self.count))
        self.saved = math.ceil(math.sqrt(self.count))
        self.losses = torch.full((self.count,), math.nan, dtype=torch.float64)

    # -- files -------------------------------------------------------------------------------------------------------

    @property
    def result_path(self) -> Path:
        """Return the file of the result."""
        return self.directory / "scores.safetensors"

    def result(self, targets: int) -> SweepResult:
        """Read the result.

        Raises:
            StoreError: it is missing or damaged.
        """
        series = TensorSpec((self.count,), (torch.float64,))
        specs = {"scores": TensorSpec((self.n, targets), (torch.float64,)), "growth": series, "losses": series}
        specs["settings"] = TensorSpec((2, self.count, targets), (torch.float64,))
        return SweepResult(**read_tensors(self.result_path, self.identity, specs))

    def _read_state(self, step: int) -> State:
        specs = {
            "weights": TensorSpec((self.width,), (self.dtype,)),
            "moments": TensorSpec((3, self.width), (self.dtype,)),
        }
        read = read_tensors(self._file("state", step), {**self.identity, "step": step}, specs)
        weights, moments = (read[name].clone().to(self.device) for name in specs)
        first, second, noise = moments
        return State(weights, Moments(first, second, noise, step))

    def _write_state(self, step: int, state: State) -> None:
        moments = torch.stack([state.moments.first, state.moments.second, state.moments.noise])
        tensors = {"weights": state.weights, "moments": moments}
        write_tensors(self._file("state", step), tensors, {**self.identity, "step": step})

    def _file(self, kind: str, step: int) -> Path:
        return self.directory / f"{kind}-{step:08d}.safetensors"

    def _files(self, kind: str) -> list[int]:
        return sorted(int(path.stem.rsplit("-", 1)[1]) for path in self.directory.glob(f"{kind}-*.safetensors"))

    # -- forwards ----------------------------------------------------------------------------------------------------

    def _step(self, index: int) -> OptimizerStep:
        step = self.path.numbers.step(index)
        return replace(step, smoothing=self.options.smoothing) if isinstance(step, AdamStep) else step

    def _forward(self, index: int, state: State) -> State:
        """Take a step: the weights are those of the path, the moments are rebuilt."""
        gradient, squares, count, losses = torch.zeros_like(state.weights), torch.zeros_like(state.weights), 0, 0.0
        self.passes.put(state.weights)
        for part in self.passes.rows(self.path.steps[index].batches):
            gradient += part.gradients.sum(0)
            squares += part.gradients.square().sum(0)
            count += len(part.rows)
            losses += part.loss
        self.losses[index] = losses
        if index == 0:
            self._check_gradient(gradient)
        variance = (squares - gradient.square() / count).clamp_min(0)
        _, moments = self._step(index).forward(state.weights, state.moments, gradient, variance)
        return State(self.path.weights(index + 1), moments)

    def _check_gradient(self, gradient: Tensor) -> None:
        """Compare the gradient of the first step, whose weights are known, with what the optimizer got."""
        found = float(gradient.double().norm()) * self._step(0).share(gradient)
        trained = self.path.steps[0].norm
        if is_known(trained) and not abs(found - trained) <= NORM_DEVIATION * trained:
            raise HfTrakError(
                f"The gradient of the first step has the norm {found:.6g}, and the optimizer got one of {trained:.6g} "
                f"in the training. Expected the same to {NORM_DEVIATION:.0%}. Was something drawn at random, such as "
                "dropout, or are parameters frozen now that were not?"
            )

    def _states(self, start: int) -> list[State]:
        """Rebuild the states before each step of a part, and the one after it."""
        states = [self._read_state(start)]
        for index in range(start, min(start + self.part, self.count)):
            states.append(self._forward(index, states[-1]))
        return states

    def _rebuild(self, progress: RowProgress) -> None:
        """Sweep forwards, and keep the state before each part. The last part is left to the sweep back."""
        starts = range(0, self.count, self.part)
        found = [step for step in self._files("state") if step in starts]
        if not found:
            weights = self.path.weights(0)
            self._write_state(0, State(weights, Moments.start(weights)))
            found = [0]
        start = found[-1]
        state = self._read_state(start)
        for index in range(start, starts[-1]):
            state = self._forward(index, state)
            progress.update(len(self.path.steps[index].rows))
            if index + 1 in starts:
                self._write_state(index + 1, state)

    # -- backwards ---------------------------------------------------------------------------------------------------

    @property
    def passes(self) -> StepPasses:
        """Return what computes gradients and curvature, during a run."""
        assert self._passes is not None
        return self._passes

    def run(self, passes: StepPasses, targets: Tensor, what: str, show: bool = True) -> SweepResult:
        """Compute the scores of all rows for some targets, unless they are there.

        Args:
            passes: computes gradients and curvature.
            targets: the gradients of the targets by the last weights, `(m, P)`.
            what: names the targets, for the progress bar.
            show: whether to show one.

        Raises:
            HfTrakError: the training rows or their loss are not those of the run.
            NonFiniteError: a number is NaN or infinite; names the step.
            GradientEngineError: the model cannot be differentiated as needed.
            StoreError: a file is damaged or cannot be written.
        """
        self._passes = passes
        if not self.result_path.exists():
            self.directory.mkdir(parents=True, exist_ok=True)
            remove_stale_temporaries(self.directory)
            rows = sum(len(one.rows) for one in self.path.steps)
            with RowProgress(rows * (2 + (self.part < self.count)), what, show=show, announce=show) as progress:
                self._run(targets.to(self.device, self.dtype), progress)
        for kind in ("state", "back"):
            for step in self._files(kind):
                self._file(kind, step).unlink(missing_ok=True)
        return self.result(len(targets))

    def _run(self, targets: Tensor, progress: RowProgress) -> None:
        self._rebuild(progress)
        behind, cotangents, scores, growth = self._resumed(targets)
        while behind > 0:
            start = (behind - 1) // self.part * self.part
            states = self._states(start)
            progress.update(sum(len(one.rows) for one in self.path.steps[start:behind]))
            for index in range(behind - 1, start - 1, -1):
                self._backward(index, states[index - start], states[index - start + 1], cotangents, scores)
                growth[index] = self._largest(cotangents, index)
                progress.update(len(self.path.steps[index].rows))
                if index % self.saved == 0 and index:
                    self._keep(index, cotangents, scores, growth)
            behind = start
        start_norm = targets.double().norm(dim=1).max().clamp_min(1e-300).cpu()
        tensors = {"scores": scores, "growth": growth / start_norm, "losses": self.losses, "settings": self.settings}
        write_tensors(self.result_path, tensors, self.identity)

    def _largest(self, cotangents: Cotangents, index: int) -> Tensor:
        found = cotangents.weights.double().norm(dim=1).max().cpu()
        if not bool(torch.isfinite(found)):
            raise NonFiniteError(
                f"The derivatives of the targets are NaN or infinite before step {index}. Expected finite numbers: "
                "the run is too hot to be followed back. Use more of each batch (`hessian_share=1`), the "
                "Gauss-Newton matrix, or `of='recipe'`."
            )
        return found

    def _backward(self, index: int, state: State, after: State, cotangents: Cotangents, scores: Tensor) -> None:
        """Take the derivatives back through one step, and add the scores of its rows."""
        recorded, step = self.path.steps[index], self._step(index)
        decoupled = isinstance(step, AdamStep) and step.decoupled
        decayed = state.weights * (-step.rate * step.decay if decoupled else math.nan)
        ways = torch.stack([after.weights - state.weights, decayed.to(state.weights)])
        self.settings[:, index] = _products(ways, cotangents.weights).cpu()
        self.passes.put(state.weights)
        held = list(self.passes.rows(recorded.batches)) if self.passes.fits(len(recorded.rows)) else None
        gradient = torch.zeros_like(state.weights)
        for part in held or self.passes.rows(recorded.batches):
            gradient += part.gradients.sum(0)
        gamma = step.backward(cotangents, after.moments, gradient, state.weights)
        for part in held or self.passes.rows(recorded.batches):
            scores.index_add_(0, torch.tensor(part.rows), _products(part.gradients, gamma).cpu())
        chosen, weight = chosen_rows([len(one.rows) for one in recorded.batches], index, self.options)
        curved = self.passes.curvature(recorded.batches, chosen, gamma, self.options.form)
        cotangents.weights.add_(curved, alpha=weight)

    def _resumed(self, targets: Tensor) -> tuple[int, Cotangents, Tensor, Tensor]:
        """Read where an interrupted sweep was, or begin after the last step."""
        m = len(targets)
        self.settings = torch.zeros(2, self.count, m, dtype=torch.float64)
        found = self._files("back")
        if not found:
            scores = torch.zeros(self.n, m, dtype=torch.float64)
            return self.count, Cotangents.of(targets), scores, torch.zeros(self.count, dtype=torch.float64)
        step = found[0]
        series, whole = TensorSpec((self.count,), (torch.float64,)), TensorSpec((m, self.width), (self.dtype,))
        specs = {
            **dict.fromkeys(("weights", "first", "second"), whole),
            "scores": TensorSpec((self.n, m), (torch.float64,)),
            "growth": series,
            "losses": series,
            "settings": TensorSpec((2, self.count, m), (torch.float64,)),
        }
        read = read_tensors(self._file("back", step), {**self.identity, "step": step}, specs)
        read = {name: tensor.clone() for name, tensor in read.items()}
        known, self.settings = read.pop("losses"), read.pop("settings")
        self.losses = torch.where(known.isnan(), self.losses, known)
        scores, growth = read.pop("scores"), read.pop("growth")
        return step, Cotangents(**{name: value.to(self.device) for name, value in read.items()}), scores, growth

    def _keep(self, step: int, cotangents: Cotangents, scores: Tensor, growth: Tensor) -> None:
        """Write the state of the sweep, and remove the one before."""
        tensors = {
            "weights": cotangents.weights,
            "first": cotangents.first,
            "second": cotangents.second,
            "scores": scores,
            "growth": growth,
            "losses": self.losses,
            "settings": self.settings,
        }
        write_tensors(self._file("back", step), tensors, {**self.identity, "step": step})
        for later in self._files("back"):
            if later > step:
                self._file("back", later).unlink(missing_ok=True)


def chosen_rows(sizes: Sequence[int], step: int, options: SweepOptions) -> tuple[list[list[int]], float]:
    """Choose the rows of a step whose curvature is used, by the counter generator.

    Args:
        sizes: rows in each of the step's batches.
        step: number of the step.
        options: share and seed.

    Returns:
        The places of the rows in each batch, and the factor of their curvature: all rows by the chosen ones.
    """
    total = sum(sizes)
    count = max(1, math.ceil(options.share * total - 1e-9))
    if count == total:
        return [list(range(size)) for size in sizes], 1.0
    generator = np.random.Generator(np.random.Philox(key=options.seed, counter=[0, 0, 0, step]))
    taken = sorted(generator.permutation(total)[:count].tolist())
    starts = np.cumsum([0, *sizes])
    places = [[one - low for one in taken if low <= one < high] for low, high in pairwise(starts)]
    return [[int(one) for one in batch] for batch in places], total / count


def _products(gradients: Tensor, gamma: Tensor) -> Tensor:
    """Multiply gradients `(B, P)` and derivatives `(m, P)`: `(B, m)`, in float64."""
    total = torch.zeros(len(gradients), len(gamma), dtype=torch.float64, device=gamma.device)
    for first in range(0, gradients.shape[1], _SLICE):
        part = slice(first, first + _SLICE)
        total += gradients[:, part].double() @ gamma[:, part].double().T
    return total
