"""Checkpoints: reading weights, identifying them, and loading them into a model and out again."""

import copy
import json
import logging
import os
import pickle
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hf_trak._compat import class_if_imported
from hf_trak.runtime.sharding import is_sharded, is_sharded_tensor, reshard
from hf_trak.runtime.zero import is_partitioned, is_zero, whole_shape
from hf_trak.weights.adapters import (
    adapter_state_dict,
    adapter_tensors,
    check_adapter_config,
    check_not_quantized,
    is_adapter,
    load_adapter,
)
from hf_trak.weights.sharded import (
    check_fit,
    dcp_directory,
    load_dcp,
    load_whole,
    local_copy,
    read_dcp,
    restore_into,
    shapes_of,
    state_of,
    whole,
)

logger = logging.getLogger(__name__)


WRAPPINGS = ("state_dict", "model_state_dict", "model", "module", "net", "weights")

"""Keys under which training scripts, Lightning, timm and DeepSpeed keep weights beside optimizers and epochs."""

_COMPILED = "_orig_mod."


def unwrapped(content: Mapping[Any, Any], where: str) -> Mapping[Any, Any]:
    """Return the weights of `{"model_state_dict": …, "optimizer": …, "epoch": …}`; anything else as it is.

    Args:
        content: what a file holds.
        where: names the file, for errors.

    Raises:
        ValueError: there are several models in it.
    """
    if any(isinstance(value, Tensor) for value in content.values()):
        return content
    found = [name for name in WRAPPINGS if isinstance(content.get(name), Mapping) and content[name]]
    if len(found) > 1:
        raise ValueError(
            f"{where[0].upper()}{where[1:]} holds weights under {found}. Expected one model. Read the file yourself, "
            "and pass the state dict of the right one."
        )
    return unwrapped(content[found[0]], where) if found else content


def with_names_of(expected: Collection[str], state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename weights to the names in a model, where wrappers have added to them.

    `torch.compile` adds `_orig_mod.`, data parallelism `module.`, and Lightning the name of an attribute, often
    `model.`, beside which it keeps weights of losses and metrics, which are left out.

    Args:
        expected: names in the model.
        state_dict: weights by name.

    Returns:
        The same weights, or those of the model among them. Unchanged where no addition explains the names.

    Raises:
        ValueError: they are there under several prefixes.
    """
    names = set(expected)
    given = dict(state_dict)
    if not any(_COMPILED in name for name in names):
        given = {name.replace(_COMPILED, ""): value for name, value in given.items()}
    if names & set(given):
        return given
    prefixes = {
        ".".join(name.split(".")[:depth]) + "." for name in given for depth in (1, 2) if name.count(".") >= depth
    }
    found = {prefix: own for prefix in sorted(prefixes) if (own := _below(prefix, given)) and set(own) <= names}
    if len(found) > 1:
        raise ValueError(
            f"The checkpoint has weights of the model under the names {sorted(found)}. Expected one model. Pass the "
            "state dict of the right one."
        )
    if not found:
        return dict(state_dict)
    prefix, own = next(iter(found.items()))
    if len(own) < len(given):
        others = sorted(name for name in given if not name.startswith(prefix))
        logger.info("Of a checkpoint, the weights below %r are taken, and not %s.", prefix, others)
    return own


def _below(prefix: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name[len(prefix) :]: value for name, value in weights.items() if name.startswith(prefix)}


Checkpoint = torch.nn.Module | Mapping[str, Tensor] | str | os.PathLike[str]

"""A module, a state dict, a `checkpoint-N` directory (also of sharded training), or a `.safetensors`, `.bin`, `.pt`,
`.pth`, `.tar` or `.ckpt` file, which may keep the weights beside other things."""


WEIGHT_FILES = ("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin", "adapter_model.bin")

INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")

_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")

FILE_SUFFIXES = (".safetensors", *_TORCH_SUFFIXES)


def fingerprint_state_dict(state_dict: Mapping[str, Any]) -> str:
    """Hash the content of weights: xxh3-128 over names, dtypes, shapes and bytes, in the order of names.

    Tensors that are divided over processes are gathered one at a time, and all processes call this together.

    Args:
        state_dict: tensors by name. Entries that are not tensors (the extra state of a module) are left out.

    Returns:
        32 hex digits, the same on every device and for every order of the entries.
    """
    digest = xxhash.xxh3_128()
    for name in sorted(state_dict):
        value = state_dict[name]
        if not isinstance(value, Tensor):
            continue
        digest.update(f"{name}\0{value.dtype}\0{tuple(whole_shape(value))}\0".encode())
        for part in _plain_parts(whole(value).detach()):
            flat = part.to("cpu").contiguous().reshape(-1)
            if flat.numel():
                digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _plain_parts(value: Tensor) -> list[Tensor]:
    """List the tensors that a tensor consists of: several for weights that torchao has quantized."""
    flatten = getattr(value, "__tensor_flatten__", None)
    return (
        [value] if flatten is None else [part for name in flatten()[0] for part in _plain_parts(getattr(value, name))]
    )


def read_state_dict(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Read the weights of a checkpoint. Nothing but plain tensors is ever unpickled (`weights_only=True`).

    Args:
        checkpoint: see [`Checkpoint`]. Directories are searched for the files that `Trainer` and `save_pretrained`
            write, including sharded ones, adapters of PEFT, and those of `torch.distributed.checkpoint`.

    Returns:
        Tensors by name. Tensors of files are on the CPU; those of a module or a state dict are the given ones.

    Raises:
        FileNotFoundError: the path does not exist, or a directory holds no weights.
        ValueError: the file is damaged, has an unknown suffix, or is a pickle of more than tensors.
        TypeError: `checkpoint` is none of the kinds above.
    """
    if isinstance(checkpoint, torch.nn.Module):
        return dict(checkpoint.state_dict())
    if isinstance(checkpoint, Mapping):
        _check_tensors(checkpoint, "the given state dict")
        return dict(checkpoint)
    if not isinstance(checkpoint, str | os.PathLike):
        raise TypeError(
            f"A checkpoint is a {type(checkpoint).__name__}. Expected a module, a state dict, a checkpoint "
            f"directory, or a file whose name ends in {', '.join(FILE_SUFFIXES)}."
        )
    path = Path(checkpoint)
    if path.is_dir():
        return _read_directory(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"The checkpoint {str(path)!r} does not exist. Expected a file or a checkpoint directory. {_beside(path)}"
        )
    return _read_file(path)


def _beside(path: Path) -> str:
    """Say which checkpoints are where one is missing."""
    there = path.parent.iterdir() if path.parent.is_dir() else ()
    found = sorted(one.name for one in there if one.is_dir() or one.suffix in FILE_SUFFIXES)
    nearest = get_close_matches(path.name, found, n=3) or found[:10]
    return f"Beside it are {nearest}." if nearest else f"There is no checkpoint in {str(path.parent)!r} either."


def _read_directory(path: Path) -> dict[str, Tensor]:
    for name in INDEX_FILES:
        if (path / name).is_file():
            parts = (_read_file(path / part) for part in read_weight_index(path / name))
            return {key: value for part in parts for key, value in part.items()}
    for name in WEIGHT_FILES:
        if (path / name).is_file():
            return _read_file(path / name)
    if (distributed := dcp_directory(path)) is not None:
        return read_dcp(distributed)
    own = sorted(
        one.name for one in (*path.glob("global_step*"), *path.glob("zero_pp_rank_*"), *path.glob("bf16_zero_*"))
    )
    if own:
        raise FileNotFoundError(
            f"The checkpoint directory {str(path)!r} holds DeepSpeed's own files alone (first: {own[0]!r}), which are "
            "pickles. Expected weights that all programs read. Run `python zero_to_fp32.py . . --safe_serialization` "
            "in it, or train with `stage3_gather_16bit_weights_on_model_save`."
        )
    if inside := sorted((one.name for one in path.glob("checkpoint-*")), key=lambda name: (len(name), name)):
        raise FileNotFoundError(
            f"The directory {str(path)!r} holds no weights, but {inside}. Expected a directory with weights. Pass one "
            f"of these, such as {str(path / inside[-1])!r}."
        )
    raise FileNotFoundError(
        f"The checkpoint directory {str(path)!r} holds no weights. Expected one of "
        f"{[*WEIGHT_FILES, *INDEX_FILES]}, as written by `Trainer` or `save_pretrained`."
    )


def read_weight_index(path: Path) -> list[str]:
    """List the files that the index of a sharded checkpoint names, each once, sorted.

    Raises:
        ValueError: the index is damaged.
    """
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(
            f"The index of weights {str(path)!r} is not valid JSON ({error}). Expected what `save_pretrained` writes. "
            "Save the checkpoint anew, or copy it again."
        ) from error
    parts = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(parts, dict) or not parts or not all(isinstance(part, str) for part in parts.values()):
        found = f"the keys {list(content)[:5]}" if isinstance(content, dict) else f"a JSON {type(content).__name__}"
        raise ValueError(
            f"The index of weights {str(path)!r} has {found}, and no usable `weight_map`. Expected an object "
            "`weight_map` from the name of each weight to that of its file. Save the checkpoint anew, or copy it "
            "again."
        )
    return sorted(set(parts.values()))


def _read_file(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(
                f"The checkpoint file {str(path)!r} is damaged or not a safetensors file ({error}). Save it anew."
            ) from error
    if path.suffix not in _TORCH_SUFFIXES:
        raise ValueError(
            f"The checkpoint file {str(path)!r} has the suffix {path.suffix!r}. Expected one of {list(FILE_SUFFIXES)}."
        )
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"The checkpoint file {str(path)!r} is damaged, or holds pickled Python objects besides tensors, which "
            "could run code when loaded and are refused. Expected a state dict: save `model.state_dict()` with "
            "`safetensors.torch.save_file` or `torch.save`, and pass that file."
        ) from error
    except (RuntimeError, EOFError) as error:
        raise ValueError(f"The checkpoint file {str(path)!r} is damaged ({error}). Save it anew.") from error
    if not isinstance(content, Mapping):
        raise ValueError(f"The checkpoint file {str(path)!r} holds a {type(content).__name__}. Expected a state dict.")
    where = f"the checkpoint file {str(path)!r}"
    content = unwrapped(content, where)
    _check_tensors(content, where)
    return dict(content)


def _check_tensors(state_dict: Mapping[Any, Any], where: str) -> None:
    for name, value in state_dict.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ValueError(
                f"The entry {name!r} of {where} is a {type(value).__name__}. Expected names (`str`) mapped to tensors."
            )


def load_into(model: torch.nn.Module, checkpoint: Checkpoint) -> None:
    """Load the weights of a checkpoint into a model, all of them or none.

    Tied weights that safetensors files leave out are set through the weights that they are tied to. Adapter files of
    PEFT go into the active adapter of a `PeftModel` and leave its base model as it is. Files of transformers have the
    names of older versions for some architectures (ViT among them) and are converted as `from_pretrained` does. Names
    that `torch.compile`, data parallelism or Lightning have added to are brought back.

    Args:
        model: the model, changed in place.
        checkpoint: see [`Checkpoint`].

    Raises:
        ValueError: names or shapes do not fit the model, or its adapter computes something else; also the errors of
            [`read_state_dict`].
    """
    _load(model, read_state_dict(checkpoint), checkpoint)


def _load(model: torch.nn.Module, state_dict: dict[str, Tensor], checkpoint: Any) -> None:
    """Load weights that were read from a checkpoint."""
    if is_adapter(model, state_dict):
        check_fit(shapes_of(adapter_state_dict(model)), shapes_of(state_dict), tied=set())
        check_adapter_config(model, checkpoint)
        load_adapter(model, state_dict)
        return
    remedy = "Give the adapters as checkpoints (`save_pretrained` of the `PeftModel`), or load the model unquantized."
    check_not_quantized(model, "The checkpoint holds weights of the whole model", remedy)
    expected = state_of(model)
    state_dict = with_names_of(expected, state_dict)
    kind = class_if_imported("transformers.modeling_utils", "PreTrainedModel")
    if kind is not None and isinstance(model, kind) and not set(state_dict) <= set(expected):
        state_dict = _converted(model, state_dict)
    check_fit(shapes_of(expected), shapes_of(state_dict), tied=_tied_names(expected, set(state_dict)))
    check_adapter_config(model, checkpoint)
    if is_sharded(model):
        load_whole(model, state_dict)
    else:
        model.load_state_dict(state_dict, strict=False)


def _converted(model: Any, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert weights to the names and shapes of the modules of transformers; unchanged if they still do not fit."""
    result: Any = type(model).from_pretrained(
        None,
        config=copy.deepcopy(model.config),
        state_dict=dict(state_dict),
        dtype=model.dtype,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    renamed, report = result
    return state_dict if any(report.values()) else renamed.state_dict()


def _tied_names(expected: Mapping[str, Tensor], given: set[str]) -> set[str]:
    """List the names that a checkpoint lacks and whose tensors share memory with one that it has."""
    present = {_memory(expected[name]) for name in given & set(expected)}
    return {name for name, value in expected.items() if _memory(value) in present} - given


def _memory(tensor: Any) -> tuple[int, torch.Size]:
    """Tell tensors apart by their place in memory, or that of this process' part of them."""
    if is_partitioned(tensor):
        return tensor.ds_id, whole_shape(tensor)
    local = tensor.to_local() if is_sharded_tensor(tensor) else tensor
    return local.data_ptr(), tensor.shape


@contextmanager
def loaded(model: torch.nn.Module, checkpoint: Checkpoint | None, dtype: torch.dtype | None = None) -> Iterator[str]:
    """Put a model into eval mode with the weights of a checkpoint, and restore it when the block ends.

    It is restored even if the block raises.

    Args:
        model: changed in place. Weights, buffers, dtypes and the mode of every module are restored on exit.
        checkpoint: see [`Checkpoint`]. `None` or the model itself keeps the current weights.
        dtype: dtype to which floating-point weights and buffers are cast. By default they keep theirs.

    Yields:
        The fingerprint of the weights in the model's own dtype, before the cast.

    Raises:
        ValueError: see [`load_into`], or a quantized model would be cast.
    """
    reshard(model)
    modes = {name: module.training for name, module in model.named_modules()}
    # a sharded model takes its shards straight from a checkpoint of sharded training
    straight = dcp_directory(checkpoint) if is_sharded(model) and not is_zero(model) else None
    current = checkpoint is None or checkpoint is model or straight is not None
    foreign = None if current else read_state_dict(checkpoint)  # type: ignore[arg-type]
    if dtype is not None:
        name = str(dtype).removeprefix("torch.")
        if is_sharded(model):
            raise ValueError(
                f"`model_dtype` is {name!r}, for a model that is divided over processes. Expected it in the dtype "
                "that it is to be computed in. Load it so, or give `fully_shard` a `MixedPrecisionPolicy`."
            )
        check_not_quantized(model, f"`model_dtype` is {name!r}", "Leave `model_dtype` out.")
    tensors = [*model.parameters(), *model.buffers()]
    if dtype is None and straight is None:
        if foreign is None:
            tensors = []
        elif is_adapter(model, foreign):
            tensors = [value for _, value in adapter_tensors(model)]
    saved = [local_copy(value) for value in tensors]
    try:
        if straight is not None:
            load_dcp(model, straight)
        if foreign is not None:
            _load(model, foreign, checkpoint)
        fingerprint = fingerprint_state_dict(state_of(model))
        if dtype is not None:
            for value in tensors:
                if value.is_floating_point():
                    value.data = value.data.to(dtype)
        model.eval()
        torch.clear_autocast_cache()  # which holds the weights from before, where an autocast region is open
        yield fingerprint
    finally:
        torch.clear_autocast_cache()
        reshard(model)
        for value, before in zip(tensors, saved, strict=True):
            if is_sharded_tensor(value) or is_partitioned(value):
                restore_into(value, before)
                continue
            value.data = value.data.to(before.dtype)
            value.data.copy_(before)
        for name, module in model.named_modules():
            module.training = modes[name]


def describe(checkpoint: Checkpoint | None, model: torch.nn.Module) -> str:
    """Say in one line where weights come from, for logs and for the store. Paths are made absolute."""
    if checkpoint is None or checkpoint is model:
        return "the model's current weights"
    if isinstance(checkpoint, torch.nn.Module):
        return f"a {type(checkpoint).__name__}"
    if isinstance(checkpoint, Mapping):
        return "a state dict"
    return str(Path(checkpoint).resolve())
