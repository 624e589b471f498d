"""`hf-trak inspect`: show what a directory holds, what is missing, and whether it is intact."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_trak.cli.parser import OutputArguments, answer, parse_yaml_and_args, size, table
from hf_trak.curvature.files import curvature_records, described_curvature
from hf_trak.errors import StoreError
from hf_trak.store.shard_set import ShardSet
from hf_trak.store.solver_files import SolverFiles
from hf_trak.store.store import FeatureStore

_SHOWN = (
    "model_name", "model_class", "model_revision", "task", "projection", "proj_dim", "seed", "feature_dtype",
    "train_size", "shard_size", "train_fingerprint", "hf_trak_version",
)  # fmt: skip


@dataclass
class InspectArguments:
    """The directory to inspect."""

    output_dir: str = field(metadata={"help": "Directory of a feature store; may stand first."})
    verify: bool = field(default=True, metadata={"help": "Read every shard and compare it with its checksum."})


def run(argv: Sequence[str]) -> int:
    """Describe a store. Returns the exit status, 1 if anything in it is damaged."""
    args, output = parse_yaml_and_args(
        (InspectArguments, OutputArguments),
        argv,
        prog="hf-trak inspect",
        description="Show what a feature store holds, what is missing, and whether it is intact. The exit status is 1 "
        "if a file is damaged, but not if one is missing.",
    )
    store = FeatureStore.load(args.output_dir)
    config = store.config
    content: dict[str, Any] = {
        "output_dir": str(args.output_dir),
        "config": {name: config[name] for name in _SHOWN if config.get(name) is not None},
        "parameters": len(config.get("parameters") or []),
        "bytes": sum(path.stat().st_size for path in Path(args.output_dir).rglob("*") if path.is_file()),
        "checkpoints": [_checkpoint(store, model_id, args.verify) for model_id in store.model_ids],
        "curvatures": [],
        "experiments": [_experiment(store, name) for name in store.experiments],
        "runs": sorted(path.parent.name for path in Path(args.output_dir).glob("scores/*/run")),
    }
    damaged = [text for entry in content["checkpoints"] for text in entry["damaged"]]
    for path in curvature_records(Path(args.output_dir)):
        try:
            content["curvatures"].append(described_curvature(path))
        except StoreError as error:
            damaged.append(str(error))
    content["intact"] = not damaged
    content["complete"] = bool(content["checkpoints"]) and all(e["complete"] for e in content["checkpoints"])
    answer(content, _lines(content, damaged), output.json)
    return 1 if damaged else 0


def _checkpoint(store: FeatureStore, model_id: int, verify: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {"model_id": model_id, "damaged": []}
    try:
        info = store.checkpoint_info(model_id)
        entry |= {"source": info.get("source"), "fingerprint": info.get("fingerprint")}
        shards = store.train(model_id)
    except StoreError as error:
        return {**entry, "damaged": [str(error)], "complete": False}
    entry |= {"shards": len(shards), "missing_shards": _missing(shards, verify, entry["damaged"])}
    entry["gram"] = False
    if not entry["missing_shards"] and not entry["damaged"]:
        try:
            entry["gram"] = store.read_gram(model_id) is not None
        except StoreError as error:
            entry["damaged"].append(str(error))
    finished = [path for path in SolverFiles(store, model_id).paths() if ".passes." not in path.name]
    entry["complete"] = entry["gram"] or bool(finished)
    return entry


def _missing(shards: ShardSet, verify: bool, damaged: list[str]) -> list[int]:
    missing = []
    for index in range(len(shards)):
        try:
            if not shards.is_written(index):
                missing.append(index)
            elif verify:
                shards.read(index, verify=True)
        except StoreError as error:
            damaged.append(str(error))
    return missing


def _experiment(store: FeatureStore, name: str) -> dict[str, Any]:
    info = store.experiment_info(name)
    return {"name": name, "targets": info.get("num_targets")}


def _lines(content: dict[str, Any], damaged: list[str]) -> list[str]:
    lines = table({name.replace("_", " "): value for name, value in content["config"].items()})
    lines.append(f"{size(content['bytes'])} on disk")
    for entry in content["checkpoints"]:
        missing = len(entry.get("missing_shards", []))
        state = "complete" if entry["complete"] else f"{missing} of {entry.get('shards', '?')} shards missing"
        if not entry["complete"] and not missing:
            state = "damaged" if entry["damaged"] else "no Gram matrix yet"
        lines.append(f"checkpoint {entry['model_id']}: {state}; from {entry.get('source')}")
    lines += [
        f"curvature of checkpoint {entry['model_id']}: {entry['kind']}, fitted to {entry['rows']:,} rows"
        for entry in content["curvatures"]
    ]
    lines += [f"experiment {entry['name']}: {entry['targets']} targets" for entry in content["experiments"]]
    lines += [f"run {name}" for name in content["runs"]]
    lines += [f"DAMAGED: {text}" for text in damaged]
    if not content["complete"] and not damaged:
        lines.append("Run `hf-trak featurize` with the same arguments to finish it.")
    return [*lines, "intact" if content["intact"] else "not intact"]
