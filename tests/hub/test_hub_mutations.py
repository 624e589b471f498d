"""Damage to any file of a published index leads to the same scores, or to a refusal that names a file."""

import contextlib
import itertools
import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from damage import Damage, swapped
from datasets import Dataset
from file_mutations import mutations
from hub_server import TOKEN, Hub, client, hub
from test_hub_hostile import resealed
from trak_options import trak_config

from hf_trak import TrakAttributor
from hf_trak.errors import HfTrakError
from hf_trak.hub import open_repo
from hf_trak.hub.index_store import IndexStore
from hf_trak.runtime.processes import Processes
from hf_trak.scores.scorer import Scorer
from hf_trak.store.store import FeatureStore

__all__ = ["client", "hub"]  # fixtures

N, M, IN, HIDDEN, CLASSES = 10, 3, 5, 4, 3
OPTIONS: dict[str, Any] = {"use_cpu": True}
UNREAD = ("README.md", ".gitattributes", "checkpoint.json")
"""Files of an index that scores do not depend on."""


class Net(torch.nn.Module):
    """A perceptron whose weights are a formula, so that no random generator has to stay the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(IN, HIDDEN)
        self.last = torch.nn.Linear(HIDDEN, CLASSES)

    def forward(self, pixel_values: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self.last(torch.tanh(self.first(pixel_values))))


def state(member: int) -> dict[str, torch.Tensor]:
    """Weights of checkpoint `member`: multiples of 1/64, exact in every precision."""
    numbers = itertools.count()

    def weight() -> float:
        return ((next(numbers) * (37 + 2 * member) + 11 * member) % 97 - 48) / 64

    shapes = {name: value.shape for name, value in Net().state_dict().items()}
    return {
        name: torch.tensor([weight() for _ in range(shape.numel())]).reshape(shape) for name, shape in shapes.items()
    }


def network() -> Net:
    model = Net()
    model.load_state_dict(state(0))
    return model.eval()


def rows(start: int, count: int) -> Dataset:
    pixels = [[((17 * i + 5 * j * j) % 31 - 15) / 16 for j in range(IN)] for i in range(start, start + count)]
    return Dataset.from_dict({"pixel_values": pixels, "labels": [i % CLASSES for i in range(start, start + count)]})


def publish(hub: Hub, directory: Path, seed: int) -> None:
    """Publish an index of two checkpoints, and write its files into a directory."""
    args = trak_config(
        output_dir=str(directory / "run"), proj_dim=8, shard_size=4, per_device_batch_size=4, seed=seed, **OPTIONS
    )
    attributor = TrakAttributor(network(), args, train_dataset=rows(0, N), task="image_classification")
    attributor.featurize([state(0), state(1)]).push_to_hub("tester/index", token=TOKEN, private=False)
    for name, data in hub.dataset("tester/index").items():
        (directory / "index" / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / "index" / name).write_bytes(data)


def below(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def scored(store: IndexStore) -> np.ndarray:
    """Score three targets with existing features over both checkpoints, as `attribute` does."""
    settings, processes = store.manifest.settings, Processes(use_cpu=True)
    scorer = Scorer(store, processes, processes.device, settings["lambda_relative"])
    ids = scorer.ensemble(None)
    features = torch.sin(torch.arange(3.0 * store.config["proj_dim"])).reshape(3, -1)
    targets = [scorer.precondition(model_id, lambda: features, 3) for model_id in ids]
    prints = [store.checkpoint_info(model_id)["fingerprint"] for model_id in ids]  # `attribute` compares them
    blocks = torch.cat([block for _, _, block in scorer.blocks(ids, targets)])
    return np.array([*blocks.flatten().tolist(), *prints])


def attributed(name: str, work: Path) -> np.ndarray:
    """Run all of `attribute` on an index with an empty cache."""
    shutil.rmtree(work, ignore_errors=True)
    states = [state(0), state(1)]
    attributor = TrakAttributor.from_pretrained(name, network(), checkpoints=states, output_dir=str(work), **OPTIONS)
    scored = attributor.attribute(rows(100, M), top_k=None)
    return np.stack(scored.with_format("numpy")["trak_scores"][:])


def check(
    intact: Path, workspace: Path, damages: Iterable[Damage], result: Callable[[Path], np.ndarray]
) -> Counter[str]:
    """Apply each damage to a copy, and count the outcomes."""
    expected = result(intact)
    seen: Counter[str] = Counter()
    for damage in damages:
        copy = workspace / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(intact, copy)
        damage.act(copy)
        try:
            found = result(copy)
        except HfTrakError as error:
            touched = [file for file in damage.files if file.name not in UNREAD]
            assert any(file.as_posix() in str(error) for file in touched), f"{damage}: {error}"
            seen["refused"] += 1
        else:
            assert np.array_equal(found, expected), f"{damage} gives other scores in silence"
            seen["the same"] += 1
    return seen


@pytest.fixture
def published(hub: Hub, client: Path, tmp_path: Path) -> Path:
    """Make the files of an index, and those of one with another seed."""
    publish(hub, tmp_path / "other", seed=1)
    publish(hub, tmp_path / "made", seed=0)
    return tmp_path / "made" / "index"


def over_http(hub: Hub, tmp_path: Path, whole: bool = False) -> Callable[[Path], np.ndarray]:
    """Publish the files as a new commit; only the damaged ones are downloaded."""

    def result(directory: Path) -> np.ndarray:
        hub.put("dataset", "tester/index", below(directory))
        if whole:
            return attributed("tester/index", tmp_path / "work")
        return scored(open_repo("tester/index", tmp_path / "work"))

    return result


def from_copy(tmp_path: Path) -> Callable[[Path], np.ndarray]:
    return lambda directory: attributed(str(directory), tmp_path / "work")


@pytest.mark.parametrize(
    "count", [pytest.param(150, marks=pytest.mark.slow), pytest.param(3000, marks=pytest.mark.exhaustive)]
)
def test_mutations_of_a_published_index(hub: Hub, client: Path, published: Path, tmp_path: Path, count: int) -> None:
    """The files are read over HTTP, and for every tenth damage all of `attribute` runs, too."""
    foreign = tmp_path / "other" / "index"
    seen = check(published, tmp_path, drawn(published, count, foreign), over_http(hub, tmp_path))
    assert seen["refused"] > count // 2 and seen["the same"] > count // 10
    tenth = itertools.islice(drawn(published, count, foreign), 0, None, 10)
    check(published, tmp_path, tenth, over_http(hub, tmp_path, whole=True))


@pytest.mark.exhaustive
def test_mutations_of_a_copy(hub: Hub, client: Path, published: Path, tmp_path: Path) -> None:
    check(published, tmp_path, drawn(published, 3000, tmp_path / "other" / "index", seed=1), from_copy(tmp_path))


def drawn(directory: Path, count: int, foreign: Path, seed: int = 0) -> Iterator[Damage]:
    return itertools.islice(mutations(directory, seed=seed, foreign=foreign), count)


ODD = (None, -1, 0, 10**19, 1e308, "", "x" * 300, "../x", [], {}, True, [[]], {"a": {}}, [None] * 3)


@pytest.mark.parametrize(
    "count", [pytest.param(150, marks=pytest.mark.slow), pytest.param(4000, marks=pytest.mark.exhaustive)]
)
def test_odd_values_are_refused_in_words(hub: Hub, client: Path, published: Path, tmp_path: Path, count: int) -> None:
    """Values of other types and sizes in the JSON files, with checksums that fit, end in no unexpected error.

    The publisher of an index may set λ freely. Everything else that scores depend on has to agree with the index.
    """
    rng, expected = random.Random(count), attributed(str(published), tmp_path / "work")
    seen: Counter[str] = Counter()
    for _ in range(count):
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(published, copy)
        path = copy / rng.choice(["trak_config.json", "trak_index.json"])
        content = json.loads(path.read_text())
        place, key = rng.choice([found for found in places(content) if found[1] != "checksum"])
        before, place[key] = place[key], rng.choice(ODD)
        path.write_bytes(resealed(content))
        with contextlib.suppress(HfTrakError, TypeError):  # where the configuration can be read, the manifest fits it
            manifest = json.loads((copy / "trak_index.json").read_text())
            manifest["config"] = FeatureStore.load(copy).config_hash
            (copy / "trak_index.json").write_bytes(resealed(manifest))
        try:
            found = attributed(str(copy), tmp_path / "work")
        except HfTrakError:
            seen["refused"] += 1
        except ValueError as error:
            assert re.search("was made with the task|λ is inf", str(error)), (key, before, error)
            seen["refused"] += 1
        else:
            if not np.array_equal(found, expected):
                assert key == "lambda_relative", (key, before)
            seen["used"] += 1
    assert seen["refused"] > count // 2


def places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the place of every value: the object or list that contains it, and its key."""
    for key in content if isinstance(content, dict) else range(len(content)):
        yield content, key
        if isinstance(content[key], dict | list):
            yield from places(content[key])


# -- exchanged checkpoints -------------------------------------------------------------------------------------------


def exchange_in_manifest(directory: Path) -> None:
    """Exchange two checkpoints in the manifest, with a checksum that fits, as an attacker can."""
    path = directory / "trak_index.json"
    content = json.loads(path.read_text())
    checkpoints = content["checkpoints"]
    checkpoints["0"], checkpoints["1"] = checkpoints["1"], checkpoints["0"]
    path.write_bytes(resealed(content))


def exchange_files(directory: Path) -> None:
    swapped(Path("checkpoint-0"), Path("checkpoint-1")).act(directory)


def exchange_both(directory: Path) -> None:
    exchange_files(directory)
    exchange_in_manifest(directory)


@pytest.mark.parametrize("act", [exchange_files, exchange_in_manifest, exchange_both])
def test_exchanged_ids_are_refused(hub: Hub, client: Path, published: Path, tmp_path: Path, act: Any) -> None:
    """The random matrix depends on the id, so features under another id belong to another projection."""
    act(published)
    for result in (over_http(hub, tmp_path), from_copy(tmp_path)):
        with pytest.raises(HfTrakError, match=r"checkpoint-[01]/(train-|gram)|model id|fingerprint"):
            result(published)
