"""How good an attribution is."""

from hf_trak.evaluation.lds import linear_datamodeling_score

__all__ = ["linear_datamodeling_score"]
