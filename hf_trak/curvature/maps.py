"""Linear maps of gradients under a curvature, in the form in which a featurizer applies a projection."""

from collections.abc import Callable

import torch
from torch import Tensor

from hf_trak.curvature.curvature import Curvature
from hf_trak.projectors import BlockProjector


class GradientMap:
    """A map of gradients `(B, P)` to rows of `proj_dim` numbers. Subclasses implement `sink`.

    Attributes:
        proj_dim (`int`): length of a result.
        scale (`float`): 1; results need no further factor.
    """

    scale = 1.0

    def __init__(self, proj_dim: int) -> None:
        self.proj_dim = proj_dim

    def sink(self, batch_size: int, model_id: int, device: str | torch.device) -> "MapSink":
        """Open a sink for the blocks of one batch.

        Raises:
            NotImplementedError: a subclass lacks it.
        """
        raise NotImplementedError


class MapSink:
    """Takes the blocks of one batch, all of them dense, in any order."""

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
        """No: a formed block is multiplied at once, for all targets together."""
        return False

    def add_outer(self, start: int, left: Tensor, right: Tensor) -> None:
        """Add a block by its factors."""
        self(start, torch.bmm(left.transpose(1, 2), right).flatten(1))


class WholeGradientMap(GradientMap):
    """A map that needs the whole gradient of a row: preconditioning, whitening."""

    def __init__(self, proj_dim: int, grad_dim: int, function: Callable[[Tensor, int], Tensor]) -> None:
        """
        Args:
            proj_dim: length of a result.
            grad_dim: P.
            function: maps `(B, P)` and the model id to `(B, proj_dim)`.
        """
        super().__init__(proj_dim)
        self.grad_dim = grad_dim
        self._function = function

    def sink(self, batch_size: int, model_id: int, device: str | torch.device) -> MapSink:
        whole = torch.zeros(batch_size, self.grad_dim, device=device)

        def add(start: int, block: Tensor) -> None:
            whole[:, start : start + block.shape[1]] += block

        return MapSink(add, lambda: self._function(whole, model_id))


def preconditioning(curvature: Curvature, damping: float) -> GradientMap:
    """Map gradients g to P⁻¹ g, `(B, P)`: the targets' side of exact scores."""
    return WholeGradientMap(
        curvature.numel, curvature.numel, lambda whole, _: curvature.precondition(whole, damping, True)
    )


def influence_on_itself(curvature: Curvature, damping: float) -> GradientMap:
    """Map gradients g to gᵀ P⁻¹ g, `(B, 1)`."""
    return WholeGradientMap(
        1, curvature.numel, lambda whole, _: curvature.whiten(whole, damping, True).square().sum(1, keepdim=True)
    )


def whitened_projection(curvature: Curvature, damping: float, projector: BlockProjector) -> GradientMap:
    """Map gradients g to the projection of P^{-1/2} g, `(B, k)`, scaled to preserve inner products."""

    def function(whole: Tensor, model_id: int) -> Tensor:
        sink = projector.sink(whole.shape[0], model_id, whole.device)
        sink(0, curvature.whiten(whole, damping, True))
        return sink.result() * projector.scale

    return WholeGradientMap(projector.proj_dim, curvature.numel, function)


class TargetProducts(GradientMap):
    """Map gradients g to ⟨g, v_q⟩ for preconditioned targets v_q: exact scores, of which nothing else is stored.

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
        targets = self._targets

        def add(start: int, block: Tensor) -> None:
            part = targets[:, start : start + block.shape[1]]
            scores.addmm_(block, part.to(block.device, torch.float32).T)

        return MapSink(add, lambda: scores)
