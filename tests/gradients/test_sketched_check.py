"""The check of the first batch on large models: gradients are compared as sketches, with memory for one parameter."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_trak.errors import GradientEngineError
from hf_trak.gradient_computers import self_check
from hf_trak.gradient_computers import tolerance as gradient_sketch
from hf_trak.gradient_computers.auto import AutoGradientComputer
from hf_trak.gradient_computers.hooked.rules import linear as linear_rule
from hf_trak.gradient_computers.layout import ParameterLayout
from hf_trak.gradient_computers.tolerance import GradientSketch, each_gradient
from hf_trak.modelout_functions import CausalLMModelOutput


@pytest.fixture
def sketched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "SKETCHED_FROM", 1)


def llama(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).eval().to(dtype)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 64, (3, 8), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def streamed(model: nn.Module) -> AutoGradientComputer:
    computer = AutoGradientComputer(model, CausalLMModelOutput(), dtype=None, device="cpu", engines=("hooked",))
    computer.stream(batch(), lambda start, block: None)
    return computer


def test_a_sketch_has_the_norms_and_is_linear():
    layout = ParameterLayout.from_model(llama())
    sketch = GradientSketch(layout)
    gradients = torch.randn(2, layout.total)
    sums = sketch.empty(2)
    for start in range(0, layout.total, 999):  # blocks across parameters
        sketch.add(sums, start, gradients[:, start : start + 999])
    for slot, place in zip(layout.slots, sketch.layout.slots, strict=True):
        norm = gradients[:, slot.offset : slot.offset + slot.numel].norm(dim=1)
        found = sums[:, place.offset : place.offset + place.numel].norm(dim=1)
        # five standard deviations of 1/√(2 · 256)
        torch.testing.assert_close(found, norm, rtol=5 / (2 * gradient_sketch.WIDTH) ** 0.5, atol=0)
    whole = sketch.empty(2)
    sketch.add(whole, 0, gradients)
    torch.testing.assert_close(whole, sums, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_right_gradients_pass(sketched, dtype):
    model = llama(dtype)
    assert streamed(model).engine == "hooked"
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_layer_is_named(sketched, monkeypatch, dtype):
    original = linear_rule.linear_pieces

    def wrong(x, grad, *args, **options):
        if grad.shape[-1] == 24:  # gate and up projections
            x = x.roll(1, dims=1)
        return original(x, grad, *args, **options)

    monkeypatch.setattr(linear_rule, "linear_pieces", wrong)
    with pytest.raises(GradientEngineError, match=r"parameter 'model.layers.\d.mlp.(gate|up)_proj.weight'"):
        streamed(llama(dtype))


def test_a_random_model_is_refused(sketched):
    model = llama()
    model.model.layers[0].mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.5))
    model.model.layers[0].mlp.act_fn.train()
    with pytest.raises(GradientEngineError, match="random"):
        streamed(model)


def test_gradients_arrive_one_by_one_and_what_was_there_stays():
    layer = nn.Linear(3, 2)
    layer.weight.grad = torch.full((2, 3), 7.0)
    x = torch.randn(4, 3)
    found: dict[str, torch.Tensor] = {}
    each_gradient(layer(x).square().sum(), dict(layer.named_parameters()), found.__setitem__)
    expected = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    assert torch.equal(found["weight"], expected[0]) and torch.equal(found["bias"], expected[1])
    assert layer.bias.grad is None and torch.equal(layer.weight.grad, torch.full((2, 3), 7.0))


@pytest.mark.slow
def test_memory_of_the_check_does_not_grow_with_the_layers():
    """Llama 3.2 1B with two layers, 384 million parameters: three times the gradient of its embedding, and blocks."""
    path = Path(__file__).parents[2] / "benchmarks" / "large_lm.py"
    spec = importlib.util.spec_from_file_location("large_lm", path)
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    # in float32: processors without instructions for bfloat16 multiply it a hundred times slower
    case = {**benchmark.BILLION[0], "dtype": "float32", "layers": 2, "tokens": 16, "threads": 1}
    found = benchmark.measured("1b", case)
    assert found["parameters"] >= gradient_sketch.SKETCHED_FROM
    assert found["peak"] < 3 * 128256 * 2048 * 4 + 3 * 2**25 + 128 * 2**20 < 4 * found["weights"]
    assert found["weights"] + found["peak"] < found["estimated featurize_memory"]
