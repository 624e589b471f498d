"""The definition of the features of a row besides weights and task: settings, and what becomes of rows before the
model."""

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState

from hf_trak.config import DEFAULT_FACTORED_DIM, TrakConfig
from hf_trak.curvature.files import CURVATURE_VERSION
from hf_trak.data.rows import RowBatches
from hf_trak.gradient_computers.layout import ParameterLayout
from hf_trak.identity.collation import check_repeatable, collation_changes, collation_of
from hf_trak.identity.function_identity import same_function
from hf_trak.identity.model_identity import model_changes, version_changes
from hf_trak.runtime.checks import is_int
from hf_trak.store.atomic import differing
from hf_trak.store.checkpoint_records import Comparison, code_settings
from hf_trak.version import __version__
from hf_trak.weights.checkpoints import Checkpoint

Checkpoints = Checkpoint | Sequence[Checkpoint] | Mapping[int, Checkpoint | None] | Sequence[int] | None
"""One checkpoint or a list of them, a mapping of model ids to weights, or the ids of featurized checkpoints."""


def new_checkpoints(checkpoints: Checkpoints) -> dict[int, Checkpoint | None]:
    """Give model ids to weights: those of a mapping, or 0, 1, …. `None` is the model's own weights.

    Raises:
        ValueError: there is none, an id is negative, or there are ids without weights.
    """
    found = _by_id(checkpoints, ())
    if isinstance(found, list):
        raise ValueError(
            f"`checkpoints` is {found}. Expected weights, since features are computed with them. Pass "
            "`{id: weights}` to choose the ids under which they are kept."
        )
    return {0: None} if found is None else found


def sources_of(
    checkpoints: Checkpoints, known: Sequence[int], new: bool = False
) -> tuple[list[int] | None, dict[int, Checkpoint | None]]:
    """Find which featurized checkpoints are meant, and the weights that are given for them.

    Args:
        checkpoints: as the user gives them. A list is in the order of `known`.
        known: the ids of the featurized checkpoints.
        new: whether weights that are not featurized may be given: a list of another length has the ids 0, 1, ….

    Returns:
        The ids, `None` for all of them, and weights by id.

    Raises:
        ValueError: there are more or fewer weights than ids, or an id is negative.
    """
    found = _by_id(checkpoints, known)
    if found is None or isinstance(found, list):
        return found, {}
    by_id = isinstance(checkpoints, Mapping) and list(checkpoints) == list(found)
    if known and len(found) != len(known) and not by_id and not new:
        raise ValueError(
            f"`checkpoints` has {len(found)} entries for the model_ids {list(known)}. Expected one for each, in "
            "this order: the weights that were featurized under these ids. Pass all of them or `{id: weights}`, or "
            "leave `checkpoints` out where they are files that still lie where `featurize` found them."
        )
    return list(found), found


def _by_id(checkpoints: Any, known: Sequence[int]) -> dict[int, Checkpoint | None] | list[int] | None:
    """Return weights by id, or ids alone; `None` where neither is given.

    Raises:
        TypeError: it is none of these.
        ValueError: the list or mapping is empty, or an id is negative.
    """
    if checkpoints is None:
        return None
    if not isinstance(checkpoints, Iterable | str | os.PathLike | torch.nn.Module):
        raise TypeError(
            f"`checkpoints` is {checkpoints!r}. Expected weights (a path, a state dict, or a model), or a list of "
            f"weights or of ids. Pass a list, such as `[{checkpoints!r}]`."
        )
    if isinstance(checkpoints, str | os.PathLike | torch.nn.Module):
        return {known[0] if len(known) == 1 else 0: checkpoints}
    listed = list(checkpoints)
    if not listed:
        raise ValueError(
            "`checkpoints` is empty. Expected at least one checkpoint, or `None` for the current weights or all "
            "featurized ones."
        )
    if not all(map(is_int, listed)):
        if isinstance(checkpoints, Mapping):  # a state dict
            return {known[0] if len(known) == 1 else 0: checkpoints}
        return dict(zip(known if len(known) == len(listed) else range(len(listed)), listed, strict=True))
    if min(listed) < 0:
        raise ValueError(f"`checkpoints` has the ids {listed}. Expected integers of at least 0.")
    return dict(checkpoints) if isinstance(checkpoints, Mapping) else listed


def drawn_rows(n: int, count: int, seed: int) -> list[int]:
    """Draw some of n rows by the counter generator, in ascending order; all of them if there are no more."""
    order = np.random.Generator(np.random.Philox(seed)).permutation(n)
    return sorted(order[:count].tolist())


def check_part(part: tuple[int, int]) -> None:
    """Raise `ValueError` unless `part` is `(index, count)` with 0 ≤ index < count."""
    whole = isinstance(part, tuple | list) and len(part) == 2
    if not whole or not all(map(is_int, part)) or not 0 <= part[0] < part[1]:
        raise ValueError(f"`part` is {part!r}. Expected `(index, count)` with 0 ≤ index < count, such as (2, 8).")


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
    _warn_of_precision(saved, given)
    return []


@cache
def _warn_of_precision(saved: str, given: str) -> None:
    """Warn once in a process, since every call compares."""
    logger.warning(
        "The features were computed with mixed precision %r, and the model at hand runs with %r. Gradients then "
        "differ by what half precision rounds, some thousandths of their norm.",
        saved,
        given,
    )


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


_OTHER_ROWS = "training rows with other values, or in another order"

COMPARISONS: dict[str, Comparison] = {
    "collation": collation_changes,
    "mixed_precision": _precision_changes,
    "model": _model_changes,
    "task": _task_changes,
    "train_fingerprint": lambda saved, given: [f"train_fingerprint: saved {saved}, given {given}: {_OTHER_ROWS}"],
}

"""By entry of a store's configuration: a function of the recorded and the given value that lists what differs."""


def whitening_settings(args: TrakConfig, train_size: int) -> dict[str, Any]:
    """Return the entries of a store's configuration that define whitened features. Plain features have none.

    Args:
        args: the configuration.
        train_size: n, the number of training rows.
    """
    curvature = args.curvature
    if not curvature.whitened:
        return {}
    return {
        "whitening": {
            "version": CURVATURE_VERSION,
            "curvature": curvature.fitted_kind,
            "labels": curvature.labels,
            "rows": curvature.sample_size(train_size),
            "damping": curvature.whitening_damping,
        }
    }


def whitening_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `CurvatureConfig` that a store's configuration records of whitened features, unchecked.

    Args:
        config: the store's configuration.
    """
    recorded = config.get("whitening")
    if not isinstance(recorded, Mapping):
        return {}
    names = {"curvature": "kind", "labels": "labels", "rows": "rows", "damping": "damping"}
    return {field: recorded[name] for name, field in names.items() if name in recorded}


def recorded_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `TrakConfig` that a store's configuration records of the projection and the files.

    Args:
        config: the store's configuration.
    """
    projection = str(config.get("projection")).rpartition("-")[0]
    number, usual = {
        "sjlt": (config.get("proj_nonzeros", 1), 1),
        "factored": (config.get("factored_dim"), DEFAULT_FACTORED_DIM),
    }.get(projection, (None, None))
    return {
        "proj_type": projection if number == usual else f"{projection}-{number}",
        "proj_dim": config["proj_dim"],
        "seed": config.get("seed"),
        "feature_dtype": config["feature_dtype"],
        "model_dtype": config.get("model_dtype"),
        "shard_size": config["shard_size"],
    }


def feature_settings(
    model: torch.nn.Module,
    args: TrakConfig,
    layout: ParameterLayout,
    projection: str,
    proj_dim: int,
    train_size: int,
) -> dict[str, Any]:
    """Return the entries of a store's configuration that describe the projection, the parameters and the files.

    Args:
        model: the model, for its class, name and revision, which are informational.
        args: the configuration.
        layout: the attributed parameters.
        projection: name and version of the algorithm that projects.
        proj_dim: k, the number of features of a row.
        train_size: n, the number of training rows.
    """
    config = getattr(model, "config", None)
    return {
        "hf_trak_version": __version__,
        "projection": projection,
        "proj_dim": proj_dim,
        "proj_nonzeros": args.nonzeros,
        "seed": args.seed,
        "parameters": layout.to_list(),
        "parameters_fingerprint": layout.fingerprint,
        "feature_dtype": args.storage,
        "model_dtype": args.model_dtype,
        "shard_size": args.shard_size,
        **({"factored_dim": args.factored_dim} if args.projection == "factored" else {}),
        **code_settings(args.storage),
        **whitening_settings(args, train_size),
        "train_size": train_size,
        "model_class": type(model).__name__,
        "model_name": getattr(config, "_name_or_path", None) or None,
        "model_revision": getattr(config, "_commit_hash", None),
    }


def collation_of_rows(batches: RowBatches) -> dict[str, Any]:
    """Describe what dataset, transforms, tokenizer and collator make of a few rows.

    Args:
        batches: collates the rows, see [`~hf_trak.data.rows.RowBatches.probe`]. Random ones are described in their
            first draw, with the number of `draws`.

    Raises:
        ValueError: the description is not the same each time.
    """
    collate, rows, drawn = batches.probe()
    if drawn:
        check_repeatable(collate, rows)
    description = collation_of(collate, rows)
    return {**description, "draws": batches.draws} if drawn else description
