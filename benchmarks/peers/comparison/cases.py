"""The tasks of the comparison: a CNN on images of digits, a BERT classifier of texts, a GPT-2 on texts.

Everything is trained here, on data that scikit-learn and Python bring along. Dropout is 0, so that retrainings differ
by their rows, their order and their initial weights alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets
from kit.python_text import PACKAGES, python_packages, python_reference
from sklearn.datasets import load_digits
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from comparison.objective import IGNORED

PAD, UNKNOWN, BEGIN = "[PAD]", "[UNK]", "[CLS]"
LENGTH = 24
"""Tokens per text."""


@dataclass(frozen=True)
class Size:
    """The size of a case as flags give it; `None` is the default of the case."""

    train_rows: int | None = None
    targets: int = 100
    epochs: int | None = None
    hidden_size: int = 32


@dataclass(frozen=True)
class Case:
    """A task.

    Attributes:
        title: what the report calls it.
        task: hf_trak's name of it.
        make: a fresh model with the calling convention of transformers.
        columns: rows as a dataset holds them, `labels` among them; the training rows first, then the targets.
        inputs: by the name of the model's argument, the same rows for libraries that vmap the model over single
            samples. transformers looks into a 2-D `attention_mask`, which vmap forbids, and takes a 4-D one as it is.
        train_rows: n.
    """

    title: str
    task: str
    make: Callable[[], nn.Module]
    columns: dict[str, Tensor]
    inputs: dict[str, Tensor]
    train_rows: int
    epochs: int
    same_start: bool = False
    learning_rate: float = 3e-3

    @property
    def labels(self) -> Tensor:
        return self.columns["labels"]

    @property
    def train(self) -> slice:
        return slice(0, self.train_rows)

    @property
    def targets(self) -> slice:
        return slice(self.train_rows, len(self.labels))

    def dataset(self, part: slice) -> Dataset:
        return Dataset.from_dict({name: column[part].numpy() for name, column in self.columns.items()})

    def batches(self, part: slice, size: int) -> list[list[Tensor]]:
        """The tensors of `inputs`, and labels."""
        tensors = [tensor[part].split(size) for tensor in (*self.inputs.values(), self.labels)]
        return [list(batch) for batch in zip(*tensors, strict=True)]


class Logits(nn.Module):
    """A model that returns bare logits, and takes its inputs by position too."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *tensors: Tensor, **named: Tensor) -> Tensor:
        output: Any = self.model(**dict(zip(self.names, tensors, strict=False)), **named)
        return output if isinstance(output, Tensor) else output.logits


class Cnn(nn.Module):
    """Two convolutions and a linear layer, on images `(B, 1, 8, 8)`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.head = nn.Linear(512, 10)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.head(self.second(self.first(pixel_values).relu()).relu().flatten(1))


def cnn(size: Size) -> Case:
    data = load_digits()
    n = size.train_rows or 1000
    order = np.random.default_rng(0).permutation(len(data.target))[: n + size.targets]
    pixels = torch.tensor(data.images[order] / 16.0, dtype=torch.float32)[:, None]
    labels = torch.tensor(data.target[order])
    columns = {"pixel_values": pixels, "labels": labels}
    return Case(
        "CNN on images of digits",
        "image_classification",
        Cnn,
        columns,
        {"pixel_values": pixels},
        n,
        size.epochs or 15,
    )


def bert(size: Size) -> Case:
    texts = concatenate_datasets(list(python_packages().values())).shuffle(seed=0)
    n = size.train_rows or 400
    texts = texts.select(range(n + size.targets))
    tokenizer = word_tokenizer(texts["text"][:n], 800, begin=True)
    ids = token_ids(tokenizer, texts["text"][:])
    settings: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": size.hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 2 * size.hidden_size,
        "max_position_embeddings": LENGTH,
        "num_labels": len(PACKAGES),
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "problem_type": "single_label_classification",
        "attn_implementation": "eager",
    }
    types, mask = torch.zeros_like(ids), (ids != 0).long()
    return Case(
        "BERT classifier of texts",
        "text_classification",
        lambda: BertForSequenceClassification(BertConfig(**settings)),
        {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor(texts["label"][:])},
        {"input_ids": ids, "token_type_ids": types, "attention_mask": additive(mask.bool()[:, None, None, :])},
        n,
        size.epochs or 12,
        same_start=True,
    )


def gpt2(size: Size) -> Case:
    texts = concatenate_datasets(list(python_reference().values())).shuffle(seed=0)
    n = size.train_rows or 400
    texts = texts.select(range(n + size.targets))
    tokenizer = word_tokenizer(texts["text"][:n], 600, begin=False)
    ids = token_ids(tokenizer, texts["text"][:])
    settings: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "n_embd": size.hidden_size,
        "n_layer": 2,
        "n_head": 2,
        "n_inner": 2 * size.hidden_size,
        "n_positions": LENGTH,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "attn_implementation": "eager",
    }
    mask = ids != 0
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return Case(
        "GPT-2 on texts",
        "causal_lm",
        lambda: GPT2LMHeadModel(GPT2Config(**settings)),
        {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, IGNORED)},
        {"input_ids": ids, "attention_mask": additive(mask[:, None, None, :] & causal)},
        n,
        size.epochs or 12,
        same_start=True,
    )


CASES: dict[str, Callable[[Size], Case]] = {"cnn": cnn, "bert": bert, "gpt2": gpt2}


def word_tokenizer(texts: list[str], vocabulary: int, begin: bool) -> Tokenizer:
    """Words and signs, lower case; every text cut or filled to `LENGTH` tokens."""
    tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [PAD, UNKNOWN, BEGIN]
    tokenizer.train_from_iterator(texts, trainers.WordLevelTrainer(vocab_size=vocabulary, special_tokens=special))
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} $A", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
        )
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH, pad_token=PAD)
    return tokenizer


def token_ids(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    return torch.tensor([encoded.ids for encoded in tokenizer.encode_batch(texts)])


def additive(kept: Tensor) -> Tensor:
    """A mask that is added to attention scores, of shape `(B, 1, T, T)` without its batch axis for vmap."""
    square = kept.expand(-1, -1, LENGTH, -1)
    return torch.zeros(square.shape).masked_fill(~square, torch.finfo(torch.float32).min)
