"""A batch's gradients and features are computed without waiting for the device, in few launches, and written once.

What would be launched on a GPU is counted on the CPU, see `tests/kit/device_counts.py`; with a GPU, CUDA itself tells
about waits.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from device_counts import as_on_a_gpu
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    SwinConfig,
    SwinForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.pytorch_utils import Conv1D

from hf_trak.featurize.batch_counts import featurizing_counts
from hf_trak.gradient_computers import HookedGradientComputer
from hf_trak.gradient_computers.hooked.rules import embedding, linear
from hf_trak.gradient_computers.hooked.workspace import OuterBlock
from hf_trak.gradient_computers.layout import ParameterLayout
from hf_trak.gradient_computers.per_sample import function_task
from hf_trak.projectors import make_projector
from hf_trak.runtime.counting import Counting, Counts

Case = tuple[nn.Module, dict[str, Tensor], Callable[[Any, Any], Tensor]]

B = 4


def margin(result: Any, batch: Any) -> Tensor:
    return result.logits[:, 0] - result.logits[:, 1:].logsumexp(1)


def loss(result: Any, batch: Any) -> Tensor:
    labels = batch["input_ids"][:, 1:]
    picked = nn.functional.cross_entropy(result.logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="none")
    return picked.view(labels.shape).sum(1)


def gpt2() -> Case:
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=32, vocab_size=100, bos_token_id=0, eos_token_id=0)
    ids = torch.randint(0, 100, (B, 16))
    return GPT2LMHeadModel(config), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, loss


def bert() -> Case:
    config = BertConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=2, vocab_size=100
    )
    ids = torch.randint(1, 100, (B, 16))
    mask = torch.ones_like(ids)
    mask[1, 10:] = 0
    return BertForSequenceClassification(config), {"input_ids": ids * mask, "attention_mask": mask}, margin


def vit() -> Case:
    config = ViTConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=2, image_size=16, patch_size=4
    )
    return ViTForImageClassification(config), {"pixel_values": torch.randn(B, 3, 16, 16)}, margin


def resnet() -> Case:
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    return ResNetForImageClassification(config), {"pixel_values": torch.randn(B, 3, 32, 32)}, margin


def swin() -> Case:
    config = SwinConfig(
        image_size=16, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=2, num_labels=3
    )
    return SwinForImageClassification(config), {"pixel_values": torch.randn(B, 3, 16, 16)}, margin


def lora_llama() -> Case:
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=2, vocab_size=100
    )
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=4, target_modules="all-linear"))
    ids = torch.randint(0, 100, (B, 16))
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, loss


def wide() -> Case:
    """A layer whose gradient takes several splits of the sparse map, which are added up."""
    model = nn.Sequential(nn.Linear(1024, 1024))
    return model, {"input": torch.randn(B, 16, 1024)}, lambda result, batch: result.square().sum((1, 2))


CASES = (gpt2, bert, vit, resnet, swin, lora_llama)


@dataclass(frozen=True)
class Steps:
    """Featurizing a batch of a model, and a plain training step on it."""

    model: nn.Module
    featurize: Callable[[], Tensor]
    plain: Callable[[], None]


def steps(case: Case, device: str) -> Steps:
    model, batch, output_fn = case
    model.to(device).eval()
    batch = {name: value.to(device) for name, value in batch.items()}
    grad_dim = ParameterLayout.from_model(model).total
    projector = make_projector("sjlt", grad_dim=grad_dim, proj_dim=4096, seed=0, device=device)
    computer = HookedGradientComputer(model, function_task(output_fn, model), None, None, None)

    def featurize() -> Tensor:
        sink = projector.sink(len(next(iter(batch.values()))), 0, device)
        computer.stream(batch, sink)
        return sink.result()

    def plain() -> None:
        model.zero_grad(set_to_none=True)
        output_fn(model(**batch), batch).sum().backward()

    return Steps(model, featurize, plain)


def counted(step: Callable[[], object]) -> Counting:
    """Count a step after the first batch, which is traced."""
    with as_on_a_gpu(Counting()):
        step()
    counting = Counting()
    with as_on_a_gpu(counting), counting:
        step()
    return counting


@cache
def both(case: Callable[[], Case]) -> tuple[nn.Module, Counting, Counting]:
    """A model, what featurizing a batch costs, and what a plain step costs."""
    torch.manual_seed(0)
    made = steps(case(), "cpu")
    return made.model, counted(made.featurize), counted(made.plain)


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers with attributed parameters."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and any(p.requires_grad for p in module.parameters(recurse=False))
    }


def gradient_bytes(module: nn.Module) -> int:
    return sum(B * 4 * p.numel() for p in module.parameters(recurse=False) if p.requires_grad)


def written_by_operators(counts: Counts) -> int:
    return sum(size for name, size in counts.written.items() if name not in ("sjlt", "reduce"))


def require_few_launches(model: nn.Module, ours: Counting) -> None:
    """A product and a sum over tokens, each projected; partial sums of large blocks are added up."""
    for name in linear_layers(model):
        found = ours.sections[name].launches
        assert found.total() <= 4 + found["reduce"], name
        assert found["reduce"] <= found["sjlt"] <= 2, name


def require_written_once(model: nn.Module, ours: Counting) -> None:
    """Every element of a linear layer's gradient is written at most once, and read once, by the sparse map."""
    for name, module in linear_layers(model).items():
        found, size = ours.sections[name], gradient_bytes(module)
        assert written_by_operators(found) <= size, name
        # the map adds blocks without partial sums to B × k sums in place
        sums = B * 4096 * 4 * (found.launches["sjlt"] - found.launches["reduce"])
        assert found.read["sjlt"] - sums == size, name


@pytest.mark.few(2)
@pytest.mark.parametrize("case", CASES)
def test_nothing_waits(case: Callable[[], Case]) -> None:
    """Count what waits beyond the plain step; some plain steps compare masks."""
    _, ours, theirs = both(case)
    assert dict(ours.total.waits - theirs.total.waits) == {}


@pytest.mark.parametrize("case", [*CASES, wide])
def test_linear_layers_take_few_launches(case: Callable[[], Case]) -> None:
    model, ours, theirs = both(case)
    require_few_launches(model, ours)
    extra = ours.total.launches.total() - theirs.total.launches.total()
    others = len(ours.sections.keys() - linear_layers(model).keys())
    assert extra <= 12 * len(linear_layers(model)) + 12 * others


@pytest.mark.parametrize("case", [*CASES, wide])
def test_gradients_are_written_and_read_once(case: Callable[[], Case]) -> None:
    model, ours, _ = both(case)
    require_written_once(model, ours)


def test_tables_that_all_samples_look_up_take_as_many_launches_for_any_number_of_samples() -> None:
    """Positions, and relative ones that are taken apart into heads."""
    for case in (bert, swin):
        model, batch, output_fn = case()
        whole, part = (
            counted(steps((model, {name: value[:rows] for name, value in batch.items()}, output_fn), "cpu").featurize)
            for rows in (B, B // 2)
        )
        assert whole.total.launches == part.total.launches


def test_products_cost_as_many_operations_as_those_of_plain_weight_gradients() -> None:
    for case in (gpt2, lora_llama):
        _, ours, theirs = both(case)
        assert ours.total.flops == theirs.total.flops


@pytest.mark.few(2)
@pytest.mark.parametrize("case", [gpt2, bert, vit, lora_llama])
def test_estimates_foretell_what_the_engine_launches(case: Callable[[], Case]) -> None:
    model, ours, _ = both(case)
    _, batch, output_fn = case()
    found = featurizing_counts(model, function_task(output_fn, model), batch, ParameterLayout.from_model(model))
    assert found.launches.total() == pytest.approx(ours.total.launches.total(), rel=0.15)
    assert found.flops == pytest.approx(ours.total.flops, rel=0.01)


def with_item(values: Tensor, trailing: int = 1) -> Tensor:
    values.sum().item()
    return over_tokens(values, trailing)


def with_another_launch(values: Tensor, trailing: int = 1) -> Tensor:
    return over_tokens(values, trailing).neg_()


def with_copies(*args: Any) -> Iterator[Any]:
    for name, start, block in outer_pieces(*args):
        assert not isinstance(block, OuterBlock)
        yield name, start, block.clone()


over_tokens, outer_pieces = linear.over_tokens, linear.outer_pieces


@pytest.mark.slow
def test_planted_waits_launches_and_copies_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail."""
    made = steps(vit(), "cpu")
    clean = counted(made.featurize)
    require_few_launches(made.model, clean)
    require_written_once(made.model, clean)
    with monkeypatch.context() as patch:
        patch.setattr(linear, "over_tokens", with_item)
        assert counted(made.featurize).total.waits == Counter({"_local_scalar_dense": len(linear_layers(made.model))})
    with monkeypatch.context() as patch:
        patch.setattr(linear, "over_tokens", with_another_launch)
        with pytest.raises(AssertionError, match=r"^vit"):
            require_few_launches(made.model, counted(made.featurize))
    with monkeypatch.context() as patch:
        patch.setattr(linear, "outer_pieces", with_copies)
        with pytest.raises(AssertionError, match=r"^vit"):
            require_written_once(made.model, counted(made.featurize))


def test_embeddings_that_are_not_copied_ahead_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    made = steps(bert(), "cpu")
    rule = embedding.embedding_pieces
    monkeypatch.setattr(embedding, "embedding_pieces", lambda ids, *args: rule(ids.clone(), *args))
    assert counted(made.featurize).total.waits["numpy"] == 2  # positions are no batch


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", [gpt2, bert, vit, resnet, lora_llama])
def test_nothing_waits_for_a_gpu(case: Callable[[], Case]) -> None:
    """CUDA raises an error at the first operator that would."""
    model, batch, output_fn = case()
    batch.pop("attention_mask", None)  # a model waits to see whether it hides anything
    featurize = steps((model, batch, output_fn), "cuda").featurize
    expected = featurize()
    featurize()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = featurize()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
