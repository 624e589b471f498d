"""Spans of targets and scores per token, on a small language model through the attributor."""

import numpy as np
import pytest
import transformers as tf
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from hf_trak import Span, TrakAttributor, TrakConfig
from hf_trak.modelout_functions import CausalLMModelOutput
from hf_trak.scores.spans import single_labels

TEXTS = [
    "the red fox sleeps in the barn", "a blue bird sings", "the red bird sleeps", "the fox sings in a blue barn today",
    "in the barn a bird sings", "the blue fox",
]  # fmt: skip
WORDS = sorted({word for text in TEXTS for word in text.split()})


@pytest.fixture(scope="module")
def tokenizer():
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", *WORDS])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    plain.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


@pytest.fixture(scope="module")
def rows(tokenizer):
    def tokens(row):
        ids = tokenizer(row["text"])["input_ids"]
        return {"input_ids": ids, "labels": ids}

    return Dataset.from_dict({"text": TEXTS}).map(tokens)


@pytest.fixture(params=["sum", "mean"])
def attributor(request, rows, tokenizer, tmp_path):
    config = tf.GPT2Config(
        vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=2
    )
    return TrakAttributor(
        tf.GPT2LMHeadModel(config).eval(),
        TrakConfig(output_dir=str(tmp_path), proj_dim=64, per_device_batch_size=4, use_cpu=True, budget="fast"),
        train_dataset=rows,
        processing_class=tokenizer,
        task=CausalLMModelOutput(aggregation=request.param),
    ).featurize()


def scores(result) -> np.ndarray:
    return np.asarray(result["trak_scores"][:])


def test_the_default_collator_pads_labels(attributor):
    """Rows of different lengths with labels need no collator, even if the tokenizer pads on the left."""
    batch = next(iter(attributor.features.featurizer().batches(attributor.train_dataset).iterate([[0, 1]])))[1]
    assert batch["labels"].shape == batch["input_ids"].shape == (2, 9)
    assert batch["labels"][1, :3].tolist() == [-100] * 3 and int(batch["attention_mask"][1, 0]) == 0
    assert batch["labels"][1, 3:].tolist() == attributor.train_dataset[1]["labels"]


@pytest.mark.slow
def test_a_span_of_everything_is_the_target(attributor, rows):
    whole = scores(attributor.attribute(rows.select([0, 3]), top_k=None))
    targets = rows.select([0, 3])
    for span in (
        {"tokens": (0, 100)},
        {"chars": [(0, len(TEXTS[0])), (0, len(TEXTS[3]))], "tokens": None},
        {"mask_column": "all"},
    ):
        given = targets.add_column("all", [[1] * len(ids) for ids in targets["input_ids"]])
        if span.get("chars"):  # the end token stands for no character
            end = [[-100 if token == 2 else token for token in ids] for ids in targets["labels"]]
            given = given.remove_columns("labels").add_column("labels", end)
            whole = scores(attributor.attribute(given, top_k=None))
        part = scores(attributor.attribute(given, top_k=None, part=Span(**span)))
        np.testing.assert_allclose(part, whole, rtol=1e-4, atol=1e-6 * np.abs(whole).max())
        whole = scores(attributor.attribute(targets, top_k=None))


def test_a_span_is_the_target_with_the_other_labels_left_out(attributor, rows):
    targets = rows.select([0, 2])
    labels = [[t if i in (3, 4) else -100 for i, t in enumerate(ids)] for ids in targets["input_ids"]]
    expected = scores(attributor.attribute(targets.remove_columns("labels").add_column("labels", labels), top_k=None))
    by_tokens = attributor.attribute(targets, part=Span(tokens=[(3, 5), (3, 5)]), top_k=None)
    by_words = attributor.attribute(targets, part=Span(words=["fox sleeps", "bird sleeps"]), top_k=None)
    for part in (by_tokens, by_words):
        np.testing.assert_allclose(scores(part), expected, rtol=1e-4, atol=1e-6 * np.abs(expected).max())
    assert not np.allclose(expected, scores(attributor.attribute(targets, top_k=None)), rtol=0.1)


def test_token_scores_add_up_to_the_score(attributor, rows):
    targets = rows.select([0, 1, 5])
    result = attributor.attribute(targets, top_k=4, per_token=True)
    again = attributor.attribute(targets, top_k=4)
    for row, ids in enumerate(targets["input_ids"]):
        assert result[row]["trak_token_positions"] == list(range(1, len(ids)))  # the first token is predicted by none
        assert result[row]["trak_indices"] == again[row]["trak_indices"]
        for prefix, name in (("trak_", "trak_token_scores"), ("trak_harmful_", "trak_harmful_token_scores")):
            parts = np.asarray(result[row][name])
            assert parts.shape == (4, len(ids) - 1)
            np.testing.assert_allclose(parts.sum(axis=1), result[row][f"{prefix}scores"], rtol=1e-3, atol=1e-7)
            assert np.abs(parts).std() > 0
    other = attributor.attribute(result, top_k=2)
    assert other.column_names == again.column_names, "parts of other scores are no longer beside these"


def test_the_breakdown_of_a_span_covers_the_span(attributor, rows):
    targets = span_targets(rows.select([0]), tokens=(2, 5))
    result = attributor.attribute(targets, top_k=3, per_token=True)
    assert result[0]["trak_token_positions"] == [2, 3, 4]
    np.testing.assert_allclose(
        np.asarray(result[0]["trak_token_scores"]).sum(axis=1), result[0]["trak_scores"], rtol=1e-3, atol=1e-7
    )


def test_single_labels_repeat_rows_with_the_weight_of_each_label(attributor, rows):
    chosen = rows.select([5, 1])
    singles = single_labels(attributor.task, attributor.features.featurizer().batches(chosen), chosen)
    weight = 1.0 if attributor.task.aggregation == "sum" else 1 / 4
    assert singles["trak_target"][:] == [0] * 4 + [1] * 5
    assert singles["trak_position"][:] == [1, 2, 3, 4, 1, 2, 3, 4, 5]
    assert singles[1]["target_weights"] == pytest.approx([0.0, 0.0, weight, 0.0, 0.0])
    assert singles[1]["text"] == "the blue fox"


# -- which tokens a span is ------------------------------------------------------------------------------------------


def span_targets(dataset, tokenizer=None, **span):
    return Span(**span).of(dataset, tokenizer)


def masks(dataset) -> list[list[int]]:
    return dataset["target_mask"][:]


def test_characters_become_the_tokens_that_hold_one_of_them(rows, tokenizer):
    targets = rows.select([5])  # <s> the blue fox </s>
    assert masks(span_targets(targets, chars=(4, 8), tokenizer=tokenizer)) == [[0, 0, 1, 0, 0]]
    assert masks(span_targets(targets, chars=(7, 10), tokenizer=tokenizer)) == [[0, 0, 1, 1, 0]]
    assert masks(span_targets(targets, chars=(-3, 12), tokenizer=tokenizer)) == [[0, 0, 0, 1, 0]]
    assert masks(span_targets(targets, words="blue", tokenizer=tokenizer)) == [[0, 0, 1, 0, 0]]
    column = targets.add_column("where", [[0, 3]])
    assert masks(span_targets(column, chars="where", tokenizer=tokenizer)) == [[0, 1, 0, 0, 0]]
    offsets = targets.add_column("offset_mapping", [[[0, 0], [0, 3], [4, 8], [9, 12], [0, 0]]])
    assert masks(span_targets(offsets, chars=(4, 8))) == [[0, 0, 1, 0, 0]]


def test_tokens_and_columns(rows):
    targets = rows.select([5, 1])
    assert masks(span_targets(targets, tokens=(-2, 100))) == [[0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1]]
    assert masks(span_targets(targets, tokens=[(0, 1), (2, 4)])) == [[1, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0]]
    given = targets.add_column("mine", [[0, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]])
    once = span_targets(given, mask_column="mine")
    assert masks(once) == [[0, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]]
    assert masks(span_targets(once, tokens=(0, 1))) == [[1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]]


def test_spans_that_are_not_there_are_refused(rows, tokenizer):
    targets = rows.select([0, 5])
    for span, message in (
        ({}, "Expected exactly one"),
        ({"tokens": (0, 1), "words": "fox"}, r"\['tokens', 'words'\].*exactly one"),
        ({"tokens": (7, 9)}, r"span of row 1 \(tokens=\(7, 9\)\) holds none of its 5 tokens.*truncated"),
        ({"chars": (3, 4), "tokenizer": tokenizer}, "holds none"),
        ({"words": "the", "tokenizer": tokenizer}, r"'the' occurs 2 times in the text of row 0"),
        ({"words": "cat", "tokenizer": tokenizer}, r"'cat' occurs 0 times"),
        ({"words": "fox"}, r"Expected a fast tokenizer"),
        ({"tokens": [(0, 1)]}, r"for 2 rows"),
        ({"mask_column": "mine"}, r"columns \['text', 'input_ids', 'labels'\], not 'mine'"),
    ):
        with pytest.raises(ValueError, match=message):
            span_targets(targets, **span)
    other = targets.remove_columns("text").add_column("text", ["a blue bird", "the red fox"])
    with pytest.raises(ValueError, match="other tokens of the text of row 0"):
        span_targets(other, words=["bird", "fox"], tokenizer=tokenizer)
    with pytest.raises(TypeError, match=r"are a list.*Dataset.from_list"):
        span_targets([{"input_ids": [1]}], tokens=(0, 1))


def test_a_truncated_row_keeps_the_spans_that_are_left(rows, tokenizer):
    cut = rows.select([0]).map(lambda row: {"input_ids": row["input_ids"][:4], "labels": row["labels"][:4]})
    assert masks(span_targets(cut, words="red", tokenizer=tokenizer)) == [[0, 0, 1, 0]]
    with pytest.raises(ValueError, match="If the row was truncated before it, tokenize with a larger"):
        span_targets(cut, words="barn", tokenizer=tokenizer)


def test_one_label_per_sample_has_no_parts(rows, tokenizer, tmp_path):
    config = tf.BertConfig(
        vocab_size=len(tokenizer), hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    labelled = rows.remove_columns("labels").add_column("label", [0, 1] * 3)
    attributor = TrakAttributor(
        tf.BertForSequenceClassification(config),
        TrakConfig(str(tmp_path), budget="fast"),
        labelled,
        processing_class=tokenizer,
    )
    with pytest.raises(TypeError, match="one number per target"):
        attributor.attribute(labelled, per_token=True)
