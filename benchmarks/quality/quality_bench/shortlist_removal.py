"""Tail removal by reranked scores: does a shortlist of 5 % of the rows lose anything against exact scores of all?

Reranked scores are exact scores of the rows on a shortlist. They are taken from the exact scores of all rows, with
which they agree to the bit; rows that are on no list have the score 0. Refined ones are treated alike.
"""

from pathlib import Path
from typing import Any

import numpy as np

from hf_trak.evaluation import Bank, evaluate_bank
from hf_trak.evaluation.bank import judged_parts
from hf_trak.evaluation.removal import RANDOM, RemovalPlan, evaluate_removal, removal_plan
from quality_bench.banks import open_bank
from quality_bench.case import Case
from quality_bench.removals import TARGETS, train_on
from quality_bench.scored import judging_targets
from quality_bench.shortlist import LISTS, Lister
from quality_bench.shortlist_scores import EXACT, INDEX, RIDGE, refined, scored

FRACTION = 0.01
SHORTLIST = 0.05
DRAWS = 30
METHODS = {
    "index": None,
    "rerank of 5 %, ridge": "ridge: scores of the index",
    "rerank of 5 %, ridge + no ridge": "ridge + no ridge",
    "rerank of 5 %, whitened": "whitened, no ridge",
    "exact": None,
    "rerank of 5 %, refined": "ridge + no ridge",
    "exact, refined": None,
}
"""By name, the shortlist."""
REFINED = "refined"
"""The scores of refined targets, beside those of `quality_bench.shortlist_scores`."""


def matrices(scores: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Scores `(n, m)` of every method. Rows that are on no shortlist have none, which is 0."""
    exact, refined = scores[EXACT].astype(np.float64), scores[REFINED].astype(np.float64)
    found = {"index": scores[f"{INDEX}, {RIDGE}"].astype(np.float64), "exact": exact, "exact, refined": refined}
    for name, shortlist in METHODS.items():
        if shortlist is not None:
            kept = refined if name.endswith(REFINED) else exact
            found[name] = np.where(on_list(scores, LISTS[shortlist]), kept, 0.0)
    return {name: found[name] for name in METHODS}


def on_list(scores: dict[str, np.ndarray], lister: Lister) -> np.ndarray:
    """Mark the rows that are on the shortlist of a target at either end, `(n, m)`."""
    n, m = scores[EXACT].shape
    marked = np.zeros((n, m), dtype=bool)
    for sign in (1, -1):
        for target, rows in enumerate(lister(scores, sign, max(1, round(SHORTLIST * n)))):
            marked[rows, target] = True
    return marked


def report_rerank(case: Case, work: Path, job: int = 0, jobs: int = 1) -> dict[str, Any]:
    """Retrain without the first rows of every method, unless the bank has it, and print what that did."""
    scores, seconds = scored(case, work)
    scores[REFINED], seconds["refined, score"] = refined(case, work)
    bank = open_bank(case, work)
    ranked = matrices(scores)
    part, plan = _removal(case, bank, ranked, job, jobs)
    lds = evaluate_bank(bank, ranked, parts=judged_parts(bank))
    quality = {name: float(np.mean([one.lds.value for one in lds if one.method == name])) for name in ranked}
    ten = max(1, round(FRACTION * len(scores[EXACT])))
    shares = {
        name: _in_common(ranked["exact, refined" if name.endswith(REFINED) else "exact"], values, ten)
        for name, values in ranked.items()
    }
    removed: dict[str, Any] = {}
    if bank.is_complete(part):
        built = bank.part(part)
        removed = {one.name: one.own for one in evaluate_removal(plan, built.masks, built.truth).effects}
    shown = _table(quality, shares, removed, plan.counts[0], ten)
    print(f"\n### {case.title}\n\n{shown}\n\nSeconds: {_seconds(seconds)}", flush=True)
    return {
        "lds": quality,
        "precision": shares,
        "removal": {name: one.to_dict() for name, one in removed.items()},
        "seconds": seconds,
    }


def _in_common(exact: np.ndarray, values: np.ndarray, top: int) -> float:
    """Share of the first rows by one matrix `(n, m)` that are first by another, averaged over targets."""
    best, found = np.argsort(-exact, axis=0)[:top], np.argsort(-values, axis=0)[:top]
    return float(np.mean([np.isin(best[:, j], found[:, j]).mean() for j in range(best.shape[1])]))


def _removal(case: Case, bank: Bank, ranked: dict[str, np.ndarray], job: int, jobs: int) -> tuple[str, RemovalPlan]:
    targets = judging_targets(bank.n_targets)[: case.options.get("removal_targets", TARGETS)]
    # the seed of the random removals is that of the bank's part, whose trainings then serve again
    plan = removal_plan(ranked, (FRACTION,), targets=targets, random_draws=DRAWS, seed=round(1000 * FRACTION))
    return train_on(plan, "rerank", case, bank, job, jobs), plan


def _table(quality: dict[str, float], shares: dict[str, float], removed: dict[str, Any], count: int, top: int) -> str:
    lines = [["", "LDS", f"of the exact top {top}", f"removal of {count} rows", "of exact removal"], ["---"] * 5]
    exact = removed["exact"].value if removed else float("nan")
    for name in (*quality, RANDOM):
        effect = removed.get(name)
        lines.append(
            [
                name,
                f"{quality[name]:.3f}" if name in quality else "",
                f"{shares[name]:.2f}" if name in shares else "",
                "" if effect is None else f"{effect.value:+.2f} [{effect.low:+.2f}, {effect.high:+.2f}]",
                "" if effect is None else f"{effect.value / exact:.0%}",
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _seconds(seconds: dict[str, float]) -> str:
    fit, score = seconds["exact, fit"], seconds["exact, score"]
    return (
        f"fitting the curvature {fit:.1f}, exact scores of all rows {score:.1f}, of 5 % {SHORTLIST * score:.1f}, "
        f"of all rows for refined targets {seconds['refined, score']:.1f}."
    )
