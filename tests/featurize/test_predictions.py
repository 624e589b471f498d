"""Targets that are the model's own predictions: classes, continuations, translations."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from digit_models import digits, make, trained_net
from doc_examples import documents, tiny_gpt2, word_tokenizer
from trak_options import trak_config
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_trak import TrakAttributor

QUICK: dict[str, Any] = {"use_cpu": True}


@pytest.mark.slow
def test_classes(tmp_path: Path) -> None:
    """With a wrong label or none at all, the class with the highest logit is what is explained."""
    net = trained_net(digits(0, 100), steps=60)
    own = make(net, tmp_path, digits(0, 100), proj_dim=256).featurize()
    rows = digits(1000, 1040)
    with torch.no_grad():
        expected = net(torch.tensor(np.array(rows["pixel_values"]), dtype=torch.float32)).logits.argmax(1).tolist()
    wrong = rows.remove_columns("labels").add_column("labels", [(label + 1) % 10 for label in expected])
    for given in (rows, wrong, rows.remove_columns("labels")):
        found = own.predict(given)
        assert found["labels"][:] == expected
        assert found["predicted"][:] == [str(label) for label in expected]
        assert found["source"][:] == rows["source"][:]
    scored = own.attribute(own.predict(wrong), top_k=1, name="predicted")
    same = own.attribute(rows.remove_columns("labels").add_column("labels", expected), top_k=1, name="expected")
    assert scored["trak_indices"][:] == same["trak_indices"][:]
    labels = np.array(digits(0, 100)["labels"][:])
    share = np.mean([labels[one[0]] == label for one, label in zip(scored["trak_indices"], expected, strict=True)])
    assert share > 0.8, "what speaks for a class are rows of this class"
    with pytest.raises(ValueError, match="generates nothing"):
        own.predict(rows, max_new_tokens=3)
    stored = wrong.rename_columns({"pixel_values": "image", "labels": "label"})

    def transform(batch: dict[str, Any]) -> dict[str, Any]:
        return {"pixel_values": batch["image"], "labels": batch["label"]}

    said = own.predict(stored.with_transform(transform))
    assert [row["labels"] for row in said] == expected and said.with_format(None)["source"] == rows["source"]
    assert said["predicted"][:] == [str(label) for label in expected]
    assert own.attribute(said, top_k=1, name="said")["trak_indices"][:] == same["trak_indices"][:]

    images = stored.with_transform(transform, columns=["image", "label"], output_all_columns=True)
    found = own.predict(images)
    assert [row["labels"] for row in found] == expected and [row["source"] for row in found] == rows["source"]
    assert [row["predicted"] for row in found] == [str(label) for label in expected]
    for one in (said, found):
        assert "predicted" not in one.remove_columns("predicted")[0]
        assert [row["labels"] for row in own.predict(one)] == expected

    right = stored.add_column("digit", expected)  # agrees with what the model says

    def of_another_column(batch: dict[str, Any]) -> dict[str, Any]:
        return {"pixel_values": batch["image"], "labels": batch["digit"]}

    with pytest.raises(TypeError, match="labels 0 and 1 the transform and the collator make"):
        own.predict(right.with_transform(of_another_column))

    def without_stored_labels(batch: dict[str, Any]) -> dict[str, Any]:
        return {"pixel_values": batch["image"], "labels": [99] * len(batch["image"])}

    with pytest.raises(TypeError, match="one with a transform"):
        own.predict(stored.rename_columns({"label": "digit"}).with_transform(without_stored_labels))
    with pytest.raises(TypeError, match=r"make \[99, 99\]"):
        own.predict(stored.with_transform(without_stored_labels))


@pytest.mark.parametrize("column", ["stars", "label"])
def test_labels_that_the_collator_makes_itself(tmp_path: Path, column: str) -> None:
    """Of a column with a name of its own, and counted from one: predictions would be replaced by other classes."""
    rows = digits(0, 20)
    rows = rows.remove_columns("labels").add_column(column, [label + 1 for label in rows["labels"]])

    def collate(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        images = torch.tensor(np.array([row["pixel_values"] for row in batch]), dtype=torch.float32)
        return {"pixel_values": images, "labels": torch.tensor([row[column] - 1 for row in batch])}

    config = trak_config(str(tmp_path), proj_dim=16, remove_unused_columns=False, **QUICK)
    net = trained_net(digits(0, 20), steps=2)
    own = TrakAttributor(net, config, train_dataset=rows, data_collator=collate, task="image_classification")
    with pytest.raises(TypeError, match="labels 0 and 1 the transform and the collator make"):
        own.predict(rows)


@pytest.fixture
def language(tmp_path: Path) -> TrakAttributor:
    torch.manual_seed(0)
    tokenizer = word_tokenizer()
    config = trak_config(str(tmp_path), proj_dim=64, **QUICK)
    rows = documents(tokenizer, 12).remove_columns("text")
    return TrakAttributor(tiny_gpt2(), config, train_dataset=rows, processing_class=tokenizer, task="causal_lm")


def test_continuations(language: TrakAttributor) -> None:
    prompts = Dataset.from_dict({"input_ids": [[3, 4, 5], [6, 7]], "mine": ["a", "b"]})
    found = language.predict(prompts, max_new_tokens=4)
    for row, prompt in zip(found, prompts["input_ids"], strict=True):
        expected = language.model.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False)[0].tolist()
        assert row["input_ids"] == expected
        assert row["labels"] == [-100] * len(prompt) + expected[len(prompt) :]
        assert row["target_mask"] == [0] * len(prompt) + [1] * (len(expected) - len(prompt))
        said = language.features.processing_class.decode(expected[len(prompt) :], skip_special_tokens=True)
        assert row["predicted"] == said
    assert found["mine"][:] == ["a", "b"]
    language.featurize()
    scored = language.attribute(found, top_k=3)
    assert all(np.isfinite(scored["trak_scores"][:]).flat)
    alone = language.attribute(found.select([1]), top_k=3, name="alone")
    assert scored["trak_indices"][1] == alone["trak_indices"][0], "padding of the other prompt has no part in it"


def test_the_prompt_of_an_answered_row_is_what_is_masked(language: TrakAttributor) -> None:
    answered = Dataset.from_dict({"input_ids": [[3, 4, 5, 8, 9]], "labels": [[-100, -100, -100, 8, 9]]})
    found = language.predict(answered, max_new_tokens=3)
    assert found["input_ids"][0][:3] == [3, 4, 5]
    assert (
        found[0]["input_ids"]
        == language.predict(Dataset.from_dict({"input_ids": [[3, 4, 5]]}), max_new_tokens=3)[0]["input_ids"]
    )
    whole = Dataset.from_dict({"input_ids": [[3, 4, 5]], "labels": [[3, 4, 5]]})
    assert language.predict(whole, max_new_tokens=3)[0]["input_ids"] == found[0]["input_ids"]


def test_a_masked_padding_token_that_begins_a_text_is_no_prompt(tmp_path: Path) -> None:
    """The collator masks `<s>`, which it pads with. Only what a row itself masks, or other tokens, is a prompt."""
    torch.manual_seed(0)
    tokenizer = word_tokenizer()
    tokenizer.pad_token = tokenizer.bos_token
    texts = Dataset.from_dict({"input_ids": [[1, 3, 4, 5], [1, 6, 7], [1, 1, 8, 9], [8, 9]]})
    model, collator = tiny_gpt2(), DataCollatorForLanguageModeling(tokenizer, mlm=False)
    options: dict[str, Any] = {"max_new_tokens": 3, "suppress_tokens": [0, 1, 2, *range(len(tokenizer), 30)]}
    assert collator([texts[0]])["labels"].tolist() == [[-100, 3, 4, 5]]
    own = TrakAttributor(
        model, trak_config(str(tmp_path), **QUICK), texts, collator, processing_class=tokenizer, task="causal_lm"
    )

    def written(ids: list[int]) -> list[int]:
        given = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
        return model.generate(**given, **options, do_sample=False)[0].tolist()

    found = own.predict(texts, **options)
    for row, ids in zip(found, texts["input_ids"], strict=True):
        assert row["input_ids"] == written(ids) and row["target_mask"].index(1) == len(ids)
    assert own.predict(found, **options)["input_ids"][0] == written(found["input_ids"][0]), (
        "the collator makes its own labels, and masks no prompt"
    )

    own.features.data_collator = DataCollatorForSeq2Seq(tokenizer)
    rows = [[1, 3, 4, 5]] * 4
    for labels, count in (([-100, 3, 4, 5], 1), ([-100, -100, 4, 5], 2), ([1, 3, 4, 5], 4)):
        answered = Dataset.from_dict({"input_ids": rows, "labels": [labels] * 4})
        assert own.predict(answered, **options)["input_ids"][:] == [written(rows[0][:count])] * 4
    masked = Dataset.from_dict({"input_ids": rows, "completion_mask": [[0, 1, 1, 1]] * 4})
    own.features.data_collator = collator
    assert own.predict(masked, **options)["input_ids"][0] == written([1])


def test_more_than_the_positions_of_the_model(language: TrakAttributor) -> None:
    """Refused before the model looks up a position that it does not have."""
    positions = language.model.config.max_position_embeddings
    prompts = Dataset.from_dict({"input_ids": [[3, 4, 5]]})
    with pytest.raises(ValueError, match=rf"Row 0 has a prompt of 3 tokens.*at most {positions - 3} new tokens"):
        language.predict(prompts, max_new_tokens=positions - 2)
    assert len(language.predict(prompts, max_new_tokens=positions - 3)[0]["input_ids"]) <= positions


def test_translations(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=30, decoder_start_token_id=0, pad_token_id=0, **sizes)
    ).eval()
    rows = Dataset.from_dict({"input_ids": [[3, 4, 5], [6, 7, 8, 9]], "labels": [[5, 6], [7, 8, 9]]})
    config = trak_config(str(tmp_path), proj_dim=16, **QUICK)
    collator = DataCollatorForSeq2Seq(word_tokenizer())
    own = TrakAttributor(model, config, train_dataset=rows, data_collator=collator, task="seq2seq_lm").featurize()
    found = own.predict(rows, max_new_tokens=3)
    for row, given in zip(found, rows, strict=True):
        written = model.generate(torch.tensor([given["input_ids"]]), max_new_tokens=3, do_sample=False)[0].tolist()
        assert row["labels"] == written[1:]
        assert row["input_ids"] == given["input_ids"]
    assert len(own.attribute(found, top_k=2)) == 2


def test_tasks_without_predictions(tmp_path: Path) -> None:
    net = trained_net(digits(0, 20))
    own = TrakAttributor(
        net, trak_config(str(tmp_path), **QUICK), train_dataset=digits(0, 20), task=lambda output, batch: output.loss
    )
    with pytest.raises(TypeError, match="The task is FunctionModelOutput"):
        own.predict(digits(0, 20))
    with pytest.raises(TypeError, match="`dataset` is a list"):
        make(net, tmp_path / "b", digits(0, 20)).predict([1])
