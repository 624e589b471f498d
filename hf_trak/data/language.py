"""Rows of text as token rows with labels: chats, prompts with completions, masked tokens.

Each function takes one row and returns the columns that the language model tasks read; use them with `Dataset.map`.
Text beyond `max_length` is cut off on the right, and the labels with it: a row that loses all of them scores 0 as
training data and is refused as a target.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_trak.modelout_functions.tokens import IGNORED

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Messages = Sequence[Mapping[str, Any]]
"""A conversation: `{"role": …, "content": …}`, one per turn."""


def tokenize_chat(
    messages: Messages, tokenizer: Any, max_length: int | None = None, tools: Sequence[Any] | None = None
) -> dict[str, list[int]]:
    """A conversation through the tokenizer's chat template. Labels are the tokens that the assistant produces.

    Where the template marks them with `{% generation %}`, those; otherwise, for every assistant turn, what the
    template adds between the generation prompt and the end of the turn.

    Args:
        messages: the turns.
        tokenizer: a fast tokenizer with a chat template.
        max_length: tokens to keep.
        tools: passed on to the template.

    Returns:
        `input_ids`, `attention_mask`, `labels` and `assistant_masks`, lists of one length.

    Raises:
        ValueError: no assistant turn; no template; a template that rewrites earlier turns and marks nothing.
    """
    ids, mask = _chat(messages, tokenizer, tools, first=0)
    return _labelled(ids, mask, "assistant_masks", max_length)


def _chat(
    messages: Messages, tokenizer: Any, tools: Sequence[Any] | None, first: int
) -> tuple[Sequence[int], Sequence[int]]:
    """The tokens of a conversation, and which of them the assistant produces in turn `first` or later."""
    turns = [turn for turn, message in enumerate(messages) if message.get("role") == "assistant"]
    wanted = [turn for turn in turns if turn >= first]
    if not wanted:
        raise ValueError(
            f"The conversation has the roles {[message.get('role') for message in messages]}. Expected an 'assistant' "
            f"turn (from turn {first} on), which is what a model learns to produce."
        )
    if _GENERATION.search(tokenizer.get_chat_template(tools=tools)):
        encoded = tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        mask = encoded["assistant_masks"]
        runs = [i for i, entry in enumerate(mask) if entry and (i == 0 or not mask[i - 1])]
        if len(wanted) < len(turns):
            if len(runs) != len(turns):
                raise ValueError(
                    f"The chat template marks {len(runs)} parts in {len(turns)} assistant turns. Expected one "
                    "each, to tell those of the prompt from those of the completion."
                )
            mask = [entry if i >= runs[-len(wanted)] else 0 for i, entry in enumerate(mask)]
        return encoded["input_ids"], mask

    def rendered(part: Messages, prompt: bool = False) -> str:
        return tokenizer.apply_chat_template(list(part), tools=tools, tokenize=False, add_generation_prompt=prompt)

    text, spans = rendered(messages), []
    for turn in wanted:
        before, after = rendered(messages[:turn], prompt=True), rendered(messages[: turn + 1])
        if not (after.startswith(before) and text.startswith(after)):
            raise ValueError(
                f"The chat template renders turn {turn} differently once more turns follow, so what the assistant "
                "produced cannot be told from the text. Expected a template that marks it: put the assistant's part "
                "between {% generation %} and {% endgeneration %}."
            )
        spans.append((len(before), len(after)))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return encoded["input_ids"], [int(any(s < b and e > a for a, b in spans)) for s, e in encoded["offset_mapping"]]


def tokenize_prompt_completion(
    prompt: str | Messages, completion: str | Messages, tokenizer: Any, max_length: int | None = None
) -> dict[str, list[int]]:
    """A prompt and what is to follow it, as in TRL's datasets: two texts, or two parts of a conversation.

    Two texts are tokenized together, with the tokenizer's end token behind them; a token belongs to the completion
    if it holds one of its characters. Of conversations, the assistant's turns in the completion count.

    Returns:
        `input_ids`, `attention_mask`, `labels` and `completion_mask`, lists of one length.

    Raises:
        TypeError: one is a text and the other a conversation.
        ValueError: all of [`tokenize_chat`].
    """
    if isinstance(prompt, str) != isinstance(completion, str):
        raise TypeError(
            f"The prompt is a {type(prompt).__name__}, the completion a {type(completion).__name__}. Expected two "
            "texts, or two lists of messages."
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


def mask_tokens(
    input_ids: Sequence[int], tokenizer: Any, mlm_probability: float = 0.15, seed: int = 0
) -> dict[str, list[int]]:
    """Mask tokens for a masked language model, always the same ones of the same row.

    `DataCollatorForLanguageModeling` draws anew for every batch; a training example whose gradient is to be
    attributed needs a fixed mask. Which tokens are masked follows from `seed` and the ids; every token that is not
    special is drawn with the same probability, at least one is; of those drawn, 80 % become the mask token, 10 % a
    random one, and 10 % stay (BERT, arXiv 1810.04805, Section 3.1).

    Returns:
        `input_ids` and `labels`, lists of the same length.

    Raises:
        ValueError: the tokenizer has no mask token, the probability is not in (0, 1], or all tokens are special.
    """
    if tokenizer.mask_token_id is None or not 0 < mlm_probability <= 1:
        raise ValueError(
            f"`mlm_probability` is {mlm_probability} and the mask token {tokenizer.mask_token_id!r}. Expected a "
            "number in (0, 1] and a tokenizer of a masked language model."
        )
    ids = torch.as_tensor(list(input_ids))
    special = torch.tensor(
        tokenizer.get_special_tokens_mask(list(input_ids), already_has_special_tokens=True), dtype=torch.bool
    )
    if bool(special.all()):
        raise ValueError(f"The row has {len(ids)} tokens, all of them special. Expected one that can be masked.")
    digest = hashlib.blake2b(f"{seed}:{list(input_ids)}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    draw = torch.rand(len(ids), generator=generator).masked_fill(special, 2.0)
    chosen = draw < mlm_probability
    chosen[draw.argmin()] = True
    fate = torch.rand(len(ids), generator=generator)
    random_ids = torch.randint(len(tokenizer), (len(ids),), generator=generator)
    labels = ids.masked_fill(~chosen, IGNORED)
    masked = ids.masked_fill(chosen & (fate < 0.8), tokenizer.mask_token_id)
    masked = torch.where(chosen & (fate >= 0.9), random_ids, masked)
    return {"input_ids": masked.tolist(), "labels": labels.tolist()}


def _labelled(ids: Sequence[int], mask: Sequence[int], name: str, max_length: int | None) -> dict[str, list[int]]:
    ids, mask = list(ids)[:max_length], list(mask)[:max_length]
    labels = [token if counts else IGNORED for token, counts in zip(ids, mask, strict=True)]
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels, name: mask}
