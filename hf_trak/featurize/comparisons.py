"""Comparing what defines features with what a store recorded, where equality to the bit is too much to ask."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from accelerate.state import AcceleratorState

from hf_trak.identity.collation import collation_changes
from hf_trak.identity.function_identity import same_function
from hf_trak.identity.model_identity import model_changes, version_changes
from hf_trak.store.atomic import differing
from hf_trak.store.configuration import Comparison

logger = logging.getLogger(__name__)


def mixed_precision(model: torch.nn.Module) -> str:
    """Return the precision of the autocast context that `Accelerator.prepare` has put around `forward`, or `"no"`."""
    if not hasattr(model, "_original_forward") or not AcceleratorState._shared_state:
        return "no"
    return str(AcceleratorState().mixed_precision)


def _precision_changes(saved: str, given: str) -> list[str]:
    """Warn, and list no change: whoever loads an index may have no such context.

    Half precision rounds some thousandths of a gradient.
    """
    logger.warning(
        "The features were computed with mixed precision %r, and the model at hand runs with %r. Gradients then "
        "differ by what half precision rounds, some thousandths of their norm.",
        saved,
        given,
    )
    return []


def _task_changes(saved: Any, given: Any) -> list[str]:
    """List how tasks differ. The code of functions can be compared within one version of Python only."""
    same = same_function(saved, given)
    if same is None:
        logger.warning(
            "The functions of the task were compiled by another version of Python than this one, and cannot be "
            "compared with those that the features were computed with. Rows whose features are computed again, where "
            "rows are at hand, show whether they are the same."
        )
    return differing({"task": saved}, {"task": given}) if same is False else []


def _model_changes(saved: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """List the settings of the model that differ.

    Other versions of packages may have other settings for the same model. Then they are only named in a warning, and
    rows that are computed again show whether features have changed.
    """
    lines = model_changes(saved, given)
    packages = version_changes(saved["versions"], given["versions"])
    if lines and packages:
        logger.warning(
            "The model has other settings than when its features were computed (%s), with other versions of packages "
            "(%s). Rows whose features are computed again, where rows are at hand, show whether that matters.",
            "; ".join(lines),
            "; ".join(packages),
        )
        return []
    return lines


COMPARISONS: dict[str, Comparison] = {
    "collation": collation_changes,
    "mixed_precision": _precision_changes,
    "model": _model_changes,
    "task": _task_changes,
}
"""By entry of a store's configuration: a function of the recorded and the given value that lists what differs."""
