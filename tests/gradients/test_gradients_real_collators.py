"""Gradients of batches as real data collators and trainers make them, against one `autograd.grad` per row collated
alone."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Wav2Vec2Config,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2ForSequenceClassification,
)

from hf_trak.errors import GradientEngineError
from hf_trak.gradient_computers import (
    AutoGradientComputer,
    HookedGradientComputer,
    make_gradient_computer,
    register_layer_rule,
)
from hf_trak.gradient_computers.hooked.rules import registry
from hf_trak.modelout_functions import (
    CausalLMModelOutput,
    ImageClassificationModelOutput,
    MaskedLMModelOutput,
    Seq2SeqLMModelOutput,
    TextClassificationModelOutput,
)
from hf_trak.modelout_functions.base import BatchedModelOutput

VOCABULARY = 40
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "pad_token_id": 0, "eos_token_id": 2,
}  # fmt: skip

Collate = Callable[[list[Any]], Any]


def spread(model: nn.Module, scale: float = 0.1) -> nn.Module:
    """Weights away from where attention is uniform and adapters do nothing."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def llama() -> nn.Module:
    torch.manual_seed(0)
    model = spread(LlamaForCausalLM(LlamaConfig(**SIZES)))
    assert model.config.use_cache  # as every causal language model of the Hub
    return model


def qwen3() -> nn.Module:
    torch.manual_seed(0)
    return spread(Qwen3ForCausalLM(Qwen3Config(**SIZES)))


def documents(*lengths: int) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(2)
    return [{"input_ids": torch.randint(3, VOCABULARY, (n,), generator=generator).tolist()} for n in lengths]


def tokenizer(side: str = "right") -> PreTrainedTokenizerFast:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w1")
    names = {"pad_token": "w0", "unk_token": "w1", "eos_token": "w2", "mask_token": "w3"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), padding_side=side, **names)


def attributed(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def gradient(model: nn.Module, task: BatchedModelOutput, batch: Any) -> Tensor:
    """One ordinary forward pass and one `autograd.grad`, without the library's engines: `(P,)`."""
    args, kwargs = task.model_inputs(batch)
    f = task.output(model(*args, **kwargs), batch).sum()
    found = torch.autograd.grad(f, attributed(model), allow_unused=True)
    flat = [torch.zeros_like(p) if g is None else g for p, g in zip(attributed(model), found, strict=True)]
    return torch.cat([g.flatten() for g in flat])


def alone(model: nn.Module, task: BatchedModelOutput, collate: Collate, rows: Sequence[Any]) -> Tensor:
    """The truth, `(rows, P)`: every row collated alone."""
    return torch.stack([gradient(model, task, dict(collate([row]))) for row in rows])


def streamed(computer: AutoGradientComputer, batch: Any, collate: Collate | None = None, rows: Any = ()) -> Tensor:
    """What the engine gives for a batch, `(rows, P)`; it may collate rows alone if `collate` is given."""
    if collate is not None:
        computer.collated_alone = lambda index: dict(collate([rows[index]]))
    blocks: list[tuple[int, Tensor]] = []
    outputs = computer.stream(batch, lambda start, block: blocks.append((start, block.clone())))
    whole = torch.zeros(len(outputs.output), computer.layout.total)
    for start, block in blocks:
        whole[:, start : start + block.shape[1]] += block
    return whole


def error(found: Tensor, expected: Tensor) -> float:
    """The largest error of a row, relative to its gradient."""
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())


def worst_parameter(model: nn.Module, found: Tensor, expected: Tensor) -> float:
    """The largest error of a parameter's gradient for a row; a gradient that vanishes counts for 1e-3 of the whole."""
    sizes = [parameter.numel() for parameter in attributed(model)]
    total = expected.norm(dim=1)
    pairs = zip(found.split(sizes, dim=1), expected.split(sizes, dim=1), strict=True)
    return max(float(((f - e).norm(dim=1) / (e.norm(dim=1) + 1e-3 * total)).max()) for f, e in pairs)


# --- packed rows ----------------------------------------------------------------------------------------------------

PACKS = [documents(5, 7, 4), documents(6, 3, 7), documents(9, 7)]


def packed() -> dict[str, Tensor]:
    """Three rows of 16 tokens, each what transformers' collator makes of some documents."""
    collate = DataCollatorWithFlattening(return_tensors="pt")
    parts = [collate(pack) for pack in PACKS]
    return {key: torch.cat([part[key] for part in parts]) for key in ("input_ids", "position_ids", "labels")}


def by_document(model: nn.Module, task: BatchedModelOutput, pack: list[dict[str, list[int]]]) -> Tensor:
    """The gradient of a packed row as the sum of those of its documents, which do not see each other."""
    tensors = [torch.tensor([document["input_ids"]]) for document in pack]
    return sum(gradient(model, task, {"input_ids": t, "labels": t}) for t in tensors)  # type: ignore[return-value]


@pytest.mark.few(2)
@pytest.mark.parametrize("engine", ["auto", "hooked", "functional", "iterative"])
def test_packed_documents_do_not_attend_to_each_other(engine: str, caplog: pytest.LogCaptureFixture) -> None:
    """transformers keeps them apart only without a cache, which `config.use_cache` asks for by default."""
    model, task, batch = llama(), CausalLMModelOutput(), packed()
    expected = torch.stack([by_document(model, task, pack) for pack in PACKS])
    contaminated = torch.stack([gradient(model, task, {k: v[i : i + 1] for k, v in batch.items()}) for i in range(3)])
    assert error(contaminated, expected) > 0.1  # with the cache, they do
    computer = make_gradient_computer(engine, model, task)
    assert error(streamed(computer, batch), expected) < 1e-5
    assert computer.engine == ("hooked" if engine == "auto" else engine)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert model.config.use_cache is True


@pytest.mark.few(2)
@pytest.mark.parametrize("engine", ["auto", "hooked", "functional", "iterative"])
def test_a_packed_row_of_trl(engine: str) -> None:
    """One row at a time is how `packing=True` reaches the model: flat, with the documents' lengths beside it."""
    trl = pytest.importorskip("trl.trainer.sft_trainer")
    collate = trl.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    model, task = llama(), CausalLMModelOutput()
    computer = make_gradient_computer(engine, model, task)
    for pack in PACKS:
        row = {
            "input_ids": [token for document in pack for token in document["input_ids"]],
            "seq_lengths": [len(document["input_ids"]) for document in pack],
        }
        found = streamed(computer, collate([row]), collate, [row])
        assert error(found, by_document(model, task, pack)[None]) < 1e-5
    assert computer.engine == ("hooked" if engine == "auto" else engine)


# --- adapters -------------------------------------------------------------------------------------------------------


def adapted(config: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama(), config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in attributed(model):
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def dora() -> nn.Module:
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    return adapted(peft.LoraConfig(r=3, lora_alpha=6, use_dora=True, target_modules=targets))


def shira() -> nn.Module:
    peft = pytest.importorskip("peft")
    return adapted(peft.ShiraConfig(r=3, target_modules=["q_proj", "k_proj", "down_proj"]))


@pytest.mark.parametrize("adapter", [dora, shira])
def test_adapters_of_weights_that_are_not_square(adapter: Callable[[], nn.Module]) -> None:
    """DoRA normalizes by the columns of the weight that its matrices make; SHiRA's parameters fill a sparse one."""
    model, task, rows = adapter(), CausalLMModelOutput(), documents(9, 6, 8, 9)
    shapes = {tuple(m.weight.shape) for n, m in model.named_modules() if n.endswith(("k_proj.base_layer", "k_proj"))}
    assert (16, 32) in shapes
    task.bind(model)
    collate = DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    computer = make_gradient_computer("auto", model, task)
    found = streamed(computer, dict(collate(rows)), collate, rows)
    assert computer.engine == "hooked"
    assert isinstance(computer._computer, HookedGradientComputer)
    assert not computer._computer._model_trace.replayed  # by the rules, not by running layers again
    assert worst_parameter(model, found, alone(model, task, collate, rows)) < 1e-4


def test_an_engine_that_cannot_take_sparse_weights_is_followed_by_the_next() -> None:
    model, task, rows = shira(), CausalLMModelOutput(), documents(9, 9)
    batch = {"input_ids": torch.tensor([row["input_ids"] for row in rows])}
    batch["labels"] = batch["input_ids"]
    task.bind(model)
    computer = AutoGradientComputer(model, task, dtype=None, device=None, engines=("functional", "iterative"))
    found = streamed(computer, batch)
    assert computer.engine == "iterative" and computer._refusals[0].startswith("functional: ")
    expected = [gradient(model, task, {k: v[i : i + 1] for k, v in batch.items()}) for i in range(2)]
    assert error(found, torch.stack(expected)) < 1e-6
    with pytest.raises(GradientEngineError, match="functional engine cannot vectorize"):
        streamed(make_gradient_computer("functional", model, task), batch)


# --- bf16 as trainers have it ---------------------------------------------------------------------------------------


@pytest.fixture
def prepared() -> Iterator[Callable[[nn.Module], nn.Module]]:
    """Models as `accelerate` prepares them for `bf16=True`: autocast within `forward`, float32 out of it."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield lambda model: Accelerator(mixed_precision="bf16", cpu=True).prepare(model)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def restored_rules() -> Iterator[None]:
    kept = dict(registry._RULES)
    yield
    registry._RULES.clear()
    registry._RULES.update(kept)


EPS = torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("build", [llama, qwen3])
def test_bf16_of_accelerate_stays_with_the_hooks(build: Callable[[], nn.Module], prepared: Any) -> None:
    task, rows = CausalLMModelOutput(), documents(12, 9, 12, 7)
    collate = DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    exact = alone(build(), task, collate, rows)
    model = prepared(build())
    assert not torch.is_autocast_enabled("cpu")  # nothing tells from outside
    expected = alone(model, task, collate, rows)
    assert error(expected, exact) > EPS / 8  # it does compute in bf16
    computer = make_gradient_computer("auto", model, task)
    assert computer.half_precision is None
    found = streamed(computer, dict(collate(rows)), collate, rows)
    assert computer.engine == "hooked" and not computer._refusals and computer.half_precision
    # as far from float32 as plain autograd is, which rounds as often
    assert error(found, exact) < 2 * error(expected, exact)
    assert error(found, expected) < 2 * EPS


@pytest.mark.slow
def test_rounding_is_measured_where_it_is_large(prepared: Any) -> None:
    """The attention of a T5 is not scaled, and with a bias that needs a gradient another kernel computes it."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0,
    )  # fmt: skip
    model = prepared(spread(transformers.T5ForConditionalGeneration(config), 0.05))
    rows = [{**row, "labels": row["input_ids"][:6]} for row in documents(12, 9, 12, 7)]
    task, collate = Seq2SeqLMModelOutput(), DataCollatorForSeq2Seq(tokenizer(), model=model)
    task.bind(model)
    computer = make_gradient_computer("auto", model, task)
    found = streamed(computer, dict(collate(rows)), collate, rows)
    assert computer.engine == "hooked" and not computer._refusals
    assert 4 * EPS < worst_parameter(model, found, alone(model, task, collate, rows)) < 0.3


@pytest.mark.parametrize("build", [llama, qwen3])
@pytest.mark.parametrize("wrong", ["next sample", "a fifth too large", "padding forgotten"])
def test_a_wrong_rule_is_refused_in_bf16(
    build: Callable[[], nn.Module], wrong: str, prepared: Any, restored_rules: None, caplog: pytest.LogCaptureFixture
) -> None:
    linear = registry._RULES[nn.Linear].rule

    @register_layer_rule(nn.Linear)
    def rule(call: Any) -> Any:
        pieces = [(n, s, (b if isinstance(b, Tensor) else b.dense()).clone()) for n, s, b in linear(call)]
        for name, start, block in pieces:
            if wrong == "next sample":
                block = block.roll(1, 0)
            elif wrong == "a fifth too large":
                block = block * 1.2
            else:  # one token of every sample is not counted
                block = block - torch.bmm(call.grad[:, :1].mT, call.x[:, :1].to(call.grad.dtype)).flatten(1)
            yield name, start, block

    model, task, rows = prepared(build()), CausalLMModelOutput(), documents(6, 6, 6)
    collate = DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    computer = make_gradient_computer("auto", model, task)
    found = streamed(computer, dict(collate(rows)))
    assert computer.engine != "hooked" and "relative error" in computer._refusals[0]
    assert error(found, alone(model, task, collate, rows)) < 2 * EPS
    with pytest.raises(GradientEngineError, match="The hooked engine gives another gradient"):
        streamed(make_gradient_computer("hooked", model, task), dict(collate(rows)))


def test_samples_that_mix_are_noticed_in_bf16(prepared: Any) -> None:
    class Mixing(CausalLMModelOutput):
        def output(self, model_output: Any, batch: Any, side: Any = "train") -> Tensor:
            f = super().output(model_output, batch, side)
            return 0.5 * (f + f.mean())

    rows = documents(12, 6, 3)
    batch = dict(DataCollatorForLanguageModeling(tokenizer(), mlm=False)(rows))
    with pytest.raises(GradientEngineError, match="depends on the other samples"):
        streamed(make_gradient_computer("auto", prepared(llama()), Mixing()), batch)


# --- padding --------------------------------------------------------------------------------------------------------


def audio(
    norm: str, mask: bool, lengths: Sequence[int]
) -> tuple[nn.Module, TextClassificationModelOutput, Collate, list[dict[str, Any]]]:
    """A tiny wav2vec2 classifier with a convolutional encoder of either kind, and waveforms."""
    torch.manual_seed(0)
    config = Wav2Vec2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, conv_dim=[8, 8],
        conv_kernel=[10, 3], conv_stride=[5, 2], num_feat_extract_layers=2, num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2, feat_extract_norm=norm, do_stable_layer_norm=norm == "layer", num_labels=3,
        classifier_proj_size=16,
    )  # fmt: skip
    extractor = Wav2Vec2FeatureExtractor(return_attention_mask=mask)
    generator = torch.Generator().manual_seed(1)
    waves = [torch.randn(n, generator=generator).numpy() for n in lengths]
    rows = [
        {"input_values": extractor(wave, sampling_rate=16000)["input_values"][0], "labels": i % 3}
        for i, wave in enumerate(waves)
    ]
    model = Wav2Vec2ForSequenceClassification(config)
    return spread(model, 0.02), TextClassificationModelOutput(), DataCollatorWithPadding(extractor), rows


REMEDY = r"how far the data collator pads it.*`per_device_batch_size=1`.*attention mask"


@pytest.mark.parametrize("engine", ["auto", "hooked", "functional", "iterative"])
def test_features_that_depend_on_padding_are_refused(engine: str) -> None:
    """A group norm over time sees the padding, and without an attention mask so does everything after it."""
    model, task, collate, rows = audio("group", False, (400, 360, 400, 300))
    batch = dict(collate(rows))
    assert "attention_mask" not in batch
    together = streamed(make_gradient_computer(engine, model, task), batch)  # nothing in the batch tells
    assert error(together, alone(model, task, collate, rows)) > 0.01
    with pytest.raises(GradientEngineError, match=REMEDY):
        streamed(make_gradient_computer(engine, model, task), batch, collate, rows)


def test_the_remedies_work() -> None:
    model, task, collate, rows = audio("group", False, (400, 360, 300))
    computer = make_gradient_computer("auto", model, task)
    found = torch.cat([streamed(computer, dict(collate([row])), collate, [row]) for row in rows])
    assert error(found, alone(model, task, collate, rows)) < 1e-5
    model, task, collate, rows = audio("layer", True, (400, 360, 400, 300))
    computer = make_gradient_computer("auto", model, task)
    found = streamed(computer, dict(collate(rows)), collate, rows)
    assert computer.engine == "hooked" and computer.half_precision is False
    assert error(found, alone(model, task, collate, rows)) < 1e-5


def test_padding_is_looked_for_until_there_is_some() -> None:
    """The first batches have rows of one length, where it cannot be seen."""
    model, task, collate, rows = audio("group", False, (400, 400, 400, 400, 400, 360))
    computer = make_gradient_computer("auto", model, task)
    for part in (rows[:2], rows[2:4]):
        streamed(computer, dict(collate(part)), collate, part)
    with pytest.raises(GradientEngineError, match=REMEDY):
        streamed(computer, dict(collate(rows[4:])), collate, rows[4:])


def test_values_that_nothing_depends_on_may_be_random() -> None:
    """They are no padding either: the search for that goes on."""
    model, _, pad, rows = audio("group", False, (400, 400, 400, 360))

    class Ignoring(TextClassificationModelOutput):
        def model_inputs(self, batch: Any) -> Any:
            return super().model_inputs({key: value for key, value in batch.items() if key != "draw"})

    def collate(part: list[Any]) -> Any:
        return {**pad(part), "draw": torch.rand(len(part))}

    computer = make_gradient_computer("auto", model, Ignoring())
    streamed(computer, collate(rows[:2]), collate, rows[:2])
    with pytest.raises(GradientEngineError, match="of the batch than of that row alone|" + REMEDY):
        streamed(computer, collate(rows[2:]), collate, rows[2:])


def test_a_row_in_the_middle_is_padded() -> None:
    model, task, collate, rows = audio("group", False, (400, 400, 360, 400))
    with pytest.raises(GradientEngineError, match=f"row 2 of the batch.*{REMEDY}"):
        streamed(make_gradient_computer("auto", model, task), dict(collate(rows)), collate, rows)


def test_padding_that_matters_is_noticed_in_bf16(prepared: Any) -> None:
    model, task, collate, rows = audio("layer", False, (400, 360, 400, 300))
    with pytest.raises(GradientEngineError, match=REMEDY):
        streamed(make_gradient_computer("auto", prepared(model), task), dict(collate(rows)), collate, rows)


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_with_a_mask_is_accepted(side: str) -> None:
    model, task, rows = llama(), CausalLMModelOutput(), documents(12, 9, 5)
    task.bind(model)
    collate = DataCollatorForLanguageModeling(tokenizer(side), mlm=False)
    computer = make_gradient_computer("auto", model, task)
    found = streamed(computer, dict(collate(rows)), collate, rows)
    assert computer.engine == "hooked"
    assert error(found, alone(model, task, collate, rows)) < 1e-5


def counted(computer: AutoGradientComputer, collate: Collate, rows: list[Any], size: int) -> list[int]:
    """How many rows were collated alone for each batch."""
    calls: list[int] = []
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        calls.append(0)

        def collated_alone(index: int, part: list[Any] = part) -> Any:
            calls[-1] += 1
            return dict(collate([part[index]]))

        computer.collated_alone = collated_alone
        computer.stream(dict(collate(part)), lambda start, block: None)
    return calls


def test_rows_are_collated_alone_only_until_one_was_padded() -> None:
    model, task = llama(), CausalLMModelOutput()
    collate = DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    calls = counted(make_gradient_computer("auto", model, task), collate, documents(*[6, 6, 6, 5] * 3), 2)
    assert calls == [2, 1, 0, 0, 0, 0]  # the first batch shows nothing; in the second, one row does


@pytest.mark.slow
def test_rows_of_one_length_are_rarely_collated_alone() -> None:
    """Neither without padding nor with padding that a row alone has, too."""
    model, task = llama(), CausalLMModelOutput()
    collate = DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    calls = counted(make_gradient_computer("auto", model, task), collate, documents(*[6] * 80), 2)
    assert calls[0] == 2 and sum(calls) <= 10
    filled = [{key: [*row[key], 0, 0] for key in row} for row in documents(*[6] * 80)]
    calls = counted(make_gradient_computer("auto", model, task), collate, filled, 2)
    assert sum(calls[8:]) <= 2 * 2 and all(n <= 2 for n in calls)


def test_random_rows_are_named() -> None:
    model = transformers.BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24
        )
    ).eval()
    rows, collate = documents(12, 12, 12), DataCollatorForLanguageModeling(tokenizer(), mlm=True)
    with pytest.raises(GradientEngineError, match=r"other values of \['input_ids', 'labels'\].*at random"):
        streamed(make_gradient_computer("auto", model, MaskedLMModelOutput()), dict(collate(rows)), collate, rows)


# --- batches of other kinds -----------------------------------------------------------------------------------------


class WithExtras(TextClassificationModelOutput):
    """Reads, beside the model's inputs, what has no batch dimension or is no tensor."""

    def model_inputs(self, batch: Any) -> Any:
        assert batch["names"] == ["a", "b", "c"] and batch["flag"] is True and batch["weights"].shape == (2,)
        keys = ("input_ids", "attention_mask")
        return (), {key: batch[key] for key in keys}

    def output(self, model_output: Any, batch: Any, side: Any = "train") -> Tensor:
        return super().output(model_output, {"labels": batch["labels"], "x": 0}, side) * batch["weights"].sum()

    def out_to_loss_grad(self, model_output: Any, batch: Any, side: Any = "train") -> Tensor:
        return super().out_to_loss_grad(model_output, {"labels": batch["labels"], "x": 0}, side)


@pytest.mark.parametrize("engine", ["auto", "hooked", "functional", "iterative"])
def test_lists_and_tensors_without_a_batch_dimension(engine: str) -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24
    )
    model = spread(BertForSequenceClassification(config))
    pad = DataCollatorWithPadding(tokenizer())
    rows = [{**row, "label": i % 2} for i, row in enumerate(documents(9, 5, 7))]

    def collate(part: list[Any]) -> Any:
        batch = {**pad(part), "names": ["a", "b", "c"], "flag": True, "weights": torch.tensor([0.5, 1.5])}
        batch["extent"] = torch.tensor(batch["input_ids"].shape[1])
        batch.pop("token_type_ids", None)
        return batch

    computer = make_gradient_computer(engine, model, WithExtras())
    found = streamed(computer, collate(rows), collate, rows)
    assert error(found, alone(model, WithExtras(), collate, rows)) < 1e-5


def test_a_sequence_of_tensors_collated_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    rows = [(torch.randn(6), i % 4) for i in range(5)]
    task = ImageClassificationModelOutput()
    batch = torch.utils.data.default_collate(rows)
    assert isinstance(batch, list)
    computer = make_gradient_computer("auto", model, task)
    computer.collated_alone = lambda index: torch.utils.data.default_collate([rows[index]])
    found = streamed(computer, batch)
    expected = [gradient(model, task, torch.utils.data.default_collate([row])) for row in rows]
    assert error(found, torch.stack(expected)) < 1e-5


def test_a_collator_that_flattens_rows_is_left_to_whoever_counts_them() -> None:
    """One sample of several rows: no row of it can be compared with anything."""
    rows, collate = documents(5, 7), DataCollatorWithFlattening(return_tensors="pt")
    computer = make_gradient_computer("auto", llama(), CausalLMModelOutput())
    assert len(streamed(computer, dict(collate(rows)), collate, rows)) == 1


def test_a_collator_that_takes_no_single_row_is_told_so() -> None:
    rows, pad = documents(6, 6), DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    computer = make_gradient_computer("auto", llama(), CausalLMModelOutput())

    def collate(part: list[Any]) -> Any:
        return pad(part[1:] if len(part) == 1 else part)

    with pytest.raises(Exception) as caught:  # whatever transformers raises for no rows
        streamed(computer, dict(collate(rows)), collate, rows)
    assert "row 0 of a batch was collated alone" in "".join(caught.value.__notes__)
