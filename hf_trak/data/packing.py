"""Rows that a collator lays end to end in one long sequence, and documents that a dataset has packed into one row.

TRL's `padding_free` and `packing`, and `DataCollatorWithFlattening`, make one sequence of all rows of a batch, with
positions that begin again at every document. Scores belong to rows, so the sequence is cut at the rows again:

* If every row is one document, the result is the padded batch of these rows.
* If rows have several documents, each row is a sequence with positions that begin again, and so is its padding, as if
  it were one more document, since models keep documents apart by their positions where there is no attention mask.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from hf_trak.modelout_functions.tokens import IGNORED

TOKENS = "input_ids"
_OF_SEQUENCES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "cu_seqlens", "max_seqlen")
"""Places of documents in the whole sequence, which have no meaning for its rows."""
_FILLS = {"labels": IGNORED}


def cut_at_rows(batch: Any, rows: Sequence[Any]) -> Any:
    """Cut a sequence of several rows at its rows; return any other batch as it is.

    Args:
        batch: what the collator made of the rows.
        rows: the rows, of which each has its tokens in `input_ids`.

    Returns:
        The batch with one sample per row.

    Raises:
        ValueError: the batch is one sequence, and has fewer or more tokens than the rows.
    """
    tokens = batch.get(TOKENS) if isinstance(batch, Mapping) else None
    if len(rows) < 2 or not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.shape[0] != 1:
        return batch
    lengths = [_length(row) for row in rows]
    if None in lengths:
        return batch
    sizes = [int(length) for length in lengths if length is not None]
    total = tokens.shape[1]
    if sum(sizes) != total and not _ends_in_padding(batch, sum(sizes)):
        raise ValueError(
            f"The collator made one sequence of {total} tokens from {len(rows)} rows with {sum(sizes)} tokens. "
            "Expected the tokens of all rows, so that they can be told apart. Truncate rows in the dataset, or set "
            "`per_device_batch_size=1`."
        )
    return _cut(batch, sizes, total)


def _length(row: Any) -> int | None:
    value = row.get(TOKENS) if isinstance(row, Mapping) else None
    return None if value is None or not hasattr(value, "__len__") else len(value)


def _ends_in_padding(batch: Mapping[str, Any], tokens: int) -> bool:
    """Tell whether there are more tokens only because the collator pads to a multiple, which counts for nothing."""
    labels = batch.get("labels")
    beyond = labels[:, tokens:] if isinstance(labels, Tensor) and labels.ndim == 2 else None
    return beyond is not None and beyond.shape[1] > 0 and bool((beyond == IGNORED).all())


def _cut(batch: Mapping[str, Any], sizes: list[int], total: int) -> dict[str, Any]:
    positions = batch.get("position_ids")
    if not isinstance(positions, Tensor) or positions.shape != (1, total):
        positions = _positions(batch, sizes, total)
    parts = positions[0, : sum(sizes)].split(sizes)
    single = all(bool((part.diff() == 1).all()) for part in parts)
    width = max(sizes)
    made: dict[str, Any] = {}
    for name, value in batch.items():
        if name in _OF_SEQUENCES or name in ("position_ids", "attention_mask") or (single and name == "seq_idx"):
            continue
        along = isinstance(value, Tensor) and value.ndim >= 2 and value.shape[:2] == (1, total)
        made[name] = _rows(value[0, : sum(sizes)], sizes, width, _FILLS.get(name, 0)) if along else value
    made["position_ids"] = _rows(positions[0, : sum(sizes)], sizes, width, 0)
    inside = _rows(positions.new_ones(sum(sizes)), sizes, width, 0)
    if single:
        return {**made, "attention_mask": inside}
    for row, size in enumerate(sizes):
        made["position_ids"][row, size:] = torch.arange(width - size)
        if isinstance(made.get("seq_idx"), Tensor):
            first = made["seq_idx"][row, 0].clone()
            made["seq_idx"][row] -= first
            made["seq_idx"][row, size:] = made["seq_idx"][row, size - 1] + 1
    return made


def _positions(batch: Mapping[str, Any], sizes: Sequence[int], total: int) -> Tensor:
    """Number the tokens of every document from 0, where the batch has bounds of documents instead of positions."""
    tokens = batch[TOKENS]
    starts = torch.zeros(total, dtype=torch.bool)
    bounds, index = batch.get("cu_seq_lens_q"), batch.get("seq_idx")
    if isinstance(bounds, Tensor):
        starts[bounds.long()[:-1]] = True
    elif isinstance(index, Tensor) and index.shape == (1, total):
        starts[1:] = index[0].diff() != 0
    starts[torch.tensor([0, *sizes[:-1]]).cumsum(0)] = True
    places = torch.arange(total)
    first = torch.where(starts, places, 0).cummax(0).values
    return (places - first).to(tokens.dtype).unsqueeze(0)


def _rows(value: Tensor, sizes: Sequence[int], width: int, fill: int) -> Tensor:
    """Put the parts of a sequence `(T, …)` below each other: `(rows, width, …)`."""
    made = value.new_full((len(sizes), width, *value.shape[1:]), fill)
    for row, part in enumerate(value.split(list(sizes))):
        made[row, : len(part)] = part
    return made


def split_documents(dataset: Dataset, lengths_column: str = "seq_lengths") -> Dataset:
    """Take packed rows apart, so that scores belong to documents.

    Args:
        dataset (`datasets.Dataset`):
            Rows with `input_ids`, and the lengths of their documents, as TRL's packing makes them.
        lengths_column (`str`, *optional*, defaults to `"seq_lengths"`):
            Name of the column of lengths. Lists as long as `input_ids` are cut like these, and all other columns are
            repeated.

    Returns:
        `datasets.Dataset`: one row per document, without the lengths, and with `packed_row`, the number of the row it
        comes from.

    Raises:
        ValueError: a column is missing, or lengths do not add up to the tokens of a row.
    """
    if missing := [name for name in (TOKENS, lengths_column) if name not in dataset.column_names]:
        raise ValueError(
            f"The dataset has the columns {dataset.column_names}, and not {missing}. Expected packed rows with the "
            "lengths of their documents. Name the column in `lengths_column`."
        )

    def documents(rows: dict[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
        made: dict[str, list[Any]] = {name: [] for name in (*rows, "packed_row") if name != lengths_column}
        for place, number in enumerate(numbers):
            row = {name: values[place] for name, values in rows.items()}
            count, lengths = len(row[TOKENS]), row.pop(lengths_column)
            if sum(lengths) != count:
                raise ValueError(
                    f"Row {number} has {count} tokens, and documents of {sum(lengths)} tokens in {lengths_column!r}. "
                    "Expected lengths that add up to the tokens. Correct the column, or leave the row out."
                )
            start = 0
            for length in lengths:
                for name, value in row.items():
                    cut = isinstance(value, list) and len(value) == count
                    made[name].append(value[start : start + length] if cut else value)
                made["packed_row"].append(number)
                start += length
        return made

    return dataset.with_format(None).map(
        documents, batched=True, with_indices=True, remove_columns=dataset.column_names, desc="Taking rows apart"
    )
