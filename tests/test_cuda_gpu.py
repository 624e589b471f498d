"""On a GPU: `python -m pytest -m gpu tests/test_cuda_gpu.py`.

Integers have exact sums in float32: signs and indices on the GPU must agree with the CPU to the bit.
For the memory and race checkers:

    compute-sanitizer --tool memcheck python -m pytest -m "gpu and not slow" tests/test_cuda_gpu.py -k shapes
    compute-sanitizer --tool racecheck python -m pytest -m "gpu and not slow" tests/test_cuda_gpu.py -k shapes
"""

import pytest
import torch

from hf_trak.projectors import make_projector, reference

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
@pytest.mark.parametrize("start", [0, 8190, 2**32 - 77, 2**63 - 20_101])
@pytest.mark.parametrize("outputs", [1, 3, 127, 130, 1009, 4096, 8191, 16_384])
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 65, 257])
def test_shapes_and_places(rows, outputs, start, dtype):
    """B = 1 … 257, k = 1 … 16384 with primes, positions up to 2⁶³: bits identical to the CPU."""
    block = integers(rows, 20_101 if rows < 17 else 301, dtype)
    assert torch.equal(on_gpu("sjlt", block.to(CUDA), outputs, start).cpu(), on_cpu("sjlt", block, outputs, start))
    short = block[:, :301]
    assert torch.equal(
        on_gpu("rademacher", short.to(CUDA), outputs, start).cpu(), on_cpu("rademacher", short, outputs, start)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("before", [0, 1, 3, 7])
@pytest.mark.parametrize("between", [0, 1, 8])
def test_alignment_and_strides(dtype, before, between):
    memory = torch.full((before + 5 * (9001 + between) + 20,), float("nan"), dtype=dtype, device=CUDA)
    block = memory.as_strided((5, 9001), (9001 + between, 1), before)
    block.copy_(integers(5, 9001, dtype))
    for name in ("sjlt", "rademacher"):
        assert torch.equal(on_gpu(name, block, 131, 77).cpu(), on_cpu(name, block, 131, 77))
        transposed = block.T.contiguous().T  # columns apart
        assert torch.equal(on_gpu(name, transposed, 131, 77).cpu(), on_cpu(name, block, 131, 77))


@pytest.mark.parametrize("nonzeros", [2, 5])
def test_several_nonzeros(nonzeros):
    block = integers(4, 30_011, torch.bfloat16)
    actual = on_gpu("sjlt", block.to(CUDA), 1000, 5, nonzeros)
    assert torch.equal(actual.cpu(), on_cpu("sjlt", block, 1000, 5, nonzeros))


@pytest.mark.parametrize("start", [0, 2**32 - 7, 2**40 + 11])
def test_entries_equal_the_definition(start):
    identity = torch.eye(16, device=CUDA)
    for name, tolerance in (("rademacher", 0), ("sjlt", 0), ("normal", 4e-6)):
        algorithm = make_projector(name, 1, 1, 0, "cpu").algorithm
        expected = reference.matrix(algorithm, start, 16, 140, SEED, MODEL_ID)
        assert abs(on_gpu(name, identity, 140, start).cpu().numpy() - expected).max() <= tolerance


@pytest.mark.parametrize("name", ["rademacher", "normal"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_values_are_as_right_as_those_of_torch(name, dtype):
    """Error against float64: below 10⁻⁵, or else below twice torch's own in the same dtype."""
    block = torch.randn(130, 50_000, device=CUDA).to(dtype)
    matrix = make_projector(name, 50_000, 257, SEED, CUDA).matrix(0, 50_000, MODEL_ID, CUDA)
    exact = block.double() @ matrix.double()
    error_of_torch = float((block @ matrix.to(dtype) - exact).norm() / exact.norm())
    error = float((on_gpu(name, block, 257) - exact).norm() / exact.norm())
    assert error <= (1e-5 if dtype == torch.float32 else max(1e-5, 2 * error_of_torch))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sparse_values_are_right(dtype):
    block = torch.randn(130, 50_000).to(dtype)
    expected = on_cpu("sjlt", block, 257)
    error = (on_gpu("sjlt", block.to(CUDA), 257).cpu() - expected).norm() / expected.norm()
    assert float(error) <= 1e-6


@pytest.mark.parametrize("name", ["sjlt", "rademacher", "normal"])
def test_batch_size_stream_and_repetition_do_not_change_a_bit(name):
    """Trap 17, and everything that could make a result depend on what else happens."""
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
def test_any_cut_gives_the_same_features(name):
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
def test_ones_beyond_32_bits_have_the_parity_of_their_number(name):
    """Trap 11: more than 2³² elements, in rows longer than 2³¹. No coordinate is dropped or doubled."""
    rows, columns = 2, 2**31 + 12_345
    if torch.cuda.mem_get_info()[0] < 3 * rows * columns:
        pytest.skip("needs 13 GB of GPU memory")
    ones = torch.ones(rows, columns, dtype=torch.bfloat16, device=CUDA)
    # With random signs every sum stays far below 2²⁴, up to where float32 is exact.
    out = on_gpu(name, ones, 4096).cpu().double()
    if name == "rademacher":
        assert ((out.long() - columns) % 2 == 0).all()
    else:
        assert (out.sum(1).long() % 2 == columns % 2).all()
    assert torch.equal(out[0], out[1])


def test_nothing_is_written_beside_the_output():
    frame = torch.full((7, 150), 3.0, device=CUDA)
    block = integers(5, 9001, torch.bfloat16, device=CUDA)
    for name in ("sjlt", "rademacher", "normal"):
        make_projector(name, 9001, 131, SEED, CUDA).accumulate(frame[1:-1, 7:138], block, 0, MODEL_ID)
    inside = torch.zeros_like(frame, dtype=torch.bool)
    inside[1:-1, 7:138] = True
    assert (frame[~inside] == 3.0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["sjlt", "rademacher", "normal"])
def test_what_is_not_finite_stays_in_its_row(name, bad):
    block = torch.randn(20, 9001, device=CUDA)
    block[7, 5000] = bad
    finite = torch.isfinite(on_gpu(name, block, 131)).all(1)
    assert not finite[7] and int(finite.sum()) == 19


@pytest.mark.parametrize(("name", "more"), [("sjlt", (2,)), ("rademacher", (2,)), ("normal", ())])
def test_operators_are_registered_properly(name, more):
    operator = getattr(torch.ops.hf_trak, f"{name}_accumulate").default
    tensors = (torch.randn(3, 40, device=CUDA), torch.randn(3, 100, device=CUDA))
    torch.library.opcheck(operator, (*tensors, 5, 1, 2, *more))


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
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    for name, expected in with_kernels.items():
        assert torch.equal(on_gpu(name, block, 131), expected)
