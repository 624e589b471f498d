"""What replays of a run cost, and how good they are for it: targets, share of the rows, steps and parameters.

    python benchmarks/replay.py run --work replay --cases gpt2
    python benchmarks/replay_cost.py --work replay
    python benchmarks/replay_cost.py --work replay --print

The run and its retrainings are the case `gpt2` of `replay.py`. Every case here is a process of its own, whose figures
are kept in `cost.json`, so that an interrupted benchmark goes on. Seconds are those of the processor.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import disable_progress_bars
from replay import SHARES, bank, recorded
from replay_cases import CASES as TRAININGS
from replay_cases import gpt2_config, help_texts
from transformers import GPT2LMHeadModel
from transformers.utils import logging as transformers_logging

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.evaluation import evaluate_lds
from hf_trak.methods import Replay

CASES = {
    **{f"m{m} f{f:g}": {"m": m, "share": f} for m in (1, 10, 40) for f in (0.1, 0.2, 0.5, 1)},
    "m10 f1 in two processes": {"m": 10, "share": 1.0},
    "m10 f0.2 T20": {"m": 10, "share": 0.2, "epochs": 1},
    "m10 f0.2 T120": {"m": 10, "share": 0.2, "epochs": 6},
    "m10 f0.2 wide": {"m": 10, "share": 0.2, "width": 120},
}
"""Targets, share, and what is other than in the run of the bank: epochs and the width of the model. Two processes ask
the run of the case before, and their seconds are those of both."""


TWO = " in two processes"


def measured(work: Path, name: str, m: int, share: float, epochs: int = 3, width: int = 60) -> dict[str, Any]:
    """Train with a record, replay, and return the figures."""
    case = replace(TRAININGS["gpt2"], targets=m, options={"num_train_epochs": epochs})
    if width != 60:
        case = replace(case, model=lambda place: GPT2LMHeadModel(gpt2_config(help_texts()[2], width)))
    rows, targets = case.split()
    place = work / "-".join(["cost", *name.split()])
    place.mkdir(parents=True, exist_ok=True)
    attributor = recorded(case, place, rows)
    summary, before = attributor.trajectory(), _peak()
    begun = time.process_time()
    found = attributor.attribute(targets, top_k=None, method=Replay(of="run", hessian_share=share))
    seconds = time.process_time() - begun
    figures: dict[str, Any] = {
        "seconds": round(seconds, 1), "training": json.loads((place / "about.json").read_text())["seconds"],
        "steps": summary.steps, "parameters": summary.parameters,
        "passes": round(summary.passes(m, share) / summary.epochs, 1),
        "megabytes": round((_peak() - before) / 2**20), "formula": round(summary.memory(m, share) / 2**20),
    }  # fmt: skip
    if width == 60 and epochs == 3:
        for title, dropped in SHARES.items():
            if (truth := bank(case, work / "gpt2", dropped, 0, train=False)) is not None:
                asked = truth[1].shape[1]  # the bank may have fewer targets than are replayed
                mean = evaluate_lds(np.array(found["trak_scores"]).T[:, :asked], *truth).mean
                figures[title] = [round(one, 3) for one in (mean.value, mean.low, mean.high)]
    return figures


def measured_by_two(work: Path, name: str, m: int, share: float) -> dict[str, Any]:
    """Replay a run that is recorded in one of two processes, and return the figures."""
    case = replace(TRAININGS["gpt2"], targets=m, options={"num_train_epochs": 3})
    place = work / "-".join(["cost", *name.removesuffix(TWO).split()])
    rows, targets = case.split()
    model = GPT2LMHeadModel.from_pretrained(
        max((place / "out").glob("checkpoint-*"), key=lambda one: one.stat().st_mtime)
    )
    config = TrakConfig(str(place / "trak"), per_device_batch_size=30, use_cpu=True)
    attributor = TrakAttributor(model, config, train_dataset=rows, task=case.task)
    before, begun = _peak(), (time.process_time(), time.monotonic())
    attributor.attribute(targets, top_k=None, method=Replay(of="run", hessian_share=share), name="two")
    spent = gather_object([(time.process_time() - begun[0], time.monotonic() - begun[1], _peak() - before)])
    summary = attributor.trajectory()
    return {
        "seconds": round(sum(one for one, _, _ in spent), 1), "clock": round(max(one for _, one, _ in spent), 1),
        "training": json.loads((place / "about.json").read_text())["seconds"], "steps": summary.steps,
        "parameters": summary.parameters, "passes": round(summary.passes(m, share) / summary.epochs, 1),
        "megabytes": round(max(one for _, _, one in spent) / 2**20),
        "formula": round(summary.memory(m, share) / 2**20),
    }  # fmt: skip


def _peak() -> int:
    """Return the largest memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def table(results: dict[str, Any]) -> str:
    lines = ["| case | steps | parameters | passes | seconds ÷ training | 1 % | 5 % | 50 % | MB (formula) |"]
    lines.append("|---" * 9 + "|")
    for name, one in results.items():
        lds = [f"{one[share][0]:.2f}" if share in one else "" for share in SHARES]
        lines.append(
            f"| {name} | {one['steps']} | {one['parameters']:,} | {one['passes']} | "
            f"{one['seconds']} ÷ {one['training']} = {one['seconds'] / one['training']:.1f} | {' | '.join(lds)} | "
            f"{one['megabytes']} ({one['formula']}) |"
        )
    return "\n".join(lines)


def main() -> None:
    disable_progress_bars()
    transformers_logging.set_verbosity_error()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--print", action="store_true", help="print what there is")
    parser.add_argument("--alone", action="store_true", help="measure the one case in this process")
    given = parser.parse_args()
    path = given.work / "cost.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for name in [] if given.print else given.cases:
        if given.alone:
            measure = measured_by_two if name.endswith(TWO) else measured
            results[name] = measure(given.work, name, **CASES[name])
            if PartialState().is_main_process:
                path.write_text(json.dumps(results, indent=2))
                print(name, results[name], flush=True)
        elif name not in results:
            runner = ["-m", "torch.distributed.run", "--nproc_per_node", "2"] if name.endswith(TWO) else []
            command = [sys.executable, *runner, __file__, "--work", str(given.work), "--alone", "--cases", name]
            subprocess.run(command, check=True)
    if given.print:
        print(table(results))


if __name__ == "__main__":
    main()
