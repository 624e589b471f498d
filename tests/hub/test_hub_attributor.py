"""An index that one process publishes gives the same scores in others, which have no training data."""

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, load_dataset, load_from_disk
from hub_server import TOKEN, Hub, client, environment, hub
from huggingface_hub import constants
from sklearn.datasets import load_digits
from test_hub_hostile import resealed
from torch import Tensor
from trak_options import trak_config
from transformers import BertConfig, BertForSequenceClassification, CLIPConfig, CLIPModel

from hf_trak import TrakAttributor
from hf_trak.errors import CheckpointMismatchError, ConfigMismatchError, HubAccessError, RefusedIndexError
from hf_trak.hub import HubCheckpoint, with_training_rows
from hf_trak.modelout_functions import CLIPModelOutput

__all__ = ["client", "hub"]  # fixtures

N = 22
OPTIONS: dict[str, Any] = {"use_cpu": True}


def tiny_bert(seed: int, hidden: int = 8) -> BertForSequenceClassification:
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=30,
        hidden_size=hidden,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=8,
        num_labels=3,
    )
    return BertForSequenceClassification(config).eval()


def sentences(start: int, stop: int) -> Dataset:
    """Turn real images of digits into word ids: the brightness of eight pixels each."""
    data = load_digits()
    words = (data.images[start:stop, 2:4, :4].reshape(stop - start, 8) + 1).astype(int)
    return Dataset.from_dict({"input_ids": words.tolist(), "labels": (data.target[start:stop] % 3).tolist()})


def targets() -> Dataset:
    return sentences(500, 505)


def files_of(model: Any, directory: Path) -> dict[str, bytes]:
    model.save_pretrained(directory)
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use as many threads as the subprocesses, which the same bits require."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Published:
    """Two checkpoints in one model repo, and an index of both."""

    def __init__(self, hub: Hub, directory: Path, **facts: Any) -> None:
        self.models = [tiny_bert(1), tiny_bert(2)]
        repo = None
        self.revisions = []
        for number, model in enumerate(self.models):
            repo = hub.put("model", "tester/model", files_of(model, directory / f"model-{number}"), private=True)
            self.revisions.append(repo.refs["main"])
        config = trak_config(
            output_dir=str(directory / "trak"), proj_dim=32, shard_size=8, per_device_batch_size=3, **OPTIONS
        )
        self.attributor = TrakAttributor(self.models[0], config, train_dataset=sentences(0, N))
        self.attributor.featurize(self.models)
        checkpoints = {i: f"tester/model@{revision}" for i, revision in enumerate(self.revisions)}
        names = {"model_name": "tester/model", "model_revision": self.revisions[0], "checkpoints": checkpoints}
        self.commit = self.attributor.push_to_hub("tester/index", private=True, token=TOKEN, **{**names, **facts})

    def scores(self, **options: Any) -> np.ndarray:
        return full(self.attributor, **options)


def full(attributor: TrakAttributor, **options: Any) -> np.ndarray:
    scored = attributor.attribute(targets(), top_k=None, **options)
    return np.stack(scored.with_format("numpy")["trak_scores"][:])


def load(model: Any = None, **options: Any) -> TrakAttributor:
    return TrakAttributor.from_pretrained("tester/index", model, token=TOKEN, **{**OPTIONS, **options})


# -- round trips -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_elsewhere_get_the_same_bits(
    hub: Hub, client: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process publishes, and two others with an empty cache and without the training data get the same scores.

    Every file is downloaded once, rank 0 alone pushes, and the token appears in no file and no output. Afterwards
    everything works offline.
    """
    published = Published(hub, tmp_path / "made")
    expected = published.scores()
    top = published.attributor.attribute(targets(), top_k=3)
    targets().save_to_disk(str(tmp_path / "targets"))
    published.models[0].save_pretrained(tmp_path / "model")
    sentences(0, N).save_to_disk(str(tmp_path / "train"))
    script = tmp_path / "job.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import logging, os, pathlib
            logging.basicConfig(level=logging.DEBUG)
            from datasets import load_from_disk
            from hf_trak import TrakAttributor, TrakConfig, push_scores
            from transformers import BertForSequenceClassification

            here, token = pathlib.Path({str(tmp_path)!r}), os.environ["SECRET"]
            options = dict(use_cpu=True)
            attributor = TrakAttributor.from_pretrained("tester/index", token=token, **options)
            assert attributor.features.processes.num_processes == 2
            targets = load_from_disk(str(here / "targets"))
            full, top = attributor.attribute(targets, top_k=None), attributor.attribute(targets, top_k=3)
            if attributor.features.processes.is_main_process:
                full.save_to_disk(str(here / "full"))
                top.save_to_disk(str(here / "top"))

            model = BertForSequenceClassification.from_pretrained(here / "model")
            config = TrakConfig(
                output_dir=str(here / "made" / "trak"), proj_dim=32, shard_size=8, per_device_batch_size=3, **options
            )
            again = TrakAttributor(model, config, train_dataset=load_from_disk(str(here / "train")))
            commit = again.push_to_hub("tester/again", private=True, token=token)
            (here / f"commit-{{again.features.processes.process_index}}").write_text(commit.oid)
            push_scores(top, "tester/scores", token=token, private=True)
            """
        )
    )
    before, home = len(hub.log), tmp_path / "elsewhere"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    done = subprocess.run(
        launch, env={**environment(hub, home), "SECRET": TOKEN}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]

    found = load_from_disk(str(tmp_path / "full")).with_format("numpy")["trak_scores"][:]
    assert np.array_equal(np.stack(found), expected)
    assert load_from_disk(str(tmp_path / "top")).to_dict() == top.to_dict()

    log = hub.log[before:]
    fetched = [
        entry.path for entry in log if entry.method == "GET" and "/datasets/tester/index/resolve/" in entry.path
    ]
    names = sorted(path.rpartition("/resolve/")[2].partition("/")[2] for path in fetched)
    shards = [f"checkpoint-{c}/train-{i:05d}-of-00003.safetensors" for c in (0, 1) for i in range(3)]
    grams = [f"checkpoint-{c}/gram.safetensors" for c in (0, 1)]
    assert names == sorted([*shards, *grams, "trak_config.json", "trak_index.json"])

    pushed = [entry.path.split("/")[4] for entry in log if entry.method == "POST" and "/commit/" in entry.path]
    assert pushed == ["again", "scores", "scores"]  # the index; the data, and then their card
    assert len([entry for entry in log if "/api/repos/create" in entry.path]) == 2
    oid = hub.repos["dataset", "tester/again"].refs["main"]
    assert {(tmp_path / f"commit-{rank}").read_text() for rank in (0, 1)} == {oid}

    assert {entry.token for entry in log if "resolve" in entry.path} == {TOKEN}
    assert TOKEN not in done.stdout + done.stderr
    assert not any(TOKEN.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert not [entry for entry in log if "telemetry" in entry.path]

    for name, value in {"HF_HOME": home, "HF_HUB_CACHE": home / "hub", "HF_HUB_OFFLINE": True}.items():
        monkeypatch.setattr(constants, name, value if isinstance(value, bool) else str(value))
    before = len(hub.log)
    assert np.array_equal(full(load(output_dir=str(tmp_path / "offline"))), expected)
    assert len(hub.log) == before


@pytest.mark.slow
def test_only_what_a_call_needs_is_downloaded(hub: Hub, client: Path, tmp_path: Path) -> None:
    published = Published(hub, tmp_path)
    attributor = load(published.models[0])
    assert hub.downloads() == ["trak_config.json", "trak_index.json"]
    assert np.array_equal(full(attributor, checkpoints=[0]), published.scores(checkpoints=[0], name="one"))
    assert sorted(hub.downloads()[2:]) == [
        "checkpoint-0/gram.safetensors", *(f"checkpoint-0/train-{i:05d}-of-00003.safetensors" for i in range(3))
    ]  # fmt: skip
    assert not hub.requests("GET", "/tester/model/")
    before = len(hub.downloads())
    again = load(published.models[0])
    assert np.array_equal(full(again, checkpoints=[0]), published.scores(checkpoints=[0], name="one"))
    assert hub.downloads()[before:] == []
    written = {path.relative_to(client).parts[0] for path in client.rglob("*") if path.is_file()}
    assert written <= {"hub", "hf_trak"}


@pytest.mark.slow
def test_training_rows_are_not_needed_and_shown_where_they_are(hub: Hub, client: Path, tmp_path: Path) -> None:
    published = Published(hub, tmp_path)
    attributor = load()
    assert len(attributor.train_dataset) == N
    by_row = attributor.attribute(targets(), top_k=2, per="train")
    assert len(by_row) == N and "input_ids" not in by_row.column_names
    assert torch.equal(attributor.self_influence(), published.attributor.self_influence())

    with_rows = load(train_dataset=sentences(0, N))
    rows = with_rows.attribute(targets(), top_k=2, method="index", per="train")
    assert rows["input_ids"][:] == sentences(0, N)["input_ids"][:]
    assert rows["trak_scores"][:] == by_row["trak_scores"][:]
    with pytest.raises(ConfigMismatchError, match="train_fingerprint"):
        load(train_dataset=sentences(1, N + 1))

    raw = Dataset.from_dict({"text": [f"digit {i}" for i in range(N)], "other": [0] * N})
    scored = attributor.attribute(targets(), top_k=2)
    shown = with_training_rows(scored, raw, ["text"])
    for row in shown:
        assert [entry["text"] for entry in row["trak_rows"]] == [f"digit {i}" for i in row["trak_indices"]]
        assert [entry["text"] for entry in row["trak_harmful_rows"]] == [
            f"digit {i}" for i in row["trak_harmful_indices"]
        ]
    with pytest.raises(ValueError, match="has 3 rows"):
        with_training_rows(scored, raw.select(range(3)))
    with pytest.raises(ValueError, match="texts"):
        with_training_rows(scored, raw, ["texts"])


@pytest.mark.slow
def test_the_training_dataset_is_found_by_name(hub: Hub, client: Path, tmp_path: Path) -> None:
    """An index names the repo and commit of rows that came from the Hub, and the name is enough to load them."""
    sentences(0, N).push_to_hub("tester/rows", token=TOKEN, private=True)
    train = load_dataset("tester/rows", split="train", token=TOKEN)
    model = tiny_bert(1)
    config = trak_config(output_dir=str(tmp_path / "trak"), proj_dim=16, shard_size=8, **OPTIONS)
    attributor = TrakAttributor(model, config, train_dataset=train).featurize()
    attributor.push_to_hub("tester/index", token=TOKEN, private=False)
    commit = hub.repos["dataset", "tester/rows"].refs["main"]
    assert f"tester/rows), revision {commit}, split train" in hub.dataset("tester/index")["README.md"].decode()
    hub.put("dataset", "tester/rows", {"data/train.csv": b"a,b\n1,2\n"})  # the index is pinned to the commit
    rows = load(model, train_dataset="tester/rows").attribute(targets(), top_k=2, per="train")
    assert rows["input_ids"][:] == train["input_ids"][:]
    with pytest.raises(HubAccessError, match="'tester/none'"):
        load(model, train_dataset="tester/none")


@pytest.mark.slow
def test_negatives_of_clip_travel_with_the_index(hub: Hub, client: Path, tmp_path: Path) -> None:
    """A task that uses training rows works without them, since the index has the embeddings that it computed."""
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={**tower, "vocab_size": 30, "max_position_embeddings": 8, "eos_token_id": 29},
        vision_config={**tower, "image_size": 8, "patch_size": 4},
        projection_dim=8,
    )
    data = load_digits()

    def pairs(start: int, stop: int) -> Dataset:
        images = np.repeat(data.images[start:stop, None] / 16.0, 3, axis=1)
        words = [[int(label) + 1, 12, 29] for label in data.target[start:stop]]
        return Dataset.from_dict(
            {"pixel_values": images, "input_ids": words, "attention_mask": [[1] * 3] * len(words)}
        )

    torch.manual_seed(0)
    model = CLIPModel(config).eval()
    arguments = trak_config(output_dir=str(tmp_path / "trak"), proj_dim=32, shard_size=8, **OPTIONS)
    attributor = TrakAttributor(model, arguments, pairs(0, 16), task=CLIPModelOutput(simulated_batch_size=6))
    attributor.featurize()
    expected = attributor.attribute(pairs(100, 103), top_k=None)
    attributor.push_to_hub("tester/index", token=TOKEN, private=False)
    found = load(model, task=CLIPModelOutput(simulated_batch_size=6)).attribute(pairs(100, 103), top_k=None)
    assert found["trak_scores"][:] == expected["trak_scores"][:]
    with pytest.raises(ConfigMismatchError, match="task"):
        load(model, task=CLIPModelOutput(simulated_batch_size=7))


@pytest.mark.slow
def test_output_directory_of_a_run_and_a_clone(hub: Hub, client: Path, tmp_path: Path) -> None:
    published = Published(hub, tmp_path)
    expected = published.scores()
    own = TrakAttributor.from_pretrained(
        str(tmp_path / "trak"), published.models[0], checkpoints=published.models, per_device_batch_size=3, **OPTIONS
    )
    assert np.array_equal(full(own, name="again"), expected)
    clone = tmp_path / "clone"
    for name, data in hub.dataset("tester/index").items():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_bytes(data)
    before = len(hub.log)
    copied = TrakAttributor.from_pretrained(str(clone), published.models[0], checkpoints=published.models, **OPTIONS)
    assert np.array_equal(full(copied), expected)
    assert len(hub.log) == before


# -- the right model -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_weights_are_compared_with_the_fingerprint(hub: Hub, client: Path, tmp_path: Path) -> None:
    """Targets are never scored with other weights than those of the features."""
    published = Published(hub, tmp_path, checkpoints={})
    with pytest.raises(CheckpointMismatchError, match="not the base that was fine-tuned"):
        load(tiny_bert(3))
    with pytest.raises(CheckpointMismatchError, match="same dtype"):
        load(tiny_bert(1).bfloat16())
    with pytest.raises(ConfigMismatchError, match="Expected the model that the index was made with"):
        load(tiny_bert(1, hidden=16))
    with pytest.raises(ConfigMismatchError, match="task"):
        load(published.models[0], task="loss")
    attributor = load()
    with pytest.raises(CheckpointMismatchError, match=r"model_id 1.*`checkpoints=`"):
        full(attributor)
    expected = published.scores()
    for checkpoints in (published.models, {1: HubCheckpoint("tester/model", published.revisions[1], token=TOKEN)}):
        assert np.array_equal(full(load(checkpoints=checkpoints), name=f"given-{len(checkpoints)}"), expected)
    for checkpoints in ({7: published.models[0]}, [published.models[0]]):
        with pytest.raises(ValueError, match=r"model_ids \[0, 1\]|\[7\]"):
            load(checkpoints=checkpoints)


@pytest.mark.slow
def test_the_model_is_found_by_name(hub: Hub, client: Path, tmp_path: Path) -> None:
    published = Published(hub, tmp_path)
    expected = published.scores(checkpoints=[0])
    for model in (None, str(tmp_path / "model-0")):
        assert np.array_equal(
            full(load(model, output_dir=str(tmp_path / f"{model is None}")), checkpoints=[0]), expected
        )
    with pytest.raises(HubAccessError, match="model repo 'tester/nothing' does not exist"):
        load("tester/nothing")
    published.attributor.push_to_hub("tester/nameless", token=TOKEN, private=False)
    with pytest.raises(ValueError, match=r"does not say where its model is.*`model=`"):
        TrakAttributor.from_pretrained("tester/nameless", token=TOKEN, **OPTIONS)
    hub.repos.pop(("model", "tester/model"))
    with pytest.raises(HubAccessError, match="or is private"):
        TrakAttributor.from_pretrained(
            "tester/index", token=TOKEN, revision=published.commit.oid, **OPTIONS
        ).attribute(targets(), checkpoints=[1])


@pytest.mark.slow
def test_a_name_of_the_index_is_never_taken_for_a_directory(
    hub: Hub, client: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = Published(hub, tmp_path / "made", model_name="secret/model", model_revision="main")
    monkeypatch.chdir(tmp_path)
    published.models[0].save_pretrained(tmp_path / "secret" / "model")
    with pytest.raises(HubAccessError, match="model repo 'secret/model'"):
        load()
    index = hub.dataset("tester/index")
    path = resealed(json.loads(index["trak_config.json"].replace(b'"secret/model"', b'"../secret/model"')))
    hub.put("dataset", "tester/index", {**index, "trak_config.json": path})
    with pytest.raises(RefusedIndexError, match="model_name"):
        load()


@pytest.mark.slow
def test_settings_come_from_the_index(hub: Hub, client: Path, tmp_path: Path) -> None:
    published = Published(hub, tmp_path)
    for name, value in (("proj_dim", 8), ("seed", 1), ("shard_size", 2), ("no_such", 1)):
        with pytest.raises(ValueError, match=f"{name}.*cannot be chosen"):
            load(**{name: value})
    args = load(published.models[0]).args
    assert (args.proj_type, args.proj_dim, args.per_device_batch_size) == ("sjlt", 32, 3)
    other = load(published.models[0], lambda_relative=3.0, output_dir=str(tmp_path / "work"))
    assert other.args.lambda_relative == 3.0 and other.args.output_dir == str(tmp_path / "work")
    assert not np.allclose(full(other, checkpoints=[0]), published.scores(checkpoints=[0]))
    assert (tmp_path / "work" / "experiments").is_dir()


def first_logit(outputs: Any, batch: Any) -> Tensor:
    return outputs.logits[:, 0]


@pytest.mark.slow
def test_a_task_of_your_own_has_to_be_given_again(hub: Hub, client: Path, tmp_path: Path) -> None:
    model = tiny_bert(1)
    config = trak_config(output_dir=str(tmp_path / "trak"), proj_dim=16, shard_size=8, **OPTIONS)
    attributor = TrakAttributor(model, config, train_dataset=sentences(0, N), task=first_logit).featurize()
    attributor.push_to_hub("tester/index", token=TOKEN, private=False)
    with pytest.raises(ValueError, match="Pass the same one as `task=`"):
        load(model)
    assert np.array_equal(full(load(model, task=first_logit)), full(attributor))
    with pytest.raises(ValueError, match="published already"):
        load(model, task=first_logit).push_to_hub("tester/other", token=TOKEN, private=False)
