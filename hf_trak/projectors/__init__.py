"""Random projections of gradients: one linear map each, the same on every device (see `reference.py`)."""

from hf_trak.projectors import cuda_ops  # noqa: F401 - registers the operators
from hf_trak.projectors.base import AbstractProjector, BlockProjector, ProjectionSink, ProjectionType
from hf_trak.projectors.basic import BasicProjector, BasicSingleBlockProjector
from hf_trak.projectors.checks import require_finite
from hf_trak.projectors.cuda import ChunkedCudaProjector, CudaProjector
from hf_trak.projectors.cuda_fast_jl import FastJlProjector
from hf_trak.projectors.dense import NormalProjector, RademacherProjector
from hf_trak.projectors.factory import MapName, make_projector
from hf_trak.projectors.noop import NoOpProjector
from hf_trak.projectors.sparse import SparseProjector

__all__ = [
    "AbstractProjector",
    "BasicProjector",
    "BasicSingleBlockProjector",
    "BlockProjector",
    "ChunkedCudaProjector",
    "CudaProjector",
    "FastJlProjector",
    "MapName",
    "NoOpProjector",
    "NormalProjector",
    "ProjectionSink",
    "ProjectionType",
    "RademacherProjector",
    "SparseProjector",
    "make_projector",
    "require_finite",
]
