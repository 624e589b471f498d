"""The passes that fit a curvature to a model, over a random sample of the training rows.

1. The first batch shows in which form gradients come, and so how the parameters divide into blocks (`observation`).
2. First pass: the sums behind the bases, over as much of the sample as bases need.
3. Eigendecompositions, each block in one process, cost shared evenly.
4. Second pass: squares of gradients in these bases, over the whole sample. Where its batches ask for another division
   than the first one did, the fit begins again with that division.

The sample is cut into parts, the same for any number of processes. Every part of a pass is a file, so that a killed
fit loses one part per process, and the parts are added in their order, so that the result has the same bits however it
was divided. One part at a time is in memory.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_trak.curvature.arrivals import BatchArrivals
from hf_trak.curvature.blocks import CurvatureBlocks
from hf_trak.curvature.curvature import Curvature
from hf_trak.curvature.eigen import eigenbasis
from hf_trak.curvature.files import CurvatureFiles
from hf_trak.curvature.observation import BatchObserver, Observation, divide
from hf_trak.curvature.sums import BasisSums, SquareSums, sides
from hf_trak.errors import NonFiniteError
from hf_trak.gradient_computers import AbstractGradientComputer
from hf_trak.gradient_computers.batches import SplitBatch
from hf_trak.gradient_computers.hooked.outer import every_factor
from hf_trak.gradient_computers.layout import ParameterLayout
from hf_trak.modelout_functions.base import Batch
from hf_trak.runtime.processes import Processes
from hf_trak.runtime.progress import RowProgress
from hf_trak.store.shards import TensorSpec

logger = logging.getLogger(__name__)

PARTS = 8
"""Parts of the sample. More would lose less to a kill, and write more."""

LARGEST_SIDE = 8192
"""Longest side of a basis. The eigendecomposition of twice the side takes eight times as long."""

BASIS_POSITIONS, FEWEST_POSITIONS = 100, 50_000
"""Positions behind a basis that are enough, per dimension and at least. Its eigenvalues are measured anew in the
second pass, so that a basis need not be as good as they are; where the sample is small, all of it is taken."""

_MAX_ROUNDS = 8


class BatchSource(Protocol):
    """Gives the batches of a fit, as a model takes them."""

    def iterate(self, cuts: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], Batch]]:
        """Yield `(row numbers, batch)` for every list of row numbers."""

    def computer(self) -> AbstractGradientComputer:
        """Make the engine, checked on the batch that was yielded last."""


@dataclass(frozen=True)
class FitPlan:
    """What is fitted, and to which rows.

    Attributes:
        kind: see [`~hf_trak.curvature.curvature.CurvatureKind`].
        rows: numbers of the rows of the sample, ascending.
        batch_size: rows per batch.
        embeddings: names of embedding tables.
        transposed: names of weights whose rows are inputs.
        description: for progress bars.
        show_progress: whether to show bars.
        largest_side: longest side of a basis.
    """

    kind: str
    rows: tuple[int, ...]
    batch_size: int
    embeddings: frozenset[str]
    transposed: frozenset[str]
    description: str
    show_progress: bool = True
    largest_side: int = LARGEST_SIDE

    @property
    def parts(self) -> int:
        """Number of parts of the sample."""
        return min(PARTS, len(self.rows))

    def cuts(self, part: int) -> list[Sequence[int]]:
        """Divide the rows of one part into batches.

        A part has rows from all over the sample, since bases may come from the first part alone, and rows may be
        sorted.
        """
        rows = self.rows[part :: self.parts]
        return [rows[low : low + self.batch_size] for low in range(0, len(rows), self.batch_size)]


class CurvatureFit:
    """One fit, done by all processes together, which call [`~CurvatureFit.run`]."""

    def __init__(
        self,
        plan: FitPlan,
        files: CurvatureFiles,
        source: BatchSource,
        layout: ParameterLayout,
        processes: Processes,
        device: torch.device,
    ) -> None:
        """
        Args:
            plan: what is fitted.
            files: where sums and the result are kept.
            source: the batches, and the engine, whose task gives log-likelihoods.
            layout: the attributed parameters.
            processes: the processes.
            device: where gradients are.
        """
        self.plan = plan
        self.files = files
        self.source = source
        self._layout = layout
        self.processes = processes
        self.device = device
        self._computer: AbstractGradientComputer | None = None

    def run(self) -> Curvature:
        """Fit, or finish a fit that was interrupted.

        Returns:
            The curvature, in every process.

        Raises:
            NonFiniteError: a gradient is NaN or infinite.
            StoreError: a file is damaged or cannot be written.
            PeerProcessError: another process failed or died.
        """
        if not self.processes.broadcast_from_main(self.files.finished):
            self.processes.broadcast_from_main(self.files.prepare)
            self._conclude(self._passes())
        with self.processes.all_or_none():
            return self.files.read()

    # -- passes ------------------------------------------------------------------------------------------------------

    def _passes(self) -> CurvatureBlocks:
        """Make both passes, with the division that all batches of the sample ask for."""
        blocks = CurvatureBlocks.from_json(self.processes.broadcast_from_main(self._first_blocks))
        for _ in range(_MAX_ROUNDS):
            self._pass("bases", blocks, range(1))
            self._pass("bases", blocks, range(1, self._basis_parts(blocks)))
            self._decompose(blocks)
            self._pass("squares", blocks, range(self.plan.parts))
            found = CurvatureBlocks.from_json(self.processes.broadcast_from_main(partial(self._divided, blocks)))
            if found == blocks:
                return blocks
            logger.info("%s: other batches use parameters otherwise than the first; again.", self.plan.description)
            blocks = found
        raise RuntimeError(
            f"The layers of the model are used in other ways in each of {_MAX_ROUNDS} passes over the same rows. "
            "Expected a model that computes the same for the same rows: look for random choices in its forward pass."
        )

    def _first_blocks(self) -> dict[str, Any]:
        """Divide by what the first batch shows, unless an earlier run has come further."""
        blocks = self.files.read_blocks()
        if blocks is None:
            seen = Observation()
            for rows, batch in self.source.iterate(self.plan.cuts(0)[:1]):
                observer = BatchObserver(self._layout, seen)
                self._stream(rows, batch, _ObservingSink(observer))
                observer.finish()
            blocks = self._divide(seen)
            self.files.write_blocks(blocks)
        return blocks.to_json()

    def _divided(self, blocks: CurvatureBlocks) -> dict[str, Any]:
        """Divide by what all batches showed."""
        seen = Observation()
        for part in range(self.plan.parts):
            seen.merge(self.files.read_observed(self.files.sums_path("squares", blocks, part)))
        found = self._divide(seen)
        self.files.write_blocks(found)
        return found.to_json()

    def _divide(self, seen: Observation) -> CurvatureBlocks:
        return divide(
            self._layout,
            seen,
            self.plan.embeddings,
            self.plan.largest_side,
            diagonal=self.plan.kind == "diagonal",
            transposed=self.plan.transposed,
        )

    def _basis_parts(self, blocks: CurvatureBlocks) -> int:
        """Tell how many parts of the sample the bases take, from the positions in the first of them.

        Bases of whole gradients, of which a row is one, take all, and so does K-FAC, whose eigenvalues come from this
        pass alone.
        """
        if self.plan.kind != "ekfac":
            return self.plan.parts
        counts = self._counts(blocks, 1)
        factored = [
            (max(block.shape), count)
            for block, count in zip(blocks.kronecker, counts, strict=True)
            if block.source is not None
        ]
        if len(factored) < len(blocks.kronecker) or any(count == 0 for _, count in factored):
            return self.plan.parts
        wanted = ((max(BASIS_POSITIONS * side, FEWEST_POSITIONS), count) for side, count in factored)
        needed = max((-(-positions // count) for positions, count in wanted), default=1)
        return min(needed, self.plan.parts)

    def _counts(self, blocks: CurvatureBlocks, parts: int) -> list[int]:
        """Add up the positions behind every basis over the first parts."""
        return self._summed(blocks, "bases", "counts", (len(blocks.kronecker),), parts, torch.int64).tolist()

    def _pass(self, stage: str, blocks: CurvatureBlocks, parts: range) -> None:
        """Compute the sums of some parts, as far as they are missing, each process its share."""
        paths = {part: self.files.sums_path(stage, blocks, part) for part in parts}
        missing = self.processes.broadcast_from_main(lambda: [i for i, path in paths.items() if not path.exists()])
        mine = [missing[i] for i in self.processes.share(len(missing))]
        main = self.processes.is_main_process
        with (
            self.processes.all_or_none(),
            RowProgress(
                sum(len(cut) for part in mine for cut in self.plan.cuts(part)),
                f"{self.plan.description}, {stage}",
                processes=self.processes.num_processes,
                show=main and self.plan.show_progress,
                announce=main,
            ) as progress,
        ):
            for part in mine:
                if stage == "bases":
                    self._sum_bases(blocks, part, progress)
                else:
                    self._sum_squares(blocks, part, progress)

    def _sum_bases(self, blocks: CurvatureBlocks, part: int, progress: RowProgress) -> None:
        kinds = {"shampoo": "gradients", "diagonal": "none"}
        kind = kinds.get(self.plan.kind, "factors")
        sums = BasisSums(blocks, kind, self.device)  # type: ignore[arg-type]
        for rows, batch in self.source.iterate(self.plan.cuts(part)):
            sink = BatchArrivals(blocks, sums)
            self._stream(rows, batch, sink)
            sink.finish()
            progress.update(len(rows))
        tensors = {}
        for index, (left, right) in enumerate(zip(sums.left, sums.right, strict=True)):
            tensors[f"{index:05d}-left"], tensors[f"{index:05d}-right"] = left, right
        tensors["counts"] = torch.tensor(sums.counts, dtype=torch.int64)
        self._check_finite(tensors, blocks, part)
        self.files.write_sums(self.files.sums_path("bases", blocks, part), tensors)

    def _sum_squares(self, blocks: CurvatureBlocks, part: int, progress: RowProgress) -> None:
        sums = SquareSums(blocks, self._bases(blocks), self.device)
        seen = Observation()
        for rows, batch in self.source.iterate(self.plan.cuts(part)):
            observer = BatchObserver(self._layout, seen)
            sink = BatchArrivals(blocks, sums)
            self._stream(rows, batch, _ObservingSink(observer, sink))
            sink.finish()
            observer.finish()
            progress.update(len(rows))
        tensors = {f"{index:05d}": total for index, total in enumerate(sums.kronecker)}
        tensors |= {f"diagonal-{index:05d}": total for index, total in enumerate(sums.diagonal)}
        self._check_finite(tensors, blocks, part)
        path = self.files.sums_path("squares", blocks, part)
        self.files.write_sums(path, tensors, observed=seen.to_json())

    def _stream(self, rows: Sequence[int], batch: Batch, sink: Any) -> None:
        """Stream the gradients of a batch. One row alone goes twice, so that its layers come as factors, too."""
        if self._computer is None:  # processes without a part never need one
            self._computer = self.source.computer()
        split = SplitBatch.of(batch)
        if split.size != len(rows):
            raise ValueError(
                f"The collator made a batch of {split.size} samples from {len(rows)} rows. Expected one sample per "
                "row. Use a collator that neither drops nor adds samples."
            )
        try:
            if split.size == 1:
                twice = split.rebuild({key: torch.cat([value, value]) for key, value in split.mapped.items()})
                self._computer.stream(twice, _FirstRow(sink))
            else:
                self._computer.stream(batch, sink)
        except Exception as error:
            error.add_note(f"This happened in the batch of training rows {rows[0]} to {rows[-1]}.")
            raise

    def _check_finite(self, tensors: dict[str, Tensor], blocks: CurvatureBlocks, part: int) -> None:
        for name, tensor in tensors.items():
            if not tensor.is_floating_point() or bool(torch.isfinite(tensor.sum())):
                continue
            index = int(name.removeprefix("diagonal-")[:5])
            block = (blocks.diagonal if name.startswith("diagonal-") else blocks.kronecker)[index]
            rows = [row for cut in self.plan.cuts(part) for row in cut]
            raise NonFiniteError(
                f"A gradient of {block.name!r} is NaN or infinite in one of the training rows {rows[0]} to "
                f"{rows[-1]}. Expected finite numbers. Look at these rows and at the checkpoint, or compute in "
                "float32 (`model_dtype='float32'`)."
            )

    # -- eigendecompositions -----------------------------------------------------------------------------------------

    def _decompose(self, blocks: CurvatureBlocks) -> None:
        """Decompose the summed matrices of the blocks that fall to this process."""
        if self.plan.kind == "diagonal":
            return
        parts = self._basis_parts(blocks)
        with self.processes.all_or_none():
            counts = self._counts(blocks, parts)
            for index in self._mine(blocks):
                path = self.files.sums_path("basis", blocks, index)
                if path.exists():
                    continue
                block = blocks.kronecker[index]
                found = {}
                for side, size in zip(("left", "right"), block.shape, strict=True):
                    total = self._summed(blocks, "bases", f"{index:05d}-{side}", (size, size), parts)
                    what = f"{block.name!r} ({side} side)"
                    found[f"{side}_values"], found[f"{side}_basis"] = eigenbasis(total, counts[index], what)
                self.files.write_sums(path, found)

    def _mine(self, blocks: CurvatureBlocks) -> list[int]:
        """Choose blocks for this process: the dearest first, each to the process that has least to do."""
        loads = [0] * self.processes.num_processes
        mine = []
        for index in sorted(range(len(blocks.kronecker)), key=lambda i: -sides(blocks.kronecker[i])):
            rank = loads.index(min(loads))
            loads[rank] += sides(blocks.kronecker[index])
            if rank == self.processes.process_index:
                mine.append(index)
        return mine

    def _summed(
        self,
        blocks: CurvatureBlocks,
        stage: str,
        name: str,
        shape: tuple[int, ...],
        parts: int,
        dtype: torch.dtype = torch.float64,
    ) -> Tensor:
        """Add one tensor over the first parts, in their order."""
        total = torch.zeros(shape, dtype=dtype)
        for part in range(parts):
            path = self.files.sums_path(stage, blocks, part)
            total += self.files.read_sums(path, {name: TensorSpec(shape, (dtype,))})[name]
        return total

    def _squares(self, blocks: CurvatureBlocks, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._summed(blocks, "squares", name, shape, self.plan.parts)

    def _basis(self, blocks: CurvatureBlocks, index: int) -> dict[str, Tensor]:
        rows, columns = blocks.kronecker[index].shape
        specs = {
            "left_basis": TensorSpec((rows, rows), (torch.float32,)),
            "right_basis": TensorSpec((columns, columns), (torch.float32,)),
            "left_values": TensorSpec((rows,), (torch.float64,)),
            "right_values": TensorSpec((columns,), (torch.float64,)),
        }
        return self.files.read_sums(self.files.sums_path("basis", blocks, index), specs)

    def _bases(self, blocks: CurvatureBlocks) -> list[tuple[Tensor, Tensor] | None]:
        if self.plan.kind == "diagonal":
            return [None] * len(blocks.kronecker)
        found = (self._basis(blocks, index) for index in range(len(blocks.kronecker)))
        return [(one["left_basis"].to(self.device), one["right_basis"].to(self.device)) for one in found]

    # -- the end -----------------------------------------------------------------------------------------------------

    def _conclude(self, blocks: CurvatureBlocks) -> None:
        """Write the blocks that fall to this process; the main process then completes the curvature."""
        rows = len(self.plan.rows)
        parts = self._basis_parts(blocks)
        counts = self._counts(blocks, parts)
        counted_rows = sum(len(cut) for part in range(parts) for cut in self.plan.cuts(part))
        with self.processes.all_or_none():
            for index in self._mine(blocks):
                eigenvalues = self._squares(blocks, f"{index:05d}", blocks.kronecker[index].shape) / rows
                basis = None if self.plan.kind == "diagonal" else self._basis(blocks, index)
                if self.plan.kind == "kfac" and basis is not None:
                    # Σ_b G_b G_bᵀ ≈ N (L / N) ⊗ (R / N) for N positions
                    scale = counts[index] / counted_rows
                    if blocks.kronecker[index].source is None:
                        # E[G Gᵀ] ⊗ E[Gᵀ G] is the square of a curvature: its trace is too large by the trace of either
                        scale /= max(float(basis["left_values"].sum()), torch.finfo(torch.float64).tiny)
                    eigenvalues = scale * torch.outer(basis["left_values"], basis["right_values"])
                bases = None if basis is None else (basis["left_basis"], basis["right_basis"])
                self.files.write_block(index, eigenvalues.float(), bases)

        def finish() -> None:
            diagonal = [
                (self._squares(blocks, f"diagonal-{index:05d}", (block.numel,)) / rows).float()
                for index, block in enumerate(blocks.diagonal)
            ]
            self.files.write_diagonal(diagonal)
            self.files.write(blocks, rows, {"counts": counts})

        self.processes.broadcast_from_main(finish)


class _ObservingSink:
    """Passes blocks to an observer, and to another sink."""

    takes_outer = staticmethod(every_factor)

    def __init__(self, observer: BatchObserver, sink: BatchArrivals | None = None) -> None:
        self._observer = observer
        self._sink = sink

    def __call__(self, start: int, block: Tensor) -> None:
        self._observer.dense(start, block)
        if self._sink is not None:
            self._sink(start, block)

    def add_outer(self, start: int, left: Tensor, right: Tensor) -> None:
        self._observer.outer(start, left, right)
        if self._sink is not None:
            self._sink.add_outer(start, left, right)


class _FirstRow:
    """Passes on the first of two equal rows."""

    takes_outer = staticmethod(every_factor)

    def __init__(self, sink: Any) -> None:
        self._sink = sink

    def __call__(self, start: int, block: Tensor) -> None:
        self._sink(start, block[:1])

    def add_outer(self, start: int, left: Tensor, right: Tensor) -> None:
        self._sink.add_outer(start, left[:1], right[:1])
