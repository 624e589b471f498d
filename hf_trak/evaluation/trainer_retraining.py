"""Retraining with `transformers.Trainer`, and the outputs of the trained model on the targets."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch.utils.data import Subset

from hf_trak._compat import accelerate_state_set_aside
from hf_trak.data.rows import Collator, RowBatches, batch_rows, default_collator, forward_columns, row_count
from hf_trak.evaluation.masking import RowLosses, mask_rows
from hf_trak.gradient_computers.environment import pass_settings
from hf_trak.gradient_computers.outputs import one_per_sample, run_model
from hf_trak.modelout_functions import AbstractModelOutput, get_task, infer_task
from hf_trak.modelout_functions.base import BatchedModelOutput
from hf_trak.runtime.checks import checked_int

_LAUNCH_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


class TrainerRetraining:
    """A training with `Trainer` for [`retrain_on_subsets`]: trains on a subset and returns f on every target.

    ```python
    def make_trainer(rows, seed):
        args = TrainingArguments("retraining", num_train_epochs=3, seed=seed, save_strategy="no")
        return Trainer(MyModel(config), args, train_dataset=rows)


    retrained = retrain_on_subsets(
        random_subsets(len(train_dataset), 100), TrainerRetraining(make_trainer, train_dataset, targets), "lds"
    )
    ```
    """

    def __init__(
        self,
        make_trainer: Callable[[Any, int], Any],
        train_dataset: Any,
        eval_dataset: Any,
        task: str | AbstractModelOutput | Callable[..., Tensor] | None = None,
        data_collator: Collator | None = None,
        batch_size: int = 64,
        drop: Literal["rows", "mask"] = "rows",
        seed: int | None = None,
        row_losses: RowLosses | None = None,
        perturbation: float = 0.0,
    ) -> None:
        """
        Args:
            make_trainer (`Callable`):
                `make_trainer(rows, seed)` returns a `Trainer` of a fresh model for these rows. Everything is seeded
                before it is called; `seed` is for `TrainingArguments`.
            train_dataset (`Dataset`):
                The training rows.
            eval_dataset (`Dataset`):
                The targets.
            task (`str`, `AbstractModelOutput` or `Callable`, *optional*):
                The model output function, which is that of the attribution. By default it follows from the model.
            data_collator (`Callable`, *optional*):
                Collates targets. By default that of the trainer.
            batch_size (`int`, *optional*, defaults to 64):
                Targets per batch.
            drop (`str`, *optional*, defaults to `"rows"`):
                `"rows"` trains on the rows of the subset alone. `"mask"` trains on all rows with the same order and
                batches, and the others weigh zero in the loss, see [`~hf_trak.evaluation.masking.mask_rows`].
            seed (`int`, *optional*):
                One seed for every training, so that trainings differ by their rows alone. By default each training
                has a seed of its own.
            row_losses (`Callable`, *optional*):
                `row_losses(model_output, batch) -> (B,)`, for `drop="mask"` with a loss that ignores no label, such as
                that of a regression.
            perturbation (`float`, *optional*, defaults to 0.0):
                Relative size ε of a change of the initial weights: every trainable weight is multiplied by 1 + ε·x,
                with x standard normal and drawn from each training's own seed. On a CPU a repeat with one `seed` gives
                the same bits, which hides how far training enlarges tiny differences; with ε = 1e-6, a few roundings
                of float32, repeats show it.

        Raises:
            TypeError, ValueError: as of `TrakAttributor`.
            ValueError: `drop` is no such name, `row_losses` is given without `drop="mask"`, or `perturbation` is not
                a finite number of at least 0.
        """
        if drop not in ("rows", "mask"):
            raise ValueError(f"`drop` is {drop!r}. Expected 'rows' or 'mask'.")
        if row_losses is not None and drop != "mask":
            raise ValueError(
                f"`row_losses` is given with `drop={drop!r}`. Expected it with 'mask' only, which weighs rows."
            )
        self.drop = drop
        self.seed = seed if seed is None else checked_int(seed, "seed", 0)
        self.row_losses = row_losses
        if not isinstance(perturbation, int | float) or not 0 <= perturbation < float("inf"):
            raise ValueError(
                f"`perturbation` is {perturbation!r}. Expected a finite number of at least 0, such as 1e-6."
            )
        self.perturbation = float(perturbation)
        self.make_trainer = make_trainer
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.task = task
        self.data_collator = data_collator
        self.batch_size = batch_size
        for name in ("train_dataset", "eval_dataset"):
            row_count(getattr(self, name), name)

    def __call__(self, rows: np.ndarray, seed: int) -> np.ndarray:
        """Train on these rows, and return f of every target, `(m,)`, float64."""
        own_seed, seed = seed, seed if self.seed is None else self.seed
        from transformers import set_seed  # imports models of transformers, for seconds

        with training_alone():
            set_seed(seed)
            trainer = self.make_trainer(self.train_dataset if self.drop == "mask" else self._selected(rows), seed)
            collator = self.data_collator or trainer.data_collator
            if self.perturbation:
                _perturb(trainer.model, self.perturbation, own_seed)
            if self.drop == "mask":
                kept = np.zeros(len(self.train_dataset), dtype=bool)
                kept[rows] = True
                mask_rows(trainer, kept, self.row_losses)
            trainer.train()
            return model_outputs(
                trainer.accelerator.unwrap_model(trainer.model),
                self.eval_dataset,
                self.task,
                collator,
                self.batch_size,
                trainer.args.remove_unused_columns,
            )

    @property
    def protocol(self) -> dict[str, Any]:
        """What tells trainings of this kind from others: `drop`, `seed` and `perturbation`, plain JSON."""
        return {"drop": self.drop, "seed": self.seed, "perturbation": self.perturbation}

    def _selected(self, rows: np.ndarray) -> Any:
        chosen = [int(row) for row in rows]
        select = getattr(self.train_dataset, "select", None)
        return Subset(self.train_dataset, chosen) if select is None else select(chosen)


def _perturb(model: nn.Module, size: float, seed: int) -> None:
    """Multiply every trainable weight by 1 + size · x, x standard normal. Global generators are left as they are."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
                parameter.mul_((1 + size * noise).to(parameter.device, parameter.dtype))


def model_outputs(
    model: nn.Module,
    dataset: Any,
    task: str | AbstractModelOutput | Callable[..., Tensor] | None = None,
    data_collator: Collator | None = None,
    batch_size: int = 64,
    remove_unused_columns: bool = True,
) -> np.ndarray:
    """Compute f(z; θ) of every row, with the model in eval mode; its own mode is restored.

    Args:
        model (`torch.nn.Module`):
            The model, on its device.
        dataset (`Dataset`):
            The m rows.
        task (`str`, `AbstractModelOutput` or `Callable`, *optional*):
            The model output function. By default it follows from the model.
        data_collator (`Callable`, *optional*):
            Turns rows into a batch. By default it is chosen as by `Trainer`.
        batch_size (`int`, *optional*, defaults to 64):
            Rows per batch.
        remove_unused_columns (`bool`, *optional*, defaults to `True`):
            Whether to drop dataset columns that the model does not accept, as `Trainer` does.

    Returns:
        `np.ndarray` of shape `(m,)`, float64: the outputs.

    Raises:
        ValueError: the task cannot be inferred, is not a batched one, or needs reference rows (CLIP).
    """
    chosen = get_task(infer_task(model) if task is None else task)
    if not isinstance(chosen, BatchedModelOutput) or chosen.reference_rows(row_count(dataset, "dataset")):
        raise ValueError(
            f"`task` is {type(chosen).__name__}. Expected a task of one batched forward pass without reference rows. "
            "For others, pass a `retrain` function of your own that returns the outputs."
        )
    collator = chosen.collator(data_collator or default_collator(dataset))
    columns = [*forward_columns(model), *chosen.batch_columns] if remove_unused_columns else None
    device = next(model.parameters()).device
    batches = RowBatches(dataset, collator, columns=columns, device=device)
    was_training = model.training
    found = []
    chosen.bind(model)
    try:
        model.eval()
        with torch.no_grad(), pass_settings(model):
            for numbers, batch in batches.iterate(batch_rows(0, len(dataset), batch_size)):
                values = chosen.output(run_model(chosen, model, batch), batch, "target")
                found.append(one_per_sample(values, len(numbers), chosen).double().cpu())
    finally:
        model.train(was_training)
    return torch.cat(found).numpy()


@contextmanager
def training_alone() -> Iterator[None]:
    """Make `Trainer` and `Accelerator` see one process, so that each process of a launch trains a model of its own, on
    its own device.
    """
    if not torch.distributed.is_initialized():
        yield
        return
    device = PartialState().device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    environment = {name: os.environ.pop(name) for name in _LAUNCH_VARIABLES if name in os.environ}
    try:
        with accelerate_state_set_aside():
            PartialState(cpu=device.type == "cpu")
            yield
    finally:
        os.environ.update(environment)
