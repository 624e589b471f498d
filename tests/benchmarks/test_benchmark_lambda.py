"""benchmarks/lambda_*.py: the command at toy size, and its eigendecompositions beside `TrakAttributor`."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.evaluation import linear_datamodeling_score

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TOY = ["--rows", "40", "--longer", "0.2", "--targets", "8", "--subsets", "6", "--repeats", "1", "--counts", "1", "2"]


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """The modules of the command."""
    names = ("lambda_sweep", "lambda_cases", "lambda_rules")
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(BENCHMARKS))
        for path in BENCHMARKS.glob("*.py"):
            sys.modules.pop(path.stem, None)


@pytest.fixture(scope="module")
def ran(modules: dict[str, ModuleType], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The command on two tasks: its directory, its options, and the JSON that it wrote."""
    out = tmp_path_factory.mktemp("lambda")
    options = [
        *TOY,
        "--processes",
        "1",
        "--resamples",
        "20",
        "--work",
        str(out / "work"),
        "--tasks",
        "mlp",
        "language",
        "--ratios",
        "0.5",
        "2",
    ]
    modules["lambda_sweep"].main([*options, "--json", str(out / "all.json"), "--png", str(out / "all.png")])
    return {"out": out, "options": options, "json": json.loads((out / "all.json").read_text())}


def test_the_command_writes_every_case(ran: dict[str, Any]) -> None:
    cases = ran["json"]["cases"]
    shown = {(case["task"], case["k"], case["checkpoints"], case["kind"]) for case in cases}
    one = {(task, k, 1, "independent") for task in ("mlp", "language") for k in (20, 80)}
    two = {(task, k, 2, kind) for task, k, _, _ in one for kind in ("independent", "one run")}
    assert shown == one | two and len(cases) == len(shown)
    assert all(np.abs(case["lds"]).max() <= 1 for case in cases)
    assert {"mlp", "language"} == set(ran["json"]["rules"][0]["tasks"])
    assert (ran["out"] / "all.png").read_bytes().startswith(b"\x89PNG")


def test_a_second_run_trains_nothing_and_finds_the_same(
    ran: dict[str, Any], modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(modules["lambda_cases"], "train", refuse)
    modules["lambda_sweep"].main([*ran["options"], "--json", str(ran["out"] / "again.json")])
    again = json.loads((ran["out"] / "again.json").read_text())
    assert again["cases"] == ran["json"]["cases"]


def test_scores_and_lds_are_those_of_the_library(
    ran: dict[str, Any], modules: dict[str, ModuleType], tmp_path: Path
) -> None:
    cases, rules, sweep = modules["lambda_cases"], modules["lambda_rules"], modules["lambda_sweep"]
    settings = cases.Settings(ran["out"] / "work", [0.5, 2.0], [1, 2], 8, 6, 1, 40, 0.2)
    prepared = cases.Prepared("mlp", settings)
    models = cases.train(prepared.task, torch.ones(2, 40, dtype=torch.bool), 99)
    outputs = prepared.retrained()
    for dim in (20, 80):  # fewer features than rows, and more
        ensemble = prepared.checkpoints("independent", dim)
        config = TrakConfig(output_dir=str(tmp_path / str(dim)), proj_dim=dim, lambda_relative=0.3, use_cpu=True)
        attributor = TrakAttributor(models[0], config, prepared.train_rows, task="image_classification")
        scored = attributor.featurize(models).attribute(prepared.targets, top_k=None)
        expected = np.stack(scored.with_format("numpy")["trak_scores"][:]).T
        ours = rules.scores([one.features for one in ensemble], 0.3)
        np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
        lds, _ = sweep.measured(ensemble, prepared.masks, outputs, 1)
        truth = linear_datamodeling_score(expected, prepared.masks, outputs).mean()
        assert lds[list(sweep.GRID).index(0.3)] == pytest.approx(truth, abs=1e-6)


def test_leave_one_out_errors_are_those_of_fits_without_each_row(modules: dict[str, ModuleType]) -> None:
    rules = modules["lambda_rules"]
    rng = np.random.default_rng(0)
    for n, k in ((12, 5), (8, 20)):
        x, y = rng.normal(size=(n, k)), rng.normal(size=n)
        one = rules.spectrum(x, rng.normal(size=(3, k)), np.ones(n))
        lam = 0.7 * one.scale
        centred = y - y.mean()
        errors = []
        for row in range(n):
            kept = np.arange(n) != row
            system = x[kept].T @ x[kept] + lam * np.eye(k)
            errors.append(centred[row] - x[row] @ np.linalg.solve(system, x[kept].T @ centred[kept]))
        expected = np.mean(np.square(errors)) / y.var()
        assert rules._loo(one, y[None], np.array([0.7]))[0] == pytest.approx(expected, rel=1e-5)


def test_the_constant_of_a_rule_comes_from_other_tasks_alone(modules: dict[str, ModuleType]) -> None:
    rules, sweep = modules["lambda_rules"], modules["lambda_sweep"]
    known = rules.Evidence(10, 10, 1, sweep.GRID, {}, {})

    def case(task: str, best: float) -> Any:
        lds = np.exp(-(np.log(sweep.GRID / best) ** 2))
        return sweep.Case(task, "independent", 10, 1, known, lds, np.tile(lds, (5, 1)))

    both = [case("a", 0.1), case("b", 3.0)]
    judged = sweep.judge(rules.Rule("c", (0.1, 3.0), lambda _, c: c), both, both)
    assert judged["constants"] == {"a": 3.0, "b": 0.1}
    assert judged["chosen"] == [3.0, 0.1]
