"""The parameter whose curvature takes most memory: often a head that is not tied to the embedding."""

from dataclasses import dataclass, replace

from torch import nn

from hf_trak.config import TrakConfig
from hf_trak.curvature.plan import LARGEST_SIDE
from hf_trak.featurize.exact_estimate import estimate_exact
from hf_trak.gradient_computers.layout import ParameterLayout
from hf_trak.runtime.memory import byte_size


@dataclass(frozen=True)
class FitShare:
    """What the curvature of one parameter takes, in bytes.

    Attributes:
        name: the parameter.
        shape: its shape.
        fit_memory: sums of one pass of a fit.
        curvature_bytes: disk.
    """

    name: str
    shape: tuple[int, ...]
    fit_memory: int
    curvature_bytes: int

    def __str__(self) -> str:
        side = max(self.shape)
        parts = -(-side // LARGEST_SIDE)
        bases = f", {parts} bases of {-(-side // parts):,}" if parts > 1 else ""
        return (
            f"{self.name!r} ({' × '.join(f'{n:,}' for n in self.shape)}{bases}) takes {byte_size(self.fit_memory)} of "
            f"the memory and {byte_size(self.curvature_bytes)} of the disk"
        )


def largest_share(model: nn.Module, layout: ParameterLayout, args: TrakConfig, n: int) -> FitShare | None:
    """Find the parameter whose curvature takes most memory while it is fitted.

    Args:
        model: the model.
        layout: the attributed parameters.
        args: the configuration.
        n: number of training rows.

    Returns:
        `FitShare`; `None` where every parameter has one number for each of its elements.
    """
    if args.curvature in ("diagonal", "identity"):
        return None
    found = []
    for slot in layout.slots:
        alone = estimate_exact(model, ParameterLayout((replace(slot, offset=0),)), args, n, 1, 0)
        if alone.curvature_bytes > 4 * slot.numel:  # it has bases
            found.append(FitShare(slot.name, tuple(slot.shape), alone.fit_memory, alone.curvature_bytes))
    return max(found, key=lambda share: share.fit_memory, default=None)
