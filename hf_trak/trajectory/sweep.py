"""The sweep back through the steps of a run: the derivatives of targets by the weight of every training row.

    <directory of the first group of targets>/
      state-<step>.safetensors      what a part of the run begins with: weights and rebuilt moments
      line-<step>.safetensors       the same on lines between known weights

A first sweep forwards rebuilds the moments of the optimizer. It needs the gradient of every step for that, and so has
the step itself: from one of the known weights the steps are taken again up to the next ones. Where these are missed by
more than [`MISSED`] (of a training with dropout that is not recorded, say), it begins again on lines between the known
weights. It keeps the states at the first step of each of about √T parts. Then the parts are taken from the last to the
first: forwards again, and backwards. Gradients of rows that fit into memory are kept from the one for the other. A
killed sweep goes on from the last file with the same bits.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_trak.errors import HfTrakError, NonFiniteError
from hf_trak.runtime.processes import Processes
from hf_trak.runtime.progress import RowProgress
from hf_trak.store.shards import TensorSpec, read_tensors, write_tensors
from hf_trak.trajectory.optimizer_steps import AdamStep, Cotangents, Moments, OptimizerStep
from hf_trak.trajectory.passes import ROW_BYTES, ROW_COPIES, CurvatureForm, RowGradients, StepPasses
from hf_trak.trajectory.record import is_known
from hf_trak.trajectory.share import RowDraws
from hf_trak.trajectory.states import RunPath, State
from hf_trak.trajectory.swept_targets import SweptTargets

logger = logging.getLogger(__name__)

KEPT_BYTES = 2**30
"""Memory for states of a part of the run, and for gradients of its rows. A run whose states all fit is one part."""

COPIES = 8
"""Numbers for each parameter and target that a sweep holds: derivatives of weights and moments, and what is made of
them in a step."""

_STATE = 4
"""Numbers for each parameter in a state: the weight, both moments, and the variance of the gradient."""

NORM_DEVIATION = 0.05
"""By how much the norm of the first gradient may differ from the training's, which half precision explains."""

MISSED = 0.1
"""By how much steps that are taken again may miss the next known weights, relative to the way to them."""

_ROUNDED = 4
"""Gradients so far that are nothing but rounding, in roundings of the largest one."""

_SLICE = 2**20
"""Parameters that are multiplied at a time, in float64."""

TOGETHER = 8
"""Directions at most that are multiplied at a time, and by one process."""


def part_length(steps: int, parameters: int, size: int = 4) -> int:
    """Return the number of steps whose states are held at a time, of so many numbers of so many bytes."""
    return steps if _STATE * steps * parameters * size <= KEPT_BYTES else math.ceil(math.sqrt(steps))


def _bytes_for_rows(steps: int, parameters: int, size: int = 4) -> int:
    """Return the memory that the states of a part leave for gradients of its rows."""
    return max(0, KEPT_BYTES - _STATE * (part_length(steps, parameters, size) + 1) * parameters * size)


def gradient_passes(steps: int, rows: int, parameters: int, size: int = 4) -> float:
    """Return how often a sweep computes the gradients of all rows: to rebuild the states, and where they are not kept.

    Args:
        steps: T.
        rows: rows of a step.
        parameters: P.
        size: bytes of a number.
    """
    part = part_length(steps, parameters, size)
    kept = _bytes_for_rows(steps, parameters, size) / (part * rows * parameters * size)
    return 2 + (part < steps) - min(1.0, kept)


def sweep_bytes(steps: int, rows: int, parameters: int, targets: int) -> int:
    """Estimate the memory of a sweep in float32, without what the model needs for its passes.

    Args:
        steps: T.
        rows: rows of a step.
        parameters: P.
        targets: those whose derivatives are swept together.
    """
    states = _STATE * (part_length(steps, parameters) + 1)
    gradients = min(ROW_BYTES, rows * parameters * ROW_COPIES)
    gradients += min(_bytes_for_rows(steps, parameters), 4 * part_length(steps, parameters) * rows * parameters)
    return 4 * parameters * (COPIES * targets + states) + gradients


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


class BackwardSweep:
    """One sweep for some groups of targets. It can be interrupted at any moment and run again."""

    def __init__(self, path: RunPath, options: SweepOptions, passes: StepPasses, processes: Processes) -> None:
        """
        Args:
            path: the run.
            options: see [`SweepOptions`].
            passes: computes gradients and curvature.
            processes: all of them sweep together, and divide the products with the curvature.
        """
        self.path, self.options, self.passes, self.processes = path, options, passes, processes
        self.count = len(path.steps)
        first = path.weights(0)
        self.dtype, self.device, self.width = first.dtype, first.device, len(first)
        self.part = part_length(self.count, self.width, first.element_size())
        self.saved = math.ceil(math.sqrt(self.count))
        self.forward = torch.full((2, self.count), math.nan, dtype=torch.float64)
        self._again = path.again
        totals, rates = [len(one.rows) for one in path.steps], path.numbers.rates.max(1).values
        self._draws = RowDraws.of(totals, rates.cpu(), options.share, options.seed)
        self._groups: list[SweptTargets] = []
        self._gradients: dict[int, list[RowGradients]] = {}

    # -- files -------------------------------------------------------------------------------------------------------

    @property
    def _home(self) -> SweptTargets:
        return self._groups[0]

    @property
    def _kind(self) -> str:
        return "line" if self.path.again and not self._again else "state"

    def _read_state(self, step: int) -> State:
        specs = {
            "weights": TensorSpec((self.width,), (self.dtype,)),
            "moments": TensorSpec((3, self.width), (self.dtype,)),
            "forward": self._home.forward_spec,
        }
        read = read_tensors(self._home.file(self._kind, step), {**self._home.identity, "step": step}, specs)
        weights, moments = (read[name].clone().to(self.device) for name in ("weights", "moments"))
        self.forward = torch.where(read["forward"].isnan(), self.forward, read["forward"])
        first, second, noise = moments
        return State(weights, Moments(first, second, noise, step))

    def _write_state(self, step: int, state: State) -> None:
        moments = torch.stack([state.moments.first, state.moments.second, state.moments.noise])
        tensors = {"weights": state.weights, "moments": moments, "forward": self.forward}
        write_tensors(self._home.file(self._kind, step), tensors, {**self._home.identity, "step": step})

    # -- forwards ----------------------------------------------------------------------------------------------------

    def _step(self, index: int) -> OptimizerStep:
        step = self.path.numbers.step(index)
        return replace(step, smoothing=self.options.smoothing) if isinstance(step, AdamStep) else step

    def _forward(self, index: int, state: State, kept: list[RowGradients] | None = None) -> State:
        """Take a step: the weights after it are known ones, or its own, or on a line. The moments are rebuilt.

        The gradients of its rows are kept in a list, if there is one.
        """
        gradient, squares, count, losses = torch.zeros_like(state.weights), torch.zeros_like(state.weights), 0, 0.0
        self.passes.put(state.weights)
        for part in self.passes.rows(self.path.steps[index].batches):
            gradient += part.gradients.sum(0)
            squares += part.gradients.square().sum(0)
            count += len(part.rows)
            losses += part.loss
            if kept is not None:
                kept.append(part)
        self.forward[0, index] = losses
        if index == 0:
            self._check_gradient(gradient)
        variance = (squares - gradient.square() / count).clamp_min(0)
        reached, moments = self._step(index).forward(state.weights, state.moments, gradient, variance)
        if self._again and not self.path.known(index + 1):
            return State(reached.to(self.dtype), moments)
        compared = not self.path.known(index) if self._again else not self.path.again
        if compared and self.path.known(index + 1):
            # Biases of keys of attention have a gradient of zero but for rounding, of which Adam makes whole steps.
            sizes = moments.second.sqrt()
            rounding = (sizes > 0) & (sizes <= _ROUNDED * torch.finfo(sizes.dtype).eps * sizes.max())
            self.forward[1, index] = self.path.deviation(index + 1, reached, ~rounding)
        return State(self.path.weights(index + 1), moments)

    def _check_gradient(self, gradient: Tensor) -> None:
        """Compare the gradient of the first step, whose weights are known, with what the optimizer got."""
        found = float(gradient.double().norm()) * self._step(0).share(gradient)
        trained = self.path.steps[0].norm
        if is_known(trained) and not abs(found - trained) <= NORM_DEVIATION * trained:
            raise HfTrakError(
                f"The gradient of the first step has the norm {found:.6g}, and the optimizer got one of {trained:.6g} "
                f"in the training. Expected the same to {NORM_DEVIATION:.0%}. Was something drawn at random, are "
                "parameters frozen now that were not, or does a row's loss depend on others of its batch, as KTO's?"
            )

    def _states(self, start: int, behind: int) -> list[State]:
        """Rebuild the states before each step of a part, and the one after it, up to the step that is left."""
        states, size = [self._read_state(start)], torch.promote_types(self.dtype, torch.float32).itemsize
        self._gradients, left = {}, _bytes_for_rows(self.count, self.width, size)
        for index in range(start, min(start + self.part, self.count)):
            kept, wanted = None, len(self.path.steps[index].rows) * self.width * size
            if index < behind and wanted <= left:
                kept = self._gradients[index] = []
                left -= wanted
            states.append(self._forward(index, states[-1], kept))
        return states

    def _rebuild(self, progress: RowProgress) -> None:
        """Sweep forwards, and keep the state before each part. The last part is left to the sweep back."""
        starts = range(0, self.count, self.part)

        def begun() -> int:
            found = [step for step in self._home.files(self._kind) if step in starts]
            if not found:
                weights = self.path.weights(0)
                self._write_state(0, State(weights, Moments.start(weights)))
            return found[-1] if found else 0

        start = self.processes.broadcast_from_main(begun)
        with self.processes.all_or_none():
            state = self._read_state(start)
            for index in range(start, starts[-1]):
                state = self._forward(index, state)
                progress.update(len(self.path.steps[index].rows))
                if index + 1 in starts and self.processes.is_main_process:
                    self._write_state(index + 1, state)

    def _missed(self) -> bool:
        """Tell whether the steps that were taken again have missed known weights."""
        missed = self.forward[1].nan_to_num(0.0, posinf=math.inf)
        most = self.processes.broadcast_from_main(lambda: float(missed.max()))
        if most > MISSED and self.processes.is_main_process:
            logger.warning(
                "The steps of the run, taken again, missed the next known weights by %.0f %% of the way to them. "
                "Expected %.0f %% at most: weights between them are taken from lines. Give the rows, the collator "
                "and the precision of the run; of a run with dropout, record all steps (`TrakCallback(record=True)`).",
                100 * most, 100 * MISSED,
            )  # fmt: skip
        return bool(most > MISSED)

    # -- backwards ---------------------------------------------------------------------------------------------------

    def run(self, groups: Sequence[tuple[SweptTargets, Tensor]], what: str) -> None:
        """Compute the scores of all rows for groups of targets. All processes call it together.

        Args:
            groups: the groups, with the gradients of their targets by the last weights, `(m, P)`.
            what: names the targets, for the progress bar.

        Raises:
            HfTrakError: the training rows or their loss are not those of the run.
            NonFiniteError: a number is NaN or infinite; names the step.
            PeerProcessError: another process failed.
            GradientEngineError: the model cannot be differentiated as needed.
            StoreError: a file is damaged or cannot be written.
        """
        self._groups, main = [group for group, _ in groups], self.processes.is_main_process
        with self.processes.all_or_none():
            for group, targets in groups:
                group.begin(targets.to(self.device, self.dtype), self.forward)
        rows = sum(len(one.rows) for one in self.path.steps)
        with RowProgress(rows * (2 + (self.part < self.count)), what, show=main, announce=main) as progress:
            if self._again:
                self._again = not self.processes.broadcast_from_main(lambda: self._home.files("line"))
            self._rebuild(progress)
            while (behind := max(group.behind for group in self._groups)) > 0:
                self._part_back(behind, progress)
        with self.processes.all_or_none():
            for group in self._groups if main else []:
                group.conclude(self.forward)
                group.clean()

    def _part_back(self, behind: int, progress: RowProgress) -> None:
        """Rebuild the part of the run before a step, and take the groups back through it that are not."""
        start = (behind - 1) // self.part * self.part
        with self.processes.all_or_none():
            states = self._states(start, behind)
        if self._again and behind == self.count and self._missed():
            self._again, self.forward[1] = False, math.nan
            self._rebuild(progress)
            with self.processes.all_or_none():
                states = self._states(start, behind)
        progress.update(sum(len(one.rows) for one in self.path.steps[start:behind]))
        for index in range(behind - 1, start - 1, -1):
            groups = [group for group in self._groups if group.behind > index]
            self._backward(index, states[index - start], states[index - start + 1], groups)
            for group in groups:
                group.growth[index] = self._largest(group.cotangents, index)
                group.behind = index
                if index % self.saved == 0 and index and self.processes.is_main_process:
                    group.keep(self.forward)
            progress.update(len(self.path.steps[index].rows))

    def _largest(self, cotangents: Cotangents, index: int) -> Tensor:
        found = cotangents.weights.double().norm(dim=1).max().cpu()
        if not bool(torch.isfinite(found)):
            raise NonFiniteError(
                f"The derivatives of the targets are NaN or infinite before step {index}. Expected finite numbers: "
                "the run is too hot to be followed back. Use more of each batch (`hessian_share=1`), the "
                "Gauss-Newton matrix, or `of='recipe'`."
            )
        return found

    def _backward(self, index: int, state: State, after: State, groups: Sequence[SweptTargets]) -> None:
        """Take the derivatives back through one step, and add the scores of its rows."""
        recorded, step = self.path.steps[index], self._step(index)
        decoupled = isinstance(step, AdamStep) and step.decoupled
        decayed = state.weights * (-step.rate * step.decay if decoupled else math.nan)
        ways = torch.stack([after.weights - state.weights, decayed.to(state.weights)])
        with self.processes.all_or_none():
            self.passes.put(state.weights)
            held = self._gradients.pop(index, None)
            if held is None and self.passes.fits(len(recorded.rows)):
                held = list(self.passes.rows(recorded.batches))
            gradient = torch.zeros_like(state.weights)
            for part in held or self.passes.rows(recorded.batches):
                gradient += part.gradients.sum(0)
            for group in groups:
                group.settings[:, index] = inner_products(ways, group.cotangents.weights).cpu()
            gammas = [step.backward(group.cotangents, after.moments, gradient, state.weights) for group in groups]
            for part in held or self.passes.rows(recorded.batches):
                for group, gamma in zip(groups, gammas, strict=True):
                    group.scores.index_add_(0, torch.tensor(part.rows), inner_products(part.gradients, gamma).cpu())
            curved = [self._curved(index, gamma) for gamma in gammas]
        for group, products in zip(groups, curved, strict=True):
            if self.processes.num_processes > 1:  # each row comes from one of them, the others add zeros
                products = self.processes.add(products.cpu()).to(products.device)
            group.cotangents.weights.add_(products)

    def _curved(self, index: int, gamma: Tensor) -> Tensor:
        """Multiply those directions of targets by the curvature of a step that fall to this process: `(m, P)`.

        The products of other processes are zero.
        """
        batches, processes = self.path.steps[index].batches, self.processes
        chosen, weight = self._draws.rows([len(one.rows) for one in batches], index)
        found, lows = torch.zeros_like(gamma), range(0, len(gamma), TOGETHER)
        pieces = [slice(low, low + TOGETHER) for low in lows[processes.process_index :: processes.num_processes]]
        if pieces:
            given = [gamma[piece] for piece in pieces]
            curved = self.passes.curvature(batches, chosen, given, self.options.form)
            for piece, one in zip(pieces, curved, strict=True):
                found[piece] = one * weight
        return found


def inner_products(rows: Tensor, directions: Tensor) -> Tensor:
    """Multiply rows `(B, P)` and directions `(m, P)`: `(B, m)`, in float64."""
    total = torch.zeros(len(rows), len(directions), dtype=torch.float64, device=directions.device)
    for first in range(0, rows.shape[1], _SLICE):
        part = slice(first, first + _SLICE)
        total += rows[:, part].double() @ directions[:, part].double().T
    return total
