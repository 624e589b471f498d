"""What an attributor remembers of its last result, so that a notebook can show it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from hf_trak.report.distributions import ScoreDistributions


@dataclass
class LastResult:
    """Of `attribute(..., per="target")`."""

    scored: Dataset
    eval_dataset: Any
    name: str
    model_ids: Sequence[int] | None
    distributions: ScoreDistributions | None = None
    """Counted when they are first needed."""
