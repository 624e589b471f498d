"""Blocks of a curvature, on layers that share, fold and transpose: every parameter once, Λ that of dense gradients."""

from pathlib import Path
from typing import Any

import pytest
import torch
from curvature_runs import written_curvature
from torch import Tensor, nn
from trak_options import trak_config
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from hf_trak import TrakAttributor
from hf_trak.curvature import arrivals, fit
from hf_trak.curvature.blocks import CurvatureBlocks, DiagonalBlock
from hf_trak.curvature.curvature import Curvature
from hf_trak.errors import GradientEngineError
from hf_trak.gradient_computers import per_sample_gradients
from hf_trak.gradient_computers.auto import ENGINES

N = 12


class Classifier(nn.Module):
    """Layers that map a vector or an image to features, and three numbers of the features' mean over positions."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, pixel_values: Tensor) -> Tensor:
        hidden = self.body(pixel_values)
        hidden = hidden.flatten(2).mean(2) if hidden.ndim > 2 else hidden
        return torch.stack([hidden.sum(1), hidden.square().sum(1), hidden[:, 0]], 1)


class Twice(nn.Module):
    """One layer used twice, as ALBERT uses its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class Products(nn.Module):
    """Stack two matrices, the first for every row: parameters that no layer type knows."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(2, 6, 5))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.experts[0]).tanh() + 0.1 * (x @ self.experts[1]).square()


class Tied(nn.Module):
    """A table that is the head, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 5)
        self.mix = nn.Linear(5, 5)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.mix(self.table(pixel_values)).tanh().mean(1) @ self.table.weight.T


def image(*shape: int) -> Tensor:
    return torch.randn(N, *shape, generator=torch.Generator().manual_seed(1))


CASES: dict[str, tuple[Any, Tensor]] = {
    "grouped": (lambda: Classifier(nn.Conv2d(4, 6, 3, groups=2, stride=2, padding=1)), image(4, 7, 6)),
    "depthwise": (lambda: Classifier(nn.Conv2d(4, 4, 3, groups=4), nn.Tanh(), nn.Conv2d(4, 5, 1)), image(4, 6, 6)),
    "transposed": (lambda: Classifier(nn.ConvTranspose2d(4, 3, 3, stride=2)), image(4, 4, 3)),
    "one dimension": (lambda: Classifier(nn.Conv1d(3, 5, 3, padding=2, dilation=2)), image(3, 9)),
    "three dimensions": (lambda: Classifier(nn.Conv3d(2, 4, 2)), image(2, 4, 4, 3)),
    "square Conv1D": (lambda: Classifier(Conv1D(6, 6), nn.Tanh(), Conv1D(4, 6)), image(6)),
    "norms": (lambda: Classifier(nn.LayerNorm(6), nn.Linear(6, 5), nn.BatchNorm1d(5)), image(6)),
    "used twice": (lambda: Classifier(Twice()), image(6)),
    "stacked": (lambda: Classifier(Products()), image(6)),
    "tied": (Tied, torch.randint(9, (N, 4), generator=torch.Generator().manual_seed(1))),
}


def fitted(directory: Path, model: nn.Module, inputs: Tensor, **options: Any) -> Curvature:
    args = trak_config(
        str(directory),
        use_cpu=True,
        curvature_labels="empirical",
        per_device_batch_size=5,
        **options,
    )
    rows = [{"pixel_values": x, "labels": torch.tensor(i % 3)} for i, x in enumerate(inputs)]
    TrakAttributor(model, args, rows, task="image_classification").fit_curvature()
    return written_curvature(directory)


def gradients(model: nn.Module, inputs: Tensor) -> Tensor:
    """−∇ℓ of every row, `(N, P)`."""
    labels = torch.arange(N) % 3

    def log_likelihood(output: Tensor, batch: Any) -> Tensor:
        return output.log_softmax(1).gather(1, batch["labels"].unsqueeze(1)).squeeze(1)

    batch = {"pixel_values": inputs, "labels": labels}
    found = per_sample_gradients(model.eval(), batch, log_likelihood, engine="iterative")
    return torch.cat([gradient.flatten(1) for gradient in found.values()], 1).double()


def check(curvature: Curvature, whole: Tensor) -> None:
    """Compare Λ with mean squares of rotated gradients, and the places of all blocks with those of all parameters."""
    places = torch.arange(whole.shape[1], dtype=torch.float64).unsqueeze(0)
    seen = []
    for block, values in zip(curvature.blocks.kronecker, curvature.kronecker, strict=True):
        seen.append(block.matrix(places).flatten())
        rotated = block.matrix(whole)
        if values.bases is not None:
            left, right = (basis.double() for basis in values.bases)
            rotated = left.T @ rotated @ right
        expected = rotated.square().mean(0)
        torch.testing.assert_close(values.eigenvalues.double(), expected, rtol=1e-4, atol=1e-5 * float(expected.max()))
    for one, squares in zip(curvature.blocks.diagonal, curvature.diagonal, strict=True):
        seen.append(torch.arange(one.start, one.start + one.numel, dtype=torch.float64))
        expected = whole[:, one.start : one.start + one.numel].square().mean(0)
        torch.testing.assert_close(squares.double(), expected, rtol=1e-4, atol=1e-5 * float(expected.max()))
    assert torch.equal(torch.cat(seen).sort().values, places[0])


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[] if kind == "ekfac" or name in ("grouped", "stacked") else [pytest.mark.slow])
        for name in CASES
        for kind in ("ekfac", "shampoo", "diagonal")
    ],
)
def test_eigenvalues_are_those_of_whole_gradients(tmp_path: Path, name: str, kind: str) -> None:
    make, inputs = CASES[name]
    torch.manual_seed(0)
    model = make().eval()
    curvature = fitted(tmp_path, model, inputs, curvature=kind)
    check(curvature, gradients(model, inputs))
    factored = {block.name for block in curvature.blocks.kronecker}
    if kind != "diagonal":
        assert ("body.0.weight" in factored) == (name not in ("depthwise", "norms", "used twice", "stacked", "tied"))
        assert "table.weight" not in factored and ("body.0.experts" in factored) == (name == "stacked")


@pytest.mark.parametrize("engine", ["functional", "iterative"])
def test_other_engines_give_dense_matrices(tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise GradientEngineError("not this model")

    for other in ENGINES.keys() - {engine, "iterative"}:
        monkeypatch.setattr(ENGINES[other], "stream", refuse)
    make, inputs = CASES["square Conv1D"]
    torch.manual_seed(0)
    model = make().eval()
    curvature = fitted(tmp_path, model, inputs)
    check(curvature, gradients(model, inputs))
    assert [(block.source, block.bias_part) for block in curvature.blocks.kronecker] == [(None, "left")] * 2


def test_long_sides_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, inputs = CASES["square Conv1D"]
    torch.manual_seed(0)
    model = make().eval()
    monkeypatch.setattr(fit.FitPlan.__init__, "__defaults__", (True, 4))  # largest_side
    curvature = fitted(tmp_path, model, inputs)
    check(curvature, gradients(model, inputs))
    assert {(block.left, block.right) for block in curvature.blocks.kronecker} == {(3, 3), (3, 4)}


def test_the_division_is_read_as_it_was_written(tmp_path: Path) -> None:
    make, inputs = CASES["grouped"]
    blocks = fitted(tmp_path, make().eval(), inputs).blocks
    again = CurvatureBlocks.from_json(blocks.to_json())
    assert again == blocks and again.digest == blocks.digest and len(blocks.kronecker) == 2
    assert [block.bias for block in blocks.kronecker] == [6 * 2 * 9, 6 * 2 * 9 + 3]


def test_a_language_model_with_a_tied_head(tmp_path: Path) -> None:
    """The table, which the head shares, is diagonal; `Conv1D` weights are matrices with their biases."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2)).eval()
    ids = torch.randint(20, (N, 6), generator=torch.Generator().manual_seed(1))
    args = trak_config(str(tmp_path), use_cpu=True, curvature_labels="empirical")
    rows = [{"input_ids": row, "labels": row} for row in ids]
    TrakAttributor(model, args, rows).fit_curvature()
    curvature = written_curvature(tmp_path)

    def log_likelihood(output: Any, batch: Any) -> Tensor:
        found = output.logits[:, :-1].log_softmax(2).gather(2, batch["input_ids"][:, 1:].unsqueeze(2))
        return found.sum((1, 2))

    found = per_sample_gradients(model, {"input_ids": ids}, log_likelihood, engine="iterative")
    check(curvature, torch.cat([gradient.flatten(1) for gradient in found.values()], 1).double())
    lone = {block.name for block in curvature.blocks.diagonal}
    assert {"transformer.wte.weight", "transformer.wpe.weight"} < lone
    assert not any(name.endswith("bias") and "ln" not in name for name in lone)


class Collected:
    """Whole gradients from what a consumer is given."""

    takes_numbers = True

    def __init__(self, size: int, numel: int) -> None:
        self.rows = torch.zeros(size, numel)
        self.times = torch.zeros(numel)

    def numbers(self, index: int, first: int, gradients: Tensor) -> None:
        self.rows[:, first : first + gradients.shape[1]] = gradients
        self.times[first : first + gradients.shape[1]] += 1


@pytest.mark.parametrize("slice_bytes", [1, 200, 10**6])
def test_uses_of_one_table_add_up(monkeypatch: pytest.MonkeyPatch, slice_bytes: int) -> None:
    """An embedding's gradient, in which most entries are zero; a head's, as factors; and one that is dense."""
    monkeypatch.setattr(arrivals, "SLICE_BYTES", slice_bytes)
    start, height, width, size = 3, 12, 5, 4
    blocks = CurvatureBlocks((), (DiagonalBlock("table", start, height * width),), frozenset([start]))
    embedded = torch.zeros(size, height, width)
    embedded[:, [2, 3, 11]] = torch.randn(size, 3, width)
    left, right = torch.randn(size, 6, height), torch.randn(size, 6, width)
    dense = torch.randn(size, height * width)
    expected = embedded.flatten(1) + torch.bmm(left.mT, right).flatten(1) + dense
    found = Collected(size, height * width)
    sink = arrivals.BatchArrivals(blocks, found)  # type: ignore[arg-type]
    sink.add_outer(start, left, right)
    for low in range(0, height * width, 17):  # in memory that is used again
        memory = embedded.flatten(1)[:, low : low + 17].clone()
        sink(start + low, memory)
        memory.fill_(7.0)
    sink(start, dense)
    sink.finish()
    torch.testing.assert_close(found.rows, expected)
    assert torch.equal(found.times, torch.ones(height * width))
