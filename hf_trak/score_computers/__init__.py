"""From features to scores: Gram matrices, λ, solves, and products that stream."""

from hf_trak.score_computers.base import AbstractScoreComputer
from hf_trak.score_computers.basic import BasicScoreComputer, BasicSingleBlockScoreComputer
from hf_trak.score_computers.gram import GramSum, column_squares
from hf_trak.score_computers.ridge import RidgeSystem, gram_update, ridge_lambda
from hf_trak.score_computers.streaming import (
    FeatureShard,
    ScaledRows,
    joined,
    score_blocks,
    self_influence_blocks,
)
from hf_trak.score_computers.topk import TopK

__all__ = [
    "AbstractScoreComputer",
    "BasicScoreComputer",
    "BasicSingleBlockScoreComputer",
    "FeatureShard",
    "GramSum",
    "RidgeSystem",
    "ScaledRows",
    "TopK",
    "column_squares",
    "gram_update",
    "joined",
    "ridge_lambda",
    "score_blocks",
    "self_influence_blocks",
]
