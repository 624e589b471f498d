"""Cutting a batch into samples: what carries the batch dimension, and what is handed on as it is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hf_trak.gradient_computers.base import batch_size_of
from hf_trak.modelout_functions.base import Batch


@dataclass(frozen=True)
class SplitBatch:
    """A batch taken apart: tensors whose leading dimension is B, and everything else (flags, constants, tables).

    Keys are the names of a mapping or the positions of a sequence.
    """

    size: int
    mapped: dict[Any, Tensor]
    constant: dict[Any, Any]
    keys: tuple[Any, ...]
    is_mapping: bool

    @classmethod
    def of(cls, batch: Batch) -> "SplitBatch":
        """Take a batch apart. Raises `ValueError` where no tensor carries a batch dimension."""
        size = batch_size_of(batch)
        is_mapping = isinstance(batch, Mapping)
        items = dict(batch.items()) if isinstance(batch, Mapping) else dict(enumerate(batch))
        mapped = {k: v for k, v in items.items() if isinstance(v, Tensor) and v.ndim > 0 and v.shape[0] == size}
        constant = {k: v for k, v in items.items() if k not in mapped}
        return cls(size, mapped, constant, tuple(items), is_mapping)

    def rebuild(self, mapped: Mapping[Any, Tensor]) -> Batch:
        """A batch of the same kind with other tensors in place of the mapped ones."""
        values = {**self.constant, **mapped}
        if self.is_mapping:
            return {key: values[key] for key in self.keys}
        return tuple(values[key] for key in self.keys)

    def rows(self, start: int, stop: int) -> Batch:
        """Samples `start … stop` as a batch of their own."""
        return self.rebuild({key: tensor[start:stop] for key, tensor in self.mapped.items()})

    @property
    def sample_elements(self) -> int:
        """Number of tensor elements per sample: how the cost of batches of different lengths compares."""
        return sum(tensor.numel() for tensor in self.mapped.values()) // max(self.size, 1)
