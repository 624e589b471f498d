"""How many samples fit: free memory, and what one sample's forward pass keeps for its backward pass."""

from collections.abc import Callable
from typing import Any

import psutil
import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch import Tensor


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error says that memory ran out, itself or as the cause of an engine's refusal: on CUDA and other
    accelerators, in the CPU's allocator, or as cuDNN puts it (see `accelerate.utils.find_executable_batch_size`).
    """
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        if isinstance(error, Exception) and should_reduce_batch_size(error):
            return True
        error = error.__cause__
    return False


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`, including what torch's allocator holds but does not use."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(psutil.virtual_memory().available)


def saved_activation_bytes(forward: Callable[[], Any]) -> int:
    """Bytes that autograd saves during `forward()`; storages that several operations share count once."""
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
    """The tensors with a storage of their own that a tensor consists of."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)
