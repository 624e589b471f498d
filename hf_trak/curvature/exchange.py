"""Gradients of a batch, handed to the process that adds up the sums of their blocks.

Processes that hold a sharded model work together, each on rows of its own. Every Kronecker block has an owner, which
alone has its sums, its bases and its part of preconditioned targets: the others send it the factors of their rows.
What has one number per parameter (norms, embeddings) is added up where it comes in a fit, and over processes at the
end of a part; where targets are preconditioned and rows are scored, it has an owner, too.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hf_trak.curvature.arrivals import BatchArrivals, BlockConsumer, BlockRanges, by_source
from hf_trak.curvature.blocks import CurvatureBlocks
from hf_trak.gradient_computers.hooked.outer import every_factor


class _Event(NamedTuple):
    """A block of gradients.

    Attributes:
        start: where it starts in the gradient vector.
        tensors: a dense block `(B, n)`, or two factors; where there is a width, the columns of a dense block that
            differ from zero in some row, `(B, c)`, and their numbers `(c,)`.
        width: n of a dense block of which only some columns are kept.
    """

    start: int
    tensors: tuple[Tensor, ...]
    width: int | None = None


class _Sink(Protocol):
    def __call__(self, start: int, block: Tensor) -> None: ...

    def add_outer(self, start: int, left: Tensor, right: Tensor) -> None: ...


class BlockOwners:
    """Which process has which Kronecker blocks: those whose gradients come together have one owner.

    Attributes:
        rank: this process.
        count: number of processes.
        group: processes that send each other tensors in the memory of the CPU.
        divides_numbers: whether diagonal blocks have owners, too.
    """

    def __init__(
        self, blocks: CurvatureBlocks, rank: int, count: int, group: Any, divides_numbers: bool = False
    ) -> None:
        """
        Args:
            blocks: the blocks.
            rank, count, group, divides_numbers: see the attributes.
        """
        self.rank = rank
        self.count = count
        self.group = group
        self.divides_numbers = divides_numbers
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
        self._of_numbers: list[int] = [0] * len(blocks.diagonal)
        for index in sorted(range(len(blocks.diagonal)), key=lambda i: -blocks.diagonal[i].numel):
            self._of_numbers[index] = owner = loads.index(min(loads))
            loads[owner] += blocks.diagonal[index].numel

    def of(self, index: int) -> int:
        """Return the owner of a block."""
        return self._of[index]

    @property
    def mine(self) -> frozenset[int]:
        """The Kronecker blocks of this process."""
        return frozenset(index for index, owner in enumerate(self._of) if owner == self.rank)

    def of_numbers(self, index: int) -> int:
        """Return the owner of a diagonal block."""
        return self._of_numbers[index]

    @property
    def my_numbers(self) -> frozenset[int]:
        """The diagonal blocks of this process."""
        return frozenset(index for index, owner in enumerate(self._of_numbers) if owner == self.rank)


class OutgoingGradients:
    """A sink of the gradients of one process' rows, which go to the owners of their blocks."""

    takes_outer = staticmethod(every_factor)

    def __init__(
        self,
        blocks: CurvatureBlocks,
        owners: BlockOwners,
        exchange: Callable[[str], Sequence[str]],
        dense: Iterable[int],
        numbers: _Sink | None = None,
    ) -> None:
        """
        Args:
            blocks: the blocks.
            owners: which process has which blocks.
            exchange: tells all processes a word, and returns theirs by rank.
            dense: indices of the Kronecker blocks whose dense gradients are wanted.
            numbers: takes gradients of diagonal blocks that have no owner; `None` where they are not wanted.
        """
        self._owners = owners
        self._exchange = exchange
        self._numbers = numbers
        self._by_source = by_source(blocks)
        self._ranges = BlockRanges(blocks, dense)
        self._out: list[list[_Event]] = [[] for _ in range(owners.count)]

    def __call__(self, start: int, block: Tensor) -> None:
        """Take columns `start … start + n` of the gradients, `(B, n)`, whose memory may be used again."""
        owners, numbers = self._receivers(start, start + block.shape[1])
        if numbers and self._numbers is not None:
            self._numbers(start, block)
        if owners:
            kept = _kept(start, block.detach(), self._owners.divides_numbers)
            for owner in owners:
                self._out[owner].append(kept)

    def add_outer(self, start: int, left: Tensor, right: Tensor) -> None:
        """Take a block by its factors, `(B, T, I)` and `(B, T, J)`."""
        left, right = left.detach(), right.detach()
        if start in self._by_source:
            self._out[self._owners.of(self._by_source[start][0])].append(_Event(start, (left, right)))
            return
        owners, numbers = self._receivers(start, start + left.shape[2] * right.shape[2])
        if numbers and self._numbers is not None:
            self._numbers.add_outer(start, left, right)
        for owner in owners:
            self._out[owner].append(_Event(start, (left, right)))

    def _receivers(self, start: int, stop: int) -> tuple[list[int], bool]:
        """Find the owners of the blocks in a range, and whether there are single numbers without an owner in it."""
        owners, numbers = set(), False
        for _, _, index, kind in self._ranges.overlapping(start, stop):
            if kind != "diagonal":
                owners.add(self._owners.of(index))
            elif self._owners.divides_numbers:
                owners.add(self._owners.of_numbers(index))
            else:
                numbers = True
        return sorted(owners), numbers

    def hand_over(self, note: Any, deliver: Callable[[int, Any, list[_Event]], None]) -> list[Any]:
        """Hand over what has come of a batch. All processes call this together.

        Args:
            note: plain JSON about the batch.
            deliver: takes the rank of a process, its note, and its gradients of the blocks that this process has; for
                all processes in the order of their ranks.

        Returns:
            The notes by rank.

        Raises:
            Exception: what `deliver` raised, once no other process waits for this one.
        """
        own, rank = self._owners, self._owners.rank
        described = [[_described(event) for event in events] for events in self._out]
        words = [json.loads(word) for word in self._exchange(json.dumps([note, described]))]
        failure: Exception | None = None
        for source, (said, of_source) in enumerate(words):
            events = self._out[rank] if source == rank else []
            if source == rank:
                for target, sent in enumerate(self._out):
                    for event in sent if target != rank else ():
                        for tensor in event.tensors:
                            dist.send(_as_bytes(tensor), target, group=own.group)
            else:
                events = [self._received(one, source) for one in of_source[rank]]
            try:
                if failure is None:
                    deliver(source, said, events)
            except Exception as error:  # raised when no other process waits for this one any more
                failure = error
            if source == rank:
                self._out = [[] for _ in range(own.count)]
        if failure is not None:
            raise failure
        return [said for said, _ in words]

    def _received(self, described: dict[str, Any], source: int) -> _Event:
        tensors = []
        for shape, name in zip(described["shapes"], described["dtypes"], strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, name))
            dist.recv(_as_bytes(tensor), source, group=self._owners.group)
            tensors.append(tensor)
        return _Event(described["start"], tuple(tensors), described["width"])


class ExchangingSink(OutgoingGradients):
    """A sink of the gradients of one process' rows, which the owners of their blocks give to a consumer."""

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
        numbers = BatchArrivals(blocks, consumer, ())
        dense = [index for index, one in enumerate(blocks.kronecker) if one.source is None]
        super().__init__(blocks, owners, exchange, dense, numbers if consumer.takes_numbers else None)
        self._blocks = blocks
        self._consumer = consumer
        self._arrivals = numbers

    def finish(self) -> None:
        """Hand over what has come of a batch. All processes call this together."""
        self._arrivals.finish()
        self.hand_over(None, self._deliver)

    def _deliver(self, source: int, note: Any, events: list[_Event]) -> None:
        """Give the gradients of one process' rows to the consumer."""
        arrivals = BatchArrivals(self._blocks, self._consumer, self._owners.mine)
        feed(arrivals, events)
        arrivals.finish()


def feed(sink: _Sink, events: Iterable[_Event], device: torch.device | None = None) -> None:
    """Give events to a sink, on a device; `None` leaves them where they are."""
    for start, tensors, width in events:
        first, *others = tensors if device is None else [tensor.to(device) for tensor in tensors]
        if width is not None:
            block = first.new_zeros(len(first), width)
            block[:, others[0]] = first
            sink(start, block)
        elif others:
            sink.add_outer(start, first, others[0])
        else:
            sink(start, first)


def _kept(start: int, block: Tensor, may_be_sparse: bool) -> _Event:
    """Copy a dense block; of the gradient of an embedding, the columns that differ from zero in some row."""
    if may_be_sparse:
        touched = (block != 0).any(0).nonzero()[:, 0]
        if 2 * len(touched) < block.shape[1]:
            return _Event(start, (block[:, touched], touched), block.shape[1])
    return _Event(start, (block.clone(),))


def _described(event: _Event) -> dict[str, Any]:
    shapes = [list(tensor.shape) for tensor in event.tensors]
    dtypes = [str(one.dtype).removeprefix("torch.") for one in event.tensors]
    return {"start": event.start, "shapes": shapes, "dtypes": dtypes, "width": event.width}


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)
