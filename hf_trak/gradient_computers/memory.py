"""How many samples fit: free memory, and what one sample's forward pass keeps for its backward pass."""

from collections.abc import Callable
from typing import Any

import psutil
import torch
from torch import Tensor


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
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(seen.values())
