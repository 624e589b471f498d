"""The rows whose curvature a replay uses, how many of them, and the signs that its scores are not to be believed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from replay_runs import recorded, replayed

from hf_trak.methods import Replay
from hf_trak.trajectory.guards import GROWTH, warnings_of
from hf_trak.trajectory.share import RowDraws, trainings
from hf_trak.trajectory.swept_targets import SweepResult

RUN = Replay(of="run")


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


@pytest.mark.slow
def test_fewer_rows_are_less_work_and_other_scores(tmp_path: Path) -> None:
    assert trainings(2, 5, 1.0, "hessian") == 12 == trainings(2, 10, 0.5, "hessian")
    run = recorded(tmp_path)
    whole = scores_of(replayed(run, tmp_path, Replay(of="run")))
    assert not torch.allclose(scores_of(replayed(run, tmp_path, Replay(of="run", hessian_share=0.5))), whole)


def found_of(**changes: Any) -> tuple[SweepResult, Any]:
    """A sweep on lines without any fault, and the path of its run, but for what is changed."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(50, 2, generator=generator, dtype=torch.float64)
    losses = changes.pop("losses", torch.ones(4, dtype=torch.float64))
    forward = torch.stack([losses, losses * torch.nan])
    parts = {"scores": scores, "growth": torch.ones(4), "forward": forward, **changes}
    parts["settings"] = torch.zeros(2, 4, 2, dtype=torch.float64)
    steps = [SimpleNamespace(rows=range(50))]
    return SweepResult(**parts), SimpleNamespace(
        steps=steps,
        gap=5,
        most_missed=0.02,
        logged=[(range(i, i + 1), 1.0) for i in range(4)],
        numbers=SimpleNamespace(rates=torch.tensor([[0.2], [0.3], [0.2], [0.1]])),
    )


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
        (
            {"growth": torch.tensor([1.0, 2 * GROWTH, 1.0, 1.0])},
            ["may do better (`Replay(of='run', form='gauss-newton')`)"],
        ),
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
