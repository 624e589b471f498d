"""Places of what an assistant says, against the offsets of the tokenizer in the text that a chat template renders."""

from typing import Any

import pytest
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hf_trak import Span
from hf_trak.data.said import said_tokens
from hf_trak.scores.said_parts import said_parts

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text if part.text else '<image>' }}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>"
    "{% endif %}{% endfor %}"
)
GEMMA = (
    "<s>{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
)
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
)


@pytest.fixture
def words() -> PreTrainedTokenizerFast:
    """Bytes, some of them merged, and tokens of chats."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        ["the user and the assistant", "is it a model or a mode ?"] * 9,
        trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", extra_special_tokens=special[3:]
    )


def chat(*texts: Any) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def tokens(text: str, start: int, stop: int, words: Any) -> tuple[list[int], list[int]]:
    """Tokenize a text, and mark the tokens of some of its characters."""
    found = words(text, add_special_tokens=False, return_offsets_mapping=True)
    return found["input_ids"], [int(a < stop and b > start) for a, b in found["offset_mapping"]]


@pytest.mark.parametrize(
    ("template", "answer", "end"),
    [
        (CHATML, "a", "<|im_end|>"),
        (CHATML, "is", "<|im_end|>"),
        (CHATML, "é", "<|im_end|>"),
        (CHATML, "0", "<|im_end|>"),
        (MISTRAL, "I", "</s>"),
        (GEMMA, " mode\n", "<end_of_turn>"),
        (GEMMA, "start", "<end_of_turn>"),
    ],
)
def test_short_answers_are_not_in_the_template(template: str, answer: str, end: str, words: Any) -> None:
    words.chat_template, word = template, answer.strip()
    for question in ("Which ?", answer, ""):
        messages = chat(question, answer)
        text = words.apply_chat_template(messages, tokenize=False)
        place = text.rindex(word + end)
        ids, mask = tokens(text, place, place + len(word), words)
        assert 0 < sum(mask) < len(ids) / 2
        given = (
            {"messages": [messages], "input_ids": [ids]},
            {
                "prompt": [messages[:1]],
                "completion": [messages[1:]],
                "input_ids": [ids],
            },
        )
        for row in map(Dataset.from_dict, given):
            assert Span(words=word).of(row, words)["target_mask"][:] == [mask]
            parts = said_parts(row, "word", words)
            assert parts["part"][:] == [word] and parts["target_mask"][:] == [mask]
        # a second `<s>`, an end token, and padding
        for before, after in (([1], []), ([], [2]), ([], [2, 0, 0]), ([0, 0], [])):
            row = Dataset.from_dict({"messages": [messages], "input_ids": [[*before, *ids, *after]]})
            found = Span(words=word).of(row, words)["target_mask"][0]
            assert found == [0] * len(before) + mask + [0] * len(after)


def test_parts_of_a_content_are_a_text(words: Any) -> None:
    """A question in parts has an answer's words, which are not the answer."""
    words.chat_template = CHATML
    asked = [{"type": "image", "text": None}, {"type": "text", "text": "Is it a cat"}, {"type": "text", "text": " ?"}]
    answered = [{"type": "text", "text": "it is"}, {"type": "text", "text": " a cat"}]
    messages = chat(asked, answered)
    text = words.apply_chat_template(messages, tokenize=False)
    assert "<image>Is it a cat ?" in text
    place = text.index("it is a cat")
    for word in ("it", "a cat"):
        start = text.index(word, place)
        ids, mask = tokens(text, start, start + len(word), words)
        row = Dataset.from_dict({"messages": [messages], "input_ids": [ids]})
        assert Span(words=word).of(row, words)["target_mask"][:] == [mask]
    assert said_parts(row, "sentence", words)["part"][:] == ["it is a cat"]


def test_turns_that_a_template_changes_or_that_are_cut_off(words: Any) -> None:
    words.chat_template = THINKING
    messages = chat("What is it ?", "<think>a cat ?</think>it is a", "What ?", "ést a <think>")
    text = words.apply_chat_template(messages, tokenize=False)
    ids, _ = tokens(text, 0, 0, words)
    said, _, _, within = said_tokens({"messages": messages}, ids, words, "messages")
    assert said == text and [text[start:stop] for start, stop in within] == ["it is a", "ést a <think>"]
    for count in range(len(ids)):
        cut, _, _, left = said_tokens({"messages": messages}, ids[:count], words, "messages")
        expected = [(start, min(stop, len(cut))) for start, stop in within if start < len(cut)]
        assert left == expected, f"{count} tokens"


def test_a_text_before_the_first_turn_may_differ(words: Any) -> None:
    """Some templates write the day on which they are rendered."""
    messages = chat("Which ?", "a")
    words.chat_template = "Today is May 1.\n" + CHATML
    text = words.apply_chat_template(messages, tokenize=False)
    ids, mask = tokens(text, text.rindex("a<|im_end|>"), text.rindex("a<|im_end|>") + 1, words)
    words.chat_template = "Today is March 17.\n" + CHATML
    row = Dataset.from_dict({"messages": [messages], "input_ids": [ids]})
    assert Span(words="a").of(row, words)["target_mask"][:] == [mask]


def test_without_the_template_an_answer_has_to_be_in_one_place(words: Any) -> None:
    def found(text: str, *turns: str) -> list[str]:
        row, ids = {"messages": chat(*turns)}, words(text)["input_ids"]
        said, _, _, within = said_tokens(row, ids, words, "messages")
        return [said[start - 1 : stop] for start, stop in within]

    assert found("user: is it ? assistant: no", "is it ?", "no") == [" no"]
    assert found("Q:x ? A:no Q:y ? A:no", "x ?", "no", "y ?", "no") == [":no", ":no"], "turns have an order"
    assert found("<|im_start|>Q:x ? A:s<|im_end|></s>", "x ?", "s") == [":s"], "nobody says a special token"
    message = r"An assistant says 'a', which is in several places.*'user: is it \? assistant: a'.*Make the tokens with"
    with pytest.raises(ValueError, match=message):
        found("user: is it ? assistant: a", "is it ?", "a")
    words.chat_template = CHATML
    with pytest.raises(ValueError, match=message):
        found("user: is it ? assistant: a", "is it ?", "a")


def test_a_completion_follows_its_prompt(words: Any) -> None:
    """The prompt ends with a space, and the completion is a word of `<s>`."""
    text = "<s>is it s ? s</s>"
    ids, mask = tokens(text, text.rindex("s</s>"), text.rindex("</s>"), words)
    row = Dataset.from_dict({"prompt": ["is it s ? "], "completion": ["s"], "input_ids": [ids]})
    assert Span(words="s").of(row, words)["target_mask"][:] == [mask]
    ids, mask = tokens("s</s>", 0, 1, words)
    row = Dataset.from_dict({"completion": ["s"], "input_ids": [ids]})
    assert Span(words="s").of(row, words)["target_mask"][:] == [mask], "labels of a translation"
