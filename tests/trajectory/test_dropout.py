"""Replays of runs with dropout: the masks are those of the training, for every kernel and every part of a batch."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from replay_runs import RowWeights, differences, outputs, recorded, replayed, sentences, tiny, trainer
from safetensors import safe_open
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    SwinConfig,
    SwinForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from hf_trak.errors import HfTrakError
from hf_trak.gradient_computers.base import SplitBatch, run_model
from hf_trak.methods import Replay
from hf_trak.modelout_functions.classification import ClassificationModelOutput
from hf_trak.modelout_functions.loss import LossModelOutput
from hf_trak.trajectory.dropout import DropoutMasks, random_state, taking_masks
from hf_trak.trajectory.record import RunRecord

ROWS = 3


def scores_of(scored: Any) -> torch.Tensor:
    return torch.tensor(scored["trak_scores"], dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_retraining_with_the_same_dropout(tmp_path: Path, attention: str) -> None:
    """Central differences by the weight of a row, in float64, where every training drops the same numbers."""
    weights, options = (
        RowWeights(),
        {"adam_epsilon": 1e-3},
    )  # away from the kinks of Adam, where differences are coarse

    def make() -> Any:
        model = tiny(dropout=0.2, attention=attention)
        model.loss_function = weights
        return model

    def train() -> torch.Tensor:
        other = trainer(tmp_path, make(), **options)
        other.train()
        return outputs(other.model)

    found = scores_of(replayed(recorded(tmp_path, make(), **options), tmp_path, Replay(of="run", smoothing=0.0)))
    measured = differences(weights, train)
    assert float((found - measured).abs().max() / measured.abs().max()) <= 1e-6


def bert(attention: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = BertConfig(
        vocab_size=30, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=12, attn_implementation=attention,
    )  # fmt: skip
    inputs = {"input_ids": torch.randint(0, 30, (ROWS, 11)), "attention_mask": torch.ones(ROWS, 11, dtype=torch.long)}
    inputs["attention_mask"][1, 6:] = 0
    return BertForSequenceClassification(config), inputs


@pytest.mark.slow
def test_a_classifier_at_its_defaults(tmp_path: Path) -> None:
    """Its losses with the masks are those of the training, which is checked at every step, and rows have scores."""
    torch.manual_seed(0)
    rows = sentences(8, 0).map(lambda row, i: {"input_ids": row["input_ids"], "labels": i % 2}, with_indices=True)
    run = recorded(tmp_path, bert("sdpa")[0], rows=rows)
    found = replayed(run, tmp_path, Replay(of="run"), rows.select([0, 1]))
    assert scores_of(found).abs().min() > 0
    path = next((tmp_path / "trak").rglob("scores.safetensors"))
    with safe_open(path, "pt") as file:
        losses = file.get_tensor("forward")[0]
    steps = RunRecord.open(tmp_path / "trak" / "trajectory" / "run").steps()
    torch.testing.assert_close(
        losses, torch.tensor([one.loss for one in steps], dtype=torch.float64), rtol=1e-5, atol=0
    )


def vit(attention: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4,
        hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.3, attn_implementation=attention,
    )  # fmt: skip
    return ViTForImageClassification(config), {"pixel_values": torch.randn(ROWS, 3, 8, 8)}


def swin(attention: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Whole paths are dropped, and attention sees windows of a row."""
    config = SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=2, drop_path_rate=0.5,
        attention_probs_dropout_prob=0.2, attn_implementation=attention,
    )  # fmt: skip
    return SwinForImageClassification(config), {"pixel_values": torch.randn(ROWS, 3, 16, 16)}


@pytest.mark.parametrize(
    ("make", "attention"), [(bert, "eager"), (bert, "sdpa"), (vit, "eager"), (vit, "sdpa"), (swin, "eager")]
)
def test_masks_are_those_of_the_training(make: Any, attention: str) -> None:
    torch.manual_seed(0)
    model, inputs = make(attention)
    batch = {**inputs, "labels": torch.tensor([0, 1, 1])}
    state = random_state(torch.device("cpu"))
    expected = model.train()(**inputs).logits
    model.eval()
    plain = model(**inputs).logits
    after = torch.get_rng_state()
    task = taking_masks(LossModelOutput(ClassificationModelOutput()))
    masks = DropoutMasks(model, task)
    drawn = masks.drawn(batch, state)
    torch.testing.assert_close(run_model(task, model, drawn).logits, expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(plain, expected, rtol=1e-2)
    split = SplitBatch.of(drawn)
    for row in range(ROWS):
        torch.testing.assert_close(
            run_model(task, model, split.rows(row, row + 1)).logits, expected[row : row + 1], rtol=1e-5, atol=1e-6
        )
    picked = run_model(task, model, split.picked([2, 0])).logits
    torch.testing.assert_close(picked, expected[[2, 0]], rtol=1e-5, atol=1e-6)
    if "attention_mask" not in inputs:  # which cannot be mapped
        _compare_mapped(model, task, drawn, expected)
    torch.testing.assert_close(model(**inputs).logits, plain)  # batches without masks
    masks.close()
    assert torch.equal(torch.get_rng_state(), after)
    assert not any(module.training for module in model.modules())


def _compare_mapped(model: nn.Module, task: Any, drawn: dict[str, Any], expected: torch.Tensor) -> None:
    weights = {name: value.detach() for name, value in model.named_parameters()}

    def alone(one: dict[str, torch.Tensor]) -> torch.Tensor:
        return run_model(task, model, {name: value.unsqueeze(0) for name, value in one.items()}, weights).logits[0]

    torch.testing.assert_close(torch.func.vmap(alone)(drawn), expected, rtol=1e-5, atol=1e-6)


def test_draws_of_no_row_are_refused() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 2)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.inner(nn.functional.dropout(inputs.T, 0.5, self.training).T)

    model, task = Odd().eval(), taking_masks(LossModelOutput(ClassificationModelOutput()))
    masks = DropoutMasks(model, task)
    batch = {"inputs": torch.randn(3, 4), "labels": torch.tensor([0, 1, 1])}
    with pytest.raises(HfTrakError, match=r"of the shape \(4, 3\) in the training, for a batch of 3 rows"):
        masks.drawn(batch, torch.get_rng_state())


@pytest.mark.slow
def test_a_run_without_a_record_says_that_dropout_is_not_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny(dropout=0.1)
    start = copy.deepcopy(model)
    start.save_pretrained(tmp_path / "out" / "checkpoint-0")
    run = trainer(tmp_path, model)
    run.train()
    found = scores_of(replayed(run, tmp_path, Replay(of="run")))
    assert found.abs().min() > 0
    assert "Rows are followed without dropout" in caplog.text


@pytest.mark.slow
def test_other_draws_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = recorded(tmp_path, tiny(dropout=0.3))
    monkeypatch.setattr(DropoutMasks, "drawn", lambda self, batch, state: batch)
    with pytest.raises(HfTrakError, match="The loss of the first batch was"):
        replayed(run, tmp_path, Replay(of="run"), sentences(1, 1))


@pytest.mark.slow
def test_runs_in_bfloat16(tmp_path: Path) -> None:
    """Masks are drawn in the precision of the training, and scores are near those of a run in float32."""
    found = []
    for precision in ({"bf16": True}, {}):
        place = tmp_path / str(precision)
        run = recorded(place, tiny(torch.float32, dropout=0.1), optim="sgd", learning_rate=0.1, **precision)
        found.append(scores_of(replayed(run, place, Replay(of="run"))))
    assert not torch.equal(*found)
    assert float(torch.corrcoef(torch.stack([one.flatten() for one in found]))[0, 1]) > 0.99
