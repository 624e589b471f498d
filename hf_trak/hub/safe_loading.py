"""Loading what other people have published, without running code of theirs: the one place of the library where models,
tokenizers, processors, adapters and datasets are loaded by name.

- No code of a repo is run, and nobody is asked whether to: `trust_remote_code=False`, also where transformers itself
  loads a part of a repo.
- Weights are tensors: safetensors, or pickles of plain tensors (`weights_only=True`).
- Configuration files are parsed within bounds and looked through first, see `hf_trak.hub.repo_config`. All files of a
  repo are of the commit that was looked at.
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
"""Largest configuration file of a model repo; those with the most labels and tokens have one or two MB."""

_NAME = re.compile(r"[A-Za-z]\w*", re.ASCII)
_PROCESSING_FILES = (CONFIG_FILE, "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
_DAMAGED = (AttributeError, IndexError, KeyError, RecursionError, TypeError)
"""What reading a file that holds something else than expected ends in."""
_NO_ROWS = (
    StopIteration,
    json.JSONDecodeError,
    UnicodeDecodeError,
    pa.ArrowInvalid,
    yaml.YAMLError,
    datasets.exceptions.DatasetGenerationError,
)
"""What reading rows of such a file ends in."""


def load_model(name: str, revision: str | None, kind: Any, **options: Any) -> Any:
    """A model of `transformers`.

    Args:
        name: a directory that `save_pretrained` wrote, or a model repo.
        revision: branch, tag or commit of a repo.
        kind: its class, or an auto class such as `AutoModelForCausalLM`.
        options: those of `from_pretrained` that say where files come from and in which dtype weights are wanted.

    Raises:
        OSError: a file is not there, or cannot be had.
        ValueError: the repo asks for code, or for files elsewhere; it is an adapter; or a file of it is damaged.
    """
    where = {key: options[key] for key in ("token", "local_files_only") if key in options}
    revision = _checked(name, revision, (CONFIG_FILE,), required=True, **where)
    if _file(name, ADAPTER_FILE, revision, **where) is not None:
        raise refused(name, f"it has the file {ADAPTER_FILE}, so it is an adapter; a whole model was expected")
    with _no_code(name, "model"):
        return kind.from_pretrained(name, **_at(revision), trust_remote_code=False, weights_only=True, **options)


def model_class(name: Any) -> type[PreTrainedModel] | None:
    """The class of models of this name in `transformers`; `None` if it has none."""
    kind = getattr(transformers, name, None) if isinstance(name, str) and _NAME.fullmatch(name) else None
    return kind if isinstance(kind, type) and issubclass(kind, PreTrainedModel) else None


def architectures(name: str, revision: str | None) -> Any:
    """What the config of a model names as its classes. Raises as [`load_model`]."""
    revision = _checked(name, revision, (CONFIG_FILE,), required=True)
    with _no_code(name, "configuration"):
        return AutoConfig.from_pretrained(name, **_at(revision), trust_remote_code=False).architectures


def load_adapter(name: str, revision: str | None, load_base: Callable[[str, str | None], torch.nn.Module]) -> Any:
    """An adapter of PEFT on its base, trainable; `None` if the name is not that of an adapter.

    Args:
        name: a directory that `PeftModel.save_pretrained` wrote, or a model repo.
        revision: branch, tag or commit of a repo.
        load_base: gives the base by name and revision, which the adapter names.

    Raises:
        OSError: a file is not there, or cannot be had.
        ValueError: the adapter needs more than its own weights and its base, or a file of it is damaged.
    """
    path = _file(name, ADAPTER_FILE, revision)
    if path is None:
        return None
    try:
        base, base_revision = check_adapter_config(read_foreign_object(path, MAX_CONFIG_BYTES))
    except ValueError as error:
        raise refused(name, f"{ADAPTER_FILE}: {error}") from error
    from peft import PeftModel

    model = load_base(base, base_revision)
    with _no_code(name, "adapter"):
        at: dict[str, Any] = _at(_commit(path, name) or revision)
        return PeftModel.from_pretrained(model, name, is_trainable=True, **at)


def load_tokenizer(name: str, revision: str | None) -> Any:
    """The tokenizer of a model. Raises as [`load_model`]."""
    return _load_processing(AutoTokenizer, "tokenizer", name, revision)


def load_image_processor(name: str, revision: str | None) -> Any:
    """The image processor of a model. Raises as [`load_model`]."""
    return _load_processing(AutoImageProcessor, "image processor", name, revision)


def load_processor(name: str, revision: str | None) -> Any:
    """The processor of images and texts of a model. Raises as [`load_model`]."""
    return _load_processing(AutoProcessor, "processor", name, revision)


def load_dataset(name: str, config_name: str | None = None, **options: Any) -> Any:
    """`datasets.load_dataset`, which runs no code of a repo.

    Args:
        name: a dataset repo, a directory of data files, or the name of a builder of `datasets`.
        config_name: configuration of the dataset.
        options: further arguments.

    Raises:
        OSError: a repo or file cannot be had.
        ValueError: there are no rows, or the files are not what their names say.
    """
    where = str(options.get("data_files") or options.get("data_dir") or name)
    with _no_rows(where):
        if Path(name).is_dir():
            _check_readme(Path(name) / "README.md")
        return datasets.load_dataset(name, config_name, **options)


def load_saved_dataset(path: str | Path) -> Any:
    """`datasets.load_from_disk`.

    Raises:
        FileNotFoundError: the directory holds no dataset.
        ValueError: its files are damaged.
    """
    with _no_rows(str(path)):
        return datasets.load_from_disk(str(path))


def refused(name: str, reason: str) -> ValueError:
    """The error for a model repo that is not loaded."""
    return ValueError(
        f"The model {name!r} was refused: {reason}. hf_trak runs no code that a repo brings or names. If you trust "
        "it, load it yourself and pass the model to `TrakAttributor`."
    )


def _load_processing(auto: Any, what: str, name: str, revision: str | None) -> Any:
    revision = _checked(name, revision, _PROCESSING_FILES)
    with _no_code(name, what):
        return auto.from_pretrained(name, **_at(revision), trust_remote_code=False)


def _checked(
    name: str, revision: str | None, files: tuple[str, ...], required: bool = False, **where: Any
) -> str | None:
    """Look through those configuration files that are there; returns the commit that they are of, for all others."""
    for file in files:
        path = _file(name, file, revision, required, **where)
        if path is None:
            continue
        try:
            check_repo_config(read_foreign_object(path, MAX_CONFIG_BYTES))
        except ValueError as error:
            raise refused(name, f"{file}: {error}") from error
        revision = _commit(path, name) or revision
    return revision


def _file(name: str, file: str, revision: str | None, required: bool = False, **where: Any) -> Path | None:
    """A file of a directory or repo on this machine; `None` if it is not there."""
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
    """The commit of a file in the Hub's cache."""
    commit = path.parent.name
    return commit if not Path(name).is_dir() and is_commit(commit) else None


def _at(revision: str | None) -> dict[str, str]:
    return {} if revision is None else {"revision": revision}


def _check_readme(path: Path) -> None:
    """Look through the YAML in which a directory of data files may describe itself, before `datasets` builds it."""
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
def _no_rows(where: str) -> Iterator[None]:
    """Turn what `datasets` says of files without rows, or with something else in them, into words."""
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
        f"No rows can be read from {where!r} ({reason[:300]}). Expected at least one row, in files of the kind that "
        "their names say. Look at the files, or name others."
    )


@contextlib.contextmanager
def _no_code(name: str, what: str) -> Iterator[None]:
    """Load a part of a repo; where that would take its code, or its files are damaged, say so."""
    try:
        with _never_asked():
            yield
    except ValueError as error:
        if "trust_remote_code" in str(error):
            raise refused(name, f"its {what} is made by Python code of the repo") from error
        raise
    except (pickle.UnpicklingError, SafetensorError, EOFError) as error:
        raise ValueError(
            f"The weights of {name!r} are damaged, or hold something else than tensors, which could run code when "
            "loaded and is refused. Expected tensors alone. Save them anew with `save_pretrained`, as safetensors."
        ) from error
    except _DAMAGED as error:
        raise ValueError(
            f"The {what} of {name!r} cannot be loaded: a file of it holds something else than expected "
            f"({type(error).__name__}: {shown(str(error))}). Save it anew, or use another revision."
        ) from error


_lock = threading.Lock()
_loading = 0
_timeout = 0


@contextlib.contextmanager
def _never_asked() -> Iterator[None]:
    """Where transformers would ask whether to run code of a repo, it refuses.

    It asks wherever it loads a part of something and passes on no `trust_remote_code`: the tokenizers of a RAG model,
    the model inside a model. With a timeout of 0 it raises instead.
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
