"""The benchmark of curvature: the command on a toy model, and how a library that fails is shown."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BENCHMARK = ROOT / "recipes" / "benchmarks" / "curvature"
LINEAR = "hf_trak, linear layers"
PARTS = ("fit: bases", "fit: eigendecompositions", "fit: eigenvalues")


def run(directory: Path, *arguments: str) -> tuple[str, dict]:
    results = directory / "results.json"
    command = [sys.executable, str(BENCHMARK), "--tiny", "--peers", str(directory), "--json", str(results), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=directory)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(results.read_text())


@pytest.mark.slow  # three processes that import everything
def test_every_stage_of_every_library_is_measured(tmp_path):
    broken = tmp_path / "kronfluence" / "kronfluence"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('broken on purpose | here')\n")
    libraries = ("hf_trak", LINEAR, "kronfluence")
    printed, written = run(tmp_path, "--rows=12", "--targets=5", "--batch-size=4", "--libraries", *libraries)
    rounds = written["rounds"]
    assert rounds["kronfluence"] == [{"error": "ImportError: broken on purpose | here"}]
    for library in libraries[:2]:
        (measured,) = rounds[library]
        seconds = measured["seconds"]
        assert set(seconds) == {"fit", *PARTS, "targets", "scores", "hybrid"}
        assert all(taken > 0 for taken in seconds.values())
        assert sum(seconds[part] for part in PARTS) < seconds["fit"]
        assert len(measured["plain"]) == 4  # before and after each of the three groups of stages
        before, after = measured["plain"][:2]
        assert measured["ratios"]["fit"] == pytest.approx(2 * seconds["fit"] / (before + after))
        if measured["peak_mib"]:
            assert set(measured["peak_mib"]) == {"plain", "fit", "scoring", "hybrid"}
            assert set(measured["promised_mib"]) == {"fit", "scoring"}
    times, memory = printed.strip().split("\n\n")[1:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in times.splitlines()]
    assert len({len(row) for row in rows}) == 1
    shown = {(row[0], row[1]): row[2:] for row in rows}
    assert shown["kronfluence", "cannot: ImportError: broken on purpose / here"] == ["", "", ""]
    fit = rounds["hf_trak"][0]["seconds"]["fit"]
    assert shown["hf_trak", "fit"][0] == f"{fit:.2f}" and shown["hf_trak", "fit"][2] == f"{12 / fit:.1f}"
    assert len(memory.splitlines()) == 2 + len(libraries)


def test_tables_show_medians_over_the_rounds(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARK))
    from curvature_bench.table import tables

    def measured(seconds: float) -> dict:
        stages = {"seconds": {"fit": seconds}, "ratios": {"fit": seconds / 2}}
        return {"plain": [2.0, 4.0], **stages, "peak_mib": {"fit": 10 * seconds}, "promised_mib": {"fit": 7.0}}

    try:
        shown = tables({"one": [measured(6.0), measured(100.0), measured(8.0)]}, rows=16)
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "curvature_bench"]:
            monkeypatch.delitem(sys.modules, name)
    assert "| one | plain pass | 3.00 | 1 | 5.3 |" in shown
    assert "| one | fit | 8.00 | 4.00 | 2.0 |" in shown
    assert "| one | – | 80 (7) | – | – |" in shown
