"""The score computers of the `trak` API, which multiply out X (XᵀX)⁻¹ for all train examples.

XᵀX is summed in float64 and kept in at least float32, whatever the dtype of the features: in float16 it overflows long
before 60,000 rows. A matrix that cannot be inverted is an error, never a NaN.

Features and scores in host memory pass through the GPU block by block, see `hf_trak.runtime.transfers`.
"""

import logging
from collections.abc import Iterator

import torch
from torch import Tensor

from hf_trak.errors import NonFiniteError, SingularGramError
from hf_trak.runtime.checks import checked_int
from hf_trak.runtime.finite import check_finite_rows, non_finite_rows
from hf_trak.runtime.transfers import download, uploaded
from hf_trak.scores.ridge import RidgeSystem, gram_update
from hf_trak.traker.products import get_matrix_mult
from hf_trak.traker.score_computers.base import AbstractScoreComputer

logger = logging.getLogger(__name__)


class BasicSingleBlockScoreComputer(AbstractScoreComputer):
    """Computes everything in one block, without a ridge (λ = 0). Meant for tests and small problems.

    Args:
        dtype (`torch.dtype`):
            Dtype of the features that `get_x_xtx_inv` returns.
        device (`torch.device` or `str`):
            Not used: products are computed where the gradients are.
    """

    def get_xtx(self, grads: Tensor) -> Tensor:
        """Compute XᵀX `(k, k)` in float32 or better. Raises `NonFiniteError` naming the row that is not finite."""
        return _gram(grads, self.dtype, grads.device, max(1, grads.shape[0]))

    def get_x_xtx_inv(self, grads: Tensor, xtx: Tensor) -> Tensor:
        """Compute X (XᵀX)⁻¹ `(n, k)` in `self.dtype`.

        Raises:
            SingularGramError: XᵀX is singular or not finite.
            NonFiniteError: a feature is not finite, or overflows `self.dtype`; names its row.
        """
        inverse = _inverse(grads, xtx, 0.0)
        return _checked_cast(grads.to(inverse) @ inverse, self.dtype)

    def get_scores(self, features: Tensor, target_grads: Tensor, accumulator: Tensor) -> None:
        """Add features · tᵀ to `accumulator` `(n, m)`, in place. Raises `NonFiniteError` naming the train row."""
        _accumulate(features, target_grads, accumulator)


class BasicScoreComputer(AbstractScoreComputer):
    """Computes features and scores block by block. The inverse of XᵀX + λI is divided by its mean absolute entry.

    That division, which the `trak` API has, keeps features within the range of float16. It multiplies all scores of a
    checkpoint by one number: rankings within a checkpoint stay, but checkpoints get other weights in the average.

    Args:
        dtype (`torch.dtype`):
            Dtype of the features that [`~BasicScoreComputer.get_x_xtx_inv`] returns.
        device (`torch.device` or `str`):
            Where products are computed. It is not touched before the first product.
        CUDA_MAX_DIM_SIZE (`int`, *optional*, defaults to 20000):
            Rows of X per block.
        logging_level (`int`, *optional*, defaults to `logging.INFO`):
            Level of this class's logger.
        lambda_reg (`float`, *optional*, defaults to 0.0):
            λ, absolute, added to the diagonal of XᵀX.

    Raises:
        TypeError: the block size is not an integer.
        ValueError: the block size is below 1, or λ is negative or not finite.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device | str,
        CUDA_MAX_DIM_SIZE: int = 20_000,  # spelled as the `trak` API spells it
        logging_level: int = logging.INFO,
        lambda_reg: float = 0.0,
    ) -> None:
        super().__init__(dtype, device)
        if not 0 <= lambda_reg < float("inf"):
            raise ValueError(f"`lambda_reg` is {lambda_reg}. Expected a finite number of at least 0.")
        self.CUDA_MAX_DIM_SIZE = checked_int(CUDA_MAX_DIM_SIZE, "CUDA_MAX_DIM_SIZE", 1)
        self.lambda_reg = lambda_reg
        self.logger = logger.getChild(type(self).__name__)
        self.logger.setLevel(logging_level)

    def get_xtx(self, grads: Tensor) -> Tensor:
        """Compute XᵀX `(k, k)` on `self.device`, in float32 or better. Raises `NonFiniteError` naming the row that is
        not finite.
        """
        return _gram(grads, self.dtype, self.device, self.CUDA_MAX_DIM_SIZE)

    def get_x_xtx_inv(self, grads: Tensor, xtx: Tensor) -> Tensor:
        """Compute X (XᵀX + λI)⁻¹ `(n, k)` in `self.dtype` on `self.device`, divided by the inverse's mean absolute
        entry.

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
        """Add features · tᵀ to `accumulator` `(n, m)`, in place. Raises `NonFiniteError` naming the train row."""
        self.logger.debug("Scoring %d train examples for %d targets.", features.shape[0], target_grads.shape[0])
        device = torch.device(self.device)
        if features.device.type == "cpu" and device.type != "cpu":
            scores = product_through_device(features, target_grads, device, self.CUDA_MAX_DIM_SIZE)
            _add(scores, accumulator)
        else:
            _accumulate(features, target_grads, accumulator)


def product_through_device(
    features: Tensor, target_grads: Tensor, device: torch.device, block_size: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Compute features · target_gradsᵀ on a device, block by block, for factors in host memory.

    Blocks of rows go to the device, and blocks of the product come back, while other blocks are computed.

    Args:
        features (`torch.Tensor` of shape `(n, k)`):
            Left factor.
        target_grads (`torch.Tensor` of shape `(m, k)`):
            Right factor, of which the device holds all rows at once.
        device (`torch.device`):
            Where the products are computed.
        block_size (`int`):
            Rows and columns of the product per block.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`):
            Dtype of the products.

    Returns:
        `torch.Tensor` of shape `(n, m)` in `dtype`, in host memory.
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
    """Yield `(start, block)` for consecutive blocks of rows, on a device."""
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
    """Compute (XᵀX + λI)⁻¹ in float64."""
    n, k = grads.shape
    if lam == 0 and n <= k:
        raise SingularGramError(
            f"XᵀX of {n} train example(s) and {k} features is singular without a ridge (λ = 0), which needs more "
            "examples than features. Pass `lambda_reg`, about 0.1 · trace(XᵀX) / min(n, k), or lower `proj_dim`."
        )
    return RidgeSystem(xtx.cpu() if xtx.device.type == "mps" else xtx, lam).inverse()


def _accumulate(features: Tensor, target_grads: Tensor, accumulator: Tensor) -> None:
    # The product is computed and added in float32, so that a float16 accumulator is rounded only once.
    dtype = torch.promote_types(features.dtype, torch.float32)
    _add(get_matrix_mult(features=features, target_grads=target_grads, target_dtype=dtype).detach(), accumulator)


def _add(scores: Tensor, accumulator: Tensor) -> None:
    scores = _checked_cast(scores.to(accumulator.device) + accumulator, accumulator.dtype)
    accumulator.copy_(scores)


def _checked_cast(values: Tensor, dtype: torch.dtype, start: int = 0) -> Tensor:
    check_finite_rows(values, "result", start)
    cast = values.to(dtype)
    if dtype.itemsize < values.dtype.itemsize and (overflowing := non_finite_rows(cast)):
        raise NonFiniteError(
            f"Row {start + overflowing[0]} of the result overflows {dtype}. Expected values up to "
            f"{torch.finfo(dtype).max:g}. Compute in float32 (`use_half_precision=False`)."
        )
    return cast
