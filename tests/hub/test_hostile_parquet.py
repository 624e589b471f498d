"""Parquet files of a few bytes that stand for gigabytes: refused with a message, in processes with little memory."""

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import TOKEN, Hub, client, environment, hub

from hf_trak.errors import HubAccessError
from hf_trak.hub.remote_rows import RemoteRows

__all__ = ["client", "hub"]  # fixtures

MEMORY = 1 << 30

CHILD = """
import resource, sys
import torch, datasets
import hf_trak.hub.remote_rows, hf_trak.hub.scores, datasets.packaged_modules.parquet.parquet
from hf_trak.errors import HubAccessError, RefusedIndexError
from hf_trak.hub import RemoteRows, load_scores

used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + {memory}, used + {memory}))
for call in {calls}:
    try:
        exec(call)
    except (HubAccessError, RefusedIndexError) as error:
        print("REFUSED", error)
"""

CALLS = {
    "one row": 'RemoteRows("tester/bomb", token={token!r})[0]',
    "one column": 'RemoteRows("tester/bomb", token={token!r}, columns=["a"])[0]',
    "scores": 'load_scores("tester/bomb", token={token!r})',
}


def written(table: pa.Table) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file, compression="zstd", row_group_size=1 << 30, store_schema=False)
    return file.getvalue()


def of_nothing() -> pa.Table:
    return pa.table({"a": pa.nulls(300_000_000, pa.int64())})


def of_one_number() -> pa.Table:
    return pa.table({"a": pa.repeat(pa.scalar(7, pa.int64()), 1 << 28)})


def of_one_text() -> pa.Table:
    indices = pa.repeat(pa.scalar(0, pa.int32()), 1 << 20)
    return pa.table({"a": pa.DictionaryArray.from_arrays(indices, pa.array(["x" * 10_000]))})


def of_long_texts() -> pa.Table:
    indices = pa.repeat(pa.scalar(0, pa.int32()), 3000)
    return pa.table({"a": pa.DictionaryArray.from_arrays(indices, pa.array(["x" * 900_000]))})


def of_one_list() -> pa.Table:
    values = pa.repeat(pa.scalar(7, pa.int64()), 1 << 27)
    return pa.table({"a": pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)})


@pytest.mark.slow
@pytest.mark.parametrize(
    "bomb, calls",
    [
        *((bomb, tuple(CALLS)) for bomb in (of_nothing, of_one_number, of_one_list)),
        (of_one_text, ("one row", "scores")),  # which only reading in pieces finds
        (of_long_texts, ("scores", "one row")),
    ],
)
def test_a_small_file_takes_little_memory(
    hub: Hub, client: Path, bomb: Callable[[], pa.Table], calls: tuple[str, ...]
) -> None:
    data = written(bomb())
    assert len(data) < 2_000_000
    hub.put("dataset", "tester/bomb", {"data/train-00000-of-00001.parquet": data})
    code = CHILD.format(memory=MEMORY, calls=[CALLS[call].format(token=TOKEN) for call in calls])
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(hub, client), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("REFUSED") == len(calls), done.stdout


def test_ordinary_files_are_read(hub: Hub, client: Path) -> None:
    """Constant columns, many row groups, texts and lists: all that real files have."""
    table = pa.table({
        "same": pa.repeat(pa.scalar(3, pa.int64()), 50_000), "text": [f"text {i}" for i in range(50_000)],
        "list": [[i, i] for i in range(50_000)],
    })  # fmt: skip
    file = io.BytesIO()
    pq.write_table(table, file, row_group_size=20_000)
    hub.put("dataset", "tester/rows", {"data/train-00000-of-00001.parquet": file.getvalue()})
    rows = RemoteRows("tester/rows", token=TOKEN)
    assert len(rows) == 50_000 and rows[45_678] == {"same": 3, "text": "text 45678", "list": [45_678, 45_678]}


def test_a_row_group_without_room_is_named(hub: Hub, client: Path) -> None:
    data = written(pa.table({"a": pa.nulls(20_000_000, pa.int64())}))
    hub.put("dataset", "tester/bomb", {"data/train-00000-of-00001.parquet": data})
    with pytest.raises(
        HubAccessError, match=r"train-00000-of-00001.parquet' of tester/bomb was refused: it holds 20000"
    ):
        RemoteRows("tester/bomb", token=TOKEN)[0]
