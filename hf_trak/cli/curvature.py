"""`hf-trak curvature`: fit the curvature of exact scores, and report on it."""

import time
from collections.abc import Sequence
from functools import partial

from hf_trak.cli.build import build, quiet, remember, remembered, require_run
from hf_trak.cli.parser import DataArguments, ModelArguments, OutputArguments, answer, parse_yaml_and_args
from hf_trak.config import TrakConfig


def run(argv: Sequence[str]) -> None:
    """Fit curvatures, or take those that are there, and print reports on them.

    Raises:
        ValueError: the curvature is the identity, which is fitted to nothing.
    """
    parse = partial(
        parse_yaml_and_args,
        (ModelArguments, DataArguments, TrakConfig, OutputArguments),
        argv,
        prog="hf-trak curvature",
        description="Fit the curvature of exact scores to a random sample of the training rows, and report on it: the "
        "layers, their spectra, and what to mistrust. Model, training rows and settings are by default those that "
        "`hf-trak featurize` has recorded in output_dir. `hf-trak attribute --exact` scores with it.",
    )
    _, _, where, _ = parse()
    model_args, data, trak, output = parse(defaults=remembered(where.output_dir))
    if trak.curvature.kind == "identity":
        raise ValueError(
            "`curvature` is 'identity', which is fitted to nothing. Expected another one. Call `hf-trak attribute "
            "--exact --curvature identity` at once, or set `--curvature ekfac`."
        )
    quiet()
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
