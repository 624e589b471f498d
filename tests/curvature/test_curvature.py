"""The front door of exact scores: groups, selections, tokens, checkpoints and forms of targets, one set of numbers."""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import store_jobs
import torch
from datasets import Dataset
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from hf_trak import Span, TrakAttributor, TrakConfig
from hf_trak.featurize import estimation as exact_estimate
from hf_trak.featurize import exact, exact_blocks

N, M = 23, 7
LABELS = np.array(store_jobs.rows(M, 2)["labels"][:])


def targets() -> Dataset:
    return store_jobs.rows(M, 2)


def all_scores(own: TrakAttributor, **options: object) -> np.ndarray:
    """Every score, `(targets, training rows)`."""
    scored = own.attribute(targets(), top_k=None, method="exact", **options)  # type: ignore[arg-type]
    return np.stack(scored.with_format("numpy")["trak_scores"][:])


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> TrakAttributor:
    """An attributor of two checkpoints, whose curvatures are fitted."""
    torch.manual_seed(5)
    own = store_jobs.make(tmp_path_factory.mktemp("fitted"), curvature="ekfac")
    return own.fit_curvature(store_jobs.models(2))


@pytest.fixture(scope="module")
def scores(fitted: TrakAttributor) -> np.ndarray:
    return all_scores(fitted)


@pytest.mark.slow
def test_checkpoints_are_averaged(fitted: TrakAttributor, scores: np.ndarray) -> None:
    single = [all_scores(fitted, checkpoints=[model_id]) for model_id in (0, 1)]
    assert np.abs(single[0] - single[1]).max() > 0.1 * np.abs(scores).max()
    np.testing.assert_allclose(np.mean(single, axis=0), scores, rtol=1e-6, atol=1e-7 * np.abs(scores).max())


@pytest.mark.slow
def test_groups_are_means_of_their_targets(fitted: TrakAttributor, scores: np.ndarray) -> None:
    close = {"rtol": 1e-4, "atol": 1e-5 * np.abs(scores).max()}
    np.testing.assert_allclose(all_scores(fitted, group_by="all")[0], scores.mean(0), **close)
    grouped = fitted.attribute(targets(), top_k=None, method="exact", group_by="labels")
    assert grouped["labels"][:] == sorted(set(LABELS.tolist()))
    assert grouped["n_targets"][:] == [int((label == LABELS).sum()) for label in grouped["labels"][:]]
    expected = [scores[label == LABELS].mean(0) for label in grouped["labels"][:]]
    np.testing.assert_allclose(np.stack(grouped.with_format("numpy")["trak_scores"][:]), expected, **close)


def test_the_highest_and_the_lowest(fitted: TrakAttributor, scores: np.ndarray) -> None:
    scored = fitted.attribute(targets(), top_k=4, method="exact").with_format("numpy")
    assert np.array_equal(np.stack(scored["trak_indices"][:]), np.argsort(-scores, axis=1)[:, :4])
    assert np.array_equal(np.stack(scored["trak_harmful_indices"][:]), np.argsort(scores, axis=1)[:, :4])
    by_row = fitted.attribute(targets(), top_k=2, per="train", method="exact").with_format("numpy")
    assert np.array_equal(np.stack(by_row["trak_indices"][:]), np.argsort(-scores.T, axis=1)[:, :2])


def test_selections_and_groups_of_training_rows(fitted: TrakAttributor, scores: np.ndarray) -> None:
    chosen = fitted.select(6, targets(), method="exact")
    assert chosen["trak_index"][:] == np.argsort(-scores.mean(0))[:6].tolist()
    harmless = fitted.select(6, targets(), criterion="least_harmful", method="exact")
    assert harmless["trak_index"][:] == np.argsort(-scores.min(0))[:6].tolist()
    summed = fitted.group_scores(targets(), "labels", method="exact").with_format("numpy")
    labels = np.array(store_jobs.rows(N, 1)["labels"][:])
    expected = np.stack([scores[:, labels == label].sum(1) for label in sorted(set(labels.tolist()))], 1)
    found = np.stack(summed["trak_group_scores"][:])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.slow
def test_self_influence_is_the_score_of_a_row_for_itself(fitted: TrakAttributor) -> None:
    scored = fitted.attribute(store_jobs.rows(N, 1), top_k=None, method="exact").with_format("numpy")
    expected = np.stack(scored["trak_scores"][:]).diagonal()
    found = fitted.self_influence(method="exact").numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert (found > 0).all()


@pytest.mark.slow
def test_tokens_and_spans_add_up(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=31, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1)
    )
    ids = torch.randint(2, 31, (10, 6)).tolist()
    train, asked = (Dataset.from_dict({"input_ids": part, "labels": part}) for part in (ids[:8], ids[8:]))
    args = TrakConfig(str(tmp_path), use_cpu=True, curvature="ekfac", budget="fast")
    own = TrakAttributor(model, args, train)
    scored = own.attribute(asked, top_k=3, method="exact", per_token=True)
    for row in scored:
        assert row["trak_token_positions"] == [1, 2, 3, 4, 5]
        parts = np.array(row["trak_token_scores"])
        np.testing.assert_allclose(parts.sum(1), row["trak_scores"], rtol=1e-4, atol=1e-5 * np.abs(parts).max())
    span = own.attribute(asked, method="exact", part=Span(tokens=[(2, 4)] * 2), top_k=None)
    whole = own.attribute(asked, top_k=8, method="exact")
    singles = own.attribute(asked, top_k=8, method="exact", per_token=True)
    for part, row, order in zip(span, singles, whole["trak_indices"][:], strict=True):
        expected = np.array(row["trak_token_scores"])[:, 1:3].sum(1)
        np.testing.assert_allclose(
            np.array(part["trak_scores"])[order], expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max()
        )


@pytest.fixture
def kept_as(monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.dtype, int | None], None]:
    """Keep targets in a dtype and a rank."""

    def choose(dtype: torch.dtype, rank: int | None) -> None:
        for module in (exact, exact_estimate):
            monkeypatch.setattr(module, "target_dtype", lambda args: dtype)
            monkeypatch.setattr(module, "target_rank", lambda args: rank)

    return choose


def wide(directory: Path) -> TrakAttributor:
    """A layer of 40 × 30, whose rank matters."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Tanh(), torch.nn.Linear(40, 5))
    rows = [
        {"input": pixels, "labels": torch.tensor(i % 5)}
        for i, pixels in enumerate(torch.randn(60, 30, generator=torch.Generator().manual_seed(1)))
    ]
    args = TrakConfig(str(directory), use_cpu=True, curvature="ekfac", shard_size=16, budget="fast")
    return TrakAttributor(model, args, rows, task="image_classification")


@pytest.mark.slow
def test_targets_of_low_rank_and_of_half_the_bytes(
    tmp_path: Path, kept_as: Callable[[torch.dtype, int | None], None], caplog: pytest.LogCaptureFixture
) -> None:
    """bfloat16 rounds by 2⁻⁹ at most. The error of a rank is in the log, and bounds that of the scores."""
    own = wide(tmp_path)
    asked = own.train_dataset[:9]

    def scores(**options: object) -> Tensor:
        return torch.tensor(own.attribute(asked, top_k=None, method="exact", **options)["trak_scores"])  # type: ignore[arg-type]

    def sizes() -> dict[str, int]:
        return {path.name: path.stat().st_size for path in tmp_path.rglob("preconditioned*")}

    expected, whole = scores(), sum(sizes().values())
    for dtype, rank in ((torch.bfloat16, None), (torch.float32, 12), (torch.bfloat16, 4), (torch.float32, 4)):
        kept_as(dtype, rank)
        before = sizes()
        with caplog.at_level(logging.INFO, logger=exact_blocks.__name__):
            caplog.clear()
            found = scores()
        written = sum(size for name, size in sizes().items() if name not in before)
        assert written < (0.75 if rank == 12 else 0.55) * whole
        promised = own.estimate(9, method="exact").stages["exact targets"]
        assert promised.disk == pytest.approx(written, rel=0.15)
        loss = float((found - expected).norm() / expected.norm())
        if rank is None:
            assert 0 < loss < 2**-8 and not caplog.records
            continue
        (record,) = caplog.records
        assert isinstance(record.args, tuple)
        assert 0 < loss < 2 * float(str(record.args[-1]))
        mean = scores(group_by="all")
        torch.testing.assert_close(mean[0], found.mean(0), rtol=1e-3, atol=1e-4 * float(found.abs().max()))
    assert loss > 0.01
