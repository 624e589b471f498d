"""The ways to compute scores: `Index`, `Exact`, `Rerank` and `Replay`, which `TrakAttributor.attribute` takes."""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hf_trak.config import HESSIAN_SHARE, CurvatureName
from hf_trak.curvature.conjugate_gradients import Refinement, checked_refinement
from hf_trak.runtime.arguments import named_arguments
from hf_trak.runtime.checks import checked_int

_KINDS = get_args(CurvatureName)


def _check_curvature(kind: Any) -> None:
    if kind not in (None, *_KINDS):
        raise ValueError(f"`curvature` is {kind!r}. Expected one of {_KINDS}, or `None` as in the configuration.")


def _check_size(name: str, value: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (number and 0 <= value < math.inf):
        raise ValueError(
            f"`{name}` is {value!r}. Expected a finite number of at least 0, or `None` as in the configuration."
        )


@named_arguments
@dataclass(frozen=True)
class Index:
    """Score with the stored features: TRAK's ridge regression.

    Args:
        first_pass_bytes (`int`, *optional*):
            Look at the first so many bytes of every row, and at whole rows of the best of these alone. For stores with
            codes; 512, 1024, 2048, … are whole blocks. Rows that the first bytes rank low are missed;
            `TrakAttributor.fidelity(of=Index(first_pass_bytes=...))` measures them.
        candidates (`int`, *optional*):
            Rows of the first pass whose whole features are read, for each target and end. By default 50 times
            `top_k`, and 1,000 at least.
        lambda_relative (`float`, *optional*):
            Ridge λ, as in [`~hf_trak.TrakConfig`]. By default that of the configuration.

    Raises:
        ValueError: `first_pass_bytes` is less than 1, `candidates` is given without it, or a number is negative.
    """

    first_pass_bytes: int | None = None
    candidates: int | None = None
    lambda_relative: float | None = None

    def __post_init__(self) -> None:
        _check_size("lambda_relative", self.lambda_relative)
        if self.first_pass_bytes is not None:
            checked_int(self.first_pass_bytes, "first_pass_bytes", 1, type_error=ValueError)
        elif self.candidates is not None:
            raise ValueError(
                f"`candidates` is {self.candidates}, without `first_pass_bytes`. Expected both or neither: candidates "
                "are the rows that a first pass finds."
            )


@named_arguments
@dataclass(frozen=True)
class Exact:
    """Score with whole gradients under the curvature that `fit_curvature` fits: one pass over the training rows.

    A curvature that is missing is fitted first. Nothing of a row is stored but its scores.

    Args:
        curvature (`str`, *optional*):
            Kind of the curvature: `"ekfac"`, `"hybrid"`, … By default that of the configuration.
        refine (`str` or `Refinement`, *optional*):
            `"cg"` refines targets by conjugate gradients on the Gauss-Newton matrix of some training rows, which knows
            all parameters together, where the fitted curvature knows layers. Options are in
            [`~hf_trak.curvature.conjugate_gradients.Refinement`].
        damping (`float`, *optional*):
            Damping c, as in [`~hf_trak.CurvatureConfig`]. By default that of the configuration.

    Raises:
        ValueError: a kind or a refinement is unknown, or the damping is negative.
    """

    curvature: CurvatureName | None = None
    refine: str | Refinement | None = None
    damping: float | None = None

    def __post_init__(self) -> None:
        _check_curvature(self.curvature)
        _check_size("damping", self.damping)
        object.__setattr__(self, "refine", checked_refinement(self.refine))

    @property
    def refinement(self) -> Refinement | None:
        """Return the options of the refinement."""
        return checked_refinement(self.refine)


@named_arguments
@dataclass(frozen=True)
class Rerank:
    """Take rows from the features, and score these rows with whole gradients, as [`Exact`] scores all rows.

    The cost does not grow with the training dataset.

    Args:
        rows (`int`, *optional*, defaults to 2000):
            Rows to take from the features, for each target and end.
        curvature, refine (*optional*):
            See [`Exact`]. A hybrid has a system over all rows, so that it cannot score some of them.
        index ([`Index`], *optional*):
            How rows are taken from the features.

    Raises:
        ValueError: `rows` is less than 1, or a kind or a refinement is unknown.
    """

    rows: int = 2000
    curvature: CurvatureName | None = None
    refine: str | Refinement | None = None
    index: Index = Index()

    def __post_init__(self) -> None:
        checked_int(self.rows, "rows", 1, type_error=ValueError)
        _check_curvature(self.curvature)
        object.__setattr__(self, "refine", checked_refinement(self.refine))

    @property
    def exact(self) -> Exact:
        """Return how the rows are scored."""
        return Exact(self.curvature, self.refine)

    @property
    def refinement(self) -> Refinement | None:
        """Return the options of the refinement."""
        return checked_refinement(self.refine)


@named_arguments
@dataclass(frozen=True)
class Replay:
    """Score with the run that made the model, walked backwards through the steps of its optimizer.

    Scores predict how far the output of a target rises by training on a row. The recipe needs an attributor of
    `TrakAttributor.from_trainer`, whose trainer knows optimizer, learning rates and batch size, and the last weights
    alone. The run needs its record, which `TrakCallback(record=True)` writes, or a checkpoint at every few steps.

    Args:
        of (`str`, *optional*, defaults to `"recipe"`):
            `"recipe"`: what rows do to a model trained like this one, in the mean over orders of the rows. `"run"`:
            what they did in the run itself.
        form (`str`, *optional*):
            Curvature of the loss on the way back: `"gauss-newton"`, which is never negative, or `"hessian"`, which is
            whole, and wants more rows. By default the Hessian for a run with half of the rows or more, and else
            Gauss-Newton.
        rows (`int`, *optional*, defaults to 32):
            Rows whose curvature each step of a recipe has, drawn at random.
        steps (`int`, *optional*, defaults to 1000):
            Steps of a recipe back at most. Those of a longer run are taken together, which is refused where it makes
            steps too large for the curvature.
        hessian_share (`float`, *optional*, defaults to 1.0):
            Part of the rows of a run whose curvature is used: less work, and more noise. The work for m targets is
            that of `2 + 2 * m * hessian_share` trainings.
        smoothing (`float`, *optional*, defaults to 1.0):
            κ, the part of the variance of a batch's gradient in the scale of the steps of a run. 0 is the plain
            derivative, which fails without warmup.
        name (`str`, *optional*, defaults to `"run"`):
            Name of the run's record, that of the callback. Where there is none, the weights are those of checkpoints,
            and rows come in the order in which the trainer of the attributor draws them.
        start (`str`, *optional*):
            Directory of the weights before the first step, for a run without a record. By default `checkpoint-0` in
            the trainer's directory, or the directory that the model was loaded from.

    Raises:
        ValueError: a number is out of range, or a word is another one.
    """

    of: Literal["recipe", "run"] = "recipe"
    form: Literal["gauss-newton", "hessian"] | None = None
    rows: int = 32
    steps: int = 1000
    hessian_share: float = 1.0
    smoothing: float = 1.0
    name: str = "run"
    start: str | None = None

    def __post_init__(self) -> None:
        for name, words in (("of", ("recipe", "run")), ("form", (None, "gauss-newton", "hessian"))):
            if getattr(self, name) not in words:
                raise ValueError(f"`{name}` of a replay is {getattr(self, name)!r}. Expected one of {list(words)}.")
        for name in ("rows", "steps"):
            object.__setattr__(self, name, checked_int(getattr(self, name), name, 1, type_error=ValueError))
        if not isinstance(self.hessian_share, int | float) or not 0 < self.hessian_share <= 1:
            raise ValueError(f"`hessian_share` is {self.hessian_share!r}. Expected a part of the rows in (0, 1].")
        if not 0 <= self.smoothing < float("inf"):
            raise ValueError(f"`smoothing` is {self.smoothing!r}. Expected a finite number of at least 0.")

    @property
    def products(self) -> Literal["gauss-newton", "hessian"]:
        """Return the curvature that is used."""
        if self.form is not None:
            return self.form
        return "hessian" if self.of == "run" and self.hessian_share >= HESSIAN_SHARE else "gauss-newton"


@dataclass(frozen=True)
class Combination:
    """Add up the scores of other methods, each times its weight.

    [`~hf_trak.TrakAttributor.calibrate`] finds them where no method is as good alone.

    Args:
        methods (`tuple[Index | Exact, ...]`):
            Methods that score all training rows.
        weights (`tuple[float, ...]`):
            A number above 0 for each.

    Raises:
        ValueError: there is not one weight above 0 for each, or a method is another one.
    """

    methods: tuple[Index | Exact, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        all_rows = all(
            isinstance(one, Exact) or (isinstance(one, Index) and one.first_pass_bytes is None) for one in self.methods
        )
        weighed = len(self.weights) == len(self.methods) > 0 and all(0 < one < math.inf for one in self.weights)
        if not all_rows or not weighed:
            raise ValueError(
                f"A combination has the methods {self.methods} and the weights {self.weights}. Expected `Index(...)` "
                "or `Exact(...)`, which score all training rows, and a weight above 0 for each."
            )


MethodName = Literal["auto", "index", "exact", "rerank", "replay"]

AnyMethod = Index | Exact | Rerank | Replay | Combination

Method = MethodName | AnyMethod
"""How scores are computed: a name, or a dataclass with options. `"auto"` is chosen by `TrakConfig.budget`."""

_NAMED: dict[str, AnyMethod] = {
    "auto": Index(),
    "index": Index(),
    "exact": Exact(),
    "rerank": Rerank(),
    "replay": Replay(),
}


def checked_method(method: Method) -> AnyMethod:
    """Return the dataclass of a method.

    Raises:
        ValueError: it is no method.
    """
    if isinstance(method, AnyMethod):
        return method
    if not isinstance(method, str) or method not in _NAMED:
        raise ValueError(
            f"`method` is {method!r}. Expected one of {list(_NAMED)}, or `Index(...)`, `Exact(...)`, `Rerank(...)` "
            "or `Replay(...)` of `hf_trak`."
        )
    return _NAMED[method]


def method_of_all_rows(method: Method) -> Index | Exact | Replay | Combination:
    """Return the dataclass of a method that scores every training row.

    Raises:
        ValueError: it is no method, or scores the best rows alone.
    """
    found = checked_method(method)
    if isinstance(found, Rerank) or (isinstance(found, Index) and found.first_pass_bytes is not None):
        raise ValueError(
            f"`method` is {found}, which scores the best rows of each target alone. Expected one that scores all "
            "training rows. Choose 'index', 'exact' or 'replay'."
        )
    return found


def check_best_rows(method: AnyMethod, top_k: int | None, per: str) -> None:
    """Check that what is asked for are the best rows of each target, if a method finds no others.

    Raises:
        ValueError: other scores are asked for, or more rows than the method looks at.
    """
    if isinstance(method, Index):
        if method.first_pass_bytes is not None and (top_k is None or per != "target"):
            raise ValueError(
                f"`first_pass_bytes` is {method.first_pass_bytes}, with `top_k={top_k}` and `per={per!r}`. A first "
                "pass finds the best rows of each target from stored features. Leave it out for other scores."
            )
    elif isinstance(method, Rerank):
        if top_k is None or per != "target":
            raise ValueError(
                f"`method` is {method}, with `top_k={top_k}` and `per={per!r}`. Reranking finds the best rows of each "
                "target, and scores no others. For scores of all rows, set `method='exact'`."
            )
        if method.rows < top_k:
            raise ValueError(
                f"`rows` of `Rerank` is {method.rows}, less than `top_k`, which is {top_k}. Expected at least as many "
                "rows on the shortlist as are to be returned. Raise `rows`, or lower `top_k`."
            )
