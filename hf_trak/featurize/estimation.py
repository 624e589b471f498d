"""Arithmetic of what an attribution takes: parameters, disk, memory, time."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from hf_trak.config import BITS, TrakConfig
from hf_trak.curvature.refinement import Refinement
from hf_trak.featurize.exact_estimate import ExactEstimate, estimate_exact
from hf_trak.featurize.fit_share import FitShare, largest_share
from hf_trak.featurize.refine_estimate import RefineEstimate, estimate_refinement
from hf_trak.featurize.rerank_estimate import RerankEstimate, estimate_rerank
from hf_trak.featurize.storage_choices import StorageChoice, storage_choices
from hf_trak.gradient_computers.layout import ParameterLayout
from hf_trak.identity.model_identity import model_identity
from hf_trak.runtime.memory import byte_size, free_bytes
from hf_trak.runtime.progress import duration
from hf_trak.scores.solver_choice import SolverCost, solver_costs
from hf_trak.store.atomic import json_bytes
from hf_trak.store.shards import ShardPlan

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
    rerank: int | None = None,
    refinement: Refinement | None = None,
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
        rerank: rows of a shortlist that are to be reranked, for each target and end.
        refinement: how targets are to be refined.

    Raises:
        ValueError: a number is out of range, or a parameter name unknown.
    """
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
