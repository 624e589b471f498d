"""The benchmarks of preferences at a toy size."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")

ROOT = Path(__file__).parents[2]


def run(script: str, *options: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "benchmarks" / script), *options]
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


@pytest.mark.slow
def test_time_per_pair() -> None:
    printed = run("preferences.py", "--pairs", "8", "--longest", "16", "--batch", "4", "--rounds", "1")
    assert printed.count("| all |") == 1 and printed.count("| LoRA, r = 8 |") == 1


@pytest.mark.slow
def test_removal(tmp_path: Path) -> None:
    options = ("--pairs", "40", "--targets", "2", "--draws", "2", "--output_dir", str(tmp_path / "bank"))
    printed = run("preference_removal.py", *options)
    assert printed.startswith("40 pairs, ") and printed.count("| 2 (0.05)") == 6
