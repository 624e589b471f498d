"""Batches cut into samples: tensors with a batch dimension, and all the rest, which is passed on as it is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hf_trak.gradient_computers.base import batch_size_of
from hf_trak.modelout_functions.base import Batch
from hf_trak.modelout_functions.records import FieldBatch, as_batch


@dataclass(frozen=True)
class SplitBatch:
    """A batch taken apart. Keys are the names of a mapping or the positions of a sequence.

    Attributes:
        size: B.
        mapped: the tensors whose leading dimension is B.
        constant: everything else (flags, constants, tables).
        keys: all keys, in order.
        is_mapping: whether the batch is a mapping.
        kind: `dict`, `tuple`, or the class of a namedtuple or of a dataclass' fields, whose attributes tasks may read.
    """

    size: int
    mapped: dict[Any, Tensor]
    constant: dict[Any, Any]
    keys: tuple[Any, ...]
    is_mapping: bool
    kind: type[Any] = dict

    @classmethod
    def of(cls, batch: Batch) -> "SplitBatch":
        """Take a batch apart.

        Raises:
            ValueError: no tensor has a batch dimension.
        """
        batch = as_batch(batch)
        size = batch_size_of(batch)
        is_mapping = isinstance(batch, Mapping)
        items = dict(batch.items()) if isinstance(batch, Mapping) else dict(enumerate(batch))
        mapped = {k: v for k, v in items.items() if isinstance(v, Tensor) and v.ndim > 0 and v.shape[0] == size}
        constant = {k: v for k, v in items.items() if k not in mapped}
        kept = isinstance(batch, FieldBatch) or hasattr(batch, "_fields")
        kind = type(batch) if kept else dict if is_mapping else tuple
        return cls(size, mapped, constant, tuple(items), is_mapping, kind)

    def rebuild(self, mapped: Mapping[Any, Tensor]) -> Batch:
        """Make a batch of the same kind with other tensors in place of the mapped ones."""
        values = {**self.constant, **mapped}
        if self.is_mapping:
            return self.kind({key: values[key] for key in self.keys})
        made = tuple(values[key] for key in self.keys)
        return self.kind(*made) if hasattr(self.kind, "_fields") else made

    def rows(self, start: int, stop: int) -> Batch:
        """Make a batch of samples `start … stop`."""
        return self.rebuild({key: tensor[start:stop] for key, tensor in self.mapped.items()})

    @property
    def sample_elements(self) -> int:
        """Number of tensor elements per sample, a measure of the cost of batches of different lengths."""
        return sum(tensor.numel() for tensor in self.mapped.values()) // max(self.size, 1)
