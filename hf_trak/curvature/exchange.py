"""Gradients of a batch, handed to the process that adds up the sums of their blocks.

Processes that hold a sharded model work on one part of the sample together, each on rows of its own. Every Kronecker
block has an owner, which alone has its sums and its bases: the others send it the factors of their rows. What has one
number per parameter (norms, embeddings) is added up where it comes, and over processes at the end of the part.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_trak.curvature.arrivals import BatchArrivals, BlockConsumer, BlockRanges, by_source
from hf_trak.curvature.blocks import CurvatureBlocks
from hf_trak.gradient_computers.hooked.outer import every_factor

_Event = tuple[int, tuple[Tensor, ...]]
"""Start in the gradient vector; and a dense block, or two factors."""


class BlockOwners:
    """Which process has which Kronecker blocks: those whose gradients come together have one owner.

    Attributes:
        rank: this process.
        count: number of processes.
        group: processes that send each other tensors in the memory of the CPU.
    """

    def __init__(self, blocks: CurvatureBlocks, rank: int, count: int, group: Any) -> None:
        """
        Args:
            blocks: the blocks.
            rank, count, group: see the attributes.
        """
        self.rank = rank
        self.count = count
        self.group = group
        together: dict[Any, list[int]] = {}
        for index, one in enumerate(blocks.kronecker):
            together.setdefault(one.name if one.source is None else one.source, []).append(index)
        sizes = {
            key: sum(sum(side**2 for side in blocks.kronecker[i].shape) + blocks.kronecker[i].numel for i in indices)
            for key, indices in together.items()
        }
        loads, self._of = [0] * count, [0] * len(blocks.kronecker)
        for key in sorted(together, key=lambda key: (-sizes[key], together[key])):  # the largest first
            owner = loads.index(min(loads))
            loads[owner] += sizes[key]
            for index in together[key]:
                self._of[index] = owner

    def of(self, index: int) -> int:
        """Return the owner of a block."""
        return self._of[index]

    @property
    def mine(self) -> frozenset[int]:
        """The blocks of this process."""
        return frozenset(index for index, owner in enumerate(self._of) if owner == self.rank)


class ExchangingSink:
    """A sink of the gradients of one process' rows, which go to the owners of their blocks."""

    takes_outer = staticmethod(every_factor)

    def __init__(
        self,
        blocks: CurvatureBlocks,
        consumer: BlockConsumer,
        owners: BlockOwners,
        exchange: Callable[[str], Sequence[str]],
    ) -> None:
        """
        Args:
            blocks: the blocks.
            consumer: takes the gradients of the blocks that this process has, and single numbers.
            owners: which process has which blocks.
            exchange: tells all processes a word, and returns theirs by rank.
        """
        self._blocks = blocks
        self._consumer = consumer
        self._owners = owners
        self._exchange = exchange
        self._by_source = by_source(blocks)
        dense = [index for index, one in enumerate(blocks.kronecker) if one.source is None]
        self._ranges = BlockRanges(blocks, dense)
        self._numbers = BatchArrivals(blocks, consumer, ())
        self._out: list[list[_Event]] = [[] for _ in range(owners.count)]

    def __call__(self, start: int, block: Tensor) -> None:
        """Take columns `start … start + n` of the gradients, `(B, n)`, whose memory may be used again."""
        owners, numbers = self._receivers(start, start + block.shape[1])
        if numbers:
            self._numbers(start, block)
        if owners:
            kept = block.detach().clone()
            for owner in owners:
                self._out[owner].append((start, (kept,)))

    def add_outer(self, start: int, left: Tensor, right: Tensor) -> None:
        """Take a block by its factors, `(B, T, I)` and `(B, T, J)`."""
        left, right = left.detach(), right.detach()
        if start in self._by_source:
            self._out[self._owners.of(self._by_source[start][0])].append((start, (left, right)))
            return
        owners, numbers = self._receivers(start, start + left.shape[2] * right.shape[2])
        if numbers:
            self._numbers.add_outer(start, left, right)
        for owner in owners:
            self._out[owner].append((start, (left, right)))

    def _receivers(self, start: int, stop: int) -> tuple[list[int], bool]:
        """Find the owners of the matrices in a range, and whether there are single numbers in it."""
        owners, numbers = set(), False
        for _, _, index, kind in self._ranges.overlapping(start, stop):
            if kind == "diagonal":
                numbers = True
            else:
                owners.add(self._owners.of(index))
        return sorted(owners), numbers and self._consumer.takes_numbers

    def finish(self) -> None:
        """Hand over what has come of a batch. All processes call this together."""
        self._numbers.finish()
        own, rank = self._owners, self._owners.rank
        words = self._exchange(json.dumps([[_described(event) for event in events] for events in self._out]))
        for source, word in enumerate(words):
            for target, described in enumerate(json.loads(word)):
                if not described:
                    continue
                if source == target == rank:
                    self._deliver(self._out[rank])
                elif source == rank:
                    for _, tensors in self._out[target]:
                        for tensor in tensors:
                            dist.send(_as_bytes(tensor), target, group=own.group)
                elif target == rank:
                    self._deliver([self._received(one, source) for one in described])
            if source == rank:
                self._out = [[] for _ in range(own.count)]

    def _received(self, described: dict[str, Any], source: int) -> _Event:
        tensors = []
        for shape, name in zip(described["shapes"], described["dtypes"], strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, name))
            dist.recv(_as_bytes(tensor), source, group=self._owners.group)
            tensors.append(tensor)
        return described["start"], tuple(tensors)

    def _deliver(self, events: list[_Event]) -> None:
        """Give the gradients of one process' rows to the consumer."""
        arrivals = BatchArrivals(self._blocks, self._consumer, self._owners.mine)
        for start, tensors in events:
            if len(tensors) == 1:
                arrivals(start, tensors[0])
            else:
                arrivals.add_outer(start, *tensors)
        arrivals.finish()


def _described(event: _Event) -> dict[str, Any]:
    start, tensors = event
    shapes = [list(tensor.shape) for tensor in tensors]
    return {"start": start, "shapes": shapes, "dtypes": [str(one.dtype).removeprefix("torch.") for one in tensors]}


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)
