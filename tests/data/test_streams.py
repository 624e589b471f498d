"""`StreamedRows`: streams with a length, in an order that is checked."""

from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset
from torch import nn

from hf_trak import StreamedRows, TrakAttributor, TrakConfig
from hf_trak.data.rows import fingerprint_dataset


def rows(n: int) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(3, generator=generator).tolist(), "label": i % 2} for i in range(n)]


def stream(n: int, passes: list[int] | None = None) -> IterableDataset:
    def generate():
        if passes is not None:
            passes.append(0)
        yield from rows(n)

    return IterableDataset.from_generator(generate)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def test_reading_forwards_is_one_pass() -> None:
    passes: list[int] = []
    dataset = StreamedRows(stream(10, passes), 8)
    assert [dataset[i]["label"] for i in range(8)] == [0, 1] * 4
    assert dataset[7] == dataset[7]
    assert len(dataset) == 8 and len(passes) == 1
    assert dataset[2] == rows(3)[2]
    assert len(passes) == 2
    with pytest.raises(IndexError, match="Row 8"):
        dataset[8]


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_scores_are_those_of_the_stored_rows(num_workers: int, tmp_path: Path) -> None:
    results = []
    for name, train in (("stored", Dataset.from_list(rows(20))), ("stream", StreamedRows(stream(30), 20))):
        config = TrakConfig(
            output_dir=str(tmp_path / name), proj_type="none", shard_size=6, use_cpu=True, per_device_batch_size=4,
            budget="fast",
        )  # fmt: skip
        attributor = TrakAttributor(Net(), config, train_dataset=train, task="image_classification")
        attributor.features.num_workers = num_workers
        attributor.featurize()
        targets = Dataset.from_list(rows(4))
        results.append(np.asarray(attributor.attribute(targets, top_k=None)["trak_scores"][:]))
    np.testing.assert_array_equal(*results)


def test_a_stream_that_changes_is_refused() -> None:
    class Shuffled:
        def __init__(self) -> None:
            self.passes = 0

        def __iter__(self):
            self.passes += 1
            return iter(rows(6) if self.passes == 1 else rows(6)[::-1])

    dataset = StreamedRows(Shuffled(), 6)
    assert dataset[4]["label"] == 0
    with pytest.raises(ValueError, match="Row 0 of the stream is not what it was"):
        dataset[1]


def test_a_short_stream_and_one_that_is_read_once() -> None:
    dataset = StreamedRows(stream(5), 9)
    with pytest.raises(ValueError, match=r"ended after 5 rows; `num_rows` is 9.*num_rows=5"):
        dataset[8]
    with pytest.raises(TypeError, match="`stream` is a generator"):
        StreamedRows((row for row in rows(3)), 3)
    with pytest.raises(ValueError, match="`num_rows` is 0"):
        StreamedRows(stream(5), 0)


def test_fingerprint_depends_on_rows_and_count() -> None:
    expected = fingerprint_dataset(StreamedRows(stream(9), 5))
    assert fingerprint_dataset(StreamedRows(rows(7), 5)) == expected
    assert fingerprint_dataset(StreamedRows(stream(9), 6)) != expected
