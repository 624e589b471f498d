"""The choice of an engine, and its check on the first batch."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from hf_trak.errors import GradientEngineError, NonFiniteError, PeerProcessError
from hf_trak.gradient_computers.base import (
    AbstractGradientComputer,
    BatchOutputs,
    GradientSink,
    SplitBatch,
    is_out_of_memory,
)
from hf_trak.gradient_computers.engine_check import (
    KEPT_BYTES,
    BatchIndependence,
    ForwardedPass,
    KeptPass,
    RenewableSink,
    check_against,
)
from hf_trak.gradient_computers.functional import FunctionalGradientComputer
from hf_trak.gradient_computers.hooked.computer import HookedGradientComputer
from hf_trak.gradient_computers.iterative import IterativeGradientComputer
from hf_trak.gradient_computers.padding import CollatedAlone, PaddingSearch, RowAlone
from hf_trak.gradient_computers.self_check import Reference, Samples, reference_of
from hf_trak.modelout_functions.base import AbstractModelOutput, Batch, BatchedModelOutput, Side
from hf_trak.modelout_functions.deferred_logits import in_chunks

logger = logging.getLogger(__name__)

ENGINES: dict[str, Callable[..., AbstractGradientComputer]] = {
    "hooked": HookedGradientComputer,
    "functional": FunctionalGradientComputer,
    "iterative": IterativeGradientComputer,
}
"""The engines by name, in the order in which `auto` tries them."""

_NOT_OF_ENGINES = (NonFiniteError, PeerProcessError, OSError, MemoryError)  # a TimeoutError is an OSError


def engines_of(engine: str) -> tuple[str, ...]:
    """List the engines that a choice allows: all of them in order for `"auto"`.

    Raises:
        ValueError: `engine` is no name of an engine.
    """
    if engine != "auto" and engine not in ENGINES:
        raise ValueError(f"`engine` is {engine!r}; expected 'auto' or one of {list(ENGINES)}.")
    return tuple(ENGINES) if engine == "auto" else (engine,)


class AutoGradientComputer(AbstractGradientComputer):
    """Tries engines in order, and keeps the first whose gradients are those of plain autograd on each sample alone.

    The check takes two samples of the first batch (and of the first batch of another kind: another side, other keys).
    It costs one forward and backward pass of each of the two samples; in half precision, another two of each, to
    measure what rounding does. Where all gradients of the batch take more than [`KEPT_BYTES`], and the sink is no
    [`RenewableSink`], the batch is passed through the model once more.

    A batch that is already padded does not show what padding does to a sample. Callers that can collate a row alone
    set `collated_alone` before each batch: then the first padded row that is found (see `padding`) is compared with
    itself alone, in the first batch or a later one.

    Attributes:
        engine (`str`, *optional*):
            Name of the engine in use. `None` before the first batch.
        collated_alone (`Callable[[int], Batch]`, *optional*):
            Returns, for a position within the batch that comes next, the batch that the data collator makes of that
            row alone, on the same device. Called for few rows.
        half_precision (`bool`, *optional*):
            Whether the forward pass was seen to compute in half precision, also under an autocast that the model
            itself switches on. `None` before the first check.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        task: AbstractModelOutput,
        grad_dim: int | None = None,
        dtype: torch.dtype | None = torch.float16,
        device: torch.device | str | None = "cuda",
        grad_wrt: Iterable[str] | None = None,
        engines: Sequence[str] = tuple(ENGINES),
        self_check: bool = True,
        max_block_bytes: int | None = None,
    ) -> None:
        """
        Args:
            model (`torch.nn.Module`):
                The model whose parameters are differentiated.
            task ([`AbstractModelOutput`]):
                The model output function.
            grad_dim (`int`, *optional*):
                P, the number of attributed parameters. `None` counts them.
            dtype (`torch.dtype`, *optional*, defaults to `torch.float16`):
                Dtype in which gradients are returned. `None` keeps that of the parameters.
            device (`torch.device` or `str`, *optional*, defaults to `"cuda"`):
                Device of the returned gradients, not touched before the first batch. `None` keeps that of the
                parameters.
            grad_wrt (`Iterable[str]`, *optional*):
                Names of the parameters to attribute, see [`ParameterLayout.from_model`]. `None` takes those with
                `requires_grad`.
            engines (`Sequence[str]`, *optional*, defaults to `("hooked", "functional", "iterative")`):
                Names from [`ENGINES`] in the order in which they are tried.
            self_check (`bool`, *optional*, defaults to `True`):
                Whether to compare two samples of the first batch with plain autograd.
            max_block_bytes (`int`, *optional*):
                See [`HookedGradientComputer`]. The other engines do not cut parameters into slices.

        Raises:
            ValueError: an unknown engine; `max_block_bytes` is not positive; `grad_dim` is not the number of
                attributed parameters; `grad_wrt` does not fit the model.
        """
        super().__init__(model, task, grad_dim, dtype, device, grad_wrt)
        unknown = [name for name in engines if name not in ENGINES]
        if unknown or not engines:
            raise ValueError(f"`engines` is {list(engines)}; expected names from {list(ENGINES)}.")
        if max_block_bytes is not None and max_block_bytes <= 0:
            raise ValueError(f"`max_block_bytes` is {max_block_bytes}; expected a positive number of bytes.")
        self.max_block_bytes = max_block_bytes
        self.self_check = self_check
        self.engine: str | None = None
        self.collated_alone: CollatedAlone | None = None
        self.half_precision: bool | None = None
        self.engines = tuple(engines)
        self._remaining = list(engines)
        self._explicit = len(engines) == 1
        self._announced: str | None = None
        self._computer: AbstractGradientComputer | None = None
        self._checked: set[tuple[object, ...]] = set()
        self._padding: dict[tuple[object, ...], PaddingSearch] = defaultdict(PaddingSearch)
        self._refusals: list[str] = []
        self._again = False
        self._kept: KeptPass | None = None

    def use(self, engine: str | None) -> None:
        """Take an engine that has been checked on another task of the same model, and check it no more.

        Args:
            engine (`str`, *optional*):
                The name of the engine; `None` leaves the choice as it is.
        """
        if engine is not None:
            self.self_check = False
            self.engines = (engine,)
            self._remaining = [engine]

    def check_again(self) -> None:
        """Check the next batch, whatever was checked before it. No other engine takes the place of one that fails."""
        self._again = True

    def load_model_params(self, model: torch.nn.Module) -> None:
        self.model = model
        if self._computer is not None:
            self._computer.load_model_params(model)

    def compute_per_sample_grad(self, batch: Batch) -> dict[str, Tensor] | Tensor:
        return self._ready(batch, "train").compute_per_sample_grad(batch)

    def compute_loss_grad(self, batch: Batch) -> Tensor:
        if self._computer is not None:
            return self._computer.compute_loss_grad(batch)
        return super().compute_loss_grad(batch)

    def stream(self, batch: Batch, sink: GradientSink, side: Side = "train") -> BatchOutputs:
        computer = self._ready(batch, side, sink)
        kept, self._kept = self._kept, None
        outputs = None if kept is None else kept.hand_on()
        return computer.stream(batch, sink, side) if outputs is None else outputs

    def _ready(self, batch: Batch, side: Side, sink: GradientSink | None = None) -> AbstractGradientComputer:
        """Choose and check the engine for this batch, and keep the checked pass for the sink if that can be done."""
        split = SplitBatch.of(batch)
        # a batch of one cannot show that samples mix, so a larger one is checked again
        kind = (side, split.keys, split.size > 1)
        search = self._padding[kind]
        apart: RowAlone | None = None
        if self.self_check and self.collated_alone is not None and not search.finished:
            apart = search.look(split, self.collated_alone)
        known = kind in self._checked
        again, self._again = self._again and known, False
        if self._computer is not None and (not self.self_check or (known and apart is None and not again)):
            return self._computer
        samples = Samples.of(batch, side, apart)
        reference = self._reference(samples) if self.self_check else None
        kept = None if reference is None else self._keeping(sink, split.size)
        computer = self._chosen(reference, samples, kept, again)
        self._kept = kept
        if reference is not None:
            self._checked.add(kind)
            search.finished |= apart is not None and apart.padded and apart.row in reference.rows
        if self._announced != self.engine:
            self._announced = self.engine
            self._announce()
        return computer

    def _keeping(self, sink: GradientSink | None, size: int) -> KeptPass | None:
        """Make what takes the gradients of a checked pass for the sink: they wait, or go on where it can forget them.

        Returns:
            [`KeptPass`] or `None`: `None` if they are not as the sink wants them, or too many to wait.
        """
        if sink is None or self.dtype is not None:
            return None
        if isinstance(sink, RenewableSink):
            return ForwardedPass(sink, self.device)
        row_bytes = self.layout.gradient_bytes(dict(self.model.named_parameters()))
        return KeptPass(sink, self.device) if size * row_bytes <= KEPT_BYTES else None

    def _chosen(
        self, reference: Reference | None, samples: Samples, kept: KeptPass | None, again: bool
    ) -> AbstractGradientComputer:
        """Return the engine in use, or the next one unless `again`, that has the gradients of the reference."""
        independence = None
        if reference is not None:
            independence = BatchIndependence(reference, samples, self.modelout_fn, self.model)
        while True:
            try:
                computer = self._computer or self._next()
                if reference is None or independence is None:
                    return computer
                if not isinstance(computer, HookedGradientComputer):  # they may take samples one at a time
                    independence.require()
                self._check(computer, reference, samples, independence, kept)
                return computer
            except Exception as error:  # an engine may fail in any way; plain autograd has just not failed
                failure = error
            if isinstance(kept, ForwardedPass) and kept.failure is not None:
                raise kept.failure
            if independence is not None and not (is_out_of_memory(failure) or isinstance(failure, _NOT_OF_ENGINES)):
                independence.require()  # is it the batch that is wrong?
            if again:
                raise failure
            self._refuse(failure)

    def _refuse(self, error: Exception) -> None:
        """Go on to the next engine, and keep the reason for the log.

        Raises:
            GradientEngineError: the engine was chosen by name, or no other is left.
            Exception: the error itself, if it is not the engine's: memory or time ran out, the system or another
                process failed, or a gradient is not finite.
        """
        if is_out_of_memory(error) or isinstance(error, _NOT_OF_ENGINES):
            raise error  # another engine would be slower, not more right
        unexpected = not isinstance(error, GradientEngineError)
        reason = f"{type(error).__name__}: {error}" if unexpected else str(error)
        if self._explicit:
            if not unexpected:
                raise error
            raise GradientEngineError(
                f"The {self.engine} engine failed on {type(self.model).__name__}, which plain autograd on single "
                f'samples did not: {reason}. Use engine="auto", or another one of {list(ENGINES)}.'
            ) from error
        if unexpected:
            logger.debug("The %s engine failed.", self.engine, exc_info=error)
        self._refusals.append(f"{self.engine}: {reason}")
        self._computer = None
        if not self._remaining:
            raise GradientEngineError(
                f"No engine takes correct per-sample gradients of {type(self.model).__name__}:\n"
                + "\n".join(self._refusals)
            ) from error

    def _reference(self, samples: Samples) -> Reference | None:
        """Take the gradients by plain autograd.

        An error here is about the model or the batch, and no other engine is tried.
        """
        return in_chunks(self.model, lambda: self._plain_reference(samples))

    def _plain_reference(self, samples: Samples) -> Reference | None:
        plain = self._make("iterative", dtype=None)
        assert isinstance(plain, IterativeGradientComputer)
        reference = reference_of(plain, samples, observe=self.half_precision is not False)
        if reference is not None:
            self.half_precision = reference.tolerance.ceiling is not None
        return reference

    def _announce(self) -> None:
        """Log which engine is used: as a warning, with the reason, where a faster one was refused."""
        name = type(self.model).__name__
        if not self._refusals:
            logger.info("Per-sample gradients of %s by the %s engine.", name, self.engine)
            return
        cost = ", one forward and one backward pass per sample" if self.engine == "iterative" else ""
        logger.warning(
            "Per-sample gradients of %s by the slower %s engine%s. Refused: %s",
            name,
            self.engine,
            cost,
            " | ".join(self._refusals),
        )

    def _check(
        self,
        computer: AbstractGradientComputer,
        reference: Reference,
        samples: Samples,
        independence: BatchIndependence,
        kept: KeptPass | None,
    ) -> None:
        """Run [`check_against`] at the precision of the parameters rather than that of the features."""
        wanted = computer.dtype, computer.device
        computer.dtype = computer.device = None
        try:
            check_against(reference, computer, samples, self.engine or "", independence, kept)
        finally:
            computer.dtype, computer.device = wanted

    def _next(self) -> AbstractGradientComputer:
        """Make the engine that comes next."""
        self.engine = self._remaining.pop(0)
        self._computer = self._make(self.engine, self.dtype)
        return self._computer

    def _make(self, name: str, dtype: torch.dtype | None) -> AbstractGradientComputer:
        """Make an engine by name."""
        computer = ENGINES[name](self.model, self.modelout_fn, self.grad_dim, dtype, self.device, self.grad_wrt)
        if isinstance(computer, HookedGradientComputer):
            computer.max_block_bytes = self.max_block_bytes
        if isinstance(computer, IterativeGradientComputer) and not isinstance(self.modelout_fn, BatchedModelOutput):
            # chosen by name, the iterative engine calls a task without a batched form as in the `trak` API; as a
            # stand-in or reference for the functional engine, it calls it as that one would
            computer.sample_form = self.engines != ("iterative",)
        return computer


def make_gradient_computer(
    engine: str,
    model: torch.nn.Module,
    task: AbstractModelOutput,
    grad_wrt: Iterable[str] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    self_check: bool = True,
    max_block_bytes: int | None = None,
) -> AutoGradientComputer:
    """Make a gradient computer by name. It checks itself on the first batch.

    Args:
        engine (`str`):
            `"auto"` tries the engines of [`ENGINES`] in order. A name takes that one alone, and raises where it fails
            the check.
        model (`torch.nn.Module`):
            The model.
        task ([`AbstractModelOutput`]):
            The model output function.
        grad_wrt (`Iterable[str]`, *optional*):
            Names of the parameters to attribute. `None` takes those with `requires_grad`.
        dtype (`torch.dtype`, *optional*):
            Dtype of the gradients. `None` keeps that of the parameters.
        device (`torch.device` or `str`, *optional*):
            Device of the gradients. `None` keeps that of the parameters.
        self_check (`bool`, *optional*, defaults to `True`):
            Whether to compare two samples of the first batch with plain autograd on each alone.
        max_block_bytes (`int`, *optional*):
            Bytes of a block of gradients at which the hooked engine cuts large parameters into slices. `None` is
            32 MiB, and 256 MiB on a GPU.

    Returns:
        [`AutoGradientComputer`]: the gradient computer.

    Raises:
        ValueError: an unknown engine; `max_block_bytes` is not positive; `grad_wrt` does not fit the model.
    """
    return AutoGradientComputer(
        model, task, None, dtype, device, grad_wrt, engines_of(engine), self_check, max_block_bytes
    )
