"""Arithmetic of what an attribution takes: parameters, disk, memory, time."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hf_trak.config import BITS, TrakConfig
from hf_trak.curvature.curvature import LARGEST_SIDE, PARTS, ROWS_PER_PART
from hf_trak.curvature.observation import SMALLEST_SIDE, decomposition_seconds
from hf_trak.curvature.target_forms import low_rank_numel
from hf_trak.featurize.exact_blocks import TARGET_SHARD_BYTES, target_dtype, target_rank
from hf_trak.featurize.roofline import Roofline
from hf_trak.gradient_computers.layout import ParameterLayout, ParameterSlot
from hf_trak.identity.model_identity import model_identity
from hf_trak.methods import Combination, Exact, Index, Method, Replay, Rerank, checked_method
from hf_trak.runtime.checks import byte_size, checked_int, free_bytes
from hf_trak.runtime.progress import duration
from hf_trak.scores.solvers import SolverCost, solver_costs
from hf_trak.store.atomic import json_bytes
from hf_trak.store.shards import ShardPlan
from hf_trak.trajectory.summary import RunSummary
from hf_trak.trajectory.sweep import COPIES

PASSES_PER_PRODUCT = 2

"""Forward and backward passes of one row that a product with the Gauss-Newton matrix costs."""

VECTORS_IN_MEMORY = 6

"""Vectors of P numbers that a target has while it is refined: gradient, solution, residual, direction, product and
their sum."""


@dataclass(frozen=True)
class FitCost:
    """Cost of fitting the curvature of some parameters of one checkpoint, in bytes.

    Sides of layers are taken from the shapes of their parameters: channel groups, which have smaller ones, count as
    one layer.

    Attributes:
        slots: the parameters.
        shapes: the shapes of their matrices.
        disk: bases and eigenvalues, 4 · Σ (I² + J² + I · J).
        scratch: disk while the fit runs: bases, and sums for each part of the sample.
        memory: sums of one pass, beside the weights. Activations and factors of one batch come on top.
        bases: numbers of the bases.
        cubes: Σ I³ + J³, in proportion to the time of their eigendecompositions.
    """

    slots: Sequence[ParameterSlot]
    shapes: Sequence[tuple[int, int]]
    disk: int
    scratch: int
    memory: int
    bases: int
    cubes: int

    @classmethod
    def of(cls, model: nn.Module, slots: Sequence[ParameterSlot], args: TrakConfig, n: int) -> "FitCost":
        """Work it out for n training rows."""
        tables = weights_of(model, nn.Embedding)
        matrices = [_matrices(slot) for slot in slots if slot.name not in tables]
        shapes = [shape for found in matrices for shape in found]
        single = args.curvature.kind in ("diagonal", "identity")
        sides = [] if single else [side for shape in shapes for side in shape]
        bases, cubes = sum(_cut(side, 2) for side in sides), sum(_cut(side, 3) for side in sides)
        total = sum(slot.numel for slot in slots)
        parts = min(PARTS, -(-n // ROWS_PER_PART))
        memory = max(8 * bases, 4 * bases + 8 * total)
        return cls(slots, shapes, 4 * (bases + total), 4 * (parts * (bases + total) + bases), memory, bases, cubes)

    def __str__(self) -> str:
        """Say what one parameter takes."""
        slot, side = self.slots[0], max(self.slots[0].shape)
        parts = -(-side // LARGEST_SIDE)
        bases = f", {parts} bases of {-(-side // parts):,}" if parts > 1 else ""
        return (
            f"{slot.name!r} ({' × '.join(f'{n:,}' for n in slot.shape)}{bases}) takes {byte_size(self.memory)} of "
            f"the memory and {byte_size(self.disk)} of the disk"
        )


def weights_of(model: nn.Module, kinds: Any) -> frozenset[str]:
    """List the weights of modules of some classes, by all their names."""
    weights = {id(module.weight) for module in model.modules() if isinstance(module, kinds)}
    return frozenset(name for name, one in model.named_parameters(remove_duplicate=False) if id(one) in weights)


def _matrices(slot: ParameterSlot) -> list[tuple[int, int]]:
    """Return the shapes of the matrices of a parameter; none for one with a diagonal curvature."""
    if len(slot.shape) < 2 or min(slot.shape[0], slot.numel // slot.shape[0]) < SMALLEST_SIDE:
        return []
    if len(slot.shape) == 3:
        return [(slot.shape[1], slot.shape[2])] * slot.shape[0]
    return [(slot.shape[0], slot.numel // slot.shape[0])]


def _cut(side: int, power: int) -> int:
    """Add up a power of the parts of one side, which is cut where it is too long."""
    return side**power // (-(-side // LARGEST_SIDE)) ** (power - 1)


def largest_share(model: nn.Module, layout: ParameterLayout, args: TrakConfig, n: int) -> FitCost | None:
    """Find the parameter whose curvature takes most memory while it is fitted.

    Args:
        model: the model.
        layout: the attributed parameters.
        args: the configuration.
        n: number of training rows.

    Returns:
        `FitCost`; `None` where every parameter has one number for each of its elements.
    """
    found = [FitCost.of(model, [slot], args, n) for slot in layout.slots]
    return max((one for one in found if one.bases), key=lambda one: one.memory, default=None)


@dataclass(frozen=True)
class Cost:
    """Cost of one stage of an attribution, over all checkpoints.

    Attributes:
        disk: bytes that stay on disk.
        scratch: bytes on disk while the stage runs.
        memory: bytes of memory of one process. Activations of one batch come on top.
        passes: forward and backward passes of single rows, at most.
        seconds: time for these passes at the rate of featurizing, where it was measured, and for decompositions.
        cubes: see [`FitCost`].
    """

    disk: int = 0
    scratch: int = 0
    memory: int = 0
    passes: int = 0
    seconds: float | None = None
    cubes: int = 0


_SHARD_HEADER_BYTES = 550

_TARGET_HEADER_BYTES = 695

_GRAM_HEADER_BYTES = 495

_CHECKPOINT_JSON_BYTES = 430

_CONFIG_BYTES = 1000

_COLLATION_BYTES = 3300  # six rows of two columns

_MEASURED_BATCHES = 4


_PRODUCT_BYTES = 2 * 32 * 2**20
"""Memory in which a GPU's products are summed: 32 MiB on Hopper for each thread that multiplies, the caller's and that
of the backward pass."""


@dataclass(frozen=True)
class Estimate:
    """Cost of an attribution of n training rows, m targets and C checkpoints, with P parameters and k features.

    `str(estimate)` is a table of its stages.
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
    solver: SolverCost
    """The solver of the ridge regression that will be chosen with the memory that is free now, for one checkpoint."""
    alternatives: tuple[SolverCost, ...]
    """The other solvers, with their defaults."""
    rows_per_second: float | None
    """Rows that one process featurizes per second, where it was measured, or at most, where it was bounded."""
    stages: dict[str, Cost]
    """`"settings"` (what describes the store), `"features"` and `"targets"` (to featurize), `"solver"` (the ridge
    regression) and, where they are asked for, `"curvature"` (to fit it), `"exact targets"` (to precondition them),
    `"exact scores"`, `"rerank"`, `"refine"`, `"moments"` (of gradients) and `"replay"`."""
    largest_share: FitCost | None = None
    """Cost of the curvature of the parameter that takes most, for one checkpoint."""
    roofline: Roofline | None = None
    """What bounds the time on a GPU that is not there."""

    @property
    def disk_bytes(self) -> int:
        """Sum everything that stays on disk except scores from features (4 · n · m for a full matrix)."""
        return sum(one.disk for one in self.stages.values())

    @property
    def seconds(self) -> float | None:
        """Return the time of all stages, or `None` if it was not measured."""
        return None if self.rows_per_second is None else sum(one.seconds or 0.0 for one in self.stages.values())

    def __str__(self) -> str:
        rows = f"{self.train_size:,} rows" + (f" and {self.n_targets:,} targets" if self.n_targets else "")
        lines = [
            f"{self.parameters:,} of {self.model_parameters:,} parameters, {self.proj_dim:,} features, {rows}, "
            f"{self.checkpoints} checkpoint{'s' if self.checkpoints > 1 else ''}",
            f"disk: {byte_size(self.disk_bytes)}",
        ]
        if self.seconds is not None:
            each = f" on each of {self.processes} processes" if self.processes > 1 else ""
            lines.append(f"time: {duration(self.seconds)} at {self.rows_per_second:,.1f} rows/s{each}")
        if self.roofline is not None:
            lines.append(str(self.roofline))
        table: list[tuple[str, ...]] = [("stage", "disk", "meanwhile", "memory", "row passes", "time")]
        for name, one in self.stages.items():
            sizes = (byte_size(size) if size else "" for size in (one.disk, one.scratch, one.memory))
            passes = f"{one.passes:,}" if one.passes else ""
            table.append((name, *sizes, passes, "" if one.seconds is None else duration(one.seconds)))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for first, *cells in table:
            padded = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
            lines.append("  ".join([first.ljust(widths[0]), *padded]).rstrip())
        lines.append("solver of the ridge: " + "; or ".join(_solver(one) for one in (self.solver, *self.alternatives)))
        if self.largest_share is not None:
            lines.append(f"to fit the curvature, {self.largest_share}")
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
    run: RunSummary | None = None,
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
        method: how scores are to be computed. What reranking, refining and replaying take is counted if it asks for
            them.
        run: what is known of a run that is to be replayed.

    Raises:
        ValueError: a number is out of range, a parameter name or the method unknown, or a run is to be replayed and
            not given.
    """
    chosen = checked_method(method)
    if isinstance(chosen, Combination):
        parts = [
            estimate_sizes(
                model, train_dataset, args, checkpoints=checkpoints, eval_dataset=eval_dataset, processes=processes,
                rows_per_second=rows_per_second, method=one,
            )
            for one in chosen.methods
        ]  # fmt: skip
        return replace(parts[0], stages=_added(one.stages for one in parts))
    refinement = None if isinstance(chosen, Index | Replay) else chosen.refinement
    if isinstance(chosen, Exact | Rerank) and chosen.curvature is not None:
        args = replace(args, curvature=replace(args.curvature, kind=chosen.curvature))
    n, m = count_of(train_dataset, "train_dataset", 1), count_of(eval_dataset, "eval_dataset", 0)
    for name, value in (("checkpoints", checkpoints), ("processes", processes)):
        checked_int(value, name, 1, type_error=ValueError)
    layout = ParameterLayout.from_model(model, args.grad_wrt)
    k = layout.total if args.projection == "none" else args.width
    weights = _weight_bytes(model, args.model_dtype)
    copies = 2 if checkpoints > 1 or args.model_dtype is not None else 1
    shard_rows = min(args.shard_size, max(n, m))
    batch = min(args.batch_size, shard_rows)
    largest = max(slot.numel for slot in layout.slots)
    products = _PRODUCT_BYTES if any(weight.is_cuda for weight in model.parameters()) else 0
    groups = max(m, 1)
    solver, alternatives = solver_costs(args.solver_kind, args.solver_rank, n, k, groups, free_bytes("cpu"))
    records = len(json_bytes(layout.to_list())) + len(json_bytes(model_identity(model)))
    as_targets = replace(args, feature_dtype="float32") if BITS[args.storage] < 16 else args  # never as codes
    stages = {
        "settings": Cost(_CONFIG_BYTES + _COLLATION_BYTES + records + checkpoints * _CHECKPOINT_JSON_BYTES),
        # One shard, of a batch features and the largest gradient (an upper bound, where layers come in pieces), and
        # the two gradients of one row that the engine is checked with.
        "features": Cost(
            checkpoints * _matrix_bytes(n, k, args),
            memory=copies * weights + 4 * (shard_rows * (k + 1) + batch * (k + largest) + 2 * layout.total) + products,
            passes=checkpoints * n,
        ),
        "targets": Cost(
            checkpoints * _matrix_bytes(m, k, as_targets, _TARGET_HEADER_BYTES) if m else 0, passes=checkpoints * m
        ),
        # Beside the solver: targets before and after in float32 and float64, and one shard.
        "solver": Cost(
            checkpoints * (solver.disk + _GRAM_HEADER_BYTES),
            memory=solver.memory + groups * k * 12 + shard_rows * row_bytes(k, args),
        ),
    }
    together = max(1, min(groups, TARGET_SHARD_BYTES // (4 * layout.total)))
    if isinstance(chosen, Replay) and chosen.of == "run":
        stages["replay"] = _run_stage(run, chosen, args, n, groups)
    elif isinstance(chosen, Replay):
        stages |= _replay_stages(layout.total, chosen, checkpoints, n, groups, together)
    elif not isinstance(chosen, Index):
        count = chosen.rows if isinstance(chosen, Rerank) else None
        scored = n if count is None else min(n, 2 * groups * count)
        fit = FitCost.of(model, layout.slots, args, n)
        last = "exact scores" if count is None else "rerank"
        stages |= _exact_stages(fit, args, checkpoints, n, groups, scored, weights, last)
    if refinement is not None:
        stages["refine"] = Cost(
            scratch=4 * layout.total * (groups + 3 * together),
            memory=VECTORS_IN_MEMORY * 4 * together * layout.total,
            passes=PASSES_PER_PRODUCT * checkpoints * refinement.steps * min(n, refinement.rows) * groups,
        )
    if rows_per_second is not None:
        for name, one in stages.items():
            seconds = math.ceil(one.passes / processes) / rows_per_second
            stages[name] = replace(one, seconds=seconds + decomposition_seconds(one.cubes / processes))
    return Estimate(
        parameters=layout.total,
        model_parameters=sum(parameter.numel() for parameter in model.parameters()),
        proj_dim=k,
        train_size=n,
        n_targets=m,
        checkpoints=checkpoints,
        processes=processes,
        solver=solver,
        alternatives=alternatives,
        rows_per_second=rows_per_second,
        stages=stages,
        largest_share=largest_share(model, layout, args, n) if "curvature" in stages else None,
    )


def _added(parts: Iterable[dict[str, Cost]]) -> dict[str, Cost]:
    """Add up the stages of several methods. Features, their targets and a curvature are shared."""
    total = dict[str, Cost]()
    for stages in parts:
        for name, one in stages.items():
            found = total.setdefault(name, one)
            if found is not one and name in ("exact targets", "exact scores", "refine"):
                seconds = None if found.seconds is None or one.seconds is None else found.seconds + one.seconds
                total[name] = Cost(
                    found.disk + one.disk, max(found.scratch, one.scratch), max(found.memory, one.memory),
                    found.passes + one.passes, seconds,
                )  # fmt: skip
    return total


def _exact_stages(
    fit: FitCost, args: TrakConfig, checkpoints: int, n: int, m: int, scored: int, weights: int, last: str
) -> dict[str, Cost]:
    """Work out the costs of a fit, of m preconditioned targets and of the exact scores of some rows."""
    total, rank, itemsize = sum(slot.numel for slot in fit.slots), target_rank(args), target_dtype(args).itemsize
    kept = total if rank is None else total - sum(i * j - low_rank_numel(i, j, rank) for i, j in fit.shapes)
    at_once = max(1, min(m, int(args.curvature.memory * 2**30) // (itemsize * kept)))
    batch = min(args.batch_size, m)
    preconditioning = fit.bases + 2 * total + batch * (total + 3 * max((i * j for i, j in fit.shapes), default=0))
    preconditioning += 4 * total  # the two gradients of one row that the engine is checked with, and their errors
    targets = min(TARGET_SHARD_BYTES, itemsize * m * kept)
    # The hybrid takes another pass, for whitened features.
    passes = math.ceil(m / at_once) + (args.curvature.kind == "hybrid")
    return {
        "curvature": Cost(
            checkpoints * fit.disk,
            fit.scratch,
            weights + fit.memory,
            2 * checkpoints * args.curvature.sample_size(n),
            cubes=checkpoints * fit.cubes,
        ),
        "exact targets": Cost(
            checkpoints * itemsize * m * kept, 0, weights + targets + 4 * preconditioning, checkpoints * m
        ),
        last: Cost(
            4 * checkpoints * scored * (m + 1),
            memory=weights + targets + itemsize * at_once * kept,
            passes=checkpoints * passes * scored,
        ),
    }


def _replay_stages(total: int, method: Replay, checkpoints: int, n: int, m: int, together: int) -> dict[str, Cost]:
    """Work out the costs of the moments of gradients, of m targets walked back, and of their scores."""
    rows = min(n, method.rows)
    return {
        "moments": Cost(8 * total * 8 * checkpoints, 0, 28 * total, checkpoints * n),
        "replay": Cost(
            4 * checkpoints * m * total,
            4 * m * total,
            VECTORS_IN_MEMORY * 4 * together * total,
            PASSES_PER_PRODUCT * checkpoints * method.steps * rows * m,
        ),
        "exact scores": Cost(4 * checkpoints * n * (m + 1), 0, 4 * m * total, checkpoints * n),
    }


def _run_stage(run: RunSummary | None, method: Replay, args: TrakConfig, n: int, m: int) -> Cost:
    """Work out the cost of a run that is followed back for m targets."""
    if run is None:
        raise ValueError(
            "`method` replays a run, and nothing is known of its steps here. Expected the attributor of the model, "
            "which finds its record. Use `TrakAttributor.from_trainer(trainer).estimate(...)`."
        )
    together = max(1, min(m, int(args.curvature.memory * 2**30) // (4 * COPIES * run.parameters)))
    sweeps, alone = math.ceil(m / together), run.passes(0)
    passes = alone * sweeps + run.passes(m, method.hessian_share) - alone
    results = 8 * m * (n + 2 * run.steps) + 24 * sweeps * run.steps
    states = 16 * math.ceil(math.sqrt(run.steps)) * run.parameters
    kept = 2 * (12 * together * run.parameters + 8 * together * n)  # the state of a sweep, and the one before
    return Cost(results, states + kept, run.memory(together, method.hessian_share), math.ceil(passes * n))


def count_of(value: Any, name: str, least: int) -> int:
    """Return the number of rows of a dataset, or a number of rows that is given as such.

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
    """Return the bytes of a feature matrix on disk.

    It has `grads` (rows, k), `out_to_loss` (rows,) float32 and a header per shard.
    """
    shards = len(ShardPlan(rows, args.shard_size))
    return rows * (row_bytes(k, args) + 4) + shards * header


def row_bytes(k: int, args: TrakConfig) -> int:
    """Return the size of the features of one row in bytes: k numbers, or their codes and a scale in float32."""
    bits = BITS[args.storage]
    return k * bits // 8 if bits >= 16 else -(-k * bits // 8) + 4


def _weight_bytes(model: torch.nn.Module, dtype: str | None) -> int:
    """Return the bytes of parameters and buffers, in `dtype` if they are floating-point and it is given."""
    width = None if dtype is None else BITS[dtype] // 8
    return sum(
        value.numel() * (width if width is not None and value.is_floating_point() else value.element_size())
        for value in [*model.parameters(), *model.buffers()]
    )


def measured_batches(n: int, batch_size: int) -> tuple[int, int]:
    """Choose the batch size and the number of batches that are featurized to measure the time.

    Raises:
        ValueError: there are fewer than 3 training rows.
    """
    size = min(batch_size, n // 3)
    if size == 0:
        raise ValueError(f"`measure` is set, but there are only {n} training rows. Expected at least 3.")
    return size, min(1 + _MEASURED_BATCHES, n // size)


def _solver(cost: SolverCost) -> str:
    """Describe the cost of a solver.

    For example `dual (5,000, memory 572.2 MiB, disk 190.7 MiB, 1.7e+12 multiply-adds)`.
    """
    exact = "" if cost.exact else "not exact, "
    return (
        f"{cost.kind} ({cost.size:,}, {exact}memory {byte_size(cost.memory)}, disk {byte_size(cost.disk)}, "
        f"{cost.multiply_adds:.1e} multiply-adds)"
    )
