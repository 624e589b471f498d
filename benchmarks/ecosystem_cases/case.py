"""`EcosystemCase`: one thing that people train with."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_trak import TrakAttributor, TrakConfig

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "far", "away", "from", "home", "with", "red"]
VOCABULARY = 3 + len(WORDS)
CLASSES = 4


@dataclass(frozen=True)
class EcosystemCase:
    """One thing that people train with.

    Attributes:
        title: what it is.
        make: makes its attributor, in a directory, from a configuration.
        needs: what a user has to say beside model and rows; empty where it works as it is.
        refused: a part of the message that refuses the case; empty where it is attributed.
    """

    title: str
    make: Callable[[Path, TrakConfig], TrakAttributor]
    needs: str = ""
    refused: str = ""


def tokenizer(**options: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of a few words."""
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>", "mask_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=64, **special, **options)


def texts(count: int, seed: int = 0) -> list[str]:
    """Random texts of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 10, (count,), generator=generator).tolist()
    chosen = (torch.randint(len(WORDS), (length,), generator=generator).tolist() for length in lengths)
    return [" ".join(WORDS[place] for place in places) for places in chosen]


def token_rows(count: int, seed: int = 0) -> list[list[int]]:
    """Random tokens of different lengths."""
    return [tokenizer()(text)["input_ids"] for text in texts(count, seed)]
