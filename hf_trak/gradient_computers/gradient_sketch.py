"""Gradients of single samples for the check of the first batch: whole, or, for large models, as sketches.

A whole gradient of a model of a billion parameters takes gigabytes, and the check compares several of them. From
[`SKETCHED_FROM`] parameters on, every parameter's gradient is reduced to [`WIDTH`] sums of its elements with random
signs as soon as it arrives, and is freed. The norm of the sums is that of the gradient up to a standard deviation of
1/√(2 · WIDTH), 4 %, which is little beside the errors that the check looks for.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hf_trak.gradient_computers.layout import ParameterLayout, ParameterSlot
from hf_trak.kernels.torch_sparse import SparseMap

SKETCHED_FROM = 2**28
"""Number of attributed parameters from which on gradients are sketched: a gradient takes 1 GiB in float32."""

WIDTH = 256
"""Sums for each parameter."""


class GradientSketch:
    """The map from gradients `(rows, P)` to sums `(rows, parameters · WIDTH)`.

    Attributes:
        layout (`ParameterLayout`): the place of every parameter among the sums.
    """

    def __init__(self, layout: ParameterLayout) -> None:
        """
        Args:
            layout: the attributed parameters.
        """
        self._slots = layout.slots
        self._map = SparseMap(layout.total, WIDTH, 0, 1)
        self.layout = ParameterLayout(
            tuple(ParameterSlot(slot.name, (WIDTH,), WIDTH * index) for index, slot in enumerate(layout.slots))
        )

    def empty(self, rows: int) -> Tensor:
        """Make sums of zeros, `(rows, parameters · WIDTH)`, float32."""
        return torch.zeros(rows, self.layout.total)

    def add(self, sums: Tensor, start: int, block: Tensor) -> None:
        """Add columns of gradients to their sums.

        Args:
            sums: `(rows, parameters · WIDTH)`, changed in place.
            start: position of the first column in the gradient vector.
            block: `(rows, n)`; its columns may belong to several parameters.
        """
        for slot, place in zip(self._slots, self.layout.slots, strict=True):
            first, last = max(start, slot.offset), min(start + block.shape[1], slot.offset + slot.numel)
            if first < last:
                found = torch.zeros(block.shape[0], WIDTH, device=block.device)
                self._map.accumulate(found, block[:, first - start : last - start].detach(), first, 0)
                sums[:, place.offset : place.offset + WIDTH] += found.to(sums.device)


def each_gradient(f: Tensor, parameters: Mapping[str, Tensor], receive: Callable[[str, Tensor], None]) -> None:
    """Take the gradients of a scalar by plain autograd, and hand each on as soon as it is there.

    Args:
        f: the scalar.
        parameters: leaves that require a gradient, by name. What they hold in `.grad` is left as it is.
        receive: called with name and gradient. Parameters that `f` does not depend on are left out.
    """
    before = {name: parameter.grad for name, parameter in parameters.items()}

    def receiving(name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            receive(name, gradient.detach())

        return hook

    handles = []
    try:
        for name, parameter in parameters.items():
            parameter.grad = None
            handles.append(parameter.register_post_accumulate_grad_hook(receiving(name)))
        f.backward()
    finally:
        for handle in handles:
            handle.remove()
        for name, parameter in parameters.items():
            parameter.grad = before[name]
