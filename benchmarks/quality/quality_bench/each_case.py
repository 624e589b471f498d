"""What scripts beside the benchmark of quality share: a table for each case that the command line names."""

import argparse
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path

from datasets import disable_progress_bars

from hf_trak.evaluation import Bank
from quality_bench.banks import open_bank
from quality_bench.case import Case
from quality_bench.cases import CASES, make_case
from quality_bench.job import Job


def each_case(description: str | None, table: Callable[[Case, Bank, Job], None]) -> None:
    """Parse the command line, and print a table for each case.

    Args:
        description: what the script says of itself.
        table: prints the table of a case, from its bank, with a job for its model and rows.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=list(CASES))
    parser.add_argument("--work", type=Path, default=Path("quality"), help="directory of banks")
    parser.add_argument("--downloads", type=Path, default=Path("downloads"), help="directory of fetched data")
    args = parser.parse_args()
    logging.getLogger("hf_trak").setLevel(logging.ERROR)
    disable_progress_bars()
    for name in args.cases:
        case, work = make_case(name, args.downloads), args.work / name
        with tempfile.TemporaryDirectory() as scratch:
            table(case, open_bank(case, work), Job(case, Path(scratch), work))
