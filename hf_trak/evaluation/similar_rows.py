"""Training rows that look like a target, found without gradients: a control for attributions.

By embeddings: the input of the last matrix of the model (its head), averaged over the positions of a sequence, and
compared by cosine. By BM25: the tokens that rows share with the target, rare ones first (Robertson & Zaragoza 2009).
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_trak.data.rows import RowBatches
from hf_trak.featurize.featurizer import Featurizer
from hf_trak.gradient_computers.environment import pass_settings
from hf_trak.gradient_computers.outputs import run_model
from hf_trak.modelout_functions.base import BatchedModelOutput

Similarity = Literal["embeddings", "bm25"]


class SimilarRows:
    """Finds the training rows that are most similar to a target."""

    def __init__(
        self, featurizer: Featurizer, prepared: Callable[[Any], Any], rows: Any, target: Any, batch_size: int
    ) -> None:
        """
        Args:
            featurizer: the model, in eval mode, and its task.
            prepared: makes of a batch what the model takes.
            rows: the training rows, by their numbers.
            target: a dataset of one row.
            batch_size: rows per pass.
        """
        self._model, self._task, self._prepared = featurizer.model, featurizer.task, prepared
        self._target = featurizer.batches(target, "target")
        self._train = featurizer.batches(rows)
        self._batch_size = batch_size

    def most_similar(self, how: Similarity, candidates: Sequence[int], count: int) -> list[int]:
        """Find the rows.

        Args:
            how: by `"embeddings"` or `"bm25"`.
            candidates: numbers of the rows to look at.
            count: number of rows to return.

        Returns:
            Row numbers, most similar first; of equals the lower number first.

        Raises:
            ImportError: BM25 is asked for, and `bm25s` is not installed.
            ValueError: rows have no `input_ids` for BM25, or the model has no matrix for embeddings.
        """
        ordered = sorted(candidates)
        if how == "bm25":
            similarity = bm25_scores([_tokens(self._train, row) for row in ordered], _tokens(self._target, 0))
        else:
            wanted = self._embedded(self._target, [0])
            similarity = (self._embedded(self._train, ordered) @ wanted.T).squeeze(1).double().numpy()
        return [ordered[place] for place in np.argsort(-similarity, kind="stable")[:count]]

    def _embedded(self, batches: RowBatches, rows: Sequence[int]) -> Tensor:
        """Compute embeddings of norm 1: `(rows, D)`."""
        model, task = self._model, self._task
        assert isinstance(task, BatchedModelOutput)  # checked by the caller
        last: list[Tensor] = []

        def keep(module: nn.Module, given: tuple[Any, ...]) -> None:
            if given and isinstance(given[0], Tensor) and given[0].ndim >= 2:
                last[:] = [given[0]]

        found: dict[int, Tensor] = {}
        matrices = [one for one in model.modules() if isinstance(one, nn.Linear | Conv1D)]
        hooks = [one.register_forward_pre_hook(keep) for one in matrices]
        try:
            cuts = [rows[first : first + self._batch_size] for first in range(0, len(rows), self._batch_size)]
            with torch.no_grad(), pass_settings(model):
                for numbers, batch in batches.iterate(cuts):
                    last.clear()
                    run_model(task, model, self._prepared(batch))
                    if not last or len(last[0]) != len(numbers):
                        raise ValueError(
                            f"`similar` is 'embeddings', and the {type(model).__name__} ends in no linear layer with "
                            "one input per row, which would be the embedding. Expected one. Set `similar=None`, or "
                            "pass rows of your own."
                        )
                    found |= dict(zip(numbers, _pooled(last[0].float(), batch).cpu(), strict=True))
        finally:
            for hook in hooks:
                hook.remove()
        vectors = torch.stack([found[row] for row in rows])  # batches may come in another order, by sizes of images
        return vectors / vectors.norm(dim=1, keepdim=True).clamp_min(torch.finfo(vectors.dtype).tiny)


def _pooled(states: Tensor, batch: Any) -> Tensor:
    """Average states `(B, …, D)` over all but the first and the last dimension, without padding where a mask tells."""
    if states.ndim == 2:
        return states
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if isinstance(mask, Tensor) and mask.shape == states.shape[:2] and states.ndim == 3:
        weights = mask.to(states).unsqueeze(2)
        return (states * weights).sum(1) / weights.sum(1).clamp_min(1)
    return states.flatten(1, -2).mean(1)


def bm25_scores(documents: Sequence[Sequence[str]], query: Sequence[str]) -> np.ndarray:
    """Compute BM25 of documents for a query, both lists of words: `(documents,)`.

    Raises:
        ImportError: `bm25s` is not installed.
    """
    try:
        bm25s: Any = importlib.import_module("bm25s")
    except ImportError as error:
        raise ImportError(
            "`similar` is 'bm25', which needs the package `bm25s`. Install it with `pip install hf_trak[text]`, or "
            "set `similar='embeddings'`."
        ) from error
    index = bm25s.BM25()
    index.index([list(one) for one in documents], show_progress=False)
    found: np.ndarray = index.get_scores(list(query))
    return found


def _tokens(batches: RowBatches, row: int) -> list[str]:
    batch = batches.collated([row])
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, Tensor):
        raise ValueError(
            "`similar` is 'bm25', and rows have no `input_ids`. Expected tokens, whose words BM25 counts. Set "
            "`similar='embeddings'`."
        )
    mask = batch.get("attention_mask")
    flat = ids.flatten()
    kept = flat[mask.flatten() > 0] if isinstance(mask, Tensor) and mask.shape == ids.shape else flat
    return [str(one) for one in kept.tolist()]
