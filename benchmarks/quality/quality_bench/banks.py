"""The bank of a case: random subsets at several shares of dropped rows, and repeats that tell the noise."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hf_trak.evaluation import Bank, random_subsets
from quality_bench.case import Case

SEED = 0
"""Seed of every training: initial weights, order, dropout."""
OTHER_SEED = 1
PERTURBATION = 1e-6
"""Relative change of the initial weights in the repeats, a few roundings of float32."""


@dataclass(frozen=True)
class Plan:
    """One part of a bank.

    Attributes:
        name: name of the part.
        masks: subsets `(s, n)`.
        options: arguments of `Case.retraining`.
        repeat_of: the part that it repeats.
    """

    name: str
    masks: np.ndarray
    options: dict[str, Any]
    repeat_of: str | None = None


def part_name(drop: float) -> str:
    return f"drop-{drop:g}"


def plans(case: Case) -> Iterator[Plan]:
    """The parts of a case's bank: every share of dropped rows, then their repeats."""
    n = len(case.train)
    masks = {drop: random_subsets(n, case.subsets, 1 - drop, seed=round(1000 * drop)) for drop in case.drops}
    options: dict[str, Any] = {"drop": "mask", "seed": SEED}
    for drop in case.drops:
        yield Plan(part_name(drop), masks[drop], options)
    for drop in case.drops:
        first, name = masks[drop][: case.perturbed], part_name(drop)
        yield Plan(f"{name}-perturbed", first, {**options, "perturbation": PERTURBATION}, name)
    for drop in dict.fromkeys((case.drops[0], case.drops[-1])):
        first, name = masks[drop][: case.other_seed], part_name(drop)
        yield Plan(f"{name}-other-seed", first, {**options, "seed": OTHER_SEED}, name)


def open_bank(case: Case, work: Path) -> Bank:
    """The bank of a case, with all its parts described."""
    recipe = {
        "case": case.name,
        "title": case.title,
        "task": case.task,
        "training": case.training,
        "parameters": sum(parameter.numel() for parameter in case.make_model().parameters()),
    }
    bank = Bank.create(work / "bank", case.train, case.targets, recipe)
    for plan in plans(case):
        protocol = case.retraining(**plan.options).protocol
        bank.add_part(plan.name, plan.masks, protocol=protocol, repeat_of=plan.repeat_of)
    return bank


def build(case: Case, work: Path, job: int = 0, jobs: int = 1) -> Bank:
    """Do all trainings that are missing."""
    bank = open_bank(case, work)
    for plan in plans(case):
        bank.build(plan.name, case.retraining(**plan.options), job=job, jobs=jobs)
    return bank
