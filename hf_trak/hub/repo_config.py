"""Checking the configuration files of an untrusted model repo: the keys that lead to code or to other files.

`transformers` and `peft` do what a repo's JSON files say. With `trust_remote_code=False` they run no code that lies in
the repo, but some keys lead to code or files outside of it:

- `attn_implementation`, `experts_implementation`: the name of a repo, or of an implementation that is downloaded,
  imported and run by the package `kernels`;
- `quantization_config`: several methods do the same;
- `backbone`, `architecture`, `audio_tokenizer`: other models, by repo or path, which are loaded under other rules, as
  are the models of some kinds of adapters;
- `model_args`, `backbone_kwargs`: arguments of `timm.create_model`, which include paths of checkpoints;
- `transformers_weights`, `configuration_files`: files in place of `model.safetensors` and `config.json`.

The functions here check parsed files. `hf_trak.hub.safe_loading` calls them before it builds anything.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import transformers.utils
from huggingface_hub.file_download import REGEX_COMMIT_HASH

from hf_trak.hub.foreign_json import shown

ATTENTION = ("eager", "sdpa", "flex_attention")
"""Implementations of attention in PyTorch."""
EXPERTS = ("eager", "batched_mm", "grouped_mm")
"""Implementations of mixtures of experts in PyTorch."""
QUANTIZATION = (
    "bitsandbytes",
    "bitsandbytes_4bit",
    "bitsandbytes_8bit",
    "compressed-tensors",
    "hqq",
    "quanto",
    "torchao",
)
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


def is_commit(revision: Any) -> bool:
    """Test for the hash of a commit, whose content never changes."""
    return isinstance(revision, str) and REGEX_COMMIT_HASH.fullmatch(revision) is not None


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
