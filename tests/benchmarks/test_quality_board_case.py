"""The case of the public board, with a tiny GPT-2 and tiny texts in the place of those on the Hub."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, Trainer, TrainerCallback

from hf_trak.evaluation import random_subsets

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "quality"
WORDS = ["<end>", *(f"w{number}" for number in range(30))]


@pytest.fixture(scope="module")
def module() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCHMARK))
    try:
        yield importlib.import_module("quality_bench.cases.board")
    finally:
        sys.path.remove(str(BENCHMARK))
        for name in [name for name in sys.modules if name.partition(".")[0] == "quality_bench"]:
            del sys.modules[name]


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 with its usual dropout, and its tokenizer, of whole words."""
    directory = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(WORDS), n_positions=16, n_embd=8, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(directory)
    return directory


def write_texts(directory: Path, rows: int) -> Path:
    """Training and test texts of 3 to 6 words."""
    generator = np.random.default_rng(0)
    directory.mkdir()
    for part, count in (("train", rows), ("test", 60)):
        texts = [" ".join(generator.choice(WORDS[1:], 3 + row % 4)) for row in range(count)]
        lines = (json.dumps({"text": text}) for text in texts)
        (directory / f"{part}.jsonl").write_text("\n".join(lines))
    return directory


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("data") / "texts", 4608)


@pytest.fixture(scope="module")
def case(module: ModuleType, model_directory: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return module.board(tmp_path_factory.mktemp("downloads"), str(model_directory), None, str(texts))


def test_rows_are_whole_texts_in_their_order(case: Any, texts: Path) -> None:
    for rows, part, count in ((case.train, "train", 4608), (case.targets, "test", 50)):
        expected = [json.loads(line)["text"] for line in (texts / f"{part}.jsonl").read_text().splitlines()]
        assert case.texts(rows) == expected[:count]
        assert {len(row) for row in rows["input_ids"]} == {6}


def test_filling_up_changes_no_output(case: Any) -> None:
    model = case.make_model().eval()
    row = case.train.select([0])  # 3 words of 6
    kept = torch.tensor(row["input_ids"])[:, :3]
    filled = model(input_ids=torch.tensor(row["input_ids"]), labels=torch.tensor(row["labels"]))
    alone = model(input_ids=kept, labels=kept)
    torch.testing.assert_close(filled.loss, alone.loss)
    torch.testing.assert_close(filled.logits[:, :3], alone.logits)


def test_inputs_serve_vmap_and_give_the_same_logits(case: Any) -> None:
    model = case.make_model().eval()
    rows = case.train.select(range(5))
    inputs = case.inputs(rows)

    def one(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids[None], attention_mask=mask[None]).logits[0]

    plain = model(input_ids=torch.tensor(rows["input_ids"][:])).logits
    torch.testing.assert_close(torch.vmap(one)(inputs["input_ids"], inputs["attention_mask"]), plain)


def test_models_are_fresh_copies_without_dropout(case: Any) -> None:
    first, second = case.make_model().train(), case.make_model().train()
    ids = torch.tensor(case.train["input_ids"][:4])
    assert torch.equal(first(input_ids=ids).logits, first(input_ids=ids).logits)
    with torch.no_grad():
        first.transformer.wte.weight.zero_()
    assert second.transformer.wte.weight.abs().sum() > 0


class _Watch(TrainerCallback):
    """Stops after the first step, and keeps what the trainer has made by then."""

    def __init__(self) -> None:
        self.steps, self.passes = 0, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps = state.max_steps

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.passes += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.passes += 1
        control.should_training_stop = True


@pytest.fixture
def started(case: Any) -> tuple[Trainer, _Watch]:
    """The case's trainer after its first step."""
    trainer, watch = case.trainer(case.train, 0), _Watch()
    trainer.add_callback(watch)
    trainer.train()
    return trainer, watch


@pytest.mark.slow
def test_training_is_the_boards(started: tuple[Trainer, _Watch]) -> None:
    trainer, watch = started
    assert watch.steps == 72  # 4 epochs of 4,608 rows in batches of 256
    assert watch.passes * trainer.args.per_device_train_batch_size == 256
    schedule = trainer.lr_scheduler.lr_lambdas[0]
    rates = [4e-4 * schedule(step) for step in (0, 9, 18, 45, 72)]
    assert rates == pytest.approx([0, 2e-4, 4e-4, 2.2e-4, 4e-5])
    settings = trainer.optimizer.optimizer.defaults
    assert (settings["betas"], settings["eps"]) == ((0.9, 0.999), 1e-8)
    assert {group["weight_decay"] for group in trainer.optimizer.param_groups} == {0.01, 0.0}
    assert trainer.args.max_grad_norm == 0


def test_a_hundred_subsets_without_46_rows(case: Any) -> None:
    (drop,) = case.drops
    masks = random_subsets(len(case.train), case.subsets, 1 - drop)
    assert masks.shape == (100, 4608)
    assert set((~masks).sum(1)) == {46}


def test_other_data_is_refused(module: ModuleType, model_directory: Path, tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts", 100)
    with pytest.raises(ValueError, match=r"100 training rows and 60 test rows\. Expected 4608"):
        module.board(tmp_path / "downloads", str(model_directory), None, str(texts))
