"""`Refinement`: the options of `attribute(..., refine=)`."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, get_args

from hf_trak.gradient_computers.gauss_newton import ProductForm
from hf_trak.runtime.checks import checked_int

DEFAULT_STEPS = 10
DEFAULT_ROWS = 1024
REFINED_DAMPING = 10.0
"""Damping c of refined targets: what the banks of the benchmark of quality say, see docs/benchmarks/refine.md. C has
curvature between layers, too, and so many more directions that a sample of rows says little about."""
DEFAULT_TOLERANCE = 0.05


@dataclass(frozen=True)
class Refinement:
    """How targets are refined: the system (C + D) x = g, and how far it is solved.

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
        for name in ("tolerance", "damping"):
            value = getattr(self, name)
            if name == "damping" and value is None:
                continue
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


def checked_refinement(refine: "str | Refinement | None", exact: bool = True) -> Refinement | None:
    """Return a refinement for what a user gives.

    Args:
        refine: `"cg"`, with options as [`Refinement.parse`] reads them, a [`Refinement`], or `None`.
        exact: whether scores are exact, of all rows or of a shortlist.

    Raises:
        ValueError: it is something else, or scores come from features.
    """
    if refine is None:
        return None
    if not isinstance(refine, str | Refinement):
        raise ValueError(_UNKNOWN.format(refine))
    if not exact:
        raise ValueError(
            f"`refine` is {refine!r}, for scores from features, whose targets are not refined. Expected exact scores. "
            "Set `exact=True` or `rerank=`, or leave `refine` out."
        )
    return Refinement.parse(refine) if isinstance(refine, str) else refine
