"""Checks of score matrices: `(n, m)`, training rows × targets, finite."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from hf_trak.errors import NonFiniteError


def checked_matrix(values: ArrayLike, name: str, shape: tuple[int, int] | None = None) -> np.ndarray:
    """Return a matrix as float64.

    Args:
        values (`ArrayLike` of shape `(n, m)`):
            The matrix, training rows × targets.
        name (`str`):
            Its name in messages.
        shape (`tuple[int, int]`, *optional*):
            The shape `(n, m)` that it must have. By default any.

    Returns:
        `np.ndarray` of shape `(n, m)`, float64: the values.

    Raises:
        ValueError: the array has another shape, such as the transposed one.
        NonFiniteError: a value is NaN or infinite.
    """
    matrix = np.asarray(values, dtype=np.float64)
    if matrix.ndim != 2 or matrix.size == 0:
        raise ValueError(f"`{name}` has the shape {matrix.shape}. Expected (training rows, targets).")
    if shape is not None and matrix.shape != shape:
        remedy = " It looks transposed: pass its `.T`." if matrix.shape == shape[::-1] else ""
        raise ValueError(f"`{name}` has the shape {matrix.shape}. Expected {shape}, training rows × targets.{remedy}")
    if not np.isfinite(matrix).all():
        row, column = np.argwhere(~np.isfinite(matrix))[0]
        raise NonFiniteError(
            f"`{name}` holds NaN or infinite values, the first for row {row} and target {column}. Expected finite "
            "ones."
        )
    return matrix


def checked_scores(values: ArrayLike, name: str, shape: tuple[int, int] | None = None) -> np.ndarray:
    """Return a matrix as float64; without a known shape it must not have more targets than training rows.

    More targets than training rows are most often a transposed matrix, which nothing else would show.

    Args:
        values (`ArrayLike` of shape `(n, m)`):
            The matrix, training rows × targets.
        name (`str`):
            Its name in messages.
        shape (`tuple[int, int]`, *optional*):
            The shape `(n, m)` that it must have, which the caller's argument `shape` gives.

    Returns:
        `np.ndarray` of shape `(n, m)`, float64: the values.

    Raises:
        ValueError: the array has another shape, or more columns than rows with no shape given.
        NonFiniteError: a value is NaN or infinite.
    """
    matrix = checked_matrix(values, name, shape)
    if shape is None and matrix.shape[0] < matrix.shape[1]:
        raise ValueError(
            f"`{name}` has the shape {matrix.shape}, fewer training rows than targets. Expected (training rows, "
            f"targets). It may be transposed: pass its `.T`, or `shape={matrix.shape}` if that is meant."
        )
    return matrix


def checked_matrices(
    named: Mapping[str, Mapping[str, ArrayLike]], shape: tuple[int, int] | None = None
) -> dict[str, np.ndarray]:
    """Return all matrices of some arguments, by their names, if they have one shape.

    Args:
        named (`Mapping[str, Mapping[str, ArrayLike]]`):
            By argument (`"scores"`, say), matrices `(n, m)` by name.
        shape (`tuple[int, int]`, *optional*):
            The shape `(n, m)`. By default that of the first matrix, see [`checked_scores`].

    Returns:
        `dict[str, np.ndarray]`: the matrices, float64.

    Raises:
        TypeError: an argument is no mapping.
        ValueError: a name is empty or given twice, there is no matrix, or shapes do not fit.
        NonFiniteError: a value is NaN or infinite.
    """
    found: dict[str, np.ndarray] = {}
    for argument, matrices in named.items():
        if not isinstance(matrices, Mapping):
            raise TypeError(
                f"`{argument}` is a {type(matrices).__name__}. Expected matrices by name, such as "
                f'`{argument}={{"trak": …}}`.'
            )
        for name, values in matrices.items():
            if not isinstance(name, str) or not name or name in found:
                raise ValueError(f"`{argument}` has the name {name!r}. Expected texts, each of which occurs once.")
            label = f"{argument}[{name!r}]"
            found[name] = matrix = checked_scores(values, label, shape)
            shape = (matrix.shape[0], matrix.shape[1])
    if not found:
        raise ValueError(f"{', '.join(f'`{name}`' for name in named)}: no matrix is given. Expected at least one.")
    return found
