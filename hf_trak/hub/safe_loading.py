"""Loading models, tokenizers, processors, adapters and datasets by name, without running code of their publishers.

No other module of the library loads anything by name.

- Code of a repo is neither run nor offered to the user: `trust_remote_code=False`, also where transformers itself
  loads a part of a repo.
- Weights are tensors: safetensors, or pickles of plain tensors (`weights_only=True`).
- Configuration files are parsed within bounds and checked first, see `hf_trak.hub.safe_loading`. All files of a repo
  are loaded from the commit that was checked.
"""

import contextlib
import json
import pickle
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import torch
import transformers
import transformers.utils
import yaml
from safetensors import SafetensorError
from transformers import dynamic_module_utils
from transformers.utils import cached_file

from hf_trak.hub.names import MAX_CARD_BYTES, check_card, is_commit, read_foreign_object, shown, too_large
from hf_trak.runtime.progress import no_progress_bars

ATTENTION = ("eager", "sdpa", "flex_attention")

"""Implementations of attention in PyTorch."""

EXPERTS = ("eager", "batched_mm", "grouped_mm")

"""Implementations of mixtures of experts in PyTorch."""

QUANTIZATION = (
    "bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit", "compressed-tensors", "hqq", "quanto", "torchao",
)  # fmt: skip

"""Quantization methods whose code is an installed package."""

ADAPTERS = (
    "ADALORA", "BOFT", "BONE", "C3A", "DELORA", "FOURIERFT", "GRALORA", "HIRA", "HRA", "IA3", "LN_TUNING", "LOHA",
    "LOKR", "LORA", "MISS", "OFT", "OSF", "RANDLORA", "ROAD", "SHIRA", "TRAINABLE_TOKENS", "VBLORA", "VERA", "WAVEFT",
)  # fmt: skip

"""Types of PEFT adapters that consist of the weights in their own file alone."""


_FLASH = re.compile(r"flash_attention_([2-9])")

_IMPLEMENTATIONS = {"attn_implementation": ATTENTION, "experts_implementation": EXPERTS}

_OTHER_MODELS = ("backbone", "architecture")

_MODEL_ARGUMENTS = ("backbone_kwargs", "model_args")

_REFUSED_ARGUMENTS = ("checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")

_REFUSED = ("audio_tokenizer", "configuration_files", "fusion_config", "megatron_config")


def check_repo_config(content: Mapping[str, Any]) -> None:
    """Refuse a configuration that leads to code or to files outside its repo.

    Args:
        content: a parsed `config.json`, or the configuration of a tokenizer or processor.

    Raises:
        ValueError: a key does; the message names the key, its value, and the expected values.
    """
    for path, key, value in _items(content, ""):
        name = key.removeprefix("_").removesuffix("_internal")
        if name in _IMPLEMENTATIONS:
            _check_implementation(path, value, _IMPLEMENTATIONS[name])
        elif key == "quantization_config":
            _check_quantization(path, value)
        elif key in _OTHER_MODELS:
            _check_plain_name(path, value)
        elif key in _MODEL_ARGUMENTS and isinstance(value, dict):
            if given := sorted(set(value) & set(_REFUSED_ARGUMENTS)):
                raise ValueError(f"`{path}` has {given}, which lead to other files; expected sizes and flags")
        elif key == "transformers_weights":
            _check_plain_name(path, value)
        elif key in _REFUSED and value:
            raise ValueError(
                f"`{path}` is {shown(value)}, which leads to code or files outside of the repo; expected none"
            )


def check_adapter_config(content: Mapping[str, Any]) -> tuple[str, str | None]:
    """Refuse an adapter that needs more than its own weights and its base.

    Args:
        content: a parsed `adapter_config.json`.

    Returns:
        Name and revision of its base model.

    Raises:
        ValueError: the type of the adapter needs more, a key leads elsewhere, or the base is not named.
    """
    kind = content.get("peft_type")
    if kind not in ADAPTERS:
        raise ValueError(
            f"`peft_type` is {shown(kind)}; expected one of {', '.join(ADAPTERS)}, whose weights are all in their own "
            "file"
        )
    check_repo_config(content)
    base = content.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ValueError(f"`base_model_name_or_path` is {shown(base)}; expected the name of the base model")
    revision = content.get("revision")
    if revision is not None and not isinstance(revision, str):
        raise ValueError(f"`revision` is {shown(revision)}; expected null or that of the base model")
    return base, revision or None


def _items(content: Any, where: str) -> Iterator[tuple[str, str, Any]]:
    """Yield the path, name and value of every key of every nested object."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            path = f"{where}.{key}" if where else str(key)
            yield path, str(key), value
            yield from _items(value, path)
    elif isinstance(content, list):
        for index, value in enumerate(content):
            if isinstance(value, Mapping | list):
                yield from _items(value, f"{where}[{index}]")


def _check_implementation(path: str, value: Any, known: tuple[str, ...]) -> None:
    for name in value.values() if isinstance(value, Mapping) else [value]:
        if isinstance(name, Mapping):
            _check_implementation(path, name, known)
        elif name is not None and not (
            isinstance(name, str) and (_implementation_name(name) in known or _has_package(_implementation_name(name)))
        ):
            raise ValueError(
                f"`{path}` is {shown(name)}, which may be downloaded and run; expected null or one of "
                f"{', '.join(known)}"
            )


def _implementation_name(name: str) -> str:
    return name.removeprefix("paged|")


def _has_package(name: str) -> bool:
    """Test whether an implementation of FlashAttention is installed. If it is not, transformers downloads another."""
    match = _FLASH.fullmatch(name)
    available = match and getattr(transformers.utils, f"is_flash_attn_{match[1]}_available", None)
    return bool(available and available())


def _check_quantization(path: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise ValueError(f"`{path}` is {shown(value)}, not null or an object")
    method = value.get("quant_method")
    if method is None and (value.get("load_in_4bit") is True or value.get("load_in_8bit") is True):
        return  # bitsandbytes, as older versions of transformers wrote it
    if method not in QUANTIZATION:
        raise ValueError(
            f"`{path}.quant_method` is {shown(method)}, whose kernels may be downloaded and run; expected one of "
            f"{', '.join(QUANTIZATION)}"
        )


def _check_plain_name(path: str, value: Any) -> None:
    if isinstance(value, str) and (any(char in value for char in "/\\:") or value.startswith(".")):
        raise ValueError(f"`{path}` is {shown(value)}, which lies outside of the repo; expected a plain name")


CONFIG_FILE = "config.json"

ADAPTER_FILE = "adapter_config.json"

MAX_CONFIG_BYTES = 8 << 20

"""Maximum size of a configuration file of a model repo. The largest, with many labels and tokens, have 1 to 2 MB."""


_NAME = re.compile(r"[A-Za-z]\w*", re.ASCII)

_PROCESSING_FILES = (CONFIG_FILE, "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")

_DAMAGED = (AttributeError, IndexError, KeyError, RecursionError, TypeError)

"""Errors that libraries raise for files with unexpected content."""

_NO_ROWS = (
    StopIteration, json.JSONDecodeError, UnicodeDecodeError, pa.ArrowInvalid, yaml.YAMLError,
    datasets.exceptions.DatasetGenerationError,
)  # fmt: skip

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


def model_class(name: Any) -> "type[transformers.PreTrainedModel] | None":
    """Return the model class of this name in `transformers`, or `None` if there is none."""
    kind = getattr(transformers, name, None) if isinstance(name, str) and _NAME.fullmatch(name) else None
    return kind if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel) else None


def architectures(name: str, revision: str | None) -> Any:
    """Return the names of classes in the config of a model. Raises as [`load_model`]."""
    revision = _check_configs(name, revision, (CONFIG_FILE,), required=True)
    with _part_errors(name, "configuration"):
        return transformers.AutoConfig.from_pretrained(
            name, **_revision_option(revision), trust_remote_code=False
        ).architectures


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
    return _load_processing(transformers.AutoTokenizer, "tokenizer", name, revision)


def load_image_processor(name: str, revision: str | None) -> Any:
    """Load the image processor of a model. Raises as [`load_model`]."""
    return _load_processing(transformers.AutoImageProcessor, "image processor", name, revision)


def load_processor(name: str, revision: str | None) -> Any:
    """Load the processor of images and texts of a model. Raises as [`load_model`]."""
    return _load_processing(transformers.AutoProcessor, "processor", name, revision)


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
        with no_progress_bars():
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
