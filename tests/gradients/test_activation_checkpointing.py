"""Layers of transformers are checkpointed while features are computed, in evaluation mode, if the model marks them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from datasets import Dataset
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.gradient_computers import per_sample_gradients
from hf_trak.gradient_computers.environment import checkpointed_layers, differentiating

LAYERS = 3


def made(family: str) -> nn.Module:
    """A tiny model, with dropout wherever its configuration has it."""
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "intermediate_size": 24}
    if family == "gpt2":
        config = GPT2Config(vocab_size=50, n_embd=16, n_layer=LAYERS, n_head=2, n_positions=16, resid_pdrop=0.5,
                            embd_pdrop=0.5, attn_pdrop=0.5)  # fmt: skip
        return GPT2LMHeadModel(config).eval()
    if family == "llama":
        config = LlamaConfig(vocab_size=50, num_key_value_heads=1, attention_dropout=0.5, **small)
        return LlamaForCausalLM(config).eval()
    if family == "mixtral":
        config = MixtralConfig(vocab_size=50, num_key_value_heads=1, num_local_experts=2, attention_dropout=0.5,
                               output_router_logits=True, **small)  # fmt: skip
        return MixtralForCausalLM(config).eval()
    if family == "bert":
        return BertForSequenceClassification(BertConfig(vocab_size=50, **small)).eval()
    if family == "t5":
        config = T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=24, num_layers=LAYERS, num_heads=2)
        return T5ForConditionalGeneration(config).eval()
    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, hidden_dropout_prob=0.5, **small)).eval()


def batch_of(family: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    if family == "vit":
        return {"pixel_values": torch.randn(3, 3, 8, 8, generator=generator)}
    batch = {"input_ids": torch.randint(1, 50, (3, 9), generator=generator)}
    return batch | ({"decoder_input_ids": batch["input_ids"][:, :5]} if family == "t5" else {})


def squared(result: Any, batch: Any) -> Tensor:
    logits = result.logits
    return (logits**2 * torch.linspace(0.5, 1.5, logits.shape[-1])).flatten(1).sum(1)


@contextmanager
def saved_bytes() -> Iterator[list[int]]:
    """Add up what autograd keeps for backward passes. What a checkpoint drops is not in it."""
    total = [0]

    def pack(tensor: Tensor) -> Tensor:
        total[0] += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total


def layers_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


@contextmanager
def counted_runs(model: nn.Module) -> Iterator[list[int]]:
    """Count how often the first attention, or first linear layer, of the model's layers runs."""
    runs = [0]
    inner = [next(module for module in layer.modules() if not list(module.children())) for layer in layers_of(model)]

    def count(*_: Any) -> None:
        runs[0] += 1

    handles = [module.register_forward_hook(count) for module in inner]
    try:
        yield runs
    finally:
        for handle in handles:
            handle.remove()


def modes(model: nn.Module) -> list[tuple[str, bool, Any]]:
    return [(n, m.training, m.__dict__.get("_gradient_checkpointing_func")) for n, m in model.named_modules()]


FAMILIES = ("gpt2", "llama", "mixtral", "bert", "t5", "vit")


@pytest.mark.few(2)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    ("engine", "family"),
    [
        *(("hooked", family) for family in FAMILIES),
        *(pytest.param("iterative", name, marks=pytest.mark.slow if name != "gpt2" else []) for name in FAMILIES),
    ],
)
def test_gradients_are_those_without_checkpointing(family: str, engine: str, reentrant: bool) -> None:
    """They are the same bits, dropout stays off, and every layer runs twice as often."""
    model, batch = made(family), batch_of(family)
    per_sample_gradients(model, batch, squared, engine)  # what is learned about the model once is left out of counts
    with counted_runs(model) as plain, saved_bytes() as whole:
        expected = per_sample_gradients(model, batch, squared, engine)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    before = modes(model)
    per_sample_gradients(model, batch, squared, engine)
    with counted_runs(model) as checkpointed, saved_bytes() as kept:
        found = per_sample_gradients(model, batch, squared, engine)
    assert modes(model) == before
    assert not model.training and layers_of(model)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    assert checkpointed[0] > plain[0] > 0
    assert kept[0] < 0.7 * whole[0]


class OwnDropout(GradientCheckpointingLayer):
    """A layer that drops without a module, and asks its own mode whether to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x).tanh(), 0.9, self.training)


def test_a_layer_that_asks_for_its_mode_is_told_evaluation() -> None:
    layer = OwnDropout().eval()
    x = torch.randn(5, 4)
    expected = layer(x)
    layer.gradient_checkpointing = True
    layer._gradient_checkpointing_func = torch.utils.checkpoint.checkpoint
    with checkpointed_layers(layer):
        found = layer(x)
    found.sum().backward()  # the layer runs again here, outside
    assert torch.equal(found, expected)
    assert not layer.training
    assert layer._gradient_checkpointing_func is torch.utils.checkpoint.checkpoint


def test_modes_come_back_after_an_error() -> None:
    model = made("gpt2")
    model.gradient_checkpointing_enable()
    before = modes(model)
    with pytest.raises(KeyError), differentiating(model, ()):
        assert any(layer.training for layer in layers_of(model))
        raise KeyError
    assert modes(model) == before


def test_every_other_layer() -> None:
    """Layers that are not marked stay as they are."""
    model = made("llama")
    if not hasattr(model, "activation_checkpointing_enable"):
        pytest.skip("an older transformers")
    model.activation_checkpointing_enable(every_n_layers=2)
    with checkpointed_layers(model):
        assert [layer.training for layer in layers_of(model)] == [True, False, True]


def test_generation_keeps_its_cache() -> None:
    """Only what is differentiated is checkpointed: a checkpointed layer gives up the cache."""
    model = made("llama")
    ids = batch_of("llama")["input_ids"]
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    model.gradient_checkpointing_enable()
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)


def trainer_of(directory: Path, checkpointing: bool) -> Trainer:
    ids = torch.randint(1, 50, (12, 9), generator=torch.Generator().manual_seed(1)).tolist()
    arguments = TrainingArguments(
        str(directory), num_train_epochs=1, per_device_train_batch_size=4, report_to=[], use_cpu=True,
        save_strategy="no", gradient_checkpointing=checkpointing, seed=0,
    )  # fmt: skip
    rows = Dataset.from_dict({"input_ids": ids, "labels": ids})
    return Trainer(model=made("gpt2"), args=arguments, train_dataset=rows)


@pytest.mark.slow
def test_a_trainer_with_checkpointing(tmp_path: Path) -> None:
    """`gradient_checkpointing=True` holds for attribution, too: less is kept, and scores are the same bits."""
    weights: dict[str, Tensor] = {}
    found = {}
    for checkpointing in (False, True):
        directory = tmp_path / str(checkpointing)
        trainer = trainer_of(directory, checkpointing)
        if checkpointing:
            trainer.model.gradient_checkpointing_enable()  # as `trainer.train()` does
            trainer.model.load_state_dict(weights)
        else:
            trainer.train()
            weights = trainer.model.state_dict()
        config = TrakConfig(str(directory / "trak"), proj_dim=64, use_cpu=True, budget="fast")
        attributor = TrakAttributor.from_trainer(trainer, config)
        with saved_bytes() as kept:
            attributor.featurize()
        scores = attributor.attribute(trainer.train_dataset.select(range(3)), top_k=12)
        found[checkpointing] = kept[0], scores["trak_indices"], scores["trak_scores"]
    (whole, *expected), (kept_bytes, *same) = found[False], found[True]
    assert same == expected
    assert kept_bytes < 0.7 * whole
