"""Many processes that ask one directory different questions: each gets the answer to its own."""

from pathlib import Path

import pytest
import store_jobs
from store_jobs import Job

pytestmark = pytest.mark.usefixtures("jobs_with_one_thread")


def check(tmp_path: Path, processes: int, calls: int, step: int) -> None:
    """`calls` calls in all, with λ, checkpoints, targets, length and orientation that change from call to call."""
    store = tmp_path / "store"
    alone = Job(tmp_path / "alone.json", store_jobs.every_combination, store, step).wait(300)
    assert alone is not None and "value" in alone, alone
    expected = alone["value"]["numbers"]
    assert len(set(expected)) == len(range(0, store_jobs.COMBINATIONS, step))  # no answer is that to another question
    jobs = [
        Job(tmp_path / f"{seed}.json", store_jobs.attribute_often, store, seed, calls // processes, step)
        for seed in range(processes)
    ]
    seen = 0
    for job in jobs:
        report = job.wait(1200)
        assert report is not None and "value" in report, report
        for index, numbers in report["value"]["found"]:
            assert numbers == expected[index // step], f"the scores of {store_jobs.combination(index)} are others"
            seen += 1
    assert seen == 2 * calls  # each as it was returned, and pickled


@pytest.mark.slow
def test_forty_calls_from_four_processes(tmp_path: Path) -> None:
    """Of one combination in five, with each value of each argument."""
    check(tmp_path, processes=4, calls=40, step=5)


@pytest.mark.exhaustive
def test_a_thousand_calls_from_four_processes(tmp_path: Path) -> None:
    check(tmp_path, processes=4, calls=1000, step=1)
