"""All that a new GPU is asked, in one command of ten minutes without a network, and one table to paste.

    python benchmarks/gpu_first_day.py --out first_day

In this order: the tests that need a GPU (`pytest -m gpu`), the kernels beside the chip's limits (`gpu_kernels.py`),
and six models, featurized and beside a plain step (`gpu_models.py`). `first_day/` gets the log of the tests and the
figures as JSON.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import gpu_kernels
import gpu_models
import torch

ROOT = Path(__file__).parents[1]
PLACES = ("tests/kernels", "tests/gradients/test_synchronizations.py", "tests/featurize/test_estimate.py")
TESTS = ("-q", "-n", "5", "--dist", "load", "-m", "gpu", "--timeout", "60", "-rfE", *PLACES)
"""Processes of their own, each with a part of the tests: most of the time goes into starting."""


def run_tests(log: Path) -> str:
    """Run the tests that need a GPU; returns the closing line."""
    with log.open("w") as file:
        subprocess.run([sys.executable, "-m", "pytest", *TESTS], cwd=ROOT, stdout=file, stderr=file, check=False)
    lines = log.read_text().splitlines()
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            print(line)
    return lines[-1] if lines else "nothing was printed"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("first_day"), help="directory of the log and the figures")
    parser.add_argument("--proj-dim", type=int, default=4096, help="k")
    parser.add_argument("--rounds", type=int, default=7, help="measurements per method")
    parser.add_argument("--parts", nargs="+", default=["tests", "kernels", "models"], help="what to do")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark measures a GPU and torch sees none. Run it on a machine with one.")
    device = torch.device("cuda", torch.cuda.current_device())
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ["HF_HUB_OFFLINE"] = "1"
    if "tests" in args.parts:
        print(f"tests: {run_tests(args.out / 'tests.log')}", flush=True)
    if "kernels" in args.parts:
        gpu_kernels.main(["--rounds", str(args.rounds), "--json", str(args.out / "kernels.json")])
    if "models" in args.parts:
        torch.manual_seed(0)
        figures = dict(gpu_models.table(args.proj_dim, args.rounds, device))
        (args.out / "models.json").write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
