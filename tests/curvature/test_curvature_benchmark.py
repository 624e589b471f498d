"""The benchmark of curvature: the command on a toy model, how a library that fails is shown, and architectures."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from hf_trak.curvature.blocks import CurvatureBlocks, DiagonalBlock, KroneckerBlock
from hf_trak.gradient_computers.layout import ParameterLayout

ROOT = Path(__file__).parents[2]
BENCHMARK = ROOT / "benchmarks" / "curvature"
LINEAR = "hf_trak, linear layers"
PARTS = ("fit: bases", "fit: eigendecompositions", "fit: eigenvalues")
HYBRID = ("hybrid: features", "hybrid: system", "hybrid: targets and scores")


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
        times = measured["times"]
        hybrid = HYBRID if library == "hf_trak" else ()
        assert set(times) == {"fit", *PARTS, "targets", "scores", *hybrid}
        assert all(min(taken["wall"], taken["cpu"]) > 0 for taken in times.values())
        assert sum(times[part]["wall"] for part in PARTS) < times["fit"]["wall"]
        assert len(measured["plain"]) == (4 if hybrid else 3)  # before and after each group of stages
        before, after = measured["plain"][:2]
        for clock in ("wall", "cpu"):
            plain = (before[clock] + after[clock]) / 2
            assert measured["ratios"]["fit"][clock] == pytest.approx(times["fit"][clock] / plain)
        if measured["peak_mib"]:
            assert set(measured["peak_mib"]) == {"plain", "fit", "scoring", *(["hybrid"] if hybrid else [])}
            assert set(measured["promised_mib"]) == {"fit", "scoring"}
    times, memory = printed.strip().split("\n\n")[1:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in times.splitlines()]
    assert len({len(row) for row in rows}) == 1
    shown = {(row[0], row[1]): row[2:] for row in rows}
    assert shown["kronfluence", "cannot: ImportError: broken on purpose / here"] == [""] * 5
    fit = rounds["hf_trak"][0]["times"]["fit"]
    assert (
        shown["hf_trak", "fit"][0] == f"{fit['wall']:.2f}" and shown["hf_trak", "fit"][2] == f"{12 / fit['wall']:.1f}"
    )
    assert len(memory.splitlines()) == 2 + len(libraries)


def test_tables_show_medians_over_the_rounds(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARK))
    from curvature_bench.table import tables

    def measured(seconds: float) -> dict:
        plain = [{"wall": 2.0, "cpu": 1.0}, {"wall": 4.0, "cpu": 3.0}]
        stages = {
            "times": {"fit": {"wall": seconds, "cpu": seconds / 2}},
            "ratios": {"fit": {"wall": seconds / 4, "cpu": seconds / 8}},
        }
        return {"plain": plain, **stages, "peak_mib": {"fit": 10 * seconds}, "promised_mib": {"fit": 7.0}}

    try:
        shown = tables({"one": [measured(6.0), measured(100.0), measured(8.0)]}, rows=16)
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "curvature_bench"]:
            monkeypatch.delitem(sys.modules, name)
    assert "| one | plain pass | 3.00 | 1.00 | 5.3 | 2.00 | 1.00 |" in shown
    assert "| one | fit | 8.00 | 2.00 | 2.0 | 4.00 | 1.00 |" in shown
    assert "| one | – | 80 (7) | – | – |" in shown


@pytest.fixture
def examined(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))
    import architectures_curvature

    yield architectures_curvature
    for name in ("architectures_curvature", "architectures"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_a_parameter_in_no_block_or_in_two_is_found(examined):
    layer = nn.Linear(5, 4)
    layout = ParameterLayout.from_model(layer)
    weight, bias = layout.slots
    joined = KroneckerBlock("weight", weight.offset, 4, 5, 5, bias=bias.offset)
    examined._check_covered(CurvatureBlocks((joined,), ()), layout)
    alone = replace(joined, bias=None)
    with pytest.raises(ValueError, match=r"4 elements of 'bias' are in \[0\] blocks"):
        examined._check_covered(CurvatureBlocks((alone,), ()), layout)
    twice = DiagonalBlock("bias", bias.offset, 2)
    with pytest.raises(ValueError, match=r"2 elements of 'bias' are in \[2\] blocks"):
        examined._check_covered(CurvatureBlocks((joined,), (twice,)), layout)


def test_what_was_found_is_not_looked_for_again(examined, tmp_path):
    path = tmp_path / "found.jsonl"
    examined.Findings(path).add("causal-lm", "gpt2", {"error": "ValueError: no"})
    examined.Findings(path).add("causal-lm", "llama", {"error": "ValueError: neither"})
    found = examined.Findings(path)
    assert ("causal-lm", "llama") in found and ("causal-lm", "opt") not in found
    assert found["causal-lm", "gpt2"]["error"] == "ValueError: no"


def test_an_architecture_is_examined(examined):
    from architectures import causal_lm, last_logits

    model, batch = causal_lm("gpt2")
    found = examined.examine(model, batch, last_logits)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert found["parameters"] == total == sum(sum(found[kind].values()) for kind in ("kronecker", "diagonal"))
    assert found["diagonal_matrices"] == ["transformer.wte.weight", "transformer.wpe.weight"]
    assert found["blocks"] == 8 and found["without_gradient"] == []
    assert examined.cells(found)[3:] == ["0", "transformer.wte.weight, transformer.wpe.weight"]
