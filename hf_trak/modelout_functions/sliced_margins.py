"""Margins over large vocabularies, with temporary tensors of some rows at a time.

The margins of T tokens under V logits each, as [`margin`] computes them, need six tensors of T · V numbers at once: a
mask, two masked copies, exponentials, and two gradients. Here only the logits themselves and their gradient have that
size, in the dtype of the logits; everything else is made for slices of the rows. A row is computed by the same
operations in the same order, so the results have the same bits on a CPU.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hf_trak.modelout_functions.deferred_logits import DeferredLogits
from hf_trak.modelout_functions.deferred_margins import margins_of
from hf_trak.modelout_functions.margins import margin

SLICE, SLICE_OF_GPUS = 2**22, 2**25
"""Logits in a slice. About three tensors of that size in float32 exist at a time: 48 MiB, and 384 MiB on a GPU."""


def sliced_margin(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute log(p_y / (1 − p_y)) at every place, as [`margin`] does.

    Args:
        logits: `(B, T, C)`, floating point, C ≥ 2; also deferred ones.
        labels: `(B, T)`, integers. The result is some finite number where one is outside of [0, C).

    Returns:
        `(B, T)`, float32 (float64 for float64 logits), differentiable, in forward mode and twice as well; once for
        deferred logits.
    """
    if isinstance(logits, DeferredLogits):
        return margins_of(logits, labels)
    if logits.numel() <= _slice_of(logits):
        return margin(logits, labels)
    return _SlicedMargin.apply(logits, labels)[0]


class _SlicedMargin(torch.autograd.Function):
    """Margins `(…, T)` of logits `(…, T, C)`, and the logsumexp of the other logits, which the backward pass needs."""

    @staticmethod
    def forward(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(logits.dtype, torch.float32)
        margins, others = (torch.empty(labels.shape, dtype=wide, device=logits.device) for _ in range(2))
        for place, rows in _slices(logits):
            values, (label, known) = rows.to(wide), _labels_of(labels[place], rows)
            correct = torch.where(known, values.gather(-1, label), 0.0)
            masked = values.scatter(-1, label, torch.where(known, -torch.inf, values.gather(-1, label)))
            others[place] = masked.logsumexp(dim=-1)
            margins[place] = correct.squeeze(-1) - others[place]
        return margins, others

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs, output[1])
        ctx.save_for_forward(*inputs)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        logits, labels, others = ctx.saved_tensors
        if torch.is_grad_enabled():  # the derivative is to be differentiated again
            with torch.enable_grad():
                values = margin(logits, labels)
            return torch.autograd.grad(values, logits, gradients[0], create_graph=True)[0], None
        found = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        for place, rows in _slices(logits):
            slope, (label, known) = gradients[0][place].unsqueeze(-1), _labels_of(labels[place], rows)
            values = rows.to(slope.dtype).sub(others[place].unsqueeze(-1)).exp_().mul_(-slope)
            values.scatter_(-1, label, torch.where(known, slope, values.gather(-1, label)))
            found[place] = values
        return found, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> tuple[Tensor, None]:
        logits, labels = ctx.saved_tensors
        wide = torch.promote_types(logits.dtype, torch.float32)
        values, change, (label, known) = logits.to(wide), tangent.to(wide), _labels_of(labels, logits)
        masked = values.scatter(-1, label, torch.where(known, -torch.inf, values.gather(-1, label)))
        correct = torch.where(known, change.gather(-1, label), 0.0).squeeze(-1)
        return correct - (masked.softmax(dim=-1) * change).sum(dim=-1), None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], logits: Tensor, labels: Tensor
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        in_front = [
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip((logits, labels), in_dims, strict=True)
        ]
        return _SlicedMargin.apply(*in_front), (0, 0)


def _slice_of(logits: Tensor) -> int:
    return SLICE_OF_GPUS if logits.is_cuda else SLICE


def _slices(logits: Tensor) -> Iterator[tuple[Any, Tensor]]:
    """Yield slices of logits `(…, T, C)` along T, with the index of each among the rows `(…, T)`.

    No slice but that of a single row has one row alone, whose sum torch would divide among threads, with other bits.
    """
    rows, classes = logits.shape[-2:]
    count = max(1, min(rows // 2, -(-rows * classes // _slice_of(logits))))
    edges = [rows * i // count for i in range(count + 1)]
    for sample in itertools.product(*map(range, logits.shape[:-2])):
        for first, last in itertools.pairwise(edges):
            place: Any = (*sample, slice(first, last))
            yield place, logits[place]


def _labels_of(labels: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return labels `(…, T)` as indices `(…, T, 1)`, 0 where one is no class, and a mask of those that are."""
    known = (labels >= 0) & (labels < logits.shape[-1])
    return torch.where(known, labels, 0).unsqueeze(-1), known.unsqueeze(-1)
