"""Whatever happens to the files of a store: the same scores, or an error that names a file. Never another number."""

import itertools
import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import Damage
from file_mutations import every_header_flip, mutations
from torch import Tensor

from hf_trak.errors import HfTrakError
from hf_trak.runtime.processes import Processes
from hf_trak.scores.scorer import Scorer
from hf_trak.store.references import read_references, write_references
from hf_trak.store.store import FeatureStore

N, M, K, SHARD = 11, 3, 6, 4
TARGETS = "d" * 32


def config(seed: int) -> dict[str, Any]:
    return {"train_size": N, "proj_dim": K, "feature_dtype": "float32", "shard_size": SHARD, "seed": seed}


def make_store(directory: Path, seed: int = 0) -> None:
    """Two checkpoints with Gram matrices and references, and two experiments."""
    generator = torch.Generator().manual_seed(seed)
    store = FeatureStore.open(directory, config(seed))
    for model_id in (0, 1):
        store.register_checkpoint(model_id, f"weights {model_id} of {seed}", "/out/checkpoint")
        write_references(store, model_id, {"negatives": torch.randn(2, 3, generator=generator)})
        matrices = [store.train(model_id)]
        for name in ("exam", "quiz"):
            matrices.append(store.targets(name, model_id, M, TARGETS, {"collation": {"rows": [0], "norm": 1.5}}))
        for shards in matrices:
            for index in range(len(shards)):
                rows = len(shards.plan.rows(index))
                shards.write(index, torch.randn(rows, K, generator=generator), torch.rand(rows, generator=generator))
        features = torch.cat([shard.grads for shard in store.train(model_id)]).double()
        store.write_gram(model_id, features.T @ features, N)


def scores_of(directory: Path) -> Tensor:
    """As `attribute` reads a store whose features are all there."""
    processes = Processes(use_cpu=True)
    store = FeatureStore.open(directory, config(0))
    scorer = Scorer(store, processes, processes.device, 0.3)
    ids = scorer.ensemble(None)
    targets, read = [], []
    for model_id in ids:
        shards = store.targets("exam", model_id, M, TARGETS, {"collation": {"rows": [0], "norm": 1.5}})
        shards.require_complete("Attribute again.")
        references = read_references(store, model_id)
        if references is None:
            raise FileNotFoundError(f"{store.checkpoint_dir(model_id) / 'references.safetensors'} is missing")
        read.append(references["negatives"].flatten())
        targets.append(scorer.precondition(model_id, lambda s=shards: torch.cat([x.grads for x in s]), M))
    scores = torch.cat([block for _, _, block in scorer.blocks(ids, targets)])
    return torch.cat([scores.flatten(), *read])


def check(
    directory: Path, workspace: Path, damages: Iterable[Damage], result: Callable[[Path], Tensor], expected: Tensor
) -> Counter[str]:
    """Do each damage to a copy; count what came of them."""
    seen: Counter[str] = Counter()
    for damage in damages:
        copy = workspace / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(directory, copy)
        damage.act(copy)
        try:
            found = result(copy)
        except (HfTrakError, OSError) as error:
            touched = [str(file) for file in damage.files]
            folders = [str(file.parent) for file in damage.files if file.parent != Path(".")]
            assert any(part in str(error) for part in touched + folders), f"{damage}: the error names no file: {error}"
            seen["refused"] += 1
            continue
        assert torch.equal(found, expected), f"{damage}: silently other numbers"
        seen["the same"] += 1
    return seen


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    logging.getLogger("hf_trak").setLevel(logging.ERROR)
    mine, other = (tmp_path_factory.mktemp("stores") / name for name in ("mine", "other"))
    make_store(mine)
    make_store(other, seed=1)
    return mine, other


@pytest.mark.slow
@pytest.mark.parametrize("count", [200, pytest.param(1200, marks=pytest.mark.slow)])
def test_mutations_of_a_store(stores: tuple[Path, Path], tmp_path: Path, count: int) -> None:
    mine, other = stores
    drawn = itertools.islice(mutations(mine, seed=0, foreign=other), count)
    seen = check(mine, tmp_path, drawn, scores_of, scores_of(mine))
    assert seen["refused"] > count / 2  # damage to files that these scores need, which is most of them


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(1, 11))
def test_twenty_thousand_mutations_of_a_store(stores: tuple[Path, Path], tmp_path: Path, seed: int) -> None:
    mine, other = stores
    drawn = itertools.islice(mutations(mine, seed=seed, foreign=other), 2000)
    assert check(mine, tmp_path, drawn, scores_of, scores_of(mine))["refused"] > 1000


@pytest.mark.exhaustive
def test_a_flip_in_every_header_byte_of_a_store(stores: tuple[Path, Path], tmp_path: Path) -> None:
    mine, _ = stores
    seen = check(mine, tmp_path, every_header_flip(mine), scores_of, scores_of(mine))
    assert seen["refused"] > 1000


def test_a_file_altered_in_place_with_its_times_set_back_is_read_again(
    stores: tuple[Path, Path], tmp_path: Path
) -> None:
    copy = tmp_path / "store"
    shutil.copytree(stores[0], copy)
    expected = scores_of(copy)
    path = copy / "checkpoint-0" / "train-00001-of-00003.safetensors"
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[-30] ^= 64
    with open(path, "r+b") as file:
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    with pytest.raises(HfTrakError, match="train-00001-of-00003"):
        assert not torch.equal(scores_of(copy), expected)
