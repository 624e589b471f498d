"""Trainers of TRL as they are: columns that they give to their collators, and what becomes of their batches."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.data.rows import own_columns
from hf_trak.data.text_columns import ColumnsCollator, SFTCollator, signature_columns
from hf_trak.modelout_functions.token_tasks import TokenColumnsCollator

trl = pytest.importorskip("trl")

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "far", "away", "from", "home", "with", "red"]


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=64
    )


def llama(**options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS) + 3, bos_token_id=1, **sizes, **heads, **options)).eval()


def texts(count: int, column: str = "text", seed: int = 0) -> dict[str, list[str]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 10, (count,), generator=generator).tolist()
    return {
        column: [
            " ".join(WORDS[int(i)] for i in torch.randint(len(WORDS), (length,), generator=generator))
            for length in lengths
        ]
    }


def arguments(tmp_path: Path, kind: Any = TrainingArguments, **options: Any) -> Any:
    return kind(output_dir=str(tmp_path / "out"), report_to="none", use_cpu=True, bf16=False, **options)


def dpo(tmp_path: Path, **options: Any) -> Any:
    pairs = Dataset.from_dict({**texts(6, "prompt"), **texts(6, "chosen", 1), **texts(6, "rejected", 2)})
    made = arguments(tmp_path, trl.DPOConfig, **options)
    return trl.DPOTrainer(llama(), ref_model=llama(), args=made, train_dataset=pairs, processing_class=tokenizer())


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(8))
def test_preferences_before_the_training(seed: int, tmp_path: Path) -> None:
    """h is 0 but for the rounding of log-probabilities, which is no sign that rows mix."""
    generator = torch.Generator().manual_seed(seed)

    def answers() -> list[str]:
        lengths = torch.randint(10, 40, (6,), generator=generator).tolist()
        return [" ".join(WORDS[int(i)] for i in torch.randint(15, (n,), generator=generator)) for n in lengths]

    pairs = Dataset.from_dict({"prompt": answers(), "chosen": answers(), "rejected": answers()})
    options = arguments(tmp_path, trl.DPOConfig, max_length=None)
    trainer = trl.DPOTrainer(
        llama(), ref_model=llama(), args=options, train_dataset=pairs, processing_class=tokenizer()
    )
    config = TrakConfig(str(tmp_path / "trak"), proj_type="none", feature_dtype="float32", use_cpu=True)
    own = TrakAttributor.from_trainer(trainer, config).featurize()
    assert all(bool(shard.grads.any(dim=1).all()) for shard in own.features.store.train(0))


def test_columns_of_the_trainer_reach_its_collator(tmp_path: Path) -> None:
    """Answers of a pair are no inputs of `forward`, and the collator needs them."""
    trainer = dpo(tmp_path)
    config = TrakConfig(output_dir=str(tmp_path / "trak"), proj_dim=16, use_cpu=True)
    attributor = TrakAttributor.from_trainer(trainer, config, task=lambda output, batch: output.logits[:, 0, 0])
    assert {"prompt_ids", "chosen_ids", "rejected_ids"} <= set(signature_columns(trainer))
    given = attributor.features.featurizer().batches(attributor.train_dataset).collated([0, 1])
    expected = trainer.data_collator([attributor.train_dataset[i] for i in (0, 1)])
    assert set(given) == set(expected) and all(torch.equal(given[name], expected[name]) for name in expected)


def test_columns_of_a_collator_inside_of_another_are_kept() -> None:
    inner = ColumnsCollator(lambda rows: {}, ("messages", "images"))
    assert own_columns(TokenColumnsCollator(inner, "input_ids")) == ("messages", "images")
    assert own_columns(len) == ()


@pytest.mark.slow
def test_the_columns_also_reach_a_rehearsal(tmp_path: Path) -> None:
    """`estimate(measure=True)` times the collator, and must give it the same columns."""
    config = TrakConfig(output_dir=str(tmp_path / "trak"), proj_dim=16, use_cpu=True, per_device_batch_size=1)
    seen: list[set[str]] = []
    trainer = Trainer(
        llama(), arguments(tmp_path), train_dataset=Dataset.from_dict({"text": ["a"] * 8, "number": range(8)})
    )

    def collator(rows: list[Any]) -> dict[str, Tensor]:
        seen.append(set(rows[0]))
        ids = torch.tensor([[1, 3 + row["number"] % 5, 4] for row in rows])
        return {"input_ids": ids, "labels": ids}

    trainer.data_collator = collator
    trainer._signature_columns = ["number"]
    attributor = TrakAttributor.from_trainer(trainer, config)
    assert attributor.estimate(measure=True).rows_per_second
    assert seen and all(columns == {"number"} for columns in seen)


@pytest.mark.parametrize(
    ("kind", "function"), [("messages", "tokenize_chat"), ("prompt and completion", "tokenize_prompt_completion")]
)
def test_chats_without_sft_name_what_tokenizes_them(kind: str, function: str, tmp_path: Path) -> None:
    trainer = Trainer(llama(), arguments(tmp_path), train_dataset=as_rows(kind, 2))
    config = TrakConfig(output_dir=str(tmp_path / "trak"), proj_dim=16, use_cpu=True)
    with pytest.raises(ValueError, match=rf"No column .*with `hf_trak\.data\.language\.{function}`"):
        TrakAttributor.from_trainer(trainer, config).featurize()


def test_what_the_configuration_says_of_columns_counts(tmp_path: Path) -> None:
    """The error about columns names `remove_unused_columns=False` as the remedy, so it has to work here."""
    rows = Dataset.from_dict({"text": ["a cat", "the dog", "a mat"]})
    trainer = Trainer(llama(), arguments(tmp_path), train_dataset=rows)
    words = tokenizer()

    def collator(given: list[Any]) -> Any:
        batch = words([row["text"] for row in given], padding=True, return_tensors="pt")
        return {**batch, "labels": batch["input_ids"]}

    trainer.data_collator = collator
    config = TrakConfig(output_dir=str(tmp_path / "trak"), proj_dim=16, use_cpu=True)
    with pytest.raises(ValueError, match=r"No column of the dataset reaches .*`remove_unused_columns=False`"):
        TrakAttributor.from_trainer(trainer, config).featurize()
    config.remove_unused_columns = False
    config.label_names = ["labels", "another"]
    attributor = TrakAttributor.from_trainer(trainer, config).featurize()
    assert attributor.args.label_names == ["labels", "another"]
    trainer.args.label_names = ["labels"]
    config.label_names = None
    assert TrakAttributor.from_trainer(trainer, config).args.label_names == ["labels"]
    trainer.args.remove_unused_columns, config.remove_unused_columns = False, True
    assert not TrakAttributor.from_trainer(trainer, config).args.remove_unused_columns


@pytest.mark.parametrize("packed", ["no", "wrapped"])
def test_supervised_finetuning(packed: str, tmp_path: Path) -> None:
    packing = {"packing": packed == "wrapped", "packing_strategy": "wrapped", "max_length": 32}
    options = arguments(tmp_path, trl.SFTConfig, **packing)
    words = tokenizer()
    trainer = trl.SFTTrainer(llama(), options, train_dataset=Dataset.from_dict(texts(12)), processing_class=words)
    config = TrakConfig(output_dir=str(tmp_path / "trak"), proj_dim=256, use_cpu=True, budget="fast")
    attributor = TrakAttributor.from_trainer(trainer, config).featurize()
    scored = attributor.attribute(trainer.train_dataset.select(range(2)), top_k=1)
    assert [row[0] for row in scored["trak_indices"][:]] == [0, 1]


@pytest.mark.parametrize("completion_only", [False, True])
def test_labels_are_those_that_the_trainer_counts(completion_only: bool, tmp_path: Path) -> None:
    """Masks of completions count only where the trainer's own preparation and collator take them for labels."""
    given = Dataset.from_dict({**texts(4, "prompt"), **texts(4, "completion", 1)})
    options = arguments(tmp_path, trl.SFTConfig, completion_only_loss=completion_only, max_length=None)
    trainer = trl.SFTTrainer(llama(), options, train_dataset=given, processing_class=tokenizer())
    config = TrakConfig(str(tmp_path / "trak"), proj_type="none", feature_dtype="float32", use_cpu=True)
    attributor = TrakAttributor.from_trainer(trainer, config, task="loss").featurize()
    assert type(attributor.task).__name__ == "LossModelOutput"
    found = torch.cat([shard.grads for shard in attributor.features.store.train(0)])
    names = ("input_ids", "labels", "seq_lengths")
    for row in range(4):
        kept = {name: value for name, value in trainer.train_dataset[row].items() if name in names}
        loss = trainer.compute_loss(trainer.model, trainer.data_collator([kept]), num_items_in_batch=torch.tensor(1.0))
        expected = torch.cat([-one.flatten() for one in torch.autograd.grad(loss, list(trainer.model.parameters()))])
        assert float((found[row] - expected).norm() / expected.norm()) <= 1e-5


TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }} {% endfor %}{% if add_generation_prompt %}and {% endif %}"
)


def as_rows(kind: str, count: int, seed: int = 0) -> Dataset:
    """Texts, messages, prompts and completions, or fields for a `formatting_func`."""
    first, second = texts(count, "a", seed)["a"], texts(count, "b", seed + 1)["b"]
    if kind == "text":
        return Dataset.from_dict({"text": first})
    if kind == "formatting_func":
        return Dataset.from_dict({"question": first, "answer": second})
    if kind == "prompt and completion":
        return Dataset.from_dict({"prompt": first, "completion": [f" {one}" for one in second]})
    spoken = [
        [{"role": "user", "content": one}, {"role": "assistant", "content": other}]
        for one, other in zip(first, second, strict=True)
    ]
    return Dataset.from_dict({"messages": spoken})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "padding_free"),
    [
        pytest.param(kind, free, marks=pytest.mark.slow if free and kind != "messages" else [])
        for kind in ("text", "messages", "prompt and completion", "formatting_func")
        for free in (False, True)
    ],
)
def test_targets_of_sft_as_people_have_them(kind: str, padding_free: bool, tmp_path: Path) -> None:
    """Rows that are no tokens yet go through the trainer's own preparation, and score as its evaluation rows do."""
    words = tokenizer()
    words.chat_template = TEMPLATE
    args = arguments(tmp_path, trl.SFTConfig, padding_free=padding_free, max_length=None)
    formatting = (lambda row: f"{row['question']} and {row['answer']}") if kind == "formatting_func" else None
    rows, targets = as_rows(kind, 6), as_rows(kind, 3, seed=5)
    trainer = trl.SFTTrainer(
        llama(),
        args=args,
        train_dataset=rows,
        eval_dataset=targets,
        processing_class=words,
        formatting_func=formatting,
    )
    assert "input_ids" in trainer.eval_dataset.column_names
    config = TrakConfig(str(tmp_path / "trak"), proj_dim=64, use_cpu=True, budget="fast")
    attributor = TrakAttributor.from_trainer(trainer, config)
    attributor.featurize()
    prepared = attributor.attribute(trainer.eval_dataset, top_k=None, name="prepared")["trak_scores"][:]
    found = attributor.attribute(targets, top_k=None, name="raw")["trak_scores"][:]
    assert torch.allclose(torch.tensor(found), torch.tensor(prepared), rtol=1e-4, atol=1e-7)
    own = attributor.attribute(rows, top_k=1, name="own")
    assert [one[0] for one in own["trak_indices"]] == list(range(6))


def test_chats_that_sft_takes_and_others(tmp_path: Path) -> None:
    """Turns with `from` and `value` are taken from `conversations` alone, as in the training."""
    words = tokenizer()
    words.chat_template = TEMPLATE
    rows = as_rows("messages", 3)
    args = arguments(tmp_path, trl.SFTConfig, max_length=None)
    trainer = trl.SFTTrainer(llama(), args=args, train_dataset=rows, eval_dataset=rows, processing_class=words)
    collator = SFTCollator(trainer)
    chats = [[{"from": turn["role"], "value": turn["content"]} for turn in row["messages"]] for row in rows]
    ready = collator.ready([{"conversations": chat} for chat in chats])
    assert [row["input_ids"] for row in ready] == [row["input_ids"] for row in trainer.eval_dataset]
    for given in ({"messages": chats[0]}, {"conversations": rows[0]["messages"]}, {"messages": []}, {"said": "a"}):
        with pytest.raises(ValueError, match=rf"columns \['{next(iter(given))}'\].*Expected `messages` or `prompt`"):
            collator.ready([given])
