"""Presentation of scores: a report in one HTML file, and a view of one target in a notebook.

`run` holds scores and rows as an `AttributionRun`, which is saved and loaded without the model: `run_record` reads,
writes and checks its files. `content`, `images` and `sounds` prepare rows, which may be hostile. `views` lays them
out, `page` fills the templates, and `notebook` shows one target. `training` says what all training rows did to a
validation loss, and `training_page` shows it.

This package may import `featurize`, `scores`, `store` and `hub`. `attributor` and `cli` import it. jinja2, pillow and
matplotlib are imported when they are used. Start with `run.py` and `page.py`.
"""

from typing import TYPE_CHECKING

from hf_trak._lazy import lazy_exports

if TYPE_CHECKING:
    from hf_trak.report.distributions import ScoreDistributions as ScoreDistributions
    from hf_trak.report.notebook import show_target as show_target
    from hf_trak.report.page import ReportOptions as ReportOptions
    from hf_trak.report.page import write_report as write_report
    from hf_trak.report.run import AttributionRun as AttributionRun
    from hf_trak.report.run_record import verify_run as verify_run
    from hf_trak.report.training import TrainingReport as TrainingReport
    from hf_trak.report.training_page import training_report as training_report
    from hf_trak.report.words import with_words as with_words

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "hf_trak.report.distributions": "ScoreDistributions",
        "hf_trak.report.notebook": "show_target",
        "hf_trak.report.page": "ReportOptions write_report",
        "hf_trak.report.run": "AttributionRun",
        "hf_trak.report.run_record": "verify_run",
        "hf_trak.report.training": "TrainingReport",
        "hf_trak.report.training_page": "training_report",
        "hf_trak.report.words": "with_words",
    },
)
