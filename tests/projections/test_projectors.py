"""Every map against its entry-by-entry definition, in any cut, dtype and position; and the errors."""

import json
import math
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from rounding import assert_within, product_bound, random_walk_bound, unit_roundoff

from hf_trak.errors import NonFiniteError
from hf_trak.projectors import (
    BasicProjector,
    BasicSingleBlockProjector,
    BlockProjector,
    NoOpProjector,
    NormalProjector,
    ProjectionType,
    RademacherProjector,
    SparseProjector,
    make_projector,
    reference,
)

MAPS = [("rademacher", 1), ("normal", 1), ("sjlt", 1), ("sjlt", 3)]


def entries(projector, start, n, model_id, form="accumulate"):
    """Rows of R as the fast path has them: what unit vectors are mapped to."""
    if form == "sink":
        sink = projector.sink(n, model_id, "cpu")
        sink(start, torch.eye(n))
        return sink.result().numpy()
    out = torch.zeros(n, projector.proj_dim)
    projector.accumulate(out, torch.eye(n), start, model_id)
    return out.numpy()


@pytest.mark.few(15)
@pytest.mark.parametrize("start", [0, 8190, 2**20 - 50, 2**32 - 77, 2**40 + 511, 2**63 - 101])
@pytest.mark.parametrize(
    ("name", "nonzeros", "k"), [(*entry, k) for entry in MAPS for k in (1, 3, 130) if entry[1] <= k]
)
@pytest.mark.parametrize("form", ["accumulate", "sink"])
def test_entries_equal_reference(name, nonzeros, k, start, form):
    projector = make_projector(name, start + 100, k, 2**40 + 3, "cpu", nonzeros=nonzeros)
    expected = reference.matrix(projector.algorithm, start, 100, k, 2**40 + 3, 9, nonzeros)
    # An entry is radius · cos(angle), with errors in units of 2⁻²⁴: 4 of the angle, as of every number from 4 to 8,
    # and 3 of its factor 2π. The cosine, a number below 1, is off by a unit in its last place. So is the logarithm,
    # which makes 1 of the root; root and product round by 1 each. The radius is at most 5.77.
    tolerance = 5.77 * (4 + 3 + 1 + 1 + 1 + 1) * unit_roundoff() if name == "normal" else 0
    assert np.abs(entries(projector, start, 100, 9, form) - expected).max() <= tolerance


@pytest.mark.parametrize(("name", "nonzeros"), MAPS)
def test_any_cut_gives_the_same_features(name, nonzeros):
    generator = torch.Generator().manual_seed(0)
    grads = torch.randn(3, 70_001, generator=generator)
    projector = make_projector(name, 70_001, 37, 11, "cpu", nonzeros=nonzeros)
    whole = projector.project(grads, 2)
    pieces = torch.zeros_like(whole)
    cuts = [0, 5, 517, 9000, 9001, 40_000, 70_001]
    for first, last in reversed(list(pairwise(cuts))):
        projector.accumulate(pieces, grads[:, first:last], first, 2)
    # Dense maps add 1024 products at a time, and then 69 sums; six pieces make six additions more. The sparse map adds
    # about 10 terms to an accumulator, and then 277 accumulators. The norm of n normal entries varies by 1 %.
    norms = 1.1 * math.sqrt(nonzeros) * grads.norm(dim=1, keepdim=True)
    assert_within(pieces, whole, random_walk_bound(1024 + 69 + 6, norms, sums=3 * 37, computations=2))


@pytest.mark.parametrize("name", ["rademacher", "normal"])
def test_long_sums_are_added_in_blocks(name):
    """A sum of 70,001 products is as exact as blocks of 1024 make it: added in turn, it would be 8 times less so."""
    grads = torch.randn(3, 70_001, generator=torch.Generator().manual_seed(0))
    projector = make_projector(name, 70_001, 37, 11, "cpu")
    matrix = projector.matrix(0, 70_001, 2).double()
    norms = (grads.double().square() @ matrix.square()).sqrt()
    assert_within(
        projector.project(grads, 2), grads.double() @ matrix, random_walk_bound(1024 + 69, norms, sums=3 * 37)
    )


def test_constructors_touch_no_device():
    for name in ("sjlt", "rademacher", "normal", "none"):
        projector = make_projector(name, 10, 4, 0, "cuda:7")
        assert projector.device == "cuda:7"
    BasicProjector(10, 4, 0, ProjectionType.rademacher, "cuda:7")
    BasicSingleBlockProjector(10, 4, 0, ProjectionType.normal, "cuda:7")


@pytest.mark.parametrize("proj_type", list(ProjectionType))
def test_basic_projectors_share_the_dense_map(proj_type):
    """Block size must not change R."""
    grads = torch.randn(4, 321, generator=torch.Generator().manual_seed(1))
    dense = {"rademacher": RademacherProjector, "normal": NormalProjector}[proj_type](321, 150, 3)
    expected = dense.project(grads, 5)
    for block_size in (1, 100, 1000):
        basic = BasicProjector(321, 150, 3, proj_type, "cpu", block_size=block_size, model_id=77)
        assert torch.equal(basic.project(grads, 5), expected)
    single = BasicSingleBlockProjector(321, 150, 3, proj_type, "cpu")
    found = single.project({"a": grads[:, :21], "b": grads[:, 21:].view(4, 3, 100)}, 5)
    assert_within(found, expected, 2 * product_bound(grads, dense.matrix(0, 321, 5)))  # sums of 321 products


def test_free_memory_at_any_time():
    """Before the first batch, twice in a row, and between batches that give the same features."""
    grads = torch.randn(2, 50, generator=torch.Generator().manual_seed(1))
    for projector in (
        BasicSingleBlockProjector(50, 7, 0, "normal", "cpu"),
        BasicProjector(50, 7, 0, "rademacher", "cpu"),
        SparseProjector(50, 7),
        RademacherProjector(50, 7),
        NoOpProjector(50, device="cpu"),
    ):
        projector.free_memory()
        before = projector.project(grads, 0)
        projector.free_memory()
        projector.free_memory()
        assert torch.equal(projector.project(grads, 0), before)


def test_noop_is_the_identity_in_both_forms():
    grads = torch.randn(2, 9)
    assert NoOpProjector().project(grads, 0) is grads
    projector = NoOpProjector(9, device="cpu")
    out = torch.zeros(2, 9)
    projector.accumulate(out, grads[:, 4:], 4, 0)
    projector.accumulate(out, grads[:, :4], 0, 0)
    assert torch.equal(out, grads)
    assert torch.equal(projector.project({"w": grads[:, :6].view(2, 2, 3), "b": grads[:, 6:]}, 0), grads)


@pytest.mark.parametrize("name", ["rademacher", "normal", "sjlt"])
def test_bad_numbers(name):
    for bad in (0, -1):
        with pytest.raises(ValueError, match=f"`proj_dim` is {bad}"):
            make_projector(name, 10, bad, 0, "cpu")
    for bad in (-1, 2**63):
        with pytest.raises(ValueError, match="`seed` is"):
            make_projector(name, 10, 4, bad, "cpu")
    for bad in (1.0, True, "3", None):
        with pytest.raises(TypeError, match="`seed` is"):
            make_projector(name, 10, 4, bad, "cpu")
    projector = make_projector(name, 10, 4, 0, "cpu")
    for bad, error in ((-1, ValueError), (2**32, ValueError), (1.5, TypeError), (False, TypeError)):
        with pytest.raises(error, match="`model_id` is"):
            projector.project(torch.zeros(1, 10), bad)


@pytest.mark.parametrize("name", ["rademacher", "normal", "sjlt", "none"])
def test_bad_blocks(name):
    projector = make_projector(name, 10, 10, 0, "cpu")
    out = torch.zeros(2, 10)
    for block, start, message in (
        (torch.zeros(2, 5), 6, "columns 6 to 11"),
        (torch.zeros(2, 5), -1, "`start` is -1"),
        (torch.zeros(3, 5), 0, r"\(3, 10\)"),
        (torch.zeros(5), 0, r"\(5,\)"),
        (torch.zeros(2, 5, dtype=torch.float64), 0, "float64"),
        (torch.zeros(2, 5, device="meta"), 0, "meta"),
    ):
        with pytest.raises(ValueError, match=message):
            projector.accumulate(out, block, start, 0)
    with pytest.raises(ValueError, match="float16"):
        projector.accumulate(out.half(), torch.zeros(2, 5), 0, 0)
    with pytest.raises(ValueError, match="9 columns"):
        projector.project(torch.zeros(2, 9), 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["rademacher", "normal", "sjlt"])
def test_non_finite_gradients_are_an_error_that_names_the_row(name, bad):
    projector = make_projector(name, 100_000, 64, 0, "cpu")
    grads = torch.zeros(4, 100_000)
    grads[2, 77_777] = bad
    with pytest.raises(NonFiniteError, match="row 2"):
        projector.project(grads, 0)


def test_any_linear_map_is_a_block_projector():
    """The map whose matrix is the targets' gradients scores without a random projection."""
    targets = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))

    class AgainstTargets(BlockProjector):
        scale = 1.0

        def accumulate(self, out, block, start, model_id):
            out += block @ targets[:, start : start + block.shape[1]].T

    grads = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    projector = AgainstTargets(50, 6, 0, "targets", "cpu")
    scores = projector.project({"w": grads[:, :20], "b": grads[:, 20:]}, 0)
    assert_within(scores, grads.double() @ targets.double().T, product_bound(grads, targets.T))  # 50 products


def test_sink_is_used_up_by_its_result():
    sink = SparseProjector(50, 6).sink(2, 0, "cpu")
    sink(0, torch.zeros(2, 50))
    sink.result()
    with pytest.raises(RuntimeError, match="taken already"):
        sink(0, torch.zeros(2, 50))
    with pytest.raises(RuntimeError, match="taken already"):
        sink.result()
    with pytest.raises(ValueError, match="columns 45 to 55"):
        SparseProjector(50, 6).sink(2, 0, "cpu")(45, torch.zeros(2, 10))


@pytest.mark.parametrize("where", ["class", "inner method", "object"])
@pytest.mark.parametrize("name", ["rademacher", "sjlt"])
def test_sinks_respect_an_overridden_accumulate(name, where):
    """A sink adds blocks as the projector does, not as its base class would."""
    base = {"rademacher": RademacherProjector, "sjlt": SparseProjector}[name]
    method = "_accumulate" if where == "inner method" else "accumulate"

    class Doubled(base):
        pass

    def doubled(self, out, block, start, model_id):
        getattr(base, method)(self, out, 2 * block, start, model_id)

    grads = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    expected = 2 * base(50, 6).project(grads, 3)
    projector = Doubled(50, 6)
    if where == "object":
        projector.accumulate = lambda *arguments: doubled(projector, *arguments)
    else:
        setattr(Doubled, method, doubled)
    assert torch.allclose(projector.project(grads, 3), expected, rtol=1e-6)
    sink = projector.sink(2, 3, "cpu")
    sink(20, grads[:, 20:])
    sink(0, grads[:, :20])
    assert torch.allclose(sink.result(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow  # a process of its own
def test_operators_need_no_projectors():
    """`_ops` stands below the projectors, and alone computes what they compute."""
    program = (
        "import sys, torch; import hf_trak.kernels.ops; out = torch.zeros(1, 4)\n"
        "torch.ops.hf_trak.rademacher_accumulate(out, torch.ones(1, 1), 3, 0, 0, 2)\n"
        "assert 'hf_trak.projectors' not in sys.modules\n"
        "print(out.flatten().tolist())"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == [reference.rademacher_entry(3, j, 0, 0) for j in range(4)]
