"""The sparse map of sums of outer products: the kernel on a CPU, the operator, and factors on their way to it.

As in `test_cuda_emulated.py`, integers have exact sums, and memory that nobody wrote is NaN.
"""

import math
import random

import pytest
import torch
from cuda_on_cpu import EmulatedRuntime, compiler
from rounding import assert_within, random_walk_bound
from torch import nn
from torch.nn import functional as F  # noqa: N812

from hf_trak.errors import KernelError
from hf_trak.featurize.row_features import _SamplePerRow
from hf_trak.gradient_computers import HookedGradientComputer
from hf_trak.gradient_computers.hooked.workspace import OuterBlock, OuterSink
from hf_trak.gradient_computers.per_sample import function_task
from hf_trak.kernels import ops, self_check
from hf_trak.kernels.outer import STRIP, accumulate_outer, plan_outer, shared_bytes, worthwhile
from hf_trak.kernels.sources import TOKENS
from hf_trak.projectors import NoOpProjector, RademacherProjector, SparseProjector
from hf_trak.traker.plugins import GradientPipeline

SEED, MODEL_ID = 2**62 + 12345, 2**32 - 3
CPU = torch.device("cpu")

emulated = pytest.mark.skipif(compiler() is None, reason="needs g++ to run CUDA sources on the CPU")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Compiled kernels, shared by the tests of this module."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def runtime(directory):
    return EmulatedRuntime(directory, (7, 5), seed=random.randrange(2**31))


def factor(samples, tokens, features, dtype, layout):
    """Integers up to 3 amid NaN. `layout`: which dimension lies side by side in memory, 2, or 1 as in convolutions."""
    order = (samples, tokens, features) if layout == 2 else (samples, features, tokens)
    memory = torch.full((5 + samples * (order[1] * order[2] + 7) + 9,), float("nan"), dtype=dtype)
    view = memory.as_strided(order, (order[1] * order[2] + 7, order[2], 1), 5)
    view.copy_(torch.randint(-3, 4, order))
    return view if layout == 2 else view.transpose(1, 2)


def product(left, right):
    return torch.einsum("bti,btj->bij", left.float(), right.float()).flatten(1)


def check(runtime, left, right, outputs, start, nonzeros=1):
    """Against the torch implementation of the map on the product; sums go into the middle of a larger tensor."""
    samples = left.shape[0]
    block = product(left, right)
    projector = SparseProjector(start + block.shape[1], outputs, SEED, nonzeros=nonzeros)
    frame = torch.full((samples + 2, outputs + 5), 7.0)
    frame[1:-1, 2:-3] = torch.randint(-3, 4, (samples, outputs)).float()
    expected = frame.clone()
    projector.accumulate(expected[1:-1, 2:-3], block, start, MODEL_ID)
    accumulate_outer(runtime, frame[1:-1, 2:-3], left, right, start, SEED, MODEL_ID, projector.segments)
    assert torch.equal(frame, expected)


@pytest.mark.slow
@emulated
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "layouts"), [(1, (2, 2)), (3, (1, 2)), (7, (2, 1)), (8, (1, 1))])
@pytest.mark.parametrize(
    ("height", "width"),
    [(1, 1), (300, 1), (1, 1023), (130, 63), (37, 512), (20, 1025), (19, STRIP), (9, STRIP + 1), (5, 9001)],
)
def test_any_matrix(runtime, dtype, tokens, layouts, height, width):
    """Narrow and wide ones, several rows per step and several strips per row, of any layout, at any place."""
    left = factor(2, tokens, height, dtype, layouts[0])
    right = factor(2, tokens, width, dtype, layouts[1])
    start = random.choice([0, 1, 3, 8191, 8192, 2**32 - 3, 2**33 - 5000, 2**63 - 46_000])
    check(runtime, left, right, random.choice([1, 7, 131, 1009, 4096]), start)


@pytest.mark.few(2)
@emulated
@pytest.mark.parametrize(
    ("outputs", "nonzeros"), [(1, 1), (5, 1), (511, 1), (5119, 1), (8192, 1), (12_289, 1), (40_000, 1), (300, 3)]
)
def test_any_number_of_outputs(runtime, outputs, nonzeros):
    """One tile of accumulators or several, and several nonzeros per coordinate."""
    left, right = (factor(2, 2, size, torch.float32, 2) for size in (29, 800))
    check(runtime, left, right, outputs, 2**40 + 3, nonzeros)


@pytest.mark.slow
@emulated
def test_several_splits_and_more_tokens_than_an_instance_has(runtime):
    left, right = (factor(1, 18, size, torch.bfloat16, 2) for size in (2 * 2**17 // 64 + 100, 64))
    check(runtime, left, right, 64, 100)
    assert [launch.kernel.file for launch in runtime.launches] == ["outer", "reduce"] * 3
    assert runtime.launches[0].grid[1] == 3 and runtime.launches[0].arguments.tokens == 8


@emulated
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", range(1, 9))
def test_every_instance(runtime, dtype, tokens):
    for _ in range(3):
        left, right = (factor(3, tokens, random.randrange(1, 200), dtype, random.choice([1, 2])) for _ in range(2))
        check(runtime, left, right, random.randrange(1, 6000), random.randrange(2**62))


@emulated
def test_batch_size_order_of_threads_and_repetition_do_not_change_a_bit(directory):
    """Values whose sums are not exact."""
    left, right = torch.randn(5, 3, 40), torch.randn(5, 3, 700)
    results = []
    for seed in range(3):
        out, alone = torch.zeros(5, 300), torch.zeros(1, 300)
        runtime = EmulatedRuntime(directory, seed=seed)
        accumulate_outer(runtime, out, left, right, 9, SEED, MODEL_ID, [(0, 300)])
        accumulate_outer(runtime, alone, left[3:4], right[3:4], 9, SEED, MODEL_ID, [(0, 300)])
        assert torch.equal(alone, out[3:4])
        results.append(out)
    assert all(torch.equal(out, results[0]) for out in results)
    expected = torch.zeros(5, 300)
    SparseProjector(9 + 28_000, 300, SEED).accumulate(expected, product(left, right), 9, MODEL_ID)
    # 28,000 / 300 sums of three products for each output, give or take a half
    norms = product(left, right).norm(dim=1, keepdim=True) / math.sqrt(200)
    assert_within(results[0], expected, random_walk_bound(3 + 28_000 // 200, norms, sums=1500, computations=2))


@emulated
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_sample(runtime, bad):
    left, right = torch.randn(4, 2, 30), torch.randn(4, 2, 50)
    left[2, 1, 7] = bad
    out = torch.zeros(4, 64)
    accumulate_outer(runtime, out, left, right, 0, SEED, MODEL_ID, [(0, 64)])
    assert torch.isfinite(out).all(1).tolist() == [True, True, False, True]


@emulated
def test_wrong_kernels_are_refused(runtime, monkeypatch):
    monkeypatch.setattr(self_check, "_done", set())
    self_check.require_right_outer(runtime, torch.bfloat16, 3, CPU)
    launches = len(runtime.launches)
    self_check.require_right_outer(runtime, torch.bfloat16, 4, CPU)  # the same instance
    assert len(runtime.launches) == launches

    class Wrong(EmulatedRuntime):
        def launch(self, launch, device):
            if launch.kernel.file == "outer":
                launch.arguments.start += 1
            super().launch(launch, device)

    self_check._done.clear()
    with pytest.raises(KernelError, match="HF_TRAK_BACKEND=torch"):
        self_check.require_right_outer(Wrong(runtime.directory), torch.bfloat16, 3, CPU)


@pytest.mark.parametrize("height", [1, 50, 4096, 10**6])
@pytest.mark.parametrize("width", [1, 63, 768, 2049, 16_384, 10**6])
@pytest.mark.parametrize("outputs", [1, 4096, 9000, 2**20])
def test_plans_cover_everything_once(height, width, outputs):
    plan = plan_outer(height, width, outputs)
    assert (plan.strips - 1) * STRIP < width <= plan.strips * STRIP
    assert (plan.splits - 1) * plan.rows_per_split < height <= plan.splits * plan.rows_per_split
    assert plan.rows_per_split % (8 * plan.rows_per_step) == 0
    assert plan.rows_per_step * -(-min(width, STRIP) // 8) <= 256 and 1 <= plan.rows_per_step <= 16
    assert plan.rows_per_step == 1 or plan.strips == 1
    assert plan.splits * plan.strips <= max(64, plan.strips) <= 65535
    assert max(map(shared_bytes, TOKENS)) <= 2**16


def test_what_is_worthwhile():
    """Few tokens; one tile of accumulators; not the narrowest matrices; dtypes that kernels have."""

    def decision(tokens, dtype=torch.float32, outputs=4096, width=512):
        return worthwhile(
            torch.empty(2, tokens, 99, dtype=dtype), torch.empty(2, tokens, width, dtype=dtype), [(0, outputs)]
        )

    assert decision(1) and decision(8) and decision(8, torch.bfloat16) and decision(1, torch.float16)
    assert not decision(9) and not decision(9, torch.bfloat16) and not decision(1, torch.float64)
    assert not decision(1, outputs=8192) and decision(1, outputs=12_288)
    assert not decision(1, width=100) and not decision(0)


# ---- The operator and the projectors ----


def test_operator_is_registered_properly():
    tensors = (torch.randn(3, 40), torch.randn(3, 2, 5), torch.randn(3, 2, 9))
    torch.library.opcheck(torch.ops.hf_trak.sjlt_accumulate_outer.default, (*tensors, 5, 1, 2, 1))


@pytest.mark.parametrize(
    "projector", [SparseProjector(500, 17, 3), RademacherProjector(500, 17, 3), NoOpProjector(500, 500, 3)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_projector_takes_factors(projector, dtype, monkeypatch):
    monkeypatch.setattr("hf_trak.projectors.base._PRODUCT_BYTES", 4 * 9 * 2 * dtype.itemsize)  # two rows at a time
    left, right = torch.randint(-3, 4, (4, 3, 7)).to(dtype), torch.randint(-3, 4, (4, 3, 9)).to(dtype)
    expected, out = (torch.zeros(4, projector.proj_dim) for _ in range(2))
    projector.accumulate(expected, product(left, right), 437, MODEL_ID)
    projector.accumulate_outer(out, left, right, 437, MODEL_ID)
    assert torch.equal(out, expected)
    sink = projector.sink(4, MODEL_ID, "cpu")
    assert isinstance(sink, OuterSink) and not sink.takes_outer(left, right), "nothing is gained on a CPU"
    if not isinstance(projector, SparseProjector):  # whose sink on a CPU keeps sums of its own
        sink.add_outer(437, left, right)
        assert torch.equal(sink.result(), expected)


def test_factors_that_do_not_fit():
    projector, out = SparseProjector(50, 8), torch.zeros(2, 8)
    good = torch.zeros(2, 3, 5)
    for left, right, start, message in [
        (good, torch.zeros(2, 4, 5), 0, r"\(2, 3, 5\) and `right` \(2, 4, 5\)"),
        (good, good.double(), 0, "one dtype"),
        (good.double(), good.double(), 0, "Expected one of torch.float32"),
        (good, good, 26, "26 to 51"),
        (torch.zeros(3, 3, 5), torch.zeros(3, 3, 5), 0, r"\(2, 8\). Expected \(3, 8\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            projector.accumulate_outer(out, left, right, start, 0)
    projector.accumulate_outer(out, torch.zeros(2, 0, 5), torch.zeros(2, 0, 5), 0, 0)


# ---- Factors on their way ----


class Everything:
    """A sink that takes all factors, or none, and adds up what they are the factors of."""

    def __init__(self, size, total, takes):
        self.grads = torch.zeros(size, total)
        self.takes = takes
        self.factored = 0

    def takes_outer(self, left, right):
        assert left.shape[:2] == right.shape[:2]
        return self.takes

    def __call__(self, start, block):
        self.grads[:, start : start + block.shape[1]] += block

    def add_outer(self, start, left, right):
        self.factored += 1
        self(start, OuterBlock(left, right).dense())


class Folded(nn.Module):
    """Windows that are folded into the batch, a shared weight, and a weight that is computed."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 5, 3)
        self.shared = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.randn(5, 1))
        self.matrix = nn.Parameter(torch.randn(5, 5))

    def forward(self, x):
        hidden = self.conv(x.reshape(-1, 2, 6)).transpose(1, 2)
        hidden = self.shared(torch.tanh(self.shared(hidden)))
        hidden = F.linear(torch.tanh(hidden), self.scale * self.matrix)
        return hidden.reshape(x.shape[0], -1).square().sum(1)


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 1)), (12,)),
    "tokens": (lambda: nn.Sequential(nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 1)), (4, 12)),
    "patches": (lambda: nn.Sequential(nn.Conv2d(3, 4, 2, stride=2), nn.Tanh(), nn.Conv2d(4, 1, 3)), (3, 6, 6)),
    "folded": (Folded, (4, 12)),
}


@pytest.mark.parametrize("name", MODELS)
def test_factors_stand_for_the_same_gradients(name):
    """Linear maps of vectors and of tokens, patches, folded windows, shared and computed weights."""
    make, shape = MODELS[name]
    model, batch = make(), (torch.randn(5, *shape),)
    computer = computer_of(model)
    sinks = [Everything(5, computer.grad_dim, takes) for takes in (False, True)]
    for sink in sinks:
        computer.stream(batch, sink)
    assert sinks[0].factored == 0 and sinks[1].factored > 0
    torch.testing.assert_close(sinks[1].grads, sinks[0].grads)
    plain = torch.zeros_like(sinks[0].grads)

    def add(start, block):
        plain[:, start : start + block.shape[1]] += block

    computer.stream(batch, add)  # and after it no workspace remembers the sink before
    assert torch.equal(plain, sinks[0].grads)


def computer_of(model):
    task = function_task(lambda output, batch: output.flatten(1).sum(1) if output.ndim > 1 else output, model)
    return HookedGradientComputer(model, task, None, torch.float32, "cpu")


@pytest.fixture
def factors_taken(monkeypatch):
    """Lets the sparse map take factors on a CPU; gives their tokens."""
    taken = []
    monkeypatch.setattr(SparseProjector, "takes_outer", lambda self, left, right: True)
    original = SparseProjector._accumulate_outer

    def record(self, out, left, right, start, model_id):
        taken.append(left.shape[1])
        original(self, out, left, right, start, model_id)

    monkeypatch.setattr(SparseProjector, "_accumulate_outer", record)
    monkeypatch.setattr(SparseProjector, "sink", RademacherProjector.sink)  # the one of the kernels
    monkeypatch.setattr(ops, "launch_sjlt_outer", ops.sjlt_accumulate_outer)  # which has an implementation for CPUs
    return taken


@pytest.mark.parametrize("name", MODELS)
def test_pipelines_give_the_same_features(name, factors_taken):
    """The two callers of gradient computers: [`GradientPipeline`] and the featurizer's sink."""
    make, shape = MODELS[name]
    model, batch = make(), (torch.randn(5, *shape),)
    computer = computer_of(model)
    projector = SparseProjector(computer.grad_dim, 33, SEED)
    features, _ = GradientPipeline(computer, projector, computer.grad_dim, 33, "cpu")(batch, 5, MODEL_ID, "train")
    assert factors_taken
    sink = _SamplePerRow(lambda: projector.sink(5, MODEL_ID, "cpu"), 5)
    computer.stream(batch, sink)
    assert torch.equal(sink.sink.result(), features)
    expected = projector.project(computer.compute_per_sample_grad(batch), MODEL_ID)
    torch.testing.assert_close(features, expected)
    with pytest.raises(ValueError, match="5 samples from 4 rows"):
        computer.stream(batch, _SamplePerRow(lambda: projector.sink(5, MODEL_ID, "cpu"), 4))


def test_a_projector_that_overrides_accumulate_is_not_bypassed(monkeypatch):
    class Own(SparseProjector):
        def accumulate(self, out, block, start, model_id):
            super().accumulate(out, 2 * block, start, model_id)

    monkeypatch.setattr("hf_trak.projectors.dense.kernels_wanted", lambda device: True)
    factors = torch.ones(2, 1, 10), torch.ones(2, 1, 200)
    assert SparseProjector(2000, 8).takes_outer(*factors)
    assert not Own(2000, 8).takes_outer(*factors)
