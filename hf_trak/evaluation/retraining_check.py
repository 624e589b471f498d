"""Verification of a directory of retrainings, and the upgrade that adds checksums to one of format 1."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from hf_trak.errors import HfTrakError, IncompleteStoreError, StoreError
from hf_trak.evaluation.retraining_files import CONFIG, RetrainingFiles, subset_digest, training_seed
from hf_trak.store.findings import Finding
from hf_trak.store.leftovers import leftovers
from hf_trak.store.sealed import write_sealed

DATASET = "retrained.arrow"
_AGAIN = "`retrain_on_subsets` with the same arguments computes it."
_UPGRADE = "`hf-trak upgrade` adds checksums."

Row = tuple[str, np.ndarray, int]
"""One training in the dataset: digest of the subset, outputs, seed."""


def verify_retraining(directory: Path) -> Iterator[Finding]:
    """Check a directory of retrainings, file by file.

    Args:
        directory: the `output_dir` of `retrain_on_subsets`.

    Returns:
        An iterator of one finding per file. Trainings that the dataset has, but that have no file, are reported as
        missing.

    Raises:
        IncompleteStoreError: there are no retrainings in this directory.
    """
    directory = Path(directory)
    path = directory / CONFIG
    try:
        files = RetrainingFiles.load(directory)
    except IncompleteStoreError:
        raise
    except StoreError as error:
        yield Finding(path, "damaged", str(error), "Restore it from a copy, or retrain into another directory.")
        return
    old = files.version == 1
    yield Finding(path, "unchecked" if old else "intact", "it has no checksum" * old, _UPGRADE * old)
    table, problem = _read_dataset(directory / DATASET)
    present = set(files.present())
    expected = present | set(table or {})
    differ = []
    for training in sorted(expected, key=lambda one: one[::-1]):
        file = files.path(*training)
        if training not in present:
            yield Finding(file, "missing", "this training is not done", _AGAIN)
            continue
        try:
            outputs, digest = files.read(*training, None)
        except HfTrakError as error:
            yield Finding(file, "damaged", str(error), f"Delete it; then: {_AGAIN}")
            continue
        row = (table or {}).get(training)
        if row is not None and not _same(row, digest, outputs, training_seed(files.config["seed"], *training)):
            differ.append(training)
        yield Finding(file, "unchecked" if old else "intact", "it has no checksum" * old, _UPGRADE * old)
    if problem is None and differ:
        problem = f"its rows of the trainings (subset, repeat) {differ[:5]} are not those in {files.path(*differ[0])}"
    if problem is not None:
        yield Finding(directory / DATASET, "damaged", problem, "`retrain_on_subsets` writes it anew at every call.")
    elif table is not None:
        yield Finding(directory / DATASET, "intact")
    for one in leftovers(directory):
        yield Finding(one.path, "leftover", f"{one.size} bytes", "`hf-trak clean` removes it.")


def upgrade_retraining(directory: Path) -> None:
    """Add checksums to a directory of format 1. After an interruption the same call continues.

    Every training is first read and compared with the dataset of all trainings, which an undamaged directory has. A
    directory of the current format is left as it is.

    Args:
        directory: the `output_dir` of `retrain_on_subsets`.

    Raises:
        IncompleteStoreError: there are no retrainings in this directory.
        StoreError: a file is damaged; the directory is left as it was.
    """
    directory = Path(directory)
    files = RetrainingFiles.load(directory)
    current = RetrainingFiles(directory, files.config, 2)
    old = RetrainingFiles(directory, files.config, 1)
    table, problem = _read_dataset(directory / DATASET)
    if problem is not None:
        raise StoreError(
            f"{directory / DATASET} {problem}. Expected the results of all trainings, to compare with. Call "
            "`retrain_on_subsets` with the same arguments, which writes it anew, and upgrade again."
        )
    found = {training: old.read(*training, None) for training in old.present()}
    for training, (outputs, digest) in found.items():
        row = (table or {}).get(training)
        if row is not None and not _same(row, digest, outputs, training_seed(files.config["seed"], *training)):
            raise StoreError(
                f"{old.path(*training)} and {directory / DATASET} hold different results of training {training}, so "
                "that one of them is damaged. Expected the same in both. Restore the damaged one, or delete the file "
                "of the training and call `retrain_on_subsets` with the same arguments."
            )
    for training, (outputs, digest) in found.items():
        current.write(*training, digest, outputs)
    if files.version == 1:  # last, because it states that all other files have checksums
        write_sealed(directory / CONFIG, files.config)


def _read_dataset(path: Path) -> tuple[dict[tuple[int, int], Row] | None, str | None]:
    """Read the rows of the dataset by subset and repeat (`None` if there is none), and say what is wrong with it."""
    if not path.exists():
        return None, None
    try:
        with pa.OSFile(str(path)) as file:
            table = pa.ipc.open_stream(file).read_all()
        table.validate(full=True)
        columns = [table.column(name).to_pylist() for name in ("subset", "repeat", "seed", "mask", "outputs")]
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        return None, f"cannot be read ({error})"
    rows: dict[tuple[int, int], Row] = {}
    for subset, repeat, seed, mask, outputs in zip(*columns, strict=True):
        if not all(isinstance(value, int) for value in (subset, repeat, seed)) or mask is None or outputs is None:
            return None, "has rows without values"
        rows[subset, repeat] = (subset_digest(np.array(mask, dtype=bool)), np.array(outputs, dtype=float), seed)
    return rows, None


def _same(row: Row, digest: str, outputs: np.ndarray, seed: int) -> bool:
    return row[0] == digest and row[2] == seed and np.array_equal(row[1], outputs)
