"""One forward pass of the hooked engine: what is recorded of it, and what its backward pass will set off."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_trak.gradient_computers.batches import SplitBatch
from hf_trak.gradient_computers.hooked.autograd_functions import Keep, PerSample, Trap
from hf_trak.gradient_computers.hooked.batch_axis import BatchAxis, UnsupportedError
from hf_trak.gradient_computers.hooked.outer import OuterBlock
from hf_trak.gradient_computers.hooked.rules.registry import Piece
from hf_trak.gradient_computers.hooked.tracker import (
    OpKey,
    OpTrace,
    Profile,
    RestartError,
    Tracked,
    is_data,
    mark_data,
    outputs_of,
    replace_tensors,
    tensors_in,
)
from hf_trak.gradient_computers.hooked.workspace import Workspace
from hf_trak.modelout_functions.base import Batch

logger = logging.getLogger(__name__)

Emit = Callable[[str, int, Tensor | OuterBlock], None]
"""`emit(parameter name, start, (B, n))`."""


@dataclass
class Knowledge:
    """What the engine has found out about a model, kept over batches.

    Attributes:
        batchless: calls of layers that see no batch (a position table looked up once for all samples).
        carrying: calls of layers that do see it, although it was not apparent from one sample.
        contacts: operations where a parameter value meets the batch.
        alone: operations that look like contacts, but whose result has no batch dimension.
        replayed: names of modules that are evaluated sample by sample, and why.
        trapped: operations that nothing can handle. What they give may not matter to f (the logits of a CLIP model,
            which compare every image with every text); a gradient that does come back from them is an error.
        unvectorizable: parameters whose values vmap cannot differentiate (sparse ones), by the roots of the value.
    """

    batchless: set[tuple[str, int]] = field(default_factory=set)
    carrying: set[tuple[str, int]] = field(default_factory=set)
    contacts: set[tuple[OpKey, int]] = field(default_factory=set)
    alone: set[tuple[OpKey, int]] = field(default_factory=set)
    replayed: dict[str, str] = field(default_factory=dict)
    trapped: dict[tuple[OpKey, int], str] = field(default_factory=dict)
    unvectorizable: set[tuple[str, ...]] = field(default_factory=set)


class ParameterUnsupportedError(UnsupportedError):
    """An unsupported use of parameters, which are named."""

    def __init__(self, roots: Iterable[str], reason: str) -> None:
        super().__init__(reason)
        self.roots = tuple(roots)
        self.operation: tuple[OpKey, int] | None = None


class ModuleUnsupportedError(UnsupportedError):
    """An unsupported call of a module, which is named."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(reason)
        self.name = name


class Session:
    """State of one pass, of a batch or (`profile.calls` still empty, `calibrating`) of one sample that is traced."""

    def __init__(
        self,
        model: nn.Module,
        selected: dict[int, str],
        size: int,
        profile: Profile,
        knowledge: Knowledge,
        calibrating: bool,
        emit: Emit | None,
        workspace: Workspace,
    ) -> None:
        """
        Args:
            model: the model, its parameters frozen.
            selected: names of the attributed parameters by `id`.
            size: B.
            profile: written when calibrating, read otherwise.
            knowledge: added to.
            calibrating: whether this is the pass of one sample.
            emit: receives gradients.
            workspace: scratch memory.
        """
        self.size = size
        self.profile = profile
        self.knowledge = knowledge
        self.calibrating = calibrating
        self.emit = emit
        self.workspace = workspace
        self.inside = 0
        self.counters: dict[Any, int] = defaultdict(int)
        self.tracked: dict[int, Tracked] = {}
        self.stand_ins: dict[str, Tensor] = {}
        self._checkpointed = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
        self._anchors: dict[torch.device, Tensor] = {}
        self._expanded: dict[tuple[int, BatchAxis, int], Tensor] = {}
        self._kept_alive: list[Tensor] = []
        for parameter in model.parameters():
            name = selected.get(id(parameter))
            if name is not None:
                self.stand_ins[name] = parameter.detach().requires_grad_(True)
                self.tracked[id(parameter)] = Tracked(self.stand_ins[name], (name,), True)

    def recording(self) -> bool:
        """Whether what is called now can have a gradient.

        Reentrant checkpointing runs its blocks first without, then with a graph: one sample alone is traced the first
        time, a batch is captured the second time.
        """
        return torch.is_grad_enabled() or (self.calibrating and self._checkpointed)

    def next_index(self, key: Any) -> int:
        """How many times this was called before in this pass."""
        index = self.counters[key]
        self.counters[key] += 1
        return index

    def marked(self, batch: Batch) -> Batch:
        """The batch with its tensors marked as data; the caller's tensors are left as they are."""
        split = SplitBatch.of(batch)
        mapped = {key: tensor.detach().view_as(tensor) for key, tensor in split.mapped.items()}
        mark_data(list(mapped.values()))
        return split.rebuild(mapped)

    # --- recording -------------------------------------------------------------------------------------------------

    def anchor(self, device: torch.device) -> Tensor:
        """A zero that requires a gradient: where it is added, the graph begins."""
        if device not in self._anchors:
            self._anchors[device] = torch.zeros((), device=device, requires_grad=True)
        return self._anchors[device]

    def capture(
        self, output: Tensor, kept: tuple[Tensor, ...], receive: Callable[[Tensor, tuple[Tensor, ...]], None]
    ) -> Tensor:
        """Call `receive(gradient of output, kept)` when the backward pass gets there.

        Returns:
            The output to continue with, which is part of a graph.
        """
        if not output.requires_grad:
            output = output + self.anchor(output.device)
        token: Tensor | None = Keep.apply(self.anchor(output.device), *(t.detach() for t in kept))

        def hook(grad: Tensor) -> None:
            nonlocal token
            if token is None:
                raise RuntimeError("A graph of the hooked engine was run backward twice.")
            node, token = token.grad_fn, None
            saved = node.saved_tensors  # type: ignore[union-attr]  # may run a checkpointed block again, hooks and all
            with self.bypassed():
                receive(grad, saved)

        output.register_hook(hook)
        return output

    def bypassed(self) -> "_Bypass":
        """Context in which neither hooks nor the tracker do anything."""
        return _Bypass(self)

    def parameter_operation(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called by the tracker for a function with a parameter value among its arguments."""
        from hf_trak.gradient_computers.hooked.op_handlers import CONTACTS, Contact, name_of

        found = {id(t): self.tracked[id(t)] for t in tensors_in(args, kwargs) if id(t) in self.tracked}
        roots = tuple(sorted({root for tracked in found.values() for root in tracked.roots}))
        key: OpKey = (roots, name_of(func))
        index = self.counters[key]
        length = 0 if self.calibrating else len(self.profile.ops.get(key, ()))
        if length and index >= length:  # a checkpointed block runs again in the backward pass
            index %= length
        handler = CONTACTS.get(func)
        known = self.knowledge
        if (key, index) in known.trapped:
            self.counters[key] += 1
            return self._trapped(func, args, kwargs, found, known.trapped[(key, index)])
        unknown = self.calibrating and handler is not None and (key, index) not in known.alone
        if unknown and any(is_data(t) for t in tensors_in(args, kwargs)):
            known.contacts.add((key, index))
        if handler is not None and (key, index) in known.contacts:
            self.counters[key] += 1
            if self.calibrating:
                return self._trace_contact(key, func, args, kwargs, found)
            try:
                contact = Contact(self, func, args, kwargs, found, roots, self._trace_of(key, index))
                meets_batch = contact.meets_batch()
                if meets_batch:
                    return handler(contact)
            except UnsupportedError as error:
                named = ParameterUnsupportedError(roots, f"{key[1]}: {error}")
                named.operation = (key, index)
                raise named from error
            known.contacts.discard((key, index))
            known.alone.add((key, index))
            raise RestartError

        def graph(tensor: Tensor) -> Tensor:
            return found[id(tensor)].value if id(tensor) in found else tensor

        with torch.enable_grad():
            result = func(
                *(replace_tensors(a, graph) for a in args), **{k: replace_tensors(v, graph) for k, v in kwargs.items()}
            )
        outputs = outputs_of(result)
        if not outputs:
            return result
        self.counters[key] += 1
        if self.calibrating:
            self.profile.ops[key].append(OpTrace.of([], outputs))
        else:
            for tensor, traced in zip(outputs, self._trace_of(key, index).outputs, strict=True):
                if tensor.shape != traced.trace.shape:
                    if handler is None or (key, index) in known.alone:
                        named = ParameterUnsupportedError(roots, f"{key[1]} mixes parameters with the batch")
                        named.operation = (key, index)
                        raise named
                    known.contacts.add((key, index))
                    raise RestartError
        for tensor in outputs:
            if tensor.requires_grad and tensor.is_floating_point():
                self.track(tensor, roots)
        return result

    def _trace_contact(
        self,
        key: OpKey,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        found: dict[int, Tracked],
    ) -> Any:
        def plain(tensor: Tensor) -> Tensor:
            return found[id(tensor)].value.detach() if id(tensor) in found else tensor

        inputs = [plain(t) for t in tensors_in(args, kwargs)]
        before = OpTrace.of(inputs, [])
        result = func(
            *(replace_tensors(a, plain) for a in args), **{k: replace_tensors(v, plain) for k, v in kwargs.items()}
        )
        before.outputs = OpTrace.of([], outputs_of(result)).outputs
        self.profile.ops[key].append(before)
        mark_data(result)
        return result

    def _trapped(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        found: dict[int, Tracked],
        message: str,
    ) -> Any:
        def trap(tensor: Tensor) -> Tensor:
            if id(tensor) not in found:
                return tensor
            value = found[id(tensor)].value.detach()
            return value if self.calibrating else Trap.apply(self.anchor(value.device), value, message)

        result = func(
            *(replace_tensors(a, trap) for a in args), **{k: replace_tensors(v, trap) for k, v in kwargs.items()}
        )
        if self.calibrating:
            mark_data(result)
        return result

    def _trace_of(self, key: OpKey, index: int) -> OpTrace:
        traces = self.profile.ops.get(key, [])
        if not traces:
            raise ParameterUnsupportedError(key[0], f"{key[1]} was not called for one sample alone")
        # a checkpointed block runs again in the backward pass, and finds its own trace there
        return traces[index % len(traces)]

    def track(self, value: Tensor, roots: tuple[str, ...]) -> Tracked:
        """Follow a parameter value."""
        tracked = Tracked(value, roots)
        self.tracked[id(value)] = tracked
        self._kept_alive.append(value)
        return tracked

    # --- gradients -------------------------------------------------------------------------------------------------

    def per_sample(self, tracked: Tracked, axis: BatchAxis, rank: int) -> Tensor:
        """A parameter value expanded along the batch dimension of a result of `rank` dimensions.

        Its gradient arrives per sample, and is deposited. Raises `UnsupportedError` where the value has a size of its
        own in that dimension.
        """
        key = (id(tracked.value), axis, rank)
        if key in self._expanded:
            return self._expanded[key]
        value = tracked.value
        aligned = [1] * (rank - value.ndim) + list(value.shape)
        if len(aligned) != rank or aligned[axis.dim] != 1:
            raise ParameterUnsupportedError(
                tracked.roots,
                f"a value of shape {tuple(value.shape)} meets the batch in dimension {axis.dim} of {rank}",
            )
        shape = list(aligned)
        shape[axis.dim] = self.size * axis.fold

        def receive(grad: Tensor) -> None:
            grad = axis.rows_first(grad)
            if axis.fold > 1:
                grad = grad.sum(1)
            with self.bypassed():
                self.deposit(tracked, grad.reshape(self.size, *value.shape))

        expanded = PerSample.apply(self.anchor(value.device), value.detach().view(aligned), shape, receive)
        self._expanded[key] = expanded
        return expanded

    def deposit(self, tracked: Tracked, grad: Tensor) -> None:
        """Take the per-sample gradient `(B, *shape)` of a parameter value back to its parameters, and emit it."""
        assert self.emit is not None
        if tracked.is_parameter:
            self.emit(tracked.roots[0], 0, grad.reshape(self.size, -1))
            return
        for root, gradient in zip(tracked.roots, self._pulled_back(tracked, grad), strict=True):
            if gradient is not None:
                self.emit(root, 0, gradient.reshape(self.size, -1))

    def _pulled_back(self, tracked: Tracked, grad: Tensor) -> Sequence[Tensor | None]:
        """The gradient of a parameter value taken through its small graph: `(B, *shape)` for each of its roots."""
        grad = grad.to(tracked.value.dtype)
        stand_ins = [self.stand_ins[root] for root in tracked.roots]

        def pull(cotangent: Tensor, batched: bool) -> Sequence[Tensor | None]:
            return torch.autograd.grad(
                tracked.value, stand_ins, cotangent, retain_graph=True, allow_unused=True, is_grads_batched=batched
            )

        if tracked.roots not in self.knowledge.unvectorizable:
            try:
                return pull(grad, True)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self.knowledge.unvectorizable.add(tracked.roots)
                logger.debug("Gradients of %s are taken sample by sample: %s", ", ".join(tracked.roots), error)
        rows = [pull(cotangent, False) for cotangent in grad]
        return [None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True)]

    def deposit_pieces(self, targets: dict[str, Tracked], pieces: Iterable[Piece]) -> None:
        """Route the pieces of a layer to the parameters, or parameter values, that it was called with."""
        assert self.emit is not None
        whole: dict[str, Tensor] = {}
        for name, start, block in pieces:
            tracked = targets[name]
            if tracked.is_parameter:
                self.emit(tracked.roots[0], start, block)
                continue
            if isinstance(block, OuterBlock):
                block = block.dense()
            if name not in whole:
                whole[name] = block.new_zeros(self.size, tracked.value.numel())
            whole[name][:, start : start + block.shape[1]] += block
        for name, gradient in whole.items():
            self.deposit(targets[name], gradient.view(self.size, *targets[name].value.shape))


class _Bypass:
    def __init__(self, session: Session) -> None:
        self.session = session

    def __enter__(self) -> None:
        self.before = self.session.inside
        self.session.inside = self.before + 1

    def __exit__(self, *exception: Any) -> None:
        self.session.inside = self.before
