"""Rotation and codes: equal to their definition to the bit, unbiased, and as noisy as theory says."""

import math
from functools import cache

import numpy as np
import pytest
import torch
from rounding import gamma
from torch import Tensor

from hf_trak.kernels.torch_hadamard import HadamardTransform
from hf_trak.store import codes_reference as reference
from hf_trak.store.codes import (
    BITS,
    STEPS,
    CodedRows,
    CodeFormat,
    Rotation,
    pack,
    padding_is_zero,
    pair_sums,
    unpack,
)

WIDTHS = (1, 2, 3, 5, 8, 13, 64, 100, 129, 257)
SEED, MODEL_ID = 7 * 2**33 + 5, 3


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("k", WIDTHS)
def test_rotation_equals_its_definition(k):
    rows = drawn(3, k, seed=k) * 10.0 ** torch.tensor([[-8.0], [0.0], [8.0]])
    found = Rotation(k, SEED, MODEL_ID).apply(rows)
    for row, result in zip(rows, found, strict=True):
        np.testing.assert_array_equal(reference.rotated(row.numpy(), SEED, MODEL_ID), result.numpy())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("k", WIDTHS)
def test_codes_equal_their_definition(k, bits):
    rows = torch.cat([drawn(3, k, seed=k), torch.zeros(1, k), 1e-30 * drawn(1, k, seed=1)])
    found = CodedRows.encode(rows, CodeFormat(bits, k))
    packed = torch.cat(found.blocks, dim=1)
    for number, row in enumerate(rows):
        levels, scale = reference.levels(row.numpy(), bits)
        assert bytes(packed[number].tolist()) == reference.packed(levels, bits)
        assert found.scale[number].item() == scale
        top = (2**bits - 1) / 2
        expected = [float(np.float32(level - top) * scale) for level in levels]
        assert found.decode()[number].tolist() == expected


@pytest.mark.few(5)
@pytest.mark.parametrize("k", [1, 2, 4, 8, 512, 4096])
def test_the_transform_is_that_of_sylvester(k):
    indices = torch.arange(k)
    matrix = torch.tensor([[(-1.0) ** bin(int(i) & int(j)).count("1") for j in indices[:64]] for i in indices])
    rows = torch.zeros(1, k)
    rows[0, :64] = drawn(min(k, 64), seed=k)
    expected = matrix.double() @ rows[0, : matrix.shape[1]].double()
    bound = gamma(max(1, k.bit_length() - 1)) * rows.abs().sum().double()
    assert (HadamardTransform(1, k, rows.device)(rows.clone())[0].double() - expected).abs().max() <= bound


@pytest.mark.parametrize("k", [64, 100, 4096, 5000])
def test_rotation_keeps_inner_products_and_can_be_undone(k):
    rows, rotation = drawn(5, k, seed=k), Rotation(k, 0, 0)
    turned = rotation.apply(rows)
    scale = rows.double().norm(dim=1)
    # Up to six rounds of log₂ k additions and two products each; errors of a row are relative to its norm.
    bound = 2 * gamma(6 * (k.bit_length() + 2)) * math.sqrt(k)
    difference = (turned.double() @ turned.double().T - rows.double() @ rows.double().T).abs()
    assert (difference / scale / scale[:, None]).max() <= bound
    assert ((rotation.inverse(turned) - rows).double().norm(dim=1) / scale).max() <= bound


def test_rotations_differ_by_seed_and_checkpoint():
    rows = drawn(1, 64)
    found = [Rotation(64, seed, model_id).apply(rows) for seed, model_id in ((0, 0), (1, 0), (0, 1), (2**33, 0))]
    for first in range(4):
        for second in range(first):
            assert (found[first] - found[second]).norm() > 1


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("columns", [1, 7, 8, 9, 64])
def test_packed_levels_come_back(bits, columns):
    levels = torch.randint(0, 2**bits, (6, columns), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    packed = pack(levels, bits)
    assert packed.shape[1] == CodeFormat(bits, columns).row_bytes
    np.testing.assert_array_equal(unpack(packed, bits, columns), levels.float() - (2**bits - 1) / 2)
    assert padding_is_zero(packed, bits, columns)
    if columns * bits % 8:
        packed[2, -1] |= 128
        assert not padding_is_zero(packed, bits, columns)


def test_blocks_of_columns_double():
    form = CodeFormat(1, 65536)
    assert form.block_bytes == [512, 512, 1024, 2048, 4096]
    assert form.prefixes == [512, 1024, 2048, 4096, 8192]
    assert CodeFormat(8, 700).block_bytes == [512, 188]
    assert CodeFormat(4, 3).block_bytes == [2]
    codes = CodedRows.encode(drawn(4, 65536), form)
    for count in form.prefixes:
        part = codes.first(count)
        assert part.columns == 8 * count
        torch.testing.assert_close(part.decode(), codes.decode()[:, : 8 * count], rtol=0, atol=0)
    torch.testing.assert_close(codes[1:3].decode(), codes.decode()[1:3], rtol=0, atol=0)


def test_sums_of_pairs():
    values = drawn(3, 37).double()
    for row, found in zip(values, pair_sums(values.clone()), strict=True):
        assert reference.pair_sum(row.tolist()) == found.item()


SPECTRA = ("flat", "steep", "outliers")


def spectrum(name: str, k: int) -> Tensor:
    """Standard deviations of the entries of a row before the rotation."""
    index = torch.arange(1, k + 1, dtype=torch.float64)
    return {"flat": torch.ones(k), "steep": 1 / index, "outliers": torch.where(index <= 3, 1000.0, 1.0)}[name].double()


def normal_noise(bits: int) -> float:
    """Mean squared error of the levels for a standard normal number, relative to its variance, as decoded: with
    levels v(y), E[v²] / E[y·v]² − 1 by numerical integration."""
    y = torch.linspace(-10, 10, 2_000_001, dtype=torch.float64)
    density = torch.exp(-y.square() / 2)
    top = (2**bits - 1) / 2
    v = torch.clamp(torch.floor(y / STEPS[bits] + 2 ** (bits - 1)), 0, 2**bits - 1) - top
    return float((v.square() * density).sum() * density.sum() / (y * v * density).sum() ** 2 - 1)


@cache
def rotated(draws: int) -> Tensor:
    """Rows and targets of all spectra in a space of 512 numbers, under every rotation: `(draws, spectra, 2, 512)`."""
    pairs = torch.stack([row_and_target(name) for name in SPECTRA])
    return torch.stack([Rotation(512, seed, 0).apply(pairs.flatten(0, 1)).view_as(pairs) for seed in range(draws)])


def row_and_target(name: str, k: int = 512) -> Tensor:
    x = (drawn(1, k, seed=1).double() * spectrum(name, k)).float()
    return torch.cat([x, (drawn(1, k, seed=2).double() * spectrum(name, k)).float() + x])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bits", "draws"),
    [(1, 1500), *(pytest.param(bits, 8000, marks=pytest.mark.slow) for bits in (1, 2, 4))],
)
@pytest.mark.parametrize("name", SPECTRA)
def test_inner_products_are_unbiased_with_the_variance_of_theory(name, bits, draws):
    """Over rotations, the error of ⟨decoded row, target⟩ has mean zero and a variance that normal numbers explain.

    With ⟨decoded, x⟩ = ‖x‖², the error is ⟨decoded − x, t⟩ for the part of t that is orthogonal to x. The error vector
    has the squared norm c·‖x‖² and a direction that is uniform to good approximation: c·‖x‖²‖t⊥‖² / (k − 1).
    """
    k = 512
    rows, targets = rotated(draws)[:, SPECTRA.index(name)].unbind(1)
    decoded = CodedRows.encode(rows, CodeFormat(bits, k)).decode()
    found = ((decoded.double() - rows.double()) * targets.double()).sum(1)
    wide, target = row_and_target(name, k).double()
    orthogonal = target - wide * (wide @ target) / (wide @ wide)
    variance = normal_noise(bits) * float(wide @ wide * (orthogonal @ orthogonal)) / (k - 1)
    # The mean of the errors lies within 4.5 of its standard deviations. The relative standard deviation of their
    # variance is √(2 / draws), so that 3 of those are left to chance beside the 5 % that theory may be off.
    assert abs(found.mean()) <= 4.5 * math.sqrt(variance / draws)
    assert abs(float(found.var()) / variance - 1) <= 0.05 + 3 * math.sqrt(2 / draws)


def test_eight_bits_are_exact_to_a_percent_whatever_the_spectrum():
    for name in ("flat", "steep", "outliers"):
        rows = Rotation(4096, 0, 0).apply((drawn(8, 4096).double() * spectrum(name, 4096)).float())
        decoded = CodedRows.encode(rows, CodeFormat(8, 4096)).decode()
        # Steps of max|y| / 127.5 with an error of step / √12 each, and at most 6 standard deviations in 4096 numbers.
        assert ((decoded - rows).norm(dim=1) / rows.norm(dim=1)).max() <= 6 / 127.5 / math.sqrt(12)


def test_rows_of_extreme_sizes():
    for size in (1e-38, 1e30):
        rows = Rotation(1000, 0, 0).apply(size * drawn(2, 1000))
        for bits in BITS:
            decoded = CodedRows.encode(rows, CodeFormat(bits, 1000)).decode().double()
            products = (decoded * rows.double()).sum(1) / rows.double().square().sum(1)
            torch.testing.assert_close(products, torch.ones(2, dtype=torch.float64), rtol=1e-5, atol=0)


def test_codes_of_nothing_else_are_recognized():
    codes = CodedRows.encode(drawn(3, 13), CodeFormat(2, 13))
    assert codes.problem() is None
    for scale in (-1.0, math.nan, math.inf):
        spoiled = codes.scale.clone()
        spoiled[1] = scale
        assert "scale" in str(CodedRows(codes.form, spoiled, codes.blocks).problem())
    block = codes.blocks[0].clone()
    block[2, -1] |= 128
    assert "bits" in str(CodedRows(codes.form, codes.scale, (block,)).problem())
