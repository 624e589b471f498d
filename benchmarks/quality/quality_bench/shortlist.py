"""Tables of shortlists: which part of the best rows under exact EK-FAC a shortlist of some size holds."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from hf_trak.scores.shortlist import fused_ranks
from quality_bench.case import Case
from quality_bench.shortlist_scores import (
    BM25,
    EMBEDDINGS,
    EXACT,
    INDEX,
    PLAIN,
    RIDGE,
    UNIT,
    UNIT_RIDGE,
    Scores,
    scored,
)

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2)
COUNTS = (100, 1000)
TOPS = (10, 100)
LARGEST_PART = 0.5
"""Shortlists of more of the rows are left out."""

Lister = Callable[[Scores, int, int], np.ndarray]
"""Lists rows for every target: of scores, a sign (+1 for the rows of the highest scores) and a number of rows."""


def by(*names: str) -> Lister:
    """Rank by one matrix, or merge several by their ranks. Similarities rank the same rows first at both ends."""

    def listed(scores: Scores, sign: int, count: int) -> np.ndarray:
        tables = [ranked(scores[name] if name in (BM25, EMBEDDINGS) else sign * scores[name], count) for name in names]
        return tables[0] if len(tables) == 1 else fused_ranks(tables, count)

    listed.names = names  # type: ignore[attr-defined]
    return listed


def _of(form: str, *kinds: str) -> Lister:
    return by(*(f"{form}, {kind}" for kind in kinds))


LISTS: dict[str, Lister] = {
    "ridge: scores of the index": _of(INDEX, RIDGE),
    "ridge, λ = 1": _of(INDEX, "ridge, λ = 1"),
    "ridge, λ = 3": _of(INDEX, "ridge, λ = 3"),
    "ridge, λ = 10": _of(INDEX, "ridge, λ = 10"),
    "ridge, λ = 30": _of(INDEX, "ridge, λ = 30"),
    "no ridge": _of(INDEX, PLAIN),
    "unit norm, ridge": _of(INDEX, UNIT_RIDGE),
    "unit norm, no ridge": _of(INDEX, UNIT),
    "unit norm, no ridge, without q": _of(INDEX, f"{UNIT}, without q"),
    "ridge + no ridge": _of(INDEX, RIDGE, PLAIN),
    "ridge, λ = 1 + no ridge": _of(INDEX, "ridge, λ = 1", PLAIN),
    "ridge + λ = 30": _of(INDEX, RIDGE, "ridge, λ = 30"),
    "float32 × 4096, ridge": _of("float32 × 4096", RIDGE),
    "int2 × 4096, ridge": _of("int2 × 4096", RIDGE),
    "int2 × 8192, ridge": _of("int2 × 8192", RIDGE),
    "int1 × 8192, ridge": _of("int1 × 8192", RIDGE),
    "int1 × 16384, ridge": _of("int1 × 16384", RIDGE),
    "int2 × 8192, ridge + no ridge": _of("int2 × 8192", RIDGE, PLAIN),
    "int1 × 16384, ridge + no ridge": _of("int1 × 16384", RIDGE, PLAIN),
    "each block scaled, no ridge": _of(INDEX, "each block scaled"),
    "each block scaled, λ = 30": _of(INDEX, "each block scaled, λ = 30"),
    "whitened, no ridge": _of(INDEX, "whitened"),
    "whitened, λ = 30": _of(INDEX, "whitened, λ = 30"),
    "BM25": by(BM25),
    "ridge + BM25": by(f"{INDEX}, {RIDGE}", BM25),
    "ridge + no ridge + BM25": by(f"{INDEX}, {RIDGE}", f"{INDEX}, {PLAIN}", BM25),
    "embeddings": by(EMBEDDINGS),
    "ridge + embeddings": by(f"{INDEX}, {RIDGE}", EMBEDDINGS),
}

Recalls = dict[str, dict[str, dict[str, float]]]
"""By list, number of best rows and size of the shortlist, the recall at both ends: `{"helpful": …, "harmful": …}`."""


def report_shortlist(case: Case, work: Path) -> Recalls:
    """Print the table of a case, and return its numbers."""
    scores, seconds = scored(case, work)
    n, m = scores[EXACT].shape
    found = {name: recalls(scores, lister) for name, lister in LISTS.items() if _has(scores, lister)}
    timed = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items() if name.startswith("exact"))
    print(f"\n### {case.title}\n\nn = {n:,}, m = {m} targets; {timed}.\n\n{table(found)}", flush=True)
    return found


def recalls(scores: Mapping[str, np.ndarray], lister: Lister) -> dict[str, dict[str, float]]:
    """Compute the share of the best rows of every target that is listed, averaged over targets."""
    exact = scores[EXACT]
    best = {sign: ranked(sign * exact, max(TOPS)) for sign in (1, -1)}
    found: dict[str, dict[str, float]] = {}
    for label, count in sizes(len(exact)).items():
        lists = {sign: lister(dict(scores), sign, count) for sign in (1, -1)}
        for top in (top for top in TOPS if top <= LARGEST_PART * len(exact)):
            ends = {
                end: float(np.mean([np.isin(a[:top], b).mean() for a, b in zip(best[sign], lists[sign], strict=True)]))
                for end, sign in (("helpful", 1), ("harmful", -1))
            }
            found[f"top {top}, {label}"] = ends
    return found


def sizes(n: int) -> dict[str, int]:
    """Sizes of shortlists by label, of at most half of the rows."""
    counts = {f"{share:.0%}": max(1, round(share * n)) for share in SHARES} | {f"{one:,} rows": one for one in COUNTS}
    return {label: count for label, count in counts.items() if count <= LARGEST_PART * n}


def ranked(values: np.ndarray, count: int) -> np.ndarray:
    """The rows of the highest values for every target, `(m, count)`; of equal ones the lower number first."""
    return np.argsort(-values, axis=0, kind="stable")[:count].T


def table(found: Recalls) -> str:
    """A line for each list: recall at the helpful and at the harmful end."""
    columns = list(next(iter(found.values())))
    lines = [["", *columns], ["---"] * (1 + len(columns))]
    for name, cells in found.items():
        lines.append([name, *(f"{cells[one]['helpful']:.2f} / {cells[one]['harmful']:.2f}" for one in columns)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def shortlist_summary(results: Mapping[str, Recalls]) -> str:
    """Mean recall over both ends and all cases that have texts, or all cases, by list."""
    columns = [f"top {top}, {share:.0%}" for top in TOPS for share in SHARES]
    lines = [["", "cases", *columns], ["---"] * (2 + len(columns))]
    for name in LISTS:
        having = [result[name] for result in results.values() if name in result]
        if not having:
            continue
        cells = [str(len(having))]
        for column in columns:
            values = [np.mean(list(one[column].values())) for one in having if column in one]
            cells.append(f"{np.mean(values):.2f}" if values else "–")
        lines.append([name, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _has(scores: Scores, lister: Lister) -> bool:
    return all(name in scores for name in lister.names)  # type: ignore[attr-defined]
