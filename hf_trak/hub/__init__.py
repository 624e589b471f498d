"""Attribution indices and scores on the Hugging Face Hub: push, pull, load, cards."""

from hf_trak.hub.models import HubCheckpoint
from hf_trak.hub.pull import open_repo, pull_index
from hf_trak.hub.push import push_index
from hf_trak.hub.scores import load_scores, push_scores, with_training_rows

__all__ = [
    "HubCheckpoint",
    "load_scores",
    "open_repo",
    "pull_index",
    "push_index",
    "push_scores",
    "with_training_rows",
]
