"""Presentation of scores: a report in one HTML file, and a view of one target in a notebook.

`run` holds scores and rows as an `AttributionRun`, which is saved and loaded without the model: `run_record` is its
`run.json`, `run_writing` and `run_reading` its files, `run_checks` and `run_verification` what has to hold for them.
`content`, `text`, `images`, `pixels` and `thumbnails` prepare rows, which may be hostile, for display. `views` lays
them out, `page` fills the templates, and `notebook` shows one target.

This package may import `featurize`, `scores`, `store` and `hub`. `attributor` and `cli` import it. jinja2, pillow and
matplotlib (extra `report`) are imported when they are used. Start with `run.py` and `page.py`.
"""

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "AttributionRun": "hf_trak.report.run",
    "ReportOptions": "hf_trak.report.page",
    "ScoreDistributions": "hf_trak.report.distributions",
    "show_target": "hf_trak.report.notebook",
    "verify_run": "hf_trak.report.run_record",
    "write_report": "hf_trak.report.page",
}

__all__ = [
    "AttributionRun",
    "ReportOptions",
    "ScoreDistributions",
    "show_target",
    "verify_run",
    "write_report",
]

if TYPE_CHECKING:
    from hf_trak.report.distributions import ScoreDistributions
    from hf_trak.report.notebook import show_target
    from hf_trak.report.page import ReportOptions, write_report
    from hf_trak.report.run import AttributionRun
    from hf_trak.report.run_record import verify_run


def __getattr__(name: str) -> Any:
    """Import public names on first use."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'hf_trak.report' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
