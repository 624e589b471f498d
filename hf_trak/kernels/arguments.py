"""Argument structs of the kernels as ctypes: one per kernel, passed by value, laid out as in the `.cu` files."""

import ctypes
import os
from typing import Any

import torch
from torch import Tensor


def fields_of(kind: Any, *names: str) -> list[tuple[str, Any]]:
    """List fields of one type, for a struct of ctypes."""
    return [(name, kind) for name in names]


class Destination(ctypes.Structure):
    """The struct `Destination` of `common.cu`."""

    _fields_ = (
        *fields_of(ctypes.c_void_p, "out", "partials"),
        *fields_of(ctypes.c_int64, "out_stride", "rows", "columns"),
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
        *fields_of(ctypes.c_int64, "stride", "columns", "start", "chunks_per_split"),
        ("generator", Generator),
        *fields_of(ctypes.c_uint32, "copy", "groups", "tile"),
    )


class OuterArguments(ctypes.Structure):
    """Arguments of `outer.cu`."""

    _fields_ = (
        ("to", Destination),
        *fields_of(ctypes.c_void_p, "left", "right"),
        *fields_of(ctypes.c_int64 * 3, "left_strides", "right_strides"),
        *fields_of(ctypes.c_int64, "height", "width", "start", "rows_per_split"),
        ("generator", Generator),
        *fields_of(ctypes.c_uint32, "copy", "groups", "tile", "tokens", "strips", "rows_per_step"),
    )


class DenseArguments(ctypes.Structure):
    """Arguments of `rademacher.cu`, `rademacher_wgmma.cu` and `dense.cu`."""

    _fields_ = (
        ("to", Destination),
        ("block", ctypes.c_void_p),
        *fields_of(ctypes.c_int64, "stride", "columns", "start", "positions_per_split"),
        ("generator", Generator),
    )


VARIABLE = "HF_TRAK_BACKEND"

TERMS_VARIABLE = "HF_TRAK_FLOAT32_TERMS"

WGMMA_VARIABLE = "HF_TRAK_WGMMA"

_NAMES = ("auto", "cuda", "torch")


def kernels_wanted(device: torch.device) -> bool:
    """Tell whether the CUDA kernels project tensors on `device`.

    They do on every NVIDIA GPU, unless the environment variable `HF_TRAK_BACKEND` is `torch`. Its other values,
    `auto` and `cuda`, change nothing. torch's builds for AMD GPUs, which call their devices `cuda` too, use torch
    operators.

    Raises:
        ValueError: the variable has another value.
    """
    name = os.environ.get(VARIABLE, "auto")
    if name not in _NAMES:
        raise ValueError(f"The environment variable {VARIABLE} is '{name}'. Expected one of {', '.join(_NAMES)}.")
    return device.type == "cuda" and name != "torch" and torch.version.hip is None


def float32_terms() -> int:
    """Read the number of bfloat16 terms of a float32 gradient on tensor cores: `HF_TRAK_FLOAT32_TERMS`, 2 or 1.

    Two keep the relative error of a projection below 10⁻⁵; one halves the time and rounds gradients to bfloat16.

    Raises:
        ValueError: the variable has another value.
    """
    terms = os.environ.get(TERMS_VARIABLE, "2")
    if terms not in ("1", "2"):
        raise ValueError(f"The environment variable {TERMS_VARIABLE} is '{terms}'. Expected 1 or 2.")
    return int(terms)


def wgmma_wanted() -> bool:
    """Tell whether Hopper GPUs use their own matrix instructions; with `HF_TRAK_WGMMA=0` they use those of all GPUs.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    value = os.environ.get(WGMMA_VARIABLE, "1")
    if value not in ("0", "1"):
        raise ValueError(f"The environment variable {WGMMA_VARIABLE} is '{value}'. Expected 0 or 1.")
    return value == "1"
