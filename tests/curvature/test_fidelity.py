"""The fidelity of an index: its samples beside what `attribute` gives, its statistics beside scipy's."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from doc_examples import documents, tiny_gpt2, word_tokenizer
from scipy.stats import spearmanr
from torch import Tensor, nn
from trak_options import trak_config

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.errors import IncompleteStoreError
from hf_trak.featurize import fidelity
from hf_trak.featurize.fidelity import Agreement, measure_fidelity, sampled_scores

N = 40


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(pixel_values)))


def rows(count: int = N) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(count, 6, generator=generator), torch.randint(3, (count,), generator=generator)
    return [{"pixel_values": one, "labels": label} for one, label in zip(inputs, labels, strict=True)]


def attributor(directory: Path, count: int = N, **options: Any) -> TrakAttributor:
    settings = {"proj_dim": 16, "shard_size": 7, "use_cpu": True, **options}
    args = trak_config(output_dir=str(directory), **settings)
    return TrakAttributor(Network().eval(), args, train_dataset=rows(count), task="image_classification")


def error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(abs(found - expected).max() / abs(expected).max())


@pytest.mark.few(2)
@pytest.mark.parametrize("options", [{}, {"curvature": "hybrid"}, {"curvature": "identity"}], ids=str)
def test_the_sampled_scores_are_those_of_attribute(tmp_path: Path, options: dict[str, Any]) -> None:
    one = attributor(tmp_path, **options).featurize()
    found, curvature, checkpoint = sampled_scores(one.features, 20, 5, seed=3, model_id=None)
    assert (len(found.rows), len(found.targets), checkpoint) == (20, 5, 0)
    assert not set(found.rows) & set(found.targets)
    targets = [one.train_dataset[row] for row in found.targets]

    index = np.array(one.attribute(targets, top_k=None)["trak_scores"][:]).T[found.rows]
    assert error(found.index, index) < 1e-5
    # the hybrid's Gram matrix is one of all rows: its sample is compared with EK-FAC, at the damping of EK-FAC
    kind = "identity" if options == {"curvature": "identity"} else "ekfac"
    args = trak_config(**{**one.args.to_dict(), "curvature": kind})
    plain = TrakAttributor(one.model, args, train_dataset=one.train_dataset, task="image_classification")
    exact = np.array(plain.attribute(targets, top_k=None, method="exact")["trak_scores"][:]).T[found.rows]
    assert error(found.exact, exact) < 1e-5
    assert curvature.kind == ("identity" if options == {"curvature": "identity"} else "ekfac")


@pytest.mark.slow
def test_whole_gradients_agree_with_themselves(tmp_path: Path) -> None:
    """Without a projection the first comparison is one of equal numbers; with one of 16 features it is not."""
    found, _, _ = sampled_scores(attributor(tmp_path / "a", proj_type="none").featurize().features, 20, 5, 0, None)
    assert error(found.products, found.exact_products) < 1e-5
    assert Agreement.of(found.products, found.exact_products, 5).overlap == (1.0,) * 5
    projected, _, _ = sampled_scores(attributor(tmp_path / "b").featurize().features, 20, 5, 0, None)
    assert error(projected.exact_products, found.exact_products) < 1e-5
    assert error(projected.products, found.exact_products) > 0.1


@pytest.mark.slow
def test_targets_are_divided_where_memory_is_short(tmp_path: Path) -> None:
    one = attributor(tmp_path).featurize().fit_curvature()
    found, _, _ = sampled_scores(one.features, 20, 5, 0, None)
    one.args.curvature.memory = 2 * 8 * one.features.layout.total / 2**30  # two targets at a time
    divided, _, _ = sampled_scores(one.features, 20, 5, 0, None)
    for name in ("products", "exact_products", "index", "exact"):
        assert error(getattr(divided, name), getattr(found, name)) < 1e-5, name


@pytest.mark.slow
def test_language_models_and_their_report(tmp_path: Path) -> None:
    tokenizer = word_tokenizer()
    args = TrakConfig(output_dir=str(tmp_path), proj_dim=256, use_cpu=True)
    one = TrakAttributor(tiny_gpt2(), args, documents(tokenizer, 30), processing_class=tokenizer).featurize()
    before = sorted(path for path in tmp_path.rglob("*") if "curvature" not in path.parts)
    found = one.fidelity(rows=12, targets=4)
    after = sorted(path for path in tmp_path.rglob("*") if "curvature" not in path.parts)
    assert before == after, "nothing is left but the curvature"
    assert (found.rows, found.targets, found.top, found.features, found.before) == (12, 4, 3, 256, "exact ekfac")
    assert found == one.fidelity(rows=12, targets=4) != measure_fidelity(one.features, "index", 12, 4, seed=1)
    content = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert content["scores"]["mean_spearman"] == pytest.approx(np.mean(found.scores.spearman))
    assert f"256 features beside whole gradients: {np.mean(found.projection.spearman):.3f} ± " in str(found)
    assert f"exact ekfac scores: {np.mean(found.scores.spearman):.3f} ± " in str(found)
    assert "chance: 0, 25%" in str(found)


def test_the_statistics_are_scipys() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 6, (30, 7)).astype(float), rng.standard_normal((30, 7))
    second[:, 0] = 2.0  # constant: no order at all
    found = Agreement.of(first, second, 10)
    expected = [spearmanr(first[:, i], second[:, i]).statistic for i in range(1, 7)]
    assert found.spearman == pytest.approx([0.0, *expected], abs=1e-12)
    assert found.mean_spearman == pytest.approx(sum(expected) / 7)
    assert found.standard_error == pytest.approx(np.std([0.0, *expected], ddof=1) / np.sqrt(7))
    best = Agreement.of(np.arange(30.0)[:, None], -np.arange(30.0)[:, None], 10)
    assert (best.spearman, best.overlap) == (pytest.approx((-1.0,)), (0.0,))
    part = Agreement.of(np.arange(30.0)[:, None], np.roll(np.arange(30.0), 5)[:, None], 10)
    assert part.overlap == (0.5,)  # places 20–29 hold 15–24 after the shift
    assert best.standard_error == float("inf")


@pytest.mark.slow
def test_what_an_interrupted_measurement_left_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = attributor(tmp_path).featurize().fit_curvature()
    expected = one.fidelity(rows=20, targets=5)
    with monkeypatch.context() as patch:
        patch.setattr(fidelity, "score_blocks", None)
        patch.setattr(fidelity, "shutil", SimpleNamespace(rmtree=_interrupt))
        with pytest.raises(KeyboardInterrupt):
            one.fidelity(rows=20, targets=5)
    (left,) = tmp_path.glob("fidelity-*")
    times = {path: path.stat().st_mtime_ns for path in left.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(fidelity, "shutil", SimpleNamespace(rmtree=lambda _: None))
        assert one.fidelity(rows=20, targets=5) == expected
    assert {path: path.stat().st_mtime_ns for path in left.iterdir()} == times and len(times) > 2
    one.args.curvature.damping = 7.0  # other scores: what lies there is not taken for them
    assert one.fidelity(rows=20, targets=5).scores != expected.scores


def _interrupt(_: Path) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_numbers_out_of_range_and_missing_parts(tmp_path: Path) -> None:
    one = attributor(tmp_path / "a")
    with pytest.raises(IncompleteStoreError, match="Nothing is featurized"):
        one.fidelity()
    one.featurize()
    for options, message in (
        ({"rows": 2}, "`rows` is 2"),
        ({"targets": 0}, "`targets` is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            measure_fidelity(one.features, **options)
    with pytest.raises(IncompleteStoreError, match="`checkpoints` has the ids \\[2\\]"):
        measure_fidelity(one.features, model_id=2)
    found = one.fidelity(rows=1000, targets=1000)
    assert (found.rows, found.targets) == (N // 2, N // 2)
    few = attributor(tmp_path / "b", count=4).featurize().fidelity()
    assert (few.rows, few.targets) == (3, 1)
    with pytest.raises(ValueError, match="There are 3 training rows"):
        attributor(tmp_path / "c", count=3).featurize().fidelity()
    one.features.train_dataset = _Absent()
    with pytest.raises(IncompleteStoreError, match="training rows of the index are not at hand"):
        one.fidelity()


class _Absent:
    absent = True
