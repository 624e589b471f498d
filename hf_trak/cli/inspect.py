"""`hf-trak inspect`: show what a directory holds, check every byte of it, and remove what interrupted runs left."""

import importlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hf_trak.cli.parser import OutputArguments, answer, option, parse_yaml_and_args, size, table
from hf_trak.curvature.files import curvature_records, described_curvature, verify_curvature
from hf_trak.errors import StoreError
from hf_trak.store.atomic import Leftover, leftovers
from hf_trak.store.sealed import MANIFEST_FILE, Finding
from hf_trak.store.solver_files import SolverFiles
from hf_trak.store.store import FeatureStore
from hf_trak.store.verification import RecordCheck, verify, verify_store

_SHOWN = (
    "model_name", "model_class", "model_revision", "task", "projection", "proj_dim", "seed", "feature_dtype",
    "train_size", "shard_size", "train_fingerprint", "hf_trak_version",
)  # fmt: skip


@dataclass
class InspectArguments:
    """The directory to inspect, and what to do there."""

    output_dir: str = option(
        "Directory of a store, an index, a run, a TRAKer, retrainings or a bank; may stand first."
    )
    check: bool = option("Compare every byte with the checksums and identities in the directory.", False)
    clean: bool = option(
        "Remove temporary files of dead processes of this host, and those of other hosts that are over a "
        "day old. Files of results are never touched.",
        False,
    )
    everything: bool = option(
        "With --clean, also remove files that a running process may be writing. Use it only while nothing runs there.",
        False,
    )
    all_files: bool = option("With --check, also list intact files.", False)


def run(argv: Sequence[str]) -> int:
    """Describe, check or clean a directory. Returns the exit status, 1 if anything in it is damaged.

    Raises:
        FileNotFoundError: the directory does not exist.
    """
    args, output = parse_yaml_and_args(
        (InspectArguments, OutputArguments),
        argv,
        prog="hf-trak inspect",
        description="Show what a directory that hf_trak wrote holds, and what is missing. With --check, read all of "
        "it, and say what is damaged and how to compute it again. With --clean, remove what interrupted processes "
        "left. The exit status is 1 if a file is damaged, but not if one is missing.",
    )
    directory = Path(args.output_dir)
    if not directory.is_dir():
        raise FileNotFoundError(
            f"`output_dir` is {args.output_dir!r}, which is not a directory. Expected the one to inspect."
        )
    content: dict[str, Any] = {"output_dir": str(directory)}
    lines: list[str] = []
    damaged = False
    if args.clean:
        lines += _clean(directory, args.everything, content)
    if args.check:
        findings = list(verify(directory, _records()))
        counts = Counter(one.state for one in findings)
        content |= {"files": [{**asdict(one), "path": str(one.path)} for one in findings], "counts": dict(counts)}
        lines += _told(findings, counts, args.all_files)
        damaged = counts["damaged"] > 0
    if not (args.clean or args.check):
        damaged = _describe(directory, content, lines)
    answer(content, lines, output.json)
    return 1 if damaged else 0


def _records() -> dict[str, RecordCheck]:
    """Return where records are, and what checks the directory of one, imported when there is one."""
    verify_run = _imported("hf_trak.report.run_record", "verify_run")
    return {
        f"**/{FeatureStore.CONFIG_FILE}": verify_store,
        "**/curvature/*/curvature.json": verify_curvature,
        "**/search.json": _imported("hf_trak.scores.search", "verify_search"),
        "metadata.json": _imported("hf_trak.traker.savers.check", "check_run"),
        "retraining.json": _imported("hf_trak.evaluation.retraining_files", "verify_retraining"),
        "bank.json": _imported("hf_trak.evaluation.bank", "verify_bank"),
        "**/record.json": _imported("hf_trak.trajectory.record", "verify_record"),
        "run.json": verify_run,
        "run": verify_run,
        "scores/*/run": verify_run,
    }


def _imported(module: str, name: str) -> RecordCheck:
    return lambda directory: getattr(importlib.import_module(module), name)(directory)


def _told(findings: list[Finding], counts: Counter[Any], every: bool) -> list[str]:
    lines = []
    for one in findings:
        if every or one.state != "intact":
            detail = f": {one.detail}" if one.detail else ""
            remedy = f" → {one.remedy}" if one.remedy else ""
            lines.append(f"{one.state.upper():<9} {one.path}{detail}{remedy}")
    states = ("intact", "damaged", "missing", "unchecked", "leftover")
    return [*lines, ", ".join(f"{counts[state]} {state}" for state in states)]


# -- leftovers -------------------------------------------------------------------------------------------------------


def _clean(directory: Path, everything: bool, content: dict[str, Any]) -> list[str]:
    """Remove leftovers, and return lines about them."""
    from hf_trak.runtime.progress import duration  # slow to import

    found = leftovers(directory)
    gone = [one for one in found if (everything or one.removable) and one.remove()]
    content |= {
        "leftovers": [_leftover(one) for one in found],
        "bytes": sum(one.size for one in found),
        "removed": [str(one.path) for one in gone],
    }
    lives = {True: "its writer is running", False: "its writer is dead", None: "its writer is on another host"}
    return [
        f"{'removed' if one in gone else 'kept'}: {one.path} ({size(one.size)}, {duration(one.age)} old, "
        f"{lives[one.alive]})"
        for one in found
    ] or ["Nothing was left behind."]


def _leftover(one: Leftover) -> dict[str, Any]:
    times = {"age_seconds": round(one.age), "host": one.host, "writer_lives": one.alive}
    return {"path": str(one.path), "bytes": one.size, **times}


# -- what a store holds ----------------------------------------------------------------------------------------------


def _describe(directory: Path, content: dict[str, Any], lines: list[str]) -> bool:
    """Describe a store, whose shards are not read. Returns whether anything is damaged."""
    store = FeatureStore.load(directory)
    config = store.config
    content |= {
        "config": {name: config[name] for name in _SHOWN if config.get(name) is not None},
        "parameters": len(config.get("parameters") or []),
        "bytes": sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()),
        "checkpoints": [_checkpoint(store, model_id) for model_id in store.model_ids],
        "curvatures": [],
        "experiments": [
            {"name": name, "targets": store.experiment_info(name).get("num_targets")} for name in store.experiments
        ],
        "runs": sorted(path.parent.name for path in directory.glob("scores/*/run")),
        "recorded": [],
    }
    damaged = [text for entry in content["checkpoints"] for text in entry["damaged"]]
    for path in curvature_records(directory):
        try:
            content["curvatures"].append(described_curvature(path))
        except StoreError as error:
            damaged.append(str(error))
    from hf_trak.trajectory.record import RECORD_FILE, RunRecord

    for path in sorted(directory.glob(f"trajectory/*/{RECORD_FILE}")):
        try:
            states = RunRecord.open(path.parent).states()
            content["recorded"].append(
                {"name": path.parent.name, "states": len(states), "steps": max(states, default=0)}
            )
        except StoreError as error:
            damaged.append(str(error))
    content["intact"] = not damaged
    content["complete"] = bool(content["checkpoints"]) and all(e["complete"] for e in content["checkpoints"])
    lines += _lines(content, damaged)
    return bool(damaged)


def _checkpoint(store: FeatureStore, model_id: int) -> dict[str, Any]:
    entry: dict[str, Any] = {"model_id": model_id, "damaged": [], "complete": False}
    try:
        info = store.checkpoint_info(model_id)
        entry |= {"source": info.get("source"), "fingerprint": info.get("fingerprint")}
        shards = store.train(model_id)
        entry |= {"shards": len(shards), "missing_shards": [], "gram": False}
        for index in range(len(shards)):
            try:
                if not shards.is_written(index):
                    entry["missing_shards"].append(index)
            except StoreError as error:
                entry["damaged"].append(str(error))
        if not entry["missing_shards"] and not entry["damaged"]:
            entry["gram"] = store.read_gram(model_id) is not None
    except StoreError as error:
        entry["damaged"].append(str(error))
    finished = [path for path in SolverFiles(store, model_id).paths() if ".passes." not in path.name]
    # Of a published index that was chosen to be small, the solver is computed where it is loaded.
    published = (store.output_dir / MANIFEST_FILE).exists() and not (
        entry.get("missing_shards", True) or entry["damaged"]
    )
    return {**entry, "complete": entry.get("gram", False) or bool(finished) or published}


def _lines(content: dict[str, Any], damaged: list[str]) -> list[str]:
    shown = dict(content["config"])
    if isinstance(task := shown.get("task"), dict):
        shown["task"] = str(task.get("class", "")).rpartition(".")[2]
    lines = table({name.replace("_", " "): value for name, value in shown.items()})
    lines.append(f"{size(content['bytes'])} on disk")
    for entry in content["checkpoints"]:
        missing = len(entry.get("missing_shards", []))
        state = "complete" if entry["complete"] else f"{missing} of {entry.get('shards', '?')} shards missing"
        if not entry["complete"] and not missing:
            state = "damaged" if entry["damaged"] else "no Gram matrix yet"
        source = "" if entry.get("source") is None else f"; from {entry['source']}"
        lines.append(f"checkpoint {entry['model_id']}: {state}{source}")
    lines += [
        f"curvature of checkpoint {entry['model_id']}: {entry['kind']}, fitted to {entry['rows']:,} rows"
        for entry in content["curvatures"]
    ]
    lines += [f"experiment {entry['name']}: {entry['targets']} targets" for entry in content["experiments"]]
    lines += [f"run {name}" for name in content["runs"]]
    lines += [
        f"recorded training {entry['name']}: {entry['steps']:,} steps, weights at {entry['states']:,} of them"
        for entry in content["recorded"]
    ]
    lines += [f"DAMAGED: {text}" for text in damaged]
    if not content["checkpoints"] and content["recorded"]:
        lines.append("Nothing is featurized, and a recorded training can be replayed.")
    elif not content["complete"] and not damaged:
        lines.append("Run `hf-trak featurize` with the same arguments to finish it.")
    return [*lines, "intact (`--check` reads every byte)" if content["intact"] else "not intact"]
