"""`hf-trak report`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hf_trak.cli.arguments import ColumnArguments, OutputArguments
from hf_trak.cli.output import answer
from hf_trak.cli.parser import parse_yaml_and_args
from hf_trak.cli.rows import load_rows
from hf_trak.report import AttributionRun, ReportOptions, write_report


@dataclass
class ReportArguments:
    """Which run, and what to show of it."""

    run: str = field(metadata={"help": "Directory of a run, or the `output_dir` that holds it; may stand first."})
    output: str | None = field(default=None, metadata={"help": "The HTML file. By default `report.html` in the run."})
    title: str | None = field(default=None, metadata={"help": "Heading."})
    examples: int = field(default=5, metadata={"help": "Training examples from either end."})
    max_targets: int | None = field(default=None, metadata={"help": "Show this many targets. `None` shows all."})
    train_dataset: str | None = field(
        default=None, metadata={"help": "The training rows, where the run does not have them."}
    )
    train_split: str | None = field(default=None, metadata={"help": "Their split."})
    label_names: list[str] | None = field(default=None, metadata={"help": "Names of numbered labels."})


def run(argv: Sequence[str]) -> None:
    """Write the report."""
    args, columns, output = parse_yaml_and_args(
        (ReportArguments, ColumnArguments, OutputArguments),
        argv,
        prog="hf-trak report",
        description="Write a run as one HTML file that loads nothing from anywhere.",
    )
    train = None
    if args.train_dataset is not None:
        train = load_rows(args.train_dataset, None, args.train_split, ("train",), None)
    found = AttributionRun.load(args.run, train)
    options = ReportOptions(
        title=args.title,
        examples=args.examples,
        max_targets=args.max_targets,
        image_column=columns.image_column,
        text_columns=columns.text_columns,
        label_column=columns.label_column,
        label_names=args.label_names,
    )
    path = write_report(found, args.output or _beside(args.run), options)
    size = path.stat().st_size
    answer({"report": str(path), "bytes": size}, [f"Report: {path} ({size / 1e6:.1f} MB)"], output.json)


def _beside(run: str) -> Path:
    from hf_trak.report.run import find_run

    return find_run(run) / "report.html"
