"""Margins, probabilities and likelihoods of classification outputs, in a form that neither overflows nor cancels.

With m = logit_y − logsumexp(other logits):

    p_y = sigmoid(m)        log(p_y / (1 − p_y)) = m        1 − p_y = sigmoid(−m)        log p_y = −softplus(−m)

so everything follows from m, and 1 − p is never formed. (`log p − log(1 − p)` is infinite from m ≈ 17 in float32 and
from m ≈ 6 in bfloat16.) Half-precision logits are widened to float32 first. All functions run under `torch.func.vmap`
and `torch.func.grad`: there is no indexing by values and no `.item()`.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from hf_trak._compat import unseen_by_modes
from hf_trak.modelout_functions.deferred_logits import DeferredLogits, LinearHead, Step
from hf_trak.modelout_functions.draws import in_front


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute log(p_y / (1 − p_y)) of every sample (TRAK paper, arXiv 2303.14186, Section 3.3).

    Args:
        logits: `(B, C)`, floating point, C ≥ 2.
        labels: `(B,)`, integers in [0, C). Their values are not checked here; see `batches.check_labels`.

    Returns:
        `(B,)`, float32 (float64 for float64 logits), differentiable.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    label, known = _labels_of(labels, logits)
    picked = logits.gather(-1, label)
    others = logits.scatter(-1, label, torch.where(known, -torch.inf, picked))
    return torch.where(known, picked, 0.0).squeeze(-1) - others.logsumexp(dim=-1)


def error_probability(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Compute q = 1 − softmax(logits / T)_y, exact to rounding however close to 1 the probability is. Shape `(B,)`."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.sigmoid(-margin(logits / temperature, labels))


def log_likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute log p_y of every sample, minus its cross-entropy loss. Shape `(B,)`."""
    return torch.nn.functional.logsigmoid(margin(logits, labels))


CHUNK = 2**24

"""Logits in a chunk of positions, for plain autograd."""


def margins_of(logits: DeferredLogits, labels: Tensor) -> Tensor:
    """Compute log(p_y / (1 − p_y)) at every position, as [`margin`] does of whole logits.

    Margins of the same logits and labels are computed once: a second call gets the values, without a graph.

    Args:
        logits: `(B, T, V)`.
        labels: `(B, T)`, integers. The result is some finite number where one is outside of [0, V).

    Returns:
        `(B, T)`, float32 (float64 for float64 logits), differentiable once.
    """
    hidden = logits.hidden[:, logits.first : logits.first + logits.shape[1]]
    head = logits.head
    if head.chunked:
        return _margins_of_chunks(hidden, labels, head, logits.steps)
    with unseen_by_modes():
        if not torch.is_grad_enabled():
            for other, given, steps, values in head.taken:
                if _same_memory(other, hidden) and steps == logits.steps and torch.equal(given, labels):
                    return values
        anchor = torch.zeros((), device=hidden.device, requires_grad=head.receive is not None)
        places = _labelled_places(labels, logits.shape[2])
        rows = hidden.gather(1, places.unsqueeze(-1).expand(-1, -1, hidden.shape[2]))
        taken: Tensor = _DeferredMargin.apply(anchor, rows, labels.gather(1, places), head, logits.steps)
        found = taken.new_zeros(labels.shape).scatter(1, places, taken)
        head.taken.append((hidden.detach(), labels, logits.steps, found.detach()))
    return found


def _labelled_places(labels: Tensor, classes: int) -> Tensor:
    """Return the positions of labels `(B, T)` that are classes, and of as many others as make rows equally long.

    Prompts, padding and words that are not masked need no logits.
    """
    known = (labels >= 0) & (labels < classes)
    longest = max(1, int(known.sum(dim=1).max()))
    if longest == labels.shape[1]:
        return torch.arange(longest, device=labels.device).expand_as(labels)
    return known.int().argsort(dim=1, descending=True, stable=True)[:, :longest]


def _margins_of_chunks(hidden: Tensor, labels: Tensor, head: LinearHead, steps: tuple[Step, ...]) -> Tensor:
    """Compute margins by plain autograd, where the logits of a chunk are computed again for the backward pass."""
    size = head.weight.shape[0]

    def of(hidden: Tensor, labels: Tensor) -> Tensor:
        return margin(_logits_of_slice(hidden, head.weight, head.bias, (0, size), steps), labels)

    count = max(1, CHUNK // size)
    rows = zip(hidden.flatten(0, 1).split(count), labels.flatten().split(count), strict=True)
    chunks = [checkpoint(of, *chunk, use_reentrant=False) for chunk in rows]
    return torch.cat(chunks).view(labels.shape)


class _DeferredMargin(torch.autograd.Function):
    """Margins `(B, T)` of hidden states `(B, T, d)`. `anchor` has a gradient where the head is differentiated."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, hidden: Tensor, labels: Tensor, head: LinearHead, steps: tuple[Step, ...]
    ) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            margins, others = _summed(head.inputs(hidden).flatten(0, 1), labels.flatten(), head, steps)
        ctx.save_for_backward(hidden, labels, others)
        ctx.head, ctx.steps = head, steps
        return margins.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, None, None, None]:
        hidden, labels, others = ctx.saved_tensors
        head: LinearHead = ctx.head
        slopes, rows, targets = gradients[0].reshape(-1, 1), head.inputs(hidden), labels.flatten()
        flat = rows.flatten(0, 1)
        total = torch.zeros(flat.shape, dtype=torch.promote_types(flat.dtype, torch.float32), device=flat.device)
        with unseen_by_modes(), torch.autocast(hidden.device.type, enabled=False):
            for first, last in head.slices(len(flat)):
                weight, bias = head.words(first, last)
                grad = _gradient_of_slice(flat, weight, bias, (first, last), ctx.steps, targets, others, slopes)
                if ctx.needs_input_grad[1]:
                    _add_product(total, grad, weight)
                if head.receive is not None:
                    head.receive(first, grad.view(*rows.shape[:2], -1), rows)
        return None, total.view(hidden.shape).to(hidden.dtype), None, None, None


def _summed(hidden: Tensor, labels: Tensor, head: LinearHead, steps: tuple[Step, ...]) -> tuple[Tensor, Tensor]:
    """Compute margins of `(N, d)` and labels `(N,)`, and log Σ exp of the other logits, both `(N,)`."""
    correct = others = None
    for first, last in head.slices(len(hidden)):
        z = _logits_of_slice(hidden, *head.words(first, last), (first, last), steps)
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        place, inside = _places(labels, first, last)
        picked = z.gather(-1, place)
        z = z.scatter_(-1, place, torch.where(inside, -torch.inf, picked))
        here, sums = torch.where(inside, picked, 0.0).squeeze(-1), z.logsumexp(dim=-1)
        correct = here if correct is None else correct + here
        others = sums if others is None else torch.logaddexp(others, sums)
    assert correct is not None and others is not None
    return correct - others, others


def _logits_of_slice(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, words: tuple[int, int], steps: tuple[Step, ...]
) -> Tensor:
    z = F.linear(hidden, weight, bias)
    for step in steps:
        z = step(z, *words)
    return z


def _gradient_of_slice(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    words: tuple[int, int],
    steps: tuple[Step, ...],
    labels: Tensor,
    others: Tensor,
    slopes: Tensor,
) -> Tensor:
    """Compute the gradient `(N, words)` of Σ slopes · margins with respect to what the head returns for some words."""
    raw = F.linear(hidden, weight, bias)
    z = raw
    if steps:
        raw.requires_grad_()
        with torch.enable_grad():
            for step in steps:
                z = step(z, *words)
    place, inside = _places(labels, *words)
    in_place = not steps and z.dtype == others.dtype
    values = z.sub_(others.unsqueeze(-1)) if in_place else z.detach() - others.unsqueeze(-1)
    values.exp_().mul_(-slopes)
    values.scatter_(-1, place, torch.where(inside, slopes, values.gather(-1, place)))
    grad = values.to(z.dtype)
    return torch.autograd.grad(z, raw, grad)[0] if steps else grad


def _places(labels: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Return where labels `(N,)` are among the words of a slice, `(N, 1)`, and a mask of those that are."""
    inside = (labels >= first) & (labels < last)
    return torch.where(inside, labels - first, 0).unsqueeze(-1), inside.unsqueeze(-1)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right`; half precision is added up in float32."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _same_memory(left: Tensor, right: Tensor) -> bool:
    return left.data_ptr() == right.data_ptr() and left.shape == right.shape and left.stride() == right.stride()


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
        return _SlicedMargin.apply(*in_front(info.batch_size, in_dims, logits, labels)), (0, 0)


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
    return torch.where(known, labels, 0).long().unsqueeze(-1), known.unsqueeze(-1)
