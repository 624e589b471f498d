"""Indexes as tables: the same bits by fragments, and there and back; what is no table is refused."""

import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset, load_dataset
from doc_examples import sentences, tiny_bert
from numpy.typing import NDArray

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.errors import HfTrakError, IncompleteStoreError, NonFiniteError, StoreError
from hf_trak.scores.ridge import RidgeSystem, ridge_lambda
from hf_trak.scores.streaming import ScaledRows
from hf_trak.scores.tables import TOP, gram_batch, merge_top, score_batch
from hf_trak.store.codes import LEVELS, ROTATION
from hf_trak.store.shard_set import Shard
from hf_trak.store.store import FeatureStore
from hf_trak.store.tables import batch_of, read_tables, rows_of, write_table

DTYPES = ("float32", "float16", "bfloat16", "int8", "int4", "int2", "int1")
N, K, M, SHARD = 41, 20, 5, 8


def made(directory: Path, dtype: str = "float32", model_ids: tuple[int, ...] = (0,)) -> FeatureStore:
    """A store of random features; rows 3 and 30 are the same."""
    config = {"train_size": N, "proj_dim": K, "feature_dtype": dtype, "shard_size": SHARD, "seed": 7}
    if dtype.startswith("int"):
        config |= {"rotation": ROTATION, "levels": LEVELS}
    store = FeatureStore.open(directory, config)
    for model_id in model_ids:
        generator = torch.Generator().manual_seed(model_id)
        features, weights = torch.randn(N, K, generator=generator), torch.rand(N, generator=generator)
        features[30], weights[30] = features[3], weights[3]
        store.register_checkpoint(model_id, f"weights {model_id}", "/out")
        shards = store.train(model_id)
        for index in range(len(shards)):
            rows = list(shards.plan.rows(index))
            shards.write(index, features[rows], weights[rows])
    return store


def targets(seed: int = 3) -> ScaledRows:
    return ScaledRows.of(torch.randn(M, K, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


def expected(store: FeatureStore, k: int, largest: bool) -> tuple[NDArray[Any], NDArray[Any]]:
    """The best scores by float64 and a stable sort, and all of them `(m, n)`."""
    shards = list(store.train(0))
    features = torch.cat([shard.grads for shard in shards]).double()
    weights = torch.cat([shard.out_to_loss for shard in shards]).double()
    scores = (targets().values.double() @ features.T * weights).numpy()
    order = np.argsort(-scores.round(5) if largest else scores.round(5), axis=1, kind="stable")
    return order[:, :k], scores


def by_target(table: pa.Table, k: int) -> NDArray[Any]:
    return table.column("row_id").to_numpy().reshape(M, k)


@pytest.mark.few(10)
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fragments_in_any_order_have_the_best_rows(tmp_path: Path, dtype: str, largest: bool) -> None:
    store = made(tmp_path, dtype)
    found = [score_batch(batch_of(shard), targets(), 6, largest) for shard in store.train(0)]
    best = merge_top(found, 6, largest)
    rows, scores = expected(store, 6, largest)
    np.testing.assert_array_equal(by_target(best, 6), rows)
    np.testing.assert_allclose(
        best.column("score").to_numpy().reshape(M, 6), np.take_along_axis(scores, rows, 1), rtol=1e-4, atol=1e-5
    )
    for order in (found[::-1], [merge_top(found[:2], 6, largest), *found[2:]]):
        assert merge_top(order, 6, largest).equals(best)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["int8", "int4", "int2", "int1"])
def test_codes_have_the_same_bits_for_any_division(tmp_path: Path, dtype: str) -> None:
    whole = pa.Table.from_batches([batch_of(shard) for shard in made(tmp_path, dtype).train(0)])
    best = score_batch(whole, targets(), 6)
    order = np.random.default_rng(0).permutation(N)
    for size in (1, 7, 40):
        parts = [whole.take(order[first : first + size]) for first in range(0, N, size)]
        assert merge_top((score_batch(part, targets(), 6) for part in parts), 6).equals(best)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_attribute_gives_the_same_bits(tmp_path: Path, dtype: str) -> None:
    """From a real model, through a file and pickled targets, beside columns of the rows."""
    rows = sentences(24)
    config = TrakConfig(
        str(tmp_path / "trak"), proj_dim=64, use_cpu=True, feature_dtype=dtype, shard_size=7, budget="fast"
    )
    attributor = TrakAttributor(tiny_bert(), config, rows).featurize()
    exam = sentences(29).select(range(24, 29))
    scored = attributor.attribute(exam, top_k=5)
    asked = attributor.features.precondition(attributor.features.question(exam)).rows[0]
    beside = Dataset.from_dict({"source": ["cc" if row % 3 else "books" for row in range(24)]})
    path = write_table(attributor.features.store, 0, tmp_path / "index.parquet", beside)
    given = pickle.loads(pickle.dumps(asked))
    file = pq.ParquetFile(path)
    for largest, name in ((True, "trak"), (False, "trak_harmful")):
        parts = (score_batch(file.read_row_group(i), given, 5, largest) for i in range(file.num_row_groups))
        best = merge_top(parts, 5, largest)
        assert by_target(best, 5).tolist() == scored[f"{name}_indices"][:]
        assert best.column("score").to_numpy().reshape(M, 5).tolist() == scored[f"{name}_scores"][:]
    common = pa.dataset.dataset(path).to_table(filter=pa.dataset.field("source") == "cc")
    listed = score_batch(common, given, 24)
    assert set(listed.column("row_id").to_pylist()) == {row for row in range(24) if row % 3}
    again = TrakAttributor(
        attributor.model,
        TrakConfig(**{**vars(config), "output_dir": str(read_tables([path], tmp_path / "again").output_dir)}),
        rows,
    )
    assert again.attribute(exam, top_k=5)["trak_scores"][:] == scored["trak_scores"][:]


def test_gram_matrices_of_fragments_add_up(tmp_path: Path) -> None:
    """In float64, and scores from a table alone: those of numpy."""
    store = made(tmp_path, "float16")
    found = [gram_batch(batch_of(shard)) for shard in store.train(0)]
    features = torch.cat([shard.grads for shard in store.train(0)]).double()
    matrix, bound = torch.stack([one.matrix for one in found]).sum(0), N * 2.0**-52
    size = features.abs().T @ features.abs()
    assert bool(((matrix - features.T @ features).abs() <= bound * size).all())
    assert sum(one.n for one in found) == N
    trace = sum(one.trace for one in found)
    assert trace == pytest.approx(float(features.square().sum()), rel=K * bound)
    lam = ridge_lambda(trace, N, K, 0.1)
    asked = torch.randn(M, K, dtype=torch.float64)
    solved = ScaledRows.of(RidgeSystem(matrix, lam).solve(asked))
    best = merge_top((score_batch(batch_of(shard), solved, 1) for shard in store.train(0)), 1)
    direct = np.linalg.solve(features.T.numpy() @ features.numpy() + lam * np.eye(K), asked.T.numpy())
    scores = (features.numpy() @ direct) * torch.cat([shard.out_to_loss for shard in store.train(0)]).numpy()[:, None]
    np.testing.assert_array_equal(by_target(best, 1)[:, 0], scores.argmax(axis=0))


@pytest.mark.slow
def test_ten_thousand_fragments_are_merged_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_trak.scores.tables._HELD", 500)
    rng, seen, alive = np.random.default_rng(0), [], 0

    def fragments() -> Iterator[pa.Table]:
        nonlocal alive
        for number in range(10_000):
            scores = np.sort(rng.normal(size=(2, 3)).astype(np.float32))[:, ::-1]
            seen.append(scores)
            rows = np.tile(np.arange(3 * number, 3 * number + 3), 2)
            alive = max(alive, pa.total_allocated_bytes())
            yield pa.table([np.repeat([0, 1], 3), rows, scores.reshape(-1)], schema=TOP)

    before = pa.total_allocated_bytes()
    best = merge_top(fragments(), 4)
    everything = np.concatenate(seen, axis=1)
    np.testing.assert_array_equal(
        best.column("row_id").to_numpy().reshape(2, 4), np.argsort(-everything, axis=1, kind="stable")[:, :4]
    )
    assert alive - before < 2**20  # all of them have 1.2 MB as numbers, and thirty times that in buffers of 64 bytes


@pytest.mark.few(2)
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_there_and_back_all_bits_are_the_same(tmp_path: Path, dtype: str, shuffled: bool) -> None:
    store = made(tmp_path / "a", dtype, (0, 4))
    paths = [write_table(store, model_id, tmp_path / f"{model_id}.parquet") for model_id in (0, 4)]
    if shuffled:  # as another tool may write it
        for path in paths:
            table = pq.read_table(path)
            pq.write_table(table.take(np.random.default_rng(1).permutation(N)), path, row_group_size=11)
    again = read_tables(paths, tmp_path / "b")
    assert again.config == store.config and again.model_ids == [0, 4]
    for model_id in (0, 4):
        files = [store.train(model_id).path(index) for index in range(len(store.train(model_id)))]
        for file in files:
            assert (tmp_path / "b" / file.relative_to(tmp_path / "a")).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_there_and_back_by_lance_all_bits_are_the_same(tmp_path: Path, dtype: str) -> None:
    """Whole, with columns of the rows and a fragment for each shard, and in parts; and on to Parquet."""
    lance: Any = pytest.importorskip("lance")
    store = made(tmp_path / "a", dtype)
    columns = Dataset.from_dict({"source": [str(row) for row in range(N)]})
    whole = write_table(store, 0, tmp_path / "whole.lance", columns)
    assert [one.count_rows() for one in lance.dataset(whole).get_fragments()] == [8, 8, 8, 8, 8, 1]
    assert lance.dataset(whole).to_table(filter="source = '7'")["row_id"].to_pylist() == [7]
    parts = [write_table(store, 0, tmp_path / f"{part}.lance", part=(part, 2)) for part in (1, 0)]
    for name, paths in (("b", [whole]), ("c", parts)):
        again = read_tables(paths, tmp_path / name)
        assert again.config == store.config
        for index in range(len(store.train(0))):
            assert again.train(0).path(index).read_bytes() == store.train(0).path(index).read_bytes()
    write_table(again, 0, tmp_path / "last.parquet", columns)
    assert pq.read_table(tmp_path / "last.parquet").equals(lance.dataset(whole).to_table())


def test_parts_are_written_by_themselves_and_read_together(tmp_path: Path) -> None:
    store = made(tmp_path / "a", "int4")
    for part in (2, 0, 3, 1):
        write_table(store, 0, tmp_path / f"tables/{part}.parquet", part=(part, 4))
    paths = sorted((tmp_path / "tables").iterdir())
    assert [pq.read_metadata(path).num_rows for path in paths] == [8, 16, 8, 9]
    again = read_tables([paths[2], paths[0], paths[3], paths[1]], tmp_path / "b")
    for index in range(len(store.train(0))):
        assert again.train(0).path(index).read_bytes() == store.train(0).path(index).read_bytes()
    with pytest.raises(IncompleteStoreError, match="After row 7 of 41"):
        read_tables([paths[0], *paths[2:]], tmp_path / "c")
    write_table(made(tmp_path / "other", "int2"), 0, paths[1], part=(1, 4))
    with pytest.raises(HfTrakError, match="different stores or checkpoints"):
        read_tables(paths, tmp_path / "c")
    assert not (tmp_path / "c").exists()
    for part in ((4, 4), (-1, 4), (0, 7)):
        with pytest.raises(ValueError, match=re.escape(f"`part` is {part}")):
            write_table(store, 0, paths[0], part=part)


def test_other_tools_read_it(tmp_path: Path) -> None:
    rows = Dataset.from_dict({"source": [str(i % 2) for i in range(N)], "length": list(range(N))})
    path = write_table(made(tmp_path / "a", "int4"), 0, tmp_path / "index.parquet", rows)
    read = load_dataset("parquet", data_files=str(path), cache_dir=str(tmp_path / "cache"), split="train")
    assert read.column_names == ["row_id", "codes", "scale", "q", "source", "length"]
    frame = pq.read_table(path).to_pandas()
    assert frame[frame.source == "1"].length.tolist() == list(range(1, N, 2))
    assert len(frame.codes[0]) == K // 2


Change = Callable[[pa.Table], pa.Table]


def replaced(name: str, column: Any) -> Change:
    return lambda table: table.set_column(table.schema.get_field_index(name), name, column)


def edited(name: str, row: int, value: Any) -> Change:
    def change(table: pa.Table) -> pa.Table:
        values = table.column(name).to_pylist()
        values[row] = value
        kind = table.schema.field(name)
        return table.set_column(
            table.schema.get_field_index(name), kind.with_nullable(True), pa.array(values, kind.type)
        )

    return change


BATCHES: dict[str, tuple[str, Change, str]] = {
    "no rows' numbers": ("int4", lambda t: t.drop_columns(["row_id"]), "no column `row_id`"),
    "two columns of one name": ("int4", lambda t: t.append_column("q", t.column("q")), "`q`, or several"),
    "a number twice": ("int4", edited("row_id", 3, 4), "twice"),
    "a number below zero": ("int4", edited("row_id", 0, -1), "below zero"),
    "numbers as text": ("int4", lambda t: replaced("row_id", t.column("row_id").cast(pa.string()))(t), "type string"),
    "a null": ("float32", edited("q", 2, None), "1 nulls"),
    "a row that is null": ("float32", edited("features", 2, None), "1 nulls"),
    "a null in a row": ("float32", edited("features", 2, [None, *[0.0] * (K - 1)]), "nulls"),
    "doubles": (
        "float32",
        replaced("features", pa.array(np.zeros((N, 2)).tolist(), pa.list_(pa.float64(), 2))),
        "type",
    ),
    "lists of any size": (
        "float32",
        replaced("features", pa.array([[0.0]] * N, pa.list_(pa.float32()))),
        "fixed size",
    ),
    "a scale that is no number": ("int4", edited("scale", 5, float("nan")), "scale"),
    "a scale below zero": ("int4", edited("scale", 5, -1.0), "scale"),
    "codes without their form": ("int4", lambda t: replaced("codes", t.column("codes"))(t), "metadata"),
    "codes that are too short": ("int4", replaced("codes", pa.array([b"abc"] * N, pa.binary(3))), "`bits` and `k`"),
}


@pytest.mark.parametrize("case", BATCHES)
def test_what_is_no_batch_is_refused(tmp_path: Path, case: str) -> None:
    dtype, change, message = BATCHES[case]
    table = pa.Table.from_batches([batch_of(shard) for shard in made(tmp_path, dtype).train(0)])
    assert len(score_batch(table, targets(), 3)) == 3 * M
    with pytest.raises(HfTrakError, match=message):
        rows_of(change(table))


def test_values_that_no_store_has_are_refused(tmp_path: Path) -> None:
    shard = next(iter(made(tmp_path).train(0)))
    shard.grads[2, 1] = float("inf")
    with pytest.raises(NonFiniteError, match="sample 2"):
        gram_batch(batch_of(shard))
    with pytest.raises(ValueError, match="`k` is 0"):
        score_batch(batch_of(shard), targets(), 0)
    two = [score_batch(batch_of(next(iter(made(tmp_path).train(0)))), targets(), 2)] * 2
    with pytest.raises(StoreError, match="is there twice for target 0"):
        merge_top(two, 2)
    with pytest.raises(StoreError, match="Expected \\['target'"):
        merge_top([pa.table({"target": [1]})], 2)
    empty = batch_of(Shard(0, 1, torch.zeros(1, K), torch.zeros(1))).slice(0, 0)
    assert merge_top([score_batch(empty, targets(), 2)], 2).num_rows == 0 and gram_batch(empty).n == 0


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut short": (lambda path: path.write_bytes(path.read_bytes()[:-100]), "cannot be used"),
    "no Parquet": (lambda path: path.write_bytes(b"x" * 1000), "cannot be used"),
    "a flipped bit": (lambda path: flip(path, 300), "cannot be used"),
    "not all rows": (lambda path: rewritten(path, lambda t: t.slice(0, N - 1)), f"{N - 1} rows of {N}"),
    "a row twice": (lambda path: rewritten(path, edited("row_id", 3, 4)), "every number from 0"),
    "another value": (lambda path: rewritten(path, edited("q", 3, 0.5)), "not those that were written"),
    "another table's metadata": (lambda path: rewritten(path, lambda t: t.replace_schema_metadata(None)), "metadata"),
    "an edited fact": (
        lambda path: rewritten(
            path,
            lambda t: t.replace_schema_metadata(
                {"hf_trak": t.schema.metadata[b"hf_trak"].replace(b"weights 0", b"weights 1")}
            ),
        ),
        "checksum",
    ),
}


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def rewritten(path: Path, change: Change) -> None:
    pq.write_table(change(pq.read_table(path)), path)


@pytest.mark.parametrize("case", FILES)
def test_damaged_files_leave_nothing(tmp_path: Path, case: str) -> None:
    damage, message = FILES[case]
    path = write_table(made(tmp_path / "a"), 0, tmp_path / "index.parquet")
    damage(path)
    with pytest.raises(StoreError, match=message):
        read_tables([path], tmp_path / "b")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a", "index.parquet"]


def test_what_cannot_be_written_or_read_is_named(tmp_path: Path) -> None:
    store = made(tmp_path / "a")
    for columns in ({"source": ["a"]}, {"q": [0.0] * N}):
        with pytest.raises(ValueError, match="Expected the 41 training rows"):
            write_table(store, 0, tmp_path / "index.parquet", Dataset.from_dict(columns))
    path = write_table(store, 0, tmp_path / "index.parquet")
    with pytest.raises(ValueError, match="a directory that does not exist"):
        read_tables([path], tmp_path / "a")
    other = made(tmp_path / "other", "float16", (1,))
    with pytest.raises(HfTrakError, match="another configuration"):
        read_tables([path, write_table(other, 1, tmp_path / "other.parquet")], tmp_path / "b")
    store.train(0).path(2).unlink()
    with pytest.raises(IncompleteStoreError, match="rows 16–23"):
        write_table(store, 0, tmp_path / "index.parquet")
