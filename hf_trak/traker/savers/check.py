"""Checking every byte of a directory of a `MmapSaver`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hf_trak.store.sealed import Finding
from hf_trak.store.verification import judged
from hf_trak.traker.savers.mmap_directory import EXPERIMENTS, METADATA, MmapDirectory, rows_seed
from hf_trak.traker.savers.row_files import RowFile

_AGAIN = "Run the same script again."


def check_run(save_dir: Path) -> Iterator[Finding]:
    """Check a directory of a `MmapSaver`, file by file.

    Args:
        save_dir (`Path`):
            The directory.

    Yields:
        `Finding`: one per file, missing ones included.
    """
    path = save_dir / METADATA
    finding = judged(path, lambda: MmapDirectory(save_dir), "Restore it from a copy, or use another save_dir.")
    yield finding
    if finding.state != "intact":
        return
    directory, path = MmapDirectory(save_dir), save_dir / EXPERIMENTS
    experiments: dict[str, dict[str, Any]] = {}
    if path.exists():
        finding = judged(path, directory.read_experiments, "Delete it and score the targets again.")
        yield finding
        experiments = directory.read_experiments() if finding.state == "intact" else {}
    elif any(save_dir.glob("*/*_is_scored.mmap")) or any(save_dir.glob("scores/*.mmap")):
        yield Finding(path, "missing", "targets and scores need it", _AGAIN)
    for model_id in directory.mentioned_ids("*/*"):
        yield from _model_id(directory, model_id, experiments)
    for name, entry in sorted(experiments.items()):
        scores = directory.scores(name, entry["num_targets"])
        if entry.get("scores_finalized"):
            yield from _array(scores, np.arange(scores.shape[0]), directory.scores_seed(name, entry))
        elif scores.path.exists():
            yield Finding(scores.path, "missing", "its scores are incomplete", scores.remedy)


def _model_id(
    directory: MmapDirectory, model_id: int, experiments: Mapping[str, Mapping[str, Any]]
) -> Iterator[Finding]:
    path, member = directory.id_path(model_id), directory.member_path(model_id)
    remedy = f"Restore it, or delete {member} and {path.parent}, and featurize again."
    finding = judged(path, lambda: directory.read_info(model_id), remedy)
    yield finding
    if finding.state != "intact":
        return
    info = directory.read_info(model_id)
    if member.exists():  # `read_info` has compared its content
        yield Finding(member, "intact")
    else:
        yield Finding(member, "missing", "without it, nobody would notice that this model id vanished", _AGAIN)
    yield from _arrays(directory.train_set(model_id, bool(info.get("grads_deleted"))), info)
    for name, entry in sorted(experiments.items()):
        files = directory.targets(model_id, name, entry["num_targets"])
        if any(file.path.exists() for file in files):
            yield from _arrays(files, info)


def _arrays(files: list[RowFile], info: Mapping[str, Any]) -> Iterator[Finding]:
    """Check the arrays of a model id, or of an experiment under it. The last file is that of the marks."""
    marks, finalized = files[-1], bool(info.get("finalized"))
    rows, problem = np.arange(marks.shape[0]), _problem(marks)
    values = np.ones(len(rows)) if problem else marks.array.reshape(-1)
    impossible = set(rows[(values != 0) & (values != 1)].tolist())
    for file in files[:-1]:
        if file.key == "features" and not finalized:
            yield Finding(file.path, "missing", "it has not been computed", _AGAIN)
            continue
        due = rows if file.key == "features" else rows[values == 1]
        yield from _array(file, due, rows_seed(info, file.key), impossible)
    absent = rows[values == 0]
    if finalized and marks.key == "is_featurized":
        impossible |= set(absent.tolist())
    if problem:
        yield problem
    elif impossible:
        detail = f"its marks of rows {sorted(impossible)[:5]} are impossible"
        yield Finding(marks.path, "damaged", detail, marks.remedy)
    elif len(absent):
        yield Finding(marks.path, "missing", f"{len(absent)} of {len(rows)} rows have not been computed", _AGAIN)
    else:
        yield Finding(marks.path, "intact")


def _array(file: RowFile, due: np.ndarray, seed: int, unwritten: set[int] | None = None) -> Iterator[Finding]:
    """Check the rows of an array that must be there. Rows that were marked but never written join `unwritten`."""
    if problem := _problem(file):
        yield problem
        return
    wrong, bare = file.compare(due, seed, again=True)
    if file.key in ("features", "scores"):  # which are written at once
        wrong, bare = np.concatenate([wrong, bare]), bare[:0]
    empty = file.empty(bare) if file.key != "out_to_loss" else bare[:0]
    if unwritten is not None:
        unwritten |= set(empty.tolist())
    if len(wrong) or file.stray_bytes():
        detail = f"rows {wrong[:5].tolist()} do not match their checksums ({len(wrong)} of {len(due)})"
        yield Finding(file.path, "damaged", detail, file.remedy)
    elif len(bare) > len(empty):
        yield Finding(file.path, "unchecked", f"{len(bare)} rows were written past the saver")
    else:
        yield Finding(file.path, "intact")


def _problem(file: RowFile) -> Finding | None:
    """Open a file for reading, and return what keeps it from being opened."""
    finding = judged(file.path, lambda: file.open("r"), file.remedy)
    return None if finding.state == "intact" else finding
