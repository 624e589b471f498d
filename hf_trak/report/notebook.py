"""The view of one target in a notebook."""

from contextlib import nullcontext
from dataclasses import dataclass
from html import escape
from typing import Any

from datasets import Dataset

from hf_trak.featurize.calibration import named
from hf_trak.featurize.exact import ExactScores
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.featurize.predictions import with_predicted_classes
from hf_trak.featurize.question import Answer, Question
from hf_trak.featurize.run_replaying import RunReplay
from hf_trak.methods import Combination, Exact, Index, Replay, Rerank
from hf_trak.report.content import Columns
from hf_trak.report.distributions import ScoreDistributions
from hf_trak.report.page import ReportOptions, target_page
from hf_trak.report.run import AttributionRun, checkpoint_names, top_k_range
from hf_trak.report.views import RunViews
from hf_trak.runtime.checks import is_int
from hf_trak.scores.scored_dataset import TOP_K_COLUMNS


@dataclass
class LastResult:
    """The last result of `attribute(..., per="target")`.

    Attributes:
        scored: the columns, beside the targets.
        question: what was asked.
        answer: how it was answered.
        distributions: distributions of all scores of the targets, once they are counted.
        judged: the result with the classes that a classifier gives to the targets, once they are predicted.
        check: what a retraining said of a replay, once there was one.
    """

    scored: Dataset
    question: Question
    answer: Answer
    distributions: ScoreDistributions | None = None
    check: str | None = None
    judged: Dataset | None = None

    def counted(self) -> ScoreDistributions | None:
        """Count the scores of a top-k result in bins, once; `None` for a result that has all scores."""
        if self.distributions is None and TOP_K_COLUMNS[0] in self.scored.column_names:
            self.distributions = ScoreDistributions.from_blocks(self.answer.blocks(), *top_k_range(self.scored))
        return self.distributions

    def with_classes(self, features: FeaturizedModel) -> Dataset:
        """Return the result with the class that a classifier gives to each target, by the last checkpoint asked.

        Args:
            features (`FeaturizedModel`): the model that computed the scores.
        """
        if self.judged is None:
            asked, last = self.question, self.question.ids[-1]
            if asked.groups is not None or Columns.find(self.scored).prediction is not None:
                self.judged = self.scored
                return self.judged
            replayed = isinstance(self.answer.method, Replay)  # which is about the weights that the model has
            current = replayed or last not in features.store.model_ids
            source = None if current else features.source_of(last, asked.sources)
            with nullcontext() if current else features.weights(last, source):
                self.judged = with_predicted_classes(features, self.scored, asked.eval_dataset)
        return self.judged

    def facts(self, features: FeaturizedModel) -> dict[str, Any]:
        """Say which checkpoints were asked, and what scores of whole gradients were computed with.

        Args:
            features (`FeaturizedModel`): the model that computed them.
        """
        asked = [one for one in self.question.ids if one in features.store.model_ids]
        return {"checkpoints": checkpoint_names(features, asked), **self._of_method(features)}

    def _of_method(self, features: FeaturizedModel) -> dict[str, Any]:
        """Say what stands in the place of projection and ridge."""
        method, rows = self.answer.method, self.answer.rows
        if isinstance(method, Index):
            lam = method.lambda_relative
            return {} if lam is None else {"ridge": f"{lam:g} relative"}
        if isinstance(method, Combination):
            return {"projection": f"a sum of scores: {named(method)}"}
        if isinstance(method, Replay):
            return {
                "projection": f"none: replay of the recipe, {method.products} of {method.rows} rows of each step",
                "features": features.layout.total,
                "ridge": "none: the steps of the run",
                **(RunReplay(features, method).facts(self.question) if method.of == "run" else {}),
                **({"trained again": self.check} if self.check else {}),
            }
        if isinstance(method, Rerank) and rows is None:
            return {"reranked": "nothing: the training rows are not at hand"}
        exact = ExactScores(features, method if isinstance(method, Exact) else method.exact, rows)
        refined = "" if exact.refinement is None else f", refined by {exact.refinement.describe()}"
        damping = f"damping {exact.damping:g} relative"
        if isinstance(method, Rerank):
            how, count = f"{exact.kind}{refined}, {damping}", 0 if rows is None else len(rows)
            return {"reranked": f"{count:,} rows, the first {method.rows:,} of each target and end; {how}"}
        ridge = f"; λ {features.args.curvature.hybrid_lambda:g} relative" if exact.hybrid else ""
        return {
            "projection": f"none: exact scores, {'hybrid' if exact.hybrid else exact.kind}{refined}",
            "features": features.layout.total,
            "ridge": f"{damping}{ridge}",
        }

    def run(self, features: FeaturizedModel) -> AttributionRun:
        """Combine the result with rows and facts, as a report shows them.

        Args:
            features (`FeaturizedModel`): the model that computed it.
        """
        return AttributionRun.collect(
            features,
            self.with_classes(features),
            self.question.rows,
            distributions=self.counted(),
            facts=self.facts(features),
        )


@dataclass(frozen=True)
class TargetDisplay:
    """A view that notebooks render as HTML, and everything else as text."""

    page: str
    """The HTML page."""
    text: str
    """The same in a few lines of text."""

    def _repr_html_(self) -> str:
        # The frame is sandboxed: its styles stay inside, and no script runs, whatever the page contains.
        return (
            f'<iframe sandbox srcdoc="{escape(self.page, quote=True)}" title="{escape(self.text.splitlines()[0])}" '
            'width="100%" height="560" style="border:0;resize:vertical;color-scheme:normal"></iframe>'
        )

    def __repr__(self) -> str:
        return self.text


def show_target(
    attributor: FeaturizedModel,
    scored: Dataset,
    index: int,
    *,
    eval_dataset: Any = None,
    distributions: ScoreDistributions | None = None,
    examples: int = 5,
    **columns: Any,
) -> TargetDisplay:
    """Show one target with its most helpful and most harmful training rows, as a report does.

    Args:
        attributor (`FeaturizedModel`):
            The attributor that computed the scores.
        scored (`datasets.Dataset`):
            The result of `attribute`, one row per target.
        index (`int`):
            Row of the target in `scored`.
        eval_dataset (`Dataset`, *optional*):
            The targets. Needed if they are no `datasets.Dataset`, since `scored` does not contain their rows then.
        distributions (`ScoreDistributions`, *optional*):
            Distributions of the scores of all targets. Without them no histogram is shown, unless `scored` has all
            scores.
        examples (`int`, *optional*, defaults to 5):
            Number of training rows from either end.
        columns:
            `image_column`, `text_columns`, `label_column` or `label_names`. By default they are inferred.

    Returns:
        `TargetDisplay`: displayed by notebooks.

    Raises:
        ValueError: there is no such target, `scored` is no such result, a column does not exist, or `examples` is
            below 1.
        TypeError: there is no such option.
    """
    if not is_int(index, 0) or index >= len(scored):
        raise ValueError(
            f"`target` is {index!r}. Expected the number of one of {len(scored)} targets, from 0. Give the row "
            "that it has in the result of `attribute`."
        )
    options = ReportOptions(examples=examples, **columns)
    # Select the row first, so that full score lists of the other targets are not read.
    rows = None if eval_dataset is None or isinstance(eval_dataset, Dataset) else [eval_dataset[index]]
    alone = None if distributions is None else distributions.select([index])
    run = AttributionRun.collect(attributor, scored.select([index]), rows, distributions=alone)
    views = RunViews(run, options.examples, options.columns())
    view = views.target(0, shown_as=index)
    return TargetDisplay(target_page(view, views.book.pictures), "\n".join(view.lines))
