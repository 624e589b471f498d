"""Files of curvatures know their place; fits run at once; kept targets have weights; rounding has no say."""

import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from curvature_runs import error, exact_scores, rows_of, written_curvature
from torch import Tensor, nn
from trak_options import trak_config
from transformers import BertConfig, BertForSequenceClassification

from hf_trak import TrakAttributor
from hf_trak.curvature import curvature
from hf_trak.curvature.blocks import CurvatureBlocks, KroneckerBlock
from hf_trak.curvature.curvature import inverse
from hf_trak.curvature.files import verify_curvature
from hf_trak.curvature.fit import CurvatureFit
from hf_trak.curvature.report import CurvatureReport
from hf_trak.curvature.sums import BasisSums
from hf_trak.errors import CheckpointMismatchError, NonFiniteError, SingularGramError, StoreError
from hf_trak.modelout_functions import FunctionModelOutput

N = 40


class Net(nn.Module):
    """Two layers of one shape; `common` adds one number to all logits, which no probability sees."""

    def __init__(self, common: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.common = nn.Linear(6, 1) if common else None

    def forward(self, pixel_values: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(pixel_values))
        logits = self.second(hidden)
        return logits if self.common is None else logits + self.common(hidden)


def rows(n: int = N, seed: int = 0) -> list[dict[str, Any]]:
    pixels = torch.randn(n, 6, generator=torch.Generator().manual_seed(seed))
    return rows_of(pixel_values=pixels, labels=torch.arange(n) % 6)


def attributor(directory: Path, model: nn.Module | None = None, task: Any = None, **options: Any) -> TrakAttributor:
    args = trak_config(str(directory), use_cpu=True, **options)
    return TrakAttributor(model or Net(), args, rows(), task=task or "image_classification")


def scores(own: TrakAttributor) -> Tensor:
    return torch.tensor(own.attribute(rows(3, seed=9), top_k=None, method="exact")["trak_scores"][:])


# -- places ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [False, True], ids=["exchanged", "copied"])
def test_blocks_of_one_shape_keep_their_place(tmp_path: Path, copied: bool) -> None:
    attributor(tmp_path).fit_curvature()
    directory = tmp_path / "curvature" / "0"
    first, second = sorted(directory.glob("block-*.safetensors"))
    assert first.stat().st_size == second.stat().st_size
    shutil.copyfile(first, directory / "kept")
    shutil.copyfile(second, first)
    if not copied:
        shutil.copyfile(directory / "kept", second)
    with pytest.raises(StoreError, match=r"block-00000.safetensors is missing or not as it was written") as caught:
        scores(attributor(tmp_path))
    assert "saved '1: second.weight'" in str(caught.value.__cause__).replace('"', "'")
    assert [one.state for one in verify_curvature(directory)] == ["damaged"]


# -- fits at once ----------------------------------------------------------------------------------------------------


def test_two_fits_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second runs from its beginning to its end while the first has come to its bases."""
    expected = scores(attributor(tmp_path / "alone"))
    whole, inner = CurvatureFit._decompose, []

    def interrupted(fit: CurvatureFit, blocks: CurvatureBlocks) -> None:
        if not inner:
            inner.append(True)
            attributor(tmp_path / "both").fit_curvature()
            assert fit.files.progress.exists()
            with pytest.raises(StoreError, match="A fit with other settings is running"):
                shutil.rmtree(tmp_path / "other", ignore_errors=True)
                (fit.files.directory / "curvature.json").rename(tmp_path / "record")
                attributor(tmp_path / "both", curvature_rows=7).fit_curvature()
            (tmp_path / "record").rename(fit.files.directory / "curvature.json")
        whole(fit, blocks)

    monkeypatch.setattr(CurvatureFit, "_decompose", interrupted)
    assert torch.equal(scores(attributor(tmp_path / "both")), expected)
    assert inner and not (tmp_path / "both" / "curvature" / "0" / "progress").exists()


def test_sums_that_vanish_are_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = CurvatureFit._conclude

    def without(fit: CurvatureFit, blocks: CurvatureBlocks) -> None:
        for path in fit.files.progress.glob("squares-*"):
            path.unlink()
        whole(fit, blocks)

    with monkeypatch.context() as patch:
        patch.setattr(CurvatureFit, "_conclude", without)
        with pytest.raises(StoreError, match="The sums of part 0 of a fit have vanished"):
            attributor(tmp_path).fit_curvature()
    assert torch.equal(scores(attributor(tmp_path)), scores(attributor(tmp_path / "other")))


# -- what targets and rows say ---------------------------------------------------------------------------------------


def test_kept_targets_belong_to_their_weights(tmp_path: Path) -> None:
    model = Net()
    own = attributor(tmp_path, model).featurize()
    expected = own.attribute(rows(3, seed=9), top_k=2)["trak_scores"][:]
    with torch.no_grad():
        model.first.weight.add_(0.1)
    for again in (own, attributor(tmp_path, model)):
        with pytest.raises(CheckpointMismatchError, match="Expected the same weights"):
            again.attribute(rows(3, seed=9), top_k=2)
    with torch.no_grad():
        model.first.weight.copy_(Net().first.weight)
    assert own.attribute(rows(3, seed=9), top_k=2)["trak_scores"][:] == expected


def empirical(output: Tensor, batch: Any) -> Tensor:
    return output.sum(1) * batch["labels"]


@pytest.mark.parametrize("rank", [None, 2])
def test_a_target_of_zeros(tmp_path: Path, rank: int | None) -> None:
    options = {"curvature_labels": "empirical", "curvature_rank": rank}
    own = attributor(tmp_path, task=FunctionModelOutput(empirical), **options)
    with pytest.raises(ValueError, match="Target 0 has the gradient zero under the curvature"):
        own.attribute(rows(2, seed=9), method="exact")


@pytest.mark.parametrize("rank", [None, 2])
def test_a_target_that_is_not_finite(tmp_path: Path, rank: int | None) -> None:
    targets = rows(3, seed=9)
    targets[1]["pixel_values"] = torch.full((6,), torch.nan)
    with pytest.raises(NonFiniteError, match="The gradient of target row 1 is not finite"):
        attributor(tmp_path, curvature_rank=rank).attribute(targets, method="exact")


def test_training_rows_of_zeros(tmp_path: Path) -> None:
    """The rows are named, not a target; nor is any row's influence said to be 0."""
    zeros = [{**row, "labels": torch.tensor(0)} for row in rows()]
    args = trak_config(str(tmp_path), use_cpu=True, curvature_labels="empirical")
    own = TrakAttributor(Net(), args, zeros, task=FunctionModelOutput(empirical))
    for ask in (
        lambda: own.attribute(rows(2, seed=8)[1:], method="exact"),
        lambda: own.self_influence(method="exact"),
    ):
        with pytest.raises(SingularGramError, match=r"The gradients of all 40 training rows .* are zero"):
            ask()


# -- rounding --------------------------------------------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["ekfac", "shampoo", "hybrid"])
def test_blocks_of_rounding_have_no_say(tmp_path: Path, kind: str) -> None:
    """Scores are those without the layer whose true gradient is zero."""
    found = []
    for name, options in (("with", {}), ("without", {"grad_wrt": [n for n, _ in Net().named_parameters()]})):
        model = Net(common=True)
        options = {**options, "curvature": kind, "proj_type": "none", "feature_dtype": "float32"}
        found.append(exact_scores(model, tmp_path / name, rows(), rows(3, seed=9), "image_classification", **options))
    fitted = written_curvature(tmp_path / "with")
    means = {block.name: float(values.double().mean()) for block, values in fitted.items()}
    assert 0 < means["common.weight"] < 1e-12 * means["second.weight"]
    assert error(*found) < 1e-5
    report = CurvatureReport.of(fitted, 0.1)
    assert any(one.startswith("The gradients of common.weight are what rounding leaves") for one in report.warnings)
    (block,) = [one for one in report.blocks if one.name == "common.weight"]
    assert block.score_share < 1e-6


def test_small_gradients_keep_their_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of queries and keys before training are a millionth of the others, and right to seven digits."""
    torch.manual_seed(0)
    config = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    model = BertForSequenceClassification(BertConfig(vocab_size=60, num_labels=3, **config)).eval()
    ids = torch.randint(1, 60, (N, 12))
    train = rows_of(input_ids=ids, labels=torch.arange(N) % 3)
    found = []
    for name in ("with", "without"):
        found.append(exact_scores(model, tmp_path / name, train, train[:3], "text_classification", curvature="ekfac"))
        monkeypatch.setattr(curvature, "NOISE", 0.0)
    fitted = written_curvature(tmp_path / "with")
    means = {block.name: float(values.double().mean()) / fitted.scale for block, values in fitted.items()}
    assert 0 < min(means[name] for name in means if "query" in name or "key" in name) < 1e-11
    assert torch.equal(*found)


def test_the_floor_is_continuous_and_leaves_other_blocks_alone() -> None:
    values = torch.rand(4, 5, generator=torch.Generator().manual_seed(0)).double()
    mean = float(values.mean())
    plain = inverse(values, 0.1)
    assert torch.equal(inverse(values, 0.1, 0.999 * mean), plain)
    torch.testing.assert_close(inverse(values, 0.1, 1.001 * mean), plain, rtol=1e-2, atol=0)
    assert float((inverse(values, 0.1, 1e4 * mean) * mean).max()) < 1e-6
    assert bool((inverse(values, 0.0, 2 * mean) == 0).all()) and bool((inverse(values, 0.0, 0.5 * mean) > 0).any())


def test_no_basis_hangs_on_one_position() -> None:
    """A position whose gradient grows by a hundredth at a time: the bases never change by much at once."""
    blocks = CurvatureBlocks((KroneckerBlock("w", 0, 4, 5, 5, source=0),), ())
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(1, 6, 4, generator=generator), torch.randn(1, 6, 5, generator=generator)
    size, sums = 1e-7, []
    while size < 1e-3:
        scaled = left.clone()
        scaled[0, 5] *= size
        one = BasisSums(blocks, "factors", torch.device("cpu"))
        one.factors(0, scaled, right)
        sums.append((one.right[0], one.counts[0]))
        size *= 1.01
    assert (sums[0][1], sums[-1][1]) == (5, 6)
    largest = float(sums[-1][0].norm())
    steps = [float((b - a).norm()) / largest for (a, _), (b, _) in pairwise(sums)]
    assert max(steps) < 0.01 < float((sums[-1][0] - sums[0][0]).norm()) / largest
