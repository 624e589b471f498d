"""The hooked engine: one forward and one backward pass of the batch, per-sample gradients layer by layer on the way
back."""

import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from hf_trak._compat import opened_backward, own_parameters
from hf_trak.errors import GradientEngineError
from hf_trak.gradient_computers.base import (
    AbstractGradientComputer,
    BatchOutputs,
    GradientSink,
    SplitBatch,
    accumulated_gradients,
    gradients_of,
    one_per_sample,
    run_model,
)
from hf_trak.gradient_computers.environment import differentiating
from hf_trak.gradient_computers.hooked.batch_axis import UnsupportedError
from hf_trak.gradient_computers.hooked.hooked_pass import BlockOutput, Emit, HookedPass
from hf_trak.gradient_computers.hooked.hooks import LayerHooks, emit_slice
from hf_trak.gradient_computers.hooked.traces import (
    ModelTrace,
    ModuleUnsupportedError,
    ParameterUnsupportedError,
    RestartError,
    SampleTrace,
)
from hf_trak.gradient_computers.hooked.tracker import ParameterTracker
from hf_trak.gradient_computers.hooked.width_traces import Steps, WidthFamily, family_of
from hf_trak.gradient_computers.hooked.workspace import (
    OuterBlock,
    OuterSink,
    TakesOuter,
    Workspace,
    default_block_bytes,
    every_factor,
)
from hf_trak.modelout_functions.base import AbstractModelOutput, Batch, BatchedModelOutput, Side
from hf_trak.modelout_functions.deferred_logits import NotDeferrableError, ReceiveHead, deferrable_head, deferring

logger = logging.getLogger(__name__)

Captured = tuple[HookedPass, Tensor, Tensor]
"""A captured forward pass of a batch, f `(B,)` with its graph, and q `(B,)`."""

MAX_PASSES = 400
MAX_SAMPLE_TRACES = 256

WHOLE_GRADIENT_BYTES = 2**30
"""Bytes of all gradients of one sample up to which a batch of one goes through plain autograd, which holds them."""


class HookedGradientComputer(AbstractGradientComputer):
    """Per-sample gradients at the price of one forward and one backward pass.

    Parameters are frozen for the pass, so that autograd never forms batched weight gradients; it still computes the
    gradients of activations. Each layer's input is kept, and when the gradient of its output arrives, a rule turns the
    two into the layer's per-sample gradients, which go to the sink and are freed.

    Before the first batch of a new shape, one sample passes through the model alone. Comparing shapes tells which
    dimension carries the batch in everything that follows, see `batch_axis`. What samples of a few widths have shown
    is computed for others, and confirmed by their batches, see `width_traces`. A batch of one goes through plain
    autograd, unless its gradients take more than [`WHOLE_GRADIENT_BYTES`].

    Attributes:
        max_block_bytes (`int`, *optional*):
            Bytes of a block at which large parameters (embeddings, LM heads) are cut into slices. `None` is 32 MiB,
            and 256 MiB on a GPU.
    """

    postpones = False
    """Whether a forward pass runs to its end before an error of the engine is raised, see [`HookedPass`]."""

    foretells = True
    """Whether traces of samples are computed where none was traced, see `width_traces`."""

    way_out = "Use the functional or the iterative engine."
    """What to do with a model that the engine does not understand."""

    defers = True
    """Whether logits of large vocabularies may be deferred, see `deferred_logits`."""

    def __init__(
        self,
        model: torch.nn.Module,
        task: AbstractModelOutput,
        grad_dim: int | None = None,
        dtype: torch.dtype | None = torch.float16,
        device: torch.device | str | None = "cuda",
        grad_wrt: Iterable[str] | None = None,
        max_block_bytes: int | None = None,
    ) -> None:
        """
        Args:
            model (`torch.nn.Module`):
                The model whose parameters are differentiated.
            task ([`AbstractModelOutput`]):
                The model output function, one with a batched form ([`BatchedModelOutput`]).
            grad_dim (`int`, *optional*):
                P, the number of attributed parameters. `None` counts them.
            dtype (`torch.dtype`, *optional*, defaults to `torch.float16`):
                Dtype of the gradients. `None` keeps that of the parameters.
            device (`torch.device` or `str`, *optional*, defaults to `"cuda"`):
                Device of the gradients, not touched before the first batch. `None` keeps that of the parameters.
            grad_wrt (`Iterable[str]`, *optional*):
                Names of the parameters to attribute. `None` takes those with `requires_grad`.
            max_block_bytes (`int`, *optional*):
                See the attribute. A block is never smaller than one row of a parameter.

        Raises:
            GradientEngineError: the task has no batched form.
            ValueError: `max_block_bytes` is not positive, `grad_dim` is not the number of attributed parameters, or
                `grad_wrt` does not fit the model.
        """
        super().__init__(model, task, grad_dim, dtype, device, grad_wrt)
        if not isinstance(task, BatchedModelOutput):
            raise GradientEngineError(
                f"The hooked engine needs a task with a batched form, but {type(task).__name__} has only "
                "get_output(model, weights, buffers, *sample). Derive it from BatchedModelOutput, or use the "
                "functional engine."
            )
        self.max_block_bytes = max_block_bytes
        self._workspace = Workspace() if max_block_bytes is None else Workspace(max_block_bytes)
        self._model_trace = ModelTrace()
        self._sample_traces: OrderedDict[Any, SampleTrace] = OrderedDict()
        self._families: dict[Any, WidthFamily] = {}
        self._head: torch.nn.Linear | None = None
        self._rows = 1
        self.load_model_params(model)

    def load_model_params(self, model: torch.nn.Module) -> None:
        if model is not self.model:
            self._sample_traces.clear()
            self._families.clear()
            self._model_trace = ModelTrace()
            self.defers = type(self).defers
        self.model = model

    def compute_per_sample_grad(self, batch: Batch) -> dict[str, Tensor]:
        """Compute the gradients of f for every sample of a batch.

        Args:
            batch (`Mapping[str, torch.Tensor]` or `Sequence[torch.Tensor]`): B samples.

        Returns:
            `dict[str, torch.Tensor]`: by parameter name, shapes `(B, *shape)`, in `dtype` on `device`.

        Raises:
            GradientEngineError: the model uses a parameter in a way that has neither a rule nor a fallback.
        """
        size = SplitBatch.of(batch).size
        parameters = dict(self.model.named_parameters())
        whole = {
            slot.name: parameters[slot.name].detach().new_zeros(size, slot.numel, dtype=self.dtype, device=self.device)
            for slot in self.layout.slots
        }

        def emit(name: str, start: int, block: Tensor | OuterBlock) -> None:
            assert isinstance(block, Tensor)  # factors are only for sinks that ask for them
            target = whole[name][:, start : start + block.shape[1]]
            target += block.to(target.device)

        self._run(batch, emit, "train")
        return {slot.name: whole[slot.name].view(size, *slot.shape) for slot in self.layout.slots}

    def stream(self, batch: Batch, sink: GradientSink, side: Side = "train") -> BatchOutputs:
        offsets = {slot.name: slot.offset for slot in self.layout.slots}
        dtypes = {name: self.dtype or p.dtype for name, p in self.model.named_parameters()}

        def emit(name: str, start: int, block: Tensor | OuterBlock) -> None:
            if isinstance(block, Tensor):
                sink(offsets[name] + start, block.to(device=self.device, dtype=dtypes[name]))
            else:
                assert isinstance(sink, OuterSink)  # no one else is given factors
                factors = (factor.to(device=self.device) for factor in (block.left, block.right))
                sink.add_outer(offsets[name] + start, *factors)

        return self._run(batch, emit, side, sink.takes_outer if isinstance(sink, OuterSink) else None)

    def _run(self, batch: Batch, emit: Emit, side: Side, takes_outer: TakesOuter | None = None) -> BatchOutputs:
        """Pass a batch through the model and back, and emit the gradients on the way.

        Raises:
            GradientEngineError: the engine cannot follow what the model does with its parameters.
        """
        split = SplitBatch.of(batch)
        blocks = BlockOutput(emit, self._sized_workspace(), takes_outer)
        # sinks of whole factors need those of a head at once
        self._head = self._deferrable_head() if self.defers and takes_outer is not every_factor else None
        self._rows = split.size
        if split.size == 1 and self.layout.gradient_bytes(dict(self.model.named_parameters())) <= WHOLE_GRADIENT_BYTES:
            return self._single(split, blocks, side)
        selected = self._selected()
        with differentiating(self.model, ()):
            hooked_pass, output, q = self._forward(split, side, selected, blocks)
            try:
                if output.requires_grad:
                    # checkpointed blocks run forward again during the backward pass, and need to be seen as before
                    with self.watching(hooked_pass, selected):
                        opened_backward((output.sum(),))
                if hooked_pass.postponed is not None:
                    raise hooked_pass.postponed
            except (torch.OutOfMemoryError, GradientEngineError):
                raise
            except (UnsupportedError, RestartError, RuntimeError) as error:
                raise GradientEngineError(
                    f"The hooked engine lost track of {type(self.model).__name__} in its backward pass: {error}. Use "
                    "another engine."
                ) from error
            leaked = [name for name, tensor in hooked_pass.stand_ins.items() if tensor.grad is not None]
        if leaked:
            raise GradientEngineError(
                f"The gradient of parameter {leaked[0]!r} arrived summed over the batch: it is used by an operation "
                "that the hooked engine does not see. Use the functional or the iterative engine, or leave it out "
                "of `grad_wrt`."
            )
        return BatchOutputs(output.detach(), q)

    @contextmanager
    def watching(self, hooked_pass: HookedPass, selected: dict[int, str]) -> Iterator[None]:
        """Return a context in which the hooks of a pass are on the model and the tracker sees its operations.

        Args:
            hooked_pass: the pass.
            selected: names of the attributed parameters by `id`.
        """
        with LayerHooks(self.model, hooked_pass, selected).attached(), ParameterTracker(hooked_pass):
            yield

    def _sized_workspace(self) -> Workspace:
        """Return the scratch memory, made anew if blocks are to have another size than last time."""
        block_bytes = self.max_block_bytes
        if block_bytes is None:
            block_bytes = default_block_bytes(next(self.model.parameters()).device)
        if self._workspace.max_block_bytes != block_bytes:
            self._workspace = Workspace(block_bytes)
        return self._workspace

    def _selected(self) -> dict[int, str]:
        """Return the names of the attributed parameters by `id`."""
        parameters = dict(self.model.named_parameters())
        return {id(parameters[name]): name for name in self.layout.names}

    def _forward(self, split: SplitBatch, side: Side, selected: dict[int, str], blocks: BlockOutput) -> Captured:
        """Run the captured forward pass of a batch, after as many passes of one sample as it takes to understand it.

        Raises:
            GradientEngineError: the model cannot be understood.
        """
        signature = self._signature(split, side)
        found = self._forward_as_foretold(signature, split, side, selected, blocks)
        if found is not None:
            return found
        traced = False
        for _ in range(MAX_PASSES):
            known = self._sample_traces.get(signature)
            sample_trace = known or SampleTrace()
            try:
                # 1. Trace one sample, unless a batch of this kind has been here before.
                if known is None:
                    traced = True
                    self._pass(split.rows(0, 1), 1, side, selected, sample_trace, None)
                    if split.size == 1:  # only a larger batch shows which dimension carries it
                        self._pass(split.picked([0, 0]), 2, side, selected, sample_trace, blocks)
                    self._keep(signature, sample_trace)
                # 2. Capture the batch.
                else:
                    found = self._pass(split.rows(0, split.size), split.size, side, selected, sample_trace, blocks)
            # 3. What the pass has found out is in the model trace now: start again.
            except RestartError:
                self._forget(signature)
            except NotDeferrableError as error:
                self._compute_logits(error)
                self._sample_traces.clear()
                self._families.clear()
            except UnsupportedError as error:
                self._forget(signature)
                if traced:  # otherwise another sample may just take another way through the model: look again
                    self._fall_back(error, selected)
            found = self._if_all_captured(found)
            if found is not None:
                if sample_trace.orders.presumed:  # right for this batch, which another one may not confirm
                    self._sample_traces.pop(signature, None)
                else:
                    self._learn(signature, split.size, sample_trace, found[0])
                return found
        raise GradientEngineError(
            f"The hooked engine cannot make out how {type(self.model).__name__} handles the batch: what it sees "
            f"changes from pass to pass. {self.way_out}"
        )

    def _if_all_captured(self, found: Captured | None) -> Captured | None:
        """Return a captured pass, unless the model is divided over processes and another one has captured none."""
        return found

    def _forward_as_foretold(
        self, signature: tuple[Any, ...], split: SplitBatch, side: Side, selected: dict[int, str], blocks: BlockOutput
    ) -> Captured | None:
        """Run the captured forward pass of a batch at whose width no sample was traced.

        Returns:
            The results of [`_forward`]; `None` if samples of other widths do not determine the trace, or if the batch
            does not confirm it. Then all is as it was before.
        """
        sample_trace = self._sample_traces.get(signature)
        if not self.foretells or split.size == 1 or (sample_trace is not None and not sample_trace.foretold):
            return None
        family, sizes = family_of(self._families, signature)
        sample_trace = sample_trace or family.foretell(sizes)
        if sample_trace is None:
            return None
        known = self._model_trace.copy()
        try:
            found = self._pass(split.rows(0, split.size), split.size, side, selected, sample_trace, blocks)
            if _taken_steps(found[0]) in family.orders:
                self._keep(signature, sample_trace)
                return found
            reason = "the batch takes another way through the model"
        except (RestartError, UnsupportedError, NotDeferrableError, GradientEngineError) as error:
            reason = str(error)
        logger.debug("A sample is traced at sizes %s: %s", sizes, reason)
        family.failures += 1
        self._model_trace = known
        self._sample_traces.pop(signature, None)
        return None

    def _learn(
        self, signature: tuple[Any, ...], size: int, sample_trace: SampleTrace, hooked_pass: HookedPass
    ) -> None:
        """Note what a traced sample and its batch say about other widths."""
        # a batch of one does not show where the batch is; blocks that run again see other calls than in this pass
        if not self.foretells or sample_trace.learned or size == 1 or hooked_pass.checkpointed:
            return
        family, sizes = family_of(self._families, signature)
        family.learn(sizes, sample_trace, _taken_steps(hooked_pass))
        sample_trace.learned = True

    def _forget(self, signature: tuple[Any, ...]) -> None:
        """Drop a trace that does not fit, and with it what was learned before more became known about the model."""
        self._sample_traces.pop(signature, None)
        self._families.clear()

    def _deferrable_head(self) -> torch.nn.Linear | None:
        return deferrable_head(self.model)

    def _deferring(self, size: int, receive: ReceiveHead | None = None) -> AbstractContextManager[Any]:
        """Return a context in which the logits of large batches are deferred, where the model allows that.

        Args:
            size: samples that pass through the model, where those of the batch decide.
            receive: see [`LinearHead`].
        """
        return nullcontext() if self._head is None else deferring(self._head, size / self._rows, receive)

    def _compute_logits(self, reason: NotDeferrableError) -> None:
        """Have logits computed from now on, because model or task needs them whole."""
        logger.info("The logits of %s are computed whole: %s.", type(self.model).__name__, reason)
        self.defers, self._head = False, None

    def _keep(self, signature: tuple[Any, ...], sample_trace: SampleTrace) -> None:
        """Keep the trace of one sample for batches of the same kind, and forget the oldest if there are too many."""
        self._sample_traces[signature] = sample_trace
        if len(self._sample_traces) > MAX_SAMPLE_TRACES:
            self._sample_traces.popitem(last=False)

    def _signature(self, split: SplitBatch, side: Side) -> tuple[Any, ...]:
        """Name the kind of a batch: batches of one kind share the trace of one sample."""
        tensors = tuple((key, tuple(t.shape[1:]), t.dtype) for key, t in split.mapped.items())
        constants = tuple(item for item in split.constant.items() if isinstance(item[1], bool | int | float | str))
        return side, self.model.training, tensors, constants

    def _pass(
        self,
        batch: Batch,
        size: int,
        side: Side,
        selected: dict[int, str],
        sample_trace: SampleTrace,
        blocks: BlockOutput | None,
    ) -> Any:
        """Run one forward pass under hooks and tracker.

        Returns:
            `None` for one sample that is traced (`blocks` is `None`); for a batch, the pass, f with its graph, and q.
        """
        task = self.modelout_fn
        assert isinstance(task, BatchedModelOutput)
        hooked_pass = HookedPass(self.model, selected, size, sample_trace, self._model_trace, blocks)
        hooked_pass.postpones = self.postpones
        if hooked_pass.tracing:
            batch = hooked_pass.marked(batch)
        elif not sample_trace.learned:
            hooked_pass.steps = []
        try:
            with self.watching(hooked_pass, selected), self._deferring(size):
                result = run_model(task, self.model, batch)
                output = one_per_sample(task.output(result, batch, side), size, task)
        except (torch.OutOfMemoryError, GradientEngineError):
            raise
        except RuntimeError as error:
            raise GradientEngineError(
                f"The forward pass of {type(self.model).__name__} failed under the hooked engine: {error}. If it "
                "succeeds without it, use the functional or the iterative engine."
            ) from error
        if hooked_pass.postponed is not None:
            raise hooked_pass.postponed
        if hooked_pass.tracing:
            return None
        return hooked_pass, output, task.out_to_loss_grad(result, batch, side).detach()

    def _fall_back(self, error: UnsupportedError, selected: dict[int, str]) -> None:
        """Have the smallest module around what is not supported replayed sample by sample from now on.

        If it is replayed already, the next larger one is. Where that would be the whole model, an operation on
        parameters is trapped: the gradient of its result is an error.

        Raises:
            GradientEngineError: it would be the whole model, and it is not about an operation on parameters.
        """
        known = self._model_trace.replayed
        name = _around(error)
        while name and name in known:
            name = name.rpartition(".")[0]
        module = self.model.get_submodule(name)
        while name and isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict | torch.nn.ParameterList):
            name = name.rpartition(".")[0]  # containers are never called
            module = self.model.get_submodule(name)
        inside = _owners(module, selected)
        # replaying nearly every layer would be the iterative engine by another name
        if not name or (inside > 8 and inside > 0.8 * _owners(self.model, selected)):
            self._trap(error)
            return
        logger.info("Module %r (%s) is differentiated sample by sample: %s.", name, type(module).__name__, error)
        known[name] = str(error)

    def _trap(self, error: UnsupportedError) -> None:
        """Let an operation pass that nothing can take apart, and make the gradient of its result an error.

        Raises:
            GradientEngineError: the error is not about an operation that can be trapped.
        """
        roots = error.roots if isinstance(error, ParameterUnsupportedError) else ()
        message = (
            f"The hooked engine has no way to take per-sample gradients of {', '.join(roots) or 'the parameters'} "
            f"in {type(self.model).__name__}: {error}. Use the functional or the iterative engine, or leave "
            f"{'them' if len(roots) != 1 else 'it'} out of `grad_wrt`."
        )
        if not isinstance(error, ParameterUnsupportedError) or error.operation is None:
            raise GradientEngineError(message) from error
        self._model_trace.trapped[error.operation] = message

    def _single(self, split: SplitBatch, blocks: BlockOutput, side: Side) -> BatchOutputs:
        """Take the gradient of a batch of one by plain autograd: the sum over the batch is the sample's own."""
        parameters = dict(self.model.named_parameters())
        wanted = [parameters[name] for name in self.layout.names]
        with differentiating(self.model, {id(p) for p in wanted}):
            try:
                output, q, deferred = self._single_outputs(split, blocks, side)
            except NotDeferrableError as error:
                self._compute_logits(error)
                output, q, deferred = self._single_outputs(split, blocks, side)
            if output.requires_grad:
                # a head emits in every backward pass, so that there must be exactly one
                gradients = (accumulated_gradients if deferred else gradients_of)(output.sum(), wanted)
                for slot, gradient in zip(self.layout.slots, gradients, strict=True):
                    if gradient is not None:
                        blocks.emit(slot.name, 0, gradient.reshape(1, -1))
        return BatchOutputs(output.detach(), q)

    def _single_outputs(self, split: SplitBatch, blocks: BlockOutput, side: Side) -> tuple[Tensor, Tensor, bool]:
        """Compute f, with its graph, and q of a batch of one, and tell whether a head will emit its gradients."""
        task, batch, receive = self.modelout_fn, split.rows(0, 1), None
        assert isinstance(task, BatchedModelOutput)
        selected = self._selected()
        found = {} if self._head is None else own_parameters(self._head)
        own = {name: selected[id(p)] for name, p in found.items() if id(p) in selected}
        if own:
            receive = partial(emit_slice, own, blocks, 1)
        with self._deferring(1, receive) as calls:
            result = run_model(task, self.model, batch)
            output = one_per_sample(task.output(result, batch, side), 1, task)
        return output, task.out_to_loss_grad(result, batch, side).detach(), bool(calls)


def _taken_steps(hooked_pass: HookedPass) -> Steps:
    """Return the steps of a forward pass, and stop noting any."""
    steps, hooked_pass.steps = hooked_pass.steps, None
    return tuple(steps or ())


def _around(error: UnsupportedError) -> str:
    """Name the smallest module around what is not supported; the empty name is the whole model."""
    if isinstance(error, ModuleUnsupportedError):
        return error.name
    if isinstance(error, ParameterUnsupportedError):
        owners = [root.rpartition(".")[0].split(".") for root in error.roots]
        common = takewhile(lambda parts: len(set(parts)) == 1, zip(*owners, strict=False))
        return ".".join(parts[0] for parts in common)
    return ""


def _owners(module: torch.nn.Module, selected: dict[int, str]) -> int:
    """Count the modules that have attributed parameters of their own."""
    return sum(any(id(p) in selected for p in own_parameters(m).values()) for m in module.modules())
