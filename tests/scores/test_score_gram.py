"""The Gram matrix has the same bits for every order and division of shards, and is as exact as float64 sums."""

import numpy as np
import pytest
import torch

from hf_trak.errors import NonFiniteError
from hf_trak.scores.gram import GramSum, column_squares


def pieces(rows: int, k: int, size: int, scales: torch.Tensor | None = None) -> list[torch.Tensor]:
    features = torch.randn(rows, k) * (torch.ones(k) if scales is None else scales)
    return list(features.split(size))


def total(shards: list[torch.Tensor], processes: list[list[int]]) -> torch.Tensor:
    """Compute XᵀX with one process for each list of shards, in the given order."""
    largest = torch.stack([column_squares(shard) for shard in shards]).amax(dim=0)
    sums = []
    for mine in processes:
        part = GramSum(largest, len(shards))
        for index in mine:
            part.add(shards[index])
        sums.append(part)
    for part in sums[1:]:
        sums[0].integers += part.integers
    return sums[0].result()


def exact(shards: list[torch.Tensor]) -> torch.Tensor:
    """Compute XᵀX in float64, in which products of float32 numbers are exact."""
    x = torch.cat(shards).double().numpy().astype(np.longdouble)
    return torch.from_numpy((x.T @ x).astype(np.float64))


@pytest.mark.parametrize("rows, k, size", [(1, 1, 1), (5, 3, 2), (64, 7, 9), (301, 20, 10)])
def test_the_same_bits_for_any_division_of_shards(rows, k, size):
    shards = pieces(rows, k, size, torch.logspace(-4, 4, k))
    order = list(range(len(shards)))
    expected = total(shards, [order])
    assert torch.equal(total(shards, [order[::-1]]), expected)
    for world in (2, 3, 7, 50):
        assert torch.equal(total(shards, [order[rank::world] for rank in range(world)]), expected)
        mixed = torch.randperm(len(shards)).tolist()
        assert torch.equal(total(shards, [mixed[rank::world] for rank in range(world)]), expected)


def test_plain_float64_sums_do_depend_on_the_order():
    """On the same data, plain float64 sums do depend on the order, so that the test above can fail."""
    shards = pieces(301, 20, 10, torch.logspace(-4, 4, 20))
    partial = [shard.double().T @ shard.double() for shard in shards]
    assert not torch.equal(sum(partial[1:], partial[0]), sum(partial[-2::-1], partial[-1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_as_exact_as_float64(dtype):
    """Errors are small relative to √(G_ii G_jj), which bounds |G_ij|, so small columns are as exact as large ones."""
    scales = torch.tensor([1e-30, 1e-4, 1.0, 300.0, 1e-2]) if dtype == torch.float32 else torch.logspace(-2, 2, 5)
    shards = [shard.to(dtype) for shard in pieces(1000, 5, 16, scales)]
    expected = exact(shards)
    norms = expected.diagonal().sqrt()
    error = (total(shards, [list(range(len(shards)))]) - expected).abs() / torch.outer(norms, norms)
    assert error.max() < 1e-13


def test_columns_of_zeros_and_one_shard_that_outweighs_all_others():
    shards = pieces(400, 4, 4)
    for shard in shards:
        shard[:, 2] = 0
    shards[37] *= 1e6
    result, expected = total(shards, [list(range(100))]), exact(shards)
    assert (result[2] == 0).all() and (result[:, 2] == 0).all()
    assert (result - expected).abs().max() < 1e-11 * expected.max()


def test_half_precision_does_not_overflow():
    """60,000 float16 rows of 4.0 have the exact sum 960,000, far above 65,504, the largest float16 number."""
    shards = list(torch.full((60_000, 2), 4.0, dtype=torch.float16).split(8192))
    assert torch.equal(total(shards, [list(range(len(shards)))]), torch.full((2, 2), 960_000.0, dtype=torch.float64))


def test_bad_rows_are_named():
    features = torch.ones(4, 3)
    features[2, 1] = float("inf")
    with pytest.raises(NonFiniteError, match="row 102 "):
        column_squares(features, start=100)
