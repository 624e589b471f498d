"""Cases by name; each module makes those of one source of data."""

import importlib
from pathlib import Path

from quality_bench.case import Case

CASES = {
    "digits-cnn": ("digits", "digits_cnn"),
    "digits-vit": ("digits", "digits_vit"),
    "mnist-lr": ("mnist", "mnist_lr"),
    "mnist-mlp": ("mnist", "mnist_mlp"),
    "gpt2": ("language", "gpt2"),
    "bert": ("topics", "bert"),
    "smollm-lora": ("smollm", "smollm_lora"),
    "board": ("board", "board"),
}
"""By name, the module and the function in it, which takes a directory for downloads."""


def make_case(name: str, downloads: Path) -> Case:
    """Make a case; data that it needs is fetched into `downloads`, unless it is there."""
    module, function = CASES[name]
    return getattr(importlib.import_module(f"quality_bench.cases.{module}"), function)(downloads)
