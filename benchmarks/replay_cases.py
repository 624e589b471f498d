"""Tiny models that `Trainer` trains in a second or some, for `replay.py`: rows, targets, first weights and arguments.

The data ships with Python and scikit-learn: images of digits, the topics of Python's help, documentation strings, and
descriptions of data sets.
"""

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
sys.path.insert(0, str(Path(__file__).parent / "quality"))

import numpy as np
import torch
from datasets import Dataset
from quality_bench.cases.digits import cnn, digits, vit
from quality_bench.cases.images import Classifier
from quality_bench.cases.topics import bert as packages
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

LENGTH = 64
"""Characters in a row of text."""

Rows = tuple[Dataset, Dataset]
"""Training rows and targets, more than any case takes."""


@dataclass(frozen=True)
class Case:
    """A training that is repeated without some of its rows.

    Attributes:
        title: what is trained, on what.
        task: the model output function.
        data: makes training rows and targets.
        model: makes the first weights, in a directory for what is trained before.
        options: training arguments that are not `Trainer`'s defaults.
        rows: n.
        targets: m.
        retrainings: of each share of dropped rows.
        orders: other orders of the rows in which 5 % are dropped, too.
    """

    title: str
    task: str
    data: Callable[[], Rows]
    model: Callable[[Path], nn.Module]
    options: dict[str, Any] = field(default_factory=dict)
    rows: int = 300
    targets: int = 10
    retrainings: int = 24
    orders: int = 0

    def split(self) -> Rows:
        """Take the rows and targets of the case."""
        train, targets = self.data()
        return train.select(range(self.rows)), targets.select(range(self.targets))

    def trainer(self, place: Path, rows: Any, seed: int = 0, **more: Any) -> Trainer:
        """Return a trainer with the first weights."""
        options = {**self.options, **more}
        trainer = Trainer(self.model(place), arguments(place, seed=seed, **options), train_dataset=rows)
        trainer.remove_callback(PrinterCallback)
        return trainer


def arguments(place: Path, **options: Any) -> TrainingArguments:
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_strategy": "no", "use_cpu": True}
    defaults = {"per_device_train_batch_size": 30, "learning_rate": 5e-4}
    return TrainingArguments(str(place / "out"), **{**quiet, **defaults, **options})


# -- digits -----------------------------------------------------------------------------------------------------------


@cache
def images() -> Rows:
    train, targets = digits()
    return train, targets


def seeded(make: Callable[[], nn.Module]) -> Callable[[Path], nn.Module]:
    """Make the same first weights every time."""

    def model(place: Path) -> nn.Module:
        torch.manual_seed(0)
        return make()

    return model


def linear() -> nn.Module:
    return Classifier((64,), nn.Identity(), nn.Linear(64, 10))


def perceptron() -> nn.Module:
    return Classifier((64,), nn.Sequential(nn.Linear(64, 32), nn.GELU()), nn.Linear(32, 10))


# -- documentation by package -----------------------------------------------------------------------------------------


@cache
def documented() -> tuple[Rows, int]:
    case = packages(Path())
    words = max(max(row) for row in case.train["input_ids"][:] + case.targets["input_ids"][:]) + 1
    return (case.train, case.targets), words


def bert(dropout: float) -> Callable[[Path], nn.Module]:
    def make() -> nn.Module:
        config = BertConfig(
            vocab_size=documented()[1], hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=64, initializer_range=0.05, max_position_embeddings=32, num_labels=5,
            hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
            problem_type="single_label_classification",
        )  # fmt: skip
        return BertForSequenceClassification(config)

    return seeded(make)


# -- language models of characters ------------------------------------------------------------------------------------


def dataset(rows: np.ndarray) -> Dataset:
    return Dataset.from_dict({"input_ids": rows.tolist(), "labels": rows.tolist()})


@cache
def help_texts() -> tuple[Dataset, Rows, int]:
    """Cut the topics of Python's help into rows of characters, for a first training and for the run."""
    text = "".join(topics[name] for name in sorted(topics))
    letters = {letter: i for i, letter in enumerate(sorted(set(text)))}
    codes = np.array([letters[letter] for letter in text])
    rows = codes[: len(codes) // LENGTH * LENGTH].reshape(-1, LENGTH)
    rows = rows[np.random.default_rng(0).permutation(len(rows))]
    return dataset(rows[640:]), (dataset(rows[:600]), dataset(rows[600:640])), len(letters)


def chunks(text: str) -> Dataset:
    """Cut text into rows of characters, which are bytes of ASCII."""
    codes = np.frombuffer(text.encode("ascii", "ignore"), np.uint8) % 128
    return dataset(codes[: len(codes) // LENGTH * LENGTH].reshape(-1, LENGTH))


@cache
def descriptions() -> Rows:
    """Cut the descriptions of scikit-learn's data sets, in an order of their own."""
    folder = files("sklearn.datasets") / "descr"
    names = sorted(one.name for one in folder.iterdir() if one.name.endswith(".rst"))
    rows = chunks("\n".join((folder / name).read_text("utf-8") for name in names)).shuffle(seed=0)
    return rows.select(range(600)), rows.select(range(600, 640))


@cache
def trained(place: Path, make: Callable[[], PreTrainedModel], rows: Callable[[], Dataset], **options: Any) -> Any:
    """Train a model for the first time, or read it."""
    if not (place / "config.json").exists():
        torch.manual_seed(0)
        run = Trainer(make(), arguments(place.parent, **options), train_dataset=rows())
        run.train()
        run.model.save_pretrained(place)
    torch.manual_seed(0)
    return type(make()).from_pretrained(place)


def gpt2_of_help() -> PreTrainedModel:
    return GPT2LMHeadModel(gpt2_config(help_texts()[2], 60))


def gpt2_of_ascii() -> PreTrainedModel:
    return GPT2LMHeadModel(gpt2_config(128, 64))


def gpt2_config(words: int, width: int) -> GPT2Config:
    return GPT2Config(
        n_layer=2, n_head=4, n_embd=width, vocab_size=words, n_positions=LENGTH, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


def llama() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=128, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def help_rows() -> Dataset:
    return help_texts()[0]


def help_chunks() -> Dataset:
    return chunks("".join(topics.values()))


def fine_tuned(place: Path) -> nn.Module:
    return copy.deepcopy(trained(place.parent / "gpt2-first", gpt2_of_help, help_rows, max_steps=400,
                                 learning_rate=3e-3, warmup_steps=0.1))  # fmt: skip


def with_dropout(place: Path) -> nn.Module:
    model = fine_tuned(place)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    return model


def unfinished(place: Path) -> nn.Module:
    """A GPT-2 whose first training is not finished: its loss still falls fast."""
    return copy.deepcopy(trained(place.parent / "unfinished-first", gpt2_of_ascii, help_chunks, max_steps=400))


def adapted(place: Path) -> nn.Module:
    """A Llama with new adapters, A random and B zero; only they are trained."""
    from peft import LoraConfig, get_peft_model

    base = copy.deepcopy(trained(place.parent / "llama-first", llama, help_chunks, max_steps=300, learning_rate=3e-3))
    torch.manual_seed(0)
    return get_peft_model(base, LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"]))


LM, IMAGE, TEXT = "causal_lm", "image_classification", "text_classification"


def of_help(title: str, model: Callable[[Path], nn.Module] = fine_tuned, **more: Any) -> Case:
    return Case(title, LM, lambda: help_texts()[1], model, **more)


CASES = {
    "lr": Case("logistic regression, digits", IMAGE, images, seeded(linear),
               {"learning_rate": 1e-2, "num_train_epochs": 4}),
    "mlp": Case("MLP, digits", IMAGE, images, seeded(perceptron),
                {"learning_rate": 3e-3, "num_train_epochs": 4}, retrainings=40),
    "cnn": Case("CNN, digits", IMAGE, images, seeded(cnn),
                {"learning_rate": 2e-3, "num_train_epochs": 4}, retrainings=40),
    "vit": Case("ViT, digits", IMAGE, images, seeded(vit), {"learning_rate": 1e-3, "num_train_epochs": 4}),
    "bert": Case("BERT, Python's packages", TEXT, lambda: documented()[0], bert(0.0),
                 {"learning_rate": 1e-3, "num_train_epochs": 4}),
    "bert-dropout": Case("BERT, dropout .1", TEXT, lambda: documented()[0], bert(0.1),
                         {"learning_rate": 1e-3, "num_train_epochs": 4}, retrainings=16),
    "lora": Case("Llama, LoRA at 5e-3, fine-tune", LM, descriptions, adapted, {"learning_rate": 5e-3}, orders=3),
    "lora-cool": Case("Llama, LoRA at 1e-3, fine-tune", LM, descriptions, adapted, {"learning_rate": 1e-3},
                      retrainings=16),
    "gpt2": of_help("GPT-2, fine-tune on 600 rows", rows=600, retrainings=40),
    "gpt2-unfinished": Case("GPT-2, 600 rows, first training unfinished", LM, descriptions, unfinished,
                            rows=600, targets=40, retrainings=40),
    "gpt2-300": of_help("GPT-2, 300 rows", orders=2),
    "gpt2-warmup": of_help("GPT-2, 150 rows, 10 % warmup", rows=150, retrainings=16,
                           options={"warmup_steps": 0.1}),
    "gpt2-sgd": of_help("GPT-2, 150 rows, SGD at 2e-2", rows=150, retrainings=16, options={
        "optim": "sgd", "optim_args": "momentum=0.9", "learning_rate": 2e-2}),
    "gpt2-sgd-cool": of_help("GPT-2, 150 rows, SGD at 5e-3", rows=150, retrainings=16, options={
        "optim": "sgd", "optim_args": "momentum=0.9", "learning_rate": 5e-3}),
    "gpt2-dropout": of_help("GPT-2, 150 rows, dropout .1", with_dropout, rows=150, retrainings=16),
}  # fmt: skip
