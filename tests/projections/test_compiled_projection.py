"""The sparse map by a compiled function on a CPU: the bits of the torch operators, and what happens without it."""

import logging
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from hf_trak.kernels import cpu_functions, sources, torch_sparse
from hf_trak.kernels.cpu_sparse import CompiledAddition
from hf_trak.projectors import SparseProjector

needs_compiler = pytest.mark.skipif(cpu_functions.compiler() is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """A cache directory of its own, and a function that nobody has looked for."""
    monkeypatch.setenv("HF_TRAK_KERNEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TRAK_BACKEND", raising=False)
    addition = CompiledAddition()
    monkeypatch.setattr(torch_sparse, "compiled_addition", addition)
    monkeypatch.setattr(cpu_functions, "_WORTH_COMPILING", 0)
    cpu_functions.compiler.cache_clear()
    yield addition
    cpu_functions.compiler.cache_clear()


def projected(gradients, cuts=(), k=512, nonzeros=1):
    """Project through a sink, block by block."""
    sink = SparseProjector(gradients.shape[1], k, nonzeros=nonzeros).sink(len(gradients), 3, "cpu")
    bounds = [0, *cuts, gradients.shape[1]]
    for first, last in pairwise(bounds):
        sink(first, gradients[:, first:last])
    return sink.result().clone()


def by_torch(monkeypatch, *args, **kwargs):
    with monkeypatch.context() as patched:
        patched.setenv("HF_TRAK_BACKEND", "torch")
        return projected(*args, **kwargs)


@pytest.mark.few(2)
@needs_compiler
@pytest.mark.parametrize(
    "shape, cuts, k, nonzeros",
    [
        ((3, 100_000), (5, 700, 9000, 9001, 50_000), 512, 1),
        ((1, 8192 * 3 + 17), (1,), 100, 1),
        ((5, 2**23 + 12_345), (4095, 2**23 - 3), 4096, 2),  # a block across two regions
        ((2, 31), (), 7, 3),
        ((16, 60_000), (16_384, 16_384 + 512, 40_000), 20_000, 1),
    ],
)
def test_both_ways_give_the_same_bits(monkeypatch, fresh, shape, cuts, k, nonzeros):
    gradients = torch.randn(*shape)
    expected = by_torch(monkeypatch, gradients, cuts, k, nonzeros)
    assert fresh._function is None
    found = projected(gradients, cuts, k, nonzeros)
    assert fresh._function is not None
    assert torch.equal(found, expected)


@needs_compiler
@pytest.mark.parametrize("threads", [1, 4, 9])
def test_the_number_of_threads_changes_no_bit(monkeypatch, fresh, threads):
    gradients = torch.randn(17, 70_000)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found = projected(gradients)
    finally:
        torch.set_num_threads(before)
    assert fresh._function is not None
    assert torch.equal(found, by_torch(monkeypatch, gradients))


@needs_compiler
def test_values_that_are_not_finite_and_signed_zeros_go_through(monkeypatch):
    gradients = torch.zeros(2, 40_000)
    gradients[0, 100], gradients[1, 20_000] = float("inf"), float("nan")
    gradients[:, 30_000:] = -0.0
    found, expected = projected(gradients), by_torch(monkeypatch, gradients)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    assert torch.equal(torch.signbit(found[found == 0]), torch.signbit(expected[expected == 0]))


@needs_compiler
@pytest.mark.parametrize(
    "block",
    [torch.randn(3, 20_000, dtype=torch.bfloat16), torch.randn(20_000, 3).T, torch.randn(3, 40_000)[:, ::2]],
    ids=["bfloat16", "columns apart", "every second column"],
)
def test_other_blocks_go_to_torch(monkeypatch, fresh, block):
    assert not fresh.usable(block)
    assert torch.equal(projected(block), by_torch(monkeypatch, block.contiguous()))


@needs_compiler
def test_rows_that_are_apart_are_added(monkeypatch, fresh):
    wide = torch.randn(4, 50_000)
    assert torch.equal(projected(wide[:, 10_000:40_000]), by_torch(monkeypatch, wide[:, 10_000:40_000].contiguous()))
    assert fresh._function is not None


@needs_compiler
def test_it_is_compiled_when_that_pays_and_read_from_the_disk_at_once(monkeypatch, fresh):
    monkeypatch.setattr(cpu_functions, "_WORTH_COMPILING", 2**20)
    small = torch.randn(1, 2**19)
    assert not fresh.usable(small)
    assert fresh.usable(small)
    again = CompiledAddition()
    assert again.usable(small)


@needs_compiler
def test_a_damaged_file_is_compiled_again(tmp_path):
    assert cpu_functions.compiled("sjlt") is not None
    path = tmp_path / "cache" / cpu_functions.name_of("sjlt")
    content = path.read_bytes()
    for damaged in (content[:1000], b"", content[:2000] + bytes([content[2000] ^ 1]) + content[2001:]):
        path.write_bytes(damaged)
        assert cpu_functions.compiled("sjlt", compile_now=False) is None
        assert cpu_functions.compiled("sjlt") is not None
        assert path.read_bytes() == content


@needs_compiler
def test_a_directory_that_cannot_be_written_to_is_reported(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_TRAK_KERNEL_CACHE", str(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.WARNING, "hf_trak"):
        assert cpu_functions.compiled("sjlt") is not None
    assert "compiled again in every process" in caplog.text


def test_without_a_compiler_torch_operators_are_used(monkeypatch, fresh, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    gradients = torch.randn(2, 30_000)
    found = projected(gradients)
    assert fresh._function is None
    assert torch.equal(found, by_torch(monkeypatch, gradients))


def test_a_compiler_that_fails_is_logged_and_not_asked_again(monkeypatch, fresh, tmp_path, caplog):
    program = tmp_path / "cc"
    program.write_text(f"#!/bin/sh\necho once >> {tmp_path}/calls\necho 'no header' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("CC", str(program))
    with caplog.at_level(logging.INFO, "hf_trak"):
        for _ in range(3):
            assert not fresh.usable(torch.randn(2, 30_000))
    assert "no header" in caplog.text
    assert (tmp_path / "calls").read_text() == "once\n"


@needs_compiler
def test_a_function_with_other_results_is_not_used(monkeypatch, fresh, caplog):
    right = sources.cpu_source("sjlt")
    wrong = right.replace("bits ^=", "bits |=")
    assert wrong != right
    monkeypatch.setattr(cpu_functions, "cpu_source", lambda name: wrong)
    with caplog.at_level(logging.WARNING, "hf_trak"):
        assert not fresh.usable(torch.randn(2, 30_000))
    assert "gives other results than torch" in caplog.text


def test_the_package_ships_the_source():
    assert (Path(sources.source_directory()) / "cpu" / "sjlt.c").is_file()
