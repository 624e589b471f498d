"""`hf-trak estimate`: estimate time, memory and disk space before anything runs."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hf_trak.cli.build import MethodArguments, load_training
from hf_trak.cli.named_models import load_model
from hf_trak.cli.parser import DataArguments, ModelArguments, OutputArguments, answer, option, parse_yaml_and_args
from hf_trak.config import TrakConfig
from hf_trak.featurize.cluster import cluster_cost
from hf_trak.featurize.estimate import estimate
from hf_trak.featurize.estimation import estimate_sizes
from hf_trak.featurize.roofline import DeviceName


@dataclass
class EstimateArguments(MethodArguments):
    """The amount of work."""

    train_size: int | None = option("Number of training rows, if `dataset_name` is not given.", None)
    eval_size: int = option("Number of targets.", 0)
    num_checkpoints: int = option("Number of checkpoints, if `checkpoints` are not given.", 1)
    num_processes: int = option("Number of processes.", 1)
    measure: bool = option("Featurize a few batches of `dataset_name` to estimate the time.", False)
    rows_per_second: float | None = option("Rows that a process featurizes per second, if it is known.", None)
    nodes: int | None = option("Number of machines: adds what the index takes on them.", None)
    read_bandwidth: float = option("Bytes that a machine reads per second; 5 GB from an NVMe drive.", 5e9)
    price_per_hour: float | None = option("Price of a machine for an hour.", None)
    device: DeviceName | None = option("A GPU that is not there, to bound the time from one batch.", None)


def run(argv: Sequence[str]) -> None:
    """Print the time, memory and disk space that an attribution will take.

    Raises:
        ValueError: the model is not given, or neither the training rows nor their number are, or a number is out of
            range.
    """
    amounts, model_args, data, trak, output = parse_yaml_and_args(
        (EstimateArguments, ModelArguments, DataArguments, TrakConfig, OutputArguments),
        argv,
        prog="hf-trak estimate",
        description="Estimate disk space, memory and time before anything runs.",
    )
    options = {
        "checkpoints": len(model_args.checkpoints) if model_args.checkpoints else amounts.num_checkpoints,
        "eval_dataset": amounts.eval_size,
        "processes": amounts.num_processes,
        "method": amounts.chosen(),
    }
    timing = {"measure": amounts.measure, "device": amounts.device}
    if data.dataset_name is not None:
        found = load_training(model_args, data)
        model, how = found.model, found.preparation
        rows = found.rows if amounts.measure or amounts.device else amounts.train_size or len(found.rows)
        given = {"data_collator": how.collator, "processing_class": how.processing_class, "task": found.task}
    elif model_args.model_name_or_path is None or amounts.train_size is None:
        raise ValueError(
            "--model, and --train_dataset or --train_size, are needed. Expected the model and its training rows, or "
            "their number."
        )
    else:
        model = load_model(model_args.model_name_or_path, model_args.model_revision, model_args.task)
        rows, given = amounts.train_size, {}
    result = estimate(model, rows, trak, **given, **timing, **options)
    rate = result.rows_per_second or amounts.rows_per_second
    if rate is not None:
        if not (math.isfinite(rate) and rate > 0):
            raise ValueError(f"`rows_per_second` is {rate}. Expected a rate above 0, or none.")
        size = amounts.train_size or result.train_size
        sizes = estimate_sizes(model, size, trak, rows_per_second=rate, **options)
        result = dataclasses.replace(sizes, roofline=result.roofline)
    content = {**dataclasses.asdict(result), "disk_bytes": result.disk_bytes, "seconds": result.seconds}
    lines = str(result).splitlines()
    if amounts.nodes is not None:
        cost = cluster_cost(result, amounts.nodes, amounts.read_bandwidth, amounts.price_per_hour)
        content["cluster"] = {
            **dataclasses.asdict(cost), "score_seconds": cost.score_seconds, "money": cost.money
        }  # fmt: skip
        lines.append(str(cost))
    answer(content, lines, output.json)
