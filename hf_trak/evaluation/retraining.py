"""Train on every subset, once or several times, and save the outputs of each model on the targets.

Every training has a file of its own, so that a killed run loses only the trainings in progress. Processes divide the
trainings among themselves; seeds depend on the number of a training, not on the process that does it.

`hf_trak.evaluation.retraining_files` describes the files.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from datasets.table import InMemoryTable
from numpy.typing import ArrayLike

from hf_trak.errors import IncompleteStoreError, NonFiniteError
from hf_trak.evaluation.intervals import scipy_stats, spearman
from hf_trak.evaluation.retraining_files import (
    CONFIG,
    RetrainingFiles,
    Training,
    all_trainings,
    create_described,
    subset_digest,
)
from hf_trak.identity.row_digest import fingerprint_dataset
from hf_trak.runtime.checks import checked_int
from hf_trak.runtime.processes import Processes
from hf_trak.runtime.progress import log_on_interrupt
from hf_trak.scores.scored_dataset import fixed_size_list
from hf_trak.store.atomic import remove_stale

logger = logging.getLogger(__name__)

Retrain = Callable[[np.ndarray, int], ArrayLike]
"""`retrain(rows, seed)` trains on these rows (ascending numbers), takes all randomness from the seed, and returns the
model output on every target, `(m,)`."""

COLUMNS = ("subset", "repeat", "seed", "mask", "outputs")
"""Columns of a dataset of retrainings, one row per training."""


def retrain_on_subsets(
    masks: ArrayLike,
    retrain: Retrain,
    output_dir: str | os.PathLike[str],
    *,
    repeats: int = 1,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    processes: Processes | None = None,
) -> Dataset:
    """Train on each subset, and return the outputs on the targets. The same call again does only missing trainings.

    Under `torchrun` or `accelerate launch` the trainings are divided among the processes, which must share the
    directory; [`TrainerRetraining`] then trains in each process alone. A later call may ask for more subsets or more
    repeats, and keeps the trainings that exist.

    Args:
        masks (`ArrayLike` of shape `(s, n)`):
            True where a training row belongs to the subset; from [`random_subsets`], for example.
        retrain (`Callable`):
            The training, see [`Retrain`].
        output_dir (`str` or `os.PathLike`):
            Directory of the trainings.
        repeats (`int`, *optional*, defaults to 1):
            Number of trainings of each subset. Their mean has less noise.
        seed (`int`, *optional*, defaults to 0):
            Training r of subset i has the seed (`seed` + r · 1,000,003 + i) mod 2³¹.
        settings (`Mapping[str, Any]`, *optional*):
            Plain JSON that the result depends on (learning rate, model). A directory made with other settings is
            refused.
        processes (`Processes`, *optional*):
            The processes that divide the trainings. By default all processes of the launch.

    Returns:
        `datasets.Dataset`: one row per training, with [`COLUMNS`]. [`masks_and_outputs`] turns it into arrays.

    Raises:
        ValueError: a mask is empty, a number is out of range, or `retrain` returned outputs of varying shapes.
        ConfigMismatchError: the directory belongs to other rows, subsets, seeds or settings, or to other training
            rows, targets or another protocol of [`TrainerRetraining`]; shows both.
        NonFiniteError: an output is NaN or infinite.
        StoreError: a file is damaged, or cannot be written.
        PeerProcessError: another process failed or died.
    """
    member = check_masks(masks)
    repeats = checked_int(repeats, "repeats", 1, type_error=ValueError)
    processes = Processes(use_cpu=not torch.accelerator.is_available()) if processes is None else processes
    directory = Path(output_dir)
    config = {"rows": member.shape[1], "seed": seed, "settings": dict(settings or {}), "training": _described(retrain)}
    processes.broadcast_from_main(lambda: create_described(directory / CONFIG, config, "set of retrainings"))
    files = RetrainingFiles.load(directory)
    wanted = all_trainings(len(member), repeats)
    train_missing(files, wanted, member, retrain, processes)

    def join() -> int:
        if missing := files.missing(wanted):
            raise IncompleteStoreError(
                f"{files.path(missing[0])} is missing after every process has finished. Expected a file for each "
                "training, in a directory that all processes share. Run the same again."
            )
        files.write_subsets(member)
        return files.write_outputs(member, repeats)

    m = processes.broadcast_from_main(join)
    outputs, seeds = files.read_outputs((repeats, len(member), m), subset_digest(member))
    subsets, numbers = np.array(wanted).T
    lists = fixed_size_list(member[subsets]), fixed_size_list(outputs.reshape(-1, m).copy())
    columns = (subsets, numbers, seeds.ravel().copy(), *lists)
    return Dataset(InMemoryTable(pa.table(dict(zip(COLUMNS, columns, strict=True)))))


def _described(retrain: Retrain) -> dict[str, Any]:
    """Describe what a [`TrainerRetraining`] trains on and answers for; of other functions nothing is known.

    Rows of other datasets than those of `datasets` may be drawn anew each time, and are not compared.
    """
    protocol = getattr(retrain, "protocol", None)
    if not isinstance(protocol, dict):
        return {}
    given = {name: getattr(retrain, name, None) for name in ("train_dataset", "eval_dataset")}
    known = {name: fingerprint_dataset(rows) for name, rows in given.items() if isinstance(rows, Dataset)}
    return {**known, "protocol": protocol}


def train_missing(
    files: RetrainingFiles,
    wanted: Sequence[Training],
    member: np.ndarray,
    retrain: Retrain,
    processes: Processes,
    m: int | None = None,
) -> None:
    """Do those trainings that have no file yet; the processes divide them among themselves.

    Args:
        files: the files of the trainings.
        wanted: the trainings.
        member: the subsets, booleans `(s, n)`.
        retrain: the training.
        processes: the processes of this launch. Other launches may work on other trainings of the same directory.
        m: number of targets, if it is known.

    Raises:
        As [`retrain_on_subsets`].
    """

    def unfinished() -> list[Training]:
        remove_stale(files.directory)
        missing = files.missing(wanted)
        for training in wanted:
            if training not in missing:
                files.read(training, member[training[0]])
        return missing

    todo = processes.broadcast_from_main(unfinished)
    mine = [todo[i] for i in processes.share(len(todo))]
    done = 0

    def progress() -> str:
        return f"{done} of {len(mine)} trainings of this process are saved in {files.directory}. Run the same again."

    with processes.all_or_none(), log_on_interrupt(progress):
        for subset, repeat in mine:
            found = retrain(np.flatnonzero(member[subset]), files.seed((subset, repeat)))
            files.write((subset, repeat), member[subset], _checked(found, subset, m))
            done += 1
            logger.info("Training %d of %d of this process is done (subset %d).", done, len(mine), subset)


def masks_and_outputs(retrained: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Turn a dataset of retrainings into the arrays that the evaluation functions take.

    Args:
        retrained (`datasets.Dataset`):
            The result of [`retrain_on_subsets`], or the same loaded from disk or the Hub.

    Returns:
        `tuple[np.ndarray, np.ndarray]`: masks of shape `(s, n)`, and outputs of shape `(s, m)` averaged over repeats.

    Raises:
        ValueError: the dataset lacks [`COLUMNS`], or some subsets have fewer repeats than others.
    """
    outputs, arrays = repeated_outputs(retrained), _columns(retrained, "mask")
    _, first = np.unique(np.asarray(arrays["subset"][:]), return_index=True)
    masks = np.stack([np.asarray(arrays[int(row)]["mask"], dtype=bool) for row in first])
    return masks, outputs.mean(axis=0)


def repeated_outputs(retrained: Dataset) -> np.ndarray:
    """Arrange the trainings of [`retrain_on_subsets`] as an array `(R, s, m)`: repeats, subsets, targets.

    Args:
        retrained (`datasets.Dataset`):
            Trainings, each subset equally often.

    Raises:
        ValueError: columns are missing, or subsets have different numbers of repeats.
    """
    arrays = _columns(retrained, "subset", "repeat", "outputs")
    subsets, repeats = np.asarray(arrays["subset"][:]), np.asarray(arrays["repeat"][:])
    # in float64, to which the NumPy format would not keep them
    exact = retrained.select_columns(["outputs"]).with_format("numpy", dtype=np.float64)
    outputs = np.stack(list(exact["outputs"][:]))
    rows, columns = np.unique(repeats, return_inverse=True), np.unique(subsets, return_inverse=True)
    shape = (len(rows[0]), len(columns[0]))
    places = rows[1] * shape[1] + columns[1]
    if len(places) != shape[0] * shape[1] or len(np.unique(places)) != len(places):
        raise ValueError(
            f"There are {len(places)} trainings of {shape[1]} subsets, in up to {shape[0]} repeats. Expected every "
            "subset in every repeat, once: finish the run that made the dataset."
        )
    return outputs[np.argsort(places)].reshape(*shape, -1)


def _columns(retrained: Dataset, *names: str) -> Dataset:
    """Return a dataset of NumPy arrays, if it has these columns."""
    if missing := [name for name in names if name not in retrained.column_names]:
        raise ValueError(f"The dataset has no columns {missing}. Expected those of `retrain_on_subsets`: {COLUMNS}.")
    return retrained.with_format("numpy")


def check_masks(masks: ArrayLike) -> np.ndarray:
    """Return masks as booleans `(s, n)`.

    Raises:
        ValueError: the array has another shape, an entry other than 0 and 1, or a subset without rows.
    """
    given = np.asarray(masks)
    if given.ndim != 2 or given.size == 0 or not np.isin(given, (0, 1)).all():
        raise ValueError(
            f"`masks` is an array of {given.dtype} of the shape {given.shape}. Expected (subsets, rows), true where a "
            "row belongs to the subset."
        )
    member = given.astype(bool)
    if not member.any(axis=1).all():
        raise ValueError(f"Subset {int(np.argmin(member.any(axis=1)))} has no rows. Expected at least one in each.")
    return member


def _checked(outputs: ArrayLike, subset: int, m: int | None) -> np.ndarray:
    values = np.ascontiguousarray(np.asarray(outputs, dtype=np.float64))
    if values.ndim != 1 or len(values) == 0 or m not in (None, len(values)):
        where = f" for subset {subset}" if m is None else f"; the bank has {m} targets"
        expected = "(m,)" if m is None else f"({m},)"
        raise ValueError(
            f"`retrain` returned the shape {values.shape}{where}. Expected {expected}, one output per target."
        )
    if not np.isfinite(values).all():
        raise NonFiniteError(
            f"Target {int(np.argmin(np.isfinite(values)))} has a NaN or infinite output after training on subset "
            f"{subset}. Expected finite ones. Check whether the training diverged, or the output is saturated."
        )
    return values


@dataclass(frozen=True)
class ReplayCheck:
    """The change of every target by leaving rows out, predicted and measured.

    Attributes:
        dropped (`np.ndarray`): numbers of the rows that were left out, ascending.
        predicted (`np.ndarray` of shape `(m,)`): minus the sum of their scores.
        measured (`np.ndarray` of shape `(m,)`): outputs after the retraining minus those of the model.
    """

    dropped: np.ndarray
    predicted: np.ndarray
    measured: np.ndarray

    @property
    def r_squared(self) -> float:
        """Return the share of the measured changes, from zero, that the predicted ones explain; at most 1."""
        return float(1 - np.square(self.measured - self.predicted).sum() / np.square(self.measured).sum())

    @property
    def rank_correlation(self) -> float:
        """Return Spearman's correlation over the targets; 0 for a single one."""
        return float(spearman(self.predicted[:, None], self.measured[:, None])[0])

    def __str__(self) -> str:
        return (
            f"without {len(self.dropped)} rows: R² = {self.r_squared:.3f}, rank correlation "
            f"{self.rank_correlation:.3f} over {len(self.measured)} targets"
        )


def check_by_retraining(
    scores: ArrayLike, outputs: ArrayLike, retraining: Retrain, share: float, seed: int = 0
) -> ReplayCheck:
    """Train again without a random share of the rows.

    Args:
        scores (`ArrayLike` of shape `(n, m)`):
            Scores whose sums are changes of outputs, as those of a replay.
        outputs (`ArrayLike` of shape `(m,)`):
            The outputs of the model on the targets.
        retraining (`Callable`):
            As [`TrainerRetraining`]: trains on the whole dataset with some rows masked.
        share (`float`):
            The share of the rows to leave out, in (0, 1).
        seed (`int`, *optional*, defaults to 0):
            Seed of their choice.

    Returns:
        [`ReplayCheck`].

    Raises:
        ValueError: `share` leaves out no row, or all of them.
        ImportError: scipy is not installed.
    """
    scipy_stats()  # needed at the end, and nothing is trained in vain
    table = np.asarray(scores, dtype=np.float64)
    n, count = len(table), round(share * len(table))
    if not 0 < count < n:
        raise ValueError(f"`share` is {share!r}, which leaves out {count} of {n} rows. Expected some, and not all.")
    order = np.random.Generator(np.random.Philox(seed)).permutation(n)
    dropped, kept = np.sort(order[:count]), np.sort(order[count:])
    measured = np.asarray(retraining(kept, seed)) - np.asarray(outputs)
    return ReplayCheck(dropped, -table[dropped].sum(0), measured)
