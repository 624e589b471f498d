"""Datasets are identified by their content, and rows arrive in order whatever the loader does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, Image, load_dataset, load_from_disk
from PIL import Image as PILImage
from torch.utils.data import TensorDataset
from transformers import BertConfig, BertForSequenceClassification, default_data_collator

from hf_trak.data.rows import RowBatches, batch_rows, default_collator, fingerprint_dataset, forward_columns, row_count


def table(n: int = 50) -> Dataset:
    return Dataset.from_dict(
        {
            "text": [f"row {i}" if i % 7 else None for i in range(n)],
            "values": [[float(i), i / 2] for i in range(n)],
            "label": [i % 3 for i in range(n)],
        }
    )


def test_fingerprint_survives_storage_and_row_selection(tmp_path: Path) -> None:
    """Equal rows have equal fingerprints in memory, on disk, in parquet files, and selected from a longer dataset."""
    dataset = table()
    expected = fingerprint_dataset(dataset)
    dataset.save_to_disk(str(tmp_path / "saved"))
    dataset.to_parquet(str(tmp_path / "x.parquet"))
    parquet = load_dataset("parquet", data_files=str(tmp_path / "x.parquet"), split="train", cache_dir=str(tmp_path))
    assert fingerprint_dataset(load_from_disk(str(tmp_path / "saved"))) == expected
    assert fingerprint_dataset(parquet) == expected
    assert fingerprint_dataset(table(80).select(range(50))) == expected
    assert fingerprint_dataset(table(80).shuffle(seed=1).sort("label").select([0])) != expected
    permutation = list(np.random.default_rng(0).permutation(50))
    assert fingerprint_dataset(dataset.select(permutation).select(np.argsort(permutation))) == expected
    assert fingerprint_dataset(dataset.with_transform(lambda rows: rows)) == expected
    assert fingerprint_dataset(dataset.with_format("torch")) == expected


def test_fingerprint_sees_a_single_changed_value_and_the_order() -> None:
    dataset = table()
    expected = fingerprint_dataset(dataset)
    flipped = dataset.map(lambda row, i: {"label": 2 if i == 37 else row["label"]}, with_indices=True)
    assert fingerprint_dataset(flipped) != expected
    assert fingerprint_dataset(dataset.rename_column("label", "labels")) != expected
    assert fingerprint_dataset(dataset.select([1, 0, *range(2, 50)])) != expected
    assert fingerprint_dataset(dataset.select(range(49))) != expected


def test_fingerprint_of_torch_datasets_and_images() -> None:
    x, y = torch.arange(12.0).reshape(6, 2), torch.arange(6)
    assert fingerprint_dataset(TensorDataset(x, y)) == fingerprint_dataset(TensorDataset(x.clone(), y.clone()))
    assert fingerprint_dataset(TensorDataset(x, y)) != fingerprint_dataset(TensorDataset(x + 1, y))
    rows = [{"x": [0.0, float(i)], "label": i % 2} for i in range(200)]
    assert fingerprint_dataset([*rows[:1], {**rows[1], "label": 0}, *rows[2:]]) != fingerprint_dataset(rows)
    images = [PILImage.fromarray(np.full((4, 4), i, dtype=np.uint8)) for i in range(3)]
    pictures = [Dataset.from_dict({"image": some}).cast_column("image", Image()) for some in (images, images[::-1])]
    assert fingerprint_dataset(pictures[0]) != fingerprint_dataset(pictures[1])


def test_a_dataset_may_name_its_own_fingerprint() -> None:
    class Slow(list):
        fingerprint: Any = "photos of May, version 3"

        def __getitem__(self, index: Any) -> Any:
            raise AssertionError("no row has to be read")

    expected = fingerprint_dataset(Slow(range(5)))
    assert fingerprint_dataset(Slow(range(6))) != expected
    other = Slow(range(5))
    other.fingerprint = "photos of May, version 4"
    assert fingerprint_dataset(other) != expected
    other.fingerprint = 4
    with pytest.raises(TypeError, match=r"`Slow.fingerprint` is 4\. Expected a string"):
        fingerprint_dataset(other)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_rows_arrive_in_the_given_order(num_workers: int) -> None:
    dataset = Dataset.from_dict({"label": list(range(23)), "unused": ["x"] * 23})
    batches = RowBatches(
        dataset, default_data_collator, columns=["label"], device=torch.device("cpu"), num_workers=num_workers
    )
    seen = []
    for rows, batch in batches.iterate(batch_rows(3, 23, 7)):
        assert batch["labels"].tolist() == rows
        seen += rows
    assert seen == list(range(3, 23))


def test_columns_that_only_a_transform_needs_are_kept() -> None:
    """Trainer drops columns before the transform runs; here they are dropped after it."""
    dataset = Dataset.from_dict({"raw": [1, 2, 3]}).with_transform(
        lambda rows: {"pixel_values": [torch.tensor([float(v)]) for v in rows["raw"]], "debug": rows["raw"]}
    )
    batches = RowBatches(dataset, default_data_collator, columns=["pixel_values"], device=torch.device("cpu"))
    ((_, batch),) = batches.iterate([range(3)])
    assert list(batch) == ["pixel_values"]
    assert batch["pixel_values"].flatten().tolist() == [1.0, 2.0, 3.0]


def test_no_column_of_the_model_is_an_error() -> None:
    dataset = Dataset.from_dict({"text": ["a"]})
    with pytest.raises(ValueError, match=r"it has \['text'\].*remove_unused_columns"):
        RowBatches(dataset, default_data_collator, columns=["pixel_values"], device=torch.device("cpu"))
    transformed = dataset.with_transform(lambda rows: rows)
    batches = RowBatches(transformed, default_data_collator, columns=["pixel_values"], device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"it has \['text'\].*remove_unused_columns"):
        next(batches.iterate([[0]]))


def test_row_count_refuses_streams_and_empty_datasets() -> None:
    with pytest.raises(TypeError, match="`train_dataset` is a IterableDataset"):
        row_count(table().to_iterable_dataset(), "train_dataset")
    with pytest.raises(ValueError, match="`eval_dataset` is empty"):
        row_count(table().select([]), "eval_dataset")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (DatasetDict({"train": table(), "test": table(3)}), r"a DatasetDict, with the keys \['train', 'test'\]"),
        ({"a": table()}, r"a dict, with the keys \['a'\]"),
        (table()[0], r"a dict, with the keys \['text', 'values', 'label'\].*`Dataset.from_list\(\[row\]\)`"),
        ("user/name", r"a str, the text 'user/name'.*`load_dataset\(name, split='train'\)`"),
    ],
)
def test_row_count_refuses_what_has_no_rows_by_number(given: Any, says: str) -> None:
    with pytest.raises(TypeError, match=f"`eval_dataset` is {says}"):
        row_count(given, "eval_dataset")


def test_collator_and_columns_are_those_of_trainer() -> None:
    assert default_collator(table()) is default_data_collator
    assert default_collator(TensorDataset(torch.ones(2, 1)))([(torch.ones(1),)])[0].shape == (1, 1)
    model = BertForSequenceClassification(
        BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=10)
    )
    columns = forward_columns(model)
    assert {"input_ids", "attention_mask", "labels", "label"} <= set(columns)
    assert "text" not in columns
    assert "kwargs" not in columns and len(columns) == len(set(columns))
