"""The running top-k equals a full sort."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_trak.errors import NonFiniteError
from hf_trak.scores.topk import PADDING, TopK


def sorted_rows(scores: torch.Tensor, k: int, largest: bool) -> np.ndarray:
    """Sort the row indices of every column by score, ties by index, with a stable sort of NumPy."""
    values = scores.numpy().T
    return np.argsort(-values if largest else values, axis=1, kind="stable")[:, :k]


def run(scores: torch.Tensor, cuts: list[int], k: int, largest: bool, order: list[int] | None = None):
    top = TopK(k, largest=largest)
    edges = [0, *cuts, len(scores)]
    blocks = list(itertools.pairwise(edges))
    for index in order or range(len(blocks)):
        start, stop = blocks[index]
        top.update(start, scores[start:stop])
    return top.result()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), rows=st.integers(1, 30), columns=st.integers(1, 4), k=st.integers(1, 35), largest=st.booleans())
def test_equals_stable_sort_with_many_ties_for_any_cut_and_order(data, rows, columns, k, largest):
    levels = st.sampled_from([-2.0, -1.0, -0.0, 0.0, 1e-45, -1e-45, 3.0, 3.4e38, -3.4e38])
    values = data.draw(st.lists(levels, min_size=rows * columns, max_size=rows * columns))
    scores = torch.tensor(values, dtype=torch.float32).reshape(rows, columns)
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), max_size=4)))
    order = data.draw(st.permutations(range(len(cuts) + 1)))
    best, indices = run(scores, cuts, k, largest, order)
    expected = sorted_rows(scores, k, largest)
    assert indices.dtype == torch.int64 and best.dtype == torch.float32
    assert np.array_equal(indices.numpy(), expected)
    assert torch.equal(best, scores.T.gather(1, torch.from_numpy(expected)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_random_scores_with_an_offset(dtype):
    scores = torch.randn(500, 7).to(dtype)
    top = TopK(20)
    top.update(2**31, scores)
    best, indices = top.result()
    expected = sorted_rows(scores.float(), 20, True)
    assert np.array_equal(indices.numpy() - 2**31, expected)
    assert torch.equal(best, scores.float().T.gather(1, torch.from_numpy(expected)))


def test_memory_is_k_per_target_whatever_the_number_of_rows():
    top = TopK(3)
    for start in range(0, 1000, 100):
        top.update(start, torch.randn(100, 5))
        assert top._keys.shape == (5, 3)
        assert top._keys.untyped_storage().nbytes() == 5 * 3 * 8


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_scores_are_refused_and_named(value):
    scores = torch.zeros(4, 3)
    scores[2, 1] = value
    top = TopK(2)
    with pytest.raises(NonFiniteError, match="row 12 "):
        top.update(10, scores)
    with pytest.raises(ValueError, match="at least one block"):
        top.result()


def test_row_numbers_fit_into_32_bits():
    with pytest.raises(ValueError, match="outside"):
        TopK(2).update(2**32 - 1, torch.zeros(3, 4))


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("levels", [2, 40, 10**6])
def test_many_blocks_of_which_few_scores_matter(largest, levels):
    """Long streams with many ties, and blocks in any order, give the result of sorting all scores, lower row first."""
    scores = torch.randint(-levels, levels, (3000, 7)).float() / levels
    top = TopK(12, largest)
    starts = list(range(0, 3000, 100))
    for start in torch.tensor(starts)[torch.randperm(len(starts))].tolist():
        top.update(start, scores[start : start + 100])
    expected = (-scores if largest else scores).sort(dim=0, stable=True)
    found, indices = top.result()
    assert torch.equal(indices, expected.indices[:12].T)
    assert torch.equal(found, scores.gather(0, expected.indices[:12]).T)


def test_lists_of_several_accumulators_merge_with_padding():
    """Processes with fewer rows than k, or none, pad their lists to a common width."""
    scores = (torch.randn(25, 3) * 2).round()
    merged = TopK(6)
    for start, stop in ((20, 25), (0, 2), (2, 20)):
        part = TopK(6)
        part.update(start, scores[start:stop])
        kept = torch.full((3, 6), PADDING)
        kept[:, : part.keys().shape[1]] = part.keys()
        merged.merge(kept)
    merged.merge(torch.full((3, 6), PADDING))
    whole = TopK(6)
    whole.update(0, scores)
    assert all(map(torch.equal, merged.result(), whole.result()))
