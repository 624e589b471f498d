"""The head of a language model whose logits are deferred: its gradients come from margins, slice by slice."""

from torch import Tensor

from hf_trak._compat import unseen_by_modes
from hf_trak.gradient_computers.hooked.batch_axis import BatchAxis
from hf_trak.gradient_computers.hooked.hooked_pass import BlockOutput, HookedPass
from hf_trak.gradient_computers.hooked.rules.linear import linear, linear_pieces
from hf_trak.gradient_computers.hooked.rules.registry import RegisteredRule
from hf_trak.modelout_functions.deferred_logits import DeferredLogits, NotDeferrableError


def emit_slice(own: dict[str, str], blocks: BlockOutput, size: int, first: int, grad: Tensor, hidden: Tensor) -> None:
    """Emit the per-sample gradients of some rows of a head.

    Both sequences of a pair are one sample.

    Args:
        own: names, in the model, of the attributed parameters of the head, by their names in it.
        blocks: where they go.
        size: B, the number of samples.
        first: the first row.
        grad: `(B · sequences, T, rows)`, gradient of what the head returns for these words.
        hidden: `(B · sequences, T, d)`, its inputs.
    """
    grad, hidden = (tensor.reshape(size, -1, tensor.shape[-1]) for tensor in (grad, hidden))
    pieces = linear_pieces(
        hidden, grad, blocks.workspace, "weight" in own, "bias" in own, takes_outer=blocks.takes_outer
    )
    with unseen_by_modes():  # rules and sinks work on plain tensors
        for name, start, block in pieces:
            before = first * hidden.shape[-1] if name == "weight" else first
            blocks.emit(own[name], before + start, block)


def receive_deferred(
    hooked_pass: HookedPass,
    rule: RegisteredRule,
    own: dict[str, str],
    logits: DeferredLogits,
    axes: tuple[BatchAxis, BatchAxis],
) -> None:
    """Have the gradients of a head emitted in the backward pass of the margins of its logits.

    Args:
        hooked_pass: the pass.
        rule: the rule of the head.
        own: names, in the model, of the attributed parameters of the head, by their names in it.
        logits: what the head returned.
        axes: batch dimensions of its input and of its output.

    Raises:
        NotDeferrableError: the batch is not in the first dimension, sequences of a sample are not next to each
            other, or linear layers were given another rule.
    """
    if axes[0] != axes[1] or axes[0] != BatchAxis(0, axes[0].fold):
        raise NotDeferrableError("the batch is not in the first dimension of the hidden states")
    if rule.rule is not linear:
        raise NotDeferrableError("the rule of linear layers was replaced")

    def receive(first: int, grad: Tensor, hidden: Tensor) -> None:
        hooked_pass.received(lambda: emit_slice(own, hooked_pass.blocks, hooked_pass.size, first, grad, hidden))

    logits.head.receive = receive
