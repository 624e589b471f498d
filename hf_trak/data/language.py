"""Tokenization of chats, prompts with completions, and masked tokens, with labels.

Each function takes one row and returns the columns that the language model tasks read. Use them with `Dataset.map`.
Tokens beyond `max_length` are cut off on the right, together with their labels. A row that loses all its labels
scores 0 as training data and is refused as a target.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from datasets import Dataset
from jinja2 import TemplateError
from torch import Tensor

from hf_trak.modelout_functions.tokens import IGNORED

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


Messages = Sequence[Mapping[str, Any]]

"""A conversation: one `{"role": …, "content": …}` per turn."""


def tokenize_chat(
    messages: Messages, tokenizer: Any, max_length: int | None = None, tools: Sequence[Any] | None = None
) -> dict[str, list[int]]:
    """Tokenize a conversation with the tokenizer's chat template. Labels are the tokens that the assistant produces.

    These are the tokens that the template marks with `{% generation %}`. If it marks none, they are what the template
    adds between the generation prompt and the end of every assistant turn.

    Args:
        messages (`Sequence[Mapping]`):
            The turns, each with `role` and `content`.
        tokenizer (`PreTrainedTokenizerFast`):
            A fast tokenizer with a chat template.
        max_length (`int`, *optional*):
            Number of tokens to keep. By default all.
        tools (`Sequence`, *optional*):
            Tools, passed on to the template.

    Returns:
        `dict[str, list[int]]`: `input_ids`, `attention_mask`, `labels` and `assistant_masks`, lists of equal length.

    Raises:
        ValueError: there is no assistant turn or no template, or the template marks nothing and renders a turn
            differently once more turns follow.
    """
    ids, mask = _chat(messages, tokenizer, tools, first=0)
    return _labelled(ids, mask, "assistant_masks", max_length)


def _chat(
    messages: Messages, tokenizer: Any, tools: Sequence[Any] | None, first: int
) -> tuple[Sequence[int], Sequence[int]]:
    """Tokenize a conversation, and mark the tokens that the assistant produces in turn `first` or later."""
    turns = [turn for turn, message in enumerate(messages) if message.get("role") == "assistant"]
    wanted = [turn for turn in turns if turn >= first]
    if not wanted:
        raise ValueError(
            f"The conversation has the roles {[message.get('role') for message in messages]}. Expected an 'assistant' "
            f"turn (from turn {first} on), which is what a model learns to produce. Leave such "
            "rows out, or attribute what the model says (`attributor.predict(rows)`, `--predict`)."
        )
    # A template with {% generation %} marks the assistant's tokens itself.
    if _GENERATION.search(tokenizer.get_chat_template(tools=tools)):
        encoded = tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        mask = encoded["assistant_masks"]
        runs = [i for i, entry in enumerate(mask) if entry and (i == 0 or not mask[i - 1])]
        if len(wanted) < len(turns):
            if len(runs) != len(turns):
                raise ValueError(
                    f"The chat template marks {len(runs)} parts in {len(turns)} assistant turns. Expected one per "
                    "turn, so that the turns of the prompt can be told from those of the completion. Correct the "
                    "template."
                )
            mask = [entry if i >= runs[-len(wanted)] else 0 for i, entry in enumerate(mask)]
        return encoded["input_ids"], mask

    # Otherwise, compare the text up to each turn, with a generation prompt, to the text that includes the turn.
    def rendered(part: Messages, prompt: bool = False) -> str:
        return tokenizer.apply_chat_template(list(part), tools=tools, tokenize=False, add_generation_prompt=prompt)

    text, spans = rendered(messages), []
    for turn in wanted:
        before, after = rendered(messages[:turn], prompt=True), rendered(messages[: turn + 1])
        if not (after.startswith(before) and text.startswith(after)):
            raise ValueError(
                f"The chat template renders turn {turn} differently once more turns follow, so that the assistant's "
                "part cannot be found in the text. Expected a template that marks it. Put the assistant's part "
                "between {% generation %} and {% endgeneration %}."
            )
        spans.append((len(before), len(after)))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return encoded["input_ids"], [int(any(s < b and e > a for a, b in spans)) for s, e in encoded["offset_mapping"]]


def tokenize_prompt_completion(
    prompt: str | Messages, completion: str | Messages, tokenizer: Any, max_length: int | None = None
) -> dict[str, list[int]]:
    """Tokenize a prompt and its completion, as in TRL's datasets. Labels are the tokens of the completion.

    Two texts are tokenized together, followed by the tokenizer's end token. A token belongs to the completion if it
    contains one of its characters. In two parts of a conversation, labels are the tokens that the assistant produces
    in the completion.

    Args:
        prompt (`str` or `Sequence[Mapping]`):
            The prompt, a text or messages.
        completion (`str` or `Sequence[Mapping]`):
            The completion, of the same kind.
        tokenizer (`PreTrainedTokenizerFast`):
            A fast tokenizer; with a chat template if messages are given.
        max_length (`int`, *optional*):
            Number of tokens to keep. By default all.

    Returns:
        `dict[str, list[int]]`: `input_ids`, `attention_mask`, `labels` and `completion_mask`, lists of equal length.

    Raises:
        TypeError: one of the two is a text and the other a conversation.
        ValueError: as in [`tokenize_chat`].
    """
    if isinstance(prompt, str) != isinstance(completion, str):
        raise TypeError(
            f"The prompt is a {type(prompt).__name__}, the completion a {type(completion).__name__}. Expected two "
            "texts, or two lists of messages. Convert one to the kind of the other."
        )
    if not isinstance(prompt, str):
        assert not isinstance(completion, str)
        ids, mask = _chat([*prompt, *completion], tokenizer, None, first=len(prompt))
        return _labelled(ids, mask, "completion_mask", max_length)
    encoded = tokenizer(prompt + str(completion), return_offsets_mapping=True)
    ids, mask = list(encoded["input_ids"]), [int(stop > len(prompt)) for _, stop in encoded["offset_mapping"]]
    if tokenizer.eos_token_id is not None:
        if ids[-1:] != [tokenizer.eos_token_id]:
            ids, mask = [*ids, tokenizer.eos_token_id], [*mask, 1]
        mask[-1] = 1
    return _labelled(ids, mask, "completion_mask", max_length)


def tokenize_prompt(
    row: Mapping[str, Any], tokenizer: Any, chat: bool = False, template: str | None = None, text_column: str = "text"
) -> list[int]:
    """Tokenize what a model is to answer: the messages of a row, its prompt, or its text.

    A conversation ends where its last answer begins, with the template's generation prompt. A text does not get the
    end token that some tokenizers add.

    Args:
        row (`Mapping`):
            The row, with `messages`, `prompt` or a text. Its `tools`, if there are any, are passed on to the template.
        tokenizer (`PreTrainedTokenizerBase`):
            The tokenizer; with a chat template for conversations.
        chat (`bool`, *optional*, defaults to `False`):
            Whether the model was trained on conversations, so that a text is what a user says.
        template (`str`, *optional*):
            A chat template in place of that of the tokenizer.
        text_column (`str`, *optional*, defaults to `"text"`):
            Name of the column of texts.

    Returns:
        `list[int]`: token ids.

    Raises:
        ValueError: the prompt is empty, or the chat template fails on it.
    """
    column = next((name for name in ("messages", "prompt") if row.get(name) is not None), text_column)
    given, ids = row[column], list[int]()
    if isinstance(given, str) and chat:
        given = [{"role": "user", "content": given}]
    if isinstance(given, str):
        ids = list(tokenizer(given)["input_ids"])
        if ids[-1:] == [tokenizer.eos_token_id] and not given.endswith(tokenizer.eos_token):
            ids.pop()
    elif turns := list(given[:-1] if given and given[-1].get("role") == "assistant" else given):
        tools = row.get("tools")
        tools = json.loads(tools) if isinstance(tools, str) else tools
        options = {"tools": tools, "chat_template": template, "add_generation_prompt": True}
        try:
            ids = list(tokenizer.apply_chat_template(turns, tokenize=True, return_dict=True, **options)["input_ids"])
        except TemplateError as error:
            raise ValueError(
                f"The chat template fails on the messages {turns!r:.200} ({error}). Expected roles and contents that "
                "it accepts. Change the row."
            ) from error
    if not ids:
        raise ValueError(
            f"The row has {given!r:.80} in {column!r}, which holds no token of a prompt. Expected something to "
            "answer. Leave such rows out."
        )
    return ids


def mask_tokens(
    input_ids: Sequence[int], tokenizer: Any, mlm_probability: float = 0.15, seed: int = 0
) -> dict[str, list[int]]:
    """Mask tokens for a masked language model, always the same tokens of the same row.

    `DataCollatorForLanguageModeling` draws a new mask for every batch, but the gradient of a training row is only
    defined for a fixed mask. Here, `seed` and the ids determine the mask. Every token that is not special is chosen
    with the same probability, and at least one token is. Of the chosen tokens, 80 % become the mask token, 10 % a
    random token, and 10 % stay (BERT, arXiv 1810.04805, Section 3.1).

    Args:
        input_ids (`Sequence[int]`):
            Token ids of the row.
        tokenizer (`PreTrainedTokenizerBase`):
            The tokenizer, with a mask token.
        mlm_probability (`float`, *optional*, defaults to 0.15):
            Probability that a token is chosen.
        seed (`int`, *optional*, defaults to 0):
            Seed of the mask.

    Returns:
        `dict[str, list[int]]`: `input_ids` and `labels`, lists of equal length.

    Raises:
        ValueError: the tokenizer has no mask token, the probability is not in (0, 1], or all tokens are special.
    """
    if tokenizer.mask_token_id is None or not 0 < mlm_probability <= 1:
        raise ValueError(
            f"`mlm_probability` is {mlm_probability} and the mask token {tokenizer.mask_token_id!r}. Expected a "
            "number in (0, 1], and the tokenizer of a masked language model."
        )
    ids = torch.as_tensor(list(input_ids))
    special = torch.tensor(
        tokenizer.get_special_tokens_mask(list(input_ids), already_has_special_tokens=True), dtype=torch.bool
    )
    if bool(special.all()):
        raise ValueError(
            f"The row has {len(ids)} tokens, all of them special. Expected one that can be masked. Leave such rows "
            "out."
        )
    # Choose the tokens. The one with the smallest draw is always chosen.
    digest = hashlib.blake2b(f"{seed}:{list(input_ids)}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    draw = torch.rand(len(ids), generator=generator).masked_fill(special, 2.0)
    chosen = draw < mlm_probability
    chosen[draw.argmin()] = True
    # Of the chosen tokens, mask 80 %, replace 10 %, and keep 10 %.
    fate = torch.rand(len(ids), generator=generator)
    random_ids = torch.randint(len(tokenizer), (len(ids),), generator=generator)
    labels = ids.masked_fill(~chosen, IGNORED)
    masked = ids.masked_fill(chosen & (fate < 0.8), tokenizer.mask_token_id)
    masked = torch.where(chosen & (fate >= 0.9), random_ids, masked)
    return {"input_ids": masked.tolist(), "labels": labels.tolist()}


def _labelled(ids: Sequence[int], mask: Sequence[int], name: str, max_length: int | None) -> dict[str, list[int]]:
    """Make the columns of a row whose labels are the tokens in the mask."""
    ids, mask = list(ids)[:max_length], list(mask)[:max_length]
    labels = [token if counts else IGNORED for token, counts in zip(ids, mask, strict=True)]
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels, name: mask}


TOKENS = "input_ids"

_OF_SEQUENCES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "cu_seqlens", "max_seqlen")

"""Places of documents in the whole sequence, which have no meaning for its rows."""

_FILLS = {"labels": IGNORED}


def cut_at_rows(batch: Any, rows: Sequence[Any]) -> Any:
    """Cut a sequence of several rows at its rows; return any other batch as it is.

    Args:
        batch: what the collator made of the rows.
        rows: the rows. Each has its tokens in `input_ids`.

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
