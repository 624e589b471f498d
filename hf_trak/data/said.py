"""Words in tokens: what a model says in a row, and which of its tokens say it.

Generated tokens need not be those that a tokenizer makes of their text, and a chat template writes around what people
say. So tokens are decoded. If the template renders the same text, it tells where each turn is: what changes with the
turn. Otherwise, turns are looked for, and have to be in one place.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from datasets import Dataset
from jinja2 import TemplateError

from hf_trak.data.columns import PREDICTED
from hf_trak.modelout_functions.aggregated import TARGET_MASK

Range = tuple[int, int]
"""`(start, stop)`, `stop` not included. Negative numbers count from the end."""

_BEGINNING = 16
"""Characters by which a turn is found whose end is cut off."""

_PART = "\ufffd"
"""What a part of a character is decoded to, at the end of a row that is cut off."""

_NOT_SAID = "\0"
"""What stands for the characters of special tokens where turns are looked for."""


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


def turns_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List the turns of a conversation. A prompt and a completion that are texts are two turns.

    Args:
        row: the row, with `messages`, or with a `completion` and perhaps a `prompt`.
    """
    if row.get("messages") is not None:
        return [dict(turn) for turn in row["messages"]]
    turns = list[dict[str, Any]]()
    for role, said in (("user", row.get("prompt") or ""), ("assistant", row["completion"])):
        turns += [{"role": role, "content": said}] if isinstance(said, str) else map(dict, said)
    return turns


def said_by(turn: Mapping[str, Any]) -> str:
    """Return what a turn says, without the images and the like between its texts.

    Args:
        turn: the turn, whose `content` is a text or a list of parts.
    """
    content = turn.get("content") or ""
    return (content if isinstance(content, str) else "".join(filter(None, map(_text, content)))).strip()


def _text(part: Any) -> str | None:
    found = part.get("text") if isinstance(part, Mapping) else None
    return found if isinstance(found, str) else None


def _rendered_turns(text: str, row: Mapping[str, Any], tokenizer: Any) -> list[Range] | None:
    """Find what the assistant says in a text, by what of it changes with a turn; `None` if the row renders otherwise.

    Headers of a template have words, too, so that a short answer cannot be told from them by looking for it.
    """
    turns = turns_of(row)
    own = [i for i, turn in enumerate(turns) if turn.get("role") == "assistant" and said_by(turn)]
    if not own:
        return []
    try:
        whole = _rendered(turns, row, tokenizer)
        ranges = {i: _changed(whole, turns, i, row, tokenizer) for i in {0, *own} if said_by(turns[i])}
    except (AttributeError, TemplateError, TypeError, ValueError):  # no template, or none that takes these turns
        return None
    first, last = min(start for start, _ in ranges.values()), max(stop for _, stop in ranges.values())
    if whole.startswith(text.rstrip(_PART)) or text.startswith(whole[:last]):
        shift = 0
    else:  # padding may come before all turns, and the template may write a date there
        begins = [begin for begin in (0, first) if text.count(whole[begin:last]) == 1]
        if not begins:
            return None
        shift = text.index(whole[begins[0] : last]) - begins[0]
    found = [(start + shift, min(stop + shift, len(text))) for start, stop in map(ranges.__getitem__, own)]
    return [(start, stop) for start, stop in found if start < stop]


def _rendered(turns: Sequence[Mapping[str, Any]], row: Mapping[str, Any], tokenizer: Any) -> str:
    """Return what the tokens of turns say, in the words of [`decoded`]."""
    chat = row.get("messages") is not None or not isinstance(row["completion"], str)
    if chat:
        tools = row.get("tools")
        options = {"tools": json.loads(tools) if isinstance(tools, str) else tools}
        options |= row.get("chat_template_kwargs") or {}
        text = tokenizer.apply_chat_template(list(turns), tokenize=False, **options)
    else:
        text = "".join(turn["content"] for turn in turns)
    words = getattr(tokenizer, "tokenizer", tokenizer)  # that of a processor
    return str(tokenizer.decode(words(text, add_special_tokens=not chat)["input_ids"], skip_special_tokens=False))


def _changed(
    whole: str, turns: Sequence[Mapping[str, Any]], turn: int, row: Mapping[str, Any], tokenizer: Any
) -> Range:
    """Find what of a rendered conversation another text of a turn would change."""
    said = said_by(turns[turn])
    mark = next(one for one in "012" if one not in (said[0], said[-1]))
    content: Any = mark
    if not isinstance(turns[turn]["content"], str):
        parts = turns[turn]["content"]
        texts = [i for i, part in enumerate(parts) if _text(part)]
        kept = [i for i in range(len(parts)) if i not in texts[1:]]
        content = [{**parts[i], "text": mark} if i == texts[0] else parts[i] for i in kept]
    other = _rendered([*turns[:turn], {**turns[turn], "content": content}, *turns[turn + 1 :]], row, tokenizer)
    start = _common(whole, other)
    piece = whole[start : max(start, len(whole) - _common(whole[::-1], other[::-1]))]
    start += len(piece) - len(piece.lstrip())
    return start, start + len(piece.strip())


def _searched_turns(text: str, row: Mapping[str, Any]) -> list[Range]:
    """Look for what the assistant says in a text. Turns that were cut off before their beginning are left out.

    Raises:
        ValueError: a turn may be in several places.
    """
    found, cursor = list[tuple[bool, int, int]](), 0
    for turn in turns_of(row):
        if not (content := said_by(turn)):
            continue
        start = text.find(content, cursor)
        if start < 0:  # a row that is cut off ends within a turn
            start = text.find(content[:_BEGINNING], cursor)
            if start < 0 or not content.startswith(text[start:]):
                continue
        cursor = min(start + len(content), len(text))
        found.append((turn.get("role") == "assistant", start, cursor))
    latest = len(text)
    for own, start, stop in reversed(found):  # each turn comes before the next one
        latest = text.rfind(text[start:stop], 0, latest)
        if own and latest != start:
            shown = text.replace(_NOT_SAID, "")
            raise ValueError(
                f"An assistant says {text[start:stop]!r:.80}, which is in several places of what the tokens of a row "
                f"say, {shown!r:.200}. Expected it in one place, or a text that the tokenizer's chat template makes. "
                "Make the tokens with that template, or give the span as `tokens`."
            )
    return [(start, stop) for own, start, stop in found if own]


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

    Raises:
        ValueError: a turn of the assistant may be in several places.
    """
    own = [place for place in range(len(ids)) if column != PREDICTED or row[TARGET_MASK][place]]
    in_turns = column in ("messages", "completion")
    text, offsets = decoded([ids[place] for place in own], tokenizer, not in_turns)
    if not in_turns:
        return text, own, offsets, [(0, len(text))]
    within = _rendered_turns(text, row, tokenizer)
    if within is None:
        special, plain = set(getattr(tokenizer, "all_special_ids", ())), text
        for place, (start, stop) in zip(own, offsets, strict=True):  # nobody says a special token
            if ids[place] in special:
                plain = plain[:start] + _NOT_SAID * (stop - start) + plain[stop:]
        within = _searched_turns(plain, row)
    return text, own, offsets, within


def places(text: str, word: str, within: Sequence[Range]) -> list[int]:
    """List where a piece of text begins, in some ranges of a text.

    Args:
        text: the text.
        word: what is looked for.
        within: ranges of characters.
    """
    return [i for start, stop in within for i in range(start, stop) if word and text.startswith(word, i, stop)]
