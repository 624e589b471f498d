"""The two-sided map `factored`: its definition, every way of giving it a gradient, and its moments."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_trak.kernels.philox import Stream
from hf_trak.projectors import FactoredProjector, SparseProjector, make_projector
from hf_trak.projectors.factored import two_sided_matrices
from hf_trak.projectors.reference import factored_matrix, two_sided

SHAPES = [(5,), (13, 15), (3,), (2, 14, 14), (4, 4), (13, 3, 5), (2, 2, 2)]
"""A vector, a matrix, a vector, a stack of two matrices, one that is too small, a convolution, one too small."""

P = sum(math.prod(shape) for shape in SHAPES)
SIZE, K = 3, 17


def projector(k: int = K, seed: int = 5, nonzeros: int = 1, **options: int) -> FactoredProjector:
    return FactoredProjector(P, k, seed, nonzeros=nonzeros, shapes=SHAPES, **{"factored_dim": SIZE, **options})


def gradients(rows: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, P, generator=torch.Generator().manual_seed(0)).to(dtype)


def close(found: Tensor, expected: Tensor | np.ndarray, precision: float = 2**-24) -> None:
    """Entries are sums of about 200 signed products, each rounded a few times."""
    expected = torch.as_tensor(expected).double()
    assert float((found.double() - expected).norm()) <= 16 * precision * float(expected.norm())


# -- definition ------------------------------------------------------------------------------------------------------


def test_which_parts_are_matrices() -> None:
    found = two_sided_matrices(SHAPES, SIZE)
    assert [(one.start, one.height, one.width) for one in found] == [
        (5, 13, 15), (203, 14, 14), (399, 14, 14), (611, 13, 15),
    ]  # fmt: skip
    # in the reduced vector, 9 numbers stand for each
    assert [one.reduced_start for one in found] == [5, 17, 26, 51]
    assert projector().reduced_dim == 5 + 9 + 3 + 18 + 16 + 9 + 8


def test_the_rule_at_its_edge() -> None:
    # 2 · 64 · (320 + 256 + 64) = 81,920 = 320 · 256
    assert len(two_sided_matrices([(320, 256)], 64)) == 1
    assert not two_sided_matrices([(320, 255)], 64)
    assert not two_sided_matrices([(10, 100_000), (100_000,)], 64)


@pytest.mark.parametrize("nonzeros", [1, 3])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_projection_is_that_of_the_reference(nonzeros: int, size: int) -> None:
    expected = factored_matrix(SHAPES, size, K, 5, 7, nonzeros)
    one = projector(nonzeros=nonzeros, factored_dim=size)
    close(one.project(gradients(), 7), gradients().double().numpy() @ expected)
    assert one.scale == 1 / math.sqrt(nonzeros)


@pytest.mark.parametrize("size", [3, 32, 130])
def test_signs_are_those_of_the_reference_to_the_bit(size: int) -> None:
    """Also those of later rows alone, and of positions beyond 32 bits."""
    position, height, width = 2**33 - 3, 9, 6
    signs = FactoredProjector(10**6, 4, 2**40 + 1, shapes=[(1000, 1000)], factored_dim=size).two_sided
    left = signs.signs(Stream.FACTORED_1_LEFT, position, 2, 7, height, 3, torch.device("cpu")).clone()
    right = signs.signs(Stream.FACTORED_1_RIGHT, position, 0, width, width, 3, torch.device("cpu")).clone()
    expected = two_sided(position, height, width, size, 2**40 + 1, 3).reshape(height, width, size, size)
    found = torch.einsum("ic,jd->ijcd", left, right).numpy()
    assert np.array_equal(np.sign(expected[2:]), found)


def test_seeds_checkpoints_and_matrices_have_signs_of_their_own() -> None:
    one = projector()
    device = torch.device("cpu")
    drawn = [
        projector(seed=seed).two_sided.signs(stream, position, 0, 9, 9, model_id, device).clone()
        for seed in (0, 1)
        for model_id in (0, 1)
        for stream in (Stream.FACTORED_1_LEFT, Stream.FACTORED_1_RIGHT)
        for position in (one.matrices[0].start, one.matrices[1].start)
    ]
    assert len({tuple(signs.flatten().tolist()) for signs in drawn}) == 16


# -- ways of giving it a gradient ------------------------------------------------------------------------------------


def test_any_cut_gives_the_same_features() -> None:
    grads, one = gradients(), projector()
    whole = one.project(grads, 0)
    for cuts in ([0, 50, 51, 210, 500, P], [0, 7, 8, 9, 10, 11, 300, 630, P], list(range(P + 1))):
        blocks = list(pairwise(cuts))
        sink, sums = one.sink(4, 0, "cpu"), torch.zeros(4, K)
        for low, high in [*blocks[1::2], *blocks[::2]]:  # out of order
            sink(low, grads[:, low:high])
            one.accumulate(sums, grads[:, low:high], low, 0)
        close(sink.result(), whole)
        close(sums, whole)


@pytest.mark.parametrize("through", ["sink", "accumulate"])
@pytest.mark.parametrize(
    ("start", "height", "width"), [(5, 13, 15), (35, 4, 15), (611, 13, 15), (595, 4, 4), (6, 3, 5), (6, 3, 15)]
)
def test_factors_give_what_their_product_gives(through: str, start: int, height: int, width: int) -> None:
    """Of a whole matrix, of some rows of one, of one that is too small, and of what is no rows of a matrix."""
    one = projector()
    left, right = torch.randn(4, 6, height), torch.randn(4, 6, width)
    block = torch.einsum("bti,btj->bij", left, right).flatten(1)
    grads = torch.zeros(4, P)
    grads[:, start : start + height * width] = block
    expected = one.project(grads, 2)
    if through == "sink":
        sink = one.sink(4, 2, "cpu")
        sink.add_outer(start, left, right)
        close(sink.result(), expected)
    else:
        out = torch.zeros(4, K)
        one.accumulate_outer(out, left, right, start, 2)
        close(out, expected)


def test_factors_in_half_precision() -> None:
    """float16 would overflow in sums of inputs: 20,000 · 15 may be beyond 65,504."""
    one = projector()
    left, right = torch.randn(4, 6, 13).to(torch.float16), torch.full((4, 6, 15), 2e4, dtype=torch.float16)
    sink, wide = one.sink(4, 0, "cpu"), one.sink(4, 0, "cpu")
    sink.add_outer(5, left, right)
    wide.add_outer(5, left.float(), right.float())
    assert torch.equal(sink.result(), wide.result())


def test_nothing_of_the_size_of_a_matrix_is_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    one = FactoredProjector(1000 * 800, 64, shapes=[(1000, 800)], factored_dim=64)
    left, right = torch.randn(2, 8, 1000), torch.randn(2, 8, 800)
    assert one.takes_outer(left, right)
    monkeypatch.setattr(torch, "bmm", None)  # by which products of factors are formed
    monkeypatch.setattr(one.two_sided, "add_rows", None)
    sink = one.sink(2, 0, "cpu")
    sink.add_outer(0, left, right)
    assert sink.result().isfinite().all()


def test_which_factors_are_taken() -> None:
    one = FactoredProjector(
        1000 * 800 + 90 * 800 + 70**2, 64, shapes=[(1000, 800), (90, 800), (70, 70)], factored_dim=64
    )

    def taken(tokens: int, height: int, width: int) -> bool:
        return one.takes_outer(torch.empty(1, tokens, height), torch.empty(1, tokens, width))

    assert taken(1, 1000, 800) and taken(10**6, 1000, 800)
    assert taken(100, 200, 800)  # some of its rows
    assert not taken(10**6, 30, 800)  # too few of them for the product with M
    assert not taken(100, 1000, 799) and not taken(100, 70, 70) and not taken(100, 1001, 800)


def test_rows_of_zeros_are_left_out() -> None:
    """As in gradients of embeddings; a row that is not finite still reaches the features of its sample."""
    one = projector()
    grads = torch.zeros(4, P)
    grads[0, 5 + 15 : 5 + 30] = 1.0
    grads[2, 5 + 36] = torch.nan
    expected = torch.as_tensor(grads[:2].double().numpy() @ factored_matrix(SHAPES, SIZE, K, 5, 0))
    sink = one.sink(4, 0, "cpu")
    sink(0, grads)
    found = sink.result()
    close(found[:2], expected)
    assert not found[2].isfinite().all() and not found[3].any()


def test_a_subclass_that_overrides_accumulate_gets_every_block() -> None:
    seen: list[int] = []

    class Watching(FactoredProjector):
        def accumulate(self, out: Tensor, block: Tensor, start: int, model_id: int) -> None:
            seen.append(start)
            super().accumulate(out, block, start, model_id)

    one = Watching(P, K, 5, shapes=SHAPES, factored_dim=SIZE)
    assert not one.takes_outer(torch.ones(4, 2, 13), torch.ones(4, 2, 15))
    close(one.project(gradients(), 0), projector().project(gradients(), 0))
    sink = one.sink(4, 0, "cpu")
    sink.add_outer(5, torch.ones(4, 2, 13), torch.ones(4, 2, 15))
    sink.result()
    assert seen == [0, 5]


def test_checkpoints_one_after_the_other() -> None:
    """What is kept of one is not taken for another."""
    grads = gradients()[:, :195]
    one, *others = (FactoredProjector(195, K, shapes=[(13, 15)], factored_dim=SIZE) for _ in range(4))
    for model_id, other in zip((0, 1, 0), others, strict=True):
        assert torch.equal(one.project(grads, model_id), other.project(grads, model_id))


def test_memory_is_freed_and_made_again() -> None:
    one = projector()
    before = one.project(gradients(), 0)
    one.free_memory()
    assert not one.two_sided._cache
    assert torch.equal(one.project(gradients(), 0), before)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="`shapes` have 814 elements together and `grad_dim` is 815"):
        FactoredProjector(P + 1, K, shapes=SHAPES)
    with pytest.raises(ValueError, match="No parameter is large enough"):
        FactoredProjector(P, K, shapes=SHAPES)
    with pytest.raises(ValueError, match="`factored_dim` is 0"):
        projector(factored_dim=0)
    with pytest.raises(ValueError, match="`shapes` is missing"):
        make_projector("factored", P, K, 0, "cpu")
    with pytest.raises(ValueError, match=r"\(B, T, I\)"):
        projector().sink(2, 0, "cpu").add_outer(5, torch.ones(2, 9), torch.ones(2, 12))
    made = make_projector("factored", P, K, 0, "cpu", 2, SHAPES, SIZE)
    assert isinstance(made, FactoredProjector) and made.nonzeros == 2 and isinstance(made.sparse, SparseProjector)
