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
from hf_trak.trajectory.share import BUDGET, RowDraws, default_share, trainings
from hf_trak.trajectory.swept_targets import SweepResult

RUN = Replay(of="run", hessian_share=1.0)


def scores_of(scored: Any) -> torch.Tensor:
    return torch.tensor(scored["trak_scores"], dtype=torch.float64)


def test_rows_are_drawn_evenly() -> None:
    draws = RowDraws.of([12] * 400, torch.ones(400), 0.25, 7)
    counts = torch.zeros(12)
    for step in range(400):
        places, factor = draws.rows([4, 4, 4], step)
        assert factor == 4 and sum(map(len, places)) == 3
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


def test_shares_are_what_twelve_trainings_pay_and_half_at_least() -> None:
    assert [default_share(m) for m in (1, 5, 8, 10, 1000)] == [1.0, 1.0, 0.625, 0.5, 0.5]
    assert trainings(8, 0.625, "hessian") == BUDGET == trainings(5, 1.0, "hessian")


@pytest.mark.slow
def test_the_share_is_chosen_unless_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run = recorded(tmp_path)
    few = scores_of(replayed(run, tmp_path, Replay(of="run")))
    assert "uses the curvature of all rows, and takes as long as 8 trainings." in caplog.text
    assert torch.equal(few, scores_of(replayed(run, tmp_path, RUN)))

    def warned() -> list[str]:
        found = [one for one in caplog.records if one.levelno > logging.INFO]
        return [one.getMessage() for one in found if one.name == "hf_trak.featurize.featurized"]

    assert not warned()
    caplog.clear()
    monkeypatch.setattr("hf_trak.trajectory.share.BUDGET", 3.2)
    monkeypatch.setattr("hf_trak.featurize.run_replaying.BUDGET", 3.2)
    half = scores_of(replayed(run, tmp_path, Replay(of="run")))
    (said,) = warned()
    assert "uses the curvature of 50% of the rows, and takes as long as 5 trainings." in said
    assert torch.equal(half, scores_of(replayed(run, tmp_path, Replay(of="run", hessian_share=0.5, form="hessian"))))
    assert not torch.allclose(half, few)


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
