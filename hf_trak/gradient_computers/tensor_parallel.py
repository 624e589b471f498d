"""Tensor parallelism: what it makes of the layers of a model, and which of it the engine covers.

There are layers with slices that a rule covers, modules that compute with their slices as plain tensors (experts),
whole parameters that see only a part of the heads, and layers that nothing covers.

transformers 5.23 puts a function of its own into the place of a layer's `forward`; torch 2.15 (`parallelize_module`)
registers hooks. Neither has a public name for what it has done, so that both are recognized by where they come from.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_trak._compat import own_parameters
from hf_trak.gradient_computers.environment import removing
from hf_trak.gradient_computers.hooked.rules.registry import Piece
from hf_trak.gradient_computers.hooked.rules.tensor_parallel import placed
from hf_trak.gradient_computers.hooked.workspace import OuterBlock
from hf_trak.runtime.sharding import is_sharded_tensor, slice_indices, tensor_parallel_ranks

_HOOKS_OF_TORCH = "torch.distributed.tensor._api"
_PARTIAL = "ReplicatedWithGradAllReduce"


def sliced_parameters(model: nn.Module) -> frozenset[str]:
    """List the parameters that tensor parallelism slices, differently in every process."""
    parameters = dict(model.named_parameters())
    ranks = tensor_parallel_ranks(model)
    return frozenset(name for name in ranks if any(one is not None for one in slice_indices(parameters[name])))


def partial_parameters(model: nn.Module) -> frozenset[str]:
    """List the whole parameters that see a part of the heads only, so that the gradients of processes add up."""
    return frozenset(
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if _PARTIAL in getattr(vars(module).get("forward"), "__qualname__", "")
        for name, _ in module.named_parameters(recurse=False)
    )


def _uses_slices(module: nn.Module) -> bool:
    forward = vars(module).get("forward")
    if not inspect.isfunction(forward) or isinstance(module, nn.Linear | nn.Embedding):
        return False
    style: Any = inspect.getclosurevars(forward).nonlocals.get("self")
    return hasattr(style, "should_use_local_tensors") and bool(style.should_use_local_tensors(module))


def uncovered(model: nn.Module, attributed: Iterable[str]) -> tuple[str, nn.Module] | None:
    """Find a divided module whose gradients nothing here computes.

    Args:
        model: the model.
        attributed: names of the attributed parameters.

    Returns:
        Its name and itself; `None` if there is none.
    """
    wanted = tensor_parallel_ranks(model).keys() & set(attributed)
    modules = dict(model.named_modules())
    for name in sorted(wanted):
        owner = name.rpartition(".")[0]
        module = modules[owner]
        layer = isinstance(module, nn.Linear | nn.Embedding) and ("forward" in vars(module) or _hooks_of_torch(module))
        if not layer and not _uses_slices(module):
            return owner, module
    return None


class Slices:
    """Puts the slices of modules, as plain tensors, into the places of their parameters while they compute.

    Attributes:
        names: names, in the model, of the parameters of these modules, by `id` of the module and their name in it.
    """

    def __init__(self, model: nn.Module) -> None:
        """
        Args:
            model: the model.
        """
        self._put: list[tuple[nn.Module, str, nn.Parameter, Any]] = []
        self._kept_alive: list[nn.Parameter] = []  # an `id` stays that of one tensor as long as the tensor lives
        self._modules = []
        self.names: dict[tuple[int, str], str] = {}
        self._held: dict[str, tuple[list[Tensor | None], torch.Size]] = {}
        for prefix, module in model.named_modules():
            if not _uses_slices(module):
                continue
            self._modules.append(module)
            for name, parameter in module.named_parameters(recurse=False):
                if is_sharded_tensor(parameter):
                    self.names[id(module), name] = f"{prefix}.{name}"
                    self._held[f"{prefix}.{name}"] = slice_indices(parameter), parameter.shape

    def placed(self, name: str, start: int, block: Tensor | OuterBlock) -> Iterator[Piece]:
        """Move columns of the gradient of a slice to their places in that of the whole parameter."""
        if name not in self._held:
            yield name, start, block
            return
        dense = block.dense() if isinstance(block, OuterBlock) else block
        yield from placed(name, start, dense, *self._held[name])

    def put(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Put the slices of one module into place, and return them by their names in it."""
        found = {}
        for name, parameter in own_parameters(module).items():
            if is_sharded_tensor(parameter):
                sharded: Any = parameter
                local = nn.Parameter(sharded.detach().to_local(), requires_grad=False)
                self._put.append((module, name, local, parameter))
                self._kept_alive.append(local)
                module._parameters[name] = found[name] = local
        return found

    def begin(self) -> None:
        """Forget the slices of the pass before."""
        self._kept_alive.clear()

    def take_away(self) -> None:
        """Put back what was there, where nothing else has been put there since."""
        while self._put:
            module, name, local, before = self._put.pop()
            if module._parameters[name] is local:
                module._parameters[name] = before

    @contextmanager
    def watched(
        self, adopt: Callable[[nn.Module, str, nn.Parameter], None], idle: Callable[[], bool]
    ) -> Iterator[None]:
        """Return a context in which slices are in place whenever their module computes, or is evaluated again.

        Args:
            adopt: takes module, name and slice.
            idle: tells that the module is evaluated again, which is not looked at.
        """

        def before(module: nn.Module, args: Any) -> None:
            if idle():
                return
            for name, local in self.put(module).items():
                adopt(module, name, local)

        def after(module: nn.Module, args: Any, result: Any) -> Any:
            if idle():
                return None
            self.take_away()
            if not isinstance(result, Tensor) or not result.requires_grad:
                return None
            result = result.view_as(result)  # its gradient comes before that of the module's own result

            def in_place(grad: Tensor) -> None:
                self.put(module)

            result.register_hook(in_place)
            return result

        handles = [module.register_forward_pre_hook(before) for module in self._modules]
        handles += [module.register_forward_hook(after) for module in self._modules]
        with removing(handles):
            try:
                yield
            finally:
                self.take_away()


@contextmanager
def hooks_as_forward(model: nn.Module) -> Iterator[None]:
    """Return a context in which layers of `parallelize_module` look like those of `tp_plan`: the hooks that torch has
    put on them are part of their `forward`, which takes and returns plain tensors.
    """
    changed = []
    try:
        for module in model.modules():
            hooks = _hooks_of_torch(module)
            if hooks is None or "forward" in vars(module) or not isinstance(module, nn.Linear | nn.Embedding):
                continue
            changed.append((module, dict(module._forward_pre_hooks), dict(module._forward_hooks)))
            for registered, taken in zip((module._forward_pre_hooks, module._forward_hooks), hooks, strict=True):
                for key in [key for key, hook in registered.items() if hook in taken]:
                    del registered[key]
            vars(module)["forward"] = partial(_forward, module, module.forward, *hooks)
        yield
    finally:
        for module, before, after in changed:
            del vars(module)["forward"]
            for registered, all_hooks in ((module._forward_pre_hooks, before), (module._forward_hooks, after)):
                registered.clear()
                registered.update(all_hooks)


def _forward(
    module: nn.Module, plain: Callable[..., Any], before: list[Any], after: list[Any], *args: Any, **kwargs: Any
) -> Any:
    for hook in before:
        changed = hook(module, args)
        if changed is not None:
            args = changed if isinstance(changed, tuple) else (changed,)
    result = plain(*args, **kwargs)
    for hook in after:
        changed = hook(module, args, result)
        result = result if changed is None else changed
    return result


def _hooks_of_torch(module: nn.Module) -> tuple[list[Any], list[Any]] | None:
    before, after = (
        [hook for hook in hooks.values() if getattr(hook, "__module__", None) == _HOOKS_OF_TORCH]
        for hooks in (module._forward_pre_hooks, module._forward_hooks)
    )
    return (before, after) if before or after else None
