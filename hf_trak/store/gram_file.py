"""The file of a Gram matrix XᵀX: the tensor `gram` (k, k), and in its metadata the number of rows and the trace."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hf_trak.errors import NonFiniteError, StoreError
from hf_trak.store.shards import Identity, TensorSpec, read_header, read_tensors, write_tensors

FILE_NAME = "gram.safetensors"
_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Gram:
    """XᵀX over all `n` train rows of one checkpoint, `matrix` (k, k), and its trace."""

    matrix: Tensor
    trace: float
    n: int


def check_gram(gram: Tensor, n: int, width: int, n_rows: int, model_id: int) -> None:
    """Check that a matrix may be the XᵀX of all rows of a store.

    Args:
        gram: the matrix.
        n: number of rows that it sums over.
        width: k.
        n_rows: number of rows of the store.
        model_id: the checkpoint, for the error message.

    Raises:
        ValueError: shape, dtype or `n` do not fit the store.
        NonFiniteError: an entry is NaN or infinite.
    """
    if tuple(gram.shape) != (width, width) or gram.dtype not in _DTYPES or n != n_rows:
        raise ValueError(
            f"The Gram matrix is {gram.dtype} {tuple(gram.shape)} over {n} rows. Expected float32 or float64 "
            f"{(width, width)} over {n_rows} rows: half precision overflows, and a part of the rows does not give XᵀX."
        )
    if not bool(torch.isfinite(gram).all()):
        raise NonFiniteError(
            f"The Gram matrix of model id {model_id} has NaN or infinite entries. Expected finite ones. Inspect the "
            "weights of this checkpoint, or compute features in float32."
        )


def write_gram_file(path: Path, gram: Tensor, n: int, identity: Identity, version: int) -> None:
    """Write a matrix that [`check_gram`] has accepted. The arguments are those of [`read_gram_file`]."""
    write_tensors(path, {"gram": gram}, identity, version, n=n, trace=_trace(gram))


def read_gram_file(path: Path, width: int, n: int, identity: Identity, version: int) -> Gram:
    """Read a matrix.

    Args:
        path: the file.
        width: k.
        n: number of rows that it has to sum over.
        identity: what it has to be computed from.
        version: the format version of the store.

    Raises:
        StoreError: the file is missing or damaged, or was computed from something else.
    """
    specs: Mapping[str, TensorSpec] = {"gram": TensorSpec((width, width), _DTYPES)}
    matrix = read_tensors(path, identity, specs, version=version, n=n)["gram"]
    saved = read_header(path, identity, specs, version, n=n).get("trace")
    found = _trace(matrix)
    # In format 1 nothing but this comparison protects the number, from which λ is derived. The bound is that of a sum
    # of k terms in another order; both sums are taken in float64.
    if not isinstance(saved, float) or not math.isclose(saved, found, rel_tol=width * 2.0**-52, abs_tol=0.0):
        raise StoreError(
            f"{path} says that the trace is {saved!r}; its matrix has {found!r}. Delete this file and run the same "
            "command again."
        )
    return Gram(matrix, saved, n)


def _trace(matrix: Tensor) -> float:
    return float(matrix.diagonal().sum(dtype=torch.float64))
