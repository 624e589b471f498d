"""Linear maps of gradients under a curvature, in the form in which a featurizer applies a projection."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from hf_trak.curvature.arrivals import BlockRanges, add_part, add_weights, by_source, slices
from hf_trak.curvature.curvature import Curvature, scaled, weights
from hf_trak.curvature.observation import BIAS_NOISE, BIAS_TOLERANCE
from hf_trak.errors import SingularGramError
from hf_trak.gradient_computers.hooked.workspace import OuterSink, every_factor
from hf_trak.projectors import BlockProjector


class GradientMap:
    """A map of gradients `(B, P)` to rows of `proj_dim` numbers. Subclasses implement `sink`.

    Attributes:
        proj_dim (`int`): length of a result.
        scale (`float`): factor of the results that a sink leaves to its caller; 1 where these need no further factor.
    """

    scale = 1.0
    by_owner = False
    """Whether processes that hold a sharded model exchange gradients at the end of every batch. Each gradient belongs
    to the first process of those with the same rows."""

    def __init__(self, proj_dim: int) -> None:
        self.proj_dim = proj_dim

    def begin(self, rows: Sequence[int]) -> None:
        """Hear the numbers of the rows of the batch that the next sink is opened for. By default of no interest."""

    def accompany(self) -> None:
        """Take part in what the other processes exchange at the end of a batch. By default they exchange nothing."""

    def sink(self, batch_size: int, model_id: int, device: str | torch.device) -> "MapSink":
        """Open a sink for the blocks of one batch.

        Raises:
            NotImplementedError: a subclass lacks it.
        """
        raise NotImplementedError


class BlockSink(OuterSink, Protocol):
    """Takes the blocks of one batch, in any order."""

    def __call__(self, start: int, block: Tensor) -> None:
        """Add columns `start … start + n` of the gradients, `(B, n)`."""


class MapSink(BlockSink, Protocol):
    """Takes the blocks of one batch, and makes rows of them."""

    def result(self) -> Tensor:
        """Return the rows, `(B, proj_dim)`, when all blocks have come."""


class DenseSink:
    """Takes the blocks of one batch, all of them dense."""

    def __init__(self, add: Callable[[int, Tensor], None], result: Callable[[], Tensor]) -> None:
        """
        Args:
            add: takes a block.
            result: returns the rows when all blocks have come.
        """
        self._add = add
        self.result = result

    def __call__(self, start: int, block: Tensor) -> None:
        """Add columns `start … start + n` of the gradients."""
        with torch.no_grad(), torch.autocast(block.device.type, enabled=False):
            self._add(start, block.detach().float())

    def takes_outer(self, left: Tensor, right: Tensor) -> bool:
        """Return `False`: a formed block is multiplied at once, for all targets together."""
        return False

    def add_outer(self, start: int, left: Tensor, right: Tensor) -> None:
        """Add a block by its factors."""
        self(start, torch.bmm(left.transpose(1, 2), right).flatten(1))


class Places(Protocol):
    """The places of the values of an [`InverseSink`]. Values of one place may come in several parts, which add up."""

    def matrices(self, index: int, rotated: Tensor) -> None:
        """Take values of Kronecker block `index` in its bases, `(B, *shape)`."""

    def numbers(self, index: int, first: int, values: Tensor) -> None:
        """Take values of diagonal block `index` from element `first` on, `(B, n)`."""


class OwnPlaces:
    """Rows of P numbers, each at the position of its parameter; matrices are rotated back."""

    def __init__(self, curvature: Curvature, size: int, device: str | torch.device) -> None:
        self._curvature = curvature
        self.rows = torch.zeros(size, curvature.numel, device=device)

    def matrices(self, index: int, rotated: Tensor) -> None:
        self._curvature.blocks.kronecker[index].add(self._curvature.kronecker[index].rotated_back(rotated), self.rows)

    def numbers(self, index: int, first: int, values: Tensor) -> None:
        start = self._curvature.blocks.diagonal[index].start + first
        self.rows[:, start : start + values.shape[1]] += values


class PlacesOfBlocks:
    """Hands on P numbers of a row block by block, matrices in their bases: first all of these, then single numbers."""

    def __init__(self, curvature: Curvature, add: Callable[[int, Tensor], object]) -> None:
        self._add = add
        sizes = [one.numel for one in curvature.blocks.kronecker] + [one.numel for one in curvature.blocks.diagonal]
        starts = [0, *accumulate(sizes)]
        self._matrices, self._numbers = starts[: len(curvature.kronecker)], starts[len(curvature.kronecker) : -1]

    def matrices(self, index: int, rotated: Tensor) -> None:
        self._add(self._matrices[index], rotated.flatten(1))

    def numbers(self, index: int, first: int, values: Tensor) -> None:
        self._add(self._numbers[index] + first, values)


class InverseMap(GradientMap):
    """Multiplication by a power of the inverse curvature, block by block as gradients come."""

    def __init__(self, proj_dim: int, curvature: Curvature, damping: float, power: float) -> None:
        """
        Args:
            proj_dim: length of a result.
            curvature: the curvature.
            damping: c in 1 / (Λ + c · mean Λ).
            power: of the inverse.
        """
        super().__init__(proj_dim)
        self.curvature = curvature
        values, floor = curvature.kronecker, curvature.floor
        self.matrices = {i: weights(values[i].eigenvalues, damping, floor, power) for i in curvature.held}
        plain, diagonal = curvature.kind == "identity", curvature.diagonal
        self.numbers = {
            i: torch.ones_like(diagonal[i]) if plain else weights(diagonal[i], damping, floor, power)
            for i in curvature.held_numbers
        }

    def opened(self, places: "Places", result: Callable[[], Tensor]) -> "MapSink":
        """Open a sink that gives its values to `places`."""
        return InverseSink(self, places, result)


class InverseSink:
    """Multiplies the blocks of one batch by a power of the inverse curvature.

    The map is linear, so that factors are multiplied as they come: rotated first, where that takes less. What comes
    dense of a matrix (all of it, from a batch of one row) is collected until the end. The gradient of a bias that is
    a column of its matrix comes twice, within the factors and alone: what the factors have of it is subtracted, and
    what is left beyond rounding is treated like weights that come dense.
    """

    takes_outer = staticmethod(every_factor)

    def __init__(self, of: InverseMap, places: Places, result: Callable[[], Tensor]) -> None:
        """
        Args:
            of: the map.
            places: where values go.
            result: returns the rows when all have gone there.
        """
        self._map = of
        self._blocks = of.curvature.blocks
        self._places = places
        self._result = result
        self._by_source = by_source(self._blocks, of.matrices)
        self._ranges = BlockRanges(self._blocks, of.matrices, of.numbers)
        self._dense: dict[int, Tensor] = {}
        self._biases: dict[int, Tensor] = {}
        self._rounding: dict[int, float] = defaultdict(float)

    def __call__(self, start: int, block: Tensor) -> None:
        """Add columns `start … start + n` of the gradients, `(B, n)`."""
        with torch.no_grad(), torch.autocast(block.device.type, enabled=False):
            self._add(start, block.detach().float())

    def add_outer(self, start: int, left: Tensor, right: Tensor) -> None:
        """Add a block by its factors, `(B, T, I)` and `(B, T, J)`."""
        with torch.no_grad(), torch.autocast(left.device.type, enabled=False):
            left, right = left.detach(), right.detach()
            if start not in self._by_source:
                for first, part in slices(left, right):
                    self._add(start + first, part)
                return
            for index in self._by_source[start]:
                one, values = self._blocks.kronecker[index], self._map.curvature.kronecker[index]
                factors = one.factors(left, right)
                if one.bias is not None:
                    within = left if one.bias_part == "right" else right
                    first = one.source_left if one.bias_part == "right" else one.source_right
                    within = within[..., first : first + one.bias_length].float()
                    self._bias(index, within).sub_(within.sum(1))
                    self._rounding[index] += BIAS_NOISE * math.sqrt(within.shape[1]) * float(within.norm())
                self._emit(index, values.rotated_product(*factors))

    def result(self) -> Tensor:
        """Return the rows when all blocks have come."""
        with torch.no_grad():
            for index, left in self._biases.items():
                if index in self._dense or float(left.norm()) > self._rounding[index]:
                    self._dense_of(index, left)
                    self._blocks.kronecker[index].bias_of(self._dense[index]).add_(left)
            for index in sorted(self._dense):
                self._emit(index, self._map.curvature.kronecker[index].rotated(self._dense.pop(index)))
            return self._result()

    def _add(self, start: int, block: Tensor) -> None:
        for low, high, index, kind in self._ranges.overlapping(start, start + block.shape[1]):
            if kind == "diagonal":
                first, last = max(low, start), min(high, start + block.shape[1])
                factor = self._map.numbers[index][first - low : last - low]
                self._places.numbers(index, first - low, scaled(block[:, first - start : last - start], factor))
            elif kind == "bias":
                add_part(self._bias(index, block), low, start, block)
                self._rounding[index] += BIAS_TOLERANCE * float(block.norm())
            else:
                add_weights(self._dense_of(index, block), self._blocks.kronecker[index], start, block)

    def _dense_of(self, index: int, like: Tensor) -> Tensor:
        """Make the matrices of what came dense or is left of a bias: `(B, *shape)`."""
        if index not in self._dense:
            self._dense[index] = like.new_zeros(like.shape[0], *self._blocks.kronecker[index].shape)
        return self._dense[index]

    def _bias(self, index: int, like: Tensor) -> Tensor:
        """Return the gradient of a bias without what factors have of it: `(B, bias_length)`."""
        if index not in self._biases:
            self._biases[index] = like.new_zeros(like.shape[0], self._blocks.kronecker[index].bias_length)
        return self._biases[index]

    def _emit(self, index: int, rotated: Tensor) -> None:
        self._places.matrices(index, scaled(rotated, self._map.matrices[index]))


class Preconditioning(InverseMap):
    """The map of gradients g to P⁻¹ g, `(B, P)`: the targets' side of exact scores."""

    def __init__(self, curvature: Curvature, damping: float) -> None:
        """
        Args:
            curvature: the curvature P.
            damping: c in 1 / (Λ + c · mean Λ).
        """
        super().__init__(curvature.numel, curvature, damping, 1.0)

    def sink(self, batch_size: int, model_id: int, device: str | torch.device) -> MapSink:
        places = OwnPlaces(self.curvature, batch_size, device)
        return self.opened(places, lambda: places.rows)


class SelfInfluence(InverseMap):
    """The map of gradients g to gᵀ P⁻¹ g, `(B, 1)`."""

    def __init__(
        self,
        curvature: Curvature,
        damping: float,
        total: Callable[[Tensor], Tensor] | None = None,
        counts: bool = True,
    ) -> None:
        """
        Args:
            curvature: the curvature P.
            damping: c in 1 / (Λ + c · mean Λ).
            total: sums a tensor over the processes that have slices of the same gradients; `None` for whole ones.
            counts: whether the result is this process' to give; the others of those processes give zero.
        """
        super().__init__(1, curvature, damping, 0.5)
        self._total = total
        self._counts = counts

    def sink(self, batch_size: int, model_id: int, device: str | torch.device) -> MapSink:
        rows = torch.zeros(batch_size, self.curvature.numel, device=device)

        def add(start: int, values: Tensor) -> None:
            rows[:, start : start + values.shape[1]] += values

        def result() -> Tensor:
            whole = rows if self._total is None else self._total(rows)
            return whole.square_().sum(1, keepdim=True) * self._counts

        return self.opened(PlacesOfBlocks(self.curvature, add), result)


class WhitenedProjection(InverseMap):
    """The map of gradients g to the projection of P^{-1/2} g, `(B, k)`, scaled to preserve inner products.

    P^{-1/2} g is in the bases of the blocks: the rotation back to the parameters' own axes, which changes no inner
    product, is left out.
    """

    def __init__(self, curvature: Curvature, damping: float, projector: BlockProjector) -> None:
        """
        Args:
            curvature: the curvature P.
            damping: c in 1 / (Λ + c · mean Λ).
            projector: the projection.
        """
        super().__init__(projector.proj_dim, curvature, damping, 0.5)
        self.scale = projector.scale
        self._projector = projector

    def sink(self, batch_size: int, model_id: int, device: str | torch.device) -> MapSink:
        sink = self._projector.sink(batch_size, model_id, device)
        return self.opened(PlacesOfBlocks(self.curvature, sink), sink.result)


class TargetProducts(GradientMap):
    """Map gradients g to ⟨g, v_q⟩ for preconditioned targets v_q. These are exact scores, and nothing else is stored.

    Literally a projection whose matrix holds the targets. Blocks are multiplied as they come, so that nothing of size
    B × P exists.
    """

    def __init__(self, targets: Tensor) -> None:
        """
        Args:
            targets: V, `(m, P)`.
        """
        super().__init__(targets.shape[0])
        self._targets = targets

    def sink(self, batch_size: int, model_id: int, device: str | torch.device) -> MapSink:
        scores = torch.zeros(batch_size, self.proj_dim, device=device)

        def add(start: int, block: Tensor) -> None:
            part = self._targets[:, start : start + block.shape[1]]
            scores.addmm_(block, part.to(block.device, torch.float32).T)

        return DenseSink(add, lambda: scores)


Rows = Callable[[], Iterable[tuple[int, Tensor]]]

"""Returns a matrix in pieces `(start, rows)`, in order, anew on every call."""


_LARGEST_DUAL = 2048
"""Largest number of training rows for which the n × n system may be solved."""


class HybridSystem:
    """The solution of the hybrid's system for m targets, applied to blocks of rows.

    Attributes:
        ridge (`float`): λ.
    """

    def __init__(self, n: int, features: Rows, scores: Rows, ridge_relative: float) -> None:
        """
        Args:
            n (`int`):
                Number of training rows.
            features (`Callable`):
                Φ̂ `(n, k)`: sketched, whitened gradients of the training rows.
            scores (`Callable`):
                C `(n, m)`: their exact scores.
            ridge_relative (`float`):
                λ as a multiple of the mean diagonal element of K.

        Raises:
            SingularGramError: all features are zero.
        """
        first = next(iter(features()))[1]
        self._features = features
        self._dual: Tensor | None = None
        self.ridge = 0.0
        k = first.shape[1]
        if n <= min(k, _LARGEST_DUAL):
            whole = torch.cat([rows.double() for _, rows in features()])
            gram = whole @ whole.T
            system = self._ridged(gram, float(gram.trace()) / n * ridge_relative)
            right = torch.cat([rows.double() for _, rows in scores()])
            self._dual = torch.linalg.solve(system, right)
            return
        gram = torch.zeros(k, k, dtype=torch.float64)
        moment: Tensor | None = None
        for (_, rows), (_, part) in zip(features(), scores(), strict=True):
            rows = rows.double()
            gram.addmm_(rows.T, rows)
            product = rows.T @ part.double()
            moment = product if moment is None else moment.add_(product)
        assert moment is not None  # there is at least one row
        system = self._ridged(gram, float(gram.trace()) / n * ridge_relative)
        self._weights = torch.cholesky_solve(moment, torch.linalg.cholesky(system))

    def _ridged(self, gram: Tensor, ridge: float) -> Tensor:
        if not ridge > 0:
            raise SingularGramError(
                f"The ridge of the hybrid is {ridge:.3g}: the whitened features of all training rows are zero, or "
                "`curvature.hybrid_lambda` is. Expected a positive number. Set `curvature.hybrid_lambda` above 0, or "
                "use `curvature='ekfac'`."
            )
        self.ridge = ridge
        return gram + ridge * torch.eye(len(gram), dtype=gram.dtype)

    def apply(self, start: int, features: Tensor, scores: Tensor) -> Tensor:
        """Compute the scores of some training rows.

        Args:
            start (`int`): number of the first of them.
            features (`torch.Tensor`): their rows of Φ̂.
            scores (`torch.Tensor`): their rows of C.

        Returns:
            `torch.Tensor`: `(rows, m)`, float32.
        """
        if self._dual is not None:
            return self._dual[start : start + len(scores)].float()
        return ((scores.double() - features.double() @ self._weights) / self.ridge).float()
