"""A BERT classifier from scratch, which tells from a piece of documentation the Python package that it is from."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets
from kit.python_text import PACKAGES, python_packages
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

from quality_bench.case import Case
from quality_bench.cases.tokens import LENGTH, additive, bpe_tokenizer, decoder, ids, pieces

ROWS = 600
TARGETS = 50
VOCABULARY = 2000


def bert(downloads: Path) -> Case:
    """Pieces of documentation strings of the standard library, by package. Nothing is downloaded."""
    documented = concatenate_datasets(list(python_packages().values()))
    texts, packages = documented["text"][:], documented["label"][:]
    tokenizer = bpe_tokenizer(texts, VOCABULARY)
    cut = pieces(tokenizer, texts)
    found = [(piece, label) for of_text, label in zip(cut, packages, strict=True) for piece in of_text]
    order = np.random.default_rng(0).permutation(len(found))[: ROWS + TARGETS]
    columns = {"input_ids": [found[row][0] for row in order], "labels": [found[row][1] for row in order]}
    rows = Dataset.from_dict(columns)
    settings: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 96,
        "initializer_range": 0.05,  # so narrow a model learns little in few steps from BERT's own 0.02
        "max_position_embeddings": LENGTH,
        "num_labels": len(PACKAGES),
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "problem_type": "single_label_classification",
        "attn_implementation": "eager",
    }
    return Case(
        name="bert",
        title="BERT on Python's packages",
        task="text_classification",
        train=rows.select(range(ROWS)),
        targets=rows.select(range(ROWS, ROWS + TARGETS)),
        make_model=lambda: BertForSequenceClassification(BertConfig(**settings)),
        training={
            "per_device_train_batch_size": 30,
            "num_train_epochs": 6,
            "learning_rate": 2.5e-3,
            "warmup_steps": 10,
            "weight_decay": 0.01,
        },
        inputs=_inputs,
        head="classifier",
        texts=decoder(tokenizer),
        options={"tokenizer": tokenizer},
    )


def _inputs(rows: Dataset) -> dict[str, Tensor]:
    tokens = ids(rows)
    everything = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    return {
        "input_ids": tokens,
        "token_type_ids": torch.zeros_like(tokens),
        "attention_mask": additive(everything, len(rows)),
    }
