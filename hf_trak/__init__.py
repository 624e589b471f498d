"""Find the training examples that made your model do this: TRAK data attribution for the Hugging Face ecosystem.

Public names are imported when they are first used. `TrakAttributor` (`attributor.py`) is where users begin and where
reading begins: below it are `featurize` (features in a store), `scores` (from features to scores), and under both
`gradient_computers`, `projectors`, `modelout_functions`, `data`, `weights` and `store`. `traker`, with the import
paths `savers`, `score_computers` and `utils`, is the `trak` API. `.importlinter` states which package may import
which.
"""

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "Exact": "hf_trak.methods",
    "HubCheckpoint": "hf_trak.hub",
    "ImageTextCollator": "hf_trak.data.image_text",
    "Index": "hf_trak.methods",
    "Refinement": "hf_trak.curvature.conjugate_gradients",
    "Rerank": "hf_trak.methods",
    "Span": "hf_trak.scores.spans",
    "StreamedRows": "hf_trak.data.streams",
    "TRAKer": "hf_trak.traker.traker",
    "TrakAttributor": "hf_trak.attributor",
    "TrakCallback": "hf_trak.callbacks",
    "TrakConfig": "hf_trak.config",
    "__version__": "hf_trak.version",
    "estimate": "hf_trak.featurize.estimate",
    "load_scores": "hf_trak.hub",
    "per_sample_gradients": "hf_trak.gradient_computers",
    "pull_index": "hf_trak.hub",
    "push_scores": "hf_trak.hub",
    "with_training_rows": "hf_trak.hub",
}

__all__ = [
    "Exact",
    "HubCheckpoint",
    "ImageTextCollator",
    "Index",
    "Refinement",
    "Rerank",
    "Span",
    "StreamedRows",
    "TRAKer",
    "TrakAttributor",
    "TrakCallback",
    "TrakConfig",
    "__version__",
    "estimate",
    "load_scores",
    "per_sample_gradients",
    "pull_index",
    "push_scores",
    "with_training_rows",
]

if TYPE_CHECKING:
    from hf_trak.attributor import TrakAttributor
    from hf_trak.callbacks import TrakCallback
    from hf_trak.config import TrakConfig
    from hf_trak.curvature.conjugate_gradients import Refinement
    from hf_trak.data.image_text import ImageTextCollator
    from hf_trak.data.streams import StreamedRows
    from hf_trak.featurize.estimate import estimate
    from hf_trak.gradient_computers import per_sample_gradients
    from hf_trak.hub import HubCheckpoint, load_scores, pull_index, push_scores, with_training_rows
    from hf_trak.methods import Exact, Index, Rerank
    from hf_trak.scores.spans import Span
    from hf_trak.traker.traker import TRAKer
    from hf_trak.version import __version__


def __getattr__(name: str) -> Any:
    """Import public names on first use, so that `import hf_trak` is quick."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'hf_trak' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
