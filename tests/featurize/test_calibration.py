"""The choice of a method by replayed targets: tables whose best method is known, and a real run."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from replay_runs import config, recorded, sentences, trainer
from test_save_index import attributor_in

from hf_trak import Exact, Index, Replay, TrakAttributor
from hf_trak.errors import HfTrakError, IncompleteStoreError, StoreError
from hf_trak.featurize.calibrating import read_calibration
from hf_trak.featurize.calibration import Calibration, Judged, choose, named
from hf_trak.methods import Combination
from hf_trak.scores.scored_dataset import weighted_blocks
from hf_trak.store.sealed import MANIFEST_FILE, read_sealed, unsealed, write_sealed
from hf_trak.store.store import CALIBRATION_FILE
from hf_trak.store.tables import read_tables, write_table
from hf_trak.store.verification import verify, verify_store

N, M = 400, 6
LOW, HIGH, EKFAC, HYBRID = Index(lambda_relative=0.1), Index(lambda_relative=10.0), Exact("ekfac"), Exact("hybrid")
PASSES = {LOW: 0, HIGH: 0, EKFAC: 1000, HYBRID: 3000}


def drawn(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(N, M))


def judged(tables: dict, replayed: np.ndarray) -> Calibration:
    return choose(tables, PASSES, replayed, Replay(of="run"))


def test_the_method_that_agrees_is_chosen() -> None:
    truth = drawn(0)
    tables = {LOW: truth + 3 * drawn(1), HIGH: truth + 2 * drawn(2), EKFAC: truth + 0.2 * drawn(3)}
    found = judged(tables, truth)
    assert found.chosen.method == EKFAC and found.index == HIGH
    assert [one.method for one in found.candidates] == [EKFAC, HIGH, LOW]
    assert np.mean(found.chosen.sums) == pytest.approx(1 / np.sqrt(1.04), abs=0.01)


def test_the_cheapest_of_equals_is_chosen() -> None:
    """Two methods with almost the same noise: the one without another pass is taken, whichever came out ahead."""
    truth, ahead = drawn(0), set()
    for seed in range(1, 6):
        noise = truth + drawn(seed)
        found = judged({LOW: noise + 0.05 * drawn(seed + 10), EKFAC: noise + 0.05 * drawn(seed + 20)}, truth)
        ahead.add(found.candidates[0].method)
        assert found.chosen.method == LOW
    assert ahead == {LOW, EKFAC}


def test_independent_errors_are_averaged() -> None:
    """Two parts of the truth, each in one method at a scale of its own: their sum is better than either."""
    first, second = drawn(0), drawn(1)
    tables = {LOW: 0.01 * first, HIGH: 0.01 * first + 0.1 * drawn(2), EKFAC: 5 * second, HYBRID: drawn(3)}
    found = judged(tables, first + second).chosen
    assert isinstance(found.method, Combination) and set(found.method.methods) == {LOW, EKFAC}
    weights = dict(zip(found.method.methods, found.method.weights, strict=True))
    assert weights[LOW] * 0.01 == pytest.approx(weights[EKFAC] * 5, rel=0.05)
    assert min(found.sums) > 0.99 and found.passes == 1000


def test_no_combination_is_taken_of_methods_without_a_say() -> None:
    truth = drawn(0)
    tables = {LOW: truth + 0.5 * drawn(1), EKFAC: drawn(2), HYBRID: -truth}
    assert judged(tables, truth).chosen.method == LOW


@pytest.mark.slow
def test_the_figure_is_that_of_sums_over_random_rows() -> None:
    """`sums` against correlations of sums over 20,000 random halves of the rows."""
    truth = drawn(0) + 3
    tables = {LOW: truth + drawn(1), EKFAC: truth + 3 * drawn(2) + 5}
    kept = np.random.default_rng(5).random((20_000, N)).argsort(1) < N // 2
    for one in judged(tables, truth).candidates:
        sums = [np.corrcoef(kept @ tables[one.method][:, j], kept @ truth[:, j])[0, 1] for j in range(M)]
        assert np.abs(np.subtract(one.sums, sums)).max() < 0.04


def test_a_target_judges_what_others_chose() -> None:
    """Each target agrees with another method only: the choice by others is worth nothing on it, and the figures say
    so."""
    truth = drawn(0)
    methods = [Index(lambda_relative=float(one + 1)) for one in range(M)]
    tables = {method: drawn(one + 1) for one, method in enumerate(methods)}
    for one, method in enumerate(methods):
        tables[method][:, one] = truth[:, one]
    found = choose(tables, dict.fromkeys(methods, 0), truth, Replay())
    assert max(np.mean(one.sums) for one in found.candidates) > 0.15 > 0.1 > abs(np.mean(found.chosen.sums))


def test_what_agrees_by_chance_does_not_agree() -> None:
    truth = drawn(0)
    assert judged({LOW: truth + drawn(1), EKFAC: drawn(2)}, truth).chosen.agrees
    assert not judged({LOW: drawn(1), EKFAC: drawn(2)}, truth).chosen.agrees


def test_json_and_text() -> None:
    truth = drawn(0)
    found = judged({LOW: truth + drawn(1), EKFAC: truth + drawn(4)}, truth)
    assert isinstance(found.chosen.method, Combination)
    assert Calibration.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert "Index(lambda_relative=0.1)" in str(found) and named(EKFAC) == "Exact(curvature='ekfac')"
    for key, value in (("index", {"lambda_relative": -1.0}), ("by", {"of": "mars"}), ("candidates", [3])):
        with pytest.raises(ValueError, match="none that hf_trak writes"):
            Calibration.from_json({**found.to_json(), key: value})


def test_blocks_with_other_cuts_are_added() -> None:
    first, second = torch.randn(10, 2), torch.randn(10, 2)

    def cut(rows: torch.Tensor, *stops: int):
        starts = (0, *stops[:-1])
        return iter([(a, b, rows[a:b]) for a, b in zip(starts, stops, strict=True)])

    found = list(weighted_blocks([cut(first, 3, 7, 10), cut(second, 5, 10)], (2.0, -0.5)))
    assert [one[:2] for one in found] == [(0, 3), (3, 5), (5, 7), (7, 10)]
    assert torch.allclose(torch.cat([one[2] for one in found]), 2 * first - 0.5 * second)


@pytest.mark.parametrize("methods", [(), (Replay(),), (Index(first_pass_bytes=8),)])
def test_what_cannot_be_added_is_refused(methods) -> None:
    with pytest.raises(ValueError, match="which score all training rows"):
        Combination(methods, (1.0,) * len(methods))


# -- a run ----------------------------------------------------------------------------------------------------------

TARGETS = sentences(5, 1)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory) -> tuple[TrakAttributor, Calibration, Path]:
    directory = tmp_path_factory.mktemp("run")
    attributor = TrakAttributor.from_trainer(recorded(directory), config(directory)).featurize()
    return attributor, attributor.calibrate(TARGETS, targets=3), directory


def scores_of(attributor: TrakAttributor, **options) -> np.ndarray:
    return np.array(attributor.attribute(TARGETS, top_k=None, **options)["trak_scores"])


@pytest.mark.slow
def test_the_figures_are_those_of_the_scores(calibrated) -> None:
    """Each candidate's figures, from scores of its own call, and the replay's."""
    attributor, found, _ = calibrated
    order = np.random.Generator(np.random.Philox(attributor.args.seed)).permutation(len(TARGETS))
    chosen = sorted(order[:3].tolist())
    replayed = scores_of(attributor, method=Replay(of="run"))[chosen]
    assert {type(one.method) for one in found.candidates} == {Index, Exact}
    for one in found.candidates:
        scores = scores_of(attributor, method=one.method)[chosen]
        expected = [np.corrcoef(a, b)[0, 1] for a, b in zip(scores, replayed, strict=True)]
        assert np.allclose(one.sums, expected, atol=1e-5)


@pytest.mark.slow
def test_training_rows_judge_without_their_own_score(calibrated) -> None:
    """Without targets of its own, by the scores of the calls themselves, less those of rows for themselves."""
    attributor, found, directory = calibrated
    path = directory / "trak" / "calibration.json"
    before = path.read_bytes()
    try:
        by_rows = attributor.calibrate(targets=3)
    finally:
        path.write_bytes(before)
    rows = attributor.train_dataset
    drawn = sorted(np.random.Generator(np.random.Philox(attributor.args.seed)).permutation(len(rows))[:3].tolist())

    def others(method: object) -> np.ndarray:
        table = np.array(attributor.attribute(rows.select(drawn), top_k=None, method=method)["trak_scores"])
        return np.stack([np.delete(one, own) for one, own in zip(table, drawn, strict=True)])

    replayed = others(Replay(of="run"))
    for one in by_rows.candidates:
        expected = [np.corrcoef(a, b)[0, 1] for a, b in zip(others(one.method), replayed, strict=True)]
        assert np.allclose(one.sums, expected, atol=1e-5)
    assert by_rows.candidates != found.candidates


@pytest.mark.slow
def test_auto_takes_what_was_chosen(calibrated) -> None:
    """The index at the calibrated ridge on a small budget, and a sum of scores where that was chosen."""
    attributor, found, directory = calibrated
    path = directory / "trak" / "calibration.json"
    before, content = path.read_bytes(), unsealed(read_sealed(path))
    assert np.array_equal(scores_of(attributor), scores_of(attributor, method=found.index))
    mixed = Combination((Index(lambda_relative=3.0), Exact("ekfac")), (2.0, 0.5))
    chosen = {**content["chosen"], "method": {
        "methods": [{"lambda_relative": 3.0}, {"curvature": "ekfac", "damping": None, "refine": False}],
        "weights": [2.0, 0.5],
    }}  # fmt: skip
    write_sealed(path, {**content, "chosen": chosen})
    record = directory / "trak" / "trajectory"
    record.rename(directory / "elsewhere")  # else the run is replayed
    try:
        again = TrakAttributor.from_trainer(attributor.features.trainer, config(directory, budget="best"))
        parts = [scores_of(attributor, method=one) for one in mixed.methods]
        assert np.allclose(scores_of(again), 2 * parts[0] + 0.5 * parts[1], rtol=1e-5)
        grouped = again.group_scores(TARGETS, [0] * 10)["trak_group_scores"][:]
        assert np.allclose(np.array(grouped)[:, 0], scores_of(again).sum(1), rtol=1e-4)
    finally:
        (directory / "elsewhere").rename(record)
        path.write_bytes(before)
    best = TrakAttributor.from_trainer(attributor.features.trainer, config(directory, budget="best"))
    assert np.array_equal(scores_of(best), scores_of(attributor, method=Replay(of="run")))


def test_what_was_calibrated_is_compared(calibrated, caplog) -> None:
    attributor, _, directory = calibrated
    assert read_calibration(attributor.features, [0]) is not None
    path = directory / "trak" / "calibration.json"
    before, content = path.read_bytes(), unsealed(read_sealed(path))
    try:
        for key, value in (("config", "0" * 32), ("checkpoints", {"0": "0" * 32}), ("record", ["", ""])):
            write_sealed(path, {**content, "identity": {**content["identity"], key: value}})
            caplog.clear()
            assert read_calibration(attributor.features, [0]) is None
            assert f"{key}: saved" in caplog.text and "Call `calibrate` again" in caplog.text
        path.write_bytes(before.replace(b'"chosen"', b'"chosem"'))
        with pytest.raises(StoreError, match="is damaged"):
            attributor.attribute(TARGETS, top_k=2)
        found = {one.path.name: one for one in verify(directory / "trak", {"trak_config.json": verify_store})}
        assert found["calibration.json"].state == "damaged" and "`calibrate`" in found["calibration.json"].remedy
    finally:
        path.write_bytes(before)


def test_a_published_choice_is_taken(calibrated, tmp_path: Path) -> None:
    attributor, found, _ = calibrated
    attributor.save_pretrained(tmp_path / "index")

    def states() -> dict[str, str]:
        found = verify(tmp_path / "index", {"trak_config.json": verify_store})
        return {one.path.relative_to(tmp_path / "index").as_posix(): one.state for one in found}

    listed = set(read_sealed(tmp_path / "index" / MANIFEST_FILE)["files"])
    assert listed <= set(states()) and set(states().values()) == {"intact"}, "a copy lacks nothing that it lists"
    gram = tmp_path / "index" / "checkpoint-0" / "gram.safetensors"
    content = gram.read_bytes()
    gram.unlink()
    assert states()["checkpoint-0/gram.safetensors"] == "missing"
    gram.write_bytes(content)
    assert named(found.chosen.method).split(" ")[0] in (tmp_path / "index" / "README.md").read_text()
    loaded = TrakAttributor.from_pretrained(
        str(tmp_path / "index"), attributor.model, output_dir=str(tmp_path / "out"), use_cpu=True
    )
    assert np.array_equal(scores_of(loaded), scores_of(attributor, method=found.index))
    path = tmp_path / "index" / "calibration.json"
    content = unsealed(read_sealed(path))
    write_sealed(path, {**content, "index": {"lambda_relative": 1e3}})
    with pytest.raises(StoreError, match=r"calibration\.json of .* was refused"):
        TrakAttributor.from_pretrained(
            str(tmp_path / "index"), attributor.model, output_dir=str(tmp_path / "again"), use_cpu=True
        )


def test_a_choice_is_in_tables(calibrated, tmp_path: Path) -> None:
    attributor, found, directory = calibrated
    path = write_table(attributor.features.store, 0, tmp_path / "index.parquet")
    loaded = TrakAttributor.from_pretrained(
        str(path), attributor.model, output_dir=str(tmp_path / "out"), use_cpu=True
    )
    assert np.array_equal(scores_of(loaded), scores_of(attributor, method=found.index))
    again = read_tables([path], tmp_path / "again").output_dir / "calibration.json"
    assert again.read_bytes() == (directory / "trak" / "calibration.json").read_bytes()


@pytest.mark.slow
def test_nothing_is_kept_of_a_judge_or_a_choice_that_is_not_to_be_believed(calibrated, monkeypatch) -> None:
    """A hot replay judges nothing, and methods that agree with it by chance are not chosen."""
    attributor = calibrated[0]
    kept = attributor.features.store.output_dir / CALIBRATION_FILE
    before = kept.read_bytes()
    monkeypatch.setattr(Judged, "agrees", False)
    with pytest.raises(HfTrakError, match="No method agrees with the replay: the best is"):
        attributor.calibrate(sentences(5, 9), 3)
    monkeypatch.setattr("hf_trak.trajectory.guards.GROWTH", 0.0)
    with pytest.raises(HfTrakError, match="has signs that its scores are wrong"):
        attributor.calibrate(sentences(5, 9), 3)
    assert kept.read_bytes() == before


def test_what_cannot_be_calibrated_is_refused(calibrated, tmp_path: Path) -> None:
    attributor, _, _ = calibrated
    with pytest.raises(ValueError, match="`targets` is 2"):
        attributor.calibrate(TARGETS, targets=2)
    with pytest.raises(ValueError, match="`eval_dataset` has 2 rows"):
        attributor.calibrate(TARGETS.select([0, 1]))
    with pytest.raises(IncompleteStoreError, match="Nothing is featurized"):
        TrakAttributor.from_trainer(trainer(tmp_path), config(tmp_path)).calibrate(TARGETS)
    without = attributor_in(tmp_path / "other").featurize()
    with pytest.raises(IncompleteStoreError, match="has no record of a training run"):
        without.calibrate(without.train_dataset)
    with pytest.raises(HfTrakError, match="not made from a trainer"):
        without.calibrate(without.train_dataset, by=Replay())
