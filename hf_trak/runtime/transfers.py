"""Tensors on their way between host and device, while the device computes.

A copy between pageable memory and a GPU keeps the host waiting and everything else on the GPU with it. Here tensors go
through two pinned buffers and over a stream of their own: while the device works on one, the next is copied, and the
host reads or writes a third. What is computed does not depend on it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor

BUFFERS = 2


class Copy(Protocol):
    """A copy that has been started."""

    def wait(self) -> None:
        """Have what the device is told from now on come after the copy."""

    def synchronize(self) -> None:
        """Have the host wait for the copy."""


class CopyEngine(Protocol):
    """What carries out copies beside the computations of a device."""

    def pinned(self, size: int) -> Tensor:
        """Host memory of so many bytes that the device reads and writes by itself, `(size,)`, uint8."""

    def upload(self, source: Tensor) -> tuple[Tensor, Copy]:
        """A tensor on the device, and the copy from pinned memory that will have filled it."""

    def download(self, source: Tensor, target: Tensor) -> Copy:
        """Copy a tensor of the device, once it has been computed, to pinned memory."""


class CudaCopyEngine:
    """A stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def pinned(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def upload(self, source: Tensor) -> tuple[Tensor, Copy]:
        with torch.cuda.stream(self.stream):
            target = source.to(self.device, non_blocking=True)
        return target, _CudaCopy(self.stream, self.device, target)

    def download(self, source: Tensor, target: Tensor) -> Copy:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        source.record_stream(self.stream)  # its memory is not given to anything else before the copy is through
        return _CudaCopy(self.stream, self.device, None)


class _CudaCopy:
    def __init__(self, stream: torch.cuda.Stream, device: torch.device, target: Tensor | None) -> None:
        self.event = stream.record_event()
        self.device = device
        self.target = target

    def wait(self) -> None:
        current = torch.cuda.current_stream(self.device)
        current.wait_event(self.event)
        if self.target is not None:
            self.target.record_stream(current)

    def synchronize(self) -> None:
        self.event.synchronize()


def copy_engine(device: torch.device) -> CopyEngine | None:
    """The engine of a device; `None` for one that copies at once, such as the CPU."""
    return CudaCopyEngine(device) if device.type == "cuda" else None


def uploaded(tensors: Iterable[Tensor], device: torch.device, engine: CopyEngine | None = None) -> Iterator[Tensor]:
    """Host tensors on a device, in order, each on its way while the one before it is worked on.

    Args:
        tensors: read one ahead of what has been asked for. Those that are on the device already are passed on,
            those on another one moved.
        device: where they are wanted.
        engine: the device's own by default.
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
    """`target.copy_(source)` for every pair of a tensor on a device and one of its shape on the host.

    Args:
        pairs: `(source, target)`; taken from the iterable while copies of the ones before are under way.
        device: where the sources are.
        engine: the device's own by default.
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
    """A pinned buffer that grows, and the copy that it is in use by."""

    def __init__(self, engine: CopyEngine) -> None:
        self.engine = engine
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.copy: Copy | None = None

    def like(self, tensor: Tensor) -> Tensor:
        """Room for a tensor, contiguous, once the copy before is through."""
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
