"""Words in tokens: what a model says in a row, and which of its tokens say it.

Generated tokens need not be those that a tokenizer makes of their text, and a chat template writes around what people
say. So tokens are decoded, and texts are looked for in what they say.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from datasets import Dataset

from hf_trak.modelout_functions.aggregated import TARGET_MASK

PREDICTED = "predicted"
"""The column of predictions as texts or names of classes."""

Range = tuple[int, int]
"""`(start, stop)`, `stop` not included. Negative numbers count from the end."""

_BEGINNING = 16
"""Characters by which a turn is found whose end is cut off."""


def said_column(dataset: Dataset) -> str | None:
    """Name the column of what a model says in every row; `None` if only the tokens tell.

    Args:
        dataset: the rows.
    """
    names = dataset.column_names
    if PREDICTED in names and TARGET_MASK in names:
        return PREDICTED
    return next((name for name in ("messages", "completion", "text") if name in names), None)


def decoded(ids: Sequence[int], tokenizer: Any, without_special: bool) -> tuple[str, list[Range]]:
    """Decode tokens, and find the range of characters of each by decoding what comes before it.

    A token with a part of a character has the whole of it. Generated tokens need not be those of their text.

    Args:
        ids: token ids.
        tokenizer: the tokenizer.
        without_special: leave special tokens out of the text; they have no characters then.

    Returns:
        The text, and a range for every token.
    """

    def text_of(count: int) -> str:
        return str(tokenizer.decode(list(ids[:count]), skip_special_tokens=without_special))

    text = text_of(len(ids))
    prefixes = [text_of(count) for count in range(len(ids) + 1)]
    ends = list(accumulate((_common(text, prefix) for prefix in prefixes), max))
    special, ranges = set(tokenizer.all_special_ids) if without_special else set(), list[Range]()
    for place, token in enumerate(ids):
        start, stop = ends[place], ends[place + 1]
        if token in special:
            stop = start
        elif stop == start or not text.startswith(prefixes[place + 1]):
            stop = next((end for end in ends[place + 1 :] if end > stop), stop)
        ranges.append((start, stop))
    return text, ranges


def _common(text: str, prefix: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(text, prefix, strict=False)) if a != b), min(len(text), len(prefix)))


def said_in(text: str, row: Mapping[str, Any]) -> list[Range]:
    """Find the turns of the assistant in the text of a conversation, or the completion after its prompt.

    Args:
        text: what the tokens of the row say.
        row: the row, with `messages`, or with a `completion` and perhaps a `prompt`.

    Returns:
        Ranges of characters. Turns that were cut off before their beginning are left out.
    """
    turns = row.get("messages")
    if turns is None:
        before, after = row.get("prompt") or "", row["completion"]
        prompt = [before] if isinstance(before, str) else [turn["content"] for turn in before]
        answer = [{"role": "assistant", "content": after}] if isinstance(after, str) else after
        turns = [*({"content": content} for content in prompt), *answer]
    found, cursor = list[Range](), 0
    for turn in turns:
        content = turn["content"].strip() if isinstance(turn["content"], str) else ""
        start = text.find(content, cursor)
        if start < 0:  # a row that is cut off ends within a turn
            start = text.find(content[:_BEGINNING], cursor)
            if start < 0 or not content.startswith(text[start:]):
                continue
        cursor = min(start + len(content), len(text))
        if turn.get("role") == "assistant":
            found.append((start, cursor))
    return found


def said_tokens(
    row: Mapping[str, Any], ids: Sequence[int], tokenizer: Any, column: str | None
) -> tuple[str, list[int], list[Range], list[Range]]:
    """Find what the model says in the tokens of a row.

    Args:
        row: the row.
        ids: its token ids.
        tokenizer: the tokenizer.
        column: what [`said_column`] returns.

    Returns:
        A text; the places of its tokens in `ids`; the range of characters of each; and ranges that the model says.
    """
    own = [place for place in range(len(ids)) if column != PREDICTED or row[TARGET_MASK][place]]
    in_turns = column in ("messages", "completion")
    text, offsets = decoded([ids[place] for place in own], tokenizer, not in_turns)
    return text, own, offsets, said_in(text, row) if in_turns else [(0, len(text))]


def places(text: str, word: str, within: Sequence[Range]) -> list[int]:
    """List where a piece of text begins, in some ranges of a text.

    Args:
        text: the text.
        word: what is looked for.
        within: ranges of characters.
    """
    return [i for start, stop in within for i in range(start, stop) if word and text.startswith(word, i, stop)]
