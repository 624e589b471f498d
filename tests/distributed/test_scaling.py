"""The formulas of the page on scaling out, against what small models really take, and against the page."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def costs() -> Iterator[ModuleType]:
    path = ROOT / "benchmarks" / "scaling_costs.py"
    spec = importlib.util.spec_from_file_location("scaling_costs", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scaling_costs"] = module  # for its dataclasses
    spec.loader.exec_module(module)
    yield module
    del sys.modules["scaling_costs"]


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_operations_and_index(costs, tied):
    shape = costs.Llama(128, 32, 48, 2, 4, 2, tied, 4)
    parameters, operations, index = costs.comparisons(shape, 24, memory=False, processes=False)
    assert parameters[1] == parameters[2]
    assert operations[1] == operations[2]
    assert index[1] < index[2] < 1.01 * index[1]  # the header of a shard


def test_the_page_has_the_table_that_the_script_prints(costs):
    page = (ROOT / "benchmarks" / "pages" / "large_lm.md").read_text()
    assert costs.table(4, 1024, 8, 2**28) in page


def test_the_large_shape_is_that_of_the_recipe(costs):
    text = (ROOT / "recipes" / "large_lm" / "README.md").read_text()
    assert f"| `8b` | {costs.SHAPES['8B'].parameters:,} |" in text


def test_time_is_operations_over_speed(costs):
    assert costs.seconds(1e15, 1e14) == pytest.approx(10.0)
    assert costs.seconds(1e15, 1e14, devices=4, share=0.5) == pytest.approx(5.0)


@pytest.mark.slow
def test_shards_gathered_bytes_and_peak_memory(costs):
    shape = costs.Llama(128, 32, 48, 2, 4, 2, False, 4)
    pairs = costs.comparisons(shape, 24, memory=True, processes=True)
    shards, received, peak = pairs[3:]
    assert shards[1] == shards[2] and received[1] == received[2]
    assert 0.8 * peak[1] < peak[2] < 1.1 * peak[1]
