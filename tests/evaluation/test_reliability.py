"""Reliability of repeated trainings, and the ceiling of scores, on outputs whose truth is known."""

import numpy as np
import pytest
from datasets import Dataset

from hf_trak.errors import NonFiniteError
from hf_trak.evaluation import measure_reliability, repeated_outputs
from hf_trak.evaluation.intervals import spearman


def measured(repeats: int, subsets: int, targets: int, noise: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Truth `(s, m)` of variance 1, and repeats `(R, s, m)` of it with noise."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=(subsets, targets))
    return truth, truth + noise * rng.normal(size=(repeats, subsets, targets))


@pytest.mark.few(2)
@pytest.mark.parametrize("repeats", [2, 3, 6])
@pytest.mark.parametrize("noise", [0.3, 1.0])
def test_reliability_and_ceiling_of_known_noise(repeats: int, noise: float) -> None:
    """With truth of variance 1 and noise of variance σ², one repeat has the reliability 1 / (1 + σ²).

    1,500 subsets and 6 targets: the standard error of a correlation is below 0.026, that of their mean 0.011. Ranks of
    normal variables correlate a little less than these themselves, by up to 0.02.
    """
    truth, outputs = measured(repeats, 1500, 6, noise)
    found = measure_reliability(outputs, resamples=20)
    assert found.one.mean() == pytest.approx(1 / (1 + noise**2), abs=0.05)
    assert found.mean.mean() == pytest.approx(1 / (1 + noise**2 / repeats), abs=0.05)
    np.testing.assert_allclose(found.noise, noise, rtol=0.08)
    np.testing.assert_allclose(found.signal, 1.0, rtol=0.1)
    # The ceiling is what the truth itself scores.
    perfect = spearman(truth, outputs.mean(axis=0)).mean()
    assert found.ceiling.value == pytest.approx(perfect, abs=0.03)
    assert found.ceiling_of_one.value == pytest.approx(spearman(truth, outputs[0]).mean(), abs=0.03)


def test_repeats_without_noise_have_no_ceiling() -> None:
    truth, _ = measured(1, 20, 3, 0.0)
    found = measure_reliability(np.stack([truth, truth]), resamples=10)
    assert found.ceiling.value == 1.0 and found.ceiling_of_one.value == 1.0
    assert not found.noise.any()


def test_pure_noise_has_a_ceiling_near_zero_and_plain_values() -> None:
    _, outputs = measured(4, 200, 5, 1.0)
    found = measure_reliability(outputs - measured(4, 200, 5, 1.0)[0], resamples=50)
    assert found.ceiling.low <= found.ceiling.value < 0.5
    plain = found.to_dict()
    assert plain["repeats"] == 4 and len(plain["noise"]) == 5 and plain["ceiling"]["value"] == found.ceiling.value


@pytest.mark.slow
def test_the_interval_holds_the_truth_most_of_the_time() -> None:
    """95 % intervals over 40 draws hold the expected ceiling at least 30 times; by chance 38, with deviation 1.4."""
    held = 0
    for seed in range(40):
        _, outputs = measured(2, 60, 10, 1.0, seed)
        held += np.sqrt(2 / 3) - 0.012 in measure_reliability(outputs, resamples=60).ceiling  # of ranks: 0.012 less
    assert held >= 30


def table(order: np.ndarray, outputs: np.ndarray) -> Dataset:
    subsets = outputs.shape[1]
    return Dataset.from_dict(
        {
            "repeat": [int(i) // subsets for i in order],
            "subset": [10 * (int(i) % subsets) for i in order],
            "outputs": [outputs[int(i) // subsets, int(i) % subsets].tolist() for i in order],
        }
    )


def test_trainings_in_any_order_are_arranged() -> None:
    _, outputs = measured(3, 4, 2, 1.0)
    order = np.random.default_rng(1).permutation(12)
    assert np.array_equal(repeated_outputs(table(order, outputs)), outputs)  # to the bit, in float64
    with pytest.raises(ValueError, match="11 trainings of 4 subsets"):
        repeated_outputs(table(order[:-1], outputs))
    with pytest.raises(ValueError, match="12 trainings of 4 subsets"):
        repeated_outputs(table(np.array([*order[:-1], order[0]]), outputs))
    with pytest.raises(ValueError, match=r"no columns \['repeat'\]"):
        repeated_outputs(table(order, outputs).remove_columns("repeat"))


def test_bad_input_is_refused() -> None:
    _, outputs = measured(2, 5, 2, 1.0)
    for bad in (outputs[:1], outputs[:, :2], outputs[0]):
        with pytest.raises(ValueError, match=r"Expected \(R, s, m\)"):
            measure_reliability(bad)
    outputs[1, 2, 0] = np.nan
    with pytest.raises(NonFiniteError, match="NaN"):
        measure_reliability(outputs)
