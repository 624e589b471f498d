"""The README's Python examples run as they are printed."""

import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset, load_dataset
from hub_server import TOKEN, Hub, client, hub
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from hf_trak import TrakAttributor, TrakConfig

__all__ = ["client", "hub"]  # fixtures

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(), flags=re.DOTALL)


def block(marker: str) -> str:
    """The one example that holds a piece of code."""
    (found,) = [code for code in BLOCKS if marker in code]
    return found


def tiny_bert() -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=2
    )
    return BertForSequenceClassification(config)


def sentences(n: int) -> Dataset:
    return Dataset.from_dict(
        {
            "input_ids": [[i % 29 + 1] * 5 for i in range(n)],
            "labels": [i % 2 for i in range(n)],
            "label": [i % 2 for i in range(n)],
            "source": ["book" if i % 3 else "web" for i in range(n)],
            "text": [f"sentence {i}" for i in range(n)],
        }
    )


def tiny_trainer() -> Trainer:
    """As the README's reader has it, with checkpoints at steps 100 and 200."""
    arguments = TrainingArguments(
        output_dir="out", max_steps=200, save_steps=100, use_cpu=True, report_to="none", disable_tqdm=True
    )
    return Trainer(model=tiny_bert(), args=arguments, train_dataset=sentences(40))


def test_every_block_is_tested() -> None:
    assert len(BLOCKS) == 7


def test_three_lines_after_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = tiny_trainer()
    trainer.train()
    namespace = {"trainer": trainer, "eval_dataset": sentences(6)}
    exec(block("featurize(checkpoints=["), namespace)
    scored = namespace["scored"]
    assert len(scored) == 6
    assert len(scored[0]["trak_indices"]) == 20
    assert scored[0]["trak_scores"][0] >= scored[0]["trak_scores"][1]


def test_callback_and_more_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace = {
        "trainer": tiny_trainer(),
        "eval_dataset": sentences(6),
        "new_rows": sentences(4),
        "TrakConfig": TrakConfig,
        "TrakAttributor": TrakAttributor,
    }
    exec(block("TrakCallback("), namespace)
    assert [Path(path).name for path in namespace["callback"].checkpoints] == ["checkpoint-100", "checkpoint-200"]
    exec(block("group_scores("), namespace)


def test_publishing(hub: Hub, client: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    model = tiny_bert().eval()
    model.save_pretrained("model")
    hub.put("model", "me/my-model", {path.name: path.read_bytes() for path in Path("model").iterdir()}, private=True)
    config = TrakConfig(output_dir="trak", proj_dim=16, use_cpu=True, disable_tqdm=True)
    namespace = {
        "attributor": TrakAttributor(model, config, sentences(40)).featurize(),
        "my_examples": sentences(5),
        "train_dataset": sentences(40),
        "TrakAttributor": TrakAttributor,
    }
    exec(block("push_to_hub("), namespace)
    assert len(namespace["scored"]) == 5
    assert len(namespace["scored"][0]["trak_indices"]) == 10
    assert len(load_dataset("me/my-scores", split="train")) == 5


def test_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    rows = sentences(12)

    def make_trainer(chosen: Dataset, seed: int) -> Trainer:
        arguments = TrainingArguments(
            output_dir="out",
            max_steps=1,
            seed=seed,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        return Trainer(model=tiny_bert(), args=arguments, train_dataset=chosen)

    namespace = {
        "make_trainer": make_trainer,
        "train_dataset": rows,
        "targets": sentences(4),
        "scores": torch.randn(12, 4).numpy(),
    }
    exec(block("TrainerRetraining(").replace("100", "8"), namespace)  # the README's hundred take most of a minute
    assert namespace["retrained"].num_rows == 8
    assert re.search(r"-?\d\.\d+ \[-?\d\.\d+, -?\d\.\d+\]", capsys.readouterr().out)


def test_trak_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = load_digits()
    images, labels = torch.tensor(data.images / 16.0, dtype=torch.float32), torch.tensor(data.target)

    def network() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    train_set, test_set = (
        TensorDataset(images[:1100], labels[:1100]),
        TensorDataset(images[1100:1120], labels[1100:1120]),
    )
    namespace = {
        "model": network(),
        "checkpoints": [network().state_dict() for _ in range(2)],
        "train_set": train_set,
        "test_set": test_set,
        "train_loader": DataLoader(train_set, batch_size=100),
        "test_loader": DataLoader(test_set, batch_size=8),
    }
    exec(block("TRAKer("), namespace)
    assert namespace["scores"].shape == (1100, 20)
    assert namespace["scores"].isfinite().all()


def test_per_sample_gradients() -> None:
    batch: dict[str, Tensor] = {"input_ids": torch.randint(1, 30, (4, 7)), "attention_mask": torch.ones(4, 7)}
    model = tiny_bert()
    namespace = {"model": model, "batch": batch}
    exec(block("per_sample_gradients("), namespace)
    assert {name: tuple(grad.shape) for name, grad in namespace["grads"].items()} == {
        name: (4, *parameter.shape) for name, parameter in model.named_parameters()
    }
