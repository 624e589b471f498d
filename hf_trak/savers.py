"""Import path of the savers in the `trak` API. Their code is in `hf_trak.traker.savers`."""

from hf_trak.traker.savers import AbstractSaver, MmapSaver, ModelIDException

__all__ = ["AbstractSaver", "MmapSaver", "ModelIDException"]
