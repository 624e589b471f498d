"""Many processes: what they find is what one finds, bit for bit; what they cannot do, they say."""

import random
from pathlib import Path
from typing import Any

import pytest
import store_jobs
import torch
from accelerate import dispatch_model
from accelerate.hooks import remove_hook_from_submodules
from store_jobs import Job, Sizes, start_group

from hf_trak import Exact, TrakAttributor
from hf_trak.errors import IncompleteStoreError
from hf_trak.runtime.processes import share_of
from hf_trak.store.store import FeatureStore

pytestmark = pytest.mark.usefixtures("jobs_with_one_thread")

ROOT = Path(__file__).parents[2]


def many_sizes() -> list[Sizes]:
    """Sizes that divide nothing, more processes than shards, ragged last batches, single rows; then random ones."""
    chosen = [
        Sizes(n=1, m=1, shard_size=4, batch_size=3, top_k=3),
        Sizes(n=3, m=2, shard_size=100, batch_size=2),
        Sizes(n=7, m=1, shard_size=1, batch_size=5, checkpoints=1),
        Sizes(n=13, m=11, shard_size=5, batch_size=5, top_k=20),
        Sizes(n=16, m=4, shard_size=8, batch_size=8, feature_dtype="float16"),
    ]
    rng = random.Random(0)
    for _ in range(3):
        n = rng.randint(1, 40)
        chosen.append(
            Sizes(
                n=n, m=rng.randint(1, 9), shard_size=rng.randint(1, n + 2), batch_size=rng.randint(1, 9),
                checkpoints=rng.randint(1, 2), proj_dim=rng.choice([1, 5, 16]), top_k=rng.randint(1, 12),
                feature_dtype=rng.choice(["float32", "bfloat16"]),
            )
        )  # fmt: skip
    return chosen


def run_sizes(directory: Path) -> list[dict[str, Any]]:
    return [store_jobs.run(directory / str(i), sizes) for i, sizes in enumerate(many_sizes())]


def fail_in_one_process(directory: Path) -> dict[str, Any]:
    """A bad row, which falls to the last process; then an error in the main process alone."""
    torch.manual_seed(0)  # both have the same weights
    attributor = store_jobs.make(directory)
    attributor.features.train_dataset = attributor.train_dataset.map(
        lambda row, i: {"labels": 7 if i == 22 else row["labels"]}, with_indices=True
    )
    first = store_jobs.report_of(lambda: attributor.featurize() and None, ())
    second = store_jobs.report_of(lambda: attributor.attribute(store_jobs.rows(2, 2)) and None, ())
    return {"featurize": first, "attribute": second, "processes": attributor.features.processes.num_processes}


def refusal_of(model: torch.nn.Module) -> str:
    try:
        TrakAttributor(model, None, train_dataset=store_jobs.rows(4, 1), task="image_classification")
    except ValueError as error:
        return str(error)
    return "accepted"


def refuse_sharded(directory: Path) -> dict[str, str]:
    """What is said of FSDP1 over the processes."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    store_jobs.make(directory / "whole")  # brings the process group up
    wrapped = torch.nn.Sequential(torch.nn.Linear(6, 6), store_jobs.TinyNet())
    wrapped[1] = FullyShardedDataParallel(wrapped[1], device_id=torch.device("cpu"))
    return {"fsdp": refusal_of(wrapped)}


def choose_together(directory: Path) -> dict[str, Any]:
    """What `method="auto"` takes by measured times, in processes that have featurized nothing themselves."""
    sizes = Sizes(checkpoints=1)
    store_jobs.make(directory, sizes).featurize(store_jobs.models(1))
    attributor = store_jobs.make(directory, sizes, budget="best")
    attributor.features.sources = {0: store_jobs.models(1)[0]}
    rate = attributor.features.rate()
    taken = attributor.attribute(store_jobs.rows(3, 2), top_k=None).with_format("numpy")["trak_scores"][:]
    exact = attributor.attribute(store_jobs.rows(3, 2), top_k=None, method=Exact("hybrid")).with_format("numpy")
    left = sorted(path.name for path in directory.glob("hf_trak-estimate-*"))
    return {"rate": rate, "exact": (taken == exact["trak_scores"][:]).all().item(), "left": left}


def every_part(directory: Path) -> dict[str, Any]:
    """What each of two processes does."""
    return {
        "sizes": run_sizes(directory / "both"),
        "failing": fail_in_one_process(directory / "failing"),
        "choice": choose_together(directory / "choice"),
        "sharded": refuse_sharded(directory / "sharded"),
    }


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory, jobs_with_one_thread: None) -> list[dict[str, Any]]:
    """What one process alone, and both of two, found."""
    directory = tmp_path_factory.mktemp("launched")
    alone = Job(directory / "alone.json", run_sizes, directory / "sizes")
    group = start_group(directory, 2, every_part, directory, timeout=120)
    return [{"sizes": (alone.wait(300) or {})["value"]}, *((job.wait(300) or {})["value"] for job in group)]


@pytest.mark.distributed
def test_two_processes_find_what_one_finds(launched: list[dict[str, Any]]) -> None:
    """Features, Gram matrices, self-influence, top-k lists and full matrices, for every size, in both processes."""
    alone, *both = launched
    for i, sizes in enumerate(many_sizes()):
        for rank, result in enumerate(both):
            assert result["sizes"][i] == alone["sizes"][i], (sizes, rank)


@pytest.mark.distributed
def test_an_error_in_one_process_is_told_to_all(launched: list[dict[str, Any]]) -> None:
    _, first, last = (result.get("failing") for result in launched)
    assert first["processes"] == last["processes"] == 2
    assert "7" in last["featurize"]["error"] and last["featurize"]["error"].startswith("ValueError")
    assert first["featurize"]["error"].startswith("PeerProcessError")
    assert "number 1, with ValueError" in first["featurize"]["error"]
    assert first["attribute"]["error"].startswith("IncompleteStoreError")
    assert "number 0, with IncompleteStoreError" in last["attribute"]["error"]


@pytest.mark.distributed
def test_auto_chooses_by_a_time_that_all_have_measured(launched: list[dict[str, Any]]) -> None:
    first, last = (result["choice"] for result in launched[1:])
    assert first == last and first["rate"] > 0 and first["exact"] and first["left"] == []


@pytest.mark.distributed
def test_sharded_parameters_are_refused_with_the_supported_way(launched: list[dict[str, Any]]) -> None:
    for result in launched[1:]:
        assert "module '1' is wrapped in FullyShardedDataParallel" in result["sharded"]["fsdp"]
        for message in result["sharded"].values():
            assert "device_map='auto'" in message and "a copy of the model in every process" in message
            assert "FSDP2 (`fully_shard`)" in message


def test_parameters_that_deepspeed_has_partitioned_are_refused() -> None:
    """What `deepspeed.zero.Init` and ZeRO-3 leave behind: parameters with an id of theirs, empty in this process."""
    model = store_jobs.TinyNet()
    model.head.weight.data = torch.empty(0)
    model.head.weight.ds_id = 3  # type: ignore[attr-defined]
    message = refusal_of(model)
    assert "'head.weight' is partitioned by DeepSpeed ZeRO-3" in message and "device_map='auto'" in message


@pytest.mark.slow
@pytest.mark.distributed
def test_more_processes_than_shards(tmp_path: Path) -> None:
    """Three processes that no launcher started, two shards: one has nothing to do, all know the result."""
    sizes = Sizes(n=7, shard_size=4)
    alone = Job(tmp_path / "alone.json", store_jobs.run, tmp_path / "one", sizes).wait()
    group = start_group(tmp_path, 3, store_jobs.run, tmp_path / "three", sizes)
    assert [job.wait() for job in group] == [alone] * 3


# -- job arrays ------------------------------------------------------------------------------------------------------


def featurize_part(directory: Path, index: int, count: int) -> list[int]:
    attributor = store_jobs.make(directory).featurize(store_jobs.models(2), part=(index, count))
    return attributor.features.store.model_ids


def featurize_checkpoint(directory: Path, model_id: int) -> list[int]:
    attributor = store_jobs.make(directory).featurize({model_id: store_jobs.models(2)[model_id]})
    return attributor.features.store.model_ids


@pytest.mark.slow
def test_a_job_array_over_shards_needs_no_first_job(tmp_path: Path) -> None:
    """Jobs without a process group, all at once on an empty directory; then the same features as of one run, none of
    them computed again."""
    whole = Job(tmp_path / "whole.json", store_jobs.run, tmp_path / "whole").wait()
    jobs = [Job(tmp_path / f"{i}.json", featurize_part, tmp_path / "parts", i, 4) for i in range(4)]
    assert [job.wait() for job in jobs] == [{"value": [0, 1]}] * 4
    shards = {p: p.stat().st_mtime_ns for p in (tmp_path / "parts").glob("*/train-*")}
    assert len(shards) == 12
    assert len(list((tmp_path / "parts").glob("*/gram*"))) == 2  # by whichever was last
    assert Job(tmp_path / "again.json", store_jobs.run, tmp_path / "parts").wait() == whole
    assert {p: p.stat().st_mtime_ns for p in shards} == shards


@pytest.mark.slow
def test_a_job_array_over_checkpoints(tmp_path: Path) -> None:
    whole = Job(tmp_path / "whole.json", store_jobs.run, tmp_path / "whole").wait()
    jobs = [Job(tmp_path / f"{i}.json", featurize_checkpoint, tmp_path / "parts", i) for i in (1, 0)]
    assert all("value" in (job.wait() or {}) for job in jobs)
    assert Job(tmp_path / "again.json", store_jobs.run, tmp_path / "parts").wait() == whole


def test_parts_that_are_missing_are_counted(tmp_path: Path) -> None:
    attributor = store_jobs.make(tmp_path).featurize(part=(1, 3))
    assert [index for index in range(6) if attributor.features.store.train(0).is_written(index)] == [2, 3]
    with pytest.raises(IncompleteStoreError, match="4 shards of model_id 0 are missing"):
        attributor.attribute(store_jobs.rows(2, 2))
    for part in ((3, 3), (-1, 2), (0, 0), 1, (0.0, 2), (True, 2)):
        with pytest.raises(ValueError, match="`part` is"):
            attributor.featurize(part=part)  # type: ignore[arg-type]
    assert FeatureStore.load(tmp_path).read_gram(0) is None


@pytest.mark.parametrize("count", [0, 1, 5, 64, 1000])
@pytest.mark.parametrize("parts", [1, 2, 3, 7, 100])
def test_shares_cover_everything_once(count: int, parts: int) -> None:
    shares = [share_of(count, index, parts) for index in range(parts)]
    assert [item for share in shares for item in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


# -- large models ----------------------------------------------------------------------------------------------------


def test_a_dispatched_model_gives_the_same_features(tmp_path: Path) -> None:
    """What `device_map` does: hooks on every module that move its inputs to its device."""
    whole = store_jobs.make(tmp_path / "whole").featurize(store_jobs.models(1))
    model = store_jobs.TinyNet()
    dispatch_model(model, device_map={"body": "cpu", "head": "cpu"}, main_device="cpu", force_hooks=True)
    assert model.hf_device_map == {"body": "cpu", "head": "cpu"} and hasattr(model.body, "_hf_hook")
    attributor = store_jobs.make(tmp_path / "dispatched")
    dispatched = TrakAttributor(
        model, attributor.args, train_dataset=attributor.train_dataset, task="image_classification"
    ).featurize(store_jobs.models(1))
    a, b = (torch.cat([shard.grads for shard in one.features.store.train(0)]) for one in (whole, dispatched))
    assert torch.equal(a, b)


def test_offloaded_parameters_are_refused(tmp_path: Path) -> None:
    model = store_jobs.TinyNet()
    attributor = store_jobs.make(tmp_path / "store")
    dispatch_model(
        model, device_map={"body": "cpu", "head": "disk"}, main_device="cpu", offload_dir=str(tmp_path / "offload")
    )
    with pytest.raises(ValueError, match=r"'head.weight' is on the meta device.*max_memory"):
        TrakAttributor(model, attributor.args, train_dataset=attributor.train_dataset, task="image_classification")
    remove_hook_from_submodules(model)
