"""The configuration of an attribution run."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from hf_trak.runtime.checks import checked_int

ProjectionName = Literal["sjlt", "rademacher", "normal", "none"]
EngineName = Literal["auto", "hooked", "functional", "iterative"]
FeatureDtype = Literal["float32", "bfloat16", "float16"]
CurvatureName = Literal["auto", "ekfac", "shampoo", "kfac", "diagonal", "identity", "hybrid"]
CurvatureLabels = Literal["sampled", "empirical"]


@dataclass
class TrakConfig:
    """Arguments of an attribution run, for Python, YAML files and `transformers.HfArgumentParser`.

    Some arguments define the features: the projection, `seed`, `grad_wrt`, `model_dtype`, `feature_dtype` and
    `shard_size`. Running again in the same `output_dir` needs the same values of those.

    Args:
        output_dir (`str`, *optional*, defaults to `"trak"`):
            Directory of the feature store. Running again with the same arguments resumes.
        proj_type (`str`, *optional*, defaults to `"sjlt"`):
            Random projection of the gradients: `"sjlt"` (sparse, the fastest), `"rademacher"` or `"normal"` (dense),
            or `"none"` (whole gradients, for small models).
        proj_dim (`int`, *optional*, defaults to 4096):
            Number of columns of the features, k. Not used with `proj_type="none"`.
        proj_nonzeros (`int`, *optional*, defaults to 1):
            Nonzero entries per gradient coordinate of the `"sjlt"` projection.
        seed (`int`, *optional*, defaults to 0):
            Seed of the projection and of simulated negatives.
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
        hybrid_lambda (`float`, *optional*, defaults to 3.0):
            Ridge of `curvature="hybrid"`, relative to the mean squared norm of whitened gradients.
        exact_memory (`float`, *optional*, defaults to 4.0):
            Memory in GiB for preconditioned targets, P numbers each. More targets are scored in several passes over
            the training rows.
        feature_dtype (`str`, *optional*, defaults to `"float32"`):
            Storage dtype of the features: `"float32"`, `"bfloat16"` or `"float16"`. Sums are computed in float32 or
            better.
        model_dtype (`str`, *optional*):
            Dtype to which the model is cast first. By default it keeps its own.
        per_device_batch_size (`int`, *optional*, defaults to 16):
            Rows per batch and process. Changes features by rounding only.
        auto_find_batch_size (`bool`, *optional*, defaults to `False`):
            Whether to lower the batch size when memory runs out, starting with `per_device_batch_size`. The size that
            fits is saved in `output_dir`, so that a resumed run starts with it.
        shard_size (`int`, *optional*, defaults to 1024):
            Rows per shard of features, which is the most that a killed process loses.
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
        metadata={
            "help": "Random projection of the gradients: `sjlt` (sparse, the fastest), `rademacher` or "
            "`normal` (dense), or `none` (whole gradients, for small models)."
        },
    )
    proj_dim: int = field(
        default=4096, metadata={"help": "Number of columns of the features, k. Not used with `proj_type='none'`."}
    )
    proj_nonzeros: int = field(
        default=1, metadata={"help": "Nonzero entries per gradient coordinate of the `sjlt` projection."}
    )
    seed: int = field(default=0, metadata={"help": "Seed of the projection and of simulated negatives."})
    grad_wrt: list[str] | None = field(
        default=None,
        metadata={"help": "Names of the parameters to attribute. By default all that require gradients."},
    )
    engine: EngineName = field(
        default="auto",
        metadata={
            "help": "Engine that computes per-sample gradients. `auto` picks the fastest that is exact for the model."
        },
    )
    max_block_bytes: int | None = field(
        default=None,
        metadata={
            "help": "Size in bytes of a block of per-sample gradients, at which the `hooked` engine cuts large "
            "parameters into slices; it bounds the memory for gradients. A block holds at least one row of a "
            "parameter for the whole batch. The default is 32 MiB on a CPU and 256 MiB on a GPU. Changes features by "
            "rounding only."
        },
    )
    lambda_reg: float | None = field(
        default=None,
        metadata={
            "help": "Ridge term λ that is added to the diagonal of the Gram matrix. By default it follows from "
            "`lambda_relative`."
        },
    )
    lambda_relative: float = field(
        default=0.3,
        metadata={
            "help": "Ridge term as a multiple of trace(XᵀX) / min(n, k), where X are the features of n training rows. "
            "Used unless `lambda_reg` is given."
        },
    )
    curvature: CurvatureName | None = field(
        default=None,
        metadata={
            "help": "Curvature of exact scores: `ekfac` (the default), `shampoo`, `kfac`, `diagonal`, `identity`, "
            "`hybrid` (EK-FAC with TRAK's Gram matrix over it), or `auto`, which is `hybrid`."
        },
    )
    curvature_rows: int | None = field(
        default=None,
        metadata={"help": "Number of training rows that a curvature is fitted to. By default 4,096 at most."},
    )
    curvature_labels: CurvatureLabels = field(
        default="sampled",
        metadata={"help": "Labels that a curvature is fitted to: `sampled` from the model, or `empirical`."},
    )
    damping: float | None = field(
        default=None,
        metadata={
            "help": "Damping of a curvature, relative to the mean of each block's eigenvalues. By default 0.1, and "
            "10 for the hybrid with one label per row."
        },
    )
    hybrid_lambda: float = field(
        default=3.0,
        metadata={"help": "Ridge of the hybrid, relative to the mean squared norm of whitened gradients."},
    )
    exact_memory: float = field(
        default=4.0, metadata={"help": "Memory in GiB for preconditioned targets, P numbers each."}
    )
    feature_dtype: FeatureDtype = field(
        default="float32", metadata={"help": "Storage dtype of the features. Sums are computed in float32 or better."}
    )
    model_dtype: FeatureDtype | None = field(
        default=None, metadata={"help": "Dtype to which the model is cast first. By default it keeps its own."}
    )
    per_device_batch_size: int = field(
        default=16, metadata={"help": "Rows per batch and process. Changes features by rounding only."}
    )
    auto_find_batch_size: bool = field(
        default=False,
        metadata={
            "help": "Lower the batch size when memory runs out, starting with `per_device_batch_size`. The size that "
            "fits is saved in `output_dir`, so that a resumed run starts with it."
        },
    )
    shard_size: int = field(
        default=1024,
        metadata={"help": "Rows per shard of features, which is the most that a killed process loses."},
    )
    remove_unused_columns: bool = field(
        default=True,
        metadata={"help": "Drop dataset columns that the model's `forward` does not accept, as `Trainer` does."},
    )
    label_names: list[str] | None = field(
        default=None,
        metadata={"help": "Names of the label columns. By default the model class tells, as for `Trainer`."},
    )
    dataloader_num_workers: int = field(default=0, metadata={"help": "Number of processes that load rows."})
    dataloader_pin_memory: bool = field(
        default=True, metadata={"help": "Put batches into pinned memory on accelerators."}
    )
    use_cpu: bool = field(default=False, metadata={"help": "Stay on the CPU even where there is an accelerator."})
    disable_tqdm: bool = field(default=False, metadata={"help": "Hide progress bars."})

    def __post_init__(self) -> None:
        self.output_dir = str(self.output_dir)
        for name, choices in (
            ("proj_type", get_args(ProjectionName)),
            ("engine", get_args(EngineName)),
            ("feature_dtype", get_args(FeatureDtype)),
            ("model_dtype", (None, *get_args(FeatureDtype))),
            ("curvature", (None, *get_args(CurvatureName))),
            ("curvature_labels", get_args(CurvatureLabels)),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"`{name}` is {getattr(self, name)!r}. Expected one of {list(choices)}.")
        for name, least in (
            ("proj_dim", 1),
            ("proj_nonzeros", 1),
            ("max_block_bytes", 1),
            ("curvature_rows", 1),
            ("per_device_batch_size", 1),
            ("shard_size", 1),
            ("seed", 0),
            ("dataloader_num_workers", 0),
        ):
            value = getattr(self, name)
            if value is None and name in ("max_block_bytes", "curvature_rows"):
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
