"""Arithmetic of what an attribution takes: parameters, disk, memory, time."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hf_trak.config import BITS, SolverName, TrakConfig
from hf_trak.curvature.conjugate_gradients import Refinement
from hf_trak.curvature.curvature import LARGEST_SIDE, PARTS, ROWS_PER_PART
from hf_trak.curvature.observation import SMALLEST_SIDE
from hf_trak.curvature.target_forms import low_rank_numel
from hf_trak.featurize.definition import sample_size
from hf_trak.featurize.exact_blocks import TARGET_SHARD_BYTES, target_dtype, target_rank
from hf_trak.gradient_computers.layout import ParameterLayout, ParameterSlot
from hf_trak.identity.model_identity import model_identity
from hf_trak.methods import Index, Method, Rerank, checked_method
from hf_trak.runtime.checks import byte_size, checked_int, free_bytes
from hf_trak.runtime.progress import duration
from hf_trak.scores.solvers import SolverCost, choose_solver, solver_cost, solver_costs
from hf_trak.store.atomic import json_bytes
from hf_trak.store.shards import ShardPlan


@dataclass(frozen=True)
class ExactEstimate:
    """Cost of one checkpoint's curvature, and of the exact scores of n training rows for m targets.

    Sizes are in bytes. Sides of layers are taken from the shapes of their parameters: channel groups, which have
    smaller ones, count as one layer.
    """

    curvature_bytes: int
    """Disk: bases and eigenvalues, 4 · Σ (I² + J² + I · J)."""
    progress_bytes: int
    """Disk, while a fit runs: bases, and sums for each part of the sample."""
    fit_memory: int
    """Memory of a process that fits: weights, and the sums of one pass. Activations and factors of one batch come on
    top."""
    targets_bytes: int
    """Disk: preconditioned targets, m rows of P numbers, or of matrices of low rank."""
    scores_bytes: int
    """Disk: scores of all rows, 4 · n · (m + 1)."""
    exact_memory: int
    """Memory of a process that scores: weights, and either the preconditioned targets of one pass, or the curvature
    with the whole gradients of one batch of targets, whichever is more. Activations of one batch come on top."""
    passes: int
    """Passes over the training rows to score them."""


def estimate_exact(
    model: nn.Module, layout: ParameterLayout, args: TrakConfig, n: int, m: int, weights: int
) -> ExactEstimate:
    """Work out what exact scores take.

    Args:
        model: the model.
        layout: the attributed parameters.
        args: the configuration.
        n: number of training rows.
        m: number of targets.
        weights: bytes of the model.
    """
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    matrices = [_matrices(slot) for slot in layout.slots if id(parameters[slot.name]) not in tables]
    shapes = [shape for found in matrices for shape in found]
    bases = 0 if args.curvature == "diagonal" else sum(_cut_squares(side) for shape in shapes for side in shape)
    total, rank, itemsize = layout.total, target_rank(args), target_dtype(args).itemsize
    kept = total if rank is None else total - sum(i * j - low_rank_numel(i, j, rank) for i, j in shapes)
    targets_at_once = max(1, min(m, int(args.exact_memory * 2**30) // (itemsize * kept)))
    batch = min(args.per_device_batch_size, max(m, 1))
    largest = max((i * j for i, j in shapes), default=0)
    preconditioning = bases + 2 * total + batch * (total + 3 * largest)
    return ExactEstimate(
        curvature_bytes=4 * (bases + total),
        progress_bytes=4 * (min(PARTS, -(-n // ROWS_PER_PART)) * (bases + total) + bases),
        fit_memory=weights + max(8 * bases, 4 * bases + 8 * total),
        targets_bytes=itemsize * m * kept,
        scores_bytes=4 * n * (m + 1),
        exact_memory=weights
        + min(TARGET_SHARD_BYTES, itemsize * m * kept)
        + max(itemsize * targets_at_once * kept, 4 * preconditioning),
        passes=math.ceil(m / targets_at_once) + (args.curvature in ("auto", "hybrid")),
    )


def _matrices(slot: ParameterSlot) -> list[tuple[int, int]]:
    """Return the shapes of the matrices of a parameter; none for one with a diagonal curvature."""
    if len(slot.shape) < 2 or min(slot.shape[0], slot.numel // slot.shape[0]) < SMALLEST_SIDE:
        return []
    if len(slot.shape) == 3:
        return [(slot.shape[1], slot.shape[2])] * slot.shape[0]
    return [(slot.shape[0], slot.numel // slot.shape[0])]


def _cut_squares(side: int) -> int:
    """Return the elements of the bases of one side, which is cut where it is too long."""
    parts = -(-side // LARGEST_SIDE)
    return side * side // parts


@dataclass(frozen=True)
class FitShare:
    """What the curvature of one parameter takes, in bytes.

    Attributes:
        name: the parameter.
        shape: its shape.
        fit_memory: sums of one pass of a fit.
        curvature_bytes: disk.
    """

    name: str
    shape: tuple[int, ...]
    fit_memory: int
    curvature_bytes: int

    def __str__(self) -> str:
        side = max(self.shape)
        parts = -(-side // LARGEST_SIDE)
        bases = f", {parts} bases of {-(-side // parts):,}" if parts > 1 else ""
        return (
            f"{self.name!r} ({' × '.join(f'{n:,}' for n in self.shape)}{bases}) takes {byte_size(self.fit_memory)} of "
            f"the memory and {byte_size(self.curvature_bytes)} of the disk"
        )


def largest_share(model: nn.Module, layout: ParameterLayout, args: TrakConfig, n: int) -> FitShare | None:
    """Find the parameter whose curvature takes most memory while it is fitted.

    Args:
        model: the model.
        layout: the attributed parameters.
        args: the configuration.
        n: number of training rows.

    Returns:
        `FitShare`; `None` where every parameter has one number for each of its elements.
    """
    if args.curvature in ("diagonal", "identity"):
        return None
    found = []
    for slot in layout.slots:
        alone = estimate_exact(model, ParameterLayout((replace(slot, offset=0),)), args, n, 1, 0)
        if alone.curvature_bytes > 4 * slot.numel:  # it has bases
            found.append(FitShare(slot.name, tuple(slot.shape), alone.fit_memory, alone.curvature_bytes))
    return max(found, key=lambda share: share.fit_memory, default=None)


PASSES_PER_PRODUCT = 4

"""Forward and backward passes of one row that a product with the Gauss-Newton matrix costs: two of each."""

VECTORS_IN_MEMORY = 6

"""Vectors of P numbers that a target has while it is refined: gradient, solution, residual, direction, product and
their sum."""


@dataclass(frozen=True)
class RefineEstimate:
    """Cost of `attribute(..., refine=...)`, over all checkpoints. It comes on top of exact scores."""

    steps: int
    """Products per target, at most."""
    rows: int
    """Training rows whose Gauss-Newton matrix refines the targets."""
    products: int
    """Products of one row and one target: C · steps · rows · m, at most."""
    row_passes: int
    """Forward and backward passes of single rows for these, at most."""
    memory: int
    """Memory, in bytes, for the targets that are refined together, beside the weights and the curvature. The
    activations of one batch come on top."""
    disk_bytes: int
    """Disk while targets are refined: their gradients, and the state of the iterations of one file of them."""
    seconds: float | None
    """Seconds for these passes at the rate of featurizing, whose rows take one forward and one backward pass."""

    def __str__(self) -> str:
        time = "" if self.seconds is None else f", {duration(self.seconds)}"
        return (
            f"refining targets: at most {self.steps} steps on {self.rows:,} rows each, {self.row_passes:,} passes of "
            f"single rows{time}; memory {byte_size(self.memory)}; disk {byte_size(self.disk_bytes)} meanwhile"
        )


def estimate_refinement(
    refinement: Refinement,
    n: int,
    m: int,
    checkpoints: int,
    parameters: int,
    processes: int,
    rows_per_second: float | None,
) -> RefineEstimate:
    """Work out what refined targets take.

    Args:
        refinement: the options.
        n: number of training rows.
        m: number of targets.
        checkpoints: number of checkpoints.
        parameters: P, the number of attributed parameters.
        processes: number of processes.
        rows_per_second: gradients per second of one process, where it was measured.
    """
    rows = min(n, refinement.rows)
    products = checkpoints * refinement.steps * rows * m
    together = max(1, min(m, TARGET_SHARD_BYTES // (4 * parameters)))
    passes = PASSES_PER_PRODUCT * products
    seconds = None if rows_per_second is None else math.ceil(passes / 2) / rows_per_second / processes
    return RefineEstimate(
        steps=refinement.steps,
        rows=rows,
        products=products,
        row_passes=passes,
        memory=VECTORS_IN_MEMORY * 4 * together * parameters,
        disk_bytes=4 * parameters * (m + 3 * together),
        seconds=seconds,
    )


@dataclass(frozen=True)
class RerankEstimate:
    """Cost of `attribute(..., rerank=...)`, stage by stage, over all checkpoints."""

    count: int
    """`rerank`: rows of the shortlist, for each target and end."""
    index_bytes: int
    """Features that the shortlist reads."""
    curvature_rows: int
    """Rows of the sample of a curvature that is not fitted yet."""
    target_gradients: int
    """Gradients of targets that are preconditioned."""
    row_gradients: int
    """Gradients of training rows, at most: those of lists that have no row in common."""
    scores_bytes: int
    """Disk: exact scores, 4 bytes for each of these rows and each target."""
    seconds: float | None
    """Seconds for these gradients at the rate of featurizing, where it was measured."""

    def __str__(self) -> str:
        time = "" if self.seconds is None else f", {duration(self.seconds)}"
        return (
            f"reranking {self.count:,} rows per target and end: shortlist from {byte_size(self.index_bytes)} of "
            f"features; curvature from {self.curvature_rows:,} rows, once; {self.target_gradients:,} preconditioned "
            f"targets; gradients of {self.row_gradients:,} rows at most{time}; disk "
            f"{byte_size(self.scores_bytes)} for scores"
        )


def estimate_rerank(
    args: TrakConfig,
    rerank: int,
    n: int,
    m: int,
    checkpoints: int,
    feature_bytes: int,
    processes: int,
    rows_per_second: float | None,
) -> RerankEstimate:
    """Work out what reranking takes.

    Args:
        args: the configuration.
        rerank: rows of the shortlist, for each target and end.
        n: number of training rows.
        m: number of targets.
        checkpoints: number of checkpoints.
        feature_bytes: bytes of the features of all checkpoints.
        processes: number of processes.
        rows_per_second: gradients per second of one process, where it was measured.

    Raises:
        ValueError: `rerank` is no number of rows.
    """
    count = checked_int(rerank, "rerank", 1, type_error=ValueError)
    rows = min(n, 2 * m * count)
    gradients = checkpoints * rows
    return RerankEstimate(
        count=count,
        index_bytes=feature_bytes,
        curvature_rows=checkpoints * sample_size(args, n),
        target_gradients=checkpoints * m,
        row_gradients=gradients,
        scores_bytes=4 * gradients * (m + 1),
        seconds=None if rows_per_second is None else (gradients + checkpoints * m) / rows_per_second / processes,
    )


SIZES = (512, 1024, 2048, 4096, 8192, 16384)

"""Bytes per row that were measured."""


QUALITY = {
    "float32": (0.62, 0.72, 0.84, 0.88, 0.96, 1.00),
    "int8": (0.84, 0.88, 0.96, 1.00, 1.06, 1.07),
    "int4": (0.87, 0.96, 1.01, 1.06, 1.08, 1.09),
    "int2": (0.91, 0.99, 1.05, 1.09, 1.11, 1.12),
    "int1": (0.88, 0.98, 1.02, 1.07, 1.08, 1.09),
}

"""Linear datamodeling score with ridge, the mean over seven banks, relative to float32 with 16,384 bytes:
`benchmarks/quality/CODES.md`. Models of other kinds may rank them differently."""


_COMPARED = (("int2", 512), ("int2", 1024), ("int4", 2048), ("int2", 2048), ("int2", 4096), ("float32", 16384))


@dataclass(frozen=True)
class StorageChoice:
    """A form of the features of a row.

    Attributes:
        feature_dtype (`str`): as in `TrakConfig`.
        proj_dim (`int`): k.
        row_bytes (`int`): bytes of a row's features.
        quality (`float`):
            Expected linear datamodeling score, relative to float32 with 16,384 bytes.
        solver (`SolverCost`):
            The solver of the ridge regression with its cost, for one checkpoint.
    """

    feature_dtype: str
    proj_dim: int
    row_bytes: int
    quality: float
    solver: SolverCost

    def __str__(self) -> str:
        return (
            f"{self.feature_dtype} × {self.proj_dim:,} ({self.row_bytes:,} bytes per row, quality {self.quality:.2f}, "
            f"{self.solver.kind} solver with {self.solver.multiply_adds:.1e} multiply-adds)"
        )


def storage_choices(solver: SolverName, solver_rank: int | None, n: int, m: int, free: int) -> list[StorageChoice]:
    """List forms with different numbers of bytes, from the smallest on.

    Args:
        solver, solver_rank: the settings.
        n: number of training rows.
        m: number of targets.
        free: bytes of memory that are free.
    """
    found = []
    for form, size in _COMPARED:
        k = size * 8 // BITS[form]
        rank = None if solver_rank is None else min(solver_rank, n, k)
        cost = solver_cost(choose_solver(solver, rank, n, k, free), n, k, m)
        found.append(StorageChoice(form, k, size, QUALITY[form][SIZES.index(size)], cost))
    return found


_SHARD_HEADER_BYTES = 480

_TARGET_HEADER_BYTES = 620

_GRAM_HEADER_BYTES = 480

_CHECKPOINT_JSON_BYTES = 430

_CONFIG_BYTES = 1000

_COLLATION_BYTES = 3300  # six rows of two columns

_MEASURED_BATCHES = 4


@dataclass(frozen=True)
class Estimate:
    """Cost of an attribution of n training rows, m targets and C checkpoints, with P parameters and k features.

    Sizes are in bytes, times in seconds. `str(estimate)` says it in a few lines.
    """

    parameters: int
    """P, exactly."""
    model_parameters: int
    """Elements of all parameters, attributed or not."""
    proj_dim: int
    """k."""
    train_size: int
    """n."""
    n_targets: int
    """m."""
    checkpoints: int
    """C."""
    processes: int
    """Processes that share the work."""
    feature_bytes: int
    """Disk: C · n · (k · b + 4), with b bytes per stored feature, and the headers of the shards."""
    gram_bytes: int
    """Disk: C · 8k² for XᵀX, or what another solver keeps."""
    target_bytes: int
    """Disk: as features, for m rows."""
    config_bytes: int
    """Disk: the configuration, which lists the parameters."""
    featurize_memory: int
    """Memory of a process that featurizes: weights, a copy of them where checkpoints are loaded, one shard, one batch
    of features, and gradients of the largest parameter for one batch (an upper bound, where layers are handed on in
    pieces). Activations of one batch come on top, as in a forward pass of training."""
    score_memory: int
    """Memory to score: that of the solver (3 · 8k² for the primal one), targets before and after in float32 and
    float64, and one shard."""
    solver: SolverCost
    """The solver of the ridge regression that will be chosen with the memory that is free now, for one checkpoint."""
    alternatives: tuple[SolverCost, ...]
    """The other solvers, with their defaults."""
    storage: tuple[StorageChoice, ...] = ()
    """Other forms of the features, with other numbers of bytes; none without a projection."""
    rows_per_second: float | None = None
    """Rows that one process featurizes per second, where it was measured."""
    exact: ExactEstimate | None = None
    """What exact scores take, where the configuration names a curvature."""
    largest_share: FitShare | None = None
    """What the curvature of one parameter takes, of the one that takes most, where the configuration names one."""
    rerank: RerankEstimate | None = None
    """What reranking takes, where it is asked for."""
    refine: RefineEstimate | None = None
    """What refined targets take, where they are asked for."""

    @property
    def disk_bytes(self) -> int:
        """The feature store: everything that stays on disk but scores (4 · n · m for a full matrix)."""
        return self.feature_bytes + self.gram_bytes + self.target_bytes + self.config_bytes

    @property
    def seconds(self) -> float | None:
        """Time to featurize all rows and targets for all checkpoints, or `None` if it was not measured."""
        if self.rows_per_second is None:
            return None
        shares = (math.ceil(rows / self.processes) for rows in (self.train_size, self.n_targets))
        return self.checkpoints * sum(shares) / self.rows_per_second

    def __str__(self) -> str:
        rows = f"{self.train_size:,} rows" + (f" and {self.n_targets:,} targets" if self.n_targets else "")
        kept = "XᵀX" if self.solver.kind == "primal" else f"{self.solver.kind} solver"
        lines = [
            f"{self.parameters:,} of {self.model_parameters:,} parameters, {self.proj_dim:,} features, {rows}, "
            f"{self.checkpoints} checkpoint{'s' if self.checkpoints > 1 else ''}",
            f"disk: {byte_size(self.disk_bytes)} (features {byte_size(self.feature_bytes)}, "
            f"{kept} {byte_size(self.gram_bytes)}"
            + (f", targets {byte_size(self.target_bytes)})" if self.n_targets else ")"),
            f"memory: {byte_size(self.featurize_memory)} and one batch's activations to featurize, "
            f"{byte_size(self.score_memory)} to score",
        ]
        solvers = (self.solver, *self.alternatives)
        lines.append("solver of the ridge: " + "; or ".join(_solver(one) for one in solvers))
        if self.storage:
            lines.append("other forms of the features: " + "; ".join(map(str, self.storage)))
        if self.exact is not None:
            exact = self.exact
            lines.append(
                f"exact scores: disk {byte_size(self.checkpoints * exact.curvature_bytes)} for the curvature (and "
                f"{byte_size(exact.progress_bytes)} while it is fitted), "
                f"{byte_size(self.checkpoints * (exact.targets_bytes + exact.scores_bytes))} for targets and scores; "
                f"memory {byte_size(exact.fit_memory)} to fit, {byte_size(exact.exact_memory)} to score; "
                f"{exact.passes} pass{'es' if exact.passes > 1 else ''} over the training rows"
            )
        if self.largest_share is not None:
            lines.append(f"to fit the curvature, {self.largest_share}")
        if self.rerank is not None:
            lines.append(str(self.rerank))
        if self.refine is not None:
            lines.append(str(self.refine))
        if self.seconds is not None:
            each = f" on each of {self.processes} processes" if self.processes > 1 else ""
            lines.append(f"time: {duration(self.seconds)} at {self.rows_per_second:,.1f} rows/s{each}")
        return "\n".join(lines)


def estimate_sizes(
    model: torch.nn.Module,
    train_dataset: Any,
    args: TrakConfig,
    *,
    checkpoints: int = 1,
    eval_dataset: Any = 0,
    processes: int = 1,
    rows_per_second: float | None = None,
    method: Method = "auto",
) -> Estimate:
    """Work out what an attribution takes from the numbers of rows, parameters and features.

    Args:
        model: the model.
        train_dataset: the training rows, or their number.
        args: the configuration.
        checkpoints: number of checkpoints.
        eval_dataset: the targets, or their number.
        processes: number of processes.
        rows_per_second: rows that one process featurizes per second, where it was measured.
        method: how scores are to be computed. What reranking and refining take is counted if it asks for them.

    Raises:
        ValueError: a number is out of range, or a parameter name or the method unknown.
    """
    chosen = checked_method(method)
    rerank = chosen.rows if isinstance(chosen, Rerank) else None
    refinement = None if isinstance(chosen, Index) else chosen.refinement
    n, m = count_of(train_dataset, "train_dataset", 1), count_of(eval_dataset, "eval_dataset", 0)
    for name, value in (("checkpoints", checkpoints), ("processes", processes)):
        count_of(value, name, 1)
    layout = ParameterLayout.from_model(model, args.grad_wrt)
    k = layout.total if args.proj_type == "none" else args.width
    weights = _weight_bytes(model, args.model_dtype)
    copies = 2 if checkpoints > 1 or args.model_dtype is not None else 1
    shard_rows = min(args.shard_size, max(n, m))
    batch = min(args.per_device_batch_size, shard_rows)
    largest = max(slot.numel for slot in layout.slots)
    groups = max(m, 1)
    features = checkpoints * _matrix_bytes(n, k, args)
    solver, alternatives = solver_costs(args.solver, args.solver_rank, n, k, groups, free_bytes("cpu"))
    return Estimate(
        parameters=layout.total,
        model_parameters=sum(parameter.numel() for parameter in model.parameters()),
        proj_dim=k,
        train_size=n,
        n_targets=m,
        checkpoints=checkpoints,
        processes=processes,
        feature_bytes=features,
        gram_bytes=checkpoints * (solver.disk + _GRAM_HEADER_BYTES),
        target_bytes=checkpoints * _matrix_bytes(m, k, _as_targets(args), _TARGET_HEADER_BYTES) if m else 0,
        config_bytes=_CONFIG_BYTES
        + _COLLATION_BYTES
        + len(json_bytes(layout.to_list()))
        + len(json_bytes(model_identity(model)))
        + checkpoints * _CHECKPOINT_JSON_BYTES,
        featurize_memory=copies * weights + 4 * (shard_rows * (k + 1) + batch * (k + largest)),
        score_memory=solver.memory + groups * k * 12 + shard_rows * row_bytes(k, args),
        solver=solver,
        alternatives=alternatives,
        storage=_other_forms(args, n, groups),
        rows_per_second=rows_per_second,
        exact=None if args.curvature is None else estimate_exact(model, layout, args, n, groups, weights),
        largest_share=None if args.curvature is None else largest_share(model, layout, args, n),
        rerank=None
        if rerank is None
        else estimate_rerank(args, rerank, n, groups, checkpoints, features, processes, rows_per_second),
        refine=None
        if refinement is None
        else estimate_refinement(refinement, n, groups, checkpoints, layout.total, processes, rows_per_second),
    )


def count_of(value: Any, name: str, least: int) -> int:
    """The number of rows of a dataset, or a number of rows that is given as such.

    Raises:
        ValueError: it is neither, or below `least`.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        count = value
    elif hasattr(value, "__len__"):
        count = len(value)
    else:
        raise ValueError(f"`{name}` is a {type(value).__name__}. Expected a number, or rows that can be counted.")
    if count < least:
        raise ValueError(f"`{name}` is {count}. Expected at least {least}.")
    return count


def _matrix_bytes(rows: int, k: int, args: TrakConfig, header: int = _SHARD_HEADER_BYTES) -> int:
    """A feature matrix on disk: `grads` (rows, k), `out_to_loss` (rows,) float32, and a header per shard."""
    shards = len(ShardPlan(rows, args.shard_size))
    return rows * (row_bytes(k, args) + 4) + shards * header


def _as_targets(args: TrakConfig) -> TrakConfig:
    """The configuration with the storage that features of targets have: floating-point numbers."""
    return replace(args, feature_dtype="float32") if BITS[args.storage] < 16 else args


def _other_forms(args: TrakConfig, n: int, m: int) -> tuple[StorageChoice, ...]:
    if args.proj_type == "none":
        return ()
    choices = storage_choices(args.solver, args.solver_rank, n, m, free_bytes("cpu"))
    return tuple(one for one in choices if (one.feature_dtype, one.proj_dim) != (args.storage, args.width))


def row_bytes(k: int, args: TrakConfig) -> int:
    """Bytes of the features of one row: k numbers, or their codes and a scale in float32."""
    bits = BITS[args.storage]
    return k * bits // 8 if bits >= 16 else -(-k * bits // 8) + 4


def _weight_bytes(model: torch.nn.Module, dtype: str | None) -> int:
    """Parameters and buffers, in `dtype` where they are floating-point and it is given."""
    width = None if dtype is None else BITS[dtype] // 8
    return sum(
        value.numel() * (width if width is not None and value.is_floating_point() else value.element_size())
        for value in [*model.parameters(), *model.buffers()]
    )


def measured_batches(n: int, args: TrakConfig) -> tuple[int, int]:
    """Batch size and number of batches that are featurized to measure the time.

    Raises:
        ValueError: there are fewer than 3 training rows.
    """
    size = min(args.per_device_batch_size, n // 3)
    if size == 0:
        raise ValueError(f"`measure` is set, but there are only {n} training rows. Expected at least 3.")
    return size, min(1 + _MEASURED_BATCHES, n // size)


def _solver(cost: SolverCost) -> str:
    """For example `dual (5,000, memory 572.2 MiB, disk 190.7 MiB, 1.7e+12 multiply-adds)`."""
    exact = "" if cost.exact else "not exact, "
    return (
        f"{cost.kind} ({cost.size:,}, {exact}memory {byte_size(cost.memory)}, disk {byte_size(cost.disk)}, "
        f"{cost.multiply_adds:.1e} multiply-adds)"
    )
