"""The hooked engine: one forward and one backward pass of the batch, per-sample gradients layer by layer on the way
back."""

import logging
from collections import OrderedDict
from collections.abc import Iterable
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from hf_trak.errors import GradientEngineError
from hf_trak.gradient_computers.base import AbstractGradientComputer, BatchOutputs, GradientSink
from hf_trak.gradient_computers.batches import SplitBatch
from hf_trak.gradient_computers.environment import only_differentiating, pass_settings
from hf_trak.gradient_computers.hooked.batch_axis import UnsupportedError
from hf_trak.gradient_computers.hooked.hooks import LayerHooks
from hf_trak.gradient_computers.hooked.opened import opened_backward
from hf_trak.gradient_computers.hooked.outer import OuterBlock, OuterSink
from hf_trak.gradient_computers.hooked.session import (
    Knowledge,
    ModuleUnsupportedError,
    ParameterUnsupportedError,
    Session,
)
from hf_trak.gradient_computers.hooked.tracker import ParameterTracker, Profile, RestartError
from hf_trak.gradient_computers.hooked.workspace import TakesOuter, Workspace, default_block_bytes
from hf_trak.gradient_computers.outputs import call_model, gradients_of, one_per_sample
from hf_trak.modelout_functions.base import AbstractModelOutput, Batch, BatchedModelOutput, Side

logger = logging.getLogger(__name__)

MAX_RESTARTS = 200
MAX_PROFILES = 256


class HookedGradientComputer(AbstractGradientComputer):
    """Per-sample gradients at the price of one forward and one backward pass.

    Parameters are frozen for the pass, so that autograd never forms batched weight gradients; what it still computes
    are the gradients of activations. Each layer's input is kept, and when the gradient of its output arrives, a rule
    turns the two into the layer's per-sample gradients, which go to the sink and are freed.

    Before the first batch of a new shape, one sample passes through the model alone. Comparing shapes tells which
    dimension carries the batch in everything that follows, see `axes`.

    Attributes:
        max_block_bytes (`int | None`): bytes of a block at which large parameters (embeddings, LM heads) are cut into
            slices; `None` is 32 MiB, and 256 MiB on a GPU.
    """

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
        """See [`AbstractGradientComputer`].

        Args:
            max_block_bytes: see the attribute; a block is never smaller than one row of a parameter.

        Raises:
            GradientEngineError: the task has no batched form.
            ValueError: `max_block_bytes` is not positive.
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
        self._knowledge = Knowledge()
        self._profiles: OrderedDict[Any, Profile] = OrderedDict()
        self.load_model_params(model)

    def load_model_params(self, model: torch.nn.Module) -> None:
        if model is not self.model:
            self._profiles.clear()
            self._knowledge = Knowledge()
        self.model = model

    def compute_per_sample_grad(self, batch: Batch) -> dict[str, Tensor]:
        """Gradients of f of every sample, by parameter name, shapes `(B, *shape)`, in `dtype` on `device`.

        Raises:
            GradientEngineError: the model uses a parameter in a way that has neither a rule nor a fallback.
        """
        size = SplitBatch.of(batch).size
        parameters = dict(self.model.named_parameters())
        whole = {
            slot.name: torch.zeros(
                size,
                slot.numel,
                dtype=self.dtype or parameters[slot.name].dtype,
                device=self.device or parameters[slot.name].device,
            )
            for slot in self.layout.slots
        }

        def emit(name: str, start: int, block: Tensor) -> None:
            target = whole[name][:, start : start + block.shape[1]]
            target += block.to(target.device)

        self._run(batch, emit, "train")
        return {slot.name: whole[slot.name].view(size, *slot.shape) for slot in self.layout.slots}

    def compute_loss_grad(self, batch: Batch) -> Tensor:
        weights, buffers = dict(self.model.named_parameters()), dict(self.model.named_buffers())
        with pass_settings(self.model), torch.no_grad():
            return self.modelout_fn.get_out_to_loss_grad(self.model, weights, buffers, batch)

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

    def _run(self, batch: Batch, emit: Any, side: Side, takes_outer: TakesOuter | None = None) -> BatchOutputs:
        split = SplitBatch.of(batch)
        if split.size == 1:
            return self._single(split, emit, side)
        block_bytes = self.max_block_bytes
        if block_bytes is None:
            block_bytes = default_block_bytes(next(self.model.parameters()).device)
        if self._workspace.max_block_bytes != block_bytes:
            self._workspace = Workspace(block_bytes)
        self._workspace.takes_outer = takes_outer
        selected = self._selected()
        with only_differentiating(self.model, ()), pass_settings(self.model), torch.enable_grad():
            session, output, q = self._forward(split, side, selected, emit)
            try:
                if output.requires_grad:
                    hooks = LayerHooks(self.model, session, selected)
                    # checkpointed blocks run forward again during the backward pass, and need to be seen as before
                    with hooks.attached(), ParameterTracker(session):
                        opened_backward((output.sum(),))
            except (torch.OutOfMemoryError, GradientEngineError):
                raise
            except (UnsupportedError, RestartError, RuntimeError) as error:
                raise GradientEngineError(
                    f"The hooked engine lost track of {type(self.model).__name__} in its backward pass: {error}. Use "
                    "another engine."
                ) from error
            leaked = [name for name, tensor in session.stand_ins.items() if tensor.grad is not None]
        if leaked:
            raise GradientEngineError(
                f"The gradient of parameter {leaked[0]!r} arrived summed over the batch: it is used by an operation "
                "that the hooked engine does not see. Use the functional or the iterative engine, or leave it out "
                "of `grad_wrt`."
            )
        return BatchOutputs(output.detach(), q)

    def _selected(self) -> dict[int, str]:
        parameters = dict(self.model.named_parameters())
        return {id(parameters[name]): name for name in self.layout.names}

    def _forward(
        self, split: SplitBatch, side: Side, selected: dict[int, str], emit: Any
    ) -> tuple[Session, Tensor, Tensor]:
        """The captured forward pass of the batch, after as many passes of one sample as it takes to understand it."""
        signature = (
            side,
            self.model.training,
            tuple((key, tuple(t.shape[1:]), t.dtype) for key, t in split.mapped.items()),
            tuple(
                (key, value) for key, value in split.constant.items() if isinstance(value, bool | int | float | str)
            ),
        )
        for _ in range(MAX_RESTARTS):
            profile = self._profiles.get(signature)
            fresh = profile is None
            try:
                if profile is None:
                    profile = Profile()
                    self._pass(split.rows(0, 1), 1, side, selected, profile, None)
                    self._profiles[signature] = profile
                    if len(self._profiles) > MAX_PROFILES:
                        self._profiles.popitem(last=False)
                return self._pass(split.rows(0, split.size), split.size, side, selected, profile, emit)
            except RestartError:
                self._profiles.pop(signature, None)
            except UnsupportedError as error:
                self._profiles.pop(signature, None)
                if fresh:  # otherwise another sample may just take another way through the model: look again
                    self._fall_back(error, selected)
        raise GradientEngineError(
            f"The hooked engine cannot make out how {type(self.model).__name__} handles the batch: what it sees "
            "changes from pass to pass. Use the functional or the iterative engine."
        )

    def _pass(self, batch: Batch, size: int, side: Side, selected: dict[int, str], profile: Profile, emit: Any) -> Any:
        task = self.modelout_fn
        assert isinstance(task, BatchedModelOutput)
        calibrating = emit is None
        session = Session(self.model, selected, size, profile, self._knowledge, calibrating, emit, self._workspace)
        if calibrating:
            batch = session.marked(batch)
        try:
            with LayerHooks(self.model, session, selected).attached(), ParameterTracker(session):
                result = call_model(task, self.model, batch)
                output = one_per_sample(task.output(result, batch, side), size, task)
        except (torch.OutOfMemoryError, GradientEngineError):
            raise
        except RuntimeError as error:
            raise GradientEngineError(
                f"The forward pass of {type(self.model).__name__} failed under the hooked engine: {error}. If it "
                "succeeds without it, use the functional or the iterative engine."
            ) from error
        if calibrating:
            return None
        return session, output, task.out_to_loss_grad(result, batch, side).detach()

    def _fall_back(self, error: UnsupportedError, selected: dict[int, str]) -> None:
        """Have the smallest enclosing module that is not yet replayed replayed sample by sample.

        Where that would be the whole model, an operation on parameters is trapped: the gradient of its result is an
        error.

        Raises:
            GradientEngineError: it would be the whole model, and it is not about an operation on parameters.
        """
        known = self._knowledge.replayed
        roots: tuple[str, ...] = ()
        if isinstance(error, ModuleUnsupportedError):
            name = error.name
        elif isinstance(error, ParameterUnsupportedError):
            roots = error.roots
            owners = [root.rpartition(".")[0].split(".") for root in roots]
            common = takewhile(lambda parts: len(set(parts)) == 1, zip(*owners, strict=False))
            name = ".".join(parts[0] for parts in common)
        else:
            name = ""
        while name and name in known:
            name = name.rpartition(".")[0]
        module = self.model.get_submodule(name)
        while name and isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict | torch.nn.ParameterList):
            name = name.rpartition(".")[0]  # containers are never called
            module = self.model.get_submodule(name)
        inside = _owners(module, selected)
        # replaying nearly every layer would be the iterative engine by another name
        if not name or (inside > 8 and inside > 0.8 * _owners(self.model, selected)):
            message = (
                f"The hooked engine has no way to take per-sample gradients of {', '.join(roots) or 'the parameters'} "
                f"in {type(self.model).__name__}: {error}. Use the functional or the iterative engine, or leave "
                f"{'them' if len(roots) != 1 else 'it'} out of `grad_wrt`."
            )
            if isinstance(error, ParameterUnsupportedError) and error.operation is not None:
                self._knowledge.trapped[error.operation] = message
                return
            raise GradientEngineError(message) from error
        logger.info("Module %r (%s) is differentiated sample by sample: %s.", name, type(module).__name__, error)
        known[name] = str(error)

    def _single(self, split: SplitBatch, emit: Any, side: Side) -> BatchOutputs:
        """A batch of one: what arrives summed over the batch is the sample's own gradient."""
        task = self.modelout_fn
        assert isinstance(task, BatchedModelOutput)
        parameters = dict(self.model.named_parameters())
        wanted = [parameters[name] for name in self.layout.names]
        batch = split.rows(0, 1)
        with (
            only_differentiating(self.model, {id(p) for p in wanted}),
            pass_settings(self.model),
            torch.enable_grad(),
        ):
            result = call_model(task, self.model, batch)
            output = one_per_sample(task.output(result, batch, side), 1, task)
            if output.requires_grad:
                gradients = gradients_of(output.sum(), wanted)
                for slot, gradient in zip(self.layout.slots, gradients, strict=True):
                    if gradient is not None:
                        emit(slot.name, 0, gradient.reshape(1, -1))
        return BatchOutputs(output.detach(), task.out_to_loss_grad(result, batch, side).detach())


def _owners(module: torch.nn.Module, selected: dict[int, str]) -> int:
    """How many modules have attributed parameters of their own."""
    return sum(any(id(p) in selected for p in m._parameters.values()) for m in module.modules())
