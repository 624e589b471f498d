"""`hf-trak recommend`: a method for each budget, with its time, disk and expected quality."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hf_trak.cli.build import build, quiet, remember, require_run
from hf_trak.cli.parser import DataArguments, ModelArguments, OutputArguments, answer, option, parse_yaml_and_args
from hf_trak.cli.record import remembered
from hf_trak.config import TrakConfig


@dataclass
class RecommendArguments:
    """The number of targets."""

    eval_size: int = option("Number of targets.", 10)


def run(argv: Sequence[str]) -> None:
    """Recommend methods for an index in `output_dir`. A few batches are featurized to measure the time."""
    kinds = (RecommendArguments, ModelArguments, DataArguments, TrakConfig, OutputArguments)
    description = "Recommend a method for each budget, with its time, disk and expected quality."

    def parse(**options: Any) -> tuple[Any, ...]:
        return parse_yaml_and_args(kinds, argv, prog="hf-trak recommend", description=description, **options)

    saved = remembered(parse()[3].output_dir)
    wanted, model_args, data, trak, output = parse(defaults=saved)
    quiet()
    require_run(trak.output_dir, model_args, data)
    built = build(model_args, data, trak)
    if saved:
        remember(built, model_args, data, write=False)
    found = built.attributor.recommend(wanted.eval_size)
    answer(asdict(found), str(found).splitlines(), output.json)
