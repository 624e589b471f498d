"""Every word, or every sentence, of what a language model says, as a target of its own."""

import re
from typing import Any, Literal

from datasets import Dataset

from hf_trak.data.said import said_column, said_tokens
from hf_trak.data.shared_words import Words
from hf_trak.modelout_functions.aggregated import TARGET_MASK
from hf_trak.modelout_functions.tokens import IGNORED
from hf_trak.runtime.progress import with_column

Unit = Literal["word", "sentence"]

PART = "part"
"""The column of the words of a part."""

OF_TARGET = "trak_target"
"""The column of the number of the target that a part is of."""

_SENTENCE = re.compile(r"\S.*?(?:[.!?]+(?=\s|$)|[。！？]|$)", re.MULTILINE)


def said_parts(dataset: Dataset, unit: Unit, tokenizer: Any, ids_column: str = "input_ids") -> Dataset:
    """Repeat every target once for each word or sentence that the model says, restricted to its tokens.

    Args:
        dataset (`datasets.Dataset`):
            Tokenized targets. What is said is found as [`~hf_trak.Span`] finds words.
        unit (`str`):
            `"word"` or `"sentence"`.
        tokenizer:
            The tokenizer.
        ids_column (`str`, *optional*, defaults to `"input_ids"`):
            The column of token ids: `labels` for sequence-to-sequence models.

    Returns:
        `datasets.Dataset`: rows with the columns `part`, its text; `trak_target`, the number of its target; and
        `target_mask`. Parts without a label are left out, such as the first token of a text.

    Raises:
        ValueError: `unit` is another one, the targets have no token ids, or nothing is said in any of them.
    """
    if unit not in ("word", "sentence"):
        raise ValueError(
            f"`part` is {unit!r}. Expected 'word', 'sentence', or a `Span`, such as `Span(words='barn')`."
        )
    if ids_column not in dataset.column_names or not hasattr(tokenizer, "decode"):
        raise ValueError(
            f"The targets have the columns {dataset.column_names}, and the tokenizer is a {type(tokenizer).__name__}. "
            f"Expected `{ids_column}`, and a tokenizer that decodes them. Give them to `TrakAttributor`."
        )
    column, owners, parts, masks = said_column(dataset), list[int](), list[str](), list[list[int]]()
    for target, row in enumerate(dataset.with_format(None)):
        ids = [token if token != IGNORED else tokenizer.pad_token_id or 0 for token in row[ids_column]]
        labels = row.get("labels") or ids
        text, own, offsets, within = said_tokens(row, ids, tokenizer, column)
        first_label = int(ids_column == "input_ids")  # a causal model says nothing of the first token
        labelled = [place >= first_label and labels[place] != IGNORED for place in range(len(ids))]
        for start, stop in within:
            for first, last in _ranges(text[start:stop], unit):
                chosen = {
                    place
                    for place, (a, b) in zip(own, offsets, strict=True)
                    if a < start + last and b > start + first and labelled[place]
                }
                if chosen:
                    owners.append(target)
                    parts.append(text[start + first : start + last])
                    masks.append([int(place in chosen) for place in range(len(ids))])
    if not parts:
        raise ValueError(
            f"The targets ({len(dataset)}) say nothing: no word of an answer in them has a label. Expected texts, or "
            "chats and prompts with an answer. Let the model answer first: pass `attributor.predict(rows)`."
        )
    kept = dataset.remove_columns([n for n in (PART, OF_TARGET, TARGET_MASK) if n in dataset.column_names])
    repeated = kept.select(owners)
    for name, values in ((PART, parts), (OF_TARGET, owners), (TARGET_MASK, masks)):
        repeated = with_column(repeated, name, values)
    return repeated


def _ranges(text: str, unit: Unit) -> list[tuple[int, int]]:
    if unit == "word":
        return list(Words.of(text).ranges)
    return [one.span() for one in _SENTENCE.finditer(text)]
