"""A `Trainer` callback that keeps the checkpoints of a training run as an ensemble."""

import copy
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState
from datasets import Dataset as HFDataset
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, PrinterCallback, ProgressCallback
from transformers.trainer_utils import SaveStrategy

from hf_trak.attributor import TrakAttributor
from hf_trak.config import TrakConfig, checked_args
from hf_trak.errors import HfTrakError
from hf_trak.evaluation.validation_loss import require_loss
from hf_trak.identity.collation import random_state_kept
from hf_trak.modelout_functions import AbstractModelOutput
from hf_trak.report.training import TrainingReport
from hf_trak.runtime.arguments import named_arguments
from hf_trak.runtime.checks import checked_int, is_int
from hf_trak.runtime.progress import say
from hf_trak.store.atomic import safe_name
from hf_trak.trajectory.recorder import RunRecorder
from hf_trak.weights.checkpoints import INDEX_FILES, WEIGHT_FILES, read_weight_index

logger = logging.getLogger(__name__)

_STEP = re.compile(r"checkpoint-(\d+)")
_UNFINISHED = ".unfinished-"
_DESCRIPTIONS = ("config.json", "adapter_config.json", "trainer_state.json")


@named_arguments
class TrakCallback(TrainerCallback):
    """Collects the checkpoints that a training run saves, and can featurize them when it ends.

    ```python
    callback = TrakCallback(TrakConfig(output_dir="trak"), last=3)
    trainer = Trainer(..., callbacks=[callback])
    trainer.train()
    attributor = TrakAttributor.from_trainer(trainer, args=callback.args).featurize(callback.checkpoints)
    ```

    Weights are saved in `<output_dir>/ensemble/<name>/checkpoint-<step>/`, where `save_total_limit` does not delete
    them. `.safetensors` files are hard links to those of the trainer: they take no space until the trainer deletes its
    own, and safetensors never writes into a file that exists. Other files, and all files where the file system has no
    hard links, are copied. Optimizer states are left out.

    Training is bit-for-bit identical with and without the callback: it draws no random number, and `featurize_at_end`
    restores weights, modes and the states of all random generators.

    A run that is resumed from a checkpoint keeps what was collected up to that step, collects what the trainer's
    directory still has, and drops later steps, which are trained again.

    Independently trained models make an ensemble, too (usually a better one, TRAK paper, Section 5): give each run a
    `name`, and featurize the `checkpoints` of all callbacks together. With `featurize_at_end`, give each run the
    `first_model_id` that follows the last one of the previous run.

    Args:
        args ([`TrakConfig`], *optional*):
            Configuration of the attribution; checkpoints are collected in its `output_dir`. By default
            `TrakConfig()`.
        last (`int`, *optional*):
            Number of checkpoints to keep; older ones are dropped. By default all are kept.
        steps (`Sequence[int]`, *optional*):
            Steps whose checkpoints are kept. The trainer saves them even where it would not by itself. By default
            every checkpoint that the trainer saves is kept.
        name (`str`, *optional*, defaults to `"run"`):
            Name of this run's directory, a different one for each run that shares `output_dir`.
        overwrite (`bool`, *optional*, defaults to `False`):
            Whether a run that starts from scratch may replace the checkpoints and the record of an earlier one.
        record (`bool`, *optional*, defaults to `False`):
            Whether to record the run for `Replay(of="run")`, in `<output_dir>/trajectory/<name>/`: the trained weights
            and, for every step, the numbers of its rows, learning rates and the norm of the gradient.
        every (`int`, *optional*, defaults to 1):
            Steps from one recorded state of the weights to the next. Fewer states take less space and tell less.
        trainer (`transformers.Trainer`, *optional*):
            The trainer, which `featurize_at_end` needs. Add the callback with `trainer.add_callback` then.
        featurize_at_end (`bool`, *optional*, defaults to `False`):
            Whether to featurize the training dataset for the collected checkpoints when training ends. The result is
            in `attributor`.
        report (`bool`, *optional*, defaults to `False`):
            Whether to write `<output_dir>/training_report.html` when training ends: what the training rows did to the
            loss of the trainer's `eval_dataset`, see [`~hf_trak.report.training_report`]. It needs `trainer`, and is
            best with `record=True`: the run is replayed then, for five to ten times as long as it took
            (`benchmarks/pages/replay_cost.md`). The trainer logs its tables where it reports to (`report_to`).
        first_model_id (`int`, *optional*, defaults to 0):
            Id of the first checkpoint in the feature store; the others follow.
        task (`str`, `AbstractModelOutput` or `Callable`, *optional*):
            Model output function, see [`TrakAttributor`].

    Attributes:
        checkpoints (`list[str]`):
            Paths of the collected checkpoints, by step, for `TrakAttributor.featurize`.
        attributor ([`TrakAttributor`] or `None`):
            After training with `featurize_at_end`: ready to `attribute`.
        report (`TrainingReport` or `None`):
            After training with `report=True`: what the page shows.

    Raises:
        ValueError: an argument is out of range, or `featurize_at_end` or `report` is set without a trainer.
        TypeError: `args` is not a `TrakConfig`.
    """

    def __init__(
        self,
        args: TrakConfig | None = None,
        *,
        last: int | None = None,
        steps: Sequence[int] | None = None,
        name: str = "run",
        overwrite: bool = False,
        record: bool = False,
        every: int = 1,
        trainer: Any = None,
        featurize_at_end: bool = False,
        report: bool = False,
        first_model_id: int = 0,
        task: str | AbstractModelOutput | Callable[..., Tensor] | None = None,
    ) -> None:
        if last is not None and not is_int(last, 1):
            raise ValueError(f"`last` is {last!r}. Expected a number of checkpoints of at least 1, or `None` for all.")
        known = isinstance(steps, Iterable) and all(is_int(step, 1) for step in steps) and bool(steps)
        if steps is not None and not known:
            raise ValueError(f"`steps` is {steps!r}. Expected step numbers of at least 1, or `None` for every save.")
        if featurize_at_end and trainer is None:
            raise ValueError(
                "`featurize_at_end` is set without a `trainer`. Expected the trainer, whose training dataset and "
                "collator are needed: `trainer.add_callback(TrakCallback(args, trainer=trainer, "
                "featurize_at_end=True))`."
            )
        if report and trainer is None:
            raise ValueError(
                "`report` is set without a `trainer`. Expected the trainer, whose rows are reported: "
                "`trainer.add_callback(TrakCallback(args, trainer=trainer, record=True, report=True))`."
            )
        self.args = checked_args(args)
        self.last = last
        self.steps = None if steps is None else frozenset(steps)
        self.directory = Path(self.args.output_dir) / "ensemble" / safe_name(name, "name")
        self.overwrite = overwrite
        every = checked_int(every, "every", 1, type_error=ValueError)
        place = Path(self.args.output_dir) / "trajectory" / name
        self._recorder = RunRecorder(place, every, overwrite) if record else None
        self.trainer = trainer
        self.featurize_at_end = featurize_at_end
        self.first_model_id = first_model_id
        self.task = task
        self.attributor: TrakAttributor | None = None
        self.report: TrainingReport | None = None
        self._reports = report

    @property
    def checkpoints(self) -> list[str]:
        """Return the paths of the collected checkpoints by step, for `TrakAttributor.featurize`."""
        return [str(self.directory / f"checkpoint-{step}") for step in self._collected()]

    def _collected(self) -> list[int]:
        if not self.directory.is_dir():
            return []
        matches = (_STEP.fullmatch(path.name) for path in self.directory.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    # -- events ------------------------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check that there will be checkpoints to collect, and drop collected ones that this run trains again.

        Raises:
            ValueError: nothing would be collected, steps lie beyond the end of the training, `output_dir` is the
                trainer's own or holds checkpoints of another run, or the training is part of a hyperparameter search.
                With `featurize_at_end` or `report` also the errors of [`TrakAttributor.from_trainer`].
            TypeError: `report` is set, and the trainer has no `eval_dataset`, or several, or the task has no loss.
            FileNotFoundError: a checkpoint that the trainer saved earlier holds no weights.
        """
        if state.is_hyper_param_search:
            raise ValueError(
                "A hyperparameter search runs many trainings in one directory. Expected a single training: remove "
                "`TrakCallback`, and train again with the parameters found."
            )
        output_dir = _output_dir(args).resolve()
        if Path(self.args.output_dir).resolve() == output_dir:
            raise ValueError(
                f"`output_dir` of the attribution is {self.args.output_dir!r}, the trainer's own. Expected another "
                f"one, for example {str(output_dir / 'trak')!r}."
            )
        if self._recorder is not None:
            self._recorder.begin(
                kwargs["model"],
                args,
                state,
                kwargs["optimizer"],
                kwargs["train_dataloader"],
                kwargs["lr_scheduler"],
                resumable=bool(self._collected()) or any(output_dir.glob("checkpoint-*")),
            )
        kept = self._recorder is not None or self._reports
        if self.steps is None and not kept and SaveStrategy(args.save_strategy) == SaveStrategy.NO:
            raise ValueError(
                "The trainer has `save_strategy='no'`, so there is nothing to collect. Expected 'steps', 'epoch' or "
                "'best'; or name the `steps` of `TrakCallback`, which are then saved."
            )
        if self.steps is not None and (late := sorted(step for step in self.steps if step > state.max_steps)):
            raise ValueError(f"`steps` has {late}, but this training ends at step {state.max_steps}. Leave them out.")
        if self._reports and not isinstance(rows := self.trainer.eval_dataset, HFDataset):
            raise TypeError(
                f"`report` is set, and `eval_dataset` of the trainer is a {type(rows).__name__}. Expected one "
                "`datasets.Dataset`, whose loss is reported. Give the trainer one, or call "
                "`training_report(attributor.features, eval_dataset)` for each of several."
            )
        if self.featurize_at_end or self._reports:
            with random_state_kept():  # fail now rather than after the training
                attributor = TrakAttributor.from_trainer(self.trainer, self.args, self.task)
                if self._reports:
                    from hf_trak.report.training_page import training_report  # noqa: F401  # needs more packages

                    require_loss(attributor.features)
        if self._reports:
            _before_those_that_close(self, self.trainer.callback_handler)
        if not state.is_world_process_zero:
            return
        if self._reports and self._recorder is not None:
            say(
                logger,
                "When training ends, the report replays it, which takes five to ten times as long as training; "
                "`training_report` does it later, where `report` is not set.",
            )
        stale = [step for step in self._collected() if step > state.global_step]
        if state.global_step == 0 and stale and not self.overwrite:
            raise ValueError(
                f"{self.directory} holds the checkpoints of steps {stale} of another run. Expected none when training "
                "starts from scratch. Give this run another `name`, pass `overwrite=True` to replace them, or resume "
                "with `trainer.train(resume_from_checkpoint=True)`."
            )
        for step in stale:
            shutil.rmtree(self.directory / f"checkpoint-{step}")
        if self.directory.is_dir():
            for leftover in self.directory.glob(f"{_UNFINISHED}*"):
                shutil.rmtree(leftover, ignore_errors=True)
        for path in sorted(output_dir.glob("checkpoint-*")):  # saved before a kill, or by a run without the callback
            match = _STEP.fullmatch(path.name)
            if match and int(match[1]) <= state.global_step:
                self._collect(path, int(match[1]))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Make the trainer save the checkpoints of `steps`, and record the step. Raises as a `StoreError`."""
        if self.steps is not None and state.global_step in self.steps:
            control.should_save = True
        if self._recorder is not None:
            self._recorder.step_done(state.global_step, _state_is_due(control) or state.global_step == state.max_steps)
        return control

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        """Record the rows of a batch whose gradient is accumulated.

        Raises:
            HfTrakError: the batch did not come from the trainer's sampler.
        """
        if self._recorder is not None:
            self._recorder.pass_done()

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Record learning rates and the norm of the gradient."""
        if self._recorder is not None:
            self._recorder.before_update()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Record the weights that the trainer is about to save or to evaluate."""
        if self._recorder is not None and _state_is_due(control):
            self._recorder.write(state.global_step)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Collect the checkpoint that was just saved.

        Raises:
            FileNotFoundError: it does not hold whole weights.
            ValueError: its index of weights is damaged.
        """
        if state.is_world_process_zero:
            self._collect(_output_dir(args) / f"checkpoint-{state.global_step}", state.global_step, fresh=True)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Featurize the training dataset if `featurize_at_end` is set, and write a report if `report` is.

        A report that fails in one process is logged as an error: what comes after the training is still to save it.

        Raises:
            All that [`TrakAttributor.featurize`] raises, and in several processes what
            [`~hf_trak.report.training_report`] raises.
        """
        if self._recorder is not None:
            self._recorder.end(state.global_step)
        PartialState().wait_for_everyone()  # the main process collects, and all processes look
        found = self.checkpoints
        if self.steps is not None and len(found) < min(len(self.steps), self.last or len(self.steps)):
            logger.warning("Collected %s only, although the steps %s were asked for.", found, sorted(self.steps))
        if not (self.featurize_at_end or self._reports):
            return
        with random_state_kept():
            attributor = TrakAttributor.from_trainer(self.trainer, self.args, self.task)
            if self.featurize_at_end:
                self.attributor = attributor.featurize(dict(enumerate(found, self.first_model_id)))
            if self._reports:
                from hf_trak.report.training_page import training_report  # reports need more packages

                path = Path(self.args.output_dir) / "training_report.html"
                try:
                    self.report = training_report(attributor.features, self.trainer.eval_dataset, path)
                except (HfTrakError, ValueError, TypeError, RuntimeError) as error:
                    if PartialState().num_processes > 1:  # the others may wait for this one
                        raise
                    logger.error("The training is done, and there is no report of it. %s", error)
                    return
                if state.is_world_process_zero:
                    say(logger, f"{self.report}\nThe page is {path}.")
                _log(self.trainer, self.report.logs())

    # -- files -------------------------------------------------------------------------------------------------------

    def _collect(self, source: Path, step: int, fresh: bool = False) -> None:
        """Link or copy the weights of a checkpoint directory, and drop the oldest ones beyond `last`."""
        target = self.directory / f"checkpoint-{step}"
        if (self.steps is None or step in self.steps) and (fresh or not target.exists()):
            files = _weight_files(source)
            unfinished = self.directory / f"{_UNFINISHED}{secrets.token_hex(8)}"
            unfinished.mkdir(parents=True)
            for name in files:
                _link_or_copy(source / name, unfinished / name)
            if target.exists():
                shutil.rmtree(target)
            os.replace(unfinished, target)
        collected = self._collected()
        for old in collected[: -self.last] if self.last else ():
            shutil.rmtree(self.directory / f"checkpoint-{old}")


def _log(trainer: Any, logs: dict[str, float | str]) -> None:
    """Log numbers as the trainer does, and tables in Markdown to its dashboards alone: on a line nobody reads them."""
    trainer.log({name: value for name, value in logs.items() if not isinstance(value, str)})
    quiet = copy.copy(trainer.callback_handler)
    quiet.callbacks = [one for one in quiet.callbacks if not isinstance(one, PrinterCallback | ProgressCallback)]
    tables = {name: value for name, value in logs.items() if isinstance(value, str)}
    quiet.on_log(trainer.args, trainer.state, trainer.control, tables)


def _before_those_that_close(callback: TrainerCallback, handler: CallbackHandler) -> None:
    """Let a callback come right after the flow, before those that end what they report to when training ends."""
    others = [other for other in handler.callbacks if other is not callback]
    first = sum(isinstance(other, DefaultFlowCallback) for other in others)
    handler.callbacks = [*others[:first], callback, *others[first:]]  # a new list, since the old one is gone through


def _state_is_due(control: TrainerControl) -> bool:
    """Tell whether the weights of this step are recorded: a resumed run may begin with them, or they are the last."""
    return bool(control.should_save or control.should_evaluate or control.should_training_stop)


def _output_dir(args: TrainingArguments) -> Path:
    return Path(args.output_dir or "")


def _weight_files(source: Path) -> list[str]:
    """List the files of a checkpoint directory that hold weights or describe them.

    Raises:
        FileNotFoundError: the directory holds no weights.
        ValueError: its index of weights is damaged.
    """
    names = [name for name in WEIGHT_FILES if (source / name).is_file()]
    for index in INDEX_FILES:
        if (source / index).is_file():
            names += [index, *read_weight_index(source / index)]
    if not names:
        raise FileNotFoundError(
            f"The checkpoint {str(source)!r} holds no weights. Expected one of {[*WEIGHT_FILES, *INDEX_FILES]}. "
            "Sharded training has to save whole state dicts (FSDP: `state_dict_type: FULL_STATE_DICT`; DeepSpeed: "
            "`stage3_gather_16bit_weights_on_model_save`)."
        )
    return names + [name for name in _DESCRIPTIONS if (source / name).is_file()]


def _link_or_copy(source: Path, target: Path) -> None:
    if source.suffix == ".safetensors":
        try:
            os.link(source, target)
            return
        except OSError as error:  # another device, or a file system without hard links
            logger.debug("Copying %s, which cannot be linked: %s", source, error)
    shutil.copyfile(source, target)
