"""How often `attributor.verify` sees an effect: of the first rows by several scores, and of random ones.

    python benchmarks/quality build --cases gpt2 --work quality --downloads downloads
    python benchmarks/quality shortlist --cases gpt2 --work quality --downloads downloads
    python benchmarks/verify.py gpt2 --work quality --downloads downloads

For every target, one small training step on the 10 rows of the highest scores. Random rows tell how often an effect is
seen without one.
"""

import argparse
import logging
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "quality"))

import numpy as np
from datasets import disable_progress_bars
from quality_bench.case import Case
from quality_bench.cases import CASES, make_case
from quality_bench.job import BATCH, Job
from quality_bench.shortlist_scores import EMBEDDINGS, EXACT, INDEX, RIDGE, scored

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.evaluation.tail_patch import PatchResult
from hf_trak.modelout_functions import get_task

ROWS = 10


def table(case: Case, work: Path, targets: int) -> None:
    """Print a line for each score."""
    scores, _ = scored(case, work)
    shape = scores[EXACT].shape
    rows = {
        "exact EK-FAC, highest": scores[EXACT],
        "exact EK-FAC, lowest": -scores[EXACT],
        "index, highest": scores[f"{INDEX}, {RIDGE}"],
        "embeddings, most similar": scores[EMBEDDINGS],
        "random": np.random.default_rng(1).standard_normal(shape),
    }
    chosen = range(0, shape[1], max(1, shape[1] // targets))[:targets]
    head = (f"{case.title}, {len(chosen)} targets", "effect seen", "median change / spread", "seconds each")
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        job = Job(case, Path(scratch), work)
        args = TrakConfig(scratch, per_device_batch_size=BATCH)
        own = TrakAttributor(job.model, args, case.train, task=get_task(case.task))
        for name, values in rows.items():
            started = time.perf_counter()
            found = [verified(own, case, values[:, target], target) for target in chosen]
            seconds = (time.perf_counter() - started) / len(found)
            seen = sum(one.has_effect for one in found)
            ratio = np.median([one.ratio for one in found])
            print(f"| {name} | {seen} | {ratio:+.1f} | {seconds:.1f} |", flush=True)


def verified(own: TrakAttributor, case: Case, values: np.ndarray, target: int) -> PatchResult:
    """Verify the rows of the highest values for a target."""
    best = np.argsort(-values, kind="stable")[:ROWS]
    return own.verify(case.targets.select([target]), best, similar=None, seed=target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=list(CASES))
    parser.add_argument("--work", type=Path, default=Path("quality"), help="directory of banks and scores")
    parser.add_argument("--downloads", type=Path, default=Path("downloads"), help="directory of fetched data")
    parser.add_argument("--targets", type=int, default=20, help="number of targets, evenly spaced")
    args = parser.parse_args()
    logging.getLogger("hf_trak").setLevel(logging.ERROR)
    disable_progress_bars()
    for name in args.cases:
        table(make_case(name, args.downloads), args.work / name, args.targets)


if __name__ == "__main__":
    main()
