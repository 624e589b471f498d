"""The fallback for a module without a rule: its gradient for each sample, from its inputs and its output gradients.

The module alone is evaluated again, never the model: by `torch.func.vmap` over the samples, or, where vmap cannot
follow it (tokens routed to experts, recurrent layers), sample after sample.
"""

import logging
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hf_trak.errors import GradientEngineError
from hf_trak.gradient_computers.environment import mask_code_traceable
from hf_trak.gradient_computers.hooked.batch_axis import BatchAxis, UnsupportedError
from hf_trak.gradient_computers.hooked.tracker import OpTrace

if TYPE_CHECKING:
    from hf_trak.gradient_computers.hooked.session import Session

logger = logging.getLogger(__name__)

_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)


class Replay:
    """Per-sample gradients of all attributed parameters below one module."""

    unvectorizable: ClassVar[set[type[nn.Module]]] = set()
    """Module types that vmap has refused, so that it is not tried again."""

    def __init__(self, module: nn.Module, name: str, names: dict[int, str], session: "Session") -> None:
        """
        Args:
            module: the module.
            name: its name in the model.
            names: names, in the model, of the attributed parameters below it, by `id`.
            session: the pass.
        """
        self.module = module
        self.name = name
        self.session = session
        self.parameters = {local: p for local, p in module.named_parameters() if id(p) in names}
        self.names = {local: names[id(p)] for local, p in self.parameters.items()}

    def tensors_of(self, tree: Any) -> list[Tensor]:
        """The tensors among arguments or results, in a fixed order."""
        return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]

    def capture(self, args: Any, kwargs: Any, result: Any, trace: OpTrace) -> Any:
        """Have the module replayed when the gradients of all its outputs are there.

        Raises:
            UnsupportedError: an argument is something that cannot be cut into samples, or none is a tensor with a
                batch dimension.
        """
        from hf_trak.gradient_computers.hooked.session import ModuleUnsupportedError

        leaves, structure = pytree.tree_flatten((args, kwargs))
        strange = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, (Tensor, *_PLAIN))]
        if strange:
            raise ModuleUnsupportedError(self.name, f"takes arguments of type {strange[0]}")
        inputs, outputs = self.tensors_of((args, kwargs)), self.tensors_of(result)
        try:
            if len(inputs) != len(trace.inputs) or len(outputs) != len(trace.outputs):
                raise UnsupportedError("has other arguments or results for one sample alone")
            axes = [t.axis_of(x, self.session.size) for t, x in zip(trace.inputs, inputs, strict=True)]
            out_axes = [t.axis_of(y, self.session.size) for t, y in zip(trace.outputs, outputs, strict=True)]
        except UnsupportedError as error:
            raise ModuleUnsupportedError(self.name, str(error)) from error
        floating = [i for i, y in enumerate(outputs) if y.is_floating_point()]
        if not any(axes) or any(out_axes[i] is None for i in floating):
            raise ModuleUnsupportedError(self.name, "has an output without a batch dimension")

        # aliases, because the module itself may go on using what it returns (router logits); only the gradient from
        # outside counts. Where no input is part of a graph, the graph begins here.
        result_leaves, result_structure = pytree.tree_flatten(result)
        anchored = [
            (y.view_as(y) if y.requires_grad else y + self.session.anchor(y.device))
            if isinstance(y, Tensor) and y.is_floating_point()
            else y
            for y in result_leaves
        ]
        watched = [y for y in anchored if isinstance(y, Tensor) and y.is_floating_point()]
        watched_axes = [axis for axis in (out_axes[i] for i in floating) if axis is not None]
        kept = [x.detach() for x in inputs]
        versions = [x._version for x in inputs]

        def receive(grads: Any) -> None:
            if [x._version for x in inputs] != versions:
                raise GradientEngineError(
                    f"An input of module {self.name!r} ({type(self.module).__name__}) is changed in place after the "
                    "module has used it; per-sample gradients need it as it was. Use the functional or the "
                    "iterative engine."
                )
            with self.session.bypassed(), torch.enable_grad():
                self._replay(leaves, structure, kept, axes, list(grads), watched_axes)
            kept.clear()

        torch.autograd.graph.register_multi_grad_hook(watched, receive)
        return pytree.tree_unflatten(anchored, result_structure)

    def _replay(
        self,
        leaves: list[Any],
        structure: Any,
        inputs: list[Tensor],
        axes: list[BatchAxis | None],
        grads: list[Tensor | None],
        grad_axes: list[BatchAxis],
    ) -> None:
        assert self.session.emit is not None
        size = self.session.size
        present = [i for i, grad in enumerate(grads) if grad is not None]
        if not present:
            return
        weights = {local: p.detach() for local, p in self.parameters.items()}
        batched = [i for i, axis in enumerate(axes) if axis is not None]
        rows = [torch.stack([axes[i].sample(inputs[i], b) for b in range(size)]) for i in batched]  # type: ignore[union-attr]
        grad_rows = [torch.stack([grad_axes[i].sample(grads[i], b) for b in range(size)]) for i in present]  # type: ignore[arg-type]

        def outputs(weights: dict[str, Tensor], *samples: Tensor) -> list[Tensor]:
            values = list(inputs)
            for i, sample in zip(batched, samples, strict=True):
                values[i] = sample
            position = iter(values)
            args, kwargs = pytree.tree_unflatten(
                [next(position) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure
            )
            result = torch.func.functional_call(self.module, weights, args, kwargs)
            floating = [y for y in self.tensors_of(result) if y.is_floating_point()]
            return [floating[i] for i in present]

        if type(self.module) not in self.unvectorizable:

            def gradients(samples: tuple[Tensor, ...], cotangents: tuple[Tensor, ...]) -> dict[str, Tensor]:
                def inner(w: dict[str, Tensor]) -> Tensor:
                    taken = outputs(w, *samples)
                    return sum((y * g).sum() for y, g in zip(taken, cotangents, strict=True))  # type: ignore[return-value]

                return torch.func.grad(inner)(weights)

            try:
                with mask_code_traceable():
                    found = torch.func.vmap(gradients)(tuple(rows), tuple(grad_rows))
            except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
                self.unvectorizable.add(type(self.module))
                logger.info(
                    "%s is replayed sample by sample: %s", type(self.module).__name__, str(error).split("\n")[0]
                )
            else:
                for local, gradient in found.items():
                    self.session.emit(self.names[local], 0, gradient.reshape(size, -1))
                return
        total = {local: p.new_zeros(size, p.numel()) for local, p in weights.items()}
        for b in range(size):
            leaf_weights = {local: p.detach().requires_grad_(True) for local, p in weights.items()}
            taken = outputs(leaf_weights, *(r[b] for r in rows))
            pairs = [(y, g[b]) for y, g in zip(taken, grad_rows, strict=True) if y.requires_grad]
            if not pairs:
                continue
            taken_gradients = torch.autograd.grad(
                [y for y, _ in pairs], list(leaf_weights.values()), [g for _, g in pairs], allow_unused=True
            )
            for local, gradient in zip(leaf_weights, taken_gradients, strict=True):
                if gradient is not None:
                    total[local][b] = gradient.flatten()
        for local, rows_of_all in total.items():
            self.session.emit(self.names[local], 0, rows_of_all)
