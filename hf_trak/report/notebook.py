"""The view of one target in a notebook."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from datasets import Dataset

from hf_trak.curvature.conjugate_gradients import Refinement
from hf_trak.data.rows import RowPart
from hf_trak.featurize.exact import ExactScores
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.report.distributions import ScoreDistributions
from hf_trak.report.page import target_page
from hf_trak.report.run import AttributionRun, score_distributions, top_k_range
from hf_trak.report.views import RunViews
from hf_trak.scores.scored_dataset import TOP_K_COLUMNS


def exact_distributions(
    attributor: FeaturizedModel,
    scored: Dataset,
    eval_dataset: Any,
    name: str | None = None,
    model_ids: Sequence[int] | None = None,
    *,
    rows: RowPart | None = None,
    refinement: Refinement | None = None,
) -> ScoreDistributions:
    """Count the exact scores of the targets in bins, from the files that `attribute` wrote.

    Args:
        attributor, scored, eval_dataset, name, model_ids:
            As for [`~hf_trak.report.run.score_distributions`], of a result of `attribute(..., exact=True)` or
            `attribute(..., rerank=...)`.
        rows (`RowPart`, *optional*):
            The rows that were reranked; `None` for all.
        refinement (`Refinement`, *optional*):
            How the targets were refined, if they were.

    Returns:
        `ScoreDistributions`: one distribution per target.
    """
    blocks = ExactScores(attributor, rows, refinement).plan(eval_dataset, name, None, model_ids).blocks
    return ScoreDistributions.from_blocks(blocks, *top_k_range(scored))


@dataclass
class LastResult:
    """The last result of `attribute(..., per="target")` and what it was computed from."""

    scored: Dataset
    eval_dataset: Any
    name: str
    model_ids: Sequence[int] | None
    distributions: ScoreDistributions | None = None
    """Counted when they are needed for the first time."""


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
        IndexError: there is no such target.
        ValueError: `scored` is no such result, or a column does not exist.
    """
    if not 0 <= index < len(scored):
        raise IndexError(f"There is no target {index}. Expected 0 … {len(scored) - 1}.")
    # Select the row first, so that full score lists of the other targets are not read.
    rows = None if eval_dataset is None or isinstance(eval_dataset, Dataset) else [eval_dataset[index]]
    alone = None if distributions is None else distributions.select([index])
    run = AttributionRun.collect(attributor, scored.select([index]), rows, distributions=alone)
    views = RunViews(run, examples, columns)
    view = views.target(0, shown_as=index)
    return TargetDisplay(target_page(view, views.book.pictures), "\n".join(view.lines))


def show_last(attributor: FeaturizedModel, last: LastResult | None, index: int, **options: Any) -> TargetDisplay:
    """Show one target of the last result, see [`show_target`].

    Args:
        attributor (`FeaturizedModel`):
            The attributor.
        last (`LastResult`, *optional*):
            Its last result. Missing distributions of top-k results are counted and kept.
        index (`int`):
            The target.
        options:
            As for [`show_target`].

    Raises:
        IndexError: there is no such target.
        ValueError: there is no result yet, or as in [`show_target`].
    """
    if last is None:
        raise ValueError(
            "There is nothing to show yet. Expected a result of `attribute`. Call it with `per='target'`."
        )
    if last.distributions is None and TOP_K_COLUMNS[0] in last.scored.column_names:
        last.distributions = score_distributions(attributor, last.scored, last.eval_dataset, last.name, last.model_ids)
    return show_target(
        attributor, last.scored, index, eval_dataset=last.eval_dataset, distributions=last.distributions, **options
    )
