"""From a name, a function or a model to a task."""

from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel

from hf_trak.modelout_functions.base import AbstractModelOutput
from hf_trak.modelout_functions.classification import (
    ImageClassificationModelOutput,
    IterativeImageClassificationModelOutput,
    TextClassificationModelOutput,
)
from hf_trak.modelout_functions.clip import CLIPModelOutput
from hf_trak.modelout_functions.clip_sigmoid import SigLIPModelOutput
from hf_trak.modelout_functions.function import FunctionModelOutput
from hf_trak.modelout_functions.loss import LossModelOutput

TASK_TO_MODELOUT: dict[str, type[AbstractModelOutput]] = {
    "image_classification": ImageClassificationModelOutput,
    "iterative_image_classification": IterativeImageClassificationModelOutput,
    "text_classification": TextClassificationModelOutput,
    "clip": CLIPModelOutput,
    "siglip": SigLIPModelOutput,
    "loss": LossModelOutput,
}
"""Task classes by name (seed API, plus `loss`)."""

_CLIP_CLASSES = frozenset(
    {"CLIP", "CustomTextCLIP", "CLIPModel", "AltCLIPModel", "ChineseCLIPModel", "MetaClip2Model"}
    | {"SiglipModel", "Siglip2Model"}
)


def get_task(task: str | AbstractModelOutput | type[AbstractModelOutput] | Callable[..., Any]) -> AbstractModelOutput:
    """The task object for whatever a user may pass as `task`.

    Args:
        task: a name of [`TASK_TO_MODELOUT`], a task, a task class that needs no arguments, or a function
            `(model_output, batch) -> (B,)`, see [`FunctionModelOutput`].

    Raises:
        ValueError: the name is unknown.
        TypeError: it is none of these.
    """
    if isinstance(task, AbstractModelOutput):
        return task
    if isinstance(task, str):
        if task not in TASK_TO_MODELOUT:
            raise ValueError(
                f"The task {task!r} is unknown. Expected one of {sorted(TASK_TO_MODELOUT)}. For any other model "
                "output, pass a function (model_output, batch) -> tensor (B,), or an instance of your own "
                "`AbstractModelOutput` subclass."
            )
        return TASK_TO_MODELOUT[task]()
    if isinstance(task, type) and issubclass(task, AbstractModelOutput):
        return task()
    if callable(task) and not isinstance(task, type | torch.nn.Module):
        return FunctionModelOutput(task)
    raise TypeError(
        f"`task` is {task!r}. Expected one of {sorted(TASK_TO_MODELOUT)}, a function (model_output, batch) -> tensor "
        "(B,), or an instance of an `AbstractModelOutput` subclass."
    )


def infer_task(model: torch.nn.Module) -> str:
    """The task name that fits a model, from the name of its class and its config.

    Raises:
        ValueError: no task is known for it.
    """
    inner = _unwrap(model)
    name = type(inner).__name__
    if name in _CLIP_CLASSES:
        return "clip" if getattr(inner, "logit_bias", None) is None else "siglip"
    task = None
    if "ForImageClassification" in name:
        task = "image_classification"
    elif name.endswith("ForSequenceClassification"):
        task = "text_classification"
    config = getattr(inner, "config", None)
    problem = getattr(config, "problem_type", None)
    if task is not None and problem is None and getattr(config, "num_labels", None) == 1:
        problem = "regression"
    if task is not None and problem in (None, "single_label_classification"):
        return task
    reason = f" with problem_type {problem!r}" if task is not None else ""
    raise ValueError(
        f"No task is known for a {name}{reason}. Pass `task=`: one of {sorted(TASK_TO_MODELOUT)}, a function "
        "(model_output, batch) -> tensor (B,), or an instance of an `AbstractModelOutput` subclass."
    )


def _unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside the wrappers of `accelerate`, `torch.compile`, data parallelism and PEFT."""
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    get_base_model = getattr(model, "get_base_model", None)
    return model if get_base_model is None else get_base_model()
