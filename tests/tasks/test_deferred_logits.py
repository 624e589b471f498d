"""Deferred logits: margins and gradients of large vocabularies without B · T · V logits are those with them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_trak.curvature.arrivals import ObservingSink
from hf_trak.curvature.curvature import FitPlan
from hf_trak.curvature.observation import BatchObserver, Observation, divide
from hf_trak.errors import GradientEngineError
from hf_trak.gradient_computers import self_check
from hf_trak.gradient_computers.auto import AutoGradientComputer
from hf_trak.gradient_computers.hooked import computer as engine
from hf_trak.gradient_computers.hooked.computer import HookedGradientComputer
from hf_trak.modelout_functions import deferred_logits
from hf_trak.modelout_functions import margins as deferred_margins
from hf_trak.modelout_functions.deferred_logits import (
    DeferredLogits,
    NotDeferrableError,
    deferrable_head,
    deferring,
    in_chunks,
)
from hf_trak.modelout_functions.loss import LossModelOutput
from hf_trak.modelout_functions.margins import margin, margins_of
from hf_trak.modelout_functions.seq2seq_lm import Seq2SeqLMModelOutput
from hf_trak.modelout_functions.token_tasks import CausalLMModelOutput, MaskedLMModelOutput

SIZES: dict[str, Any] = {
    "vocab_size": 151, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ENCODER = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 151, "max_position_embeddings": 64,
}  # fmt: skip


def bart() -> nn.Module:
    model = BartForConditionalGeneration(BartConfig(**ENCODER))
    model.final_logits_bias.normal_()  # type: ignore[operator]
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "llama, tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "gemma 2, soft caps": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=2.0)),
    "cohere, scaled": lambda: CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.25)),
    "granite, divided": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=3.0)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=151, n_positions=64)),
    "bert, head with bias": lambda: BertForMaskedLM(BertConfig(**SIZES)),
    "bart, bias of logits": bart,
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, vocab_size=151, decoder_start_token_id=0)
    ),
}
TASKS = {"bert, head with bias": MaskedLMModelOutput, "bart, bias of logits": Seq2SeqLMModelOutput}
TASKS["t5"] = Seq2SeqLMModelOutput


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for parameter in model.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))  # biases, too
    return model


def batch_of(rows: int, vocabulary: int = 151) -> dict[str, Tensor]:
    ids = torch.randint(3, vocabulary, (rows, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Slices of a few words, and logits of any size deferred."""
    monkeypatch.setattr(deferred_logits, "SLICE", 200)
    monkeypatch.setattr(deferred_logits, "LEAST_SLICE", 8)
    monkeypatch.setattr(deferred_logits, "DEFERRED_FROM", 0)
    return monkeypatch


def computer_of(model: nn.Module, task: Any, **options: Any) -> HookedGradientComputer:
    task.bind(model)
    return HookedGradientComputer(model, task, dtype=None, device="cpu", **options)


def taken(computer: HookedGradientComputer, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """All gradients `(B, P)`, f and q."""
    whole = torch.zeros(len(batch["input_ids"]), computer.layout.total)

    def sink(start: int, block: Tensor) -> None:
        whole[:, start : start + block.shape[1]] += block.float()

    outputs = computer.stream(batch, sink)
    return whole, outputs.output, outputs.out_to_loss


def assert_same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float = 2e-5) -> None:
    for one, other in zip(found, expected, strict=True):
        assert bool(other.any()) and float((one - other).norm()) <= tolerance * float(other.norm())


def count_deferred(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    shapes: list[torch.Size] = []
    original = deferred_margins._summed

    def counted(hidden: Tensor, *args: Any) -> Any:
        shapes.append(hidden.shape)
        return original(hidden, *args)

    monkeypatch.setattr(deferred_margins, "_summed", counted)
    return shapes


@pytest.mark.few(4)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", list(MODELS))
def test_gradients_are_those_with_logits(small, name, rows):
    model, batch = made(name), batch_of(rows)
    small.setattr(deferred_logits, "DEFERRED_FROM", 2**60)
    expected = taken(computer_of(model, TASKS.get(name, CausalLMModelOutput)()), batch)
    small.setattr(deferred_logits, "DEFERRED_FROM", 0)
    calls = count_deferred(small)
    deferring_computer = computer_of(model, TASKS.get(name, CausalLMModelOutput)())
    assert_same(taken(deferring_computer, batch), expected)
    assert calls.count(max(calls)) == 1 and deferring_computer.defers  # q takes the margins of f
    assert_same(taken(deferring_computer, batch), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_no_more_than_with_logits(small, dtype):
    """Against float64, errors with and without logits are alike."""
    exact = made("gemma 2, soft caps").double()
    model = copy.deepcopy(exact).to(dtype)
    exact.load_state_dict(model.state_dict())
    batch = batch_of(3)
    errors = []
    truth = _double_gradients(exact, batch)
    for limit in (0, 2**60):
        small.setattr(deferred_logits, "DEFERRED_FROM", limit)
        found = taken(computer_of(model, CausalLMModelOutput()), batch)[0].double()
        errors.append(float((found - truth).norm() / truth.norm()))
    assert errors[0] <= 1.5 * errors[1] < 0.1


def _double_gradients(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    task = CausalLMModelOutput()
    task.bind(model)
    parameters = [parameter for _, parameter in model.named_parameters()]
    rows = []
    for row in range(len(batch["input_ids"])):
        one = {name: tensor[row : row + 1] for name, tensor in batch.items()}
        f = task.output(model(**task.model_inputs(one)[1]), one).sum()
        rows.append(torch.cat([gradient.flatten() for gradient in torch.autograd.grad(f, parameters)]))
    return torch.stack(rows)


def test_autocast_computes_in_its_dtype(small):
    model, batch = made("llama"), batch_of(3)
    results = []
    for limit in (0, 2**60):
        small.setattr(deferred_logits, "DEFERRED_FROM", limit)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results.append(taken(computer_of(model, CausalLMModelOutput()), batch))
    assert_same(results[0], results[1], 0.02)
    plain = taken(computer_of(model, CausalLMModelOutput()), batch)
    assert not torch.allclose(results[0][1], plain[1], rtol=1e-5, atol=0)


@pytest.mark.parametrize("grad_wrt", [["lm_head.weight"], ["model.layers.0.mlp.up_proj.weight"]])
def test_head_or_body_alone(small, grad_wrt):
    model, batch = made("llama"), batch_of(3)
    small.setattr(deferred_logits, "DEFERRED_FROM", 2**60)
    expected = taken(computer_of(model, CausalLMModelOutput(), grad_wrt=grad_wrt), batch)
    small.setattr(deferred_logits, "DEFERRED_FROM", 0)
    calls = count_deferred(small)
    assert_same(taken(computer_of(model, CausalLMModelOutput(), grad_wrt=grad_wrt), batch), expected)
    assert calls


@pytest.mark.parametrize("unit_output", ["margin", "log_likelihood"])
def test_losses_and_likelihoods(small, unit_output):
    model, batch = made("llama"), batch_of(3)
    results = []
    for limit in (0, 2**60):
        small.setattr(deferred_logits, "DEFERRED_FROM", limit)
        task = LossModelOutput(CausalLMModelOutput("mean", unit_output))
        results.append(taken(computer_of(model, task), batch))
    assert_same(results[0], results[1])


class Doubled(CausalLMModelOutput):
    """A task that needs whole logits."""

    def output(self, model_output: Any, batch: Any, side: Any = "train") -> Tensor:
        return super().output(model_output, batch, side) + model_output.logits.square().sum(dim=(1, 2))


@pytest.mark.parametrize("rows", [1, 3])
def test_what_needs_whole_logits_gets_them(small, rows):
    model, batch = made("llama"), batch_of(rows)
    computer = computer_of(model, Doubled())
    found = taken(computer, batch)
    assert not computer.defers
    small.setattr(deferred_logits, "DEFERRED_FROM", 2**60)
    assert_same(found, taken(computer_of(model, Doubled()), batch))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
def test_checkpointing_changes_nothing(small, rows, reentrant):
    """A head emits its gradients in every backward pass, so that there must be one."""
    model, batch = made("llama, tied"), batch_of(rows)
    expected = taken(computer_of(model, CausalLMModelOutput()), batch)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    assert_same(taken(computer_of(model.train(), CausalLMModelOutput()), batch), expected)


def test_a_batch_of_one_through_hooks(small):
    """As of a model whose gradients plain autograd is not to hold."""
    model, batch = made("llama, tied"), batch_of(1)
    expected = taken(computer_of(model, CausalLMModelOutput()), batch)
    small.setattr(engine, "WHOLE_GRADIENT_BYTES", 0)
    assert_same(taken(computer_of(model, CausalLMModelOutput()), batch), expected)


@pytest.mark.slow
def test_heads_that_are_not_plain_keep_their_logits():
    peft = pytest.importorskip("peft")
    model = made("llama")
    assert deferrable_head(model) is model.get_submodule("lm_head")
    lora = peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head", "q_proj"], r=2))
    assert deferrable_head(lora) is None
    model = made("llama")
    kept = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], r=2))
    assert deferrable_head(kept) is None
    model = made("llama")
    handle = model.get_submodule("lm_head").register_forward_hook(lambda module, inputs, result: result * 2)
    assert deferrable_head(model) is None
    handle.remove()
    nn.utils.parametrizations.weight_norm(model.get_submodule("lm_head"))
    assert deferrable_head(model) is None and deferrable_head(nn.Linear(2, 2)) is None


@pytest.mark.parametrize(
    "use",
    [
        lambda z: z.softmax(dim=-1),
        lambda z: z[:, ::2],
        lambda z: z[..., :5],
        lambda z: z[:1],
        lambda z: z + z,
        lambda z: 1.0 / z,
        lambda z: z * torch.randn(2, 1, 1),
        lambda z: z * torch.randn(5, 1),
        lambda z: z.mul_(2.0),
        lambda z: z * torch.ones((), requires_grad=True),
        lambda z: z.to(torch.int64),
        lambda z: float(z.max()),
        lambda z: z.detach().numpy(),
    ],
)
def test_other_uses_of_the_logits_are_refused(small, use):
    head = nn.Linear(4, 30)
    with deferring(head):
        logits = head(torch.randn(2, 5, 4))
    assert isinstance(logits, DeferredLogits) and logits.shape == (2, 5, 30)
    with pytest.raises((NotDeferrableError, RuntimeError)):
        use(logits)


def test_margins_of_labels_outside_and_of_other_labels(small):
    torch.manual_seed(0)
    head, hidden = nn.Linear(4, 30), torch.randn(2, 5, 4)
    labels = torch.randint(0, 30, (2, 5))
    labels[0, 1] = -100
    with torch.no_grad():
        whole = head(hidden)
        with deferring(head):
            logits = head(hidden)
        for given in (labels, labels.flip(1), labels):
            torch.testing.assert_close(margins_of(logits, given), margin(whole, given))


@pytest.mark.few(2)
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("wrong", [False, True])
def test_first_batch_is_checked_against_plain_autograd(small, whole, wrong):
    """Against whole logits, or, where those of one sample are too large, against some positions at a time."""
    small.setattr(deferred_logits, "CHUNKED_FROM", 2**60 if whole else 0)
    small.setattr(deferred_margins, "CHUNK", 400)
    chunks: list[Any] = []
    original, right = deferred_margins.checkpoint, deferred_margins._gradient_of_slice
    small.setattr(deferred_margins, "checkpoint", lambda *args, **kw: chunks.append(0) or original(*args, **kw))
    if wrong:  # one word in 151
        small.setattr(
            deferred_margins,
            "_gradient_of_slice",
            lambda *args: right(*args) * (torch.arange(args[3][1] - args[3][0]) != 0),
        )
    model = made("gemma 2, soft caps")
    task = CausalLMModelOutput()
    task.bind(model)
    computer = AutoGradientComputer(model, task, dtype=None, device="cpu", engines=("hooked",))
    if wrong:
        with pytest.raises(GradientEngineError, match="relative error"):
            computer.stream(batch_of(3), lambda start, block: None)
    else:
        computer.stream(batch_of(3), lambda start, block: None)
    assert bool(chunks) != whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_in_chunks_is_the_reference(small, dtype):
    small.setattr(deferred_margins, "CHUNK", 400)
    model, batch = made("gemma 2, soft caps").to(dtype), batch_of(3)
    task = CausalLMModelOutput()
    task.bind(model)
    found = []
    for limit in (0, 2**60):
        small.setattr(deferred_logits, "CHUNKED_FROM", limit)
        computer = AutoGradientComputer(model, task, dtype=None, device="cpu")
        found.append(computer._reference(self_check.Samples.of(batch, "train")))
    assert found[0] is not None and found[1] is not None
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert_same((found[0].gradients, found[0].output), (found[1].gradients, found[1].output), tolerance)


def test_whole_logits_where_chunks_do_not_do(small):
    small.setattr(deferred_logits, "CHUNKED_FROM", 0)
    model, batch = made("llama"), batch_of(3)
    kinds: list[type] = []

    def compute() -> Tensor:
        logits = model(batch["input_ids"]).logits
        kinds.append(type(logits))
        return logits.softmax(dim=-1)

    assert in_chunks(model, compute).shape == (3, 9, 151) and kinds == [DeferredLogits, Tensor]
    assert "forward" not in vars(model.get_submodule("lm_head"))


@pytest.mark.parametrize("tied", [False, True])
def test_curvature_of_a_head_is_cut_or_diagonal(small, tied):
    """Its blocks need the factors of a layer at once. No basis is as long as a vocabulary of 32,768."""
    sizes = {**SIZES, "vocab_size": 32768, "tie_word_embeddings": tied}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    calls, seen = count_deferred(small), Observation()
    computer = computer_of(model, CausalLMModelOutput())
    observer = BatchObserver(computer.layout, seen)
    computer.stream(batch_of(2), ObservingSink(observer))
    observer.finish()
    plan = FitPlan("ekfac", (0, 1), 2, frozenset(["model.embed_tokens.weight"]), frozenset(), "")
    blocks = divide(computer.layout, seen, plan)
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    heads = [block for block in blocks.kronecker if block.name == name]
    assert not calls and [(block.left, block.right) for block in heads] == ([] if tied else [(8192, 16)] * 4)
    assert [block.numel for block in blocks.diagonal if "embed_tokens" in block.name] == [32768 * 16]


def test_positions_without_labels_are_left_out(small):
    """Of masked words, one in seven is predicted."""
    model, batch = made("bert, head with bias"), batch_of(3)
    batch["labels"] = torch.where(
        torch.rand(3, 9, generator=torch.Generator().manual_seed(2)) < 0.2, batch["labels"], -100
    )
    batch["labels"][1] = -100
    results = []
    for limit in (0, 2**60):
        small.setattr(deferred_logits, "DEFERRED_FROM", limit)
        calls = count_deferred(small)
        results.append(taken(computer_of(model, MaskedLMModelOutput()), batch))
        if not limit:
            assert max(calls)[0] == 3 * int((batch["labels"] >= 0).sum(dim=1).max()) < 27
    assert_same(results[0], results[1])
