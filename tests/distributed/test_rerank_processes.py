"""Reranking by several processes, and after kills in every stage: always the same bits."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import store_jobs
import torch
from store_jobs import Job, start_group
from test_curvature_invariance import KILLED, Kept, unchanged

from hf_trak import Rerank
from hf_trak.attributor import last_result
from hf_trak.scores.scored_dataset import RANK_COLUMNS, STAGE_COLUMN, TOP_K_COLUMNS
from hf_trak.store import atomic

pytestmark = pytest.mark.usefixtures("jobs_with_one_thread")

STAGES = {"train-": 5, "targets-": 1, "shortlist": 1, "curvature.json": 1, "preconditioned": 1, "scores-": 3}
"""Files in the order of the stages, and before which one of each the job is killed."""


def job(directory: Path) -> dict[str, Any]:
    """Featurize two checkpoints, and rerank 3 of 23 rows for each target and end."""
    torch.manual_seed(5)
    attributor = store_jobs.make(directory, curvature="ekfac")
    attributor.featurize(store_jobs.models(2))
    scored = attributor.attribute(store_jobs.rows(3, 2), top_k=2, method=Rerank(3), checkpoints=store_jobs.models(2))
    found = {name: scored[name][:] for name in (*TOP_K_COLUMNS, *RANK_COLUMNS, STAGE_COLUMN)}
    return {
        **store_jobs.feature_digests(directory),
        "rows": list(last_result(attributor).answer.rows.numbers),
        "found": found,
    }


def kill_at(name: str, count: int, directory: Path, job: Callable[[Path], dict[str, Any]] = job) -> dict[str, Any]:
    """The job, killed right before the `count`-th file whose name starts with `name` becomes visible."""
    seen = 0

    def watched(function: Any) -> Any:
        def call(source: Any, target: Any, **options: Any) -> Any:
            nonlocal seen
            seen += Path(target).name.startswith(name)
            if seen == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(source, target, **options)

        return call

    for call in ("replace", "link"):
        setattr(atomic.os, call, watched(getattr(os, call)))
    return job(directory)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a job reports that is left alone."""
    directory = tmp_path_factory.mktemp("reference")
    report = Job(directory / "report.json", job, directory / "store").wait()
    assert report is not None and "value" in report, report
    assert 6 <= len(report["value"]["rows"]) < 23
    assert report["value"]["found"][STAGE_COLUMN] == ["exact"] * 3
    return report


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_more_processes(reference: dict[str, Any], tmp_path: Path, world: int) -> None:
    reports = [one.wait() for one in start_group(tmp_path, world, job, tmp_path / "store")]
    assert reports == [reference] * world


@pytest.mark.slow
def test_killed_again_and_again(reference: dict[str, Any], tmp_path: Path) -> None:
    """Between and within the stages. The same call goes on, and ends with the same bits."""
    kept: Kept = {}
    store = tmp_path / "store"
    for stage, count in STAGES.items():
        killed = Job(tmp_path / "report.json", kill_at, stage, count, store)
        assert killed.wait() is None and killed.process.exitcode == KILLED, stage
        files = [path for path in store.rglob("*.safetensors") if "hf_trak-tmp" not in path.name]
        found = {path: path.stat().st_mtime_ns for path in files}
        assert unchanged(kept) and found != kept, stage
        kept = found
    assert Job(tmp_path / "report.json", job, store).wait() == reference
    assert unchanged(kept)
