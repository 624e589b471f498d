"""The `trak` API's import path of savers; they live in `hf_trak.traker.savers`."""

from hf_trak.traker.savers import AbstractSaver, MmapSaver, ModelIDException, SafetensorsSaver

__all__ = ["AbstractSaver", "MmapSaver", "ModelIDException", "SafetensorsSaver"]
