"""`hf_trak.estimate`: what an attribution will take, before anything is written."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_trak.config import TrakConfig, checked_args
from hf_trak.data.rows import Collator
from hf_trak.featurize.estimation import Estimate, count_of, estimate_sizes, measured_batches
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.featurize.roofline import DeviceName
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
    device: DeviceName | None = None,
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
        device (`str`, *optional*):
            A GPU that is not there: `"h200"`. Bounds the time from below by the launches, bytes and operations of one
            batch in bfloat16, and says what bounds it. Needs the rows themselves.
        method (`str` or a dataclass of `hf_trak.methods`, *optional*, defaults to `"auto"`):
            How scores are to be computed, as `attribute` takes it.
        data_collator, processing_class, task (*optional*):
            As `TrakAttributor` takes them, for `measure` and `device`.

    Returns:
        [`~hf_trak.featurize.estimation.Estimate`]: sizes in bytes, times in seconds.

    Raises:
        ValueError: a number is out of range, a name unknown, rows are needed and a number is given, or the
            time is to be measured and bounded.
        HfTrakError: the model or the task is one that cannot be counted for a device.
        TypeError: `args` is no `TrakConfig`.
    """
    args = checked_args(args)
    rate = bound = None
    if measure or device is not None:
        n = count_of(train_dataset, "train_dataset", 1)
        if measure and device is not None:
            raise ValueError(f"`measure` is set, and `device` is {device!r}. Expected one of them.")
        if isinstance(train_dataset, int):
            name = "`measure` is set" if measure else f"`device` is {device!r}"
            raise ValueError(
                f"{name}, but `train_dataset` is the number {n}. Expected the rows, since some are featurized or "
                "counted to see how long it takes."
            )
        rows = train_dataset, data_collator, processing_class, task
        if device is not None:
            from hf_trak.featurize.batch_counts import roofline  # counting imports more of torch

            bound = roofline(FeaturizedModel(model, replace(args, use_cpu=True), *rows), device)
            rate = bound.rows_per_second
        else:
            measured_batches(n, args.batch_size)  # whether there are enough rows
            rate = FeaturizedModel(model, args, *rows).measured_rate()
    found = estimate_sizes(
        model,
        train_dataset,
        args,
        checkpoints=checkpoints,
        eval_dataset=eval_dataset,
        processes=processes,
        rows_per_second=rate,
        method=method,
    )
    return replace(found, roofline=bound)
