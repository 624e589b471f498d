"""The hooked engine on a model that FSDP2, ZeRO-3 or tensor parallelism divides over processes.

Under FSDP2 and ZeRO-3, layers are gathered for their forward and backward pass, and hooks see the activations of this
process' own rows, as in data parallelism; parameters are frozen, so that no gradient is formed or reduced. All
processes make the same number of passes (`hf_trak.runtime.lockstep`): where one of them has to trace a sample or to
begin again, all repeat their forward pass.

Under tensor parallelism, the processes of a group have the same rows and each emits the columns of its own slices;
the columns of whole parameters are emitted by the first process alone. The sums over the group are whole gradients.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hf_trak._compat import class_before_fsdp, gathered_after_forward
from hf_trak.errors import GradientEngineError
from hf_trak.gradient_computers.base import BatchOutputs, GradientSink, SplitBatch
from hf_trak.gradient_computers.environment import removing
from hf_trak.gradient_computers.hooked.batch_axis import UnsupportedError
from hf_trak.gradient_computers.hooked.computer import Captured, HookedGradientComputer
from hf_trak.gradient_computers.hooked.hooked_pass import Emit, HookedPass
from hf_trak.gradient_computers.hooked.rules.tensor_parallel import GatheringSlices
from hf_trak.gradient_computers.hooked.traces import RestartError
from hf_trak.gradient_computers.hooked.workspace import OuterBlock, TakesOuter
from hf_trak.gradient_computers.padding import CollatedAlone
from hf_trak.gradient_computers.sharded_check import check_together
from hf_trak.gradient_computers.tensor_parallel import (
    Slices,
    hooks_as_forward,
    partial_parameters,
    sliced_parameters,
    uncovered,
)
from hf_trak.modelout_functions.base import AbstractModelOutput, Batch, Side
from hf_trak.modelout_functions.deferred_logits import output_embedding
from hf_trak.runtime.lockstep import STEP, Lockstep, lost_contact
from hf_trak.runtime.sharding import averaged_over, fsdp_modules, is_sharded_tensor, reshard, tensor_parallel_ranks
from hf_trak.runtime.zero import GatheredUnit, gathering, is_zero, units_of

_OF_FSDP = "torch.distributed.fsdp."


def sharded_head(model: nn.Module) -> nn.Linear | None:
    """Find the head of a divided model whose logits can be deferred, `None` if there is none.

    It is a linear layer as torch has it, see [`deferrable_head`], of a model that FSDP2 alone divides.
    """
    head = output_embedding(model)
    if not isinstance(head, nn.Linear) or "forward" in vars(head) or parametrize.is_parametrized(head):
        return None
    units = fsdp_modules(model)
    alone = any(unit is head for unit in units)  # FSDP2 makes a class of its own for a layer that it gathers alone
    if (class_before_fsdp(head) if alone else type(head)) is not nn.Linear:
        return None
    hooks = [head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks]
    if any(
        not str(getattr(hook, "__module__", "")).startswith(_OF_FSDP) for found in hooks for hook in found.values()
    ):
        return None
    if not units or is_zero(model) or tensor_parallel_ranks(model):
        return None
    return head if head.weight.is_floating_point() and head.weight.device.type != "meta" else None


CHECK = "check"

"""What a process says at the beginning of a pass for whose batch the engine has not been checked yet."""


_CAPTURED, _AGAIN = "captured", "again"


class _Dropped:
    """A sink for a pass whose result is dropped. It also takes the factors that [`GatheringSlices`] asks for."""

    def __call__(self, start: int, block: Tensor) -> None:
        """Drop a block."""

    def takes_outer(self, left: Tensor, right: Tensor) -> bool:
        """Return `False`: nothing is done with a block in either form."""
        return False

    def add_outer(self, start: int, left: Tensor, right: Tensor) -> None:
        """Drop a block that is given by its factors."""


class ShardedGradientComputer(HookedGradientComputer):
    """Per-sample gradients of a sharded model. All processes call its methods together, see [`Lockstep`].

    On the first batch, gradients of two samples are compared with those that plain autograd, and the gradient
    reduction of FSDP2, give of each of them alone.

    Attributes:
        engine (`str`): `"hooked"`; no other engine works on shards.
        self_check (`bool`): whether to compare.
        collated_alone (`Callable[[int], Batch]`, *optional*): see [`AutoGradientComputer`].
        half_precision (`bool`, *optional*): `None`: it is not looked for.
    """

    postpones = True
    foretells = False
    way_out = "No other engine works on a sharded model: attribute it unsharded."
    engine = "hooked"
    half_precision: bool | None = None
    gathers = False
    """Whether the first process of every group gets whole gradients, and the others of it none."""

    def __init__(
        self,
        model: nn.Module,
        task: AbstractModelOutput,
        lockstep: Lockstep,
        device: torch.device | str | None = None,
        grad_wrt: Any = None,
        self_check: bool = True,
    ) -> None:
        """
        Args:
            model: the sharded model.
            task: the model output function, one with a batched form.
            lockstep: keeps the processes at the same pass.
            device, grad_wrt: see [`HookedGradientComputer`].
            self_check: whether to compare two samples of the first batch with plain autograd.
        """
        super().__init__(model, task, None, None, device, grad_wrt)
        self.lockstep = lockstep
        self.division = lockstep.division
        self.self_check = self_check
        self.collated_alone: CollatedAlone | None = None
        self._checked: set[tuple[object, ...]] = set()
        self._layers = units_of(model)
        self._units: list[Any] = [*fsdp_modules(model), *self._layers]
        self._order: list[Any] = list(self._units)
        self._averaged = averaged_over(model)
        self._check_slices()
        own = sliced_parameters(model)
        self._partial = partial_parameters(model)
        self._others: frozenset[str] = frozenset()  # of whole parameters, which all processes of a group have
        self._uncounted: frozenset[str] = frozenset()
        if not self.division.is_leader:
            self._others = frozenset(self.layout.names) - own
            self._uncounted = self._others - self._partial
        self._slices = Slices(model)
        self._numel = {slot.name: slot.numel for slot in self.layout.slots}
        self._last: tuple[Batch, Side] | None = None

    def _check_slices(self) -> None:
        """Refuse a model if tensor parallelism divides something in it that nothing here differentiates.

        Raises:
            GradientEngineError: names the module, in every process.
        """
        found = uncovered(self.model, self.layout.names)
        if found is not None:
            raise GradientEngineError(
                f"Tensor parallelism divides parameters of the module {found[0]!r} ({type(found[1]).__name__}). "
                "Expected linear layers, embeddings and experts of transformers to be divided. Leave that module out "
                "of the plan, out of `grad_wrt`, or divide the model with FSDP2."
            )

    def use(self, engine: str | None) -> None:
        """Check the engine no more: it has been checked on another task of the same model."""
        self.self_check = self.self_check and engine is None

    def check_again(self) -> None:
        """Check the next batch, whatever was checked before it."""
        self._checked.clear()

    def stream(self, batch: Batch, sink: GradientSink, side: Side = "train") -> BatchOutputs:
        self._last = batch, side
        words = self.lockstep.exchange(CHECK if self._unchecked(batch, side) else STEP)
        return self._step(batch, sink, side, words)

    def accompany(self, words: list[str], batch: Callable[[], Batch], side: Side) -> None:
        """Make a pass whose result is dropped, because another process makes one.

        Args:
            words: what the processes said when they began.
            batch: returns a batch for the case that this process has had none yet.
            side: its side.
        """
        if self._last is None:
            self._last = batch(), side
        self.collated_alone = None
        self._step(self._last[0], _Dropped(), self._last[1], words)

    def _unchecked(self, batch: Batch, side: Side) -> bool:
        split = SplitBatch.of(batch)
        return self.self_check and (side, split.keys, split.size > 1) not in self._checked

    def _step(self, batch: Batch, sink: GradientSink, side: Side, words: list[str]) -> BatchOutputs:
        if CHECK in words:
            gathers, self.gathers = self.gathers, False  # every process is checked on what it emits itself
            try:
                check_together(self, batch, side, [rank for rank, word in enumerate(words) if word == CHECK])
            finally:
                self.gathers = gathers
            split = SplitBatch.of(batch)
            self._checked.add((side, split.keys, split.size > 1))
        return self.stream_unchecked(batch, sink, side)

    # -- passes ------------------------------------------------------------------------------------------------------

    def _run(self, batch: Batch, emit: Emit, side: Side, takes_outer: TakesOuter | None = None) -> BatchOutputs:
        """Run as the hooked engine does. One sample alone goes twice, since shards give plain autograd no gradient."""
        split = SplitBatch.of(batch)
        self._partition()
        self._slices.begin()

        if self.gathers and len(self.division.ranks) > 1:
            takes_outer = GatheringSlices(self.division.total)

        def counted(name: str, start: int, block: Tensor | OuterBlock) -> None:
            if isinstance(takes_outer, GatheringSlices):
                start, block = self._gathered(name, start, block)
                if self.division.is_leader:
                    emit(name, start, block)
                return
            if name in self._uncounted:
                return
            for piece in self._slices.placed(name, start, block):
                emit(*piece)

        if split.size > 1:
            with self._holding():
                return super()._run(batch, counted, side, takes_outer)

        def first(name: str, start: int, block: Tensor | OuterBlock) -> None:
            counted(
                name,
                start,
                OuterBlock(block.left[:1], block.right[:1]) if isinstance(block, OuterBlock) else block[:1],
            )

        twice = split.picked([0, 0])
        with self._holding():
            found = super()._run(twice, first, side, takes_outer)
        return BatchOutputs(found.output[:1], found.out_to_loss[:1])

    def _deferrable_head(self) -> nn.Linear | None:
        return sharded_head(self.model)

    @contextmanager
    def _holding(self) -> Iterator[None]:
        """Keep the units of FSDP2 around the head to the end of a pass, whether or not this process defers."""
        head = self._deferrable_head()
        with ExitStack() as stack:
            for unit in fsdp_modules(self.model) if head is not None else ():
                if any(module is head for module in unit.modules()):
                    stack.enter_context(gathered_after_forward(unit))
            yield

    def _gathered(self, name: str, start: int, block: Tensor | OuterBlock) -> tuple[int, Tensor | OuterBlock]:
        """Make a block of one process, which may have slices or a part of the heads, that of the whole parameter."""
        if isinstance(block, OuterBlock):
            return start, block
        if name in self._slices.names.values():
            pieces = list(self._slices.placed(name, start, block))
            whole = block.new_zeros(block.shape[0], self._numel[name])
            for _, first, part in pieces:
                whole[:, first : first + part.shape[1]] = part  # type: ignore[assignment]
            return 0, self.division.total(whole)
        return start, self.division.total(block) if name in self._partial else block

    def _if_all_captured(self, found: Captured | None) -> Captured | None:
        words = self.lockstep.exchange(_AGAIN if found is None else _CAPTURED)
        return found if all(word == _CAPTURED for word in words) else None

    def _partition(self) -> None:
        """Free what has been gathered, and what a pass before has kept of it."""
        for unit in self._layers:
            unit.forget()
        reshard(self.model)

    def _pass(self, *args: Any) -> Any:
        self._partition()
        with self.completing():
            return super()._pass(*args)

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Return a context in which layers that ZeRO-3 has partitioned are gathered as they compute."""
        if not self._layers:
            yield
            return
        self._partition()
        try:
            with gathering(self.model, self._layers):
                yield
        finally:
            self._partition()

    @contextmanager
    def completing(self) -> Iterator[None]:
        """Return a context for one forward pass: if it fails, what others wait for is gathered all the same."""
        entered: list[Any] = []
        handles = [
            unit.register_forward_pre_hook(lambda module, inputs, unit=unit: entered.append(unit))
            for unit in self._units
        ]
        try:
            yield
        except (RestartError, UnsupportedError):  # raised at the end of a pass
            raise
        except (
            Exception
        ) as error:  # whatever a model may raise; it is raised again when no other process waits any more
            if lost_contact(error) or len(self.division.ranks) > 1:  # another process has ended, or this one has to
                raise
            seen = {id(unit) for unit in entered}
            for unit in self._order:
                if id(unit) not in seen:
                    _gather_in_vain(unit)
            raise
        finally:
            for handle in handles:
                handle.remove()
        self._order = list({id(unit): unit for unit in entered}.values())

    def stream_unchecked(self, batch: Batch, sink: GradientSink, side: Side) -> BatchOutputs:
        """Stream the gradients of a batch, as part of a pass that has begun."""
        try:
            return super().stream(batch, sink, side)
        finally:
            self._partition()

    def gradient_share(self, name: str, gradient: Tensor) -> float:
        """Return the factor on this process' part of a reduced gradient; zero where another process counts for it.

        FSDP2 averages over the processes of its mesh. Of copies, the first one counts.
        """
        if name in self._others:
            return 0.0
        if is_sharded_tensor(gradient):
            whole: Any = gradient
            place = whole.device_mesh.get_coordinate()
            if any(p.is_replicate() and place[dim] for dim, p in enumerate(whole.placements)):
                return 0.0
        return float(self._averaged.get(name, 1))

    @contextmanager
    def watching(self, hooked_pass: HookedPass, selected: dict[int, str]) -> Iterator[None]:
        owned = self._owned(selected)

        def adopt(unit: nn.Module, inputs: Any) -> None:
            for module, own_name, name in owned[id(unit)]:
                parameter = module._parameters[own_name]
                if parameter is not None:
                    selected.setdefault(id(parameter), name)
                    hooked_pass.adopt(parameter, name)

        def adopt_slice(module: nn.Module, own_name: str, local: nn.Parameter) -> None:
            name = self._slices.names.get((id(module), own_name))
            if name in self.layout.names:
                selected.setdefault(id(local), name)
                hooked_pass.adopt(local, name)

        def adopt_gathered(unit: GatheredUnit) -> None:
            for parameter in unit.parameters:
                name = selected.get(id(parameter))
                if name is not None and not hooked_pass.stand_ins[name].numel():
                    hooked_pass.tracked.pop(id(parameter), None)
                    hooked_pass.adopt(parameter, name)

        handles = [unit.register_forward_pre_hook(adopt) for unit in fsdp_modules(self.model)]
        with (
            removing(handles),
            gathering(self.model, self._layers, adopt_gathered) if self._layers else nullcontext(),
            hooks_as_forward(self.model),
            self._slices.watched(adopt_slice, lambda: hooked_pass.bypass_depth > 0),
            super().watching(hooked_pass, selected),
        ):
            yield

    def _owned(self, selected: dict[int, str]) -> dict[int, list[tuple[nn.Module, str, str]]]:
        """List module, own name and name in the model of the attributed parameters of every FSDP2 unit, by `id`."""
        units = fsdp_modules(self.model)
        inner = {id(unit) for unit in units}
        found: dict[int, list[tuple[nn.Module, str, str]]] = {}
        for unit in units:
            found[id(unit)], left = [], [unit]
            while left:
                module = left.pop()
                found[id(unit)] += [
                    (module, own, selected[id(p)])
                    for own, p in module._parameters.items()
                    if p is not None and id(p) in selected
                ]
                left += [child for child in module.children() if id(child) not in inner]
        return found


def _gather_in_vain(unit: Any) -> None:
    try:
        unit.unshard()
        unit.reshard()
    except RuntimeError:  # the other processes are gone
        return
