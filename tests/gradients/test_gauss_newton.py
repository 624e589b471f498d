"""Products with the Gauss-Newton matrix against matrices that are written out, for the kinds of models and tasks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from hf_trak.errors import GradientEngineError
from hf_trak.gradient_computers.gauss_newton import GaussNewton
from hf_trak.gradient_computers.layout import ParameterLayout
from hf_trak.modelout_functions import FunctionModelOutput, get_task
from hf_trak.modelout_functions.loss import LossModelOutput

Batch = dict[str, Tensor]
Made = tuple[nn.Module, str, Batch, Tensor]
"""A model, its task, a batch, and the Hessian of the loss by the logits, all positions in a row."""

VOCABULARY = 23
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
TEXT: dict[str, Any] = {"hidden_size": 8, "vocab_size": VOCABULARY, **SMALL}


def tokens() -> Batch:
    """Three rows, one of them padded; some positions carry no label."""
    ids = torch.randint(2, VOCABULARY, (3, 6))
    attention = torch.ones_like(ids)
    attention[1, 4:] = 0
    labels = ids.masked_fill(attention == 0, -100)
    labels[2, :3] = -100
    return {"input_ids": ids, "attention_mask": attention, "labels": labels}


def images(size: int) -> Batch:
    return {"pixel_values": torch.randn(3, 3, size, size), "labels": torch.tensor([0, 4, 1])}


def counted(labels: Tensor, causal: bool) -> Tensor:
    """Mark the logits whose positions are in the loss."""
    if not causal:
        return labels != -100
    return torch.cat([labels[:, 1:] != -100, torch.zeros_like(labels[:, :1], dtype=torch.bool)], 1)


def gpt2() -> tuple[nn.Module, str, Batch]:
    """Its head is its table of embeddings."""
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 8}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=1, **sizes)), "causal_lm", (
        tokens()
    )  # fmt: skip


def llama() -> tuple[nn.Module, str, Batch]:
    config = LlamaConfig(**{**TEXT, "num_attention_heads": 4, "num_key_value_heads": 2}, tie_word_embeddings=True)
    return LlamaForCausalLM(config), "causal_lm", tokens()


def lora() -> tuple[nn.Module, str, Batch]:
    model = get_peft_model(llama()[0], LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.1))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model, "causal_lm", tokens()


def bert() -> tuple[nn.Module, str, Batch]:
    return BertForMaskedLM(BertConfig(**TEXT, max_position_embeddings=8)), "masked_lm", tokens()


def t5() -> tuple[nn.Module, str, Batch]:
    """Relative positions, and labels in a sequence of their own."""
    config = T5Config(vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2,
                      decoder_start_token_id=0)  # fmt: skip
    labels = torch.randint(2, VOCABULARY, (3, 4))
    labels[1, 2:] = -100
    return T5ForConditionalGeneration(config), "seq2seq_lm", {**tokens(), "labels": labels}


def vit() -> tuple[nn.Module, str, Batch]:
    sizes = {key: value for key, value in TEXT.items() if key != "vocab_size"}
    config = ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=5)
    return ViTForImageClassification(config), "image_classification", images(8)


def resnet() -> tuple[nn.Module, str, Batch]:
    """Batch norms with statistics of their own."""
    config = ResNetConfig(embedding_size=4, hidden_sizes=[4, 6], depths=[1, 1], layer_type="basic", num_labels=5)
    model = ResNetForImageClassification(config)
    model.train()(torch.randn(6, 3, 16, 16))
    return model, "image_classification", images(16)


MODELS: dict[str, Callable[[], tuple[nn.Module, str, Batch]]] = {
    "gpt2": gpt2, "llama": llama, "lora": lora, "bert": bert, "t5": t5, "vit": vit, "resnet": resnet,
}  # fmt: skip


def in_double(made: tuple[nn.Module, str, Batch]) -> tuple[nn.Module, str, Batch]:
    model, task, batch = made
    return model.double().eval(), task, {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    given = {name: value for name, value in batch.items() if name != "labels"}
    if isinstance(model, T5ForConditionalGeneration):
        given["labels"] = batch["labels"]
    return model(**given).logits


def jacobian(model: nn.Module, outputs: Tensor) -> Tensor:
    """Derivatives of all outputs by the trained parameters, `(outputs, P)`."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    flat = outputs.flatten()
    every = torch.eye(len(flat), dtype=flat.dtype)
    found = torch.autograd.grad(flat, parameters, every, retain_graph=True, allow_unused=True, is_grads_batched=True)
    parts = [
        torch.zeros(len(flat), p.numel(), dtype=p.dtype) if g is None else g.flatten(1)
        for p, g in zip(parameters, found, strict=True)
    ]
    return torch.cat(parts, 1)


def softmax_hessian(logits: Tensor, valid: Tensor) -> Tensor:
    """Blocks diag(p) − p pᵀ, and zeros at positions without a label."""
    p = logits.softmax(-1).flatten(0, -2).detach()
    blocks = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    return torch.block_diag(*(blocks * valid.flatten()[:, None, None]))


def products(model: nn.Module, task: str, batch: Batch, directions: Tensor, **options: Any) -> Tensor:
    inner = get_task(task)
    inner.bind(model)
    layout = ParameterLayout.from_model(model)
    return GaussNewton(model, LossModelOutput(of=inner), layout, **options).products(batch, directions)  # type: ignore[arg-type]


def off(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("form", ["forward", pytest.param("twice", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
def test_products_are_those_of_the_matrix(name: str, form: str) -> None:
    model, task, batch = in_double(MODELS[name]())
    logits = logits_of(model, batch)
    valid = torch.ones(3, dtype=torch.bool)
    if task != "image_classification":
        valid = counted(batch["labels"], task == "causal_lm")
    derivatives = jacobian(model, logits)
    matrix = derivatives.T @ softmax_hessian(logits, valid) @ derivatives
    directions = torch.randn(4, len(matrix), dtype=torch.float64)
    found = products(model, task, batch, directions, form=form)
    # float64, a few thousand roundings; root mean square norms compute in float32 whatever they are given
    assert off(found, directions @ matrix) < (1e-6 if name in ("llama", "lora", "t5") else 1e-12)


def test_other_losses() -> None:
    """Regression has the Hessian 1, several labels per row p (1 − p) each, and an answer has two softmaxes."""
    config: dict[str, Any] = {**TEXT, "max_position_embeddings": 8}
    batch = tokens()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}

    model = BertForSequenceClassification(BertConfig(**config, num_labels=1)).double().eval()
    derivatives = jacobian(model, model(**inputs).logits)
    directions = torch.randn(2, derivatives.shape[1], dtype=torch.float64)
    found = products(model, "regression", {**inputs, "labels": torch.randn(3).double()}, directions)
    assert off(found, directions @ derivatives.T @ derivatives) < 1e-12

    model = BertForSequenceClassification(BertConfig(**config, num_labels=4)).double().eval()
    logits = model(**inputs).logits
    derivatives, p = jacobian(model, logits), logits.sigmoid().flatten().detach()
    directions = torch.randn(2, derivatives.shape[1], dtype=torch.float64)
    labels = torch.randint(2, (3, 4)).double()
    found = products(model, "multi_label_classification", {**inputs, "labels": labels}, directions)
    assert off(found, directions @ (derivatives.T * p * (1 - p)) @ derivatives) < 1e-12

    reader = BertForQuestionAnswering(BertConfig(**config)).double().eval()
    unpadded = {"input_ids": batch["input_ids"], "attention_mask": torch.ones_like(batch["attention_mask"])}
    output = reader(**unpadded)
    every = torch.ones(3, dtype=torch.bool)
    expected = 0
    ends = (output.start_logits, output.end_logits)
    directions = torch.randn(2, sum(p.numel() for p in reader.parameters()), dtype=torch.float64)
    for logits in ends:
        derivatives = jacobian(reader, logits)
        expected = expected + directions @ derivatives.T @ softmax_hessian(logits, every) @ derivatives
    answer = {"start_positions": torch.tensor([1, 2, 3]), "end_positions": torch.tensor([2, 4, 3])}
    found = products(reader, "question_answering", {**unpadded, **answer}, directions)
    assert off(found, expected) < 1e-12


def test_products_of_gradients() -> None:
    """The empirical Fisher of a task that is a function alone."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    task = FunctionModelOutput(lambda output, batch: (output - batch[1]).square().sum(1))
    batch = torch.randn(5, 3).double(), torch.randn(5, 2).double()
    gradients = jacobian(net, (net(batch[0]) - batch[1]).square().sum(1))
    directions = torch.randn(3, gradients.shape[1], dtype=torch.float64)
    computer = GaussNewton(net, task, ParameterLayout.from_model(net), of_gradients=True)
    assert off(computer.products(batch, directions), directions @ gradients.T @ gradients) < 1e-12


def test_a_part_of_the_parameters() -> None:
    model, task, batch = in_double(gpt2())
    names = ["transformer.h.0.mlp.c_fc.weight", "transformer.wte.weight"]
    layout = ParameterLayout.from_model(model, names)
    inner = get_task(task)
    inner.bind(model)
    whole = ParameterLayout.from_model(model)
    directions = torch.randn(2, layout.total, dtype=torch.float64)
    padded = torch.zeros(2, whole.total, dtype=torch.float64)
    places = torch.cat(
        [torch.arange(whole.slot(one.name).offset, whole.slot(one.name).offset + one.numel) for one in layout.slots]
    )
    padded[:, places] = directions
    found = GaussNewton(model, LossModelOutput(of=inner), layout).products(batch, directions)  # type: ignore[arg-type]
    assert off(found, products(model, task, batch, padded)[:, places]) < 1e-12
    assert all(parameter.requires_grad for parameter in model.parameters()), "the model is left as it was"
    assert all(parameter.grad is None for parameter in model.parameters())


# -- models without one of the forms ---------------------------------------------------------------------------------


def test_grouped_kernels_have_no_forward_mode(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="hf_trak")
    model = MixtralForCausalLM(MixtralConfig(**{**TEXT, "num_key_value_heads": 2, "hidden_size": 16},
                                             num_local_experts=3)).eval()  # fmt: skip
    inner = get_task("causal_lm")
    layout = ParameterLayout.from_model(model)
    computer = GaussNewton(model, LossModelOutput(of=inner), layout)  # type: ignore[arg-type]
    batch, directions = tokens(), torch.randn(3, layout.total)
    found = computer.products(batch, directions)
    assert computer.form == "twice"
    assert "Derivatives of MixtralForCausalLM are taken twice: in forward mode: " in caplog.text
    logits = logits_of(model, batch)
    derivatives = jacobian(model, logits).double()
    hessian = softmax_hessian(logits.double(), counted(batch["labels"], causal=True))
    # float32
    assert off(found.double(), directions.double() @ derivatives.T @ hessian @ derivatives) < 1e-5


class Doubled(torch.autograd.Function):
    """Twice its input, without a forward mode; what differentiates it is a choice."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient


class Once(Doubled):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient


class Wrong(Doubled):
    """Its forward mode is that of another function."""

    generate_vmap_rule = True

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:  # type: ignore[override]
        return 3 * tangent


class Detached(Doubled):
    """Its backward pass loses its own derivative, without an error."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient.detach()


class Scaling(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Linear(3, 4), nn.Linear(4, 2), function

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.second(self.function.apply(self.first(pixel_values)))


def scaled(function: Any, **options: Any) -> tuple[GaussNewton, Tensor, Tensor]:
    """A computer, its products, and the right ones."""
    model = Scaling(function).double()
    batch = {"pixel_values": torch.randn(5, 3).double(), "labels": torch.tensor([0, 1, 1, 0, 1])}
    layout = ParameterLayout.from_model(model)
    directions = torch.randn(3, layout.total, dtype=torch.float64)
    logits = model.second(2 * model.first(batch["pixel_values"]))
    derivatives = jacobian(model, logits)
    hessian = softmax_hessian(logits, torch.ones(5, dtype=torch.bool))
    computer = GaussNewton(model, LossModelOutput(of=get_task("image_classification")), layout, **options)  # type: ignore[arg-type]
    return computer, computer.products(batch, directions), directions @ derivatives.T @ hessian @ derivatives


@pytest.mark.parametrize("function", [Doubled, Wrong])
def test_functions_without_a_right_forward_mode_are_differentiated_twice(function: Any) -> None:
    computer, found, expected = scaled(function)
    assert computer.form == "twice"
    assert off(found, expected) < 1e-12


@pytest.mark.parametrize("function", [Once, Detached])
def test_functions_with_neither_form_are_refused(function: Any) -> None:
    with pytest.raises(GradientEngineError, match=r"Scaling cannot be differentiated in forward mode: .*; nor twice"):
        scaled(function)


def test_a_wrong_forward_mode_that_was_asked_for_is_refused() -> None:
    with pytest.raises(GradientEngineError, match="the derivative along a direction is wrong"):
        scaled(Wrong, form="forward")
