"""Errors that several savers raise."""

from collections.abc import Iterable
from pathlib import Path

from hf_trak.errors import CheckpointMismatchError, IncompleteStoreError


def mismatched_weights(save_dir: Path, model_id: int, saved: str, given: str) -> CheckpointMismatchError:
    """Make the error for a model id that is used with other weights than before."""
    return CheckpointMismatchError(
        f"Model id {model_id} is tied to the weights {saved} in {save_dir}, but was given a checkpoint with the "
        f"weights {given}. Load the checkpoint that belongs to this id, or use another model id."
    )


def unknown_model_id(save_dir: Path, model_id: int, known: Iterable[int]) -> IncompleteStoreError:
    """Make the error for a model id that is not registered."""
    return IncompleteStoreError(
        f"Model id {model_id!r} is not in {save_dir}, which has {sorted(known) or 'none'}. Expected one that has been "
        "featurized. Call `load_checkpoint`, `featurize` and `finalize_features` for it first."
    )


def deleted_grads(save_dir: Path, model_id: int | None) -> IncompleteStoreError:
    """Make the error for a call that needs gradients which were deleted."""
    return IncompleteStoreError(
        f"The train gradients of model id {model_id} in {save_dir} were deleted (`del_grads`), and the features have "
        "to be computed from them anew. Featurize this checkpoint again under another model id."
    )
