"""Distributions of the exact scores of a reranked result, over the rows that were reranked."""

from collections.abc import Sequence
from typing import Any

from datasets import Dataset

from hf_trak.data.row_part import RowPart
from hf_trak.featurize.exact import ExactScores
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.report.distributions import ScoreDistributions
from hf_trak.report.run import top_k_range


def reranked_distributions(
    attributor: FeaturizedModel,
    scored: Dataset,
    rows: RowPart,
    eval_dataset: Any,
    name: str | None = None,
    model_ids: Sequence[int] | None = None,
) -> ScoreDistributions:
    """Count the exact scores of the rows that were reranked, from the files that `attribute(..., rerank=...)` wrote.

    Args:
        attributor, scored, eval_dataset, name, model_ids:
            As for [`~hf_trak.report.run.score_distributions`], of a result of `attribute(..., rerank=...)`.
        rows (`RowPart`):
            The rows that were reranked.

    Returns:
        `ScoreDistributions`: one distribution per target.
    """
    blocks = ExactScores(attributor, rows).plan(eval_dataset, name, None, model_ids).blocks
    return ScoreDistributions.from_blocks(blocks, *top_k_range(scored))
