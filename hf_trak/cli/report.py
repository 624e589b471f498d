"""`hf-trak report`: write a run as one HTML file."""

from collections.abc import Sequence
from dataclasses import dataclass

from hf_trak.cli.parser import ColumnArguments, OutputArguments, answer, option, parse_yaml_and_args, size
from hf_trak.report import AttributionRun, ReportOptions, write_report
from hf_trak.report.run_record import find_run

TRAINING = "--training"
"""The option that asks for the report of a training, which has options of its own."""


@dataclass
class ReportArguments:
    """The run, and what is shown of it."""

    run: str = option("Directory of a run, or the `output_dir` that holds it; may stand first.")
    output: str | None = option("Path of the HTML file. By default `report.html` in the directory of the run.", None)
    title: str | None = option("Heading of the page.", None)
    examples: int = option("Number of training rows to show, of the highest scores and of the lowest.", 5)
    max_targets: int | None = option("Number of targets to show. By default all.", None)
    train_dataset: str | None = option("The training rows, if the run does not contain them.", None)
    train_split: str | None = option("Split of `train_dataset`.", None)
    label_names: list[str] | None = option("Names of the labels, in the order of their numbers.", None)


def run(argv: Sequence[str]) -> None:
    """Write the report."""
    if TRAINING in argv:
        from hf_trak.cli.training_report import run as of_training  # slow to import

        rest = [text for text in argv if text != TRAINING]
        if rest and (rest[0] == "--run" or not rest[0].startswith("-")):  # the directory stands first here, too
            rest = ["--output_dir", *rest[rest[0] == "--run" :]]
        of_training(rest)
        return
    args, columns, output = parse_yaml_and_args(
        (ReportArguments, ColumnArguments, OutputArguments),
        argv,
        prog="hf-trak report",
        description="Write a run as one self-contained HTML file, which loads no other files. "
        "`hf-trak report --training --help` is about a report of what the training rows did to a validation loss.",
    )
    train = None
    if args.train_dataset is not None:
        from hf_trak.cli.stored_rows import load_rows  # slow to import

        train = load_rows(args.train_dataset, None, args.train_split, ("train",), None)
    found = AttributionRun.load(args.run, train)
    options = ReportOptions(
        title=args.title, examples=args.examples, max_targets=args.max_targets, label_names=args.label_names,
        **vars(columns),
    )  # fmt: skip
    path = write_report(found, args.output or find_run(args.run) / "report.html", options)
    taken = path.stat().st_size
    answer({"report": str(path), "bytes": taken}, [f"Report: {path} ({size(taken)})"], output.json)
