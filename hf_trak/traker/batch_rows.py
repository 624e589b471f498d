"""The checks of `TRAKer` before a step: which rows a batch belongs to, and whether the steps before it are done."""

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from hf_trak.errors import IncompleteStoreError
from hf_trak.gradient_computers import batch_size_of
from hf_trak.gradient_computers.base import SplitBatch
from hf_trak.modelout_functions import Batch, Side
from hf_trak.runtime.checks import checked_int, is_int
from hf_trak.store.checkpoint_records import checked_model_id
from hf_trak.traker.savers import AbstractSaver
from hf_trak.weights.watch import LoadedWeights


def materialize(batch: Any) -> Batch:
    """Return a batch as a mapping or a tuple.

    Raises:
        TypeError: the batch is a single tensor, or neither a mapping nor iterable.
    """
    if isinstance(batch, Mapping):
        return batch
    if isinstance(batch, Tensor) or not isinstance(batch, Iterable):
        raise TypeError(
            f"The batch is a {type(batch).__name__}. Expected a sequence of tensors such as (images, labels), or a "
            "mapping of names to tensors."
        )
    return tuple(batch)


def selected(batch: Batch, chosen: np.ndarray) -> Batch:
    """Return a batch of some samples of a batch.

    Args:
        batch: the batch; tensors without a batch dimension are kept as they are.
        chosen: positions of the samples, ascending.
    """
    if len(chosen) == batch_size_of(batch):
        return batch
    return SplitBatch.of(batch).picked(chosen.tolist())


@dataclass
class OpenCheckpoint:
    """A checkpoint that has been loaded for `featurize` or for `score`.

    Attributes:
        side: `"train"` if batches are for `featurize`, `"target"` if they are for `score`.
        weights: the weights that were loaded into the model.
        size: number of rows that batches may belong to.
        size_name: the argument that gave this number, for error messages.
        next_row: the row after those that were written with `num_samples`.
    """

    side: Side
    weights: LoadedWeights
    size: int
    size_name: str
    next_row: int = 0

    def rows(self, batch: Batch, inds: Iterable[int] | None, num_samples: int | None) -> list[int]:
        """Determine and check the row numbers of a batch.

        Args:
            batch: the batch as the model gets it.
            inds: row numbers, one per sample.
            num_samples: number of samples, given instead of `inds`; their rows follow those of the previous call.

        Returns:
            `list[int]`: one row number per sample.

        Raises:
            ValueError: not exactly one of `inds` and `num_samples` is given, their number differs from that of the
                samples, or a row is out of range or named twice.
            TypeError: a row number is not an integer.
        """
        if (inds is None) == (num_samples is None):
            raise ValueError(
                f"`inds` is {inds!r} and `num_samples` is {num_samples!r}. Expected exactly one of the two: row "
                "numbers, or the number of samples to write after those of the previous call."
            )
        if inds is not None:
            rows = [_as_row(i) for i in (inds.tolist() if isinstance(inds, Tensor) else inds)]
            source = f"`inds` has {len(rows)} row numbers"
        else:
            count = checked_int(num_samples, "num_samples", 1, type_error=ValueError)
            rows = list(range(self.next_row, self.next_row + count))
            source = f"`num_samples` is {count}"
        found = batch_size_of(batch)
        if found != len(rows):
            raise ValueError(
                f"{source}, but the batch has {found} samples. Expected the same number. Pass one row number per "
                "sample."
            )
        outside = [row for row in rows if not 0 <= row < self.size]
        if outside:
            after = f" (the previous calls wrote {self.next_row} rows)" if num_samples is not None else ""
            raise ValueError(
                f"The batch is to be written to rows {outside[:5]}{after}. Expected rows 0 … {self.size - 1}, since "
                f"`{self.size_name}` is {self.size}. Correct the row numbers, or use another save_dir for another "
                f"`{self.size_name}`."
            )
        if len(set(rows)) < len(rows):
            twice = sorted({row for row in rows if rows.count(row) > 1})
            raise ValueError(f"`inds` names the rows {twice[:5]} more than once. Expected different row numbers.")
        return rows

    def advance(self, num_samples: int | None) -> None:
        """Count rows that were written in sequence. Called after they were, so that a failed call can be repeated."""
        if num_samples is not None:
            self.next_row += operator.index(num_samples)


def _as_row(value: Any) -> int:
    if not is_int(value):
        raise TypeError(f"`inds` contains {value!r} of type {type(value).__name__}. Expected integers: row numbers.")
    return operator.index(value)


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
