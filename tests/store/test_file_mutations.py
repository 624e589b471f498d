"""Damage to curvatures, search indexes, banks and caches: the same numbers, or an error that names a file."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from file_mutations import mutations
from test_store_mutations import check
from torch import Tensor

from hf_trak.curvature.blocks import CurvatureBlocks, DiagonalBlock, KroneckerBlock
from hf_trak.curvature.files import CurvatureFiles
from hf_trak.evaluation import Bank, random_subsets
from hf_trak.featurize.reranking import SavedShortlist
from hf_trak.hub.remote_rows import ParquetRows, RangedFile, RepoFile
from hf_trak.scores.scored_dataset import TOP_K_COLUMNS
from hf_trak.scores.search import GradientSearch
from hf_trak.store.shard_set import ShardSet
from hf_trak.store.shards import ShardPlan
from hf_trak.store.store import FeatureStore

N, M = 12, 4


def curvature_files(directory: Path, seed: int) -> CurvatureFiles:
    return CurvatureFiles(directory / "curvature" / "0", {"kind": "ekfac", "checkpoint": f"weights {seed}"})


def make_curvature(directory: Path, seed: int) -> None:
    """Three blocks of one shape, and two diagonal ones of one shape."""
    generator = torch.Generator().manual_seed(seed)
    names = ("up", "up", "down")
    blocks = CurvatureBlocks(
        tuple(KroneckerBlock(f"{name}.weight", 6 * i, 2, 3, 3) for i, name in enumerate(names)),
        tuple(DiagonalBlock(f"{name}.bias", 18 + 2 * i, 2) for i, name in enumerate(("up", "down"))),
    )
    files = curvature_files(directory, seed)
    for index in range(3):
        values, left, right = (torch.rand(size, generator=generator) for size in ((2, 3), (2, 2), (3, 3)))
        files.write_block(blocks, index, values, (left, right))
    files.write_diagonal(blocks, [torch.rand(2, generator=generator) for _ in range(2)])
    files.write(blocks, N, {"counts": [N] * 3, "scale": 1.0})


def read_curvature(directory: Path) -> Tensor:
    found = curvature_files(directory, 0).read()
    bases = [basis for one in found.kronecker for basis in (one.bases or ())]
    values = [values for _, values in found.items()]
    starts = torch.tensor([block.start for block, _ in found.items()])
    return torch.cat([*(one.flatten() for one in (*bases, *values)), starts, torch.tensor([found.scale, found.rows])])


def make_search(directory: Path, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shards = ShardSet(directory / "rows", "train", ShardPlan(N, N), M, torch.float32, {"weights": seed})
    shards.write(0, torch.randn(N, M, generator=generator), torch.ones(N))
    GradientSearch.build([shards], [0], f"features {seed}", "Flat").save(directory / "search")


def read_search(directory: Path) -> Tensor:
    found = GradientSearch.load(directory / "search", "features 0")
    return torch.from_numpy(found.index.faiss_index.reconstruct_n(0, N)).clone() + sum(found.model_ids)


def bank_rows(count: int, seed: int) -> Dataset:
    return Dataset.from_dict({"x": [i + seed for i in range(count)]})


def make_bank(directory: Path, seed: int) -> None:
    """Two parts of one shape, and a repeat."""
    bank = Bank.create(directory / "bank", bank_rows(N, seed), bank_rows(M, seed), {"seed": seed})
    masks = random_subsets(N, 3, 0.5)

    def retrain(mask: np.ndarray, training_seed: int) -> np.ndarray:
        return np.random.default_rng([seed, training_seed, int(mask.sum())]).normal(size=M)

    bank.add_part("first", masks)
    bank.add_part("other", masks)
    bank.add_part("again", masks, seed=9, repeat_of="first")
    for name in bank.parts:
        assert bank.build(name, retrain)


def read_bank(directory: Path) -> Tensor:
    bank = Bank(directory / "bank")
    bank.check_rows(bank_rows(N, 0), bank_rows(M, 0))
    parts = [bank.part(name) for name in ("first", "other", "again")]
    numbers = [array.flatten().astype(np.float64) for one in parts for array in (one.outputs, one.masks, one.seeds)]
    said = [len(repr((one.protocol, one.repeat_of, bank.recipe, bank.described))) for one in parts]
    return torch.from_numpy(np.concatenate([*numbers, said]))


@functools.cache
def parquet_file(seed: int, place: int) -> bytes:
    table = pa.table({"x": np.random.default_rng([seed, place]).normal(size=N)})
    pq.write_table(table, sink := pa.BufferOutputStream(), row_group_size=N // 2)
    return sink.getvalue().to_pybytes()


class LocalRows(ParquetRows):
    """Rows of two files whose bytes are at hand instead of on the Hub."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.data = [parquet_file(seed, place) for place in range(2)]
        files = [RepoFile(f"{place}.parquet", len(data)) for place, data in enumerate(self.data)]
        super().__init__(cast(Any, None), "user/rows", f"commit {seed}", files, directory / "rows")

    def _open(self, place: int) -> RangedFile:
        return RangedFile(len(self.data[place]), lambda part: self.data[place][part.start : part.stop])


def read_rows(directory: Path, seed: int = 0) -> Tensor:
    return torch.from_numpy(LocalRows(directory, seed).read(range(2 * N))["x"].to_numpy())


def shortlist(directory: Path, seed: int) -> SavedShortlist:
    config = {"train_size": N, "proj_dim": M, "feature_dtype": "float32", "shard_size": N}
    return SavedShortlist(FeatureStore.open(directory / "store", config), "exam", {"seed": seed}, M, 3)


def make_shortlist(directory: Path, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, N, (M, 3))
    shortlist(directory, seed).write(
        Dataset.from_dict({name: (values + i).tolist() for i, name in enumerate(TOP_K_COLUMNS)})
    )


def read_shortlist(directory: Path) -> Tensor:
    found = shortlist(directory, 0).read()
    return torch.tensor([found[name][:] for name in TOP_K_COLUMNS], dtype=torch.float64)


@dataclass(frozen=True)
class Kind:
    """One kind of file: `make(directory, seed)` writes some, `read(directory)` reads those of seed 0."""

    make: Callable[[Path, int], object]
    read: Callable[[Path], Tensor]
    count: int
    """Number of mutations in the default run."""
    mends: bool = False
    """Whether damage is mended rather than refused."""


KINDS = {
    "curvature": Kind(make_curvature, read_curvature, 800),
    "search": Kind(make_search, read_search, 500),
    "bank": Kind(make_bank, read_bank, 200),
    "rows": Kind(lambda directory, seed: read_rows(directory, seed), read_rows, 200, mends=True),
    "shortlist": Kind(make_shortlist, read_shortlist, 300),
}


def mutate(name: str, directory: Path, count: int, seed: int) -> None:
    """Draw mutations of one kind of files: none may be silent, none may raise another error."""
    if name == "search":
        pytest.importorskip("faiss")
    kind = KINDS[name]
    mine, other = directory / "mine", directory / "other"
    kind.make(mine, 0)
    kind.make(other, 1)
    drawn = itertools.islice(mutations(mine, seed=seed, foreign=other), count)
    seen = check(mine, directory, drawn, kind.read, kind.read(mine))
    assert sum(seen.values()) == count
    assert (seen["the same"] == count) if kind.mends else (seen["refused"] > 0.2 * count)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_two_thousand_mutations(tmp_path: Path, name: str) -> None:
    mutate(name, tmp_path, KINDS[name].count, seed=0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("seed", range(1, 11))
def test_twenty_thousand_mutations(tmp_path: Path, name: str, seed: int) -> None:
    mutate(name, tmp_path, KINDS[name].count, seed)
