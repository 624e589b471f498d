"""Where features live: the sharded feature store, and the savers of the seeds' API."""

from hf_trak.savers.base import AbstractSaver, ModelIDException
from hf_trak.savers.mmap_saver import MmapSaver
from hf_trak.savers.safetensors_saver import SafetensorsSaver
from hf_trak.savers.shard_set import Shard, ShardSet
from hf_trak.savers.shards import ShardPlan
from hf_trak.savers.store import FeatureStore, Gram

__all__ = [
    "AbstractSaver",
    "FeatureStore",
    "Gram",
    "MmapSaver",
    "ModelIDException",
    "SafetensorsSaver",
    "Shard",
    "ShardPlan",
    "ShardSet",
]
