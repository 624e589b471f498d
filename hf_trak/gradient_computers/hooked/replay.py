"""The fallback for a module without a rule: its gradient for each sample, from its inputs and its output gradients.

The module alone is evaluated again, never the model: by `torch.func.vmap` over the samples, or, where vmap cannot
follow it (tokens routed to experts, recurrent layers), sample after sample.
"""

import logging
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_trak._compat import mask_code_traceable, tree_flatten, tree_leaves, tree_unflatten
from hf_trak.errors import GradientEngineError
from hf_trak.gradient_computers.hooked.batch_axis import BatchAxis, UnsupportedError
from hf_trak.gradient_computers.hooked.hooked_pass import HookedPass
from hf_trak.gradient_computers.hooked.traces import ModuleUnsupportedError, OpTrace

logger = logging.getLogger(__name__)

_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)


@dataclass(frozen=True)
class ReplayedCall:
    """One call of a replayed module in the batched pass.

    Attributes:
        leaves, structure: its arguments taken apart.
        inputs: the tensors among them.
        axes: their batch dimensions; `None` for a tensor without one.
        grad_axes: the batch dimensions of the floating-point outputs.
    """

    leaves: list[Any]
    structure: Any
    inputs: list[Tensor]
    axes: list[BatchAxis | None]
    grad_axes: list[BatchAxis]

    @property
    def batched(self) -> list[int]:
        """List the positions of the inputs with a batch dimension."""
        return [i for i, axis in enumerate(self.axes) if axis is not None]

    def input_rows(self, size: int) -> list[Tensor]:
        """Stack, for every input with a batch dimension, what each sample has alone: `(B, *)`."""
        return [torch.stack([self.axes[i].sample(self.inputs[i], b) for b in range(size)]) for i in self.batched]  # type: ignore[union-attr]

    def arguments(self, samples: tuple[Tensor, ...]) -> tuple[Any, Any]:
        """Put the inputs of one sample into the place of the batched ones. Returns `(args, kwargs)`."""
        values = list(self.inputs)
        for i, sample in zip(self.batched, samples, strict=True):
            values[i] = sample
        position = iter(values)
        leaves = [next(position) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.structure)


class Replay:
    """Per-sample gradients of all attributed parameters below one module."""

    unvectorizable: ClassVar[set[type[nn.Module]]] = set()
    """Module types that vmap has refused, so that it is not tried again."""

    def __init__(self, module: nn.Module, name: str, names: dict[int, str], hooked_pass: HookedPass) -> None:
        """
        Args:
            module: the module.
            name: its name in the model.
            names: names, in the model, of the attributed parameters below it, by `id`.
            hooked_pass: the pass.
        """
        self.module = module
        self.name = name
        self.hooked_pass = hooked_pass
        self.parameters = {local: p for local, p in module.named_parameters() if id(p) in names}
        self.names = {local: names[id(p)] for local, p in self.parameters.items()}

    def tensors_of(self, tree: Any) -> list[Tensor]:
        """Return the tensors among arguments or results, in a fixed order."""
        return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]

    def capture(self, args: Any, kwargs: Any, result: Any, trace: OpTrace) -> Any:
        """Have the module replayed when the gradients of all its outputs are there.

        Args:
            args, kwargs: what the module was called with.
            result: what it returned.
            trace: the same call for one sample alone.

        Returns:
            The result to continue with, its floating-point tensors part of a graph.

        Raises:
            ModuleUnsupportedError: an argument is something that cannot be cut into samples, or no input, or not every
                output, has a batch dimension.
        """
        leaves, structure = tree_flatten((args, kwargs))
        strange = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, (Tensor, *_PLAIN))]
        if strange:
            raise ModuleUnsupportedError(self.name, f"takes arguments of type {strange[0]}")
        inputs, outputs = self.tensors_of((args, kwargs)), self.tensors_of(result)
        axes, out_axes = self._axes(inputs, outputs, trace)
        floating = [i for i, y in enumerate(outputs) if y.is_floating_point()]
        if not any(axes) or any(out_axes[i] is None for i in floating):
            raise ModuleUnsupportedError(self.name, "has an output without a batch dimension")

        # aliases, because the module itself may go on using what it returns (router logits); only the gradient from
        # outside counts. Where no input is part of a graph, the graph begins here.
        result_leaves, result_structure = tree_flatten(result)
        anchored = [
            (y.view_as(y) if y.requires_grad else y + self.hooked_pass.anchor(y.device))
            if isinstance(y, Tensor) and y.is_floating_point()
            else y
            for y in result_leaves
        ]
        watched = [y for y in anchored if isinstance(y, Tensor) and y.is_floating_point()]
        grad_axes = [axis for axis in (out_axes[i] for i in floating) if axis is not None]
        call = ReplayedCall(leaves, structure, [x.detach() for x in inputs], axes, grad_axes)
        versions = [x._version for x in inputs]

        def replay(grads: Any) -> None:
            if [x._version for x in inputs] != versions:
                raise GradientEngineError(
                    f"An input of module {self.name!r} ({type(self.module).__name__}) is changed in place after the "
                    "module has used it; per-sample gradients need it as it was. Use the functional or the "
                    "iterative engine."
                )
            with torch.enable_grad():
                self._replay(call, list(grads))
            call.inputs.clear()  # nothing needs them any more

        torch.autograd.graph.register_multi_grad_hook(
            watched, lambda grads: self.hooked_pass.received(lambda: replay(grads))
        )
        return tree_unflatten(anchored, result_structure)

    def _axes(
        self, inputs: list[Tensor], outputs: list[Tensor], trace: OpTrace
    ) -> tuple[list[BatchAxis | None], list[BatchAxis | None]]:
        """Find the batch dimensions of the inputs and of the outputs."""
        size, orders = self.hooked_pass.size, self.hooked_pass.sample_trace.orders
        try:
            if len(inputs) != len(trace.inputs) or len(outputs) != len(trace.outputs):
                raise UnsupportedError("has other arguments or results for one sample alone")
            return (
                [t.axis_of(x, size, orders) for t, x in zip(trace.inputs, inputs, strict=True)],
                [t.axis_of(y, size, orders) for t, y in zip(trace.outputs, outputs, strict=True)],
            )
        except UnsupportedError as error:
            raise ModuleUnsupportedError(self.name, str(error)) from error

    def _replay(self, call: ReplayedCall, grads: list[Tensor | None]) -> None:
        """Emit the gradients of all parameters, given those of the outputs; `None` for an output that f ignores."""
        size, emit = self.hooked_pass.size, self.hooked_pass.blocks.emit
        present = [i for i, grad in enumerate(grads) if grad is not None]
        if not present:
            return
        # as they are now: FSDP2 puts the gathered parameter into the place of the shard
        weights = {local: self.module.get_parameter(local).detach() for local in self.parameters}
        rows = call.input_rows(size)
        grad_rows = [torch.stack([call.grad_axes[i].sample(grads[i], b) for b in range(size)]) for i in present]  # type: ignore[arg-type]

        def outputs(weights: dict[str, Tensor], *samples: Tensor) -> list[Tensor]:
            args, kwargs = call.arguments(samples)
            result = torch.func.functional_call(self.module, weights, args, kwargs)
            floating = [y for y in self.tensors_of(result) if y.is_floating_point()]
            return [floating[i] for i in present]

        found = self._vectorized(outputs, weights, rows, grad_rows)
        if found is None:
            found = self._one_by_one(outputs, weights, rows, grad_rows)
        for local, gradient in found.items():
            emit(self.names[local], 0, gradient.reshape(size, -1))

    def _vectorized(
        self, outputs: Any, weights: dict[str, Tensor], rows: list[Tensor], grad_rows: list[Tensor]
    ) -> dict[str, Tensor] | None:
        """Take the gradients of all samples at once; `None` if vmap cannot follow the module."""
        if type(self.module) in self.unvectorizable:
            return None

        def gradients(samples: tuple[Tensor, ...], cotangents: tuple[Tensor, ...]) -> dict[str, Tensor]:
            def inner(w: dict[str, Tensor]) -> Tensor:
                taken = outputs(w, *samples)
                return sum((y * g).sum() for y, g in zip(taken, cotangents, strict=True))

            return torch.func.grad(inner)(weights)

        try:
            with mask_code_traceable():
                return torch.func.vmap(gradients)(tuple(rows), tuple(grad_rows))
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
            self.unvectorizable.add(type(self.module))
            logger.info("%s is replayed sample by sample: %s", type(self.module).__name__, str(error).split("\n")[0])
            return None

    def _one_by_one(
        self, outputs: Any, weights: dict[str, Tensor], rows: list[Tensor], grad_rows: list[Tensor]
    ) -> dict[str, Tensor]:
        """Take the gradients of one sample after the other."""
        size = self.hooked_pass.size
        total = {local: p.new_zeros(size, p.numel()) for local, p in weights.items()}
        for b in range(size):
            leaf_weights = {local: p.detach().requires_grad_(True) for local, p in weights.items()}
            taken = outputs(leaf_weights, *(r[b] for r in rows))
            pairs = [(y, g[b]) for y, g in zip(taken, grad_rows, strict=True) if y.requires_grad]
            if not pairs:
                continue
            gradients = torch.autograd.grad(
                [y for y, _ in pairs], list(leaf_weights.values()), [g for _, g in pairs], allow_unused=True
            )
            for local, gradient in zip(leaf_weights, gradients, strict=True):
                if gradient is not None:
                    total[local][b] = gradient.flatten()
        return total
