"""Argument structs of the kernels as ctypes: one per kernel, passed by value, laid out as in the `.cu` files."""

import ctypes

from torch import Tensor


class Destination(ctypes.Structure):
    """The struct `Destination` of `common.cu`."""

    _fields_ = (
        ("out", ctypes.c_void_p),
        ("partials", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
    )

    @classmethod
    def of(cls, out: Tensor, partials: Tensor | None) -> "Destination":
        """Describe sums for `out`, `(B, columns)` with columns side by side; `partials` is `(slots, B, columns)`."""
        rows, columns = out.shape
        return cls(out.data_ptr(), None if partials is None else partials.data_ptr(), out.stride(0), rows, columns)


class Generator(ctypes.Structure):
    """The struct `Generator` of `common.cu`."""

    _fields_ = (("seed", ctypes.c_uint64), ("model_id", ctypes.c_uint32))


class ReduceArguments(ctypes.Structure):
    """Arguments of `reduce.cu`."""

    _fields_ = (("to", Destination), ("slots", ctypes.c_int64))


class SjltArguments(ctypes.Structure):
    """Arguments of `sjlt.cu`."""

    _fields_ = (
        ("to", Destination),
        ("block", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("start", ctypes.c_int64),
        ("chunks_per_split", ctypes.c_int64),
        ("generator", Generator),
        ("copy", ctypes.c_uint32),
        ("groups", ctypes.c_uint32),
        ("tile", ctypes.c_uint32),
    )


class OuterArguments(ctypes.Structure):
    """Arguments of `outer.cu`."""

    _fields_ = (
        ("to", Destination),
        ("left", ctypes.c_void_p),
        ("right", ctypes.c_void_p),
        ("left_strides", ctypes.c_int64 * 3),
        ("right_strides", ctypes.c_int64 * 3),
        ("height", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("start", ctypes.c_int64),
        ("rows_per_split", ctypes.c_int64),
        ("generator", Generator),
        ("copy", ctypes.c_uint32),
        ("groups", ctypes.c_uint32),
        ("tile", ctypes.c_uint32),
        ("tokens", ctypes.c_uint32),
        ("strips", ctypes.c_uint32),
        ("rows_per_step", ctypes.c_uint32),
    )


class DenseArguments(ctypes.Structure):
    """Arguments of `rademacher.cu`, `rademacher_wgmma.cu` and `dense.cu`."""

    _fields_ = (
        ("to", Destination),
        ("block", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("start", ctypes.c_int64),
        ("positions_per_split", ctypes.c_int64),
        ("generator", Generator),
    )
