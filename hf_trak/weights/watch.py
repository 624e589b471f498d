"""Notice weights that change: a look at version counters first, and a hash of the contents only where those differ."""

import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from hf_trak.errors import CheckpointMismatchError
from hf_trak.weights.checkpoints import fingerprint_state_dict


class LoadedWeights:
    """The weights that a model had when they were loaded under a model id.

    Attributes:
        fingerprint: see [`~hf_trak.weights.checkpoints.fingerprint_state_dict`].
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """
        Args:
            model: the model, with the weights loaded.
        """
        self._model = model
        self.fingerprint = fingerprint_state_dict(model.state_dict())
        self._versions = _Versions(_state_tensors(model))

    def verify(self) -> None:
        """Check that the model still has these weights.

        Raises:
            CheckpointMismatchError: the weights have changed.
        """
        tensors = _state_tensors(self._model)
        if self._versions.match(tensors):
            return
        found = fingerprint_state_dict(self._model.state_dict())
        if found != self.fingerprint:
            raise CheckpointMismatchError(
                f"The model has the weights {found}, but {self.fingerprint} were loaded for this model id: they were "
                "changed since. Expected the weights of the checkpoint. Load each checkpoint with `load_checkpoint` "
                "or `start_scoring_checkpoint`, not into the model directly."
            )
        self._versions = _Versions(tensors)


class WeightsStamp:
    """The content that a list of tensors had at construction, for a task that keeps something computed from them."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """
        Args:
            tensors: parameters and buffers of a model, see [`model_tensors`].
        """
        tensors = list(tensors)
        self._fingerprint = _fingerprint(tensors)
        self._known = [_Versions(tensors)]

    def matches(self, tensors: Iterable[Tensor]) -> bool:
        """Tell whether these tensors have the stamped content. Safe to call under `torch.func` transforms."""
        tensors = list(tensors)
        if any(known.match(tensors) for known in self._known):
            return True
        if _fingerprint(tensors) != self._fingerprint:
            return False
        self._known = [*self._known[-3:], _Versions(tensors)]  # engines may alternate between a model and its copy
        return True


def model_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _state_tensors(model: torch.nn.Module) -> list[Tensor]:
    """Return the tensors of a model's state dict themselves. Without `keep_vars` they would be new objects in each
    call."""
    return [value for value in model.state_dict(keep_vars=True).values() if isinstance(value, Tensor)]


class _Versions:
    """The tensor objects, their places in memory, and how often each has been written to."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._seen = [(weakref.ref(tensor), tensor.data_ptr(), _version(tensor)) for tensor in tensors]

    def match(self, tensors: list[Tensor]) -> bool:
        return len(tensors) == len(self._seen) and all(
            reference() is tensor and place == tensor.data_ptr() and version == _version(tensor)
            for tensor, (reference, place, version) in zip(tensors, self._seen, strict=True)
        )


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # inference tensors count no writes


def _fingerprint(tensors: list[Tensor]) -> str:
    """Hash tensors with their positions for names.

    Contents cannot be read under `torch.func` transforms, but those belong to a thread, and a new one has none.
    """
    named = {f"{position:09d}": tensor for position, tensor in enumerate(tensors)}
    with ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(fingerprint_state_dict, named).result()
