"""Tokenization of chats, prompts with completions, and masked tokens."""

import pytest
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from hf_trak.data.language import mask_tokens, tokenize_chat, tokenize_prompt_completion

WORDS = ["hello", "there", "who", "are", "you", "a", "fox", "what", "color", "red", "user", "assistant", "system", ":"]
MARKED = (
    "{% for m in messages %}{{ m.role }} : {% if m.role == 'assistant' %}{% generation %}{{ m.content }} </s>"
    "{% endgeneration %} {% else %}{{ m.content }} </s> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
REWRITING = "{% for m in messages %}{{ loop.length }}{{ m.role }} : {{ m.content }} </s> {% endfor %}"
CHAT = [
    {"role": "system", "content": "hello"},
    {"role": "user", "content": "who are you"},
    {"role": "assistant", "content": "a fox"},
    {"role": "user", "content": "what color"},
    {"role": "assistant", "content": "red"},
]


def make_tokenizer(template: str | None = None, offset: bool = True) -> tf.PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<mask>", *WORDS])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    plain.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = tf.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", bos_token="<s>", eos_token="</s>", mask_token="<mask>"
    )
    tokenizer.chat_template = template
    return tokenizer


def produced(tokenizer, row) -> str:
    return tokenizer.decode([token for token in row["labels"] if token != -100])


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "by prefix"])
def test_labels_of_a_chat_are_what_the_assistant_says(template):
    tokenizer = make_tokenizer(template)
    row = tokenize_chat(CHAT, tokenizer)
    assert tokenizer.decode(row["input_ids"]) == (
        "system : hello </s> user : who are you </s> assistant : a fox </s> "
        "user : what color </s> assistant : red </s>"
    )
    assert produced(tokenizer, row) == "a fox </s> red </s>"
    assert len({len(column) for column in row.values()}) == 1
    assert row["labels"] == [t if m else -100 for t, m in zip(row["input_ids"], row["assistant_masks"], strict=True)]
    cut = tokenize_chat(CHAT, tokenizer, max_length=15)
    assert cut == {name: column[:15] for name, column in row.items()}
    assert produced(tokenizer, cut) == "a fox </s>"


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "by prefix"])
def test_of_a_conversational_prompt_nothing_counts(template):
    tokenizer = make_tokenizer(template)
    row = tokenize_prompt_completion(CHAT[:4], CHAT[4:], tokenizer)
    assert row["input_ids"] == tokenize_chat(CHAT, tokenizer)["input_ids"]
    assert produced(tokenizer, row) == "red </s>"
    assert sum(row["completion_mask"]) == 2


def test_chats_that_cannot_be_labelled_are_refused():
    with pytest.raises(ValueError, match=r"roles \['system', 'user'\].*'assistant'.*`--predict`"):
        tokenize_chat(CHAT[:2], make_tokenizer(MARKED))
    with pytest.raises(ValueError, match=r"differently once more turns follow.*\{% generation %\}"):
        tokenize_chat(CHAT, make_tokenizer(REWRITING))
    with pytest.raises(ValueError, match="chat_template"):
        tokenize_chat(CHAT, make_tokenizer(None))


def test_labels_of_a_text_are_those_of_the_completion():
    tokenizer = make_tokenizer()
    row = tokenize_prompt_completion("who are you", " a fox", tokenizer)
    assert tokenizer.decode(row["input_ids"]) == "<s> who are you a fox </s>"
    assert produced(tokenizer, row) == "a fox </s>"
    assert row["completion_mask"] == [0, 0, 0, 0, 1, 1, 1]
    # the token "you" has its last characters in the completion, so it belongs to it
    assert produced(tokenizer, tokenize_prompt_completion("who are y", "ou a fox", tokenizer)) == "you a fox </s>"
    gone = tokenize_prompt_completion("who are you", " a fox", tokenizer, max_length=3)
    assert gone["labels"] == [-100] * 3
    with pytest.raises(TypeError, match="The prompt is a str, the completion a list"):
        tokenize_prompt_completion("who", CHAT, tokenizer)


def test_masks_are_the_same_every_time_and_depend_on_the_row():
    tokenizer = make_tokenizer()
    ids = tokenizer("who are you a fox what color red " * 40)["input_ids"]
    row = mask_tokens(ids, tokenizer, seed=3)
    assert row == mask_tokens(list(ids), tokenizer, seed=3)
    assert row["labels"] != mask_tokens(ids, tokenizer, seed=4)["labels"]
    chosen = [i for i, label in enumerate(row["labels"]) if label != -100]
    assert 0 not in chosen  # <s> is special
    assert all(row["labels"][i] == ids[i] for i in chosen)
    assert all(row["input_ids"][i] == ids[i] for i in range(len(ids)) if i not in chosen)
    assert 0.08 < len(chosen) / len(ids) < 0.24
    assert 0.6 < sum(row["input_ids"][i] == tokenizer.mask_token_id for i in chosen) / len(chosen) < 0.95


def test_at_least_one_token_is_masked():
    tokenizer = make_tokenizer()
    for seed in range(20):
        row = mask_tokens([1, 7, 8], tokenizer, mlm_probability=0.01, seed=seed)
        assert [label != -100 for label in row["labels"]].count(True) == 1 and row["labels"][0] == -100
    with pytest.raises(ValueError, match="all of them special"):
        mask_tokens([1, 2], tokenizer)
    with pytest.raises(ValueError, match="`mlm_probability` is 0"):
        mask_tokens([7], tokenizer, mlm_probability=0)
