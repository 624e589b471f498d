"""Linear maps of gradients under a curvature of which every process has some blocks.

The gradients of all processes' rows go to the owners of their blocks at the end of each batch's backward pass
(`hf_trak.curvature.exchange`). Owners compute what their blocks add to the result, for the rows of each process, and
what all of them add is summed in the order of their ranks, so that results have the same bits in every run.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_trak.curvature.arrivals import slices
from hf_trak.curvature.curvature import Curvature
from hf_trak.curvature.exchange import BlockOwners, OutgoingGradients, feed
from hf_trak.curvature.maps import GradientMap, InverseMap, MapSink
from hf_trak.curvature.target_forms import LowRankForm
from hf_trak.gradient_computers.hooked.outer import every_factor
from hf_trak.runtime.lockstep import Lockstep


class OwnerMap(GradientMap):
    """A map that every process computes for its own blocks, and for the rows of all processes."""

    by_owner = True

    def __init__(
        self,
        own: GradientMap,
        curvature: Curvature,
        owners: BlockOwners,
        lockstep: Lockstep,
        device: torch.device,
    ) -> None:
        """
        Args:
            own: what the blocks of this process add to the result.
            curvature: the curvature, of which this process has its own blocks.
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

        def result(outgoing: OutgoingGradients) -> Tensor:
            found = self._served(outgoing, note)
            return torch.zeros(batch_size, self.proj_dim, device=device) if found is None else found.to(device)

        return _OwnerSink(self._outgoing(), result)

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
            feed(_Sliced(sink), events, self._device)
            parts.append(sink.result().to("cpu", torch.float32))

        notes = outgoing.hand_over(note, deliver)
        self._lockstep.exchange("computed")  # one that has failed says so here
        total = self._lockstep.total(torch.cat(parts))
        sizes = [0 if said is None else said["size"] for said in notes]
        first = sum(sizes[: self._owners.rank])
        return None if note is None else total[first : first + note["size"]]


class _OwnerSink:
    takes_outer = staticmethod(every_factor)

    def __init__(self, outgoing: OutgoingGradients, result: Callable[[OutgoingGradients], Tensor]) -> None:
        self._outgoing = outgoing
        self._result = result

    def __call__(self, start: int, block: Tensor) -> None:
        self._outgoing(start, block)

    def add_outer(self, start: int, left: Tensor, right: Tensor) -> None:
        self._outgoing.add_outer(start, left, right)

    def result(self) -> Tensor:
        return self._result(self._outgoing)


class _Sliced:
    """Gives factors that a sink does not want to it as dense slices of bounded size."""

    def __init__(self, sink: MapSink) -> None:
        self._sink = sink

    def __call__(self, start: int, block: Tensor) -> None:
        self._sink(start, block)

    def add_outer(self, start: int, left: Tensor, right: Tensor) -> None:
        if self._sink.takes_outer(left, right):
            self._sink.add_outer(start, left, right)
            return
        for first, part in slices(left, right):
            self._sink(start + first, part)


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
    """What the blocks of this process add to gᵀ P⁻¹ g, `(B, 1)`."""

    def __init__(self, curvature: Curvature, damping: float) -> None:
        """
        Args:
            curvature: the curvature P, of which this process has some blocks.
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
            form: the form in which targets are kept, of a curvature of which this process has some blocks.
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
            return total * self._draws  # of which the mean over draws is taken

        return self.opened(places, result)
