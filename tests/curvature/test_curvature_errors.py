"""Bad input to curvatures and exact scores: what is refused, and that nothing is lost."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trak_options import trak_config

from hf_trak import TrakAttributor
from hf_trak.curvature.curvature import inverse
from hf_trak.errors import CheckpointMismatchError, ConfigMismatchError, NonFiniteError, StoreError
from hf_trak.modelout_functions import FunctionModelOutput

N = 40


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.never = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(5, 5)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(pixel_values)))


def rows(n: int = N, seed: int = 0, scale: float = 1.0) -> list[dict[str, Tensor]]:
    pixels = scale * torch.randn(n, 6, generator=torch.Generator().manual_seed(seed))
    return [{"pixel_values": row, "labels": torch.tensor(i % 4)} for i, row in enumerate(pixels)]


def attributor(directory: Path, model: nn.Module | None = None, dataset: Any = None, **options: Any) -> TrakAttributor:
    options = {"task": "image_classification", **options}
    task = options.pop("task")
    args = trak_config(str(directory), use_cpu=True, **options)
    return TrakAttributor(model or Net(), args, dataset or rows(), task=task)


def scores(own: TrakAttributor) -> Tensor:
    return torch.tensor(own.attribute(rows(3, seed=9), top_k=None, method="exact")["trak_scores"])


def test_a_curvature_of_something_else_is_refused_and_kept(tmp_path: Path) -> None:
    own = attributor(tmp_path).fit_curvature()
    expected = scores(own)
    files = {path: path.read_bytes() for path in (tmp_path / "curvature").rglob("*") if path.is_file()}
    with pytest.raises(CheckpointMismatchError, match="Model id 0 is tied"):
        attributor(tmp_path, Net(1)).fit_curvature()
    for options, what in (
        ({"curvature": "shampoo"}, "kind"),
        ({"curvature_labels": "empirical"}, "labels"),
        ({"curvature_rows": 7}, "rows"),
        ({"grad_wrt": ["first.weight"]}, "parameters"),
        ({"dataset": rows(seed=3)}, "train_fingerprint"),
    ):
        with pytest.raises(ConfigMismatchError, match=what):
            attributor(tmp_path, **options).fit_curvature()
    assert files == {path: path.read_bytes() for path in (tmp_path / "curvature").rglob("*") if path.is_file()}
    assert torch.equal(scores(attributor(tmp_path)), expected)


def test_exact_without_a_fit_fits(tmp_path: Path) -> None:
    assert torch.equal(scores(attributor(tmp_path / "a")), scores(attributor(tmp_path / "b").fit_curvature()))


def test_damaged_files_name_the_directory_to_delete(tmp_path: Path) -> None:
    attributor(tmp_path).fit_curvature()
    block = tmp_path / "curvature" / "0" / "block-00000.safetensors"
    block.write_bytes(block.read_bytes()[:-8])
    with pytest.raises(StoreError, match=r"block-00000.safetensors.*Delete the directory and fit the curvature again"):
        scores(attributor(tmp_path))
    block.unlink()
    with pytest.raises(StoreError, match="Delete the directory"):
        scores(attributor(tmp_path))


@pytest.mark.parametrize("value", [0, -1, 2.5, True])
def test_numbers_of_rows_out_of_range(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ValueError, match=r"`curvature\.rows`"):
        attributor(tmp_path, curvature_rows=value)


@pytest.mark.parametrize("name", ["curvature_damping", "curvature_hybrid_lambda", "curvature_memory"])
def test_settings_out_of_range(tmp_path: Path, name: str) -> None:
    for value in (-1.0, float("nan"), "much"):
        with pytest.raises(ValueError, match=name.replace("_", ".", 1)):
            attributor(tmp_path, **{name: value})
    with pytest.raises(ValueError, match="curvature"):
        attributor(tmp_path, curvature="exact")


def test_more_rows_than_there_are(tmp_path: Path) -> None:
    one = scores(attributor(tmp_path / "a", curvature_rows=1000))
    assert torch.equal(one, scores(attributor(tmp_path / "b")))


def test_gradients_that_are_not_finite(tmp_path: Path) -> None:
    bad = rows()
    bad[17]["pixel_values"] = torch.full((6,), torch.inf)
    with pytest.raises((NonFiniteError, ValueError)):
        attributor(tmp_path, dataset=bad).fit_curvature()
    assert not (tmp_path / "curvature" / "0" / "curvature.json").exists()


def test_a_target_without_a_gradient(tmp_path: Path) -> None:
    def constant(output: Tensor, batch: Any) -> Tensor:
        return output.sum(1) * batch["labels"]

    own = attributor(tmp_path, task=FunctionModelOutput(constant), curvature_labels="empirical")
    with pytest.raises(ValueError, match="Target 0 has the gradient zero"):
        own.attribute(rows(2, seed=9), method="exact")


def test_labels_that_cannot_be_drawn(tmp_path: Path) -> None:
    own = attributor(tmp_path, task=FunctionModelOutput(lambda output, batch: output.sum(1)))
    with pytest.raises(TypeError, match=r"curvature\.labels="):
        own.fit_curvature()


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["ekfac", "shampoo", "kfac", "diagonal", "hybrid"])
def test_parameters_without_a_gradient_add_nothing(tmp_path: Path, kind: str) -> None:
    """A layer that no row reaches, rows that are all the same, and inputs that are always zero."""
    dead = rows()
    for row in dead:
        row["pixel_values"] = torch.zeros(6)
    found = scores(attributor(tmp_path, dataset=dead, curvature=kind))
    assert bool(found.isfinite().all())


def test_tiny_curvatures_do_not_overflow(tmp_path: Path) -> None:
    """Gradients of 1e-18 have squares that float32 holds badly, and inverses that it does not hold."""
    tiny = attributor(tmp_path / "tiny", dataset=rows(scale=1e-18), grad_wrt=["first.weight"])
    targets = rows(3, seed=9, scale=1e-18)
    found = torch.tensor(tiny.attribute(targets, top_k=None, method="exact")["trak_scores"])
    assert bool(found.isfinite().all())
    assert bool((inverse(torch.full((3,), 1e-40), 0.1) == 0).all())
    assert bool((inverse(torch.full((3,), 1e-30), 0.0) == 1 / torch.full((3,), 1e-30).double()).all())


def test_memory_may_change_between_runs(tmp_path: Path) -> None:
    parameters = sum(p.numel() for p in Net().parameters())
    first = scores(attributor(tmp_path))
    second = scores(attributor(tmp_path, curvature_memory=4 * parameters / 2**30))
    torch.testing.assert_close(first, second, rtol=0, atol=1e-5 * float(first.abs().max()))
