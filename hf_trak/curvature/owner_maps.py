"""Linear maps of gradients under a curvature whose blocks are divided over processes.

The gradients of all processes' rows go to the owners of their blocks at the end of each batch's backward pass
(`hf_trak.curvature.owner_maps`). Owners compute what their blocks add to the result, for the rows of each process, and
what all of them add is summed in the order of their ranks, so that results have the same bits in every run.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hf_trak.curvature.arrivals import BatchArrivals, BlockConsumer, BlockRanges, by_source, slices
from hf_trak.curvature.blocks import CurvatureBlocks
from hf_trak.curvature.curvature import Curvature
from hf_trak.curvature.maps import BlockSink, GradientMap, InverseMap, MapSink
from hf_trak.curvature.sums import shared_out
from hf_trak.curvature.target_forms import LowRankForm
from hf_trak.gradient_computers.hooked.workspace import every_factor
from hf_trak.runtime.lockstep import Lockstep


class _Event(NamedTuple):
    """A block of gradients.

    Attributes:
        start: where it starts in the gradient vector.
        tensors: a dense block `(B, n)`, or two factors; with a `width`, the columns of a dense block that
            differ from zero in some row, `(B, c)`, and their numbers `(c,)`.
        width: n of a dense block that is kept only in some columns.
    """

    start: int
    tensors: tuple[Tensor, ...]
    width: int | None = None


class BlockOwners:
    """The division of Kronecker blocks over processes. Blocks whose gradients come together have one owner.

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
        loads = [0] * count
        owners = shared_out(sizes, loads)
        self._of = {index: owners[key] for key, indices in together.items() for index in indices}
        self._of_numbers = shared_out({index: one.numel for index, one in enumerate(blocks.diagonal)}, loads)

    def of(self, index: int) -> int:
        """Return the owner of a block."""
        return self._of[index]

    @property
    def mine(self) -> frozenset[int]:
        """Return the Kronecker blocks of this process."""
        return frozenset(index for index, owner in self._of.items() if owner == self.rank)

    def of_numbers(self, index: int) -> int:
        """Return the owner of a diagonal block."""
        return self._of_numbers[index]

    @property
    def my_numbers(self) -> frozenset[int]:
        """Return the diagonal blocks of this process."""
        return frozenset(index for index, owner in self._of_numbers.items() if owner == self.rank)


class OutgoingGradients:
    """A sink of the gradients of one process' rows, which go to the owners of their blocks.

    Attributes:
        result: returns what the owners have made of them, `(B, k)`; whoever opens a sink for rows gives it.
    """

    takes_outer = staticmethod(every_factor)
    result: Callable[[], Tensor]

    def __init__(
        self,
        blocks: CurvatureBlocks,
        owners: BlockOwners,
        exchange: Callable[[str], Sequence[str]],
        dense: Iterable[int],
        numbers: BlockSink | None = None,
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


def feed(sink: BlockSink, events: Iterable[_Event], device: torch.device | None = None) -> None:
    """Give events to a sink, on a device; `None` leaves them where they are."""
    for start, tensors, width in events:
        first, *others = tensors if device is None else [tensor.to(device) for tensor in tensors]
        if width is not None:
            block = first.new_zeros(len(first), width)
            block[:, others[0]] = first
            sink(start, block)
        elif others and sink.takes_outer(first, others[0]):
            sink.add_outer(start, first, others[0])
        elif others:
            for low, part in slices(first, others[0]):
                sink(start + low, part)
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


class OwnerMap(GradientMap):
    """A map that every process computes for its own blocks, and for the rows of all processes."""

    by_owner = True

    def __init__(
        self, own: GradientMap, curvature: Curvature, owners: BlockOwners, lockstep: Lockstep, device: torch.device
    ) -> None:
        """
        Args:
            own: what the blocks of this process add to the result.
            curvature: the curvature, with the blocks of this process.
            owners: which process has which blocks, diagonal ones included.
            lockstep: the processes.
            device: where `own` computes.
        """
        super().__init__(own.proj_dim)
        self.scale = own.scale
        self._own = own
        self._curvature = curvature
        self._owners = owners
        self._lockstep = lockstep
        self._device = device
        self._rows: list[int] = []

    def begin(self, rows: Sequence[int]) -> None:
        self._rows = list(rows)

    def sink(self, batch_size: int, model_id: int, device: str | torch.device) -> MapSink:
        """Open a sink, whose `result` all processes call together; those without a batch call `accompany`."""
        leads = self._lockstep.division.is_leader
        note = {"rows": self._rows, "model_id": model_id, "size": batch_size} if leads else None

        outgoing = self._outgoing()

        def result() -> Tensor:
            found = self._served(outgoing, note)
            return torch.zeros(batch_size, self.proj_dim, device=device) if found is None else found.to(device)

        outgoing.result = result
        return outgoing

    def accompany(self) -> None:
        self._served(self._outgoing(), None)

    def _outgoing(self) -> OutgoingGradients:
        blocks = self._curvature.blocks
        return OutgoingGradients(blocks, self._owners, self._lockstep.exchange, range(len(blocks.kronecker)))

    def _served(self, outgoing: OutgoingGradients, note: dict[str, Any] | None) -> Tensor | None:
        """Compute what the blocks of this process add for all rows, and add up what all add for the own rows.

        Returns:
            `(B, proj_dim)`; `None` for a process without rows.
        """
        parts: list[Tensor] = []

        def deliver(source: int, said: dict[str, Any] | None, events: list[Any]) -> None:
            if said is None:
                return
            self._own.begin(said["rows"])
            sink = self._own.sink(said["size"], said["model_id"], self._device)
            feed(sink, events, self._device)
            parts.append(sink.result().to("cpu", torch.float32))

        notes = outgoing.hand_over(note, deliver)
        self._lockstep.exchange("computed")  # one that has failed says so here
        total = self._lockstep.total(torch.cat(parts))
        sizes = [0 if said is None else said["size"] for said in notes]
        first = sum(sizes[: self._owners.rank])
        return None if note is None else total[first : first + note["size"]]


class _BlockPlaces:
    """Keeps the values of every block that this process has by itself, matrices in their bases."""

    def __init__(self, curvature: Curvature, size: int, device: str | torch.device) -> None:
        self._curvature = curvature
        self._size = size
        self._device = device
        self._matrices: dict[int, Tensor] = {}
        self._numbers: dict[int, Tensor] = {}

    def matrices(self, index: int, rotated: Tensor) -> None:
        found = self._matrices.get(index)
        self._matrices[index] = rotated if found is None else found + rotated

    def numbers(self, index: int, first: int, values: Tensor) -> None:
        if index not in self._numbers:
            self._numbers[index] = self._zeros(self._curvature.blocks.diagonal[index].numel)
        self._numbers[index][:, first : first + values.shape[1]] += values

    def take_matrix(self, index: int) -> Tensor:
        """Return `(B, *shape)`, and forget it."""
        found = self._matrices.pop(index, None)
        return self._zeros(*self._curvature.blocks.kronecker[index].shape) if found is None else found

    def take_numbers(self, index: int) -> Tensor:
        """Return `(B, n)`, and forget it."""
        found = self._numbers.pop(index, None)
        return self._zeros(self._curvature.blocks.diagonal[index].numel) if found is None else found

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(self._size, *shape, device=self._device)


class OwnSelfInfluence(InverseMap):
    """The part of gᵀ P⁻¹ g that the blocks of this process add, `(B, 1)`."""

    def __init__(self, curvature: Curvature, damping: float) -> None:
        """
        Args:
            curvature: the curvature P, with the blocks of this process.
            damping: c in 1 / (Λ + c · mean Λ).
        """
        super().__init__(1, curvature, damping, 0.5)

    def sink(self, batch_size: int, model_id: int, device: str | torch.device) -> MapSink:
        places = _BlockPlaces(self.curvature, batch_size, device)

        def result() -> Tensor:
            total = torch.zeros(batch_size, 1, device=device)
            for index in self.curvature.held:
                total += places.take_matrix(index).flatten(1).square_().sum(1, keepdim=True)
            for index in self.curvature.held_numbers:
                total += places.take_numbers(index).square_().sum(1, keepdim=True)
            return total

        return self.opened(places, result)


class TargetKeeper(Protocol):
    """Keeps preconditioned targets, block by block."""

    def keep(self, name: str, rows: Sequence[int], values: Tensor) -> Tensor:
        """Keep a block of some targets, `(B, numel)`, and return it as it is kept."""

    def finish(self, rows: Sequence[int]) -> None:
        """Hear that all blocks of some targets have been kept."""


class OwnPreconditioning(InverseMap):
    """The blocks of P⁻¹ g that this process has, which go to a keeper.

    What the map gives are three numbers of every row `(B, 3)`: how many numbers of V differ from zero as they are
    kept, ‖V‖², and ‖V − UW‖² of a form of low rank.
    """

    def __init__(self, form: LowRankForm, keeper: TargetKeeper, draws: int = 1) -> None:
        """
        Args:
            form: the form in which targets are kept, of a curvature with the blocks of this process.
            keeper: keeps them.
            draws: how often every row comes, one time after the other; V is the mean.
        """
        super().__init__(3, form.curvature, form.damping, 1.0)
        self._form = form
        self._keeper = keeper
        self._draws = draws
        self._rows: tuple[int, ...] = ()
        self._drawn: dict[tuple[int, ...], tuple[_BlockPlaces, int]] = {}

    def begin(self, rows: Sequence[int]) -> None:
        self._rows = tuple(rows)

    def sink(self, batch_size: int, model_id: int, device: str | torch.device) -> MapSink:
        rows, curvature, form = self._rows, self.curvature, self._form
        places, before = self._drawn.pop(rows, (_BlockPlaces(curvature, batch_size, device), 0))

        def result() -> Tensor:
            total = torch.zeros(batch_size, 3, dtype=torch.float64, device=device)
            if before + 1 < self._draws:
                self._drawn[rows] = places, before + 1
                return total
            for name, place in form.places().items():
                kind, _, number = name.partition("-")
                index = int(number)
                if kind == "matrix":
                    whole = curvature.kronecker[index].rotated_back(places.take_matrix(index) / self._draws)
                    values, lost = form.compressed_matrix(place.rank, whole)
                    total[:, 2] += lost
                    whole = whole.flatten(1)
                else:
                    values = whole = places.take_numbers(index) / self._draws
                kept = self._keeper.keep(name, rows, values)
                total[:, 0] += (kept != 0).sum(1).to(device)
                total[:, 1] += whole.double().square().sum(1)
            self._keeper.finish(rows)
            return total * self._draws  # the mean over draws is taken of it

        return self.opened(places, result)
