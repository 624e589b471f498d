"""Copies of tensors between host and device that overlap with computations.

A copy between pageable memory and a GPU blocks the host and all other work on the GPU. Here tensors go through two
pinned buffers and over a stream of their own: while the device works on one tensor, the next is copied, and the host
reads or writes a third. Results do not depend on it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

BUFFERS = 2


class Copy:
    """A copy that has been started on a stream of a CUDA device."""

    def __init__(self, stream: torch.cuda.Stream, device: torch.device, target: Tensor | None) -> None:
        self.event = stream.record_event()
        self.device = device
        self.target = target

    def wait(self) -> None:
        """Make later operations on the device's current stream wait for the copy."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(self.event)
        if self.target is not None:
            self.target.record_stream(current)

    def synchronize(self) -> None:
        """Make the host wait for the copy."""
        self.event.synchronize()


class CopyEngine:
    """Copies over a stream of its own on a CUDA device, while the device computes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def pinned(self, size: int) -> Tensor:
        """Allocate page-locked host memory of `size` bytes, a uint8 tensor `(size,)`."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def upload(self, source: Tensor) -> tuple[Tensor, Copy]:
        """Start a copy of pinned memory to the device; return the tensor there and the copy that fills it."""
        with torch.cuda.stream(self.stream):
            target = source.to(self.device, non_blocking=True)
        return target, Copy(self.stream, self.device, target)

    def download(self, source: Tensor, target: Tensor) -> Copy:
        """Start a copy of a tensor of the device, once it has been computed, to pinned memory."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        source.record_stream(self.stream)  # its memory is not reused before the copy has finished
        return Copy(self.stream, self.device, None)


def copy_engine(device: torch.device) -> CopyEngine | None:
    """Return the engine of a device, or `None` for a device that copies synchronously, such as the CPU."""
    return CopyEngine(device) if device.type == "cuda" else None


def copied_to_host(source: Tensor) -> Callable[[], Tensor] | None:
    """Start a copy of a tensor to the host, behind what its device has been given to do so far.

    Returns:
        A function that returns the copy as soon as it has arrived, while the device goes on with what it has been
        given since; `None` if the tensor is not on a CUDA device.
    """
    if not source.is_cuda:
        return None
    target = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    target.copy_(source, non_blocking=True)
    event = torch.cuda.current_stream(source.device).record_event()

    def arrived() -> Tensor:
        event.synchronize()
        return target

    return arrived


def sent_to_device(source: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor in host memory to a device; on a CUDA device the copy is only started."""
    if device.type != "cuda":
        return source.to(device)
    return source.pin_memory().to(device, non_blocking=True)


def uploaded(tensors: Iterable[Tensor], device: torch.device, engine: CopyEngine | None = None) -> Iterator[Tensor]:
    """Copy tensors to a device, each while the caller works on the one before it.

    Args:
        tensors: the tensors, read one ahead of the caller. Those on the device already are passed on, and those on
            another device are moved.
        device: the device.
        engine: the engine that copies; by default that of the device.

    Returns:
        An iterator of tensors on the device, in order.
    """
    engine = engine or copy_engine(device)
    if engine is None:
        for tensor in tensors:
            yield tensor.to(device)
        return
    buffers = [_Pinned(engine) for _ in range(BUFFERS)]
    moving: deque[tuple[Tensor, Copy | None]] = deque()
    for index, tensor in enumerate(tensors):
        moving.append(_start_upload(engine, buffers[index % BUFFERS], tensor, device))
        if len(moving) == BUFFERS:
            yield _arrived(*moving.popleft())
    while moving:
        yield _arrived(*moving.popleft())


def download(pairs: Iterable[tuple[Tensor, Tensor]], device: torch.device, engine: CopyEngine | None = None) -> None:
    """Copy each tensor on a device to a tensor of the same shape on the host.

    Args:
        pairs: `(source, target)`; the next pair is taken while earlier copies are in progress.
        device: the device of the sources.
        engine: the engine that copies; by default that of the device.
    """
    engine = engine or copy_engine(device)
    if engine is None:
        for source, target in pairs:
            target.copy_(source)
        return
    buffers = [_Pinned(engine) for _ in range(BUFFERS)]
    moving: deque[Callable[[], object]] = deque()
    for index, (source, target) in enumerate(pairs):
        if len(moving) == BUFFERS:
            moving.popleft()()
        moving.append(_start_download(engine, buffers[index % BUFFERS], source, target))
    while moving:
        moving.popleft()()


class _Pinned:
    """A pinned buffer that grows as needed, and the copy that uses it."""

    def __init__(self, engine: CopyEngine) -> None:
        self.engine = engine
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.copy: Copy | None = None

    def like(self, tensor: Tensor) -> Tensor:
        """Return a part of the buffer with the shape and dtype of a tensor, once the last copy has finished."""
        if self.copy is not None:
            self.copy.synchronize()
            self.copy = None
        size = tensor.numel() * tensor.element_size()
        if self.memory.numel() < size:
            self.memory = self.engine.pinned(size)
        return self.memory[:size].view(tensor.dtype).view(tensor.shape)


def _start_upload(
    engine: CopyEngine, buffer: _Pinned, tensor: Tensor, device: torch.device
) -> tuple[Tensor, Copy | None]:
    if tensor.device.type != "cpu":
        return tensor.to(device), None  # itself, unless it is on another GPU
    target, copy = engine.upload(buffer.like(tensor).copy_(tensor))
    buffer.copy = copy
    return target, copy


def _arrived(tensor: Tensor, copy: Copy | None) -> Tensor:
    if copy is not None:
        copy.wait()
    return tensor


def _start_download(engine: CopyEngine, buffer: _Pinned, source: Tensor, target: Tensor) -> Callable[[], object]:
    staged = buffer.like(source)
    copy = engine.download(source, staged)

    def finish() -> None:
        copy.synchronize()
        target.copy_(staged)

    return finish
