"""Random draws from a model's own predictions, one for every place of a row that carries a label.

A draw is a pure function of the seed, the row number, the place, the prediction, and whether it is the first draw or a
second one. The *place* of a label is its rank among the labels of its row (0, 1, 2, …), so the batch, the padding and
the device do not matter.

A class is drawn by the Gumbel-max rule: argmax_c (z_c + g_c), with g_c = −log(−log u_c) for independent uniform
numbers u_c, has the distribution softmax(z) (Maddison, Tarlow, Minka: "A* sampling", arXiv 1411.0030). A random number
for each of 50,000 classes would cost as much as a small model. So more than 256 classes are drawn in two steps, which
together have the same distribution: a group of 256 classes, with the logsumexp of its classes as its logit, and then a
class of that group.

The logits of a row differ in the last bits from batch to batch. Under this rule a difference δ changes a class with a
probability of about δ. The inverse of the cumulative distribution is less steady, because every class moves the
borders of all classes behind it: of 50,257 classes, differences of 3·10⁻⁵ changed 2 % of the labels, and none of 1,500
here.

Use of the generator (`hf_trak.kernels.philox`, stream `LABELS_1`): the position is the row number, and the last word
of the counter is the place, plus 2³¹ for second draws. Of the blocks, 0 has the uniform number of the place (its first
word), 1 … 64 the 256 numbers of the classes in a group, and 65 onwards those of the groups.
"""

from typing import Any

import torch
from torch import Tensor

from hf_trak.kernels.philox import MASK32, SEED_LIMIT, Stream, philox_4x32

GROUP = 256
"""Number of classes in a group. Part of the definition of a draw, as are the blocks below."""

UNIFORM_BLOCK = 0
CLASS_BLOCK = 1
GROUP_BLOCK = CLASS_BLOCK + GROUP // 4

_SECOND = 2**31
"""Added to the places of second draws."""

_SLICE = 2**22
"""Logits that are looked at together, so that temporary tensors stay small beside the logits themselves."""


class Draws:
    """The draws of the rows of a batch.

    Works under `torch.func.vmap` and `torch.func.grad`. Nothing that is drawn has a gradient.
    """

    def __init__(self, seed: int, rows: Tensor, second: bool = False) -> None:
        """
        Args:
            seed: seed in [0, 2⁶³).
            rows: row number of every sample, `(B,)`, int64, not negative.
            second: whether to draw again, independently of the first draws.

        Raises:
            ValueError: the seed is outside its range.
        """
        if not 0 <= seed < SEED_LIMIT:
            raise ValueError(f"`seed` is {seed}. Expected an integer in 0 … 2⁶³ − 1.")
        self.seed = seed
        self.rows = rows
        self._shift = _SECOND if second else 0

    def uniforms(self, labelled: Tensor) -> Tensor:
        """Draw a number in (0, 1) for every place.

        Args:
            labelled: marks the places that carry a label, `(B, T)`, boolean.

        Returns:
            `(B, T)`, float64, multiples of 2⁻³³; meaningless numbers in places without a label.
        """
        return self._numbers(places_of(labelled), UNIFORM_BLOCK, 1).squeeze(-1)

    def classes(self, logits: Tensor, labelled: Tensor) -> Tensor:
        """Draw a class for every place.

        Args:
            logits: `(B, T, C)`. Logits of −∞ behind the others change nothing, however many there are.
            labelled: marks the places that carry a label, `(B, T)`, boolean.

        Returns:
            `(B, T)`, int64; any class in places without a label.
        """
        places, width = places_of(labelled), logits.shape[1]
        step = max(1, _SLICE // max(1, logits.shape[0] * logits.shape[2]))
        with torch.no_grad():
            drawn = [
                self._drawn(logits[:, start : start + step], places[:, start : start + step])
                for start in range(0, max(width, 1), step)
            ]
        return torch.cat(drawn, dim=1)

    def log_likelihoods(self, logits: Tensor, labelled: Tensor) -> Tensor:
        """Draw a class for every place, and compute its log-probability.

        With m = z_y − logsumexp(other logits), log p_y = −softplus(−m): precise where p_y is close to 1, too.

        Args:
            logits: `(B, T, C)`, C ≥ 2.
            labelled: marks the places that carry a label, `(B, T)`, boolean.

        Returns:
            `(B, T)`, float32 (float64 for float64 logits), differentiable with respect to the logits; meaningless
            numbers in places without a label.
        """
        drawn = self.classes(logits, labelled).unsqueeze(-1)
        return torch.nn.functional.logsigmoid(_Margins.apply(_widened(logits), drawn)[0].squeeze(-1))

    def _drawn(self, logits: Tensor, places: Tensor) -> Tensor:
        logits = _widened(logits.detach())
        count = logits.shape[-1]
        if count <= GROUP:
            return (logits + self._gumbels(places, CLASS_BLOCK, count)).argmax(dim=-1)
        groups = _group_logits(logits)
        group = (groups + self._gumbels(places, GROUP_BLOCK, groups.shape[-1])).argmax(dim=-1, keepdim=True)
        classes = group * GROUP + torch.arange(GROUP, device=logits.device)
        inside = logits.gather(-1, classes.clamp(max=count - 1)).masked_fill(classes >= count, -torch.inf)
        drawn = (inside + self._gumbels(places, CLASS_BLOCK, GROUP)).argmax(dim=-1, keepdim=True)
        return classes.gather(-1, drawn).squeeze(-1)

    def _gumbels(self, places: Tensor, block: int, count: int) -> Tensor:
        return -(-self._numbers(places, block, count).log()).log()

    def _numbers(self, places: Tensor, block: int, count: int) -> Tensor:
        return _Uniforms.apply(self.rows.to(places.device), places + self._shift, self.seed, block, count)


def places_of(labelled: Tensor) -> Tensor:
    """Number the labels of every row: 0, 1, 2 … where `labelled` `(B, T)` holds, any number ≥ 0 elsewhere."""
    return (labelled.long().cumsum(dim=1) - 1).clamp(min=0)


def _widened(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _group_logits(logits: Tensor) -> Tensor:
    """Compute the logsumexp of every group of classes, `(…, groups)`. The last group may be smaller."""
    whole = logits.shape[-1] // GROUP * GROUP
    groups = [logits[..., :whole].unflatten(-1, (whole // GROUP, GROUP)).logsumexp(dim=-1)]
    if whole < logits.shape[-1]:
        groups.append(logits[..., whole:].logsumexp(dim=-1, keepdim=True))
    return torch.cat(groups, dim=-1)


class _Margins(torch.autograd.Function):
    """z_y − logsumexp(others) of logits z `(…, C)` and classes y `(…, 1)`: `(…, 1)`; and its derivatives, `(…, C)`.

    What autograd would compute, with fewer temporary tensors of the size of the logits.
    """

    @staticmethod
    def forward(logits: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
        others = logits.scatter(-1, drawn, -torch.inf)
        largest = others.amax(dim=-1, keepdim=True)
        total = others.sub_(largest).exp_().sum(dim=-1, keepdim=True)
        return logits.gather(-1, drawn) - (largest + total.log()), others.div_(-total).scatter_(-1, drawn, 1.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (derivatives,) = ctx.saved_tensors
        return derivatives * gradients[0], None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], logits: Tensor, drawn: Tensor
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        return _Margins.apply(*in_front(info.batch_size, in_dims, logits, drawn)), (0, 0)


class _Uniforms(torch.autograd.Function):
    """Uniform numbers in (0, 1) of rows `(…, B)` and places `(…, B, T)`: `(…, B, T, count)`, float64.

    An autograd function with a vmap rule of its own, because the generator works in place, which vmap cannot follow.
    """

    @staticmethod
    def forward(rows: Tensor, places: Tensor, seed: int, block: int, count: int) -> Tensor:
        blocks = torch.arange(block, block - (-count // 4), device=places.device) | (int(Stream.LABELS_1) << 24)
        rows = rows[..., None, None]
        words = philox_4x32((rows & MASK32, rows >> 32, blocks, places[..., None]), (seed & MASK32, seed >> 32))
        return torch.stack(words, dim=-1).flatten(-2)[..., :count].double().add_(0.5).mul_(2.0**-32)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        return (None,) * 5

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], rows: Tensor, places: Tensor, seed: int, block: int, count: int
    ) -> tuple[Tensor, int]:
        return _Uniforms.apply(*in_front(info.batch_size, in_dims[:2], rows, places), seed, block, count), 0


def in_front(size: int, dims: tuple[int | None, ...], *tensors: Tensor) -> list[Tensor]:
    """Put the dimension that `vmap` maps over first, where a tensor has one, and expand the others."""
    return [
        tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, dims, strict=True)
    ]
