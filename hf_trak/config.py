"""The configuration of an attribution run."""

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, cast, get_args

from hf_trak.runtime.arguments import named_arguments
from hf_trak.runtime.checks import checked_int

ProjectionName = Literal["sjlt", "factored", "rademacher", "normal", "none"]
EngineName = Literal["auto", "hooked", "functional", "iterative"]
ModelDtype = Literal["float32", "bfloat16", "float16"]
FeatureDtype = Literal["float32", "bfloat16", "float16", "int8", "int4", "int2", "int1"]
SolverName = Literal["auto", "primal", "dual", "low_rank"]
CurvatureName = Literal["ekfac", "shampoo", "kfac", "diagonal", "identity", "hybrid"]
ExactDtype = Literal["float32", "bfloat16"]
CurvatureLabels = Literal["sampled", "empirical"]
BudgetName = Literal["fast", "balanced", "best"]

BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "int4": 4, "int2": 2, "int1": 1}
"""Bits per number, by `feature_dtype`."""

DEFAULT_WIDTH = 4096
"""Number of columns of projected features, unless it is given."""

ProductForm = Literal["auto", "forward", "twice"]
"""How J v is computed: in forward mode, by differentiating twice, or in forward mode where the model allows it."""

HESSIAN_SHARE = 0.5
"""Part of the rows of a run from which on their Hessian is used on the way back, not the Gauss-Newton matrix."""

DEFAULT_FACTORED_DIM = 128
"""Rows and columns that the `"factored"` projection leaves of a large matrix, unless they are given."""

LEAST_CODED_WIDTH = 2048
"""Number of columns from which on features are kept as codes, unless their storage is given."""

DEFAULT_ROWS = 4096
"""Rows of the sample that a curvature is fitted to, unless they are given."""

DEFAULT_DAMPING = 0.1
"""Damping of a curvature, unless it is given."""

FIRST_BATCH = 16
"""Rows of the first batch of `per_device_batch_size="auto"`."""


@named_arguments
@dataclass
class CurvatureConfig:
    """The curvature of exact scores, and of whitened features.

    Args:
        kind (`str`, *optional*, defaults to `"ekfac"`):
            `"ekfac"` (Kronecker bases, corrected eigenvalues), `"shampoo"` (bases of whole gradients), `"kfac"`,
            `"diagonal"`, `"identity"`, or `"hybrid"`: EK-FAC with TRAK's Gram matrix over it.
        rows (`int`, *optional*):
            Number of training rows, drawn at random, that it is fitted to. By default 4,096, or all if there are
            fewer.
        labels (`str`, *optional*, defaults to `"sampled"`):
            Labels of the gradients that it is fitted to: `"sampled"` from the model's own predictions, which gives
            the Fisher information, or `"empirical"` for the data's.
        damping (`float`, *optional*):
            Damping c, relative to the mean of each block's eigenvalues. By default 0.1, and 10 for exact scores of
            `"hybrid"` with one label per row.
        whitened (`bool`, *optional*, defaults to `False`):
            Whether features are projections of gradients times P^{-1/2}, with the curvature P, which is fitted first.
        hybrid_lambda (`float`, *optional*, defaults to 3.0):
            Ridge of `"hybrid"`, relative to the mean squared norm of whitened gradients.
        memory (`float`, *optional*, defaults to 4.0):
            Memory in GiB for preconditioned targets, P numbers each. More targets are scored in several passes over
            the training rows.
        dtype (`str`, *optional*, defaults to `"float32"`):
            Dtype in which preconditioned targets are kept: `"float32"`, or `"bfloat16"` for half the memory.
        rank (`int`, *optional*):
            Rank of the matrices in which preconditioned targets are kept, for less memory; the error is logged. By
            default they are kept whole.

    Raises:
        ValueError: an argument is out of range, or of the wrong type.
    """

    kind: CurvatureName = "ekfac"
    rows: int | None = None
    labels: CurvatureLabels = "sampled"
    damping: float | None = None
    whitened: bool = False
    hybrid_lambda: float = 3.0
    memory: float = 4.0
    dtype: ExactDtype = "float32"
    rank: int | None = None

    def __post_init__(self) -> None:
        for name, kinds in (("kind", CurvatureName), ("labels", CurvatureLabels), ("dtype", ExactDtype)):
            _check_choice(f"curvature.{name}", getattr(self, name), get_args(kinds))
        for name in ("rows", "rank"):
            if (value := getattr(self, name)) is not None:
                setattr(self, name, checked_int(value, f"curvature.{name}", 1, type_error=ValueError))
        for name in ("hybrid_lambda", "memory"):
            _check_number(f"curvature.{name}", getattr(self, name))
        if self.damping is not None:
            _check_number("curvature.damping", self.damping)
        if not isinstance(self.whitened, bool):
            raise ValueError(f"`curvature.whitened` is {self.whitened!r}. Expected True or False.")

    @property
    def fitted_kind(self) -> CurvatureName:
        """Return the kind of the curvature that is fitted. The hybrid is one over EK-FAC."""
        return "ekfac" if self.kind == "hybrid" else self.kind

    @property
    def whitening_damping(self) -> float:
        """Return the damping c of whitened features."""
        return DEFAULT_DAMPING if self.damping is None else self.damping

    def sample_size(self, train_size: int) -> int:
        """Return the number of rows that a curvature is fitted to, of `train_size`."""
        return min(train_size, DEFAULT_ROWS if self.rows is None else self.rows)


@named_arguments
@dataclass
class TrakConfig:
    """Arguments of an attribution run. Python, YAML files and the command line take them.

    Some arguments define the features: the projection, `seed`, `grad_wrt`, `model_dtype`, `feature_dtype`,
    `shard_size` and whitening. Running again in the same `output_dir` needs the same values of those.

    Args:
        output_dir (`str`, *optional*, defaults to `"trak"`):
            Directory of the feature store. Running again with the same arguments resumes.
        proj_type (`str`, *optional*, defaults to `"sjlt"`):
            Random projection of the gradients: `"sjlt"` (sparse), `"factored"` (two-sided for large matrices, then
            sparse: the fastest for large models), `"rademacher"` or `"normal"` (dense), or `"none"` (whole gradients,
            for small models). `"sjlt-4"` has four nonzero entries per coordinate in place of one, and `"factored-64"`
            leaves 64 rows and columns of a large matrix in place of 128.
        proj_dim (`int` or `str`, *optional*):
            Number of columns of the features, k, by default 4,096; or the bytes of a row's features, such as `"512B"`,
            from which k follows. Not used with `proj_type="none"`.
        feature_dtype (`str`, *optional*):
            Storage of the features: `"float32"`, `"bfloat16"`, `"float16"`, or codes of rotated features with 8, 4, 2
            or 1 bits per number, `"int8"`, `"int4"`, `"int2"` and `"int1"`. Sums are computed in float32 or better.
            By default `"int4"` for projections with at least 2,048 columns, `"int2"` where `proj_dim` is a number of
            bytes, and otherwise `"float32"`.
        seed (`int`, *optional*, defaults to 0):
            Seed of the projection, of random rows and of simulated negatives.
        grad_wrt (`list[str]`, *optional*):
            Names of the parameters to attribute. By default all parameters that require gradients.
        engine (`str`, *optional*, defaults to `"auto"`):
            Engine that computes per-sample gradients: `"hooked"`, `"functional"`, `"iterative"`, or `"auto"` for the
            fastest that is exact for the model.
        lambda_relative (`float`, *optional*, defaults to 0.3):
            Ridge term λ as a multiple of trace(XᵀX) / min(n, k), where X are the features of n training rows.
        solver (`str`, *optional*, defaults to `"auto"`):
            How the ridge regression is solved: `"primal"` (k × k), `"dual"` (n × n), `"low_rank"` (the largest 2,048
            eigenvalues, or as many as `"low_rank-512"` says, and λ for the rest), or `"auto"` for what is exact and
            fits into memory, and otherwise `"low_rank"`.
        curvature (`CurvatureConfig`, `str` or `dict`, *optional*, defaults to `CurvatureConfig()`):
            Curvature of exact scores. A string is its kind, and a mapping has its fields.
        model_dtype (`str`, *optional*):
            Dtype to which the model is cast first. By default it keeps its own.
        per_device_batch_size (`int` or `str`, *optional*, defaults to 16):
            Rows per batch and process; changes features by rounding only. `"auto"` begins with 16 rows, and lowers
            their number when memory runs out. The size that fits is saved in `output_dir`, so that a resumed run
            starts with it.
        shard_size (`int`, *optional*, defaults to 1024):
            Rows per shard of features, which is the most that a killed process loses.
        num_draws (`int`, *optional*, defaults to 1):
            Number of draws of each row that a collator or transform draws at random (masks, crops). Features are means
            over them. Has no influence on other rows.
        label_names (`list[str]`, *optional*):
            Names of the label columns. By default the model class tells, as for `Trainer`.
        remove_unused_columns (`bool`, *optional*, defaults to `True`):
            Whether to drop dataset columns that the model's `forward` does not accept, as `Trainer` does.
        use_cpu (`bool`, *optional*, defaults to `False`):
            Whether to stay on the CPU even if the machine has an accelerator.
        budget (`str`, *optional*, defaults to `"balanced"`):
            What `method="auto"` may take: `"fast"` is the index, `"balanced"` the best method that takes at most a
            minute or as long as featurizing, and `"best"` the best one.

    Raises:
        ValueError: an argument is out of range, or of the wrong type.
    """

    output_dir: str = "trak"
    proj_type: str = "sjlt"
    proj_dim: int | str | None = None
    feature_dtype: FeatureDtype | None = None
    seed: int = 0
    grad_wrt: list[str] | None = None
    engine: EngineName = "auto"
    lambda_relative: float = 0.3
    solver: str = "auto"
    curvature: CurvatureConfig = field(default_factory=CurvatureConfig)
    model_dtype: ModelDtype | None = None
    per_device_batch_size: int | str = 16
    shard_size: int = 1024
    num_draws: int = 1
    label_names: list[str] | None = None
    remove_unused_columns: bool = True
    use_cpu: bool = False
    budget: BudgetName = "balanced"

    def __post_init__(self) -> None:
        if not isinstance(self.output_dir, str | os.PathLike) or not str(self.output_dir):
            raise ValueError(f"`output_dir` is {self.output_dir!r}. Expected the path of a directory. Name one.")
        self.output_dir = str(self.output_dir)
        for name in ("use_cpu", "remove_unused_columns"):
            _check_choice(name, getattr(self, name), (True, False))
        self.curvature = _as_curvature(self.curvature)
        for name, choices in (
            ("engine", get_args(EngineName)),
            ("budget", get_args(BudgetName)),
            ("feature_dtype", (None, *get_args(FeatureDtype))),
            ("model_dtype", (None, *get_args(ModelDtype))),
        ):
            _check_choice(name, getattr(self, name), choices)
        for name, least, most in (("shard_size", 1, None), ("num_draws", 1, None), ("seed", 0, 2**63 - 1)):
            setattr(self, name, checked_int(getattr(self, name), name, least, most, type_error=ValueError))
        self.proj_dim = _number_or_text("proj_dim", self.proj_dim, r"[1-9]\d{0,15}B", "'512B'")
        size = self.per_device_batch_size
        if size is None:
            raise ValueError("`per_device_batch_size` is None. Expected an integer of at least 1, or 'auto'.")
        self.per_device_batch_size = _number_or_text("per_device_batch_size", size, "auto", "'auto'")
        _check_number("lambda_relative", self.lambda_relative)
        for name, what in (("grad_wrt", "parameters"), ("label_names", "columns")):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Iterable | None):
                raise ValueError(f"`{name}` is {value!r}. Expected a list of names of {what}. Pass `[...]`.")
        _split("proj_type", self.proj_type, get_args(ProjectionName), ("sjlt-4", "factored-64"))
        _split("solver", self.solver, get_args(SolverName), ("low_rank-512",))
        if self.projection == "factored" and (self.curvature.whitened or self.curvature.kind == "hybrid"):
            given = "whitened=True" if self.curvature.whitened else "kind='hybrid'"
            raise ValueError(
                f"`proj_type` is {self.proj_type!r}, with a curvature of {given}. Expected another projection, since "
                "whitened gradients are sketched in other bases than the parameters'. Use `proj_type='sjlt'`."
            )
        if self.width < 1:
            raise ValueError(
                f"`proj_dim` is {self.proj_dim!r}, less than one number of {self.storage}. Expected room for at least "
                "one. Raise it."
            )

    @property
    def projection(self) -> ProjectionName:
        """Return the name of the projection, `proj_type` without its number."""
        return cast(ProjectionName, self.proj_type.partition("-")[0])

    @property
    def nonzeros(self) -> int:
        """Return the number of nonzero entries per gradient coordinate of the `"sjlt"` projection."""
        return int(self.proj_type.partition("-")[2] or 1) if self.projection == "sjlt" else 1

    @property
    def factored_dim(self) -> int:
        """Return p, the number of rows and columns that the `"factored"` projection leaves of a large matrix."""
        number = self.proj_type.partition("-")[2] if self.projection == "factored" else ""
        return int(number or DEFAULT_FACTORED_DIM)

    @property
    def solver_kind(self) -> SolverName:
        """Return the name of the solver, `solver` without its number."""
        return cast(SolverName, self.solver.partition("-")[0])

    @property
    def solver_rank(self) -> int | None:
        """Return the number of eigenvalues of the solver `"low_rank"`, if it is given."""
        number = self.solver.partition("-")[2]
        return int(number) if number else None

    @property
    def batch_size(self) -> int:
        """Return the rows per batch and process, or the most of them that are tried."""
        return FIRST_BATCH if isinstance(self.per_device_batch_size, str) else self.per_device_batch_size

    @property
    def width(self) -> int:
        """Return k, the number of columns of projected features. It is `proj_dim`, what its bytes hold, or 4,096."""
        if isinstance(self.proj_dim, str):
            return int(self.proj_dim[:-1]) * 8 // BITS[self.storage]
        return DEFAULT_WIDTH if self.proj_dim is None else self.proj_dim

    @property
    def storage(self) -> FeatureDtype:
        """Return the storage of the features: `feature_dtype`, or the one that the benchmark of quality says.

        `"int2"` is the best on average for a number of bytes. For a number of columns, `"int4"` is as good as
        `"float32"` with an eighth of the bytes, which count from some thousand columns on.
        """
        if self.feature_dtype is not None:
            return self.feature_dtype
        if isinstance(self.proj_dim, str):
            return "int2"
        coded = self.projection != "none" and self.width >= LEAST_CODED_WIDTH
        return "int4" if coded else "float32"

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments as plain JSON values."""
        return asdict(self)

    def to_json_string(self) -> str:
        """Return the arguments as indented JSON."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True)


def _check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise ValueError(f"`{name}` is {value!r}. Expected one of {list(choices)}.")


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"`{name}` is {value!r}. Expected a finite number of at least 0.")


def _split(name: str, value: Any, kinds: tuple[str, ...], numbered: tuple[str, ...]) -> None:
    """Check a name that may have a number after a hyphen, as the examples in `numbered` have."""
    with_number = "|".join(one.partition("-")[0] for one in numbered)
    if not isinstance(value, str) or (
        value not in kinds and not re.fullmatch(rf"({with_number})-[1-9]\d{{0,8}}", value, re.ASCII)
    ):
        examples = " or ".join(map(repr, numbered))
        raise ValueError(f"`{name}` is {value!r}. Expected one of {list(kinds)}, or one with a number: {examples}.")


def _number_or_text(name: str, value: Any, pattern: str, example: str) -> Any:
    """Return an integer of at least 1, or a text of a form; digits, as on the command line, become an integer."""
    if value is None or (isinstance(value, str) and re.fullmatch(pattern, value, re.ASCII)):
        return value
    if isinstance(value, str) and re.fullmatch(r"\d{1,15}", value, re.ASCII):
        value = int(value)
    if isinstance(value, str):
        raise ValueError(f"`{name}` is {value!r}. Expected an integer of at least 1, or a text such as {example}.")
    return checked_int(value, name, 1, type_error=ValueError)


def _as_curvature(value: Any) -> CurvatureConfig:
    """Return a curvature that is given as such, by its kind, or as a mapping of its fields."""
    if isinstance(value, CurvatureConfig):
        return replace(value)  # of its own, also in a copy of the configuration
    if isinstance(value, str):
        return CurvatureConfig(kind=value)  # type: ignore[arg-type]
    names = [one.name for one in fields(CurvatureConfig)]
    if not isinstance(value, Mapping) or set(value) - set(names):
        raise ValueError(
            f"`curvature` is {value!r}. Expected a `CurvatureConfig`, its kind, or a mapping with some of {names}."
        )
    return CurvatureConfig(**value)


def checked_args(args: TrakConfig | None) -> TrakConfig:
    """Return the given configuration, or the defaults for `None`.

    Raises:
        TypeError: `args` is not a `TrakConfig`.
    """
    if args is None:
        return TrakConfig()
    if isinstance(args, TrakConfig):
        return args
    if isinstance(args, Mapping):
        remedy = f"the keys {list(args)}. Expected a `TrakConfig`: pass `TrakConfig(**args)`."
    else:
        remedy = "which configures something else. Expected a `TrakConfig`, such as `TrakConfig(output_dir='trak')`."
    raise TypeError(f"`args` is a {type(args).__name__}, {remedy}")
