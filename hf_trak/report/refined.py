"""Distributions of the exact scores of refined targets, over all rows or those that were reranked."""

from collections.abc import Sequence
from typing import Any

from datasets import Dataset

from hf_trak.curvature.refinement import Refinement
from hf_trak.data.row_part import RowPart
from hf_trak.featurize.exact import ExactScores
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.report.distributions import ScoreDistributions
from hf_trak.report.run import top_k_range


def refined_distributions(
    attributor: FeaturizedModel,
    scored: Dataset,
    eval_dataset: Any,
    name: str | None = None,
    model_ids: Sequence[int] | None = None,
    *,
    refinement: Refinement,
    rows: RowPart | None = None,
) -> ScoreDistributions:
    """Count the scores of refined targets in bins, from the files that `attribute(..., refine=...)` wrote.

    Args:
        attributor, scored, eval_dataset, name, model_ids:
            As for [`~hf_trak.report.run.score_distributions`], of a result of `attribute(..., refine=...)`.
        refinement (`Refinement`):
            How the targets were refined.
        rows (`RowPart`, *optional*):
            The rows that were reranked; `None` for all.

    Returns:
        `ScoreDistributions`: one distribution per target.
    """
    blocks = ExactScores(attributor, rows, refinement).plan(eval_dataset, name, None, model_ids).blocks
    return ScoreDistributions.from_blocks(blocks, *top_k_range(scored))
