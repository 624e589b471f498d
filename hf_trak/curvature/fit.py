"""The passes that fit a curvature to a model, over a random sample of the training rows.

1. The first batch shows in which form gradients come, and so how the parameters divide into blocks (`observation`).
2. First pass: the sums behind the bases, over as much of the sample as bases need.
3. Eigendecompositions, each block in one process, cost shared evenly.
4. Second pass: squares of gradients in these bases, over the whole sample. Where its batches ask for another division
   than the first one did, the fit begins again with that division.

Labels that are drawn from the model are drawn anew for the second pass: measured on the gradients that it was made
for, a basis would find its first eigenvalues too large and its last too small.

The sample is cut into parts (`plan`), the same for any number of processes. Every part of a pass is a file, so that a
killed fit loses one part per process, and the parts are added in their order, so that the result has the same bits
however it was divided. One part at a time is in memory.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from hf_trak.curvature.arrivals import BatchArrivals, FirstRow, ObservingSink, Unwanted
from hf_trak.curvature.blocks import CurvatureBlocks
from hf_trak.curvature.curvature import Curvature, FitPlan, Rows, rows_needed
from hf_trak.curvature.files import CurvatureFiles
from hf_trak.curvature.observation import BatchObserver, Observation, divide, eigenbasis, even_in_null_spaces
from hf_trak.curvature.owner_maps import BlockOwners, ExchangingSink
from hf_trak.curvature.sums import BasisSums, SquareSums, shared_out, sides
from hf_trak.errors import NonFiniteError, StoreError
from hf_trak.gradient_computers import AbstractGradientComputer
from hf_trak.gradient_computers.base import SplitBatch
from hf_trak.gradient_computers.layout import ParameterLayout
from hf_trak.modelout_functions.base import Batch
from hf_trak.runtime.processes import Processes
from hf_trak.runtime.progress import RowProgress
from hf_trak.runtime.sharding import RowDivision
from hf_trak.store.shards import TensorSpec

logger = logging.getLogger(__name__)

_MAX_ROUNDS = 8

Stage = Literal["bases", "squares"]
"""The passes over the sample."""


class BatchSource(Protocol):
    """Gives the batches of a fit, as a model takes them."""

    def iterate(self, cuts: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], Batch]]:
        """Yield `(row numbers, batch)` for every list of row numbers."""

    def together(self) -> AbstractContextManager[None]:
        """Return a context in which processes may stream different numbers of batches. All of them enter it."""

    @property
    def sharded(self) -> bool:
        """Tell whether processes hold parts of one model, so that all make the same passes."""

    @property
    def division(self) -> RowDivision:
        """Return which processes work on the same rows. The first of them gets the gradients."""

    def exchange(self, word: str) -> list[str]:
        """Tell all processes that hold parts of one model a word, and hear theirs, by rank."""

    def computer(self, stage: Stage) -> AbstractGradientComputer:
        """Make the engine of a pass, checked on the batch that was yielded last.

        Each pass has label draws of its own.
        """


@dataclass(eq=False, repr=False)
class CurvatureFit:
    """One fit, done by all processes together, which call [`~CurvatureFit.run`].

    Attributes:
        plan: what is fitted.
        files: where sums and the result are kept.
        source: the batches, and the engine, whose task gives log-likelihoods.
        layout: the attributed parameters.
        processes: the processes.
        device: where gradients are.
    """

    plan: FitPlan
    files: CurvatureFiles
    source: BatchSource
    layout: ParameterLayout
    processes: Processes
    device: torch.device
    _computers: dict[Stage, AbstractGradientComputer] = field(default_factory=dict, init=False)

    def run(
        self, chosen: Callable[[CurvatureBlocks], tuple[Collection[int], Collection[int]]] | None = None
    ) -> Curvature:
        """Fit, or finish a fit that was interrupted.

        Args:
            chosen: see [`CurvatureFiles.read`].

        Returns:
            The curvature, in every process, as far as it is chosen.

        Raises:
            NonFiniteError: a gradient is NaN or infinite.
            StoreError: a file is damaged or cannot be written.
            PeerProcessError: another process failed or died.
        """
        if not self.processes.broadcast_from_main(self.files.finished):
            try:
                self.processes.broadcast_from_main(self.files.prepare)
                self._conclude(self._passes())
            finally:
                self.files.release()
        with self.processes.all_or_none():
            return self.files.read(chosen)

    # -- passes ------------------------------------------------------------------------------------------------------

    def _passes(self) -> CurvatureBlocks:
        """Make both passes, with the division that all batches of the sample ask for."""
        first: list[dict[str, Any]] = []
        begun = self.processes.broadcast_from_main(lambda: self.files.read_blocks() is not None)
        with self.processes.all_or_none(), self.source.together():
            if self.processes.is_main_process or (self.source.sharded and not begun):
                first.append(self._first_blocks())
        blocks = CurvatureBlocks.from_json(self.processes.broadcast_from_main(lambda: first[0]))
        for _ in range(_MAX_ROUNDS):
            self._pass("bases", blocks, self.plan.first_basis_parts)
            self._pass("bases", blocks, self._basis_parts(blocks))
            self._decompose(blocks)
            self._pass("squares", blocks, self.plan.parts)
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
        """Divide by what the first batch shows, unless an earlier run has come further.

        All processes of a sharded model call this. The main process gets the gradients.
        """
        main = self.processes.is_main_process
        blocks = self.files.read_blocks() if main else None
        if blocks is None:
            seen = Observation()
            for rows, batch in self.source.iterate(self.plan.batches(self.plan.first_basis_parts[0])[:1]):
                observer = BatchObserver(self.layout, seen)
                self._stream("bases", rows, batch, ObservingSink(observer) if main else Unwanted())
                observer.finish()
            if not main:
                return {}
            blocks = divide(self.layout, seen, self.plan)
            self.files.write_blocks(blocks)
        return blocks.to_json()

    def _divided(self, blocks: CurvatureBlocks) -> dict[str, Any]:
        """Divide by what all batches showed."""
        seen = Observation()
        for part in range(len(self.plan.parts)):
            for path in self.files.sums_paths("squares", blocks, part):
                seen.merge(self.files.read_extra(path)["observed"])
        found = divide(self.layout, seen, self.plan)
        self.files.write_blocks(found)
        return found.to_json()

    def _basis_parts(self, blocks: CurvatureBlocks) -> list[Rows]:
        """Return all parts of the first pass. The first must be there: they tell how many positions rows have. A
        gradient that comes whole counts as one position."""
        first = self.plan.first_basis_parts
        if self.plan.kind != "ekfac":
            return first
        counts = map(int, self._counts(blocks, len(first)))
        longer = [max(block.shape) for block in blocks.kronecker]
        counted = sum(map(len, first))
        needed = rows_needed(counted, list(zip(longer, counts, strict=True)), len(self.plan.rows))
        return [*first, *self.plan.further_basis_parts(needed)]

    def _counts(self, blocks: CurvatureBlocks, parts: int) -> list[float]:
        """Add up the positions behind every basis over the first parts."""
        return self._summed(blocks, "bases", "counts", (len(blocks.kronecker),), parts).tolist()

    def _pass(self, stage: Stage, blocks: CurvatureBlocks, parts: Sequence[Rows]) -> None:
        """Compute the sums of all parts, as far as they are missing, each process its share."""
        missing = self.processes.broadcast_from_main(
            lambda: [part for part in range(len(parts)) if not self.files.sums_paths(stage, blocks, part)]
        )
        if not missing:
            return
        together = self._together(blocks) if self.source.sharded else None
        mine = missing if together else [missing[i] for i in self.processes.share(len(missing))]
        rows = sum(len(parts[part]) for part in mine)
        with (
            self.processes.all_or_none(),
            self.source.together(),
            RowProgress.over(
                self.processes,
                rows // self.processes.num_processes if together else rows,
                f"{self.plan.description}, {stage}",
            ) as progress,
        ):
            for part in mine:
                if stage == "bases":
                    tensors, seen = self._sum_bases(blocks, parts[part], progress, together), Observation()
                else:
                    tensors, seen = self._sum_squares(blocks, parts[part], progress, together)
                self._check_finite(tensors, blocks, parts[part])
                share = (together.rank, together.count) if together else (0, 1)
                path = self.files.sums_path(stage, blocks, part, share)
                self.files.write_sums(path, tensors, observed=seen.to_json(), names=sorted(tensors))

    def _together(self, blocks: CurvatureBlocks) -> BlockOwners:
        """Divide the blocks over the processes of a sharded model."""
        group = torch.distributed.new_group(backend="gloo")
        return BlockOwners(blocks, self.processes.process_index, self.processes.num_processes, group)

    def _batches(
        self, stage: Stage, part: Rows, progress: RowProgress, sink: Callable[[], Any], seen: Observation | None
    ) -> None:
        """Stream the batches of a part that are this process' into sinks, one for each.

        Processes that hold a sharded model take turns in batches. Where there is none left for one of them, it streams
        the first one, and drops the result.
        """
        cuts, division = self.plan.batches(part), self.source.division
        places = list(range(len(cuts)))
        if self.source.sharded:
            turns = -(-len(cuts) // division.count)
            places = [turn * division.count + division.index for turn in range(turns)]
        asked = [cuts[place] if place < len(cuts) else cuts[0] for place in places]
        # A cut may come in several batches, if its rows have images of different sizes.
        left = [place for place, cut in zip(places, asked, strict=True) for _ in cut]
        for rows, batch in self.source.iterate(asked):
            place = left[0]
            del left[: len(rows)]
            if self.source.sharded and place == (left[0] if left else None):
                raise ValueError(
                    f"The rows {rows[0]} to {rows[-1]} are part of a batch of rows with images of different sizes, "
                    "for a model that is divided over processes. Expected batches that stay whole. Set "
                    "`per_device_batch_size=1`."
                )
            made = sink()
            if place >= len(cuts) or not division.is_leader:
                self._stream(stage, rows, batch, Unwanted())
            elif seen is None:
                self._stream(stage, rows, batch, made)
            else:
                observer = BatchObserver(self.layout, seen)
                self._stream(stage, rows, batch, ObservingSink(observer, made))
                observer.finish()
            made.finish()
            if place < len(cuts):
                progress.update(len(rows))

    def _sink(self, blocks: CurvatureBlocks, sums: Any, together: BlockOwners | None) -> Any:
        if together is None:
            return BatchArrivals(blocks, sums)
        return ExchangingSink(blocks, sums, together, self.source.exchange)

    def _sum_bases(
        self, blocks: CurvatureBlocks, part: Rows, progress: RowProgress, together: BlockOwners | None
    ) -> dict[str, Tensor]:
        kinds = {"shampoo": "gradients", "diagonal": "none"}
        kind: Any = kinds.get(self.plan.kind, "factors")
        sums = BasisSums(blocks, kind, self.device, None if together is None else together.mine)
        self._batches("bases", part, progress, lambda: self._sink(blocks, sums, together), None)
        tensors = {"counts": torch.tensor(sums.counts, dtype=torch.float64)}
        return tensors | _rounded("left-", sums.left) | _rounded("right-", sums.right)

    def _sum_squares(
        self, blocks: CurvatureBlocks, part: Rows, progress: RowProgress, together: BlockOwners | None
    ) -> tuple[dict[str, Tensor], Observation]:
        """Return the sums, and what was observed."""
        owned = None if together is None else together.mine
        sums = SquareSums(blocks, self._bases(blocks, owned), self.device, owned)
        seen = Observation()
        self._batches("squares", part, progress, lambda: self._sink(blocks, sums, together), seen)
        return _rounded("", sums.kronecker) | _rounded("diagonal-", sums.diagonal), seen

    def _stream(self, stage: Stage, rows: Sequence[int], batch: Batch, sink: Any) -> None:
        """Stream the gradients of a batch. One row alone goes twice, so that its layers come as factors, too."""
        if stage not in self._computers:  # processes without a part never need one
            self._computers[stage] = self.source.computer(stage)
        computer = self._computers[stage]
        split = SplitBatch.of_rows(batch, len(rows))
        try:
            if split.size == 1:
                computer.stream(split.picked([0, 0]), FirstRow(sink))
            else:
                computer.stream(batch, sink)
        except Exception as error:
            error.add_note(f"This happened in the batch of training rows {rows[0]} to {rows[-1]}.")
            raise

    def _check_finite(self, tensors: dict[str, Tensor], blocks: CurvatureBlocks, rows: Rows) -> None:
        for name, tensor in tensors.items():
            if not tensor.is_floating_point() or bool(torch.isfinite(tensor.sum())):
                continue
            index = int(name[-5:])
            block = (blocks.diagonal if name.startswith("diagonal-") else blocks.kronecker)[index]
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
        with self.processes.all_or_none():
            parts = len(self._basis_parts(blocks))
            counts = self._counts(blocks, parts)
            for index in self._mine(blocks):
                if (path := self.files.sums_path("basis", blocks, index)).exists():
                    continue
                block = blocks.kronecker[index]
                found = {}
                for side, size in zip(("left", "right"), block.shape, strict=True):
                    total = self._summed(blocks, "bases", f"{side}-{index:05d}", (size, size), parts)
                    what = f"{block.name!r} ({side} side)"
                    found[f"{side}_values"], found[f"{side}_basis"] = eigenbasis(total, counts[index], what)
                self.files.write_sums(path, found)

    def _mine(self, blocks: CurvatureBlocks) -> list[int]:
        """Choose blocks for this process: the dearest first, each to the process that has least to do."""
        costs = {index: sides(block) for index, block in enumerate(blocks.kronecker)}
        owners = shared_out(costs, [0] * self.processes.num_processes)
        return [index for index, owner in owners.items() if owner == self.processes.process_index]

    def _summed(self, blocks: CurvatureBlocks, stage: str, name: str, shape: tuple[int, ...], parts: int) -> Tensor:
        """Add one tensor over the first parts, in their order, in float64."""
        total = torch.zeros(shape, dtype=torch.float64)
        specs = {name: TensorSpec(shape, (torch.float32, torch.float64))}
        for part in range(parts):
            if not (paths := self.files.sums_paths(stage, blocks, part)):
                raise StoreError(
                    f"The sums of part {part} of a fit have vanished from {self.files.progress}. Expected all parts. "
                    "Run the same command again; only what is missing is computed."
                )
            for path in paths:
                if name in self.files.read_extra(path)["names"]:
                    total += self.files.read_sums(path, specs)[name]
        return total

    def _squares(self, blocks: CurvatureBlocks, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._summed(blocks, "squares", name, shape, len(self.plan.parts))

    def _basis(self, blocks: CurvatureBlocks, index: int) -> dict[str, Tensor]:
        rows, columns = blocks.kronecker[index].shape
        specs = {
            "left_basis": TensorSpec((rows, rows), (torch.float32,)),
            "right_basis": TensorSpec((columns, columns), (torch.float32,)),
            "left_values": TensorSpec((rows,), (torch.float64,)),
            "right_values": TensorSpec((columns,), (torch.float64,)),
        }
        return self.files.read_sums(self.files.sums_path("basis", blocks, index), specs)

    def _bases(
        self, blocks: CurvatureBlocks, owned: frozenset[int] | None = None
    ) -> list[tuple[Tensor, Tensor] | None]:
        """Read the bases of the blocks whose gradients come here."""
        found: list[tuple[Tensor, Tensor] | None] = [None] * len(blocks.kronecker)
        if self.plan.kind != "diagonal":
            for index in range(len(found)) if owned is None else owned:
                one = self._basis(blocks, index)
                found[index] = one["left_basis"].to(self.device), one["right_basis"].to(self.device)
        return found

    # -- the end -----------------------------------------------------------------------------------------------------

    def _conclude(self, blocks: CurvatureBlocks) -> None:
        """Write the blocks that fall to this process; the main process then completes the curvature."""
        rows, scale = len(self.plan.rows), 0.0
        with self.processes.all_or_none():
            parts = self._basis_parts(blocks)
            counts = self._counts(blocks, len(parts))
            counted_rows = sum(map(len, parts))
            for index in self._mine(blocks):
                eigenvalues = self._squares(blocks, f"{index:05d}", blocks.kronecker[index].shape) / rows
                basis = None if self.plan.kind == "diagonal" else self._basis(blocks, index)
                if self.plan.kind == "kfac" and basis is not None:
                    # Σ_b G_b G_bᵀ ≈ N (L / N) ⊗ (R / N) for N positions
                    factor = counts[index] / counted_rows
                    if blocks.kronecker[index].source is None:
                        # E[G Gᵀ] ⊗ E[Gᵀ G] is the square of a curvature: its trace is too large by the trace of either
                        factor /= max(float(basis["left_values"].sum()), torch.finfo(torch.float64).tiny)
                    eigenvalues = factor * torch.outer(basis["left_values"], basis["right_values"])
                elif basis is not None:
                    eigenvalues = even_in_null_spaces(eigenvalues, basis["left_values"], basis["right_values"])
                bases = None if basis is None else (basis["left_basis"], basis["right_basis"])
                eigenvalues = eigenvalues.float()
                scale = max(scale, float(eigenvalues.double().mean()))
                self.files.write_block(blocks, index, eigenvalues, bases)
        largest = float(self.processes.maximum(torch.tensor(scale, dtype=torch.float64)))

        def finish() -> None:
            diagonal = [
                (self._squares(blocks, f"diagonal-{index:05d}", (block.numel,)) / rows).float()
                for index, block in enumerate(blocks.diagonal)
            ]
            self.files.write_diagonal(blocks, diagonal)
            scales = [largest, *(float(one.double().mean()) for one in diagonal)]
            self.files.write(blocks, rows, {"counts": list(map(round, counts)), "scale": max(scales)})

        self.processes.broadcast_from_main(finish)


def _rounded(prefix: str, sums: dict[int, Tensor]) -> dict[str, Tensor]:
    """Round sums to float32 for a file, and free those in float64 one by one. Names are prefix and index."""
    for index, total in sums.items():
        sums[index] = total.float()
    return {f"{prefix}{index:05d}": total for index, total in sums.items()}
