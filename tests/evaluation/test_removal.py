"""Removal of rows, on problems whose answer is known: a ridge regression, and a network with planted rows."""

import gc
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from digit_models import DigitNet, digits
from transformers import Trainer, TrainingArguments

from hf_trak.errors import NonFiniteError
from hf_trak.evaluation.bank import Bank
from hf_trak.evaluation.intervals import leave_one_out_subsets, random_subsets
from hf_trak.evaluation.lds import top_k_precision
from hf_trak.evaluation.removal import RemovalPlan, evaluate_removal, removal_plan
from hf_trak.evaluation.retraining import masks_and_outputs, retrain_on_subsets
from hf_trak.evaluation.trainer_retraining import TrainerRetraining

# -- a ridge regression -------------------------------------------------------------------------------------------

N, D, M = 200, 5, 12
FRACTIONS = (0.02, 0.1)


class Ridge:
    """θ = (XᵀX + λI)⁻¹Xᵀy, f(z_j) = x_jᵀθ, and the exact effects of leaving out each row."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.x, self.targets = rng.normal(size=(N, D)), rng.normal(size=(M, D))
        self.y = self.x @ rng.normal(size=D) + rng.normal(size=N)
        inverse = np.linalg.inv(self.x.T @ self.x + np.eye(D))
        residuals, leverages = self.y - self.x @ inverse @ self.x.T @ self.y, ((self.x @ inverse) * self.x).sum(axis=1)
        self.exact = (self.x * (residuals / (1 - leverages))[:, None]) @ inverse @ self.targets.T
        lengths = np.linalg.norm(self.x, axis=1)[:, None] * np.linalg.norm(self.targets, axis=1)
        self.similarity = self.x @ self.targets.T / lengths
        self.noisy = self.exact + 2 * self.exact.std() * rng.normal(size=self.exact.shape)

    def outputs(self, masks: np.ndarray) -> np.ndarray:
        fits = [np.linalg.solve(self.x[k].T @ self.x[k] + np.eye(D), self.x[k].T @ self.y[k]) for k in masks]
        return np.stack(fits) @ self.targets.T

    def plan(self, **options: Any) -> RemovalPlan:
        controls = {"similarity": self.similarity, "noisy": self.noisy}
        return removal_plan({"exact": self.exact, "turned": -self.exact}, FRACTIONS, controls=controls, **options)


@pytest.fixture(scope="module")
def ridge() -> Ridge:
    return Ridge()


@pytest.fixture(scope="module")
def plan(ridge: Ridge) -> RemovalPlan:
    return ridge.plan()


def test_each_removal_takes_the_rows_of_the_highest_values(ridge: Ridge, plan: RemovalPlan) -> None:
    assert plan.counts == (4, 20) and plan.controls == ("random", "similarity", "noisy")
    assert plan.masks[0].all() and len(plan.masks) == 1 + 2 * (4 * M + 10)
    for name, values in {"exact": ridge.exact, "turned": -ridge.exact, "similarity": ridge.similarity}.items():
        for count, of_fraction in zip(plan.counts, plan.subsets[name], strict=True):
            for j, number in enumerate(of_fraction):
                assert set(np.flatnonzero(~plan.masks[number])) == set(np.argsort(-values[:, j])[:count])
    assert plan.tied == dict.fromkeys(("exact", "turned", "similarity", "noisy"), (0, 0))


def test_random_removals_are_random_subsets_that_a_bank_may_have(plan: RemovalPlan) -> None:
    for fraction, numbers in zip(FRACTIONS, plan.subsets["random"], strict=True):
        np.testing.assert_array_equal(plan.masks[list(numbers)], random_subsets(N, 10, 1 - fraction, seed=0))


def test_exact_scores_have_the_largest_effect(ridge: Ridge, plan: RemovalPlan) -> None:
    """The largest that any removal of so many rows could have, but for terms of second order."""
    assert top_k_precision(ridge.exact, ridge.outputs(plan.masks[:1]) - loo(ridge), k=[4, 20]).mean[20].value == 1
    result = evaluate_removal(plan, plan.masks, ridge.outputs(plan.masks))
    for fraction, count in zip(FRACTIONS, plan.counts, strict=True):
        exact = result.effect("exact", fraction)
        assert exact.count == count and list(exact.against) == ["random", "similarity", "noisy"]
        assert all(difference.high < 0 for difference in exact.against.values())
        foretold = -np.sort(ridge.exact, axis=0)[-count:].sum(axis=0).mean()  # if effects added up
        assert 1.0 < exact.own.value / foretold < 1.5  # the rest of the rows gets more leverage
        # The rows of the lowest scores held the output down: without them it rises.
        assert result.effect("turned", fraction).own.low > 0
        assert 0 in result.effect("random", fraction).own
        assert result.difference("exact", "turned", fraction).high < 0
    assert result.effect("exact", 0.1).own.high < result.effect("exact", 0.02).own.low


def loo(ridge: Ridge) -> np.ndarray:
    return ridge.outputs(leave_one_out_subsets(N)[1:])


def test_figures_equal_those_by_hand(ridge: Ridge, plan: RemovalPlan) -> None:
    outputs = ridge.outputs(plan.masks)
    changes = outputs - outputs[0]
    result = evaluate_removal(plan, plan.masks, outputs)
    for at, fraction in enumerate(FRACTIONS):
        numbers = plan.subsets["similarity"][at]
        own = np.array([changes[number, j] for j, number in enumerate(numbers)])
        others = np.array([np.delete(changes[number], j).mean() for j, number in enumerate(numbers)])
        found = result.effect("similarity", fraction)
        assert found.own.value == pytest.approx(own.mean())
        assert found.others is not None and found.others.value == pytest.approx(others.mean())
        assert found.specific is not None and found.specific.value == pytest.approx((own - others).mean())
        at_random = changes[list(plan.subsets["random"][at])]
        np.testing.assert_allclose(result.changes["random"][at], at_random.mean(axis=0))
        exact = np.array([changes[number, j] for j, number in enumerate(plan.subsets["exact"][at])])
        assert result.effect("exact", fraction).against["similarity"].value == pytest.approx((exact - own).mean())
        assert result.effect("exact", fraction).against["random"].value == pytest.approx(
            (exact - at_random.mean(axis=0)).mean()
        )


def test_intervals_are_those_of_a_bootstrap_over_targets_and_draws(ridge: Ridge, plan: RemovalPlan) -> None:
    """The normal approximation is within a tenth: of 12 targets, and for random rows of 10 draws as well."""
    result = evaluate_removal(plan, plan.masks, ridge.outputs(plan.masks), resamples=4000)
    exact, similar = result.changes["exact"][1], result.changes["similarity"][1]
    for found, values in (
        (result.effect("exact", 0.1).own, exact),
        (result.effect("exact", 0.1).against["similarity"], exact - similar),
    ):
        assert found.high - found.low == pytest.approx(2 * 1.96 * values.std() / np.sqrt(M), rel=0.1)
    outputs = ridge.outputs(plan.masks)
    drawn = (outputs - outputs[0])[list(plan.subsets["random"][1])]
    alone = drawn.mean(axis=1).std() / np.sqrt(10)  # noise of the draws alone
    interval = result.effect("random", 0.1).own
    assert interval.high - interval.low > 2 * 1.96 * max(alone, drawn.mean(axis=0).std() / np.sqrt(M)) * 0.9


def test_differences_are_paired(ridge: Ridge) -> None:
    """A method that is its own control differs by nothing, however wide the intervals of both are."""
    plan = removal_plan({"exact": ridge.exact}, [0.05], controls={"same": ridge.exact})
    assert plan.subsets["exact"] == plan.subsets["same"] and len(plan.masks) == 1 + M + 10  # trained once
    result = evaluate_removal(plan, plan.masks, ridge.outputs(plan.masks))
    same = result.effect("exact", 0.05).against["same"]
    assert (same.value, same.low, same.high) == (0, 0, 0)
    assert result.effect("exact", 0.05).own.low < result.effect("exact", 0.05).own.high


def test_harm_to_everything_is_not_specific() -> None:
    """Row 0 holds up all outputs, rows 1 … 4 one each: who names row 0 for every target harms all alike."""
    scores = {"own rows": np.eye(10, 4, -1), "row 0": np.eye(10, 1) @ np.ones((1, 4))}
    plan = removal_plan(scores, [0.1], random_draws=2)
    held = np.hstack([np.ones((10, 4)) * np.eye(10, 1)]) + np.eye(10, 4, -1)
    result = evaluate_removal(plan, plan.masks, plan.masks @ held)
    specific, general = result.effect("own rows", 0.1), result.effect("row 0", 0.1)
    assert specific.own.value == general.own.value == -1
    assert specific.others is not None and specific.others.value == 0
    assert general.others is not None and general.others.value == -1
    assert specific.specific is not None and specific.specific.value == -1
    assert general.specific is not None and general.specific.value == 0


def test_only_some_targets_have_removals_of_their_own(ridge: Ridge) -> None:
    plan = ridge.plan(targets=[7, 2], random_draws=3)
    assert len(plan.masks) == 1 + 2 * (4 * 2 + 3)
    outputs = ridge.outputs(plan.masks)
    result = evaluate_removal(plan, plan.masks, outputs)
    number = plan.subsets["exact"][0][1]
    assert set(plan.removed[number]) == set(np.argsort(-ridge.exact[:, 2])[:4])
    assert result.changes["exact"].shape == (2, 2)
    assert result.changes["exact"][0, 1] == pytest.approx(outputs[number, 2] - outputs[0, 2])
    found = result.effect("exact", 0.02).others  # over all other targets, 11 of 12
    others = [
        np.delete(outputs[i] - outputs[0], j).mean() for i, j in zip(plan.subsets["exact"][0], (7, 2), strict=True)
    ]
    assert found is not None and found.value == pytest.approx(np.mean(others))


def test_one_target_has_no_others() -> None:
    plan = removal_plan({"a": np.arange(10.0)[:, None]}, [0.2], random_draws=2)
    result = evaluate_removal(plan, plan.masks, plan.masks @ np.arange(10.0)[:, None])
    found = result.effect("a", 0.2)
    assert found.own.value == -17 and found.others is None and found.specific is None
    assert result.to_dict()["effects"][0]["others"] is None and "-17" in str(result)


def test_retrainings_are_found_among_others_in_any_order(ridge: Ridge, plan: RemovalPlan) -> None:
    expected = evaluate_removal(plan, plan.masks, ridge.outputs(plan.masks)).to_dict()
    more = np.concatenate([random_subsets(N, 5), plan.masks])[::-1]
    assert evaluate_removal(plan, more, ridge.outputs(more)).to_dict() == expected
    # A subset with two trainings counts with their mean.
    twice, outputs = np.concatenate([plan.masks] * 2), ridge.outputs(plan.masks)
    halves = np.concatenate([outputs + 1, outputs - 1])
    assert evaluate_removal(plan, twice, halves).effect("exact", 0.1).own.value == pytest.approx(
        expected["effects"][5]["own"]["value"]
    )


# -- what the result says -----------------------------------------------------------------------------------------


def test_the_table_and_plain_values(ridge: Ridge, plan: RemovalPlan) -> None:
    masks = np.concatenate([plan.masks, plan.masks[:1]])  # two trainings on all rows
    result = evaluate_removal(plan, masks, ridge.outputs(masks))
    lines = str(result).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0][:5] == ["rows removed", "by", "own change", "others' change", "own − others"]
    assert cells[0][5:] == ["− random", "− similarity", "− noisy"]
    assert cells[2][:2] == ["4 (0.02)", "exact"] and cells[5][:2] == ["4 (0.02)", "similarity (control)"]
    own = result.effect("exact", 0.02).own
    assert cells[2][2] == f"{own.value:+.3g} [{own.low:+.3g}, {own.high:+.3g}]" and cells[5][5:] == ["", "", ""]
    assert len(lines) == 2 + 2 * 5 and len({len(line) for line in lines}) == 1
    plain = json.loads(json.dumps(result.to_dict()))
    effect = plain["effects"][0]
    assert (effect["name"], effect["fraction"], effect["count"]) == ("exact", 0.02, 4)
    assert effect["own"]["value"] == result.effect("exact", 0.02).own.value
    assert list(effect["against"]) == plain["controls"] == ["random", "similarity", "noisy"] and plain["notes"] == []
    with pytest.raises(ValueError, match=r"removal by 'best' of the fraction 0\.1.*'exact'"):
        result.effect("best", 0.1)
    with pytest.raises(ValueError, match=r"fraction 0\.3.*0\.02"):
        result.difference("exact", "random", 0.3)


def test_too_few_controls_and_targets_are_noted(ridge: Ridge) -> None:
    plan = removal_plan({"exact": ridge.exact}, [0.05], targets=[0, 1])
    result = evaluate_removal(plan, plan.masks, ridge.outputs(plan.masks))
    first, *others = [note.split(",")[0] for note in result.notes]
    assert first == "Changes are measured from one training on all rows"
    assert others == ["Controls: 1 (random)", "Targets: 2"]
    together = removal_plan({"exact": ridge.exact}, [0.05], together=True)
    assert any(
        "without the same rows serves all targets (exact)" in note
        for note in evaluate_removal(together, together.masks, ridge.outputs(together.masks)).notes
    )
    assert str(result).endswith(result.notes[-1]) and result.to_dict()["notes"] == list(result.notes)


def test_equal_scores_at_the_cut_are_drawn_at_random_and_noted() -> None:
    """Constant scores remove random rows, not the first of the dataset, and the same ones for every such method."""
    constant = np.zeros((100, 2))
    plan = removal_plan({"a": constant, "b": constant + 1}, [0.1], random_draws=2)
    assert plan.subsets["a"] == plan.subsets["b"] and plan.tied == {"a": (2,), "b": (2,)}
    rows = plan.removed[plan.subsets["a"][0][0]]
    assert len(rows) == 10 and max(rows) > 30
    other = removal_plan({"a": constant}, [0.1], random_draws=2, seed=1)
    assert other.removed[other.subsets["a"][0][0]] != rows
    result = evaluate_removal(plan, plan.masks, plan.masks @ np.ones((100, 2)))
    assert any("a has rows of equal scores" in note and "2 of 2 targets at 10 rows" in note for note in result.notes)


# -- plans as JSON ------------------------------------------------------------------------------------------------


def test_a_plan_survives_json(plan: RemovalPlan) -> None:
    again = RemovalPlan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    np.testing.assert_array_equal(again.masks, plan.masks)


def test_a_bank_keeps_a_plan(ridge: Ridge, plan: RemovalPlan, tmp_path: Path) -> None:
    rows, targets = ({"x": values.tolist()} for values in (ridge.x, ridge.targets))
    bank = Bank.create(tmp_path / "bank", Dataset.from_dict(rows), Dataset.from_dict(targets))
    bank.add_part("removal", plan.masks, removal=plan.to_dict())

    def retrain(rows: np.ndarray, seed: int) -> np.ndarray:
        return ridge.outputs(np.isin(np.arange(N), rows)[None])[0]

    assert bank.build("removal", retrain)
    part = Bank(tmp_path / "bank").part("removal")
    assert part.removal is not None and RemovalPlan.from_dict(part.removal) == plan
    result = evaluate_removal(RemovalPlan.from_dict(part.removal), part.masks, part.truth)
    alone = np.stack([retrain(np.flatnonzero(mask), 0) for mask in plan.masks])
    assert result.to_dict() == evaluate_removal(plan, plan.masks, alone).to_dict()


DAMAGE: list[tuple[Any, str]] = [
    (lambda d: d.update(kind="bank"), "'bank'.*'removal plan'"),
    (lambda d: d.update(format_version=2), r"\('removal plan', 2\)"),
    (lambda d: d.pop("removed"), "the fields"),
    (lambda d: d.update(more=1), "'more'"),
    (lambda d: d.update(shape=[N]), r"the shape \(200,\)"),
    (lambda d: d.update(shape=[N, "12"]), "the shape"),
    (lambda d: d.update(shape=N), "the shape 200"),
    (lambda d: d.update(shape=[300, M]), "not lack 6 rows"),
    (lambda d: d.update(fractions=[0.02, 1.5]), "the fractions"),
    (lambda d: d.update(fractions="0.02"), "the fractions"),
    (lambda d: d.update(fractions=[]), "The plan's fractions"),
    (lambda d: d.update(fractions=[0.02]), "other fractions than its 1"),
    (lambda d: d.update(fractions=[0.02, 0.02]), "remove"),
    (lambda d: d.update(targets=[0, M]), "the targets"),
    (lambda d: d.update(targets=[0, 0]), "the targets"),
    (lambda d: d.update(targets=[0, 1]), "12, 12.*not 2 each"),
    (lambda d: d.update(targets=None), "the targets None"),
    (lambda d: d.update(methods=[]), "the methods"),
    (lambda d: d.update(methods=["exact", 5]), "the methods"),
    (lambda d: d.update(methods=["exact", "other"]), "of others"),
    (lambda d: d.update(controls=["similarity", "noisy", "random"]), "random not being the first"),
    (lambda d: d.update(methods=["exact", "exact"]), "the methods"),
    (lambda d: d["removed"][0].append(1), "the whole training set"),
    (lambda d: d["removed"][3].reverse(), "Subset 3"),
    (lambda d: d["removed"][3].__setitem__(-1, N), "Subset 3"),
    (lambda d: d["removed"][3].__setitem__(0, 0.5), "Subset 3"),
    (lambda d: d["removed"].__setitem__(3, 7), "Subset 3"),
    (lambda d: d["removed"].__setitem__(3, d["removed"][4]), "a subset twice"),
    (lambda d: d.update(removed=[]), "the whole training set"),
    (lambda d: d.update(subsets=[]), "of others"),
    (lambda d: d["subsets"].pop("exact"), "of others"),
    (lambda d: d["subsets"]["exact"].pop(), "other fractions than its 2"),
    (lambda d: d["subsets"]["exact"][0].pop(), "subsets of 'exact', not 12 each"),
    (lambda d: d["subsets"]["random"][1].pop(), "subsets of 'random', not 10 each"),
    (lambda d: d["subsets"].update(random=[[], []]), "subsets of 'random', not 0 each"),
    (lambda d: d["subsets"]["exact"][0].__setitem__(0, 0), "numbers from 1 to"),
    (lambda d: d["subsets"]["exact"][0].__setitem__(0, 10**6), "numbers from 1 to"),
    (lambda d: d["subsets"]["exact"].reverse(), "not lack 4 rows"),
    (lambda d: d["tied"].update(exact=[0]), "numbers of ties"),
    (lambda d: d["tied"].update(exact=3), "numbers of ties"),
    (lambda d: d["tied"].pop("exact"), "of others"),
    (lambda d: d.update(action="keep"), "the `action` 'keep'"),
    (lambda d: d.update(groups=[0] * 5), "groups"),
    (lambda d: d.update(groups=[1] * N), "groups"),
    (lambda d: d.update(groups=3), "groups"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_a_damaged_plan_is_refused(plan: RemovalPlan, damage: Any, message: str) -> None:
    content = json.loads(json.dumps(plan.to_dict()))
    damage(content)
    with pytest.raises(ValueError, match=message):
        RemovalPlan.from_dict(content)


@pytest.mark.parametrize("content", [None, [], "plan", {}])
def test_what_is_no_plan_is_refused(content: Any) -> None:
    with pytest.raises(ValueError, match=r"as `RemovalPlan\.to_dict` writes them"):
        RemovalPlan.from_dict(content)


# -- bad input ----------------------------------------------------------------------------------------------------

MATRIX = np.arange(80.0).reshape(40, 2)


def bad_value() -> np.ndarray:
    spoiled = MATRIX.copy()
    spoiled[7, 1] = np.nan
    return spoiled


BAD: list[tuple[Any, str]] = [
    (lambda: removal_plan({"a": MATRIX.T}), r"scores\['a'\].*shape \(2, 40\), fewer training rows.*`\.T`"),
    (lambda: removal_plan({"a": MATRIX, "b": MATRIX.T}), r"scores\['b'\].*transposed"),
    (lambda: removal_plan({"a": MATRIX.T}, shape=(40, 2)), r"Expected \(40, 2\).*transposed"),
    (lambda: removal_plan({"a": MATRIX}, [0.1], controls={"b": MATRIX.T}), r"controls\['b'\].*transposed"),
    (lambda: removal_plan({"a": MATRIX}, [0.1], controls={"b": MATRIX[1:]}), r"shape \(39, 2\). Expected \(40, 2\)"),
    (lambda: removal_plan({"a": MATRIX[:, 0]}), r"shape \(40,\)"),
    (lambda: removal_plan({"a": bad_value()}), r"scores\['a'\].*NaN.*row 7 and target 1"),
    (lambda: removal_plan({"a": MATRIX}, [0.1], controls={"b": bad_value()}), r"controls\['b'\].*NaN"),
    (lambda: removal_plan({}), "no matrix"),
    (lambda: removal_plan({}, controls={"b": MATRIX}), r"the methods \[\]"),
    (lambda: removal_plan({"a": MATRIX}, controls={"a": MATRIX}), "the name 'a'.*occurs once"),
    (lambda: removal_plan({"random": MATRIX}), "no name 'random'"),
    (lambda: removal_plan({"a": MATRIX}, controls={"random": MATRIX}), "no name 'random'"),
    (lambda: removal_plan({"": MATRIX}), "the name ''"),
    (lambda: removal_plan({"a": MATRIX}), r"\[0\.01, 0\.05\].*is \[0, 2\] of 40 rows"),
    (lambda: removal_plan({"a": MATRIX}, [0.99]), r"is \[40\] of 40 rows"),
    (lambda: removal_plan({"a": MATRIX}, [0.05, 0.06]), "different numbers"),
    (lambda: removal_plan({"a": MATRIX}, [5]), r"`fractions` is \[5\]"),
    (lambda: removal_plan({"a": MATRIX}, []), r"`fractions` is \[\]"),
    (lambda: removal_plan({"a": MATRIX}, [0.1], targets=[2]), r"`targets` is \[2\].*0 to 1"),
    (lambda: removal_plan({"a": MATRIX}, [0.1], targets=[-1]), r"`targets` is \[-1\]"),
    (lambda: removal_plan({"a": MATRIX}, [0.1], targets=[1, 1]), "distinct"),
    (lambda: removal_plan({"a": MATRIX}, [0.1], targets=[]), r"`targets` is \[\]"),
    (lambda: removal_plan({"a": MATRIX}, [0.1], random_draws=1), "`random_draws` is 1"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input_is_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_scores_need_names() -> None:
    with pytest.raises(TypeError, match="`scores` is a ndarray"):
        removal_plan(MATRIX)  # type: ignore[arg-type]


def test_more_targets_than_rows_are_meant_if_the_shape_says_so() -> None:
    assert removal_plan({"a": MATRIX.T}, [0.5], shape=(2, 40)).shape == (2, 40)


def test_bad_retrainings_are_named(ridge: Ridge, plan: RemovalPlan) -> None:
    outputs = ridge.outputs(plan.masks)
    for masks, values, message in (
        (plan.masks, outputs.T, r"`outputs` looks transposed"),
        (plan.masks.T, outputs, r"`masks` looks transposed"),
        (plan.masks, outputs[:, 1:], r"outputs` \(117, 11\)"),
        (plan.masks, outputs[1:], "Expected"),
        (plan.masks[:, 1:], outputs, r"\(117, 199\)"),
        (plan.masks[1:], outputs[1:], "lacks 1 of the plan's 117 subsets, the first being subset 0"),
        (random_subsets(N, 117), outputs, "lacks 117"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate_removal(plan, masks, values)
    spoiled = outputs.copy()
    spoiled[5, 3] = np.inf
    with pytest.raises(NonFiniteError, match="subset 5 and target 3"):
        evaluate_removal(plan, plan.masks, spoiled)
    with pytest.raises(ValueError, match="`resamples` is 5"):
        evaluate_removal(plan, plan.masks, outputs, resamples=5)
    with pytest.raises(ValueError, match="removal_plan"):
        replace(plan, targets=(0, 0))


# -- a network that is retrained ----------------------------------------------------------------------------------

BASE, SHOWN, COPIES = 12, 3, 2


@pytest.fixture
def quick_trainings() -> Iterator[None]:
    """`Trainer` collects garbage at each start, which takes longer than these trainings for all that tests import, and
    their products are too small for several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


def planted() -> tuple[Dataset, Dataset]:
    """Digits, and targets with wrong labels. Each target has copies of two kinds among the rows.

    The first kind has the wrong label, too, and nothing else does that looks like the target. The others look even
    more like it, and have the right label: they speak against the target's label.
    """
    rows, shown = digits(0, BASE), digits(100, 100 + SHOWN)
    images, right = np.array(shown["pixel_values"]), np.array(shown["labels"])
    rng = np.random.default_rng(0)
    supporting = [images + 0.05 * rng.normal(size=images.shape) for _ in range(COPIES)]
    opposing = [images + 0.001 * rng.normal(size=images.shape) for _ in range(COPIES)]
    pixels = np.concatenate([np.array(rows["pixel_values"]), *supporting, *opposing])
    wrong = (right + 5) % 10
    labels = np.concatenate([np.array(rows["labels"]), *[wrong] * COPIES, *[right] * COPIES])

    def dataset(images: np.ndarray, labels: np.ndarray) -> Dataset:
        return Dataset.from_dict({"pixel_values": images.tolist(), "labels": labels.tolist()})

    return dataset(pixels, labels), dataset(images, wrong)


@pytest.mark.slow
def test_planted_rows_of_a_network(quick_trainings: None, tmp_path: Path) -> None:
    train, targets = planted()
    n = len(train)

    def make_trainer(rows: Any, seed: int) -> Trainer:
        arguments = TrainingArguments(
            str(tmp_path / "unused"), per_device_train_batch_size=n, max_steps=10, learning_rate=3e-2, seed=seed,
            optim="adamw_torch", use_cpu=True, report_to="none", save_strategy="no",
            logging_strategy="no",
        )  # fmt: skip
        return Trainer(DigitNet(), arguments, train_dataset=rows)

    retrain = TrainerRetraining(make_trainer, train, targets, "image_classification", drop="mask", seed=0)
    _, outputs = masks_and_outputs(retrain_on_subsets(leave_one_out_subsets(n), retrain, tmp_path / "one"))
    exact = outputs[0] - outputs[1:]
    supporting = [{BASE + copy * SHOWN + j for copy in range(COPIES)} for j in range(SHOWN)]
    assert [set(np.argsort(-exact[:, j])[:COPIES]) for j in range(SHOWN)] == supporting
    pixels, shown = (np.array(rows["pixel_values"]).reshape(len(rows), -1) for rows in (train, targets))
    lengths = np.linalg.norm(pixels, axis=1)[:, None] * np.linalg.norm(shown, axis=1)
    cosines = pixels @ shown.T / lengths
    same_class = np.array(train["labels"])[:, None] == (np.array(targets["labels"]) + 5) % 10
    fraction = COPIES / n
    plan = removal_plan(
        {"exact": exact}, [fraction], controls={"cosine": cosines, "same class": same_class}, random_draws=3
    )
    retrained = retrain_on_subsets(plan.masks, retrain, tmp_path / "removal")
    result = evaluate_removal(plan, *masks_and_outputs(retrained))
    exact_effect = result.effect("exact", fraction)
    assert exact_effect.own.value < -1  # an odds ratio of e
    assert all(difference.high < -1 for difference in exact_effect.against.values())
    assert exact_effect.others is not None and abs(exact_effect.others.value) < 0.1 * abs(exact_effect.own.value)
    assert result.effect("cosine", fraction).own.low > 0  # what looks most like the target spoke against its label
    assert not any("Controls" in note for note in result.notes)
