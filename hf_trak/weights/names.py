"""Names of weights in files that trainings of all kinds write, brought to those of the model."""

import logging
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

logger = logging.getLogger(__name__)

WRAPPINGS = ("state_dict", "model_state_dict", "model", "module", "net", "weights")
"""Keys under which training scripts, Lightning, timm and DeepSpeed keep weights beside optimizers and epochs."""
_COMPILED = "_orig_mod."


def unwrapped(content: Mapping[Any, Any], where: str) -> Mapping[Any, Any]:
    """Return the weights of `{"model_state_dict": …, "optimizer": …, "epoch": …}`; anything else as it is.

    Args:
        content: what a file holds.
        where: names the file, for errors.

    Raises:
        ValueError: there are several models in it.
    """
    if any(isinstance(value, Tensor) for value in content.values()):
        return content
    found = [name for name in WRAPPINGS if isinstance(content.get(name), Mapping) and content[name]]
    if len(found) > 1:
        raise ValueError(
            f"{where[0].upper()}{where[1:]} holds weights under {found}. Expected one model. Read the file yourself, "
            "and pass the state dict of the right one."
        )
    return unwrapped(content[found[0]], where) if found else content


def with_names_of(expected: Collection[str], state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename weights to the names in a model, where wrappers have added to them.

    `torch.compile` adds `_orig_mod.`, data parallelism `module.`, and Lightning the name of an attribute, often
    `model.`, beside which it keeps weights of losses and metrics, which are left out.

    Args:
        expected: names in the model.
        state_dict: weights by name.

    Returns:
        The same weights, or those of the model among them. Unchanged where no addition explains the names.

    Raises:
        ValueError: they are there under several prefixes.
    """
    names = set(expected)
    given = dict(state_dict)
    if not any(_COMPILED in name for name in names):
        given = {name.replace(_COMPILED, ""): value for name, value in given.items()}
    if names & set(given):
        return given
    prefixes = {
        ".".join(name.split(".")[:depth]) + "." for name in given for depth in (1, 2) if name.count(".") >= depth
    }
    found = {prefix: own for prefix in sorted(prefixes) if (own := _below(prefix, given)) and set(own) <= names}
    if len(found) > 1:
        raise ValueError(
            f"The checkpoint has weights of the model under the names {sorted(found)}. Expected one model. Pass the "
            "state dict of the right one."
        )
    if not found:
        return dict(state_dict)
    prefix, own = next(iter(found.items()))
    if len(own) < len(given):
        others = sorted(name for name in given if not name.startswith(prefix))
        logger.info("Of a checkpoint, the weights below %r are taken, and not %s.", prefix, others)
    return own


def _below(prefix: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name[len(prefix) :]: value for name, value in weights.items() if name.startswith(prefix)}
