"""What removals did: changes of outputs by method and control, with intervals and paired differences.

For a target j and the rows that a method removed for it, three numbers tell whether "these rows did it":

    own       f_j(without the rows) − f_j(all rows): negative if the rows supported the output
    others    the mean of the same change over the other targets: far from 0 if the removal harms everything
    specific  own − others

Negative differences to a control mean that the method's rows mattered more. Intervals resample targets and, for random
removal, its draws, independently of each other (Owen 2007, The pigeonhole bootstrap). All methods and controls use the
same resamples, so that differences are paired.
"""

import numpy as np
from numpy.typing import ArrayLike

from hf_trak.errors import NonFiniteError
from hf_trak.evaluation.intervals import RESAMPLES, check_interval
from hf_trak.evaluation.removal_result import MeanChanges, RemovalEffect, RemovalResult
from hf_trak.evaluation.retraining import check_masks
from hf_trak.evaluation.tail_removal import RANDOM, RemovalPlan

_ENOUGH_CONTROLS = 3
_ENOUGH_TARGETS = 10


def evaluate_removal(
    plan: RemovalPlan,
    masks: ArrayLike,
    outputs: ArrayLike,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> RemovalResult:
    """Compare the changes of outputs that the removals of a plan caused.

    Args:
        plan (`RemovalPlan`):
            The plan.
        masks (`ArrayLike` of shape `(s, n)`):
            Subsets that were trained on, true where a training row belongs to one. Those of the plan must be among
            them, in any order; others are not used, and a subset that occurs several times is averaged.
        outputs (`ArrayLike` of shape `(s, m)`):
            The model output on every target after training on each subset.
        confidence (`float`, *optional*, defaults to 0.95):
            Confidence level of the intervals.
        resamples (`int`, *optional*, defaults to 1000):
            Number of bootstrap samples.
        seed (`int`, *optional*, defaults to 0):
            Seed of the bootstrap.

    Returns:
        [`RemovalResult`]: mean changes, differences to each control, and a table of both.

    Raises:
        ValueError: shapes do not fit, a subset of the plan was not trained on, or `confidence` or `resamples` is out
            of range.
        NonFiniteError: an output is NaN or infinite.
    """
    check_interval(confidence, resamples)
    measured = _outputs_of_plan(plan, masks, outputs)
    own, others = _changes(plan, measured - measured[0])
    rng = np.random.default_rng(seed)
    targets = _resampling_weights(len(plan.targets), resamples, rng)
    draws = {
        1: np.ones((resamples, 1)),
        (count := len(plan.subsets[RANDOM][0])): _resampling_weights(count, resamples, rng),
    }
    means = {name: MeanChanges.of(values, targets, draws[values.shape[2]]) for name, values in own.items()}
    elsewhere = {name: MeanChanges.of(values, targets, draws[values.shape[2]]) for name, values in others.items()}

    def effect(at: int, name: str) -> RemovalEffect:
        other = elsewhere.get(name)
        compared = plan.controls if name in plan.methods else ()
        return RemovalEffect(
            name,
            plan.fractions[at],
            plan.counts[at],
            own=means[name].interval(at, confidence),
            others=None if other is None else other.interval(at, confidence),
            specific=None if other is None else (means[name] - other).interval(at, confidence),
            against={control: (means[name] - means[control]).interval(at, confidence) for control in compared},
        )

    names = (*plan.methods, *plan.controls)
    return RemovalResult(
        plan,
        effects=tuple(effect(at, name) for at in range(len(plan.fractions)) for name in names),
        changes={name: own[name].mean(axis=2) for name in names},
        notes=tuple(_notes(plan)),
        confidence=confidence,
        _means=means,
    )


def _outputs_of_plan(plan: RemovalPlan, masks: ArrayLike, outputs: ArrayLike) -> np.ndarray:
    """Find the outputs of the plan's subsets, in its order, `(s, m)`."""
    member, values = check_masks(masks), np.asarray(outputs, dtype=np.float64)
    n, m = plan.shape
    if member.shape[1] != n or values.shape != (len(member), m):
        remedy = ""
        if values.shape == (m, len(member)):
            remedy = " `outputs` looks transposed: pass its `.T`."
        elif member.shape == (n, len(values)):
            remedy = " `masks` looks transposed: pass its `.T`."
        raise ValueError(
            f"`masks` has the shape {member.shape}, `outputs` {values.shape}. Expected (s, {n}) and (s, {m}), as the "
            f"plan has {n} training rows and {m} targets.{remedy}"
        )
    if not np.isfinite(values).all():
        row, column = np.argwhere(~np.isfinite(values))[0]
        raise NonFiniteError(
            f"`outputs` holds NaN or infinite values, the first for subset {row} and target {column}. Expected finite "
            "ones. Check whether that training diverged."
        )
    places: dict[bytes, list[int]] = {}
    for place, packed in enumerate(np.packbits(member, axis=1)):
        places.setdefault(packed.tobytes(), []).append(place)
    found = [places.get(packed.tobytes(), []) for packed in np.packbits(plan.masks, axis=1)]
    if missing := [number for number, of_subset in enumerate(found) if not of_subset]:
        raise ValueError(
            f"`masks` lacks {len(missing)} of the plan's {len(found)} subsets, the first being subset {missing[0]}. "
            "Expected all of `plan.masks`, the first of which is the whole training set. Train on those, too."
        )
    return np.stack([values[of_subset].mean(axis=0) for of_subset in found])


def _changes(plan: RemovalPlan, changes: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Arrange the changes `(s, m)` of own targets and of the others, by name `(F, T, draws)`; a method has one draw.

    The second is empty if there is one target alone.
    """
    targets, m = np.array(plan.targets), plan.shape[1]
    own, others = {}, {}
    for name, of_fractions in plan.subsets.items():
        numbers = np.array(of_fractions)
        # random: (F, 1, draws), for all targets; else (F, T, 1)
        numbers = numbers[:, None, :] if name == RANDOM else numbers[:, :, None]
        own[name] = changes[numbers, targets[None, :, None]]
        if m > 1:
            others[name] = (changes[numbers].sum(axis=-1) - own[name]) / (m - 1)
    return own, others


def _resampling_weights(count: int, resamples: int, rng: np.random.Generator) -> np.ndarray:
    """Draw how often each of `count` values is in each bootstrap sample, as shares of 1, `(resamples, count)`."""
    return rng.multinomial(count, np.full(count, 1 / count), size=resamples) / count


def _notes(plan: RemovalPlan) -> list[str]:
    notes = []
    if len(plan.controls) < _ENOUGH_CONTROLS:
        notes.append(
            f"Controls: {len(plan.controls)} ({', '.join(plan.controls)}), fewer than {_ENOUGH_CONTROLS}. Without "
            "others, such as similarity of embeddings or BM25, rows that merely look like a target are not told from "
            "rows that caused its output."
        )
    if len(plan.targets) < _ENOUGH_TARGETS:
        notes.append(
            f"Targets: {len(plan.targets)}, fewer than {_ENOUGH_TARGETS}. Intervals resample them, and are too narrow "
            "for so few."
        )
    for name, of_fractions in plan.tied.items():
        tied = [(count, number) for count, number in zip(plan.counts, of_fractions, strict=True) if number]
        if tied:
            counted = ", ".join(f"{number} of {len(plan.targets)} targets at {count} rows" for count, number in tied)
            notes.append(
                f"{name} has rows of equal scores on both sides of the cut ({counted}). They were drawn at random."
            )
    return notes
