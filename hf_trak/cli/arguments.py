"""Arguments that several commands have, as dataclasses for the shared parser.

Their names are those of the example scripts of transformers, where these have the same argument.
"""

from dataclasses import dataclass, field


@dataclass
class OutputArguments:
    """The form of a command's output."""

    json: bool = field(default=False, metadata={"help": "Print one JSON object, for scripts."})


@dataclass
class ModelArguments:
    """The model and its weights."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Model on the Hub, or its directory.", "aliases": ["--model"]}
    )
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit of a model on the Hub."})
    task: str | None = field(
        default=None, metadata={"help": "Name of the model output function. By default it follows from the model."}
    )
    checkpoints: list[str] | None = field(
        default=None,
        metadata={
            "help": "Directories or files of weights; scores are averaged over them. By default the model's own."
        },
    )


@dataclass
class ColumnArguments:
    """The columns of a dataset."""

    text_columns: list[str] | None = field(
        default=None, metadata={"help": "One or two columns of text. By default those of text type."}
    )
    image_column: str | None = field(default=None, metadata={"help": "Column of images. By default the only one."})
    label_column: str | None = field(
        default=None, metadata={"help": "Column of labels. By default `labels` or `label`."}
    )


@dataclass
class DataArguments(ColumnArguments):
    """The rows that the model was trained on."""

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
        default=None, metadata={"help": "Split of the training rows. By default `train`, or the only one."}
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Number of rows, evenly spaced."})
    max_length: int | None = field(
        default=None,
        metadata={
            "help": "Length in tokens to which texts are truncated. By default the longest that the tokenizer allows."
        },
    )

    def __post_init__(self) -> None:
        for name in ("max_train_samples", "max_length", "max_eval_samples"):
            value = getattr(self, name, None)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` is {value}. Expected at least 1.")


@dataclass
class TargetArguments:
    """The rows to explain."""

    eval_dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "Targets, in the same forms as `dataset_name`. By default another split of that dataset.",
            "aliases": ["--eval_dataset"],
        },
    )
    eval_dataset_config_name: str | None = field(
        default=None, metadata={"help": "Configuration of the target dataset."}
    )
    eval_split: str | None = field(
        default=None, metadata={"help": "Split of the targets. By default `test` or `validation`, or the only one."}
    )
    max_eval_samples: int | None = field(default=None, metadata={"help": "Number of targets, evenly spaced."})
