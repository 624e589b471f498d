"""The hooked engine in the situations of real training code, and the hazards that module hooks cannot see."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaModel,
)
from transformers.pytorch_utils import Conv1D

from hf_trak.errors import GradientEngineError
from hf_trak.gradient_computers import HookedGradientComputer, make_gradient_computer, per_sample_gradients
from hf_trak.gradient_computers.per_sample import function_task, inputs_taken_by
from hf_trak.modelout_functions.function import FunctionModelOutput


def squared(result: Any, batch: Any) -> Tensor:
    """A smooth scalar per sample."""
    value = result if isinstance(result, Tensor) else result[0] if isinstance(result, tuple) else result["out"]
    return (value.float() ** 2 * torch.linspace(0.5, 1.5, value.shape[-1])).flatten(1).sum(1)


def alone(model: nn.Module, batch: Any, output_fn: Callable[..., Tensor]) -> dict[str, Tensor]:
    """One forward pass and one `autograd.grad` per sample."""
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    mapping = isinstance(batch, dict)
    rows = []
    for i in range(len(next(iter(batch.values())) if mapping else batch[0])):
        single = {k: v[i : i + 1] for k, v in batch.items()} if mapping else tuple(v[i : i + 1] for v in batch)
        result = model(**single) if mapping else model(*single)
        found = torch.autograd.grad(output_fn(result, single).sum(), list(parameters.values()), allow_unused=True)
        rows.append([torch.zeros_like(p) if g is None else g for p, g in zip(parameters.values(), found, strict=True)])
    return {n: torch.stack(column) for n, column in zip(parameters, zip(*rows, strict=True), strict=True)}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-4) -> None:
    assert list(found) == list(expected)
    total = torch.stack([g.float().norm() for g in expected.values()]).norm()
    for name, gradient in expected.items():
        assert found[name].shape == gradient.shape
        error = float((found[name].float() - gradient.float()).norm())
        assert error <= tolerance * float(gradient.float().norm() + 1e-3 * total), name


def check(model: nn.Module, batch: Any, output_fn: Callable[..., Tensor] = squared, tolerance: float = 1e-4) -> None:
    assert_same(per_sample_gradients(model, batch, output_fn, "hooked"), alone(model, batch, output_fn), tolerance)


def perturbed(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def tiny_gpt2(**options: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=16, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
        bos_token_id=0, eos_token_id=0, **options,
    )  # fmt: skip
    mask = torch.ones(4, 9, dtype=torch.long)
    mask[1, 5:], mask[2, :3] = 0, 0
    return perturbed(GPT2LMHeadModel(config)), {"input_ids": torch.randint(1, 50, (4, 9)), "attention_mask": mask}


def lm(result: Any, batch: Any) -> Tensor:
    logits, labels = result.logits[:, :-1].float(), batch["input_ids"][:, 1:]
    picked = logits.gather(-1, labels[..., None]).squeeze(-1) - logits.logsumexp(-1)
    return (picked * batch["attention_mask"][:, 1:]).sum(1)


# --- layers ---------------------------------------------------------------------------------------------------------

IMAGE = (torch.randn(4, 4, 9, 10),)
SIGNAL = (torch.randn(4, 4, 17),)
VOLUME = (torch.randn(3, 4, 5, 6, 5),)
TOKENS = (torch.randn(4, 5, 8),)
LAYERS: list[tuple[str, nn.Module, tuple[Tensor, ...]]] = [
    ("linear", nn.Linear(8, 6), TOKENS),
    ("linear-vectors", nn.Linear(8, 6), (torch.randn(4, 8),)),
    ("linear-no-bias", nn.Linear(8, 6, bias=False), (torch.randn(4, 2, 3, 8),)),
    ("conv1d-gpt2", Conv1D(6, 8), TOKENS),
    ("conv2d", nn.Conv2d(4, 6, 3, padding=1), IMAGE),
    ("conv2d-wide", nn.Conv2d(4, 2, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), IMAGE),
    ("conv2d-groups", nn.Conv2d(4, 8, 3, groups=2, stride=2), IMAGE),
    ("conv2d-depthwise", nn.Conv2d(4, 4, 5, groups=4, padding=2), IMAGE),
    ("conv2d-1x1-stride", nn.Conv2d(4, 3, 1, stride=2), IMAGE),
    ("conv2d-patches", nn.Conv2d(4, 7, 2, stride=2), IMAGE),
    ("conv2d-patches-dilated", nn.Conv2d(4, 7, 2, stride=2, dilation=2), IMAGE),
    ("conv2d-reflect", nn.Conv2d(4, 3, 3, padding=1, padding_mode="reflect"), IMAGE),
    ("conv2d-circular", nn.Conv2d(4, 3, 3, padding=(2, 1), padding_mode="circular"), IMAGE),
    ("conv2d-same", nn.Conv2d(4, 3, 4, padding="same"), IMAGE),
    ("conv2d-valid", nn.Conv2d(4, 3, 4, padding="valid"), IMAGE),
    ("conv1d", nn.Conv1d(4, 6, 5, stride=2, padding=3, dilation=2), SIGNAL),
    ("conv1d-depthwise", nn.Conv1d(4, 4, 3, groups=4), SIGNAL),
    ("conv3d", nn.Conv3d(4, 6, 3, padding=1, stride=(1, 2, 1)), VOLUME),
    ("conv3d-patches", nn.Conv3d(4, 6, (1, 2, 2), stride=(1, 2, 2)), VOLUME),
    ("transposed1d", nn.ConvTranspose1d(4, 6, 4, stride=2, padding=1), SIGNAL),
    ("transposed2d", nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1), IMAGE),
    ("transposed2d-groups", nn.ConvTranspose2d(4, 6, 3, groups=2, dilation=2), IMAGE),
    ("transposed3d", nn.ConvTranspose3d(4, 2, 2, stride=2), VOLUME),
    ("layer-norm", nn.LayerNorm(8), TOKENS),
    ("layer-norm-2d", nn.LayerNorm((5, 8)), TOKENS),
    ("rms-norm", nn.RMSNorm(8), TOKENS),
    ("group-norm", nn.GroupNorm(2, 4), IMAGE),
    ("group-norm-vectors", nn.GroupNorm(2, 8), (torch.randn(4, 8),)),
    ("batch-norm", nn.BatchNorm2d(4), IMAGE),
    ("batch-norm-vectors", nn.BatchNorm1d(8), (torch.randn(4, 8),)),
    ("instance-norm", nn.InstanceNorm2d(4, affine=True), IMAGE),
    ("embedding", nn.Embedding(30, 6, padding_idx=2), (torch.randint(0, 30, (4, 7)),)),
    ("embedding-padding", nn.Embedding(4, 6, padding_idx=-1), (torch.randint(0, 4, (4, 7)),)),
    ("prelu", nn.PReLU(4), IMAGE),
    ("bilinear", nn.Bilinear(8, 8, 3), (torch.randn(4, 8), torch.randn(4, 8))),
    ("lstm", nn.LSTM(8, 5, 2, batch_first=True, bidirectional=True), TOKENS),
    ("gru-sequence-first", nn.Sequential(), (torch.randn(4, 3, 8),)),
]


class SequenceFirstGRU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(0, 1))[0].transpose(0, 1)


class Wrapped(nn.Module):
    """The layer between two others, so that it is neither first nor last."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Tensor) -> Tensor:
        result = self.layer(*inputs)
        return torch.tanh(result[0] if isinstance(result, tuple) else result)


@pytest.mark.few(28)
@pytest.mark.parametrize(("name", "layer", "batch"), LAYERS, ids=[name for name, _, _ in LAYERS])
def test_layer(name: str, layer: nn.Module, batch: tuple[Tensor, ...]) -> None:
    """Every layer rule, and modules without one, against plain autograd on each sample alone."""
    torch.manual_seed(0)
    if name == "gru-sequence-first":
        layer = SequenceFirstGRU()
    if "batch-norm" in name:
        layer.train()
        for _ in range(3):
            layer(torch.randn(9, *batch[0].shape[1:]) * 2 + 1)
    model = perturbed(Wrapped(layer))
    check(model, batch)
    for only in [n for n, _ in model.named_parameters()]:
        expected = {only: alone(model, batch, squared)[only]}
        assert_same(per_sample_gradients(model, batch, squared, "hooked", [only]), expected)


def test_blocks_stay_below_the_limit() -> None:
    """A large parameter comes in slices; together they are the whole gradient."""
    model, batch = tiny_gpt2()
    task = function_task(lm, model)
    computer = HookedGradientComputer(model, task, None, torch.float32, "cpu")
    computer.max_block_bytes = 4 * 4 * 16 * 4  # four rows of width 16 for four samples
    total, sizes = torch.zeros(4, computer.grad_dim), []

    def sink(start: int, block: Tensor) -> None:
        sizes.append(block.numel() * 4)
        total[:, start : start + block.shape[1]] += block

    computer.stream(batch, sink)
    widest_row = 4 * 64 * 4  # one row of the widest layer for four samples
    assert max(sizes) <= max(computer.max_block_bytes, widest_row)
    expected = torch.cat([g.flatten(1) for g in alone(model, batch, lm).values()], 1)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5)


# --- hazards --------------------------------------------------------------------------------------------------------


class RelativeBias(nn.Module):
    """Hazard (a): a table without a batch dimension, looked up once and added to every sample's scores."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.bias = nn.Embedding(9, 2)
        self.table = nn.Parameter(torch.randn(25, 2))
        self.norm = nn.LayerNorm(2)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        positions = torch.arange(length)
        index = (positions[:, None] - positions[None]).clamp(-4, 4) + 4
        heads = self.project(x).view(*x.shape[:2], 2, 4).transpose(1, 2)
        scores = heads @ heads.transpose(-1, -2)
        scores = scores + self.norm(self.bias(index)).permute(2, 0, 1).unsqueeze(0)
        scores += self.table[(positions[:, None] * 0 + positions[None]) % 25].permute(2, 0, 1)
        return (scores.softmax(-1) @ heads).transpose(1, 2).reshape(x.shape)


class Positions(nn.Module):
    """Hazard (a'): rows of tables that all samples look up, some of them twice, one without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.padded = nn.Embedding(40, 8), nn.Embedding(9, 8, padding_idx=2)
        self.scaled, self.project = nn.Embedding(7, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(x.shape[1]) // 2
        h = self.project(x + self.places(ids * 9) + self.padded(ids[None]))
        return h + self.scaled(ids) * 2


class Windows(nn.Module):
    """Hazard (b): windows folded into the leading dimension, in front of a linear layer, a norm and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.conv = nn.Linear(8, 8), nn.LayerNorm(8), nn.Conv1d(8, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        windows = x.reshape(-1, 3, 8)
        windows = self.norm(torch.relu(self.linear(windows)))
        return self.conv(windows.transpose(1, 2)).reshape(x.shape[0], -1)


class SequenceMajor(nn.Module):
    """Hazard (b): tokens flattened with the samples of one position next to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.transpose(0, 1).reshape(-1, 8)
        return torch.relu(self.linear(flat)).view(x.shape[1], x.shape[0], 8).transpose(0, 1)


class Routed(nn.Module):
    """Hazard (b): tokens go to experts, whose rows belong to samples in no order that a shape could tell."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.before = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.before(x) + self._moe(x)

    def _moe(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 8)
        weights, choice = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows = (choice == i).nonzero().squeeze(1)
            if len(rows):
                out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, None])
        return out.view(x.shape)


class RoutedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.moe, self.last = nn.Linear(8, 8), Routed(), nn.Linear(8, 8)
        self.more = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.moe(torch.tanh(self.first(x)))
        for layer in self.more:
            x = torch.tanh(layer(x))
        return self.last(x)


class Loose(nn.Module):
    """Hazard (c): parameters used through functions."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.query = nn.Parameter(torch.randn(2, 8))
        self.positions = nn.Parameter(torch.randn(1, 8, 8))
        self.scale = nn.Parameter(torch.randn(8))
        self.temperature = nn.Parameter(torch.tensor(0.3))
        self.joint = nn.Parameter(torch.randn(16, 8))
        self.out = nn.Parameter(torch.randn(8, 3))
        self.conv = nn.Parameter(torch.randn(8, 1, 3))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.cross = nn.MultiheadAttention(8, 2)
        self.never_called = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[0]
        x = torch.cat([self.token.expand(size, -1, -1), x, self.query.unsqueeze(0).repeat(size, 1, 1)], 1)
        x = x + self.positions[:, : x.shape[1]]
        left, right = F.linear(x, self.joint).chunk(2, -1)
        x = F.linear(left, self.joint[:8]) + torch.sigmoid(right) * torch.exp(self.scale)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        first = x.transpose(0, 1)
        x = x + self.cross(first[:3], first, torch.tanh(first))[0].mean(0).unsqueeze(1)
        x = x + F.conv1d(x.transpose(1, 2), self.conv, padding=1, groups=8).transpose(1, 2)
        x = torch.addmm(self.never_called.bias, x.reshape(-1, 8), self.never_called.weight).view(x.shape)
        x = x * self.temperature.exp()
        return x @ self.out


@pytest.mark.few(10)
@pytest.mark.parametrize("kind", [RelativeBias, Positions, Windows, SequenceMajor, RoutedBlock, Loose])
@pytest.mark.parametrize("size", [4, 6])
def test_hazards(kind: type[nn.Module], size: int) -> None:
    """With five or six tokens and four or six samples: sizes must not be taken for one another."""
    torch.manual_seed(0)
    length = {Windows: 6, Loose: 5}.get(kind, 6)
    check(perturbed(kind()), (torch.randn(size, length, 8),))


def test_weight_norm_and_parametrizations() -> None:
    torch.manual_seed(0)
    weight_norm = nn.utils.parametrizations.weight_norm
    model = nn.Sequential(weight_norm(nn.Conv1d(4, 6, 3)), nn.Tanh(), weight_norm(nn.Linear(15, 5)))
    check(perturbed(model), SIGNAL)


def test_tied_and_reused_layers_add_up() -> None:
    """A layer called three times, and a table that is embedding and head at once."""

    class Reused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.block = nn.Embedding(12, 8), nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh())
            self.head = nn.Linear(8, 12, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for _ in range(3):
                x = x + self.block(x)
            return self.head(x) + F.linear(x, self.embed.weight)

    torch.manual_seed(0)
    check(perturbed(Reused()), (torch.randint(0, 12, (4, 5)),))


def test_in_place_operations() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 5, 3), nn.ReLU(inplace=True), nn.Conv2d(5, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
    )
    check(perturbed(model), IMAGE)


def test_input_changed_in_place_is_refused() -> None:
    """A kept input that is overwritten would give wrong gradients: an error, and another engine under `auto`."""

    class Overwrites(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x) + 0
            y = self.second(h)
            h.mul_(2.0)
            return y

    torch.manual_seed(0)
    model, batch = perturbed(Overwrites()), (torch.randn(3, 8),)
    names = ["first.weight", "second.weight"]
    with pytest.raises(GradientEngineError, match="in its backward pass"):
        per_sample_gradients(model, batch, squared, "hooked", names, self_check=False)


@pytest.mark.parametrize("form", ["tuple", "dict", "tensor"])
def test_model_results(form: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Any:
            y = self.linear(x)
            return {"tuple": (y, None), "dict": {"out": y, "flag": True}, "tensor": y}[form]

    torch.manual_seed(0)
    check(Model(), (torch.randn(4, 8),))


# --- training set-ups -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_implementations_and_padding(attention: str) -> None:
    model, batch = tiny_gpt2(attn_implementation=attention)
    check(model, batch, lm)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_activation_checkpointing(family: str, reentrant: bool) -> None:
    model, batch = tiny_gpt2()
    output = lm
    if family == "llama":
        config = LlamaConfig(
            vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1,
        )  # fmt: skip
        model = perturbed(LlamaModel(config))

        def output(result: Any, batch: Any) -> Tensor:
            return squared(result.last_hidden_state * batch["attention_mask"][..., None], batch)

    expected = alone(model, batch, output)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.train()
    if reentrant:
        model.get_input_embeddings().register_forward_hook(lambda m, i, o: o.requires_grad_(True))
    assert_same(per_sample_gradients(model, batch, output, "hooked"), expected)
    assert model.training


def test_lora_counts_adapters_only() -> None:
    peft = pytest.importorskip("peft")
    model, batch = tiny_gpt2()
    config = peft.LoraConfig(r=2, target_modules=["c_attn", "c_proj"], init_lora_weights=False, fan_in_fan_out=True)
    model = peft.get_peft_model(model, config).eval()
    found = per_sample_gradients(model, batch, lm, "hooked")
    assert found and all("lora_" in name for name in found)
    assert_same(found, alone(model, batch, lm))


def test_frozen_parameters_and_grad_wrt() -> None:
    """Frozen and unnamed parameters are not counted."""
    model, batch = tiny_gpt2()
    everything = alone(model, batch, lm)
    model.transformer.wte.requires_grad_(False)
    found = per_sample_gradients(model, batch, lm, "hooked")
    assert "transformer.wte.weight" not in found
    assert_same(found, {n: g for n, g in everything.items() if n != "transformer.wte.weight"})
    named = ["transformer.wte.weight", "transformer.h.1.ln_2.bias"]
    assert_same(per_sample_gradients(model, batch, lm, "hooked", named), {n: everything[n] for n in named})
    assert not model.transformer.wte.weight.requires_grad


def test_half_precision() -> None:
    """A bf16 model and autocast, as close to plain autograd as their rounding."""
    model, batch = tiny_gpt2()
    exact = alone(model, batch, lm)
    with torch.autocast("cpu", torch.bfloat16):
        found = per_sample_gradients(model, batch, lm, "hooked")
        assert_same(found, alone(model, batch, lm), 0.1)
    assert {g.dtype for g in found.values()} == {torch.float32}
    model = model.to(torch.bfloat16)
    found = per_sample_gradients(model, batch, lm, "hooked")
    assert {g.dtype for g in found.values()} == {torch.bfloat16}
    weights = [n for n in exact if n.endswith("weight")]
    assert_same({n: found[n] for n in weights}, {n: exact[n] for n in weights}, 0.15)


def test_double_precision_equals_plain_autograd_to_rounding() -> None:
    model, batch = tiny_gpt2()
    model = model.double()
    expected = alone(model, batch, lambda result, batch: lm(result, batch).double())
    check(model, batch, lm, 1e-5)
    assert expected


def test_company_independence() -> None:
    """A sample's gradient is the same alone, in any batch, and at any padding length that its mask covers."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=32, num_labels=3,
    )  # fmt: skip
    model = perturbed(BertForSequenceClassification(config))
    task = function_task(lambda result, batch: result.logits[:, 0] - result.logits.logsumexp(1), model)
    computer = HookedGradientComputer(model, task, None, torch.float32, "cpu")
    ids = torch.randint(1, 40, (1, 6))

    def first(others: int, length: int) -> Tensor:
        batch_ids = torch.randint(1, 40, (1 + others, length))
        mask = torch.ones_like(batch_ids)
        batch_ids[0, :6], mask[0, 6:] = ids[0], 0
        found = computer.compute_per_sample_grad({"input_ids": batch_ids, "attention_mask": mask})
        return torch.cat([gradient[0].flatten() for gradient in found.values()])

    reference = first(0, 6)
    for others, length in ((0, 9), (1, 6), (2, 9), (5, 9), (8, 9), (6, 7), (5, 6)):
        assert float((first(others, length) - reference).norm() / reference.norm()) < 1e-5, (others, length)


def test_images_of_different_sizes_in_different_batches() -> None:
    torch.manual_seed(0)
    model = perturbed(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    )
    computer = make_gradient_computer("auto", model, function_task(squared, model))
    for size, side in ((4, 8), (3, 11), (5, 8), (1, 9)):
        batch = (torch.randn(size, 3, side, side),)
        total = torch.zeros(size, computer.layout.total)

        def sink(start: int, block: Tensor, total: Tensor = total) -> None:
            total[:, start : start + block.shape[1]] += block

        computer.stream(batch, sink)
        expected = torch.cat([g.flatten(1) for g in alone(model, batch, squared).values()], 1)
        torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5)
    assert computer.engine == "hooked"


def test_hooks_leave_nothing_behind() -> None:
    """Also after an exception in the sink, in the middle of the backward pass."""
    model, batch = tiny_gpt2()
    model.transformer.h[0].requires_grad_(False)
    model.train()
    model.transformer.h[1].eval()
    computer = HookedGradientComputer(model, function_task(lm, model), None, torch.float32, "cpu")

    def state() -> Any:
        return (
            [(n, p.requires_grad, p.grad is None) for n, p in model.named_parameters()],
            [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks), sorted(vars(m))) for m in model.modules()],
            model.config.use_cache,
            torch.is_grad_enabled(),
        )

    before = state()
    computer.stream(batch, lambda start, block: None)
    assert state() == before

    def failing(start: int, block: Tensor) -> None:
        raise KeyError("in the sink")

    with pytest.raises(KeyError, match="in the sink"):
        computer.stream(batch, failing)
    assert state() == before
    loss = lm(model(**batch), batch).sum()
    loss.backward()
    assert model.transformer.h[1].mlp.c_fc.weight.grad is not None


def test_no_weight_gradients_are_formed_by_autograd() -> None:
    """The promise of one backward pass: no parameter is part of the graph that runs backward."""
    model, batch = tiny_gpt2()
    leaves: list[Tensor] = []

    class Task(FunctionModelOutput):
        def output(self, model_output: Any, batch: Any, side: Any = "train") -> Tensor:
            f = super().output(model_output, batch, side)
            waiting, visited = [f.grad_fn], set()
            while waiting:
                node = waiting.pop()
                if node is None or node in visited:
                    continue
                visited.add(node)
                if hasattr(node, "variable"):
                    leaves.append(node.variable)
                waiting += [following for following, _ in node.next_functions]
            return f

    task = Task(lm, model_inputs_fn=inputs_taken_by(model))
    HookedGradientComputer(model, task, None, torch.float32, "cpu").stream(batch, lambda s, b: None)
    assert leaves and all(leaf.ndim == 0 for leaf in leaves)


def test_parameters_of_two_modules_are_replayed_in_what_encloses_both() -> None:
    """The common beginning of their names, not every position at which the names agree."""

    class Weights(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.default = nn.ParameterDict({"weight": nn.Parameter(torch.randn(6))})

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = Weights(), Weights()

        def forward(self, x: Tensor) -> Tensor:
            both = torch.stack([self.left.default["weight"], self.right.default["weight"]])
            return torch.einsum("bi,ki->bk", x, both)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.mixed, self.last = nn.Linear(6, 6), Mixed(), nn.Linear(2, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"out": self.last(self.mixed(self.first(x).tanh()))}

    torch.manual_seed(0)
    model, batch = Model(), (torch.randn(4, 6),)
    computer = make_gradient_computer("hooked", model, function_task(squared, model))
    computer.stream(batch, lambda start, block: None)
    assert isinstance(computer._computer, HookedGradientComputer)
    assert list(computer._computer._model_trace.replayed) == ["mixed"]
    check(model, batch)


@pytest.mark.parametrize("changed", ["nothing", "before", "after"])
def test_rows_of_a_table_that_all_samples_look_up(changed: str) -> None:
    """Some twice, some by negative numbers, taken apart into heads; and rows that are changed in place on the way."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(7, 3))
            self.lookup = nn.Embedding(6, 3)
            self.out = nn.Linear(5, 4)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            rows = self.table[torch.tensor([0, -1, 3, 3, -7])]
            if changed == "before":
                rows.mul_(3.0)
            heads = rows.permute(1, 0).contiguous().unsqueeze(0) * 2.0
            if changed == "after":
                rows.mul_(3.0)
            positions = self.lookup(torch.tensor([5, 0, 0, 2, 1]))
            return {"out": self.out(x[:, None] * heads + positions.T) + (rows + positions).sum(0)[None, :, None]}

    torch.manual_seed(0)
    check(Model(), (torch.randn(4, 5),))


def test_lookups_of_the_engine_are_not_taken_for_the_models() -> None:
    """A layer that is called without the batch, as DoRA does to get at the weight that two layers make."""

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 5, bias=False)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            weight = self.up(self.down(torch.eye(6))).T
            norm = weight.detach().norm(dim=1)
            return {"out": self.up(self.down(x)) / norm}

    torch.manual_seed(0)
    model, batch = Product(), (torch.randn(4, 6),)
    computer = make_gradient_computer("hooked", model, function_task(squared, model))
    computer.stream(batch, lambda start, block: None)
    assert isinstance(computer._computer, HookedGradientComputer)
    assert not computer._computer._model_trace.replayed
    check(model, batch)
