"""One target in a notebook."""

from dataclasses import dataclass
from html import escape
from typing import Any

from datasets import Dataset

from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.report.distributions import ScoreDistributions
from hf_trak.report.last import LastResult
from hf_trak.report.page import target_page
from hf_trak.report.run import AttributionRun, score_distributions
from hf_trak.report.views import RunViews, TargetView
from hf_trak.scores.scored_dataset import TOP_K_COLUMNS


@dataclass(frozen=True)
class TargetDisplay:
    """Shows itself in notebooks; as text elsewhere."""

    page: str
    """The HTML page."""
    text: str

    def _repr_html_(self) -> str:
        # A sandboxed frame: styles stay inside, and no script runs whatever the page holds.
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
    """The view of one target that a report has, without a report.

    Args:
        attributor: what `scored` came from.
        scored: the result of `attribute`, one row per target.
        index: the target.
        eval_dataset: the targets, for a dataset that is no `datasets.Dataset`, whose rows `scored` lacks.
        distributions: of the scores of all targets. `None` shows none, unless `scored` has all scores.
        examples: training examples from either end.
        columns: `image_column`, `text_columns`, `label_column`, `label_names`, where they are not found out.

    Raises:
        IndexError: there is no such target.
        ValueError: `scored` is no such result, or a column does not exist.
    """
    if not 0 <= index < len(scored):
        raise IndexError(f"There is no target {index}. Expected 0 … {len(scored) - 1}.")
    # One row of it, so that full score lists of the others are not read.
    rows = None if eval_dataset is None or isinstance(eval_dataset, Dataset) else [eval_dataset[index]]
    alone = None if distributions is None else distributions.select([index])
    run = AttributionRun.collect(attributor, scored.select([index]), rows, distributions=alone)
    views = RunViews(run, examples, columns)
    view = views.target(0, shown_as=index)
    return TargetDisplay(target_page(view, views.book.pictures), _text(view))


def show_last(attributor: FeaturizedModel, last: LastResult | None, index: int, **options: Any) -> TargetDisplay:
    """What `TrakAttributor.show` returns. Raises `ValueError` if there is no result yet."""
    if last is None:
        raise ValueError("There is nothing to show yet. Expected a call of `attribute` before, with `per='target'`.")
    if last.distributions is None and TOP_K_COLUMNS[0] in last.scored.column_names:
        last.distributions = score_distributions(attributor, last.scored, last.eval_dataset, last.name, last.model_ids)
    return show_target(
        attributor, last.scored, index, eval_dataset=last.eval_dataset, distributions=last.distributions, **options
    )


def _text(view: TargetView) -> str:
    lines = [view.target.alt]
    for name, side in (("helped most", view.helped), ("harmed most", view.harmed)):
        lines.append(f"  {name}: " + ", ".join(f"row {s.example.row} ({s.score})" for s in side))
    return "\n".join(lines)
