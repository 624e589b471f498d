"""Weights of models that FSDP2, tensor parallelism or ZeRO-3 divides: their plan, their hash, and whole weights put
into them.

All processes call these functions together. One parameter at a time is gathered, never the model.
"""

import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_trak._compat import class_before_fsdp
from hf_trak.runtime.processes import Processes
from hf_trak.runtime.sharding import fsdp_modules, is_sharded, is_sharded_tensor, meshes_of, reshard, slice_ranks
from hf_trak.runtime.zero import attributes_set_aside, gathered, is_partitioned, is_zero, part_of, whole_shape

_REMEDY = "Divide the same model in the same way in every process, over a mesh of all of them."


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor, gathered from all processes if it is divided over them."""
    if is_sharded_tensor(tensor):
        sharded: Any = tensor
        return sharded.detach().full_tensor()
    if is_partitioned(tensor):
        with gathered([tensor]):
            return tensor.detach().clone()
    return tensor


def load_whole(model: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Put whole weights into a sharded model: each process takes its part of them.

    Args:
        model: changed in place.
        state_dict: whole tensors by name, in every process.
    """
    reshard(model)
    if is_zero(model):
        _load_partitioned(model, state_dict)
        return
    from torch.distributed.checkpoint.state_dict import (  # slow to import, and for sharded models alone
        StateDictOptions,
        set_model_state_dict,
    )

    set_model_state_dict(model, dict(state_dict), options=StateDictOptions(full_state_dict=True, strict=False))


def _load_partitioned(model: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    given = {id(value): state_dict[name] for name, value in state_of(model).items() if name in state_dict}
    for value in {id(value): value for value in state_of(model).values()}.values():
        if id(value) in given:
            with gathered([value], change=True), torch.no_grad():
                value.data.copy_(given[id(value)])


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of a model. Of ZeRO-3, it has the parameters themselves, which know their whole shape."""
    return dict(model.state_dict(keep_vars=is_zero(model)))


def shapes_of(state_dict: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the whole shapes of tensors by name."""
    return {name: tuple(whole_shape(value)) for name, value in state_dict.items()}


def check_fit(
    expected: Mapping[str, Any], given: Mapping[str, Any], tied: set[str], what: str = "The checkpoint"
) -> None:
    """Compare the shapes of a checkpoint with those of a model, by name.

    Args:
        expected: those of the model.
        given: those of the checkpoint.
        tied: names that the checkpoint may lack.
        what: names the checkpoint.

    Raises:
        ValueError: names or shapes differ.
    """
    missing = sorted(set(expected) - set(given) - tied)
    unexpected = sorted(set(given) - set(expected))
    shapes = [
        f"{name}: {given[name]} instead of {expected[name]}"
        for name in sorted(set(given) & set(expected))
        if given[name] != expected[name]
    ]
    if missing or unexpected or shapes:
        raise ValueError(
            f"{what} does not fit the model: {len(missing)} names missing (first: {missing[:3]}), "
            f"{len(unexpected)} unexpected (first: {unexpected[:3]}), {len(shapes)} of another shape (first: "
            f"{shapes[:3]}). Expected weights of this architecture. Pass the model that they belong to."
        )


def check_plan(model: nn.Module, processes: Processes) -> None:
    """Compare how processes have divided a model.

    Raises:
        ValueError: in every process, with the first parameter that is divided differently in another process, over a
            part of the processes, or by two units of FSDP2 over different meshes, or that is not there yet; or if
            accelerate does not know all processes.
        PeerProcessError: another process died.
    """
    if is_sharded(model) and dist.is_initialized() and dist.get_world_size() > processes.num_processes:
        raise ValueError(
            f"The model is divided over {dist.get_world_size()} processes, and accelerate knows "
            f"{processes.num_processes}. Expected all of them. On CPUs, set `use_cpu=True` in `TrakConfig`."
        )
    plans = processes.gather(_plan(model))
    for rank, plan in enumerate(plans):
        if sorted(plan) != sorted(plans[0]):
            odd = sorted(set(plan) ^ set(plans[0]))[0]
            raise ValueError(f"The parameter {odd!r} exists in only one of the processes 0 and {rank}. {_REMEDY}")
        for name, how in plan.items():
            if how["meta"]:
                raise ValueError(
                    f"The parameter {name!r} of the sharded model is on the meta device in process {rank}: it was "
                    "never loaded. Expected every parameter on a device. Give the model memory (`model.to_empty`) and "
                    "weights before it is attributed."
                )
            if how["kind"] != plans[0][name]["kind"]:
                raise ValueError(
                    f"The parameter {name!r} is {plans[0][name]['kind']} in process 0 and {how['kind']} in process "
                    f"{rank}. Expected the same plan. {_REMEDY}"
                )
    for rank, plan in enumerate(plans):
        groups = {tuple(how["slices"]): name for name, how in plan.items() if how["slices"]}
        if len(groups) > 1:
            (one, first), (other, second) = list(groups.items())[:2]
            raise ValueError(
                f"In process {rank}, tensor parallelism divides the parameter {first!r} over the processes {list(one)}"
                f" and {second!r} over {list(other)}. Expected one mesh of tensor parallelism. {_REMEDY}"
            )
    sizes = {how["processes"]: name for name, how in plans[0].items() if how["fsdp"]}
    if len(sizes) > 1:
        first, second = list(sizes.values())[:2]
        raise ValueError(
            f"FSDP2 divides the parameters {first!r} and {second!r} over meshes of {sorted(sizes)} processes. "
            f"Expected one mesh for the whole model. {_REMEDY}"
        )


def _plan(model: nn.Module) -> dict[str, Any]:
    """Describe how this process has divided each parameter: plain JSON."""
    meshes, plan = meshes_of(model), {}
    for name, parameter in model.named_parameters():
        mesh = meshes.get(id(parameter)) if is_sharded_tensor(parameter) else None
        plan[name] = {
            "kind": _kind(parameter),
            "meta": parameter.is_meta,
            "fsdp": mesh is not None,
            "processes": 1 if mesh is None else mesh.size(),
            "slices": slice_ranks(parameter, mesh) if is_sharded_tensor(parameter) else [],
        }
    return plan


def _kind(parameter: Any) -> str:
    shape = tuple(whole_shape(parameter))
    if is_partitioned(parameter):
        return f"divided {shape} by ZeRO-3"
    if not is_sharded_tensor(parameter):
        return f"whole {shape}"
    mesh = tuple(parameter.device_mesh.shape)
    return f"divided {shape} by {[str(one) for one in parameter.placements]} over a mesh {mesh}"


@contextmanager
def classes_before_fsdp(model: nn.Module) -> Iterator[None]:
    """Take off what FSDP2, ZeRO-3 and tensor parallelism put on modules, as long as somebody asks what the model is.

    FSDP2 gives its units other classes, and the `tp_plan` of transformers gives layers another `forward`.
    """
    saved = [(module, type(module)) for module in fsdp_modules(model)]
    forwards = [
        (module, vars(module).pop("forward"))
        for module in model.modules()
        if "forward" in vars(module) and any(is_sharded_tensor(p) for p in module.parameters(recurse=False))
    ]
    try:
        for module, _ in saved:
            module.__class__ = class_before_fsdp(module)
        with attributes_set_aside(model):
            yield
    finally:
        for module, cls in saved:
            module.__class__ = cls
        for module, forward in forwards:
            module.forward = forward


def local_copy(tensor: Tensor) -> Tensor:
    """Copy a tensor, or this process' part of it, to the CPU."""
    return (part_of(tensor) if is_partitioned(tensor) else tensor.detach()).to("cpu", copy=True)


def restore_into(tensor: Tensor, before: Tensor) -> None:
    """Write values back into this process' part of a tensor."""
    with torch.no_grad():
        (part_of(tensor) if is_partitioned(tensor) else tensor).copy_(before)


_INNER = "pytorch_model_fsdp_0"

_METADATA = ".metadata"

_CLASSES = {
    "torch": {"Size"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "StorageMeta", "MetadataIndex", "TensorProperties", "ChunkStorageMetadata",
        "TensorStorageMetadata", "BytesStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path"},
    "collections": {"OrderedDict"},
}  # fmt: skip


def dcp_directory(checkpoint: Any) -> Path | None:
    """Find the directory of a distributed checkpoint: the given one, or the one that a training wrote into it.

    Returns:
        `Path` or `None`: `None` if there is none.
    """
    if not isinstance(checkpoint, str | os.PathLike):
        return None
    path = Path(checkpoint)
    return next((one for one in (path, path / _INNER) if (one / _METADATA).is_file()), None)


def read_dcp(directory: Path) -> dict[str, Tensor]:
    """Read the whole tensors of a distributed checkpoint, without a process group.

    Returns:
        Tensors by name, on the CPU.

    Raises:
        ValueError: the checkpoint is damaged, or its metadata holds other objects.
    """
    prefix, entries = _tensors_of(directory)
    whole = {name: torch.empty(tuple(entry.size), dtype=entry.properties.dtype) for name, entry in entries.items()}
    _load(whole, directory)
    return {name.removeprefix(prefix): value for name, value in whole.items()}


def load_dcp(model: nn.Module, directory: Path) -> None:
    """Load a distributed checkpoint into a model: each process reads the parts of its own shards, and no more.

    Args:
        model: changed in place.
        directory: see [`dcp_directory`].

    Raises:
        ValueError: the checkpoint is damaged, or does not fit the model.
    """
    prefix, entries = _tensors_of(directory)
    sizes = {name.removeprefix(prefix): tuple(entry.size) for name, entry in entries.items()}
    expected = dict(model.state_dict())
    shared = {id(value): name for name, value in model.state_dict(keep_vars=True).items() if name in sizes}
    tied = {name for name, value in model.state_dict(keep_vars=True).items() if id(value) in shared}
    check_fit(shapes_of(expected), sizes, tied, f"The checkpoint {str(directory)!r}")
    _load({prefix + name: value for name, value in expected.items() if name in sizes}, directory)


def _tensors_of(directory: Path) -> tuple[str, dict[str, Any]]:
    """Return what is before the names of weights, and their metadata: accelerate saves `{"model": weights}`."""
    metadata = _read_metadata(directory)
    paths = list((metadata.planner_data or {}).values())
    prefix = "model." if paths and all(len(path) > 1 and path[0] == "model" for path in paths) else ""
    return prefix, {name: entry for name, entry in metadata.state_dict_metadata.items() if hasattr(entry, "size")}


def _load(tensors: dict[str, Tensor], directory: Path) -> None:
    from torch.distributed.checkpoint import load  # slow to import, and for these checkpoints alone

    try:
        load(tensors, storage_reader=_reader(directory), no_dist=True)
    except (RuntimeError, EOFError, OSError, KeyError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"The checkpoint {str(directory)!r} is damaged ({error}). Save it anew, or copy all of its files again."
        ) from error


def _reader(directory: Path) -> Any:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata

    class Reader(FileSystemReader):
        """Reads metadata as `_read_metadata` does."""

        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            return _read_metadata(directory)

    return Reader(str(directory))


class _MetadataUnpickler(pickle.Unpickler):
    """Finds no classes but those of metadata."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _read_metadata(directory: Path) -> Any:
    """Read which part of each tensor is where.

    Raises:
        ValueError: it is damaged, names other objects, or files outside of the directory.
    """
    path = directory / _METADATA
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        places = {str(info.relative_path) for info in metadata.storage_data.values()}
    except (pickle.UnpicklingError, EOFError, AttributeError, ValueError, TypeError, ImportError, IndexError) as error:
        raise ValueError(
            f"The metadata {str(path)!r} is damaged or holds other objects ({error}). Expected what "
            "`torch.distributed.checkpoint` writes. Save the checkpoint anew."
        ) from error
    outside = sorted(place for place in places if Path(place).name != place)
    if outside:
        raise ValueError(
            f"The metadata {str(path)!r} names the file {outside[0]!r}. Expected files of its own directory. Save the "
            "checkpoint anew."
        )
    return metadata
