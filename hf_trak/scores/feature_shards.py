"""Feature shards, and their upload to the device that multiplies them."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hf_trak.runtime.transfers import CopyEngine, copy_engine, uploaded


class FeatureShard(Protocol):
    """The features of rows `start … stop` of one checkpoint, `stop` not included."""

    @property
    def start(self) -> int:
        """Index of the first row."""

    @property
    def stop(self) -> int:
        """One past the index of the last row."""

    @property
    def grads(self) -> Tensor:
        """Projected gradients g(z_i), `(stop - start, k)`."""

    @property
    def out_to_loss(self) -> Tensor:
        """Weights q_i, `(stop - start,)`."""


@dataclass(frozen=True)
class DeviceShard:
    """A [`FeatureShard`] whose `grads` have been copied to a device."""

    start: int
    stop: int
    grads: Tensor
    out_to_loss: Tensor


def uploaded_shards(
    shards: Iterable[FeatureShard], device: torch.device, engine: CopyEngine | None = None
) -> Iterator[FeatureShard]:
    """Copy the features of shards to a device, each shard while the one before it is being processed.

    Args:
        shards: shards in order. One shard is read ahead of the one that was asked for.
        device: the device that the features are copied to. For a device without asynchronous copies (the CPU), shards
            pass through as they are, without reading ahead.
        engine: performs the copies, see [`hf_trak.runtime.transfers.uploaded`]. By default the engine of the device.

    Yields:
        The shards in the same order, `out_to_loss` where it was.
    """
    engine = engine or copy_engine(device)
    if engine is None:
        yield from shards
        return
    read: deque[FeatureShard] = deque()

    def grads() -> Iterator[Tensor]:
        for shard in shards:
            read.append(shard)
            yield shard.grads

    for tensor in uploaded(grads(), device, engine):
        shard = read.popleft()
        yield DeviceShard(shard.start, shard.stop, tensor, shard.out_to_loss)
        del tensor, shard  # free this shard before waiting for the next one
