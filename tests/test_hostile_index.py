"""Copies of an index that somebody hands on: nothing is written into them or through them, nothing that they bring
counts as computed here, and what they can cost is bounded."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hub_server import TOKEN, Hub, client, hub
from huggingface_hub import constants, snapshot_download
from test_hub_attributor import OPTIONS, Published, full
from test_hub_attributor import one_thread as one_thread
from test_hub_hostile import below, resealed
from test_hub_index import make_store

from hf_trak import TrakAttributor
from hf_trak.cli.main import main
from hf_trak.errors import RefusedIndexError
from hf_trak.hub import open_repo, pull_index, push_index
from hf_trak.hub.files import LocalFiles
from hf_trak.hub.index_files import checksums_of
from hf_trak.hub.index_store import open_index
from hf_trak.hub.manifest import IndexManifest, PublishedCheckpoint
from hf_trak.hub.redaction import address_without_secrets, without_secrets
from hf_trak.savers import FeatureStore
from hf_trak.savers.sealed import content_digest, sealed_bytes

__all__ = ["client", "hub"]  # fixtures


_made: dict[str, Any] = {}


@pytest.fixture
def published(hub: Hub, client: Path, tmp_path_factory: pytest.TempPathFactory) -> Published:
    """A published index of two checkpoints, made once."""
    if not _made:
        _made["run"] = Published(hub, tmp_path_factory.mktemp("made"))
        _made["files"] = dict(hub.dataset("tester/index"))
        _made["scores"] = _made["run"].scores(name="first")
    hub.put("dataset", "tester/index", _made["files"])
    return _made["run"]


@pytest.fixture
def copy(hub: Hub, published: Published, tmp_path: Path) -> Path:
    """A clone of the index."""
    return clone(hub, tmp_path / "copy")


def clone(hub: Hub, directory: Path) -> Path:
    for name, data in hub.dataset("tester/index").items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    return directory


def from_copy(copy: Path, published: Published, **options: Any) -> TrakAttributor:
    return TrakAttributor.from_pretrained(
        str(copy), published.models[0], checkpoints=published.models, **{**OPTIONS, **options}
    )


def content(directory: Path) -> dict[str, bytes]:
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in below(directory)}


# -- where results go ------------------------------------------------------------------------------------------------


def test_nothing_is_written_into_a_copy(copy: Path, published: Published, client: Path) -> None:
    """Targets and scores lie beside the Hub's cache, by the name of the copy and a digest of it."""
    before = content(copy)
    (copy / "checkpoint-0" / ".hf_trak-tmp-elsewhere").write_bytes(b"theirs")
    attributor = from_copy(copy, published)
    assert np.array_equal(full(attributor), _made["scores"])
    assert {**before, "checkpoint-0/.hf_trak-tmp-elsewhere": b"theirs"} == content(copy)
    work = Path(attributor.args.output_dir)
    assert work == attributor.store.output_dir and work.parent == client / "hf_trak" / "copy"
    assert (work / "experiments").is_dir() and (work / "scores").is_dir()


def test_another_index_of_the_same_name_has_another_place(
    hub: Hub, copy: Path, published: Published, tmp_path: Path
) -> None:
    one = LocalFiles(copy).work_dir
    assert LocalFiles(clone(hub, tmp_path / "elsewhere" / "copy")).work_dir == one
    published.attributor.push_to_hub("tester/index", token=TOKEN, lds=0.25)
    assert LocalFiles(clone(hub, tmp_path / "later" / "copy")).work_dir != one


def test_features_that_a_copy_brings_are_not_used(copy: Path, published: Published) -> None:
    """Target features and scores of another run, under the name and with the fingerprint of the targets to come."""
    expected = published.scores(name="exam")
    made = Path(published.attributor.args.output_dir)
    for folder in ("experiments", "scores"):
        shutil.copytree(made / folder, copy / folder)
    for path in (copy / "experiments").rglob("*.safetensors"):
        forge(path)
    before = content(copy)
    assert np.array_equal(full(from_copy(copy, published), name="exam"), expected)
    assert content(copy) == before


def forge(path: Path) -> None:
    """Other features in a file that says of itself what it has to say."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    from hf_trak.savers.sealed import sealed
    from hf_trak.savers.shards import checksum

    with safe_open(path, framework="pt") as file:
        metadata = json.loads(file.metadata()["hf_trak"])
        tensors = {name: 100 * file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del metadata["checksum"]
    metadata = sealed({**metadata, "tensors": checksum(tensors, 2)})
    save_file(tensors, path, metadata={"hf_trak": json.dumps(metadata)})


@pytest.mark.parametrize("where", [".", "work", "checkpoint-0/../deep/er"])
def test_the_copy_itself_is_no_output_directory(copy: Path, published: Published, where: str) -> None:
    with pytest.raises(ValueError, match=r"inside the copy .* of an index.*Leave `output_dir` out"):
        from_copy(copy, published, output_dir=str(copy / where))


def test_a_copy_is_no_run_of_your_own(copy: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A record of arguments that a copy brings is not followed."""
    record = {"arguments": {"model_name_or_path": "evil/model", "dataset_name": "evil/rows"}, "trak": {}}
    (copy / "featurize.json").write_text(json.dumps(record))
    for command in ("attribute", "featurize"):
        assert main([command, "--output_dir", str(copy)]) == 1
        assert "is a copy of a published index" in capsys.readouterr().err


def test_a_copy_is_published_with_the_settings_that_it_came_with(
    hub: Hub, copy: Path, published: Published, client: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published.attributor.args, "lambda_relative", 0.125)
    published.attributor.push_to_hub("tester/index", token=TOKEN, lds=0.25)
    clone(hub, copy)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    (copy / "featurize.json").write_text('{"arguments": {}, "trak": {"lambda_relative": 7.0}}')
    assert main(["push", str(copy), "--repo_id", "tester/fork"]) == 0
    manifest = json.loads(hub.dataset("tester/fork")["trak_index.json"])
    assert (manifest["settings"]["lambda_relative"], manifest["lds"]) == (0.125, 0.25)
    assert manifest["weights_dtype"] == "float32"


def test_a_run_of_your_own_is_trusted_as_ever(published: Published, hub: Hub) -> None:
    own = TrakAttributor.from_pretrained(
        str(published.attributor.args.output_dir), published.models[0], checkpoints=published.models,
        per_device_batch_size=3, **OPTIONS,
    )  # fmt: skip
    assert np.array_equal(full(own, name="again"), _made["scores"])
    assert own.args.output_dir == published.attributor.args.output_dir


# -- links -----------------------------------------------------------------------------------------------------------


LINKS: dict[str, Callable[[Path, Path], None]] = {
    "experiments": lambda copy, away: (copy / "experiments").symlink_to(away),
    "scores": lambda copy, away: (copy / "scores").symlink_to(away),
    "checkpoint": lambda copy, away: moved(copy / "checkpoint-0", away / "there"),
    "shard": lambda copy, away: moved(copy / "checkpoint-0" / "train-00000-of-00003.safetensors", away / "there"),
    "configuration": lambda copy, away: moved(copy / "trak_config.json", away / "there"),
    "manifest": lambda copy, away: moved(copy / "trak_index.json", away / "there"),
    "within": lambda copy, away: moved(copy / "checkpoint-1" / "gram.safetensors", copy / "there"),
    "to nothing": lambda copy, away: (copy / "checkpoint-0" / "x").symlink_to(away / "nothing"),
    "loop": lambda copy, away: (copy / "checkpoint-0" / "x").symlink_to(copy),
    "card": lambda copy, away: moved(copy / "README.md", away / "there"),
}


def moved(path: Path, to: Path) -> None:
    shutil.move(path, to)
    path.symlink_to(to)


@pytest.mark.parametrize("case", LINKS)
def test_links_are_refused(copy: Path, published: Published, tmp_path: Path, case: str) -> None:
    away = tmp_path / "away"
    away.mkdir()
    LINKS[case](copy, away)
    before = content(away)
    with pytest.raises(RefusedIndexError, match=r"was refused: it is a link to '/.*Remove the link"):
        from_copy(copy, published)
    assert content(away) == before
    if case in ("experiments", "checkpoint"):
        with pytest.raises(RefusedIndexError, match="is a link"):
            pull_index("tester/index", copy, token=TOKEN)
        assert content(away) == before


def test_a_link_that_appears_later_is_refused(copy: Path, tmp_path: Path) -> None:
    store = open_index(LocalFiles(copy), tmp_path / "work")
    moved(copy / "checkpoint-0", tmp_path / "there")
    with pytest.raises(RefusedIndexError, match="is a link"):
        store.train(0).read(1)


def test_a_snapshot_in_the_cache_is_read(hub: Hub, published: Published, client: Path, tmp_path: Path) -> None:
    """Its files are links to the blobs of its repo, and to nothing else."""
    path = Path(snapshot_download("tester/index", repo_type="dataset", token=TOKEN))
    assert (path / "trak_config.json").is_symlink()
    assert np.array_equal(full(from_copy(path, published)), _made["scores"])
    secret = tmp_path / "secret"
    secret.write_bytes((path / "checkpoint-0" / "gram.safetensors").read_bytes())
    for target in (secret, path.parents[1] / "refs" / "main"):
        (path / "checkpoint-0" / "gram.safetensors").unlink()
        (path / "checkpoint-0" / "gram.safetensors").symlink_to(target)
        with pytest.raises(RefusedIndexError, match="is a link"):
            from_copy(path, published)


def test_a_directory_that_is_a_link_itself_is_the_users(copy: Path, published: Published, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(copy)
    assert np.array_equal(full(from_copy(tmp_path / "link", published)), _made["scores"])


# -- what is published -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["out/model", "./out/model", "out", "../out/model", "out/run/model", "~/model"])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_paths_of_models_are_not_published_as_repos(
    hub: Hub, client: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, elsewhere: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Neither from the directory that they are relative to, nor from another one."""
    (tmp_path / "here" / "out" / "run" / "model").mkdir(parents=True)
    (tmp_path / "here" / "out" / "model").mkdir()
    store = make_store(tmp_path / "here" / "store", model_name=name, model_revision=None)
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / ("there" if elsewhere else "here"))
    push_index(store, "tester/index", token=TOKEN)
    assert json.loads(hub.dataset("tester/index")["trak_config.json"])["model_name"] is None
    card = hub.dataset("tester/index")["README.md"].decode()
    assert f"huggingface.co/{name}" not in card and "not named" in card
    assert "pass `model_name=`" in caplog.text


def test_repos_of_models_are_published(hub: Hub, client: Path, tmp_path: Path) -> None:
    """Those of a commit, those in the cache, and those that an index has named before."""

    def name_of(repo: str) -> Any:
        return json.loads(hub.dataset(repo)["trak_config.json"])["model_name"]

    push_index(make_store(tmp_path / "a"), "tester/index", token=TOKEN)
    assert name_of("tester/index") == "tester/model"
    cached = make_store(tmp_path / "b", model_name="my/model", model_revision=None)
    Path(constants.HF_HUB_CACHE, "models--my--model").mkdir(parents=True)
    push_index(cached, "tester/cached", token=TOKEN)
    assert name_of("tester/cached") == "my/model"
    shutil.rmtree(Path(constants.HF_HUB_CACHE, "models--my--model"))
    pull_index("tester/cached", tmp_path / "pulled")
    push_index(FeatureStore.load(tmp_path / "pulled"), "tester/fork", token=TOKEN)
    assert name_of("tester/fork") == "my/model"


def test_passwords_in_addresses_are_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for address in (
        "https://user:secret@hub.example/x?token=secret#secret", "user:secret@hub.example", "https://secret@hub.example",
        "https://hub.example/?secret", "https://user:sec@secret@hub.example", "https://user:secret?secret@hub.example",
        "https://user:a/secret@hub.example",
    ):  # fmt: skip
        monkeypatch.setenv("HF_ENDPOINT", address)
        assert main(["env"]) == 0 and main(["env", "--json"]) == 0
        printed = capsys.readouterr().out
        assert "secret" not in printed and "hub.example" in printed
    assert address_without_secrets("https://hub.example:8080/path") == "https://hub.example:8080/path"
    said = without_secrets("Error for url 'https://me:secret@hub.example/api?x=secret' (hf_secretsecret), see a@b.c")
    assert "secret" not in said and "https://***@hub.example/api?***" in said and "a@b.c" in said


def test_passwords_in_addresses_are_not_in_errors(hub: Hub, client: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = hub.endpoint.replace("http://", "http://user:secret@")
    monkeypatch.setattr(constants, "ENDPOINT", address)
    with pytest.raises(OSError, match="does not exist at http://") as error:
        open_repo("tester/nothing")
    assert "secret" not in str(error.value)


# -- what it can cost ------------------------------------------------------------------------------------------------

SECONDS, MEGABYTES = 20, 400
"""CPU time and memory that one case may take, the import of the library aside. What takes more is stopped."""

RUNNER = f"""
import json, resource, signal, sys
from pathlib import Path
import torch
from hf_trak import TrakAttributor, TrakConfig
from hf_trak.cli.parser import parse_yaml_and_args
from hf_trak.hub.cards import updated_card, render_card
from hf_trak.hub.files import LocalFiles
from hf_trak.hub.index_store import open_index
sys.path.insert(0, {str(Path(__file__).parent)!r})
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
    """A process in which cases are run, one after the other, each within the bounds."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUNNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip

    def run(self, code: str, path: Path, seconds: int = SECONDS) -> str:
        """What an expression gives, or the error that it raises."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([code, str(path), seconds]) + "\n")
        self.process.stdin.flush()
        last_resort = threading.Timer(300, self.process.kill)  # a loop in C hears no signal
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


def test_the_bounds_hold(tmp_path: Path, bounded: Bounded) -> None:
    """What takes more is stopped, and the next one is run."""
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
    """A whole index of one checkpoint in a directory, without a Hub; `changes` to its configuration."""
    store = make_store(tmp_path / "index", ids=(0,))
    published = PublishedCheckpoint(f"{0:032x}", None, checksums_of(store.train(0)))
    manifest = IndexManifest({0: published}, {"lambda_relative": 0.3}, config=store.config_hash)
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
    """200,000 parameters: a model of that many layers."""
    return index(tmp_path, parameters=[[f"layer.{i}.weight", [3, 4], 12 * i] for i in range(200_000)])


def with_the_most_parameters(tmp_path: Path) -> Path:
    return fitting(index(tmp_path, parameters=[[f"layer.{i}.weight", [3, 4], 12 * i] for i in range(1 << 17)]))


def fitting(directory: Path) -> Path:
    """With the hash of the configuration in the manifest."""
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
    """A consistent index of 10⁹ rows, as far as its JSON files say: 300,000 checksums, of which three have files."""
    directory = index(tmp_path, train_size=300_000 * 4000, shard_size=4000)
    checkpoint = {"fingerprint": "0" * 32, "references": None, "source": None, "shards": ["0" * 32] * 300_000}
    others = {"config": "0" * 32, "lds": None, "settings": {}, "train_dataset": None, "weights_dtype": None}
    content = {"format_version": 2, "checkpoints": {"0": checkpoint}, **others}
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


@pytest.mark.parametrize("case", TEXTS)
def test_what_a_text_can_cost_is_bounded(tmp_path: Path, bounded: Bounded, case: str) -> None:
    text, code, reason = TEXTS[case]
    (tmp_path / "text").write_text(text)
    said = bounded.run(code, tmp_path / "text")
    assert re.search(reason, said), said[:2000]
