"""The linear datamodeling score against its definition."""

import numpy as np
import pytest
from scipy.stats import spearmanr

from hf_trak.errors import NonFiniteError
from hf_trak.evaluation import linear_datamodeling_score


def problem(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    scores, masks = rng.normal(size=(30, 4)), rng.random((25, 30)) < 0.5
    return scores, masks, masks @ scores + rng.normal(size=(25, 4))


def test_is_spearmans_correlation_of_predicted_and_measured_outputs() -> None:
    scores, masks, outputs = problem()
    result = linear_datamodeling_score(scores, masks, outputs)
    for target in range(4):
        predicted = [scores[mask, target].sum() for mask in masks]
        assert result[target] == pytest.approx(spearmanr(predicted, outputs[:, target]).statistic)


def test_perfect_opposite_and_constant_predictions() -> None:
    scores, masks, _ = problem()
    assert linear_datamodeling_score(scores, masks, np.exp(masks @ scores)) == pytest.approx(np.ones(4))
    assert linear_datamodeling_score(-scores, masks, masks @ scores) == pytest.approx(-np.ones(4))
    assert linear_datamodeling_score(0 * scores, masks, masks @ scores).tolist() == [0, 0, 0, 0]


def test_bad_input_is_named() -> None:
    scores, masks, outputs = problem()
    with pytest.raises(ValueError, match=r"\(29, 4\).*\(25, 30\).*Expected \(n, m\)"):
        linear_datamodeling_score(scores[:-1], masks, outputs)
    with pytest.raises(ValueError, match="2 subsets"):
        linear_datamodeling_score(scores, masks[:2], outputs[:2])
    outputs[3, 1] = np.nan
    with pytest.raises(NonFiniteError, match="`outputs`"):
        linear_datamodeling_score(scores, masks, outputs)
