"""Packed and padding-free batches have the features of padded batches of the same documents."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from test_trl import arguments, llama, texts, tokenizer
from torch import Tensor
from trak_options import trak_config
from transformers import (
    DataCollatorForTokenClassification,
    DataCollatorWithFlattening,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.data.language import cut_at_rows, split_documents
from hf_trak.data.rows import row_lengths


def qwen() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=24, **sizes, **heads)).eval()


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=24, n_embd=16, n_layer=2, n_head=2, n_positions=16)).eval()


MODELS = {"llama": llama, "qwen": qwen, "gpt2": gpt2}


def documents(count: int = 11) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 12, (count,), generator=generator).tolist()
    ids = [torch.randint(3, 18, (length,), generator=generator).tolist() for length in lengths]
    labels = [[-100, *row[1:]] if i % 3 else [-100, -100, *row[2:]] for i, row in enumerate(ids)]
    return Dataset.from_dict({"input_ids": ids, "labels": labels})


def attributed(directory: Path, model: Any, rows: Any, collator: Any, **options: Any) -> TrakAttributor:
    settings = {"proj_type": "none", "use_cpu": True, "per_device_batch_size": 4, **options}
    return TrakAttributor(model, trak_config(output_dir=str(directory), **settings), rows, collator, task="causal_lm")


def features(attributor: TrakAttributor) -> tuple[Tensor, Tensor]:
    shards = list(attributor.featurize().features.store.train(0))
    return torch.cat([shard.grads for shard in shards]), torch.cat([shard.out_to_loss for shard in shards])


def assert_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        scale = float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * scale)


def trl_collator(**options: Any) -> Any:
    sft = pytest.importorskip("trl.trainer.sft_trainer")
    return sft.DataCollatorForLanguageModeling(pad_token_id=0, **options)


COLLATORS = {
    "flattening": lambda: DataCollatorWithFlattening(),
    "flattening with bounds": lambda: DataCollatorWithFlattening(
        return_position_ids=False, return_flash_attn_kwargs=True, return_seq_idx=True
    ),
    "padding_free": lambda: trl_collator(padding_free=True),
    "padding_free to a multiple": lambda: trl_collator(padding_free=True, pad_to_multiple_of=32),
}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "kind, use_cache", [*((kind, False) for kind in COLLATORS), ("padding_free", True), ("flattening", True)]
)
def test_rows_laid_end_to_end(kind: str, use_cache: bool, tmp_path: Path) -> None:
    rows, model = documents(), llama()
    model.config.use_cache = use_cache
    padded = DataCollatorForTokenClassification(tokenizer())
    expected = features(attributed(tmp_path / "padded", model, rows, padded))
    free = attributed(tmp_path / "free", model, rows, COLLATORS[kind]())
    assert_same(features(free), expected)
    assert model.config.use_cache is use_cache


def packed(rows: Dataset, sizes: list[int]) -> Dataset:
    """Pack so many documents into each row."""
    given, made, start = list(rows), [], 0
    for size in sizes:
        part = given[start : start + size]
        made.append(
            {
                "input_ids": [token for row in part for token in row["input_ids"]],
                "labels": [label for row in part for label in row["labels"]],
                "seq_lengths": [len(row["input_ids"]) for row in part],
            }
        )
        start += size
    return Dataset.from_list(made)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "name, attention",
    [
        ("llama", "sdpa"),
        ("qwen", "eager"),
        ("gpt2", "sdpa"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [("llama", "eager"), ("qwen", "sdpa"), ("gpt2", "eager")]
        ),
    ],
)
def test_rows_of_several_documents_are_sums(name: str, attention: str, tmp_path: Path) -> None:
    """The output of a packed row is the sum over its documents, and q their mean over all labels."""
    rows, sizes = documents(), [3, 1, 2, 4, 1]
    model = MODELS[name]()
    model.set_attn_implementation(attention)
    alone, q = features(attributed(tmp_path / "a", model, rows, DataCollatorForTokenClassification(tokenizer())))
    labels = torch.tensor([sum(label >= 0 for label in row["labels"]) for row in rows])
    # The label of a first token is no label of its document.
    parts = [range(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
    sums = torch.stack([alone[list(part)].sum(0) for part in parts])
    means = torch.stack([(q * labels)[list(part)].sum() / labels[list(part)].sum() for part in parts])
    collator = trl_collator(padding_free=True)
    together = attributed(tmp_path / "b", model, packed(rows, sizes), collator, remove_unused_columns=False)
    assert_same(features(together), (sums, means))
    single = attributed(
        tmp_path / "c", model, packed(rows, sizes), collator, remove_unused_columns=False, per_device_batch_size=1
    )
    assert_same(features(single), (sums, means))


def test_the_engine_takes_the_whole_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No engine is refused, and a batch goes through the model at once."""
    model, sizes = llama(), []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    attributor = attributed(
        tmp_path / "trak", model, packed(documents(), [3, 1, 2, 4, 1]), trl_collator(padding_free=True),
        remove_unused_columns=False, per_device_batch_size=5,
    )  # fmt: skip
    with caplog.at_level("WARNING", logger="hf_trak"):
        attributor.featurize()
    assert max(sizes) == 5 and not caplog.records


@pytest.mark.parametrize("options", [{"packing": True}, {"padding_free": True, "max_length": None}])
def test_trainers_of_trl(options: dict[str, Any], tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    settings = {"max_length": 32, **options}
    rows = Dataset.from_dict(texts(14))
    trainer = trl.SFTTrainer(
        llama(), args=arguments(tmp_path, trl.SFTConfig, **settings), train_dataset=rows, processing_class=tokenizer()
    )
    config = TrakConfig(
        output_dir=str(tmp_path / "trak"), proj_dim=256, use_cpu=True, per_device_batch_size=3, budget="fast"
    )
    attributor = TrakAttributor.from_trainer(trainer, config).featurize()
    count = len(trainer.train_dataset)
    assert (count < 14) == bool(options.get("packing"))
    scored = attributor.attribute(trainer.train_dataset, top_k=1)
    assert [row[0] for row in scored["trak_indices"][:]] == list(range(count))


def test_scores_of_documents_of_packed_rows(tmp_path: Path) -> None:
    rows = documents()
    taken = split_documents(packed(rows, [3, 1, 2, 4, 1]).add_column("source", list("abcde")))
    assert taken.remove_columns(["packed_row", "source"]).to_list() == rows.to_list()
    assert taken["packed_row"][:] == [0, 0, 0, 1, 2, 2, 3, 3, 3, 3, 4]
    assert "".join(taken["source"][:]) == "aaabccdddde"
    model = llama()
    expected = features(attributed(tmp_path / "a", model, rows, DataCollatorForTokenClassification(tokenizer())))
    assert_same(features(attributed(tmp_path / "b", model, taken, trl_collator(padding_free=True))), expected)
    with pytest.raises(ValueError, match=r"not \['lengths'\].*`lengths_column`"):
        split_documents(rows, "lengths")
    wrong = Dataset.from_dict({"input_ids": [[1, 2, 3]], "seq_lengths": [[1, 1]]})
    with pytest.raises(ValueError, match=r"Row 0 has 3 tokens, and documents of 2 tokens"):
        split_documents(wrong)


@pytest.mark.slow
def test_masks_beside_tokens_are_cut_too(tmp_path: Path) -> None:
    """Collators drop such columns, and a long sequence of them is cut as the tokens are."""
    rows = documents()
    masks = [[int(i % 2) for i in range(len(row["input_ids"]))] for row in rows]
    marked = rows.add_column("completion_mask", masks)
    expected = features(attributed(tmp_path / "a", llama(), marked, DataCollatorForTokenClassification(tokenizer())))
    assert_same(features(attributed(tmp_path / "b", llama(), marked, DataCollatorWithFlattening())), expected)
    plain = features(attributed(tmp_path / "c", llama(), rows, DataCollatorWithFlattening()))
    assert not torch.allclose(plain[0], expected[0])


def test_long_packed_rows_are_not_taken_for_long_documents(tmp_path: Path) -> None:
    """GPT-2 here has 16 positions; the rows have more tokens, in documents that have fewer."""
    rows = packed(documents(), [3, 1, 2, 4, 1])
    assert max(len(row["input_ids"]) for row in rows) > 16
    model = gpt2()
    attributed(tmp_path / "a", model, rows, trl_collator(padding_free=True), remove_unused_columns=False).featurize()
    long = Dataset.from_dict({"input_ids": [list(range(3, 20))] * 2, "labels": [list(range(3, 20))] * 2})
    with pytest.raises(ValueError, match=r"17 tokens per sample, but GPT2LMHeadModel has 16 positions"):
        attributed(tmp_path / "b", model, long, DataCollatorWithFlattening()).featurize()


@pytest.mark.slow
def test_rows_are_sorted_by_length(tmp_path: Path) -> None:
    """Within a shard, longest first, so that little of a batch is padding; where no length is stored, they are not."""
    rows, model = documents(), llama()
    free = attributed(
        tmp_path / "free", model, rows, DataCollatorWithFlattening(), shard_size=8, per_device_batch_size=2
    )
    batches = free.features.featurizer().batches(rows)
    lengths = [len(row["input_ids"]) for row in rows]
    padded = attributed(tmp_path / "padded", model, rows, DataCollatorForTokenClassification(tokenizer()))
    for divided in (batches, padded.features.featurizer().batches(rows)):
        for shard in (range(8), range(8, 11)):
            cut = divided.cuts(shard, 2)
            assert sorted(row for part in cut for row in part) == list(shard)
            assert [lengths[row] for part in cut for row in part] == sorted(lengths[row] for row in shard)[::-1]
    expected = features(padded)
    assert_same(features(free), expected)
    unknown = padded.features.featurizer().batches([rows[row] for row in range(len(rows))])
    assert unknown.cuts(range(3, 8), 2) == [range(3, 5), range(5, 7), range(7, 8)]
    in_order = attributed(tmp_path / "order", model, list(rows), DataCollatorForTokenClassification(tokenizer()))
    assert_same(features(in_order), expected)


def test_lengths_of_rows_are_read_without_the_rows() -> None:
    """Of the columns that collators pad; `None` where nothing is stored, or a transform makes the rows."""
    rows = Dataset.from_dict({"input_ids": [[1, 2, 3], [], [4]], "labels": [0, 1, 2], "note": ["a", "bb", "ccc"]})
    assert row_lengths(rows, range(3)) == [3, 0, 1]
    assert row_lengths(rows.select([2, 0]), range(2)) == [1, 3]
    assert row_lengths(rows.with_format("torch"), range(1, 3)) == [0, 1]
    pairs = rows.add_column("chosen_ids", [[1], [2, 3], None])
    assert row_lengths(pairs, range(3)) == [4, 2, 1]
    assert row_lengths(rows.with_transform(lambda batch: batch), range(3)) is None
    assert row_lengths(rows.remove_columns("input_ids"), range(3)) is None
    assert row_lengths(list(rows), range(3)) is None
    assert row_lengths(Dataset.from_dict({"input_ids": ["text", "not tokens"]}), range(2)) is None


def test_what_is_cut_and_what_is_not() -> None:
    rows = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]
    flat = {"input_ids": torch.tensor([[1, 2, 3, 4, 5]]), "x": torch.arange(10).view(1, 5, 2), "flag": True}
    cut = cut_at_rows(flat, rows)
    assert cut["input_ids"].tolist() == [[1, 2, 3], [4, 5, 0]] and cut["flag"] is True
    assert cut["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert cut["position_ids"].tolist() == [[0, 1, 2], [0, 1, 0]]
    assert cut["x"].tolist() == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [0, 0]]]
    for batch in ({"input_ids": torch.ones(2, 3)}, {"pixel_values": torch.ones(1, 5)}, (torch.ones(1, 5),), flat):
        assert cut_at_rows(batch, rows[:1] if batch is flat else rows) is batch
    assert cut_at_rows(flat, [{"text": "a"}, {"text": "b"}]) is flat
    with pytest.raises(ValueError, match=r"one sequence of 5 tokens from 2 rows with 6 tokens"):
        cut_at_rows(flat, [rows[0], rows[0]])
    several = {**flat, "position_ids": torch.tensor([[0, 0, 1, 0, 1]]), "seq_idx": torch.tensor([[0, 1, 1, 2, 2]])}
    cut = cut_at_rows(several, rows)
    assert "attention_mask" not in cut and cut["position_ids"].tolist() == [[0, 0, 1], [0, 1, 0]]
    assert cut["seq_idx"].tolist() == [[0, 1, 1], [0, 0, 1]]
