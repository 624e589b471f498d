"""`hf-trak recommend`: a method for each budget, with its time, disk and expected quality."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from hf_trak.cli.build import begin, build, record_names, require_run
from hf_trak.cli.parser import DataArguments, ModelArguments, OutputArguments, answer, option
from hf_trak.config import TrakConfig


@dataclass
class RecommendArguments:
    """The number of targets."""

    eval_size: int = option("Number of targets.", 10)


def run(argv: Sequence[str]) -> None:
    """Recommend methods for an index in `output_dir`. A few batches are featurized to measure the time."""
    kinds = (RecommendArguments, ModelArguments, DataArguments, TrakConfig, OutputArguments)
    description = "Recommend a method for each budget, with its time, disk and expected quality."
    saved, (wanted, model_args, data, trak, output) = begin(
        kinds, argv, prog="hf-trak recommend", description=description
    )
    require_run(trak.output_dir, model_args, data)
    built = build(model_args, data, trak, saved)
    found = built.attributor.recommend(wanted.eval_size)
    if saved:
        record_names(built, model_args, data)
    command = f"hf-trak attribute --output_dir {shlex.quote(trak.output_dir)} --eval_dataset ROWS --budget"
    answer(asdict(found), found.lines(lambda one: f"{command} {one.budget}  # {one.method}"), output.json)
