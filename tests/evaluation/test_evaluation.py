"""Statistics of an attribution's quality, against independent implementations and problems with known answers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from scipy.stats import pearsonr, spearmanr
from torch import Tensor, nn

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.errors import NonFiniteError
from hf_trak.evaluation import (
    RemovalPlan,
    compare_lds,
    evaluate_lds,
    evaluate_removal,
    group_sums,
    leave_one_out_correlation,
    leave_one_out_subsets,
    linear_datamodeling_score,
    masks_and_outputs,
    mean_interval,
    mislabel_detection,
    random_subsets,
    removal_plan,
    retrain_on_subsets,
    with_wrong_labels,
)
from hf_trak.scores.groups import RowGroups

N, D, M = 300, 4, 12


class Linear(nn.Module):
    """f(z) = x · θ, so that the gradient of f is x itself."""

    def __init__(self, theta: np.ndarray) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor(theta, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.theta


class Regression:
    """Least squares on made-up rows: every retraining is exact, and so is the attribution up to one Newton step."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.x, self.targets = rng.normal(size=(N, D)), rng.normal(size=(M, D))
        self.y = self.x @ rng.normal(size=D) + rng.normal(size=N)
        self.trained = 0

    def fit(self, rows: np.ndarray) -> np.ndarray:
        return np.linalg.solve(self.x[rows].T @ self.x[rows], self.x[rows].T @ self.y[rows])

    def retrain(self, rows: np.ndarray, seed: int) -> np.ndarray:
        self.trained += 1
        return self.targets @ self.fit(rows)

    def scores(self, directory: Path) -> np.ndarray:
        """Of this library: whole gradients, λ = 0, `(N, M)`."""
        rows = Dataset.from_dict({"x": self.x.astype("float32"), "labels": self.y.astype("float32")})
        targets = Dataset.from_dict({"x": self.targets.astype("float32"), "labels": [0.0] * M})
        config = TrakConfig(
            output_dir=str(directory), proj_type="none", lambda_relative=0.0, use_cpu=True, budget="fast"
        )
        attributor = TrakAttributor(Linear(self.fit(np.arange(N))), config, train_dataset=rows, task="regression")
        scored = attributor.featurize().attribute(targets, top_k=None)
        return np.stack(scored.with_format("numpy")["trak_scores"][:]).T


@pytest.fixture(scope="module")
def regression() -> Regression:
    return Regression()


@pytest.fixture(scope="module")
def scores(regression: Regression, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    return regression.scores(tmp_path_factory.mktemp("linear"))


@pytest.fixture(scope="module")
def retrained(regression: Regression, tmp_path_factory: pytest.TempPathFactory) -> tuple[np.ndarray, np.ndarray]:
    directory = tmp_path_factory.mktemp("retrained")
    return masks_and_outputs(retrain_on_subsets(random_subsets(N, 80), regression.retrain, directory))


def made_up(seed: int = 0, s: int = 40, n: int = 30, m: int = 6) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    tau, masks = rng.normal(size=(n, m)), random_subsets(n, s, seed=seed)
    return tau, masks, masks @ tau + 3 * rng.normal(size=(s, m))


@pytest.mark.parametrize("seed", range(3))
def test_lds_equals_dattri(seed: int) -> None:
    """Skipped where dattri is missing; `test_evaluation_lds` compares with scipy, target by target, everywhere."""
    metric = pytest.importorskip("dattri.metric", reason="dattri 0.3.0 is not installed")
    tau, masks, outputs = made_up(seed)
    indices = torch.tensor(np.stack([np.flatnonzero(mask) for mask in masks]))
    theirs, _ = metric.lds(torch.tensor(tau), (torch.tensor(outputs), indices))
    np.testing.assert_allclose(linear_datamodeling_score(tau, masks, outputs), theirs.numpy(), rtol=0, atol=1e-6)
    ours = mislabel_detection(tau[:, 0], tau[:, 1] > 0.5, resamples=10).auc.value
    auc, _ = metric.mislabel_detection_auc(torch.tensor(tau[:, 0]), torch.tensor(tau[:, 1] > 0.5))
    assert ours == pytest.approx(float(auc), abs=1e-6)


def test_lds_with_ties_equals_scipy_in_double_precision() -> None:
    tau, masks, outputs = made_up()
    tau, outputs = tau.round(), outputs.round(-1)
    found = evaluate_lds(tau, masks, outputs, resamples=50).per_target
    for j in range(tau.shape[1]):
        predicted = [tau[mask, j].sum() for mask in masks]
        assert found[j] == pytest.approx(spearmanr(predicted, outputs[:, j]).statistic, abs=1e-12)


def test_exact_attributions_of_a_linear_model_reach_the_top(
    scores: np.ndarray, retrained: tuple[np.ndarray, np.ndarray]
) -> None:
    result = evaluate_lds(scores, *retrained, resamples=200)
    assert result.mean.value >= 0.95
    assert result.mean.low >= 0.9 and result.mean.value in result.mean
    assert (result.low <= result.per_target).all() and (result.per_target <= result.high).all()


@pytest.mark.slow
def test_shuffled_scores_give_zero_within_the_interval(
    scores: np.ndarray, retrained: tuple[np.ndarray, np.ndarray]
) -> None:
    covered = [
        0 in evaluate_lds(np.random.default_rng(seed).permutation(scores), *retrained, resamples=200).mean
        for seed in range(12)
    ]
    assert sum(covered) >= 10  # each with 95 %: 9 or fewer of 12 by chance has a probability of 2 %
    small = evaluate_lds(np.random.default_rng(0).permutation(scores), *retrained, resamples=200).mean
    assert small.high - small.low < 0.6  # an interval that holds everything would say nothing


@pytest.mark.slow
def test_compared_attributions_are_resampled_together(
    scores: np.ndarray, retrained: tuple[np.ndarray, np.ndarray]
) -> None:
    """A little noise costs a little, which the interval of the difference sees and those of the two scores do not."""
    noisy = scores + 0.5 * scores.std() * np.random.default_rng(0).normal(size=scores.shape)
    difference = compare_lds(scores, noisy, *retrained, resamples=200)
    one, other = (evaluate_lds(each, *retrained, resamples=200).mean for each in (scores, noisy))
    assert difference.value == pytest.approx(one.value - other.value)
    assert 0 < difference.low < difference.value < difference.high
    same = compare_lds(scores, 2 * scores, *retrained, resamples=50)
    assert (same.low, same.value, same.high) == (0, 0, 0)


def test_intervals_cover_and_shrink() -> None:
    """95 % intervals of the mean of 30 exponential numbers: skewed, so somewhat fewer than 95 % hold it."""
    rng = np.random.default_rng(1)
    intervals = [mean_interval(rng.exponential(size=30), resamples=300) for _ in range(100)]
    assert 80 <= sum(1.0 in interval for interval in intervals) <= 99
    wide, narrow = (mean_interval(rng.normal(size=size)) for size in (20, 2000))
    assert narrow.high - narrow.low < 0.2 * (wide.high - wide.low)
    assert str(mean_interval([2.0, 2.0])) == "2.000 [2.000, 2.000]"
    with pytest.raises(NonFiniteError, match="`values`"):
        mean_interval([0.0, np.nan])
    with pytest.raises(ValueError, match="`resamples` is 5"):
        mean_interval([0.0], resamples=5)


def test_subsets_have_their_size_and_do_not_depend_on_their_number() -> None:
    masks = random_subsets(20, 7, fraction=0.3, seed=5)
    assert masks.dtype == bool and (masks.sum(axis=1) == 6).all()
    np.testing.assert_array_equal(random_subsets(20, 30, fraction=0.3, seed=5)[:7], masks)
    assert len({row.tobytes() for row in random_subsets(20, 30)}) == 30
    assert random_subsets(400, 200).mean(axis=0).std() < 0.06  # every row is as likely as another
    with pytest.raises(ValueError, match=r"`fraction` is 0\.01"):
        random_subsets(20, 3, fraction=0.01)


def test_groups_stay_together() -> None:
    groups = RowGroups(["a", "b", "a", "c", "b", "d"])
    masks = random_subsets(6, 10, groups=groups)
    for mask in masks:
        assert [len(set(mask[groups.member.numpy() == g])) for g in range(4)] == [1] * 4
        assert len(np.unique(groups.member.numpy()[mask])) == 2
    tau = np.arange(12.0).reshape(6, 2)
    sums = group_sums(tau, groups)
    np.testing.assert_array_equal(sums, [[0 + 4, 1 + 5], [2 + 8, 3 + 9], [6, 7], [10, 11]])
    by_group = np.stack([masks[:, list(groups.member).index(g)] for g in range(4)], axis=1)
    outputs = np.random.default_rng(0).normal(size=(10, 2))
    np.testing.assert_allclose(
        linear_datamodeling_score(tau, masks, outputs), linear_datamodeling_score(sums, by_group, outputs)
    )


def test_leave_one_out_of_a_linear_model(regression: Regression, scores: np.ndarray, tmp_path: Path) -> None:
    rows = list(range(0, N, 6))
    masks = leave_one_out_subsets(N, rows)
    assert masks.shape == (51, N) and masks[0].all() and [int(np.argmin(mask)) for mask in masks[1:]] == rows
    masks, outputs = masks_and_outputs(retrain_on_subsets(masks, regression.retrain, tmp_path))
    result = leave_one_out_correlation(scores, masks, outputs)
    assert result.mean_pearson.value >= 0.99 and result.mean_spearman.value >= 0.99
    effects = outputs[0, 3] - outputs[1:, 3]
    assert result.pearson[3] == pytest.approx(pearsonr(scores[rows, 3], effects).statistic)
    assert result.spearman[3] == pytest.approx(spearmanr(scores[rows, 3], effects).statistic)
    with pytest.raises(ValueError, match="all rows first"):
        leave_one_out_correlation(scores, masks[1:], outputs[1:])


def test_leave_one_group_out(regression: Regression, scores: np.ndarray, tmp_path: Path) -> None:
    groups = RowGroups([row % 25 for row in range(N)])
    masks = leave_one_out_subsets(N, groups=groups)
    assert masks.shape == (26, N) and (masks[1:].sum(axis=1) == N - 12).all()
    masks, outputs = masks_and_outputs(retrain_on_subsets(masks, regression.retrain, tmp_path))
    assert leave_one_out_correlation(scores, masks, outputs, groups=groups).mean_pearson.value >= 0.95


@pytest.mark.parametrize("targets", [[0, 3, 5], None])
def test_curves_over_numbers_of_rows(
    regression: Regression, scores: np.ndarray, tmp_path: Path, targets: list[int] | None
) -> None:
    """Rows are ordered for each target, or once for all of them."""
    plan = removal_plan(
        {"helpful": scores, "harmful": -scores}, counts=[10, 40], targets=targets, together=targets is None
    )
    assert plan.counts == (10, 40) and len(plan.masks) == 1 + 2 * 10 + 2 * 2 * (1 if targets is None else 3)
    j, first = (slice(None), scores.mean(axis=1)) if targets is None else (0, scores[:, 0])
    number = plan.subsets["helpful"][0][0]
    assert set(np.flatnonzero(~plan.masks[number])) == set(np.argsort(-first)[:10])
    result = evaluate_removal(plan, *masks_and_outputs(retrain_on_subsets(plan.masks, regression.retrain, tmp_path)))
    assert list(result.curves) == ["random", "helpful", "harmful"]
    assert result.curves["helpful"][40].high < 0 < result.curves["harmful"][40].low
    assert result.curves["helpful"][40].value < result.curves["helpful"][10].value
    assert abs(result.curves["random"][40].value) < 0.5 * abs(result.curves["helpful"][40].value)
    direct = regression.retrain(np.flatnonzero(plan.masks[number]), 0) - regression.retrain(np.arange(N), 0)
    assert result.changes["helpful"][0][j] == pytest.approx(direct[j])
    assert result.effect("helpful", 10).own == result.curves["helpful"][10]


def test_controls_and_paired_differences(regression: Regression, scores: np.ndarray, tmp_path: Path) -> None:
    """A control that is the exact scores with noise removes less than they do, and more than a random order."""
    noise = np.random.default_rng(0).normal(size=scores.shape) * scores.std()
    plan = removal_plan({"helpful": scores}, counts=[15], controls={"noisy": scores + 2 * noise, "same": scores})
    result = evaluate_removal(plan, *masks_and_outputs(retrain_on_subsets(plan.masks, regression.retrain, tmp_path)))
    exact = result.difference("helpful", "same", 15)
    assert (exact.value, exact.low, exact.high) == (0, 0, 0)
    assert result.difference("helpful", "noisy", 15).high < 0
    assert result.difference("noisy", "random", 15).high < 0
    by_hand = np.mean(np.subtract(result.changes["helpful"], result.changes["noisy"]))
    assert result.difference("helpful", "noisy", 15).value == pytest.approx(by_hand)
    with pytest.raises(ValueError, match=r"'best'.*15"):
        result.difference("helpful", "best", 15)


def test_addition_begins_with_nothing(regression: Regression, scores: np.ndarray, tmp_path: Path) -> None:
    groups = RowGroups([row // 10 for row in range(N)])
    both = {"helpful": scores, "harmful": -scores}
    plan = removal_plan(both, counts=[3], action="add", targets=[1], groups=groups, random_draws=2)
    first = plan.masks[plan.subsets["helpful"][0][0]]
    assert first.sum() == 30 and len(np.unique(np.flatnonzero(first) // 10)) == 3 and plan.masks[0].all()
    sums = group_sums(scores, groups)[:, 1]
    assert set(np.flatnonzero(first) // 10) == set(np.argsort(-sums)[:3])
    assert RemovalPlan.from_dict(plan.to_dict()) == plan
    masks, outputs = masks_and_outputs(retrain_on_subsets(plan.masks, regression.retrain, tmp_path))
    result = evaluate_removal(plan, masks, outputs)
    assert result.curves["helpful"][3].value > 0 > result.curves["harmful"][3].value
    assert str(result).startswith("| groups added")
    with pytest.raises(ValueError, match="lacks"):
        evaluate_removal(removal_plan({"helpful": scores}, counts=[9]), masks, outputs)


@pytest.mark.slow
def test_mislabelled_rows() -> None:
    rows = Dataset.from_dict({"labels": [i % 3 for i in range(60)], "x": list(range(60))})
    changed, wrong = with_wrong_labels(rows, 0.2, seed=3)
    assert wrong.sum() == 12 and changed.column_names == rows.column_names and changed.features == rows.features
    assert [a != b for a, b in zip(changed["labels"], rows["labels"], strict=True)] == wrong.tolist()
    noise = np.random.default_rng(0).normal(size=60)
    perfect = mislabel_detection(wrong + 0.01 * noise, wrong, ks=[6, 12, 24], resamples=50)
    assert (perfect.auc.value, perfect.average_precision) == (1, 1)
    assert perfect.precision_at == {6: 1, 12: 1, 24: 0.5}
    some = mislabel_detection(wrong + noise, wrong, resamples=200)
    pairs = (wrong + noise)[wrong][:, None] > (wrong + noise)[~wrong][None]
    assert some.auc.value == pytest.approx(pairs.mean())  # the probability that a wrong row stands above a right one
    assert some.auc.low < some.auc.value < some.auc.high
    assert 0.5 in mislabel_detection(noise, wrong, resamples=200).auc
    for order in (np.argsort(~wrong), np.argsort(wrong)):  # equal scores say nothing, whichever rows come first
        assert mislabel_detection(np.ones(60), wrong[order], ks=[6], resamples=20).precision_at[6] == pytest.approx(
            0.2
        )


def test_labels_alone_and_rows_without_a_class() -> None:
    alone, wrong = with_wrong_labels(Dataset.from_dict({"labels": [0, 1] * 5}), 0.2)
    assert alone.column_names == ["labels"] and len(alone) == 10 and wrong.sum() == 2
    halves = Dataset.from_dict({"labels": [0.0, 1.0] * 5})  # as pandas stores classes beside empty cells
    assert set(with_wrong_labels(halves, 0.2)[0]["labels"]) == {0.0, 1.0}
    for odd, shown in ((None, "None"), (-100, "-100"), (0.5, "0.5"), ([1], r"\[1\]")):
        labels = [odd, *([[0], [1]] if isinstance(odd, list) else [0, 1])]
        with pytest.raises(ValueError, match=f"Row 0 has {shown} in `labels`"):
            with_wrong_labels(Dataset.from_dict({"labels": labels}), 0.4)


BAD: list[tuple[Any, str]] = [
    (lambda: mislabel_detection([1.0, 2.0], [True, True]), "2 of 2 rows"),
    (lambda: mislabel_detection([1.0, 2.0], [True, False], ks=[3]), r"`ks` is \[3\]"),
    (lambda: removal_plan({"a": np.ones((5, 2))}, counts=[5]), r"`counts` is \[5\].*1 to 4"),
    (lambda: removal_plan({"a": np.ones((5, 2))}, counts=[1, 1]), r"`counts` is \[1, 1\].*distinct"),
    (lambda: removal_plan({"a": np.ones((5, 2))}, counts=[1], targets=[2]), r"`targets` is \[2\].*0 to 1"),
    (lambda: removal_plan({"a": np.ones((5, 2))}, counts=[1], action="take"), "`action` is 'take'"),  # type: ignore[arg-type]
    (
        lambda: removal_plan({"a": np.ones((5, 2))}, counts=[1], controls={"bm25": np.ones((5, 3))}),
        r"bm25.*the shape \(5, 3\)",
    ),
    (lambda: leave_one_out_subsets(4, [1, 1]), "distinct numbers from 0 to 3"),
    (lambda: group_sums(np.ones((5, 2)), RowGroups([0, 1])), "2 rows for 5"),
    (lambda: with_wrong_labels(Dataset.from_dict({"y": [0, 1]}), 0.5), r"\['y'\]"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input_is_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
