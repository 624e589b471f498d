"""The libraries that are compared: where they come from, and a call of one in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REQUIREMENTS: dict[str, list[str]] = {
    "hf_trak": [],
    "hf_trak_linear": [],
    "traker": ["traker==0.3.2"],
    "dattri": ["dattri==0.3.0"],
    "bergson": [
        "bergson==2.5.1", "jaxtyping", "wadler_lindig", "natsort", "petname", "simple-parsing", "docstring-parser",
        "ml_dtypes", "torchopt", "optree", "graphviz",
    ],
}  # fmt: skip
"""Without what hf_trak's `recipes` extra brings (torch, transformers, datasets, peft, scipy), and without what the
libraries declare but do not import here (dattri's pretty_midi, bergson's bitsandbytes and torchaudio)."""

LIBRARIES = list(REQUIREMENTS)


def install(library: str, directory: Path) -> None:
    """Install a peer into a folder of its own, unless it is installed."""
    if not REQUIREMENTS[library] or (directory / library).is_dir():
        return
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(directory / library)]
    subprocess.run([*command, *REQUIREMENTS[library]], check=True)


class Worker:
    """A library in a process of its own, started at the first request. A context manager: it ends the process."""

    def __init__(self, library: str, path: Path, peers: Path) -> None:
        self.library, self.path, self.peers = library, path, peers
        self.process: subprocess.Popen[str] | None = None
        self.errors = path / f"{library}.log"

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.communicate()

    def ask(self, seeds: list[int], lambdas: list[float], timed: bool = False) -> dict[str, Any]:
        """Score with each seed, or time one run; gives times, or {"error": the last line of the library's message}."""
        process = self.process = self.process or self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps({"seeds": seeds, "lambdas": lambdas, "timed": timed}) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it died: there is no answer either
        answer = process.stdout.readline()
        if answer:
            return json.loads(answer)
        code = process.wait()
        lines = [line.strip() for line in self.errors.read_text().splitlines() if line.strip()]
        return {"error": lines[-1] if lines else f"exit code {code}, no message"}

    def _start(self) -> "subprocess.Popen[str]":
        here = Path(__file__).resolve().parents[1]
        places = [str(self.peers.resolve() / self.library), str(here.parents[1])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "HF_HUB_OFFLINE": "1"}
        with self.errors.open("w") as errors:
            return subprocess.Popen(
                [sys.executable, str(here), "--worker", self.library, str(self.path.resolve())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )


def kept(path: Path, key: dict[str, Any], make: Any) -> dict[str, Any]:
    """Return the result of `make()`, or read it from a file that was made for the same `key`. Errors are not kept."""
    if path.is_file():
        read = json.loads(path.read_text())
        if read["key"] == key:
            return read["result"]
    result = make()
    if "error" not in result:
        path.write_text(json.dumps({"key": key, "result": result}) + "\n")
    return result
