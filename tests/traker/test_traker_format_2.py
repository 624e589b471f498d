"""Directories of `TRAKer` and of retrainings that an earlier version wrote in the current format.

They open without a warning, give the scores of that version, and are finished. Their files name classes by the modules
in which these were then.
"""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data import format_1_traker as old
from torch import Tensor
from traker_runs import SAVERS, findings

from hf_trak.evaluation import retrain_on_subsets
from hf_trak.evaluation.retraining_files import verify_retraining
from hf_trak.traker import TRAKer
from hf_trak.traker.savers.mmap_saver import read_scores

GOLDEN = Path(__file__).parents[1] / "data" / "format-2"
EXPECTED = json.loads((GOLDEN / "traker-expected.json").read_text())
NAMES = {"mmap": "traker-mmap", "safetensors": "traker-safetensors"}
UNIT_ROUNDOFF = 2.0**-24  # of float32


@pytest.fixture
def golden(tmp_path: Path, kind: str) -> Path:
    shutil.copytree(GOLDEN / NAMES[kind], tmp_path / "golden")
    return tmp_path / "golden"


def open_golden(directory: Path, kind: str) -> TRAKer:
    return old.traker(directory, SAVERS[kind].__name__)


def saved_scores(directory: Path, kind: str) -> Tensor:
    if kind == "mmap":
        return read_scores(directory, "golden")
    return open_golden(directory, kind).saver.read_scores("golden")


def closed_form(traker: TRAKer, model_ids: list[int]) -> tuple[Tensor, Tensor]:
    """Scores `(n, m)` in float64 from the features, targets and output-to-loss gradients in the directory, and how far
    from them a computation in float32 may be.

    A sum of k products in any order is off by at most k units of roundoff times the sum of absolute products. Further
    units come from adding up the checkpoints, dividing by their number, rounding the mean of q, and multiplying by it.
    """
    scores, sizes = torch.zeros(2, old.N, old.M, dtype=torch.float64)
    q = torch.zeros(old.N, 1, dtype=torch.float64)
    for member in model_ids:
        assert traker.saver.load_experiment("golden", member)
        targets = traker.saver.read_targets().double()
        traker.saver.load_current_store(member)
        features, out_to_loss = (values.double() for values in traker.saver.read_features())
        scores += features @ targets.T / len(model_ids)
        sizes += features.abs() @ targets.abs().T / len(model_ids)
        q += out_to_loss[:, None] / len(model_ids)
    units = (traker.proj_dim + len(model_ids) + 3) * UNIT_ROUNDOFF
    return scores * q, units / (1 - units) * sizes * q.abs()


def content(directory: Path) -> dict[Path, bytes]:
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", SAVERS)
def test_saved_scores_are_equal_to_the_bit(golden: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    before = content(golden)
    with caplog.at_level(logging.WARNING, "hf_trak"):
        assert torch.equal(saved_scores(golden, kind), torch.tensor(EXPECTED[NAMES[kind]]))
        assert {one.state for one in findings(golden, kind)} == {"intact", "missing"}  # model id 2 is half-finished
    assert not caplog.records
    assert content(golden) == before


@pytest.mark.parametrize("kind", SAVERS)
def test_finalized_features_are_taken_for_what_they_are(
    golden: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The score computer that they name is the one of this version, so `finalize_features` computes nothing."""
    before = content(golden)
    with caplog.at_level(logging.WARNING, "hf_trak"):
        open_golden(golden, kind).finalize_features([0, 1])
    assert not caplog.records
    assert content(golden) == before


@pytest.mark.parametrize("kind", SAVERS)
def test_recomputed_scores_agree_to_rounding(golden: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    traker = open_golden(golden, kind)
    exact, bound = closed_form(traker, [0, 1])
    assert bool(((torch.tensor(EXPECTED[NAMES[kind]]) - exact).abs() <= bound).all())
    with caplog.at_level(logging.WARNING, "hf_trak"):
        scores = traker.finalize_scores("golden", [0, 1])
    assert not caplog.records
    assert bool(((scores - exact).abs() <= bound).all())
    assert torch.equal(saved_scores(golden, kind), scores)


@pytest.mark.parametrize("kind", SAVERS)
def test_the_half_finished_checkpoint_is_finished(golden: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    fresh = old.traker(golden.parent / "fresh", SAVERS[kind].__name__)
    with caplog.at_level(logging.WARNING, "hf_trak"):
        traker = open_golden(golden, kind)
        for opened in (traker, fresh):
            opened.load_checkpoint(old.state(2), 2)
            half = old.HALF if opened is traker else 0
            assert np.flatnonzero(opened.saver.featurized()).tolist() == list(range(half))
            for start in range(0, old.N, 2):
                opened.featurize(old.rows(start, start + 2), inds=range(start, start + 2))
        grads, again = (opened.saver.read_grads() for opened in (traker, fresh))
        assert torch.equal(grads[old.HALF :], again[old.HALF :])  # computed here, in the same batches
        traker.finalize_features()
        for member in range(3):
            traker.start_scoring_checkpoint("golden", old.state(member), member, old.M)
            traker.score(old.rows(old.N, old.N + old.M), num_samples=old.M)
        scores = traker.finalize_scores("golden")
        assert torch.equal(saved_scores(golden, kind), scores)
    assert not caplog.records
    assert {one.state for one in findings(golden, kind)} == {"intact"}
    traker.saver.load_current_store(2)
    computer = traker.score_computer
    assert torch.equal(traker.saver.read_features()[0], computer.get_x_xtx_inv(grads, computer.get_xtx(grads)))
    exact, bound = closed_form(traker, [0, 1, 2])
    assert bool(((scores - exact).abs() <= bound).all())


def test_trainings_of_a_retraining_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "retraining"
    shutil.copytree(GOLDEN / "retraining", directory)
    (directory / "trainings" / "subset-000001-repeat-001.safetensors").unlink()
    seeds: list[int] = []

    def retrain(chosen: np.ndarray, seed: int) -> np.ndarray:
        seeds.append(seed)
        return old.retrain(chosen, seed)

    def outputs() -> Any:
        found = retrain_on_subsets(old.MASKS, retrain, directory, repeats=2, seed=3, settings=old.SETTINGS)
        return found["outputs"][:]

    with caplog.at_level(logging.WARNING, "hf_trak"):
        assert outputs() == EXPECTED["retraining"]
        assert len(seeds) == 1  # the training that was taken away
        assert outputs() == EXPECTED["retraining"]
        assert len(seeds) == 1
        assert {one.state for one in verify_retraining(directory)} == {"intact"}
    assert not caplog.records
