"""Scores made visible: a report in one HTML file, one target in a notebook, a grid of images."""

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "AttributionRun": "hf_trak.report.run",
    "ReportOptions": "hf_trak.report.page",
    "ScoreDistributions": "hf_trak.report.distributions",
    "image_grid": "hf_trak.report.grid",
    "show_target": "hf_trak.report.notebook",
    "verify_run": "hf_trak.report.run_verification",
    "write_report": "hf_trak.report.page",
}

__all__ = [
    "AttributionRun",
    "ReportOptions",
    "ScoreDistributions",
    "image_grid",
    "show_target",
    "verify_run",
    "write_report",
]

if TYPE_CHECKING:
    from hf_trak.report.distributions import ScoreDistributions
    from hf_trak.report.grid import image_grid
    from hf_trak.report.notebook import show_target
    from hf_trak.report.page import ReportOptions, write_report
    from hf_trak.report.run import AttributionRun
    from hf_trak.report.run_verification import verify_run


def __getattr__(name: str) -> Any:
    """Import public names on first use."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'hf_trak.report' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
