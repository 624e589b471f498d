"""Loading models, tokenizers, processors, adapters and datasets by name, without running code of their publishers.

No other module of the library loads anything by name.

- Code of a repo is neither run nor offered to the user: `trust_remote_code=False`, also where transformers itself
  loads a part of a repo.
- Weights are tensors: safetensors, or pickles of plain tensors (`weights_only=True`).
- Configuration files are parsed within bounds and checked first, see `hf_trak.hub.repo_config`. All files of a repo
  are loaded from the commit that was checked.
"""

import contextlib
import json
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import torch
import transformers
import yaml
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
    dynamic_module_utils,
)
from transformers.utils import cached_file

from hf_trak.hub.foreign_json import read_foreign_object, shown, too_large
from hf_trak.hub.foreign_yaml import MAX_CARD_BYTES, check_card
from hf_trak.hub.repo_config import check_adapter_config, check_repo_config, is_commit

CONFIG_FILE = "config.json"
ADAPTER_FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 8 << 20
"""Maximum size of a configuration file of a model repo. The largest, with many labels and tokens, have 1 to 2 MB."""

_NAME = re.compile(r"[A-Za-z]\w*", re.ASCII)
_PROCESSING_FILES = (CONFIG_FILE, "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
_DAMAGED = (AttributeError, IndexError, KeyError, RecursionError, TypeError)
"""Errors that libraries raise for files with unexpected content."""
_NO_ROWS = (
    StopIteration,
    json.JSONDecodeError,
    UnicodeDecodeError,
    pa.ArrowInvalid,
    yaml.YAMLError,
    datasets.exceptions.DatasetGenerationError,
)
"""Errors that `datasets` raises for files without rows."""


def load_model(name: str, revision: str | None, kind: Any, **options: Any) -> Any:
    """Load a model of `transformers`.

    Args:
        name: a directory that `save_pretrained` wrote, or a model repo.
        revision: branch, tag or commit of a repo.
        kind: class of the model, or an auto class such as `AutoModelForCausalLM`.
        options: options of `from_pretrained`: the source of files (`token`, `local_files_only`) and the dtype.

    Raises:
        OSError: a file does not exist or cannot be downloaded.
        ValueError: the repo asks for code or for files outside of it, is an adapter, or has a damaged file.
    """
    where = {key: options[key] for key in ("token", "local_files_only") if key in options}
    revision = _check_configs(name, revision, (CONFIG_FILE,), required=True, **where)
    if _find_file(name, ADAPTER_FILE, revision, **where) is not None:
        raise refused_model(name, f"it has the file {ADAPTER_FILE}, so it is an adapter; a whole model was expected")
    with _part_errors(name, "model"):
        return kind.from_pretrained(
            name, **_revision_option(revision), trust_remote_code=False, weights_only=True, **options
        )


def model_class(name: Any) -> type[PreTrainedModel] | None:
    """Return the model class of this name in `transformers`, or `None` if there is none."""
    kind = getattr(transformers, name, None) if isinstance(name, str) and _NAME.fullmatch(name) else None
    return kind if isinstance(kind, type) and issubclass(kind, PreTrainedModel) else None


def architectures(name: str, revision: str | None) -> Any:
    """Return the names of classes in the config of a model. Raises as [`load_model`]."""
    revision = _check_configs(name, revision, (CONFIG_FILE,), required=True)
    with _part_errors(name, "configuration"):
        return AutoConfig.from_pretrained(name, **_revision_option(revision), trust_remote_code=False).architectures


def load_adapter(name: str, revision: str | None, load_base: Callable[[str, str | None], torch.nn.Module]) -> Any:
    """Load an adapter of PEFT on its base model, trainable.

    Args:
        name: a directory that `PeftModel.save_pretrained` wrote, or a model repo.
        revision: branch, tag or commit of a repo.
        load_base: loads the base from the name and revision that the adapter records.

    Returns:
        The `PeftModel`, or `None` if the directory or repo holds no adapter.

    Raises:
        OSError: a file does not exist or cannot be downloaded.
        ValueError: the adapter needs more than its own weights and its base, or a file of it is damaged.
    """
    path = _find_file(name, ADAPTER_FILE, revision)
    if path is None:
        return None
    try:
        base, base_revision = check_adapter_config(read_foreign_object(path, MAX_CONFIG_BYTES))
    except ValueError as error:
        raise refused_model(name, f"{ADAPTER_FILE}: {error}") from error
    from peft import PeftModel

    model = load_base(base, base_revision)
    with _part_errors(name, "adapter"):
        options: dict[str, Any] = _revision_option(_commit(path, name) or revision)
        return PeftModel.from_pretrained(model, name, is_trainable=True, **options)


def load_tokenizer(name: str, revision: str | None) -> Any:
    """Load the tokenizer of a model. Raises as [`load_model`]."""
    return _load_processing(AutoTokenizer, "tokenizer", name, revision)


def load_image_processor(name: str, revision: str | None) -> Any:
    """Load the image processor of a model. Raises as [`load_model`]."""
    return _load_processing(AutoImageProcessor, "image processor", name, revision)


def load_processor(name: str, revision: str | None) -> Any:
    """Load the processor of images and texts of a model. Raises as [`load_model`]."""
    return _load_processing(AutoProcessor, "processor", name, revision)


def load_dataset(name: str, config_name: str | None = None, **options: Any) -> Any:
    """Call `datasets.load_dataset`, which runs no code of a repo, with clear errors for damaged files.

    Args:
        name: a dataset repo, a directory of data files, or the name of a builder of `datasets`.
        config_name: configuration of the dataset.
        options: further arguments of `datasets.load_dataset`.

    Raises:
        OSError: a repo or file does not exist or cannot be reached.
        ValueError: there are no rows, or the content of a file does not fit its name.
    """
    where = str(options.get("data_files") or options.get("data_dir") or name)
    with _row_errors(where):
        if Path(name).is_dir():
            _check_readme(Path(name) / "README.md")
        return datasets.load_dataset(name, config_name, **options)


def load_dataset_builder(name: str, config_name: str | None = None, **options: Any) -> Any:
    """Call `datasets.load_dataset_builder`, which finds the files of a dataset without downloading them.

    Args:
        name, config_name, options: as for [`load_dataset`].

    Raises:
        As [`load_dataset`].
    """
    with _row_errors(name):
        return datasets.load_dataset_builder(name, config_name, **options)


def load_saved_dataset(path: str | Path) -> Any:
    """Call `datasets.load_from_disk`, with clear errors for damaged files.

    Raises:
        FileNotFoundError: the directory holds no dataset.
        ValueError: its files are damaged.
    """
    with _row_errors(str(path)):
        return datasets.load_from_disk(str(path))


def refused_model(name: str, reason: str) -> ValueError:
    """Make the error for a model repo that is refused."""
    return ValueError(
        f"The model {name!r} was refused: {reason}. hf_trak runs no code that a repo brings or names. If you trust "
        "it, load it yourself and pass the model to `TrakAttributor`."
    )


def _load_processing(auto: Any, what: str, name: str, revision: str | None) -> Any:
    revision = _check_configs(name, revision, _PROCESSING_FILES)
    with _part_errors(name, what):
        return auto.from_pretrained(name, **_revision_option(revision), trust_remote_code=False)


def _check_configs(
    name: str, revision: str | None, files: tuple[str, ...], required: bool = False, **where: Any
) -> str | None:
    """Check those of the files that exist, and return their commit, from which everything else is to be loaded."""
    for file in files:
        path = _find_file(name, file, revision, required, **where)
        if path is None:
            continue
        try:
            check_repo_config(read_foreign_object(path, MAX_CONFIG_BYTES))
        except ValueError as error:
            raise refused_model(name, f"{file}: {error}") from error
        revision = _commit(path, name) or revision
    return revision


def _find_file(name: str, file: str, revision: str | None, required: bool = False, **where: Any) -> Path | None:
    """Return the local path of a file of a directory or repo, or `None` if there is no such file."""
    if Path(name).is_dir():
        path = Path(name) / file
        return path if path.is_file() else None
    found = cached_file(
        name,
        file,
        revision=revision,
        _raise_exceptions_for_missing_entries=required,
        _raise_exceptions_for_connection_errors=required,
        **where,
    )
    return None if found is None else Path(found)


def _commit(path: Path, name: str) -> str | None:
    """Return the commit of a file in the Hub's cache, and `None` for other files."""
    commit = path.parent.name
    return commit if not Path(name).is_dir() and is_commit(commit) else None


def _revision_option(revision: str | None) -> dict[str, str]:
    return {} if revision is None else {"revision": revision}


def _check_readme(path: Path) -> None:
    """Check the YAML in the card of a directory of data files before `datasets` loads it. Raises `ValueError`."""
    if not path.is_file():
        return
    try:
        if (size := path.stat().st_size) > MAX_CARD_BYTES:
            raise ValueError(too_large(size, MAX_CARD_BYTES))
        check_card(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(
            f"{path} was refused: {' '.join(str(error).split())}. Expected a card that says which files are which "
            "split. Correct it, or name the data files."
        ) from error


@contextlib.contextmanager
def _row_errors(where: str) -> Iterator[None]:
    """Turn errors of `datasets` for files without rows, or with unexpected content, into a clear `ValueError`."""
    try:
        yield
    except (*_DAMAGED, *_NO_ROWS) as error:
        raise _without_rows(where, error.__cause__ or error) from error
    except ValueError as error:
        if "corresponds to no data" in str(error):
            raise _without_rows(where, error) from error
        raise


def _without_rows(where: str, error: BaseException) -> ValueError:
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
    return ValueError(
        f"No rows can be read from {where!r} ({reason[:300]}). Expected at least one row, in files whose content fits "
        "their names. Look at the files, or name others."
    )


@contextlib.contextmanager
def _part_errors(name: str, what: str) -> Iterator[None]:
    """Refuse code of the repo, and turn errors of damaged files into a clear `ValueError`, while a part is loaded."""
    try:
        with _refused_prompts():
            yield
    except ValueError as error:
        if "trust_remote_code" in str(error):
            raise refused_model(name, f"its {what} is made by Python code of the repo") from error
        raise
    except (pickle.UnpicklingError, SafetensorError, EOFError) as error:
        raise ValueError(
            f"The weights of {name!r} are damaged, or hold something else than tensors, which could run code when it "
            "is loaded. Expected nothing but tensors. Save them again with `save_pretrained`, as safetensors."
        ) from error
    except _DAMAGED as error:
        raise ValueError(
            f"The {what} of {name!r} cannot be loaded: one of its files has unexpected content "
            f"({type(error).__name__}: {shown(str(error))}). Save it again, or use another revision."
        ) from error


_lock = threading.Lock()
_loading = 0
_timeout = 0


@contextlib.contextmanager
def _refused_prompts() -> Iterator[None]:
    """Make transformers raise an error instead of asking the user whether to run code of a repo.

    It asks wherever it loads a part of a model without passing on `trust_remote_code`: the tokenizers of a RAG model,
    the decoder of an encoder-decoder model. With a timeout of 0 it raises instead (transformers 5.23).
    """
    global _loading, _timeout
    with _lock:
        if _loading == 0:
            _timeout, dynamic_module_utils.TIME_OUT_REMOTE_CODE = dynamic_module_utils.TIME_OUT_REMOTE_CODE, 0
        _loading += 1
    try:
        yield
    finally:
        with _lock:
            _loading -= 1
            if _loading == 0:
                dynamic_module_utils.TIME_OUT_REMOTE_CODE = _timeout
