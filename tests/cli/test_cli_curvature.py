"""Curvatures from the command line and in recipes: fitting, exact scores, the fidelity of an index."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, load_from_disk
from doc_examples import make_trainer, sentences, write_reviews
from kit import training
from trak_options import trak_config

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.cli.build import build
from hf_trak.cli.main import main
from hf_trak.cli.parser import DataArguments, ModelArguments, parse_yaml_and_args
from hf_trak.report.run import AttributionRun
from hf_trak.scores.scored_dataset import TOP_K_COLUMNS

MODEL = ("--model", "model", "--train_dataset", "reviews.jsonl")
QUICK = ("--proj_dim", "64", "--use_cpu")

Answer = Callable[..., dict[str, Any]]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with `model/`, 40 rows in `reviews.jsonl` and 4 targets in `mine.jsonl`."""
    write_reviews(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Answer:
    """Run a command with `--json`; the object that it prints."""

    def ask(*argv: str) -> dict[str, Any]:
        capsys.readouterr()
        assert main([*argv, "--json"]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return ask


def library(**options: Any) -> tuple[TrakAttributor, Any]:
    """The attributor that the commands build, in another directory, and the targets as it takes them."""
    kinds = (ModelArguments, DataArguments)
    model_args, data = parse_yaml_and_args(kinds, list(MODEL))
    built = build(model_args, data, trak_config("library", proj_dim=64, use_cpu=True, **options))
    return built.attributor, built.preparation.prepare(Dataset.from_json("mine.jsonl"))


@pytest.mark.slow
def test_a_fitted_curvature_is_what_exact_scores_use(place: Path, answer: Answer) -> None:
    settings = ("--curvature", "kfac", "--curvature_damping", "0.5", "--curvature_rows", "30")
    printed = answer("curvature", *MODEL, *QUICK, *settings)
    (report,) = printed["reports"]
    assert (printed["train_rows"], report["model_id"], report["kind"]) == (40, 0, "kfac")
    assert (report["rows"], report["damping"]) == (30, 0.5)
    files = {path: path.stat().st_mtime_ns for path in (place / "trak/curvature").rglob("*.*")}
    assert answer("curvature")["reports"] == printed["reports"], "the settings are remembered"
    run = answer("attribute", "--method", "exact", "--eval_dataset", "mine.jsonl", "--top_k", "5", "--name", "mine")[
        "run"
    ]
    assert {path: path.stat().st_mtime_ns for path in files} == files, "nothing is fitted again"
    assert not list(place.glob("trak/checkpoint-*/train-*")), "no features are needed"

    attributor, targets = library(curvature="kfac", curvature_damping=0.5, curvature_rows=30)
    expected = attributor.attribute(targets, top_k=5, method="exact")
    found = load_from_disk(f"{run}/run/scored")
    for name in TOP_K_COLUMNS:
        assert np.allclose(found[name][:], expected[name][:], rtol=1e-4), name
    whole = np.array(attributor.attribute(targets, top_k=None, method="exact")["trak_scores"][:])
    saved = AttributionRun.load(run)
    assert saved.distributions is not None and saved.self_influence is not None
    assert np.allclose(saved.distributions.mean, whole.mean(axis=1), rtol=1e-4, atol=1e-6 * abs(whole).max())
    assert np.allclose(saved.self_influence, attributor.self_influence(method="exact").numpy(), rtol=1e-4)
    assert saved.facts["projection"] == "none: exact scores, kfac"
    assert saved.facts["ridge"] == "damping 0.5 relative"
    assert main(["report", run]) == 0
    assert "none: exact scores, kfac" in Path(run, "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_exact_scores_need_no_other_command(place: Path, answer: Answer, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("--curvature", "hybrid", "--eval_dataset", "mine.jsonl", "--all_scores", "--no_self_influence")
    run = answer("attribute", "--method", "exact", *MODEL, *QUICK, *settings)["run"]
    attributor, targets = library(curvature="hybrid")
    (file,) = Path(run).glob("per-target-*.arrow")
    whole = np.array(attributor.attribute(targets, top_k=None, method="exact")["trak_scores"][:])
    found = np.array(Dataset.from_file(str(file))["trak_scores"][:])
    assert np.allclose(found, whole, rtol=1e-3, atol=1e-5 * abs(whole).max())
    assert AttributionRun.load(run).facts["projection"] == "none: exact scores, hybrid"
    assert main(["curvature", *MODEL, *QUICK]) == 0  # that of the hybrid is the one of EK-FAC
    text = capsys.readouterr().out
    assert "Checkpoint 0\nekfac, fitted to 40 rows" in text
    assert "bert.encoder.layer.0.attention.self.query.weight" in text and "Fitted in" in text


@pytest.mark.slow
def test_an_index_scores_exactly_with_its_rows(
    place: Path, answer: Answer, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the curvature that lies beside the features, and with no other rows than those of the index."""
    settings = ("--curvature", "kfac", "--curvature_damping", "0.5", "--curvature_rows", "30")
    answer("featurize", *MODEL, *QUICK)
    answer("curvature", *settings)
    wanted = ("--method", "exact", "--eval_dataset", "mine.jsonl", "--top_k", "5", "--no_self_influence")
    expected = load_from_disk(answer("attribute", *wanted, *settings, "--name", "own")["run"] + "/run/scored")
    fitted = {path: path.stat().st_mtime_ns for path in (place / "trak/curvature").rglob("*.*")}
    index = ("attribute", "--index", "trak", "--model", "model", *wanted, *settings, "--use_cpu", "--name", "other")
    found = load_from_disk(answer(*index, "--train_dataset", "reviews.jsonl")["run"] + "/run/scored")
    for name in TOP_K_COLUMNS:
        assert found[name][:] == expected[name][:], name
    assert {path: path.stat().st_mtime_ns for path in fitted} == fitted
    assert main([*index, "--train_dataset", "mine.jsonl"]) == 1
    assert "train_fingerprint: saved" in capsys.readouterr().err


@pytest.mark.slow
def test_several_checkpoints(place: Path, answer: Answer) -> None:
    printed = answer("curvature", *MODEL, *QUICK, "--checkpoints", "model", "model")
    assert [report["model_id"] for report in printed["reports"]] == [0, 1]
    first, second = ({**report, "model_id": None} for report in printed["reports"])
    assert first == second
    run = answer(
        "attribute", "--method", "exact", "--eval_dataset", "mine.jsonl", "--top_k", "3", "--no_self_influence"
    )["run"]
    assert len(load_from_disk(f"{run}/run/scored")) == 4


@pytest.mark.slow
def test_checkpoints_that_are_recorded_stay(place: Path, answer: Answer, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a curvature of some of them, nor a call that is refused, takes their place."""
    (place / "other").mkdir()
    write_reviews(place / "other")
    ask = ("attribute", "--eval_dataset", "mine.jsonl", "--top_k", "3", "--no_self_influence", "--method", "index")
    answer("featurize", *MODEL, *QUICK, "--checkpoints", "model", "other/model")
    expected = load_from_disk(answer(*ask)["run"] + "/run/scored")["trak_scores"][:]
    answer("curvature", "--checkpoints", "model")
    answer("featurize", *MODEL, *QUICK, "--checkpoints", "model")
    assert main(["featurize", *MODEL, *QUICK, "--checkpoints", "other/model"]) == 1
    assert "Expected the same weights" in capsys.readouterr().err
    assert load_from_disk(answer(*ask, "--name", "again")["run"] + "/run/scored")["trak_scores"][:] == expected


@pytest.mark.slow
def test_what_cannot_be_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*argv: str) -> str:
        assert main(list(argv)) == 1
        return capsys.readouterr().err

    assert "'trak' holds no run" in refused("curvature")
    assert "'identity', which is fitted to nothing" in refused("curvature", *MODEL, "--curvature", "identity")
    assert "`method` is 'exact', for an index, and `--train_dataset` is missing" in refused(
        "attribute", "--method", "exact", "--index", "me/index", "--eval_dataset", "mine.jsonl"
    )
    assert main(["curvature", *MODEL, *QUICK]) == 0
    other = ("--eval_dataset", "mine.jsonl", "--method", "exact", "--curvature", "shampoo")
    assert 'kind: saved "ekfac", given "shampoo"' in refused("attribute", *other)


@pytest.mark.slow
def test_curvatures_are_listed_and_verified(place: Path, answer: Answer, capsys: pytest.CaptureFixture[str]) -> None:
    answer("curvature", *MODEL, *QUICK, "--curvature_rows", "30")
    (listed,) = answer("inspect", "trak")["curvatures"]
    assert listed == {"model_id": 0, "kind": "ekfac", "labels": "sampled", "rows": 30}
    assert main(["inspect", "trak"]) == 0
    assert "curvature of checkpoint 0: ekfac, fitted to 30 rows" in capsys.readouterr().out

    def states() -> dict[str, str]:
        status = main(["inspect", "trak", "--check", "--json"])
        found = {
            Path(one["path"]).name: one["state"]
            for one in json.loads(capsys.readouterr().out)["files"]
            if "curvature" in one["path"]
        }
        assert status == ("damaged" in found.values())
        return found

    whole = states()
    assert set(whole) == {path.name for path in (place / "trak/curvature/0").iterdir()}
    assert set(whole.values()) == {"intact"}
    path = place / "trak/curvature/0/block-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    damaged = {"curvature.json": "damaged", path.name: "damaged"}
    assert states() == whole | damaged
    record = place / "trak/curvature/0/curvature.json"
    record.write_text(record.read_text().replace("ekfac", "kfac"))
    assert states() == whole | damaged
    assert main(["inspect", "trak"]) == 1
    assert "DAMAGED: " in capsys.readouterr().out


@pytest.mark.slow
def test_featurize_measures_the_fidelity_of_its_index(
    place: Path, answer: Answer, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = (*MODEL, *QUICK, "--fidelity", "--shard_size", "10")
    assert main(["featurize", *quick, "--part", "0", "2"]) == 0
    assert "The fidelity is not measured" in capsys.readouterr().out
    assert not (place / "trak/curvature").exists()
    (found,) = answer("featurize", *quick)["fidelity"]
    assert (found["rows"], found["targets"], found["features"]) == (24, 16, 64)
    assert main(["featurize", *quick]) == 0
    assert f"64 features beside whole gradients: {found['projection']['mean_spearman']:.3f}" in capsys.readouterr().out
    assert "fidelity" not in answer("featurize", *MODEL, *QUICK, "--shard_size", "10")


@pytest.mark.slow
def test_a_notebook_shows_exact_scores(place: Path) -> None:
    attributor, targets = library()
    attributor.attribute(targets, top_k=5, method="exact")
    shown = attributor.show(1)  # needs no features
    assert "helped most" in repr(shown) and "<svg" in shown.page
    every = attributor.attribute(targets, top_k=None, method="exact")
    assert "helped most" in repr(attributor.show(2))
    assert len(every) == 4


@pytest.mark.slow
@pytest.mark.parametrize("method", ["index", "exact"])
def test_recipes_attribute_with_either_method(place: Path, method: str) -> None:
    rows = sentences(12)
    trainer = make_trainer(rows, 0)
    trainer.args.save_strategy, trainer.args.save_steps = "steps", 1
    trainer.args.output_dir = "recipe/model"
    trak = TrakConfig("recipe/trak", proj_dim=32, use_cpu=True, budget="fast")
    arguments = training.TrainingRecipeArguments(output_dir="recipe", num_checkpoints=1, top_k=4, method=method)
    outcome = training.train_and_attribute(trainer, arguments, trak, {}, rows.select(range(2)))
    assert outcome.method == method
    assert list(outcome.seconds)[1] == ("featurizing" if method == "index" else "fitting the curvature")
    again = outcome.attributor.attribute(rows.select(range(2)), top_k=4, method=outcome.method)
    assert outcome.scored["trak_scores"][:] == again["trak_scores"][:]
    assert bool(list(place.glob("recipe/trak/checkpoint-0/train-*"))) == (method == "index")
    assert (place / "recipe/trak/curvature/0/curvature.json").exists() == (method == "exact")
