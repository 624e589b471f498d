"""The choice of `method="auto"` by a budget, what it says, recommendations, and the figures that they rest on."""

import json
import logging
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import disable_progress_bars, enable_progress_bars
from replay_runs import config, recorded, sentences, trainer

from hf_trak import Exact, Index, Replay, Rerank, TrakAttributor, TrakConfig
from hf_trak.callbacks import TrakCallback
from hf_trak.curvature.observation import decomposition_seconds
from hf_trak.errors import ConfigMismatchError, NonFiniteError
from hf_trak.featurize import choosing
from hf_trak.featurize.choosing import Option, Options
from hf_trak.featurize.pricing import Price, fitted, price, recorded_run
from hf_trak.featurize.run_replaying import RunReplay
from hf_trak.methods import AnyMethod
from hf_trak.report.training import effects_of_training
from hf_trak.runtime import progress
from hf_trak.store.sealed import write_sealed
from hf_trak.trajectory.passes import StepPasses

ROOT = Path(__file__).resolve().parents[2]
TARGETS = sentences(4, 1)


def option(method, passes: int, quality: float, of_banks: bool = True) -> Option:
    return Option(method, Price(passes), quality, "figures", of_banks)


def test_budgets() -> None:
    """A minute is 6,000 row passes here, and featurizing 1,000."""
    slow, near = option(Exact("ekfac", "cg"), 10_000, 0.6), option(Exact("hybrid"), 5_000, 0.55)
    cheap, index = option(Exact("ekfac"), 2_000, 0.54), option(Index(), 0, 0.35)
    found = Options((slow, near, cheap, index), 100.0, 1_000)
    assert [found.within(one) for one in ("fast", "balanced", "best")] == [index, cheap, slow]
    assert Options((slow, near, cheap, index), 1.0, 1_999).within("balanced") == index
    assert Options((slow, near, cheap, index), 1.0, 2_000).within("balanced") == cheap
    measured = tuple(option(one.method, one.price.passes, one.quality, False) for one in (near, cheap, index))
    assert Options(measured, 100.0, 1_000).within("balanced").method == near.method
    replay = option(Replay(of="run"), 90_000, 1.0, False)
    assert Options((replay, slow, index), 100.0, 1_000).within("best") == replay


def test_decompositions_count_beside_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a vocabulary of 49,152 take longer than the passes over few rows."""
    monkeypatch.setattr("hf_trak.curvature.observation._cube_seconds", lambda side: 1e-9)
    assert decomposition_seconds(1e6) == 0 and decomposition_seconds(6 * 8192**3) == pytest.approx(3298.5, abs=0.1)
    exact, index = Option(Exact("ekfac"), Price(60, seconds=3298.0), 0.54, "figures", True), option(Index(), 0, 0.35)
    found = Options((exact, index), 60.0, 60)
    assert exact.lasts(60.0) == 3299.0 and "about 54 min 59 s" in found.line(exact, "best")
    assert found.within("balanced") == index and found.within("best") == exact


def test_a_measured_time_counts_before_the_rate_of_featurizing() -> None:
    replay, index = option(Replay(of="run"), 90_000, 1.0, False), option(Index(), 0, 0.35)
    fast = replace(replay, seconds=30.0)
    assert Options((replay, index), 100.0, 1_000).within("balanced") == index
    assert Options((fast, index), 100.0, 1_000).within("balanced") == fast
    assert "about 30 s" in Options((fast, index), 100.0, 1_000).line(fast, "best")
    assert Options((replace(replay, seconds=61.0), index), 100.0, 1_000).within("balanced") == index
    assert Options((replace(replay, seconds=61.0), index), 100.0, 6_100).within("balanced").seconds == 61.0


@pytest.mark.slow
def test_the_time_of_a_replay_is_that_of_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured on one step, with a clock that counts passes over rows and products; the model is left as it was."""
    attributor = TrakAttributor.from_trainer(recorded(tmp_path), config(tmp_path)).featurize()
    monkeypatch.setattr(choosing, "MEASURED", 0)
    model = attributor.model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    clock = [0.0]
    gradients, curvature = StepPasses.gradients, StepPasses.curvature

    def counted(self: Any, batch: Any, size: int, side: Any) -> Any:
        clock[0] += size
        return gradients(self, batch, size, side)

    def multiplied(self: Any, batches: Any, chosen: Any, directions: Any, form: Any) -> Any:
        clock[0] += 100 * sum(map(len, chosen)) * sum(map(len, directions))
        return curvature(self, batches, chosen, directions, form)

    monkeypatch.setattr(StepPasses, "gradients", counted)
    monkeypatch.setattr(StepPasses, "curvature", multiplied)
    monkeypatch.setattr("hf_trak.featurize.run_replaying.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr("hf_trak.featurize.run_replaying.LONG", math.inf)
    whole = RunReplay(attributor.features, Replay(of="run"))
    found = whole.seconds(10, step := whole.step_seconds(10, 0))
    assert model.training and all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    rows = attributor.trajectory().rows
    assert found == pytest.approx(rows * (1 + 100 * 10))  # gradients are kept for the way back
    half = RunReplay(attributor.features, Replay(of="run", hessian_share=0.5))
    assert half.step_seconds(10, 0) == pytest.approx(step)
    assert half.seconds(10, step) == pytest.approx(rows * (1 + 50 * 10))
    monkeypatch.setattr("hf_trak.featurize.run_replaying.LONG", 1.0)  # no products: 2 trainings for each target
    before_this = clock[0]
    assert whole.seconds(10, whole.step_seconds(10, 0)) == pytest.approx(rows * (1 + 2 * 10))
    assert clock[0] - before_this == 2 * step[0]
    monkeypatch.setattr("hf_trak.featurize.run_replaying.LONG", 10.0)  # a first pass that is long, and no other
    cold = [100.0]

    def slow_at_first(self: Any, batch: Any, size: int, side: Any) -> Any:
        clock[0] += cold.pop() if cold else 0.0
        return counted(self, batch, size, side)

    monkeypatch.setattr(StepPasses, "gradients", slow_at_first)
    assert whole.step_seconds(10, 0) == pytest.approx(step)
    monkeypatch.undo()
    monkeypatch.setattr(choosing, "MEASURED", 0)
    monkeypatch.setattr(RunReplay, "seconds", lambda self, m, step: 1234.0 * self.method.hessian_share)
    assert "about 20 min" in str(attributor.recommend(10))


def test_the_line_says_what_why_and_what_would_be_better() -> None:
    best, index = option(Exact("hybrid"), 9_000, 0.5), option(Index(), 0, 0.35)
    found = Options((best, index), 100.0, 1_000)
    assert found.line(index, "fast") == (
        "`method='auto'` takes Index() (figures; no time beside the index), `budget` is 'fast'. "
        "Better: Exact(curvature='hybrid') (figures; about 1 min 30 s)."
    )
    assert "Better" not in found.line(best, "best")
    near = Options((replace(best, quality=0.37), index), 100.0, 1_000)
    assert "Better" not in near.line(near.within("balanced"), "balanced"), "a difference that the banks do not tell"
    assert "about 9 times as long as featurizing" in Options((best, index), None, 1_000).line(index, "fast")


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("run")
    run = trainer(place)
    run.train()
    TrakAttributor.from_trainer(run, config(place)).featurize()
    return place


def with_budget(directory: Path, budget: str) -> TrakAttributor:
    run = trainer(directory)
    run.train()
    return TrakAttributor.from_trainer(run, config(directory, budget=budget))


def scores_of(attributor: TrakAttributor, **options) -> np.ndarray:
    return np.array(attributor.attribute(TARGETS, **options)["trak_scores"][:])


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "method"), [("fast", Index()), ("balanced", None), ("best", Exact("ekfac", "cg"))])
def test_what_auto_takes(directory: Path, budget: str, method, caplog, monkeypatch) -> None:
    """Scores are those of the method that the line names. A language model: whole gradients are better."""
    attributor = with_budget(directory, budget)
    if budget == "best":  # a busy machine takes longer than a minute
        monkeypatch.setattr(choosing, "MINUTE", 3600.0)
    with caplog.at_level(logging.INFO, "hf_trak.featurize.choosing"):
        found = scores_of(attributor, top_k=5)
    (line,) = [one for one in caplog.records if one.name == choosing.__name__]
    taken = eval(line.getMessage().partition("takes ")[2].partition(" (LDS")[0], {}, vars(choosing))
    assert taken == method or (
        method is None and taken in (Exact("ekfac"), Exact("hybrid"), Rerank(2000, "ekfac"), Exact("ekfac", "cg"))
    )
    assert np.array_equal(found, scores_of(attributor, top_k=5, method=taken))
    assert line.levelno == logging.INFO
    if budget == "best":
        monkeypatch.setattr(choosing, "MINUTE", 0.0)
        scores_of(attributor, top_k=5)
        assert caplog.records[-1].levelno == logging.WARNING and (
            "about" in caplog.text or "a few seconds" in caplog.text
        )


@pytest.mark.slow
def test_scores_of_all_rows_are_not_reranked(directory: Path, monkeypatch) -> None:
    """Where reranking is all that the budget allows, scores of all rows come from the index."""
    attributor = with_budget(directory, "balanced")
    monkeypatch.setattr(choosing, "possible", lambda model, method: isinstance(method, Rerank))
    assert (
        isinstance(attributor.recommend(4).rows[1].method, str) and "Rerank" in attributor.recommend(4).rows[1].method
    )
    assert np.array_equal(scores_of(attributor, top_k=None), scores_of(attributor, top_k=None, method="index"))
    assert "trak_stage" in attributor.attribute(TARGETS, top_k=3).column_names
    assert (
        attributor.select(3, TARGETS)["trak_index"] == with_budget(directory, "fast").select(3, TARGETS)["trak_index"]
    )


def test_the_index_where_nothing_else_is_possible(directory: Path, monkeypatch) -> None:
    """Engines read the index alone. A curvature that memory has no room for is not chosen, but one that is there."""
    attributor = TrakAttributor.from_trainer(
        trainer(directory), TrakConfig(str(directory / "trak"), proj_dim=8, shard_size=4)
    )
    features = attributor.features
    assert attributor.args.budget == "balanced"

    def taken(ids: list[int]) -> list[AnyMethod]:
        return [one.method for one in choosing.options(features, 4, ids, 5, None, False).options]

    monkeypatch.setattr(choosing, "fitted", lambda *given: False)
    monkeypatch.setattr(choosing, "shortages", lambda model: [])
    assert Exact("ekfac") in taken([0])
    monkeypatch.setattr(choosing, "shortages", lambda model: ["100 GiB of memory"])
    assert taken([0]) == [Index()]
    monkeypatch.setattr(choosing, "fitted", lambda *given: True)
    assert Exact("ekfac") in taken([0])
    features.scored_by = object()  # type: ignore[assignment]
    assert taken([0]) == [Index()]


@pytest.mark.slow
def test_auto_leaves_a_replay_alone_that_speaks_against_itself(tmp_path: Path, caplog, monkeypatch) -> None:
    """It is computed once, warned of once, and not tried again for other targets."""
    attributor = TrakAttributor.from_trainer(recorded(tmp_path), config(tmp_path, budget="best")).featurize()
    believed = scores_of(attributor, top_k=5)
    assert np.array_equal(believed, scores_of(attributor, top_k=5, method=Replay(of="run")))
    monkeypatch.setattr("hf_trak.trajectory.guards.GROWTH", 0.0)
    monkeypatch.setattr(choosing, "of_banks", lambda method, kind: [0.1] if isinstance(method, Index) else [])
    for targets in (TARGETS, TARGETS.select([1, 0])):
        found = np.array(attributor.attribute(targets, top_k=5)["trak_scores"][:])
        index = attributor.attribute(targets, top_k=5, method="index")
        assert np.array_equal(found, np.array(index["trak_scores"][:]))
    warned = [one.getMessage() for one in caplog.records if one.name == "hf_trak.featurize.featurized"]
    assert len(warned) == 4 and "grew" in warned[0] and "grew" in warned[2]  # by either form of the curvature
    assert "leaves Replay(of='run') alone" in warned[1] and "leaves Replay(of='run', form='gauss-newton')" in warned[3]


def test_auto_and_the_report_take_the_gauss_newton_matrix_where_the_hessian_is_doubted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attributor = TrakAttributor.from_trainer(recorded(tmp_path), config(tmp_path, budget="best")).featurize()
    convex = Replay(of="run", form="gauss-newton")
    expected = scores_of(attributor, top_k=5, method=convex)
    assert not np.array_equal(expected, scores_of(attributor, top_k=5, method=Replay(of="run")))
    effects = effects_of_training(attributor.features, TARGETS, method=convex).effects
    monkeypatch.setattr(
        "hf_trak.featurize.run_replaying.warnings_of",
        lambda found, path, method, coarse: ["It grew."] if method.products == "hessian" else [],
    )
    report = effects_of_training(attributor.features, TARGETS)
    assert np.array_equal(report.effects, effects) and "Gauss-Newton matrix" in report.warnings[0]
    again = TrakAttributor.from_trainer(attributor.features.trainer, attributor.args)  # which has heard of no doubts
    assert np.array_equal(scores_of(again, top_k=5), expected)


def test_auto_takes_the_record_of_the_run_that_ended_with_these_weights(tmp_path: Path) -> None:
    """Whatever its name, and whatever other runs are recorded beside it."""
    runs = []
    for name, seed in zip("ab", (3, 4), strict=True):
        callback = TrakCallback(config(tmp_path), record=True, name=name)
        runs.append(trainer(tmp_path, seed=seed, callbacks=[callback]))
        runs[-1].train()
    records = tmp_path / "trak" / "trajectory"
    for name, content in (("0", (records / "a" / "record.json").read_bytes()), ("1", b"{}")):  # no states, damaged
        (records / name).mkdir()
        (records / name / "record.json").write_bytes(content)
    best = [TrakAttributor.from_trainer(run, config(tmp_path, budget="best")).features for run in runs]
    assert [recorded_run(one) for one in best] == [Replay(of="run", name=name) for name in "ab"]
    assert choosing.options(best[1], 4, [0], 5, None, False).options[0].method == Replay(of="run", name="b")
    assert recorded_run(TrakAttributor.from_trainer(trainer(tmp_path), config(tmp_path)).features) is None


def test_auto_leaves_a_replay_alone_that_fails(tmp_path: Path, caplog, monkeypatch) -> None:
    attributor = TrakAttributor.from_trainer(recorded(tmp_path), config(tmp_path, budget="best")).featurize()

    calls = list[str]()

    def failed(*given: Any) -> None:
        raise NonFiniteError("The derivatives are NaN.")

    def measured(*given: Any) -> None:
        calls.append("step")
        failed()

    monkeypatch.setattr(choosing, "planned", failed)
    monkeypatch.setattr(choosing, "MEASURED", 0)
    monkeypatch.setattr(RunReplay, "step_seconds", measured)
    attributor.recommend(4)
    assert calls == ["step"]  # for the whole run and half of it
    monkeypatch.setattr(choosing, "of_banks", lambda method, kind: [0.1] if isinstance(method, Index) else [])
    assert np.array_equal(scores_of(attributor, top_k=5), scores_of(attributor, top_k=5, method="index"))
    assert "leaves Replay(of='run') alone: The derivatives are NaN." in caplog.text


def test_auto_leaves_a_record_alone_whose_loss_nobody_knows(tmp_path: Path, caplog) -> None:
    """The trainer computed it itself, and the attributor has the model alone."""
    run = trainer(tmp_path, callbacks=[TrakCallback(config(tmp_path), record=True)])
    run.compute_loss_func = lambda outputs, labels, num_items_in_batch=None: outputs.logits.square().mean()
    run.train()
    attributor = TrakAttributor(run.model, config(tmp_path, budget="best"), run.train_dataset, task="causal_lm")
    attributor.featurize()
    assert np.isfinite(scores_of(attributor, top_k=5)).all()
    assert "leaves Replay(of='run') alone: The record has no loss" in caplog.text


@pytest.mark.few(1)
@pytest.mark.parametrize("draws", [2, 1])
def test_what_auto_takes_of_random_rows(tmp_path: Path, draws: int, monkeypatch) -> None:
    """The best that there is has scores. A refinement multiplies by the curvature of one draw, and has none of two."""
    monkeypatch.setattr(choosing, "MINUTE", 3600.0)
    given = trainer(tmp_path)

    def masked(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = given.data_collator(rows)
        hidden = torch.rand(batch["labels"].shape) < 0.3
        hidden[:, -1] = False
        return {**batch, "labels": batch["labels"].masked_fill(hidden, -100)}

    settings = config(tmp_path, budget="best", num_draws=draws)
    attributor = TrakAttributor(
        given.model, settings, train_dataset=sentences(8, 0), task="causal_lm", data_collator=masked
    ).featurize()
    assert ("cg" in attributor.recommend(4).rows[2].method) == (draws == 1)
    assert np.isfinite(scores_of(attributor, top_k=5)).all()


@pytest.mark.slow
def test_a_curvature_with_other_settings_is_left_alone(tmp_path: Path) -> None:
    """What was fitted of other rows, or what the configuration names, is not what the banks speak of."""
    run = trainer(tmp_path)
    TrakAttributor.from_trainer(run, config(tmp_path, curvature_rows=4)).featurize().fit_curvature()
    other = TrakAttributor.from_trainer(run, config(tmp_path, budget="best"))
    assert fitted(other.features, Exact("ekfac"), [0]) is None
    assert np.array_equal(scores_of(other, top_k=5), scores_of(other, top_k=5, method="index"))
    with pytest.raises(ConfigMismatchError, match="rows: saved 4, given 10"):
        scores_of(other, top_k=5, method=Exact("ekfac"))
    diagonal = TrakAttributor.from_trainer(run, config(tmp_path, budget="best", curvature="diagonal"))
    assert np.array_equal(scores_of(diagonal, top_k=5), scores_of(other, top_k=5, method="index"))


def test_the_batch_size_that_fits_is_that_of_a_fit_and_of_a_measured_time(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="hf_trak")
    auto = config(tmp_path, per_device_batch_size="auto")
    features = TrakAttributor.from_trainer(trainer(directory), auto).features
    assert features.batch_size == auto.batch_size > 3
    write_sealed(Path(auto.output_dir) / "batch_size.json", {"batch_size": 3})
    assert features.batch_size == 3
    seen: list[int] = []
    features.model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    assert features.rate() > 0 and max(seen) <= 3
    assert "9 rows are featurized first" in caplog.text  # three batches of the ten rows
    caplog.clear()
    assert features.rate() > 0 and not caplog.text


def test_a_time_that_featurizing_took_is_not_measured_again(directory: Path, tmp_path: Path, monkeypatch) -> None:
    attributor = TrakAttributor.from_trainer(trainer(directory), config(tmp_path)).featurize()
    monkeypatch.setattr(type(attributor.features), "measured_rate", None)
    assert attributor.features.rate() > 0


def test_a_pace_leaves_the_first_batch_out(monkeypatch) -> None:
    clock, seen = iter([100.0, 101.0, 104.0]), []
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    pace = progress.Pace(seen.append)
    for rows in (7, 8, 4):
        assert pace.rate is None
        pace.count(rows)
    assert pace.rate == 3.0 and seen == [7, 8, 4]


@pytest.mark.slow
def test_a_curvature_that_is_there_costs_nothing(directory: Path) -> None:
    attributor = with_budget(directory, "fast")
    attributor.fit_curvature()
    features = attributor.features
    stages = attributor.estimate(4, method=Exact("ekfac")).stages
    expected = stages["exact targets"].passes + stages["exact scores"].passes
    assert price(features, Exact("ekfac"), 4, [0]).passes == expected < expected + stages["curvature"].passes


@pytest.mark.slow
def test_recommendations(directory: Path, tmp_path: Path) -> None:
    found = with_budget(directory, "fast").recommend(TARGETS)
    assert [one.budget for one in found.rows] == ["fast", "balanced", "best"]
    assert [eval(one.method, {}, vars(choosing)) for one in (found.rows[0], found.rows[2])] == [
        Index(), Exact("ekfac", "cg")
    ]  # fmt: skip
    assert "attribute(eval_dataset, method=Index())" in str(found) and "record=True" in found.note
    assert "LDS of models like this one on the banks .35" in found.rows[0].quality
    run = TrakAttributor.from_trainer(recorded(tmp_path), config(tmp_path)).featurize()
    best = run.recommend(4)
    assert best.rows[2].method == "Replay(of='run')" and "calibrate" in best.note
    assert price(run.features, Replay(of="run"), 4, [0]).passes == pytest.approx(
        run.trajectory().passes(4) * 10, abs=1
    )


def test_figures_and_page_are_those_of_the_benchmarks(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import which_method

    figures = which_method.collected()
    assert json.loads(which_method.FIGURES.read_text()) == figures == choosing.bank_figures()
    page = which_method.PAGE.read_text().partition(which_method.BEGIN)[2].partition(which_method.END)[0]
    assert page.strip() == which_method.table(figures)
    assert figures["gpt2"]["lds"]["exact, hybrid"] == 0.54 and len(figures) == 7
    sys.modules.pop("which_method")


@pytest.mark.slow
def test_what_people_see(
    directory: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A line for each stage, the choice once, bars with names, and nothing of how columns are put together."""
    attributor = with_budget(directory, "fast")
    monkeypatch.setattr(sys.modules["datasets.utils.tqdm"], "HF_DATASETS_DISABLE_PROGRESS_BARS", None)
    enable_progress_bars()
    attributor.featurize()
    for targets in (TARGETS.select([2, 0]), TARGETS.select([3, 1])):
        attributor.attribute(targets, top_k=3)
    shown = capfd.readouterr().err
    assert shown.count("The features of 10 rows are in ") == 1 and shown.count("takes Index()") == 1
    assert shown.count("Index() scored 10 rows for 2 targets in ") == 2
    assert "targets, checkpoint 0: " in shown and "targets-" not in shown and "Flattening" not in shown
    with caplog.at_level(logging.INFO, "hf_trak"):
        attributor.attribute(TARGETS, top_k=3)
    assert "Index() scored" in caplog.text and "Index() scored" not in capfd.readouterr().err
    disable_progress_bars()
    attributor.attribute(TARGETS, top_k=2)
    assert "scored" not in capfd.readouterr().err
