"""`hf-trak report --training`: what the training rows did to the validation loss, as one page, and a proof of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_trak.cli.build import MethodArguments, begin, build, record_names, require_run, target_rows
from hf_trak.cli.parser import DataArguments, ModelArguments, OutputArguments, TargetArguments, answer, option
from hf_trak.config import TrakConfig
from hf_trak.methods import Replay


@dataclass
class ReportArguments(MethodArguments):
    """How the effects are computed, and what is shown of them."""

    training_args: str | None = option(
        "For replays and proofs: the trainer's arguments, a JSON file or `learning_rate=5e-5,weight_decay=0.1,…`.",
        None,
    )
    prove_from: str | None = option(
        "The model that the training began with. From it, one training leaves out the most harmful rows, and one as "
        "many random ones.",
        None,
    )
    train_group_by: str | None = option("Column of the sources of training rows. By default `source`.", None)
    output: str | None = option("Path of the HTML file. By default `training_report.html` in output_dir.", None)
    title: str | None = option("Heading of the page.", None)
    examples: int = option("Number of training rows to show, of those that raised the loss most and least.", 5)


def run(argv: Sequence[str]) -> None:
    """Report what the training rows did to the mean loss of a validation set."""
    kinds = (TargetArguments, ReportArguments, ModelArguments, DataArguments, TrakConfig, OutputArguments)
    saved, (targets, wanted, model_args, data, trak, output) = begin(
        kinds,
        argv,
        prog="hf-trak report --training",
        description="Report what the training rows did to the loss of a validation set: rows, sources, labels, "
        "duplicates, and a proof by two trainings. A record in output_dir is replayed.",
    )
    require_run(trak.output_dir, model_args, data)
    stored = target_rows(data, targets)
    built = build(model_args, data, trak, saved)
    features, method = built.attributor.features, wanted.chosen()
    make_trainer = None
    if isinstance(method, Replay) and (method.of == "recipe" or wanted.training_args is not None):
        from hf_trak.cli.training import trainer_of  # slow to import

        features.trainer = trainer_of(features, wanted.training_args, model_args.model_name_or_path)
    if wanted.prove_from is not None:
        from hf_trak.cli.training import trainers_from  # slow to import

        make_trainer = trainers_from(wanted.prove_from, features, wanted.training_args, model_args)
    from hf_trak.report.training_page import training_report  # slow to import

    path = Path(wanted.output or Path(trak.output_dir) / "training_report.html")
    found = training_report(
        features,
        built.preparation.prepare(stored),
        path,
        method=method,
        train_group_by=wanted.train_group_by,
        make_trainer=make_trainer,
        title=wanted.title,
        examples=wanted.examples,
    )
    if saved:
        record_names(built, model_args, data)
    answer(
        {"loss": found.loss, "validation_rows": len(found.losses), **found.to_dict(), "report": str(path)},
        [*str(found).splitlines(), f"Report: {path}"],
        output.json,
    )
