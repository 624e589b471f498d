"""Checking every byte of a directory of a `MmapSaver`, and adding checksums to those of format 1."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from hf_trak.errors import IncompleteStoreError, StoreError
from hf_trak.store.findings import Finding
from hf_trak.store.leftovers import leftovers
from hf_trak.store.sealed import write_sealed
from hf_trak.traker.savers.mmap_directory import EXPERIMENTS, METADATA, ArrayPlan, MmapDirectory, is_id
from hf_trak.traker.savers.row_files import RowFile, add_sums
from hf_trak.traker.savers.run_metadata import IDENTITY_FORMAT

_UPGRADE = "`hf-trak upgrade` adds checksums."
_AGAIN = "Run the same script again."


def verify_mmap(save_dir: Path) -> Iterator[Finding]:
    """Check a directory of a `MmapSaver`, file by file.

    Args:
        save_dir: the directory.

    Returns:
        an iterator of one finding per file, missing ones included.

    Raises:
        IncompleteStoreError: there are no results of a `MmapSaver` in this directory.
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
            yield Finding(path, "missing", "targets and scores are there without it", _AGAIN)
    names = {path.name for path in save_dir.iterdir() if path.is_dir()} | {p.stem for p in save_dir.glob("*.json")}
    for model_id in sorted(int(name) for name in names if is_id(name)):
        yield from _model_id(directory, model_id, experiments)
    for name, entry in sorted(experiments.items()):
        yield from _scores(directory, name, entry)
    for one in leftovers(save_dir):
        yield Finding(one.path, "leftover", f"{one.size} bytes", "`hf-trak clean` removes it.")


def upgrade_mmap(save_dir: Path) -> None:
    """Add checksums to a directory of format 1. Interrupted, the same call goes on; done, it changes nothing.

    Every array is copied once, beside its old file. Nothing else may write to the directory meanwhile. Before, all
    arrays are checked for their sizes, for values that are not finite, and for marks that are missing.

    Args:
        save_dir: the directory.

    Raises:
        IncompleteStoreError: there are no results of a `MmapSaver` in this directory.
        StoreError: a file is damaged, or cannot be written; all results are still there.
    """
    save_dir = Path(save_dir)
    old = MmapDirectory.load(save_dir)
    if old.version > 1:
        return
    new = MmapDirectory(save_dir, old.metadata, 2)
    infos = {model_id: old.read_info(model_id) for model_id in old.model_ids()}
    experiments = old.read_experiments()
    for model_id, info in infos.items():
        _require_sound(old, model_id, info, experiments)
    for model_id, info in infos.items():
        infos[model_id] = _upgraded_id(new, model_id, info, experiments)
    for name, entry in experiments.items():
        plan = new.scores_array(name, entry["num_targets"])
        if entry.get("scores_finalized"):
            _add(plan, np.arange(plan.shape[0]), new.scores_seed(name, entry))
    for model_id, info in infos.items():
        new.write_info(model_id, info)
        new.claim(model_id, info)
    if (save_dir / EXPERIMENTS).exists():
        new.write_experiments(experiments)
    # last, because it says that all others have checksums
    write_sealed(save_dir / METADATA, {**old.metadata, IDENTITY_FORMAT: 1})


def _model_id(
    directory: MmapDirectory, model_id: int, experiments: Mapping[str, Mapping[str, Any]]
) -> Iterator[Finding]:
    path, member = directory.id_path(model_id), directory.member_path(model_id)
    if not path.exists():
        yield Finding(path, "missing", "the arrays of this model id say nothing without it", _AGAIN)
        return
    try:
        info = directory.read_info(model_id)
    except StoreError as error:
        yield Finding(path, "damaged", str(error), f"Restore it, or delete {path.parent} and featurize again.")
        return
    yield _intact(directory, path)
    if member.exists():  # `read_info` has compared it
        yield _intact(directory, member)
    elif directory.version > 1:
        yield Finding(member, "missing", "the loss of this model id could not be noticed", _AGAIN)
    deleted = bool(info.get("grads_deleted"))
    seeds = {name: directory.rows_seed(info, name) for name in ("grads", "out_to_loss")}
    if info.get("finalized"):
        seeds["features"] = directory.features_seed(info)
    plans = directory.train_arrays(model_id, deleted)
    yield from _arrays(directory, plans, seeds, all_rows=bool(info.get("finalized")))
    for name, entry in sorted(experiments.items()):
        plans = directory.target_arrays(model_id, name, entry["num_targets"])
        if any(plan.path.exists() for plan in plans):
            seeds = {plans[0].key: directory.rows_seed(info, "targets", experiment=name)}
            yield from _arrays(directory, plans, seeds, all_rows=False)


def _arrays(
    directory: MmapDirectory, plans: list[ArrayPlan], seeds: Mapping[str, int], all_rows: bool
) -> Iterator[Finding]:
    """The arrays of a model id, or of an experiment under it; that of the marks is the last one."""
    files: dict[str, RowFile] = {}
    for plan in plans:
        try:
            files[plan.key] = RowFile(plan.path, plan.shape, plan.dtype, plan.checked, "r", plan.remedy)
        except FileNotFoundError:
            yield Finding(plan.path, "missing", "the array is not there", plan.remedy)
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
            yield Finding(plan.path, "missing", "it is not computed", _AGAIN)
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
        return Finding(plan.path, "damaged", f"it says of rows {rows[:5]} what cannot be", plan.remedy)
    if len(absent):
        return Finding(plan.path, "missing", f"{len(absent)} of {len(values)} rows are not computed", _AGAIN)
    if directory.version == 1:
        return Finding(plan.path, "unchecked", "it has no checksums", _UPGRADE)
    return Finding(plan.path, "intact")


def _scores(directory: MmapDirectory, name: str, entry: Mapping[str, Any]) -> Iterator[Finding]:
    plan = directory.scores_array(name, entry["num_targets"])
    if not entry.get("scores_finalized"):
        if plan.path.exists():
            yield Finding(plan.path, "missing", "its scores are not complete", plan.remedy)
        return
    try:
        file = RowFile(plan.path, plan.shape, plan.dtype, plan.checked, "r", plan.remedy)
    except FileNotFoundError:
        yield Finding(plan.path, "missing", "the scores are not there", plan.remedy)
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


def _require_sound(
    directory: MmapDirectory, model_id: int, info: Mapping[str, Any], experiments: Mapping[str, Mapping[str, Any]]
) -> None:
    """Raise `StoreError` unless the arrays of a model id are what they should be, as far as that can be seen."""
    plans = directory.train_arrays(model_id, bool(info.get("grads_deleted")))
    groups = [plans if any(plan.path.exists() for plan in plans) else []]
    for name, entry in experiments.items():
        plans = directory.target_arrays(model_id, name, entry["num_targets"])
        groups.append(plans if any(plan.path.exists() for plan in plans) else [])
    for plans in filter(None, groups):
        files = [_opened(plan) for plan in plans]
        marks = files[-1].array.reshape(-1)
        bad = np.flatnonzero((marks != 0) & (marks != 1)).tolist()
        if bad or (files[-1].path.stem == "_is_featurized" and info.get("finalized") and not marks.all()):
            raise StoreError(
                f"{files[-1].path} is damaged: it says of rows {bad[:5] or np.flatnonzero(marks == 0)[:5].tolist()} "
                f"what cannot be. {files[-1].remedy}"
            )
        for plan, file in zip(plans[:-1], files[:-1], strict=True):
            due = np.flatnonzero(marks) if plan.key != "features" else np.arange(len(marks))[: plan.shape[0]]
            if not bool(np.isfinite(file.array[due]).all()):
                raise StoreError(f"{plan.path} is damaged: it has values that are not finite. {plan.remedy}")


def _opened(plan: ArrayPlan) -> RowFile:
    try:
        return RowFile(plan.path, plan.shape, plan.dtype, plan.checked, "r", plan.remedy)
    except FileNotFoundError as error:
        raise StoreError(f"{plan.path} is missing. Expected it beside the other arrays. {plan.remedy}") from error


def _upgraded_id(
    directory: MmapDirectory, model_id: int, info: dict[str, Any], experiments: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Add checksums to the arrays of a model id. Returns what is then to be said of it."""
    info = info | directory.identity(model_id, info.get("fingerprint"))
    plans = {plan.key: plan for plan in directory.train_arrays(model_id, bool(info.get("grads_deleted")))}
    marks = plans.pop("is_featurized")
    content = {}
    if marks.path.exists():
        done = _marked(marks)
        for key in [key for key in ("grads", "out_to_loss") if key in plans]:
            sums = _add(plans[key], done, directory.rows_seed(info, key))
            content[key] = xxhash.xxh3_128_hexdigest(sums.tobytes())
        if info.get("finalized"):
            info["content"] = content
        rows = np.arange(marks.shape[0]) if info.get("finalized") else done[:0]
        _add(plans["features"], rows, directory.features_seed(info))
    for name, entry in experiments.items():
        grads, marks = directory.target_arrays(model_id, name, entry["num_targets"])
        if marks.path.exists():
            _add(grads, _marked(marks), directory.rows_seed(info, "targets", experiment=name))
    return info


def _marked(plan: ArrayPlan) -> np.ndarray:
    return np.flatnonzero(_opened(plan).array.reshape(-1) == 1)


def _add(plan: ArrayPlan, rows: np.ndarray, seed: int) -> np.ndarray:
    return add_sums(plan.path, plan.shape, plan.dtype, rows, seed)
