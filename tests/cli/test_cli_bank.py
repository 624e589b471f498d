"""`hf-trak evaluate --bank`: the table of several methods, and everything that does not fit the bank."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from doc_examples import sentences, tiny_bert
from hub_server import TOKEN, Hub, client, hub

from hf_trak.cli.main import main
from hf_trak.evaluation import Bank, evaluate_bank, random_subsets
from hf_trak.hub import push_bank
from hf_trak.report.run import AttributionRun

__all__ = ["client", "hub"]  # fixtures

N, M = 12, 4
Ask = Callable[..., Any]


def sums(kept: np.ndarray, seed: int) -> np.ndarray:
    """A training of a model that sums cosines, with a little noise."""
    noise = np.random.default_rng(seed).normal(size=M)
    return np.array([np.sum(np.cos(kept * (1 + target))) for target in range(M)]) + 0.1 * noise


EXACT = np.cos(np.arange(N)[:, None] * (1 + np.arange(M)))


def make_bank(directory: Path, train: Dataset, targets: Dataset) -> Bank:
    bank = Bank.create(directory, train, targets)
    for name, kept in (("half", 0.5), ("most", 0.75)):
        bank.add_part(name, random_subsets(N, 8, kept))
        bank.build(name, sums)
    bank.add_part("half-again", bank.part("half").masks[:5], seed=20, repeat_of="half")
    bank.build("half-again", sums)
    return bank


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bank, files of scores, and a run with all scores of the bank's rows and targets."""
    home = tmp_path_factory.mktemp("home")
    make_bank(home / "bank", sentences(N), sentences(M))
    np.save(home / "exact.npy", EXACT)
    np.save(home / "noise.npy", np.random.default_rng(0).normal(size=(N, M)))
    torch.manual_seed(0)
    tiny_bert().save_pretrained(home / "model")
    sentences(N).save_to_disk(home / "rows")
    sentences(M).save_to_disk(home / "targets")
    trak = ["--output_dir", f"{home}/trak"]
    rows = ["--model", f"{home}/model", "--train_dataset", f"{home}/rows"]
    assert main(["featurize", *trak, *rows, "--proj_dim", "16", "--use_cpu"]) == 0
    wanted = ["--eval_dataset", f"{home}/targets", "--name", "all", "--all_scores", "--no_self_influence"]
    assert main(["attribute", *trak, *wanted]) == 0
    return home


@pytest.fixture
def ask(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Run `hf-trak evaluate` in the directory `home` with few resamples; what it prints, or its error."""
    monkeypatch.chdir(home)
    monkeypatch.setattr(
        "hf_trak.cli.evaluate.evaluate_bank", lambda *args, **kwargs: evaluate_bank(*args, **kwargs, resamples=20)
    )

    def asked(*argv: str, status: int = 0) -> Any:
        capsys.readouterr()
        found = main(["evaluate", *argv])
        output = capsys.readouterr()
        assert found == status, output.err
        if status:
            assert not output.out and "Traceback" not in output.err
            return output.err
        return json.loads(output.out) if "--json" in argv else output.out

    return asked


# -- what it prints --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_table_and_the_json_are_those_of_the_library(home: Path, ask: Ask) -> None:
    given = ["--bank", "bank", "--scores", "exact=exact.npy", "noise=noise.npy", "trak=trak/scores/all"]
    (arrow,) = (home / "trak/scores/all").glob("per-target-*.arrow")
    trak = Dataset.from_file(str(arrow)).with_format("numpy")["trak_scores"][:].T
    scores = {"exact": EXACT, "noise": np.load(home / "noise.npy"), "trak": trak}
    expected = evaluate_bank(Bank(home / "bank"), scores, resamples=20)
    assert [(one.part, one.method) for one in expected] == [(p, m) for p in ("half", "most") for m in scores]
    found = ask(*given, "--json")
    assert found == {
        "bank": "bank",
        "train_rows": N,
        "targets": M,
        "results": json.loads(json.dumps([one.to_dict() for one in expected])),
    }
    assert found["results"][0]["lds"]["value"] > 0.9 > abs(found["results"][1]["lds"]["value"])
    lines = ask(*given).splitlines()
    assert len({line.find(expected[0].method) for line in lines if " exact " in line}) == 1, "columns are aligned"
    cells = [[cell for cell in line.split("  ") if cell] for line in lines]
    head, *body = [[cell.strip() for cell in row] for row in cells]
    assert head == ["part", "method", "LDS", "difference to exact"]
    wanted = []
    for one in expected:
        wanted.append([one.part, one.method, str(one.lds), *([str(one.difference)] if one.difference else [])])
        if (one.part, one.method) == ("half", "trak"):
            wanted.append(["half", "highest possible (half-again)", str(one.ceilings["half-again"])])
    assert body == wanted


def test_parts_targets_and_a_file_of_arguments(home: Path, ask: Ask, tmp_path: Path) -> None:
    found = ask("--bank", "bank", "--scores", "a=exact.npy", "--parts", "most", "--targets", "2", "0", "--json")
    expected = evaluate_bank(Bank(home / "bank"), {"a": EXACT}, parts=["most"], targets=[2, 0], resamples=20)
    assert found["targets"] == 2 and found["results"] == [one.to_dict() for one in expected]
    (tmp_path / "run.yaml").write_text("bank: bank\nscores: [a=exact.npy]\nparts: [most]\ntargets: [2, 0]\n")
    assert ask("--config", str(tmp_path / "run.yaml"), "--json") == found
    table = ask("--bank", "bank", "--scores", "a=exact.npy")
    assert "difference" not in table and "highest possible (half-again)" in table, "there is one method only"
    repeats = ask("--bank", "bank", "--scores", "a=exact.npy", "--parts", "half-again", "--json")
    assert [one["part"] for one in repeats["results"]] == ["half-again"]


@pytest.mark.slow
def test_a_bank_on_the_hub(
    home: Path, ask: Ask, hub: Hub, client: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("hf_trak.hub.banks.RESAMPLES", 20)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    push_bank(Bank(home / "bank"), "me/bank", private=True)
    push_bank(Bank(home / "bank"), "me/bank", parts=["most"], revision="small", private=False)
    local = ask("--bank", "bank", "--scores", "a=exact.npy", "b=noise.npy", "--json")
    found = ask("--bank", "me/bank", "--scores", "a=exact.npy", "b=noise.npy", "--json")
    assert found == {**local, "bank": "me/bank"} and hub.downloads("outputs")
    small = ask("--bank", "me/bank", "--revision", "small", "--scores", "a=exact.npy", "--json")
    assert [one["part"] for one in small["results"]] == ["most"]
    assert "'me/nothing' does not exist" in ask("--bank", "me/nothing", "--scores", "a=exact.npy", status=1)


# -- wrong command lines ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line, problem",
    [
        ("", "Missing: --run, --masks, --outputs. Expected --run, --masks and --outputs, or --bank and --scores."),
        ("exact.npy --masks m.npy", "Missing: --outputs."),
        ("--scores a=exact.npy", "Given without --bank: --scores."),
        ("exact.npy --masks m.npy --outputs o.npy --parts a --targets 0", "Given without --bank: --parts, --targets"),
        ("exact.npy --bank bank", "Given with --bank: --run. Expected runs and files of scores as --scores NAME=PATH"),
        ("--bank bank --scores a=exact.npy --masks m.npy --outputs o.npy", "Given with --bank: --masks, --outputs."),
        ("--bank bank", "--bank is given without --scores. Expected NAME=PATH of at least one method."),
        ("--bank bank --scores exact.npy", "--scores is 'exact.npy'. Expected NAME=PATH, such as trak=scores.npy."),
        ("--bank bank --scores =exact.npy", "--scores is '=exact.npy'."),
        ("--bank bank --scores a=", "--scores is 'a='."),
        ("--bank bank --scores a=exact.npy a=noise.npy", "--scores has the name 'a' twice."),
    ],
)  # fmt: skip
def test_a_wrong_command_line_says_what_is_wrong(ask: Ask, line: str, problem: str) -> None:
    error = ask(*line.split(), status=2)
    assert error.startswith(f"hf-trak evaluate: error: {problem}")
    assert error.endswith("See `hf-trak evaluate --help`.\n")


# -- scores that do not fit ------------------------------------------------------------------------------------------


def with_nan(scores: np.ndarray) -> np.ndarray:
    scores = scores.copy()
    scores[5, 1] = np.nan
    return scores


@pytest.mark.parametrize(
    "scores, problem",
    [
        (EXACT.T, r"have the shape (4, 12). Expected (12, 4)"),
        (EXACT.T, "They are transposed: pass `scores.T`."),
        (EXACT[:-1], "have the shape (11, 4). Expected (12, 4): the training rows and the targets of the bank bank."),
        (EXACT[:, :3], "have the shape (12, 3)."),
        (EXACT[:, 0], "have the shape (12,)."),
        (EXACT[None], "have the shape (1, 12, 4)."),
        (with_nan(EXACT), "hold nan for training row 5 and target 1. Expected finite ones."),
        (np.full((N, M), -np.inf), "hold -inf for training row 0 and target 0. Expected finite ones."),
        (EXACT.astype(str), "holds values of the type <U32. Expected numbers"),
        (EXACT + 1j, "holds values of the type complex128. Expected numbers"),
        (np.array([{}]), "is damaged, or not a .npy file of numbers"),
    ],
)
def test_scores_that_do_not_fit_are_refused(ask: Ask, tmp_path: Path, scores: np.ndarray, problem: str) -> None:
    np.save(tmp_path / "mine.npy", scores)
    assert problem in ask("--bank", "bank", "--scores", "a=exact.npy", f"mine={tmp_path}/mine.npy", status=1)


def test_missing_and_damaged_files_of_scores_are_refused(home: Path, ask: Ask, tmp_path: Path) -> None:
    assert "is not a file. Expected a .npy file" in ask("--bank", "bank", "--scores", "a=nothing.npy", status=1)
    assert "holds no run" in ask("--bank", "bank", "--scores", "a=nothing", status=1)
    (tmp_path / "cut.npy").write_bytes((home / "exact.npy").read_bytes()[:-1])
    assert "is damaged" in ask("--bank", "bank", "--scores", f"a={tmp_path}/cut.npy", status=1)
    run = tmp_path / "top"
    top_k = AttributionRun.load(home / "trak/scores/all")
    top_k.facts = {name: value for name, value in top_k.facts.items() if name != "score_files"}
    top_k.save(run)
    error = ask("--bank", "bank", "--scores", f"a={run}", status=1)
    assert "has only the highest and lowest scores. Expected one with all scores." in error


@pytest.mark.parametrize("which", ["training rows", "targets"])
def test_a_run_of_other_data_is_refused(home: Path, ask: Ask, tmp_path: Path, which: str) -> None:
    """Rows of the same number; as a file of scores the user may take responsibility."""
    other = sentences(N).add_column("more", list(range(N)))
    rows = (other, sentences(M)) if which == "training rows" else (sentences(N), other.select(range(1, 1 + M)))
    bank = make_bank(tmp_path / "bank", *rows)
    error = ask("--bank", str(bank.directory), "--scores", "a=exact.npy", "trak=trak/scores/all", status=1)
    assert f"ConfigMismatchError: The {which} of the run trak/scores/all have the fingerprint" in error
    described = json.loads((bank.directory / "bank.json").read_bytes())
    ours = json.loads((home / "bank" / "bank.json").read_bytes())
    key = "rows_fingerprint" if which == "training rows" else "targets_fingerprint"
    assert described[key] in error and ours[key] in error and "save the scores as a .npy file" in error
    moved = shutil.copytree(home / "trak/scores/all", tmp_path / "moved")
    if which == "targets":  # away from its index nothing tells the targets
        ask("--bank", str(bank.directory), "--scores", f"a={moved}", "--parts", "half")
    else:
        assert "have the fingerprint" in ask("--bank", str(bank.directory), "--scores", f"a={moved}", status=1)


# -- banks that cannot be used ---------------------------------------------------------------------------------------


def copied(home: Path, tmp_path: Path) -> Path:
    return shutil.copytree(home / "bank", tmp_path / "bank")


def test_an_unfinished_part_is_left_out_unless_it_is_named(home: Path, ask: Ask, tmp_path: Path) -> None:
    bank = Bank(copied(home, tmp_path))
    bank.add_part("begun", random_subsets(N, 4, seed=3))
    bank.build("begun", sums, job=0, jobs=2)
    given = ["--bank", str(bank.directory), "--scores", "a=exact.npy"]
    assert {one["part"] for one in ask(*given, "--json")["results"]} == {"half", "most"}
    error = ask(*given, "--parts", "begun", status=1)
    assert "The part 'begun' of the bank" in error and "has 2 of 4 trainings. Expected all of them" in error
    error = ask(*given, "--parts", "none", status=1)
    assert "has no part 'none' (it has: begun, half, half-again, most)" in error
    assert "it contains a path separator" in ask(*given, "--parts", "a/../half", status=1)
    for name in ("half", "most"):
        (bank.directory / name / "outputs.safetensors").unlink()
    error = ask(*given, status=1)
    assert "no complete part to judge scores on; its parts are: begun, half, most" in error


@pytest.mark.parametrize("targets", [["4"], ["-1"], ["0", "0"]])
def test_targets_that_do_not_exist_are_refused(ask: Ask, targets: list[str]) -> None:
    error = ask("--bank", "bank", "--scores", "a=exact.npy", "--targets", *targets, status=1)
    assert "Expected distinct numbers from 0 to 3." in error


@pytest.mark.parametrize(
    "name, source, problem",
    [
        ("half/outputs.safetensors", "most/outputs.safetensors", "it belongs to another run"),
        ("half/subsets.safetensors", "most/subsets.safetensors", "it belongs to another run"),
        ("half/retraining.json", "other/half/retraining.json", "belongs to another bank"),
        ("bank.json", "other/bank.json", "belongs to another bank"),
        ("half/outputs.safetensors", "truncated", r"outputs\.safetensors cannot be used: it cannot be read"),
        (
            "half/subsets.safetensors",
            "truncated",
            r"subsets\.safetensors cannot be used: it cannot be read",
        ),
        ("half/retraining.json", "truncated", r"retraining\.json of .* was refused: it is not valid JSON"),
        ("half/outputs.safetensors", "flipped", "the checksum of its tensors is"),
        ("half/subsets.safetensors", "flipped", "the checksum of its tensors is"),
        ("half/subsets.safetensors", "missing", "half/subsets.safetensors is missing"),
        ("bank.json", "missing", "holds no bank: bank.json is missing"),
    ],
)
def test_mixed_up_and_damaged_banks_are_refused(
    home: Path, ask: Ask, tmp_path: Path, name: str, source: str, problem: str
) -> None:
    bank = copied(home, tmp_path)
    data = (bank / name).read_bytes()
    if source == "missing":
        (bank / name).unlink()
    elif source == "truncated":
        (bank / name).write_bytes(data[:-9])
    elif source == "flipped":
        (bank / name).write_bytes(data[:-1] + bytes([data[-1] ^ 4]))
    elif source.startswith("other/"):
        other = make_bank(tmp_path / "other", sentences(N), sentences(M + 1).select(range(1, M + 1)))
        shutil.copy(other.directory.parent / source, bank / name)
    else:
        shutil.copy(bank / source, bank / name)
    error = ask("--bank", str(bank), "--scores", "a=exact.npy", status=1)
    assert re.search(problem, error), error
    assert "Expected" in error or "Delete this file" in error
