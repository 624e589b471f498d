"""`hf_trak.estimate`: what an attribution will take, before anything is written."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_trak.config import TrakConfig, checked_args
from hf_trak.data.rows import Collator
from hf_trak.featurize.estimation import Estimate, count_of, estimate_sizes, measured_batches
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.methods import Method
from hf_trak.modelout_functions import AbstractModelOutput


def estimate(
    model: torch.nn.Module,
    train_dataset: Any,
    args: TrakConfig | None = None,
    *,
    checkpoints: int = 1,
    eval_dataset: Any = 0,
    processes: int = 1,
    measure: bool = False,
    method: Method = "auto",
    data_collator: Collator | None = None,
    processing_class: Any = None,
    task: str | AbstractModelOutput | Callable[..., Tensor] | None = None,
) -> Estimate:
    """Tell what an attribution will take: parameters, disk, memory, and time if a few batches may be run.

    Args:
        model (`torch.nn.Module`):
            The model.
        train_dataset (`Dataset` or `int`):
            The training rows, or just their number.
        args (`TrakConfig`, *optional*):
            The configuration.
        checkpoints (`int`, *optional*, defaults to 1):
            Number of checkpoints.
        eval_dataset (`Dataset` or `int`, *optional*, defaults to 0):
            The targets, or just their number.
        processes (`int`, *optional*, defaults to 1):
            Number of processes that share the work.
        measure (`bool`, *optional*, defaults to `False`):
            Featurize the first few batches, in a temporary directory, to project the time. Needs the rows themselves.
        method (`str` or a dataclass of `hf_trak.methods`, *optional*, defaults to `"auto"`):
            How scores are to be computed, as `attribute` takes it.
        data_collator, processing_class, task (*optional*):
            As `TrakAttributor` takes them, for `measure`.

    Returns:
        [`~hf_trak.featurize.estimation.Estimate`]: sizes in bytes, times in seconds.

    Raises:
        ValueError: a number is out of range, a parameter name unknown, or rows are needed and a number is given.
        TypeError: `args` is no `TrakConfig`.
    """
    args = checked_args(args)
    rate = None
    if measure:
        n = count_of(train_dataset, "train_dataset", 1)
        if isinstance(train_dataset, int):
            raise ValueError(
                f"`measure` is set, but `train_dataset` is the number {n}. Expected the rows, some of which are "
                "featurized to see how long it takes."
            )
        measured_batches(n, args)  # whether there are enough rows
        rate = FeaturizedModel(model, args, train_dataset, data_collator, processing_class, task).measured_rate()
    return estimate_sizes(
        model,
        train_dataset,
        args,
        checkpoints=checkpoints,
        eval_dataset=eval_dataset,
        processes=processes,
        rows_per_second=rate,
        method=method,
    )
