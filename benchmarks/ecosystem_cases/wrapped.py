"""Wrappers around models, kinds of batches, and training loops of one's own."""

import dataclasses
from collections import namedtuple
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from accelerate import Accelerator
from datasets import Dataset
from torch import nn
from torch.utils.data import DataLoader

from ecosystem_cases.case import EcosystemCase, token_rows, tokenizer
from ecosystem_cases.language import llama
from ecosystem_cases.truth import of_model, with_truth
from hf_trak import TrakAttributor, TrakConfig

Named = namedtuple("Named", ["input_ids", "attention_mask", "labels"])


@dataclasses.dataclass
class Fields:
    """A batch as a dataclass."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    labels: torch.Tensor


def rows() -> Dataset:
    return Dataset.from_dict({"input_ids": token_rows(6)})


def collate(given: list[Any]) -> Any:
    return hf.DataCollatorForLanguageModeling(tokenizer(), mlm=False)(given)


def wrapped(directory: Path, args: TrakConfig, *, wrap: Any) -> TrakAttributor:
    return of_model(wrap(llama()), args, rows(), collate, task="causal_lm")


def batched(directory: Path, args: TrakConfig, *, kind: Any) -> TrakAttributor:
    def own(given: list[Any]) -> Any:
        batch = collate(given)
        return kind(batch["input_ids"], batch["attention_mask"], batch["labels"])

    made = TrakAttributor(llama(), args, train_dataset=rows(), data_collator=own, task="causal_lm")
    return with_truth(made, of_model(made.model, args, rows(), collate, task="causal_lm").loss_of)


def looped(directory: Path, args: TrakConfig) -> TrakAttributor:
    model, loader = Accelerator(cpu=True).prepare(llama(), DataLoader(rows(), 2, shuffle=True, collate_fn=collate))
    made = TrakAttributor(model, args, dataloader=loader, task="causal_lm")
    return with_truth(made, of_model(made.model, args, rows(), collate, task="causal_lm").loss_of)


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def checkpointed(model: Any) -> Any:
    model.gradient_checkpointing_enable()
    return model


def lightning(directory: Path, args: TrakConfig) -> TrakAttributor:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama()

        def forward(self, **batch: Any) -> Any:
            return self.model(**batch)

    return of_model(Module().eval().model, args, rows(), collate, task="causal_lm")


WRAPPED = (
    EcosystemCase("`torch.compile(model)`", partial(wrapped, wrap=partial(torch.compile, backend="eager"))),
    EcosystemCase("`model.compile()`", partial(wrapped, wrap=compiled_in_place)),
    EcosystemCase("`nn.DataParallel(model)`", partial(wrapped, wrap=nn.DataParallel)),
    EcosystemCase(
        "gradient checkpointing",
        partial(wrapped, wrap=checkpointed),
    ),
    EcosystemCase("a loop with Accelerate", looped, "`dataloader=`, `task=`"),
    EcosystemCase("the model inside of a LightningModule", lightning, "`module.model`"),
    EcosystemCase("batches that are dataclasses", partial(batched, kind=Fields)),
    EcosystemCase("batches that are namedtuples", partial(batched, kind=Named)),
)
