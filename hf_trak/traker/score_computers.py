"""The score computers of the `trak` API, which multiply out X (XᵀX)⁻¹ for all train examples.

XᵀX is summed in float64 and kept in at least float32, whatever the dtype of the features: in float16 it overflows long
before 60,000 rows. A matrix that cannot be inverted is an error, never a NaN.

Features and scores in host memory pass through the GPU block by block, see `hf_trak.runtime.transfers`.
"""

import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from hf_trak.errors import NonFiniteError, SingularGramError
from hf_trak.runtime.checks import check_finite_rows, checked_int, free_bytes, non_finite_rows
from hf_trak.runtime.transfers import download, uploaded
from hf_trak.scores.ridge import RidgeSystem


def get_matrix_mult(
    features: Tensor,
    target_grads: Tensor,
    target_dtype: torch.dtype | None = None,
    batch_size: int = 8096,
    use_blockwise: bool = False,
) -> Tensor:
    """Compute features · target_gradsᵀ, with sums in at least float32.

    Args:
        features (`torch.Tensor` of shape `(n, k)`):
            Features of the train examples.
        target_grads (`torch.Tensor` of shape `(m, k)`):
            Projected gradients of the targets.
        target_dtype (`torch.dtype`, *optional*):
            Dtype of the result. By default that of `features`.
        batch_size (`int`, *optional*, defaults to 8096):
            Rows and columns of the result per block, where it is computed block by block.
        use_blockwise (`bool`, *optional*, defaults to `False`):
            Compute block by block even if the result fits into the memory of the device.

    Returns:
        `torch.Tensor` of shape `(n, m)`: on the device of `features`, or on the CPU where it is computed block by
        block.

    Raises:
        ValueError: the shapes do not fit.
    """
    target_dtype = features.dtype if target_dtype is None else target_dtype
    if not use_blockwise and (
        features.device.type == "cpu"
        or get_output_memory(features, target_grads, target_dtype) < get_free_memory(features.device)
    ):
        return get_matrix_mult_standard(features, target_grads, target_dtype)
    return get_matrix_mult_blockwise(features, target_grads, target_dtype, batch_size)


def get_matrix_mult_blockwise(features: Tensor, target_grads: Tensor, target_dtype: torch.dtype, bs: int) -> Tensor:
    """Compute features · target_gradsᵀ in blocks on the device of `features`, and collect them on the CPU.

    A block is computed while the blocks before it are on their way to the CPU, see `hf_trak.runtime.transfers`.

    Args:
        features (`torch.Tensor` of shape `(n, k)`):
            Features of the train examples.
        target_grads (`torch.Tensor` of shape `(m, k)`):
            Projected gradients of the targets.
        target_dtype (`torch.dtype`):
            Dtype of the result.
        bs (`int`):
            Rows and columns of a block.

    Returns:
        `torch.Tensor` of shape `(n, m)`, on the CPU.

    Raises:
        TypeError: `bs` is not an integer.
        ValueError: the shapes do not fit, or `bs` is below 1.
    """
    _check_factors(features, target_grads)
    bs = checked_int(bs, "bs", 1)
    result = torch.empty(features.shape[0], target_grads.shape[0], dtype=target_dtype)
    blocks = itertools.product(_slices(features.shape[0], bs), _slices(target_grads.shape[0], bs))
    products = (
        (get_matrix_mult_standard(features[rows], target_grads[columns], target_dtype), result[rows, columns])
        for rows, columns in blocks
    )
    download(products, features.device)
    return result


def get_matrix_mult_standard(features: Tensor, target_grads: Tensor, target_dtype: torch.dtype) -> Tensor:
    """Compute features · target_gradsᵀ in one product on the device of `features`, with sums in at least float32.

    Args:
        features (`torch.Tensor` of shape `(n, k)`):
            Features of the train examples.
        target_grads (`torch.Tensor` of shape `(m, k)`):
            Projected gradients of the targets.
        target_dtype (`torch.dtype`):
            Dtype of the result.

    Returns:
        `torch.Tensor` of shape `(n, m)`.

    Raises:
        ValueError: the shapes do not fit.
    """
    _check_factors(features, target_grads)
    dtype = torch.promote_types(torch.promote_types(features.dtype, target_grads.dtype), torch.float32)
    return (features.to(dtype) @ target_grads.to(device=features.device, dtype=dtype).T).to(target_dtype)


def get_output_memory(features: Tensor, target_grads: Tensor, target_dtype: torch.dtype) -> int:
    """Count the bytes of features · target_gradsᵀ in `target_dtype`.

    Args:
        features (`torch.Tensor` of shape `(n, k)`):
            Left factor.
        target_grads (`torch.Tensor` of shape `(m, k)`):
            Right factor.
        target_dtype (`torch.dtype`):
            Dtype of the product.

    Returns:
        `int`: n · m times the size of an element.
    """
    return features.shape[0] * target_grads.shape[0] * target_dtype.itemsize


def get_free_memory(device: torch.device | str) -> int:
    """Return how many bytes torch can still allocate on a device.

    Args:
        device (`torch.device` or `str`):
            A GPU or the CPU.

    Returns:
        `int`: free memory of the GPU plus what torch's allocator holds unused, or the free memory of the system.

    Raises:
        ValueError: the free memory of this kind of device is not known.
    """
    return free_bytes(device)


def _check_factors(features: Tensor, target_grads: Tensor) -> None:
    if features.ndim != 2 or target_grads.ndim != 2 or features.shape[1] != target_grads.shape[1]:
        raise ValueError(
            f"The factors have shapes {tuple(features.shape)} and {tuple(target_grads.shape)}. Expected (n, k) and "
            "(m, k)."
        )


def _slices(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


class AbstractScoreComputer(ABC):
    """Computes features from gradients, and scores from features.

    Args:
        dtype (`torch.dtype`):
            Dtype of the features that [`~AbstractScoreComputer.get_x_xtx_inv`] returns.
        device (`torch.device` or `str`):
            Where products are computed. It is not touched before the first product.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device | str) -> None:
        self.dtype = dtype
        self.device = device

    @abstractmethod
    def get_xtx(self, grads: Tensor) -> Tensor:
        """Compute the Gram matrix XᵀX.

        Args:
            grads (`torch.Tensor` of shape `(n, k)`):
                Projected gradients X of the train examples.

        Returns:
            `torch.Tensor` of shape `(k, k)`.
        """

    @abstractmethod
    def get_x_xtx_inv(self, grads: Tensor, xtx: Tensor) -> Tensor:
        """Compute the features X (XᵀX)⁻¹.

        Args:
            grads (`torch.Tensor` of shape `(n, k)`):
                Projected gradients X of the train examples.
            xtx (`torch.Tensor` of shape `(k, k)`):
                XᵀX.

        Returns:
            `torch.Tensor` of shape `(n, k)`.
        """

    @abstractmethod
    def get_scores(self, features: Tensor, target_grads: Tensor, accumulator: Tensor) -> None:
        """Add features · tᵀ to `accumulator`, in place.

        Args:
            features (`torch.Tensor` of shape `(n, k)`):
                Features of the train examples.
            target_grads (`torch.Tensor` of shape `(m, k)`):
                Projected gradients t of the targets.
            accumulator (`torch.Tensor` of shape `(n, m)`):
                Sum of the products of all checkpoints so far.
        """


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
    """Compute features · target_gradsᵀ on a device block by block, for factors in host memory.

    Blocks of rows go to the device, and blocks of the product come back, while other blocks are computed.

    Args:
        features (`torch.Tensor` of shape `(n, k)`):
            Left factor.
        target_grads (`torch.Tensor` of shape `(m, k)`):
            Right factor. The device holds all its rows at once.
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
        check_finite_rows(block, "feature vector", start)
        wide = block.to(gram)
        gram.addmm_(wide.T, wide)
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
