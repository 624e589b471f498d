"""Reranking an index from the Hub: rows of the shortlist are read from the Parquet files of a dataset repo."""

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset, load_dataset
from digit_models import DigitNet, digits, trained_net
from hub_server import TOKEN, Fault, Hub, client, environment, hub
from test_rerank import column, same_bits
from trak_options import trak_config

from hf_trak import Rerank, TrakAttributor
from hf_trak.attributor import last_result
from hf_trak.errors import ConfigMismatchError, HubAccessError, IncompleteStoreError, RefusedIndexError
from hf_trak.hub import pull_index
from hf_trak.hub.index_files import TRAIN_ROWS_FILE
from hf_trak.hub.remote_rows import RemoteRows

__all__ = ["client", "hub"]  # fixtures

N, GROUP, TOP = 240, 10, 3
FILES = ("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet")
OPTIONS: dict[str, Any] = {"use_cpu": True, "per_device_batch_size": 12}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def parquet(rows: Dataset) -> bytes:
    """A file with a row group for every ten rows."""
    sink = io.BytesIO()
    pq.write_table(rows.with_format("arrow")[:], sink, row_group_size=GROUP)
    return sink.getvalue()


def repo_of(rows: Dataset) -> dict[str, bytes]:
    return {FILES[0]: parquet(rows.select(range(130))), FILES[1]: parquet(rows.select(range(130, N)))}


def train_rows() -> Dataset:
    return digits(0, N).add_column("text", [f"digit {i}" for i in range(N)])


def targets() -> Dataset:
    return digits(1000, 1003)


_made: list[tuple[dict[str, bytes], DigitNet]] = []


@pytest.fixture
def net(hub: Hub, client: Path, tmp_path: Path) -> DigitNet:
    """An index of rows from a dataset repo, with a curvature, on the Hub; and its model."""
    hub.put("dataset", "tester/rows", repo_of(train_rows()))
    if not _made:
        net = trained_net(digits(0, N))
        config = trak_config(
            output_dir=str(tmp_path / "made"),
            proj_dim=64,
            shard_size=32,
            curvature="ekfac",
            curvature_rows=60,
            **OPTIONS,
        )
        rows = load_dataset("tester/rows", split="train", token=TOKEN)
        made = TrakAttributor(net, config, train_dataset=rows, task="image_classification").featurize().fit_curvature()
        made.push_to_hub("tester/index", token=TOKEN, private=False)
        _made.append((dict(hub.dataset("tester/index")), net))
    hub.put("dataset", "tester/index", _made[0][0])
    return _made[0][1]


def load(net: DigitNet, **options: Any) -> TrakAttributor:
    return TrakAttributor.from_pretrained("tester/index", net, token=TOKEN, **{**OPTIONS, **options})


@pytest.mark.slow
def test_rows_are_found_by_the_record_of_the_index(hub: Hub, net: DigitNet, tmp_path: Path) -> None:
    """As with all rows at hand; downloaded are the row groups of the shortlist, and those of the probed rows."""
    at_hand = load(net, train_dataset=train_rows().cast(load_features()), output_dir=str(tmp_path / "at-hand"))
    expected = at_hand.attribute(targets(), top_k=TOP, method=Rerank(6))
    listed = last_result(at_hand).answer.rows.numbers
    hub.log.clear()
    elsewhere = load(net)
    assert not hub.downloads("parquet")
    found = elsewhere.attribute(targets(), top_k=TOP, method=Rerank(6))
    same_bits(found, expected)
    assert found["trak_index_ranks"] == expected["trak_index_ranks"]
    assert found["trak_stage"] == ["exact"] * 3
    groups = {row // GROUP for row in (*listed, 0, 1, 2, N // 3, N // 2, N - 1)}
    assert len(groups) < N // GROUP
    assert len(hub.downloads("parquet")) == len(groups) + 2  # a request for each, and one for each footer


def load_features() -> Any:
    return load_dataset("tester/rows", split="train", token=TOKEN).features


@pytest.mark.slow
def test_what_was_downloaded_is_kept(hub: Hub, net: DigitNet, client: Path) -> None:
    load(net).attribute(targets(), top_k=TOP, method=Rerank(6))
    hub.log.clear()
    load(net).attribute(targets(), top_k=TOP, method=Rerank(6))
    assert not hub.downloads("parquet")
    kept = sorted((client / "hf_trak" / "rows").rglob("*.rows"))
    kept[0].write_bytes(kept[0].read_bytes()[:-9])  # damaged: downloaded again
    load(net, output_dir=str(client / "other")).attribute(targets(), top_k=TOP, method=Rerank(6))
    assert len(hub.downloads("parquet")) == 1


@pytest.mark.slow
def test_an_answer_is_verified_on_rows_that_are_fetched(hub: Hub, net: DigitNet, tmp_path: Path) -> None:
    """As with all rows at hand. Without a search for similar rows, few row groups are downloaded."""
    at_hand = load(net, train_dataset=train_rows().cast(load_features()), output_dir=str(tmp_path / "at-hand"))
    target, rows = targets().select([0]), [3, 5, 8]
    expected = at_hand.verify(target, rows, draws=4)
    hub.log.clear()
    alone = load(net).verify(target, rows, similar=None, draws=4)
    assert 3 <= len(hub.downloads("parquet")) <= 3 * 5 + 6 + 2, "the rows, four draws of three, and probed rows"
    assert (alone.change, alone.random) == (expected.change, expected.random)
    assert load(net).verify(target, rows, draws=4) == expected
    lost = load(net)
    lost.train_dataset.remote = None
    with pytest.raises(IncompleteStoreError, match="no dataset repo is recorded to fetch them from"):
        lost.verify(target, rows)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_fetch_once(hub: Hub, net: DigitNet, client: Path, tmp_path: Path) -> None:
    expected = load(net).attribute(targets(), top_k=TOP, method=Rerank(6))
    patch = load(net).verify(targets().select([0]), expected[0]["trak_indices"], similar=None)
    torch.save(net.state_dict(), tmp_path / "weights.pt")
    script = Path(__file__).parents[1] / "kit" / "remote_rerank_job.py"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    asked = [*launch, str(tmp_path / "weights.pt"), str(tmp_path / "out")]
    done = subprocess.run(asked, env=environment(hub, tmp_path / "fresh"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [json.loads((tmp_path / f"out-{rank}.json").read_text()) for rank in range(2)]
    for report in reports:
        for name, values in report["found"].items():
            assert np.array_equal(values, expected[name][:]), name
        assert report["change"] == patch.change
    assert reports[0]["downloads"] > 0
    assert reports[1]["downloads"] < reports[0]["downloads"], "the main process fetches row groups"


@pytest.mark.slow
def test_an_interrupted_download_goes_on(hub: Hub, net: DigitNet) -> None:
    """Row groups that have arrived are not downloaded again."""
    hub.faults.append(Fault("GET", "train-00001-of-00002.parquet", 503, skip=3))
    with pytest.raises(HubAccessError, match="tester/rows"):
        load(net).attribute(targets(), top_k=TOP, method=Rerank(20))
    hub.faults.clear()
    arrived = [entry for entry in hub.requests("GET", "parquet") if entry.status == 206]
    hub.log.clear()
    found = load(net).attribute(targets(), top_k=TOP, method=Rerank(20))
    again = hub.requests("GET", "parquet")
    assert len(arrived) > 4
    assert len(again) < len(arrived)
    assert found["trak_stage"] == ["exact"] * 3


@pytest.mark.slow
def test_a_broken_connection_is_tried_again(hub: Hub, net: DigitNet) -> None:
    hub.faults.append(Fault("GET", "train-0000", "drop", times=2, skip=5))
    assert load(net).attribute(targets(), top_k=TOP, method=Rerank(6))["trak_stage"] == ["exact"] * 3
    hub.faults.append(Fault("GET", "train-0000", "half", times=1))
    with pytest.raises(RefusedIndexError, match=r"train-0000\d-of-00002.parquet"):
        load(net).attribute(targets(), top_k=TOP, method=Rerank(40))


@pytest.mark.slow
def test_rows_that_have_changed_are_named(hub: Hub, net: DigitNet) -> None:
    """One label that is another; and the text of one row, which the model does not read."""
    before = load(net)
    before.attribute(targets(), top_k=TOP, method=Rerank(6))
    listed = last_result(before).answer.rows.numbers
    chosen = listed[len(listed) // 2]
    labels, texts = train_rows()["labels"][:], train_rows()["text"][:]
    changed = (
        train_rows()
        .remove_columns("labels")
        .add_column("labels", [(label + (i == chosen)) % 10 for i, label in enumerate(labels)])
    )
    hub.put("dataset", "tester/rows", repo_of(changed))
    rows = RemoteRows("tester/rows", revision="main", token=TOKEN)
    with pytest.raises(ConfigMismatchError, match=rf"1 of \d+ rows of tester/rows@.* training rows {chosen}\."):
        load(net, train_dataset=rows).attribute(targets(), top_k=TOP, method=Rerank(6))
    # The commit that the index records has them as they were.
    expected = load(net).attribute(targets(), top_k=TOP, method=Rerank(6))
    # A column that does not reach the model is downloaded and compared where it is asked for.
    changed = (
        train_rows()
        .remove_columns("text")
        .add_column("text", [text + "!" * (i == chosen) for i, text in enumerate(texts)])
    )
    hub.put("dataset", "tester/rows", repo_of(changed))
    part = RemoteRows("tester/rows", revision="main", token=TOKEN)
    same_bits(load(net, train_dataset=part).attribute(targets(), top_k=TOP, method=Rerank(6)), expected)
    whole = RemoteRows("tester/rows", revision="main", token=TOKEN, columns=["pixel_values", "labels", "text"])
    with pytest.raises(ConfigMismatchError, match=rf"training rows {chosen}\."):
        load(net, train_dataset=whole).attribute(targets(), top_k=TOP, method=Rerank(6))


@pytest.mark.slow
def test_another_number_of_rows_and_other_columns(hub: Hub, net: DigitNet) -> None:
    hub.put("dataset", "tester/fewer", {"train.parquet": parquet(train_rows().select(range(100)))})
    with pytest.raises(ConfigMismatchError, match="has 100 rows, and the index was made from 240"):
        load(net, train_dataset=RemoteRows("tester/fewer", token=TOKEN)).attribute(
            targets(), top_k=2, method=Rerank(4)
        )
    lacking = train_rows().rename_column("pixel_values", "pixels")
    hub.put("dataset", "tester/lacking", repo_of(lacking))
    raw = RemoteRows("tester/lacking", token=TOKEN)
    with pytest.raises(ConfigMismatchError, match=r"\['pixel_values'\], too.*prepare="):
        load(net, train_dataset=raw).attribute(targets(), top_k=TOP, method=Rerank(6))
    ready = RemoteRows(
        "tester/lacking", token=TOKEN, prepare=lambda rows: rows.rename_column("pixels", "pixel_values")
    )
    found = load(net, train_dataset=ready).attribute(targets(), top_k=TOP, method=Rerank(6))
    same_bits(found, load(net).attribute(targets(), top_k=TOP, method=Rerank(6)))
    dropping = RemoteRows("tester/rows", token=TOKEN, prepare=lambda rows: rows.select([0]))
    with pytest.raises(ConfigMismatchError, match="`prepare` made 1 rows"):
        load(net, train_dataset=dropping).attribute(targets(), top_k=TOP, method=Rerank(6))


@pytest.mark.slow
def test_another_collator_is_noticed(hub: Hub, net: DigitNet) -> None:
    def brighter(rows: list[dict[str, Any]]) -> dict[str, Any]:
        pixels = torch.tensor(np.array([row["pixel_values"] for row in rows]), dtype=torch.float32)
        return {"pixel_values": 2 * pixels, "labels": torch.tensor([row["labels"] for row in rows])}

    with pytest.raises(
        ConfigMismatchError, match=r"do not become what the index was made from:\n  pixel_values: .* in the rows "
    ):
        load(net, data_collator=brighter).attribute(targets(), top_k=TOP, method=Rerank(6))


def test_without_rows_the_answer_is_that_of_the_index(
    hub: Hub, net: DigitNet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    local = TrakAttributor.from_pretrained("tester/index", net, token=TOKEN, **OPTIONS)
    local.train_dataset.remote = None  # as of an index that names no dataset repo
    caplog.set_level(logging.WARNING)
    found = local.attribute(targets(), top_k=TOP, method=Rerank(6))
    same_bits(found, local.attribute(targets(), top_k=TOP))
    assert found["trak_stage"] == ["index"] * 3
    assert found["trak_index_ranks"] == [[1, 2, 3]] * 3 == found["trak_harmful_index_ranks"]
    assert "nothing is reranked: the training rows are not at hand" in caplog.text


@pytest.mark.slow
def test_an_index_without_digests_needs_the_commit(hub: Hub, net: DigitNet, tmp_path: Path) -> None:
    """Rows of private data have no digests in the index."""
    config = trak_config(output_dir=str(tmp_path / "own"), proj_dim=16, curvature="identity", **OPTIONS)
    made = TrakAttributor(net, config, train_dataset=train_rows(), task="image_classification").featurize()
    made.push_to_hub("tester/own", token=TOKEN, private=False)
    assert TRAIN_ROWS_FILE not in hub.dataset("tester/own")
    options = {**OPTIONS, "token": TOKEN}
    rows = RemoteRows("tester/rows", token=TOKEN)
    one = TrakAttributor.from_pretrained("tester/own", net, train_dataset=rows, **options)
    with pytest.raises(ConfigMismatchError, match="has no digests of its training rows"):
        one.attribute(targets(), top_k=TOP, method=Rerank(6))
    alone = TrakAttributor.from_pretrained("tester/own", net, **options)
    assert alone.attribute(targets(), top_k=TOP, method=Rerank(6))["trak_stage"] == ["index"] * 3


@pytest.mark.slow
def test_digests_travel_and_are_checked(hub: Hub, net: DigitNet, tmp_path: Path) -> None:
    copy = pull_index("tester/index", tmp_path / "copy", token=TOKEN)
    assert copy.train_rows() is not None
    assert copy.train_rows().columns == ("pixel_values", "labels", "source", "text")
    data = bytearray(hub.dataset("tester/index")[TRAIN_ROWS_FILE])
    data[-3] ^= 1
    hub.put("dataset", "tester/index", {**hub.dataset("tester/index"), TRAIN_ROWS_FILE: bytes(data)})
    with pytest.raises(RefusedIndexError, match=TRAIN_ROWS_FILE):
        load(net).attribute(targets(), top_k=TOP, method=Rerank(6))
    hub.put("dataset", "tester/index", {**hub.dataset("tester/index"), TRAIN_ROWS_FILE: b"x" * 100})
    with pytest.raises(RefusedIndexError, match="it has 100 bytes"):
        load(net)


def test_files_of_a_converted_branch(hub: Hub, client: Path) -> None:
    rows = train_rows()
    lines = "".join(f'{{"labels": {row["labels"]}, "text": "{row["text"]}"}}\n' for row in rows)
    repo = hub.put("dataset", "tester/lines", {"train.jsonl": lines.encode()})
    remote = RemoteRows("tester/lines", token=TOKEN)
    with pytest.raises(HubAccessError, match="no branch refs/convert/parquet"):
        remote[0]
    files = {"default/train/0000.parquet": parquet(rows.select_columns(["labels", "text"]))}
    repo.commit("refs/convert/parquet", files)
    again = RemoteRows("tester/lines", token=TOKEN)
    assert len(again) == N
    assert again[17] == {"labels": rows[17]["labels"], "text": "digit 17"}
    assert again.select([3, 100, 239])["text"] == ["digit 3", "digit 100", "digit 239"]


def test_what_is_no_parquet(hub: Hub, client: Path) -> None:
    hub.put("dataset", "tester/broken", {"train.parquet": b"PAR1" + b"nothing" * 30})
    with pytest.raises(HubAccessError, match=r"'train\.parquet' of tester/broken cannot be read as Parquet"):
        RemoteRows("tester/broken", token=TOKEN)[0]
    with pytest.raises(HubAccessError, match="has the splits"):
        hub.put("dataset", "tester/rows", repo_of(train_rows()))
        RemoteRows("tester/rows", split="test", token=TOKEN)[0]
    with pytest.raises(ValueError, match="repo_id"):
        RemoteRows("../rows")
    with pytest.raises(IndexError, match="Row 240 does not exist"):
        RemoteRows("tester/rows", token=TOKEN)[N]


def test_single_rows_are_those_of_the_dataset(hub: Hub, client: Path) -> None:
    hub.put("dataset", "tester/rows", repo_of(train_rows()))
    remote, whole = RemoteRows("tester/rows", token=TOKEN), load_dataset("tester/rows", split="train", token=TOKEN)
    for row in (0, 9, 10, 129, 130, N - 1):
        assert remote[row] == whole[row]
    assert remote.select([5, 131]).features == whole.features
    assert len(column(Dataset.from_list([remote[3]]), "labels")) == 1


class Small(torch.nn.Module):
    """Two outputs of four inputs: an index of 100,000 rows is made in seconds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return SimpleNamespace(logits=self.layer(pixel_values))


@pytest.mark.slow
def test_a_thousand_of_a_hundred_thousand_rows(hub: Hub, client: Path, tmp_path: Path) -> None:
    """Downloaded are the columns that reach the model, of the row groups that hold the shortlist, and the footer."""
    n, generator = 100_000, np.random.Generator(np.random.Philox(1))
    values = generator.standard_normal((n, 4)).astype(np.float32)
    columns = {"pixel_values": list(values), "labels": (values[:, 0] > 0).astype(int)}
    rows = Dataset.from_dict({**columns, "text": [generator.bytes(60).hex() for _ in range(n)]})
    sink = io.BytesIO()
    pq.write_table(rows.with_format("arrow")[:], sink, row_group_size=50)
    file = sink.getvalue()
    hub.put("dataset", "tester/many", {"train.parquet": file})
    model = Small()
    config = trak_config(
        output_dir=str(tmp_path / "made"), proj_type="none", shard_size=n, curvature="ekfac", curvature_rows=64,
        feature_dtype="float32", **OPTIONS,
    )  # fmt: skip
    made = TrakAttributor(
        model, config, train_dataset=load_dataset("tester/many", split="train"), task="image_classification"
    )
    made.fit_curvature()
    features = np.concatenate([values * (2 * columns["labels"] - 1)[:, None]] * 2 + [values[:, :2]], axis=1)
    made.features.store.train(0).write(0, torch.tensor(features), torch.ones(n))
    made.push_to_hub("tester/large", token=TOKEN, private=False)
    hub.log.clear()

    elsewhere = TrakAttributor.from_pretrained("tester/large", model, token=TOKEN, **OPTIONS)
    found = elsewhere.attribute(rows.select([5]), top_k=10, method=Rerank(500))
    assert found["trak_stage"] == ["exact"]
    fetched = elsewhere.train_dataset.remote.fetched
    metadata = pq.read_metadata(io.BytesIO(file))
    wanted = sum(
        metadata.row_group(group).column(place).total_compressed_size
        for group in range(metadata.num_row_groups)
        for place in range(2)
    )
    footer = metadata.serialized_size + (64 << 10)
    print(f"\n{fetched:,} of {len(file):,} bytes, of which {wanted:,} are of the columns that reach the model")
    assert len(last_result(elsewhere).answer.rows) == 1000
    assert fetched < 0.42 * wanted + footer  # 1,000 rows lie in 39 % of 2,000 groups
    assert fetched < 0.25 * len(file)
