"""A page in the browser that answers questions: which training rows helped and harmed a typed or uploaded target?

`session` is what both kinds of sessions share, and shows a saved run without a model; `index_session` asks a model and
its index about new targets. `target_form` is what a user fills in. `train_rows` reads, searches and
groups training rows, and `page` fills the template with them. `handlers` connects these to plain values, `app` lays
them out with Gradio, and `server` serves them behind the `gate`.

This package may import everything below `cli`. Only `app` and `server` import Gradio, when they are
used. Start with `index_session.py` and `app.py`.
"""

from typing import TYPE_CHECKING

from hf_trak._lazy import lazy_exports

if TYPE_CHECKING:
    from hf_trak.viewer.app import make_app as make_app
    from hf_trak.viewer.index_session import IndexSession as IndexSession
    from hf_trak.viewer.index_session import Question as Question
    from hf_trak.viewer.server import serve as serve
    from hf_trak.viewer.session import RunSession as RunSession
    from hf_trak.viewer.target_form import TargetForm as TargetForm

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "hf_trak.viewer.app": "make_app",
        "hf_trak.viewer.index_session": "IndexSession Question",
        "hf_trak.viewer.server": "serve",
        "hf_trak.viewer.session": "RunSession",
        "hf_trak.viewer.target_form": "TargetForm",
    },
)
