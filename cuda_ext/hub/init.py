"""Random projections that are never stored: sparse (`sjlt`), ±1 (`rademacher`) and `normal`, and their transposes.

On CPUs and other devices they run in torch operators, on NVIDIA GPUs in CUDA kernels, which NVRTC compiles when they
are first used. The operators are in `kernels.ops`.
"""

from .kernels import ops as operators
from .projectors.functional import (
    normal,
    normal_transposed,
    rademacher,
    rademacher_transposed,
    sjlt,
    sjlt_transposed,
)

__all__ = [
    "normal",
    "normal_transposed",
    "operators",
    "rademacher",
    "rademacher_transposed",
    "sjlt",
    "sjlt_transposed",
]
