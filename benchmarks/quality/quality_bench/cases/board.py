"""The setting of a public board: GPT-2, fine-tuned on 4,608 chunks of WikiText. It takes a GPU and the Hub.

The board is bergson's (its `docs/leaderboard.rst`). The setting follows its configuration
`examples/compare_wikitext/1_magic.yaml`, the README beside it, and the defaults of bergson 2.5.1:

- GPT-2 (124M, pretrained) in eval mode, so without dropout; float32.
- The data set `EleutherAI/bergson-wikitext-512-chunks`: all 4,608 training rows, the first 50 test rows as targets.
- 4 epochs in batches of 256, which are 72 steps, of AdamW: betas .9 and .999, ε 1e-8, weight decay .01, no clipping;
  the learning rate rises to 4e-4 over the first quarter, and then falls to 4e-5 in a straight line.
- 100 random subsets without 1 % of the rows, same seed. A left-out row weighs zero in the mean over a batch's tokens.

What differs here: the subsets and the order of the rows are drawn anew; warmup starts at 0 instead of 1e-6; AdamW has
no second ε under its root (1e-17 there); `Trainer` decays neither biases nor norms; and f of a target is hf_trak's sum
of margins, where the board takes the target's loss. The loss on the other test rows fell from 3.545 to 3.111 there.
What is not known: the commit of the data set that the board used, and whether its matrix products were in TF32.

Cost, an estimate that nobody has measured. FLOPs per token, forward and backward:

    6 · 123.5M parameters in matrix products, the head among them      741M
    12 · 12 layers · 512 positions · 768 for attention                  57M

4,608 · 512 · 4 = 9.4M tokens make 7.5e15 FLOPs per training. The bank has 120 trainings: one on each subset, and two
more on 10 of them, with a perturbed start and with another seed: 9e17 FLOPs. At half of an H200's 67 TFLOP/s in
float32 a training takes 225 seconds, and the bank 7.5 hours of one GPU. With TF32, at a quarter of 494 TFLOP/s, these
are 61 seconds and 2 hours.

The bank is divided over processes. Each should see one GPU; what is done stays done when they are stopped.
"""

import copy
import functools
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from hf_trak.hub.safe_loading import load_dataset, load_model, load_tokenizer
from quality_bench.case import Case
from quality_bench.cases.tokens import additive, ids
from quality_bench.objective import IGNORED

MODEL = "openai-community/gpt2"
REVISION = "607a30d783dfa663caf39e06633721c8d4cfcd7e"
"""Commit of the model's repo."""
DATA = "EleutherAI/bergson-wikitext-512-chunks"
ROWS, TARGETS = 4608, 50
BATCH, PASSED_AT_ONCE = 256, 16
"""Rows per step, and rows per forward pass: 16 need some 20 GiB (an estimate), for logits and attention."""


def board(downloads: Path, model: str = MODEL, revision: str | None = REVISION, data: str = DATA) -> Case:
    """The board's data, model and training.

    Args:
        downloads: directory for the data set's files; the model goes to the Hub's cache.
        model: a GPT-2, a repo or a directory.
        revision: commit of the model's repo.
        data: a data set with a column `text` and the splits `train` and `test`, a repo or a directory.

    Raises:
        OSError: model or data cannot be reached.
        ValueError: the data has another number of rows than the board's.
    """
    tokenizer = load_tokenizer(model, revision)
    texts = {part: load_dataset(data, split=part, cache_dir=str(downloads))["text"][:] for part in ("train", "test")}
    if len(texts["train"]) != ROWS or len(texts["test"]) < TARGETS:
        raise ValueError(
            f"{data!r} has {len(texts['train'])} training rows and {len(texts['test'])} test rows. Expected {ROWS}, "
            f"and at least {TARGETS}: the board's. Name a revision or a copy of the data that has them."
        )
    rows = token_rows(tokenizer, texts["train"] + texts["test"][:TARGETS])
    return Case(
        name="board",
        title="GPT-2 on WikiText, a public board's setting",
        task="causal_lm",
        train=rows.select(range(ROWS)),
        targets=rows.select(range(ROWS, ROWS + TARGETS)),
        make_model=lambda: copy.deepcopy(pretrained(model, revision)),
        training={
            "num_train_epochs": 4,
            "per_device_train_batch_size": PASSED_AT_ONCE,
            "gradient_accumulation_steps": BATCH // PASSED_AT_ONCE,
            "learning_rate": 4e-4,
            "lr_scheduler_type": "polynomial",
            "lr_scheduler_kwargs": {"lr_end": 4e-5, "power": 1.0},
            "warmup_steps": 0.25,
            "adam_beta1": 0.9,
            "adam_beta2": 0.999,
            "adam_epsilon": 1e-8,
            "weight_decay": 0.01,
            "max_grad_norm": 0.0,
            # Sums on a GPU take the order that comes first, which would be noise of the bank.
            "full_determinism": torch.cuda.is_available(),
        },
        inputs=model_inputs,
        head="lm_head",
        texts=lambda rows: tokenizer.batch_decode(kept_tokens(rows)),
        drops=(0.01,),
        subsets=100,
        perturbed=10,
        other_seed=10,
        options={"tokenizer": tokenizer},
    )


@functools.cache
def pretrained(model: str, revision: str | None) -> nn.Module:
    """The pretrained model without dropout, read once per process. Copy it before anything changes it."""
    return load_model(
        model,
        revision,
        AutoModelForCausalLM,
        dtype=torch.float32,
        attn_implementation="eager",
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )


def token_rows(tokenizer: Any, texts: list[str]) -> Dataset:
    """Tokens of whole texts, filled up on the right to the length of the longest.

    A chunk of 512 tokens is not always 512 again when its text is tokenized. What is filled up has no labels, and the
    tokens before it do not look at it, so no attention mask is needed.
    """
    found = tokenizer(texts)["input_ids"]
    length = max(map(len, found))
    filled = [row + [tokenizer.eos_token_id] * (length - len(row)) for row in found]
    labels = [row + [IGNORED] * (length - len(row)) for row in found]
    return Dataset.from_dict({"input_ids": filled, "labels": labels})


def kept_tokens(rows: Dataset) -> list[list[int]]:
    return [[label for label in row if label != IGNORED] for row in rows["labels"][:]]


def model_inputs(rows: Dataset) -> dict[str, Tensor]:
    """Tokens `(B, T)`, and a causal mask `(B, 1, T, T)` whose rows are the same memory."""
    tokens = ids(rows)
    causal = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
    return {"input_ids": tokens, "attention_mask": additive(causal, 1).expand(len(tokens), -1, -1, -1)}
