"""The last result of an attributor, which `TrakAttributor.show` displays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from hf_trak.report.distributions import ScoreDistributions


@dataclass
class LastResult:
    """The last result of `attribute(..., per="target")` and what it was computed from."""

    scored: Dataset
    eval_dataset: Any
    name: str
    model_ids: Sequence[int] | None
    distributions: ScoreDistributions | None = None
    """Counted when they are needed for the first time."""
