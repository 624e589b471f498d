"""The solvers of one feature store: which one each checkpoint gets, what it keeps, and what it says of itself."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from hf_trak.config import SolverName
from hf_trak.runtime.checks import checked_int, free_bytes
from hf_trak.runtime.processes import Processes
from hf_trak.scores.dual import DualSystem, ensure_kernel, kernel_facts
from hf_trak.scores.gram_sample import sample_size
from hf_trak.scores.low_rank import LowRankSystem
from hf_trak.scores.ridge import RidgeSystem, ridge_lambda
from hf_trak.scores.subspace import ALGORITHM, PASSES, PROBES, SubspaceIteration, width_of
from hf_trak.scores.training_features import PIECE_NUMBERS, TrainingFeatures
from hf_trak.store.solver_files import SolverFiles
from hf_trak.store.store import GRAM_FILE, FeatureStore

Kind = Literal["primal", "dual", "low_rank"]


DEFAULT_RANK = 2048

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
        size (`int`): k, n, or the rank r.
        reason (`str`): what decided, for the log.
    """

    kind: Kind
    size: int
    reason: str

    @property
    def identity(self) -> dict[str, Any]:
        """Return what scores depend on beside the features and λ, as plain JSON."""
        content: dict[str, Any] = {"kind": self.kind}
        if self.kind == "low_rank":
            content |= {"algorithm": ALGORITHM, "rank": self.size}
        return content


@dataclass(frozen=True)
class SolverCost:
    """The cost of a solver for one checkpoint.

    Attributes:
        kind (`str`): the solver.
        size (`int`): k, n, or the rank r.
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
        solver_rank: rank of `low_rank`; `None` for the default.
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
        rows = sample_size(n, k)
        work = (rows or n) * k * k + k**3 // 6 + m * k * k
        disk = _FLOAT64 * k * k * (1 if rows is None else 2)
        return SolverCost("primal", size, rows is None, system, disk, work)
    if choice.kind == "dual":
        work = n * n * k // 2 + n**3 // 6 + m * n * (n + 2 * k)
        return SolverCost("dual", size, True, system + buffers, _FLOAT64 * n * n, work)
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
    kinds: tuple[Kind, ...] = ("primal", "dual", "low_rank")
    others = [choose_solver(kind, None, n, k, free) for kind in kinds if kind != chosen.kind]
    return solver_cost(chosen, n, k, m), tuple(solver_cost(one, n, k, m) for one in others)


def _fits(size: int, free: int) -> bool:
    return size <= LARGEST_SYSTEM and _MATRICES * _FLOAT64 * size**2 <= free // 2


def _rank(given: int | None, n: int, k: int) -> int:
    if given is None:
        return min(DEFAULT_RANK, n, k)
    remedy = "The features have no more eigenvalues; leave it out, or lower it."
    return checked_int(given, "solver_rank", 1, min(n, k), remedy=remedy, type_error=ValueError)


logger = logging.getLogger(__name__)


StreamedSolver = DualSystem | LowRankSystem

"""Every solver but the primal one, which holds XᵀX in the main process."""


@dataclass(frozen=True)
class SolverReport:
    """The report of the solver of a checkpoint.

    Attributes:
        kind (`str`): `"primal"`, `"dual"` or `"low_rank"`.
        size (`int`): k, n, or the rank.
        lam (`float`): λ.
        condition (`float`):
            Condition number of XᵀX + λI: an estimate in the 1-norm for `primal`, and that in the 2-norm for the
            others, which is the smaller one, by a factor of k at most.
        error (`float`):
            Bound on the error of scores, beside rounding: x (G + λI)⁻¹ tᵀ is off by at most `error` times the
            geometric mean of the same for (x, x) and (t, t); about that, where XᵀX is estimated from a sample. 0 for
            exact solvers.
        captured (`float`): share of trace(XᵀX) in the eigenvalues that are used; 1 for all others than `low_rank`.
    """

    kind: Kind
    size: int
    lam: float
    condition: float
    error: float
    captured: float = 1.0

    @classmethod
    def of(cls, choice: SolverChoice, solver: RidgeSystem | StreamedSolver) -> "SolverReport":
        """Describe a solver."""
        captured = solver.factors.captured if isinstance(solver, LowRankSystem) else 1.0
        return cls(choice.kind, choice.size, solver.lam, solver.condition, solver.error, captured)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self)

    def __str__(self) -> str:
        text = f"λ = {self.lam:.6g}, condition number of XᵀX + λI about {self.condition:.2e}"
        if self.kind == "primal" and self.error:
            text += (
                f"; XᵀX is estimated from a sample of the rows, an error of about {self.error:.2g} in the same sense"
            )
        if self.kind == "low_rank":
            text += (
                f"; {self.size:,} eigenvalues have {self.captured:.2%} of trace(XᵀX), and change the score of a row "
                f"for a target by at most {self.error:.2g} times the geometric mean of their self-influences"
            )
        return text


@dataclass(eq=False)
class Solvers:
    """Chooses, prepares and makes the solvers of one store. All processes call its methods in the same order.

    Attributes:
        store: the features.
        processes: the processes that divide the work.
        device: where pieces of the features are multiplied.
        lambda_relative: λ, relative to trace(XᵀX) / min(n, k).
        solver: the solver that is set, or `"auto"`.
        solver_rank: number of eigenvalues of `"low_rank"`.
    """

    store: FeatureStore
    processes: Processes
    device: torch.device
    lambda_relative: float
    solver: SolverName = "auto"
    solver_rank: int | None = None

    def __post_init__(self) -> None:
        self._choices: dict[int, SolverChoice] = {}

    def choice(self, model_id: int) -> SolverChoice:
        """Choose the solver of a checkpoint, once.

        Raises:
            ValueError: the rank is larger than min(n, k).
        """

        def choose() -> dict[str, Any]:
            store = self.store
            there = (store.checkpoint_dir(model_id) / GRAM_FILE).exists()
            free = free_bytes("cpu")
            return asdict(choose_solver(self.solver, self.solver_rank, store.train_size, store.proj_dim, free, there))

        if model_id not in self._choices:
            found = SolverChoice(**self.processes.broadcast_from_main(choose))
            self._choices[model_id] = found
            if found.kind != "primal" and self.processes.is_main_process:
                logger.info("Checkpoint %d: solver %s of size %d: %s.", model_id, found.kind, found.size, found.reason)
        return self._choices[model_id]

    def identity(self, model_ids: Sequence[int]) -> dict[str, Any]:
        """Return what scores depend on. It is empty if every checkpoint has the primal solver, as before there were
        others."""
        choices = [self.choice(model_id) for model_id in model_ids]
        primal = all(choice.kind == "primal" for choice in choices)
        return {} if primal else {"solvers": [choice.identity for choice in choices]}

    def prepare(self, model_id: int) -> None:
        """Compute and save what the solver of a checkpoint, which is not the primal one, keeps in the store.

        Raises:
            ValueError: the rank is larger than min(n, k).
            IncompleteStoreError: shards are missing.
            StoreError: a shard or a saved file is damaged, or a file cannot be written.
            NonFiniteError: a feature is not finite; names its row.
        """
        if self.choice(model_id).kind == "dual":
            ensure_kernel(self.features(model_id), SolverFiles(self.store, model_id))
        else:
            self._iteration(model_id).run()

    def make(self, model_id: int) -> StreamedSolver:
        """Make the solver of a checkpoint, after [`~Solvers.prepare`], and log what it says of itself.

        Raises:
            As `prepare`, and SingularGramError: the ridge is too small for these features.
        """
        self.prepare(model_id)
        choice = self.choice(model_id)
        with self.processes.all_or_none():
            solver = self._made(model_id)
        if self.processes.is_main_process:
            logger.info("Checkpoint %d: %s.", model_id, SolverReport.of(choice, solver))
        return solver

    def _made(self, model_id: int) -> StreamedSolver:
        features, files = self.features(model_id), SolverFiles(self.store, model_id)
        if self.choice(model_id).kind == "dual":
            return DualSystem(features, files, self._lambda(features, kernel_facts(features, files)["trace"]))
        factors = self._iteration(model_id).factors()
        return LowRankSystem(factors, self._lambda(features, factors.trace))

    def solve(self, solver: StreamedSolver, targets: Tensor) -> Tensor:
        """Compute t (XᵀX + λI)⁻¹ `(m, k)` in every process, for targets that are the same in all."""
        if not isinstance(solver, LowRankSystem):
            return solver.solve(targets)
        shape = tuple(targets.shape)
        return self.processes.broadcast_tensor_from_main(lambda: solver.solve(targets), shape)

    def training_quadratic(self, model_id: int, solver: StreamedSolver, indices: Sequence[int]) -> Tensor:
        """Compute x (XᵀX + λI)⁻¹ xᵀ for the training rows x of some shards, others in each process."""
        if isinstance(solver, DualSystem):
            return solver.training_quadratic(indices)
        with self.processes.all_or_none():
            return solver.training_quadratic(self.features(model_id), indices)

    def features(self, model_id: int) -> TrainingFeatures:
        """Return the training features of a checkpoint."""
        return TrainingFeatures(self.store.train(model_id), self.processes, self.device)

    def _lambda(self, features: TrainingFeatures, trace: float) -> float:
        return ridge_lambda(trace, features.n, features.k, self.lambda_relative)

    def _iteration(self, model_id: int) -> SubspaceIteration:
        seed, files = int(self.store.config.get("seed", 0)), SolverFiles(self.store, model_id)
        return SubspaceIteration(self.features(model_id), files, self.choice(model_id).size, seed, model_id)
