"""Loops of small operators in threads: every sample once, the same bits, no operator that waits for a thread."""

import os
import threading
from collections.abc import Iterator

import pytest
import torch

from hf_trak.gradient_computers.hooked.rules.conv import ConvGeometry, conv_pieces
from hf_trak.gradient_computers.hooked.workspace import Workspace
from hf_trak.kernels import torch_sparse
from hf_trak.projectors import SparseProjector
from hf_trak.runtime.operator_threads import one_core, over_samples


@pytest.fixture(params=[1, 2, 4, 16])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """A number of threads of torch, whatever the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize("size", [0, 1, 3, 8, 16, 37])
def test_every_sample_is_in_one_stretch_whose_operators_use_one_core(threads: int, size: int, tiny: bool) -> None:
    seen = torch.zeros(size)
    used, stretches = set(), []

    def loop(first: int, last: int) -> None:
        seen[first:last] += 1
        used.add(torch.get_num_threads())
        stretches.append((threading.get_ident(), last - first))

    over_samples(loop, size, tiny)
    assert seen.tolist() == [1] * size
    assert used == {1}
    assert torch.get_num_threads() == threads
    parts = max(1, min(threads // 2, size // 4) if tiny else min(threads, size))
    assert len(stretches) == (parts if tiny or parts == 1 else size)
    assert len({thread for thread, _ in stretches}) <= parts
    if len(stretches) > 1:
        assert min(length for _, length in stretches) >= (4 if tiny else 1)


def test_a_thread_that_is_late_leaves_its_samples_to_the_others() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    taken: list[int] = []
    others_done = threading.Event()

    def loop(first: int, last: int) -> None:
        taken.append(threading.get_ident())
        if len(taken) == 1:
            assert others_done.wait(60)
        elif len(taken) == 16:
            others_done.set()

    try:
        over_samples(loop, 16)
    finally:
        torch.set_num_threads(before)
    assert sorted(taken.count(thread) for thread in set(taken)) == [1, 15]


def test_threads_that_start_later_have_the_number_of_threads_of_the_process(threads: int) -> None:
    over_samples(lambda first, last: None, 16)
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [threads]


def test_an_error_of_any_thread_is_raised_after_all_have_ended(threads: int) -> None:
    ended = []

    def loop(first: int, last: int) -> None:
        try:
            if last == 16:
                raise KeyError("the last stretch")
        finally:
            ended.append(last)

    with pytest.raises(KeyError, match="the last stretch"):
        over_samples(loop, 16)
    assert len(ended) == (16 if threads > 1 else 1)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_threads_are_in_the_modes_of_the_caller(threads: int, context: type) -> None:
    modes = set()
    with context():
        sums = torch.zeros(16, 8)
        expected = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

        def loop(first: int, last: int) -> None:
            modes.add((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
            sums[first:last].add_(1)

        over_samples(loop, 16)
    assert modes == {expected}
    assert sums.eq(1).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_starts_threads_of_its_own() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    try:
        over_samples(lambda first, last: None, 16)
        child = os.fork()
        if child == 0:
            done: list[int] = []
            over_samples(lambda first, last: done.append(last - first), 16)
            os._exit(sum(done))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 16
    finally:
        torch.set_num_threads(before)


def test_one_core_restores_the_number_of_threads_after_an_error(threads: int) -> None:
    with pytest.raises(ValueError, match="inside"), one_core() as given:
        assert (given, torch.get_num_threads()) == (threads, 1)
        raise ValueError("inside")
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("nonzeros", [1, 2])
def test_the_sparse_map_has_the_same_bits_for_any_number_of_threads(
    threads: int, nonzeros: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its torch operators add nothing that is spread over threads: a batch had some thousand of them."""
    monkeypatch.setenv("HF_TRAK_BACKEND", "torch")
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(16, 300_001, generator=generator)
    used = set()
    add_slice = torch_sparse._add_slice

    def recorded(*args: object) -> None:
        used.add(torch.get_num_threads())
        add_slice(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(torch_sparse, "_add_slice", recorded)
    results = []
    for count in (threads, 1):
        torch.set_num_threads(count)
        sink = SparseProjector(block.shape[1], 512, nonzeros=nonzeros).sink(16, 0, "cpu")
        for start in range(0, block.shape[1], 170_003):
            sink(start, block[:, start : start + 170_003])
        results.append(sink.result())
    torch.set_num_threads(threads)
    assert torch.equal(*results)
    assert used == {1}


def test_convolutions_have_the_same_bits_for_any_number_of_threads(threads: int) -> None:
    """Their weight gradients are contracted sample by sample, each on one core."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 4, 20, 20, generator=generator)
    grad = torch.randn(8, 6, 20, 20, generator=generator)
    geometry = ConvGeometry([1, 1], [1, 1], [1, 1], 1)
    found = []
    for count in (threads, 1):
        torch.set_num_threads(count)
        ((_, _, block),) = conv_pieces(x, grad, (6, 4, 3, 3), geometry, Workspace())
        found.append(block.clone())
    torch.set_num_threads(threads)
    assert torch.equal(*found)
    weight = torch.zeros(6, 4, 3, 3, dtype=torch.float64, requires_grad=True)
    for row in range(8):
        output = torch.nn.functional.conv2d(x[row : row + 1].double(), weight, padding=1)
        (expected,) = torch.autograd.grad(output, weight, grad[row : row + 1].double())
        # 400 positions: rounding of their sum, whatever the order
        torch.testing.assert_close(found[0][row].double(), expected.flatten(), rtol=0, atol=400 * 2**-24 * 20)
