"""Shortlists: lists of rows merged by their ranks, and plain inner products of the features of an index."""

from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from torch import nn

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.scores.scored_dataset import TOP_K_COLUMNS
from hf_trak.scores.shortlist import RANK_OFFSET, fused_ranks, fused_shortlist, with_plain_targets


def test_ranks_are_fused_by_the_formula() -> None:
    rng = np.random.default_rng(0)
    lists = [np.stack([rng.permutation(30)[:length] for _ in range(4)]) for length in (12, 20, 7)]
    found = fused_ranks(lists, 10)
    for target in range(4):
        sums: dict[int, float] = {}
        for one in lists:
            for rank, row in enumerate(one[target].tolist(), 1):
                sums[row] = sums.get(row, 0) + 1 / (RANK_OFFSET + rank)
        expected = sorted(sums, key=lambda row: (-sums[row], row))[:10]
        assert found[target].tolist() == expected


def test_rows_of_both_lists_come_first_and_ties_by_number() -> None:
    assert fused_ranks([[[9, 4, 7]], [[2, 7, 5]]], 5).tolist() == [[7, 2, 9, 4, 5]]
    assert fused_ranks([[[3, 1, 2]]], 2).tolist() == [[3, 1]]


def test_a_shortlist_has_both_ends_of_all_targets() -> None:
    def listed(helpful: list[list[int]], harmful: list[list[int]]) -> Dataset:
        zeros = [[0.0] * len(one) for one in helpful]
        return Dataset.from_dict(dict(zip(TOP_K_COLUMNS, (helpful, zeros, harmful, zeros), strict=True)))

    one = listed([[1, 2], [3, 4]], [[10, 11], [12, 13]])
    other = listed([[2, 5], [4, 6]], [[14, 10], [13, 15]])
    # of (1, 2) and (2, 5), row 2 is in both, and 1 leads its list
    assert fused_shortlist([one, other], 2).tolist() == [1, 2, 3, 4, 10, 12, 13, 14]
    assert fused_shortlist([one], 1).tolist() == [1, 3, 10, 12]


def test_plain_targets_score_by_inner_products(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    rows = [(torch.randn(6), torch.tensor(row % 3)) for row in range(30)]
    args = TrakConfig(str(tmp_path), proj_dim=64, use_cpu=True, feature_dtype="float32")
    own = TrakAttributor(model, args, rows[:24], task="image_classification").featurize()
    targets = own.features.precondition(own.features.question(rows[24:]))
    scorer = own.features.scorer
    blocks = scorer.blocks([0], with_plain_targets(targets, scorer.device), everywhere=True)
    ridge, found = torch.cat([block for _, _, block in blocks]).split(6, dim=1)
    (train,) = own.features.store.train(0)
    features = torch.cat([shard.grads for shard in targets.features[0]])
    expected = train.out_to_loss[:, None] * (train.grads @ features.T)
    # sums of 64 products, each rounded to 2⁻²⁴
    assert torch.allclose(found, expected, rtol=0, atol=64 * 2.0**-24 * float(expected.abs().max()))
    alone = torch.cat([block for _, _, block in scorer.blocks([0], targets.rows, everywhere=True)])
    assert torch.allclose(ridge, alone, rtol=0, atol=64 * 2.0**-24 * float(alone.abs().max()))
    assert not torch.allclose(found / found.norm(), ridge / ridge.norm(), atol=1e-2)


def test_groups_of_targets_and_features_of_any_size(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 3))
    rows = [(1e18 * torch.randn(6), torch.tensor(row % 3)) for row in range(30)]
    args = TrakConfig(str(tmp_path), proj_dim=64, use_cpu=True, feature_dtype="float32")
    own = TrakAttributor(model, args, rows[:24], task="image_classification").featurize()
    question = own.features.question(rows[24:], group_by=[0, 0, 0, 1, 1, 1])
    targets = own.features.precondition(question)
    (found,) = with_plain_targets(targets, own.features.scorer.device, question.groups)
    features = torch.cat([shard.grads for shard in targets.features[0]]).double()
    plain = torch.ldexp(found.values.double(), found.exponents.unsqueeze(1))[2:]
    means = torch.stack([features[:3].mean(0), features[3:].mean(0)])
    assert torch.allclose(plain, means, rtol=1e-5, atol=1e-5 * float(means.abs().max()))
    preconditioned = targets.rows[0]
    assert torch.equal(found.values[:2], preconditioned.values)
    assert torch.equal(found.exponents[:2], preconditioned.exponents)
