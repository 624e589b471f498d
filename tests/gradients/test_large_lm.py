"""Language models with large vocabularies: margins in slices have the same bits, and memory stays within a bound."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from datasets import Dataset
from torch import nn
from torch.func import grad, jvp, vmap
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.gradient_computers.hooked import computer
from hf_trak.modelout_functions import deferred_logits
from hf_trak.modelout_functions import margins as sliced_margins
from hf_trak.modelout_functions.margins import margin, sliced_margin
from hf_trak.modelout_functions.seq2seq_lm import Seq2SeqLMModelOutput
from hf_trak.modelout_functions.token_tasks import (
    CausalLMModelOutput,
    MaskedLMModelOutput,
    TokenClassificationModelOutput,
)

REPOSITORY = Path(__file__).parents[2]
MIB = 2**20


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("large_lm", REPOSITORY / "benchmarks" / "large_lm.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced_margins, "SLICE", 2**10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(2, 37, 500), (1, 9, 3000), (3, 1, 2000), (1, 1, 4000)])
def test_margins_in_slices_have_the_same_bits(short_slices, dtype, shape):
    torch.manual_seed(0)
    logits, labels = (5 * torch.randn(shape)).to(dtype), torch.randint(0, shape[2], shape[:2])
    labels[0, 0] = -100
    assert logits.numel() > sliced_margins.SLICE
    found, expected = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    margins, whole = sliced_margin(found, labels), margin(expected, labels)
    slopes = torch.randn_like(whole)
    margins.backward(slopes)
    whole.backward(slopes)
    assert torch.equal(margins, whole) and margins.dtype == whole.dtype
    assert torch.equal(found.grad, expected.grad) and found.grad.dtype == dtype


def test_margins_in_slices_differentiate_as_the_formula_does(short_slices):
    """Once and twice, in forward mode, and under vmap: what products with the Gauss-Newton matrix and engines need."""
    torch.manual_seed(0)
    sliced_margins.SLICE = 30  # restored by the fixture
    logits, labels = torch.randn(2, 4, 9, dtype=torch.float64), torch.randint(0, 9, (2, 4))
    labels[0, 0] = -100

    def of(logits: torch.Tensor) -> torch.Tensor:
        return sliced_margin(logits, labels)

    assert torch.autograd.gradcheck(of, (logits.clone().requires_grad_(),), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(of, (logits.clone().requires_grad_(),))
    gradients = vmap(grad(lambda row, label: sliced_margin(row[None], label[None]).square().sum()))
    expected = vmap(grad(lambda row, label: margin(row[None], label[None]).square().sum()))
    assert torch.equal(gradients(logits, labels), expected(logits, labels))
    tangents = torch.randn(3, *logits.shape, dtype=torch.float64)
    along = vmap(lambda tangent: jvp(of, (logits,), (tangent,))[1])(tangents)
    exact = vmap(lambda tangent: jvp(lambda z: margin(z, labels), (logits,), (tangent,))[1])(tangents)
    torch.testing.assert_close(along, exact, rtol=1e-12, atol=1e-12)


def test_causal_lm_takes_its_margins_in_slices(short_slices, monkeypatch):
    logits, ids = torch.randn(2, 8, 200), torch.randint(0, 200, (2, 8))
    batch = {"input_ids": ids, "labels": ids}
    task = CausalLMModelOutput()
    found = task.unit_margins({"logits": logits}, batch)
    assert torch.equal(found[:, 1:], margin(logits[:, :-1], ids[:, 1:])) and not found[:, 0].any()
    monkeypatch.setattr(sliced_margins._SlicedMargin, "apply", lambda *args: pytest.fail("in slices"))
    with pytest.raises(pytest.fail.Exception, match="in slices"):
        task.unit_margins({"logits": logits}, batch)


@pytest.mark.parametrize("task", [MaskedLMModelOutput, TokenClassificationModelOutput, Seq2SeqLMModelOutput])
def test_other_tasks_of_tokens_take_the_same_margins_in_slices(short_slices, monkeypatch, task):
    logits, labels = torch.randn(2, 8, 200), torch.randint(0, 200, (2, 8))
    batch = {"input_ids": labels, "decoder_input_ids": labels, "labels": labels}
    assert torch.equal(task().unit_margins({"logits": logits}, batch), margin(logits, labels))
    monkeypatch.setattr(sliced_margins._SlicedMargin, "apply", lambda *args: pytest.fail("in slices"))
    with pytest.raises(pytest.fail.Exception, match="in slices"):
        task().unit_margins({"logits": logits}, batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "tokens", "tied", "deferred"),
    [
        (64, 384, True, False),  # margins of all tokens at once would take four times the logits, 600 MB
        (64, 384, True, True),  # the logits and their gradient, 300 MB
        (512, 32, True, False),  # the gradients of the head, 200 MB
        (512, 32, False, True),  # and of the embedding
    ],
)
def test_memory_of_a_large_vocabulary_follows_from_the_budget(benchmark, monkeypatch, width, tokens, tied, deferred):
    monkeypatch.setattr(deferred_logits, "DEFERRED_FROM", 0 if deferred else 2**60)
    case = {"vocabulary": 49152, "width": width, "tokens": tokens, "rows": 2, "tied": tied, "budget": 8 * MIB}
    benchmark.featurize_batch({**case, "vocabulary": 512, "tokens": 8})  # what is allocated once
    found = benchmark.featurize_batch(case)
    assert found["peak"] < bound(case, found, deferred) < max(4 * found["logits"], case["rows"] * found["weights"])


@pytest.mark.slow
def test_memory_of_pairs_is_that_of_rows(benchmark, monkeypatch):
    """Whole logits of four sequences of 384 tokens are 300 MB."""
    monkeypatch.setattr(deferred_logits, "DEFERRED_FROM", 0)
    case = {"vocabulary": 49152, "width": 64, "tokens": 384, "rows": 2, "sequences": 2, "budget": 8 * MIB}
    benchmark.featurize_batch({**case, "vocabulary": 512, "tokens": 8})  # what is allocated once
    found = benchmark.featurize_batch(case)
    assert found["peak"] < bound(case, found, True) < found["logits"]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "width"), [("float32", 256), ("bfloat16", 16)])
def test_memory_of_a_vocabulary_of_262144(benchmark, dtype, width):
    """Processors without instructions for bfloat16 multiply it a hundred times slower; logits have no width."""
    case = {"vocabulary": 262144, "width": width, "tokens": 512, "rows": 2, "dtype": dtype, "budget": 32 * MIB}
    found = benchmark.measured("vocabulary", {**case, "threads": 1})
    assert found["peak"] < bound(case, found, True) < found["logits"]


def bound(case: dict, found: dict, deferred: bool) -> int:
    """Bound the memory above the model.

    Whole logits and their gradient in the dtype of the model, and slices of the margins; deferred ones take the slices
    alone. Then a block of gradients, and two more for the projection if it is not in float32. Beside them there are
    random signs, and the activations of one small layer.
    """
    blocks = 1 if case.get("dtype", "float32") == "float32" else 3
    logits = 4 * 4 * deferred_logits.SLICE if deferred else 2 * found["logits"] + 3 * 4 * sliced_margins.SLICE
    return logits + blocks * case["budget"] + 48 * MIB


@pytest.mark.slow
def test_checkpointing_of_long_rows_changes_no_feature(benchmark, monkeypatch):
    """Recomputed activations are the same numbers: layers run again under the same hooks."""
    case = {"vocabulary": 128, "width": 64, "rows": 2, "tokens": 1024, "layers": 2}
    calls: list[int] = []
    original = benchmark.llama

    def counted(case: dict) -> nn.Module:
        model = original(case)
        calls.append(0)

        def count(module: nn.Module, inputs: object) -> None:
            calls[-1] += 1

        model.model.layers[0].mlp.register_forward_pre_hook(count)
        return model

    monkeypatch.setattr(benchmark, "llama", counted)
    found, expected = (
        benchmark.featurize_batch({**case, "checkpointing": checkpointing}) for checkpointing in (True, False)
    )
    assert found["features"] == expected["features"] and any(map(any, found["features"]))
    assert calls == [3, 2]  # one sample that is traced, the batch, and its layers again


def test_long_documents_are_attributed_by_themselves_in_flattened_batches(tmp_path):
    """Rows of hundreds of tokens: laid end to end, and each alone, they have the same features up to rounding."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=2048, **sizes)).eval()
    lengths = [700, 1100, 900, 40]
    ids = [torch.randint(0, 64, (length,)).tolist() for length in lengths]
    rows = Dataset.from_dict({"input_ids": ids, "labels": ids})
    found = []
    for size, collator in ((2, DataCollatorWithFlattening()), (1, None)):
        config = TrakConfig(
            str(tmp_path / str(size)), proj_dim=64, per_device_batch_size=size, feature_dtype="float32", use_cpu=True,
        )  # fmt: skip
        attributor = TrakAttributor(model, config, train_dataset=rows, task="causal_lm", data_collator=collator)
        attributor.featurize()
        found.append(torch.cat([shard.grads for shard in attributor.features.store.train(0)]))
    error = (found[0] - found[1]).norm(dim=1) / found[1].norm(dim=1)
    assert float(error.max()) < 1e-4  # float32 over 1,100 tokens and another kernel of attention


@pytest.mark.parametrize("tied", [True, False])
def test_a_batch_of_one_of_a_large_model_is_handed_on_in_blocks(monkeypatch, tied):
    """Plain autograd would hold the gradients of all parameters."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=tied, **sizes)).eval()
    ids = torch.randint(0, 64, (3, 9))
    batches = [ids[:1], ids[1:2], ids[:1, :5], ids[2:]]  # of two lengths

    def streamed(limit: int) -> tuple[torch.Tensor, int]:
        monkeypatch.setattr(computer, "WHOLE_GRADIENT_BYTES", limit)
        engine = computer.HookedGradientComputer(
            model, CausalLMModelOutput(), dtype=None, device="cpu", max_block_bytes=4096
        )
        gradients, widths = torch.zeros(len(batches), engine.layout.total), [0]
        for row, chosen in zip(gradients, batches, strict=True):

            def sink(start: int, block: torch.Tensor, row: torch.Tensor = row) -> None:
                row[start : start + block.shape[1]] += block[0]
                widths.append(block.shape[1])

            batch = {"input_ids": chosen, "attention_mask": torch.ones_like(chosen), "labels": chosen}
            engine.stream(batch, sink)
        return gradients, max(widths)

    (expected, whole), (given, largest) = streamed(2**30), streamed(0)
    assert whole >= 64 * 32 and largest <= 1024  # elements of 4,096 bytes
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)
