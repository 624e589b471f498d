"""Import path of the score computers in the `trak` API. Their code is in `hf_trak.traker.score_computers`."""

from hf_trak.traker.score_computers import AbstractScoreComputer, BasicScoreComputer, BasicSingleBlockScoreComputer

__all__ = ["AbstractScoreComputer", "BasicScoreComputer", "BasicSingleBlockScoreComputer"]
