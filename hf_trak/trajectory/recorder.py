"""Watches a `Trainer` train, and writes the record of the run. Nothing that it does changes a bit of the training.

Row numbers are those that the trainer's own batch sampler draws, so that they are right for every sampling strategy,
several processes and a resumed run. What the loss was divided by is seen where the model is called.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.utils.data import BatchSampler, IterableDataset

from hf_trak.errors import ConfigMismatchError, HfTrakError, IncompleteStoreError
from hf_trak.gradient_computers.layout import ParameterLayout
from hf_trak.runtime.sharding import fsdp_modules, tensor_parallel_ranks
from hf_trak.runtime.zero import is_zero
from hf_trak.trajectory.dropout import dropout_of, random_state
from hf_trak.trajectory.hyperparameters import membership, optimizer_groups
from hf_trak.trajectory.record import RECORD_FILE, MicroBatch, RecordedStep, RunRecord, trained_weights
from hf_trak.weights.sharded import whole

logger = logging.getLogger(__name__)

_LEAVE_OUT = "Leave out `record=True` (a report of the training needs no record), or train without it."


class RunRecorder:
    """Writes the record of one run, as the events of its trainer come."""

    def __init__(self, directory: Path, every: int, overwrite: bool) -> None:
        """
        Args:
            directory: the directory of the record.
            every: steps from one recorded state to the next.
            overwrite: whether a run that starts from scratch replaces the record of an earlier one.
        """
        self.directory, self.every, self.overwrite = directory, every, overwrite
        self._record: RunRecord | None = None
        self._steps: list[RecordedStep] = []
        self._drawn: list[list[int]] = []
        self._place = self._skipped = 0
        self._passes: list[tuple[Tensor | None, Any, Tensor | None]] = []
        self._batches: list[tuple[list[int], Tensor | None, Any, Tensor | None]] = []
        self._numbers: tuple[list[float], Tensor] | None = None
        self._hooks: list[Any] = []
        self._random: Tensor | None = None
        self._ended = False
        self._lacking: set[str] | None = None
        self._warned = False

    def begin(
        self,
        model: torch.nn.Module,
        args: Any,
        state: Any,
        optimizer: Any,
        loader: Any,
        scheduler: Any,
        resumable: bool,
    ) -> None:
        """Describe the run, write its first state, and begin to watch.

        Args:
            model, args, state, optimizer, loader, scheduler: of the trainer.
            resumable: whether there are checkpoints, from which a run that was killed can go on.

        Raises:
            HfTrakError: the run leaves out layers at random, or cannot be recorded for another reason.
            ConfigMismatchError: the directory has the record of another run.
            IncompleteStoreError: the run is resumed from a step that is not recorded.
            StoreError: a file is damaged or cannot be written.
        """
        for hook in self._hooks:  # of a training that an error has ended
            hook.remove()
        check_run(model, args, loader, scheduler)
        check_moments(optimizer, state.global_step)
        layout = ParameterLayout.from_model(model)
        description = describe_run(model, args, optimizer, loader, layout)
        self._model, self._layout, self._optimizer = model, layout, optimizer
        self._inner, self._groups = getattr(optimizer, "optimizer", optimizer), description["groups"]
        self._main, self._world = state.is_world_process_zero, args.world_size
        self._load_best, self._planned = args.load_best_model_at_end, int(state.max_steps)
        self._place = self._skipped = 0
        if state.global_step and not args.ignore_data_skip:
            updates = max(1, math.ceil(len(loader) / args.gradient_accumulation_steps))
            self._skipped = state.global_step % updates * args.gradient_accumulation_steps
        weights = self._weights()
        if weights is not None:
            self._open(description, state.global_step, resumable, weights)
        self._steps.clear()
        self._passes.clear()
        self._batches.clear()
        self._random, self._ended, self._warned, self._lacking = None, False, False, None
        self._hooks = [model.register_forward_hook(self._after_forward, with_kwargs=True)]
        if description["dropout"]:
            self._hooks.append(model.register_forward_pre_hook(self._before_forward))
        _watch(_sampler(loader), self._begin_epoch)

    def _open(self, description: dict[str, Any], step: int, resumable: bool, weights: Tensor) -> None:
        """Open the record, and find or write the state that the run begins with."""
        if step == 0:
            if self.overwrite:
                for path in [*self.directory.glob("state-*.safetensors"), self.directory / RECORD_FILE]:
                    path.unlink(missing_ok=True)
            self._record = RunRecord.create(self.directory, description)
            later = [one for one in self._record.states() if one]
            if later and not resumable and self._is_unfinished(later[-1], weights):
                self._record.forget_after(0)
            elif later:
                raise ConfigMismatchError(
                    f"{self.directory} has the record of a run up to step {later[-1]}. Expected none when training "
                    "starts from scratch. Give this run another `TrakCallback(name=...)`, replace the record with "
                    "`TrakCallback(overwrite=True)`, or resume with `trainer.train(resume_from_checkpoint=True)`."
                )
            if not self._record.states():
                self._record.write(0, weights, [], self._planned)
                return
        else:
            if not (self.directory / RECORD_FILE).exists():
                raise IncompleteStoreError(
                    f"The training is resumed from step {step}, and its first steps were not recorded in "
                    f"{self.directory}. Expected a run that was recorded from its first step on. Train from scratch "
                    "(`trainer.train()`), or leave out `record=True`."
                )
            self._record = RunRecord.create(self.directory, description)
            self._record.forget_after(step)
            if step not in self._record.states():
                raise IncompleteStoreError(
                    f"{self.directory} has no state of step {step}, from which the training is resumed. Expected the "
                    f"record of the run that saved this checkpoint. Train from scratch. {_LEAVE_OUT}"
                )
            self._record.steps()
        if not torch.equal(self._record.weights(step), weights):
            raise ConfigMismatchError(
                f"The weights at step {step} are not those of the record in {self.directory}. Expected the same run. "
                "Give this run another `TrakCallback(name=...)`, or replace the record with "
                "`TrakCallback(overwrite=True)`."
            )

    def _is_unfinished(self, last: int, weights: Tensor) -> bool:
        """Tell whether the record is of the same run, killed before its end."""
        assert self._record is not None
        same = self._record.planned(last) == self._planned > last
        return same and torch.equal(self._record.weights(0), weights)

    def _weights(self) -> Tensor | None:
        """Return the weights to the main process. All call this together, since FSDP2 divides them over all."""
        own: dict[str, Tensor] = dict(self._model.named_parameters())
        if self._main:
            return trained_weights(own, self._layout)
        for name in self._layout.names:
            whole(own[name])
        return None

    # -- what happens in a step --------------------------------------------------------------------------------------

    def _begin_epoch(self) -> list[list[int]]:
        """Begin to note the batches that the sampler draws in an epoch."""
        self._drawn, self._place, self._skipped = [], self._skipped, 0
        return self._drawn

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        if module.training:
            self._random = random_state(next(module.parameters()).device).cpu()

    def _after_forward(self, module: torch.nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        if module.training:
            self._passes.append((_loss_of(output), kwargs.get("num_items_in_batch"), self._random))

    def pass_done(self) -> None:
        """Note the rows of a pass. Losses stay on their device until the step is done.

        Raises:
            HfTrakError: the batch did not come from the trainer's sampler.
        """
        if self._ended:
            return
        rows = self._drawn[self._place] if self._place < len(self._drawn) else []
        if not rows:
            raise HfTrakError(
                f"The trainer took batch {self._place} of an epoch, and its sampler has drawn {len(self._drawn)}. "
                f"Expected every batch to come from the sampler of the trainer's data loader. {_LEAVE_OUT}"
            )
        self._place += 1
        one = self._passes[0] if len(self._passes) == 1 else (None, None, None)
        self._passes.clear()
        self._batches.append((rows, *one))

    def before_update(self) -> None:
        """Note the learning rates and the norm of the gradient of the optimizer's next step."""
        if self._ended:
            return
        if changed := self._changed():
            self._stop()
            logger.warning(
                "%s. Expected nothing but learning rates to change in a recorded training. The record ends here, "
                "and the run cannot be replayed.",
                changed,
            )
            return
        rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        own = dict(self._model.named_parameters())
        found = [one for name in self._layout.names if (one := own[name].grad) is not None]
        lacking = {name for name in self._layout.names if own[name].grad is None}
        if self._lacking is not None and (odd := sorted(lacking ^ self._lacking)) and not self._warned:
            self._warned = True
            logger.warning(
                "%r has a gradient in some steps and none in others, where the optimizer leaves it and its moments "
                "alone. Expected one in every step or in none: a replay takes it for zero.",
                odd[0],
            )
        self._lacking = lacking
        norms = torch.stack([whole(one.detach().double().square().sum()) for one in found])
        self._numbers = rates, norms.sum().sqrt()

    def _stop(self) -> None:
        """End the record. The steps since the last state are not written any more."""
        self._ended = True
        self._steps.clear()
        self._batches.clear()
        self._passes.clear()
        for hook in self._hooks:
            hook.remove()

    def _changed(self) -> str:
        """Say what has changed since the run began; empty if nothing has that a replay takes for the same."""
        _, groups = optimizer_groups(self._inner)
        if len(groups) != len(self._groups):
            return f"The optimizer had {len(self._groups)} groups of parameters and has {len(groups)} now"
        for before, now in zip(self._groups, groups, strict=True):
            for name, value in now.items():
                if value != before[name]:
                    return f"`{name}` of the optimizer was {before[name]:g} and is {value:g} now"
        trained = {name for name, one in self._model.named_parameters() if one.requires_grad}
        if odd := sorted(trained ^ set(self._layout.names)):
            return f"The training has frozen or released {odd[0]!r}, with {len(odd) - 1} others"
        return ""

    def step_done(self, step: int, last: bool) -> None:
        """Note a step, and write the state where one is due.

        Args:
            step: number of steps taken.
            last: whether a state is due whatever the number.
        """
        if self._ended:
            return
        self.pass_done()
        assert self._numbers is not None
        batches = tuple(
            MicroBatch(tuple(rows), _number(loss), _number(items), random=random)
            for rows, loss, items, random in self._batches
        )
        self._batches.clear()
        rates, norm = self._numbers
        self._steps.append(RecordedStep(batches, tuple(rates), float(norm)))
        if last or step % self.every == 0:
            self.write(step)

    def write(self, step: int) -> None:
        """Write the state, and the steps since the one before. All processes call this together."""
        if not self._steps:
            return
        parts = gather_object([self._steps]) if self._world > 1 else [self._steps]
        weights = self._weights()
        if weights is not None:
            assert self._record is not None
            joined = [
                RecordedStep(tuple(batch for one in same for batch in one.batches), same[0].rates, same[0].norm)
                for same in zip(*parts, strict=True)
            ]
            self._record.write(step, weights, joined, self._planned)
        self._steps.clear()

    def end(self, step: int) -> None:
        """Write what is left, and stop watching."""
        if self._steps and self._load_best:
            logger.warning(
                "The last %d steps are not in the record, since the best weights were loaded again.", len(self._steps)
            )
        else:
            self.write(step)
        for hook in self._hooks:
            hook.remove()


def describe_run(
    model: torch.nn.Module, args: Any, optimizer: Any, loader: Any, layout: ParameterLayout
) -> dict[str, Any]:
    """Describe everything about a run that stays the same, as plain JSON.

    Raises:
        HfTrakError: the optimizer is none whose steps are known.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    kind, groups = optimizer_groups(inner)
    members = membership(inner, model, layout)
    own = dict(model.named_parameters())
    double = any(own[name].dtype == torch.float64 for name in layout.names)
    return {
        "accumulation": args.gradient_accumulation_steps,
        "across_devices": bool(args.average_tokens_across_devices),
        "bf16": bool(args.bf16),
        "dropout": bool(dropout_of(model)),
        "dtype": "float64" if double else "float32",
        "group_of": [int(members[slot.offset]) for slot in layout.slots],
        "groups": [dict(group) for group in groups],
        "kind": kind,
        "max_norm": args.max_grad_norm if (args.max_grad_norm or 0) > 0 else None,
        "parameters": [[slot.name, list(slot.shape)] for slot in layout.slots],
        "processes": args.world_size,
        "train_rows": len(loader.dataset),
    }


def check_moments(optimizer: Any, step: int) -> None:
    """Check that an optimizer has taken the steps of this run, and no others.

    Args:
        optimizer: the optimizer.
        step: the number of steps that the run has taken.

    Raises:
        HfTrakError: its moments are those of other steps.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    kept = list(inner.state.values())
    if isinstance(inner, torch.optim.SGD):
        moments = any(one.get("momentum_buffer") is not None for one in kept)
        right = moments == (step > 0 and any(group["momentum"] for group in inner.param_groups))
        said = "moments" if moments else "no moments"
    else:
        taken = max((int(one["step"]) for one in kept if "step" in one), default=0)
        right, said = taken == step, f"the moments of {taken} steps"
    if not right:
        raise HfTrakError(
            f"The optimizer has {said}, and the training begins at step {step}. Expected those of the steps of this "
            "run, which a replay follows from the first one on. Make a new trainer for a second training, or resume "
            "from a checkpoint that has its optimizer (`save_only_model=False`)."
        )


def check_run(model: torch.nn.Module, args: Any, loader: Any, scheduler: Any) -> None:
    """Check that a run can be recorded.

    Raises:
        HfTrakError: it leaves out layers, decomposes weights (DoRA), adds noise to embeddings, changes its momentum,
            divides its parameters, scales its gradients, or streams its rows.
    """
    scheduler = getattr(scheduler, "scheduler", scheduler)
    if getattr(scheduler, "cycle_momentum", False):
        raise HfTrakError(
            f"The scheduler is a {type(scheduler).__name__} with `cycle_momentum=True`, which changes more than the "
            "learning rates. Expected `cycle_momentum=False`. Set it, or leave out `record=True`."
        )
    settings: dict[str, Any] = getattr(getattr(model, "config", None), "to_dict", dict)()
    if left_out := {name: value for name, value in settings.items() if name.endswith("layerdrop") and value}:
        raise HfTrakError(
            f"The model leaves out whole layers at random ({left_out}). Expected dropout of single numbers at most, "
            "which can be drawn once more. Set it to 0 in the configuration of the model, or leave out `record=True`."
        )
    decomposed = [getattr(module, "use_dora", None) for module in model.modules()]
    if any(any(one.values()) for one in decomposed if isinstance(one, dict)):
        raise HfTrakError(
            "The model has weights that PEFT decomposes (`use_dora=True`), whose norms it leaves out of the gradient. "
            f"Expected gradients that have derivatives. Use LoRA. {_LEAVE_OUT}"
        )
    if args.neftune_noise_alpha:
        raise HfTrakError(
            f"`neftune_noise_alpha` is {args.neftune_noise_alpha}, which adds noise to embeddings. Expected `None`, "
            "since the noise cannot be drawn once more. Leave out `neftune_noise_alpha` or `record=True`."
        )
    if any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        raise HfTrakError(
            "The model has batch normalization, which mixes the rows of a batch. Expected a loss that is a sum over "
            f"rows. {_LEAVE_OUT}"
        )
    if tensor_parallel_ranks(model) or is_zero(model) or args.n_gpu > 1:
        raise HfTrakError(
            "Tensor parallelism or ZeRO-3 divides the parameters over processes, or the batch is divided over devices "
            f"of one. Expected one device for each process, with the whole model or its part of FSDP2. {_LEAVE_OUT}"
        )
    if args.bf16 and fsdp_modules(model):
        raise HfTrakError(
            "`bf16` is set for a model that FSDP2 divides, which rounds other numbers than a whole model does with "
            f"`bf16`. Expected float32. {_LEAVE_OUT}"
        )
    if args.fp16:
        raise HfTrakError(
            "`fp16` is set, which scales the loss and skips steps. Expected float32 or `bf16`. Set `bf16=True`, or "
            "leave out `record=True`."
        )
    half = [name for name, one in model.named_parameters() if one.requires_grad and one.itemsize < 4]
    if half:
        raise HfTrakError(
            f"The weights that are trained are {dict(model.named_parameters())[half[0]].dtype} ({half[0]!r}), whose "
            "rounding swallows small updates, so that steps have no derivative. Expected weights in float32, with "
            "which `bf16=True` computes in bfloat16. Load the model with `dtype=torch.float32`."
        )
    if isinstance(loader.dataset, IterableDataset) or not isinstance(_sampler(loader), BatchSampler):
        raise HfTrakError(
            "The training rows come from a stream, or from a loader without a batch sampler. Expected rows by number. "
            f"Load them as a `datasets.Dataset`. {_LEAVE_OUT}"
        )


def _sampler(loader: Any) -> Any:
    """Return what draws the batches of a loader."""
    sampler = getattr(loader, "sampler", None)
    return sampler if isinstance(sampler, BatchSampler) else getattr(loader, "batch_sampler", None)


def _watch(sampler: Any, begin: Callable[[], list[list[int]]]) -> None:
    """Make a batch sampler note what it draws. It stays the same object, which loaders compare and hold."""
    kind = type(sampler)
    kind = getattr(kind, "watched", kind)

    def drawn(self: Any) -> Iterator[Any]:
        return _noted(kind.__iter__(self), begin())

    sampler.__class__ = type(kind.__name__, (kind,), {"__iter__": drawn, "watched": kind})


def _noted(batches: Iterator[Any], notes: list[list[int]]) -> Iterator[Any]:
    for batch in batches:
        notes.append([int(row) for row in batch])
        yield batch


def _loss_of(output: Any) -> Tensor | None:
    found = output.get("loss") if isinstance(output, Mapping) else None
    if found is None and isinstance(output, tuple) and output:
        found = output[0]
    # a copy, since `Trainer` multiplies the loss in place by the number of processes
    return found.detach().clone() if isinstance(found, Tensor) and found.numel() == 1 else None


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
