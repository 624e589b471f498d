"""Weights that were loaded under a name, and must not be changed behind that name's back."""

import torch
from torch import Tensor

from hf_trak.errors import CheckpointMismatchError
from hf_trak.weights.checkpoints import fingerprint_state_dict


class LoadedWeights:
    """The weights that a model has at construction.

    Attributes:
        fingerprint: see `fingerprint_state_dict`.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """
        Args:
            model: the model, with the weights loaded.
        """
        self._model = model
        self.fingerprint = fingerprint_state_dict(model.state_dict())
        self._versions = _versions(model)

    def verify(self) -> None:
        """Check that the model still has these weights. They are hashed again only if a tensor was written to.

        Raises:
            CheckpointMismatchError: the weights are others.
        """
        versions = _versions(self._model)
        if versions == self._versions:
            return
        found = fingerprint_state_dict(self._model.state_dict())
        if found != self.fingerprint:
            raise CheckpointMismatchError(
                f"The model has the weights {found}, but {self.fingerprint} were loaded for this model id: they were "
                "changed since. Expected the weights of the checkpoint. Load each checkpoint with `load_checkpoint` "
                "or `start_scoring_checkpoint`, not into the model directly."
            )
        self._versions = versions


def _versions(model: torch.nn.Module) -> list[tuple[int, int]]:
    """Where the weights are, and how often each has been written to."""
    tensors = [value for value in model.state_dict().values() if isinstance(value, Tensor)]
    return [(value.data_ptr(), 0 if value.is_inference() else value._version) for value in tensors]
