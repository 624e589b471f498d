"""Which models are so large that a pass over the rows takes long, and only few variants of a method are tried."""

from torch import nn

LARGE = 10**7
"""Parameters, trained or not."""


def is_large(model: nn.Module) -> bool:
    return sum(parameter.numel() for parameter in model.parameters()) >= LARGE
