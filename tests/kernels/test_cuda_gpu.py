"""On a GPU, where a wait inside of CUDA cannot be interrupted by a signal, hence the thread:

    python -m pytest -m gpu tests/kernels/test_cuda_gpu.py tests/kernels/test_transfers.py --timeout 60

Integers have exact sums in float32: signs and indices on the GPU must agree with the CPU to the bit.
For the memory and race checkers, which are slow:

    SOME="shapes_and_places and (257-130 or 17-1009 or 3-3) and dtype1"
    compute-sanitizer --tool memcheck python -m pytest -m gpu tests/kernels/test_cuda_gpu.py --timeout 0 -k "$SOME"
    compute-sanitizer --tool racecheck python -m pytest -m gpu tests/kernels/test_cuda_gpu.py --timeout 0 -k "$SOME"
"""

import os
import threading

import pytest
import torch

from hf_trak.gradient_computers import HookedGradientComputer
from hf_trak.gradient_computers.per_sample import function_task
from hf_trak.kernels import self_check
from hf_trak.kernels.dense import accumulate_dense
from hf_trak.kernels.runtime import CUDA as RUNTIME
from hf_trak.projectors import SparseProjector, make_projector, reference
from hf_trak.traker.plugins import GradientPipeline

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = "cuda"
SEED, MODEL_ID = 2**62 + 12345, 2**32 - 3
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def integers(rows, columns, dtype, **options):
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    return torch.randint(-8, 9, (rows, columns), generator=generator).to(dtype=dtype, **options)


@pytest.fixture(autouse=True)
def _kernels_are_tested():
    """Tests of kernels would pass without them: by torch operators, or by another kernel where Hopper's own fails."""
    assert "HF_TRAK_BACKEND" not in os.environ
    yield
    assert not self_check._without_wgmma, "the kernel for Hopper was wrong or could not run; the log says why"


@pytest.fixture(params=["wgmma", "mma"])
def instruction(request, monkeypatch):
    """The instructions that multiply signs: Hopper's own, or those of all GPUs."""
    if request.param == "wgmma" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only Hopper has wgmma")
    monkeypatch.setenv("HF_TRAK_WGMMA", "1" if request.param == "wgmma" else "0")
    return request.param


def test_hopper_uses_its_own_instructions(caplog):
    """First of all: if it fails, the others test `mma` in its place."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only Hopper has wgmma")
    for dtype in DTYPES:
        for rows in (1, 40, 200):
            device = torch.device("cuda", torch.cuda.current_device())
            assert self_check.checked_instruction(RUNTIME, "rademacher", dtype, rows, device, 2) == "wgmma", (
                caplog.text
            )


def on_gpu(name, block, outputs, start=0, nonzeros=1):
    projector = make_projector(name, start + block.shape[1], outputs, SEED, CUDA, nonzeros=nonzeros)
    out = torch.zeros(block.shape[0], outputs, device=block.device)
    projector.accumulate(out, block, start, MODEL_ID)
    return out


def on_cpu(name, block, outputs, start=0, nonzeros=1):
    projector = make_projector(name, start + block.shape[1], outputs, SEED, "cpu", nonzeros=nonzeros)
    out = torch.zeros(block.shape[0], outputs)
    projector.accumulate(out, block.cpu(), start, MODEL_ID)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [0, 8190, 2**32 - 77, 2**63 - 20_102])
@pytest.mark.parametrize("outputs", [1, 3, 127, 130, 1009, 4096, 8191, 16_384])
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 65, 257])
def test_shapes_and_places(rows, outputs, start, dtype, monkeypatch):
    """B = 1 … 257, k = 1 … 16384 with primes, positions up to 2⁶³: bits identical to the CPU."""
    block = integers(rows, 20_101 if rows < 17 else 301, dtype)
    assert torch.equal(on_gpu("sjlt", block.to(CUDA), outputs, start).cpu(), on_cpu("sjlt", block, outputs, start))
    short = block[:, :301]
    expected = on_cpu("rademacher", short, outputs, start)
    for wgmma in ("1", "0"):
        monkeypatch.setenv("HF_TRAK_WGMMA", wgmma)
        assert torch.equal(on_gpu("rademacher", short.to(CUDA), outputs, start).cpu(), expected)


@pytest.mark.parametrize("terms", ["2", "1"])
@pytest.mark.parametrize("rows", [3, 40, 130, 600])
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_chains(dtype, rows, terms, instruction, monkeypatch):
    """Every tile, in splits longer than a chain of products on tensor cores, against torch operators on the GPU;
    thirty times, in which a race would show. Integers up to 8 are exact in one bfloat16."""
    monkeypatch.setenv("HF_TRAK_FLOAT32_TERMS", terms)
    block = integers(rows, 300_001, dtype, device=CUDA)
    actual = on_gpu("rademacher", block, 4096, 77)
    assert all(torch.equal(on_gpu("rademacher", block, 4096, 77), actual) for _ in range(30))
    monkeypatch.setenv("HF_TRAK_BACKEND", "torch")
    assert torch.equal(actual, on_gpu("rademacher", block, 4096, 77))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [7, 70])
def test_signs_without_tensor_cores(dtype, rows):
    """The kernels of GPUs before Ampere."""
    block = integers(rows, 9001, dtype)
    out = torch.zeros(rows, 300, device=CUDA)
    accumulate_dense(RUNTIME, "rademacher", out, block.to(CUDA), 5, SEED, MODEL_ID, 2, "fma")
    assert torch.equal(out.cpu(), on_cpu("rademacher", block, 300, 5))


@pytest.mark.parametrize("name", ["sjlt", "rademacher"])
def test_a_thread_that_has_not_called_cuda_yet(name):
    block = integers(5, 9001, torch.bfloat16, device=CUDA)
    expected, results = on_gpu(name, block, 131), []
    out = torch.zeros_like(expected)
    projector = make_projector(name, 9001, 131, SEED, CUDA)
    thread = threading.Thread(target=lambda: results.append(projector.accumulate(out, block, 0, MODEL_ID)))
    torch.cuda.synchronize()
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert results == [None] and torch.equal(out, expected)


def test_repeated_tokens_give_the_same_bits_in_every_run():
    """Rows of an embedding's gradient are added in a fixed order."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(50, 64), torch.nn.Linear(64, 64)).to(CUDA)
    task = function_task(lambda output, batch: output.flatten(1).square().sum(1), model)
    computer = HookedGradientComputer(model, task, None, None, CUDA)
    projector = SparseProjector(computer.grad_dim, 512, SEED, device=CUDA)
    pipeline = GradientPipeline(computer, projector, computer.grad_dim, 512, CUDA)
    batch = (torch.randint(0, 50, (20, 400), device=CUDA),)
    first, _ = pipeline(batch, 20, MODEL_ID, "train")
    assert all(torch.equal(pipeline(batch, 20, MODEL_ID, "train")[0], first) for _ in range(5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("before", [0, 1, 3, 7])
@pytest.mark.parametrize("between", [0, 1, 8])
def test_alignment_and_strides(dtype, before, between, instruction):
    memory = torch.full((before + 5 * (9001 + between) + 20,), float("nan"), dtype=dtype, device=CUDA)
    block = memory.as_strided((5, 9001), (9001 + between, 1), before)
    block.copy_(integers(5, 9001, dtype))
    for name in ("sjlt", "rademacher"):
        assert torch.equal(on_gpu(name, block, 131, 77).cpu(), on_cpu(name, block, 131, 77))
        transposed = block.T.contiguous().T  # columns apart
        assert torch.equal(on_gpu(name, transposed, 131, 77).cpu(), on_cpu(name, block, 131, 77))


def factors(samples, tokens, height, width, dtype, layout=2):
    """Integers up to 3, `(B, T, I)` and `(B, T, J)`; tokens side by side in memory if `layout` is 1."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(samples, tokens, size) if layout == 2 else (samples, size, tokens) for size in (height, width)]
    pair = [torch.randint(-3, 4, shape, generator=generator).to(dtype) for shape in shapes]
    return pair if layout == 2 else [tensor.transpose(1, 2) for tensor in pair]


def outer_on(device, left, right, outputs, start, nonzeros=1):
    out = torch.zeros(left.shape[0], outputs, device=device)
    arguments = (left.to(device), right.to(device), start, SEED, MODEL_ID, nonzeros)
    torch.ops.hf_trak.sjlt_accumulate_outer(out, *arguments)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3, 8, 19])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (257, 64), (40, 513), (70, 2048), (33, 2049), (5, 9001)])
@pytest.mark.parametrize(("outputs", "nonzeros"), [(1, 1), (1009, 1), (4096, 1), (16_384, 1), (300, 3)])
def test_shapes_of_outer_products(dtype, tokens, height, width, outputs, nonzeros):
    """Sums of outer products from their factors: bits identical to the CPU, which forms them."""
    for layout, start in ((2, 8190), (1, 2**32 - 77)):
        left, right = factors(3, tokens, height, width, dtype, layout)
        expected = outer_on("cpu", left, right, outputs, start, nonzeros)
        assert torch.equal(outer_on(CUDA, left, right, outputs, start, nonzeros).cpu(), expected)


def test_outer_products_beyond_32_bits():
    """More than 2³² elements of one sample. As the coordinates of the identity map of ones: their parity."""
    height, width = 2**17 + 1, 2**15 + 3
    left, right = (torch.ones(1, 1, size, dtype=torch.bfloat16, device=CUDA) for size in (height, width))
    out = outer_on(CUDA, left, right, 4096, 5).cpu().double()
    assert int(out.sum()) % 2 == height * width % 2


@pytest.mark.parametrize("tokens", [1, 8])
def test_outer_products_do_not_depend_on_what_else_happens(tokens):
    """Batch size, stream and repetition. Against the product that torch forms, to rounding."""
    left, right = torch.randn(60, tokens, 700, device=CUDA), torch.randn(60, tokens, 900, device=CUDA)
    first = outer_on(CUDA, left, right, 4096, 11)
    assert torch.equal(outer_on(CUDA, left[17:18], right[17:18], 4096, 11), first[17:18])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        other = outer_on(CUDA, left, right, 4096, 11)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(other, first)
    assert all(torch.equal(outer_on(CUDA, left, right, 4096, 11), first) for _ in range(5))
    exact = torch.bmm(left.double().transpose(1, 2), right.double()).flatten(1).float()
    expected = on_gpu("sjlt", exact, 4096, 11)
    assert float((first - expected).norm() / expected.norm()) < 1e-6


def test_featurizing_takes_factors_and_gives_the_same_features(monkeypatch):
    """The hooked engine hands linear layers of few tokens over by their factors; HF_TRAK_BACKEND=torch does not."""
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Tanh(), torch.nn.Linear(200, 70)).to(CUDA)
    task = function_task(lambda output, batch: output.flatten(1).square().sum(1), model)
    computer = HookedGradientComputer(model, task, None, None, CUDA)
    projector = SparseProjector(computer.grad_dim, 4096, SEED, device=CUDA)
    pipeline = GradientPipeline(computer, projector, computer.grad_dim, 4096, CUDA)
    batch = (torch.randn(20, 5, 300, device=CUDA),)
    taken = []
    original = SparseProjector._accumulate_outer
    monkeypatch.setattr(
        SparseProjector, "_accumulate_outer", lambda self, *args: (taken.append(1), original(self, *args))[1]
    )
    features, _ = pipeline(batch, 20, MODEL_ID, "train")
    assert len(taken) == 2
    monkeypatch.setenv("HF_TRAK_BACKEND", "torch")
    expected, _ = pipeline(batch, 20, MODEL_ID, "train")
    assert len(taken) == 2
    torch.testing.assert_close(features, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("nonzeros", [2, 5])
def test_several_nonzeros(nonzeros):
    block = integers(4, 30_011, torch.bfloat16)
    actual = on_gpu("sjlt", block.to(CUDA), 1000, 5, nonzeros)
    assert torch.equal(actual.cpu(), on_cpu("sjlt", block, 1000, 5, nonzeros))


@pytest.mark.parametrize("start", [0, 2**32 - 7, 2**40 + 11])
def test_entries_equal_the_definition(start, instruction):
    identity = torch.eye(16, device=CUDA)
    for name, tolerance in (("rademacher", 0), ("sjlt", 0), ("normal", 4e-6)):
        algorithm = make_projector(name, 1, 1, 0, "cpu").algorithm
        expected = reference.matrix(algorithm, start, 16, 140, SEED, MODEL_ID)
        assert abs(on_gpu(name, identity, 140, start).cpu().numpy() - expected).max() <= tolerance


@pytest.mark.parametrize("name", ["rademacher", "normal"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_values_are_as_right_as_those_of_torch(name, dtype, instruction):
    """Error against float64: below 10⁻⁵ for every dtype, since products are exact or float32, and so below torch's own
    in 16 bits, which rounds the result."""
    block = torch.randn(130, 50_000, device=CUDA).to(dtype)
    matrix = make_projector(name, 50_000, 257, SEED, CUDA).matrix(0, 50_000, MODEL_ID, CUDA)
    exact = block.double() @ matrix.double()
    error = float((on_gpu(name, block, 257) - exact).norm() / exact.norm())
    assert error <= 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_sparse_values_are_right(dtype):
    block = torch.randn(130, 50_000).to(dtype)
    expected = on_cpu("sjlt", block, 257)
    error = (on_gpu("sjlt", block.to(CUDA), 257).cpu() - expected).norm() / expected.norm()
    assert float(error) <= 1e-6


@pytest.mark.parametrize("name", ["sjlt", "rademacher", "normal"])
def test_batch_size_stream_and_repetition_do_not_change_a_bit(name, instruction):
    """Everything that could make a result depend on what else happens."""
    block = torch.randn(200, 100_003, device=CUDA)
    first = on_gpu(name, block, 300, 11)
    for rows in (slice(0, 1), slice(17, 34), slice(100, 200)):
        assert torch.equal(on_gpu(name, block[rows], 300, 11), first[rows])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        other = on_gpu(name, block, 300, 11)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(other, first)
    assert all(torch.equal(on_gpu(name, block, 300, 11), first) for _ in range(5))


@pytest.mark.parametrize("name", ["sjlt", "rademacher", "normal"])
def test_any_cut_gives_the_same_features(name, instruction):
    block = integers(5, 70_001, torch.float32, device=CUDA)
    whole = on_gpu(name, block, 131)
    projector = make_projector(name, 70_001, 131, SEED, CUDA)
    pieces = torch.zeros_like(whole)
    for first, last in ((9000, 9001), (0, 5), (9001, 70_001), (5, 9000)):
        projector.accumulate(pieces, block[:, first:last], first, MODEL_ID)
    assert torch.allclose(pieces, whole, rtol=0, atol=1e-2 if name == "normal" else 0)


def test_results_do_not_depend_on_the_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    block = integers(5, 30_001, torch.bfloat16)
    for name in ("sjlt", "rademacher"):
        results = [on_gpu(name, block.to(f"cuda:{index}"), 131).cpu() for index in range(2)]
        assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("name", ["sjlt", "rademacher"])
def test_ones_beyond_32_bits_have_the_parity_of_their_number(name, instruction):
    """More than 2³² elements, in rows longer than 2³¹. No coordinate is dropped or doubled."""
    rows, columns = 2, 2**31 + 12_345
    if torch.cuda.mem_get_info()[0] < 3 * rows * columns:
        pytest.skip("needs 13 GB of GPU memory")
    ones = torch.ones(rows, columns, dtype=torch.bfloat16, device=CUDA)
    ones[1] = -1
    # With random signs every sum stays far below 2²⁴, up to where float32 is exact.
    out = on_gpu(name, ones, 4096).cpu().double()
    if name == "rademacher":
        assert ((out.long() - columns) % 2 == 0).all()
    else:
        assert (out.sum(1).long() % 2 == columns % 2).all()
    assert torch.equal(out[0], -out[1])
    pieces, projector = torch.zeros(rows, 4096, device=CUDA), make_projector(name, columns, 4096, SEED, CUDA)
    for first in range(0, columns, 2**28):
        projector.accumulate(pieces, ones[:, first : first + 2**28], first, MODEL_ID)
    assert torch.equal(pieces.cpu().double(), out), "cut into pieces with small offsets"


def test_nothing_is_written_beside_the_output(instruction):
    frame = torch.full((7, 150), 3.0, device=CUDA)
    block = integers(5, 9001, torch.bfloat16, device=CUDA)
    for name in ("sjlt", "rademacher", "normal"):
        make_projector(name, 9001, 131, SEED, CUDA).accumulate(frame[1:-1, 7:138], block, 0, MODEL_ID)
    inside = torch.zeros_like(frame, dtype=torch.bool)
    inside[1:-1, 7:138] = True
    assert (frame[~inside] == 3.0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["sjlt", "rademacher", "normal"])
def test_what_is_not_finite_stays_in_its_row(name, bad, instruction):
    block = torch.randn(20, 9001, device=CUDA)
    block[7, 5000] = bad
    finite = torch.isfinite(on_gpu(name, block, 131)).all(1)
    assert not finite[7] and int(finite.sum()) == 19


@pytest.mark.parametrize(("name", "more"), [("sjlt", (2,)), ("rademacher", (2,)), ("normal", ())])
def test_operators_are_registered_properly(name, more):
    operator = getattr(torch.ops.hf_trak, f"{name}_accumulate").default
    tensors = (torch.randn(3, 40, device=CUDA), torch.randn(3, 100, device=CUDA))
    torch.library.opcheck(operator, (*tensors, 5, 1, 2, *more))


def test_operator_of_factors_is_registered_properly():
    tensors = (torch.randn(3, size, device=CUDA) for size in (40, 10, 18))
    out, left, right = next(tensors), next(tensors).view(3, 2, 5), next(tensors).view(3, 2, 9)
    torch.library.opcheck(torch.ops.hf_trak.sjlt_accumulate_outer.default, (out, left, right, 5, 1, 2, 1))


def test_projections_can_be_captured_in_a_graph():
    block, out = torch.randn(20, 9001, device=CUDA), torch.zeros(20, 131, device=CUDA)
    projector = make_projector("sjlt", 9001, 131, SEED, CUDA)
    projector.accumulate(out, block, 0, MODEL_ID)  # loads and checks the kernel
    expected = 2 * out
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        projector.accumulate(out, block, 0, MODEL_ID)
    graph.replay()
    assert torch.equal(out, expected)


def test_torch_backend_on_the_gpu_gives_the_same(monkeypatch):
    block = integers(5, 9001, torch.float32, device=CUDA)
    with_kernels = {name: on_gpu(name, block, 131) for name in ("sjlt", "rademacher")}
    monkeypatch.setenv("HF_TRAK_BACKEND", "torch")
    for name, expected in with_kernels.items():
        assert torch.equal(on_gpu(name, block, 131), expected)
