"""The work that every library does: a GPT-2, training rows and targets, and a plain pass of training over the rows."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from datasets import Dataset
from gradients import gpt2
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

BASIS_POSITIONS = 20
"""Positions per dimension that bases are fitted to, by every library that has a setting for it."""


@dataclass(frozen=True)
class Work:
    """What is measured.

    Attributes:
        rows: number of training rows; the curvature is fitted to all of them.
        targets: number of targets.
        batch_size: rows per batch of every library.
        threads: threads of every process.
        tiny: whether the model is a toy, for a test of the command.
    """

    rows: int
    targets: int
    batch_size: int
    threads: int
    tiny: bool = False

    def model(self) -> nn.Module:
        """The GPT-2 of featurize.py, the same in every process, in eval mode."""
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(_toy()) if self.tiny else gpt2()[0]
        return model.eval()

    def tokens(self) -> tuple[Tensor, Tensor]:
        """Tokens of the training rows `(rows, T)` and of the targets `(targets, T)`."""
        config = _toy() if self.tiny else gpt2()[0].config
        generator = torch.Generator().manual_seed(1)
        shape = (self.rows + self.targets, config.n_positions)
        tokens = torch.randint(config.vocab_size, shape, generator=generator)
        return tokens[: self.rows], tokens[self.rows :]

    def datasets(self) -> tuple[Dataset, Dataset]:
        """The same as datasets with the columns `input_ids`, `attention_mask` and `labels`."""
        train, targets = (
            Dataset.from_dict(
                {
                    "input_ids": part.tolist(),
                    "attention_mask": torch.ones_like(part).tolist(),
                    "labels": part.tolist(),
                }
            )
            for part in self.tokens()
        )
        return train, targets

    def basis_rows(self) -> int:
        """Rows whose positions are enough for the bases of the longest side of a layer."""
        model = self.model()
        sides = (max(weight.shape) + 1 for weight in linear_weights(model).values())
        return -(-BASIS_POSITIONS * max(sides) // int(model.config.n_positions))  # type: ignore[union-attr, arg-type]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class PlainPass:
    """Training without its optimizer: forward and backward passes over all rows, with gradients of all weights."""

    def __init__(self, work: Work) -> None:
        self._model = work.model()
        self._batches = work.tokens()[0].split(work.batch_size)

    def __call__(self) -> None:
        for batch in self._batches:
            self.step(batch)

    def step(self, batch: Tensor | None = None) -> None:
        """One batch, the first by default."""
        ids = self._batches[0] if batch is None else batch
        self._model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
        self._model.zero_grad(set_to_none=True)


def linear_weights(model: nn.Module) -> dict[str, Tensor]:
    """Weights of the layers that all libraries follow: linear ones without the head, which shares its weight."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Conv1D)}
    return {f"{name}.weight": module.weight for name, module in layers.items()}


def linear_parameters(model: nn.Module) -> list[str]:
    """Names of the weights and biases of these layers."""
    return [name for weight in linear_weights(model) for name in (weight, weight.removesuffix("weight") + "bias")]


def _toy() -> transformers.GPT2Config:
    return transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=2, n_positions=16, vocab_size=50, bos_token_id=0, eos_token_id=0
    )
