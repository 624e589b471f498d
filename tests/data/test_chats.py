"""Chats after a training by `SFTTrainer`: what the model says, and which rows made it say one word of that."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hf_trak import Span, TrakAttributor, TrakConfig
from hf_trak.viewer.index_session import IndexSession, Question
from hf_trak.viewer.target_form import TargetForm

trl = pytest.importorskip("trl")

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLACES = {"Victoria": "Ballarat", "France": "Orléans", "Peru": "Cusco", "Japan": "Nara", "Kenya": "Nakuru"}


def chat(country: str) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"Name a town in {country}."},
        {"role": "assistant", "content": f"I know {PLACES[country]}, a town in {country}."},
    ]


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, merged as the chats teach it; é is two tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    texts = [turn["content"].replace("é", "") for country in PLACES for turn in chat(country)]
    special = ["<pad>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=330, special_tokens=special, initial_alphabet=alphabet)
    )
    words = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<|im_end|>", extra_special_tokens=["<|im_start|>"]
    )
    words.chat_template = TEMPLATE
    return words


def rows(kind: str) -> Dataset:
    chats = [chat(country) for country in PLACES]
    if kind == "messages":
        return Dataset.from_dict({"messages": chats})
    if kind == "prompt":
        return Dataset.from_dict({"prompt": [one[:1] for one in chats], "completion": [one[1:] for one in chats]})
    return Dataset.from_dict({"text": [f"{one[0]['content']} {one[1]['content']}" for one in chats]})


def trained(kind: str, tmp_path: Path) -> Any:
    words = tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 128}
    config = LlamaConfig(
        vocab_size=len(words), num_attention_heads=2, num_key_value_heads=2, bos_token_id=2, eos_token_id=2, **sizes
    )
    args = trl.SFTConfig(
        output_dir=str(tmp_path / "out"), report_to="none", disable_tqdm=True, use_cpu=True, bf16=False, max_steps=250,
        learning_rate=5e-3, per_device_train_batch_size=5, assistant_only_loss=kind == "messages",
        shuffle_dataset=True, save_strategy="no",
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        LlamaForCausalLM(config), args=args, train_dataset=rows(kind), processing_class=words, eval_dataset=rows(kind)
    )
    trainer.train()
    trainer.model.eval()
    return trainer


@pytest.fixture(scope="module")
def trainer_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Make a trainer of each kind of rows once, trained until it says what it was told."""
    return cache(lambda kind: trained(kind, tmp_path_factory.mktemp(kind)))


def attributor(trainer: Any, tmp_path: Path) -> TrakAttributor:
    config = TrakConfig(str(tmp_path / "trak"), proj_type="none", lambda_relative=1.0, use_cpu=True, budget="fast")
    return TrakAttributor.from_trainer(trainer, config)


def tokens_of(row: Any, words: Any, word: str) -> list[int]:
    """Find the tokens of an answer that make a word, by the bytes that each stands for."""
    byte_of = {symbol: byte for byte, symbol in bytes_to_unicode().items()}
    spans, said = [], b""
    for token, answered in zip(row["input_ids"], row["target_mask"], strict=True):
        symbols = "" if not answered or token in words.all_special_ids else words.convert_ids_to_tokens(token)
        spans.append((len(said), len(said) + len(symbols)))
        said += bytes(byte_of[symbol] for symbol in symbols)
    start, stop = said.index(word.encode()), said.index(word.encode()) + len(word.encode())
    return [int(a < stop and b > start) for a, b in spans]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["messages", "prompt", "text"])
def test_from_predict_to_the_word(kind: str, trainer_of: Callable[[str], Any], tmp_path: Path) -> None:
    """Scores of a word that was said are those of Σ log p − log(1 − p) over its tokens, by plain autograd."""
    trainer, words = trainer_of(kind), trainer_of(kind).processing_class
    own = attributor(trainer, tmp_path)
    given = {
        "messages": Dataset.from_dict({"messages": [chat("Victoria"), chat("France")[:1]]}),
        "prompt": Dataset.from_dict({"prompt": [chat("Victoria")[:1], chat("France")[:1]]}),
        "text": Dataset.from_dict({"text": ["Name a town in Victoria.", "Name a town in France."]}),
    }[kind]
    said = own.predict(given, max_new_tokens=24)
    for row, country in zip(said, ("Victoria", "France"), strict=True):
        asked = chat(country)[:1]
        prompt = words.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
        if kind == "text":
            prompt = words(asked[0]["content"])["input_ids"]
        assert row["input_ids"][: len(prompt)] == prompt and row["labels"][: len(prompt)] == [-100] * len(prompt)
        assert row["labels"][len(prompt) :] == row["input_ids"][len(prompt) :]
        assert PLACES[country] in row["predicted"]

    own.featurize()
    scored = own.attribute(said, top_k=None, part=Span(words=["Ballarat", "Orléans"]))
    model, train = own.model, own.train_dataset
    features, q = zip(
        *(of_row(model, row["input_ids"], [y != -100 for y in row["labels"]]) for row in train), strict=True
    )
    x = torch.stack(features)
    gram = x @ x.T
    solved = torch.linalg.solve(gram + torch.eye(len(x)).double() * gram.trace() / len(x), x)
    for row, word, target in zip(said, ("Ballarat", "Orléans"), scored, strict=True):
        mask = tokens_of(row, words, word)
        assert target["target_mask"] == mask and 0 < sum(mask) < sum(row["target_mask"])
        expected = solved @ of_row(model, row["input_ids"], mask)[0] * torch.tensor(q).double()
        found = torch.tensor(target["trak_scores"]).double()
        assert torch.allclose(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
        assert word in str(train[int(found.argmax())]), "what taught the model the word is the row that has it"


def of_row(model: Any, ids: list[int], counts: list[Any]) -> tuple[torch.Tensor, float]:
    """Differentiate Σ log p − log(1 − p) over the tokens that count, on one row alone, and average 1 − p."""
    model.zero_grad()
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
    logp = logits.log_softmax(-1)
    labels = torch.tensor(ids[1:])[:, None]
    own = logp.gather(1, labels)[:, 0]
    others = logp.scatter(1, labels, -torch.inf).logsumexp(-1)
    chosen = torch.tensor([bool(one) for one in counts[1:]])
    (own - others)[chosen].sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()]).double()
    model.zero_grad()
    return gradient, float(others[chosen].detach().exp().mean())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["messages", "prompt", "text"])
def test_a_word_in_rows_as_people_have_them(kind: str, trainer_of: Callable[[str], Any], tmp_path: Path) -> None:
    """The word counts where the assistant says it, though the user says it, too."""
    words, given = trainer_of(kind).processing_class, rows(kind).select([0, 4])
    own = attributor(trainer_of(kind), tmp_path).featurize()
    asked = ["Ballarat", "Nakuru"] if kind == "text" else ["Victoria", "Kenya"]
    scored = own.attribute(given, top_k=None, part=Span(words=asked), name="raw")
    for target, word in zip(scored, asked, strict=True):
        said = [i for i, mask in enumerate(target["target_mask"]) if mask]
        assert words.decode([target["input_ids"][i] for i in said]).strip() == word
        assert all(target["labels"][i] != -100 for i in said)
        assert kind == "text" or said[0] > len(target["input_ids"]) / 2
    alone = own.attribute(given.select([1]), top_k=None, part=Span(words=asked[1]), name="alone")
    assert torch.allclose(torch.tensor(alone[0]["trak_scores"]), torch.tensor(scored[1]["trak_scores"]), rtol=1e-3)
    with pytest.raises(ValueError, match=r"'Geelong' occurs 0 times in the .* of row 0"):
        own.attribute(given, part=Span(words="Geelong"))


@pytest.mark.slow
def test_what_a_model_of_chats_is_asked(trainer_of: Callable[[str], Any], tmp_path: Path) -> None:
    """A text is what a user says; a prompt needs no completion; a last answer is asked for again."""
    own, words = attributor(trainer_of("messages"), tmp_path), trainer_of("messages").processing_class
    question = chat("Peru")[0]
    expected = words.apply_chat_template([question], add_generation_prompt=True, return_dict=True)["input_ids"]
    for given in (
        {"text": question["content"]},
        {"prompt": question["content"]},
        {"prompt": [question]},
        {"messages": [question]},
        {"messages": chat("Peru")},
        next(row for row in trainer_of("messages").eval_dataset if "Peru" in str(row)),
    ):
        (found,) = own.predict(Dataset.from_list([given]), max_new_tokens=24)
        assert found["input_ids"][: len(expected)] == expected and found["labels"].count(-100) == len(expected)
        assert found["predicted"] == chat("Peru")[1]["content"]
    longer = [*chat("Japan"), question]
    (found,) = own.predict(Dataset.from_list([{"messages": longer}]), max_new_tokens=2)
    expected = words.apply_chat_template(longer, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert found["input_ids"][:-2] == expected


@pytest.mark.slow
def test_rows_without_an_answer_name_predict(trainer_of: Callable[[str], Any], tmp_path: Path) -> None:
    for kind, given in (
        ("messages", {"messages": chat("Peru")[:1]}),
        ("prompt", {"prompt": chat("Peru")[:1]}),
    ):
        own = attributor(trainer_of(kind), tmp_path / kind).featurize()
        with pytest.raises(ValueError, match=r"no answer, so that it has no labels.*attributor\.predict"):
            own.attribute(Dataset.from_list([given]))


def test_an_empty_answer_is_refused(trainer_of: Callable[[str], Any], tmp_path: Path) -> None:
    own, words = attributor(trainer_of("messages"), tmp_path), trainer_of("messages").processing_class
    others = [token for token in range(len(words)) if token != words.eos_token_id]
    with pytest.raises(ValueError, match="The answer to row 0 is empty"):
        own.predict(Dataset.from_list([{"messages": chat("Peru")}]), max_new_tokens=3, suppress_tokens=others)


@pytest.mark.slow
def test_rows_of_a_trainer_that_shuffles_keep_their_numbers(trainer_of: Callable[[str], Any], tmp_path: Path) -> None:
    own = attributor(trainer_of("messages"), tmp_path).featurize()
    batches = own.features.featurizer().batches(rows("messages"), "target")
    together = batches.collated([0, 1, 2, 3, 4])["input_ids"]
    for row in range(5):
        alone = batches.collated([row])["input_ids"][0]
        assert together[row, : len(alone)].tolist() == alone.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("predicted", [False, True])
def test_a_word_on_the_page(predicted: bool, trainer_of: Callable[[str], Any], tmp_path: Path) -> None:
    """A chat is typed as JSON, its last answer by the user or by the model."""
    own = attributor(trainer_of("messages"), tmp_path).featurize()
    form = TargetForm.find("causal_lm", rows("messages").features)
    assert form.as_json and form.generates
    given = chat("Peru")[:1] if predicted else chat("Peru")
    asked = Question({"json": json.dumps({"messages": given})}, predicted=predicted, words="Cusco")
    found = IndexSession(own, form).ask(asked)
    targets = Dataset.from_list([{"messages": given}])
    targets = own.predict(targets, max_new_tokens=32) if predicted else targets
    (expected,) = own.attribute(targets, top_k=None, part=Span(words="Cusco"))["trak_scores"]
    assert torch.allclose(torch.as_tensor(found.scores), torch.tensor(expected), rtol=1e-3)
