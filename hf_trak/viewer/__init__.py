"""A page in the browser that answers questions: which training rows helped and harmed a typed or uploaded target?

`session` is what both kinds of sessions share: `index_session` asks a model and its index about new targets, and
`run_session` shows a saved run without either. `target_form` is what a user fills in, `kept_solvers` what makes the
second question fast, `token_parts` the share of each token. `train_rows` reads, searches and groups training rows,
`shown` prepares rows, which may be hostile, for display, `page` fills the template, and `export` writes what is shown.
`handlers` connects these to plain values, `app` lays them out with Gradio (extra `viewer`), and `server` serves them.

This package may import everything below `cli`. Only `app` and `server` import Gradio, when they are
used. Start with `index_session.py` and `app.py`.
"""

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "IndexSession": "hf_trak.viewer.index_session",
    "Question": "hf_trak.viewer.index_session",
    "RunSession": "hf_trak.viewer.run_session",
    "TargetForm": "hf_trak.viewer.target_form",
    "make_app": "hf_trak.viewer.app",
    "serve": "hf_trak.viewer.server",
}

__all__ = ["IndexSession", "Question", "RunSession", "TargetForm", "make_app", "serve"]

if TYPE_CHECKING:
    from hf_trak.viewer.app import make_app
    from hf_trak.viewer.index_session import IndexSession, Question
    from hf_trak.viewer.run_session import RunSession
    from hf_trak.viewer.server import serve
    from hf_trak.viewer.target_form import TargetForm


def __getattr__(name: str) -> Any:
    """Import public names on first use."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'hf_trak.viewer' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
