"""The counter of launches, waits, bytes and operations, on programs small enough to count by hand."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from device_counts import as_on_a_gpu
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from hf_trak.projectors import make_projector
from hf_trak.runtime.counting import Counting, Counts


def counts_of(program: Callable[[], object]) -> Counts:
    with Counting() as counting:
        program()
    return counting.total


A, W = torch.randn(4, 8), torch.randn(8, 16)  # 128 and 512 bytes; the product has 256


@pytest.mark.parametrize(
    ("program", "launches", "read", "written", "allocated", "flops"),
    [
        (lambda: A @ W, {"mm": 1}, 640, 256, 256, 2 * 4 * 8 * 16),
        (lambda: F.linear(A, W.T, torch.zeros(16)), {"addmm": 1, "zeros": 1}, 704, 320, 320, 2 * 4 * 8 * 16),
        (lambda: (A + 1).relu(), {"add": 1, "relu": 1}, 256, 256, 256, 0),
        (lambda: A.view(32).unsqueeze(0).expand(9, 32).T.detach(), {}, 0, 0, 0, 0),
        (lambda: torch.empty(100), {}, 0, 0, 400, 0),
        (lambda: A.T.contiguous(), {"clone": 1}, 128, 128, 128, 0),
        (lambda: A[:1].expand(4, 8).clone(), {"clone": 1}, 32, 128, 128, 0),  # what is expanded is there once
        (lambda: A.clone().add_(A), {"clone": 1, "add_": 1}, 128 + 256, 256, 128, 0),
        (lambda: torch.empty(4, 8).copy_(A), {"copy_": 1}, 128, 128, 128, 0),
        (lambda: torch.empty(8).zero_(), {"zero_": 1}, 0, 32, 32, 0),
        (lambda: torch.mm(A, W, out=torch.empty(4, 16)), {"mm": 1}, 640, 256, 256, 2 * 4 * 8 * 16),
        (lambda: W.index_select(0, torch.tensor([3])), {"index_select": 1}, 64 + 8, 64, 64, 0),
        (lambda: A.sum(), {"sum": 1}, 128, 4, 4, 0),
        (lambda: A[:0] + 1, {}, 0, 0, 0, 0),
    ],
)
def test_operators(
    program: Callable[[], object], launches: dict[str, int], read: int, written: int, allocated: int, flops: int
) -> None:
    found = counts_of(program)
    assert dict(found.launches) == launches
    assert (found.read.total(), found.written.total()) == (read, written)
    assert (found.allocated, found.flops) == (allocated, flops)


def test_placed_rows_alone_are_written() -> None:
    table, rows, index = torch.zeros(1000, 8), torch.ones(2, 8), torch.tensor([5, 7])
    found = counts_of(lambda: table.index_add_(0, index, rows))
    assert found.written["index_add_"] == 64
    assert found.read["index_add_"] == 64 + 64 + 16  # what was there, what is added, and where


def test_a_training_step() -> None:
    """y = x Wᵀ, backward: two products of the same size, one for each argument."""
    x, w = A.clone().requires_grad_(), W.T.clone().requires_grad_()
    found = counts_of(lambda: F.linear(x, w).sum().backward())
    assert found.launches == Counter({"mm": 3, "sum": 1, "ones_like": 1})
    assert found.flops == 3 * 2 * 4 * 8 * 16


def test_a_step_of_a_convolution_with_groups() -> None:
    """Forward, and backward to the weight: 2 · 9 positions · 6 channels out · 2 channels in of a group · 9 each."""
    x, w = torch.randn(3, 4, 5, 5), torch.randn(6, 2, 3, 3, requires_grad=True)
    found = counts_of(lambda: F.conv2d(x, w, groups=2).sum().backward())
    assert found.flops == 2 * (2 * 3 * 9 * 6 * 2 * 9)


@pytest.mark.parametrize(
    ("program", "waits"),
    [
        (lambda: A.sum().item(), {"_local_scalar_dense": 1}),
        (lambda: bool(A[0, 0] > 0), {"_local_scalar_dense": 1}),
        (lambda: A[A > 0], {"index": 1}),
        (lambda: A.nonzero(), {"nonzero": 1}),
        (lambda: A.unique(), {"_unique2": 1}),
        (lambda: A.cpu(), {"cpu": 1}),
        (lambda: A.tolist(), {"tolist": 1}),
        (lambda: A.numpy(), {"numpy": 1}),
        (lambda: A[[1, 2]].sum(), {}),
        (lambda: A.where(A > 0, 0.0), {}),
    ],
)
def test_waits(program: Callable[[], object], waits: dict[str, int]) -> None:
    counting = Counting()
    with as_on_a_gpu(counting), counting:
        program()
    assert dict(counting.total.waits) == waits


def test_sections_count_what_is_done_in_them() -> None:
    with Counting() as counting:
        A.neg()
        with counting.section("one"):
            A.abs()
            with counting.section("two"):
                A.exp()
    assert counting.total.launches == Counter({"neg": 1, "abs": 1, "exp": 1})
    assert counting.sections["one"].launches == Counter({"abs": 1})
    assert counting.sections["two"].launches == Counter({"exp": 1})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_of_the_sparse_map(dtype: torch.dtype) -> None:
    """A small block is added to the sums in place; 8 chunks of 8,192 are a split, whose partial sums are added up."""
    projector = make_projector("sjlt", grad_dim=2**20, proj_dim=4096, seed=0, device="cpu")
    sums = 2 * 4096 * 4
    for columns, splits in ((1000, 1), (2**17, 2)):
        block, out = torch.ones(2, columns, dtype=dtype), torch.zeros(2, 4096)
        counting = Counting()
        with as_on_a_gpu(counting), counting:
            projector.accumulate(out, block, 0, 0)
        found, size = counting.total, 2 * columns * dtype.itemsize
        assert found.launches == Counter({"sjlt": 1, "reduce": 1} if splits > 1 else {"sjlt": 1})
        assert found.read["sjlt"] == (size if splits > 1 else size + sums)
        assert found.written["sjlt"] == splits * sums
        assert found.read["reduce"] == (0 if splits == 1 else (splits + 1) * sums)
        assert found.allocated == (0 if splits == 1 else splits * sums)


def test_factors_of_few_tokens_are_one_kernel() -> None:
    projector = make_projector("sjlt", grad_dim=256 * 512, proj_dim=4096, seed=0, device="cpu")
    left, right, out = torch.ones(2, 4, 256), torch.ones(2, 4, 512), torch.zeros(2, 4096)
    counting = Counting()
    with as_on_a_gpu(counting), counting:
        assert projector.takes_outer(left, right)
        projector.accumulate_outer(out, left, right, 0, 0)
    assert counting.total.launches["outer"] == 1
    assert counting.total.launches.total() <= 2
    assert counting.total.read["outer"] - 2 * 4096 * 4 * (2 - counting.total.launches.total()) == 4 * 2 * 4 * 768


def test_a_gpu_is_played_in_the_context_alone() -> None:
    is_cuda: Callable[[Tensor], bool] = lambda tensor: tensor.is_cuda  # noqa: E731
    with as_on_a_gpu(Counting()):
        assert is_cuda(A)
    assert not is_cuda(A) and A.cpu() is A
