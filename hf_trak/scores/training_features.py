"""The features X `(n, k)` of the training rows of one checkpoint, multiplied piece by piece by all processes together.

Everything is in float64, and has the same bits for any number of processes: each entry of a result is computed by one
process as a whole, from pieces whose sizes depend on n, k and the shards alone, or is a sum of integers. A piece holds
whole rows, or some columns of them, so that memory does not grow with n or k.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_trak.runtime.checks import check_finite_rows
from hf_trak.runtime.processes import Processes
from hf_trak.scores.gram import ProductSum, power_above
from hf_trak.store.codes import CodedRows, CodeFormat, packed_bytes
from hf_trak.store.shard_set import Shard, ShardSet

PIECE_NUMBERS = 1 << 26
"""Numbers in a piece, unless one row has more: 512 MiB in float64."""

_STRIP_NUMBERS = 1 << 24
"""Numbers of a factor, or of a result, that are converted or computed at a time."""

_COLUMN_SLICE = 4096
"""Columns of BᵀX that one process computes at a time."""


@dataclass(frozen=True)
class Sizes:
    """The magnitudes of the features, which scale sums of integers.

    Attributes:
        column_squares (`torch.Tensor` of shape `(k,)`):
            The largest ‖x_i‖² that column i has within a shard.
        trace (`float`):
            trace(XᵀX) = Σ‖x‖².
    """

    column_squares: Tensor
    trace: float


class TrainingFeatures:
    """X `(n, k)` of one checkpoint. All processes call its methods in the same order, except for `pieces`.

    Attributes:
        n (`int`): number of training rows.
        k (`int`): number of features.
    """

    def __init__(self, shards: ShardSet, processes: Processes, device: torch.device) -> None:
        """
        Args:
            shards: the shards of X, all of them written.
            processes: the processes that share the work.
            device: products are computed on this device.
        """
        self.shards = shards
        self.processes = processes
        self.device = device
        self.n, self.k = shards.plan.n_rows, shards.width

    @property
    def own(self) -> range:
        """Return the indices of the shards that fall to this process."""
        return self.processes.share(len(self.shards))

    def pieces(
        self, indices: Sequence[int], columns: range | None = None, together: int | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Read some shards in pieces of bounded size, in order.

        Args:
            indices: the shards.
            columns: some columns; `None` for all.
            together: rows of a piece; `None` for as many as the bound allows.

        Yields:
            The index of the first row, and `(rows, columns)` in float64 on the device.

        Raises:
            StoreError: a shard is missing or damaged.
            NonFiniteError: a feature is not finite; names its row.
        """
        columns = range(self.k) if columns is None else columns
        together = together or max(1, PIECE_NUMBERS // max(1, len(columns)))
        for index in indices:
            shard = self.shards.read(index)
            for first in range(0, shard.stop - shard.start, together):
                piece = _piece(shard, first, min(first + together, shard.stop - shard.start), columns)
                check_finite_rows(piece, "feature vector", shard.start + first)
                yield shard.start + first, piece.to(device=self.device, dtype=torch.float64)

    def sizes(self) -> Sizes:
        """Measure the columns and the trace, in one pass.

        Raises:
            As `pieces`.
        """
        largest = torch.zeros(self.k, dtype=torch.float64, device=self.device)
        squares = torch.zeros(self.n, dtype=torch.float64)
        with self.processes.all_or_none():
            for index in self.own:
                within = torch.zeros_like(largest)
                for start, piece in self.pieces([index]):
                    square = piece.square_()
                    within += square.sum(dim=0)
                    squares[start : start + len(piece)] = square.sum(dim=1).cpu()
                torch.maximum(largest, within, out=largest)
        columns = self.processes.maximum(largest.cpu())
        return Sizes(columns, float(self.processes.add(squares).sum()))

    def times(self, right: Tensor) -> Tensor:
        """Compute X·B.

        Args:
            right: B, `(k, m)`, float64.

        Returns:
            `(n, m)`, float64, on the CPU.

        Raises:
            As `pieces`.
        """
        right = right.to(self.device)
        result = torch.zeros(self.n, right.shape[1], dtype=torch.float64)
        with self.processes.all_or_none():
            for start, piece in self.pieces(self.own):
                result[start : start + len(piece)] = (piece @ right).cpu()
        return self.processes.add(result)  # every row comes from one process, the others add zeros

    def combine(self, weights: Tensor) -> Tensor:
        """Compute BᵀX. Each process computes some columns, over all rows.

        Args:
            weights: B, `(n, m)`, float64.

        Returns:
            `(m, k)`, float64, on the CPU.

        Raises:
            As `pieces`.
        """
        slices = [range(first, min(first + _COLUMN_SLICE, self.k)) for first in range(0, self.k, _COLUMN_SLICE)]
        mine = [slices[index] for index in sorted(self.processes.share(len(slices)))]  # neighbours
        result = torch.zeros(weights.shape[1], self.k, dtype=torch.float64, device=self.device)
        with self.processes.all_or_none():
            every = range(len(self.shards)) if mine else []
            own = range(mine[0].start, mine[-1].stop) if mine else range(0)
            # Sums over pieces have the same bits for any number of columns if pieces have the same rows.
            for start, piece in self.pieces(every, own, max(1, PIECE_NUMBERS // self.k)):
                rows = weights[start : start + len(piece)].T.to(self.device)
                for columns, part in zip(mine, piece.split(_COLUMN_SLICE, dim=1), strict=True):
                    result[:, columns.start : columns.stop].addmm_(rows, part)
        return self.processes.add(result.cpu())

    def gram_times(self, right: Tensor, sizes: Sizes) -> Tensor:
        """Compute XᵀX·B in one pass over the rows.

        Args:
            right: B, `(k, r)`, float32 or float64; the same in all processes.
            sizes: the magnitudes of X.

        Returns:
            `(k, r)`, float64, on the CPU.

        Raises:
            As `pieces`.
        """
        right = right.to(self.device)
        r = right.shape[1]
        strip = max(1, _STRIP_NUMBERS // r)

        def squares() -> Tensor:
            return sum_over_strips(right, strip, lambda part: part.square().sum(dim=0)).cpu()

        # ‖X b‖² ≤ ‖X‖² ‖b‖², and the squared Frobenius norm of X is the trace
        norms = self.processes.broadcast_tensor_from_main(squares, (r,))
        left_scale = power_above(sizes.column_squares * len(self.shards))
        total = ProductSum(left_scale.to(self.device), power_above(norms * sizes.trace).to(self.device))
        with self.processes.all_or_none():
            for _, piece in self.pieces(self.own):
                product = torch.zeros(len(piece), r, dtype=torch.float64, device=self.device)
                for first in range(0, self.k, strip):
                    part = slice(first, first + strip)
                    product.addmm_(piece[:, part], right[part].double())
                total.add(piece, product, strip)
        total.integers = self.processes.add(total.integers.cpu()).to(self.device)
        return total.result().cpu()


def sum_over_strips(matrix: Tensor, strip: int, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Sum a function of strips of rows, each converted to float64."""
    parts = (function(part.double()) for part in matrix.split(strip))
    total = next(parts)
    for part in parts:
        total += part
    return total


def _piece(shard: Shard, first: int, last: int, columns: range) -> Tensor:
    """Return some rows and columns of a shard, in the storage dtype or decoded to float32."""
    part = shard.rows(first, last)
    if part.coded is not None:
        return _decoded(part.coded, columns)
    return part.grads[:, columns.start : columns.stop]


def _decoded(coded: CodedRows, columns: range) -> Tensor:
    """Decode some columns, from the bytes that hold them: those of 8 columns at a time are whole bytes."""
    bits, start = coded.form.bits, columns.start // 8 * 8
    first, last, passed, parts = start * bits // 8, packed_bytes(columns.stop, bits), 0, []
    for block in coded.blocks:
        parts.append(block[:, max(0, first - passed) : max(0, last - passed)])
        passed += block.shape[1]
    form = CodeFormat(bits, columns.stop - start)
    return CodedRows(form, coded.scale, (torch.cat(parts, dim=1),)).decode()[:, columns.start - start :]
