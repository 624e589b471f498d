"""Does a model still have the weights it had? For tasks that keep something computed from a checkpoint."""

import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
import xxhash
from torch import Tensor


def model_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a model by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


class WeightsStamp:
    """Content of a list of tensors at the time of construction.

    A comparison first looks at the identity and the version counter of each tensor, which costs next to nothing and
    settles the usual case, the same model unchanged; only otherwise are the contents hashed.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        tensors = list(tensors)
        self._digest = _digest(tensors)
        self._known = [_Versions(tensors)]

    def matches(self, tensors: Iterable[Tensor]) -> bool:
        """Whether these tensors have the stamped content. Safe to call under `torch.func` transforms."""
        tensors = list(tensors)
        if any(known.of(tensors) for known in self._known):
            return True
        if _digest(tensors) != self._digest:
            return False
        self._known = [*self._known[-3:], _Versions(tensors)]  # engines may alternate between a model and its copy
        return True


class _Versions:
    """Which tensor objects, with which storage, changed how many times."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._seen = [(weakref.ref(tensor), tensor.data_ptr(), tensor._version) for tensor in tensors]

    def of(self, tensors: list[Tensor]) -> bool:
        return len(tensors) == len(self._seen) and all(
            reference() is tensor and place == tensor.data_ptr() and version == tensor._version
            for tensor, (reference, place, version) in zip(tensors, self._seen, strict=True)
        )


def _digest(tensors: list[Tensor]) -> str:
    # Contents cannot be read under `torch.func` transforms, but those belong to a thread, and a new one has none.
    with ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(_digest_here, tensors).result()


def _digest_here(tensors: list[Tensor]) -> str:
    digest = xxhash.xxh3_128()
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype};".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()
