"""Real architectures through every engine of the attributor: features equal plain autograd on each sample alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from sklearn.datasets import load_digits
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from hf_trak import TrakAttributor, TrakConfig

ROWS = 9


def images() -> Dataset:
    data = load_digits()
    pixels = (data.images[:ROWS, None] / 16.0).astype(np.float32)
    return Dataset.from_dict({"pixel_values": pixels, "labels": data.target[:ROWS]})


def texts() -> Dataset:
    """Sentences of different lengths, padded by the collator."""
    rng = np.random.default_rng(0)
    sentences = [rng.integers(1, 40, size=length).tolist() for length in (3, 12, 5, 9, 1, 7, 12, 2, 6)]
    return Dataset.from_dict({"input_ids": sentences, "labels": [i % 3 for i in range(ROWS)]})


def convolutional() -> nn.Module:
    """With BatchNorm statistics that differ from the defaults."""
    config = ResNetConfig(
        num_channels=1, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=10
    )
    model = ResNetForImageClassification(config)
    model.train()
    with torch.no_grad():
        model(torch.rand(16, 1, 8, 8))
    return model.eval()


def vision_transformer() -> nn.Module:
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=10,
    )
    return ViTForImageClassification(config)


def bert() -> nn.Module:
    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        num_labels=3,
    )
    return BertForSequenceClassification(config)


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = Tokenizer(WordLevel({"[PAD]": 0, **{f"w{i}": i for i in range(1, 40)}}, unk_token="[PAD]"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")


def alone(model: nn.Module, row: dict[str, Any]) -> Tensor:
    """∂ margin / ∂θ of one row that has no company and no padding, by plain autograd."""
    model.eval()
    label = row["labels"]
    key = "pixel_values" if "pixel_values" in row else "input_ids"
    logits = model(**{key: torch.tensor(row[key])[None]}).logits[0]
    margin = logits[label] - torch.cat([logits[:label], logits[label + 1 :]]).logsumexp(0)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    grads = torch.autograd.grad(margin, parameters, allow_unused=True)
    parts = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]
    return torch.cat([part.flatten() for part in parts])


@pytest.mark.few(2)
@pytest.mark.parametrize("engine", ["auto", "functional", "iterative"])
@pytest.mark.parametrize(("build", "rows"), [(convolutional, images), (vision_transformer, images), (bert, texts)])
def test_features_are_the_gradients_of_samples_alone(
    build: Callable[[], nn.Module], rows: Callable[[], Dataset], engine: str, tmp_path: Path
) -> None:
    """Padding masks pass through current transformers; batches of 4, 4 and 1, padded differently."""
    torch.manual_seed(0)
    model, dataset = build(), rows()
    config = TrakConfig(
        output_dir=str(tmp_path),
        proj_type="none",
        engine=engine,
        per_device_batch_size=4,
        use_cpu=True,
    )
    processing = tokenizer() if "input_ids" in dataset.column_names else None
    attributor = TrakAttributor(model, config, train_dataset=dataset, processing_class=processing).featurize()
    features = torch.cat([shard.grads for shard in attributor.features.store.train(0)])
    expected = torch.stack([alone(model, row) for row in dataset])
    error = (features - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < 1e-5
    assert not torch.equal(features[0], features[1])
