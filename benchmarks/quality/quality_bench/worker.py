"""A method in a process of its own, with its library alone on the path: scores, cost, or the library's error."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quality_bench.cases import make_case
from quality_bench.job import Cost, Job, PeakMemory
from quality_bench.methods import LIBRARIES, methods

HERE = Path(__file__).resolve().parents[1]
RESULT = "result.json"


def install(library: str, peers: Path) -> None:
    """Install a library into a folder of its own, unless it is installed."""
    if LIBRARIES[library] and not (peers / library).is_dir():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(peers / library)]
        subprocess.run([*command, *LIBRARIES[library]], check=True)


def environment(library: str, peers: Path) -> dict[str, str]:
    places = [str(peers.resolve() / library), str(HERE), str(HERE.parents[1])]
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    return {
        **os.environ, "PYTHONPATH": os.pathsep.join(places), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": threads,
    }  # fmt: skip


def method_names(library: str, peers: Path) -> list[str]:
    """The names of a library's methods, which only a process with the library on its path can tell."""
    code = f"from quality_bench.methods import methods; print(*methods({library!r}), sep='\\n')"
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment(library, peers), capture_output=True, text=True, check=True
    )
    return found.stdout.splitlines()


def directory_of(work: Path, library: str, method: str) -> Path:
    """Where the scores of a method lie."""
    return work / "scores" / re.sub(r"[^a-zA-Z0-9.]+", "-", f"{library} {method}").strip("-")


def score(
    case: str, library: str, method: str, work: Path, downloads: Path, peers: Path, limit: float
) -> dict[str, Any]:
    """Run a method in a process of its own, unless its scores are there; `{"error": …}` if it fails."""
    directory = directory_of(work, library, method)
    if (directory / RESULT).is_file():
        return json.loads((directory / RESULT).read_text())
    directory.mkdir(parents=True, exist_ok=True)
    request = json.dumps([case, library, method, str(work.resolve()), str(downloads.resolve())])
    with (directory / "log.txt").open("w") as log:
        try:
            code = subprocess.run(
                [sys.executable, "-m", "quality_bench.worker", request],
                env=environment(library, peers),
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=limit,
            ).returncode
        except subprocess.TimeoutExpired:
            return _failed(directory, library, method, f"took more than {limit / 60:.0f} minutes")
    if code == 0:
        return json.loads((directory / RESULT).read_text())
    lines = [line.strip() for line in (directory / "log.txt").read_text().splitlines() if line.strip()]
    return _failed(directory, library, method, lines[-1] if lines else f"exit code {code}, no message")


def _failed(directory: Path, library: str, method: str, error: str) -> dict[str, Any]:
    result = {"library": library, "method": method, "error": error}
    (directory / RESULT).write_text(json.dumps(result, indent=2) + "\n")
    return result


def main() -> None:
    case_name, library, name, work, downloads = json.loads(sys.argv[1])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    directory = directory_of(Path(work), library, name)
    method = methods(library)[name]
    case = make_case(case_name, Path(downloads))
    cost = Cost()
    with tempfile.TemporaryDirectory() as scratch:
        job = Job(case, Path(scratch), Path(work))
        job.model  # noqa: B018 - trained before memory is measured
        memory = PeakMemory()
        found = method(job, cost)
        peak = memory.mib()
    shape = (len(case.train), len(case.targets))
    for variant, values in found.items():
        if values.shape != shape:
            raise ValueError(f"The variant {variant!r} has scores of the shape {values.shape}. Expected {shape}.")
    np.savez(directory / "scores.npz", allow_pickle=False, **found)
    result = {
        "library": library,
        "method": name,
        "variants": list(found),
        "seconds": cost.seconds,
        "bytes_per_row": cost.bytes_per_row,
        "peak_mib": peak,
    }
    (directory / RESULT).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
