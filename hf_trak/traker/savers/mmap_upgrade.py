"""Adding checksums to a directory of a `MmapSaver` of format 1."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from hf_trak.errors import StoreError
from hf_trak.store.sealed import write_sealed
from hf_trak.traker.savers.mmap_arrays import ArrayPlan
from hf_trak.traker.savers.mmap_directory import EXPERIMENTS, METADATA, MmapDirectory
from hf_trak.traker.savers.row_files import RowFile, add_sums
from hf_trak.traker.savers.run_metadata import IDENTITY_FORMAT


def upgrade_mmap(save_dir: Path) -> None:
    """Add checksums to a directory of format 1.

    After an interruption, the same call goes on where it stopped; on an upgraded directory it does nothing. Every
    array is copied once, beside its old file. Nothing else may write to the directory meanwhile. First of all, the
    sizes of all arrays are checked, and that values are finite and no mark is missing.

    Args:
        save_dir (`Path`):
            The directory.

    Raises:
        IncompleteStoreError: the directory holds no results of a `MmapSaver`.
        StoreError: a file is damaged, or cannot be written. No result is lost.
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
        plan = new.arrays.of_scores(name, entry["num_targets"])
        if entry.get("scores_finalized"):
            _add(plan, np.arange(plan.shape[0]), new.scores_seed(name, entry))
    for model_id, info in infos.items():
        new.write_info(model_id, info)
        new.claim(model_id, info)
    if (save_dir / EXPERIMENTS).exists():
        new.write_experiments(experiments)
    # This file comes last, because it says that all others have checksums.
    write_sealed(save_dir / METADATA, {**old.metadata, IDENTITY_FORMAT: 1})


def _require_sound(
    directory: MmapDirectory, model_id: int, info: Mapping[str, Any], experiments: Mapping[str, Mapping[str, Any]]
) -> None:
    """Raise `StoreError` if an array of a model id is visibly damaged."""
    plans = directory.arrays.of_train_set(model_id, bool(info.get("grads_deleted")))
    groups = [plans if any(plan.path.exists() for plan in plans) else []]
    for name, entry in experiments.items():
        plans = directory.arrays.of_targets(model_id, name, entry["num_targets"])
        groups.append(plans if any(plan.path.exists() for plan in plans) else [])
    for plans in filter(None, groups):
        files = [_opened(plan) for plan in plans]
        marks = files[-1].array.reshape(-1)
        bad = np.flatnonzero((marks != 0) & (marks != 1)).tolist()
        if bad or (files[-1].path.stem == "_is_featurized" and info.get("finalized") and not marks.all()):
            raise StoreError(
                f"{files[-1].path} is damaged: its marks of rows "
                f"{bad[:5] or np.flatnonzero(marks == 0)[:5].tolist()} are impossible. {files[-1].remedy}"
            )
        for plan, file in zip(plans[:-1], files[:-1], strict=True):
            due = np.flatnonzero(marks) if plan.key != "features" else np.arange(len(marks))[: plan.shape[0]]
            if not bool(np.isfinite(file.array[due]).all()):
                raise StoreError(f"{plan.path} is damaged: it has values that are not finite. {plan.remedy}")


def _opened(plan: ArrayPlan) -> RowFile:
    try:
        return plan.open("r")
    except FileNotFoundError as error:
        raise StoreError(f"{plan.path} is missing beside the other arrays. {plan.remedy}") from error


def _upgraded_id(
    directory: MmapDirectory, model_id: int, info: dict[str, Any], experiments: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Add checksums to the arrays of a model id. Returns its new description."""
    info = info | directory.identity(model_id, info.get("fingerprint"))
    plans = {plan.key: plan for plan in directory.arrays.of_train_set(model_id, bool(info.get("grads_deleted")))}
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
        grads, marks = directory.arrays.of_targets(model_id, name, entry["num_targets"])
        if marks.path.exists():
            _add(grads, _marked(marks), directory.rows_seed(info, "targets", experiment=name))
    return info


def _marked(plan: ArrayPlan) -> np.ndarray:
    return np.flatnonzero(_opened(plan).array.reshape(-1) == 1)


def _add(plan: ArrayPlan, rows: np.ndarray, seed: int) -> np.ndarray:
    return add_sums(plan.path, plan.shape, plan.dtype, rows, seed)
