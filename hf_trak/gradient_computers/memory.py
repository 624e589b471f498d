"""Memory that a forward pass keeps for its backward pass, and errors that say that memory ran out."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch import Tensor


def is_out_of_memory(error: BaseException | None) -> bool:
    """Tell whether an error, or one of the errors that caused it, says that memory ran out.

    Recognizes the messages of CUDA and other accelerators, of the CPU's allocator and of cuDNN, as
    `accelerate.utils.find_executable_batch_size` does.
    """
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        if isinstance(error, Exception) and should_reduce_batch_size(error):
            return True
        error = error.__cause__
    return False


def saved_activation_bytes(forward: Callable[[], Any]) -> int:
    """Count the bytes that autograd saves during `forward()`. A storage shared by several operations counts once."""
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        for part in _dense_parts(tensor):
            storage = part.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(seen.values())


def _dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that hold the storage of a tensor: itself, or the indices and values of a sparse one."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)
