"""Shards on their way to the device that multiplies them."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hf_trak.runtime.transfers import CopyEngine, copy_engine, uploaded


class FeatureShard(Protocol):
    """Rows `start … stop` of the features of one checkpoint."""

    @property
    def start(self) -> int:
        """Index of the first row."""

    @property
    def stop(self) -> int:
        """One past the index of the last row."""

    @property
    def grads(self) -> Tensor:
        """`(stop - start, k)`."""

    @property
    def out_to_loss(self) -> Tensor:
        """`(stop - start,)`."""


@dataclass(frozen=True)
class DeviceShard:
    """A [`FeatureShard`] whose `grads` are on a device."""

    start: int
    stop: int
    grads: Tensor
    out_to_loss: Tensor


def uploaded_shards(
    shards: Iterable[FeatureShard], device: torch.device, engine: CopyEngine | None = None
) -> Iterator[FeatureShard]:
    """Shards with their features on a device, in order, each on its way while the one before it is worked on.

    Args:
        shards: read one ahead of what has been asked for.
        device: where the features are wanted. Nothing is done, or read ahead, for one that copies at once.
        engine: the device's own by default, see [`hf_trak.runtime.transfers.uploaded`].
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
        del tensor, shard  # not kept while the next one is waited for
