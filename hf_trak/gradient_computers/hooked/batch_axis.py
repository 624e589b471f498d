"""The batch dimension of a tensor that some layer sees, found by comparing it with the pass of one sample alone.

Guessing from sizes would confuse T with B as soon as they are equal. A pass of one sample shows every dimension as it
is without the batch; the dimension that grows with B carries it.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_trak.modelout_functions.deferred_logits import DeferredLogits


class UnsupportedError(Exception):
    """An operation whose per-sample gradient the hooked engine cannot take where it stands."""


_CLEAR = 0.01
"""Relative difference of folded rows from which their order can be told: more than the rounding of half precision."""


@dataclass(frozen=True)
class BatchAxis:
    """The dimension of a tensor that carries the batch.

    Attributes:
        dim: the dimension. Its size is B · `fold`.
        fold: rows per sample (windows, flattened tokens).
        major: whether the rows of one sample are neighbours; otherwise the samples of one row are (sequence-first
            layouts).
    """

    dim: int
    fold: int = 1
    major: bool = True

    def rows_first(self, tensor: Tensor) -> Tensor:
        """Bring the batch to the front: `(B, *)`, or `(B, fold, *)` where rows are folded."""
        tensor = tensor.movedim(self.dim, 0)
        if self.fold == 1:
            return tensor
        rest = tensor.shape[1:]
        if self.major:
            return tensor.reshape(-1, self.fold, *rest)
        return tensor.reshape(self.fold, -1, *rest).transpose(0, 1)

    def sample(self, tensor: Tensor, index: int) -> Tensor:
        """Cut out the part of one sample, in the shape that it has when the sample is alone."""
        if self.fold == 1:
            return tensor.narrow(self.dim, index, 1)
        return self.rows_first(tensor)[index].movedim(0, self.dim)


@dataclass(frozen=True)
class TensorTrace:
    """A tensor of the pass of one sample.

    Attributes:
        shape: its shape.
        signature: one number per row, by which rows are recognized in a batch; `None` if there is only one row.
    """

    shape: torch.Size
    signature: Tensor | None

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorTrace":
        """Trace a tensor. Rows get a signature only if there are several, because only those may be folded."""
        signature = None
        if tensor.layout is torch.strided and tensor.ndim > 0 and tensor.shape[0] > 1 and tensor.numel() > 0:
            signature = _signature(tensor)
        return cls(tensor.shape, signature)


def _signature(tensor: Tensor) -> Tensor:
    """Compute one number per row; of deferred logits, whose rows are those of their hidden states, from these."""
    tensor = tensor.hidden if isinstance(tensor, DeferredLogits) else tensor
    rows = tensor.detach().reshape(tensor.shape[0], -1)
    # random, not constant weights: normalized rows all have the same sum
    weights = torch.sin(torch.arange(1, rows.shape[1] + 1, device=rows.device, dtype=torch.float32) * 1.7)
    return rows.to(torch.float32) @ weights


@dataclass
class RowOrders:
    """The facts that the tensors of a pass have shown about the order of folded rows.

    Attributes:
        shown: the values of [`BatchAxis.major`] of tensors whose rows differ, by fold.
        presumed: folds for which a tensor came before any that shows it.
    """

    shown: dict[int, set[bool]] = field(default_factory=dict)
    presumed: set[int] = field(default_factory=set)


def batch_axis(trace: TensorTrace, tensor: Tensor, size: int, orders: RowOrders) -> BatchAxis | None:
    """Find the dimension of `tensor` that carries `size` samples.

    Where all folded rows are the same (embedded token types, positions), either order fits them, but not their
    gradients: it is then the order of other tensors of the pass, whose rows differ. Before any of these, rows of a
    sample are presumed to be neighbours; a tensor that then shows the contrary is an error.

    Args:
        trace: the same tensor when one sample was alone.
        tensor: the tensor of a batch.
        size: B.
        orders: what tensors of the pass have shown so far. What this one shows is added.

    Returns:
        `BatchAxis` or `None`: `None` if the tensor has no batch dimension.

    Raises:
        UnsupportedError: the shapes do not differ by exactly one dimension that is `size` times as large, or the
            order of folded rows cannot be told.
    """
    alone, together = trace.shape, tensor.shape
    if alone == together:
        return None
    dims = [d for d in range(len(together)) if len(alone) == len(together) and alone[d] != together[d]]
    if len(dims) != 1 or together[dims[0]] != size * alone[dims[0]]:
        raise UnsupportedError(f"a tensor of shape {tuple(alone)} for one sample has {tuple(together)} for {size}")
    dim = dims[0]
    fold = alone[dim]
    if fold == 1:
        return BatchAxis(dim)
    if dim != 0 or trace.signature is None:
        raise UnsupportedError(f"the batch is folded into dimension {dim} of shape {tuple(together)}")
    # sample 0 is the one that was traced: are its rows the first `fold`, or every size-th?
    signature = _signature(tensor)
    major = torch.linalg.vector_norm(signature[:fold] - trace.signature)
    minor = torch.linalg.vector_norm(signature[::size] - trace.signature)
    best, scale = torch.minimum(major, minor), torch.linalg.vector_norm(trace.signature)
    if not bool(best <= 0.05 * scale + 1e-6):
        raise UnsupportedError(f"the rows of shape {tuple(together)} belong to samples in no recognizable order")
    shown = orders.shown.setdefault(fold, set())
    if bool((major - minor).abs() > _CLEAR * scale):
        shown.add(bool(major < minor))
        if fold in orders.presumed and shown != {True}:
            raise UnsupportedError(f"the rows of shape {tuple(together)} are in another order than was presumed")
        return BatchAxis(dim, fold, bool(major < minor))
    if len(shown) == 2:
        raise UnsupportedError(f"the rows of shape {tuple(together)} are the same in either order of samples and rows")
    if not shown:
        orders.presumed.add(fold)
    return BatchAxis(dim, fold, False not in shown)
