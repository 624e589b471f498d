"""Attribution with `proj_type="factored"`: the same features from every engine, number of processes and division."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sharded_jobs
import torch
from digit_models import DigitNet, digits
from sharded_jobs import attributor, difference, features, made, mesh_of_all, sharded, tensor_parallel
from torch import Tensor, nn
from trak_options import trak_config
from transformers.modeling_outputs import CausalLMOutput, ImageClassifierOutput

from hf_trak import TrakAttributor, TrakConfig, TRAKer, per_sample_gradients
from hf_trak.errors import ConfigMismatchError, GradientEngineError
from hf_trak.featurize.estimate import estimate
from hf_trak.gradient_computers.hooked.computer import HookedGradientComputer
from hf_trak.gradient_computers.hooked.rules import register_layer_rule
from hf_trak.gradient_computers.hooked.rules.linear import linear
from hf_trak.modelout_functions import get_task
from hf_trak.projectors import FactoredProjector
from hf_trak.projectors.reference import factored_matrix
from hf_trak.traker.plugins import projection_identity

SIZE, K = 3, 32
OPTIONS: dict[str, Any] = {"proj_type": f"factored-{SIZE}", "proj_dim": K}

ROUNDING = 1e-5
"""Features are sums over parameters of products that take 10 to 10⁴ additions in float32 (ε = 6·10⁻⁸)."""

pytestmark = pytest.mark.usefixtures("jobs_with_one_thread")


class Reusing(nn.Module):
    """A language model with one table for words and logits, a layer that is called twice, and another operation."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(sharded_jobs.VOCABULARY, 16)
        self.twice = nn.Linear(16, 16)
        self.experts = nn.Parameter(torch.randn(2, 16, 16) / 4)
        self.head = nn.Linear(16, sharded_jobs.VOCABULARY, bias=False)
        self.head.weight = self.words.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> CausalLMOutput:
        hidden = self.words(input_ids)
        hidden = self.twice(torch.tanh(self.twice(hidden)))
        hidden = hidden @ self.experts[0] + torch.tanh(hidden @ self.experts[1])
        return CausalLMOutput(logits=self.head(hidden))


def reusing() -> nn.Module:
    torch.manual_seed(0)
    return Reusing().eval()


class ConvNet(nn.Module):
    """Convolutions with and without groups, a projection of patches, and a small head."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 12, 2, 2)
        self.conv = nn.Conv2d(12, 16, 3, padding=1)
        self.groups = nn.Conv2d(16, 16, 3, groups=2)
        self.head = nn.Linear(64, 10)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> ImageClassifierOutput:
        hidden = torch.tanh(self.conv(torch.tanh(self.patches(pixel_values[:, None]))))
        return ImageClassifierOutput(logits=self.head(torch.tanh(self.groups(hidden)).flatten(1)))


def of_digits(model: nn.Module, directory: Path, **options: Any) -> TrakAttributor:
    config = trak_config(
        output_dir=str(directory), shard_size=4, per_device_batch_size=3, use_cpu=True,
        **{"feature_dtype": "float32", **OPTIONS, **options},
    )  # fmt: skip
    return TrakAttributor(model, config, train_dataset=digits(0, 7), task="image_classification")


def by_the_reference(model: nn.Module, batch: dict[str, Tensor], task: str) -> Tensor:
    """Gradients by plain autograd, times R as it is defined."""
    found = per_sample_gradients(model, batch, task, "iterative")
    grads = torch.cat([one.flatten(1) for one in found.values()], dim=1)
    shapes = [tuple(p.shape) for p in model.parameters()]
    return grads.double() @ torch.from_numpy(factored_matrix(shapes, SIZE, K, 0, 0))


def batch_of(data: Any) -> dict[str, Tensor]:
    return {name: torch.tensor(data[name][:]) for name in data.column_names if name != "source"}


LANGUAGE = {"gpt2": lambda: made("gpt2"), "llama": lambda: made("llama"), "reusing": reusing}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", LANGUAGE)
def test_features_are_those_of_the_definition(name: str, tmp_path: Path) -> None:
    """Of GPT-2 (tied head, Conv1D), Llama, and a model that uses parameters several times."""
    model = LANGUAGE[name]()
    data = sharded_jobs.rows("gpt2")
    one = TrakAttributor(model, config_of(tmp_path), train_dataset=data, task="causal_lm").featurize()
    expected = by_the_reference(model, batch_of(data), "causal_lm")
    assert difference(features(one).double(), expected) <= ROUNDING
    assert len(one.features.projector().matrices) >= 4  # type: ignore[attr-defined]


def config_of(directory: Path, **options: Any) -> TrakConfig:
    return trak_config(
        output_dir=str(directory), shard_size=2, per_device_batch_size=2, use_cpu=True,
        **{"feature_dtype": "float32", **OPTIONS, **options},
    )  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["gpt2", "qwen_moe", "vit"])
def test_engines_agree_and_layers_come_as_factors(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    factors: list[tuple[int, ...]] = []
    add = FactoredProjector.add_factors

    def counted(self: FactoredProjector, sums: Tensor, left: Tensor, right: Tensor, *rest: Any) -> None:
        factors.append((left.shape[2], right.shape[2]))
        add(self, sums, left, right, *rest)

    monkeypatch.setattr(FactoredProjector, "add_factors", counted)
    whole = {}
    for engine in ("hooked", "iterative"):
        one = attributor(made(name), name, tmp_path / engine, engine=engine, **OPTIONS).featurize()
        whole[engine] = features(one)
        if engine == "hooked":
            assert {(16, 16), *_WIDE[name]} <= set(factors)
        factors.clear()
    assert not factors
    assert difference(whole["hooked"], whole["iterative"]) <= ROUNDING


_WIDE = {"gpt2": {(16, 48), (64, 16)}, "qwen_moe": set(), "vit": {(24, 16), (16, 24), (16, 16)}}


@pytest.mark.parametrize("model", [DigitNet, ConvNet])
def test_the_functional_engine_and_convolutions(model: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = model().eval()
    expected = by_the_reference(net, batch_of(digits(0, 7)), "image_classification")
    for engine in ("hooked", "functional"):
        one = of_digits(net, tmp_path / engine, engine=engine).featurize()
        assert difference(features(one).double(), expected) <= ROUNDING


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    model, batch = made("gpt2"), batch_of(sharded_jobs.rows("gpt2"))
    expected = by_the_reference(model, batch, "causal_lm")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    for module in model.modules():  # blocks are checkpointed in training mode alone; dropout stays off
        module.training = type(module).__name__ == "GPT2Block"
    if reentrant:
        model.get_input_embeddings().register_forward_hook(lambda module, given, out: out.requires_grad_(True))
    calls: list[bool] = []
    model.transformer.h[0].mlp.register_forward_pre_hook(lambda *_: calls.append(True))
    shapes = [tuple(p.shape) for p in model.parameters()]
    total = sum(p.numel() for p in model.parameters())
    sink = FactoredProjector(total, K, shapes=shapes, factored_dim=SIZE).sink(7, 0, "cpu")
    HookedGradientComputer(model, get_task("causal_lm"), dtype=None, device="cpu").stream(batch, sink)
    assert difference(sink.result().double(), expected) <= ROUNDING
    assert len(calls) >= 3  # one sample, the batch, and the batch again in the backward pass


def test_a_killed_run_continues_with_the_same_bits(tmp_path: Path) -> None:
    whole = attributor(made("gpt2"), "gpt2", tmp_path, **OPTIONS).featurize()
    before = {path: path.read_bytes() for path in tmp_path.rglob("train-*")}
    assert len(before) == 4
    sorted(before)[1].unlink()
    attributor(made("gpt2"), "gpt2", tmp_path, **OPTIONS).featurize()
    assert {path: path.read_bytes() for path in tmp_path.rglob("train-*")} == before
    scored = attributor(made("gpt2"), "gpt2", tmp_path, **OPTIONS).attribute(sharded_jobs.rows("gpt2", 3, 2))
    assert len(scored) == 3 and whole.features.store.config["factored_dim"] == SIZE


@pytest.mark.parametrize("changed", [{"proj_type": "factored-4"}, {"proj_type": "sjlt"}, {"seed": 1}])
def test_another_map_is_refused(changed: dict[str, Any], tmp_path: Path) -> None:
    attributor(made("vit"), "vit", tmp_path, **OPTIONS).featurize()
    with pytest.raises(ConfigMismatchError, match=r"seed|factored_dim|projection"):
        attributor(made("vit"), "vit", tmp_path, **{**OPTIONS, **changed}).featurize()


@pytest.mark.slow
def test_an_index_that_is_loaded(tmp_path: Path) -> None:
    one = attributor(made("vit"), "vit", tmp_path, **OPTIONS).featurize()
    targets = sharded_jobs.rows("vit", 3, 2)
    loaded = TrakAttributor.from_pretrained(str(tmp_path), made("vit"), use_cpu=True)
    assert loaded.args.proj_type == f"factored-{SIZE}"
    scores = [torch.tensor(each.attribute(targets, top_k=None)["trak_scores"]) for each in (one, loaded)]
    assert torch.equal(*scores)


def test_a_wrong_rule_is_noticed(tmp_path: Path) -> None:
    @register_layer_rule(nn.Linear)
    def wrong(call: Any) -> Any:
        for name, start, block in linear(call):
            yield name, start, block if isinstance(block, Tensor) and name == "bias" else _doubled(block)

    try:
        with pytest.raises(GradientEngineError, match=r"another gradient for parameter '.*weight'"):
            attributor(made("vit"), "vit", tmp_path, engine="hooked", **OPTIONS).featurize()
    finally:
        register_layer_rule(nn.Linear)(linear)


def _doubled(block: Any) -> Any:
    return 2 * block if isinstance(block, Tensor) else type(block)(2 * block.left, block.right)


@pytest.mark.slow
def test_what_does_not_go_together(tmp_path: Path) -> None:
    for other in ({"curvature_whitened": True}, {"curvature": "hybrid"}):
        with pytest.raises(ValueError, match="`proj_type` is 'factored', with"):
            trak_config(proj_type="factored", **other)
    with pytest.raises(ValueError, match="No parameter is large enough"):
        attributor(made("gpt2"), "gpt2", tmp_path, **{**OPTIONS, "proj_type": "factored-64"}).featurize()
    exact = attributor(made("gpt2"), "gpt2", tmp_path / "exact", **OPTIONS)
    assert len(exact.attribute(sharded_jobs.rows("gpt2", 2, 2), method="exact")) == 2  # EK-FAC needs no projection


def test_estimate(tmp_path: Path) -> None:
    args = config_of(tmp_path)
    found = estimate(made("gpt2"), sharded_jobs.rows("gpt2"), args, measure=True, task="causal_lm")
    assert found.proj_dim == K and found.rows_per_second is not None


def test_traker_takes_the_projector_and_records_p(tmp_path: Path) -> None:
    net = DigitNet().eval()
    shapes = [tuple(p.shape) for p in net.parameters()]
    total = sum(p.numel() for p in net.parameters())
    projector = FactoredProjector(total, K, shapes=shapes, factored_dim=SIZE)
    other = FactoredProjector(total, K, shapes=shapes, factored_dim=4)
    assert projection_identity(projector) != projection_identity(other)
    batch = batch_of(digits(0, 7))
    traker = TRAKer(
        net, get_task("image_classification"), 7, save_dir=str(tmp_path), device="cpu", projector=projector,
        proj_dim=K, use_half_precision=False, lambda_reg=1.0,
    )  # fmt: skip
    traker.load_checkpoint(net.state_dict(), 0)
    traker.featurize(batch, num_samples=7)
    traker.finalize_features()
    found = torch.from_numpy(np.load(tmp_path / "0" / "grads.mmap")) * total**0.5
    expected = by_the_reference(net, batch, "image_classification")
    assert difference(found.double(), expected) <= ROUNDING


def job(directory: Path) -> dict[str, Any]:
    """What one process of two finds: of whole models, of models that FSDP2 divides, and of slices of matrices."""
    sharded_model = sharded(made("gpt2"), mesh_of_all())
    divided = attributor(sharded_model, "gpt2", directory / "fsdp", **OPTIONS).featurize()
    whole = attributor(made("gpt2"), "gpt2", directory / "whole", **OPTIONS).featurize()
    slices = tensor_parallel("llama", directory / "model", int(os.environ["WORLD_SIZE"]) // 2)
    sliced = attributor(slices, "llama", directory / "tp", **OPTIONS).featurize()
    expected = attributor(made("llama"), "llama", directory / "llama", **OPTIONS).featurize()
    return {
        "fsdp": difference(features(divided), features(whole)),
        "tensor parallel": difference(features(sliced), features(expected)),
        "features": features(whole).tolist(),
    }


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.usefixtures("jobs_with_one_thread")
def test_two_processes(tmp_path: Path) -> None:
    both = sharded_jobs.in_group(tmp_path, job)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = features(attributor(made("gpt2"), "gpt2", tmp_path / "alone", **OPTIONS).featurize())
    torch.set_num_threads(before)
    for found in both:
        assert found["fsdp"] <= ROUNDING and found["tensor parallel"] <= ROUNDING
        assert torch.equal(torch.tensor(found["features"]), alone)
