"""The one place that reaches into the internals of torch, transformers, accelerate and bitsandbytes.

Each entry names the version that it was written against, and says when it can go. A release that changes such an
internal then breaks one function here, and nothing else has to be searched. This module imports nothing of `hf_trak`,
and none of the libraries but torch.
"""

import copy
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_unflatten as tree_unflatten

# torch 2.15. `torch.utils._pytree` (the three functions above) is what `torch.func` itself nests results with, and has
# no public name. It can go when `torch.utils.pytree` becomes public.

# torch 2.15. The private base class of all batch norms, which other libraries derive from as well. It can go when
# torch gives it a public name.
BatchNormBase = nn.modules.batchnorm._BatchNorm


def class_if_imported(module: str, name: str) -> Any:
    """Return a class if its module has been imported.

    `transformers.modeling_utils` and `transformers.generation` take seconds to import, for which an `isinstance` of
    somebody's own model need not wait: whatever is of a class has imported the class's module.

    Args:
        module: full name of the module.
        name: name of the class in it.

    Returns:
        The class or `None`.
    """
    imported = sys.modules.get(module)
    return None if imported is None else getattr(imported, name)


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return a module's own parameters by name, without those of its children; `None` for one that is switched off.

    torch 2.15: `named_parameters(recurse=False)` leaves out what is `None` (`bias=False`) and what appears twice. This
    can go when it has an option to keep both.
    """
    return module._parameters


def class_before_fsdp(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before `fully_shard` put one of its own below `FSDPModule` and it.

    torch 2.15: the class is made of these two bases. It can go when `FSDPModule` tells what it was.
    """
    return type(module).__bases__[1]


def fsdp_mesh(module: nn.Module) -> Any:
    """Return the mesh over which `fully_shard` divides the parameters of a module, `None` if it has none of its own.

    torch 2.15: nothing public tells it. It can go when `FSDPModule` has it as an attribute.
    """
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    groups = state._fsdp_param_groups
    return groups[0].mesh_info.mesh if groups else None


@contextmanager
def gathered_after_forward(module: nn.Module) -> Iterator[None]:
    """Return a context in which FSDP2 does not free the parameters of a module when its forward pass ends.

    torch 2.15: `set_reshard_after_forward` does that, too, and nothing public tells what to set afterwards.
    """
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    groups = list(state._fsdp_param_groups)

    def reshard(group: Any) -> None:
        if group._training_state.name != "FORWARD":
            type(group).reshard(group)

    for group in groups:
        vars(group)["reshard"] = partial(reshard, group)
    try:
        yield
    finally:
        for group in groups:
            del vars(group)["reshard"]


def padding_of_both_sides(conv: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> list[int]:
    """Return the padding before and behind every spatial dimension, last dimension first, as `F.pad` takes it.

    torch 2.15: a convolution computes this list in its constructor, for `padding="same"` from kernel and dilation. It
    can go when the list has a public name.
    """
    return conv._reversed_padding_repeated_twice


def unseen_by_modes() -> AbstractContextManager[None]:
    """Return a context in which no `TorchFunctionMode` sees the calls of torch functions.

    torch 2.15: the only way to leave a mode from inside, without which each operation and each look at a shape goes
    through Python. It can go when `torch.overrides` has a public context that does the same.
    """
    return torch._C.DisableTorchFunction()


def _never(*args: Any) -> bool:
    return False


def _opened(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copy a Python function of torch, without its first step, which hands the whole call to the active mode."""
    if not isinstance(function, types.FunctionType):
        raise TypeError(f"{function!r} is not a Python function. Expected one, as in torch 2.15.")
    names = {**function.__globals__, "has_torch_function": _never}
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


# torch 2.15. `F.multi_head_attention_forward` takes the projections of `nn.MultiheadAttention` as arguments, and a
# mode sees one opaque call; in the copy it sees every inner operation. The copy can go when torch lets a mode decline
# a call, or when `nn.MultiheadAttention` calls its projections as modules.
opened_attention = _opened(F.multi_head_attention_forward)

# torch 2.15. `torch.autograd.backward` runs with all modes switched off, and with it whatever activation checkpointing
# computes again; in the copy they stay on. It can go when checkpointing restores the modes of the first forward pass.
opened_backward = _opened(torch.autograd.backward)


@contextmanager
def mask_code_traceable() -> Iterator[None]:
    """Let the mask code of transformers run under `torch.func.vmap`, inside this context alone.

    The mask code looks for masks that are all true with `.all()`, which has no meaning under vmap. Told that it is
    being traced, it builds the full mask instead, which gives the same values.

    transformers 5.24: `is_tracing` and `torch_compilable_check` are imported by name into many modules. This can go
    when `is_tracing` recognizes the transforms of `torch.func`.
    """
    replaced: list[tuple[Any, str, Any]] = []
    utils = sys.modules.get("transformers.utils.import_utils")
    try:
        for name, answer in (("is_tracing", _yes), ("torch_compilable_check", _unchecked)):
            original: Any = getattr(utils, name, None)
            if original is None:  # transformers is not loaded, or does not have this function
                continue
            for module in [m for key, m in sys.modules.items() if key.startswith("transformers.")]:
                # `is` on the module's own dict: attribute access would trigger transformers' lazy imports
                if getattr(module, "__dict__", {}).get(name) is original and module is not utils:
                    replaced.append((module, name, original))
                    setattr(module, name, answer)
        yield
    finally:
        for module, name, original in replaced:
            setattr(module, name, original)


def _yes(tensor: Any = None) -> bool:
    return True


def _unchecked(cond: Any, msg: Any, error_type: type[Exception] = ValueError) -> None:
    """Skip a data-dependent input check, which cannot run under vmap; an ordinary forward pass makes it."""


def has_foreign_forward(module: nn.Module) -> bool:
    """Tell whether somebody has replaced `forward` of this one module, which then may compute anything.

    accelerate 1.15: its own wrappers, which move weights and inputs between devices, mark the module with `_hf_hook`
    and compute the same as before. The exception can go when accelerate uses hooks of torch.
    """
    return "forward" in vars(module) and not hasattr(module, "_hf_hook")


_PACKS = "support_avx512bf16_for_cpu"
"""bitsandbytes 0.50: this attribute of every `Linear4bit` lets it rewrite its weights for inference on CPUs with
bfloat16 instructions, when its input needs no gradient. That rounds the scales, and no gradient passes through such a
layer any more. The next two functions can go when bitsandbytes keeps the weights that it was given."""


@contextmanager
def keeping_4bit_weights(model: nn.Module) -> Iterator[None]:
    """Keep the 4-bit layers of bitsandbytes from rewriting their weights for inference, inside this context."""
    saved: list[tuple[nn.Module, Any]] = []
    try:
        for module in model.modules() if "bitsandbytes" in sys.modules else ():
            if module.__dict__.get(_PACKS):
                saved.append((module, module.__dict__[_PACKS]))
                setattr(module, _PACKS, False)
        yield
    finally:
        for module, value in saved:
            setattr(module, _PACKS, value)


def packed_4bit_layer(model: nn.Module) -> tuple[str, str] | None:
    """Find a 4-bit layer of bitsandbytes that has rewritten its weights for inference.

    Returns:
        The name of the first such layer, and of the attribute that keeps a layer from it; `None` if there is none.
    """
    for name, module in model.named_modules() if "bitsandbytes" in sys.modules else ():
        if _PACKS in module.__dict__:
            state = getattr(getattr(module, "weight", None), "quant_state", None)
            if getattr(state, "packing_format_for_cpu", False):
                return name, _PACKS
    return None


def set_group_timeout(group: Any, timeout: timedelta) -> None:
    """Change how long the operations of a process group wait.

    torch 2.11 has a private function for it, 2.15 also `torch.distributed.set_timeout`. This can go when the oldest
    torch that hf_trak supports has the latter.
    """
    if hasattr(torch.distributed, "set_timeout"):
        torch.distributed.set_timeout(timeout, group)
    else:
        torch.distributed.distributed_c10d._set_pg_timeout(timeout, group)


@contextmanager
def accelerate_state_set_aside() -> Iterator[None]:
    """Let `Accelerator` and `Trainer` start anew inside this context, and give them back what they knew afterwards.

    accelerate 1.15: the state is shared by all objects of three classes. This can go when accelerate can set its state
    aside itself.
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState

    kept = [(state, dict(state._shared_state)) for state in (PartialState, AcceleratorState, GradientState)]
    for state, _ in kept:
        state._shared_state.clear()
    try:
        yield
    finally:
        for state, content in kept:
            state._shared_state.clear()
            state._shared_state.update(content)


def collator_of_used_columns(trainer: Any) -> Callable[[list[Any]], Any]:
    """Return the collator of a `Trainer`, which first drops the columns that the model does not take, if it is to.

    transformers 5.23: `Trainer` wraps its collator where it builds its own data loader. This can go when the wrapped
    collator has a public name.
    """
    return trainer._get_collator_with_removed_columns(trainer.data_collator)


def counted_items(trainer: Any, batches: Sequence[Any]) -> float | None:
    """Return what a `Trainer` divides the loss of some accumulated batches by; `None` where it takes their means.

    Labels of other processes are not added: all count the same batches.

    transformers 5.23: the rule depends on the class of the model, and is not in public. This can go when it is.
    """
    trainer, args = copy.copy(trainer), copy.copy(trainer.args)
    args.average_tokens_across_devices, trainer.args = False, args
    found = trainer._get_num_items_in_batch(list(batches), torch.device("cpu"))
    return None if found is None or not trainer.model_accepts_loss_kwargs else float(found)
