"""Conversion of rows and score columns of any kind to the datasets of a run."""

from typing import Any

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset

from hf_trak.report.content import as_row
from hf_trak.report.distributions import ScoreDistributions
from hf_trak.scores.scored_dataset import TOP_K_COLUMNS

_FULL_TOP = 50  # length of the top-k lists that are made of full score lists


def top_k_of_full(scored: Dataset, n: int) -> tuple[Dataset, ScoreDistributions]:
    """Convert full score lists to top-k columns and distributions.

    Args:
        scored: the result of `attribute(..., top_k=None, per="target")`.
        n: number of training rows.

    Returns:
        The rows with top-k columns of the 50 highest and lowest scores, and the distribution of every list.

    Raises:
        ValueError: the lists do not have n scores.
    """
    name = TOP_K_COLUMNS[1]
    if (length := scored.features[name].length) != n:
        raise ValueError(
            f"`{name}` holds {length} scores per row for {n} training rows. Expected the result of "
            "`attribute(..., top_k=None, per='target')`."
        )
    k = min(_FULL_TOP, n)
    ends: dict[str, list[Any]] = {column: [] for column in TOP_K_COLUMNS}
    parts = []
    for row in scored.select_columns([name]).with_format("numpy"):
        scores = row[name]
        order = np.argsort(-scores, kind="stable")
        for indices, (rows, values) in zip(
            (order[:k], order[::-1][:k]), (TOP_K_COLUMNS[:2], TOP_K_COLUMNS[2:]), strict=True
        ):
            ends[rows].append(indices.tolist())
            ends[values].append(scores[indices].tolist())
        block = [(0, n, torch.from_numpy(np.array(scores)[:, None]))]
        parts.append(ScoreDistributions.from_blocks(block, scores.min(keepdims=True), scores.max(keepdims=True)))
    merged = ScoreDistributions(
        **{f: np.concatenate([getattr(part, f) for part in parts]) for f in ScoreDistributions.__dataclass_fields__}
    )
    kept = scored.with_format(None).remove_columns([name])
    for column in TOP_K_COLUMNS:
        kept = kept.add_column(column, ends[column])
    return kept, merged


def with_scores_of(rows: Any, scored: Dataset) -> Dataset:
    """Convert the rows of any dataset to a `datasets.Dataset`, and add their scores.

    Args:
        rows: a map-style dataset with as many rows as `scored`.
        scored: the score columns.
    """
    shown = as_dataset([rows[i] for i in range(len(rows))])
    shown = shown.remove_columns(
        [name for name in TOP_K_COLUMNS if name in shown.column_names]
    )  # scores of an earlier call
    for name in scored.column_names:
        if name not in shown.column_names:
            shown = shown.add_column(name, scored[name][:])
    return shown


def as_dataset(rows: Any) -> Dataset:
    """Convert rows of any kind to a `datasets.Dataset`, as far as they can be shown. A `datasets.Dataset` stays as is.

    Raises:
        ValueError: a column has values that Arrow cannot store in one column.
    """
    if isinstance(rows, Dataset):
        return rows
    named = [as_row(row) for row in rows]
    names = list(dict.fromkeys(name for row in named for name in row))
    try:
        return Dataset.from_dict({name: [_plain(row.get(name)) for row in named] for name in names})
    except (pa.ArrowException, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"The columns {names} of the rows cannot be saved: {str(error)[:200]}. Expected values of one type in "
            "each column. Give the rows as a `datasets.Dataset`."
        ) from error


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor | np.ndarray | np.generic) else value
