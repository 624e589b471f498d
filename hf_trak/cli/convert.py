"""`hf-trak convert`: keep a feature store with fewer bits per number."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_trak.cli.parser import OutputArguments, answer, option, parse_yaml_and_args
from hf_trak.cli.record import RECORD, is_copy, remembered
from hf_trak.config import FeatureDtype, TrakConfig
from hf_trak.runtime.checks import checked_int
from hf_trak.store.sealed import read_sealed, unsealed, write_sealed
from hf_trak.store.store import FeatureStore


@dataclass
class ConvertArguments:
    """The store, and what becomes of it."""

    output_dir: str = option("Directory of the store, or copy of an index; may stand first.")
    to: str = option("Directory of the result.")
    feature_dtype: FeatureDtype = option(
        "Storage of the result, of fewer bits than now: `int8`, `int4`, `int2`, `int1` or a dtype.", "int4"
    )
    targets: int = option("Number of training rows that are drawn as targets to compare scores; 0 compares none.", 16)
    use_cpu: bool = option("Stay on the CPU even if the machine has an accelerator.", False)

    def __post_init__(self) -> None:
        self.targets = checked_int(self.targets, "targets", 0, type_error=ValueError)


def run(argv: Sequence[str]) -> None:
    """Convert a store, and compare scores from both."""
    args, output = parse_yaml_and_args(
        (ConvertArguments, OutputArguments),
        argv,
        prog="hf-trak convert",
        description="Write the features of a store into another directory with fewer bits per number, and print how "
        "well the scores agree. Neither the model nor the rows are needed. After an interruption, the same command "
        "continues.",
    )
    from hf_trak.featurize.converting import convert_store
    from hf_trak.featurize.fidelity import compare_stores
    from hf_trak.runtime.processes import Processes

    source, trak = _opened(args)
    processes = Processes(args.use_cpu)
    result = convert_store(source, args.to, args.feature_dtype, trak, processes)
    processes.broadcast_from_main(lambda: _keep_record(args, result.proj_dim))
    content: dict[str, Any] = {"output_dir": args.to, "feature_dtype": args.feature_dtype, "fidelity": None}
    lines = [f"Converted: {args.to}, checkpoints {result.model_ids}"]
    if args.targets:
        found = compare_stores(source, result, trak, processes, args.targets)
        content["fidelity"] = found.to_dict()
        lines += str(found).splitlines()
    answer(content, lines, output.json)


def _opened(args: ConvertArguments) -> tuple[FeatureStore, TrakConfig]:
    """Open the store, with the settings that it was made or published with."""
    fields = {"output_dir": args.to, "use_cpu": args.use_cpu}
    if not is_copy(args.output_dir):
        saved = remembered(args.output_dir)
        known = {name: value for name, value in saved.items() if name in TrakConfig.__dataclass_fields__}
        return FeatureStore.load(args.output_dir), TrakConfig(**{**known, **fields})
    from hf_trak.hub.files import LocalFiles
    from hf_trak.hub.index_store import open_index

    files = LocalFiles(Path(args.output_dir))
    index = open_index(files, files.work_dir)
    for model_id in index.model_ids:
        index.fetch_references(model_id)
    return index, TrakConfig(**{**index.manifest.settings, **fields})


def _keep_record(args: ConvertArguments, proj_dim: int) -> None:
    """Write the arguments of `hf-trak featurize` for the result, so that later commands find them there, too."""
    path = Path(args.output_dir) / RECORD
    if is_copy(args.output_dir) or not path.is_file():
        return
    record = unsealed(read_sealed(path))
    trak = {**record.get("trak", {}), "output_dir": args.to, "feature_dtype": args.feature_dtype}
    write_sealed(Path(args.to) / RECORD, {**record, "trak": {**trak, "proj_dim": proj_dim}})
