"""Feature shards, and their upload to the device that multiplies them."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from hf_trak.runtime.transfers import CopyEngine, copy_engine, uploaded
from hf_trak.store.codes import CodedRows
from hf_trak.store.shard_set import Shard


class FeatureShard(Protocol):
    """The features of rows `start … stop` of one checkpoint, `stop` not included."""

    @property
    def start(self) -> int:
        """Return the index of the first row."""

    @property
    def stop(self) -> int:
        """Return one past the index of the last row."""

    @property
    def grads(self) -> Tensor:
        """Return the projected gradients g(z_i), `(stop - start, k)`."""

    @property
    def out_to_loss(self) -> Tensor:
        """Return the weights q_i, `(stop - start,)`."""


@runtime_checkable
class ShardOfCodes(Protocol):
    """A [`FeatureShard`] that may hold codes."""

    @property
    def coded(self) -> CodedRows | None:
        """Return the codes, or `None` for floating-point features."""


def codes_of(shard: FeatureShard) -> CodedRows | None:
    """Return the codes of a shard, or `None` for floating-point features."""
    return shard.coded if isinstance(shard, ShardOfCodes) else None


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

    Codes are copied as they are, and decoded on the device.

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

    def features() -> Iterator[Tensor]:
        for shard in shards:
            read.append(shard)
            coded = codes_of(shard)
            yield shard.grads if coded is None else _bytes_of(coded)

    for tensor in uploaded(features(), device, engine):
        shard = read.popleft()
        coded = codes_of(shard)
        if coded is None:
            yield DeviceShard(shard.start, shard.stop, tensor, shard.out_to_loss)
        else:
            yield Shard(shard.start, shard.stop, _of_bytes(tensor, coded), shard.out_to_loss)
        del tensor, shard, coded  # free this shard before waiting for the next one


def _bytes_of(coded: CodedRows) -> Tensor:
    """Join the scales and codes of rows to one tensor, uint8."""
    return torch.cat([coded.scale.contiguous().view(torch.uint8), *(block.flatten() for block in coded.blocks)])


def _of_bytes(tensor: Tensor, like: CodedRows) -> CodedRows:
    """Invert [`_bytes_of`] on a device, for rows of the same shapes."""
    sizes = [4 * len(like), *(block.numel() for block in like.blocks)]
    scale, *blocks = tensor.split(sizes)
    shaped = (part.view(block.shape) for part, block in zip(blocks, like.blocks, strict=True))
    return CodedRows(like.form, scale.view(torch.float32), tuple(shaped))
