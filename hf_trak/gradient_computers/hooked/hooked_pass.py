"""The state of one forward pass under the hooked engine, and the gradients that its backward pass brings."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_trak.gradient_computers.base import SplitBatch
from hf_trak.gradient_computers.hooked.autograd_functions import Keep, PerSample
from hf_trak.gradient_computers.hooked.batch_axis import BatchAxis
from hf_trak.gradient_computers.hooked.rules.embedding import embedding_pieces
from hf_trak.gradient_computers.hooked.rules.registry import Piece
from hf_trak.gradient_computers.hooked.traces import (
    Lookup,
    ModelTrace,
    ParameterUnsupportedError,
    SampleTrace,
    Tracked,
    mark_data,
)
from hf_trak.gradient_computers.hooked.workspace import OuterBlock, TakesOuter, Workspace
from hf_trak.modelout_functions.base import Batch
from hf_trak.runtime.sharding import is_sharded_tensor
from hf_trak.runtime.transfers import copied_to_host

logger = logging.getLogger(__name__)

Emit = Callable[[str, int, Tensor | OuterBlock], None]
"""`emit(parameter name, start, block)`: receives columns `start … start + n` of a parameter's gradients, `(B, n)`."""


@dataclass(frozen=True)
class BlockOutput:
    """The workspace and the receiver of blocks of gradients.

    Attributes:
        emit: receives them.
        workspace: scratch memory.
        takes_outer: tells which blocks to pass on as two factors; `None` forms all of them.
    """

    emit: Emit
    workspace: Workspace
    takes_outer: TakesOuter | None = None


class HookedPass:
    """One pass through the model, of a batch or of one sample that is traced.

    Attributes:
        size: B, the number of samples.
        sample_trace: written while one sample is traced, read when a batch is captured.
        model_trace: what is known about the model; passes add to it.
        tracing: whether this is the pass of one sample.
        bypass_depth: hooks and the tracker do nothing while it is above zero.
        counters: how many calls there were, by name of the layer or key of the operation.
        steps: layers and torch functions in order, see `width_traces`; `None` where nobody will ask.
        tracked: the parameter values of the pass, by `id` of the tensor.
        stand_ins: a leaf of the small graphs of parameter values for each attributed parameter.
        checkpointed: whether blocks of the model may run again in the backward pass.
        postpones: whether the pass runs to its end when the engine does not understand it, because other processes
            make the same pass.
        postponed: the error that the end of the pass is to raise.
    """

    def __init__(
        self,
        model: nn.Module,
        selected: dict[int, str],
        size: int,
        sample_trace: SampleTrace,
        model_trace: ModelTrace,
        blocks: BlockOutput | None,
    ) -> None:
        """
        Args:
            model: the model, its parameters frozen.
            selected: names of the attributed parameters by `id`.
            size: B.
            sample_trace: what the pass of one sample saw, or is going to see.
            model_trace: what is known about the model.
            blocks: where gradients go; `None` for the pass of one sample, which only traces.
        """
        self.size = size
        self.sample_trace = sample_trace
        self.model_trace = model_trace
        self.tracing = blocks is None
        self.bypass_depth = 0
        self.counters: dict[Any, int] = defaultdict(int)
        self.steps: list[Any] | None = None
        self.tracked: dict[int, Tracked] = {}
        self.stand_ins: dict[str, Tensor] = {}
        self.postpones = False
        self.postponed: Exception | None = None
        self._blocks = blocks
        flag = "gradient_checkpointing"  # an attribute that is not there is expensive to ask a module for
        having = (one for one in model.modules() if flag in one.__dict__ or hasattr(type(one), flag))
        self.checkpointed = any(getattr(module, flag) for module in having)
        self._anchors: dict[torch.device, Tensor] = {}
        self._expanded: dict[tuple[int, BatchAxis, int], Tensor] = {}
        self._kept_alive: list[Tensor] = []  # an `id` stays that of one tensor as long as the tensor lives
        for parameter in model.parameters():
            name = selected.get(id(parameter))
            if name is not None:
                self.adopt(parameter, name)

    def adopt(self, parameter: Tensor, name: str) -> None:
        """Follow an attributed parameter, or the tensor that FSDP2 puts into its place while it is gathered.

        A shard takes part in no operation of the model, and needs no stand-in.
        """
        if id(parameter) not in self.tracked and not is_sharded_tensor(parameter):
            self.stand_ins[name] = parameter.detach().requires_grad_(True)
            self.tracked[id(parameter)] = Tracked(self.stand_ins[name], (name,), True)

    def postpone(self, error: Exception) -> bool:
        """Keep an error for the end of the pass, in which nothing is looked at any more.

        Returns:
            `bool`: whether the pass goes on; otherwise the error is to be raised at once.
        """
        if self.postpones:
            self.postponed = self.postponed or error
            self.bypass_depth += 1
        return self.postpones

    @property
    def blocks(self) -> BlockOutput:
        """Return where gradients go. The pass of one sample has no backward pass, and never asks."""
        assert self._blocks is not None
        return self._blocks

    def recording(self) -> bool:
        """Tell whether a call that is made now can have a gradient.

        Reentrant checkpointing runs its blocks first without a graph, then with one: one sample alone is traced the
        first time, a batch is captured the second time.
        """
        return torch.is_grad_enabled() or (self.tracing and self.checkpointed)

    def next_index(self, key: Any) -> int:
        """Count a call, and return how many came before it in this pass."""
        index = self.counters[key]
        self.counters[key] += 1
        if self.steps is not None:
            self.steps.append(key)
        return index

    def marked(self, batch: Batch) -> Batch:
        """Mark the tensors of a batch as data. The caller's own tensors are left as they are."""
        split = SplitBatch.of(batch)
        mapped = {key: tensor.detach().view_as(tensor) for key, tensor in split.mapped.items()}
        mark_data(list(mapped.values()))
        return split.rebuild(mapped)

    def bypassed(self) -> "_Bypass":
        """Return a context in which neither hooks nor the tracker do anything."""
        return _Bypass(self)

    # --- forward: what is captured ---------------------------------------------------------------------------------

    def anchor(self, device: torch.device) -> Tensor:
        """Return a zero that requires a gradient: where it is added, the graph begins."""
        if device not in self._anchors:
            self._anchors[device] = torch.zeros((), device=device, requires_grad=True)
        return self._anchors[device]

    def capture(
        self,
        output: Tensor,
        kept: tuple[Tensor, ...],
        receive: Callable[[Tensor, tuple[Tensor, ...]], None],
        on_host: bool = False,
    ) -> Tensor:
        """Have `receive(gradient of output, kept)` called when the backward pass comes to `output`.

        Args:
            output: the result of a layer or an operation.
            kept: tensors that the call will need, held as autograd holds what it saves.
            receive: called once.
            on_host: whether it gets the first of `kept` in host memory, where a copy arrives during the forward pass.

        Returns:
            `torch.Tensor`: the output to continue with, which is part of a graph.
        """
        if not output.requires_grad:
            output = output + self.anchor(output.device)
        watched, shape = _viewed(output), output.shape  # a hook that held the output would keep its memory
        arrived = copied_to_host(kept[0]) if on_host else None
        token: Tensor | None = Keep.apply(self.anchor(output.device), *(t.detach() for t in kept))

        def hook(grad: Tensor) -> None:
            nonlocal token
            if token is None:
                raise RuntimeError("A graph of the hooked engine was run backward twice.")
            keeper, token = token, None  # a node lives, and keeps what it saved, as long as its result
            saved = keeper.grad_fn.saved_tensors  # type: ignore[union-attr]  # may run a checkpointed block again
            del keeper
            if arrived is not None:
                saved = (arrived(), *saved[1:])
            self.received(lambda: receive(grad.reshape(shape), saved))

        watched.register_hook(hook)
        return output

    def small_graph(self) -> AbstractContextManager[Any]:
        """Return a context in which small graphs of parameter values grow.

        They keep what they need within a checkpointed block, too. Their backward passes are others than that of the
        model, and each would have the block run again.
        """
        if not self.checkpointed:
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda tensor: tensor)

    def track(
        self, value: Tensor, roots: tuple[str, ...], lookup: Lookup | None = None, via: Tracked | None = None
    ) -> Tracked:
        """Follow a parameter value that was computed from the parameters `roots`."""
        tracked = Tracked(value, roots, lookup=lookup, via=via)
        self.tracked[id(value)] = tracked
        self._kept_alive.append(value)
        return tracked

    def per_sample(self, tracked: Tracked, axis: BatchAxis, rank: int) -> Tensor:
        """Expand a parameter value along the batch dimension, so that its gradient arrives per sample.

        Args:
            tracked: the parameter value.
            axis: the batch dimension of the result in which the value is used.
            rank: number of dimensions of that result.

        Returns:
            `torch.Tensor`: the value with B rows (or B · fold) in dimension `axis.dim`. Its gradient is deposited.

        Raises:
            ParameterUnsupportedError: the value has a size of its own in that dimension.
        """
        key = (id(tracked.value), axis, rank)
        # a block that runs again has to do all that it did the first time
        if key in self._expanded and not self.checkpointed:
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
            self.received(lambda: self.deposit(tracked, grad.reshape(self.size, *value.shape)))

        expanded = PerSample.apply(self.anchor(value.device), value.detach().view(aligned), shape, receive)
        self._expanded[key] = expanded
        return expanded

    # --- backward: where gradients go ------------------------------------------------------------------------------

    def received(self, receive: Callable[[], None]) -> None:
        """Process a gradient that has arrived, unless the pass only runs to its end."""
        if self.postponed is not None:
            return
        try:
            with self.bypassed():
                receive()
        except Exception as error:
            if not self.postpone(error):
                raise

    def deposit(self, tracked: Tracked, grad: Tensor) -> None:
        """Take the per-sample gradient `(B, *shape)` of a parameter value back to its parameters, and emit it."""
        if tracked.is_parameter:
            self.blocks.emit(tracked.roots[0], 0, grad.reshape(self.size, -1))
            return
        if tracked.lookup is not None:
            self._deposit_rows(tracked.roots[0], tracked.lookup, grad.to(tracked.value.dtype))
            return
        # rows that were changed in place are others than those that the value was computed from
        if tracked.via is not None and not tracked.via.value._version:
            (rows,) = self._pulled_back(tracked, grad, [tracked.via.value])
            if rows is not None:
                self.deposit(tracked.via, rows)
            return
        stand_ins = [self.stand_ins[root] for root in tracked.roots]
        for root, gradient in zip(tracked.roots, self._pulled_back(tracked, grad, stand_ins), strict=True):
            if gradient is not None:
                self.blocks.emit(root, 0, gradient.reshape(self.size, -1))

    def _deposit_rows(self, root: str, lookup: Lookup, grad: Tensor) -> None:
        """Emit the gradients of the rows that were looked up. Through a graph, each sample would be a kernel."""
        ids, rows = lookup.ids(), lookup.rows
        ids = ids.expand(self.size, *ids.shape)
        for _, start, block in embedding_pieces(ids, grad, self.blocks.workspace, rows, lookup.padding_idx):
            self.blocks.emit(root, start, block)

    def deposit_pieces(self, targets: dict[str, Tracked], pieces: Iterable[Piece]) -> None:
        """Deposit the gradients that a rule gives for an operation.

        Args:
            targets: the parameter values that the operation was called with, by the name that the rule gives them.
            pieces: the rule's result.
        """
        whole: dict[str, Tensor] = {}
        for name, start, block in pieces:
            tracked = targets[name]
            if tracked.is_parameter:
                self.blocks.emit(tracked.roots[0], start, block)
                continue
            # the value is computed from parameters: only its whole gradient can be taken back to them
            if isinstance(block, OuterBlock):
                block = block.dense()
            if name not in whole:
                whole[name] = block.new_zeros(self.size, tracked.value.numel())
            whole[name][:, start : start + block.shape[1]] += block
        for name, gradient in whole.items():
            self.deposit(targets[name], gradient.view(self.size, *targets[name].value.shape))

    def _pulled_back(self, tracked: Tracked, grad: Tensor, ends: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Take a gradient `(B, *shape)` through the small graph of a parameter value, as far as some tensors.

        Returns:
            `(B, *shape)` for each of them; `None` for one that the value does not depend on.
        """
        grad = grad.to(tracked.value.dtype)

        def pull(cotangent: Tensor, batched: bool) -> Sequence[Tensor | None]:
            return torch.autograd.grad(
                tracked.value, ends, cotangent, retain_graph=True, allow_unused=True, is_grads_batched=batched
            )

        if tracked.roots not in self.model_trace.unvectorizable:
            try:
                return pull(grad, True)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self.model_trace.unvectorizable.add(tracked.roots)
                logger.debug("Gradients of %s are taken sample by sample: %s", ", ".join(tracked.roots), error)
        rows = [pull(cotangent, False) for cotangent in grad]
        return [None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True)]


def _viewed(output: Tensor) -> Tensor:
    """Return the tensor that has the same numbers as an output, and keeps its hooks when the output is written to.

    Some versions of torch return the result of a linear layer with a bias as a view. Hooks of a view are lost when it
    is changed in place, and those of the viewed tensor are not.
    """
    base = output._base
    if base is None or base.is_leaf or base.numel() != output.numel():
        return output
    return base if base.is_contiguous() and output.is_contiguous() else output


class _Bypass:
    """A class rather than a generator, because every captured gradient enters it."""

    def __init__(self, hooked_pass: HookedPass) -> None:
        self.hooked_pass = hooked_pass

    def __enter__(self) -> None:
        self.before = self.hooked_pass.bypass_depth
        self.hooked_pass.bypass_depth = self.before + 1

    def __exit__(self, *exception: Any) -> None:
        self.hooked_pass.bypass_depth = self.before
