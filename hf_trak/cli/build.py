"""Build an attributor from arguments, and record the arguments in its directory for later commands."""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset

from hf_trak.attributor import TrakAttributor
from hf_trak.cli.named_models import load_model
from hf_trak.cli.parser import DataArguments, ModelArguments, TargetArguments, option, parse_yaml_and_args
from hf_trak.cli.preparation import Preparation, preparation
from hf_trak.cli.record import RECORD, read_record, remembered_or_made
from hf_trak.cli.stored_rows import load_rows, training_rows
from hf_trak.config import TrakConfig
from hf_trak.data.rows import default_collator
from hf_trak.errors import ConfigMismatchError, IncompleteStoreError
from hf_trak.hub.remote_rows import RemoteRows
from hf_trak.methods import Exact, Index, Method, MethodName, Replay, Rerank
from hf_trak.modelout_functions import get_task, infer_task
from hf_trak.store.atomic import differing
from hf_trak.store.sealed import write_sealed


@dataclass
class MethodArguments:
    """Options of how scores are computed, as `method` of `TrakAttributor.attribute`."""

    method: MethodName = option(
        "Score with the features (`index`), with whole gradients under a curvature (`exact`), with those "
        "of the rows that the features rank first (`rerank`), or with the run (`replay`). `auto` takes the best "
        "that `--budget` allows.",
        "auto",
    )
    rerank_rows: int | None = option("Rows to rerank, for each target and end. By default 2,000.", None)
    first_pass_bytes: int | None = option("Look at so many bytes of every row first (codes only).", None)
    candidates: int | None = option("Rows that are then read whole.", None)
    refine: str | None = option("Refine the targets of exact scores: `cg`, or `cg,steps=5,rows=512`.", None)
    replay: Replay = field(default_factory=Replay)

    def __post_init__(self) -> None:
        if isinstance(self.replay, Mapping):  # as the parser fills it
            self.replay = Replay(**self.replay)
        of_index, of_exact = ("auto", "index", "rerank"), ("exact", "rerank")
        for name, methods in (
            ("rerank_rows", ("rerank",)),
            ("first_pass_bytes", of_index),
            ("candidates", of_index),
            ("refine", of_exact),
            ("replay", ("replay",)),
        ):
            if (value := getattr(self, name)) not in (None, Replay()) and self.method not in methods:
                raise ValueError(
                    f"`{name}` is {value!r}, and `method` is {self.method!r}, which has no such option. Expected the "
                    f"method {' or '.join(methods)}. Set `method`, or leave `{name}` out."
                )
        self.chosen()  # which refuses values

    def chosen(self) -> Method:
        """Return the method with its options; `"auto"` without any, which the budget decides."""
        index = Index(self.first_pass_bytes, self.candidates)
        if self.method == "auto" and index == Index():
            return "auto"
        if self.method == "rerank":
            rows = Rerank.rows if self.rerank_rows is None else self.rerank_rows
            return Rerank(rows, refine=self.refine, index=index)
        if self.method == "replay":
            return self.replay
        return Exact(refine=self.refine) if self.method == "exact" else index


@dataclass
class Built:
    """An attributor, and the preparation of further rows for it."""

    attributor: TrakAttributor
    preparation: Preparation


@dataclass
class Training:
    """A model and its prepared training rows."""

    model: Any
    task: str
    rows: Dataset
    preparation: Preparation


def load_training(model_args: ModelArguments, data: DataArguments) -> Training:
    """Load the model and the training rows.

    Raises:
        ValueError: no model or no training rows are given.
        Exception: any error of loading or preparing them.
    """
    name = model_args.model_name_or_path
    if name is None or data.dataset_name is None:
        missing = [f"--{n}" for n, v in (("model", name), ("train_dataset", data.dataset_name)) if v is None]
        raise ValueError(f"{' and '.join(missing)} missing. Expected the model and the rows it was trained on.")
    if model_args.task is not None:
        get_task(model_args.task)  # which knows its name
    model = load_model(name, model_args.model_revision, model_args.task)
    task = model_args.task or infer_task(model)
    rows = training_rows(data, data.max_train_samples)
    how = preparation(model, task, rows, data, name, model_args.model_revision)
    return Training(model, task, how.prepare(rows), how)


def build(
    model_args: ModelArguments, data: DataArguments, trak: TrakConfig, saved: Mapping[str, Any] | None = None
) -> Built:
    """Build the attributor of a model and its training rows.

    Args:
        model_args, data, trak: the arguments.
        saved: what is recorded in the directory, if anything; it has to agree with the image processor.

    Raises:
        ConfigMismatchError: it does not.
        Exception: as [`load_training`].
    """
    found = load_training(model_args, data)
    attributor = TrakAttributor(
        found.model,
        trak,
        train_dataset=found.rows,
        data_collator=found.preparation.collator,
        processing_class=found.preparation.processing_class,
        task=found.task,
    )
    built = Built(attributor, found.preparation)
    if saved:
        remember(built, model_args, data, write=False)
    return built


def build_from_index(
    index: str,
    model_args: ModelArguments,
    data: DataArguments,
    trak: TrakConfig,
    rows: Dataset | Callable[[TrakAttributor, str], Dataset],
    with_rows: bool = False,
    rerank: bool = False,
    revision: str | None = None,
) -> Built:
    """Load a published index, or a copy of one.

    Args:
        index: dataset repo or directory.
        model_args: the model, if it is another one than the index names.
        data: names of columns.
        trak: settings; the index replaces those that have their default values.
        rows: targets as stored, whose columns determine how they are prepared; or a function that makes them, of the
            attributor and the name of its task.
        with_rows: load the training rows, too, which exact scores need. They then determine how rows are prepared.
        rerank: some training rows will be needed: those of a local dataset, or single rows of a dataset repo.
        revision: branch, tag or commit of the index.

    Raises:
        ValueError: the index names a model repo, and a directory of the same name exists here.
        Exception: any error of loading the model or preparing rows.
    """
    options, defaults = trak.to_dict(), TrakConfig().to_dict()
    for given, usual in ((options["curvature"], defaults["curvature"]), (options, defaults)):
        for name in [name for name, value in usual.items() if given[name] == value]:
            del given[name]
    options |= {"revision": revision, "task": model_args.task, "checkpoints": model_args.checkpoints}
    attributor = TrakAttributor.from_pretrained(index, model_args.model_name_or_path, **options)
    config = getattr(attributor.model, "config", None)
    name = model_args.model_name_or_path or getattr(config, "_name_or_path", None) or ""
    if model_args.model_name_or_path is None and Path(name).is_dir():
        raise ValueError(
            f"The index {index!r} names the model repo {name!r}, and there is a directory of that name here. Expected "
            "a name that stands for one of them, since its tokenizer is loaded. Run the command in another directory, "
            "or choose with `--model`."
        )
    task = model_args.task or infer_task(attributor.model)
    model_revision = getattr(config, "_commit_hash", None) or model_args.model_revision
    whole = with_rows or (rerank and data.dataset_name is not None and Path(data.dataset_name).exists())
    if whole:
        rows = training_rows(data, data.max_train_samples)
    elif callable(rows):
        rows = rows(attributor, task)
    how = preparation(attributor.model, task, rows, data, name, model_revision)
    train: Any = None
    if whole:
        train = how.prepare(rows)
    elif rerank and data.dataset_name is not None:
        split = data.train_split or "train"
        train = RemoteRows(data.dataset_name, data.dataset_config_name, split, prepare=how.prepare)
    elif rerank and (recorded := getattr(attributor.train_dataset, "remote", None)) is not None:
        recorded.prepare = how.prepare
    if train is not None:
        options |= {"data_collator": how.collator, "processing_class": how.processing_class}
        attributor = TrakAttributor.from_pretrained(index, attributor.model, train_dataset=train, **options)
    if not whole:
        attributor.features.processing_class = how.processing_class
        attributor.features.data_collator = how.collator or default_collator(rows, how.processing_class)
    return Built(attributor, how)


def begin(
    kinds: Sequence[type], argv: Sequence[str], prog: str, description: str
) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """Begin a command that uses a run, and let only the first process print.

    Arguments that are not given are those that `hf-trak featurize` has recorded in `output_dir`; of an index that a
    Python program made, those that define its features.

    Args:
        kinds: the dataclasses to fill, [`TrakConfig`] among them.
        argv: the command line.
        prog, description: texts of `--help`.

    Returns:
        What is recorded, and the dataclasses. With `--index` nothing is taken from the record: an index brings its
        settings itself, and the directory may hold another run.

    Raises:
        IncompleteStoreError: `output_dir` is a copy of an index, which `--index` takes.
        Exception: as [`parse_yaml_and_args`].
    """
    parse = partial(parse_yaml_and_args, kinds, argv, prog=prog, description=description)
    first = parse()
    (where,) = (one.output_dir for one in first if isinstance(one, TrakConfig))
    saved = remembered_or_made(where)
    if any(getattr(one, "index", None) is not None for one in first):
        saved = {}
    quiet()
    return saved, parse(defaults=saved)


def target_rows(data: DataArguments, targets: TargetArguments) -> Dataset:
    """Load the targets as they are stored.

    Raises:
        ValueError: no rows are named, or the training rows alone.
        Exception: any error of loading them.
    """
    name = targets.eval_dataset_name or data.dataset_name
    if name is None:
        raise ValueError("--eval_dataset missing. Expected the rows to explain.")
    config_name = targets.eval_dataset_config_name
    if targets.eval_dataset_name is None:
        config_name = config_name or data.dataset_config_name
    own = targets.eval_dataset_name is None
    preferred = ("test", "validation")
    return load_rows(name, config_name, targets.eval_split, preferred, targets.max_eval_samples, held_out=own)


def remember(
    built: Built, model_args: ModelArguments, data: DataArguments, write: bool = True, featurized: bool = False
) -> None:
    """Compare the arguments with those recorded in the directory, and record them once the store accepts them.

    Args:
        built: the attributor.
        model_args, data: the arguments.
        write: whether to record them.
        featurized: whether the checkpoints are featurized now. Until then, recorded ones stay.

    Raises:
        ConfigMismatchError: the directory was made with other settings.
    """
    attributor = built.attributor
    processor = built.preparation.processing_class
    arguments = {
        **dataclasses.asdict(model_args),
        **dataclasses.asdict(data),
        **built.preparation.columns.given(),
    }
    given = {"arguments": arguments, "processing": _settings(processor), "trak": attributor.args.to_dict()}
    path = Path(attributor.args.output_dir) / RECORD
    saved = attributor.features.processes.broadcast_from_main(lambda: read_record(path) if path.is_file() else None)
    if saved is not None:
        before, now = (one["checkpoints"] or [] for one in (saved["arguments"], arguments))
        if not featurized or before[: len(now)] == now:  # which may be the first ones of these
            arguments["checkpoints"] = saved["arguments"]["checkpoints"]
    # Rows and weights have fingerprints of their own; the conversion of images to pixels has none.
    if saved is not None and (changes := differing(saved["processing"], given["processing"] or {})):
        raise ConfigMismatchError(
            f"{path} was saved with another image processor:\n  "
            + "\n  ".join(changes)
            + "\nUse the same processor, or another output directory."
        )
    if not write:
        return
    attributor.features.store  # noqa: B018  # opens it, which compares the configurations
    if attributor.features.processes.is_main_process:
        write_sealed(path, given)
    attributor.features.processes.wait_for_everyone()


def record_names(built: Built, model_args: ModelArguments, data: DataArguments) -> None:
    """Record model and rows of an index that Python made, once a command has used them. All processes call this.

    Args:
        built: the attributor.
        model_args, data: the arguments.
    """
    attributor = built.attributor
    path = Path(attributor.args.output_dir) / RECORD
    if not attributor.features.processes.broadcast_from_main(path.is_file):
        remember(built, dataclasses.replace(model_args, checkpoints=None), data)


def require_run(output_dir: str, model_args: ModelArguments, data: DataArguments) -> None:
    """Refuse a directory without a record, unless the arguments name model and training rows.

    Raises:
        IncompleteStoreError: `hf-trak featurize` has not written this directory, and model or training rows are not
            given.
    """
    given = {"--model": model_args.model_name_or_path, "--train_dataset": data.dataset_name}
    missing = [name for name, value in given.items() if value is None]
    if missing and not (Path(output_dir) / RECORD).is_file():
        raise IncompleteStoreError(
            f"{output_dir!r} holds no run: {RECORD} is missing. Expected the output directory of `hf-trak featurize`, "
            f"or {' and '.join(missing)}, too, for an index that Python made (the rows as the trainer saw them, saved "
            "by `save_to_disk`). Give them, set `--output_dir`, or pass an index as `--index`."
        )


def _settings(processor: Any) -> dict[str, Any] | None:
    """Return the settings of an image processor as JSON, and `None` for tokenizers, whose tokens are compared."""
    if processor is None or not hasattr(processor, "image_mean"):
        return None
    settings = json.loads(json.dumps(processor.to_dict(), default=str))
    return {name: value for name, value in settings.items() if not name.startswith("_") and name != "name_or_path"}


def quiet() -> None:
    """Switch off the progress bars of `datasets` on all processes but the first."""
    if int(os.environ.get("RANK", "0")) != 0:
        from datasets import disable_progress_bars

        disable_progress_bars()
