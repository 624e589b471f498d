"""Tables of codes: quality by form and bytes per row, beside float32 features at the library's default."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from hf_trak.evaluation import linear_datamodeling_score
from hf_trak.evaluation.bank import judged_parts
from hf_trak.evaluation.intervals import Interval, mean_interval
from quality_bench.banks import open_bank
from quality_bench.case import Case
from quality_bench.methods.coded import FORMS, PLAIN, PREFIX, RIDGE, SIZES, variant
from quality_bench.scored import DEFAULT
from quality_bench.worker import directory_of

REFERENCE = variant("float32", 16384)
BEST, SHORTLIST = 10, 0.05
"""How many of the best rows under exact EK-FAC are looked for, and in which share of the rows."""


def report_codes(case: Case, work: Path) -> dict[str, dict[str, float]]:
    """Print the tables of a case, and return their numbers.

    Each number is the LDS, averaged over the bank's shares of dropped rows and over targets, with the interval of its
    difference to that of the default, paired by target.
    """
    bank = open_bank(case, work)
    parts = [bank.part(name) for name in judged_parts(bank)]
    scores = dict(np.load(directory_of(work, "hf_trak", "TRAK, codes") / "scores.npz", allow_pickle=False))
    quality = {
        name: np.mean([linear_datamodeling_score(values, part.masks, part.truth) for part in parts], axis=0)
        for name, values in scores.items()
    }
    exact = _exact(work)
    print(f"\n### {case.title}\n")
    for title, kind in (("with ridge", RIDGE), ("no ridge", PLAIN)):
        print(f"LDS, {title}:\n")
        _table(lambda form, size, kind=kind: _cell(quality, variant(form, size, kind)))
    if exact is not None:
        print(f"Of the {BEST} best rows of exact EK-FAC, the share among the best {SHORTLIST:.0%} of the index:\n")
        _table(lambda form, size: _recall(scores.get(variant(form, size)), exact))
    return {
        name: {
            "lds": float(values.mean()),
            "recall": float("nan") if exact is None else recall(scores[name], exact),
            **({} if name.endswith(PREFIX) else _difference(quality, name).to_dict()),
        }
        for name, values in quality.items()
    }


def recall(scores: np.ndarray, exact: np.ndarray) -> float:
    """Share of the best rows under `exact` that are among the best of `scores`; both `(n, m)`."""
    count = max(BEST, round(SHORTLIST * len(scores)))
    best, listed = (np.argsort(-values, axis=0)[:rows] for values, rows in ((exact, BEST), (scores, count)))
    return float(np.mean([np.isin(best[:, j], listed[:, j]).mean() for j in range(scores.shape[1])]))


def _exact(work: Path) -> np.ndarray | None:
    path = directory_of(work, "hf_trak", "EK-FAC") / "scores.npz"
    return np.load(path, allow_pickle=False)[DEFAULT] if path.is_file() else None


def _difference(quality: dict[str, np.ndarray], name: str) -> Interval:
    return mean_interval(quality[name] - quality[REFERENCE])


def _cell(quality: dict[str, np.ndarray], name: str) -> str:
    if name not in quality:
        return ""
    found = _difference(quality, name)
    mark = "" if name == REFERENCE else " +" if found.low > 0 else " −" if found.high < 0 else ""
    return f"{quality[name].mean():.3f}{mark}"


def _recall(scores: np.ndarray | None, exact: np.ndarray) -> str:
    return "" if scores is None else f"{recall(scores, exact):.2f}"


def _table(cell: Callable[[str, int], str]) -> None:
    print("| | " + " | ".join(f"{size:,} B" for size in SIZES) + " |\n" + "|---" * (len(SIZES) + 1) + "|")
    for form in FORMS:
        print(f"| {form} | " + " | ".join(cell(form, size) for size in SIZES) + " |")
    print()
