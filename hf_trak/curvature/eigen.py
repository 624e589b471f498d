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
