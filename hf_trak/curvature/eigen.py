"""Eigendecompositions of the sums of the first pass."""

import logging

import torch
from torch import Tensor

from hf_trak.errors import NonFiniteError

logger = logging.getLogger(__name__)

_JITTER = 1e-12
"""Added to the diagonal, relative to its mean, where LAPACK does not converge."""


def eigenbasis(total: Tensor, count: int, what: str) -> tuple[Tensor, Tensor]:
    """Decompose a sum of outer products, in float64.

    Args:
        total: the sum, `(d, d)`, of which the lower triangle is read.
        count: by which it is divided first, so that no decomposition sees huge numbers.
        what: name of the parameter and the side, for errors.

    Returns:
        Eigenvalues `(d,)`, ascending, at least 0, float64; and eigenvectors as columns `(d, d)`, float32.

    Raises:
        NonFiniteError: the sum is not finite.
    """
    if not bool(torch.isfinite(total).all()):
        raise NonFiniteError(
            f"The covariance of {what} is not finite. Expected finite numbers. Look for NaN or infinite values in "
            "the checkpoint, or compute in float32 (`model_dtype='float32'`)."
        )
    matrix = total.to("cpu", torch.float64) / max(count, 1)
    try:
        values, vectors = torch.linalg.eigh(matrix, UPLO="L")
    except torch.linalg.LinAlgError:
        shift = _JITTER * float(matrix.diagonal().mean())
        logger.warning("The covariance of %s did not converge; %.3g is added to its diagonal.", what, shift)
        matrix.diagonal().add_(shift)
        values, vectors = torch.linalg.eigh(matrix, UPLO="L")
    return values.clamp_(min=0), vectors.float()


def even_in_null_spaces(eigenvalues: Tensor, left_values: Tensor, right_values: Tensor) -> Tensor:
    """Average corrected eigenvalues over the directions that the rows behind a basis said nothing about.

    These directions span the null space of a covariance, and a decomposition may return any basis of it: rounding
    chooses. Gradients of other rows, or with other labels, do have parts there. The mean over the null space, of
    Λ = mean_b (Q_leftᵀ G_b Q_right)∘², is the same for every basis of it.

    Args:
        eigenvalues: Λ `(I, J)`.
        left_values: eigenvalues of the left covariance, `(I,)`.
        right_values: those of the right one, `(J,)`.

    Returns:
        Λ `(I, J)`.
    """
    found = eigenvalues.clone()
    for view, values in ((found, left_values), (found.T, right_values)):
        null = values <= len(values) * torch.finfo(torch.float32).eps * values.max()
        if bool(null.any()):
            view[null] = view[null].mean(0)
    return found
