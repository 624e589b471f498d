"""`hf-trak featurize` and `hf-trak curvature`: compute what scores need of a training set, or finish computing it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hf_trak.cli.build import begin, build, quiet, remember, require_run
from hf_trak.cli.parser import (
    DataArguments,
    ModelArguments,
    OutputArguments,
    answer,
    option,
    parse_yaml_and_args,
    table,
)
from hf_trak.cli.record import RECORD, remembered_or_made, require_own
from hf_trak.config import TrakConfig
from hf_trak.featurize.fidelity import measure_fidelity
from hf_trak.hub.index_files import write_train_rows
from hf_trak.hub.push import train_source


@dataclass
class PartArguments:
    """The part of the work to do, for jobs that share a directory."""

    part: list[int] = option(
        "Index and number of parts, for job arrays: `--part 2 8` does the third of eight parts.",
        default_factory=lambda: [0, 1],
    )

    def __post_init__(self) -> None:
        if len(self.part) != 2:
            raise ValueError(f"`part` is {self.part}. Expected two numbers: index and number of parts.")


@dataclass
class FidelityArguments:
    """The comparison with exact scores."""

    fidelity: bool = option(
        "When all features are there, compare scores from them with exact ones on 64 training rows and 16 "
        "targets. A curvature is fitted for that.",
        False,
    )


def run(argv: Sequence[str]) -> None:
    """Compute features. The same command again computes only what is missing."""
    kinds = (ModelArguments, DataArguments, PartArguments, FidelityArguments, TrakConfig, OutputArguments)
    parse = partial(
        parse_yaml_and_args,
        kinds,
        argv,
        prog="hf-trak featurize",
        description="Compute the features of a training set. After an interruption, the same command continues.",
    )
    *_, trak, _ = parse()
    made = {} if (Path(trak.output_dir) / RECORD).is_file() else remembered_or_made(trak.output_dir)  # by Python
    model_args, data, part, wanted, trak, output = parse(defaults=made)
    quiet()
    start = time.perf_counter()
    require_own(trak.output_dir)
    built = build(model_args, data, trak)
    remember(built, model_args, data)
    attributor = built.attributor
    attributor.featurize(checkpoints=model_args.checkpoints, part=(part.part[0], part.part[1]))
    remember(built, model_args, data, featurized=True)
    features = attributor.features
    source = train_source(attributor.train_dataset)
    if source is not None:  # others can then rerank with single rows of that repo
        rows = attributor.train_dataset
        features.processes.broadcast_from_main(lambda: write_train_rows(features.store, rows, source))
    missing = {i: len(features.store.train(i).unwritten()) for i in features.store.model_ids}
    content: dict[str, Any] = {
        "output_dir": trak.output_dir,
        "train_rows": len(attributor.train_dataset),
        "checkpoints": len(missing),
        "parameters": features.layout.total,
        "features": features.proj_dim,
        "missing_shards": sum(missing.values()),
        "seconds": round(time.perf_counter() - start, 1),
    }
    lines = table({name.replace("_", " "): value for name, value in content.items()})
    if wanted.fidelity and content["missing_shards"]:
        lines.append("The fidelity is not measured: shards of other parts are missing.")
    elif wanted.fidelity:
        found = [measure_fidelity(features, model_id=model_id) for model_id in features.store.model_ids]
        content["fidelity"] = [one.to_dict() for one in found]
        lines += [line for one in found for line in str(one).splitlines()]
    answer(content, lines, output.json)


def run_curvature(argv: Sequence[str]) -> None:
    """Fit curvatures, or take those that are there, and print reports on them.

    Raises:
        ValueError: the curvature is the identity, which is fitted to nothing.
    """
    _, (model_args, data, trak, output) = begin(
        (ModelArguments, DataArguments, TrakConfig, OutputArguments),
        argv,
        prog="hf-trak curvature",
        description="Fit the curvature of exact scores to a random sample of the training rows, and report on it: the "
        "layers, their spectra, and what to mistrust. Model, training rows and settings are by default those that "
        "`hf-trak featurize` has recorded in output_dir. `hf-trak attribute --method exact` scores with it.",
    )
    if trak.curvature.kind == "identity":
        raise ValueError(
            "`curvature` is 'identity', which is fitted to nothing. Expected another one. Call `hf-trak attribute "
            "--method exact --curvature identity` at once, or set `--curvature ekfac`."
        )
    require_run(trak.output_dir, model_args, data)
    start = time.perf_counter()
    built = build(model_args, data, trak)
    remember(built, model_args, data)
    attributor = built.attributor.fit_curvature(checkpoints=model_args.checkpoints)
    seconds = round(time.perf_counter() - start, 1)
    count = 1 if model_args.checkpoints is None else len(model_args.checkpoints)
    reports = {model_id: attributor.curvature_report(model_id) for model_id in range(count)}
    content = {
        "output_dir": trak.output_dir,
        "train_rows": len(attributor.train_dataset),
        "seconds": seconds,
        "reports": [{"model_id": model_id, **report.to_dict()} for model_id, report in reports.items()],
    }
    lines = []
    for model_id, report in reports.items():
        lines += [f"Checkpoint {model_id}", *str(report).splitlines(), ""]
    answer(content, [*lines, f"Fitted in {seconds} s: {trak.output_dir}/curvature"], output.json)
