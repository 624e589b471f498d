"""One library in a process of its own, which has no other library on its path."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
_PIP = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]

REQUIREMENTS: dict[str, list[str]] = {
    "hf_trak": [],
    "hf_trak, linear layers": [],
    "kronfluence": ["kronfluence==1.0.1", "einconv", "einops", "opt_einsum"],
    "bergson": [
        "bergson==2.5.1", "jaxtyping", "wadler_lindig", "natsort", "petname", "simple-parsing", "docstring-parser",
        "ml_dtypes", "torchopt", "optree", "graphviz",
    ],
}  # fmt: skip
"""What each library needs beside hf_trak's `recipes` extra."""

LIBRARIES = list(REQUIREMENTS)


def install(library: str, peers: Path) -> None:
    """Install a library into a folder of its own, unless it is installed."""
    if REQUIREMENTS[library] and not (peers / library).is_dir():
        subprocess.run([*_PIP, str(peers / library), *REQUIREMENTS[library]], check=True)


def measure(library: str, work: dict[str, Any], peers: Path) -> dict[str, Any]:
    """Let a library do the work once: `Measured` as a dictionary, or `{"error": …}` with its last message."""
    places = [HERE, HERE.parent, HERE.parents[1], peers.resolve() / library]
    threads = str(work["threads"])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, places)),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
    }
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result.json"
        command = [sys.executable, "-m", "curvature_bench.worker", library, json.dumps(work), scratch]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode == 0:
            return json.loads(result.read_text())
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode < 0 or not lines:  # a signal (memory?) leaves no message
        return {"error": f"exit code {done.returncode}, no message"}
    return {"error": lines[-1]}


def main() -> None:
    """Measure a library in this process."""
    import torch

    from curvature_bench.measure import Meter
    from curvature_bench.work import Work

    library, given, scratch = sys.argv[1:]
    work = Work(**json.loads(given))
    torch.set_num_threads(work.threads)
    package, _, variant = library.partition(", ")
    run = import_module(f"curvature_bench.with_{package}").run
    run = partial(run, linear_only=True) if variant else run
    directory = Path(scratch) / "files"
    directory.mkdir()
    meter = Meter(work)
    run(work, meter, directory)
    (Path(scratch) / "result.json").write_text(json.dumps(asdict(meter.measured)))


if __name__ == "__main__":
    main()
