"""Free memory of a device, and numbers of bytes in words."""

from typing import Any

import psutil
import torch


def free_bytes(device: torch.device | str) -> int:
    """Return how many bytes can still be allocated on a device.

    Args:
        device (`torch.device` or `str`): the device.

    Returns:
        `int`: for an accelerator, its free memory plus what torch's allocator holds unused; for an Apple GPU, what is
        left of the recommended maximum; for the CPU, the memory that the system can give without swapping.

    Raises:
        ValueError: torch does not tell the free memory of this kind of device.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return int(psutil.virtual_memory().available)
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    backend: Any = getattr(torch, device.type, None)
    if hasattr(backend, "mem_get_info"):
        unused = backend.memory_reserved(device) - backend.memory_allocated(device)
        return backend.mem_get_info(device)[0] + unused
    raise ValueError(
        f"The free memory of {device} is not known. Expected the CPU, an Apple GPU, or an accelerator of which torch "
        "tells it, such as CUDA. Choose the sizes of blocks and chunks yourself."
    )


def byte_size(count: float) -> str:
    """Write a number of bytes for people, for example `1.5 GiB`.

    Args:
        count (`float`): number of bytes.
    """
    units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while count >= 1024 and len(units) > 1:
        count /= 1024
        units.pop(0)
    return f"{count:,.0f} {units[0]}" if units[0] == "B" else f"{count:,.1f} {units[0]}"
