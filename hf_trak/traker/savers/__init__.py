"""Savers of the `trak` API, which keep the gradients, features and scores of a `TRAKer` on disk.

Start with `base`, the contract. `mmap_saver` keeps it with memory-mapped NumPy arrays: `mmap_directory` describes the
directory, `row_files` the format of an array, and `check` verifies every byte of a directory.

This package may import `hf_trak.store`, `hf_trak.identity`, `hf_trak.runtime` and `hf_trak.errors`. It knows neither
models nor the mathematics of scores.
"""

from hf_trak.traker.savers.base import AbstractSaver, ModelIDException
from hf_trak.traker.savers.mmap_saver import MmapSaver

__all__ = ["AbstractSaver", "MmapSaver", "ModelIDException"]
