"""Shared fixtures: nothing here reaches a network; models are built from configs and trained in seconds."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of two workers on two cores wait for each other

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test starts from the same random state."""
    torch.manual_seed(0)
