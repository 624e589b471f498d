"""The identity of a run: what a directory of `TRAKer` records of the parts that its features depend on."""

from typing import Any

import torch

from hf_trak.gradient_computers import ParameterLayout
from hf_trak.identity.recorded_names import recorded_name
from hf_trak.modelout_functions import AbstractModelOutput
from hf_trak.modelout_functions.identity import task_identity, task_identity_v1
from hf_trak.projectors import NoOpProjector
from hf_trak.traker.plugins import can_accumulate, is_ours
from hf_trak.traker.savers.run_metadata import RunMetadata
from hf_trak.version import __version__


def run_metadata(
    model: torch.nn.Module, layout: ParameterLayout, task: AbstractModelOutput, computer: Any, projector: Any
) -> RunMetadata:
    """Describe all that defines the features of a run, apart from sizes and dtype, which the saver adds.

    Args:
        model: the model.
        layout: the attributed parameters.
        task: the model output function.
        computer: the gradient computer.
        projector: the projector.
    """
    metadata = {
        "api": "TRAKer",  # features are divided by √P, unlike those of TrakAttributor
        "gradient_computer": "built-in"
        if is_ours(type(computer))
        else class_name(type(computer)),  # built-in ones agree
        "hf_trak_version": __version__,
        "model_class": type(model).__name__,
        "parameters": layout.to_list(),
        "parameters_fingerprint": layout.fingerprint,
        "projection": projection_identity(projector),
        "task": task_identity(task, model),
    }
    return RunMetadata(metadata, {**metadata, "task": task_identity_v1(task)})


def projection_identity(projector: Any) -> dict[str, Any]:
    """Identify a projection. The library's own are known by their algorithm, whichever class computes it."""
    own = can_accumulate(projector) and is_ours(type(projector))
    identity = {
        "class": None if own else class_name(type(projector)),
        "algorithm": getattr(projector, "algorithm", None),
    }
    for name in ("nonzeros", "proj_type", "seed"):
        value = getattr(projector, name, None)
        identity[name] = value if value is None or isinstance(value, int) else str(value)
    if isinstance(projector, NoOpProjector):
        identity |= {"proj_type": None, "seed": None}
    return identity


def class_name(cls: type) -> str:
    """Return the name under which a directory records a class."""
    return recorded_name(f"{cls.__module__}.{cls.__qualname__}")
