"""Distributions of exact scores, which are on disk once they are computed."""

from collections.abc import Sequence
from typing import Any

from datasets import Dataset

from hf_trak.curvature.refinement import Refinement
from hf_trak.data.row_part import RowPart
from hf_trak.featurize.exact import ExactScores
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.report.distributions import ScoreDistributions
from hf_trak.report.run import top_k_range


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
