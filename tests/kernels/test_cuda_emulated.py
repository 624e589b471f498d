"""The sources of the CUDA kernels, run on a CPU thread by thread with the launches that a GPU would get.

Blocks of integers have exact sums: signs, indices and which element goes where must agree with the reference to the
bit. Memory around the block, and shared memory nobody wrote, is NaN.
"""

import dataclasses
import random

import pytest
import torch
from cuda_on_cpu import EmulatedRuntime, compiler

from hf_trak.errors import KernelError
from hf_trak.kernels import self_check
from hf_trak.kernels.dense import accumulate_dense, plan_dense
from hf_trak.kernels.sparse import TILE, accumulate_sjlt, plan_sjlt, shared_bytes
from hf_trak.projectors import NormalProjector, RademacherProjector, SparseProjector, reference

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs g++ to run CUDA sources on the CPU")

SEED, MODEL_ID = 2**62 + 12345, 2**32 - 3


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Compiled kernels, shared by the tests of this module."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def ampere(directory):
    return EmulatedRuntime(directory, (8, 0), seed=random.randrange(2**31))


@pytest.fixture
def hopper(directory):
    return EmulatedRuntime(directory, (9, 0), seed=random.randrange(2**31))


@pytest.fixture(params=["ampere", "hopper"])
def tensor_cores(request):
    """`mma.sync` and `wgmma`."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def turing(directory):
    return EmulatedRuntime(directory, (7, 5), seed=random.randrange(2**31))


def integers(rows, columns, dtype, before=0, between=0, fractions=False):
    """A block `(rows, columns)` of integers up to 8 amid NaN; `before` elements shift its first byte."""
    memory = torch.full((before + rows * (columns + between) + 40,), float("nan"))
    block = memory.as_strided((rows, columns), (columns + between, 1), before)
    block.copy_(torch.randint(-8, 9, (rows, columns)))
    if fractions:  # more bits than one bfloat16 has, still exact in two
        block += torch.randint(-8, 9, (rows, columns)) / 1024
    return memory.to(dtype).as_strided((rows, columns), (columns + between, 1), before)


def framed(rows, columns):
    """Something to add to, and the larger tensor that it lies in."""
    frame = torch.full((rows + 2, columns + 5), 7.0)
    frame[1:-1, 2:-3] = torch.randint(-3, 4, (rows, columns)).float()
    return frame[1:-1, 2:-3], frame


def check_sjlt(runtime, dtype, rows, columns, outputs, start, nonzeros=1, before=0, between=0):
    block = integers(rows, columns, dtype, before, between)
    projector = SparseProjector(start + columns, outputs, SEED, nonzeros=nonzeros)
    out, frame = framed(rows, outputs)
    expected = frame.clone()
    projector.accumulate(expected[1:-1, 2:-3], block, start, MODEL_ID)
    accumulate_sjlt(runtime, out, block, start, SEED, MODEL_ID, projector.segments)
    assert torch.equal(frame, expected)


def check_rademacher(runtime, dtype, rows, columns, outputs, start, terms=2, before=0, between=0):
    block = integers(rows, columns, dtype, before, between, fractions=dtype == torch.float32 and terms == 2)
    out, frame = framed(rows, outputs)
    expected = frame.clone()
    RademacherProjector(start + columns, outputs, SEED).accumulate(expected[1:-1, 2:-3], block, start, MODEL_ID)
    accumulate_dense(runtime, "rademacher", out, block, start, SEED, MODEL_ID, terms)
    assert torch.equal(frame, expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("outputs", "nonzeros"),
    [
        *((outputs, 1) for outputs in (1, 2, 4, 7, 97, 511, 512, 1000, 4096, 5119, 6145, 8192, 10007, TILE, TILE + 1)),
        *((40_000, 1), (3, 2), (300, 3), (9, 9)),
    ],
)
def test_sjlt_for_any_number_of_outputs(ampere, dtype, outputs, nonzeros):
    """One tile or several, of groups or of outputs; folds by table, by generator, in slices."""
    check_sjlt(ampere, dtype, 2, 20_000, outputs, 2**33 - 8195, nonzeros)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("start", [0, 1, 8191, 2**32 - 3, 2**63 - 20_000])
@pytest.mark.parametrize("columns", [1, 2, 9, 8192, 12_001])
def test_sjlt_at_any_place_and_alignment(ampere, dtype, start, columns):
    check_sjlt(ampere, dtype, 3, columns, 130, start, before=random.randrange(9), between=random.randrange(9))


@pytest.mark.slow
def test_sjlt_in_several_splits(ampere):
    """Enough chunks for several splits: a workspace, and its reduction."""
    check_sjlt(ampere, torch.bfloat16, 2, 40 * 8192 + 17, 64, 100)
    assert [launch.kernel.file for launch in ampere.launches] == ["sjlt", "reduce"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "rows", "terms"), [(torch.bfloat16, 1, 1), (torch.bfloat16, 130, 1), (torch.float32, 5, 2)]
)
@pytest.mark.parametrize("outputs", [1, 130, 257])
@pytest.mark.parametrize("columns", [1, 67, 131])
def test_rademacher_on_tensor_cores(tensor_cores, dtype, rows, terms, outputs, columns):
    """The map from lanes and registers to positions and outputs, for any shape, place and alignment."""
    start = random.choice([0, 1, 63, 2**32 - 70, 2**40 + 5, 2**63 - 200])
    check_rademacher(
        tensor_cores, dtype, rows, columns, outputs, start, terms, random.randrange(9), random.randrange(9)
    )


@pytest.mark.few(1)
def test_rademacher_in_chains_and_splits(tensor_cores):
    """More positions than a chain and a split have."""
    check_rademacher(tensor_cores, torch.float32, 2, 9001, 3, 77, 2)
    assert [launch.kernel.file.partition("_")[0] for launch in tensor_cores.launches] == ["rademacher", "reduce"]


@pytest.mark.slow
def test_hopper_has_instructions_of_its_own(hopper):
    """Long chains of a single split, whose ends are added in shared memory, of 16-bit input too."""
    check_rademacher(hopper, torch.float32, 1, 4096, 2, 5, 2)
    block, out = integers(1, 8192 + 100, torch.bfloat16), torch.zeros(1, 3)
    plan = plan_dense("rademacher", "wgmma", 1, 0, 8292, 3, torch.bfloat16, 1)
    one_split = dataclasses.replace(plan, positions_per_split=8320, splits=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_trak.kernels.dense.plan_dense", lambda *_: one_split)
        accumulate_dense(hopper, "rademacher", out, block, 9, SEED, MODEL_ID, 1)
    expected = torch.zeros(1, 3)
    RademacherProjector(8301, 3, SEED).accumulate(expected, block, 9, MODEL_ID)
    assert torch.equal(out, expected)
    assert {launch.kernel.file for launch in hopper.launches} == {"rademacher_wgmma"}


@pytest.mark.slow
def test_float32_is_split_into_two_terms(tensor_cores):
    """Errors below 10⁻⁵ of the result's norm with two terms; those of bfloat16 with one.

    Two roundings to bfloat16, to 2⁻⁹ each, leave 2⁻¹⁸ = 3.8e-6 of an entry. The signs of a column keep norms.
    """
    block = torch.randn(5, 2000)
    exact = block.double() @ RademacherProjector(2000, 150, SEED).matrix(0, 2000, MODEL_ID).double()
    errors = []
    for terms in (2, 1):
        out = torch.zeros(5, 150)
        accumulate_dense(tensor_cores, "rademacher", out, block, 0, SEED, MODEL_ID, terms)
        errors.append(float((out - exact).norm() / exact.norm()))
    assert errors[0] < 1e-5
    assert 1e-4 < errors[1] < 4e-3


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "start"), [(1, 2**32 - 1), (70, 3), (45, 2**40 + 2)])
def test_normal(ampere, columns, start):
    block = integers(3, columns, torch.float32, 1, 2)
    projector = NormalProjector(start + columns, 131, SEED)
    expected, out = torch.zeros(3, 131), torch.zeros(3, 131)
    projector.accumulate(expected, block, start, MODEL_ID)
    accumulate_dense(ampere, "normal", out, block, start, SEED, MODEL_ID, 2)
    assert torch.allclose(out, expected, atol=8 * 4e-6 * columns**0.5 + 1e-6, rtol=0)


@pytest.mark.slow
def test_rademacher_without_tensor_cores(turing):
    check_rademacher(turing, torch.float32, 5, 70, 131, 2**32 - 9, before=1, between=3)
    assert turing.launches[0].kernel.file == "dense"


@pytest.mark.slow
@pytest.mark.parametrize("rows", [7, 40, 100])
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_instance_of_the_dense_kernels(tensor_cores, turing, dtype, rows, terms):
    for runtime in (tensor_cores, turing):
        check_rademacher(runtime, dtype, rows, 99, 150, 2**32 - 50, terms, before=1, between=1)
    block = integers(rows, 99, dtype)
    expected, out = torch.zeros(rows, 20), torch.zeros(rows, 20)
    NormalProjector(200, 20, SEED).accumulate(expected, block, 50, MODEL_ID)
    accumulate_dense(tensor_cores, "normal", out, block, 50, SEED, MODEL_ID, 2)
    assert torch.allclose(out, expected, atol=1e-3, rtol=0)


@pytest.mark.slow
def test_sjlt_of_float16(ampere):
    check_sjlt(ampere, torch.float16, 3, 20_001, 4096, 2**32 - 9000, before=1, between=2)


@pytest.mark.few(1)
def test_batch_size_does_not_change_a_bit(tensor_cores):
    """Samples alone and in batches that take other tiles, with values whose sums are not exact."""
    block = torch.randn(70, 300).to(torch.bfloat16)
    whole = torch.zeros(70, 20)
    accumulate_dense(tensor_cores, "rademacher", whole, block, 9, SEED, MODEL_ID, 1)
    alone = torch.zeros(1, 20)
    accumulate_dense(tensor_cores, "rademacher", alone, block[33:34], 9, SEED, MODEL_ID, 1)
    assert torch.equal(alone, whole[33:34])
    whole, alone = torch.zeros(70, 20), torch.zeros(1, 20)
    accumulate_sjlt(tensor_cores, whole, block, 9, SEED, MODEL_ID, [(0, 20)])
    accumulate_sjlt(tensor_cores, alone, block[33:34], 9, SEED, MODEL_ID, [(0, 20)])
    assert torch.equal(alone, whole[33:34])


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_order_of_threads_does_not_change_a_bit(directory, capability):
    """A missing barrier would: every round runs the threads in an order of its own."""
    # Several chunks, and more bits than a sum of a few bfloat16 takes: otherwise no order of additions matters.
    block = torch.randn(3, 40_000)
    results = []
    for seed in range(4):
        runtime = EmulatedRuntime(directory, capability, seed=seed)
        sparse, dense = torch.zeros(3, 300), torch.zeros(3, 300)
        accumulate_sjlt(runtime, sparse, block, 9, SEED, MODEL_ID, [(0, 300)])
        accumulate_dense(runtime, "rademacher", dense, block[:, :200].bfloat16(), 9, SEED, MODEL_ID, 1)
        results.append((sparse, dense))
    assert all(torch.equal(sparse, results[0][0]) and torch.equal(dense, results[0][1]) for sparse, dense in results)


def test_sums_of_ones_have_the_parity_of_their_number(tensor_cores):
    """No coordinate is dropped or doubled, in either map."""
    columns = 8192 + 77
    ones = torch.ones(1, columns, dtype=torch.bfloat16)
    sparse, dense = torch.zeros(1, 64), torch.zeros(1, 64)
    accumulate_sjlt(tensor_cores, sparse, ones, 5, SEED, MODEL_ID, [(0, 64)])
    assert int(sparse.sum()) % 2 == columns % 2
    accumulate_dense(tensor_cores, "rademacher", dense, ones[:, :301], 5, SEED, MODEL_ID, 1)
    assert ((dense.long() - 301) % 2 == 0).all()


def test_signs_of_the_kernel_equal_the_definition(tensor_cores):
    """Against `reference.py` itself, entry by entry, where 32-bit positions would wrap."""
    start = 2**32 - 6
    out = torch.zeros(12, 131)
    accumulate_dense(tensor_cores, "rademacher", out, torch.eye(12, dtype=torch.bfloat16), start, SEED, MODEL_ID, 1)
    assert (out.numpy() == reference.matrix("rademacher-1", start, 12, 131, SEED, MODEL_ID)).all()
    out = torch.zeros(12, 131)
    accumulate_sjlt(tensor_cores, out, torch.eye(12, dtype=torch.bfloat16), start, SEED, MODEL_ID, [(0, 131)])
    assert (out.numpy() == reference.matrix("sjlt-1", start, 12, 131, SEED, MODEL_ID)).all()


@pytest.mark.parametrize("outputs", [1, 6, 700, 4096, 6145, 8191, TILE, TILE + 1, 99_999, 2**24])
@pytest.mark.parametrize("columns", [1, 10**6, 10**9, 3 * 10**10])
def test_plans_cover_everything_once(outputs, columns):
    plan = plan_sjlt(8000, columns, outputs)
    tiling = plan.tiling
    accumulators = tiling.groups * outputs
    assert accumulators >= 10240 and tiling.groups == -(-10240 // outputs)
    assert tiling.tile <= TILE and (tiling.tiles - 1) * tiling.tile < accumulators <= tiling.tiles * tiling.tile
    chunks = (8000 + columns - 1) // 8192 + 1
    assert (plan.splits - 1) * plan.chunks_per_split < chunks <= plan.splits * plan.chunks_per_split
    assert plan.splits <= 65535 and tiling.tiles <= 65535
    assert tiling.tile % outputs == 0 or outputs > TILE
    assert plan.slots * 8 * outputs <= max(8 * outputs * tiling.tiles, 2 * columns)  # traffic of the workspace
    assert max(shared_bytes(2), shared_bytes(4)) <= 2**16


def test_wrong_kernels_are_refused(ampere, monkeypatch):
    """The first result on a device is compared with the reference; a wrong one is an error with the way out."""
    monkeypatch.setattr(self_check, "_done", set())
    cpu = torch.device("cpu")
    self_check.require_right_sjlt(ampere, torch.bfloat16, cpu)
    assert self_check.checked_instruction(ampere, "rademacher", torch.bfloat16, 3, cpu, 1) == "mma"
    launches = len(ampere.launches)
    self_check.require_right_sjlt(ampere, torch.bfloat16, cpu)
    assert len(ampere.launches) == launches, "checked once"

    class Wrong(EmulatedRuntime):
        def launch(self, launch, device):
            if launch.kernel.file != "reduce":
                launch.arguments.generator.seed += 1
            super().launch(launch, device)

    self_check._done.clear()
    with pytest.raises(KernelError, match="HF_TRAK_BACKEND=torch"):
        self_check.require_right_sjlt(Wrong(ampere.directory), torch.bfloat16, cpu)
    with pytest.raises(KernelError, match="wrong results"):
        self_check.checked_instruction(Wrong(ampere.directory), "rademacher", torch.bfloat16, 3, cpu, 1)


@pytest.mark.parametrize("failure", ["wrong", "refused"])
def test_hopper_goes_on_without_its_own_instructions(hopper, monkeypatch, caplog, failure):
    """If their kernel is wrong or cannot run, the kernel for all GPUs takes its place, with a warning."""
    monkeypatch.setattr(self_check, "_done", set())
    monkeypatch.setattr(self_check, "_without_wgmma", set())
    arguments = ("rademacher", torch.bfloat16, 3, torch.device("cpu"), 1)

    class Broken(EmulatedRuntime):
        def launch(self, launch, device):
            if launch.kernel.file == "rademacher_wgmma":
                if failure == "refused":
                    raise KernelError("no such instruction")
                launch.arguments.generator.seed += 1
            super().launch(launch, device)

    broken = Broken(hopper.directory, (9, 0))
    assert self_check.checked_instruction(broken, *arguments) == "mma"
    (record,) = caplog.records
    assert "HF_TRAK_WGMMA=0" in record.message
    assert ("wrong results" if failure == "wrong" else "no such instruction") in record.message
    assert self_check.checked_instruction(broken, *arguments) == "mma" and len(caplog.records) == 1, "said once"

    monkeypatch.setattr(self_check, "_without_wgmma", set())
    assert self_check.checked_instruction(hopper, *arguments) == "wgmma"
    monkeypatch.setenv("HF_TRAK_WGMMA", "0")
    assert self_check.checked_instruction(hopper, *arguments) == "mma" and len(caplog.records) == 1
    monkeypatch.setenv("HF_TRAK_WGMMA", "no")
    with pytest.raises(ValueError, match="HF_TRAK_WGMMA is 'no'"):
        self_check.checked_instruction(hopper, *arguments)
