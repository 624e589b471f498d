"""`hf-trak featurize`: compute the features of a training set, or finish computing them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from hf_trak.cli.arguments import DataArguments, ModelArguments, OutputArguments
from hf_trak.cli.build import build, quiet, remember, require_own
from hf_trak.cli.output import answer, table
from hf_trak.cli.parser import parse_yaml_and_args
from hf_trak.config import TrakConfig


@dataclass
class PartArguments:
    """The part of the work to do, for jobs that share a directory."""

    part: list[int] = field(
        default_factory=lambda: [0, 1],
        metadata={"help": "Index and number of parts, for job arrays: `--part 2 8` does the third of eight parts."},
    )

    def __post_init__(self) -> None:
        if len(self.part) != 2:
            raise ValueError(f"`part` is {self.part}. Expected two numbers: index and number of parts.")


def run(argv: Sequence[str]) -> None:
    """Compute features. The same command again computes only what is missing."""
    kinds = (ModelArguments, DataArguments, PartArguments, TrakConfig, OutputArguments)
    model_args, data, part, trak, output = parse_yaml_and_args(
        kinds,
        argv,
        prog="hf-trak featurize",
        description="Compute the features of a training set. After an interruption, the same command continues.",
    )
    quiet(trak)
    start = time.perf_counter()
    require_own(trak.output_dir)
    built = build(model_args, data, trak)
    remember(built, model_args, data)
    attributor = built.attributor
    attributor.featurize(checkpoints=model_args.checkpoints, part=(part.part[0], part.part[1]))
    missing = {i: len(attributor.store.train(i).unwritten()) for i in attributor.store.model_ids}
    content = {
        "output_dir": trak.output_dir,
        "train_rows": len(attributor.train_dataset),
        "checkpoints": len(missing),
        "parameters": attributor.layout.total,
        "features": attributor.proj_dim,
        "missing_shards": sum(missing.values()),
        "seconds": round(time.perf_counter() - start, 1),
    }
    answer(content, table({name.replace("_", " "): value for name, value in content.items()}), output.json)
