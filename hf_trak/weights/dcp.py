"""Checkpoints of `torch.distributed.checkpoint`, as sharded trainings write them, without `accelerate merge-weights`.

`Trainer` and accelerate write `checkpoint-N/pytorch_model_fsdp_0/`: files of tensors, and `.metadata`, a pickle that
says which part of which tensor is where. torch reads that with everything that a pickle can do; here it may name
nothing but the classes of such metadata.
"""

import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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
    metadata = _read_metadata(directory)
    prefix = _prefix(metadata)
    whole = {
        name: torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if hasattr(entry, "size")
    }
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
    metadata = _read_metadata(directory)
    prefix = _prefix(metadata)
    sizes = {
        name.removeprefix(prefix): tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if hasattr(entry, "size")
    }
    expected = dict(model.state_dict())
    shared = {id(value): name for name, value in model.state_dict(keep_vars=True).items() if name in sizes}
    tied = {name for name, value in model.state_dict(keep_vars=True).items() if id(value) in shared}
    wrong = sorted((set(expected) - set(sizes) - tied) | (set(sizes) - set(expected)))
    wrong += [name for name in sizes if name in expected and tuple(expected[name].shape) != sizes[name]]
    if wrong:
        raise ValueError(
            f"The checkpoint {str(directory)!r} does not fit the model: {len(wrong)} names are missing, unexpected or "
            f"of another shape (first: {wrong[:3]}). Expected weights of this architecture. Pass the model that they "
            "belong to."
        )
    _load({prefix + name: value for name, value in expected.items() if name in sizes}, directory)


def _prefix(metadata: Any) -> str:
    """Return what is before the names of weights: accelerate saves them as `{"model": weights}`."""
    paths = list((metadata.planner_data or {}).values())
    return "model." if paths and all(len(path) > 1 and path[0] == "model" for path in paths) else ""


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
    """Read which part of which tensor is where.

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
