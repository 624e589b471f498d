"""Converting a store to fewer bits: from float32 the bits of featuring anew, in any number of processes and after any
kill; from anything else what is honest about it."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import store_jobs
import torch
from digit_models import digits, full_scores, make, trained_net
from doc_examples import write_reviews
from hub_server import TOKEN, Hub, client, hub
from store_jobs import Job, Sizes, start_group
from test_hub_index import make_store

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.cli.main import main
from hf_trak.errors import ConfigMismatchError, IncompleteStoreError, StoreError
from hf_trak.featurize.converting import convert_store, history_of
from hf_trak.featurize.fidelity import compare_stores, row_bytes
from hf_trak.hub import pull_index, push_index
from hf_trak.store import atomic
from hf_trak.store.checkpoint_records import code_settings
from hf_trak.store.references import read_references, write_references
from hf_trak.store.sealed import sealed_bytes
from hf_trak.store.shard_set import ShardSet
from hf_trak.store.store import FeatureStore

__all__ = ["client", "hub"]  # fixtures

N = 60
pytestmark = pytest.mark.usefixtures("jobs_with_one_thread")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Use as many threads as the jobs, which the same bits of scores require."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def nets(one_thread: None) -> list[torch.nn.Module]:
    return [trained_net(digits(0, N), seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def net(nets: list[torch.nn.Module]) -> torch.nn.Module:
    return nets[0]


@pytest.fixture(scope="module")
def featurized(nets: list[torch.nn.Module], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 store of two checkpoints, not to be written to."""
    directory = tmp_path_factory.mktemp("featurized") / "store"
    make(nets[0], directory, digits(0, N)).featurize(nets)
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    """Files by their names, without what differs on purpose: the records of checkpoints."""
    names = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in names.items() if not name.endswith("/checkpoint.json")}


# -- the bits --------------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["int8", "int4", "int2", "int1", "bfloat16"])
def test_float32_gives_the_bits_of_featurizing_anew(
    nets: list[torch.nn.Module], featurized: Path, tmp_path: Path, dtype: str
) -> None:
    """Every file is the same, and the same attributor opens the result: it compares rows with those it finds."""
    net = nets[0]
    before = contents(featurized)
    other = make(net, featurized, digits(0, N)).convert(tmp_path / "converted", dtype)
    direct = make(net, tmp_path / "direct", digits(0, N), feature_dtype=dtype).featurize(nets)
    found, expected = contents(tmp_path / "converted"), contents(tmp_path / "direct")
    assert len(found) == 2 * (4 + 1 + 1) + 1 and found == expected
    assert contents(featurized) == before
    assert other.features.store.config_hash == direct.features.store.config_hash
    assert [history_of(other.features.store, model_id) for model_id in (0, 1)] == [("float32",)] * 2
    again = make(net, tmp_path / "converted", digits(0, N), feature_dtype=dtype)
    again.features.sources.update(dict(enumerate(nets)))
    assert np.array_equal(full_scores(again, digits(200, 203)), full_scores(direct, digits(200, 203)))


@pytest.mark.few(2)
@pytest.mark.parametrize(("before", "dtype"), [("bfloat16", "int1"), ("float16", "int8"), ("int8", "int2")])
def test_what_was_rounded_before_is_recorded(net: torch.nn.Module, tmp_path: Path, before: str, dtype: str) -> None:
    """The features are those of the source, rounded once more, and the record of the checkpoint names both steps."""
    source = make(net, tmp_path / "source", digits(0, N), feature_dtype=before).featurize()
    other = source.convert(tmp_path / "converted", dtype)
    assert (
        other.features.store.config_hash
        == make(net, tmp_path, digits(0, N), feature_dtype=dtype).features.store.config_hash
    )
    assert history_of(other.features.store, 0) == (before,)
    deeper = (
        convert_store(other.features.store, tmp_path / "deeper", "int1") if dtype != "int1" else other.features.store
    )
    assert history_of(deeper, 0) == (before, dtype)[: 1 + (dtype != "int1")]
    form, rotation = other.features.store.code_format, other.features.store.rotation(0)
    assert form is not None and rotation is not None
    for old, new in zip(source.features.store.train(0), other.features.store.train(0), strict=True):
        rows = old.grads.float() if old.coded is not None else rotation.apply(old.grads)
        expected = type(new.coded).encode(rows, form)
        assert all(torch.equal(a, b) for a, b in zip(expected.blocks, new.coded.blocks, strict=True))
        assert torch.equal(expected.scale, new.coded.scale) and torch.equal(old.out_to_loss, new.out_to_loss)


@pytest.mark.slow
def test_signs_survive_any_detour(net: torch.nn.Module, tmp_path: Path) -> None:
    """Levels lie symmetrically around 0 and never on it: one bit from 8, 4 or 2 is one bit from float32."""
    source = make(net, tmp_path / "source", digits(0, N)).featurize()
    straight = convert_store(source.features.store, tmp_path / "straight", "int1")
    for dtype in ("int8", "int4", "int2"):
        middle = convert_store(source.features.store, tmp_path / dtype, dtype)
        for a, b in zip(
            convert_store(middle, tmp_path / f"{dtype}-1", "int1").train(0), straight.train(0), strict=True
        ):
            assert all(torch.equal(*blocks) for blocks in zip(a.coded.blocks, b.coded.blocks, strict=True)), dtype


def test_references_go_along(tmp_path: Path) -> None:
    source = make_store(tmp_path / "source", ids=(0, 3))
    write_references(source, 3, {"image_embeddings": torch.arange(6.0).view(2, 3)})
    result = convert_store(source, tmp_path / "converted", "int4")
    assert result.model_ids == [0, 3] and read_references(result, 0) is None
    assert torch.equal(read_references(result, 3)["image_embeddings"], torch.arange(6.0).view(2, 3))
    assert result.checkpoint_info(3)["source"] == source.checkpoint_info(3)["source"]


# -- interruptions and processes -------------------------------------------------------------------------------------

SIZES = Sizes(n=23, shard_size=4, checkpoints=2, proj_dim=24)


def test_a_killed_conversion_is_finished_by_the_same_call(tmp_path: Path) -> None:
    """Two kills, the second after the first, end in the files of a conversion that was left alone."""
    store_jobs.make(tmp_path / "source", SIZES).featurize(store_jobs.models(2))
    expected = contents(convert_store(FeatureStore.load(tmp_path / "source"), tmp_path / "alone", "int2").output_dir)
    kills = 0
    for step in (9, 31):
        report = Job(tmp_path / "report.json", store_jobs.convert_and_die, tmp_path, step).wait()
        kills += report is None
        config = tmp_path / "killed" / "trak_config.json"
        if config.exists():
            assert config.read_bytes() == expected["trak_config.json"]
    assert kills == 2 and Job(tmp_path / "report.json", store_jobs.convert_and_die, tmp_path, 0).wait() is not None
    found = {name: data for name, data in contents(tmp_path / "killed").items() if ".hf_trak-tmp-" not in name}
    assert found == expected


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_convert_the_same_bits(tmp_path: Path) -> None:
    store_jobs.make(tmp_path / "source", SIZES).featurize(store_jobs.models(2))
    source = FeatureStore.load(tmp_path / "source")
    alone = convert_store(source, tmp_path / "alone", "int2")
    expected = compare_stores(source, alone, targets=5).to_dict()
    reports = [job.wait() for job in start_group(tmp_path, 2, store_jobs.convert_together, tmp_path)]
    assert [report["value"]["fidelity"] for report in reports] == [json.loads(json.dumps(expected))] * 2
    assert contents(tmp_path / "together") == contents(tmp_path / "alone")


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "dtype"), [("float32", "float32"), ("float16", "bfloat16"), ("int2", "int4"),
                                               ("int1", "int1"), ("float32", "int3")])  # fmt: skip
def test_bits_do_not_come_back(tmp_path: Path, before: str, dtype: str) -> None:
    source = make_store(tmp_path / "source", feature_dtype=before, **code_settings(before))
    with pytest.raises(ValueError, match=f"`feature_dtype` is '{dtype}', and .*{before} features.*fewer bits"):
        convert_store(source, tmp_path / "converted", dtype)
    assert not (tmp_path / "converted").exists()


def test_other_directories_are_left_alone(tmp_path: Path) -> None:
    """A conversion goes into a new directory, or on in its own."""
    source, other = make_store(tmp_path / "source", ids=(0,)), make_store(tmp_path / "other", ids=(0,), seed=8)
    for place in (source.output_dir, source.output_dir / "below", tmp_path):
        with pytest.raises(ValueError, match="none contains the other"):
            convert_store(source, place, "int1")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("mine")
    converted_other = convert_store(other, tmp_path / "converted-other", "int1").output_dir
    changed = FeatureStore.open(tmp_path / "changed", source.config)  # the same configuration, other features
    changed.register_checkpoint(0, source.checkpoint_info(0)["fingerprint"])
    for index in range(3):
        rows = changed.train(0).plan.rows(index)
        changed.train(0).write(index, torch.ones(len(rows), 6), torch.ones(len(rows)))
    copy = shutil.copytree(convert_store(source, tmp_path / "mine", "int1").output_dir, tmp_path / "featurized")
    changed_record = json.loads((copy / "checkpoint-0" / "checkpoint.json").read_text())
    for key in ("converted_from", "converted_content"):
        del changed_record[key]
    atomic.write_bytes(copy / "checkpoint-0" / "checkpoint.json", sealed_bytes(changed_record))
    for store, place, reason in (
        (source, tmp_path / "notes", r"holds \['diary.txt'\], and no feature store"),
        (source, converted_other, "another configuration"),
        (source, tmp_path / "other", "another configuration"),
        (changed, tmp_path / "mine", "converted_content: saved"),
        (source, copy, r"converted_from: saved \(absent\), given \[\"float32\"\]"),
    ):
        before = contents(place)
        with pytest.raises(ConfigMismatchError, match=reason):
            convert_store(store, place, "int1")
        assert contents(place) == before
    assert contents(convert_store(source, tmp_path / "mine", "int1").output_dir) == contents(tmp_path / "mine")


def test_incomplete_and_foreign_stores_are_refused(tmp_path: Path, net: torch.nn.Module, featurized: Path) -> None:
    source = make_store(tmp_path / "source", ids=(0,))
    source.train(0).path(1).unlink()
    with pytest.raises(IncompleteStoreError, match="Featurize the remaining rows"):
        convert_store(source, tmp_path / "converted", "int1")
    with pytest.raises(IncompleteStoreError, match="no checkpoint to convert"):
        convert_store(make_store(tmp_path / "empty", ids=()), tmp_path / "converted", "int1")
    revised = make(net, featurized, digits(0, N)).exclude([0])
    with pytest.raises(StoreError, match="is a revision, which cannot be converted"):
        convert_store(revised.features.store, tmp_path / "converted", "int1")
    assert not (tmp_path / "converted").exists()


def test_a_damaged_source_is_named(tmp_path: Path) -> None:
    source = make_store(tmp_path / "source", ids=(0,))
    path = source.train(0).path(1)
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(StoreError, match=r"train-00001-of-00003.safetensors cannot be used: the checksum"):
        convert_store(source, tmp_path / "converted", "int1")
    assert not (tmp_path / "converted" / "checkpoint-0" / path.name).exists()


# -- the fidelity ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fidelity_is_that_of_attributed_scores(
    nets: list[torch.nn.Module], featurized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compares what `attribute` gives for the drawn training rows as targets, without the model."""
    source = make(nets[0], featurized, digits(0, N))
    source.features.sources.update(dict(enumerate(nets)))
    other = source.convert(tmp_path / "converted", "int2")
    found = compare_stores(source.features.store, other.features.store, targets=4, seed=3)
    drawn = np.random.Generator(np.random.Philox(3)).permutation(N)
    rows, targets = sorted(drawn[4:]), digits(0, N).select(sorted(drawn[:4]))
    before, after = (full_scores(one, targets, name="drawn")[rows] for one in (source, other))

    def ranks(values: np.ndarray) -> np.ndarray:
        return values.argsort(axis=0).argsort(axis=0)

    for column in range(4):
        # Features of targets are computed in another batch than those of training rows, which can swap neighbours.
        expected = np.corrcoef(ranks(before)[:, column], ranks(after)[:, column])[0, 1]
        assert found.scores.spearman[column] == pytest.approx(expected, abs=0.003)
        best = [set(np.argsort(-one[:, column])[:10]) for one in (before, after)]
        assert found.scores.overlap[column] == pytest.approx(len(best[0] & best[1]) / 10, abs=0.1)
    assert (found.rows, found.targets, found.top, found.before, found.after) == (56, 4, 10, "float32", "int2")
    assert (found.bytes_before, found.bytes_after) == (64 * 4, 64 // 4 + 4)
    assert "256 to 20 bytes per row, 12.8 times fewer" in str(found)
    monkeypatch.setattr("hf_trak.featurize.fidelity._MOST_ROWS", 30)
    part = compare_stores(source.features.store, other.features.store, targets=4, seed=3)
    chosen = [rows.index(row) for row in sorted(drawn[4:34])]
    sampled = np.corrcoef(ranks(before[chosen])[:, 0], ranks(after[chosen])[:, 0])[0, 1]
    assert part.rows == 30 and part.scores.spearman[0] == pytest.approx(sampled, abs=0.01)


@pytest.mark.slow
def test_fewer_bits_cost_more(featurized: Path, tmp_path: Path) -> None:
    source = FeatureStore.load(featurized)
    found = {}
    for dtype in ("bfloat16", "int8", "int4", "int2", "int1"):
        found[dtype] = compare_stores(source, convert_store(source, tmp_path / dtype, dtype))
    means = [one.scores.mean_spearman for one in found.values()]
    assert means == sorted(means, reverse=True) and means[0] > 0.999 > 0.8 > means[-1] > 0.2
    assert [one.bytes_after for one in found.values()] == [128, 68, 36, 20, 12]
    assert row_bytes(source) == 256


def test_too_few_rows_to_compare(tmp_path: Path) -> None:
    source = make_store(tmp_path / "source", train_size=3)
    with pytest.raises(ValueError, match=r"3 training rows. Expected at least 4"):
        compare_stores(source, convert_store(source, tmp_path / "converted", "int1"))


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The result is a run of its own: later commands find model, rows and settings there."""
    write_reviews(tmp_path)
    monkeypatch.chdir(tmp_path)
    quick = ["--proj_dim", "64", "--use_cpu", "--lambda_relative", "0.2"]
    assert main(["featurize", "--model", "model", "--train_dataset", "reviews.jsonl", *quick]) == 0
    capsys.readouterr()
    command = ["convert", "trak", "--to", "small", "--use_cpu"]
    assert main([*command, "--feature_dtype", "int2", "--targets", "5"]) == 0
    printed = capsys.readouterr().out
    assert "float32 to int2: 256 to 20 bytes per row" in printed and "35 training rows × 5 others" in printed
    assert main([*command, "--feature_dtype", "int2", "--targets", "5", "--json"]) == 0
    fidelity = json.loads(capsys.readouterr().out)["fidelity"]
    args = TrakConfig(lambda_relative=0.2)
    assert fidelity == json.loads(
        json.dumps(compare_stores(FeatureStore.load("trak"), FeatureStore.load("small"), args, targets=5).to_dict())
    )
    assert main(["attribute", "--output_dir", "small", "--eval_dataset", "mine.jsonl", "--top_k", "3"]) == 0
    assert main(["featurize", "--model", "model", "--train_dataset", "reviews.jsonl", *quick, "--output_dir", "again",
                 "--feature_dtype", "int2"]) == 0  # fmt: skip
    names = [path.name for path in Path("small/checkpoint-0").glob("*.safetensors")]
    assert len(names) == 2
    for name in names:
        assert Path("small/checkpoint-0", name).read_bytes() == Path("again/checkpoint-0", name).read_bytes()
    capsys.readouterr()
    assert main(["convert", "small", "--to", "smaller"]) == 1
    assert "Expected one of ['int1']" in capsys.readouterr().err
    assert main(["convert", "small", "--to", "smaller", "--feature_dtype", "int1", "--targets", "0", "--use_cpu"]) == 0
    assert FeatureStore.load("smaller").config["feature_dtype"] == "int1"
    assert history_of(FeatureStore.load("smaller"), 0) == ("float32", "int2")


def test_a_copy_of_an_index_is_converted(
    hub: Hub, client: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is checked like any index, and takes the settings that it was published with."""
    store = make_store(tmp_path / "store")
    write_references(store, 1, {"image_embeddings": torch.ones(2, 3)})
    push_index(store, "tester/index", token=TOKEN, settings=TrakConfig(lambda_relative=0.25), private=False)
    pull_index("tester/index", tmp_path / "copy")
    arguments = ["--to", str(tmp_path / "small"), "--use_cpu", "--json"]
    assert main(["convert", str(tmp_path / "copy"), *arguments]) == 0
    fidelity = json.loads(capsys.readouterr().out)["fidelity"]
    small = FeatureStore.load(tmp_path / "small")
    assert contents(small.output_dir) == contents(convert_store(store, tmp_path / "own", "int4").output_dir)
    assert fidelity["scores"]["mean_spearman"] == pytest.approx(
        compare_stores(store, small, TrakConfig(lambda_relative=0.25)).scores.mean_spearman, abs=1e-12
    )
    shard = tmp_path / "copy" / "checkpoint-1" / "train-00001-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")
    shutil.rmtree(tmp_path / "small")
    assert main(["convert", str(tmp_path / "copy"), *arguments]) == 1
    assert "was refused: the checksum" in capsys.readouterr().err


@pytest.mark.slow
def test_attributors_of_an_index_are_converted(net: torch.nn.Module, featurized: Path, tmp_path: Path) -> None:
    options = {"task": "image_classification", "use_cpu": True}
    attributor = TrakAttributor.from_pretrained(str(featurized), net, train_dataset=digits(0, N), **options)
    other = attributor.convert(tmp_path / "converted", "int1")
    assert other.args.feature_dtype == "int1" and other.features.sources == attributor.features.sources
    assert full_scores(other, digits(200, 202), checkpoints=[0]).shape == (N, 2)


def test_what_is_converted_is_left_alone(tmp_path: Path) -> None:
    """The same call after an interruption writes missing shards alone."""
    source = store_jobs.make(tmp_path / "source", SIZES).featurize(store_jobs.models(2)).features.store
    result = convert_store(source, tmp_path / "result", "int2")
    shards = sorted((tmp_path / "result").rglob("train-*.safetensors"))
    before = {path: path.stat().st_ino for path in shards}
    missing = result.train(1).path(2)
    missing.unlink()
    writes: list[int] = []
    write = ShardSet.write
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            ShardSet, "write", lambda self, index, *rest: writes.append(index) or write(self, index, *rest)
        )
        convert_store(source, tmp_path / "result", "int2")
    assert writes == [2] and missing.exists()
    assert {path: path.stat().st_ino for path in shards if path != missing} == {
        path: node for path, node in before.items() if path != missing
    }
