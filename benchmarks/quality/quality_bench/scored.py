"""Scores of all methods on a case, and the choice of the best variant of each, on targets that judge nothing."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hf_trak.evaluation import Bank, linear_datamodeling_score
from hf_trak.evaluation.bank import judged_parts
from quality_bench.worker import RESULT

DEFAULT = "default"


def tuning_targets(m: int) -> list[int]:
    """Targets that serve the choice of variants, and nothing else."""
    return list(range(0, m, 2))


def judging_targets(m: int) -> list[int]:
    return list(range(1, m, 2))


@dataclass(frozen=True)
class Scored:
    """A method on a case.

    Attributes:
        directory: where its scores are.
        result: what `quality_bench.worker` wrote: cost, variants, or the error.
    """

    directory: Path
    result: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.result['library']}: {self.result['method']}"

    @property
    def error(self) -> str | None:
        return self.result.get("error")

    @cached_property
    def variants(self) -> dict[str, np.ndarray]:
        """Scores `(n, m)` by variant; those that are not finite everywhere are left out."""
        found = dict(np.load(self.directory / "scores.npz", allow_pickle=False))
        return {name: values for name, values in found.items() if np.isfinite(values).all()}

    def best(self, bank: Bank) -> str:
        """The variant of the highest LDS on the tuning targets, averaged over the bank's parts."""
        columns = tuning_targets(bank.n_targets)
        parts = [bank.part(name) for name in judged_parts(bank)]

        def quality(name: str) -> float:
            values = self.variants[name][:, columns]
            found = [linear_datamodeling_score(values, part.masks, part.truth[:, columns]).mean() for part in parts]
            return float(np.mean(found))

        return max(self.variants, key=quality)


def all_scored(work: Path) -> list[Scored]:
    """All methods that were run on a case, in the order of libraries and methods as they were run."""
    found = sorted((work / "scores").glob(f"*/{RESULT}"), key=lambda path: path.parent.stat().st_ctime)
    return [Scored(path.parent, json.loads(path.read_text())) for path in found]
