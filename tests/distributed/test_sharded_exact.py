"""Exact scores of sharded models: every block of the curvature and of the targets is in one process alone."""

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import sharded_jobs
import torch
from sharded_jobs import attributor, divided, made, mesh_of_all, rows, sharded
from store_jobs import start_group
from test_sharded import launched

from hf_trak import TrakAttributor
from hf_trak.curvature.files import CurvatureFiles
from hf_trak.curvature.owner_maps import OwnerMap
from hf_trak.curvature.target_forms import LowRankForm
from hf_trak.featurize.owned import TargetBlocks
from hf_trak.runtime.processes import Processes

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("jobs_with_one_thread")]

TOLERANCE = 1e-3
"""The inverse of a damped curvature multiplies rounding by up to max Λ / (c · mean Λ), about 10³."""

SETTINGS: dict[str, dict[str, Any]] = {
    "ekfac": {"curvature": "ekfac"},
    "hybrid": {"curvature": "hybrid"},
    "rank": {"curvature": "ekfac", "curvature_rank": 2},
    "diagonal": {"curvature": "diagonal"},
    "few at a time": {"curvature": "ekfac", "curvature_memory": 1e-6},
}
UNDER_TP = ("hybrid", "rank")
"""What else blocks are, or how many are held, does not depend on how the model is divided."""


def model_of(kind: str, name: str, directory: Path) -> torch.nn.Module:
    if kind == "tp":
        return divided(name, directory / "model")
    return sharded(made(name), mesh_of_all(kind))


def scores(one: TrakAttributor) -> torch.Tensor:
    return torch.tensor(one.attribute(rows("gpt2", 3, 2), top_k=None, method="exact")["trak_scores"])


def change(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def recorded(call: Any) -> dict[str, Any]:
    """What a call returns, the curvature's files that it read, and the tensors of targets that it kept and read."""
    read, keep, load = CurvatureFiles._read, TargetBlocks.keep, TargetBlocks.read
    found: dict[str, Any] = {"blocks": set(), "numbers": set(), "kept": set(), "loaded": 0, "whole": 0}

    def reading(self: Any, file: Any) -> Any:
        found["numbers" if file.name.startswith("diagonal") else "blocks"].update(
            file.specs if file.name.startswith("diagonal") else [file.name]
        )
        return read(self, file)

    def keeping(self: Any, name: str, kept_rows: Any, values: torch.Tensor) -> Any:
        found["kept"].add(name)
        return keep(self, name, kept_rows, values)

    def loading(self: Any, form: LowRankForm, columns: range) -> Any:
        found["loaded"], found["whole"] = form.width - 1, form.curvature.numel
        return load(self, form, columns)

    CurvatureFiles._read, TargetBlocks.keep, TargetBlocks.read = reading, keeping, loading  # type: ignore
    try:
        value = call()
    finally:
        CurvatureFiles._read, TargetBlocks.keep, TargetBlocks.read = read, keep, load  # type: ignore
    return {"value": value, **{key: sorted(one) if isinstance(one, set) else one for key, one in found.items()}}


def settings_of(kind: str) -> dict[str, dict[str, Any]]:
    return {what: one for what, one in SETTINGS.items() if kind != "tp" or what in UNDER_TP}


def compared(kind: str, name: str, directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for what, options in settings_of(kind).items():
        ones = [
            attributor(model_of(kind, name, directory / what), name, directory / what / str(again), **options)
            for again in range(2)
        ]
        whole = attributor(made(name), name, directory / what / "whole", **options)
        ones[0].fit_curvature()
        # whitened sketches depend on signs of eigenvectors, which rounding changes: one curvature for both
        fitted, taken = (directory / what / one / "curvature" for one in ("0", "whole"))
        Processes(True).broadcast_from_main(lambda: str(shutil.copytree(fitted, taken)))  # noqa: B023
        run = recorded(lambda: scores(ones[0]))  # noqa: B023
        expected, value = scores(whole), run.pop("value")
        found[what] = {
            **run,
            "scores": change(value, expected),
            "same bits": bool(torch.equal(value, scores(ones[1]))),
            "self-influence": change(ones[0].self_influence(method="exact"), whole.self_influence(method="exact")),
        }
    return found


def grouped(directory: Path) -> float:
    """Scores of means over groups of targets."""
    targets, taken = rows("gpt2", 4, 2).add_column("kind", ["a", "b", "a", "b"]), []
    for where, model in (("one", sharded(made("gpt2"), mesh_of_all())), ("whole", made("gpt2"))):
        one = attributor(model, "gpt2", directory / where, curvature="ekfac")
        found = one.attribute(targets, top_k=None, method="exact", group_by="kind")
        taken.append(torch.tensor(found["trak_scores"][:]))
    return change(*taken)


def all_job(directory: Path) -> dict[str, Any]:
    Processes(True)
    kind = os.environ["KIND"]
    name = {"tp": "llama"}.get(kind, "gpt2")
    return {"settings": compared(kind, name, directory), "grouped": grouped(directory / "grouped")}


def check_all(reports: list[Any], kind: str) -> None:
    assert all(report["grouped"] <= TOLERANCE for report in reports)
    for what in settings_of(kind):
        ones = [report["settings"][what] for report in reports]
        for one in ones:
            assert max(one["scores"], one["self-influence"]) <= TOLERANCE, (what, one)
            assert one["same bits"], what
        for key in ("blocks", "numbers", "kept"):
            of_all = [name for one in ones for name in one[key]]
            assert len(of_all) == len(set(of_all)), (what, key)
            assert all(one[key] for one in ones), (what, key)
        every = {index for one in ones for index in one["blocks"]}
        assert every == {f"block-{index:05d}.safetensors" for index in range(len(every))}
        if what != "rank":
            assert sum(one["loaded"] for one in ones) == ones[0]["whole"]
            assert max(one["loaded"] for one in ones) <= 0.6 * ones[0]["whole"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", "tp"])
def test_scores_are_those_of_a_whole_model_and_no_block_is_in_two_processes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIND", kind)
    check_all(launched(tmp_path, "all", 2, 400, __file__), kind)


def scored(directory: Path, name: str, moment: int = 0) -> bool:
    """Exact scores under FSDP2. The last process is killed as it exchanges gradients for the `moment`-th time."""
    Processes(True)
    serve, times = OwnerMap._served, []

    def serve_or_die(self: Any, *args: Any) -> Any:
        times.append(1)
        if len(times) == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return serve(self, *args)

    if int(os.environ["RANK"]) == 1:
        OwnerMap._served = serve_or_die  # type: ignore[method-assign]
    one = attributor(sharded(made("gpt2"), mesh_of_all()), "gpt2", directory / name, **SMALL)
    torch.save(scores(one), directory / f"{name}-{os.environ['RANK']}.pt")
    return True


SMALL: dict[str, Any] = {"shard_size": 1, "per_device_batch_size": 1, "curvature": "ekfac"}


@pytest.mark.slow
@pytest.mark.parametrize("moment", [2, 5], ids=["targets", "scores"])
def test_a_killed_run_goes_on_with_any_number_of_processes(moment: int, tmp_path: Path) -> None:
    """Three targets and seven rows in batches of one."""

    def run(name: str, count: int, moment: int = 0) -> list[Any]:
        jobs = start_group(tmp_path, count, scored, tmp_path, name, moment, timeout=120)
        try:
            return [jobs[-1].wait(200), *(job.wait(60) for job in jobs[:-1])]
        finally:
            for job in jobs:
                job.kill()

    last, first = run("killed", 2, moment)
    assert last is None and first is not None and first["error"].startswith("PeerProcessError: Process")
    shutil.copytree(tmp_path / "killed", tmp_path / "other")
    for name, count in (("killed", 2), ("straight", 2), ("other", 3)):
        assert all(said is not None and said.get("value") for said in run(name, count))
    again, straight, other = (torch.load(tmp_path / f"{name}-0.pt") for name in ("killed", "straight", "other"))
    assert torch.equal(again, straight)
    assert change(other, straight) <= TOLERANCE
    files = [
        {path.name: path.stat().st_mtime_ns for path in (tmp_path / name).rglob("preconditioned-*")}
        for name in ("killed", "other")
    ]
    assert files[0].keys() == files[1].keys()
    if moment == 5:
        assert files[0] == files[1]  # copied with their times, and not written again
    store = tmp_path / "straight"
    for path in [next(store.rglob("preconditioned-by-block-matrix-*")), *store.rglob("scores-by-block-*")]:
        path.unlink()
    shutil.rmtree(store / "scores", ignore_errors=True)
    assert all(said is not None and said.get("value") for said in run("straight", 2))
    assert torch.equal(torch.load(tmp_path / "straight-0.pt"), straight)
    whole = scores(attributor(made("gpt2"), "gpt2", tmp_path / "whole", **SMALL))
    assert change(straight, whole) <= TOLERANCE


if __name__ == "__main__":
    sharded_jobs.run({"all": all_job}[sys.argv[1]], Path(sys.argv[2]))
