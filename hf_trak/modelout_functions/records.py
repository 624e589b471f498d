"""Batches that are objects with named tensors: dataclasses and namedtuples."""

import dataclasses
from typing import Any


class FieldBatch(dict[str, Any]):
    """The fields of a dataclass as a batch: a mapping, whose entries are attributes too, as they were before."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"The batch has the entries {list(self)}, and no {name!r}. Expected one of them. Add it to the "
                "dataclass that the data collator makes."
            ) from None


def as_batch(batch: Any) -> Any:
    """Return the fields of a dataclass as a mapping, without those that are `None`, and any other batch as it is.

    Args:
        batch (`Any`):
            What a data collator made.
    """
    if isinstance(batch, dict) or not dataclasses.is_dataclass(batch) or isinstance(batch, type):
        return batch  # the outputs of transformers are dictionaries and dataclasses at once
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return FieldBatch({name: value for name, value in values.items() if value is not None})
