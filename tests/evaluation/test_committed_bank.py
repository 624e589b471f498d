"""A committed bank of retrained CNNs, on which TRAK has the quality that the benchmark reports."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.errors import ConfigMismatchError
from hf_trak.evaluation import Bank, evaluate_bank

ROOT = Path(__file__).parents[2]
BANK = ROOT / "tests" / "kit" / "bank-digits-cnn"
sys.path.insert(0, str(ROOT / "benchmarks" / "quality"))

from quality_bench.cases import make_case  # noqa: E402


@pytest.fixture(scope="module")
def bank() -> Bank:
    return Bank(BANK)


def test_the_bank_is_that_of_the_case(bank: Bank, tmp_path: Path) -> None:
    """Fingerprints and the recipe still hold, so that features and retrained outputs belong together."""
    case = make_case("digits-cnn", tmp_path)
    bank.check_rows(case.train, case.targets)
    assert bank.recipe["training"] == case.training
    with pytest.raises(ConfigMismatchError, match="training rows have the fingerprint"):
        bank.check_rows(case.train.select(range(999)))


@pytest.mark.slow
def test_trak_predicts_the_bank(bank: Bank, tmp_path: Path) -> None:
    """Far above chance at both shares of dropped rows, below the ceiling, and with the sign of a proponent."""
    case = make_case("digits-cnn", tmp_path)
    trainer = case.trainer(case.train, 0)
    trainer.train()
    config = TrakConfig(output_dir=str(tmp_path / "trak"), use_cpu=True, per_device_batch_size=50, budget="fast")
    attributor = TrakAttributor.from_trainer(trainer, config, task=case.task)
    scored = attributor.featurize().attribute(case.targets, top_k=None)
    scores = np.stack(scored.with_format("numpy")["trak_scores"][:], axis=1)
    random = np.random.default_rng(0).normal(size=scores.shape)
    found = evaluate_bank(bank, {"TRAK": scores, "reversed": -scores, "random": random}, resamples=100)
    for part in ("drop-0.01", "drop-0.5"):
        trak, turned, chance = (each for each in found if each.part == part)
        assert 0.3 < trak.lds.value < 0.9
        assert turned.lds.value == pytest.approx(-trak.lds.value, abs=1e-9)
        # 60 correlations over 50 subsets, independent since the random scores of targets are: six standard errors
        assert abs(chance.lds.value) < 6 / (49 * 60) ** 0.5
    ceilings = next(each.ceilings for each in found if each.part == "drop-0.5")
    assert ceilings["drop-0.5-perturbed"].value > 0.99 > ceilings["drop-0.5-other-seed"].value > 0.5


def test_a_copy_is_read_alike(bank: Bank, tmp_path: Path) -> None:
    shutil.copytree(BANK, tmp_path / "copy")
    np.testing.assert_array_equal(Bank(tmp_path / "copy").part("drop-0.5").outputs, bank.part("drop-0.5").outputs)
