"""The `trak` API's import path of score computers; they live in `hf_trak.traker.score_computers`."""

from hf_trak.traker.score_computers import (
    AbstractScoreComputer,
    BasicScoreComputer,
    BasicSingleBlockScoreComputer,
)

__all__ = ["AbstractScoreComputer", "BasicScoreComputer", "BasicSingleBlockScoreComputer"]
