"""The ridge regression in blocks of columns: XᵀX without the entries that join two blocks.

Block b of k_b contiguous columns has a Gram matrix of its own, and a ridge λ_b = `lambda_relative` · trace(X_bᵀX_b) /
min(n, k_b), or `lambda_reg`. Scores are the sums of the scores of the blocks: t (XᵀX + λI)⁻¹ xᵀ is replaced by
Σ_b t_b (X_bᵀX_b + λ_b I)⁻¹ x_bᵀ. That is another estimate than with the whole matrix, not an approximation with a
known error.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from hf_trak.scores.dual import extreme_eigenvalues
from hf_trak.scores.ridge import RidgeSystem, checked_rows, raise_singular, ridge_lambda
from hf_trak.scores.training_features import TrainingFeatures
from hf_trak.store.shards import Identity, TensorSpec
from hf_trak.store.solver_files import SolverFiles

_FACTS = ("trace", "largest_eigenvalue", "smallest_eigenvalue")


class BlockGrams:
    """The Gram matrices of the blocks of one checkpoint, a file for each."""

    def __init__(self, features: TrainingFeatures, files: SolverFiles, columns: int) -> None:
        """
        Args:
            features: X.
            files: where the matrices are kept.
            columns: columns of a block; the last one may have fewer.
        """
        self.features = features
        self.ranges = [range(first, min(first + columns, features.k)) for first in range(0, features.k, columns)]
        self._files = files
        self._columns = columns

    def ensure(self) -> None:
        """Compute and save the matrices that are missing. All processes call this together.

        Raises:
            StoreError: a shard or a saved file is damaged, or a file cannot be written.
            NonFiniteError: a feature is not finite; names its row.
        """
        processes = self.features.processes
        missing = processes.broadcast_from_main(
            lambda: [b for b in range(len(self.ranges)) if not self._files.exists(self._name(b))]
        )
        with processes.all_or_none():
            for index in processes.share(len(missing)):
                self._compute(missing[index])

    def _compute(self, block: int) -> None:
        columns = self.ranges[block]
        gram = torch.zeros(len(columns), len(columns), dtype=torch.float64, device=self.features.device)
        for _, piece in self.features.pieces(range(len(self.features.shards)), columns):
            gram.addmm_(piece.T, piece)
        gram = gram.cpu()
        smallest = 0 if self.features.n >= len(columns) else None
        facts = {"trace": float(gram.trace()), **extreme_eigenvalues(gram, smallest)}
        self._files.write(self._name(block), {"gram": gram}, self._identity(block), facts)

    def facts(self, block: int) -> dict[str, float]:
        """Read the trace and eigenvalues of a block. Raises `StoreError` if its file is damaged."""
        return self._files.facts(self._name(block), self._specs(block), self._identity(block), _FACTS)

    def read(self, block: int) -> Tensor:
        """Read the matrix of a block, `(k_b, k_b)`, float64. Raises `StoreError` if its file is damaged."""
        return self._files.read(self._name(block), self._specs(block), self._identity(block))[0]["gram"]

    def _name(self, block: int) -> str:
        return f"gram_block-{self._columns}-{block:05d}"

    def _identity(self, block: int) -> Identity:
        columns = self.ranges[block]
        return {"first_column": columns.start, "kind": "gram_block", "last_column": columns.stop - 1}

    def _specs(self, block: int) -> dict[str, TensorSpec]:
        size = len(self.ranges[block])
        return {"gram": TensorSpec((size, size), (torch.float64,))}


class BlockSystem:
    """(D + Λ)⁻¹ with the blocks D of XᵀX and Λ of λ_b I. All processes call its methods together.

    Attributes:
        lam (`float`): the mean of λ_b over the columns.
        condition (`float`):
            The largest condition number of a block in the 2-norm, (σ₁² + λ_b) / (σ² + λ_b) with its largest and
            smallest eigenvalues, of which the latter is 0 for more columns than rows.
        error (`None`): no bound is known.
    """

    error: ClassVar[None] = None

    def __init__(self, grams: BlockGrams, lambda_reg: float | None, lambda_relative: float) -> None:
        """
        Args:
            grams: the matrices, see [`BlockGrams.ensure`].
            lambda_reg: absolute ridge, see [`ridge_lambda`].
            lambda_relative: relative ridge.

        Raises:
            SingularGramError: all features are zero.
            StoreError: a file is damaged.
        """
        self._grams = grams
        facts = [grams.facts(block) for block in range(len(grams.ranges))]
        n, sizes = grams.features.n, [len(columns) for columns in grams.ranges]
        self.lambdas = [
            ridge_lambda(one["trace"], n, size, lambda_reg, lambda_relative)
            for one, size in zip(facts, sizes, strict=True)
        ]
        self.lam = sum(lam * size for lam, size in zip(self.lambdas, sizes, strict=True)) / self.k
        # blocks whose features are all zero, which no score depends on, would be singular under a relative ridge
        self._used = [block for block, one in enumerate(facts) if one["trace"] > 0]
        if not self._used:
            raise_singular(self.lam, "all features are zero")
        self.condition = max(_condition(facts[block], self.lambdas[block]) for block in self._used)

    @property
    def k(self) -> int:
        """Number of features, k."""
        return self._grams.features.k

    def solve(self, targets: Tensor) -> Tensor:
        """Compute t_b (X_bᵀX_b + λ_b I)⁻¹ for every row t and block b.

        Args:
            targets: `(m, k)`, any floating dtype, the same in all processes.

        Returns:
            `(m, k)`, float64, on the CPU, in every process.

        Raises:
            ValueError: the shape does not fit.
            NonFiniteError: a target is not finite; names its row.
            SingularGramError: the ridge of a block is too small.
            StoreError: a file is damaged.
        """
        wide, processes = checked_rows(targets, self.k, "target feature vector").cpu(), self._grams.features.processes
        result = torch.zeros_like(wide)
        with processes.all_or_none():
            for index in processes.share(len(self._used)):
                block = self._used[index]
                columns = self._slice(block)
                result[:, columns] = self._system(block).solve(wide[:, columns])
        return processes.add(result)  # every block comes from one process, the others add zeros

    def quadratic(self, features: Tensor, start: int = 0) -> Tensor:
        """Compute Σ_b x_b (X_bᵀX_b + λ_b I)⁻¹ x_bᵀ for every row x, in this process alone.

        Args:
            features: `(rows, k)`.
            start: index of the first row, for error messages.

        Returns:
            `(rows,)`, float64, never negative.

        Raises:
            As `solve`.
        """
        wide = checked_rows(features, self.k, "feature vector", start).cpu()
        result = torch.zeros(len(wide), dtype=torch.float64)
        for block in self._used:
            result += self._system(block).quadratic(wide[:, self._slice(block)], start)
        return result

    def training_quadratic(self, indices: Sequence[int]) -> Tensor:
        """Compute Σ_b x_b (X_bᵀX_b + λ_b I)⁻¹ x_bᵀ for the training rows x of some shards, in this process alone.

        Args:
            indices: the shards.

        Returns:
            `(rows of all these shards,)`, float64.

        Raises:
            As `solve`.
        """
        features = self._grams.features
        result = torch.zeros(sum(len(features.shards.plan.rows(index)) for index in indices), dtype=torch.float64)
        for block in self._used:
            system, first = self._system(block), 0
            for start, piece in features.pieces(indices, self._grams.ranges[block]):
                result[first : first + len(piece)] += system.quadratic(piece.cpu(), start)
                first += len(piece)
        return result

    def _system(self, block: int) -> RidgeSystem:
        return RidgeSystem(self._grams.read(block), self.lambdas[block])

    def _slice(self, block: int) -> slice:
        columns = self._grams.ranges[block]
        return slice(columns.start, columns.stop)


def _condition(facts: dict[str, float], lam: float) -> float:
    smallest = facts["smallest_eigenvalue"] + lam
    return (facts["largest_eigenvalue"] + lam) / smallest if smallest > 0 else math.inf
