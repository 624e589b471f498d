"""Random projections of gradients: one linear map R ∈ R^{P × k} each, the same on every device.

Start with `base` (the contract, `BlockProjector`), then `dense` (the maps `rademacher`, `normal` and `sjlt`, and the
identity) and `factored` (two-sided, then `sjlt`). `factory` builds one from its name, `functional` has the maps as
functions of tensors, and `reference` defines them entry by entry in plain Python. `cuda` has the names and signatures
of the `trak` package.

May import `hf_trak.kernels`, which computes the maps, and the checks in `hf_trak.runtime`. Knows no
models, tasks or files.
"""

from hf_trak.projectors.base import AbstractProjector, BlockProjector, ProjectionSink, ProjectionType
from hf_trak.projectors.checks import require_finite
from hf_trak.projectors.cuda import (
    BasicProjector,
    BasicSingleBlockProjector,
    ChunkedCudaProjector,
    CudaProjector,
    FastJlProjector,
)
from hf_trak.projectors.dense import NoOpProjector, NormalProjector, RademacherProjector, SparseProjector
from hf_trak.projectors.factored import FactoredProjector
from hf_trak.projectors.factory import MapName, make_projector
from hf_trak.projectors.functional import (
    normal,
    normal_transposed,
    rademacher,
    rademacher_transposed,
    sjlt,
    sjlt_transposed,
)

__all__ = [
    "AbstractProjector", "BasicProjector", "BasicSingleBlockProjector", "BlockProjector", "ChunkedCudaProjector",
    "CudaProjector", "FactoredProjector", "FastJlProjector", "MapName", "NoOpProjector", "NormalProjector",
    "ProjectionSink", "ProjectionType", "RademacherProjector", "SparseProjector", "make_projector", "normal",
    "normal_transposed", "rademacher", "rademacher_transposed", "require_finite", "sjlt", "sjlt_transposed",
]  # fmt: skip
