"""Preconditioned conjugate gradients for many right-hand sides at once, each with step sizes of its own.

Solves (C + D) x = g for every target g, with C a curvature that can only be multiplied by, and D its damping. The
preconditioner P is a Kronecker-factored curvature with the same damping, so that the first direction is P⁻¹g, the
answer without refinement (Hestenes & Stiefel 1952; for curvatures of networks: Martens 2010). The start is zero
rather than P⁻¹g itself: with the same number of products, that gives the best multiple of P⁻¹g on the way as well.

Targets share products only, so a solution does not depend on the company of others. Inner products are float64.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hf_trak.config import ProductForm
from hf_trak.curvature.curvature import Curvature, damping_of, inverse
from hf_trak.runtime.arguments import named_arguments
from hf_trak.runtime.checks import checked_int

Reason = Literal["running", "tolerance", "steps", "stagnation", "negative curvature", "zero gradient"]

"""Why a target needs no more steps. The place in this list is the number that is stored."""


REASONS: tuple[str, ...] = get_args(Reason)


PATIENCE = 5

"""Steps without a smaller residual after which there is nothing left to gain but rounding."""


@dataclass
class Solutions:
    """The state of the iterations for m targets, which holds all that the next step needs.

    Attributes:
        found (`torch.Tensor`): x, `(m, P)`.
        residuals (`torch.Tensor`): g − (C + D) x, `(m, P)`.
        directions (`torch.Tensor`): the next directions, `(m, P)`.
        squares (`torch.Tensor`): rᵀP⁻¹r of the residuals now, of the start, the smallest of all steps, and that of
            P⁻¹g, the answer without refinement: `(4, m)`, float64.
        counts (`torch.Tensor`): steps taken, steps since the smallest residual, and the number of the reason to stop:
            `(3, m)`, int64.
    """

    found: Tensor
    residuals: Tensor
    directions: Tensor
    squares: Tensor
    counts: Tensor

    @classmethod
    def start(cls, gradients: Tensor, precondition: Callable[[Tensor], Tensor]) -> "Solutions":
        """Begin with x = 0.

        Args:
            gradients: g, `(m, P)`.
            precondition: multiplies `(m, P)` by P⁻¹.
        """
        directions = precondition(gradients)
        squares = dots(gradients, directions)
        counts = torch.zeros(3, len(gradients), dtype=torch.int64, device=gradients.device)
        # No direction, no answer but zero; and none where the preconditioner is not positive, as where it is rounding.
        counts[2] = torch.where(squares > 0, 0, REASONS.index("zero gradient"))
        state = torch.stack([squares, squares, squares, torch.full_like(squares, math.nan)])
        return cls(torch.zeros_like(gradients), gradients.clone(), directions, state, counts)

    @property
    def running(self) -> Tensor:
        """Return the numbers of the targets that take another step."""
        return (self.counts[2] == 0).nonzero().flatten()

    def advance(
        self, products: Tensor, precondition: Callable[[Tensor], Tensor], steps: int, tolerance: float
    ) -> None:
        """Take one step for every target that is running.

        Args:
            products: (C + D) times their directions, `(len(running), P)`.
            precondition: multiplies `(m, P)` by P⁻¹.
            steps: largest number of steps.
            tolerance: residual, relative to that of the start, at which a target is done.
        """
        which = self.running
        directions = self.directions[which]
        curved = dots(directions, products)
        if bool((self.counts[0][which] == 0).all()):
            unrefined = self.residuals[which] - products
            self.squares[3, which] = dots(unrefined, precondition(unrefined)).clamp_min(0)
        self._stop(which[curved <= 0], directions[curved <= 0])
        which, directions, products, curved = (one[curved > 0] for one in (which, directions, products, curved))
        if len(which) == 0:
            return
        lengths = (self.squares[0, which] / curved).unsqueeze(1)
        self.found[which] += (lengths * directions).to(directions.dtype)
        residuals = self.residuals[which] - (lengths * products).to(products.dtype)
        self.residuals[which] = residuals
        conditioned = precondition(residuals)
        squares = dots(residuals, conditioned).clamp_min(0)
        turned = (squares / self.squares[0, which]).unsqueeze(1)
        self.directions[which] = conditioned + (turned * directions).to(directions.dtype)
        self._count(which, squares, steps, tolerance)

    def _stop(self, which: Tensor, directions: Tensor) -> None:
        """End where a direction has no positive curvature. Before the first step, it is the answer itself."""
        first = self.counts[0, which] == 0
        self.found[which[first]] = directions[first]
        self.squares[0, which[first]] = self.squares[3, which[first]]
        self.counts[2, which] = REASONS.index("negative curvature")

    def _count(self, which: Tensor, squares: Tensor, steps: int, tolerance: float) -> None:
        """Note the residuals of a step, and who is done."""
        smallest = self.squares[2, which]
        better = squares < smallest
        taken = self.counts[0, which] + 1
        waited = torch.where(better, 0, self.counts[1, which] + 1)
        self.squares[0, which], self.squares[2, which] = squares, torch.minimum(squares, smallest)
        reasons = torch.zeros_like(taken)
        reasons[taken >= steps] = REASONS.index("steps")
        reasons[waited >= PATIENCE] = REASONS.index("stagnation")
        reasons[squares <= tolerance**2 * self.squares[1, which]] = REASONS.index("tolerance")
        self.counts[:, which] = torch.stack([taken, waited, reasons])

    def report(self) -> "list[RefinedTarget]":
        """Describe where every target has got to."""
        relative = (self.squares / self.squares[1].clamp_min(torch.finfo(torch.float64).tiny)).sqrt().tolist()
        steps, _, reasons = self.counts.tolist()
        unrefined = [None if math.isnan(residual) else residual for residual in relative[3]]
        return list(map(RefinedTarget, steps, relative[0], unrefined, (REASONS[reason] for reason in reasons)))


@dataclass(frozen=True)
class RefinedTarget:
    """The accuracy to which one target was solved.

    Attributes:
        steps (`int`): number of steps.
        residual (`float`): ‖g − (C + D) x‖ / ‖g‖, both in the norm of P⁻¹.
        unrefined (`float`, *optional*): the same for P⁻¹g, the answer without refinement.
        stopped (`str`): see [`Reason`].
    """

    steps: int
    residual: float
    unrefined: float | None
    stopped: str


def summary(targets: Sequence[RefinedTarget]) -> str:
    """Sum up in one sentence how far targets were solved."""
    if not (solved := [one for one in targets if one.stopped != "zero gradient"]):
        return "no target has a gradient"
    residuals = sorted(one.residual for one in solved)
    before = sorted(one.unrefined for one in solved if one.unrefined is not None)
    steps = sorted(one.steps for one in solved)
    counted = {reason: sum(one.stopped == reason for one in targets) for reason in REASONS}
    reasons = ", ".join(f"{reason} {count}" for reason, count in counted.items() if count)
    unrefined = f" instead of {before[len(before) // 2]:.2g} without refinement" if before else ""
    return (
        f"relative residual {residuals[len(residuals) // 2]:.2g}{unrefined} in the median, {residuals[-1]:.2g} at "
        f"most, after {steps[len(steps) // 2]} steps in the median; stopped by: {reasons}"
    )


def damping_terms(curvature: Curvature, damping: float) -> Tensor:
    """Return D, the damping of every parameter, d of its block: `(P,)`, float64. Blocks without curvature, which have
    no part in scores, have 0."""
    terms = torch.zeros(1, curvature.numel, dtype=torch.float64)
    for block, values in zip(curvature.blocks.kronecker, curvature.kronecker, strict=True):
        block.put(_terms(values.eigenvalues, damping, curvature.floor).expand(1, *block.shape), terms)
    for one, squares in zip(curvature.blocks.diagonal, curvature.diagonal, strict=True):
        terms[0, one.start : one.start + one.numel] = _terms(squares, damping, curvature.floor)
    return terms[0]


def _terms(eigenvalues: Tensor, damping: float, floor: float) -> Tensor:
    if bool(inverse(eigenvalues, damping, floor).any()):
        return damping_of(eigenvalues, damping, floor)
    return torch.zeros((), dtype=torch.float64)


def dots(left: Tensor, right: Tensor) -> Tensor:
    """Compute the inner products of rows `(m, P)`, row by row in float64: `(m,)`."""
    return torch.stack([a.double() @ b.double() for a, b in zip(left, right, strict=True)])


DEFAULT_STEPS = 10

DEFAULT_ROWS = 1024

REFINED_DAMPING = 10.0

"""Damping c of refined targets: what the banks of the benchmark of quality say, see benchmarks/pages/refine.md. C has
curvature between layers, too, and so many more directions that a sample of rows says little about."""

DEFAULT_TOLERANCE = 0.05


@named_arguments
@dataclass(frozen=True)
class Refinement:
    """The settings of refined targets: the system (C + D) x = g and how far it is solved.

    Args:
        steps (`int`, *optional*, defaults to 10):
            Steps at most. Each is a product of C with all targets: a forward and a backward pass over `rows` for each
            target. One step alone leaves every target's ranking as it was.
        rows (`int`, *optional*, defaults to 1024):
            Number of training rows, drawn at random, whose Gauss-Newton matrix C is. All, if there are fewer.
        tolerance (`float`, *optional*, defaults to 0.05):
            Residual at which a target is done, relative to that of the start, in the norm of P⁻¹.
        damping (`float`, *optional*):
            Damping c of both C and P, relative to the mean of each block's eigenvalues. By default that of the
            configuration, if it names one, and otherwise 10.
        form (`str`, *optional*, defaults to `"auto"`):
            Derivatives along a direction `"forward"`, in forward mode, or `"twice"`, by differentiating twice, which
            takes less memory and more time; `"auto"` is forward mode where the model allows it.

    Raises:
        ValueError: a number is out of range, or there is no such form.
    """

    steps: int = DEFAULT_STEPS
    rows: int = DEFAULT_ROWS
    tolerance: float = DEFAULT_TOLERANCE
    damping: float | None = None
    form: ProductForm = "auto"

    def __post_init__(self) -> None:
        for name in ("steps", "rows"):
            object.__setattr__(self, name, checked_int(getattr(self, name), name, 1, type_error=ValueError))
        for name in ("tolerance",) if self.damping is None else ("tolerance", "damping"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise ValueError(f"`{name}` of a refinement is {value!r}. Expected a finite number of at least 0.")
        if self.form not in get_args(ProductForm):
            raise ValueError(
                f"`form` of a refinement is {self.form!r}. Expected one of {list(get_args(ProductForm))}."
            )

    def describe(self) -> str:
        """Say in a few words what was done."""
        return f"at most {self.steps} steps of conjugate gradients on {self.rows:,} rows"

    @classmethod
    def parse(cls, text: str) -> "Refinement":
        """Read what a command line says, such as `cg` or `cg,steps=20,damping=1`.

        Args:
            text (`str`): `cg`, and fields of this class.

        Raises:
            ValueError: it says something else.
        """
        method, *options = [part.strip() for part in text.split(",")]
        kinds: dict[str, Callable[[str], Any]] = {
            "steps": int, "rows": int, "tolerance": float, "damping": float, "form": str
        }  # fmt: skip
        found: dict[str, Any] = {}
        for option in options:
            name, equals, value = option.partition("=")
            if not equals or name not in kinds:
                raise ValueError(
                    f"`refine` has the option {option!r}. Expected `name=value` with a name of "
                    f"{[field.name for field in fields(cls)]}, such as `cg,steps=20,damping=1`."
                )
            try:
                found[name] = kinds[name](value)
            except ValueError as error:
                raise ValueError(f"`refine` has the option {option!r}. Expected a number after `=`.") from error
        if method != "cg":
            raise ValueError(_UNKNOWN.format(method))
        return cls(**found)


_UNKNOWN = (
    "`refine` is {!r}. Expected 'cg', for conjugate gradients, or a `Refinement` with its options. For the Woodbury "
    "identity over all rows, use `curvature='hybrid'`."
)


def checked_refinement(refine: "str | Refinement | None") -> Refinement | None:
    """Return a refinement for what a user gives.

    Args:
        refine: `"cg"`, with options as [`Refinement.parse`] reads them, a [`Refinement`], or `None`.

    Raises:
        ValueError: it is something else.
    """
    if refine is None:
        return None
    if not isinstance(refine, str | Refinement):
        raise ValueError(_UNKNOWN.format(refine))
    return Refinement.parse(refine) if isinstance(refine, str) else refine
