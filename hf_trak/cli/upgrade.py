"""`hf-trak upgrade`: bring a directory of an older version up to date."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hf_trak.cli.build import build, quiet, remembered, require_run
from hf_trak.cli.parser import DataArguments, ModelArguments, OutputArguments, answer, parse_yaml_and_args
from hf_trak.config import TrakConfig
from hf_trak.store.atomic import read_json
from hf_trak.store.store import FeatureStore


def run(argv: Sequence[str]) -> None:
    """Bring a directory that an older version wrote up to date."""
    parse = partial(
        parse_yaml_and_args,
        (ModelArguments, DataArguments, TrakConfig, OutputArguments),
        argv,
        prog="hf-trak upgrade",
        description="Bring a directory that an older version of hf_trak wrote up to date. For a feature store, one "
        "row of every shard is computed again and compared; model, rows and settings are by default those that "
        "`hf-trak featurize` has recorded in output_dir. Files of TRAKer directories and retrainings get checksums.",
    )
    directory = Path(parse()[2].output_dir)
    kind = _seal(directory)
    if kind is None:
        model_args, data, trak, output = parse(defaults=remembered(str(directory)))
        quiet()
        require_run(trak.output_dir, model_args, data)
        build(model_args, data, trak).attributor.upgrade_store(model_args.checkpoints)
        kind = "feature store"
    else:
        output = parse()[3]
    content: dict[str, Any] = {"output_dir": str(directory), "kind": kind}
    answer(content, [f"The {kind} in {directory} is up to date."], output.json)


def _seal(directory: Path) -> str | None:
    """Add checksums to a directory of another kind than a feature store; return its kind, `None` for a store."""
    if (directory / "retraining.json").exists():
        from hf_trak.evaluation.retraining import upgrade_retraining

        upgrade_retraining(directory)
        return "retraining"
    if (directory / "metadata.json").exists():
        from hf_trak.traker.savers.mmap_saver import upgrade_mmap

        upgrade_mmap(directory)
        return "TRAKer directory"
    config = directory / FeatureStore.CONFIG_FILE
    if config.exists() and read_json(config).get("api") == "TRAKer":
        from hf_trak.traker.savers.safetensors_saver import upgrade_traker

        upgrade_traker(directory)
        return "TRAKer directory"
    return None
