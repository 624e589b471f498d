"""Refined targets from the command line, in its run and its report."""

import json
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, load_from_disk
from doc_examples import write_reviews
from torch import nn

from hf_trak import Exact, TrakConfig, estimate
from hf_trak.cli.build import build
from hf_trak.cli.main import main
from hf_trak.cli.parser import DataArguments, ModelArguments, parse_yaml_and_args
from hf_trak.curvature.conjugate_gradients import Refinement
from hf_trak.report.run import AttributionRun
from hf_trak.scores.scored_dataset import TOP_K_COLUMNS

MODEL = ("--model", "model", "--train_dataset", "reviews.jsonl")
QUICK = "--use_cpu"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with `model/`, 40 rows in `reviews.jsonl` and 4 targets in `mine.jsonl`."""
    write_reviews(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_refined_scores_are_those_of_the_library(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("attribute", *MODEL, QUICK, "--eval_dataset", "mine.jsonl", "--top_k", "5", "--method", "exact")
    assert main([*asked, "--refine", "cg,steps=2,rows=24", "--json"]) == 0, capsys.readouterr().err
    run = json.loads(capsys.readouterr().out)["run"]

    model_args, data = parse_yaml_and_args((ModelArguments, DataArguments), list(MODEL))
    built = build(model_args, data, TrakConfig("library", use_cpu=True, budget="fast"))
    targets = built.preparation.prepare(Dataset.from_json("mine.jsonl"))
    given = {"method": Exact(refine=Refinement(steps=2, rows=24))}
    expected = built.attributor.attribute(targets, top_k=5, **given)
    found = load_from_disk(f"{run}/run/scored")
    for name in TOP_K_COLUMNS:
        assert np.allclose(found[name][:], expected[name][:], rtol=1e-4), name

    whole = np.array(built.attributor.attribute(targets, top_k=None, **given)["trak_scores"][:])
    saved = AttributionRun.load(run)
    assert saved.distributions is not None, "those of refined scores"
    assert np.allclose(saved.distributions.mean, whole.mean(axis=1), rtol=1e-4, atol=1e-6 * abs(whole).max())
    refined = "none: exact scores, ekfac, refined by at most 2 steps of conjugate gradients on 24 rows"
    assert saved.facts["projection"] == refined
    assert saved.facts["ridge"] == "damping 10 relative"
    assert main(["report", run]) == 0
    assert refined in Path(run, "report.html").read_text(encoding="utf-8")


def test_a_refinement_needs_exact_scores(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attribute", *MODEL, QUICK, "--eval_dataset", "mine.jsonl", "--refine", "cg"]) != 0
    assert "`refine` is 'cg', and `method` is 'auto', which has no such option" in capsys.readouterr().err
    assert (
        main(
            ["attribute", *MODEL, QUICK, "--eval_dataset", "mine.jsonl", "--method", "exact", "--refine", "cg,step=2"]
        )
        != 0
    )
    assert "`refine` has the option 'step=2'" in capsys.readouterr().err


def test_the_estimate_counts_the_passes(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(10, 4)
    asked = {"eval_dataset": 10, "checkpoints": 2, "method": Exact(refine="cg,steps=3,rows=500")}
    found = estimate(model, 100_000, TrakConfig(proj_dim=64, curvature="ekfac"), **asked).stages["refine"]
    assert found.passes == 2 * 2 * 3 * 500 * 10
    assert found.memory == 6 * 4 * 10 * 44
    assert found.seconds is None
    assert (
        estimate(model, 100, TrakConfig(proj_dim=64), method=Exact(refine="cg,steps=1")).stages["refine"].passes
        == 2 * 100
    )
    assert estimate(model, 100, TrakConfig(proj_dim=64)).stages.get("refine") is None
    printed = (
        "estimate",
        *MODEL,
        "--eval_size",
        "4",
        "--method",
        "exact",
        "--refine",
        "cg,steps=2,rows=24",
        "--measure",
    )
    assert main([*printed, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["stages"]["refine"]["seconds"] == pytest.approx(2 * 2 * 24 * 4 / answer["rows_per_second"])
    assert main([*printed]) == 0
    assert "  384  " in capsys.readouterr().out.split("\nrefine ")[1]
    with pytest.raises(ValueError, match="`refine` is 'newton'"):
        estimate(model, 100, TrakConfig(), method=Exact(refine="newton"))
