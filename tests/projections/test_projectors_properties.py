"""Properties of the maps for every seed, cut and position, drawn at random: by the definition and among themselves."""

import math
import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import assert_within, random_walk_bound

from hf_trak.kernels import torch_sparse
from hf_trak.kernels.philox import Stream, philox_words
from hf_trak.projectors import RademacherProjector, SparseProjector, make_projector, reference

MAPS = [("rademacher", 1), ("normal", 1), ("sjlt", 1), ("sjlt", 3)]

seeds = st.integers(0, 2**63 - 1)
model_ids = st.integers(0, 2**32 - 1)
starts = st.one_of(
    st.integers(0, 2**63 - 200),
    st.integers(0, 20_000),
    # around chunk, region and word boundaries
    st.builds(
        lambda power, offset: max(0, 2**power + offset),
        st.sampled_from([9, 13, 18, 23, 32, 40, 62]),
        st.integers(-70, 70),
    ),
)
dims = st.one_of(st.integers(1, 300), st.sampled_from([512, 1000, 4096, 8191, 8192, 8193, 20_000]))


@settings(max_examples=60, deadline=None)
@given(start=starts, n=st.integers(1, 40), k=dims, seed=seeds, model_id=model_ids)
def test_rademacher_signs_equal_reference(start, n, k, seed, model_id):
    projector = RademacherProjector(start + n, k, seed)
    out = torch.zeros(n, k)
    projector.accumulate(out, torch.eye(n), start, model_id)
    draw = random.Random(seed)
    for _ in range(200):
        i, j = draw.randrange(n), draw.randrange(k)
        assert int(out[i, j]) == reference.rademacher_entry(start + i, j, seed, model_id)


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(
    start=starts,
    n=st.integers(1, 130),
    k=dims,
    seed=seeds,
    model_id=model_ids,
    nonzeros=st.integers(1, 4),
    whole_batch=st.booleans(),
)
def test_sjlt_signs_and_indices_equal_reference(start, n, k, seed, model_id, nonzeros, whole_batch):
    nonzeros = min(nonzeros, k)
    projector = SparseProjector(start + n, k, seed, nonzeros=nonzeros)
    if whole_batch:  # the form with accumulators; the other one takes short blocks straight to the outputs
        sink = projector.sink(n, model_id, "cpu")
        sink(start, torch.eye(n))
        out = sink.result()
    else:
        out = torch.zeros(n, k)
        projector.accumulate(out, torch.eye(n), start, model_id)
    for i in range(n):
        expected = sorted(reference.sjlt_row(start + i, k, seed, model_id, nonzeros))
        columns = out[i].nonzero().flatten().tolist()
        assert [(j, int(out[i, j])) for j in columns] == expected


@pytest.mark.few(2)
@settings(max_examples=20, deadline=None)
@given(data=st.data(), seed=seeds, k=st.sampled_from([1, 7, 64, 500, 1024]))
@pytest.mark.parametrize(("name", "nonzeros"), MAPS)
def test_any_cut_and_order_gives_the_same_features(name, nonzeros, data, seed, k):
    total, k = 9_001, min(k, 64) if name == "normal" else k  # normal entries cost the most
    grads = torch.randn(2, total, generator=torch.Generator().manual_seed(seed % 2**31))
    projector = make_projector(name, total, k, seed, "cpu", nonzeros=min(nonzeros, k))
    whole = projector.project(grads, 1)
    cuts = sorted({0, total, *data.draw(st.lists(st.integers(1, total - 1), max_size=6))})
    blocks = data.draw(st.permutations(list(pairwise(cuts))))
    accumulated = torch.zeros_like(whole)
    sink = projector.sink(2, 1, "cpu")
    for first, last in blocks:
        projector.accumulate(accumulated, grads[:, first:last], first, 1)
        sink(first, grads[:, first:last])
    # Sums of 9,001 terms of random sign in blocks of 1024 at most, and of 9 blocks and up to 7 pieces. The norm of so
    # many normal entries varies by 1 %.
    norms = 1.1 * math.sqrt(projector.nonzeros if name == "sjlt" else 1) * grads.norm(dim=1, keepdim=True)
    bound = random_walk_bound(1024 + 9 + 7, norms, sums=4 * k, computations=2)
    assert_within(accumulated, whole, bound)
    assert_within(sink.result(), whole, bound)


@pytest.mark.few(5)
@pytest.mark.parametrize(("name", "nonzeros"), MAPS)
@pytest.mark.parametrize("total", [300, 50_000])
def test_same_cut_gives_the_same_bits(name, nonzeros, total):
    """Also for another object, after `free_memory`, at another address, and whatever came before."""
    grads = torch.randn(3, total, generator=torch.Generator().manual_seed(0))

    def features(projector, block, model_id=1):
        out = torch.zeros(3, 100)
        projector.accumulate(out, block, 0, model_id)
        return out

    projector = make_projector(name, total, 100, 4, "cpu", nonzeros=nonzeros)
    first = features(projector, grads)
    features(projector, grads, model_id=2)
    assert torch.equal(features(projector, grads), first)
    projector.free_memory()
    assert torch.equal(features(projector, grads), first)
    shifted = torch.zeros(3 * total + 1)[1:].view(3, total).copy_(grads)
    padded = torch.zeros(3, total + 5)[:, 3:-2].copy_(grads)
    for other in (shifted, padded, grads.T.contiguous().T):
        fresh = make_projector(name, total, 100, 4, "cpu", nonzeros=nonzeros)
        assert torch.equal(features(fresh, other), first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "nonzeros"), MAPS)
@pytest.mark.parametrize("n", [40, 30_000])
def test_half_precision_blocks_are_summed_in_float32(name, nonzeros, dtype, n):
    """Half-precision values are exact in float32, and so the features must be those of the same values."""
    grads = torch.randn(2, n, generator=torch.Generator().manual_seed(0)).to(dtype)
    projector = make_projector(name, n, 10, 4, "cpu", nonzeros=nonzeros)
    expected = projector.project(grads.float(), 0)
    assert projector.project(grads, 0).dtype == torch.float32
    assert torch.equal(projector.project(grads, 0), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(projector.project(grads, 0), expected)


@pytest.mark.parametrize("total", [1, 69_999, 70_000, 2**20 + 1])
def test_ones_have_the_parity_of_their_number(total):
    """No coordinate is dropped or doubled, proven: a sum of P signs is odd exactly if P is."""
    ones = torch.ones(1, total)
    dense = RademacherProjector(total, 33).project(ones, 0)
    assert torch.equal(dense % 2, torch.full_like(dense, total % 2))
    for nonzeros in (1, 5):
        sparse = SparseProjector(total, 33, nonzeros=nonzeros).project(ones, 0)
        assert int(sparse.sum()) % 2 == total * nonzeros % 2


@pytest.mark.slow
def test_no_repeated_rows():
    """Neither equal nor opposite, over half a million parameters."""
    rows = []
    for start in range(0, 500_000, 100_000):
        signs = RademacherProjector(500_000, 128, 3).matrix(start, 100_000, 0).numpy() > 0
        signs ^= signs[:, :1]  # a row and its opposite look the same
        rows.append(np.packbits(signs, axis=1))
    assert len(np.unique(np.concatenate(rows), axis=0)) == 500_000


def unique_calls(calls):
    """Count the different 128-bit outputs, and all of them."""
    words = np.concatenate([torch.stack(words, -1).reshape(-1, 4).numpy() for words in calls])
    return len(np.unique(words, axis=0)), len(words)


@pytest.mark.slow
def test_no_two_of_seed_model_and_block_share_bits():
    """Seeding with `base + 1000 · block + 100,000 · model` collides. 200,000 combinations, some built to collide."""
    seed_values = [*range(24), *(1000 * i for i in range(1, 5)), *(2**32 * i for i in range(1, 5)), 2**63 - 1, 100_000]
    model_values = [*range(8), 100, 1000, 100_000, 2**31, 2**32 - 1]
    blocks = torch.tensor([*range(14), 100, 1000, 2**16, 2**24 - 1])
    calls = [
        philox_words(start, 8, seed, model_id, stream, blocks)
        for seed in seed_values
        for model_id in model_values
        for stream in (Stream.RADEMACHER_1, Stream.SJLT_1_SIGNS)
        for start in (0, 2**32 - 4)
    ]
    different, total = unique_calls(calls)
    assert total == len(seed_values) * len(model_values) * 2 * 2 * 8 * 18 > 200_000
    assert different == total


def test_streams_do_not_share_bits():
    different, total = unique_calls([philox_words(0, 1000, 1, 1, stream, torch.arange(8)) for stream in Stream])
    assert different == total == 8000 * len(Stream)


@pytest.mark.parametrize("name", ["rademacher", "sjlt", "normal"])
def test_matrices_of_other_seeds_models_and_positions_are_unrelated(name):
    """Correlations of the matrices of 20 (seed, model id) pairs and 2 positions stay within chance. Of every chunk of
    the sparse layout one coordinate is looked at: within a run of 512 all of them meet another map's, or none."""
    flat = []
    for seed in (0, 1, 2**32, 2**63 - 1):
        for model_id in (0, 1, 2, 100, 2**32 - 1):
            projector = make_projector(name, 2**32 + 2**20, 64, seed, "cpu")
            for start in (0, 2**32):
                out = torch.zeros(64, 64)
                if name == "sjlt":
                    for index in range(64):
                        projector.accumulate(out[index : index + 1], torch.ones(1, 1), start + 8192 * index, model_id)
                else:
                    projector.accumulate(out, torch.eye(64), start, model_id)
                flat.append(out.flatten() / out.norm())
    matrices = torch.stack(flat)
    correlations = matrices @ matrices.T - torch.eye(len(flat))
    # 780 pairs of unit vectors. Dense: 4096 entries each, standard deviation 1/64. Sparse: 64 nonzeros each;
    # one of them is expected to meet another, each meeting worth 1/64.
    assert float(correlations.abs().max()) < 6 / 64


def test_cache_of_the_sparse_map_is_bounded_and_harmless(monkeypatch):
    grads = torch.randn(1, 3 * 2**13, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(torch_sparse, "_SLICE", 2**13)
    monkeypatch.setattr(torch_sparse, "_REGION", 2**13)
    expected = SparseProjector(3 * 2**13, 50).project(grads, 0)
    monkeypatch.setattr(torch_sparse, "_CACHE_BYTES", 2**11)
    projector = SparseProjector(3 * 2**13, 50)
    for model_id in (0, 1, 0):
        features = projector.project(grads, model_id)
    assert torch.equal(features, expected)
    assert sum(region.nbytes for region in projector._map._regions.values()) <= 2**11


@pytest.mark.slow
def test_block_larger_than_32_bits_can_count():
    """B · n = 2.2 · 10⁹ elements (one row, repeated without memory) do not wrap around."""
    batch, n = 67_000, 33_000
    projector = SparseProjector(n, 64)
    row = torch.randn(1, n, generator=torch.Generator().manual_seed(0))
    block = row.expand(batch, n)
    assert block.numel() > 2**31
    out = torch.zeros(batch, 64)
    projector.accumulate(out, block, 0, 0)
    single = torch.zeros(1, 64)
    projector.accumulate(single, row, 0, 0)
    # 33,000 / 64 terms for each output, give or take a third
    bound = random_walk_bound(33_000 // 48, float(row.norm()) / math.sqrt(48), sums=64, computations=2)
    assert_within(out, single.expand(batch, 64), bound)


@pytest.mark.slow
def test_parameter_larger_than_32_bits_can_count():
    """One parameter of 2³² + 5 elements; the parity of the sums shows that none is dropped or doubled."""
    n = 2**32 + 5
    out = torch.zeros(1, 4096)
    SparseProjector(n, 4096).accumulate(out, torch.ones(1, 1).expand(1, n), 0, 0)
    assert float(out.abs().max()) < 2**24
    assert int(out.long().sum()) % 2 == 1
    assert float(out.square().mean()) / (n / 4096) == pytest.approx(1, abs=4 * (2 / 4096) ** 0.5)
