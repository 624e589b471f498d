"""What people hand over besides mappings and tensors: dataclasses, namedtuples, tables, and names of tasks."""

import dataclasses
from collections import namedtuple
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn
from trak_options import trak_config

from hf_trak import TrakAttributor, TrakConfig, per_sample_gradients
from hf_trak.modelout_functions.base import FieldBatch, as_batch

Pair = namedtuple("Pair", ["pixels", "labels"])


@dataclasses.dataclass
class Record:
    pixels: Tensor
    labels: Tensor
    mask: Tensor | None = None


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(torch.tanh(pixels))


def rows() -> list[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(6, generator=generator), i % 3) for i in range(7)]


def collator(kind: Any) -> Any:
    def collate(given: list[Any]) -> Any:
        return kind(torch.stack([pixels for pixels, _ in given]), torch.tensor([label for _, label in given]))

    return collate


def label_logit(output: Tensor, batch: Any) -> Tensor:
    return output.gather(1, batch.labels[:, None]).squeeze(1)


def features(directory: Path, kind: Any, task: Any, engine: Any = "auto", **options: Any) -> Tensor:
    torch.manual_seed(0)
    config = trak_config(output_dir=str(directory), proj_dim=16, use_cpu=True, engine=engine, **options)
    attributor = TrakAttributor(Network(), config, rows(), collator(kind), task=task).featurize()
    return attributor.features.store.train(0).read(0).grads


@pytest.mark.parametrize("kind", [Pair, Record])
@pytest.mark.parametrize("engine", ["hooked", "functional", "iterative"])
def test_objects_with_named_tensors_are_batches(kind: Any, engine: str, tmp_path: Path) -> None:
    expected = features(tmp_path / "tuples", lambda *values: values, "image_classification", engine)
    assert torch.equal(features(tmp_path / "objects", kind, "image_classification", engine), expected)
    found = features(tmp_path / "function", kind, label_logit, engine)
    other = features(tmp_path / "cast", kind, label_logit, engine, model_dtype="float32")
    assert torch.equal(found, other) and not torch.equal(found, expected)


@pytest.mark.parametrize("kind", [Pair, Record])
def test_gradients_of_objects_with_named_tensors(kind: Any) -> None:
    model, pixels, labels = Network(), torch.randn(3, 6), torch.tensor([0, 2, 1])
    expected = per_sample_gradients(
        model, (pixels, labels), lambda output, batch: output.gather(1, batch[1][:, None]).squeeze(1)
    )
    found = per_sample_gradients(model, kind(pixels, labels), label_logit)
    assert all(torch.allclose(found[name], expected[name]) for name in expected)


def test_a_dataclass_is_a_mapping_with_attributes() -> None:
    batch = as_batch(Record(torch.ones(2, 6), torch.zeros(2)))
    assert isinstance(batch, FieldBatch) and list(batch) == ["pixels", "labels"]  # `None` is no entry
    assert batch.pixels is batch["pixels"] and as_batch(batch) is batch
    with pytest.raises(AttributeError, match=r"entries \['pixels', 'labels'\], and no 'mask'"):
        _ = batch.mask
    assert as_batch(Record) is Record


def test_a_task_is_named_instead_of_a_function() -> None:
    model, batch = Network(), (torch.randn(2, 6), torch.tensor([0, 2]))
    found = per_sample_gradients(model, batch, "image_classification")

    def margin(output: Tensor, given: Any) -> Tensor:
        own = nn.functional.one_hot(given[1], 3).bool()
        return output[own] - output.masked_fill(own, -torch.inf).logsumexp(1)

    expected = per_sample_gradients(model, batch, margin)
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)
    with pytest.raises(ValueError, match=r"The task 'image_classifcation' is unknown"):
        per_sample_gradients(model, batch, "image_classifcation")
    with pytest.raises(TypeError, match=r"`output_fn` is 3\. Expected a function"):
        per_sample_gradients(model, torch.randn(2, 6), 3)  # type: ignore[arg-type]


def test_a_table_is_refused_with_the_conversion(tmp_path: Path) -> None:
    table = pd.DataFrame({"pixels": [[0.0] * 6] * 4, "labels": [0, 1, 2, 0]})
    config = TrakConfig(output_dir=str(tmp_path / "trak"), proj_dim=16, use_cpu=True, budget="fast")
    with pytest.raises(TypeError, match=r"`train_dataset` is a DataFrame.*Dataset\.from_pandas\(frame"):
        TrakAttributor(Network(), config, table, task="image_classification")
    converted = Dataset.from_pandas(table, preserve_index=False)
    attributor = TrakAttributor(Network(), config, converted, task="image_classification").featurize()
    with pytest.raises(TypeError, match=r"`eval_dataset` is a DataFrame"):
        attributor.attribute(table)
