"""Embedding tables: only rows that a batch looks up have a gradient."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from hf_trak.gradient_computers.hooked.rules.registry import LayerCall, Piece, register_layer_rule
from hf_trak.gradient_computers.hooked.workspace import Workspace
from hf_trak.runtime.transfers import sent_to_device

MERGE_ELEMENTS, MERGE_ELEMENTS_OF_GPUS = 1 << 16, 1 << 23
"""Two touched rows go into one block when the zeros between them are fewer than this: about the cost of a block of its
own, which on a GPU is the time of some kernel launches."""


def embedding_pieces(
    ids: Tensor, grad: Tensor, workspace: Workspace, rows: int, padding_idx: int | None = None
) -> Iterator[Piece]:
    """Yield slices of Σ_t [ids[b, t] = v] · grad[b, t, :] over runs of table rows v that the batch touches.

    Rows that no sample looks up are left out, except in short gaps: their gradient is zero, and a vocabulary is much
    larger than a batch.

    Args:
        ids: `(B, *)`, integers; negative ones count from the last row. In host memory; elsewhere the host waits for
            them.
        grad: `(B, *, D)`.
        workspace: where the slices are written.
        rows: number of rows of the table.
        padding_idx: the row without a gradient; `None` if there is none.
    """
    size, width = grad.shape[0], grad.shape[-1]
    flat = ids.cpu().numpy().reshape(-1) % rows
    order = np.argsort(flat, kind="stable")
    if padding_idx is not None:
        order = order[flat[order] != padding_idx % rows]
    flat, sample = flat[order], order // max(1, flat.size // size)
    step = workspace.rows(size, width, grad.dtype, rows)
    gap = max(1, (MERGE_ELEMENTS_OF_GPUS if grad.is_cuda else MERGE_ELEMENTS) // (size * width))
    runs = np.array(list(_runs(np.unique(flat).tolist(), gap, step)), dtype=np.int64).reshape(-1, 2)
    edges = np.searchsorted(flat, runs + np.array([0, 1]))
    firsts, heights = (np.repeat(values, np.diff(edges)[:, 0]) for values in (runs[:, 0], np.diff(runs)[:, 0] + 1))
    # all numbers in one transfer
    order, target = sent_to_device(torch.from_numpy(np.stack([order, sample * heights + flat - firsts])), grad.device)
    grad = grad.reshape(-1, width)[order]
    for (first, last), (low, high) in zip(runs.tolist(), edges.tolist(), strict=True):
        block = workspace.empty((size, last + 1 - first, width), grad).zero_()
        _add_rows(block.view(-1, width), target[low:high], grad[low:high])
        yield "weight", first * width, block.view(size, -1)


def _add_rows(table: Tensor, index: Tensor, rows: Tensor) -> None:
    """Do `table[index[i]] += rows[i]` in the same order in every run, which `index_add_` does not on a GPU."""
    if table.is_cuda:
        table.index_put_((index,), rows, accumulate=True)
    else:
        table.index_add_(0, index, rows)


def _runs(values: list[int], gap: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield runs `(first, last)` of sorted values, merged over gaps up to `gap`, no longer than `step`."""
    start = 0
    for i in range(1, len(values) + 1):
        if i == len(values) or values[i] - values[i - 1] > gap or values[i] - values[start] >= step:
            yield values[start], values[i - 1]
            start = i


def _plain(module: nn.Module) -> bool:
    # max_norm rewrites rows during the forward pass; scale_grad_by_freq counts tokens over the batch
    return not getattr(module, "max_norm", None) and not getattr(module, "scale_grad_by_freq", False)


@register_layer_rule(nn.Embedding, parameters=("weight",), applies=_plain, on_host=True)
def embedding(call: LayerCall) -> Iterator[Piece]:
    """Compute dW[b, v] = Σ_t [x[b, t] = v] · grad[b, t, :]."""
    module = call.module
    return embedding_pieces(call.x, call.grad, call.workspace, module.num_embeddings, module.padding_idx)
