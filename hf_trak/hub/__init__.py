"""Attribution indexes and scores on the Hugging Face Hub: publish your own, and use those of others safely.

Start with `push.py`, which makes one commit or one directory of a feature store, and `loading.py`, which makes an
attributor of either. `index_store.py` reads a published index as a feature store, and copies it. `files.py` fetches
its files and compares them with `manifest.py`; `index_files.py`, `index_shards.py` and `curvature_files.py` check what
they hold. `scores.py` publishes scored datasets, `remote_rows.py` reads single training rows from a dataset repo,
`banks.py` serves banks of retrained models, `cards.py` writes cards.

Everything that others published is checked before it is used. `safe_loading.py` is the only module of the library that
loads models, tokenizers and datasets by name; `names.py` checks names, JSON and YAML, `parquet_groups.py` rows.

May import `evaluation` and what lies below it. Knows nothing of reports and the command line.
"""

from typing import TYPE_CHECKING

from hf_trak._lazy import lazy_exports

if TYPE_CHECKING:
    from hf_trak.hub.banks import load_bank as load_bank
    from hf_trak.hub.banks import push_bank as push_bank
    from hf_trak.hub.index_store import open_repo as open_repo
    from hf_trak.hub.index_store import pull_index as pull_index
    from hf_trak.hub.models import HubCheckpoint as HubCheckpoint
    from hf_trak.hub.push import push_index as push_index
    from hf_trak.hub.remote_rows import RemoteRows as RemoteRows
    from hf_trak.hub.scores import load_scores as load_scores
    from hf_trak.hub.scores import push_scores as push_scores
    from hf_trak.hub.scores import with_training_rows as with_training_rows

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "hf_trak.hub.banks": "load_bank push_bank",
        "hf_trak.hub.index_store": "open_repo pull_index",
        "hf_trak.hub.models": "HubCheckpoint",
        "hf_trak.hub.push": "push_index",
        "hf_trak.hub.remote_rows": "RemoteRows",
        "hf_trak.hub.scores": "load_scores push_scores with_training_rows",
    },
)
