"""References: tensors that a task computes once per checkpoint, before its first batch (CLIP: simulated negatives).

They are in `<output_dir>/checkpoint-<model_id>/references.safetensors`. The first process that writes the file wins,
and every process of this and later runs reads it. So all rows, on any number of processes and kinds of devices, are
compared with the same bits, and targets can be attributed without the training rows.
"""

from collections.abc import Mapping

from safetensors import safe_open
from torch import Tensor

from hf_trak.store.atomic import create_file
from hf_trak.store.shards import DTYPES, TensorSpec, read_tensors, write_tensors
from hf_trak.store.store import FeatureStore

FILE_NAME = "references.safetensors"


def write_references(store: FeatureStore, model_id: int, tensors: Mapping[str, Tensor]) -> None:
    """Save the references of a registered checkpoint, unless some are saved already: those stay.

    Args:
        store: the store.
        model_id: id of the checkpoint.
        tensors: the references by name.

    Raises:
        IncompleteStoreError: the checkpoint is not registered.
        StoreError: the file cannot be written.
    """
    path = store.checkpoint_dir(model_id) / FILE_NAME
    identity = _identity(store, model_id)
    create_file(path, lambda temporary: write_tensors(temporary, tensors, identity))


def read_references(store: FeatureStore, model_id: int) -> dict[str, Tensor] | None:
    """Read the references of a checkpoint, by name; `None` if none are saved.

    Raises:
        IncompleteStoreError: the checkpoint is not registered.
        StoreError: the file is damaged, or belongs to other weights or another configuration.
    """
    path = store.checkpoint_dir(model_id) / FILE_NAME
    if not path.exists():
        return None
    identity = _identity(store, model_id)
    read_tensors(path, identity, {})  # belongs here, and is intact
    with safe_open(path, framework="pt", device="cpu") as file:
        names = list(file.keys())
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    specs = {name: TensorSpec(shapes[name], tuple(DTYPES.values())) for name in names}
    return read_tensors(path, identity, specs)


def _identity(store: FeatureStore, model_id: int) -> dict[str, str | int]:
    return {**store.identity(model_id), "kind": "references"}
