"""The rows whose curvature a replay uses, how many of them, and the signs that its scores are not to be believed."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from replay_runs import recorded, replayed

from hf_trak.methods import Replay
from hf_trak.trajectory.guards import GROWTH, warnings_of
from hf_trak.trajectory.share import (
    AGREEMENT,
    BUDGET,
    PROBE_SHARE,
    RowDraws,
    ShareChoice,
    agreement,
    noise,
    trainings,
)
from hf_trak.trajectory.swept_targets import SweepResult

RUN = Replay(of="run", hessian_share=1.0)


def scores_of(scored: Any) -> torch.Tensor:
    return torch.tensor(scored["trak_scores"], dtype=torch.float64)


def test_rows_are_drawn_evenly_and_without_those_of_the_other_draw() -> None:
    draws = RowDraws.of([12] * 400, torch.ones(400), 0.25, 7)
    counts = torch.zeros(12)
    for step in range(400):
        (places, factor), (others, _) = (draws.rows([4, 4, 4], step, draw) for draw in (0, 1))
        assert factor == 4 and sum(map(len, places)) == sum(map(len, others)) == 3
        assert all(not {*chosen} & {*other} for chosen, other in zip(places, others, strict=True))
        for batch, chosen in enumerate(places):
            counts[[4 * batch + place for place in chosen]] += 1
    assert counts.sum() == 1200
    assert 60 < counts.min() <= counts.max() < 140


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.9, 1.0])
def test_steps_get_rows_in_proportion_to_their_rates(share: float) -> None:
    rates = torch.linspace(1, 0, 60, dtype=torch.float64)
    counts = torch.tensor(RowDraws.of([30] * 60, rates, share, 0).counts)
    assert 0 <= int(counts.sum()) - share * 1800 + 1 <= (11 if share < 0.5 else 2)  # every step has one at least
    assert 1 <= counts.min() <= counts.max() <= 30
    wanted = 30 * share * rates / rates.mean()
    if share <= 0.2:
        assert float((counts - wanted)[:50].abs().max()) <= 1.5
    assert share < 1 or counts.min() == 30
    assert RowDraws.of([3, 5], torch.zeros(2), 1.0, 0).counts == [3, 5]


def test_agreement_is_predicted_from_two_draws() -> None:
    """Draw a share of the rows that scores are sums over: the truth is their correlation with those of all."""
    generator = torch.Generator().manual_seed(0)
    n, rows, targets = 2000, 200, 4
    signal = torch.randn(n, targets, 1, generator=generator, dtype=torch.float64)
    parts = signal / rows + 0.03 * torch.randn(n, targets, rows, generator=generator, dtype=torch.float64)

    def drawn(share: float, first: int = 0) -> torch.Tensor:
        count = int(share * rows)
        return parts[:, :, first : first + count].sum(2) / share

    found = noise(drawn(PROBE_SHARE), drawn(PROBE_SHARE, first=rows // 2))
    for share in (0.1, 0.2, 0.5):
        pairs = torch.stack([drawn(share).T, drawn(1.0).T], 1)
        measured = torch.stack([torch.corrcoef(pair)[0, 1] for pair in pairs]).mean()
        assert agreement(found, share) == pytest.approx(float(measured), abs=0.02)
    assert noise(drawn(1.0), drawn(1.0)) == pytest.approx(0, abs=1e-9)
    assert agreement(found, 0.1) < 0.95


def test_shares_are_as_large_as_needed_and_affordable() -> None:
    assert ShareChoice.unmeasured(1, "hessian") == ShareChoice(1.0, 1.0, 4.0)
    assert ShareChoice.unmeasured(10, "hessian") == ShareChoice(0.5, 0.5, 12.0)
    assert ShareChoice.unmeasured(11, "hessian") is None is ShareChoice.unmeasured(40, "hessian")
    quiet, loud = (ShareChoice.measured(v, 10, "gauss-newton") for v in (0.01, 0.05))
    assert quiet.agreement == pytest.approx(AGREEMENT, abs=1e-3) == loud.agreement
    assert quiet.share < loud.share < 1
    many = ShareChoice.measured(0.05, 100, "gauss-newton")
    assert many.work == pytest.approx(BUDGET, rel=0.01) == trainings(100, many.share, "gauss-newton")
    assert many.agreement is not None and many.agreement < AGREEMENT
    assert f"Set `hessian_share={many.wanted:.2f}`" in str(many)
    assert "Set" not in str(quiet)


@pytest.mark.slow
def test_the_share_is_chosen_unless_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run = recorded(tmp_path)
    few = scores_of(replayed(run, tmp_path, Replay(of="run")))
    assert "The replay uses the curvature of all rows: 8 trainings, at most 12." in caplog.text
    assert torch.equal(few, scores_of(replayed(run, tmp_path, RUN)))
    caplog.clear()
    monkeypatch.setattr("hf_trak.trajectory.share.BUDGET", 6.5)
    half = scores_of(replayed(run, tmp_path, Replay(of="run")))
    assert "The replay uses the curvature of 75% of the rows: 6.5 trainings, at most 6.5." in caplog.text
    assert torch.equal(half, scores_of(replayed(run, tmp_path, Replay(of="run", hessian_share=0.75, form="hessian"))))
    caplog.clear()
    monkeypatch.setattr("hf_trak.trajectory.share.BUDGET", 3.2)
    draws: list[torch.Tensor] = []
    monkeypatch.setattr("hf_trak.featurize.run_replaying.noise", lambda *given: draws.extend(given) or 1.0)
    chosen = scores_of(replayed(run, tmp_path, Replay(of="run")))
    assert [one.shape for one in draws] == [few.T.shape] * 2
    assert not torch.allclose(*draws)
    assert "The replay uses the curvature of 30% of the rows" in caplog.text
    assert "for 3.2 trainings. Expected 0.97, within 3.2 trainings. Set `hessian_share=" in caplog.text
    assert torch.equal(chosen, scores_of(replayed(run, tmp_path, Replay(of="run", hessian_share=0.3))))
    assert not torch.allclose(chosen, few)


def found_of(**changes: Any) -> tuple[SweepResult, Any]:
    """A sweep on lines without any fault, and the path of its run, but for what is changed."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(50, 2, generator=generator, dtype=torch.float64)
    losses = changes.pop("losses", torch.ones(4, dtype=torch.float64))
    forward = torch.stack([losses, losses * torch.nan])
    parts = {"scores": scores, "growth": torch.ones(4), "forward": forward, **changes}
    parts["settings"] = torch.zeros(2, 4, 2, dtype=torch.float64)
    steps = [SimpleNamespace(rows=range(50))]
    return SweepResult(**parts), SimpleNamespace(steps=steps, gap=5, logged=[(range(i, i + 1), 1.0) for i in range(4)])


def outlier() -> torch.Tensor:
    scores = found_of()[0].scores.clone()
    scores[7, 1] = 1e5
    return scores


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({}, []),
        ({"losses": 1.1 * torch.ones(4, dtype=torch.float64)}, ["Record the weights more often than every 5 steps"]),
        ({"losses": 1.01 * torch.ones(4, dtype=torch.float64)}, []),
        ({"growth": torch.tensor([1.0, 2 * GROWTH, 1.0, 1.0])}, ["Take `Replay(of='run', form='gauss-newton')`"]),
        ({"growth": torch.tensor([1.0, GROWTH / 2, 1.0, 1.0])}, []),
        ({"scores": outlier()}, ["Look at that row, or raise `smoothing`"]),
    ],
)
def test_warnings_and_their_remedies(changes: dict[str, torch.Tensor], texts: list[str]) -> None:
    found, path = found_of(**changes)
    warnings = warnings_of(found, path, RUN)
    assert len(warnings) == len(texts)
    assert all(text in warning for text, warning in zip(texts, warnings, strict=True))


def test_scores_of_two_grids_are_compared() -> None:
    found, path = found_of()
    near = found.scores[:, :1] + 0.1
    assert warnings_of(found, path, RUN, near.pow(3)) == []
    (warning,) = warnings_of(found, path, RUN, near.flip(0))
    assert "weights at every 5 steps are too few. Record them more often" in warning


@pytest.mark.slow
def test_runs_without_the_weights_of_every_step_have_two_grids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hf_trak.trajectory.sweep.MISSED", -1.0)  # so weights between lie on lines
    run = recorded(tmp_path, every=2, learning_rate=1e-3)
    first = scores_of(replayed(run, tmp_path, RUN))
    assert "every second one" not in caplog.text
    monkeypatch.setattr("hf_trak.trajectory.guards.GRID_AGREEMENT", 1.01)
    again = scores_of(replayed(run, tmp_path, RUN))
    assert "Scores from every second one of the known weights have a rank correlation of" in caplog.text
    assert torch.equal(first, again)
    other = recorded(tmp_path / "every-step", learning_rate=1e-3)
    caplog.clear()
    replayed(other, tmp_path / "every-step", RUN)
    assert "every second one" not in caplog.text
