"""Costs of curvature: EK-FAC fitted and exact scores of 100 targets, beside a plain pass of training over the same
rows, and beside kronfluence 1.0.1 and bergson 2.5.1.

    python benchmarks/curvature --peers peers
    python benchmarks/curvature --peers peers --rows 512 --rounds 3

The model is the GPT-2 of featurize.py. Every library runs in a process of its own with its threads pinned, in rounds
that take turns. A process makes a plain pass (forward and backward, with gradients of all weights) before and after
each group of stages, and a stage is divided by the mean of the two; printed are medians over the rounds. Peers that
are not in `--peers` yet are installed there, each into a folder of its own.
"""

import argparse
import json
import sys
from pathlib import Path

from curvature_bench.table import Rounds, tables
from curvature_bench.worker import LIBRARIES, install, measure


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=LIBRARIES)
    parser.add_argument("--peers", type=Path, default=Path("peers"), help="directory of the installed libraries")
    parser.add_argument("--rows", type=int, default=64, help="training rows; the curvature is fitted to all of them")
    parser.add_argument("--targets", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=16, help="rows per batch of every library")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help="a toy model, to try the command")
    parser.add_argument("--json", type=Path, help="file to write the measurements to")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    args = arguments()
    work = {name: getattr(args, name) for name in ("rows", "targets", "batch_size", "threads", "tiny")}
    for library in args.libraries:
        install(library, args.peers)
    rounds: Rounds = {library: [] for library in args.libraries}
    for _ in range(args.rounds):
        for library in args.libraries:
            measured = measure(library, work, args.peers)
            rounds[library].append(measured)
            print(library, json.dumps(measured), file=sys.stderr, flush=True)
    print(f"{args.rows} rows, {args.targets} targets, batches of {args.batch_size}, {args.threads} thread(s)\n")
    print(tables(rounds, args.rows))
    if args.json is not None:
        args.json.write_text(json.dumps({"work": work, "rounds": rounds}, indent=2) + "\n")


if __name__ == "__main__":
    main()
