"""Savers of the `trak` API, which keep the gradients, features and scores of a `TRAKer` on disk.

Start with `base`, the contract; `directory_saver` has what both savers share. `safetensors_saver`, the default, works
on a feature store of `hf_trak.store`: `partial` has its unfinished shards, `finalized_files` its features and scores.
`mmap_saver` works on memory-mapped NumPy arrays: `mmap_directory` describes the directory, `mmap_arrays` the arrays,
`row_files` their format. `*_check` and `*_upgrade` verify directories, and bring those of format 1 up to date.

This package may import `hf_trak.store`, `hf_trak.identity`, `hf_trak.runtime` and `hf_trak.errors`. It knows neither
models nor the mathematics of scores.
"""

from hf_trak.traker.savers.base import AbstractSaver, ModelIDException
from hf_trak.traker.savers.mmap_saver import MmapSaver
from hf_trak.traker.savers.safetensors_saver import SafetensorsSaver

__all__ = ["AbstractSaver", "MmapSaver", "ModelIDException", "SafetensorsSaver"]
