"""From a name, a function or a model to a task."""

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

import torch

from hf_trak.modelout_functions.base import AbstractModelOutput
from hf_trak.modelout_functions.batches import unwrapped
from hf_trak.modelout_functions.diffusion import DiffusionModelOutput
from hf_trak.modelout_functions.dpo import DPOModelOutput, ORPOModelOutput, RewardModelOutput
from hf_trak.modelout_functions.embedding_pairs import EmbeddingPairsModelOutput
from hf_trak.modelout_functions.function import FunctionModelOutput
from hf_trak.modelout_functions.inference import TASKS_OF_MODELS, known_task
from hf_trak.modelout_functions.kto import KTOModelOutput
from hf_trak.modelout_functions.loss import GaussNewtonModelOutput, LossModelOutput
from hf_trak.modelout_functions.policy import GRPOModelOutput, PPOModelOutput
from hf_trak.modelout_functions.row_loss import RowLossModelOutput

TASK_TO_MODELOUT: dict[str, type[AbstractModelOutput]] = {
    **TASKS_OF_MODELS,
    "loss": LossModelOutput,
    "row_loss": RowLossModelOutput,
    "diffusion": DiffusionModelOutput,
    "gauss_newton": GaussNewtonModelOutput,
    "embedding_pairs": EmbeddingPairsModelOutput,
    "dpo": DPOModelOutput,
    "reward": RewardModelOutput,
    "kto": KTOModelOutput,
    "orpo": ORPOModelOutput,
    "grpo": GRPOModelOutput,
    "ppo": PPOModelOutput,
}
"""Task classes by name: the tasks of the `trak` API first."""


def get_task(task: str | AbstractModelOutput | type[AbstractModelOutput] | Callable[..., Any]) -> AbstractModelOutput:
    """Turn whatever a user may pass as `task` into a task object.

    Args:
        task (`str`, `AbstractModelOutput`, `type` or `Callable`):
            A name of [`TASK_TO_MODELOUT`], a task, a task class that needs no arguments, or a function
            `(model_output, batch) -> (B,)`, see [`FunctionModelOutput`].

    Returns:
        `AbstractModelOutput`: the task; `task` itself if it is one already.

    Raises:
        ValueError: the name is unknown.
        TypeError: `task` is none of these.
    """
    if isinstance(task, AbstractModelOutput):
        return task
    if isinstance(task, str):
        if task not in TASK_TO_MODELOUT:
            near = get_close_matches(task, TASK_TO_MODELOUT, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(
                f"The task {task!r} is unknown{hint}. Expected one of {sorted(TASK_TO_MODELOUT)}. For any other model "
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
    """Find the task that fits a model by the name of its class, or of a class that it derives from, and by its config.

    Args:
        model (`torch.nn.Module`):
            Any model, also one wrapped by `accelerate`, `torch.compile` or PEFT.

    Returns:
        `str`: a name of [`TASK_TO_MODELOUT`].

    Raises:
        ValueError: no task is known for the model.
    """
    if (task := known_task(model)) is None:
        raise ValueError(
            f"No task is known for a {type(unwrapped(model)[1]).__name__}. Expected a model with a head, as "
            f"`AutoModelFor…` loads it. Pass `task=`: one of {sorted(TASK_TO_MODELOUT)}, a function (model_output, "
            "batch) -> tensor (B,), or an instance of an `AbstractModelOutput` subclass."
        )
    return task
