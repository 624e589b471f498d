"""A GPT-2-like language model from scratch, on Python's language reference."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets
from kit.python_text import python_reference
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from quality_bench.case import Case
from quality_bench.cases.tokens import LENGTH, additive, bpe_tokenizer, decoder, ids, pieces

ROWS = 640
TARGETS = 50
VOCABULARY = 512


def gpt2(downloads: Path) -> Case:
    """Pieces of paragraphs that ship with Python as the text of `help()`. Nothing is downloaded."""
    paragraphs = concatenate_datasets(list(python_reference().values()))["text"][:]
    tokenizer = bpe_tokenizer(paragraphs, VOCABULARY)
    found = [piece for text in pieces(tokenizer, paragraphs) for piece in text]
    order = np.random.default_rng(0).permutation(len(found))[: ROWS + TARGETS]
    rows = Dataset.from_dict({"input_ids": [found[row] for row in order], "labels": [found[row] for row in order]})
    settings: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_inner": 128,
        "n_positions": LENGTH,
        "activation_function": "gelu_pytorch_tanh",  # the same function as GPT-2's "gelu_new", in one operation
        "initializer_range": 0.06,  # so narrow a model learns little in few steps from GPT-2's own 0.02
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "attn_implementation": "eager",
    }
    return Case(
        name="gpt2",
        title="GPT-2 on Python's reference",
        task="causal_lm",
        train=rows.select(range(ROWS)),
        targets=rows.select(range(ROWS, ROWS + TARGETS)),
        make_model=lambda: GPT2LMHeadModel(GPT2Config(**settings)),
        training={
            "per_device_train_batch_size": 32,
            "num_train_epochs": 8,
            "learning_rate": 4e-3,
            "warmup_steps": 10,
            "weight_decay": 0.01,
        },
        inputs=_inputs,
        head="lm_head",
        texts=decoder(tokenizer),
        options={"tokenizer": tokenizer},
    )


def _inputs(rows: Dataset) -> dict[str, Tensor]:
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return {"input_ids": ids(rows), "attention_mask": additive(causal, len(rows))}
