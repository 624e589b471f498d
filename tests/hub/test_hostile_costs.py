"""Malicious indexes, cards and files of arguments take bounded memory and time."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from places import PYTHONPATH
from test_hub_hostile import resealed
from test_hub_index import make_store

from hf_trak.hub.files import recorded_checksum
from hf_trak.hub.manifest import IndexManifest, PublishedCheckpoint, PublishedFile
from hf_trak.store.sealed import content_digest, sealed_bytes
from hf_trak.store.store import FeatureStore

SECONDS, MEGABYTES = 20, 400
"""Limits on the CPU time and memory of one case, not counting the import of the library."""

RUNNER = f"""
import json, resource, signal, sys
from pathlib import Path
import torch
from hf_trak import TrakAttributor, TrakConfig
from hf_trak.cli.parser import parse_yaml_and_args
from hf_trak.hub.cards import updated_card, render_card
from hf_trak.hub.files import LocalFiles
from hf_trak.hub.index_store import open_index
sys.path[:0] = {PYTHONPATH.split(os.pathsep)!r}
from test_hub_attributor import tiny_bert
model = tiny_bert(1)

def stopped(*_):
    raise TimeoutError("too much CPU time")

signal.signal(signal.SIGXCPU, stopped)
for line in sys.stdin:
    code, path, seconds = json.loads(line)
    path = Path(path)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    used = int(status["VmData"].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + {MEGABYTES} * 2**20, resource.RLIM_INFINITY))
    before = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    resource.setrlimit(resource.RLIMIT_CPU, (int(before) + seconds, resource.RLIM_INFINITY))
    try:
        said = str(eval(code))
    except Exception as error:
        said = f"{{type(error).__name__}}: {{error}}"
    print(json.dumps([said, sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) - before]), flush=True)
"""


class Bounded:
    """A subprocess that runs cases one after another, each within the limits."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUNNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip

    def run(self, code: str, path: Path, seconds: int = SECONDS) -> str:
        """Evaluate an expression, and return its value or its error as text."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([code, str(path), seconds]) + "\n")
        self.process.stdin.flush()
        last_resort = threading.Timer(300, self.process.kill)  # a loop in C handles no signal
        last_resort.start()
        while not (line := self.process.stdout.readline()).startswith("["):
            assert line, "the process was stopped"
        last_resort.cancel()
        said, spent = json.loads(line)
        assert spent <= seconds + 1  # the system counts whole seconds
        return said


@pytest.fixture(scope="module")
def bounded() -> Iterator[Bounded]:
    started = Bounded()
    yield started
    started.process.kill()


@pytest.mark.slow
def test_the_bounds_hold(tmp_path: Path, bounded: Bounded) -> None:
    """A case that takes more is stopped, and the next one still runs."""
    assert bounded.run("len([bytearray(2**20) for _ in range(100)])", tmp_path) == "100"
    assert bounded.run("[bytearray(2**20) for _ in range(500)]", tmp_path).startswith("MemoryError")
    assert bounded.run("all(zero == 0 for zero in iter(int, 1))", tmp_path, seconds=2).startswith("TimeoutError")
    assert bounded.run("path.name", tmp_path) == tmp_path.name


OPEN = "open_index(LocalFiles(path), path.parent / 'work')"
LOAD = "TrakAttributor.from_pretrained(str(path), model, use_cpu=True, task='text_classification')"
PARSE = "parse_yaml_and_args(TrakConfig, ['--config', str(path)])"
UPDATE = (
    "updated_card(path.read_text(), render_card('index', 'T', 'x', dict.fromkeys(('checkpoints', 'parameters'), '')"
    " | {'lds': None}, {}), 'index')"
)


def index(tmp_path: Path, **changes: Any) -> Path:
    """Write an index of one checkpoint into a directory, with `changes` to its configuration."""
    store = make_store(tmp_path / "index", ids=(0,))
    paths = {path.relative_to(tmp_path / "index").as_posix(): path for path in store.output_dir.rglob("*.safetensors")}
    files = {name: PublishedFile(path.stat().st_size, recorded_checksum(path)) for name, path in paths.items()}
    published = PublishedCheckpoint(f"{0:032x}")
    manifest = IndexManifest(files, {0: published}, store.config_hash, {"lambda_relative": 0.3})
    (tmp_path / "index" / "trak_index.json").write_bytes(sealed_bytes(manifest.to_json()))
    if changes:
        write_config(tmp_path / "index", **changes)
    return tmp_path / "index"


def write_config(directory: Path, **changes: Any) -> None:
    path = directory / "trak_config.json"
    content = {**json.loads(path.read_text()), **changes}
    del content["checksum"]
    path.write_text(json.dumps({**content, "checksum": content_digest(content)}, separators=(",", ":")))


def with_many_parameters(tmp_path: Path) -> Path:
    """Write the configuration of a model with 200,000 parameter tensors."""
    return index(tmp_path, parameters=[[f"layer.{i}.weight", [3, 4], 12 * i] for i in range(200_000)])


def with_the_most_parameters(tmp_path: Path) -> Path:
    return fitting(index(tmp_path, parameters=[[f"layer.{i}.weight", [3, 4], 12 * i] for i in range(1 << 17)]))


def fitting(directory: Path) -> Path:
    """Put the hash of the configuration into the manifest."""
    manifest = json.loads((directory / "trak_index.json").read_text())
    manifest["config"] = FeatureStore.load(directory).config_hash
    (directory / "trak_index.json").write_bytes(resealed(manifest))
    return directory


def with_manifest(data: bytes) -> Callable[[Path], Path]:
    def made(tmp_path: Path) -> Path:
        directory = index(tmp_path)
        (directory / "trak_index.json").write_bytes(data)
        return directory

    return made


def with_many_checksums(tmp_path: Path) -> Path:
    """Write consistent JSON files of an index of 10⁹ rows, with 300,000 checksums and only three shard files."""
    directory = index(tmp_path, train_size=300_000 * 4000, shard_size=4000)
    files = {f"checkpoint-0/train-{i:05d}-of-300000.safetensors": [8, "0" * 32] for i in range(300_000)}
    others = {"config": "0" * 32, "lds": None, "settings": {}, "train_dataset": None, "weights_dtype": None}
    checkpoints = {"0": {"fingerprint": "0" * 32, "source": None, "converted_from": []}}
    content = {"format_version": 1, "checkpoints": checkpoints, "files": files, **others}
    (directory / "trak_index.json").write_bytes(sealed_bytes(content))
    return directory


def with_a_huge_file(name: str) -> Callable[[Path], Path]:
    def made(tmp_path: Path) -> Path:
        directory = index(tmp_path)
        with (directory / name).open("r+b") as file:
            file.truncate(1 << 36)  # without blocks on the disk
        return directory

    return made


INDEXES: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "a million million rows": (
        lambda tmp: index(tmp, train_size=10**12), OPEN, r"trak_config\.json .* refused: `train_size` 10+ in shards"
    ),
    "a million million rows in few shards": (
        lambda tmp: index(tmp, train_size=10**12, shard_size=10**7), OPEN, "implies 100000 shards, and only 5 files"
    ),
    "a million million rows in three shards": (
        lambda tmp: fitting(index(tmp, train_size=10**12, shard_size=4 * 10**11)), OPEN,
        r"train-00000.* bytes, not 11200000000",
    ),
    "200,000 parameters": (with_many_parameters, OPEN, "`parameters` has 200000 entries, more than 131072"),
    "as many parameters as there can be": (
        with_the_most_parameters, LOAD, "ConfigMismatchError: .* attributes 131072 parameters .* 131072 of them",
    ),
    "60 MB of manifest": (
        with_manifest(b'{"checkpoints": {' + b'"0": [],' * 7_500_000 + b'"1": []}}'), OPEN,
        r"trak_index\.json .* refused: it has 60000026 bytes, more than the 70656",
    ),
    "a manifest of empty lists": (
        with_manifest(b'{"checkpoints": [' + b"[]," * 20_000 + b"1]}"), OPEN, r"trak_index.* up to 40002 values",
    ),
    "a config of empty lists": (
        lambda tmp: config_with(tmp, b"[]," * 5_000_000), OPEN, r"trak_config\.json .* up to \d+ values in 15\d+ bytes"
    ),
    "a config of 60 MB": (
        lambda tmp: config_with(tmp, b"0,        " * 6_000_000), OPEN, r"trak_config\.json .* 60\d+ bytes, more than"
    ),
    "checksums of shards that are not there": (with_many_checksums, OPEN, "implies 300000 shards, and only 5 files"),
    "a deep manifest": (with_manifest(b'{"a":' * 10_000), OPEN, r"trak_index.* refused: it has up to 10000 values"),
    "a huge shard": (
        with_a_huge_file("checkpoint-0/train-00001-of-00003.safetensors"), OPEN, "train-00001.* has 68719476736 bytes"
    ),
    "a huge Gram matrix": (with_a_huge_file("checkpoint-0/gram.safetensors"), OPEN, "gram.* it has 68719476736 bytes"),
    "a huge configuration": (with_a_huge_file("trak_config.json"), OPEN, r"trak_config\.json .* 68719476736 bytes"),
    "a huge manifest": (with_a_huge_file("trak_index.json"), OPEN, r"trak_index\.json .* 68719476736 bytes"),
}  # fmt: skip


def config_with(tmp_path: Path, values: bytes) -> Path:
    directory = index(tmp_path)
    (directory / "trak_config.json").write_bytes(b'{"format_version": 2, "parameters": [' + values + b"1]}")
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("case", INDEXES)
def test_what_an_index_can_cost_is_bounded(tmp_path: Path, bounded: Bounded, case: str) -> None:
    make, code, reason = INDEXES[case]
    said = bounded.run(code, make(tmp_path))
    assert re.search(reason, said), said[:2000]


BILLION = "\n".join(
    ["a: &a [x,x,x,x,x,x,x,x,x]"]
    + [f"{chr(98 + i)}: &{chr(98 + i)} [{','.join([f'*{chr(97 + i)}'] * 9)}]" for i in range(9)]
)
TEXTS: dict[str, tuple[str, str, str]] = {
    "aliases of aliases": (BILLION, PARSE, "refused: line 2 refers to another place"),
    "an alias of itself": ("a: &a [*a]", PARSE, "refers to another place"),
    "merged keys": ("a: &a {x: 1}\nb: {<<: *a}", PARSE, "refers to another place"),
    "brackets": ("a: " + "[" * 20_000, PARSE, "nested more than 32 deep"),
    "braces": ("a: " + "{a: " * 20_000, PARSE, "nested more than 32 deep"),
    "dashes": ("- " * 20_000, PARSE, "nested more than 32 deep"),
    "a large file": ("a: 1\n" * 100_000, PARSE, "has 500000 bytes. Expected at most 262144"),
    "many keys": ("".join(f"key{i}: 1\n" for i in range(20_000)), PARSE, "which no argument is called"),
    "a key many times": ("seed: 1\n" * 20_000, PARSE, r"the keys \['seed'\] are there twice"),
    "a number of 200,000 digits": ("seed: " + "9" * 200_000, PARSE, "Expected an integer"),
    "a date that is none": ("seed: 2020-99-99", PARSE, "`seed` is '2020-99-99'. Expected an integer"),
    "a card of 10 MB": ("word " * 2_000_000, UPDATE, "^None$"),
    "a card of half markers": ("<!-- hf_trak index: begin " * 40_000, UPDATE, "^---\ntags:"),
    "a card of markers": ("<!-- hf_trak index: begin -->" * 30_000, UPDATE, "^None$"),
    "a card of aliases": (f"---\n{BILLION}\n---\n", UPDATE, "^None$"),
    "a card of keys": (
        "---\n" + "".join(f"k{i}: 1\n" for i in range(90_000)) + "---\n",
        UPDATE,
        "^None$",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", TEXTS)
def test_what_a_text_can_cost_is_bounded(tmp_path: Path, bounded: Bounded, case: str) -> None:
    text, code, reason = TEXTS[case]
    (tmp_path / "text").write_text(text)
    said = bounded.run(code, tmp_path / "text")
    assert re.search(reason, said), said[:2000]
