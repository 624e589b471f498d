"""Arguments that several commands have, as dataclasses for the shared parser. Names are those of transformers' example
scripts where those have one."""

from dataclasses import dataclass, field


@dataclass
class OutputArguments:
    """How a command answers."""

    json: bool = field(default=False, metadata={"help": "Print one JSON object for scripts."})


@dataclass
class ModelArguments:
    """Which model, and which of its weights."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Model on the Hub, or its directory.", "aliases": ["--model"]}
    )
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit of a model on the Hub."})
    task: str | None = field(
        default=None, metadata={"help": "Model output function by name. By default it follows from the model."}
    )
    checkpoints: list[str] | None = field(
        default=None,
        metadata={"help": "Directories or files of weights to average over. By default the model's own."},
    )


@dataclass
class ColumnArguments:
    """Which columns are what."""

    text_columns: list[str] | None = field(
        default=None, metadata={"help": "Columns of text, one or two. By default those of text type."}
    )
    image_column: str | None = field(default=None, metadata={"help": "Column of images. By default the one there is."})
    label_column: str | None = field(
        default=None, metadata={"help": "Column of labels. By default `labels` or `label`."}
    )


@dataclass
class DataArguments(ColumnArguments):
    """Which rows the model was trained on."""

    dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "Training rows: a dataset on the Hub, a directory of `save_to_disk`, a data file (.json, .jsonl, "
            ".csv, .parquet, .txt, .arrow), or a directory that `load_dataset` reads.",
            "aliases": ["--train_dataset"],
        },
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of the training dataset."})
    train_split: str | None = field(
        default=None, metadata={"help": "Split of training rows. By default `train`, or the only one."}
    )
    max_train_samples: int | None = field(
        default=None, metadata={"help": "Take this many rows, evenly spaced. `None` takes all."}
    )
    max_length: int | None = field(
        default=None, metadata={"help": "Longest text in tokens. By default the longest that the tokenizer allows."}
    )

    def __post_init__(self) -> None:
        for name in ("max_train_samples", "max_length", "max_eval_samples"):
            value = getattr(self, name, None)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` is {value}. Expected at least 1.")


@dataclass
class TargetArguments:
    """Which rows to explain."""

    eval_dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "Targets, as `dataset_name`. By default another split of it.",
            "aliases": ["--eval_dataset"],
        },
    )
    eval_dataset_config_name: str | None = field(
        default=None, metadata={"help": "Configuration of the target dataset."}
    )
    eval_split: str | None = field(
        default=None, metadata={"help": "Split of targets. By default `test` or `validation`, or the only one."}
    )
    max_eval_samples: int | None = field(
        default=None, metadata={"help": "Take this many targets, evenly spaced. `None` takes all."}
    )
