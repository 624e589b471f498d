"""Attribution indexes and scores on the Hugging Face Hub: publish your own, and use those of others safely.

Start with `push.py`, which makes one commit or one directory of a feature store, and `loading.py`, which makes an
attributor of either. `index_store.py` reads a published index as a feature store. `files.py` fetches its files and
compares them with `manifest.py`; `index_files.py`, `index_shards.py` and `curvature_files.py` check what they hold.
`pull.py` copies an index, `scores.py` publishes scored datasets, `remote_rows.py` reads single training rows from a
dataset repo, `banks.py` serves banks of retrained models, `cards.py` writes cards.

Everything that others published is checked before it is used. `safe_loading.py` is the only module of the library that
loads models, tokenizers and datasets by name; `names.py` checks names, JSON and YAML.

May import `evaluation` and what lies below it. Knows nothing of reports and the command line.
"""

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "HubCheckpoint": "hf_trak.hub.models",
    "RemoteRows": "hf_trak.hub.remote_rows",
    "load_bank": "hf_trak.hub.banks",
    "load_scores": "hf_trak.hub.scores",
    "open_repo": "hf_trak.hub.pull",
    "pull_index": "hf_trak.hub.pull",
    "push_bank": "hf_trak.hub.banks",
    "push_index": "hf_trak.hub.push",
    "push_scores": "hf_trak.hub.scores",
    "with_training_rows": "hf_trak.hub.scores",
}

__all__ = [
    "HubCheckpoint",
    "RemoteRows",
    "load_bank",
    "load_scores",
    "open_repo",
    "pull_index",
    "push_bank",
    "push_index",
    "push_scores",
    "with_training_rows",
]

if TYPE_CHECKING:
    from hf_trak.hub.banks import load_bank, push_bank
    from hf_trak.hub.models import HubCheckpoint
    from hf_trak.hub.pull import open_repo, pull_index
    from hf_trak.hub.push import push_index
    from hf_trak.hub.remote_rows import RemoteRows
    from hf_trak.hub.scores import load_scores, push_scores, with_training_rows


def __getattr__(name: str) -> Any:
    """Import public names on first use: the command line's parser needs one small module of this package."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'hf_trak.hub' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
