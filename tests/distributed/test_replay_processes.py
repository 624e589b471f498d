"""Replay by several processes, and after kills in every stage: always the same bits."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import store_jobs
import torch
from store_jobs import Job, start_group
from test_curvature_invariance import KILLED, Kept, unchanged
from test_rerank_processes import kill_at

from hf_trak import Replay
from hf_trak.featurize import exact, replaying

pytestmark = pytest.mark.usefixtures("jobs_with_one_thread")

STAGES = {"gradients-": 2, "moments-": 3, "replayed-": 2, "scores-": 2}
"""Files in the order of the stages, and before which one of each the job is killed."""


def job(directory: Path) -> dict[str, Any]:
    """Replay 5 targets, two to a file."""
    torch.manual_seed(5)
    attributor = store_jobs.make(directory)
    optimizer = torch.optim.AdamW(attributor.model.parameters(), lr=0.01)
    attributor.features.trainer = SimpleNamespace(
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 6),
        state=SimpleNamespace(global_step=6, max_steps=6),
        args=SimpleNamespace(max_grad_norm=1.0, train_batch_size=4, gradient_accumulation_steps=1, world_size=1),
    )
    exact.TARGET_SHARD_BYTES = replaying.TARGET_SHARD_BYTES = 2 * 4 * attributor.features.layout.total
    scored = attributor.attribute(store_jobs.rows(5, 2), top_k=None, method=Replay(rows=3))
    return {**store_jobs.feature_digests(directory), "scores": scored["trak_scores"][:]}


def killed_job(name: str, count: int, directory: Path) -> dict[str, Any]:
    return kill_at(name, count, directory, job)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a job reports that is left alone."""
    directory = tmp_path_factory.mktemp("reference")
    report = Job(directory / "report.json", job, directory / "store").wait()
    assert report is not None and "value" in report, report
    assert sum("replayed-" in name for name in report["value"]) == 3
    return report


@pytest.mark.slow
@pytest.mark.distributed
def test_more_processes(reference: dict[str, Any], tmp_path: Path) -> None:
    reports = [one.wait() for one in start_group(tmp_path, 2, job, tmp_path / "store")]
    assert reports == [reference] * 2


@pytest.mark.slow
def test_killed_again_and_again(reference: dict[str, Any], tmp_path: Path) -> None:
    """The same call goes on, and ends with the same bits."""
    kept: Kept = {}
    store = tmp_path / "store"
    for stage, count in STAGES.items():
        killed = Job(tmp_path / "report.json", killed_job, stage, count, store)
        assert killed.wait() is None and killed.process.exitcode == KILLED, stage
        files = [path for path in store.rglob("*.safetensors") if "hf_trak-tmp" not in path.name]
        kept = {path: path.stat().st_mtime_ns for path in files if "gradients-" not in path.name}
        assert stage == "gradients-" or kept, stage
    assert Job(tmp_path / "report.json", job, store).wait() == reference
    assert unchanged(kept)
