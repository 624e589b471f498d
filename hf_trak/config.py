"""The configuration of an attribution run."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from hf_trak.runtime.checks import checked_int

ProjectionName = Literal["sjlt", "factored", "rademacher", "normal", "none"]
EngineName = Literal["auto", "hooked", "functional", "iterative"]
ModelDtype = Literal["float32", "bfloat16", "float16"]
FeatureDtype = Literal["float32", "bfloat16", "float16", "int8", "int4", "int2", "int1"]
SolverName = Literal["auto", "primal", "dual", "low_rank"]
CurvatureName = Literal["auto", "ekfac", "shampoo", "kfac", "diagonal", "identity", "hybrid"]
ExactDtype = Literal["float32", "bfloat16"]
CurvatureLabels = Literal["sampled", "empirical"]

BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "int4": 4, "int2": 2, "int1": 1}
"""Bits per number, by `feature_dtype`."""

DEFAULT_WIDTH = 4096
"""Number of columns of projected features, unless it is given."""

LEAST_CODED_WIDTH = 2048
"""Number of columns from which on features are kept as codes, unless their storage is given."""


@dataclass
class TrakConfig:
    """Arguments of an attribution run, for Python, YAML files and `transformers.HfArgumentParser`.

    Some arguments define the features: the projection, `seed`, `grad_wrt`, `model_dtype`, `feature_dtype` and
    `shard_size`. Running again in the same `output_dir` needs the same values of those.

    Args:
        output_dir (`str`, *optional*, defaults to `"trak"`):
            Directory of the feature store. Running again with the same arguments resumes.
        proj_type (`str`, *optional*, defaults to `"sjlt"`):
            Random projection of the gradients: `"sjlt"` (sparse), `"factored"` (two-sided for large matrices, then
            sparse: the fastest for large models), `"rademacher"` or `"normal"` (dense), or `"none"` (whole gradients,
            for small models).
        proj_dim (`int`, *optional*):
            Number of columns of the features, k, by default 4,096, or what `bytes_per_row` leaves room for. Not used
            with `proj_type="none"`.
        proj_nonzeros (`int`, *optional*, defaults to 1):
            Nonzero entries per gradient coordinate of the `"sjlt"` projection.
        factored_dim (`int`, *optional*, defaults to 128):
            Rows and columns p that the `"factored"` projection leaves of a large matrix.
        seed (`int`, *optional*, defaults to 0):
            Seed of the projection, of random rows and of simulated negatives.
        grad_wrt (`list[str]`, *optional*):
            Names of the parameters to attribute. By default all parameters that require gradients.
        engine (`str`, *optional*, defaults to `"auto"`):
            Engine that computes per-sample gradients: `"hooked"`, `"functional"`, `"iterative"`, or `"auto"` for the
            fastest that is exact for the model.
        max_block_bytes (`int`, *optional*):
            Size in bytes of a block of per-sample gradients, at which the `"hooked"` engine cuts large parameters into
            slices; it bounds the memory for gradients. A block holds at least one row of a parameter for the whole
            batch. The default is 32 MiB on a CPU and 256 MiB on a GPU. Changes features by rounding only.
        lambda_reg (`float`, *optional*):
            Ridge term λ that is added to the diagonal of the Gram matrix. By default it follows from
            `lambda_relative`.
        lambda_relative (`float`, *optional*, defaults to 0.3):
            Ridge term as a multiple of trace(XᵀX) / min(n, k), where X are the features of n training rows. Used
            unless `lambda_reg` is given.
        solver (`str`, *optional*, defaults to `"auto"`):
            How the ridge regression is solved: `"primal"` (k × k), `"dual"` (n × n), `"low_rank"` (the largest
            eigenvalues, and λ for the rest), or `"auto"` for what is exact and fits into memory, and otherwise
            `"low_rank"`.
        solver_rank (`int`, *optional*):
            Eigenvalues of `solver="low_rank"`. By default 2,048.
        curvature (`str`, *optional*):
            Curvature of exact scores: `"ekfac"` (Kronecker bases, corrected eigenvalues), `"shampoo"` (bases of whole
            gradients), `"kfac"`, `"diagonal"`, `"identity"`, or `"hybrid"`: EK-FAC with TRAK's Gram matrix over it.
            `"auto"` is the best on the banks of the benchmark of quality: `"hybrid"`. By default `"ekfac"`.
        curvature_rows (`int`, *optional*):
            Number of training rows, drawn at random, that a curvature is fitted to. By default 4,096, or all if there
            are fewer.
        curvature_labels (`str`, *optional*, defaults to `"sampled"`):
            Labels of the gradients that a curvature is fitted to: `"sampled"` from the model's own predictions, which
            gives the Fisher information, or `"empirical"` for the data's.
        damping (`float`, *optional*):
            Damping c of a curvature, relative to the mean of each block's eigenvalues. By default 0.1, and 10 for
            `curvature="hybrid"` with one label per row.
        whitened (`bool`, *optional*, defaults to `False`):
            Whether features are projections of gradients times P^{-1/2}, with the curvature P, which is fitted first.
        hybrid_lambda (`float`, *optional*, defaults to 3.0):
            Ridge of `curvature="hybrid"`, relative to the mean squared norm of whitened gradients.
        exact_memory (`float`, *optional*, defaults to 4.0):
            Memory in GiB for preconditioned targets, P numbers each. More targets are scored in several passes over
            the training rows.
        exact_dtype (`str`, *optional*, defaults to `"float32"`):
            Dtype in which preconditioned targets are kept: `"float32"`, or `"bfloat16"` for half the memory.
        exact_rank (`int`, *optional*):
            Rank of the matrices in which preconditioned targets are kept, for less memory; the error is logged. By
            default they are kept whole.
        feature_dtype (`str`, *optional*):
            Storage of the features: `"float32"`, `"bfloat16"`, `"float16"`, or codes of rotated features with 8, 4, 2
            or 1 bits per number, `"int8"`, `"int4"`, `"int2"` and `"int1"`. Sums are computed in float32 or better.
            By default `"int4"` for projections with at least 2,048 columns, `"int2"` with `bytes_per_row`, otherwise
            `"float32"`, and whatever a store in `output_dir` has.
        bytes_per_row (`int`, *optional*):
            Bytes for the features of a row, from which `proj_dim` and `feature_dtype` follow unless they are given.
        model_dtype (`str`, *optional*):
            Dtype to which the model is cast first. By default it keeps its own.
        per_device_batch_size (`int`, *optional*, defaults to 16):
            Rows per batch and process. Changes features by rounding only.
        auto_find_batch_size (`bool`, *optional*, defaults to `False`):
            Whether to lower the batch size when memory runs out, starting with `per_device_batch_size`. The size that
            fits is saved in `output_dir`, so that a resumed run starts with it.
        shard_size (`int`, *optional*, defaults to 1024):
            Rows per shard of features, which is the most that a killed process loses.
        num_draws (`int`, *optional*, defaults to 1):
            Number of draws of each row that a collator or transform draws at random (masks, crops). Features are means
            over them. Has no influence on other rows.
        remove_unused_columns (`bool`, *optional*, defaults to `True`):
            Whether to drop dataset columns that the model's `forward` does not accept, as `Trainer` does.
        label_names (`list[str]`, *optional*):
            Names of the label columns. By default the model class tells, as for `Trainer`.
        dataloader_num_workers (`int`, *optional*, defaults to 0):
            Number of processes that load rows.
        dataloader_pin_memory (`bool`, *optional*, defaults to `True`):
            Whether to put batches into pinned memory on accelerators.
        use_cpu (`bool`, *optional*, defaults to `False`):
            Whether to stay on the CPU even where there is an accelerator.
        disable_tqdm (`bool`, *optional*, defaults to `False`):
            Whether to hide progress bars.

    Raises:
        ValueError: an argument is out of range, or of the wrong type.
    """

    output_dir: str = field(
        default="trak",
        metadata={"help": "Directory of the feature store. Running again with the same arguments resumes."},
    )
    proj_type: ProjectionName = field(
        default="sjlt",
        metadata={"help": "Random projection, or `none`."},
    )
    proj_dim: int | None = field(
        default=None,
        metadata={"help": "Columns of the features, k: 4,096."},
    )
    proj_nonzeros: int = field(default=1, metadata={"help": "Nonzeros per coordinate of `sjlt`."})
    factored_dim: int = field(default=128, metadata={"help": "Size p of `factored`."})
    seed: int = field(default=0, metadata={"help": "Seed of projection, random rows and simulated negatives."})
    grad_wrt: list[str] | None = field(
        default=None,
        metadata={"help": "Parameters to attribute. By default all that require gradients."},
    )
    engine: EngineName = field(
        default="auto",
        metadata={"help": "Engine of per-sample gradients. `auto` picks the fastest that is exact."},
    )
    max_block_bytes: int | None = field(
        default=None,
        metadata={"help": "Bytes of a block of gradients: 32 MiB on a CPU and 256 MiB on a GPU by default."},
    )
    lambda_reg: float | None = field(
        default=None,
        metadata={"help": "Ridge term λ of the Gram matrix. By default it follows from `lambda_relative`."},
    )
    lambda_relative: float = field(
        default=0.3,
        metadata={"help": "Ridge term as a multiple of trace(XᵀX) / min(n, k), unless `lambda_reg` is given."},
    )
    solver: SolverName = field(
        default="auto",
        metadata={"help": "Solver of the ridge regression; `auto` is exact where that fits into memory."},
    )
    solver_rank: int | None = field(
        default=None,
        metadata={"help": "Eigenvalues of `low_rank` (2,048)."},
    )
    curvature: CurvatureName | None = field(
        default=None,
        metadata={"help": "Curvature of exact scores, `ekfac` by default; `hybrid` puts TRAK's Gram matrix over it."},
    )
    curvature_rows: int | None = field(
        default=None,
        metadata={"help": "Training rows of a curvature: 4,096."},
    )
    curvature_labels: CurvatureLabels = field(
        default="sampled",
        metadata={"help": "Labels of a curvature: `sampled` from the model, or `empirical`."},
    )
    damping: float | None = field(
        default=None,
        metadata={
            "help": "Damping of a curvature, relative to each block's mean eigenvalue: 0.1 or, for `hybrid`, 10."
        },
    )
    whitened: bool = field(default=False, metadata={"help": "Project P^{-1/2} times gradients."})
    hybrid_lambda: float = field(
        default=3.0,
        metadata={"help": "Ridge of the hybrid, relative."},
    )
    exact_memory: float = field(default=4.0, metadata={"help": "GiB for preconditioned targets."})
    exact_dtype: ExactDtype = field(default="float32", metadata={"help": "Dtype of preconditioned targets."})
    exact_rank: int | None = field(default=None, metadata={"help": "Their rank; whole by default."})
    feature_dtype: FeatureDtype | None = field(
        default=None,
        metadata={"help": "Storage of the features: numbers, or codes of 8, 4, 2 or 1 bits."},
    )
    bytes_per_row: int | None = field(
        default=None,
        metadata={"help": "Bytes per row, in place of `proj_dim` and `feature_dtype`."},
    )
    model_dtype: ModelDtype | None = field(default=None, metadata={"help": "Dtype to cast the model to."})
    per_device_batch_size: int = field(
        default=16, metadata={"help": "Rows per batch and process. Changes features by rounding only."}
    )
    auto_find_batch_size: bool = field(
        default=False,
        metadata={"help": "Lower the batch size when memory runs out, and save what fits."},
    )
    shard_size: int = field(
        default=1024,
        metadata={"help": "Rows per shard, the most that a killed process loses."},
    )
    num_draws: int = field(default=1, metadata={"help": "Draws of each random row, averaged."})
    remove_unused_columns: bool = field(
        default=True,
        metadata={"help": "Drop columns that the model's `forward` does not accept."},
    )
    label_names: list[str] | None = field(
        default=None,
        metadata={"help": "Names of the label columns."},
    )
    dataloader_num_workers: int = field(default=0, metadata={"help": "Number of processes that load rows."})
    dataloader_pin_memory: bool = field(
        default=True, metadata={"help": "Put batches into pinned memory on accelerators."}
    )
    use_cpu: bool = field(default=False, metadata={"help": "Stay on the CPU."})
    disable_tqdm: bool = field(default=False, metadata={"help": "Hide progress bars."})

    def __post_init__(self) -> None:
        self.output_dir = str(self.output_dir)
        if self.bytes_per_row is not None:
            self.bytes_per_row = checked_int(self.bytes_per_row, "bytes_per_row", 1, type_error=ValueError)
        for name, choices in (
            ("proj_type", get_args(ProjectionName)),
            ("engine", get_args(EngineName)),
            ("feature_dtype", (None, *get_args(FeatureDtype))),
            ("model_dtype", (None, *get_args(ModelDtype))),
            ("solver", get_args(SolverName)),
            ("curvature", (None, *get_args(CurvatureName))),
            ("curvature_labels", get_args(CurvatureLabels)),
            ("exact_dtype", get_args(ExactDtype)),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"`{name}` is {getattr(self, name)!r}. Expected one of {list(choices)}.")
        for name, least in (
            ("proj_dim", 1),
            ("solver_rank", 1),
            ("exact_rank", 1),
            ("proj_nonzeros", 1),
            ("factored_dim", 1),
            ("max_block_bytes", 1),
            ("curvature_rows", 1),
            ("per_device_batch_size", 1),
            ("shard_size", 1),
            ("num_draws", 1),
            ("seed", 0),
            ("dataloader_num_workers", 0),
        ):
            value = getattr(self, name)
            if value is None and name in (
                "proj_dim",
                "max_block_bytes",
                "curvature_rows",
                "solver_rank",
                "exact_rank",
            ):
                continue
            setattr(self, name, checked_int(value, name, least, type_error=ValueError))
        for name in ("lambda_reg", "lambda_relative", "damping", "hybrid_lambda", "exact_memory"):
            value = getattr(self, name)
            if value is None and name in ("lambda_reg", "damping"):
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise ValueError(f"`{name}` is {value!r}. Expected a finite number of at least 0.")
        if isinstance(self.grad_wrt, str):
            raise ValueError(f"`grad_wrt` is the string {self.grad_wrt!r}. Expected a list of parameter names.")
        if not self.output_dir:
            raise ValueError("`output_dir` is empty. Expected the path of a directory.")
        if self.proj_type == "factored" and (self.whitened or self.curvature in ("auto", "hybrid")):
            given = "`whitened` is True" if self.whitened else f"`curvature` is {self.curvature!r}"
            raise ValueError(
                f"`proj_type` is 'factored' and {given}. Expected another projection, since whitened gradients are "
                "sketched in other bases than the parameters'. Use `proj_type='sjlt'`."
            )
        if self.width < 1:
            raise ValueError(
                f"`bytes_per_row` is {self.bytes_per_row}, less than one number of {self.storage}. Expected room for "
                "at least one. Raise it."
            )

    @property
    def width(self) -> int:
        """Number of columns of projected features, k: `proj_dim`, what `bytes_per_row` holds, or 4,096."""
        if self.proj_dim is not None:
            return self.proj_dim
        return DEFAULT_WIDTH if self.bytes_per_row is None else self.bytes_per_row * 8 // BITS[self.storage]

    @property
    def storage(self) -> FeatureDtype:
        """Storage of the features: `feature_dtype`, or the one that the benchmark of quality says.

        `"int2"` is the best on average for a number of bytes. For a number of columns, `"int4"` is as good as
        `"float32"` with an eighth of the bytes, which count from some thousand columns on.
        """
        if self.feature_dtype is not None:
            return self.feature_dtype
        if self.bytes_per_row is not None:
            return "int2"
        coded = self.proj_type != "none" and (self.proj_dim or DEFAULT_WIDTH) >= LEAST_CODED_WIDTH
        return "int4" if coded else "float32"

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments as plain JSON values."""
        return asdict(self)

    def to_json_string(self) -> str:
        """Return the arguments as indented JSON."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True)


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
