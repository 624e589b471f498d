"""Scores made visible."""

from hf_trak.report.grid import image_grid

__all__ = ["image_grid"]
