"""What a task computes once per checkpoint before its first batch (CLIP: simulated negatives), kept in the store.

`<output_dir>/checkpoint-<model_id>/references.safetensors`. The first process that writes it wins, and every process
of this and later runs reads that one file. So all rows, on however many processes and kinds of devices, are compared
with the same bits, and targets can be attributed where the training rows are not at hand.
"""

from collections.abc import Mapping

from safetensors import safe_open
from torch import Tensor

from hf_trak.store.atomic import create_file
from hf_trak.store.shards import DTYPES, TensorSpec, read_tensors, write_tensors
from hf_trak.store.store import FeatureStore

FILE_NAME = "references.safetensors"


def write_references(store: FeatureStore, model_id: int, tensors: Mapping[str, Tensor]) -> None:
    """Keep the references of a registered checkpoint, unless some are kept already: those stay."""
    path = store.checkpoint_dir(model_id) / FILE_NAME
    identity = _identity(store, model_id)
    create_file(path, lambda temporary: write_tensors(temporary, tensors, identity, store.version))


def read_references(store: FeatureStore, model_id: int) -> dict[str, Tensor] | None:
    """The references of a checkpoint, or `None` if none are kept.

    Raises:
        IncompleteStoreError: the checkpoint is not registered.
        StoreError: the file is damaged, or belongs to other weights or another configuration.
    """
    path = store.checkpoint_dir(model_id) / FILE_NAME
    if not path.exists():
        return None
    identity = _identity(store, model_id)
    read_tensors(path, identity, {}, version=store.version)  # whose file it is, and whether it is whole
    with safe_open(path, framework="pt", device="cpu") as file:
        names = list(file.keys())
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    specs = {name: TensorSpec(shapes[name], tuple(DTYPES.values())) for name in names}
    return read_tensors(path, identity, specs, version=store.version)


def _identity(store: FeatureStore, model_id: int) -> dict[str, str | int]:
    return {**store.identity(model_id), "kind": "references"}
