"""The functional and the iterative engine against plain autograd on each sample alone (and what both must refuse)."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, ViTConfig, ViTForImageClassification

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.errors import GradientEngineError
from hf_trak.gradient_computers import (
    FunctionalGradientComputer,
    HookedGradientComputer,
    IterativeGradientComputer,
    ParameterLayout,
    functional,
    make_gradient_computer,
    per_sample_gradients,
)
from hf_trak.gradient_computers.base import saved_activation_bytes
from hf_trak.gradient_computers.hooked.rules import LayerCall, register_layer_rule, unregister_layer_rule
from hf_trak.gradient_computers.hooked.rules.linear import outer_pieces
from hf_trak.gradient_computers.hooked.workspace import BLOCK_BYTES_VARIABLE, Workspace, default_block_bytes
from hf_trak.modelout_functions.base import AbstractModelOutput, BatchedModelOutput


class Margin(BatchedModelOutput):
    """Classification margin of mapping batches (labels stay out of the model) and of `(images, labels)` tuples."""

    def model_inputs(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(batch, tuple | list):
            return (batch[0],), {}
        return (), {key: value for key, value in batch.items() if key != "labels"}

    def output(self, model_output: Any, batch: Any, side: str = "train") -> Tensor:
        logits = model_output if isinstance(model_output, Tensor) else model_output.logits
        labels = batch[1] if isinstance(batch, tuple | list) else batch["labels"]
        true = logits.gather(1, labels[:, None]).squeeze(1)
        others = logits.scatter(1, labels[:, None], -torch.inf)
        return true - others.logsumexp(1)

    def out_to_loss_grad(self, model_output: Any, batch: Any, side: str = "train") -> Tensor:
        return torch.sigmoid(-self.output(model_output, batch, side)).detach()


class MarginWithLabels(Margin):
    """Passes the labels to the model as well, as `Trainer` does."""

    def model_inputs(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (), dict(batch)


class SeedMargin(AbstractModelOutput):
    """The functional form of the `trak` API: one sample, weights given."""

    def get_output(self, model: nn.Module, weights: Any, buffers: Any, *sample: Tensor) -> Tensor:
        image, label = sample
        logits = torch.func.functional_call(model, (weights, buffers), image.unsqueeze(0))
        return Margin().output(logits, (image, label.unsqueeze(0)))[0]

    def get_out_to_loss_grad(self, model: nn.Module, weights: Any, buffers: Any, batch: Any) -> Tensor:
        images, labels = batch
        logits = torch.func.functional_call(model, (weights, buffers), images)
        return torch.sigmoid(-Margin().output(logits, (images, labels))).detach()


class SeedIterativeMargin(AbstractModelOutput):
    """The iterative form of the `trak` API: a batch, no weights."""

    def get_output(self, model: nn.Module, weights: Any, buffers: Any, *sample: Tensor) -> Tensor:
        assert weights is None and buffers is None
        return Margin().output(model(sample[0]), sample)

    def get_out_to_loss_grad(self, model: nn.Module, weights: Any, buffers: Any, batch: Any) -> Tensor:
        return torch.sigmoid(-Margin().output(model(batch[0]), tuple(batch))).detach()


def small_cnn() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3, stride=2), nn.BatchNorm2d(8),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip
    for _ in range(3):  # running statistics that are not the initial ones
        model(torch.randn(16, 3, 9, 9) * 2 + 1)
    return model.eval(), (torch.randn(5, 3, 9, 9), torch.tensor([0, 1, 2, 3, 1]))


def small_vit() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=12, patch_size=4,
        num_labels=3,
    )  # fmt: skip
    batch = {"pixel_values": torch.randn(4, 3, 12, 12), "labels": torch.tensor([0, 1, 2, 1])}
    return ViTForImageClassification(config).eval(), batch


def small_bert() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=16, num_labels=3,
    )  # fmt: skip
    mask = torch.ones(4, 7, dtype=torch.long)
    mask[1, 4:] = 0
    mask[2, :2] = 0
    batch = {"input_ids": torch.randint(1, 40, (4, 7)), "attention_mask": mask, "labels": torch.tensor([0, 1, 2, 1])}
    return BertForSequenceClassification(config).eval(), batch


MODELS: list[Callable[[], tuple[nn.Module, Any]]] = [small_cnn, small_vit, small_bert]


def rows_of(batch: Any, start: int, stop: int) -> Any:
    if isinstance(batch, dict):
        return {key: value[start:stop] for key, value in batch.items()}
    return tuple(value[start:stop] for value in batch)


def truth(model: nn.Module, task: BatchedModelOutput, batch: Any) -> dict[str, Tensor]:
    """One ordinary forward pass and one `autograd.grad` per sample, written without the library."""
    size = len(batch["labels"] if isinstance(batch, dict) else batch[1])
    parameters = dict(model.named_parameters())
    rows = []
    for i in range(size):
        single = rows_of(batch, i, i + 1)
        args, kwargs = task.model_inputs(single)
        f = task.output(model(*args, **kwargs), single)
        gradients = torch.autograd.grad(f.sum(), list(parameters.values()), allow_unused=True)
        rows.append(
            [torch.zeros_like(p) if g is None else g for p, g in zip(parameters.values(), gradients, strict=True)]
        )
    return {name: torch.stack(column) for name, column in zip(parameters, zip(*rows, strict=True), strict=True)}


def streamed(computer: Any, batch: Any, size: int) -> tuple[Tensor, Any]:
    total = torch.zeros(size, computer.layout.total)

    def sink(start: int, block: Tensor) -> None:
        total[:, start : start + block.shape[1]] += block

    return total, computer.stream(batch, sink)


def concatenated(gradients: dict[str, Tensor], layout: ParameterLayout) -> Tensor:
    return torch.cat([gradients[name].flatten(1) for name in layout.names], dim=1)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    assert actual.shape == expected.shape
    error = torch.linalg.vector_norm(actual - expected, dim=1) / torch.linalg.vector_norm(expected, dim=1)
    assert float(error.max()) < tolerance


@pytest.mark.few(4)
@pytest.mark.parametrize("engine", [FunctionalGradientComputer, IterativeGradientComputer])
@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_engines_equal_plain_autograd(build: Callable[[], tuple[nn.Module, Any]], engine: Any) -> None:
    """Masks under vmap; a sample's gradient is that of the sample alone, not 1/B of it."""
    model, batch = build()
    expected = truth(model, Margin(), batch)
    computer = engine(model, Margin(), None, torch.float32, "cpu")
    size = len(next(iter(expected.values())))
    actual = computer.compute_per_sample_grad(batch)
    if isinstance(actual, dict):
        assert list(actual) == [name for name, _ in model.named_parameters()]
        assert all(actual[name].shape == expected[name].shape for name in actual)
        actual = concatenated(actual, computer.layout)
    assert_close(actual, concatenated(expected, computer.layout))
    total, outputs = streamed(computer, batch, size)
    assert_close(total, concatenated(expected, computer.layout))
    args, kwargs = Margin().model_inputs(batch)
    f = Margin().output(model(*args, **kwargs), batch)
    torch.testing.assert_close(outputs.output, f.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(outputs.out_to_loss, torch.sigmoid(-f).detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(computer.compute_loss_grad(batch), torch.sigmoid(-f).detach(), rtol=1e-4, atol=1e-5)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


@pytest.mark.parametrize("engine", [FunctionalGradientComputer, IterativeGradientComputer])
def test_only_the_selected_parameters_are_differentiated(engine: Any) -> None:
    """Neither frozen nor unnamed parameters are counted; a frozen one that is named is."""
    model, batch = small_bert()
    expected = truth(model, Margin(), batch)
    names = [n for n, _ in model.named_parameters() if "layer.1" in n]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("query" not in name and "layer.0" not in name)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    for grad_wrt in (names, None):
        computer = engine(model, Margin(), None, torch.float32, "cpu", grad_wrt)
        selected = names if grad_wrt else [n for n, flag in before.items() if flag]
        assert computer.grad_dim == sum(expected[n][0].numel() for n in selected)
        total, _ = streamed(computer, batch, 4)
        assert_close(total, torch.cat([expected[n].flatten(1) for n in selected], 1))
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before


def test_functional_chunks_agree() -> None:
    model, batch = small_bert()
    computer = FunctionalGradientComputer(model, Margin(), None, torch.float32, "cpu")
    whole, _ = streamed(computer, batch, 4)
    computer.chunk_size = 3
    chunked, outputs = streamed(computer, batch, 4)
    assert_close(chunked, whole)
    assert outputs.output.shape == outputs.out_to_loss.shape == (4,)


def test_functional_chooses_its_chunk_by_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less free memory, fewer samples at once, down to one; the gradients stay the same."""
    model, batch = small_bert()
    chunks: list[int | None] = []
    vmap = torch.func.vmap

    def recorded(*args: Any, **kwargs: Any) -> Any:
        chunks.append(kwargs["chunk_size"])
        return vmap(*args, **kwargs)

    monkeypatch.setattr(torch.func, "vmap", recorded)

    def gradients(free: float) -> Tensor:
        monkeypatch.setattr(functional, "free_bytes", lambda device: int(free))
        computer = FunctionalGradientComputer(model, Margin(), None, torch.float32, "cpu")
        return streamed(computer, batch, 4)[0]

    whole = gradients(2**40)
    gradient = 4 * sum(parameter.numel() for parameter in model.parameters())
    with torch.enable_grad():
        single = {key: value[:1] for key, value in batch.items() if key != "labels"}
        sample = 2 * saved_activation_bytes(lambda: model(**single)) + gradient
    for fitting in (3.5, 2.5, 1.5, 0.0, -4.0):
        # half of what is free may be planned with; the gradients of all four samples are held beside the chunk
        shrunk = gradients((4 * gradient + fitting * sample) / functional.MEMORY_SHARE)
        assert_close(shrunk, whole)
    assert chunks == [4, 3, 2, 1, 1, 1]


def test_functional_takes_smaller_chunks_when_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the estimate was too high: half as many samples, until they fit; one that does not fit is an error."""
    model, batch = small_bert()
    computer = FunctionalGradientComputer(model, Margin(), None, torch.float32, "cpu")
    whole, _ = streamed(computer, batch, 4)
    vmap, chunks, room = torch.func.vmap, [], 1

    def too_small(function: Any, *, chunk_size: int, **kwargs: Any) -> Any:
        chunks.append(chunk_size)
        if chunk_size > room:
            raise torch.OutOfMemoryError("out of memory")
        return vmap(function, chunk_size=chunk_size, **kwargs)

    def deferred(*args: Any, **kwargs: Any) -> Any:
        return lambda *inputs: too_small(*args, **kwargs)(*inputs)

    monkeypatch.setattr(torch.func, "vmap", deferred)
    assert_close(streamed(computer, batch, 4)[0], whole)
    assert chunks == [4, 2, 1]
    room = 0
    with pytest.raises(torch.OutOfMemoryError):
        streamed(computer, batch, 4)
    assert chunks[3:] == [4, 2, 1]


@pytest.fixture
def built_blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every block that the hooked engine builds in its workspace."""
    sizes: list[int] = []
    empty = Workspace.empty

    def recorded(self: Workspace, shape: tuple[int, ...], like: Tensor) -> Tensor:
        sizes.append(torch.Size(shape).numel() * like.element_size())
        return empty(self, shape, like)

    monkeypatch.setattr(Workspace, "empty", recorded)
    return sizes


@pytest.mark.slow
def test_the_size_of_blocks_can_be_chosen(built_blocks: list[int]) -> None:
    """By `per_sample_gradients`, and by whoever makes a gradient computer; the gradients are the same."""
    model, batch = small_bert()
    expected = concatenated(truth(model, Margin(), batch), ParameterLayout.from_model(model))
    limit = 4 * 4 * 24  # one row of the widest layer for four samples, in float32

    def whole(**options: Any) -> Tensor:
        gradients = per_sample_gradients(model, batch, lambda r, b: Margin().output(r, b), **options)
        return torch.cat([gradient.flatten(1) for gradient in gradients.values()], dim=1)

    assert_close(whole(), expected)
    assert max(built_blocks) >= 4 * 4 * 24 * 16  # the widest layer as a whole
    built_blocks.clear()
    assert_close(whole(max_block_bytes=limit), expected)
    assert max(built_blocks) == limit
    for engine in ("auto", "hooked"):
        built_blocks.clear()
        computer = make_gradient_computer(engine, model, Margin(), max_block_bytes=limit)
        assert_close(streamed(computer, batch, 4)[0], expected)
        assert max(built_blocks) == limit
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=f"`max_block_bytes` is {wrong}; expected a positive"):
            per_sample_gradients(model, batch, lambda r, b: Margin().output(r, b), max_block_bytes=wrong)
        with pytest.raises(ValueError, match=f"`max_block_bytes` is {wrong}; expected a positive"):
            HookedGradientComputer(model, Margin(), max_block_bytes=wrong)


@pytest.mark.parametrize(("terms", "most"), [(1, 2**23), (32, 2**23), (33, 2**25), (500, 2**25)])
def test_sums_of_few_products_come_in_blocks_that_fit_a_cache(terms: int, most: int) -> None:
    """`Workspace.rows_of_products`: never more than one block's bytes, nor more than were asked for."""
    size, width, like = 4, 1024, torch.empty(0)
    rows = Workspace(default_block_bytes(torch.device("cpu"))).rows_of_products(terms, size, width, like, 10**6)
    assert rows * size * width * 4 == most
    assert Workspace(2**20).rows_of_products(terms, size, width, like, 10**6) == 2**20 // (size * width * 4)
    assert Workspace(1).rows_of_products(terms, size, width, like, 10**6) == 1
    assert Workspace(2**25).rows_of_products(terms, size, width, like, 7) == 7


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_outer_products_of_one_term_are_the_exact_products(terms: int, dtype: torch.dtype) -> None:
    left, right = torch.randn(3, terms, 5, dtype=dtype), torch.randn(3, terms, 7, dtype=dtype)
    ((name, start, block),) = outer_pieces("weight", left, right, Workspace())
    assert (name, start, block.dtype) == ("weight", 0, dtype)
    expected = torch.einsum("bti,btj->bij", left.double(), right.double()).flatten(1)
    if terms == 1:
        torch.testing.assert_close(block, expected.to(dtype), rtol=0, atol=0)
    else:
        magnitudes = torch.einsum("bti,btj->bij", left.double().abs(), right.double().abs()).flatten(1)
        assert ((block.double() - expected).abs() <= 3 * torch.finfo(dtype).eps * magnitudes).all()


def test_the_size_of_blocks_is_a_setting_that_defines_no_features(
    built_blocks: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`HF_TRAK_MAX_BLOCK_BYTES`: a run goes on with another value, and its features are the same to rounding."""
    model, batch = small_bert()
    rows = Dataset.from_dict({name: value.tolist() for name, value in batch.items()})

    def featurized(store: str) -> TrakAttributor:
        args = TrakConfig(str(tmp_path / store), proj_dim=32, use_cpu=True)
        return TrakAttributor(model, args, train_dataset=rows).featurize()

    def features(attributor: TrakAttributor) -> Tensor:
        return torch.cat([shard.grads for shard in attributor.features.store.train(0)])

    whole = features(featurized("whole"))
    assert max(built_blocks) >= 4 * 4 * 24 * 16
    built_blocks.clear()
    monkeypatch.setenv(BLOCK_BYTES_VARIABLE, str(4 * 4 * 24))
    sliced = featurized("sliced")
    assert max(built_blocks) == 4 * 4 * 24
    assert_close(features(sliced), whole)
    built_blocks.clear()
    monkeypatch.setenv(BLOCK_BYTES_VARIABLE, str(2**20))
    torch.testing.assert_close(features(featurized("sliced")), features(sliced), rtol=0, atol=0)
    assert built_blocks == []  # everything was there
    for wrong in ("0", "-1", "much"):
        monkeypatch.setenv(BLOCK_BYTES_VARIABLE, wrong)
        with pytest.raises(ValueError, match=f"`{BLOCK_BYTES_VARIABLE}` is '{wrong}'. Expected a positive number"):
            default_block_bytes(torch.device("cpu"))


def test_blocks_are_larger_on_a_gpu_unless_somebody_says() -> None:
    assert default_block_bytes(torch.device("cpu")) == 32 * 2**20
    assert default_block_bytes(torch.device("cuda", 1)) == 256 * 2**20
    model, batch = small_bert()
    computer = HookedGradientComputer(model, Margin(), None, None, "cpu")
    for chosen, expected in ((None, 32 * 2**20), (12345, 12345), (None, 32 * 2**20)):
        computer.max_block_bytes = chosen
        computer.stream(batch, lambda start, block: None)
        assert computer._workspace.max_block_bytes == expected


def test_functional_sets_the_problem_type_only_while_it_runs() -> None:
    """The sequence-classification loss would write `config.problem_type` under vmap."""
    model, batch = small_bert()
    computer = FunctionalGradientComputer(model, MarginWithLabels(), None, torch.float32, "cpu")
    assert_close(streamed(computer, batch, 4)[0], concatenated(truth(model, Margin(), batch), computer.layout))
    assert model.config.problem_type is None


def test_mask_code_is_restored_after_an_exception() -> None:
    from transformers import masking_utils
    from transformers.utils import import_utils

    class Failing(Margin):
        def output(self, model_output: Any, batch: Any, side: str = "train") -> Tensor:
            if masking_utils.is_tracing():
                raise KeyError("inside the engine")
            return super().output(model_output, batch, side)

    model, batch = small_bert()
    before = masking_utils.is_tracing
    with pytest.raises(KeyError, match="inside the engine"):
        FunctionalGradientComputer(model, Failing(), None, torch.float32, "cpu").compute_per_sample_grad(batch)
    assert masking_utils.is_tracing is before is import_utils.is_tracing
    assert not masking_utils.is_tracing()


def test_seed_tasks_on_tuple_batches() -> None:
    model, batch = small_cnn()
    expected = truth(model, Margin(), batch)
    functional = FunctionalGradientComputer(model, SeedMargin(), None, torch.float32, "cpu")
    iterative = IterativeGradientComputer(model, SeedIterativeMargin(), None, torch.float32, "cpu")
    for computer in (functional, iterative):
        total, outputs = streamed(computer, batch, 5)
        assert_close(total, concatenated(expected, computer.layout))
        q = torch.sigmoid(-Margin().output(model(batch[0]), batch)).detach()
        torch.testing.assert_close(outputs.out_to_loss, q)
    for engine, task in (("auto", SeedMargin()), ("functional", SeedMargin()), ("iterative", SeedIterativeMargin())):
        computer = make_gradient_computer(engine, model, task)
        assert_close(streamed(computer, list(batch), 5)[0], concatenated(expected, computer.layout))
    with pytest.raises(TypeError, match="functional form"):
        functional.compute_per_sample_grad({"x": batch[0], "y": batch[1]})


def test_tied_and_unused_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(2, 2)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).tanh())

    torch.manual_seed(0)
    model, batch = Tied(), (torch.randn(3, 4), torch.tensor([0, 1, 2]))
    expected = truth(model, Margin(), batch)
    assert "second.weight" not in expected
    for engine in (FunctionalGradientComputer, IterativeGradientComputer):
        computer = engine(model, Margin(), None, torch.float32, "cpu")
        total, _ = streamed(computer, batch, 3)
        assert_close(total, concatenated(expected, computer.layout))
        assert total[:, computer.layout.slot("unused.weight").offset :].abs().max() == 0


def test_values_without_a_batch_dimension_are_passed_on() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor, shift: Tensor, scale: float, flag: bool) -> Tensor:
            return self.linear(x * scale if flag else x) + shift

    torch.manual_seed(0)
    batch = {
        "x": torch.randn(5, 4),
        "shift": torch.randn(3),
        "scale": 3.0,
        "flag": True,
        "labels": torch.tensor([0, 1, 2, 0, 1]),
    }
    model = Scaled()
    functional = FunctionalGradientComputer(model, Margin(), None, torch.float32, "cpu")
    iterative = IterativeGradientComputer(model, Margin(), None, torch.float32, "cpu")
    assert_close(streamed(functional, batch, 5)[0], streamed(iterative, batch, 5)[0])


def test_a_mean_over_the_batch_is_refused() -> None:
    """A mean loss is 1/B too small and mixes samples."""

    class Mean(Margin):
        def output(self, model_output: Any, batch: Any, side: str = "train") -> Tensor:
            return super().output(model_output, batch, side).mean()

    model, batch = small_cnn()
    for engine in (FunctionalGradientComputer, IterativeGradientComputer):
        with pytest.raises(ValueError, match="one scalar per sample"):
            engine(model, Mean(), None, torch.float32, "cpu").compute_per_sample_grad(batch)


@pytest.mark.parametrize("engine", ["auto", "functional", "iterative", "hooked"])
def test_several_outputs_per_sample_name_the_function_that_gave_them(engine: str) -> None:
    model, (images, labels) = nn.Sequential(nn.Flatten(), nn.Linear(6, 3)), (torch.rand(2, 6), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"`output_fn` returned a tensor of shape \([12], 3\) for .*Expected"):
        per_sample_gradients(model, (images, labels), lambda logits, batch: logits, engine)


def test_gradients_come_in_the_dtype_asked_for() -> None:
    model, batch = small_cnn()
    for dtype in (torch.float16, torch.float64):
        functional = FunctionalGradientComputer(model, Margin(), None, dtype, "cpu").compute_per_sample_grad(batch)
        assert {gradient.dtype for gradient in functional.values()} == {dtype}
        assert (
            IterativeGradientComputer(model, Margin(), None, dtype, "cpu").compute_per_sample_grad(batch).dtype
            == dtype
        )


def test_functional_follows_newly_loaded_weights() -> None:
    model, batch = small_cnn()
    computer = FunctionalGradientComputer(model, Margin(), None, torch.float32, "cpu")
    other, _ = small_cnn()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    computer.load_model_params(other)
    assert_close(streamed(computer, batch, 5)[0], concatenated(truth(other, Margin(), batch), computer.layout))


def test_functional_says_what_vmap_cannot_do() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) if x.sum().item() > 0 else self.linear(2 * x)

    batch = (torch.ones(2, 4), torch.tensor([0, 1]))
    with pytest.raises(GradientEngineError, match="iterative"):
        FunctionalGradientComputer(Branching(), Margin(), None, torch.float32, "cpu").compute_per_sample_grad(batch)


def test_a_slower_engine_is_a_warning_that_says_why(caplog: pytest.LogCaptureFixture) -> None:
    """At the level that is shown by default: that samples go one by one, and what each faster engine objects to."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale if x.sum().item() > 0 else 2 * x * self.scale

    def wrong(call: LayerCall) -> dict[str, Tensor]:
        return {"scale": 3 * call.grad * call.x}

    batch = (torch.rand(2, 3), torch.tensor([0, 1]))
    register_layer_rule(Branching, parameters=("scale",))(wrong)
    try:
        computer = make_gradient_computer("auto", Branching(), Margin())
        for _ in range(2):
            streamed(computer, batch, 2)
    finally:
        unregister_layer_rule(Branching)
    assert computer.engine == "iterative"
    (warning,) = (record for record in caplog.records if record.name.startswith("hf_trak"))
    said = warning.getMessage()
    assert warning.levelno == logging.WARNING
    assert "of Branching by the slower iterative engine, one forward and one backward pass per sample" in said
    assert (
        "Refused: hooked: " in said
        and "'scale'" in said
        and "functional: The functional engine cannot vectorize" in said
    )
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="hf_trak"):
        model, images = small_cnn()
        streamed(make_gradient_computer("auto", model, Margin()), images, 5)
        named = make_gradient_computer("iterative", Branching(), Margin())
        streamed(named, batch, 2)
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.INFO, "Per-sample gradients of Sequential by the hooked engine."),
        (logging.INFO, "Per-sample gradients of Branching by the iterative engine."),
    ]


def test_unknown_engine() -> None:
    model, _ = small_cnn()
    with pytest.raises(ValueError, match="expected 'auto' or one of"):
        make_gradient_computer("fast", model, Margin())


@pytest.mark.few(2)
@pytest.mark.parametrize("engine", ["auto", "functional", "iterative"])
def test_per_sample_gradients(engine: str) -> None:
    model, batch = small_bert()
    expected = truth(model, Margin(), batch)
    actual = per_sample_gradients(model, batch, lambda result, batch: Margin().output(result, batch), engine)
    assert list(actual) == list(expected)
    for name, gradient in actual.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)
    cnn, (images, labels) = small_cnn()
    names = ["8.weight"]
    expected = truth(cnn, Margin(), (images, labels))
    pair = per_sample_gradients(cnn, (images, labels), lambda y, batch: Margin().output(y, batch), engine, names)
    assert list(pair) == names
    torch.testing.assert_close(pair["8.weight"], expected["8.weight"], rtol=1e-4, atol=1e-6)
    single = per_sample_gradients(
        cnn, images, lambda y, batch: (y * batch.mean((1, 2, 3))[:, None]).sum(1), "iterative", names
    )
    assert single["8.weight"].shape == (5, 4, 8)
