"""Where features live: the sharded feature store, and the savers of the seeds' API on top of it."""

from hf_trak.savers.shard_set import Shard, ShardSet
from hf_trak.savers.shards import ShardPlan
from hf_trak.savers.store import FeatureStore, Gram

__all__ = ["FeatureStore", "Gram", "Shard", "ShardPlan", "ShardSet"]
