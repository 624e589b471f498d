"""Rows that words alone find, beside those of the attribution: in the report, in a notebook and in a saved run."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from hf_trak import Span, TrakAttributor, TrakConfig
from hf_trak.attributor import last_result
from hf_trak.report import AttributionRun, write_report
from hf_trak.report.words import row_texts

TRAIN = [
    "the king lives in a castle by the sea",
    "a queen lives in <b> town </b> far away",
    "the town of Ballarat had gold",
    "gold and silver and iron",
    "my sister sells boats",
    "iron boats",
]
TARGETS = ["who rules ? the king lives in Ballarat", "what is there ? gold and silver"]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> TrakAttributor:
    texts = [word for text in TRAIN + TARGETS for word in text.split()]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(dict.fromkeys(["<pad>", *texts]))}, "<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>")
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(words), n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=0)
    args = TrakConfig(str(tmp_path_factory.mktemp("trak")), proj_dim=32, use_cpu=True, budget="fast")
    rows = rows_of(TRAIN, words)
    return TrakAttributor(GPT2LMHeadModel(config), args, rows, processing_class=words, task="causal_lm").featurize()


def rows_of(texts: list[str], words: Any) -> Dataset:
    ids = [words(text)["input_ids"] for text in texts]
    return Dataset.from_dict({"text": texts, "input_ids": ids, "labels": ids})


def answers(words: Any) -> Dataset:
    """Return targets as `predict` does, whose answers follow a question mark."""
    rows = rows_of(TARGETS, words)
    place = [text.split().index("?") + 1 for text in TARGETS]
    masks = [[int(i >= start) for i in range(len(text.split()))] for text, start in zip(TARGETS, place, strict=True)]
    return rows.add_column("target_mask", masks).add_column("predicted", [one.split("? ")[1] for one in TARGETS])


def test_rows_with_the_same_words_are_beside_those_of_the_attribution(own: TrakAttributor, tmp_path: Path) -> None:
    own.attribute(answers(own.features.processing_class), top_k=3)
    run = AttributionRun.load(last_result(own).run(own.features).save(tmp_path))
    first, second = run.scored["trak_words"]
    assert [one["said"][one["start"] : one["stop"]] for one in (first, second)] == [
        "the king lives in Ballarat",
        "gold and silver",
    ]
    assert [(one["row"], one["score"]) for one in first["same"]] == [(0, 4), (1, 2)]
    shared = first["same"][0]
    assert shared["text"][shared["start"] : shared["stop"]] == "the king lives in"
    assert [(one["row"], one["score"]) for one in second["same"]] == [(3, 3)]
    assert first["bm25"][0]["row"] == 0 and {one["row"] for one in second["bm25"]} == {2, 3}
    assert first["verified"] is None
    page = write_report(run, tmp_path / "page.html").read_text()
    assert page.count("Verbatim</h") == page.count("BM25, in units of its own</h") == page.count("Influence</h") == 2
    assert "One training step</h" not in page
    assert "<mark>the king lives in</mark>" in page and "<mark>gold and silver</mark>" in page
    assert "&lt;b&gt; town" in page and "<b> town" not in page
    shown = own.show(0)
    assert "same words: row 0 (4 words), row 1 (2 words)" in shown.text and "the king lives in</mark>" in shown.page


def test_a_span_is_compared_alone(own: TrakAttributor) -> None:
    """The sequence goes on to both sides of the span, and BM25 looks for its words."""
    rows = answers(own.features.processing_class).select([0])
    own.attribute(rows, top_k=3, part=Span(words="king"))
    (found,) = last_result(own).run(own.features).scored["trak_words"]
    assert found["said"][found["start"] : found["stop"]] == "king" and found["said"].endswith("lives in Ballarat")
    (alone,) = found["same"]
    assert (alone["row"], alone["score"]) == (0, 4) and [one["row"] for one in found["bm25"]] == [0]
    assert alone["text"][alone["start"] : alone["stop"]] == "the king lives in"


def test_chats_are_compared_by_what_the_assistant_says(own: TrakAttributor) -> None:
    words = own.features.processing_class
    in_parts = [{"role": "assistant", "content": [{"type": "text", "text": "sister sells boats"}]}]
    for rows in (chat(words), chat(words).remove_columns("messages").add_column("messages", [in_parts])):
        own.attribute(rows, top_k=3)
        (found,) = last_result(own).run(own.features).scored["trak_words"]
        assert found["said"] == "sister sells boats" and [one["row"] for one in found["same"]] == [4]


def chat(words: Any) -> Dataset:
    turns = [{"role": "user", "content": "gold and silver"}, {"role": "assistant", "content": "sister sells boats"}]
    rows = rows_of(["gold and silver my sister sells boats"], words).remove_columns("text")
    return rows.add_column("messages", [turns])


@pytest.mark.slow
def test_every_word_of_an_answer_has_its_sources(own: TrakAttributor, tmp_path: Path) -> None:
    """Influence is that of a span of the word, steps are those that a copy of the model takes by hand."""
    words = own.features.processing_class
    sources = own.sources(answers(words), top_k=3)
    said = ["the", "king", "lives", "in", "Ballarat"], ["gold", "and", "silver"]
    assert sources["part"][:] == [*said[0], *said[1]] and sources["trak_target"][:] == [0] * 5 + [1] * 3
    for place in (1, 4):
        alone = own.attribute(answers(words).select([0]), top_k=3, part=Span(words=said[0][place]))
        assert alone["trak_indices"][:] == [sources[place]["trak_indices"]]
        np.testing.assert_allclose(sources[place]["trak_scores"], alone["trak_scores"][0], rtol=1e-5)
    own.sources(answers(words), top_k=3)
    ballarat = sources[4]["trak_words"]
    named = {one["row"] for part in ("same", "bm25") for one in ballarat[part]} | {
        row for row, score in zip(sources[4]["trak_indices"], sources[4]["trak_scores"], strict=True) if score > 0
    }
    assert {one["row"] for one in ballarat["verified"]} == named and 2 in named
    changes = [one["score"] for one in ballarat["verified"]]
    assert changes == sorted(changes, reverse=True)
    truth = [by_hand(own, sources[4], one["row"]) for one in ballarat["verified"]]
    # The learning rate is the library's choice, which one factor is.
    np.testing.assert_allclose(np.array(truth) / np.array(changes), truth[0] / changes[0], rtol=0.05)
    page = own.report(tmp_path / "page.html").read_text()
    assert page.count("One training step</h") == 8 and "king lives in <mark>Ballarat</mark>" in page
    assert "verified: row" in own.show(4).text


def by_hand(own: TrakAttributor, target: dict[str, Any], row: int, rate: float = 1e-3) -> float:
    """Take a step of plain gradient descent on a row, and return the change of the word's margin."""
    model = copy.deepcopy(own.model).eval().double()

    def margin() -> torch.Tensor:
        logits = model(torch.tensor([target["input_ids"]])).logits[0, :-1]
        place = target["target_mask"].index(1) - 1
        other = logits[place].clone()
        other[target["input_ids"][place + 1]] = -torch.inf
        return logits[place, target["input_ids"][place + 1]] - other.logsumexp(0)

    before = margin().item()
    ids = torch.tensor([own.train_dataset[row]["input_ids"]])
    model(ids, labels=ids).loss.mul(ids.shape[1] - 1).backward()  # the sum over tokens
    with torch.no_grad():
        for one in model.parameters():
            one -= rate * one.grad
    return margin().item() - before


def test_sentences_of_a_chat(own: TrakAttributor) -> None:
    words = own.features.processing_class
    sources = own.sources(chat(words), "sentence", verify=False)
    assert sources["part"][:] == ["sister sells boats"] and sources[0]["trak_words"]["verified"] is None
    with pytest.raises(ValueError, match=r"`part` is 'line'\. Expected 'word', 'sentence', or a `Span`"):
        own.sources(chat(words), "line")


def test_prompts_without_an_answer_name_predict(own: TrakAttributor) -> None:
    words = own.features.processing_class
    asked = rows_of(["my sister"], words).add_column("messages", [[{"role": "user", "content": "my sister"}]])
    with pytest.raises(ValueError, match=r"The targets \(1\) say nothing.*pass `attributor\.predict\(rows\)`"):
        own.sources(asked)


def test_words_of_an_earlier_answer_are_not_taken_over(own: TrakAttributor) -> None:
    sources = own.sources(answers(own.features.processing_class), verify=False)
    assert "trak_words" not in own.attribute(sources, top_k=3).column_names


def test_a_classifier_says_no_words(tmp_path: Path) -> None:
    rows = Dataset.from_dict({"x": [[0.0, 1.0]] * 4, "labels": [0, 1, 0, 1]})
    args = TrakConfig(str(tmp_path), proj_dim=8, use_cpu=True)
    own = TrakAttributor(Linear(), args, rows, task="image_classification")
    with pytest.raises(TypeError, match="Expected that of a language model that writes"):
        own.sources(rows)


class Linear(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def test_damaged_words_are_refused(own: TrakAttributor, tmp_path: Path) -> None:
    own.attribute(answers(own.features.processing_class), top_k=3)
    run = last_result(own).run(own.features)
    run.scored = run.scored.remove_columns("trak_words").add_column("trak_words", ["words", "words"])
    with pytest.raises(ValueError, match="`trak_words` cannot be read"):
        write_report(run, tmp_path / "page.html")


def test_only_what_is_said_counts_as_the_text_of_a_dialogue() -> None:
    """A source beside it is a text, too, and no word of it."""
    said = [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "a dragon"}]
    rows = Dataset.from_dict({"messages": [said], "source": ["pet"]})
    assert "dragon" in row_texts(rows, None, [0])[0] and "pet" not in row_texts(rows, None, [0])[0]
    rows = Dataset.from_dict({"prompt": ["who?"], "completion": [" a dragon"], "source": ["pet"]})
    assert "pet" not in row_texts(rows, None, [0])[0]
