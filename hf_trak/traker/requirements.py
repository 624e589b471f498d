"""Checks that a saver holds what the next step of `TRAKer` needs."""

from collections.abc import Iterable, Mapping
from typing import Any

from hf_trak.errors import IncompleteStoreError
from hf_trak.store.checkpoint_records import checked_model_id
from hf_trak.traker.savers import AbstractSaver


def registered_ids(saver: AbstractSaver, model_ids: Iterable[int] | None) -> list[int]:
    """Check that model ids are registered, and drop duplicates. `None` stands for all registered ids.

    Raises:
        IncompleteStoreError: an id is not registered, or no id is.
    """
    known = sorted(saver.model_ids)
    ids = known if model_ids is None else list(dict.fromkeys(checked_model_id(i) for i in model_ids))
    unknown = [model_id for model_id in ids if model_id not in known]
    if unknown:
        raise IncompleteStoreError(
            f"The model ids {unknown} are not in {saver.save_dir}, which has {known or 'none'}. Expected ids of "
            "featurized checkpoints. Call `load_checkpoint` and `featurize` first."
        )
    if not ids:
        given = f"{saver.save_dir} has no model ids" if model_ids is None else "No model ids were given"
        raise IncompleteStoreError(
            f"{given}. Expected at least one featurized checkpoint. Call `load_checkpoint` and `featurize` first."
        )
    return ids


def require_all_rows(saver: AbstractSaver, model_id: int, train_set_size: int) -> None:
    """Check that all train rows of the current model id have been written.

    Raises:
        IncompleteStoreError: rows are missing; names the first ones.
    """
    absent = (~saver.featurized()).nonzero()[0]
    if len(absent):
        raise IncompleteStoreError(
            f"Model id {model_id} lacks {len(absent)} of {train_set_size} train rows (first: {absent[:5].tolist()}). "
            "Featurize them, or check `train_set_size`."
        )


def require_finalized(saver: AbstractSaver, model_id: int, settings: Mapping[str, Any]) -> None:
    """Check that the features of a model id were finalized with these settings.

    Raises:
        IncompleteStoreError: they were not finalized, or with other settings.
    """
    found = saver.finalized_with(model_id)
    if found != settings:
        state = "are not finalized" if found is None else f"were finalized with {dict(found)}"
        raise IncompleteStoreError(
            f"The features of model id {model_id} in {saver.save_dir} {state}. Expected features finalized with "
            f"{dict(settings)}. Call `finalize_features` first."
        )


def require_experiment(saver: AbstractSaver, exp_name: str) -> int:
    """Check that an experiment exists, and return its number of targets.

    Raises:
        IncompleteStoreError: it does not exist.
    """
    if exp_name not in saver.experiments:
        raise IncompleteStoreError(
            f"Experiment {exp_name!r} is not in {saver.save_dir}, which has {sorted(saver.experiments) or 'none'}. "
            "Expected one whose targets have been scored. Call `start_scoring_checkpoint` and `score` first."
        )
    return saver.experiments[exp_name]["num_targets"]


def missing_targets(saver: AbstractSaver, exp_name: str, model_id: int) -> str | None:
    """Open an experiment under a model id for reading.

    Returns:
        A sentence that says which targets are missing, or `None` if all have been written.
    """
    if not saver.load_experiment(exp_name, model_id):
        return f"Model id {model_id} has no gradients of the targets of {exp_name!r}."
    done = saver.scored()
    absent = (~done).nonzero()[0]
    if not len(absent):
        return None
    return (
        f"Model id {model_id} lacks {len(absent)} of {len(done)} targets of {exp_name!r} (first: "
        f"{absent[:5].tolist()})."
    )
