"""The configuration of an attribution run: what defines the features, and how they are computed."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

ProjectionName = Literal["sjlt", "rademacher", "normal", "none"]
EngineName = Literal["auto", "hooked", "functional", "iterative"]
FeatureDtype = Literal["float32", "bfloat16", "float16"]


@dataclass
class TrakConfig:
    """Arguments of [`TrakAttributor`], for Python, YAML and `transformers.HfArgumentParser` alike."""

    output_dir: str = field(
        default="trak",
        metadata={"help": "Directory of the feature store. Running again with the same arguments resumes."},
    )
    proj_type: ProjectionName = field(
        default="sjlt",
        metadata={
            "help": "Random projection of the gradients: `sjlt` (sparse, fastest), `rademacher` or "
            "`normal` (dense), or `none` (keep whole gradients; for small models)."
        },
    )
    proj_dim: int = field(
        default=4096, metadata={"help": "Features per example (k). Not used with `proj_type='none'`."}
    )
    proj_nonzeros: int = field(
        default=1, metadata={"help": "Nonzeros per gradient coordinate of the `sjlt` projection."}
    )
    seed: int = field(default=0, metadata={"help": "Seed of the projection and of simulated negatives."})
    grad_wrt: list[str] | None = field(
        default=None,
        metadata={"help": "Names of the parameters to attribute. `None` takes all that require gradients."},
    )
    engine: EngineName = field(
        default="auto",
        metadata={"help": "How per-sample gradients are taken. `auto` picks the fastest that is right."},
    )
    max_block_bytes: int | None = field(
        default=None,
        metadata={
            "help": "Bytes of a block of per-sample gradients at which the `hooked` engine cuts large parameters into "
            "slices: the memory that it takes for gradients. At least one row of a parameter for the whole batch is "
            "held. `None` is 32 MiB, and 256 MiB on a GPU. Changes features by rounding only."
        },
    )
    lambda_reg: float | None = field(
        default=None,
        metadata={"help": "Ridge λ added to the Gram matrix, absolute. `None` derives it from `lambda_relative`."},
    )
    lambda_relative: float = field(
        default=0.3,
        metadata={"help": "Ridge λ relative to trace(Gram) / min(n, k), used when `lambda_reg` is `None`."},
    )
    feature_dtype: FeatureDtype = field(
        default="float32", metadata={"help": "Storage dtype of features. Sums are taken in float32 or better."}
    )
    model_dtype: FeatureDtype | None = field(
        default=None, metadata={"help": "Cast the model to this dtype first. `None` keeps the dtype that it has."}
    )
    per_device_batch_size: int = field(
        default=16, metadata={"help": "Examples per batch and process. Changes features by rounding only."}
    )
    auto_find_batch_size: bool = field(
        default=False,
        metadata={
            "help": "Lower the batch size whenever memory runs out, beginning with `per_device_batch_size`. What was "
            "found is kept in `output_dir`, so that a resumed run goes on with it."
        },
    )
    shard_size: int = field(
        default=1024, metadata={"help": "Rows per feature shard: what a killed run loses at most, per process."}
    )
    remove_unused_columns: bool = field(
        default=True,
        metadata={"help": "Drop dataset columns that the model's `forward` does not take, as `Trainer` does."},
    )
    label_names: list[str] | None = field(
        default=None, metadata={"help": "Names of the label columns. `None` asks the model class, as `Trainer` does."}
    )
    dataloader_num_workers: int = field(default=0, metadata={"help": "Processes that load rows."})
    dataloader_pin_memory: bool = field(default=True, metadata={"help": "Pin batches in host memory on accelerators."})
    use_cpu: bool = field(default=False, metadata={"help": "Stay on the CPU even where there is an accelerator."})
    disable_tqdm: bool = field(default=False, metadata={"help": "Show no progress bars."})

    def __post_init__(self) -> None:
        self.output_dir = str(self.output_dir)
        for name, choices in (
            ("proj_type", get_args(ProjectionName)),
            ("engine", get_args(EngineName)),
            ("feature_dtype", get_args(FeatureDtype)),
            ("model_dtype", (None, *get_args(FeatureDtype))),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"`{name}` is {getattr(self, name)!r}. Expected one of {list(choices)}.")
        for name, least in (
            ("proj_dim", 1),
            ("proj_nonzeros", 1),
            ("max_block_bytes", 1),
            ("per_device_batch_size", 1),
            ("shard_size", 1),
            ("seed", 0),
            ("dataloader_num_workers", 0),
        ):
            value = getattr(self, name)
            if value is None and name == "max_block_bytes":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"`{name}` is {value!r}. Expected an integer of at least {least}.")
        for name in ("lambda_reg", "lambda_relative"):
            value = getattr(self, name)
            if value is None and name == "lambda_reg":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise ValueError(f"`{name}` is {value!r}. Expected a finite number of at least 0.")
        if isinstance(self.grad_wrt, str):
            raise ValueError(f"`grad_wrt` is the string {self.grad_wrt!r}. Expected a list of parameter names.")
        if not self.output_dir:
            raise ValueError("`output_dir` is empty. Expected the path of a directory.")

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return asdict(self)

    def to_json_string(self) -> str:
        """The fields as indented JSON."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True)


def checked_args(args: TrakConfig | None) -> TrakConfig:
    """The configuration, or the defaults where none is given.

    Raises:
        TypeError: it is something else.
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
