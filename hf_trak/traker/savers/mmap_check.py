"""Checking every byte of a directory of a `MmapSaver`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hf_trak.errors import IncompleteStoreError, StoreError
from hf_trak.store.atomic import leftovers
from hf_trak.store.shards import Finding
from hf_trak.traker.savers.mmap_arrays import ArrayPlan
from hf_trak.traker.savers.mmap_directory import EXPERIMENTS, METADATA, MmapDirectory, is_id
from hf_trak.traker.savers.row_files import RowFile

_UPGRADE = "`hf-trak upgrade` adds checksums."
_AGAIN = "Run the same script again."


def verify_mmap(save_dir: Path) -> Iterator[Finding]:
    """Check a directory of a `MmapSaver`, file by file.

    Args:
        save_dir (`Path`):
            The directory.

    Yields:
        `Finding`: one per file, missing ones included.

    Raises:
        IncompleteStoreError: the directory holds no results of a `MmapSaver`.
    """
    save_dir = Path(save_dir)
    try:
        directory = MmapDirectory.load(save_dir)
    except IncompleteStoreError:
        raise
    except StoreError as error:
        yield Finding(save_dir / METADATA, "damaged", str(error), "Restore it from a copy, or use another save_dir.")
        return
    yield _intact(directory, save_dir / METADATA)
    experiments: dict[str, dict[str, Any]] = {}
    path = save_dir / EXPERIMENTS
    try:
        experiments = directory.read_experiments()
    except StoreError as error:
        yield Finding(path, "damaged", str(error), "Delete it and score the targets again.")
    else:
        if path.exists():
            yield _intact(directory, path)
        elif any(save_dir.glob("*/*_is_scored.mmap")) or any(save_dir.glob("scores/*.mmap")):
            yield Finding(path, "missing", "targets and scores need it", _AGAIN)
    names = {path.name for path in save_dir.iterdir() if path.is_dir()} | {p.stem for p in save_dir.glob("*.json")}
    for model_id in sorted(int(name) for name in names if is_id(name)):
        yield from _model_id(directory, model_id, experiments)
    for name, entry in sorted(experiments.items()):
        yield from _scores(directory, name, entry)
    for one in leftovers(save_dir):
        yield Finding(one.path, "leftover", f"{one.size} bytes", "`hf-trak clean` removes it.")


def _model_id(
    directory: MmapDirectory, model_id: int, experiments: Mapping[str, Mapping[str, Any]]
) -> Iterator[Finding]:
    path, member = directory.id_path(model_id), directory.member_path(model_id)
    if not path.exists():
        yield Finding(path, "missing", "it describes the arrays of this model id", _AGAIN)
        return
    try:
        info = directory.read_info(model_id)
    except StoreError as error:
        yield Finding(path, "damaged", str(error), f"Restore it, or delete {path.parent} and featurize again.")
        return
    yield _intact(directory, path)
    if member.exists():  # `read_info` has compared its content
        yield _intact(directory, member)
    elif directory.version > 1:
        yield Finding(member, "missing", "without it, nobody would notice that this model id vanished", _AGAIN)
    deleted = bool(info.get("grads_deleted"))
    seeds = {name: directory.rows_seed(info, name) for name in ("grads", "out_to_loss")}
    if info.get("finalized"):
        seeds["features"] = directory.features_seed(info)
    plans = directory.arrays.of_train_set(model_id, deleted)
    yield from _arrays(directory, plans, seeds, all_rows=bool(info.get("finalized")))
    for name, entry in sorted(experiments.items()):
        plans = directory.arrays.of_targets(model_id, name, entry["num_targets"])
        if any(plan.path.exists() for plan in plans):
            seeds = {plans[0].key: directory.rows_seed(info, "targets", experiment=name)}
            yield from _arrays(directory, plans, seeds, all_rows=False)


def _arrays(
    directory: MmapDirectory, plans: list[ArrayPlan], seeds: Mapping[str, int], all_rows: bool
) -> Iterator[Finding]:
    """Check the arrays of a model id, or of an experiment under it. The last plan is that of the marks."""
    files: dict[str, RowFile] = {}
    for plan in plans:
        try:
            files[plan.key] = plan.open("r")
        except FileNotFoundError:
            yield Finding(plan.path, "missing", "the array does not exist", plan.remedy)
        except StoreError as error:
            yield Finding(plan.path, "damaged", str(error), plan.remedy)
    marks = files.pop(plans[-1].key, None)
    rows = np.arange(plans[-1].shape[0])
    marked = rows if marks is None else rows[marks.array.reshape(-1) == 1]
    unwritten: set[int] = set()
    for plan in plans[:-1]:
        if (file := files.get(plan.key)) is None:
            continue
        if plan.key not in seeds:
            yield Finding(plan.path, "missing", "it has not been computed", _AGAIN)
            continue
        due = rows if plan.key == "features" else marked
        wrong, bare = file.compare(due, seeds[plan.key], again=True)
        empty = bare[~np.asarray(file.array[bare] != 0).any(axis=1)] if plan.key != "out_to_loss" else bare[:0]
        unwritten |= set() if plan.key == "features" else set(empty.tolist())
        if len(wrong) or file.stray_bytes() or (plan.key == "features" and len(empty)):
            detail = f"rows {wrong[:5].tolist()} do not match their checksums ({len(wrong)} of {len(due)})"
            yield Finding(plan.path, "damaged", detail, plan.remedy)
        elif directory.version == 1:
            yield Finding(plan.path, "unchecked", "it has no checksums", _UPGRADE)
        elif len(bare) > len(empty):
            yield Finding(plan.path, "unchecked", f"{len(bare)} rows were written past the saver")
        else:
            yield Finding(plan.path, "intact")
    if marks is not None:
        yield _marks(directory, plans[-1], marks, unwritten, all_rows)


def _marks(directory: MmapDirectory, plan: ArrayPlan, marks: RowFile, unwritten: set[int], all_rows: bool) -> Finding:
    values = marks.array.reshape(-1)
    odd = np.flatnonzero((values != 0) & (values != 1))
    absent = np.flatnonzero(values == 0)
    if len(odd) or unwritten or (all_rows and len(absent)):
        rows = sorted({*odd.tolist(), *unwritten, *(absent.tolist() if all_rows else ())})
        return Finding(plan.path, "damaged", f"its marks of rows {rows[:5]} are impossible", plan.remedy)
    if len(absent):
        return Finding(plan.path, "missing", f"{len(absent)} of {len(values)} rows have not been computed", _AGAIN)
    if directory.version == 1:
        return Finding(plan.path, "unchecked", "it has no checksums", _UPGRADE)
    return Finding(plan.path, "intact")


def _scores(directory: MmapDirectory, name: str, entry: Mapping[str, Any]) -> Iterator[Finding]:
    plan = directory.arrays.of_scores(name, entry["num_targets"])
    if not entry.get("scores_finalized"):
        if plan.path.exists():
            yield Finding(plan.path, "missing", "its scores are incomplete", plan.remedy)
        return
    try:
        file = plan.open("r")
    except FileNotFoundError:
        yield Finding(plan.path, "missing", "the scores do not exist", plan.remedy)
        return
    except StoreError as error:
        yield Finding(plan.path, "damaged", str(error), plan.remedy)
        return
    wrong, bare = file.compare(np.arange(plan.shape[0]), directory.scores_seed(name, entry), again=True)
    if len(wrong) or len(bare) or file.stray_bytes():
        detail = f"{len(wrong) + len(bare)} of {plan.shape[0]} rows do not match their checksums"
        yield Finding(plan.path, "damaged", detail, plan.remedy)
    else:
        yield _intact(directory, plan.path)


def _intact(directory: MmapDirectory, path: Path) -> Finding:
    if directory.version == 1:
        return Finding(path, "unchecked", "it has no checksum", _UPGRADE)
    return Finding(path, "intact")
