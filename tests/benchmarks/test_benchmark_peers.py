"""The benchmark beside other libraries: its command at toy size, its cases, and how a failing library is shown."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from hf_trak.evaluation import model_outputs

ROOT = Path(__file__).parents[2]
BENCHMARK = ROOT / "benchmarks" / "peers"
TOY = (
    "--train-rows=40", "--targets=8", "--subsets=6", "--repeats=1", "--epochs=1", "--proj-dim=16", "--lambdas", "0.1",
    "1", "--seeds", "0", "1", "--hidden-size=8",
)  # fmt: skip


def run(directory: Path, *arguments: str) -> tuple[str, dict]:
    command = [sys.executable, str(BENCHMARK), *TOY, "--work", str(directory / "work"), "--peers", str(directory)]
    command += ["--json", str(directory / "results.json"), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=directory)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((directory / "results.json").read_text())


def tables(printed: str) -> list[list[list[str]]]:
    """Cells of the Markdown tables."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line[:1] == "|"]
    starts = [index - 1 for index, cells in enumerate(lines) if set("".join(cells)) == {"-"}]
    return [lines[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]


@pytest.fixture
def comparison(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARK))
    from comparison import cases, label_as_token, libraries, retraining

    yield {"cases": cases, "label_as_token": label_as_token, "libraries": libraries, "retraining": retraining}
    for name in [name for name in sys.modules if name.split(".")[0] == "comparison"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.slow  # four processes that import everything
def test_a_library_that_fails_stands_in_every_table_with_its_error(tmp_path):
    broken = tmp_path / "traker" / "trak"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('broken on purpose | here')\n")
    plot = tmp_path / "plot.png"
    arguments = ("--cases", "cnn", "--libraries", "traker", "hf_trak", "--rounds=2", "--plot", str(plot))
    printed, written = run(tmp_path, *arguments)
    quality, speed = tables(printed)
    for table in (quality, speed):
        assert len({len(row) for row in table}) == 1, table
        assert [row[0] for row in table[2:]] == ["hf_trak", "traker"]
        assert table[3][1] == "cannot: ImportError: broken on purpose / here"
    results = written["cases"]["cnn"]["results"]
    assert results["traker"] == {"error": "ImportError: broken on purpose | here"}
    rounds = results["hf_trak"]["rounds"]
    assert len(rounds) == 2 and all(set(each["seconds"]) == {"featurize", "score", "project"} for each in rounds)
    assert all(each["peak_mib"] >= 0 for each in rounds) or sys.platform != "linux"
    assert "minutes in total" in printed and plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow  # two more processes that import everything
def test_text_cases_are_judged_on_the_targets_that_did_not_tune(tmp_path):
    printed, written = run(tmp_path, "--cases", "bert", "gpt2", "--libraries", "hf_trak", "--rounds=0")
    assert [len(table) for table in tables(printed)] == [3, 3]
    for name, entry in written["cases"].items():
        (found,) = entry["results"].values()
        trained = tmp_path / "work" / f"{name}-40-8-1-8"
        masks = np.load(next(trained.glob("masks-*.npy")))
        outputs = np.load(trained / "outputs-6-0-0.npy")
        assert masks.shape == (6, 40) and (masks.sum(1) == 20).all() and outputs.shape == (6, 8)
        scores = [dict(np.load(trained / "16-1-1-50" / f"hf_trak-{seed}.npz")) for seed in (0, 1)]
        for kind, column in (("default", "default"), ("tuned", found["tuning"]["tuned_lambda"])):
            expected = [
                np.mean([spearmanr(masks @ each[column][:, j], outputs[:, j])[0] for j in range(1, 8, 2)])
                for each in scores
            ]
            assert found["lds"][kind]["seeds"] == pytest.approx(expected)
            assert found["lds"][kind]["value"] == pytest.approx(np.mean(expected))
            assert found["lds"][kind]["low"] <= found["lds"][kind]["high"]
        assert set(found["tuning"]["by_lambda"]) == {"0.1", "1"} and found["tuning"]["not_finite"] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cnn", "bert", "gpt2"])
def test_what_peers_are_given_is_the_same_function(comparison, name):
    """Inputs for vmap, with masks that it can take, and hf_trak's own definition of the task give the same outputs."""
    case = comparison["cases"].CASES[name](comparison["cases"].Size(30, 7, hidden_size=8))
    torch.manual_seed(0)
    model = case.make().eval()
    own = model_outputs(model, case.dataset(case.targets), case.task, batch_size=4)
    np.testing.assert_allclose(comparison["retraining"].target_outputs(case, model), own, rtol=1e-4, atol=1e-4)
    bare = comparison["cases"].Logits(model, list(case.inputs))
    *inputs, _ = case.batches(case.targets, 7)[0]
    single = torch.func.vmap(lambda *sample: bare(*(each[None] for each in sample))[0])(*inputs)
    torch.testing.assert_close(single, bare(*inputs))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cnn", "bert"])
def test_a_classifier_as_a_language_model_is_the_same_function(comparison, name):
    case = comparison["cases"].CASES[name](comparison["cases"].Size(30, 7, hidden_size=8))
    torch.manual_seed(0)
    model = case.make().eval()
    twin = comparison["label_as_token"].label_as_token(model)
    *inputs, labels = case.batches(case.targets, 7)[0]
    tokens = inputs[0].flatten(1)
    tokens = (tokens * 16).round().long() if name == "cnn" else tokens
    logits = twin(torch.cat([tokens, labels[:, None]], dim=1)).logits
    expected = comparison["cases"].Logits(model, list(case.inputs))(*inputs)
    torch.testing.assert_close(logits[:, -2], expected)
    assert logits.shape == (7, tokens.shape[1] + 1, expected.shape[1])


def test_results_are_kept_for_the_same_question_and_errors_are_not(comparison, tmp_path):
    kept = comparison["libraries"].kept
    asked = []

    def make():
        asked.append(1)
        return {"error": "no"} if len(asked) == 1 else {"value": len(asked)}

    path = tmp_path / "kept.json"
    assert kept(path, {"seed": 0}, make) == {"error": "no"}
    assert kept(path, {"seed": 0}, make) == kept(path, {"seed": 0}, make) == {"value": 2}
    assert kept(path, {"seed": 1}, make) == {"value": 3}
