"""Rows that mix in some batches alone: the first batch shows nothing, and the run stops all the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trak_options import trak_config

from hf_trak import TrakAttributor
from hf_trak.errors import GradientEngineError
from hf_trak.featurize.row_features import LateChecks

N, BATCH, SHARD = 48, 8, 16


class Crowded(nn.Module):
    """An expert of limited capacity: where more rows ask for it than it takes, each gets a share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.expert, self.head = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, pixel_values: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(pixel_values))
        asking = (pixel_values[:, :1] > 50).to(hidden.dtype)
        share = (3 / asking.sum().clamp_min(1)).clamp_max(1)
        return self.head(hidden + share * asking * self.expert(hidden))


def rows(crowded: range) -> list[dict[str, Any]]:
    """Make rows; some ask for the expert."""
    values = torch.randn(N, 5, generator=torch.Generator().manual_seed(1))
    values[list(crowded), 0] = 60.0
    return [{"pixel_values": one, "labels": torch.tensor(i % 3)} for i, one in enumerate(values)]


def attributor(directory: Path, train: Any, **options: Any) -> TrakAttributor:
    options = {"per_device_batch_size": BATCH, "shard_size": SHARD, "use_cpu": True, "proj_dim": 32, **options}
    return TrakAttributor(Crowded(), trak_config(str(directory), **options), train, task="image_classification")


@pytest.mark.few(2)
@pytest.mark.parametrize("engine", ["auto", "functional"])
@pytest.mark.parametrize("crowded", [range(32, 40), range(40, 48)], ids=["late", "last"])
def test_rows_that_mix_in_a_later_batch(tmp_path: Path, crowded: range, engine: str) -> None:
    """The features of these rows would be wrong by a third. None of the run is kept."""
    own = attributor(tmp_path / "batches", rows(crowded), engine=engine)
    with pytest.raises(GradientEngineError, match=f"rows {crowded[0]} to {crowded[-1]} fail a check") as error:
        own.featurize()
    assert "depends on the other samples of its batch" in str(error.value)
    assert not list((tmp_path / "batches").rglob("train-*.safetensors"))
    alone = attributor(tmp_path / "alone", rows(crowded), per_device_batch_size=1).featurize()
    assert alone.attribute(rows(range(0)), top_k=2)["trak_indices"]


def test_targets_that_mix_in_their_last_batch(tmp_path: Path) -> None:
    own = attributor(tmp_path, rows(range(0))).featurize()
    with pytest.raises(GradientEngineError, match="The target rows 40 to 47 fail a check"):
        own.attribute(rows(range(40, 48)), top_k=2)


@pytest.mark.parametrize(
    ("sizes", "chosen"),
    [
        ([8] * 8, [6, 7]),  # the first in the last quarter, and the last
        ([8] * 7 + [1], [5, 6]),  # one row alone shows nothing
        ([8], [0]),
        ([8, 3], [1]),
        ([1] * 5, []),
    ],
)
def test_which_batches_are_checked_again(sizes: list[int], chosen: list[int]) -> None:
    late = LateChecks(sum(sizes))
    assert [i for i, size in enumerate(sizes) if late.meet(range(size))] == chosen
