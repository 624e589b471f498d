"""The attributed parameters, in order, and the place of each in the concatenated gradient vector."""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter

import torch

from hf_trak.runtime.zero import whole_shape


@dataclass(frozen=True)
class ParameterSlot:
    """One attributed parameter.

    Attributes:
        name (`str`): its name.
        shape (`tuple[int, ...]`): its shape.
        offset (`int`): position of its first element in the gradient vector.
    """

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class ParameterLayout:
    """The attributed parameters in `named_parameters()` order, concatenated without gaps.

    Row i of the projection matrix belongs to position i of this concatenation (see `hf_trak.projectors`), so the
    layout is part of what defines the features and is written into the store.
    """

    slots: tuple[ParameterSlot, ...]

    @classmethod
    def from_model(cls, model: torch.nn.Module, grad_wrt: Iterable[str] | None = None) -> "ParameterLayout":
        """Lay out the parameters that are attributed.

        Args:
            model (`torch.nn.Module`):
                The model. A tied parameter appears once, under its first name, as in `named_parameters()`.
            grad_wrt (`Iterable[str]`, *optional*):
                Names of the parameters to attribute; any alias of a tied one will do. `None` takes every parameter
                with `requires_grad`. A frozen parameter that is named is attributed all the same.

        Returns:
            [`ParameterLayout`]: the layout.

        Raises:
            ValueError: a name in `grad_wrt` is unknown, or no parameter is left.
        """
        parameters = dict(model.named_parameters())
        if grad_wrt is None:
            selected = {id(parameter) for parameter in parameters.values() if parameter.requires_grad}
            remedy = (
                "The model has no parameter with `requires_grad=True`: unfreeze some (`PeftModel.from_pretrained` has "
                "`is_trainable=True` for that), or name them in `grad_wrt`."
            )
        else:
            if isinstance(grad_wrt, str):
                raise ValueError(f"`grad_wrt` is the string {grad_wrt!r}; expected a list of parameter names.")
            aliases = dict(model.named_parameters(remove_duplicate=False))
            unknown = sorted(set(grad_wrt := list(grad_wrt)) - set(aliases))
            if unknown:
                raise ValueError(
                    f"`grad_wrt` names {unknown}, which the model does not have. Expected names from "
                    f"`model.named_parameters()`, for example {list(parameters)[:3]}."
                )
            selected = {id(aliases[name]) for name in grad_wrt}
            remedy = "`grad_wrt` is empty: name at least one parameter, or pass `None` for all."
        slots, offset = [], 0
        for name, parameter in parameters.items():
            if id(parameter) in selected:
                slots.append(ParameterSlot(name, tuple(whole_shape(parameter)), offset))
                offset += slots[-1].numel
        if not slots:
            raise ValueError(f"No parameter is left to attribute. Expected at least one. {remedy}")
        return cls(tuple(slots))

    @property
    def total(self) -> int:
        """Return the length P of the gradient vector."""
        last = self.slots[-1]
        return last.offset + last.numel

    @property
    def names(self) -> list[str]:
        """Return the parameter names in order."""
        return [slot.name for slot in self.slots]

    def slot(self, name: str) -> ParameterSlot:
        """Return the slot of one parameter.

        Raises:
            KeyError: the parameter is not attributed.
        """
        for slot in self.slots:
            if slot.name == name:
                return slot
        raise KeyError(name)

    def overlaps(self, start: int, stop: int) -> Iterator[tuple[ParameterSlot, int, int]]:
        """Yield the parameters that have a part in a range of the gradient vector, and where that part is in it.

        Args:
            start, stop: the range.
        """
        for place in range(bisect_right(self.slots, start, key=attrgetter("offset")) - 1, len(self.slots)):
            slot = self.slots[place]
            low, high = max(start, slot.offset), min(stop, slot.offset + slot.numel)
            if low < high:
                yield slot, low, high
            elif slot.offset >= stop:
                return

    def gradient_bytes(self, weights: Mapping[str, torch.Tensor]) -> int:
        """Count the bytes of a gradient in the dtypes of the weights, which are given by name."""
        return sum(slot.numel * weights[slot.name].element_size() for slot in self.slots)

    def to_list(self) -> list[list[object]]:
        """Return the JSON form: `[[name, shape, offset], …]`."""
        return [[slot.name, list(slot.shape), slot.offset] for slot in self.slots]

    @property
    def fingerprint(self) -> str:
        """Return the hex digest of names, shapes and offsets."""
        return hashlib.sha256(json.dumps(self.to_list()).encode()).hexdigest()[:32]
