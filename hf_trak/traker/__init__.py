"""The `trak` API: `TRAKer`, its savers and its score computers."""

from hf_trak.traker.traker import TRAKer

__all__ = ["TRAKer"]
