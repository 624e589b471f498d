"""Distributions of exact scores, which are on disk once they are computed."""

from collections.abc import Sequence
from typing import Any

from datasets import Dataset

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
) -> ScoreDistributions:
    """Count all exact scores of the targets in bins, from the files that `attribute(..., exact=True)` wrote.

    Args:
        attributor, scored, eval_dataset, name, model_ids:
            As for [`~hf_trak.report.run.score_distributions`], of a result of `attribute(..., exact=True)`.

    Returns:
        `ScoreDistributions`: one distribution per target.
    """
    blocks = ExactScores(attributor).plan(eval_dataset, name, None, model_ids).blocks
    return ScoreDistributions.from_blocks(blocks, *top_k_range(scored))
