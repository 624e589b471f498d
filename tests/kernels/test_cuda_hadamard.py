"""The rotation of features: in torch operators, by the kernel on a CPU, by the operator, and by the kernel on a GPU.

All of them add and subtract the same pairs in the same order, so that results are compared bit by bit, with values
whose sums are not exact. As in `test_cuda_emulated.py`, memory around the rows is NaN. On a GPU:

    python -m pytest -m gpu tests/kernels/test_cuda_hadamard.py --timeout 60 --timeout-method=thread
"""

import random
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch
from cuda_on_cpu import EmulatedRuntime, compiler
from torch import Tensor

from hf_trak.errors import KernelError
from hf_trak.kernels import compiler as nvrtc
from hf_trak.kernels import hadamard as kernel
from hf_trak.kernels import self_check, torch_hadamard
from hf_trak.kernels.hadamard import TILE_BITS, plan_passes
from hf_trak.kernels.philox import sign_tensor
from hf_trak.kernels.runtime import CUDA as RUNTIME
from hf_trak.kernels.sources import ARCHITECTURES, HADAMARD
from hf_trak.store import codes as rotation
from hf_trak.store.codes import Rotation

CPU = torch.device("cpu")

emulated = pytest.mark.skipif(compiler() is None, reason="needs g++ to run CUDA sources on the CPU")


def gpu(test):
    """Mark a test of a real GPU."""
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(test))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Compiled kernels, shared by the tests of this module."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def runtime(directory):
    """The GPU with the least shared memory."""
    return EmulatedRuntime(directory, (7, 5), seed=random.randrange(2**31))


def framed(rows: int, columns: int, between: int = 0, before: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of values of many sizes amid NaN, and the memory that they lie in."""
    memory = torch.full((before + rows * (columns + between) + 7,), float("nan"))
    view = memory.as_strided((rows, columns), (columns + between, 1), before)
    view.copy_(torch.randn(rows, columns) * 10.0 ** torch.randint(-6, 7, (rows, 1)))
    return view, memory


def drawn_signs(rounds: int, size: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, (rounds, -(-size // 32))).to(torch.int32)


def by_definition(rows: Tensor, signs: Tensor, size: int, starts: list[int]) -> Tensor:
    """Step by step, without a thought of memory."""
    rows = rows.clone()
    for start, words in zip(starts, signs, strict=True):
        block = rows[:, start : start + size] * (sign_tensor(words)[:size] * torch.tensor(size**-0.5))
        distance = 1
        while distance < size:
            pairs = block.view(len(rows), -1, 2, distance)
            block = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2).flatten(1)
            distance *= 2
        rows[:, start : start + size] = block
    return rows


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Zeros of both signs and NaN included."""
    return torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))


def check(run, rows: int, size: int, starts: list[int], between: int = 0, before: int = 0) -> None:
    """Rotate rows amid NaN, which may not change."""
    block, memory = framed(rows, max(starts) + size, between, before)
    signs = drawn_signs(len(starts), size)
    expected = memory.clone()
    expected.as_strided(block.shape, block.stride(), before).copy_(by_definition(block, signs, size, starts))
    run(block, signs, size, starts)
    assert same_bits(memory, expected)


# ---- In torch operators ----


@pytest.mark.parametrize("size_bits", range(18))
def test_torch_operators_do_the_steps_of_the_definition(size_bits):
    size = 1 << size_bits
    check(torch_hadamard.rotate_blocks, 3, size, [0, 0, 0], between=random.randrange(3), before=1)
    check(torch_hadamard.rotate_blocks, 2, size, [0, size // 2, 0], between=1)


def test_groups_of_rows_do_not_change_a_bit(monkeypatch):
    """Several groups. The last has fewer rows."""
    monkeypatch.setattr(torch_hadamard, "_CACHED_BYTES", 4 * 256 * 5)
    check(torch_hadamard.rotate_blocks, 33 * torch.get_num_threads(), 256, [0, 100])
    torch_hadamard.rotate_blocks(torch.zeros(0, 8), drawn_signs(1, 8), 8, [0])


# ---- The kernel on a CPU ----


@pytest.mark.few(1)
@emulated
@pytest.mark.parametrize("size_bits", range(17))
def test_every_size(runtime, size_bits):
    size = 1 << size_bits
    check(lambda *given: kernel.rotate_blocks(runtime, *given), 3, size, [0, 0, 0], random.randrange(5), 3)
    check(lambda *given: kernel.rotate_blocks(runtime, *given), 2, size, [0, size // 2 + 1, 0], random.randrange(5), 1)


@emulated
@pytest.mark.parametrize(
    "size_bits", [18, *(pytest.param(bits, marks=pytest.mark.slow) for bits in (17, 19, 20, 21, 22))]
)
def test_long_rows(runtime, size_bits):
    """From 2¹⁸ on, some passes neither begin a round nor end one."""
    rows = 1 if size_bits == 18 else 2
    check(lambda *given: kernel.rotate_blocks(runtime, *given), rows, 1 << size_bits, [0, 0, 0], 5, 3)


@emulated
@pytest.mark.parametrize(("rows", "size_bits"), [(40, 10), (16, 10), (17, 10), (600, 5), (20_000, 0), (9000, 1)])
def test_tiles_of_many_rows(runtime, rows, size_bits):
    """Full tiles and one that is not."""
    check(lambda *given: kernel.rotate_blocks(runtime, *given), rows, 1 << size_bits, [0, 0], between=1)
    assert [launch.grid for launch in runtime.launches] == [(-(-rows * 2**size_bits // 2**TILE_BITS), 1, 1)]


@emulated
def test_order_of_threads_does_not_change_a_bit(directory):
    """A missing barrier would: every round runs the threads in an order of its own."""
    rows, signs = torch.randn(2, 2**16), drawn_signs(3, 2**16)
    results = []
    for seed in range(4):
        result = rows.clone()
        kernel.rotate_blocks(EmulatedRuntime(directory, seed=seed), result, signs, 2**16, [0, 0, 0])
        results.append(result)
    assert all(same_bits(result, results[0]) for result in results)


@emulated
@pytest.mark.parametrize("k", [1, 3, 100, 4096, 5000, 40_000])
def test_rotations_use_the_kernel_where_it_is_wanted(runtime, k, monkeypatch):
    rows, expected = torch.randn(3, k), []
    for turn in (False, True):
        expected.append(Rotation(k, 5, 6).apply(rows))
        if not turn:
            assert not runtime.launches
            monkeypatch.setattr(rotation, "kernels_wanted", lambda device: True)
            monkeypatch.setattr(rotation, "hadamard", lambda *given: kernel.rotate_blocks(runtime, *given))
    assert same_bits(*expected)
    assert runtime.launches


@emulated
def test_wrong_kernels_are_refused(runtime, monkeypatch):
    monkeypatch.setattr(self_check, "_done", set())
    for size in (1, 2**14, 2**15, 2**20):
        self_check.require_right_hadamard(runtime, size, CPU)
    assert len(runtime.launches) == 1 + 4, "checked once for rows in a tile, and once for longer ones"

    class Wrong(EmulatedRuntime):
        def launch(self, launch, device):
            launch.arguments.low_bits -= launch.arguments.low_bits > 0
            super().launch(launch, device)

    self_check._done.clear()
    for size in (64, 2**15):
        with pytest.raises(KernelError, match=r"'hadamard' kernel.*wrong results.*HF_TRAK_BACKEND=torch"):
            self_check.require_right_hadamard(Wrong(runtime.directory), size, CPU)


def test_rows_too_far_apart_are_refused(runtime):
    rows = torch.empty(0).expand(0).as_strided((0, 1), (2**19, 1))
    kernel.rotate_blocks(runtime, rows, drawn_signs(1, 1), 1, [0])
    far = torch.empty(1, device="meta").as_strided((3, 1), (2**19, 1))
    with pytest.raises(KernelError, match=r"Rows of 1 numbers lie 524288 numbers apart.*contiguous"):
        kernel.rotate_blocks(runtime, far, drawn_signs(1, 1), 1, [0])


@pytest.mark.parametrize("size_bits", range(32))
@pytest.mark.parametrize("rounds", [1, 2, 3, 6])
def test_passes_do_every_step_once_and_in_order(size_bits, rounds):
    steps, began = [], 0
    for planned in plan_passes(size_bits, rounds):
        high = range(planned.first_bit, planned.first_bit + planned.high_bits)
        steps += [(began - 1, bit) for bit in high]
        if size_bits > TILE_BITS:
            line_bits = TILE_BITS - planned.high_bits
            assert 5 <= line_bits <= planned.first_bit and planned.low_bits <= line_bits
        assert planned.first_round == began
        for _ in range(planned.rounds):
            steps += [(began, bit) for bit in range(planned.low_bits)]
            began += 1
    assert steps == [(number, bit) for number in range(rounds) for bit in range(size_bits)]


# ---- The program ----


def disassembler() -> str | None:
    """triton, which torch's CUDA wheels need, brings nvdisasm."""
    packaged = Path(sysconfig.get_path("purelib")) / "triton/backends/nvidia/bin/nvdisasm"
    return str(packaged) if packaged.is_file() else shutil.which("nvdisasm")


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch", [pytest.param(arch, marks=[] if arch == "90a" else pytest.mark.slow) for arch in ARCHITECTURES]
)
def test_products_are_rounded_before_they_are_added(arch, tmp_path):
    """The compiler may make one instruction of a product and a sum, which rounds once; this kernel has none."""
    try:
        nvrtc.nvrtc_version()
    except KernelError as error:
        pytest.skip(f"NVRTC is not installed: {error}")
    if disassembler() is None:
        pytest.skip("nvdisasm is not installed")
    (tmp_path / "kernel.cubin").write_bytes(nvrtc.compile_kernel(HADAMARD, arch).image)
    code = subprocess.run(
        [disassembler(), "-c", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True
    ).stdout
    assert "FMUL" in code and "FADD" in code and "FFMA" not in code
    assert "FTZ" not in code, "small numbers are numbers"


# ---- The operator ----


def test_operator_is_registered_properly():
    given = torch.randn(3, 100), drawn_signs(3, 64), 64, [0, 36, 0]
    torch.library.opcheck(torch.ops.hf_trak.hadamard.default, given)
    rows = given[0].clone()
    torch.ops.hf_trak.hadamard(rows, *given[1:])
    assert same_bits(rows, by_definition(*given))


# ---- The kernel on a GPU ----


def on_gpu(rows: Tensor, signs: Tensor, size: int, starts: list[int]) -> Tensor:
    result = rows.cuda()
    torch.ops.hf_trak.hadamard(result, signs.cuda(), size, starts)
    return result.cpu()


@gpu
@pytest.mark.parametrize("size_bits", range(24))
def test_every_size_on_a_gpu(size_bits):
    size = 1 << size_bits
    for rows, starts in ((3, [0, 0, 0]), (2, [0, size // 2, 0, size // 2]), (max(1, 2**18 >> size_bits) + 1, [0])):
        given = torch.randn(rows, max(starts) + size), drawn_signs(len(starts), size), size, starts
        expected = given[0].clone()
        torch_hadamard.rotate_blocks(expected, *given[1:])
        assert same_bits(on_gpu(*given), expected)


@gpu
@pytest.mark.parametrize("size_bits", [0, 3, 9, 14, 16])
@pytest.mark.parametrize(("between", "before"), [(0, 1), (5, 3), (64, 32)])
def test_rows_of_any_alignment_on_a_gpu(size_bits, between, before):
    """Nothing beside them is written, and rows whose columns do not lie side by side work too."""
    size = 1 << size_bits
    block, memory = framed(70, size + 1, between, before)
    signs = drawn_signs(2, size)
    expected = by_definition(block, signs, size, [0, 1])
    on_device = memory.cuda()
    view = on_device.as_strided(block.shape, block.stride(), before)
    torch.ops.hf_trak.hadamard(view, signs.cuda(), size, [0, 1])
    assert same_bits(view.cpu(), expected)
    view.fill_(float("nan"))
    assert bool(on_device.isnan().all())
    turned = block.t().contiguous().cuda().t()
    torch.ops.hf_trak.hadamard(turned, signs.cuda(), size, [0, 1])
    assert same_bits(turned.cpu(), expected)


@gpu
@pytest.mark.parametrize("k", [512, 5000, 2**16])
def test_rotations_on_a_gpu_have_the_bits_of_the_cpu(k, monkeypatch):
    """By the kernel and by torch operators, again and again, on two streams at once, alone and in batches."""
    rows, turn = torch.randn(200, k), Rotation(k, 7, 8)
    expected, given = turn.apply(rows), rows.cuda()
    assert all(same_bits(turn.apply(given).cpu(), expected) for _ in range(20))
    assert same_bits(turn.apply(given[17:18]).cpu(), expected[17:18])
    results, streams = [], [torch.cuda.Stream() for _ in range(2)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            results.append([turn.apply(given) for _ in range(5)])
    torch.cuda.synchronize()
    assert all(same_bits(result.cpu(), expected) for of_stream in results for result in of_stream)
    monkeypatch.setenv("HF_TRAK_BACKEND", "torch")
    assert same_bits(turn.apply(given).cpu(), expected)


@gpu
def test_many_rows_on_a_gpu():
    """More than 2³² numbers; the last row is compared."""
    rows, size = 2**16 + 1, 2**16
    if torch.cuda.mem_get_info()[0] < 5 * rows * size:
        pytest.skip("needs 22 GB of GPU memory")
    given, signs = torch.randn(rows, size, device="cuda"), drawn_signs(3, size)
    last = given[-2:].cpu()
    torch_hadamard.rotate_blocks(last, signs, size, [0, 0, 0])
    torch.ops.hf_trak.hadamard(given, signs.cuda(), size, [0, 0, 0])
    assert same_bits(given[-2:].cpu(), last)


@gpu
def test_what_is_not_finite_stays_in_its_row_on_a_gpu():
    rows = torch.randn(20, 4096)
    rows[7, 100] = float("inf")
    finite = torch.isfinite(on_gpu(rows, drawn_signs(3, 4096), 4096, [0, 0, 0])).all(1)
    assert not finite[7] and int(finite.sum()) == 19


@gpu
def test_operator_is_registered_properly_on_a_gpu():
    given = torch.randn(3, 100, device="cuda"), drawn_signs(3, 64).cuda(), 64, [0, 36, 0]
    torch.library.opcheck(torch.ops.hf_trak.hadamard.default, given)


@gpu
def test_rotations_can_be_captured_in_a_graph():
    rows, signs = torch.randn(5, 2**15), drawn_signs(3, 2**15)
    expected = on_gpu(rows, signs, 2**15, [0, 0, 0])  # loads and checks the kernel
    given, on_device = rows.cuda(), signs.cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.hf_trak.hadamard(given, on_device, 2**15, [0, 0, 0])
    graph.replay()
    assert same_bits(given.cpu(), expected)


@gpu
def test_kernels_are_checked_on_a_gpu(monkeypatch):
    monkeypatch.setattr(self_check, "_done", set())
    device = torch.device("cuda", torch.cuda.current_device())
    for size in (64, 2**15):
        self_check.require_right_hadamard(RUNTIME, size, device)
    assert {key[:2] for key in self_check._done} == {("hadamard", True), ("hadamard", False)}
