"""Training loops of one's own: rows and collator come from the `DataLoader`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from digit_models import digits, make, trained_net
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from trak_options import trak_config

from hf_trak import TrakAttributor

QUICK: dict[str, Any] = {"use_cpu": True, "proj_dim": 64, "shard_size": 16}


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A collator that reads a column which is no argument of the model."""
    pixels = torch.tensor(np.array([row["pixel_values"] for row in rows]), dtype=torch.float32)
    assert all(row["source"] in ("scan", "photo", "form") for row in rows)
    return {"pixel_values": pixels, "labels": torch.tensor([row["labels"] for row in rows])}


def features(own: TrakAttributor) -> torch.Tensor:
    return torch.cat([shard.grads for shard in own.featurize().features.store.train(0)])


@pytest.mark.parametrize("prepared", [False, True])
def test_an_accelerate_loop(prepared: bool, tmp_path: Path) -> None:
    rows, net = digits(0, 40), trained_net(digits(0, 40))
    loader: Any = DataLoader(rows, batch_size=8, shuffle=True, collate_fn=collate)
    if prepared:
        loader = Accelerator(cpu=True).prepare(loader)
    config = trak_config(str(tmp_path / "loader"), per_device_batch_size=5, **QUICK)
    own = TrakAttributor(net, config, dataloader=loader, task="image_classification")
    assert torch.equal(features(own), features(make(net, tmp_path / "rows", rows)))
    scored = own.attribute(digits(0, 3), top_k=1)
    assert [one[0] for one in scored["trak_indices"]] == [0, 1, 2]
    resumed = TrakAttributor(net, config, dataloader=loader, task="image_classification").featurize()
    assert len(resumed.features.store.train(0)) == 3


def test_tensors(tmp_path: Path) -> None:
    rows = digits(0, 20)
    pixels = torch.tensor(np.array(rows["pixel_values"]), dtype=torch.float32)
    loader = DataLoader(TensorDataset(pixels, torch.tensor(rows["labels"])), batch_size=4)
    net = trained_net(rows)
    config = trak_config(str(tmp_path / "loader"), per_device_batch_size=5, **QUICK)
    own = TrakAttributor(net, config, dataloader=loader, task="image_classification")
    assert torch.allclose(features(own), features(make(net, tmp_path / "rows", rows)), rtol=1e-5, atol=1e-6)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(())


def test_what_is_no_loader_of_rows(tmp_path: Path) -> None:
    net, config = trained_net(digits(0, 20)), trak_config(str(tmp_path), **QUICK)
    some = SubsetRandomSampler(range(10))
    given: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        ([1, 2], {}, TypeError, "`dataloader` is a list"),
        (DataLoader(Stream()), {}, TypeError, "loads a Stream, a stream without row numbers"),
        (
            DataLoader(digits(0, 20), sampler=some),
            {},
            ValueError,
            "draws 10 of the 20 rows of its dataset, by a Subset",
        ),
        (
            DataLoader(digits(0, 20), batch_sampler=BatchSampler(some, 5, False)),
            {},
            ValueError,
            "draws 10 of the 20 rows",
        ),
        (DataLoader(digits(0, 20)), {"train_dataset": digits(0, 20)}, ValueError, "together with `train_dataset`"),
        (DataLoader(Dataset.from_dict({"a": []})), {}, ValueError, "`train_dataset` is empty"),
    ]
    for loader, more, kind, message in given:
        with pytest.raises(kind, match=message):
            TrakAttributor(net, config, dataloader=loader, task="image_classification", **more)


def test_rows_that_are_drawn_by_weights_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows, config = digits(0, 20), trak_config(str(tmp_path), **QUICK)
    loader = DataLoader(rows, sampler=WeightedRandomSampler([1.0] * 19 + [0.0], 20), collate_fn=collate)
    TrakAttributor(trained_net(rows), config, dataloader=loader, task="image_classification")
    assert "draws rows by weights" in caplog.text
    caplog.clear()
    loader = DataLoader(rows, sampler=SubsetRandomSampler(range(20)), collate_fn=collate)
    TrakAttributor(trained_net(rows), config, dataloader=loader, task="image_classification")
    assert not caplog.text


class Buckets(SequentialSampler):
    """A sampler of one's own, whose `indices` are something else."""

    indices: Any = ([0, 1], [2, 3])


def test_indices_of_other_samplers_mean_what_they_mean_there(tmp_path: Path) -> None:
    rows, config = digits(0, 20), trak_config(str(tmp_path), **QUICK)
    loader = DataLoader(rows, sampler=Buckets(rows), collate_fn=collate)
    TrakAttributor(trained_net(rows), config, dataloader=loader, task="image_classification")
