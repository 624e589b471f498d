"""Copies of an index from untrusted sources: nothing is written into them or through them, results that they contain
are not used as results of this machine, and links in them are not followed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hub_server import TOKEN, Hub, client, hub
from huggingface_hub import constants, snapshot_download
from test_hub_attributor import OPTIONS, Published, full
from test_hub_attributor import one_thread as one_thread
from test_hub_hostile import below
from test_hub_index import make_store

from hf_trak import TrakAttributor
from hf_trak.cli.main import main
from hf_trak.errors import RefusedIndexError
from hf_trak.hub import open_repo, pull_index, push_index
from hf_trak.hub.access import address_without_secrets, without_secrets
from hf_trak.hub.files import LocalFiles
from hf_trak.hub.index_store import open_index
from hf_trak.store.store import FeatureStore

__all__ = ["client", "hub"]  # fixtures


_made: dict[str, Any] = {}


@pytest.fixture
def published(hub: Hub, client: Path, tmp_path_factory: pytest.TempPathFactory) -> Published:
    """Publish an index of two checkpoints; it is made only once."""
    if not _made:
        _made["run"] = Published(hub, tmp_path_factory.mktemp("made"))
        _made["files"] = dict(hub.dataset("tester/index"))
        _made["scores"] = _made["run"].scores(name="first")
    hub.put("dataset", "tester/index", _made["files"])
    return _made["run"]


@pytest.fixture
def copy(hub: Hub, published: Published, tmp_path: Path) -> Path:
    """Clone the index into a directory."""
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


@pytest.mark.slow
def test_nothing_is_written_into_a_copy(copy: Path, published: Published, client: Path) -> None:
    """Targets and scores are kept beside the Hub's cache, under the name of the copy and a digest of it."""
    before = content(copy)
    (copy / "checkpoint-0" / ".hf_trak-tmp-elsewhere").write_bytes(b"theirs")
    attributor = from_copy(copy, published)
    assert np.array_equal(full(attributor), _made["scores"])
    assert {**before, "checkpoint-0/.hf_trak-tmp-elsewhere": b"theirs"} == content(copy)
    work = Path(attributor.args.output_dir)
    assert work == attributor.features.store.output_dir and work.parent == client / "hf_trak" / "copy"
    assert (work / "experiments").is_dir() and (work / "scores").is_dir()


def test_another_index_of_the_same_name_has_another_place(
    hub: Hub, copy: Path, published: Published, tmp_path: Path
) -> None:
    one = LocalFiles(copy).work_dir
    assert LocalFiles(clone(hub, tmp_path / "elsewhere" / "copy")).work_dir == one
    published.attributor.push_to_hub("tester/index", token=TOKEN, lds=0.25, private=False)
    assert LocalFiles(clone(hub, tmp_path / "later" / "copy")).work_dir != one


def test_features_that_a_copy_brings_are_not_used(copy: Path, published: Published) -> None:
    """The copy contains target features and scores of another run, with the name and fingerprint of these targets."""
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
    """Write other features into a file, with metadata that fit."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    from hf_trak.store.sealed import sealed
    from hf_trak.store.shards import checksums

    with safe_open(path, framework="pt") as file:
        metadata = json.loads(file.metadata()["hf_trak"])
        tensors = {name: 100 * file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del metadata["checksum"]
    metadata = sealed({**metadata, "tensors": checksums(tensors)})
    save_file(tensors, path, metadata={"hf_trak": json.dumps(metadata)})


@pytest.mark.parametrize("where", [".", "work", "checkpoint-0/../deep/er"])
def test_the_copy_itself_is_no_output_directory(copy: Path, published: Published, where: str) -> None:
    with pytest.raises(ValueError, match=r"inside the copy .* of an index.*Leave `output_dir` out"):
        from_copy(copy, published, output_dir=str(copy / where))


def test_a_copy_is_no_run_of_your_own(copy: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A record of arguments in a copy is not followed."""
    record = {"arguments": {"model_name_or_path": "evil/model", "dataset_name": "evil/rows"}, "trak": {}}
    (copy / "featurize.json").write_text(json.dumps(record))
    for command in ("attribute", "featurize"):
        assert main([command, "--output_dir", str(copy)]) == 1
        assert "is a copy of a published index" in capsys.readouterr().err


def test_a_copy_is_published_with_the_settings_that_it_came_with(
    hub: Hub, copy: Path, published: Published, client: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published.attributor.args, "lambda_relative", 0.125)
    published.attributor.push_to_hub("tester/index", token=TOKEN, lds=0.25, private=False)
    clone(hub, copy)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    (copy / "featurize.json").write_text('{"arguments": {}, "trak": {"lambda_relative": 7.0}}')
    assert main(["push", str(copy), "--repo_id", "tester/fork", "--no_private"]) == 0
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
    """The files of a snapshot are links to the blobs of its repo. Links to other places are refused."""
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


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["out/model", "./out/model", "out", "../out/model", "out/run/model", "~/model"])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_paths_of_models_are_not_published_as_repos(
    hub: Hub, client: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, elsewhere: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """This holds in the directory that the paths are relative to, and in another one."""
    (tmp_path / "here" / "out" / "run" / "model").mkdir(parents=True)
    (tmp_path / "here" / "out" / "model").mkdir()
    store = make_store(tmp_path / "here" / "store", model_name=name, model_revision=None)
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / ("there" if elsewhere else "here"))
    push_index(store, "tester/index", token=TOKEN, private=False)
    assert json.loads(hub.dataset("tester/index")["trak_config.json"])["model_name"] is None
    card = hub.dataset("tester/index")["README.md"].decode()
    assert f"huggingface.co/{name}" not in card and "not named" in card
    assert "pass `model_name=`" in caplog.text


@pytest.mark.slow
def test_repos_of_models_are_published(hub: Hub, client: Path, tmp_path: Path) -> None:
    """A name counts as a repo if it has a commit, is in the cache, or was named by an earlier index."""

    def name_of(repo: str) -> Any:
        return json.loads(hub.dataset(repo)["trak_config.json"])["model_name"]

    push_index(make_store(tmp_path / "a"), "tester/index", token=TOKEN, private=False)
    assert name_of("tester/index") == "tester/model"
    cached = make_store(tmp_path / "b", model_name="my/model", model_revision=None)
    Path(constants.HF_HUB_CACHE, "models--my--model").mkdir(parents=True)
    push_index(cached, "tester/cached", token=TOKEN, private=False)
    assert name_of("tester/cached") == "my/model"
    shutil.rmtree(Path(constants.HF_HUB_CACHE, "models--my--model"))
    pull_index("tester/cached", tmp_path / "pulled")
    push_index(FeatureStore.load(tmp_path / "pulled"), "tester/fork", token=TOKEN, private=False)
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
