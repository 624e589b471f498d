"""What the configuration files of somebody's model repo may ask for, and what is refused.

`transformers` and `peft` do what a repo's JSON files say. With `trust_remote_code=False` they run no code that lies in
the repo, but some keys lead to code or files that lie elsewhere:

- `attn_implementation`, `experts_implementation`: the name of a repo, or of an implementation that is downloaded,
  imported and run by the package `kernels`;
- `quantization_config`: several methods do the same;
- `backbone`, `architecture`, `audio_tokenizer`: other models, by repo or path, which are loaded by rules of their own,
  as are those of some kinds of adapters;
- `model_args`, `backbone_kwargs`: arguments of `timm.create_model`, among them paths of checkpoints;
- `transformers_weights`, `configuration_files`: other files than those that everybody looks at.

The functions here look at parsed files; `hf_trak.hub.safe_loading` calls them before anything is built.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import transformers.utils
from huggingface_hub.file_download import REGEX_COMMIT_HASH

from hf_trak.hub.foreign_json import shown

ATTENTION = ("eager", "sdpa", "flex_attention")
"""Attention of PyTorch."""
EXPERTS = ("eager", "batched_mm", "grouped_mm")
"""Mixtures of experts by matrix products of PyTorch."""
QUANTIZATION = (
    "bitsandbytes",
    "bitsandbytes_4bit",
    "bitsandbytes_8bit",
    "compressed-tensors",
    "hqq",
    "quanto",
    "torchao",
)
"""Quantization whose code is an installed package."""
ADAPTERS = (
    "ADALORA", "BOFT", "BONE", "C3A", "DELORA", "FOURIERFT", "GRALORA", "HIRA", "HRA", "IA3", "LN_TUNING", "LOHA",
    "LOKR", "LORA", "MISS", "OFT", "OSF", "RANDLORA", "ROAD", "SHIRA", "TRAINABLE_TOKENS", "VBLORA", "VERA", "WAVEFT",
)  # fmt: skip
"""Adapters of PEFT that are weights of their own file and nothing else."""

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
        ValueError: it does; names the key, its value, and what was expected.
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
                raise ValueError(f"`{path}` has {given}, which lead to other files; expected sizes and flags alone")
        elif key == "transformers_weights":
            _check_plain_name(path, value)
        elif key in _REFUSED and value:
            raise ValueError(f"`{path}` is {shown(value)}, which leads to code or files elsewhere; expected none")


def check_adapter_config(content: Mapping[str, Any]) -> tuple[str, str | None]:
    """Refuse an adapter that needs more than its own weights and its base.

    Args:
        content: a parsed `adapter_config.json`.

    Returns:
        Name and revision of its base model.

    Raises:
        ValueError: it does, or names no base.
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
    """Whether this is the hash of a commit, whose content never changes."""
    return isinstance(revision, str) and REGEX_COMMIT_HASH.fullmatch(revision) is not None


def _items(content: Any, where: str) -> Iterator[tuple[str, str, Any]]:
    """Every key of every object inside, with the path that leads to it."""
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
            isinstance(name, str) and (_plain(name) in known or _has_package(_plain(name)))
        ):
            raise ValueError(
                f"`{path}` is {shown(name)}, which may be downloaded and run; expected null or one of "
                f"{', '.join(known)}"
            )


def _plain(name: str) -> str:
    return name.removeprefix("paged|")


def _has_package(name: str) -> bool:
    """Whether an implementation of FlashAttention is installed: where it is not, one is downloaded in its place."""
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
        return  # bitsandbytes, as it was written before methods had names
    if method not in QUANTIZATION:
        raise ValueError(
            f"`{path}.quant_method` is {shown(method)}, whose kernels may be downloaded and run; expected one of "
            f"{', '.join(QUANTIZATION)}"
        )


def _check_plain_name(path: str, value: Any) -> None:
    if isinstance(value, str) and (any(char in value for char in "/\\:") or value.startswith(".")):
        raise ValueError(f"`{path}` is {shown(value)}, which lies elsewhere; expected a plain name")
