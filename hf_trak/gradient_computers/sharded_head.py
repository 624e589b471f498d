"""The head of a language model that FSDP2 divides, for deferred logits.

Margins of deferred logits are taken after the forward pass of the model, and their gradients come before that of
anything else, so that the head has to be whole all that time. FSDP2 gathers parameters for the backward pass when the
gradient of an output comes back, and deferred logits are no tensor that has one. So the units around the head stay
gathered from the forward pass on, in all processes, of which some may have batches whose logits are small.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn
from torch.nn.utils import parametrize

from hf_trak._compat import class_before_fsdp, gathered_after_forward
from hf_trak.modelout_functions.deferred_logits import output_embedding
from hf_trak.runtime.sharding import fsdp_modules, tensor_parallel_ranks
from hf_trak.runtime.zero import is_zero

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


@contextmanager
def holding(model: nn.Module, head: nn.Linear) -> Iterator[None]:
    """Return a context in which the units of FSDP2 around a head are not freed after their forward pass."""
    with ExitStack() as stack:
        for unit in fsdp_modules(model):
            if any(module is head for module in unit.modules()):
                stack.enter_context(gathered_after_forward(unit))
        yield
