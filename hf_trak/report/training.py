"""What training rows did to the loss of a validation set: the content of the report of a training.

The question has one target, minus the mean loss of the validation rows, so that the answer costs a single replay of
the recorded run, or one pass of exact scores. The effect of a row is the change of that loss by training on the row.
"""

import html
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from datasets import ClassLabel, Dataset, Value
from torch.nn.functional import normalize

from hf_trak.errors import HfTrakError, StoreError
from hf_trak.evaluation.intervals import Interval, Result, mean_interval
from hf_trak.evaluation.review import (
    MOST_FALSE_DOUBTS,
    doubted_labels,
    doubting_seconds,
    outputs_without,
    repeated_rows,
    trained_classes,
    with_row_labels,
    without_effect,
)
from hf_trak.evaluation.trainer_retraining import TrainerRetraining
from hf_trak.evaluation.validation_loss import loss_question, rows_with_loss, validation_losses
from hf_trak.featurize.answering import planned
from hf_trak.featurize.calibration import named
from hf_trak.featurize.choosing import MINUTE, doubt, leave_alone, seconds_of
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.featurize.pricing import price, recorded_run
from hf_trak.featurize.run_replaying import RunReplay
from hf_trak.methods import Exact, Method, Replay, checked_method
from hf_trak.modelout_functions.loss import MinusLossModelOutput
from hf_trak.modelout_functions.trainer_loss import TrainerLossModelOutput
from hf_trak.runtime.progress import duration, say
from hf_trak.scores.groups import GroupBy, RowGroups

logger = logging.getLogger(__name__)

SOURCE = "source"
"""The column of training rows that is taken for their source, unless another is named."""

MOST_DOUBTED = 256
"""Rows, the most harmful first, whose labels are compared with what other rows say."""

MOST_COMPARED = 256
"""Rows, those with the largest effects, whose features are compared with those of all rows."""

_ALIKE = 0.01
"""Share of pairs of rows that features call near duplicates above which they tell none."""

NEAR = 0.995
"""Cosine of the features of two rows from which on they are near duplicates."""

_PAIRED = 64
"""Rows drawn at random, whose features are compared to see whether a cosine tells near duplicates."""

LOGGED = 20
"""Rows of either end in the tables that a trainer logs."""

PROVED = 0.05
"""Share of the training rows, the most harmful ones, that a proof leaves out."""


@dataclass(frozen=True)
class GroupEffect(Result):
    """What the training rows of a source or a label did together.

    Attributes:
        value (`str`): the source or the label.
        rows (`int`): number of training rows.
        effect (`float`): sum of their effects.
    """

    value: str
    rows: int
    effect: float

    @property
    def each(self) -> float:
        """Return the mean effect of a row."""
        return self.effect / self.rows


@dataclass(frozen=True)
class LossProof(Result):
    """Two trainings, one without the most harmful rows and one without as many random ones.

    Attributes:
        removed (`int`): how many rows each left out.
        predicted (`float`): change of the validation loss without the harmful rows, by their effects; NaN where these
            are relative.
        measured (`Interval`): the same change, measured, with its interval over the validation rows.
        predicted_random (`float`): predicted change without the random rows.
        measured_random (`Interval`): measured change without them.
        difference (`Interval`): measured change without the harmful rows minus that without the random ones. The
            intervals tell these models apart, and leave out that other random rows make another model.
    """

    removed: int
    predicted: float
    measured: Interval
    predicted_random: float
    measured_random: Interval
    difference: Interval

    @property
    def verdict(self) -> str:
        """Say whether the model is better without the most harmful rows than without random ones."""
        found = "no better"
        if self.difference.high < 0:
            found = "better"
        elif self.difference.low > 0:
            found = "worse"
        advice = "" if found == "better" else " Do not remove rows by these effects."
        return (
            f"Without the rows named most harmful the model is {found} than without random ones, in this one "
            f"comparison.{advice}"
        )

    def __str__(self) -> str:
        def change(measured: Interval, predicted: float) -> str:
            said = "" if math.isnan(predicted) else f", predicted {predicted:+.3g}"
            return f"{measured.value:+.3g} ({measured.low:+.3g} to {measured.high:+.3g}){said}"

        return (
            f"without the {self.removed} most harmful rows the validation loss changes by "
            f"{change(self.measured, self.predicted)}; without as many random rows by "
            f"{change(self.measured_random, self.predicted_random)}"
        )


@dataclass(frozen=True)
class TrainingReport(Result):
    """What training rows did to the mean loss of a validation set. `str()` says the most of it in a few lines.

    Attributes:
        losses (`np.ndarray` of shape `(m,)`): loss of each validation row, or per label where rows have several.
        effects (`np.ndarray` of shape `(n,)`): change of this loss by training on each row. Positive: the row harms.
        relative (`bool`): whether effects are divided by the largest, since they are impossible as changes of a loss.
        sources (`tuple[GroupEffect, ...]`): sources of rows, the most harmful first; empty without any.
        labels (`tuple[GroupEffect, ...]`): labels of rows in the same way.
        doubted (`dict[int, str]`): rows that have probably a wrong label, and the label that fits better.
        doubts (`int`): number of the rows, the most harmful ones, whose labels were looked at.
        repeated (`dict[int, int]`): rows that are the same as an earlier one, apart from the label, and that row.
        near (`tuple[tuple[int, int, float], ...]`): near duplicates among rows of large effect: a row, another one,
            and the cosine of their features. A sentence that says why, where features cannot tell.
        no_effect (`float`): share of the rows without effect.
        settings (`dict[str, float]`): change of the loss by 10 % more learning rate and weight decay, where a replay
            of the run tells.
        method (`str`): how effects were computed.
        passes (`float`): what that took, in forward and backward passes over the training rows.
        seconds (`float`): and in time.
        validation (`str`): fingerprint of the validation rows.
        proof ([`LossProof`], *optional*): what two trainings say.
        false_doubts (`float`): share of the doubted labels that are right, as far as 64 validation rows tell.
        warnings (`tuple[str, ...]`): what makes the numbers of a replay doubtful, and the remedy.
        earlier (`TrainingReport`, *optional*): that of a training before, such as one whose rows were not fixed yet.
    """

    losses: np.ndarray
    effects: np.ndarray
    sources: tuple[GroupEffect, ...]
    labels: tuple[GroupEffect, ...]
    doubted: dict[int, str]
    doubts: int
    repeated: dict[int, int]
    near: tuple[tuple[int, int, float], ...] | str
    no_effect: float
    settings: dict[str, float]
    method: str
    passes: float
    seconds: float
    validation: str
    proof: LossProof | None = None
    false_doubts: float = 0.0
    warnings: tuple[str, ...] = ()
    earlier: "TrainingReport | None" = None
    relative: bool = False

    @property
    def loss(self) -> float:
        """Return the mean loss of the validation set."""
        return float(self.losses.mean())

    @property
    def compared(self) -> list[tuple[str, str, str]]:
        """List a name, what was of the earlier training, and what is now; empty without an earlier one.

        Sums of sources and labels are left out where effects are relative, in either report. They and doubted labels
        are, where the effects of one report were computed by another method than those of the other.
        """
        if (earlier := self.earlier) is None:
            return []
        change = mean_interval(self.losses - earlier.losses)
        loss = f"{self.loss:.4g} ({change.value:+.3g}, {change.low:+.3g} to {change.high:+.3g})"
        found = [
            ("validation loss", f"{earlier.loss:.4g}", loss),
            ("training rows", f"{len(earlier.effects):,}", f"{len(self.effects):,}"),
            ("duplicates", f"{len(earlier.repeated):,}", f"{len(self.repeated):,}"),
        ]
        if earlier.method != self.method:
            return [*found, ("effects, which do not compare", f"by {earlier.method}", f"by {self.method}")]
        if self.labels:
            found.append(("doubted labels", f"{len(earlier.doubted):,}", f"{len(self.doubted):,}"))
        if earlier.relative or self.relative:  # sizes of two units, or of none
            return found
        for kind, before, after in (("source", earlier.sources, self.sources), ("label", earlier.labels, self.labels)):
            was, now = ({one.value: f"{one.effect:+.3g}" for one in groups} for groups in (before, after))
            found += [(f"{kind} {name}", was.get(name, "no row"), now.get(name, "no row")) for name in {**was, **now}]
        return found

    @property
    def impossible(self) -> str:
        """Say that effects are relative, and why; empty if they are not."""
        if not self.relative:
            return ""
        return (
            f"Without the {self.removed:,} most harmful rows, effects would predict a loss that is below 0, where no "
            "such loss can be. They are given relative to the largest, and only their order tells something."
        )

    @property
    def removed(self) -> int:
        """Return how many of the most harmful rows a proof leaves out."""
        return max(1, round(PROVED * len(self.effects)))

    def scaled(self) -> "TrainingReport":
        """Return the report, with effects relative to the largest if a loss without harmful rows were below 0.

        Derivatives of such a loss are as wrong, and what another learning rate would change is left out.
        """
        left = self.loss - float(self.effects[self.harmful(self.removed)].sum())
        if self.loss < 0 or left >= 0:
            return self
        by = float(np.abs(self.effects).max())
        groups = [
            tuple(replace(one, effect=one.effect / by) for one in given) for given in (self.sources, self.labels)
        ]
        effects = self.effects / by
        proof = self.proof and replace(self.proof, predicted=math.nan, predicted_random=math.nan)
        return replace(
            self, effects=effects, sources=groups[0], labels=groups[1], settings={}, proof=proof, relative=True
        )

    @property
    def rough_doubts(self) -> str:
        """Say how many doubted labels may be right; empty if few are."""
        if self.false_doubts <= MOST_FALSE_DOUBTS:
            return ""
        return (
            "This test does not tell wrong labels of this model, since it doubts those of validation rows, too: about "
            f"{self.false_doubts:.0%} of the doubted labels may well be right. Do not relabel by it."
        )

    @property
    def price(self) -> str:
        """Say what the effects have cost."""
        passes = f"{self.passes:.3g}"
        return f"{passes} pass{'' if passes == '1' else 'es'} over the training rows, {duration(self.seconds)}"

    def logs(self) -> dict[str, float | str]:
        """Return numbers, and tables in Markdown, for [`~transformers.Trainer.log`]."""
        found: dict[str, float | str] = {
            "report/validation_loss": self.loss,
            "report/no_effect": self.no_effect,
            **({"report/doubted_labels": float(len(self.doubted))} if self.labels else {}),
            "report/repeated_rows": float(len(self.repeated)),
            **{f"report/10 % more {name}": change for name, change in self.settings.items()},
        }
        tables = {"sources": self.sources, "labels": self.labels}
        for name, groups in tables.items():
            cells = [(_cell(one.value), f"{one.rows:,}", f"{one.effect:+.3g}", f"{one.each:+.3g}") for one in groups]
            found |= _table(f"report/{name}", (name, "rows", "effect", "per row"), cells)
        ends = [*self.harmful(LOGGED), *reversed(self.helpful(LOGGED))]
        found |= _table("report/rows", ("row", "effect"), [(str(row), f"{self.effects[row]:+.3g}") for row in ends])
        doubted = sorted(self.doubted, key=lambda row: -self.effects[row])[:LOGGED]
        rows = [(str(row), f"{self.effects[row]:+.3g}", _cell(self.doubted[row])) for row in doubted]
        found |= _table("report/wrong_labels", ("row", "effect", "fits better"), rows)
        if (proof := self.proof) is not None:
            found["report/proof"] = str(proof)
        return found

    def harmful(self, count: int) -> list[int]:
        """List the rows that raised the loss most, the most harmful first."""
        order = np.argsort(-self.effects, kind="stable")[:count]
        return [int(row) for row in order if self.effects[row] > 0]

    def helpful(self, count: int) -> list[int]:
        """List the rows that lowered the loss most, the most helpful first."""
        order = np.argsort(self.effects, kind="stable")[:count]
        return [int(row) for row in order if self.effects[row] < 0]

    def __str__(self) -> str:
        def listed(rows: list[int]) -> str:
            return ", ".join(f"row {row} ({self.effects[row]:+.3g})" for row in rows) or "no row"

        lines = [
            f"validation loss {self.loss:.4g} over {len(self.losses):,} rows; {len(self.effects):,} training "
            f"rows, {self.no_effect:.0%} without effect",
            f"by {self.method}: {self.price}",
            *([] if self.proof is None else [self.proof.verdict]),
            *self.warnings,
            f"raised the loss most: {listed(self.harmful(5))}",
            f"lowered it most: {listed(self.helpful(5))}",
        ]
        if self.proof is None and self.harmful(1):
            lines.append("the largest are exaggerated most: do not remove rows without a proof (`make_trainer`)")
        for name, groups in (("sources", self.sources), ("labels", self.labels)):
            if groups:
                lines.append(f"{name}: " + ", ".join(f"{one.value} ({one.effect:+.3g})" for one in groups[:8]))
        if self.labels:
            doubted = "doubted" if self.rough_doubts else "probably wrong"
            lines.append(f"{doubted} labels: {len(self.doubted)}; repeated rows: {len(self.repeated)}")
        else:
            lines.append(f"repeated rows: {len(self.repeated)}; labels are looked at where a row has one class")
        lines += [self.rough_doubts] if self.rough_doubts else []
        for name, change in self.settings.items():
            lines.append(f"10 % more {name} changes the loss by {change:+.3g}, as far as its derivative tells")
        lines += [self.impossible] if self.impossible else []
        lines += [f"{name}: {before} before, {now} now" for name, before, now in self.compared]
        return "\n".join([*lines, *([] if self.proof is None else [str(self.proof)])])


def effects_of_training(
    features: FeaturizedModel,
    eval_dataset: Any,
    method: Method = "auto",
    train_group_by: GroupBy | None = None,
    make_trainer: Callable[[Any, int], Any] | None = None,
    earlier: TrainingReport | None = None,
) -> TrainingReport:
    """Compute the content of a report, see [`~hf_trak.report.training_report`]. All processes call this.

    Args:
        features: the model after the training, and its training rows.
        eval_dataset, method, train_group_by, make_trainer, earlier: as there.

    Raises:
        TypeError: the task has no loss of every row, or the training rows are no `datasets.Dataset`.
        ValueError: the method is neither exact nor a replay, the training rows cannot be grouped, or the earlier
            report has other validation rows.
        All that the method raises.
    """
    rows = features.train_dataset
    if not isinstance(rows, Dataset):
        raise TypeError(
            f"The training rows are a {type(rows).__name__}. Expected a `datasets.Dataset`, whose columns are "
            "reported. Convert them, such as with `Dataset.from_list`."
        )
    if train_group_by is None and _has_sources(rows):
        train_group_by = SOURCE
    sources = None if train_group_by is None else RowGroups.of(rows, train_group_by, "train_group_by")
    chosen, near_by = _method(features, method), features
    features = with_row_labels(features.as_trained("training_report"))
    eval_dataset = rows_with_loss(features, eval_dataset)
    question = loss_question(features, eval_dataset)
    if earlier is not None and earlier.validation != question.fingerprint:
        raise ValueError(
            f"The earlier report has other validation rows than `eval_dataset`, which has {len(eval_dataset):,}. "
            "Expected the same rows with the same columns, whose losses are compared. Pass those of that report."
        )
    losses, scale = validation_losses(features, eval_dataset)
    texts = list[str]()
    try:
        priced = price(features, chosen, 1, question.ids)
    except HfTrakError as error:
        if method != "auto" or isinstance(error, StoreError) or not isinstance(chosen, Replay):
            raise
        texts, chosen = [f"The recorded run is left alone, and EK-FAC is taken. {error}"], Exact("ekfac")
        priced = price(features, chosen, 1, question.ids)
    passes = priced.passes * features.processes.num_processes / len(rows)
    exact = chosen if isinstance(chosen, Exact) else Exact()
    spent = seconds_of(features, chosen, 1, question.ids)
    of_doubts = doubting_seconds(features, exact, min(MOST_DOUBTED, len(rows) // 2), fit=exact is not chosen)
    if spent is not None and features.processes.is_main_process:
        text = (
            f"The report takes {named(chosen)}, {passes:.1f} passes over {len(rows):,} rows: about {duration(spent)}"
        )
        text += f", and {duration(of_doubts)} for labels that may be wrong" if of_doubts else ""
        text += "." if make_trainer is None else "; the proof trains twice."
        if spent + of_doubts > MINUTE:
            logger.warning("%s", text)
        else:
            say(logger, text)
    begun = time.monotonic()
    while (
        method == "auto" and isinstance(chosen, Replay) and (doubts := doubt(features, question, chosen)) is not None
    ):
        leave_alone(near_by, chosen)
        convex = chosen.products == "hessian"
        texts.insert(
            0,
            f"The recorded run is {'replayed by its Gauss-Newton matrix' if convex else 'left alone'}, since its "
            f"replay speaks against itself{'' if convex else ', and EK-FAC is taken'}. {doubts}",
        )
        chosen = replace(chosen, form="gauss-newton") if convex else Exact("ekfac")
        passes += price(features, chosen, 1, question.ids).passes * features.processes.num_processes / len(rows)
    plan = planned(features, question, chosen)
    plan = replace(plan, warnings=tuple(texts)) if texts else plan
    scores = torch.cat([block[:, 0].double() for _, _, block in plan.blocks]).numpy()
    seconds, settings = time.monotonic() - begun, dict[str, float]()
    if isinstance(chosen, Replay) and chosen.of == "run":
        changes = RunReplay(features, chosen).sensitivities(question)
        settings = {name: -change / scale for name, (change, _) in changes.items() if change}
    effects = -scores / scale / (len(rows) if isinstance(chosen, Exact) else 1)
    column = trained_classes(features)
    labels = None if column is None else RowGroups.of(rows, column)
    kind = None if column is None else rows.features[column]
    harmful = np.sort(np.argsort(-effects, kind="stable")[: min(MOST_DOUBTED, int((effects > 0).sum()))])
    doubted, false_doubts = doubted_labels(features, harmful, eval_dataset, exact)
    repeated = repeated_rows(features.row_batches(rows, "train"), column)
    found = TrainingReport(
        losses=losses,
        effects=effects,
        sources=() if sources is None else _of_groups(sources, effects, rows.features.get(sources.column)),
        labels=() if labels is None else _of_groups(labels, effects, kind),
        doubted={row: _name(other, kind) for row, other in doubted.items()},
        doubts=0 if labels is None else len(harmful),
        repeated=repeated,
        near=_near(near_by, effects, repeated),
        no_effect=float(without_effect(effects).mean()),
        settings=settings,
        method=_described(chosen),
        passes=passes,
        seconds=seconds,
        validation=question.fingerprint,
        false_doubts=false_doubts,
        warnings=plan.warnings,
        earlier=earlier,
    )
    harmful_rows = found.harmful(found.removed)
    if make_trainer is None or not harmful_rows:
        return found.scaled()
    task = MinusLossModelOutput(of=features.task)  # type: ignore[arg-type]  # `loss_question` has looked
    retraining = TrainerRetraining(
        make_trainer, rows, eval_dataset, task, features.data_collator, _batch_size(features), drop="mask"
    )
    (random,), without, (control,) = outputs_without(harmful_rows, retraining, features.args.seed)
    changed, changed_random = -without / scale - losses, -control / scale - losses
    proof = LossProof(
        removed=len(harmful_rows),
        predicted=-float(effects[harmful_rows].sum()),
        measured=mean_interval(changed),
        predicted_random=-float(effects[random].sum()),
        measured_random=mean_interval(changed_random),
        difference=mean_interval(changed - changed_random),
    )
    return replace(found, proof=proof).scaled()


def _method(features: FeaturizedModel, method: Method) -> Exact | Replay:
    """Choose how the loss of a whole validation set is answered for."""
    if method == "auto":
        return recorded_run(features) or Exact("ekfac")
    chosen = checked_method(method)
    if isinstance(chosen, Replay) or (isinstance(chosen, Exact) and chosen.curvature != "hybrid"):
        return chosen
    raise ValueError(
        f"`method` is {method!r}. Expected 'auto', 'exact' or 'replay', or `Exact(...)` or `Replay(...)` of "
        "`hf_trak`, whose scores are changes of a loss. Use `attribute` for others."
    )


def _has_sources(rows: Dataset) -> bool:
    """Tell whether the column of sources groups rows: translations have one of that name with texts, or lists."""
    kind = rows.features.get(SOURCE)
    flat = isinstance(kind, ClassLabel) or (isinstance(kind, Value) and not pa.types.is_floating(kind.pa_type))
    return flat and len(rows.unique(SOURCE)) <= len(rows) / 2


def _batch_size(features: FeaturizedModel) -> int:
    """Return the rows that the model takes at a time: one for a loss of a trainer's own, which may need it."""
    return 1 if isinstance(features.task, TrainerLossModelOutput) else features.args.batch_size


def _of_groups(groups: RowGroups, effects: np.ndarray, kind: Any) -> tuple[GroupEffect, ...]:
    """Add up effects by groups, the most harmful first."""
    sums = np.bincount(groups.member.numpy(), weights=effects, minlength=len(groups))
    order = np.argsort(-sums, kind="stable")
    return tuple(GroupEffect(_name(groups.values[i], kind), int(groups.sizes[i]), float(sums[i])) for i in order)


def _name(value: Any, kind: Any) -> str:
    """Return a label or another value as text."""
    named = isinstance(kind, ClassLabel) and isinstance(value, int) and 0 <= value < len(kind.names)
    return str(kind.names[value]) if named else str(value)


def _near(
    features: FeaturizedModel, effects: np.ndarray, repeated: dict[int, int]
) -> tuple[tuple[int, int, float], ...] | str:
    """Find, for the rows of the largest effects, the row of the most similar features, if it is a near duplicate.

    Opposite features are no duplicates: the outputs of two classes have such.
    """
    ids = features.store.model_ids
    shards = features.store.train(ids[-1]) if ids else None
    if shards is None or shards.unwritten():
        return "Near duplicates take features: call `featurize` first."

    def directions(rows: Any) -> torch.Tensor:
        inside = [rows[(rows >= shard.start) & (rows < shard.stop)] - shard.start for shard in shards]
        return normalize(torch.cat([shard.grads[own] for shard, own in zip(shards, inside, strict=True)]).float())

    first = torch.tensor([repeated.get(row, row) for row in range(len(effects))])
    drawn = torch.from_numpy(np.sort(np.random.Generator(np.random.Philox(0)).permutation(len(effects))[:_PAIRED]))
    some, (left, right) = directions(drawn), torch.triu_indices(len(drawn), len(drawn), 1)
    alike = ((some @ some.T)[left, right] >= NEAR)[first[drawn[left]] != first[drawn[right]]]
    if len(alike) and (share := float(alike.float().mean())) > _ALIKE:
        return (
            "Near duplicates cannot be told by the features of this model, which lie along few directions, such as "
            f"one for each class: {share:.0%} of the pairs drawn at random have a cosine of {NEAR} or more."
        )
    watched = np.sort(np.argsort(-np.abs(effects), kind="stable")[:MOST_COMPARED])
    places = torch.from_numpy(watched)
    own, best, other = directions(places), torch.full((len(places),), -1.0), torch.zeros(len(places), dtype=torch.long)
    for shard in shards:
        cosines = own @ normalize(shard.grads.float()).T
        cosines[first[places][:, None] == first[shard.start : shard.stop]] = -1.0  # itself, and its exact duplicates
        values, at = cosines.max(1)
        higher = values > best
        best[higher] = values[higher]
        other[higher] = shard.start + at[higher]
    found = {
        (min(row, number), max(row, number)): cosine
        for row, number, cosine in zip(watched.tolist(), other.tolist(), best.tolist(), strict=True)
        if cosine >= NEAR
    }
    ordered = sorted(found.items(), key=lambda one: -one[1])
    return tuple((row, number, cosine) for (row, number), cosine in ordered)


def _table(name: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> dict[str, str]:
    """Make a table in Markdown by its name, unless it has no rows."""
    lines = [head, ["---"] * len(head), *rows]
    return {name: "\n".join(f"| {' | '.join(line)} |" for line in lines)} if rows else {}


def _cell(text: str) -> str:
    """Write text so that a viewer of Markdown shows it as it is, in one line."""
    return html.escape(" ".join(text.split())).replace("|", "&#124;")


def _described(method: Exact | Replay) -> str:
    """Say how effects were computed."""
    if isinstance(method, Replay):
        if method.of == "recipe":
            return "replay of the recipe"
        form = ", Gauss-Newton" if method.products == "gauss-newton" else ""
        share = f", {method.hessian_share:.0%} of its curvature" if method.hessian_share < 1 else ""
        return f"replay of the recorded run{form}{share}"
    return f"exact scores, {named(method)}"
