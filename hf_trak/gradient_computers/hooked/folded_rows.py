"""Layers with exactly one leading dimension, into which a model may fold several rows per sample (windows, frames)."""

from collections.abc import Iterable, Iterator

from torch import Tensor

from hf_trak.gradient_computers.hooked.batch_axis import BatchAxis
from hf_trak.gradient_computers.hooked.outer import OuterBlock
from hf_trak.gradient_computers.hooked.rules.registry import Piece


def aligned_rows(
    x: Tensor, x_axis: BatchAxis, grad: Tensor, grad_axis: BatchAxis, rows: bool
) -> tuple[Tensor, Tensor]:
    """Bring the batch of an input and an output gradient to the front.

    Args:
        x: the input.
        x_axis: its batch dimension.
        grad: the gradient of the output.
        grad_axis: the batch dimension of the output.
        rows: whether the rule takes one leading dimension, see [`RegisteredRule`].

    Returns:
        Both as `(B, *)`; folded rows as `(B, fold, *)`, or as `(B · fold, *)` if `rows`.
    """
    x, grad = x_axis.rows_first(x), grad_axis.rows_first(grad)
    if rows:
        x = x.flatten(0, 1) if x_axis.fold > 1 else x
        grad = grad.flatten(0, 1) if grad_axis.fold > 1 else grad
    return x, grad


def sum_rows(pieces: Iterable[Piece], size: int, fold: int) -> Iterator[Piece]:
    """Add up the rows of each sample: pieces of `(size · fold, n)` become `(size, n)`."""
    for name, start, block in pieces:
        if fold == 1:
            yield name, start, block
        elif isinstance(block, OuterBlock):
            yield name, start, block.joined(fold)
        else:
            yield name, start, block.view(size, fold, -1).sum(1)
