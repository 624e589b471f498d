"""The contract of a projector: one linear map R ∈ R^{P × k}, applied to whole gradients or to blocks of them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from hf_trak.kernels.arguments import kernels_wanted
from hf_trak.projectors.checks import (
    check_block,
    check_factors,
    check_grad_dim,
    check_model_id,
    check_proj_dim,
    check_seed,
    require_finite,
    same_device,
)

_PRODUCT_BYTES = 32 * 2**20
"""Memory budget for one materialized product of factors."""


class ProjectionType(StrEnum):
    """Distribution of the entries of R, by the names of the `trak` API."""

    normal = "normal"
    rademacher = "rademacher"


class AbstractProjector(ABC):
    """Base class of projectors in the `trak` API: anything with `project(grads, model_id)`."""

    def __init__(
        self, grad_dim: int, proj_dim: int, seed: int, proj_type: str | ProjectionType, device: str | torch.device
    ) -> None:
        """
        Args:
            grad_dim (`int`):
                P, length of a gradient vector.
            proj_dim (`int`):
                k, length of a projected gradient.
            seed (`int`):
                Seed of the random matrix, at least 0.
            proj_type (`str` or `ProjectionType`):
                Distribution of the entries of the matrix.
            device (`str` or `torch.device`):
                Device on which projected gradients are wanted. Not touched before the first batch.
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
            grads (`torch.Tensor` of shape `(B, P)` or `Mapping[str, torch.Tensor]`):
                Gradients, or a mapping of parameter names to `(B, *parameter shape)` in the order of the
                concatenation.
            model_id (`int`):
                Id of the checkpoint; each has a random matrix of its own.

        Returns:
            `torch.Tensor` of shape `(B, k)`: `grads @ R` with the unscaled R of this class.
        """

    def free_memory(self) -> None:  # noqa: B027 - a projector without caches has nothing to drop
        """Drop caches. Safe at any time; the next `project` works as before."""


class BlockProjector(AbstractProjector):
    """A projector that also takes gradients block by block, in any order and any cut.

    `scale` is the factor that preserves inner products in expectation: E⟨scale · xR, scale · yR⟩ = ⟨x, y⟩.
    [`~AbstractProjector.project`] and `accumulate` leave it out, as the `trak` API does.

    Subclasses implement `scale` and `_accumulate`, which gets checked arguments, or override `accumulate` itself.
    """

    algorithm: str
    """Name and version of the map, such as `"rademacher-1"`: with seed, model_id and k it determines R to the bit."""

    def __init__(
        self, grad_dim: int, proj_dim: int, seed: int, proj_type: str | ProjectionType, device: str | torch.device
    ) -> None:
        """
        Args:
            grad_dim (`int`):
                P, length of a gradient vector, 1 ≤ P < 2⁶³.
            proj_dim (`int`):
                k, length of a projected gradient, 1 ≤ k ≤ 2²⁴.
            seed (`int`):
                Seed of the random matrix, 0 ≤ seed < 2⁶³.
            proj_type (`str` or `ProjectionType`):
                Name of the distribution, for the record.
            device (`str` or `torch.device`):
                Device on which [`~BlockProjector.project`] expects gradients. Not touched before the first batch;
                `accumulate` works on the device of its tensors.

        Raises:
            TypeError: a number is a float, a bool or anything else that is not an integer.
            ValueError: a number is outside its range.
        """
        super().__init__(check_grad_dim(grad_dim), check_proj_dim(proj_dim), check_seed(seed), proj_type, device)

    @property
    @abstractmethod
    def scale(self) -> float:
        """Return the factor that preserves inner products in expectation."""

    def accumulate(self, out: Tensor, block: Tensor, start: int, model_id: int) -> None:
        """Add the projection of some columns of the gradients: `out += block @ R[start : start + n]`, in float32.

        Any cut of a gradient gives the same sum to rounding; the same cut gives the same bits on every run. Values are
        not inspected here, since that would read the block twice (and stall a GPU once per layer): NaN and infinity
        reach `out`, in the same row, whatever the map. Call [`require_finite`] on `out` once per batch, as
        [`~BlockProjector.project`] does.

        Args:
            out (`torch.Tensor` of shape `(B, k)`):
                Sums, float32, changed in place.
            block (`torch.Tensor` of shape `(B, n)`):
                Columns of the gradients, float32, bfloat16 or float16, on the device of `out`.
            start (`int`):
                Position of the block's first column in the gradient vector.
            model_id (`int`):
                Id of the checkpoint, 0 ≤ model_id < 2³².

        Raises:
            TypeError: `start` or `model_id` is not an integer.
            ValueError: the block does not lie in [0, P), or shapes, dtypes or devices do not fit.
        """
        start = check_block(out, block, start, self.grad_dim, self.proj_dim)
        model_id = check_model_id(model_id)
        if block.numel() == 0:
            return
        with torch.no_grad(), without_autocast(block.device):
            self._accumulate_checked(out.detach(), block.detach(), start, model_id)

    def takes_outer(self, left: Tensor, right: Tensor) -> bool:
        """Tell whether [`~BlockProjector.accumulate_outer`] beats forming the product and projecting it.

        Args:
            left (`torch.Tensor` of shape `(B, T, I)`):
                Factors of a linear layer's gradients, as for `accumulate_outer`.
            right (`torch.Tensor` of shape `(B, T, J)`):
                The other factors.
        """
        return False

    def accumulate_outer(self, out: Tensor, left: Tensor, right: Tensor, start: int, model_id: int) -> None:
        """Add the projection of a linear layer's gradients, given as factors, accumulated in float32.

        `out[b] += vec(Σ_t left[b, t] ⊗ right[b, t]) @ R[start : start + I · J]`. Equal to the projection of the formed
        block to rounding: where the map takes factors ([`~BlockProjector.takes_outer`]), the elements of the block are
        not rounded to the dtype of the factors.

        Args:
            out (`torch.Tensor` of shape `(B, k)`):
                Sums, float32, changed in place.
            left (`torch.Tensor` of shape `(B, T, I)`):
                Factors, float32, bfloat16 or float16, on the device of `out`.
            right (`torch.Tensor` of shape `(B, T, J)`):
                The other factors, of the same dtype and device.
            start (`int`):
                Position of the block's first column in the gradient vector.
            model_id (`int`):
                Id of the checkpoint, 0 ≤ model_id < 2³².

        Raises:
            TypeError: `start` or `model_id` is not an integer.
            ValueError: the block does not lie in [0, P), or shapes, dtypes or devices do not fit.
        """
        start = check_factors(out, left, right, start, self.grad_dim, self.proj_dim)
        model_id = check_model_id(model_id)
        if left.numel() == 0 or right.numel() == 0:
            return
        with torch.no_grad(), without_autocast(left.device):
            self._accumulate_outer(out.detach(), left.detach(), right.detach(), start, model_id)

    def _accumulate_outer(self, out: Tensor, left: Tensor, right: Tensor, start: int, model_id: int) -> None:
        for offset, block in formed_slices(left, right):
            self.accumulate(out, block, start + offset, model_id)

    def sink(self, batch_size: int, model_id: int, device: str | torch.device) -> "ProjectionSink":
        """Open the block form for a whole batch: a callable `(start, block)` with a `result()`.

        It gives the same features as `accumulate` on zeros, to rounding. Maps that keep more than `(B, k)` between the
        blocks of a batch do so here, which pays off for models with many small parameters. A subclass that overrides
        `accumulate` gets every block through it.

        Args:
            batch_size (`int`):
                B of every block.
            model_id (`int`):
                Id of the checkpoint.
            device (`str` or `torch.device`):
                Device of the blocks.
        """
        return ProjectionSink(self, batch_size, model_id, device)

    def _accumulates_its_own_way(self, kind: type["BlockProjector"]) -> bool:
        """Tell whether a subclass of `kind`, or whoever set an attribute of this object, replaced a method."""
        methods = ((self.accumulate, BlockProjector.accumulate), (self._accumulate, kind._accumulate))
        return any(getattr(given, "__func__", None) is not own for given, own in methods)

    def _accumulate_checked(self, out: Tensor, block: Tensor, start: int, model_id: int) -> None:
        """Add a block of at least one element whose arguments were checked, by kernels or by torch operators."""
        run = self._accumulate_with_kernels if kernels_wanted(block.device) else self._accumulate
        run(out, block, start, model_id)

    def _accumulate(self, out: Tensor, block: Tensor, start: int, model_id: int) -> None:
        """Do the work of [`~BlockProjector.accumulate`] on checked arguments and a block of at least one element."""
        raise NotImplementedError(f"{type(self).__name__} implements neither `accumulate` nor `_accumulate`.")

    def _accumulate_with_kernels(self, out: Tensor, block: Tensor, start: int, model_id: int) -> None:
        """Do the same by CUDA kernels, for maps that have them."""
        self._accumulate(out, block, start, model_id)

    def project(self, grads: Mapping[str, Tensor] | Tensor, model_id: int) -> Tensor:
        """Project whole gradients, see [`AbstractProjector.project`]. A mapping is not concatenated first.

        Raises:
            TypeError: `model_id` is not an integer.
            ValueError: the gradients do not have P columns, or are not on `device`; `model_id` is out of range.
            NonFiniteError: a gradient holds NaN or infinity, or its projection overflows; names the row.
        """
        blocks = blocks_for(self, grads)
        for block in blocks:
            if not same_device(block.device, self.device):
                raise ValueError(
                    f"The gradients are on {block.device}, but this {type(self).__name__} was made for device "
                    f"'{self.device}'. Move them, or construct the projector with device='{block.device}'."
                )
        sink = self.sink(blocks[0].shape[0], model_id, blocks[0].device)
        start = 0
        for block in blocks:
            sink(start, block)
            start += block.shape[1]
        out = sink.result()
        require_finite(out)
        return out


class ProjectionSink:
    """Takes the blocks of one batch in any order and gives their unscaled projection, see [`BlockProjector.sink`]."""

    def __init__(self, projector: BlockProjector, batch_size: int, model_id: int, device: str | torch.device) -> None:
        """
        Args:
            projector (`BlockProjector`):
                The projector whose `accumulate` gets the blocks.
            batch_size (`int`):
                B, the number of samples of every block.
            model_id (`int`):
                Id of the checkpoint, which seeds the map.
            device (`str` or `torch.device`):
                Device of the blocks.

        Raises:
            TypeError: `model_id` is not an integer.
            ValueError: `model_id` is out of range.
        """
        self.projector = projector
        self.model_id = check_model_id(model_id)
        replaced = getattr(projector.accumulate, "__func__", None) is not BlockProjector.accumulate
        self._accumulate = projector.accumulate if replaced else projector._accumulate_checked
        self._out = torch.zeros(batch_size, projector.proj_dim, dtype=torch.float32, device=device)
        self._finished = False

    def __call__(self, start: int, block: Tensor) -> None:
        """Add columns `start … start + n`; arguments and errors as in [`BlockProjector.accumulate`].

        Raises:
            TypeError: `start` is not an integer.
            ValueError: the block does not lie in [0, P), or shapes, dtypes or devices do not fit.
            RuntimeError: the result has been taken already.
        """
        self._require_open()
        start = check_block(self._out, block, start, self.projector.grad_dim, self.projector.proj_dim)
        if block.numel():
            with torch.no_grad(), without_autocast(block.device):
                self._add(start, block.detach())

    def takes_outer(self, left: Tensor, right: Tensor) -> bool:
        """Tell whether [`~ProjectionSink.add_outer`] is the faster way for a block with these factors."""
        return self.projector.takes_outer(left, right)

    def add_outer(self, start: int, left: Tensor, right: Tensor) -> None:
        """Add a block in factored form; arguments and errors as in [`BlockProjector.accumulate_outer`].

        Raises:
            RuntimeError: the result has been taken already.
        """
        self._require_open()
        self.projector.accumulate_outer(self._out, left, right, start, self.model_id)

    def result(self) -> Tensor:
        """Close the sink and return the features.

        Returns:
            `torch.Tensor` of shape `(B, k)`: float32, unscaled, not checked for NaN and infinity ([`require_finite`]
            does that).

        Raises:
            RuntimeError: the result has been taken already.
        """
        self._require_open()
        self._finished = True
        with torch.no_grad():
            self._finish()
        return self._out

    def _add(self, start: int, block: Tensor) -> None:
        self._accumulate(self._out, block, start, self.model_id)

    def _finish(self) -> None:
        """Do what is left to do after the last block."""

    def _require_open(self) -> None:
        if self._finished:
            raise RuntimeError("The result of this sink has been taken already. Open a new one for the next batch.")


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context outside of somebody's autocast region, where products would silently be rounded to bf16."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def formed_slices(left: Tensor, right: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Form a product of factors a few rows at a time.

    Args:
        left: `(B, T, I)`.
        right: `(B, T, J)`.

    Yields:
        Position of the first element of a slice in the flattened product, and the slice, `(B, n)`.
    """
    width = right.shape[2]
    rows = max(1, _PRODUCT_BYTES // (right.shape[0] * width * right.element_size()))
    for first in range(0, left.shape[2], rows):
        yield first * width, torch.bmm(left[:, :, first : first + rows].transpose(1, 2), right).flatten(1)


def blocks_of(grads: Mapping[str, Tensor] | Tensor) -> list[Tensor]:
    """Turn gradients into a list of `(B, n)` blocks in the order of the concatenation.

    Args:
        grads: `(B, P)`, or a mapping of parameter names to `(B, *parameter shape)`.

    Raises:
        ValueError: there are no gradients, or they have no batch dimension, or different batch sizes.
    """
    if isinstance(grads, Tensor):
        if grads.ndim != 2:
            raise ValueError(
                f"The gradients have shape {tuple(grads.shape)}. Expected (batch size, P): flatten them per sample."
            )
        return [grads]
    blocks = []
    for name, grad in grads.items():
        if grad.ndim == 0:
            raise ValueError(f"The gradient of '{name}' is a scalar. Expected (batch size, *parameter shape).")
        blocks.append(grad.reshape(grad.shape[0], -1) if grad.numel() else grad.new_zeros(grad.shape[0], 0))
    if not blocks:
        raise ValueError("The mapping of gradients is empty: there is nothing to project.")
    sizes = {name: grad.shape[0] for name, grad in grads.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"The gradients have different batch sizes: {sizes}. Expected the same for every parameter.")
    return blocks


def blocks_for(projector: AbstractProjector, grads: Mapping[str, Tensor] | Tensor) -> list[Tensor]:
    """Turn gradients into [`blocks_of`] them, and check that they have as many columns as a projector was made for.

    Raises:
        ValueError: they have not, or as for [`blocks_of`].
    """
    blocks = blocks_of(grads)
    total = sum(block.shape[1] for block in blocks)
    if projector.grad_dim and total != projector.grad_dim:
        raise ValueError(
            f"The gradients have {total} columns, but this {type(projector).__name__} was made for "
            f"grad_dim={projector.grad_dim}. Pass the gradients of exactly the parameters that were counted."
        )
    return blocks
