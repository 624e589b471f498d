"""The score computers of the seed API, which multiply out X (XᵀX)⁻¹ for all train examples.

XᵀX is accumulated in float64 and kept in at least float32, whatever the dtype of the features: in float16 it is
infinite long before 60,000 rows. A matrix that cannot be inverted is an error, never a NaN.

Features and scores that are in host memory pass through the GPU block by block, see `hf_trak.runtime.transfers`.
"""

import logging
from collections.abc import Iterator

import torch
from torch import Tensor

from hf_trak.errors import NonFiniteError, SingularGramError
from hf_trak.runtime.transfers import download, uploaded
from hf_trak.scores.ridge import RidgeSystem, check_finite_rows, gram_update
from hf_trak.traker.products import get_matrix_mult
from hf_trak.traker.score_computers.base import AbstractScoreComputer

logger = logging.getLogger(__name__)


class BasicSingleBlockScoreComputer(AbstractScoreComputer):
    """Everything in one block, λ = 0: for tests and small problems."""

    def get_xtx(self, grads: Tensor) -> Tensor:
        """XᵀX `(k, k)`, float32 or better. Raises `NonFiniteError` naming the row of X that is not finite."""
        return _gram(grads, self.dtype, grads.device, max(1, grads.shape[0]))

    def get_x_xtx_inv(self, grads: Tensor, xtx: Tensor) -> Tensor:
        """X (XᵀX)⁻¹ `(n, k)` in `self.dtype`. Raises `SingularGramError`, or `NonFiniteError` where that overflows."""
        inverse = _inverse(grads, xtx, 0.0)
        return _checked_cast(grads.to(inverse) @ inverse, self.dtype)

    def get_scores(self, features: Tensor, target_grads: Tensor, accumulator: Tensor) -> None:
        """Add features · tᵀ to `accumulator` `(n, m)` in place. Raises `NonFiniteError` naming the train row."""
        _accumulate(features, target_grads, accumulator)


class BasicScoreComputer(AbstractScoreComputer):
    """Block by block, with λ, and with the inverse divided by its mean absolute value.

    That division (as in the seeds) keeps features within the range of float16. It multiplies all scores of a
    checkpoint by one number, so it does not change a ranking within a checkpoint, but it weighs checkpoints against
    each other.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device | str,
        CUDA_MAX_DIM_SIZE: int = 20_000,  # the seeds' spelling
        logging_level: int = logging.INFO,
        lambda_reg: float = 0.0,
    ) -> None:
        """
        Args:
            dtype: dtype of the features that `get_x_xtx_inv` returns.
            device: where products are computed.
            CUDA_MAX_DIM_SIZE: rows of X per block.
            logging_level: level of this class's logger.
            lambda_reg: λ, absolute, added to the diagonal of XᵀX.

        Raises:
            ValueError: the block size or λ is out of range.
        """
        super().__init__(dtype, device)
        if CUDA_MAX_DIM_SIZE < 1:
            raise ValueError(
                f"`CUDA_MAX_DIM_SIZE` is {CUDA_MAX_DIM_SIZE}. Expected a number of rows ≥ 1, such as 20000."
            )
        if not 0 <= lambda_reg < float("inf"):
            raise ValueError(f"`lambda_reg` is {lambda_reg}. Expected a finite number ≥ 0.")
        self.CUDA_MAX_DIM_SIZE = CUDA_MAX_DIM_SIZE
        self.lambda_reg = lambda_reg
        self.logger = logger.getChild(type(self).__name__)
        self.logger.setLevel(logging_level)

    def get_xtx(self, grads: Tensor) -> Tensor:
        """XᵀX `(k, k)` on `self.device`, float32 or better. Raises `NonFiniteError` naming the row that is not
        finite."""
        return _gram(grads, self.dtype, self.device, self.CUDA_MAX_DIM_SIZE)

    def get_x_xtx_inv(self, grads: Tensor, xtx: Tensor) -> Tensor:
        """X (XᵀX + λI)⁻¹ `(n, k)` in `self.dtype` on `self.device`, divided by the mean absolute entry of the inverse.

        Raises:
            SingularGramError: XᵀX + λI is singular or not finite.
            NonFiniteError: a feature is not finite, or overflows `self.dtype`; names its row.
        """
        inverse = _inverse(grads, xtx, self.lambda_reg)
        inverse = (inverse / inverse.abs().mean()).float().to(self.device)
        result = torch.empty(grads.shape, dtype=self.dtype, device=self.device)
        for start, block in _uploaded_blocks(grads, torch.device(self.device), self.CUDA_MAX_DIM_SIZE):
            result[start : start + block.shape[0]] = _checked_cast(block.float() @ inverse, self.dtype, start)
        return result

    def get_scores(self, features: Tensor, target_grads: Tensor, accumulator: Tensor) -> None:
        """Add features · tᵀ to `accumulator` `(n, m)` in place. Raises `NonFiniteError` naming the train row."""
        self.logger.debug("scores of %d train examples and %d targets", features.shape[0], target_grads.shape[0])
        device = torch.device(self.device)
        if features.device.type == "cpu" and device.type != "cpu":
            scores = product_through_device(features, target_grads, device, self.CUDA_MAX_DIM_SIZE)
            _add(scores, accumulator)
        else:
            _accumulate(features, target_grads, accumulator)


def product_through_device(
    features: Tensor, target_grads: Tensor, device: torch.device, block_size: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """features · target_gradsᵀ for factors in host memory, computed on a device block by block.

    Blocks of rows go to the device, and blocks of the product come back, while others are computed.

    Args:
        features: `(n, k)`.
        target_grads: `(m, k)`, held on the device as a whole.
        device: where the products are computed.
        block_size: rows and columns of the product per block.
        dtype: in which they are computed.

    Returns:
        `(n, m)` in `dtype`, in host memory.
    """
    targets = target_grads.to(device=device, dtype=dtype)
    result = torch.empty(features.shape[0], targets.shape[0], dtype=dtype)

    def products() -> Iterator[tuple[Tensor, Tensor]]:
        for row, block in _uploaded_blocks(features, device, block_size):
            rows, wide = slice(row, row + block.shape[0]), block.to(dtype)
            for column in range(0, targets.shape[0], block_size):
                columns = slice(column, min(column + block_size, targets.shape[0]))
                yield wide @ targets[columns].T, result[rows, columns]

    download(products(), device)
    return result


def _uploaded_blocks(rows: Tensor, device: torch.device, block_rows: int) -> Iterator[tuple[int, Tensor]]:
    """`(start, block)` for blocks of rows, on a device."""
    starts = range(0, rows.shape[0], block_rows)
    return zip(starts, uploaded((rows[start : start + block_rows] for start in starts), device), strict=True)


def _gram(grads: Tensor, dtype: torch.dtype, device: torch.device | str, block_rows: int) -> Tensor:
    # MPS has no float64.
    where = torch.device("cpu" if torch.device(device).type == "mps" else device)
    gram = torch.zeros(grads.shape[1], grads.shape[1], dtype=torch.float64, device=where)
    for start, block in _uploaded_blocks(grads, where, block_rows):
        gram_update(gram, block, start)
    kept = torch.promote_types(torch.promote_types(dtype, grads.dtype), torch.float32)
    return _checked_cast(gram, kept).to(device)


def _inverse(grads: Tensor, xtx: Tensor, lam: float) -> Tensor:
    """(XᵀX + λI)⁻¹, float64."""
    n, k = grads.shape
    if lam == 0 and n <= k:
        raise SingularGramError(
            f"XᵀX of {n} train example(s) and {k} features is singular, and λ is 0. Expected more examples than "
            "features, or a positive λ: pass `lambda_reg`, about 0.1 · trace(XᵀX) / min(n, k), or lower `proj_dim`."
        )
    return RidgeSystem(xtx.cpu() if xtx.device.type == "mps" else xtx, lam).inverse()


def _accumulate(features: Tensor, target_grads: Tensor, accumulator: Tensor) -> None:
    # The product is formed in float32 and added in float32, so that a float16 accumulator is rounded once.
    dtype = torch.promote_types(features.dtype, torch.float32)
    _add(get_matrix_mult(features=features, target_grads=target_grads, target_dtype=dtype).detach(), accumulator)


def _add(scores: Tensor, accumulator: Tensor) -> None:
    scores = _checked_cast(scores.to(accumulator.device) + accumulator, accumulator.dtype)
    accumulator.copy_(scores)


def _checked_cast(values: Tensor, dtype: torch.dtype, start: int = 0) -> Tensor:
    check_finite_rows(values, "result", start)
    cast = values.to(dtype)
    if dtype.itemsize < values.dtype.itemsize and not bool(cast.isfinite().all()):
        finite = cast.isfinite().reshape(cast.shape[0], -1).all(dim=1)
        raise NonFiniteError(
            f"Row {start + int((~finite).nonzero()[0])} of the result overflows {dtype}. Expected values up to "
            f"{torch.finfo(dtype).max:g}. Compute in float32 (`use_half_precision=False`)."
        )
    return cast
