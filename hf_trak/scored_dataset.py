"""Scores as columns of a `datasets.Dataset`, from a stream of score blocks."""

import os
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset, Features, List, Value, concatenate_datasets
from datasets.arrow_writer import ArrowWriter
from torch import Tensor

from hf_trak.errors import NonFiniteError
from hf_trak.score_computers import TopK

ScoreBlock = tuple[int, int, Tensor]
"""`(start, stop, block)`: `block` of shape `(stop - start, m)` scores these training rows against m targets."""

TOP_K_COLUMNS = ("trak_indices", "trak_scores", "trak_opponent_indices", "trak_opponent_scores")
"""Columns of a top-k result. A full result has `trak_scores` alone."""

_ROW_GROUP_BYTES = 64 << 20


def fixed_size_list(values: np.ndarray) -> pa.FixedSizeListArray:
    """A 2-D array `(rows, n)` as one Arrow fixed-size list per row, without a copy if it is contiguous."""
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])


def top_k_columns(
    blocks: Iterable[ScoreBlock], top_k: int, n_targets: int, per: Literal["target", "train"]
) -> Dataset:
    """The highest and the lowest scores of every row, as the four columns [`TOP_K_COLUMNS`].

    Args:
        blocks: the scores, in the order of training rows.
        top_k: length of each list.
        n_targets: m.
        per: whether rows are targets (and indices training rows) or the other way round.

    Returns:
        A dataset of m or n rows. Opponents come most harmful first. Among equal scores the lower index comes first.
    """
    highest, lowest = [], []
    if per == "target":
        best, worst = TopK(top_k, largest=True), TopK(top_k, largest=False)
        for start, _, block in _finite(blocks):
            best.update(start, block)
            worst.update(start, block)
        highest.append(best.result())
        lowest.append(worst.result())
    else:
        for _, _, block in _finite(blocks):
            # The same accumulator with the roles exchanged: one pass over the targets of a few training rows.
            for chosen, largest in ((highest, True), (lowest, False)):
                top = TopK(top_k, largest=largest)
                top.update(0, block.T)
                chosen.append(top.result())
    table = {}
    for (indices_name, scores_name), parts in zip(
        (TOP_K_COLUMNS[:2], TOP_K_COLUMNS[2:]), (highest, lowest), strict=True
    ):
        table[indices_name] = fixed_size_list(torch.cat([indices for _, indices in parts]).numpy())
        table[scores_name] = fixed_size_list(torch.cat([scores for scores, _ in parts]).numpy())
    return Dataset(pa.table(table))


def full_scores(
    path: Path, blocks: Iterable[ScoreBlock], n_train: int, n_targets: int, per: Literal["target", "train"]
) -> None:
    """Write every score to an Arrow file with one fixed-size list per row, never holding the matrix in memory.

    Args:
        path: the file, replaced at once when it is complete.
        blocks: the scores, in the order of training rows.
        n_train: n.
        n_targets: m.
        per: `"target"` gives m rows of n scores, `"train"` n rows of m scores.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unique = f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}"
    temporary, scratch = path.with_name(f"{unique}.tmp"), path.with_name(f"{unique}.scratch")
    rows: Iterator[np.ndarray] = (block.numpy() for _, _, block in _finite(blocks))
    length = n_targets
    try:
        if per == "target":
            rows, length = _transposed(scratch, blocks, n_train, n_targets), n_train
        features = Features({"trak_scores": List(Value("float32"), length=length)})
        with ArrowWriter(features=features, path=str(temporary)) as writer:
            for group in rows:
                writer.write_table(pa.table({"trak_scores": fixed_size_list(np.ascontiguousarray(group))}))
            writer.finalize()
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
        scratch.unlink(missing_ok=True)


def _transposed(scratch: Path, blocks: Iterable[ScoreBlock], n_train: int, n_targets: int) -> Iterator[np.ndarray]:
    """Groups of rows of the transposed score matrix, turned over by way of a scratch file."""
    matrix = np.memmap(scratch, dtype=np.float32, mode="w+", shape=(n_targets, n_train))
    for start, stop, block in _finite(blocks):
        matrix[:, start:stop] = block.numpy().T
    group = max(1, _ROW_GROUP_BYTES // (4 * n_train))
    for first in range(0, n_targets, group):
        yield matrix[first : first + group]


def _finite(blocks: Iterable[ScoreBlock]) -> Iterator[ScoreBlock]:
    for start, stop, block in blocks:
        bad = ~torch.isfinite(block).all(dim=1)
        if bad.any():
            raise NonFiniteError(
                f"The scores of training row {start + int(bad.nonzero()[0])} are not finite ({int(bad.sum())} rows "
                f"of {start} … {stop}). Expected finite scores. Raise `lambda_reg` or `lambda_relative`, or store "
                "features in float32."
            )
        yield start, stop, block


def attach_columns(rows: Any, columns: Dataset) -> Dataset:
    """Put score columns beside the rows they belong to; earlier score columns of the same name are replaced.

    Args:
        rows: a dataset of as many rows. Its columns are kept as stored if it is a `datasets.Dataset`, and left out
            otherwise.
        columns: the score columns.
    """
    if not isinstance(rows, Dataset):
        return columns
    stale = [name for name in TOP_K_COLUMNS if name in rows.column_names]
    kept = rows.with_format(None).remove_columns(stale)
    return concatenate_datasets([kept, columns], axis=1)
