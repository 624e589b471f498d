"""Exact scores against problems with known answers, and against curvatures written out as dense matrices."""

from pathlib import Path
from typing import Any

import pytest
import torch
from curvature_runs import assembled, error, exact_scores, factored_blocks, rows_of, written_curvature
from dense_curvature import (
    Block,
    Factors,
    block_scores,
    diagonal_block,
    kronecker_block,
    layer_factors,
    log_odds,
    minus_cross_entropy,
    places_of,
    sample_gradients,
)
from scipy.stats import spearmanr
from torch import Tensor, nn
from trak_options import trak_config

from hf_trak import TrakAttributor
from hf_trak.curvature import curvature as plan
from hf_trak.curvature.observation import eigenbasis, even_in_null_spaces
from hf_trak.modelout_functions import FunctionModelOutput

KINDS = ("ekfac", "shampoo", "kfac")
DAMPING = 0.1


class Net(nn.Module):
    """A network with the calling convention of image classifiers."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.body(pixel_values)


# -- linear regression: everything is known -----------------------------------------------------------------------


class Regression:
    """Linear regression at its minimum, all in closed form and float64."""

    def __init__(self, bias: bool, n: int = 200, d: int = 6, m: int = 7) -> None:
        generator = torch.Generator().manual_seed(0)
        inputs, targets = torch.randn(n, d, generator=generator) + 0.3, torch.randn(m, d, generator=generator)
        labels = inputs @ torch.randn(d, generator=generator) + torch.randn(n, generator=generator) + 1
        self.rows = rows_of(pixel_values=inputs, labels=labels)
        self.targets = rows_of(pixel_values=targets, labels=torch.zeros(m))
        ones = [torch.ones(len(one), int(bias)) for one in (inputs, targets)]
        self.x, self.x_targets = (torch.cat(parts, 1).double() for parts in zip((inputs, targets), ones, strict=True))
        self.y = labels.double()
        self.solution = self.solved(torch.ones(n, dtype=torch.bool))
        self.residuals = self.y - self.x @ self.solution
        self.model = Net(nn.Linear(d, 1, bias=bias))
        with torch.no_grad():
            self.model.body[0].weight.copy_(self.solution[:d])
            if bias:
                self.model.body[0].bias.copy_(self.solution[d:])

    def solved(self, kept: Tensor) -> Tensor:
        """The minimum of the squared loss over some rows."""
        return torch.linalg.lstsq(self.x[kept], self.y[kept, None]).solution[:, 0]

    def influence(self) -> Tensor:
        """x_bᵀ (XᵀX / n)⁻¹ x_q times the residual of row b, `(n, m)`."""
        inverse = torch.linalg.inv(self.x.T @ self.x / len(self.x))
        return self.residuals[:, None] * (self.x @ inverse @ self.x_targets.T)

    def leverages(self) -> Tensor:
        """h_b = x_bᵀ (XᵀX)⁻¹ x_b, `(n,)`."""
        return (self.x * torch.linalg.solve(self.x.T @ self.x, self.x.T).T).sum(1)


@pytest.mark.few(2)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_influence_on_a_linear_regression_is_exact(tmp_path: Path, kind: str, bias: bool) -> None:
    """The gradient of a label drawn from N(ŷ, 1) is ±x, so that every kind of curvature is XᵀX / n itself."""
    problem = Regression(bias)
    scores = exact_scores(
        problem.model, tmp_path, problem.rows, problem.targets, "regression", curvature=kind, curvature_damping=0.0
    )
    # float32, condition number about 2
    assert error(scores, problem.influence()) < 1e-6


def test_scores_predict_leaving_one_row_out(tmp_path: Path) -> None:
    """Retraining without row b changes a prediction by score / (n (1 − h_b)): to first order, score / n."""
    problem = Regression(bias=True)
    n = len(problem.y)
    args = trak_config(output_dir=str(tmp_path), use_cpu=True, curvature="ekfac", curvature_damping=0.0)
    attributor = TrakAttributor(problem.model, args, train_dataset=problem.rows, task="regression")
    scored = attributor.attribute(problem.targets, method="exact", top_k=None)
    scores = torch.tensor(scored["trak_scores"][:]).T.double()
    without = torch.stack([problem.solved(torch.arange(n) != row) for row in range(n)])
    change = (problem.solution - without) @ problem.x_targets.T

    leverages = problem.leverages()[:, None]
    assert error(scores / n / (1 - leverages), change) < 2e-6
    bound = leverages / (1 - leverages) * scores.abs() / n
    assert bool(((change - scores / n).abs() <= bound + 2e-6 * change.abs().max()).all())
    correlation = torch.corrcoef(torch.stack([scores.flatten(), change.flatten()]))[0, 1]
    assert correlation > 0.999

    on_itself = attributor.self_influence(method="exact").double() / problem.residuals / n
    assert error(on_itself, leverages[:, 0]) < 1e-4  # a residual close to 0 has few correct digits


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fisher_that_is_a_kronecker_product_is_inverted_exactly(tmp_path: Path, kind: str) -> None:
    """Every input occurs with every residual, so that they are independent and Σ ggᵀ / n = S ⊗ A holds exactly."""
    inputs, residuals = torch.randn(12, 5) + 0.2, torch.randn(9, 3) @ torch.randn(3, 3)
    model = Net(nn.Linear(5, 3))
    inputs, residuals = inputs.repeat_interleave(9, 0), residuals.repeat(12, 1)
    labels = model(inputs).detach() + residuals
    targets, wanted = torch.randn(4, 5), torch.randn(4, 3)

    def fit_of(prediction: Tensor, label: Tensor) -> Tensor:
        return -(prediction - label).square().sum(1) / 2

    task = FunctionModelOutput(lambda prediction, batch: fit_of(prediction, batch["labels"]))
    scores = exact_scores(
        model,
        tmp_path,
        rows_of(pixel_values=inputs, labels=labels),
        rows_of(pixel_values=targets, labels=wanted),
        task,
        curvature=kind,
        curvature_labels="empirical",
        curvature_damping=DAMPING,
    )
    train, target = (sample_gradients(model, x, y.double(), fit_of) for x, y in ((inputs, labels), (targets, wanted)))
    fisher = train.T @ train / len(train)
    damped = fisher + DAMPING * fisher.diagonal().mean() * torch.eye(len(fisher)).double()
    assert error(scores, train @ torch.linalg.solve(damped, target.T)) < 1e-5


# -- classifiers, block by block -------------------------------------------------------------------------------------


class Classified:
    """A network with rows, targets and all their gradients."""

    def __init__(self, model: nn.Module, shape: tuple[int, ...], classes: int = 5, n: int = 150, m: int = 5) -> None:
        self.model = model
        inputs, labels = torch.randn(n + m, *shape) + 0.3, torch.randint(classes, (n + m,))
        self.rows = rows_of(pixel_values=inputs[:n], labels=labels[:n])
        self.targets = rows_of(pixel_values=inputs[n:], labels=labels[n:])
        self.train = sample_gradients(model, inputs[:n], labels[:n], minus_cross_entropy)
        self.target = sample_gradients(model, inputs[n:], labels[n:], log_odds)
        self.factors = layer_factors(model, inputs[:n], labels[:n], minus_cross_entropy)

    def scores(self, directory: Path, kind: str, **options: Any) -> Tensor:
        """The library's scores, with the labels of the data."""
        settings = {"curvature": kind, "curvature_labels": "empirical", "curvature_damping": DAMPING, **options}
        return exact_scores(self.model, directory, self.rows, self.targets, "image_classification", **settings)

    def blocks(self, kind: str) -> list[Block]:
        """Dense blocks: of the linear maps, then of all other parameters one by one."""
        found = [kronecker_block(one, self.train, kind) for one in self.factors]
        joined = {int(place) for one in self.factors for place in one.places.flatten()}
        alone = [places for places in places_of(self.model).values() if int(places[0]) not in joined]
        return found + [diagonal_block(places, self.train) for places in alone]


def softmax_regression() -> Classified:
    return Classified(Net(nn.Linear(6, 5)), (6,))


def perceptron() -> Classified:
    return Classified(Net(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)), (6,))


def convolutions() -> Classified:
    """Stride, padding, groups, with and without a bias, and parameters that are on their own."""
    return Classified(
        Net(
            nn.Conv2d(3, 4, 3, stride=2, padding=1),
            nn.Tanh(),
            nn.Conv2d(4, 6, 3, groups=2, padding=1),
            nn.Tanh(),
            nn.Conv2d(6, 4, (2, 1), bias=False),
            nn.Tanh(),
            nn.Flatten(),
            nn.LayerNorm(48),
            nn.Linear(48, 5),
        ),
        (3, 7, 8),
    )


def dead_positions() -> Classified:
    """Half of the positions without a gradient, because another one is the maximum, or without an input."""
    return Classified(
        Net(
            nn.Conv2d(1, 4, 3, padding=2, bias=False),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 4, (1, 2), padding=(1, 0), bias=False),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(96, 5),
        ),
        (1, 6, 8),
    )


PROBLEMS = {one.__name__: one for one in (softmax_regression, perceptron, convolutions, dead_positions)}


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_blocks_are_explicit_kronecker_products(tmp_path: Path, name: str, kind: str) -> None:
    problem = PROBLEMS[name]()
    scores = problem.scores(tmp_path, kind)
    curvature = written_curvature(tmp_path)
    blocks = problem.blocks(kind)
    known = len(problem.factors)

    # Float32 bases; the matrices with them are free of the sign and order of eigenvectors.
    matrix = assembled(curvature)
    for block in blocks:
        assert error(matrix[block.places[:, None], block.places], block.matrix) < 1e-5
    for values, block in zip(curvature.kronecker, blocks[:known], strict=True):
        assert error(values.eigenvalues, block.eigenvalues) < 1e-4
    for (_, places, values), factors in zip(factored_blocks(curvature), problem.factors, strict=True):
        assert torch.equal(places, factors.places)
        assert kind == "shampoo" or values.count == factors.counted()
    for values, block in zip(curvature.diagonal, blocks[known:], strict=True):
        assert error(values, block.eigenvalues) < 1e-5
    assert error(scores, block_scores(blocks, problem.train, problem.target, DAMPING)) < 1e-4


@pytest.mark.parametrize("name", ["perceptron", "convolutions"])
def test_bases_diagonalize_the_covariances(tmp_path: Path, name: str) -> None:
    """K-FAC's own eigenvalues are those of S and A, in their order, times the positions of a row."""
    problem = PROBLEMS[name]()
    problem.scores(tmp_path, "kfac")
    for (_, _, values), factors in zip(factored_blocks(written_curvature(tmp_path)), problem.factors, strict=True):
        spectra = []
        assert values.bases is not None
        for basis, covariance in zip(values.bases, factors.covariances(), strict=True):
            rotated = basis.double().T @ covariance @ basis.double()
            spectrum = torch.linalg.eigvalsh(covariance)
            assert error(rotated, spectrum.diag()) < 1e-5
            spectra.append(spectrum)
        assert error(values.eigenvalues, factors.outputs.shape[1] * torch.outer(*spectra)) < 1e-5


def test_eigenvalues_come_from_all_rows_where_bases_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many rows, bases come from some of them. Λ is the diagonal of the Fisher in these, from all rows."""
    rows = 600
    monkeypatch.setattr(plan, "BASIS_ROWS", 70)
    problem = Classified(Net(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)), (6,), n=rows)
    problem.scores(tmp_path, "ekfac")
    for (_, _, values), factors in zip(factored_blocks(written_curvature(tmp_path)), problem.factors, strict=True):
        assert values.bases is not None
        assert 70 < 20 * max(values.eigenvalues.shape) <= values.count < rows
        left, right = (basis.double() for basis in values.bases)
        rotated = left.T @ problem.train[:, factors.places] @ right
        assert error(values.eigenvalues, rotated.square().mean(0)) < 1e-5


def test_a_diagonal_curvature_is_that_of_squared_gradients(tmp_path: Path) -> None:
    problem = convolutions()
    scores = problem.scores(tmp_path, "diagonal")
    blocks = [diagonal_block(one.places.flatten(), problem.train) for one in problem.factors]
    blocks += problem.blocks("ekfac")[len(blocks) :]
    assert error(scores, block_scores(blocks, problem.train, problem.target, DAMPING)) < 1e-5


def test_no_curvature_gives_inner_products(tmp_path: Path) -> None:
    problem = perceptron()
    scores, expected = problem.scores(tmp_path, "identity").double(), problem.train @ problem.target.T
    factor = (scores * expected).sum() / expected.square().sum()  # 1 / (1 + c) or 1: the same for all
    assert error(scores, factor * expected) < 1e-5
    assert factor > 0


# -- the whole Fisher matrix -----------------------------------------------------------------------------------------


class Trained(Classified):
    """A trained network of 1,792 parameters, and 1,200 rows."""

    def __init__(self) -> None:
        n, m, width, classes = 1200, 12, 24, 8
        inputs = torch.randn(n + m, width) @ (torch.randn(width, width) * torch.linspace(0.2, 1.5, width)) / 3
        teacher = nn.Sequential(nn.Linear(width, 30), nn.Tanh(), nn.Linear(30, classes))
        labels = (3 * teacher(inputs)).softmax(1).multinomial(1)[:, 0]
        self.model = Net(nn.Linear(width, 40), nn.Tanh(), nn.Linear(40, 16), nn.Tanh(), nn.Linear(16, classes))
        optimizer = torch.optim.Adam(self.model.parameters(), 3e-3)
        for _ in range(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(inputs[:n]), labels[:n]).backward()
            optimizer.step()
        self.rows = rows_of(pixel_values=inputs[:n], labels=labels[:n])
        self.targets = rows_of(pixel_values=inputs[n:], labels=labels[n:])
        self.train = sample_gradients(self.model, inputs[:n], labels[:n], minus_cross_entropy)
        self.target = sample_gradients(self.model, inputs[n:], labels[n:], log_odds)
        self.factors = layer_factors(self.model, inputs[:n], labels[:n], minus_cross_entropy)
        self.fisher = self.train.T @ self.train / n

    def block_of(self, factors: Factors) -> Tensor:
        """The Fisher matrix of one layer."""
        places = factors.places.flatten()
        return self.fisher[places[:, None], places]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trained, dict[str, Tensor], Path]:
    """The network, its scores under every kind of curvature, and the directory of these."""
    torch.manual_seed(0)
    problem, directory = Trained(), tmp_path_factory.mktemp("trained")
    kinds = (*KINDS, "diagonal", "identity")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "BASIS_ROWS", 1200)  # all: curvatures are compared that have the same bases
        scores = {kind: problem.scores(directory / kind, kind, per_device_batch_size=200) for kind in kinds}
    return problem, scores, directory


@pytest.mark.slow
def test_agreement_with_the_inverse_of_the_whole_fisher(trained: tuple[Trained, dict[str, Tensor], Path]) -> None:
    """Rank correlations with scores under the dense Fisher of all parameters, with the same damping of every layer:

    one dense matrix per layer .76, Kronecker bases .51, a diagonal .18, no curvature .17. Against one dense matrix per
    layer, Kronecker bases have .71, a diagonal .39. EK-FAC, K-FAC and Shampoo's bases differ by less than .005.
    """
    problem, scores, _ = trained
    damping = torch.zeros(len(problem.fisher)).double()
    layers = []
    for factors in problem.factors:
        matrix = problem.block_of(factors)
        damping[factors.places] = DAMPING * matrix.diagonal().mean()
        layers.append(Block(factors.places.flatten(), matrix, matrix.diagonal()))
    whole = problem.train @ torch.linalg.solve(problem.fisher + damping.diag(), problem.target.T)
    by_layer = block_scores(layers, problem.train, problem.target, DAMPING)

    assert agreement(by_layer, whole) > 0.7
    for kind in KINDS:
        assert 0.45 < agreement(scores[kind], whole) < agreement(by_layer, whole)
        assert agreement(scores[kind], by_layer) > 0.65
    for kind in ("diagonal", "identity"):
        assert agreement(scores[kind], whole) < 0.3
        assert agreement(scores[kind], by_layer) < 0.5


def test_corrected_eigenvalues_are_the_best_in_their_basis(trained: tuple[Trained, dict[str, Tensor], Path]) -> None:
    """Λ is the diagonal of the Fisher F in the basis K: ‖F − KΛKᵀ‖² = ‖F‖² − ‖Λ‖², the least of all diagonals.

    Of the norms of these layers' F, .44, .39 and .46 are left with corrected eigenvalues, .49, .39 and .48 with those
    of K-FAC.
    """
    problem, _, directory = trained
    corrected, plain = (factored_blocks(written_curvature(directory / kind)) for kind in ("ekfac", "kfac"))
    for factors, (matrix, _, values), (other, _, _) in zip(problem.factors, corrected, plain, strict=True):
        fisher = problem.block_of(factors)
        left = float((fisher - matrix).norm())
        expected = (fisher.square().sum() - values.eigenvalues.double().square().sum()).sqrt()
        assert left == pytest.approx(float(expected), rel=1e-5)
        assert left < float((fisher - other).norm()) < float(fisher.norm())


def agreement(scores: Tensor, others: Tensor) -> float:
    """Mean rank correlation over targets."""
    return sum(float(spearmanr(*pair)[0]) for pair in zip(scores.T, others.T, strict=True)) / scores.shape[1]


def test_null_spaces() -> None:
    """Corrected eigenvalues do not depend on which basis of a null space a decomposition returned."""
    torch.manual_seed(0)
    gradients, few = torch.randn(40, 7, 5, dtype=torch.float64), torch.randn(3, 7, dtype=torch.float64)
    right_values, right = torch.linalg.eigh(torch.einsum("bij,bik->jk", gradients, gradients))
    left_values, left = eigenbasis(few.T @ few, len(few), "rows")
    turned = left.double()
    turned[:, :4] @= torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0]
    found = []
    for basis in (left.double(), turned):
        squares = (basis.T @ gradients @ right).square().mean(0)
        eigenvalues = even_in_null_spaces(squares, left_values, right_values)
        assert torch.allclose(eigenvalues[4:], squares[4:], rtol=0, atol=0)
        assert float(eigenvalues.sum()) == pytest.approx(float(squares.sum()), rel=1e-12)
        found.append(basis @ torch.diag(1 / eigenvalues[:, 0]) @ basis.T)
    assert float((found[0] - found[1]).abs().max()) < 1e-6 * float(found[0].abs().max())
