"""Tail removal: models retrained without the rows that each method holds responsible for a target."""

from pathlib import Path

import numpy as np

from hf_trak.evaluation import Bank
from hf_trak.evaluation.removal import RemovalPlan, RemovalResult, evaluate_removal, removal_plan
from hf_trak.evaluation.retraining import Retrain
from hf_trak.store.sealed import content_digest
from quality_bench.banks import SEED, open_bank
from quality_bench.case import Case
from quality_bench.scored import DEFAULT, Scored, all_scored, judging_targets

FRACTION = 0.05
"""Share of the rows that the tables remove."""
TARGETS = 8
DRAWS = 30
"""Random removals, which are subsets that the bank has trained on."""
METHODS = (
    "hf_trak: TRAK", "traker: TRAK", "dattri: EK-FAC", "kronfluence: EK-FAC", "bergson: TrackStar", "bergson: EK-FAC",
    "baselines: gradient dot", "hf_trak: EK-FAC", "hf_trak: hybrid", "hf_trak: replayed recipe",
    "hf_trak: replayed run", "hf_trak: replayed run, Gauss-Newton",
)  # fmt: skip
CODED = ("hf_trak: TRAK, codes", ("int4, 2048 B", "int2, 2048 B", "int1, 1024 B"))
"""Variants of features in few bytes, beside the default of `hf_trak: TRAK` in float32, 16,384 bytes."""
CONTROLS = ("baselines: BM25", "baselines: embedding cosine", "baselines: gradient cosine")
"""Similarities that know nothing of the training, or little."""


def remove(case: Case, work: Path, fraction: float = FRACTION, job: int = 0, jobs: int = 1) -> RemovalResult | None:
    """Retrain without the first rows of every method's default scores, for some targets each.

    The result is None as long as another job still trains, and without any scores.
    """
    bank = open_bank(case, work)
    by_name = {scored.name: scored for scored in all_scored(work) if scored.error is None}
    chosen = {
        name: _default(by_name[name]) for name in METHODS if name in by_name and DEFAULT in by_name[name].variants
    }
    if CODED[0] in by_name:
        variants = by_name[CODED[0]].variants
        chosen |= {f"{CODED[0]} ({name})": variants[name] for name in CODED[1] if name in variants}
    controls = {name: _default(by_name[name]) for name in CONTROLS if name in by_name}
    if not chosen:
        return None
    targets = judging_targets(bank.n_targets)[: case.options.get("removal_targets", TARGETS)]
    # the seed of the random removals is that of the bank's part, whose trainings then serve again
    seed = round(1000 * fraction)
    plan = removal_plan(chosen, (fraction,), controls=controls, targets=targets, random_draws=DRAWS, seed=seed)
    train_on(plan, "removal", case, bank, job, jobs)
    return removal_result(bank, fraction)


def train_on(plan: RemovalPlan, kind: str, case: Case, bank: Bank, job: int, jobs: int) -> str:
    """Retrain on the subsets of a plan, as a part of the bank, and return its name."""
    retrain = case.retraining(drop="mask", seed=SEED)
    name = f"{kind}-{content_digest(plan.to_dict())[:8]}"
    bank.add_part(name, plan.masks, protocol=retrain.protocol, removal=plan.to_dict())
    bank.build(name, reusing(bank, retrain, retrain.protocol), job=job, jobs=jobs)
    return name


def _default(scored: Scored) -> np.ndarray:
    return scored.variants[DEFAULT]


def reusing(bank: Bank, retrain: Retrain, protocol: dict[str, object]) -> Retrain:
    """A training that first looks whether the bank has it: one seed and an unchanged start give the same result."""
    known: dict[bytes, np.ndarray] = {}
    for name in bank.parts:
        if bank.is_complete(name) and bank.description(name)["protocol"] == protocol:
            part = bank.part(name)
            known |= {
                np.flatnonzero(mask).tobytes(): row for mask, row in zip(part.masks, part.outputs[0], strict=True)
            }

    def training(rows: np.ndarray, seed: int) -> np.ndarray:
        found = known.get(np.asarray(rows).tobytes())
        return np.asarray(retrain(rows, seed)) if found is None else found

    return training


def removal_result(bank: Bank, fraction: float = FRACTION) -> RemovalResult | None:
    """Effects of removing so many rows, of the part with the most methods, if there is a complete one."""
    parts = [bank.description(name) | {"name": name} for name in bank.parts if bank.is_complete(name)]
    removals = [part for part in parts if (part["removal"] or {}).get("fractions") == [fraction]]
    if not removals:
        return None
    largest = bank.part(max(removals, key=lambda part: (len(part["removal"]["methods"]), part["subsets"]))["name"])
    plan = RemovalPlan.from_dict(largest.removal or {})
    return evaluate_removal(plan, largest.masks, largest.truth)
