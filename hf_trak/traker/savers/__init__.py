"""The savers of the `trak` API: where `TRAKer` keeps gradients, features and scores."""

from hf_trak.traker.savers.base import AbstractSaver, ModelIDException
from hf_trak.traker.savers.mmap_saver import MmapSaver
from hf_trak.traker.savers.safetensors_saver import SafetensorsSaver

__all__ = ["AbstractSaver", "MmapSaver", "ModelIDException", "SafetensorsSaver"]
