"""Products of directions with the Gauss-Newton matrix of a batch, all directions through one forward pass.

With J_b the derivatives of what the model returns for row b by the attributed parameters, and H_b the second
derivative of the row's loss by what the model returns,

    C = Σ_b J_bᵀ H_b J_b        (for a softmax, at each position: H = diag(p) − p pᵀ)

is the Gauss-Newton matrix of the loss, and for losses that are log-likelihoods of exponential families the Fisher
information (Martens, arXiv 1412.1193, Section 9). A product C v takes three steps: J v is a derivative in forward
mode, H is applied by differentiating the loss twice, which sees no more than the model's outputs, and Jᵀ is an
ordinary backward pass (Schraudolph 2002). No gradient of a single row is formed.

J v has two forms. In *forward mode*, tangents run along with the forward pass, many of them beside one primal pass
(`torch.func.jvp` under `vmap`). Some operators have no forward mode (fused and grouped kernels, autograd functions
without `jvp`). Then J v is found by *differentiating twice*: Jᵀ u is linear in u, and its derivative by u, along v, is
J v. Attention runs in its plain form for both, since fused kernels have neither.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_trak._compat import tree_flatten, tree_unflatten
from hf_trak.config import ProductForm
from hf_trak.errors import GradientEngineError
from hf_trak.gradient_computers.base import (
    SplitBatch,
    batch_size_of,
    is_out_of_memory,
    one_per_sample,
    run_model,
    saved_activation_bytes,
)
from hf_trak.gradient_computers.environment import pass_settings, problem_type_fixed
from hf_trak.gradient_computers.layout import ParameterLayout
from hf_trak.modelout_functions.answered_calls import SUBSTITUTED
from hf_trak.modelout_functions.base import Batch, BatchedModelOutput

logger = logging.getLogger(__name__)

TANGENT_BYTES = 2**29
"""Memory for the tangents that run along with one forward pass."""

_AGREEMENT = {torch.float64: (1e-6, 1e-12), torch.float32: (1e-2, 1e-5)}
_HALF_AGREEMENT = (0.2, 1e-2)
"""By how much vᵀ(Cv) and (Jv)ᵀH(Jv) may differ: relative to themselves, and to ‖v‖ ‖Cv‖, beside which both may be
small. They are computed by two different ways through the model, and a wrong derivative changes one of them alone."""


class GaussNewton:
    """Multiplies directions by the Gauss-Newton matrix of batches. The first product checks the form of J v.

    Attributes:
        form (`str`, *optional*): the form of J v that the model allows, once it is known.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        task: BatchedModelOutput,
        layout: ParameterLayout,
        *,
        of_gradients: bool = False,
        form: ProductForm = "auto",
    ) -> None:
        """
        Args:
            model: the model, in eval mode.
            task: its train side is minus the loss of every row, `(B,)`.
            layout: the attributed parameters.
            of_gradients: C = Σ_b ∇f_b ∇f_bᵀ with f the train side of the task, the empirical Fisher, instead of the
                Gauss-Newton matrix. For losses without outputs of their own for every row.
            form: the form of J v, see [`~hf_trak.config.ProductForm`].
        """
        self.model = model
        self.task = task
        self.layout = layout
        self.of_gradients = of_gradients
        self.form: ProductForm | None = None if form == "auto" else form
        self._checked = False
        self._bytes: dict[Any, int] = {}

    def products(self, batch: Batch, directions: Tensor) -> Tensor:
        """Compute Σ_b J_bᵀ H_b J_b v for every direction v.

        Args:
            batch: rows, with labels.
            directions: `(m, P)`, in the order of the layout, on the device of the model.

        Returns:
            `(m, P)`, in the dtype of the directions.

        Raises:
            GradientEngineError: the model can be differentiated neither in forward mode nor twice, or both give
                something else than a derivative.
        """
        return self.of_groups(batch, [directions])[0]

    def of_groups(self, batch: Batch, groups: Sequence[Tensor]) -> list[Tensor]:
        """Compute the products of several groups of directions, each with the same bits as alone.

        Args:
            batch: rows, with labels.
            groups: directions, `(m, P)` each.

        Returns:
            The products, like [`products`].

        Raises:
            GradientEngineError: as for [`products`].
        """
        labels = batch.get("labels") if hasattr(batch, "get") else None
        with (
            pass_settings(self.model),
            problem_type_fixed(self.model, labels),
            sdpa_kernel(SDPBackend.MATH),
            torch.enable_grad(),
        ):
            linearized = _Linearized(self.model, self.task, self.layout, batch, self.of_gradients)
            if not self._checked:
                self._choose(linearized, groups[0])
            step = self._together(linearized, batch)
            found = [torch.empty_like(directions) for directions in groups]
            for directions, products in zip(groups, found, strict=True):
                for low in range(0, len(directions), step):
                    part = slice(low, low + step)
                    products[part] = self._product(linearized, directions[part])[0]
        return found

    def _product(self, linearized: "_Linearized", directions: Tensor) -> tuple[Tensor, Tensor]:
        """Compute C v `(t, P)` and (Jv)ᵀH(Jv) `(t,)`."""
        tangents = linearized.tangents(directions)
        outputs = linearized.forward(tangents) if self.form == "forward" else linearized.twice(tangents)
        weighted = linearized.weighted(outputs)
        return linearized.backward(weighted).to(directions.dtype), _inner(outputs, weighted)

    def _together(self, linearized: "_Linearized", batch: Batch) -> int:
        """Count the directions that fit into [`TANGENT_BYTES`]. It depends on the sizes of the batch alone."""
        split = SplitBatch.of(batch)
        sizes = tuple((key, tuple(value.shape)) for key, value in split.mapped.items())
        if sizes not in self._bytes:
            self._bytes[sizes] = saved_activation_bytes(linearized.run)
        return max(1, TANGENT_BYTES // max(1, self._bytes[sizes] + 8 * self.layout.total))

    # -- the choice of the form ------------------------------------------------------------------------------------

    def _choose(self, linearized: "_Linearized", directions: Tensor) -> None:
        """Take the first form that gives derivatives: those whose products are the same both ways."""
        reasons: list[str] = []
        forms: tuple[ProductForm, ...] = ("forward", "twice") if self.form is None else (self.form,)
        for form in forms:
            self.form = form
            reason = self._trial(linearized, directions[:1])
            if reason is None:
                if reasons:
                    logger.info("Derivatives of %s are taken twice: %s", type(self.model).__name__, reasons[0])
                self._checked = True
                return
            reasons.append(f"{'in forward mode' if form == 'forward' else 'twice'}: {reason}")
        self.form = None
        raise GradientEngineError(
            f"The model {type(self.model).__name__} cannot be differentiated " + "; nor ".join(reasons) + ". Expected "
            "one of both for products with the Gauss-Newton matrix. Leave `refine` out, or give the autograd function "
            "in question a `jvp` or a backward pass that is differentiable itself."
        )

    def _trial(self, linearized: "_Linearized", direction: Tensor) -> str | None:
        """Multiply one direction, and say what is wrong with the result."""
        try:
            product, inner = self._product(linearized, direction)
        except (RuntimeError, NotImplementedError) as error:
            if is_out_of_memory(error):
                raise
            return str(error).splitlines()[0].rstrip(".")
        if not bool(torch.isfinite(product).all()):
            return None  # whoever adds the products up says in which rows
        other = (product.double() * direction.double()).sum()
        relative, absolute = _AGREEMENT.get(linearized.dtype, _HALF_AGREEMENT)
        allowed = relative * float(other.abs()) + absolute * float(direction.double().norm() * product.double().norm())
        if not float((inner[0] - other).abs()) <= allowed:
            return f"the derivative along a direction is wrong ({float(inner[0]):.6g} instead of {float(other):.6g})"
        return None


class Hessian(GaussNewton):
    """Multiplies directions by the Hessian of the loss of batches, by differentiating twice.

    Beside the Gauss-Newton matrix it has the curvature of the model itself, which may be negative.
    """

    def __init__(self, model: torch.nn.Module, task: BatchedModelOutput, layout: ParameterLayout) -> None:
        """
        Args:
            model, task, layout: as for [`GaussNewton`].
        """
        super().__init__(model, task, layout, of_gradients=True, form="twice")

    def _product(self, linearized: "_Linearized", directions: Tensor) -> tuple[Tensor, Tensor]:
        found = linearized.curved(linearized.tangents(directions)).to(directions.dtype)
        return found, (found.double() * directions.double()).sum(1)


class _Linearized:
    """One batch at the weights of the model: what it returns, and its derivatives."""

    def __init__(
        self,
        model: torch.nn.Module,
        task: BatchedModelOutput,
        layout: ParameterLayout,
        batch: Batch,
        of_gradients: bool,
    ) -> None:
        self.model, self.task, self.layout, self.batch = model, task, layout, batch
        self.of_gradients = of_gradients
        own = dict(model.named_parameters())
        self.fixed = {name: weight.detach() for name, weight in own.items()}
        self.weights = {name: self.fixed.pop(name).requires_grad_() for name in layout.names}
        self.dtype = next(iter(self.weights.values())).dtype
        self.outputs, self._rebuild = self._outputs(self.weights)
        self._leaves = [one.detach().requires_grad_() for one in self.outputs]
        self._slopes: list[Tensor] = []
        self._used = range(len(self._leaves))
        if not of_gradients:
            self._differentiate_loss()
        self._transposed: tuple[list[Tensor], list[Tensor], list[str]] | None = None
        self._gradients: dict[str, Tensor] | None = None

    def run(self) -> Any:
        """Run the forward pass."""
        return self._outputs(self.weights)

    def _outputs(self, weights: dict[str, Tensor]) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
        """Run the model, and return all numbers that it returns, and how to put others in their places."""
        every = {**self.fixed, **weights}
        result = run_model(self.task, self.model, self.batch, every)
        if self.of_gradients:
            token = SUBSTITUTED.set(every)
            try:
                found = self.task.output(result, self.batch)
            finally:
                SUBSTITUTED.reset(token)
            return [one_per_sample(found, batch_size_of(self.batch), self.task)], lambda replaced: replaced[0]
        leaves, spec = tree_flatten(result)
        places = [i for i, one in enumerate(leaves) if isinstance(one, Tensor) and one.is_floating_point()]

        def rebuild(replaced: Sequence[Tensor]) -> Any:
            filled = list(leaves)
            for place, value in zip(places, replaced, strict=True):
                filled[place] = value
            return tree_unflatten(filled, spec)

        return [leaves[place] for place in places], rebuild

    def _differentiate_loss(self) -> None:
        """Take the first derivative of the loss by the model's outputs, and forget outputs that it does not use."""
        loss = -one_per_sample(
            self.task.output(self._rebuild(self._leaves), self.batch), batch_size_of(self.batch), self.task
        ).sum()
        slopes = torch.autograd.grad(loss, self._leaves, create_graph=True, allow_unused=True)
        self._used = [i for i, slope in enumerate(slopes) if slope is not None]  # type: ignore[assignment]
        if not self._used:
            raise GradientEngineError(
                "The loss asks the model itself, beside what the model returned for the rows. Expected a loss of its "
                "outputs for the Gauss-Newton matrix. Use the Hessian."
            )
        self._leaves = [self._leaves[i] for i in self._used]
        self.outputs = [self.outputs[i] for i in self._used]
        self._slopes = [slopes[i] for i in self._used]

    def tangents(self, directions: Tensor) -> dict[str, Tensor]:
        """Cut directions `(t, P)` into parameters, `(t, *shape)` each."""
        return {
            slot.name: directions[:, slot.offset : slot.offset + slot.numel]
            .reshape(-1, *slot.shape)
            .to(self.weights[slot.name].dtype)
            for slot in self.layout.slots
        }

    def forward(self, tangents: dict[str, Tensor]) -> list[Tensor]:
        """Compute J v of every tangent in forward mode."""
        weights = {name: weight.detach() for name, weight in self.weights.items()}

        def outputs(given: dict[str, Tensor]) -> tuple[Tensor, ...]:
            found = self._outputs(given)[0]
            return tuple(found[i] for i in self._used)

        def along(tangent: dict[str, Tensor]) -> tuple[Tensor, ...]:
            return torch.func.jvp(outputs, (weights,), (tangent,))[1]

        with torch.no_grad():
            return list(torch.func.vmap(along, randomness="same")(tangents))

    def twice(self, tangents: dict[str, Tensor]) -> list[Tensor]:
        """Compute J v of every tangent as the derivative by u of the product of Jᵀ u and v."""
        if self._transposed is None:
            probes = [torch.zeros_like(one).requires_grad_() for one in self.outputs]
            found = torch.autograd.grad(
                self.outputs, list(self.weights.values()), probes, create_graph=True, allow_unused=True
            )
            pairs = [(name, one) for name, one in zip(self.weights, found, strict=True) if one is not None]
            pairs = [(name, one) for name, one in pairs if one.requires_grad]
            self._transposed = probes, [one for _, one in pairs], [name for name, _ in pairs]
        probes, products, names = self._transposed
        return _derivatives(products, probes, [tangents[name] for name in names])

    def curved(self, tangents: dict[str, Tensor]) -> Tensor:
        """Multiply by the Hessian of the loss, minus the sum of the outputs: `(t, P)`."""
        if self._gradients is None:
            found = torch.autograd.grad(
                -self.outputs[0].sum(), list(self.weights.values()), create_graph=True, allow_unused=True
            )
            pairs = zip(self.weights, found, strict=True)
            self._gradients = {name: one for name, one in pairs if one is not None and one.requires_grad}
        cotangents = [tangents[name] for name in self._gradients]
        products = _derivatives(list(self._gradients.values()), list(self.weights.values()), cotangents)
        return torch.cat([one.flatten(1) for one in products], 1)

    def weighted(self, outputs: list[Tensor]) -> list[Tensor]:
        """Multiply by H, the second derivative of the loss by the outputs."""
        outputs = [one.detach() for one in outputs]
        if self.of_gradients:
            return outputs
        curved = [i for i, slope in enumerate(self._slopes) if slope.requires_grad]
        return _derivatives([self._slopes[i] for i in curved], self._leaves, [outputs[i] for i in curved])

    def backward(self, weighted: list[Tensor]) -> Tensor:
        """Multiply by Jᵀ: `(t, P)`."""
        found = _derivatives(self.outputs, list(self.weights.values()), weighted)
        return torch.cat([one.flatten(1) for one in found], 1)


def _derivatives(outputs: list[Tensor], inputs: list[Tensor], cotangents: list[Tensor]) -> list[Tensor]:
    """Take the derivatives of outputs by inputs, weighted by each of t cotangents: `(t, *shape)` for each input.

    All cotangents run through the graph together, or one after the other where an operator cannot be vectorized.
    """
    count = len(cotangents[0]) if cotangents else 0
    if not outputs:
        return [one.new_zeros(count, *one.shape) for one in inputs]

    def take(given: list[Tensor], batched: bool) -> list[Tensor]:
        found = torch.autograd.grad(
            outputs, inputs, given, retain_graph=True, allow_unused=True, is_grads_batched=batched
        )
        shape = (count,) if batched else ()
        return [
            one.new_zeros(*shape, *one.shape) if part is None else part.detach()
            for one, part in zip(inputs, found, strict=True)
        ]

    if count > 1:
        try:
            return take(cotangents, True)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
    rows = [take([one[i] for one in cotangents], False) for i in range(count)]
    return [torch.stack(parts) for parts in zip(*rows, strict=True)]


def _inner(left: list[Tensor], right: list[Tensor]) -> Tensor:
    """Compute the inner products of each of t rows, float64: `(t,)`."""
    parts = [(a.double() * b.double()).flatten(1).sum(1) for a, b in zip(left, right, strict=True)]
    return torch.stack(parts).sum(0)
