"""What is known of a run, and what a replay of it costs."""

from dataclasses import dataclass

from hf_trak.config import HESSIAN_SHARE
from hf_trak.trajectory.passes import CurvatureForm
from hf_trak.trajectory.record import is_known
from hf_trak.trajectory.share import trainings
from hf_trak.trajectory.states import RunPath
from hf_trak.trajectory.sweep import TOGETHER, gradient_passes, sweep_bytes

_CLIPPED = 0.999
"""Part of the largest norm from which on a gradient was clipped, in rounding."""

_COPIES_OF_GRADIENTS, _COPIES_OF_PRODUCTS, _COPIES_OF_TANGENTS = 3, 8, 2
"""Activations that a pass holds at its peak: for the gradients of rows, for products with their curvature, and for
each direction that is multiplied."""


@dataclass(frozen=True)
class RunSummary:
    """What there is of a run. `str()` says it in a few lines.

    Attributes:
        recorded (`bool`): whether there is a record; otherwise the order of rows is what the trainer draws now.
        steps (`int`): steps of the optimizer.
        rows (`int`): rows that they saw, repeated ones included.
        epochs (`float`): these, divided by the number of training rows.
        states (`int`): weights that are known on the way, the first and the last included.
        gap (`int`): the longest way between two of them, in steps.
        rates (`tuple[float, float, float]`): learning rates of the first and the last step, and the highest.
        clipped (`float`, *optional*): share of the steps whose gradient was clipped, where it is recorded.
        parameters (`int`): trained parameters.
        activations (`int`): bytes that the forward pass of the largest batch of a step keeps for its way back; 0 if
            they were not counted.
    """

    recorded: bool
    steps: int
    rows: int
    epochs: float
    states: int
    gap: int
    rates: tuple[float, float, float]
    clipped: float | None
    parameters: int
    activations: int

    @classmethod
    def of(cls, path: RunPath, recorded: bool, train_rows: int, parameters: int, activations: int) -> "RunSummary":
        """Sum up a run.

        Args:
            path: its way.
            recorded: whether it comes from a record.
            train_rows: n.
            parameters: P.
            activations: bytes, see the attribute.
        """
        rates = path.numbers.rates.max(1).values.tolist()
        norms, largest = [one.norm for one in path.steps if is_known(one.norm)], path.numbers.max_norm
        clipped = sum(norm >= _CLIPPED * largest for norm in norms) / len(norms) if norms and largest else None
        rows = sum(len(one.rows) for one in path.steps)
        return cls(
            recorded, len(path.steps), rows, rows / train_rows, len(path.states), path.gap,
            (rates[0], rates[-1], max(rates)), clipped, parameters, activations,
        )  # fmt: skip

    def passes(self, targets: int, hessian_share: float = 1.0) -> float:
        """Estimate the cost of a replay in forward and backward passes of a row, for each row of the training dataset.

        Args:
            targets (`int`): m.
            hessian_share (`float`, *optional*, defaults to 1.0): see [`~hf_trak.Replay`]. Half of the rows or more
                have the Hessian, fewer the Gauss-Newton matrix.
        """
        gradients = gradient_passes(self.steps, -(-self.rows // self.steps), self.parameters)
        form: CurvatureForm = "hessian" if hessian_share >= HESSIAN_SHARE else "gauss-newton"
        return self.epochs * trainings(gradients, targets, hessian_share, form)

    def memory(self, targets: int, hessian_share: float = 1.0) -> int:
        """Estimate the bytes of a sweep of m targets together, beside the model.

        The sweep's own numbers are counted. Its passes hold the activations of a batch some times over: graphs of
        gradients that are differentiated again, and tangents of each target. How often, is measured
        (`benchmarks/pages/replay_cost.md`), and right to a factor of three.

        Args:
            targets (`int`): m.
            hessian_share (`float`, *optional*, defaults to 1.0): see [`~hf_trak.Replay`].
        """
        own = sweep_bytes(self.steps, -(-self.rows // self.steps), self.parameters, targets)
        products = hessian_share * (_COPIES_OF_PRODUCTS + _COPIES_OF_TANGENTS * min(targets, TOGETHER))
        return own + round(self.activations * max(_COPIES_OF_GRADIENTS, products))

    def __str__(self) -> str:
        first, last, highest = self.rates
        order = "as recorded" if self.recorded else "as the trainer draws them (no record)"
        clipping = "" if self.clipped is None else f", {self.clipped:.0%} of the steps clipped"
        return (
            f"{self.steps} steps over {self.rows:,} rows ({self.epochs:.3g} epochs), {order}\n"
            f"weights of {self.parameters:,} parameters at {self.states} steps, at most {self.gap} apart\n"
            f"learning rate {first:.3g} to {last:.3g}, {highest:.3g} at most{clipping}\n"
            f"a replay takes {self.passes(1):.3g} passes over the training rows for 1 target, {self.passes(10):.3g} "
            f"for 10 and {self.passes(100):.3g} for 100; a fifth of each batch in the curvature: "
            f"{self.passes(1, 0.2):.3g}, {self.passes(10, 0.2):.3g} and {self.passes(100, 0.2):.3g}"
        )
