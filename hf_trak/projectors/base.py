"""The contract of a projector: one linear map R ∈ R^{P × k}, applied to whole gradients or to blocks of them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import StrEnum

import torch
from torch import Tensor


class ProjectionType(StrEnum):
    """Distribution of the entries of R (seed API: `normal`, `rademacher`)."""

    normal = "normal"
    rademacher = "rademacher"


class AbstractProjector(ABC):
    """Base class of the seeds: anything with `project(grads, model_id)`."""

    def __init__(
        self,
        grad_dim: int,
        proj_dim: int,
        seed: int,
        proj_type: str | ProjectionType,
        device: str | torch.device,
    ) -> None:
        """
        Args:
            grad_dim: P, length of a gradient vector.
            proj_dim: k, length of a projected one.
            seed: seed of the random matrix, an integer ≥ 0.
            proj_type: distribution of its entries.
            device: where projected gradients are wanted. Not touched before the first batch.
        """
        self.grad_dim = grad_dim
        self.proj_dim = proj_dim
        self.seed = seed
        self.proj_type = proj_type
        self.device = device

    @abstractmethod
    def project(self, grads: Mapping[str, Tensor] | Tensor, model_id: int) -> Tensor:
        """Project a batch of gradients.

        Args:
            grads: `(B, P)`, or a mapping of parameter names to `(B, *shape)` in the order of the concatenation.
            model_id: id of the checkpoint; each has a random matrix of its own.

        Returns:
            `(B, k)`, equal to `grads @ R` with the unscaled R of this class.
        """

    def free_memory(self) -> None:
        """Drop caches. Safe at any time; the next `project` works as before."""


class BlockProjector(AbstractProjector):
    """A projector that also takes gradients block by block, in any order and any cut.

    `scale` is the factor that makes inner products come out right in expectation:
    E⟨scale · xR, scale · yR⟩ = ⟨x, y⟩. [`~AbstractProjector.project`] and `accumulate` leave it out, as the seeds do.
    """

    algorithm: str
    """Id and version of the map, for example `"rademacher-1"`: with seed, model_id and k it determines R to the bit."""

    @property
    @abstractmethod
    def scale(self) -> float:
        """The factor that preserves inner products in expectation."""

    @abstractmethod
    def accumulate(self, out: Tensor, block: Tensor, start: int, model_id: int) -> None:
        """`out += block @ R[start : start + n]`, accumulated in fp32.

        Args:
            out: `(B, k)`, float32, changed in place.
            block: `(B, n)`, float32, bfloat16 or float16, on the device of `out`.
            start: position of the block's first column in the gradient vector.
            model_id: id of the checkpoint.

        Raises:
            ValueError: the block does not lie in [0, P), or shapes, dtypes or devices do not fit.
        """
