"""Whitened features: inner products of preconditioned gradients, kept, published and checked like plain features."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from curvature_runs import written_curvature
from hub_server import TOKEN, Hub, client, hub
from store_jobs import TinyNet, rows
from torch import Tensor
from trak_options import trak_config

from hf_trak import TrakAttributor
from hf_trak.errors import ConfigMismatchError, HfTrakError, StoreError
from hf_trak.featurize import fidelity

__all__ = ["client", "hub"]  # fixtures

N, M = 41, 3
DAMPING = 0.2


def attributor_in(directory: Path, **options: Any) -> TrakAttributor:
    torch.manual_seed(3)
    settings: dict[str, Any] = {
        "use_cpu": True, "shard_size": 8, "per_device_batch_size": 8, "proj_dim": 16,
        "curvature_damping": DAMPING, "curvature_whitened": True,
    }  # fmt: skip
    config = trak_config(output_dir=str(directory), **{**settings, **options})
    return TrakAttributor(TinyNet(), config, train_dataset=rows(N, 1), task="image_classification")


def features(attributor: TrakAttributor) -> Tensor:
    return torch.cat([shard.grads.float() for shard in attributor.features.store.train(0)]).double()


def scores(attributor: TrakAttributor) -> np.ndarray:
    return np.stack(attributor.attribute(rows(M, 2), top_k=None).with_format("numpy")["trak_scores"][:])


@pytest.mark.few(2)
@pytest.mark.parametrize("curvature", ["ekfac", "diagonal", "hybrid"])
def test_inner_products(tmp_path: Path, curvature: str) -> None:
    """Whole whitened gradients have the inner products ⟨g, P⁻¹g⟩, in whatever basis they are kept."""
    whole = {"proj_type": "none", "feature_dtype": "float32"}
    plain = features(attributor_in(tmp_path / "plain", curvature_whitened=False, **whole).featurize())
    found = features(attributor_in(tmp_path / "whitened", curvature=curvature, **whole).featurize())
    preconditioned = written_curvature(tmp_path / "whitened").precondition(plain.float(), DAMPING).double()
    expected = preconditioned @ plain.T
    # Float32 products of 48 numbers in two orders
    assert float((found @ found.T - expected).abs().max()) < 1e-5 * float(expected.abs().max())
    assert float((plain @ plain.T - expected).abs().max()) > 0.1 * float(expected.abs().max())


@pytest.mark.slow
def test_projection_and_scores(tmp_path: Path) -> None:
    """Sketches are those of the same rows: with many columns, scores are near those of whole whitened gradients."""
    exact = scores(attributor_in(tmp_path / "none", proj_type="none", feature_dtype="float32").featurize())
    found = scores(attributor_in(tmp_path / "wide", proj_type="normal", proj_dim=4096).featurize())
    plain = scores(
        attributor_in(
            tmp_path / "plain", proj_type="none", feature_dtype="float32", curvature_whitened=False
        ).featurize()
    )

    def agreement(one: np.ndarray) -> float:
        return float(np.corrcoef(one.ravel(), exact.ravel())[0, 1])

    assert agreement(found) > 0.98
    assert agreement(plain) < 0.97


def test_resuming(tmp_path: Path) -> None:
    """A shard that is computed later has the same bits, and the curvature is fitted once."""
    attributor = attributor_in(tmp_path).featurize()
    before = features(attributor)
    record = tmp_path / "curvature" / "0" / "curvature.json"
    written = record.stat().st_mtime_ns
    shards = attributor.features.store.train(0)
    shards.path(2).unlink()
    again = attributor_in(tmp_path).featurize()
    assert torch.equal(features(again), before)
    assert record.stat().st_mtime_ns == written
    assert np.array_equal(scores(again), scores(attributor))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "changed",
    [{"curvature_damping": 0.3}, {"curvature_rows": 20}, {"curvature": "kfac"}, {"curvature_labels": "empirical"},
     {"curvature_whitened": False}],
    ids=lambda one: next(iter(one)),
)  # fmt: skip
def test_settings_define_features(tmp_path: Path, changed: dict[str, Any]) -> None:
    attributor_in(tmp_path).featurize()
    with pytest.raises(ConfigMismatchError, match="whitening"):
        attributor_in(tmp_path, **changed).featurize()


def test_defaults_are_the_same_settings(tmp_path: Path) -> None:
    """A setting that names its default defines the same features."""
    attributor_in(tmp_path).featurize()
    attributor_in(tmp_path, curvature="ekfac", curvature_rows=N).featurize()


@pytest.mark.slow
def test_published(hub: Hub, client: Path, tmp_path: Path) -> None:
    """Targets are whitened with the published curvature, without training rows."""
    made = attributor_in(tmp_path / "made").featurize()
    expected = scores(made)
    with pytest.raises(ValueError, match=r"no curvature of the checkpoints \[0\]"):
        made.push_to_hub("tester/whitened", token=TOKEN, curvature=False, private=False)
    made.push_to_hub("tester/whitened", token=TOKEN, fidelity=made.fidelity(rows=8, targets=4), private=False)
    card = hub.dataset("tester/whitened")["README.md"].decode()
    assert "with exact ekfac scores" in card and "8 training rows × 4 targets" in card
    loaded = TrakAttributor.from_pretrained("tester/whitened", made.model, token=TOKEN, use_cpu=True)
    assert loaded.args.curvature.whitened
    assert np.array_equal(scores(loaded), expected)


def test_a_directory_without_its_curvature(tmp_path: Path) -> None:
    made = attributor_in(tmp_path / "made").featurize()
    for path in (tmp_path / "made" / "curvature" / "0").iterdir():
        path.unlink()
    loaded = TrakAttributor.from_pretrained(str(tmp_path / "made"), made.model, use_cpu=True)
    with pytest.raises(StoreError, match="holds no curvature of checkpoint 0"):
        loaded.attribute(rows(M, 2))


def test_changed_rows(tmp_path: Path) -> None:
    made = attributor_in(tmp_path).featurize()
    with pytest.raises(HfTrakError, match="The features are whitened"):
        made.exclude([1])
    with pytest.raises(HfTrakError, match="The features are whitened"):
        made.extend(rows(2, 5))


@pytest.mark.slow
def test_sketches_that_hold_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="hf_trak"):
        attributor_in(tmp_path / "none", proj_type="none", feature_dtype="float32").featurize()
        assert "do not hold" not in caplog.text
        small = attributor_in(tmp_path / "small", proj_dim=1).featurize()
        assert "1 numbers per row do not hold them" in caplog.text
        caplog.clear()
        small.featurize()
        assert "do not hold" not in caplog.text  # nothing was computed
    assert small.features.check_features(0) < 0.5
    whole = attributor_in(tmp_path / "none", proj_type="none", feature_dtype="float32")
    assert whole.features.check_features(0) > 0.999


@pytest.mark.slow
def test_fidelity(tmp_path: Path) -> None:
    """Features are compared with whitened gradients."""
    found = attributor_in(tmp_path, proj_type="none", feature_dtype="float32").featurize().fidelity()
    assert found.projection.mean_spearman > 0.999


def test_a_killed_check_is_made_by_the_next_run(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    """It warns, and removes what the killed one left."""

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fidelity._Sample, "_index_scores", killed)
        patch.setattr(fidelity, "shutil", SimpleNamespace(rmtree=lambda _: None))
        with pytest.raises(KeyboardInterrupt):
            attributor_in(tmp_path, proj_dim=1).featurize()
    assert list(tmp_path.glob("fidelity-*"))
    with caplog.at_level(logging.WARNING, logger="hf_trak"):
        attributor_in(tmp_path, proj_dim=1).featurize()
    assert "1 numbers per row do not hold them" in caplog.text
    assert not list(tmp_path.glob("fidelity-*"))
