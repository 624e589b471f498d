"""Checkpoints and parts of the work, as `featurize` and `attribute` take them, checked."""

import os
from collections.abc import Mapping, Sequence

import torch

from hf_trak.weights.checkpoints import Checkpoint


def as_list(checkpoints: Checkpoint | Sequence[Checkpoint] | None) -> list[Checkpoint | None]:
    """One checkpoint, or several, as a list; `None`, the model's own weights, is one."""
    if checkpoints is None or isinstance(checkpoints, str | os.PathLike | Mapping | torch.nn.Module):
        return [checkpoints]
    return list(checkpoints)


def sources_of(
    model_ids: Sequence[int], checkpoints: Checkpoint | Sequence[Checkpoint] | None
) -> dict[int, Checkpoint | None]:
    """The checkpoints by model id, in the order of the ids; nothing where none are given.

    Raises:
        ValueError: they are not as many.
    """
    if checkpoints is None:
        return {}
    sources = as_list(checkpoints)
    if len(sources) != len(model_ids):
        raise ValueError(
            f"`checkpoints` has {len(sources)} entries for the model_ids {list(model_ids)}. Expected one for each, in "
            "this order: the weights that were featurized under these ids. Pass all of them, or leave `checkpoints` "
            "out where they are files that still lie where `featurize` found them."
        )
    return dict(zip(model_ids, sources, strict=True))


def checked_ids(sources: Sequence[Checkpoint | None], model_ids: Sequence[int] | None) -> list[int]:
    ids = list(range(len(sources))) if model_ids is None else list(model_ids)
    if not sources:
        raise ValueError(
            "`checkpoints` is an empty list. Expected at least one checkpoint, or `None` for the current weights."
        )
    whole = all(isinstance(model_id, int) and not isinstance(model_id, bool) and model_id >= 0 for model_id in ids)
    if not whole or len(ids) != len(sources) or len(set(ids)) != len(ids):
        raise ValueError(
            f"`model_ids` is {ids} for {len(sources)} checkpoints. Expected one distinct integer of at "
            f"least 0 for each."
        )
    return ids


def check_part(part: tuple[int, int]) -> None:
    """Raise `ValueError` unless `part` is `(index, count)` with 0 ≤ index < count."""
    whole = isinstance(part, tuple | list) and len(part) == 2
    if not whole or any(isinstance(v, bool) or not isinstance(v, int) for v in part) or not 0 <= part[0] < part[1]:
        raise ValueError(f"`part` is {part!r}. Expected `(index, count)` with 0 ≤ index < count, such as (2, 8).")
