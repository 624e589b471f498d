"""Products with an inverse curvature, in whichever forms gradients come: those with whole gradients, in full."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hf_trak.curvature.blocks import CurvatureBlocks, DiagonalBlock, KroneckerBlock
from hf_trak.curvature.curvature import Curvature, KroneckerValues
from hf_trak.curvature.maps import GradientMap, InverseSink, Preconditioning, SelfInfluence, WhitenedProjection
from hf_trak.curvature.owner_maps import OwnSelfInfluence
from hf_trak.curvature.target_forms import LowRankForm, TargetForm, truncated

B, DAMPING = 3, 0.1
BIAS, LEFT_BIAS, NORM = 8 * 6, 8 * 6 + 8 + 5 * 4, 8 * 6 + 8 + 5 * 4 + 4
"""Layout: weight 8 × 6, bias 8, weight 5 × 4 (inputs first), bias 4, norm 7."""
P = NORM + 7


def kronecker() -> tuple[KroneckerBlock, ...]:
    """A linear layer that is cut in four, whose bias belongs to two of the parts, and one with inputs first."""
    cut = [
        KroneckerBlock("w", 6 * low + first, 4, 3, 6, BIAS + low if first == 0 else None, "right", 0, low, first)
        for low in (0, 4)
        for first in (0, 3)
    ]
    return *cut, KroneckerBlock("conv1d", BIAS + 8, 5, 4, 4, LEFT_BIAS, "left", BIAS + 8)


@pytest.fixture(scope="module")
def curvature() -> Curvature:
    blocks, values = kronecker(), []
    for index, one in enumerate(blocks):
        generator = torch.Generator().manual_seed(index)
        bases = [torch.linalg.qr(torch.randn(side, side, generator=generator)).Q for side in one.shape]
        spectrum = torch.exp(4 * torch.rand(one.shape, generator=generator))
        values.append(KroneckerValues((bases[0], bases[1]), spectrum, 100))
    division = CurvatureBlocks(blocks, (DiagonalBlock("norm", NORM, 7),))
    return Curvature("ekfac", division, tuple(values), (torch.arange(1.0, 8.0),), 100, "digest")


class Gradients:
    """Gradients of three rows, as factors of both layers over `positions` positions."""

    def __init__(self, positions: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.outputs, self.inputs, self.first, self.second, self.norm = (
            torch.randn(B, *shape, generator=generator)
            for shape in ((positions, 8), (positions, 6), (positions, 5), (positions, 4), (7,))
        )

    def whole(self) -> Tensor:
        """All in one, `(B, P)`."""
        weight = torch.einsum("bto,bti->boi", self.outputs, self.inputs).flatten(1)
        other = torch.einsum("bti,bto->bio", self.first, self.second).flatten(1)
        return torch.cat([weight, self.outputs.sum(1), other, self.second.sum(1), self.norm], 1)

    def factors(self, sink: InverseSink) -> None:
        """Weights as factors, and biases alone, too, as engines give them."""
        sink.add_outer(0, self.outputs, self.inputs)
        sink(BIAS, self.outputs.sum(1))
        sink(LEFT_BIAS, self.second.sum(1))
        sink.add_outer(BIAS + 8, self.first, self.second)
        sink(NORM, self.norm)

    def dense(self, sink: InverseSink) -> None:
        """In pieces that end anywhere."""
        whole = self.whole()
        for low in range(0, P, 11):
            sink(low, whole[:, low : low + 11])

    def calls(self, sink: InverseSink) -> None:
        """A layer that is used twice, once of these in slices, and biases in two parts."""
        sink(BIAS, self.outputs[:, 1:].sum(1))
        sink.add_outer(0, self.outputs[:, :1], self.inputs[:, :1])
        sink(0, torch.einsum("bto,bti->boi", self.outputs[:, 1:], self.inputs[:, 1:]).flatten(1))
        sink(BIAS, self.outputs[:, :1].sum(1))
        sink.add_outer(BIAS + 8, self.first[:, 1:], self.second[:, 1:])
        sink.add_outer(BIAS + 8, self.first[:, :1], self.second[:, :1])
        sink(LEFT_BIAS, self.second.sum(1))
        sink(NORM, self.norm[:, :3])
        sink(NORM + 3, self.norm[:, 3:])


FORMS: dict[str, Callable[[Gradients, InverseSink], None]] = {
    "factors": Gradients.factors,
    "dense": Gradients.dense,
    "several calls": Gradients.calls,
}


class Kept:
    """A projector that projects nothing."""

    proj_dim, scale = P, 1.0

    def sink(self, batch_size: int, model_id: int, device: str) -> "Kept":
        self.rows = torch.zeros(batch_size, P)
        return self

    def __call__(self, start: int, block: Tensor) -> None:
        self.rows[:, start : start + block.shape[1]] += block

    def result(self) -> Tensor:
        return self.rows


@pytest.fixture(params=[2, 40], ids=["few positions", "many positions"])
def gradients(request: pytest.FixtureRequest) -> Gradients:
    """Few positions are rotated before they are multiplied, many are multiplied first."""
    return Gradients(request.param)


def close(found: Tensor, expected: Tensor) -> None:
    """To float32 products of matrices with at most 8 rows, and eigenvalues that differ by a factor of 50."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("form", FORMS)
def test_products(curvature: Curvature, gradients: Gradients, form: str) -> None:
    expected = curvature.precondition(gradients.whole(), DAMPING)
    maps = (
        Preconditioning(curvature, DAMPING),
        SelfInfluence(curvature, DAMPING),
        WhitenedProjection(curvature, DAMPING, Kept()),  # type: ignore[arg-type]
    )
    found = []
    for one in maps:
        sink = one.sink(B, 0, "cpu")
        FORMS[form](gradients, sink)  # type: ignore[arg-type]
        found.append(sink.result())
    preconditioned, own, whitened = found
    gram = gradients.whole() @ expected.T
    close(preconditioned, expected)
    close(own[:, 0], gram.diagonal())
    close(whitened @ whitened.T, gram)


def test_a_bias_that_is_used_elsewhere_too(curvature: Curvature, gradients: Gradients) -> None:
    """What the factors do not have of its gradient is not lost."""
    whole = gradients.whole()
    whole[:, BIAS : BIAS + 8] += 0.5
    sink = Preconditioning(curvature, DAMPING).sink(B, 0, "cpu")
    gradients.factors(sink)  # type: ignore[arg-type]
    sink(BIAS, torch.full((B, 8), 0.5))
    close(sink.result(), curvature.precondition(whole, DAMPING))


def test_a_curvature_without_bases(curvature: Curvature, gradients: Gradients) -> None:
    values = tuple(KroneckerValues(None, one.eigenvalues, 0) for one in curvature.kronecker)
    diagonal = Curvature("diagonal", curvature.blocks, values, curvature.diagonal, 100, "digest")
    sink = Preconditioning(diagonal, DAMPING).sink(B, 0, "cpu")
    gradients.factors(sink)  # type: ignore[arg-type]
    close(sink.result(), diagonal.precondition(gradients.whole(), DAMPING))


# -- forms of targets ------------------------------------------------------------------------------------------------


def kept(form: TargetForm, gradients: Gradients, dtype: torch.dtype = torch.float32) -> Tensor:
    """Preconditioned gradients in a form."""
    sink = form.preconditioning().sink(B, 0, "cpu")
    gradients.factors(sink)  # type: ignore[arg-type]
    return sink.result().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [None, 1, 2])
def test_scores_are_products_with_what_is_kept(
    curvature: Curvature, gradients: Gradients, rank: int | None, dtype: torch.dtype
) -> None:
    """In rank 2 the layer with inputs first, 6 × 4 with its bias, has fewer numbers alone: others are kept whole."""
    form = TargetForm(curvature, DAMPING) if rank is None else LowRankForm(curvature, DAMPING, rank)
    rows = kept(form, gradients, dtype)
    exact, whole = curvature.precondition(gradients.whole(), DAMPING), form.whole(rows)
    assert rows.shape == (B, form.width)
    for cut in (11, 1000):
        sink = form.products(rows).sink(B, 0, "cpu")
        for low in range(0, P, cut):
            sink(low, gradients.whole()[:, low : low + cut])
        close(sink.result(), gradients.whole() @ whole.T)
    lost = (exact - whole).norm(dim=1) / exact.norm(dim=1)
    if isinstance(form, LowRankForm):
        assert form.width < P + 1
        torch.testing.assert_close(form.errors(rows), lost, rtol=0.02, atol=1e-6 if dtype == torch.float32 else 4e-3)
        assert rank == 2 or float(lost.max()) > 0.1
    else:
        assert float(lost.max()) < (1e-5 if dtype == torch.float32 else 2**-8)


def test_matrices_are_cut_as_a_singular_value_decomposition_cuts_them() -> None:
    generator = torch.Generator().manual_seed(3)
    outer = [torch.linalg.qr(torch.randn(5, side, 30, generator=generator)).Q for side in (50, 40)]
    spectrum = torch.logspace(0, -3, 30)
    matrices = outer[0] * spectrum @ outer[1].mT
    for rank in (1, 4, 20):
        left, right, rest = truncated(matrices, rank)
        assert left.shape == (5, 50, rank) and right.shape == (5, rank, 40)
        least = spectrum[rank:].double().square().sum()
        assert float((matrices - left @ right).double().square().sum((1, 2)).max()) < 1.01 * float(least)
        torch.testing.assert_close(rest, least.expand(5), rtol=0.01, atol=1e-6)


@pytest.mark.parametrize("rank", [None, 1])
def test_zero_targets_are_found(curvature: Curvature, gradients: Gradients, rank: int | None) -> None:
    form = TargetForm(curvature, DAMPING) if rank is None else LowRankForm(curvature, DAMPING, rank)
    rows = kept(form, gradients)
    rows[1] = 0
    assert form.zero(rows).tolist() == [False, True, False]
    rows[1, P // 2] = 1e-30
    assert not bool(form.zero(rows).any())


def part_of(curvature: Curvature, held: set[int], numbers: bool) -> Curvature:
    """The curvature as a process has it that owns some of the blocks."""
    values = tuple(
        one if index in held else KroneckerValues(None, one.eigenvalues.to("meta"), one.count)
        for index, one in enumerate(curvature.kronecker)
    )
    diagonal = curvature.diagonal if numbers else tuple(one.to("meta") for one in curvature.diagonal)
    return replace(curvature, kronecker=values, diagonal=diagonal)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("what", ["self-influence", "whitened", "products"])
def test_what_owners_of_blocks_find_adds_up(curvature: Curvature, gradients: Gradients, form: str, what: str) -> None:
    count = len(curvature.kronecker)
    targets = torch.randn(4, P, generator=torch.Generator().manual_seed(3))

    def found(one: Curvature, whole: bool) -> Tensor:
        maps = {
            "self-influence": lambda: SelfInfluence(one, 0.1) if whole else OwnSelfInfluence(one, 0.1),
            "whitened": lambda: WhitenedProjection(one, 0.1, Kept()),  # type: ignore[arg-type]
            "products": lambda: TargetForm(one, 0.1).products(targets) if whole else own_products(one),
        }
        sink = maps[what]().sink(B, 0, "cpu")
        FORMS[form](gradients, sink)  # type: ignore[arg-type]
        return sink.result()

    def own_products(one: Curvature) -> GradientMap:
        own = LowRankForm(one, 0.1, max(max(block.shape) for block in one.blocks.kronecker))
        rows = torch.zeros(4, own.width)
        for name, place in own.places().items():
            kind, _, number = name.partition("-")
            if kind == "matrix":
                values = one.blocks.kronecker[int(number)].matrix(targets).flatten(1)
            else:
                lone = one.blocks.diagonal[int(number)]
                values = targets[:, lone.start : lone.start + lone.numel]
            rows[:, place.start : place.start + place.numel] = values
        return own.products(rows)

    parts = [part_of(curvature, {0}, True), part_of(curvature, set(range(1, count)), False)]
    assert [one.held for one in parts] == [[0], [*range(1, count)]]
    close(found(parts[0], False) + found(parts[1], False), found(curvature, True))
