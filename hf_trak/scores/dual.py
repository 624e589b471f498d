"""The dual form of the ridge regression: an n × n system if the rows are fewer than the features.

With K = XXᵀ `(n, n)`, the Woodbury identity gives

    (XᵀX + λI)⁻¹ = (I − Xᵀ(K + λI)⁻¹X) / λ

so that t (XᵀX + λI)⁻¹ takes one n × n system, and two products with X that stream over the rows. The two terms cancel
where XᵀX is large beside λ: errors of rounding are multiplied by the condition number, as in the primal form. For the
training rows themselves X (XᵀX + λI)⁻¹ Xᵀ = K(K + λI)⁻¹, which needs no features.
"""

from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from hf_trak.scores.ridge import check_condition, checked_rows, raise_singular
from hf_trak.scores.subspace import random_normals
from hf_trak.scores.training_features import TrainingFeatures
from hf_trak.store.shards import Identity, TensorSpec
from hf_trak.store.solver_files import SolverFiles

_DENSE = 1024

"""Size up to which all eigenvalues are computed in any case."""

_ITERATIONS = 100


def extreme_eigenvalues(matrix: Tensor, wanted: int | None) -> dict[str, float]:
    """Compute the largest eigenvalue of a matrix, and another one.

    Where all eigenvalues would take long and no other one is wanted, the largest comes from LOBPCG (Knyazev 2001, SIAM
    J. Sci. Comput. 23:517), from below, and the closer the more it stands out.

    Args:
        matrix: symmetric, positive semidefinite, float64.
        wanted: number of the other one in ascending order, or `None`, for which 0 is returned.

    Returns:
        `largest_eigenvalue` and `smallest_eigenvalue`.
    """
    if wanted is not None or len(matrix) <= _DENSE:
        values = torch.linalg.eigvalsh(matrix).clamp_min(0)
        return {
            "largest_eigenvalue": float(values[-1]),
            "smallest_eigenvalue": 0.0 if wanted is None else float(values[wanted]),
        }
    if not bool(matrix.diagonal().any()):
        return {"largest_eigenvalue": 0.0, "smallest_eigenvalue": 0.0}
    start = random_normals(len(matrix), 1, seed=0, model_id=0)
    values, _ = torch.lobpcg(matrix, X=start, largest=True, niter=_ITERATIONS, tol=1e-9)
    return {"largest_eigenvalue": float(values[0]), "smallest_eigenvalue": 0.0}


_NAME = "kernel"

_IDENTITY: Identity = {"kind": "kernel"}

_FACTS = ("trace", "largest_eigenvalue", "smallest_eigenvalue")

_SLICE_NUMBERS = 1 << 25

"""Numbers of X, over all rows, that are multiplied at a time: 256 MiB in float64."""

_TILE = 512

"""Rows and columns of a block of K, which one process computes as a whole."""

_ROWS_TOGETHER = 1024

"""Columns of (K + λI)⁻¹ that are computed at a time."""


def ensure_kernel(features: TrainingFeatures, files: SolverFiles) -> None:
    """Compute K = XXᵀ of a checkpoint and save it, unless that is done. All processes call this together.

    Raises:
        StoreError: a shard or a saved file is damaged, or a file cannot be written.
        NonFiniteError: a feature is not finite; names its row.
    """
    processes = features.processes
    if processes.broadcast_from_main(lambda: files.exists(_NAME)):
        return
    matrix = kernel(features)

    def keep() -> None:
        # the smallest of the k eigenvalues of XᵀX, which is 0 with fewer rows
        smallest = features.n - features.k if features.n >= features.k else None
        facts = {"trace": float(matrix.trace()), **extreme_eigenvalues(matrix, smallest)}
        files.write(_NAME, {"kernel": matrix}, _IDENTITY, facts)

    processes.broadcast_from_main(keep)


def kernel(features: TrainingFeatures) -> Tensor:
    """Compute K = XXᵀ, slice by slice of columns.

    Returns:
        `(n, n)`, float64, symmetric, in every process.

    Raises:
        As [`ensure_kernel`].
    """
    n, k, processes = features.n, features.k, features.processes
    bounds = [slice(first, min(first + _TILE, n)) for first in range(0, n, _TILE)]
    pairs = [(a, b) for a in bounds for b in bounds if b.start <= a.start]
    mine = [pairs[index] for index in processes.share(len(pairs))]
    result = torch.zeros(n, n, dtype=torch.float64, device=features.device)
    with processes.all_or_none():
        for columns in _column_slices(n, k):
            part = torch.empty(n, len(columns), dtype=torch.float64, device=features.device)
            for start, piece in features.pieces(range(len(features.shards)), columns):
                part[start : start + len(piece)] = piece
            for a, b in mine:
                result[a, b] += part[a] @ part[b].T
        for a, b in mine:
            if a == b:
                result[a, a] = result[a, a].tril() + result[a, a].tril(-1).T
            else:
                result[b, a] = result[a, b].T
    return processes.add(result.cpu())  # every block comes from one process, the others add zeros


def _column_slices(n: int, k: int) -> Iterator[range]:
    width = max(1, _SLICE_NUMBERS // n)
    return (range(first, min(first + width, k)) for first in range(0, k, width))


class DualSystem:
    """(XᵀX + λI)⁻¹ through the n × n matrix K. All processes call its methods together.

    Attributes:
        lam (`float`): λ.
        condition (`float`):
            Condition number of XᵀX + λI in the 2-norm: (σ₁² + λ) / λ with the largest eigenvalue σ₁² of XᵀX if
            the rows are fewer than the features, and otherwise (σ₁² + λ) / (σ_k² + λ).
        error (`float`): 0, since the solution is exact up to rounding.
    """

    error: ClassVar[float] = 0.0

    def __init__(self, features: TrainingFeatures, files: SolverFiles, lam: float) -> None:
        """
        Args:
            features: the features X.
            files: where [`ensure_kernel`] has saved K.
            lam: λ.

        Raises:
            SingularGramError: λ = 0, or XᵀX + λI cannot be told from a singular matrix.
            StoreError: the file of K is damaged.
        """
        self.lam = float(lam)
        self._features = features
        self._files = files
        if self.lam <= 0:
            reason = f"there are {features.n} training examples and {features.k} features"
            raise_singular(self.lam, f"{reason}, and the dual form divides by λ")
        facts = kernel_facts(features, files)
        self.condition = (facts["largest_eigenvalue"] + self.lam) / (facts["smallest_eigenvalue"] + self.lam)
        check_condition(self.condition, self.lam, torch.float64, features.k)
        self._cholesky: Tensor | None = None

    @property
    def k(self) -> int:
        """Return the number of features, k."""
        return self._features.k

    def solve(self, targets: Tensor) -> Tensor:
        """Compute t (XᵀX + λI)⁻¹ for every row t.

        Args:
            targets: `(m, k)`, any floating dtype, the same in all processes.

        Returns:
            `(m, k)`, float64, on the CPU, in every process.

        Raises:
            ValueError: the shape does not fit.
            NonFiniteError: a target or a feature is not finite; names its row.
        """
        wide = checked_rows(targets, self.k, "target feature vector").cpu()
        products = self._features.times(wide.T)
        return (wide - self._features.combine(self._solved(products))).div_(self.lam)

    def quadratic(self, features: Tensor, start: int = 0) -> Tensor:
        """Compute x (XᵀX + λI)⁻¹ xᵀ for every row x, training rows or others.

        Args:
            features: `(rows, k)`, the same in all processes.
            start: index of the first row, for error messages.

        Returns:
            `(rows,)`, float64, never negative.

        Raises:
            As `solve`.
        """
        wide = checked_rows(features, self.k, "feature vector", start).cpu()
        products = self._features.times(wide.T)
        inner = (products * self._solved(products)).sum(dim=0)
        return (wide.square().sum(dim=1) - inner).div_(self.lam).clamp_min_(0)

    def training_quadratic(self, indices: Sequence[int]) -> Tensor:
        """Compute x (XᵀX + λI)⁻¹ xᵀ for the training rows x of some shards, from K alone: the diagonal of K(K + λI)⁻¹.

        Args:
            indices: the shards, which may be others in each process.

        Returns:
            `(rows of all these shards,)`, float64.
        """
        n = self._features.n
        whole = self._features.processes.broadcast_tensor_from_main(self._leverages, (n,))
        rows = [self._features.shards.plan.rows(index) for index in indices]
        return torch.cat([whole[:0], *(whole[one.start : one.stop] for one in rows)])

    def _leverages(self) -> Tensor:
        cholesky, matrix = self._factor(), read_kernel(self._features, self._files)
        n, result = self._features.n, torch.empty(self._features.n, dtype=torch.float64)
        # The product, and not 1 − λ(K + λI)⁻¹, which has no digits left where λ is large.
        for first in range(0, n, _ROWS_TOGETHER):
            rows = slice(first, min(first + _ROWS_TOGETHER, n))
            unit = torch.zeros(n, rows.stop - first, dtype=torch.float64)
            unit[rows].diagonal().fill_(1)
            inverse = torch.cholesky_solve(unit, cholesky)
            result[rows] = (matrix[:, rows] * inverse).sum(dim=0)
        return result.clamp_min_(0)

    def _solved(self, products: Tensor) -> Tensor:
        """Compute (K + λI)⁻¹·B in the main process, and return it in all."""

        def solve() -> Tensor:
            return torch.cholesky_solve(products, self._factor())

        return self._features.processes.broadcast_tensor_from_main(solve, tuple(products.shape))

    def _factor(self) -> Tensor:
        """Return the Cholesky factor of K + λI. Only the main process needs it."""
        if self._cholesky is None:
            matrix = read_kernel(self._features, self._files).clone()
            matrix.diagonal().add_(self.lam)
            self._cholesky, info = torch.linalg.cholesky_ex(matrix)
            if int(info) != 0:
                raise_singular(self.lam, f"the leading minor of order {int(info)} of XXᵀ + λI is not positive")
        return self._cholesky


def kernel_facts(features: TrainingFeatures, files: SolverFiles) -> dict[str, float]:
    """Read the trace and eigenvalues of the saved K. Raises `StoreError` if the file is damaged."""
    return files.facts(_NAME, _specs(features), _IDENTITY, _FACTS)


def read_kernel(features: TrainingFeatures, files: SolverFiles) -> Tensor:
    """Read the saved K, `(n, n)`, float64, memory-mapped. Raises `StoreError` if the file is damaged."""
    return files.read(_NAME, _specs(features), _IDENTITY)[0]["kernel"]


def _specs(features: TrainingFeatures) -> dict[str, TensorSpec]:
    return {"kernel": TensorSpec((features.n, features.n), (torch.float64,))}
