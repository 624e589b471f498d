"""Access to models that ZeRO-3 of DeepSpeed partitions: gather parameters, or one layer at a time.

The only file that knows the internals of DeepSpeed (written against 0.19): the attributes that it gives to parameters
(`ds_id`, `ds_shape`, `ds_tensor`, `ds_status`) and to modules, the list of parameters in flight, and where its module
hooks come from. It is imported by who has partitioned the model, and never here.

DeepSpeed's own hooks are set aside for the time of a pass. They gather every module by itself, in the order in which
the rows of this process call them, and wait forever where a mixture of experts calls other ones elsewhere. Here whole
layers are gathered, the same ones in every process.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from hf_trak._compat import tree_leaves, unseen_by_modes

_OWN = "deepspeed."
_ATTRIBUTES = {
    "pre_bwd_fn", "post_bwd_fn", "applied_pre_backward_ref_cnt", "all_parameters", "_external_params",
    "_original_parameters",
}  # fmt: skip
"""What DeepSpeed puts on modules, beside attributes whose names begin with `ds_`."""


def is_partitioned(tensor: Any) -> bool:
    """Tell whether ZeRO-3 partitions a parameter, which is empty except while it is gathered."""
    return hasattr(tensor, "ds_id")


def is_zero(model: nn.Module) -> bool:
    """Tell whether ZeRO-3 partitions parameters of a model."""
    return any(is_partitioned(parameter) for parameter in model.parameters())


def can_gather() -> bool:
    """Tell whether DeepSpeed and its group of processes are there, without which a part remains a part."""
    return "deepspeed" in sys.modules and dist.is_available() and dist.is_initialized()


def whole_shape(tensor: Any) -> torch.Size:
    """Return the shape of a tensor, of the gathered one if ZeRO-3 partitions it."""
    return torch.Size(tensor.ds_shape) if is_partitioned(tensor) else tensor.shape


def part_of(parameter: Any) -> Tensor:
    """Return the part of a partitioned parameter that this process has."""
    return parameter.ds_tensor.data


def without_engine(model: Any) -> Any:
    """Return the model in an engine of DeepSpeed; anything else as it is."""
    deepspeed = sys.modules.get("deepspeed")
    return model.module if deepspeed is not None and isinstance(model, deepspeed.DeepSpeedEngine) else model


@contextmanager
def gathered(parameters: Sequence[Any], change: bool = False) -> Iterator[None]:
    """Return a context in which parameters are whole. All processes enter and leave it together.

    Args:
        parameters: some of them may be partitioned.
        change: whether values that are written in the first process last.
    """
    deepspeed: Any = sys.modules["deepspeed"]  # which has made these parameters
    with deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=0 if change else None):
        yield


def partition(model: nn.Module) -> None:
    """Free what is gathered of a model, also what DeepSpeed keeps whole or has begun to gather."""
    in_flight: Any = getattr(model, "ds_inflight_param_registry", None)
    while in_flight:
        in_flight.popitem()[1].wait()
    for parameter in model.parameters():
        held: Any = parameter
        if is_partitioned(held) and held.ds_status.name == "AVAILABLE":
            held.partition()


class GatheredUnit:
    """A layer whose parameters are gathered together, as `FSDPModule` is one.

    What autograd, views and stand-ins keep of a gathered parameter shares its storage. That is emptied when the layer
    is partitioned again, and filled when it is gathered for the backward pass.

    Attributes:
        module: the layer.
        parameters: those of it that are partitioned.
        is_layer: whether all that is in it is gathered with it. Other modules stay whole to the end of a backward
            pass, in which their own operations may come after those of modules in them.
    """

    def __init__(self, module: nn.Module, parameters: Sequence[Any], is_layer: bool) -> None:
        """
        Args:
            module: the layer.
            parameters: those to gather.
            is_layer: see the attribute.
        """
        self.module = module
        self.register_forward_pre_hook = module.register_forward_pre_hook
        self.parameters = [parameter for parameter in parameters if is_partitioned(parameter)]
        self.is_layer = is_layer
        self._context: Any = None
        self._kept: list[Tensor] = []

    def forget(self) -> None:
        """Partition the layer, and forget the storage of the pass before."""
        self.reshard()
        self._kept = []

    def shares(self, other: "GatheredUnit") -> bool:
        """Tell whether a parameter of this layer is one of another layer, too (tied embeddings)."""
        return not {id(parameter) for parameter in self.parameters}.isdisjoint(map(id, other.parameters))

    def unshard(self) -> None:
        """Gather the layer. All processes call this together."""
        if self._context is None and self.parameters:
            with unseen_by_modes(), torch.no_grad():
                self._gather()

    def _gather(self) -> None:
        self._context = gathered(self.parameters)
        self._context.__enter__()
        if not self._kept:
            self._kept = [parameter.data for parameter in self.parameters]
            return
        for parameter, before in zip(self.parameters, self._kept, strict=True):
            if parameter.data_ptr() != before.data_ptr() or not before.untyped_storage().size():
                before.untyped_storage().resize_(before.numel() * before.element_size())
                before.copy_(parameter.data)
            parameter.data = before

    def reshard(self) -> None:
        """Partition the layer."""
        if self._context is not None:
            with unseen_by_modes(), torch.no_grad():
                self._partition()

    def _partition(self) -> None:
        context, self._context = self._context, None
        parts = {parameter.ds_tensor.untyped_storage().data_ptr() for parameter in self.parameters}
        context.__exit__(None, None, None)
        for before in self._kept:
            storage = before.untyped_storage()
            # a single process gathers nothing: its part is the whole parameter
            if storage.data_ptr() not in parts and storage.size() == before.numel() * before.element_size():
                storage.resize_(0)


def units_of(model: nn.Module) -> list[GatheredUnit]:
    """List what is gathered together: the layers in outermost lists of modules, and every other module by itself.

    Of a model that ZeRO-3 does not partition, the list is empty.
    """
    if not is_zero(model):
        return []
    layers: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            known = {id(inner) for layer in layers for inner in layer.modules()}
            layers += [child for child in module if id(child) not in known and _has_parameters(child)]
    inside = {id(inner) for layer in layers for inner in layer.modules()}
    units = [GatheredUnit(layer, list(layer.parameters()), True) for layer in layers]
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if own and id(module) not in inside:
            units.append(GatheredUnit(module, own, False))
    return units


def _has_parameters(module: nn.Module) -> bool:
    return type(module).forward is not nn.ModuleList.forward and next(module.parameters(), None) is not None


@contextmanager
def gathering(
    model: nn.Module, units: Sequence[GatheredUnit], adopt: Callable[[GatheredUnit], None] = lambda unit: None
) -> Iterator[None]:
    """Return a context in which every layer is gathered while it computes, forward and backward.

    Args:
        model: the partitioned model.
        units: see [`units_of`].
        adopt: takes every layer that has been gathered for its forward pass.
    """
    handles: list[Any] = []

    def arm(unit: GatheredUnit) -> None:
        def before(module: nn.Module, args: Any) -> None:
            unit.unshard()
            adopt(unit)

        def arrive(grad: Tensor) -> None:
            for other in units:
                if other is not unit and (other.is_layer or other.shares(unit)):
                    other.reshard()
            unit.unshard()

        def after(module: nn.Module, args: Any, result: Any) -> Any:
            if torch._C._current_graph_task_id() != -1:  # activation checkpointing: its backward pass follows
                return None
            unit.reshard()
            if isinstance(result, Tensor):
                if result.requires_grad:
                    result = result.view_as(result)  # its gradient comes before that of the module's own result
                    result.register_hook(arrive)
                return result
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(arrive)
            return None

        handles.append(unit.module.register_forward_pre_hook(before, prepend=True))
        handles.append(unit.module.register_forward_hook(after))

    with hooks_set_aside(model):
        try:
            for unit in units:
                arm(unit)
            yield
        finally:
            for handle in handles:
                handle.remove()


@contextmanager
def attributes_set_aside(model: nn.Module) -> Iterator[None]:
    """Return a context in which modules are without the attributes and hooks that DeepSpeed has put on them."""
    taken: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for module in model.modules() if is_zero(model) else ():
        attributes = vars(module)
        names = [name for name in attributes if name.startswith("ds_") or name in _ATTRIBUTES]
        taken.append((attributes, {name: attributes.pop(name) for name in names}))
    try:
        with hooks_set_aside(model):
            yield
    finally:
        for attributes, removed in taken:
            attributes.update(removed)


@contextmanager
def hooks_set_aside(model: nn.Module) -> Iterator[None]:
    """Return a context in which no module has the hooks of DeepSpeed, and `F.linear` is that of torch.

    DeepSpeed's own keeps no view of a gathered matrix, which here share its storage.
    """
    linear = F.linear
    taken: list[tuple[Any, list[tuple[int, Any]], list[int]]] = []
    try:
        for module in model.modules():
            for hooks in (
                module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
            ):  # fmt: skip
                its = [key for key, hook in hooks.items() if str(getattr(hook, "__module__", "")).startswith(_OWN)]
                if its:
                    order = list(hooks)
                    taken.append((hooks, [(key, hooks.pop(key)) for key in its], order))
        if linear.__module__ is not None and linear.__module__.startswith(_OWN):
            F.linear = torch._C._nn.linear
        yield
    finally:
        F.linear = linear
        for hooks, removed, order in taken:
            hooks.update(removed)
            for key in order:
                if key in hooks:
                    hooks.move_to_end(key)
