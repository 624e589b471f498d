"""The score computers of the `trak` API."""

from hf_trak.traker.score_computers.base import AbstractScoreComputer
from hf_trak.traker.score_computers.basic import BasicScoreComputer, BasicSingleBlockScoreComputer

__all__ = ["AbstractScoreComputer", "BasicScoreComputer", "BasicSingleBlockScoreComputer"]
