"""Rows that words alone find, beside those of the attribution: in the report, in a notebook and in a saved run."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from hf_trak import Span, TrakAttributor, TrakConfig
from hf_trak.attributor import last_result
from hf_trak.report import AttributionRun, write_report

pytest.importorskip("bm25s")

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
    args = TrakConfig(str(tmp_path_factory.mktemp("trak")), proj_dim=32, use_cpu=True)
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
    assert (first["said"], second["said"]) == ("the king lives in Ballarat", "gold and silver")
    assert [(one["row"], one["score"]) for one in first["same"]] == [(0, 4), (1, 2)]
    shared = first["same"][0]
    assert shared["text"][shared["start"] : shared["stop"]] == "the king lives in"
    assert [(one["row"], one["score"]) for one in second["same"]] == [(3, 3)]
    assert first["bm25"][0]["row"] == 0 and {one["row"] for one in second["bm25"]} == {2, 3}
    page = write_report(run, tmp_path / "page.html").read_text()
    assert page.count("Same words in a row") == page.count("BM25</h") == 2
    assert "<mark>the king lives in</mark>" in page and "<mark>gold and silver</mark>" in page
    assert "&lt;b&gt; town" in page and "<b> town" not in page
    shown = own.show(0)
    assert "same words: row 0 (4 words), row 1 (2 words)" in shown.text and "the king lives in</mark>" in shown.page


def test_a_span_is_compared_alone(own: TrakAttributor) -> None:
    rows = answers(own.features.processing_class).select([0])
    own.attribute(rows, top_k=3, part=Span(words="Ballarat"))
    (found,) = last_result(own).run(own.features).scored["trak_words"]
    assert found["said"] == "Ballarat"
    assert [one["row"] for one in found["same"]] == [one["row"] for one in found["bm25"]] == [2]


def test_chats_are_compared_by_what_the_assistant_says(own: TrakAttributor) -> None:
    words = own.features.processing_class
    turns = [{"role": "user", "content": "gold and silver"}, {"role": "assistant", "content": "sister sells boats"}]
    rows = rows_of(["gold and silver my sister sells boats"], words).remove_columns("text")
    own.attribute(rows.add_column("messages", [turns]), top_k=3)
    (found,) = last_result(own).run(own.features).scored["trak_words"]
    assert found["said"] == "sister sells boats" and [one["row"] for one in found["same"]] == [4]


def test_without_bm25s_the_report_says_so(
    own: TrakAttributor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "bm25s", None)
    own.attribute(answers(own.features.processing_class), top_k=3)
    saved = AttributionRun.load(last_result(own).run(own.features).save(tmp_path))
    page = write_report(saved, tmp_path / "page.html").read_text()
    assert page.count("Not computed: install bm25s.") == 2 and "Same words in a row" in page
    assert "pip install bm25s" in caplog.text


def test_damaged_words_are_refused(own: TrakAttributor, tmp_path: Path) -> None:
    own.attribute(answers(own.features.processing_class), top_k=3)
    run = last_result(own).run(own.features)
    run.scored = run.scored.remove_columns("trak_words").add_column("trak_words", ["words", "words"])
    with pytest.raises(ValueError, match="`trak_words` cannot be read"):
        write_report(run, tmp_path / "page.html")
