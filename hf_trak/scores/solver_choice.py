"""The choice of a solver for the ridge regression, by numbers of rows and features and by memory, and its cost.

| solver | system | exact | chosen by `"auto"` |
|---|---|---|---|
| `primal` | XᵀX, k × k | yes | XᵀX is there; k ≤ 4,096; or k ≤ n and k ≤ 16,384 and it fits |
| `dual` | XXᵀ, n × n | yes | rows are few; or n < k; where n ≤ 16,384 and it fits |
| `low_rank` | the r largest eigenvalues of XᵀX | no, with a bound | otherwise |
| `block` | XᵀX in blocks of columns | no | never |

A system fits if three float64 matrices of its size take at most half of the memory that is free in the main process.
Rows are few where k > 1,024 and n ≤ k / 2: then XXᵀ has at most a quarter of the numbers of XᵀX, and its factor takes
at most an eighth of the time, which counts for every call.
"""

from dataclasses import dataclass
from typing import Any, Literal

from hf_trak.config import SolverName
from hf_trak.runtime.checks import checked_int
from hf_trak.scores.subspace import ALGORITHM, PASSES, PROBES, width_of
from hf_trak.scores.training_features import PIECE_NUMBERS

Kind = Literal["primal", "dual", "low_rank", "block"]

DEFAULT_RANK = 2048
DEFAULT_COLUMNS = 4096
PLAIN_PRIMAL = 4096
"""Largest k for which XᵀX is used whatever the memory is, unless rows are few."""
SMALL_PRIMAL = 1024
"""Largest k for which XᵀX is used however few rows there are: it costs next to nothing."""
LARGEST_SYSTEM = 16_384
"""Largest n or k of an exact system that is chosen unasked."""
_MATRICES = 3
_FLOAT64 = 8


@dataclass(frozen=True)
class SolverChoice:
    """A solver, and why it was chosen.

    Attributes:
        kind (`str`): the solver.
        size (`int`): k, n, the rank r, or the columns of a block.
        reason (`str`): what decided, for the log.
    """

    kind: Kind
    size: int
    reason: str

    @property
    def identity(self) -> dict[str, Any]:
        """What scores depend on beside the features and λ, as plain JSON."""
        content: dict[str, Any] = {"kind": self.kind}
        if self.kind == "low_rank":
            content |= {"algorithm": ALGORITHM, "rank": self.size}
        if self.kind == "block":
            content["columns"] = self.size
        return content


@dataclass(frozen=True)
class SolverCost:
    """What a solver takes for one checkpoint.

    Attributes:
        kind (`str`): the solver.
        size (`int`): k, n, the rank r, or the columns of a block.
        exact (`bool`): whether its scores are exact up to rounding.
        memory (`int`): bytes of its matrices and buffers in the main process, beside targets and one shard.
        disk (`int`): bytes that it keeps in the store.
        multiply_adds (`int`): multiplications and additions, for the first attribution of m targets.
    """

    kind: Kind
    size: int
    exact: bool
    memory: int
    disk: int
    multiply_adds: int


def choose_solver(
    solver: SolverName, solver_rank: int | None, n: int, k: int, free: int, gram_exists: bool = False
) -> SolverChoice:
    """Choose a solver.

    Args:
        solver: the setting.
        solver_rank: rank of `low_rank`, or columns per block of `block`; `None` for the defaults.
        n: number of training rows.
        k: number of features.
        free: bytes of memory that are free.
        gram_exists: whether XᵀX has been computed.

    Raises:
        ValueError: the rank is larger than min(n, k).
    """
    if solver == "primal":
        return SolverChoice("primal", k, "it is set")
    if solver == "dual":
        return SolverChoice("dual", n, "it is set")
    if solver == "low_rank":
        return SolverChoice("low_rank", _rank(solver_rank, n, k), "it is set")
    if solver == "block":
        return SolverChoice("block", min(solver_rank or DEFAULT_COLUMNS, k), "it is set")
    if gram_exists:
        return SolverChoice("primal", k, "XᵀX is there already")
    if few_rows(n, k) and _fits(n, free):
        return SolverChoice("dual", n, f"n = {n:,} is small beside k = {k:,}")
    if k <= PLAIN_PRIMAL or (k <= n and _fits(k, free)):
        return SolverChoice("primal", k, f"k = {k:,} is small enough")
    if n < k and _fits(n, free):
        return SolverChoice("dual", n, f"k = {k:,} is large, and n = {n:,} is small enough")
    needed, size = _MATRICES * _FLOAT64 * min(n, k) ** 2, min(n, k)
    limit = f"of at most {LARGEST_SYSTEM:,}" if size > LARGEST_SYSTEM else f"in half of {free / 2**30:,.1f} GiB"
    reason = f"exact systems of size {size:,} take {needed / 2**30:,.1f} GiB, and are chosen where they are {limit}"
    return SolverChoice("low_rank", _rank(solver_rank, n, k), reason)


def few_rows(n: int, k: int) -> bool:
    """Tell whether there are so few rows that XXᵀ is much cheaper than XᵀX.

    Args:
        n: number of training rows.
        k: number of features.
    """
    return k > SMALL_PRIMAL and 2 * n <= k


def solver_cost(choice: SolverChoice, n: int, k: int, m: int) -> SolverCost:
    """Work out what a solver takes.

    Args:
        choice: the solver.
        n: number of training rows.
        k: number of features.
        m: number of targets.
    """
    size = choice.size
    system = _MATRICES * _FLOAT64 * size**2
    buffers = (4 + _FLOAT64) * min(PIECE_NUMBERS, n * k)  # a piece of the features, as it is read and in float64
    if choice.kind == "primal":
        work = n * k * k + k**3 // 6 + m * k * k
        return SolverCost("primal", size, True, system, _FLOAT64 * k * k, work)
    if choice.kind == "dual":
        work = n * n * k // 2 + n**3 // 6 + m * n * (n + 2 * k)
        return SolverCost("dual", size, True, system + buffers, _FLOAT64 * n * n, work)
    if choice.kind == "block":
        work = n * k * size + k * size * size // 6 + m * k * size
        return SolverCost("block", size, False, system + buffers, _FLOAT64 * k * size, work)
    width = width_of(size, n, k) + PROBES
    memory = k * (_FLOAT64 * width + 4 * width + 4 * size) + system + buffers
    disk = 4 * k * size + _FLOAT64 * size * (size + 1)
    work = 2 * n * k * (2 * width + (PASSES - 3) * PROBES) + 5 * k * width * width + 2 * m * k * size
    return SolverCost("low_rank", size, False, memory, disk, work)


def solver_costs(
    solver: SolverName, solver_rank: int | None, n: int, k: int, m: int, free: int
) -> tuple[SolverCost, tuple[SolverCost, ...]]:
    """Work out the cost of the solver that will be chosen, and those of the others with their defaults.

    Args:
        solver, solver_rank, n, k, free: see [`choose_solver`].
        m: number of targets.

    Raises:
        ValueError: the rank is larger than min(n, k).
    """
    chosen = choose_solver(solver, solver_rank, n, k, free)
    kinds: tuple[Kind, ...] = ("primal", "dual", "low_rank", "block")
    others = [choose_solver(kind, None, n, k, free) for kind in kinds if kind != chosen.kind]
    return solver_cost(chosen, n, k, m), tuple(solver_cost(one, n, k, m) for one in others)


def _fits(size: int, free: int) -> bool:
    return size <= LARGEST_SYSTEM and _MATRICES * _FLOAT64 * size**2 <= free // 2


def _rank(given: int | None, n: int, k: int) -> int:
    if given is None:
        return min(DEFAULT_RANK, n, k)
    remedy = "The features have no more eigenvalues; leave it out, or lower it."
    return checked_int(given, "solver_rank", 1, min(n, k), remedy=remedy, type_error=ValueError)
