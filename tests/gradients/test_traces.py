"""The hooked engine at widths at which it has traced no sample: same bits, fewer traces, and no trust in a model that
changes with the width."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    ViTConfig,
    ViTForImageClassification,
)

from hf_trak.gradient_computers.hooked import width_traces
from hf_trak.gradient_computers.hooked.batch_axis import (
    BatchAxis,
    RowOrders,
    TensorTrace,
    UnsupportedError,
    batch_axis,
)
from hf_trak.gradient_computers.hooked.computer import HookedGradientComputer
from hf_trak.gradient_computers.per_sample import function_task
from hf_trak.modelout_functions.base import AbstractModelOutput

WIDTHS = [(12, 4), (17, 5), (9, 3), (4, 4), (33, 2), (12, 6), (21, 6), (1, 3), (8, 8)]
"""Widths and sizes of batches. Some have as many rows as columns."""

Batch = dict[str, Tensor]


def of_logits(result: Any, batch: Any) -> Tensor:
    """A scalar per sample that depends on all logits."""
    logits = result.logits if hasattr(result, "logits") else result
    return logits.log_softmax(-1)[..., 3].flatten(1).mul(torch.arange(1.0, 1 + logits[0, ..., 0].numel())).sum(1)


def text(seed: int, width: int, size: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(size, width, dtype=torch.long)
    if seed % 3 and width > 2:  # some batches without any padding, for which transformers makes no mask
        mask[0, -1] = 0
    return {"input_ids": torch.randint(5, 64, (size, width), generator=generator), "attention_mask": mask}


def images(seed: int, width: int, size: int) -> Batch:
    """Sequences of vectors, `(size, width, 6)`."""
    return {"x": torch.randn(size, width, 6, generator=torch.Generator().manual_seed(seed))}


def batches(made: Callable[[int, int, int], Batch], widths: Sequence[tuple[int, int]] = tuple(WIDTHS)) -> list[Batch]:
    return [made(seed, *sizes) for seed, sizes in enumerate(widths)]


def task_of(model: nn.Module) -> AbstractModelOutput:
    return function_task(of_logits, model)


def gradients(
    model: nn.Module, given: Sequence[Batch], order: Sequence[int] | None = None
) -> tuple[list[dict[str, Tensor]], HookedGradientComputer]:
    """Take the gradients of batches in an order, and return them in theirs, with the computer."""
    computer = HookedGradientComputer(model, task_of(model), dtype=None, device=None)
    found = {i: computer.compute_per_sample_grad(given[i]) for i in order or range(len(given))}
    return [found[i] for i in range(len(given))], computer


def traced(computer: HookedGradientComputer) -> int:
    """Count the widths at which a sample was traced."""
    return sum(not trace.foretold for trace in computer._sample_traces.values())


def require_same_bits(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert list(one) == list(other)
        assert all(torch.equal(one[name], other[name]) for name in other)


def with_a_trace_each(
    model: nn.Module, given: Sequence[Batch], patch: pytest.MonkeyPatch
) -> tuple[list[dict[str, Tensor]], HookedGradientComputer]:
    with patch.context() as context:
        context.setattr(width_traces, "LEAST_WIDTHS", 10**6)
        return gradients(model, given)


def alone(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Plain autograd on each sample alone."""
    rows = []
    for i in range(len(next(iter(batch.values())))):
        single = {key: value[i : i + 1] for key, value in batch.items()}
        f = of_logits(model(**single), single).sum()
        taken = torch.autograd.grad(f, list(model.parameters()), allow_unused=True)
        rows.append([torch.zeros_like(p) if g is None else g for g, p in zip(taken, model.parameters(), strict=True)])
    names = [name for name, _ in model.named_parameters()]
    return {name: torch.stack(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def require_right(model: nn.Module, given: Sequence[Batch], found: list[dict[str, Tensor]]) -> None:
    for batch, one in zip(given, found, strict=True):
        truth = alone(model, batch)
        for name, gradient in truth.items():
            # sums over up to 33 positions of float32
            torch.testing.assert_close(one[name], gradient, rtol=1e-4, atol=1e-4 * float(gradient.abs().max() + 1e-3))


@pytest.fixture(scope="module")
def gpt2() -> nn.Module:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=64, n_positions=64,
                                      bos_token_id=1, eos_token_id=2)).eval()  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("order", [range(9), range(8, -1, -1), [4, 8, 1, 7, 0, 2, 6, 3, 5]])
def test_two_widths_are_enough(gpt2: nn.Module, order: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits are those of a trace per width, in whatever order batches come."""
    given = batches(text)
    expected, each = with_a_trace_each(gpt2, given, monkeypatch)
    found, computer = gradients(gpt2, given, order)
    require_same_bits(found, expected)
    assert traced(each) == 8
    assert traced(computer) <= 3  # of rows with padding and of rows without


def test_the_same_batch_twice(gpt2: nn.Module) -> None:
    given = [text(seed, width, 3) for seed, width in ((1, 7), (1, 9), (1, 11), (1, 11))]
    found, computer = gradients(gpt2, given)
    require_same_bits(found[3:], found[2:3])
    assert traced(computer) == 2


def test_two_sizes_need_three_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of encoder and decoder vary for themselves: two samples do not tell what belongs to which."""
    torch.manual_seed(0)
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = BartConfig(vocab_size=64, d_model=16, encoder_ffn_dim=16, decoder_ffn_dim=16,
                        max_position_embeddings=64, **sizes)  # fmt: skip
    model = BartForConditionalGeneration(config).eval()
    given = []
    for seed, (width, length) in enumerate(((7, 5), (9, 11), (12, 4), (20, 13), (6, 8))):
        ids = torch.randint(5, 64, (3, length), generator=torch.Generator().manual_seed(seed))
        given.append({"input_ids": text(0, width, 3)["input_ids"], "decoder_input_ids": ids})
    expected, _ = with_a_trace_each(model, given, monkeypatch)
    found, computer = gradients(model, given)
    require_same_bits(found, expected)
    assert traced(computer) == 3


class Sequenced(nn.Module):
    """Layers on sequences of vectors, which a subclass connects."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.conv = nn.Conv1d(6, 6, 3, stride=2, padding=1)
        self.scale = nn.Parameter(torch.randn(6))
        self.table = nn.Parameter(torch.randn(64, 6))
        self.head = nn.Linear(6, 6)


class OtherLayer(Sequenced):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh((self.first if x.shape[1] <= 10 else self.second)(x)))


class OtherOrder(Sequenced):
    """Folds positions and samples into one dimension, with samples behind positions if there are many positions.
    All shapes are those of the other order."""

    def forward(self, x: Tensor) -> Tensor:
        size, width, last = x.shape
        if width <= 10:
            y = torch.tanh(self.first(x.transpose(0, 0).reshape(-1, last))).view(size, width, last).transpose(0, 0)
        else:
            y = torch.tanh(self.first(x.transpose(0, 1).reshape(-1, last))).view(width, size, last).transpose(0, 1)
        return self.head(y)


class OtherUse(Sequenced):
    """Adds a table of positions, and multiplies by it if there are many."""

    def forward(self, x: Tensor) -> Tensor:
        table = self.table[: x.shape[1]]
        return self.head(torch.tanh(self.first(x) + table if x.shape[1] <= 10 else self.first(x) * table))


class Chunks(Sequenced):
    """Works on chunks of eight positions, as state-space models do."""

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[1]
        x = nn.functional.pad(x, (0, 0, 0, -width % 8))
        chunks = x.view(-1, 8, 6)
        y = torch.tanh(self.first(chunks) * self.scale)
        return self.head(y.view(len(x), -1, 6)[:, :width])


class Strides(Sequenced):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.conv(x.transpose(1, 2))).transpose(1, 2))


class Steps(Sequenced):
    """One call of a layer per position, as recurrent models make it."""

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        states = []
        for position in range(x.shape[1]):
            state = torch.tanh(self.first(x[:, position]) + self.second(state) * self.scale)
            states.append(state)
        return self.head(torch.stack(states, 1))


class Loops(Sequenced):
    """Another number of operations at each width, without any parameter."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        for _ in range(x.shape[1]):
            y = torch.sin(y)
        return self.head(y)


class Expanded(Sequenced):
    """Expands a parameter to a size that is not linear in the width, by an operation that may as well make a batch."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale.expand(x.shape[1] // 4 + 1, 6).sum(0)
        return self.head(torch.tanh(self.first(x)) * scale)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", [OtherLayer, OtherOrder, OtherUse, Chunks, Strides, Steps, Loops, Expanded])
def test_models_that_change_with_the_width(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    model = kind()
    widths = [(8, 3), (9, 3), (4, 4), (17, 5), (12, 4), (21, 6), (10, 10), (33, 2), (16, 3), (3, 3)]
    given = batches(images, widths)
    expected, each = with_a_trace_each(model, given, monkeypatch)
    require_right(model, given, expected)
    for order in (range(10), range(9, -1, -1), [3, 0, 5, 2, 7, 1, 9, 4, 8, 6]):
        found, computer = gradients(model, given, order)
        require_same_bits(found, expected)
        # nothing remains of traces that were not confirmed
        assert computer._model_trace == each._model_trace


def test_few_traces_are_computed_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs a forward pass."""
    model, passes = Loops(), []
    kept = HookedGradientComputer._pass
    monkeypatch.setattr(
        HookedGradientComputer, "_pass", lambda self, *args: (passes.append(args[4].foretold), kept(self, *args))[1]
    )
    gradients(model, [images(0, width, 3) for width in range(2, 20)])
    assert sum(passes) == width_traces.MOST_FAILURES


@pytest.mark.parametrize("layers", [1, 4])
def test_a_class_token_is_found_out_at_once(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a batch shows that it was expanded; all layers behind it are known by then."""
    config = ViTConfig(hidden_size=8, num_attention_heads=2, intermediate_size=8, image_size=8, patch_size=4)
    config.num_hidden_layers = layers
    model = ViTForImageClassification(config).eval()
    passes, kept = [], HookedGradientComputer._pass
    monkeypatch.setattr(
        HookedGradientComputer, "_pass", lambda self, *args: (passes.append(args[1]), kept(self, *args))[1]
    )
    images = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    task = function_task(lambda result, batch: result.logits[:, 1], model)
    computer = HookedGradientComputer(model, task, dtype=None, device=None)
    found = computer.compute_per_sample_grad({"pixel_values": images})
    assert passes == [1, 5, 1, 5]
    for row, image in enumerate(images):
        f = model(pixel_values=image[None]).logits[0, 1]
        truth = torch.autograd.grad(f, list(model.parameters()), allow_unused=True)
        for (name, parameter), gradient in zip(model.named_parameters(), truth, strict=True):
            expected = torch.zeros_like(parameter) if gradient is None else gradient
            torch.testing.assert_close(found[name][row], expected, rtol=1e-4, atol=1e-6)


def test_what_steps_say_of_a_call() -> None:
    """Dimensions that are reordered count, sizes do not."""
    x = torch.zeros(2, 3)
    step = width_traces.step_of
    assert step(torch.transpose, (x, 0, 1), {}) != step(torch.transpose, (x, 1, 1), {})
    assert step(torch.permute, (x, (0, 1)), {}) != step(torch.permute, (x, (1, 0)), {})
    assert step(torch.einsum, ("ij->ji", x), {}) != step(torch.einsum, ("ij->ij", x), {})
    assert step(torch.cat, ([x, x],), {"dim": 0}) != step(torch.cat, ([x, x],), {"dim": 1})
    assert step(torch.Tensor.view, (x, 3, 2), {}) == step(torch.Tensor.view, (x, 6, 1), {})
    assert step(torch.add, (x, x), {}) != step(torch.mul, (x, x), {})


def folded(rows: Tensor, noise: float = 0.0) -> tuple[TensorTrace, Tensor]:
    """The trace of a sample of three rows, and a batch of two samples, one after the other."""
    generator = torch.Generator().manual_seed(0)
    batch = rows + noise * torch.randn(rows.shape, generator=generator)
    return TensorTrace.of(rows[:3]), batch


@pytest.mark.parametrize("noise", [0.0, 1e-6])
def test_rows_that_are_the_same_are_in_the_order_of_others(noise: float) -> None:
    """Rounding decides which order fits better where all rows are the same, as those of embedded token types."""
    different, same = torch.randn(6, 8), torch.randn(8).expand(6, 8)
    for major in (True, False):
        orders = RowOrders()
        rows = different if major else different.view(2, 3, 8).transpose(0, 1).reshape(6, 8)
        axis = batch_axis(TensorTrace.of(different[:3]), rows, 2, orders)
        assert axis == BatchAxis(0, 3, major) and orders == RowOrders({3: {major}})
        assert batch_axis(*folded(same, noise), 2, orders) == BatchAxis(0, 3, major)
        assert batch_axis(*folded(torch.zeros(6, 8, dtype=torch.long)), 2, orders) == BatchAxis(0, 3, major)


def test_rows_that_are_the_same_are_presumed_to_be_neighbours_until_a_tensor_tells() -> None:
    orders = RowOrders({2: {False}})
    assert batch_axis(*folded(torch.ones(6, 8), 1e-6), 2, orders) == BatchAxis(0, 3, True)
    assert orders.presumed == {3}
    different = torch.randn(6, 8)
    assert batch_axis(*folded(different), 2, orders) == BatchAxis(0, 3, True)
    other = different.view(2, 3, 8).transpose(0, 1).reshape(6, 8)
    with pytest.raises(UnsupportedError, match="another order than was presumed"):
        batch_axis(TensorTrace.of(different[:3]), other, 2, orders)
    with pytest.raises(UnsupportedError, match="are the same in either order"):
        batch_axis(*folded(torch.ones(6, 8)), 2, orders)


class TypesOfTexts(nn.Module):
    """Rows of several texts, folded into the batch, each with the same token types, as in BERT."""

    def __init__(self, types_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.types = nn.Embedding(30, 8), nn.Embedding(2, 8)
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 1)
        self.types_first = types_first
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        ids = x.flatten(0, 1)
        calls = [lambda: self.words(ids), lambda: self.types(torch.zeros_like(ids))]
        one, other = (call() for call in (reversed(calls) if self.types_first else calls))
        return self.out(torch.tanh(self.norm(one + other))).sum((1, 2)).reshape(x.shape[:2])


def of_texts(scores: Tensor, batch: Any) -> Tensor:
    return (scores * torch.tensor([2.0, -1.0, 0.5])).sum(1)


@pytest.mark.parametrize("types_first", [False, True])
def test_token_types_of_folded_texts(types_first: bool) -> None:
    model = TypesOfTexts(types_first)
    computer = HookedGradientComputer(model, function_task(of_texts, model), dtype=None, device=None)
    for width in (4, 7, 5, 9, 6, 11):
        for size in (4, 2, 3, 1):
            x = torch.randint(1, 30, (size, 3, width))
            if size == 3:
                x[:] = 5  # all rows of all samples are the same
            found = computer.compute_per_sample_grad({"x": x})
            for row in range(size):
                value = of_texts(model(x[row : row + 1]), None)
                expected = torch.autograd.grad(value.sum(), list(model.parameters()))
                for (name, _), gradient in zip(model.named_parameters(), expected, strict=True):
                    assert (found[name][row] - gradient).norm() <= 1e-5 * (1 + gradient.norm()), name
    assert bool(computer._sample_traces) != types_first  # none is kept that rests on what was presumed
