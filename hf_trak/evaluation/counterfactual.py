"""Counterfactual curves: the change of the model's outputs when the rows of the highest scores are removed or added.

Order the training rows by their scores for a target, train without the first r of them (or with these alone), and look
at that target's output. A random order is the control (TRAK paper, Section 5; Ilyas et al. 2022, arXiv 2202.00622).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from datasets import Dataset
from numpy.typing import ArrayLike

from hf_trak.evaluation.intervals import Interval, mean_interval
from hf_trak.evaluation.retraining import masks_and_outputs
from hf_trak.evaluation.score_matrix import checked_matrix
from hf_trak.evaluation.subsets import group_sums
from hf_trak.scores.groups import RowGroups

Order = Literal["helpful", "harmful", "random"]
"""The rows that come first: those of the highest scores, those of the lowest, or random ones."""

Action = Literal["remove", "add"]
"""`"remove"` trains without the first r rows, `"add"` with the first r rows alone."""

MEAN = -1
"""The target number that stands for the mean over all targets."""


@dataclass(frozen=True)
class CounterfactualPlan:
    """Subsets to retrain on, for [`retrain_on_subsets`]. Subset 0 is the whole training set.

    Attributes:
        masks (`np.ndarray` of shape `(s, n)`):
            True where a training row belongs to the subset.
        order (`tuple[str, ...]`):
            The order of rows of subsets 1 … s − 1, see [`Order`].
        count (`tuple[int, ...]`):
            The number of rows (or groups) removed or added in each of them.
        target (`tuple[int, ...]`):
            The target by whose scores rows were ordered for each of them; [`MEAN`] for the mean over targets.
        action (`str`):
            See [`Action`].
    """

    masks: np.ndarray
    order: tuple[str, ...]
    count: tuple[int, ...]
    target: tuple[int, ...]
    action: Action

    def curves(self, retrained: Dataset, confidence: float = 0.95) -> "CounterfactualCurves":
        """Compute the curves from the retrainings of this plan.

        Args:
            retrained (`datasets.Dataset`):
                The result of `retrain_on_subsets(plan.masks, …)`.
            confidence (`float`, *optional*, defaults to 0.95):
                Confidence level of the intervals over targets.

        Returns:
            [`CounterfactualCurves`]: the curves.

        Raises:
            ValueError: the retrainings are of other subsets, or lack a target.
            ImportError: scipy is not installed.
        """
        masks, outputs = masks_and_outputs(retrained)
        if not np.array_equal(masks, self.masks):
            raise ValueError(
                "The retrainings are of other subsets than this plan's. Expected the result of "
                "`retrain_on_subsets(plan.masks, …)`."
            )
        if max(self.target) >= outputs.shape[1]:
            raise ValueError(
                f"The plan has target {max(self.target)}, but the retrainings have {outputs.shape[1]} targets. "
                "Expected an output for every target of the plan."
            )
        changes = outputs[1:] - outputs[0]
        own = [row.mean() if j == MEAN else row[j] for row, j in zip(changes, self.target, strict=True)]
        table = Dataset.from_dict(
            {
                "order": list(self.order),
                "count": list(self.count),
                "target": list(self.target),
                "change": [float(value) for value in own],
            }
        )
        points: dict[str, dict[int, Interval]] = {}
        for order in dict.fromkeys(self.order):
            for count in dict.fromkeys(self.count):
                keys = zip(self.order, self.count, self.target, changes, own, strict=True)
                values: list[float] = []
                for found, size, target, row, value in keys:
                    if (found, size) == (order, count):
                        values.extend(row if target == MEAN else [value])
                points.setdefault(order, {})[count] = mean_interval(values, confidence)
        return CounterfactualCurves(points, table, self.action)


@dataclass(frozen=True)
class CounterfactualCurves:
    """Changes of outputs, f(after) − f(trained on all rows).

    Attributes:
        points (`dict[str, dict[int, Interval]]`):
            By order and count, the mean change over targets with its bootstrap interval over targets.
        table (`datasets.Dataset`):
            One row per retraining, with the columns `order`, `count`, `target` and `change`.
        action (`str`):
            See [`Action`].
    """

    points: dict[str, dict[int, Interval]]
    table: Dataset
    action: Action

    def difference(self, order: str, control: str, count: int, confidence: float = 0.95) -> Interval:
        """Compare two orders target by target: the mean of the change under `order` minus that under `control`.

        Args:
            order (`str`):
                An order of the plan, such as `"helpful"`.
            control (`str`):
                Another one, such as `"random"` or the name of a control.
            count (`int`):
                Number of rows (or groups) removed or added.
            confidence (`float`, *optional*, defaults to 0.95):
                Confidence level of the interval over targets.

        Returns:
            [`Interval`]: negative for removal if the rows of `order` mattered more.

        Raises:
            ValueError: the plan has no such orders or count, or ordered rows for the mean over targets, which leaves a
                single difference.
            ImportError: scipy is not installed.
        """
        changes: dict[str, dict[int, float]] = {order: {}, control: {}}
        for row in self.table:
            if row["order"] in changes and row["count"] == count and row["target"] != MEAN:
                changes[row["order"]][row["target"]] = row["change"]
        common = sorted(changes[order].keys() & changes[control].keys())
        if not common:
            raise ValueError(
                f"There are no targets with the orders {order!r} and {control!r} and the count {count}. Expected "
                f"orders among {list(self.points)} and a count of the plan, made with `targets=`."
            )
        return mean_interval([changes[order][j] - changes[control][j] for j in common], confidence)


def counterfactual_plan(
    scores: ArrayLike,
    counts: Sequence[int],
    *,
    action: Action = "remove",
    orders: Sequence[Order] = ("helpful", "harmful", "random"),
    targets: Sequence[int] | None = None,
    groups: RowGroups | None = None,
    seed: int = 0,
    controls: Mapping[str, ArrayLike] | None = None,
) -> CounterfactualPlan:
    """Choose the subsets for removal or addition curves.

    Args:
        scores (`ArrayLike` of shape `(n, m)`):
            Scores τ of any attribution method; higher means more helpful.
        counts (`Sequence[int]`):
            The numbers r of rows (or groups).
        action (`str`, *optional*, defaults to `"remove"`):
            `"remove"` trains without the first r rows, `"add"` with the first r rows alone.
        orders (`Sequence[str]`, *optional*, defaults to `("helpful", "harmful", "random")`):
            The orders of rows, see [`Order`]. Rows of equal scores keep the order of the dataset.
        targets (`Sequence[int]`, *optional*):
            Numbers of the targets that get an order of their own, which costs `len(targets)` retrainings per point. By
            default rows are ordered once, by their mean score over all targets.
        groups (`RowGroups`, *optional*):
            Groups of training rows that are removed or added together, ordered by the sums of their scores.
        seed (`int`, *optional*, defaults to 0):
            Seed of the random order, which is the same for every count.
        controls (`Mapping[str, ArrayLike]`, *optional*):
            More orders to compare with, by name: matrices of the shape of `scores`, the highest values first, such as
            the similarity of embeddings or the scores of another method.

    Returns:
        [`CounterfactualPlan`]: the subsets.

    Raises:
        ValueError: a count, an order, the action or a target is out of range.
        NonFiniteError: a score is NaN or infinite.
    """
    tau = checked_matrix(scores, "scores")
    n, m = tau.shape
    others = {name: checked_matrix(values, f"controls[{name!r}]") for name, values in (controls or {}).items()}
    for name, values in others.items():
        if name in get_args(Order) or values.shape != tau.shape:
            raise ValueError(
                f"`controls` has {name!r} of the shape {values.shape}. Expected a name other than {get_args(Order)}, "
                f"and the shape of `scores`, {tau.shape}."
            )
    if action not in get_args(Action):
        raise ValueError(f"`action` is {action!r}. Expected one of {list(get_args(Action))}.")
    if not orders or not set(orders) <= set(get_args(Order)):
        raise ValueError(f"`orders` is {list(orders)}. Expected some of {list(get_args(Order))}.")
    units, *more = (values if groups is None else group_sums(values, groups) for values in (tau, *others.values()))
    by_control = dict(zip(others, more, strict=True))
    if not counts or not all(0 < count < len(units) for count in counts) or len(set(counts)) != len(counts):
        raise ValueError(f"`counts` is {list(counts)}. Expected distinct numbers from 1 to {len(units) - 1}.")
    chosen = [MEAN] if targets is None else list(targets)
    if not chosen or (targets is not None and not all(0 <= target < m for target in chosen)):
        raise ValueError(f"`targets` is {chosen}. Expected numbers from 0 to {m - 1}, or `None` for their mean.")
    shuffled = np.random.default_rng(seed).permutation(len(units))
    masks, keys = [np.ones(n, dtype=bool)], []
    for order in (*orders, *others):
        matrix = by_control.get(order, units)
        for target in chosen:
            values = matrix.mean(axis=1) if target == MEAN else matrix[:, target]
            first = (
                shuffled if order == "random" else np.argsort(values if order == "harmful" else -values, kind="stable")
            )
            for count in counts:
                taken = np.isin(np.arange(len(units)), first[:count])
                rows = taken if groups is None else taken[groups.member.numpy()]
                masks.append(rows if action == "add" else ~rows)
                keys.append((order, int(count), int(target)))
    named = tuple(zip(*keys, strict=True))
    return CounterfactualPlan(np.stack(masks), named[0], named[1], named[2], action)
