"""`TokenColumnsCollator`: carry columns of one entry per token through any data collator.

Collators of the ecosystem pad the columns that they know, and drop a mask beside the tokens, or fail on it. This one
takes such columns out of the rows, lets the inner collator do its work, and puts them back beside the tokens, wherever
padding has moved those.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import DataCollatorWithPadding

from hf_trak.modelout_functions.tokens import IGNORED, TARGET_WEIGHTS, TOKEN_COLUMNS


class TokenColumnsCollator:
    """A data collator that also carries [`tokens.TOKEN_COLUMNS`], and `labels` where the inner one cannot."""

    def __init__(self, collator: Callable[[list[Any]], Any], beside: str) -> None:
        """
        Args:
            collator: the inner collator.
            beside: the column whose entries the others are aligned with: `input_ids`, or `labels` for
                sequence-to-sequence models.
        """
        self.collator = collator
        self.beside = beside

    def __call__(self, rows: list[Any]) -> Any:
        """Collate rows into a batch.

        Raises:
            ValueError: a column has another number of entries than the row has tokens.
        """
        if not rows or not isinstance(rows[0], Mapping):
            return self.collator(rows)
        names = [name for name in TOKEN_COLUMNS if name in rows[0]]
        # `DataCollatorWithPadding` pads what the tokenizer made and fails on labels of different lengths.
        if isinstance(self.collator, DataCollatorWithPadding) and isinstance(rows[0].get("labels"), Sequence | Tensor):
            names.insert(0, "labels")
        if not names:
            return self.collator(rows)
        columns = {name: [_entries(row, name, i) for i, row in enumerate(rows)] for name in names}
        tokens = [len(row[self.beside]) if row.get(self.beside) is not None else None for row in rows]
        batch = self.collator([{name: value for name, value in row.items() if name not in columns} for row in rows])
        for name, column in columns.items():
            batch[name] = self._padded(name, column, tokens, batch)
        return batch

    def _padded(self, name: str, column: list[list[Any]], tokens: list[int | None], batch: Any) -> Tensor:
        reference = batch.get(self.beside)
        free = not isinstance(reference, Tensor)  # an encoder-decoder may have more or fewer labels than inputs
        width = max(map(len, column)) if free else reference.shape[1]
        if not free and reference.shape[0] == 1 < len(column):  # one sequence of all rows, which is cut later
            column, tokens = [list(chain.from_iterable(column))], [sum(count or 0 for count in tokens)]
        if not free:
            for i, (entries, count) in enumerate(zip(column, tokens, strict=True)):
                if len(entries) not in (count, width):
                    raise ValueError(
                        f"Row {i} of the batch has {len(entries)} entries in `{name}`, but {count} in "
                        f"`{self.beside}`. Expected the same number. Make both with one call of the tokenizer."
                    )
        fill, dtype = {"labels": (IGNORED, torch.long), TARGET_WEIGHTS: (0.0, torch.float32)}.get(
            name, (0, torch.long)
        )
        padded = torch.full((len(column), width), fill, dtype=dtype)
        for i, entries in enumerate(column):
            start = width - len(entries) if self._left(i, batch) else 0
            padded[i, start : start + len(entries)] = torch.as_tensor(entries, dtype=dtype)
        return padded

    def _left(self, row: int, batch: Any) -> bool:
        """Tell from its attention mask, or else from the tokenizer, whether a row is padded on the left."""
        mask = batch.get("attention_mask")
        if self.beside == "input_ids" and isinstance(mask, Tensor) and mask.ndim == 2:
            return bool(mask[row, 0] == 0)
        tokenizer = getattr(self.collator, "tokenizer", None) or getattr(self.collator, "processing_class", None)
        return getattr(tokenizer, "padding_side", "right") == "left"


def _entries(row: Mapping[str, Any], name: str, index: int) -> list[Any]:
    value = row.get(name)
    if value is None or not hasattr(value, "__len__"):
        raise ValueError(
            f"Row {index} of the batch has {value!r} in `{name}`. Expected a list with one entry per token. Fill the "
            "column in every row, or remove it."
        )
    return list(value)
