"""Trainer's data collators, end to end: a row in a padded batch has the features that it has by itself."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, Image
from PIL import Image as PILImage
from trak_options import trak_config
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertTokenizerFast,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    GPT2Config,
    GPT2LMHeadModel,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    default_data_collator,
)

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.modelout_functions import FunctionModelOutput

N = 10
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
BERT = {
    "vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 24, "num_labels": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> BertTokenizerFast:
    return BertTokenizerFast(vocab={word: i for i, word in enumerate(WORDS)})


def rows(tokenizer: BertTokenizerFast, **columns: Any) -> Dataset:
    """Texts of different lengths."""
    generator = np.random.default_rng(0)
    texts = [" ".join(generator.choice(WORDS[5:], size=3 + i % 6)) for i in range(N)]
    tokens = tokenizer(texts, return_token_type_ids=False)
    found = {"text": texts, "input_ids": tokens["input_ids"], "attention_mask": tokens["attention_mask"]}
    return Dataset.from_dict({**found, **{name: make(tokens["input_ids"]) for name, make in columns.items()}})


def classifier(tokenizer: BertTokenizerFast) -> tuple[Any, Dataset, Any]:
    dataset = rows(tokenizer, label=lambda ids: [i % 3 for i in range(len(ids))])
    return BertForSequenceClassification(BertConfig(**BERT)), dataset, DataCollatorWithPadding(tokenizer)


def equal_lengths(tokenizer: BertTokenizerFast) -> tuple[Any, Dataset, Any]:
    model, dataset, _ = classifier(tokenizer)
    padded = dataset.map(lambda row: tokenizer(row["text"], padding="max_length", max_length=12))
    return model, padded, default_data_collator


def with_transform(tokenizer: BertTokenizerFast) -> tuple[Any, Dataset, Any]:
    """A dataset that is tokenized when rows are read. Only the transform needs its column `text`."""
    model, dataset, collator = classifier(tokenizer)
    raw = dataset.select_columns(["text", "label"])
    raw.set_transform(
        lambda batch: {
            **tokenizer(batch["text"], return_token_type_ids=False),
            **({"label": batch["label"]} if "label" in batch else {}),
        }
    )
    return model, raw, collator


def causal(tokenizer: BertTokenizerFast) -> tuple[Any, Dataset, Any]:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=len(WORDS), n_positions=24))
    return model, rows(tokenizer), DataCollatorForLanguageModeling(tokenizer, mlm=False)


def seq2seq(tokenizer: BertTokenizerFast) -> tuple[Any, Dataset, Any]:
    config = BartConfig(
        vocab_size=len(WORDS), d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=24,
        pad_token_id=0, bos_token_id=2, eos_token_id=3, decoder_start_token_id=2, forced_eos_token_id=3,
    )  # fmt: skip
    model = BartForConditionalGeneration(config)
    dataset = rows(tokenizer, labels=lambda ids: [row[1 : 3 + i % 4] for i, row in enumerate(ids)])
    return model, dataset, DataCollatorForSeq2Seq(tokenizer, model=model)


def tagger(tokenizer: BertTokenizerFast) -> tuple[Any, Dataset, Any]:
    def tags(ids: list[list[int]]) -> list[list[int]]:
        return [[-100, *[token % 3 for token in row[1:-1]], -100] for row in ids]

    model = BertForTokenClassification(BertConfig(**BERT))
    return model, rows(tokenizer, labels=tags), DataCollatorForTokenClassification(tokenizer)


CASES = [classifier, equal_lengths, with_transform, causal, seq2seq, tagger]


@pytest.mark.few(2)
@pytest.mark.parametrize("case", CASES, ids=[case.__name__ for case in CASES])
def test_padding_does_not_change_features(case: Any, tokenizer: BertTokenizerFast, tmp_path: Path) -> None:
    """Features are the same in batches of one (no padding) and of four (padded to the longest), for each collator."""
    torch.manual_seed(0)
    model, dataset, collator = case(tokenizer)
    model.eval()
    results = []
    for batch_size in (1, 4):
        config = TrakConfig(
            output_dir=str(tmp_path / str(batch_size)), proj_dim=128, shard_size=8, use_cpu=True,
            per_device_batch_size=batch_size, budget="fast",
        )  # fmt: skip
        attributor = TrakAttributor(model, config, dataset, collator).featurize()
        shards = list(attributor.features.store.train(0))
        grads, q = torch.cat([s.grads for s in shards]), torch.cat([s.out_to_loss for s in shards])
        scored = attributor.attribute(dataset.select(range(2)), top_k=N)
        assert sorted(scored["trak_indices"][0]) == list(range(N))
        results.append((grads, q))
    for small, large in zip(*results, strict=True):
        assert float((small - large).abs().max()) < 1e-4 * float(small.abs().max())
    lengths = {len(row["input_ids"]) for row in dataset}
    assert len(lengths) == 1 if case is equal_lengths else len(lengths) > 3


def test_a_collator_that_changes_the_number_of_samples_is_refused(
    tokenizer: BertTokenizerFast, tmp_path: Path
) -> None:
    model, dataset, collator = classifier(tokenizer)
    config = TrakConfig(output_dir=str(tmp_path), proj_dim=16, use_cpu=True)
    attributor = TrakAttributor(model.eval(), config, dataset, lambda batch: collator(batch[:-1]))
    with pytest.raises(ValueError, match=r"made a batch of 9 samples from 10 rows"):
        attributor.featurize()


def vision_transformer() -> ViTForImageClassification:
    config = ViTConfig(
        image_size=8, patch_size=4, num_channels=1, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
        intermediate_size=8, num_labels=3,
    )  # fmt: skip
    return ViTForImageClassification(config).eval()


def featurize(model: Any, dataset: Any, directory: Path, collator: Any = None, **options: Any) -> None:
    fields = {name: options.pop(name) for name in ("remove_unused_columns",) if name in options}
    config = trak_config(output_dir=str(directory), proj_dim=16, use_cpu=True, **fields)
    TrakAttributor(model.eval(), config, dataset, collator, **options).featurize()


def pictures(**columns: Any) -> Dataset:
    images = [PILImage.fromarray(np.full((8, 8), i, dtype=np.uint8)) for i in range(3)]
    return Dataset.from_dict({**columns, "image": images, "label": [0, 1, 2]}).cast_column("image", Image())


@pytest.mark.parametrize("processor", [None, ViTImageProcessor()])
def test_images_without_a_transform_are_refused_with_the_columns_and_the_remedy(
    processor: Any, tmp_path: Path
) -> None:
    expected = r"batch of \['labels'\].*ViTForImageClassification.*image \(PIL.Image.Image\), label \(int64\).*"
    with pytest.raises(ValueError, match=expected + r"Expected `pixel_values`.*`dataset.set_transform\("):
        featurize(vision_transformer(), pictures(), tmp_path, processing_class=processor)


@pytest.mark.parametrize("remove_unused_columns", [True, False])
def test_text_in_the_place_of_pixels_or_tokens_is_refused(remove_unused_columns: bool, tmp_path: Path) -> None:
    options = {"remove_unused_columns": remove_unused_columns}
    paths = Dataset.from_dict({"pixel_values": ["a.png", "b.png"], "label": [0, 1]})
    with pytest.raises(ValueError, match=r"pixel_values \(string\).*Expected `pixel_values` as numbers"):
        featurize(vision_transformer(), paths, tmp_path, **options)
    texts = Dataset.from_dict({"text": ["a b", "c"], "label": [0, 1], "idx": [0, 1]})
    expected = r"BertForSequenceClassification.*text \(string\).*`input_ids` \(or `inputs_embeds`\).*tokenizer\("
    with pytest.raises(ValueError, match=expected):
        featurize(BertForSequenceClassification(BertConfig(**BERT)), texts, tmp_path / "texts", **options)


def test_text_that_the_tokenizer_has_not_seen_is_refused(tokenizer: BertTokenizerFast, tmp_path: Path) -> None:
    model = BertForSequenceClassification(BertConfig(**BERT))
    texts = Dataset.from_dict({"text": ["a b", "c"], "label": [0, 1]})
    with pytest.raises(
        ValueError, match=r"rows have \['label'\], and no `input_ids` for BertTokenizer.*text \(string"
    ):
        featurize(model, texts, tmp_path, processing_class=tokenizer)


def test_images_that_reach_the_default_collator_are_refused(tmp_path: Path) -> None:
    named = pictures().rename_column("image", "pixel_values")
    with pytest.raises(ValueError, match=r"`pixel_values` of the first row is a PngImageFile.*set_transform"):
        featurize(vision_transformer(), named, tmp_path)


def test_a_task_may_make_inputs_of_entries_that_the_model_does_not_take(tmp_path: Path) -> None:
    """The check of the batch accepts entries that it does not know."""
    data = Dataset.from_dict({"picture": np.random.default_rng(0).random((3, 1, 8, 8)), "label": [0, 1, 2]})
    task = FunctionModelOutput(
        lambda result, batch: result.logits[:, 0],
        model_inputs_fn=lambda batch: ((), {"pixel_values": batch["picture"]}),
    )
    featurize(vision_transformer(), data, tmp_path, remove_unused_columns=False, task=task)


def test_labels_of_text_are_refused_with_the_remedy(tokenizer: BertTokenizerFast, tmp_path: Path) -> None:
    """Texts in `label` fail in every collator. The default one drops texts in `labels`, the padding one fails."""
    pixels = np.zeros((2, 1, 8, 8), dtype=np.float32)
    for name, says in (("label", r"`label` of the first row is 'cat', a text"), ("labels", "none hold labels")):
        data = Dataset.from_dict({"pixel_values": pixels, name: ["cat", "dog"]})
        with pytest.raises(ValueError, match=f"{says}.*label2id"):
            featurize(vision_transformer(), data, tmp_path / name)
    tokens = rows(tokenizer, labels=lambda ids: ["cat" for _ in ids])
    model = BertForSequenceClassification(BertConfig(**BERT))
    with pytest.raises(ValueError, match=r"`labels` of the first row is 'cat', a text.*label2id\[row\['labels'\]\]"):
        featurize(model, tokens, tmp_path / "tokens", processing_class=tokenizer)


def test_rows_of_different_lengths_without_anything_that_pads(tokenizer: BertTokenizerFast, tmp_path: Path) -> None:
    expected = r"`input_ids` has the size 5 in the first row of a batch and 6 in row 1.*`processing_class=`"
    for case in (classifier, causal):
        model, dataset, _ = case(tokenizer)
        with pytest.raises(ValueError, match=expected):
            featurize(model, dataset, tmp_path / case.__name__)
