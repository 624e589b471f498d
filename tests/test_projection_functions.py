"""The maps as functions of tensors: the same numbers as the projectors, derivatives, vmap, compilation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import jvp, vmap

from hf_trak import _ops
from hf_trak.projectors import make_projector, normal, rademacher, sjlt
from hf_trak.projectors.reference import matrix

MAPS: dict[str, Callable[..., Tensor]] = {"sjlt": sjlt, "rademacher": rademacher, "normal": normal}
CASES = [("sjlt", 1), ("sjlt", 3), ("rademacher", 1), ("normal", 1)]
N, K, SEED = 700, 37, 5


def reference(name: str, nonzeros: int, n: int = N) -> Tensor:
    extra = {"nonzeros": nonzeros} if name == "sjlt" else {}
    return torch.tensor(matrix(f"{name}-1", 0, n, K, seed=SEED, model_id=2, **extra))


def projected(name: str, nonzeros: int, x: Tensor, **options: Any) -> Tensor:
    extra = {"nonzeros": nonzeros} if name == "sjlt" else {}
    return MAPS[name](x, K, seed=SEED, model_id=2, **extra, **options)


@pytest.mark.parametrize(("name", "nonzeros"), CASES)
def test_values(name: str, nonzeros: int) -> None:
    """Those of the definition, and to the bit those of the projector."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, N)
    found = projected(name, nonzeros, x, scaled=False)
    assert found.shape == (2, 3, K)
    expected = x.double() @ reference(name, nonzeros)
    # Sums of 700 products in float32
    assert float((found - expected).abs().max()) < 700 * 2**-24 * float(x.abs().max()) * 4
    projector = make_projector(name, N, K, SEED, "cpu", nonzeros)  # type: ignore[arg-type]
    assert torch.equal(found.flatten(0, 1), projector.project(x.flatten(0, 1), 2))
    assert torch.equal(projected(name, nonzeros, x), found * projector.scale)


@pytest.mark.parametrize(("name", "nonzeros"), CASES)
@pytest.mark.parametrize("n", [1, 511, 8192 + 700])
def test_transposed(name: str, nonzeros: int, n: int) -> None:
    torch.manual_seed(0)
    y = torch.randn(3, K)
    found = _ops.project_transposed(y, n, name, SEED, 2, nonzeros)
    expected = y.double() @ reference(name, nonzeros, n).T
    assert float((found - expected).abs().max()) < K * 2**-22 * float(expected.abs().max())


@pytest.mark.parametrize(("name", "nonzeros"), [("sjlt", 1), ("normal", 1)])
def test_transposed_across_regions_of_the_generator(name: str, nonzeros: int) -> None:
    """⟨x R, y⟩ = ⟨x, y Rᵀ⟩, with more coordinates than are generated together."""
    torch.manual_seed(0)
    n = 2**23 + 9000 if name == "sjlt" else 2**15
    x, y = torch.randn(1, n), torch.randn(1, K)
    left = (_ops.project(x, K, name, SEED, 2, nonzeros).double() * y).sum()
    right = (x.double() * _ops.project_transposed(y, n, name, SEED, 2, nonzeros)).sum()
    assert float(left) == pytest.approx(float(right), rel=1e-4, abs=1e-2)


@pytest.mark.filterwarnings("ignore:Input #. requires gradient and is not a double")
@pytest.mark.parametrize(("name", "nonzeros"), CASES)
def test_derivatives(name: str, nonzeros: int) -> None:
    """A linear map has exact differences with any step, so that float32 is enough."""
    torch.manual_seed(0)
    x = torch.randn(1, 7, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return projected(name, nonzeros, x)

    assert torch.autograd.gradcheck(function, (x,), eps=1.0, atol=1e-4, rtol=1e-4)
    assert torch.autograd.gradgradcheck(lambda x: function(x) ** 2, (x,), eps=1e-1, atol=1e-2, rtol=1e-2)
    tangent = torch.randn(1, 7)
    value, change = jvp(function, (x.detach(),), (tangent,))
    assert torch.equal(value, function(x.detach()))
    assert torch.allclose(change, function(tangent), atol=1e-5)


@pytest.mark.parametrize(("name", "nonzeros"), CASES)
def test_operators(name: str, nonzeros: int) -> None:
    x, y = torch.randn(3, 40, requires_grad=True), torch.randn(3, K, requires_grad=True)
    torch.library.opcheck(_ops.project, (x, K, name, SEED, 2, nonzeros))
    torch.library.opcheck(_ops.project_transposed, (y, 40, name, SEED, 2, nonzeros))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """Inputs are half precision, sums and results are not; gradients have the dtype of the inputs."""
    x = torch.randn(2, N, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = rademacher(x, K)
    assert found.dtype == torch.float32
    assert torch.equal(found, rademacher(x.detach().float(), K))
    found.sum().backward()
    assert x.grad is not None and x.grad.dtype == dtype


def test_vmap() -> None:
    """Per-sample gradients through a sketch."""
    torch.manual_seed(0)
    x = torch.randn(4, 2, N)
    assert torch.equal(vmap(lambda one: sjlt(one, K))(x), sjlt(x, K))
    assert torch.equal(vmap(lambda one: sjlt(one, K), in_dims=1)(x), sjlt(x.transpose(0, 1), K))
    gradients = vmap(torch.func.grad(lambda one: sjlt(one, K).square().sum()))(x)
    expected = torch.autograd.grad(sjlt(leaf := x.clone().requires_grad_(), K).square().sum(), leaf)[0]
    assert torch.allclose(gradients, expected, atol=1e-5)


def test_compiled() -> None:
    """A compiled function gives the same bits, without a break of the graph, for several batch sizes."""

    def function(x: Tensor) -> Tensor:
        return torch.tanh(sjlt(x, K, seed=3) + rademacher(x, K))

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for size in (2, 5):
        x = torch.randn(size, N, requires_grad=True)
        assert torch.equal(compiled(x), function(x))
        found, expected = (torch.autograd.grad(one(x).sum(), x)[0] for one in (compiled, function))
        assert torch.equal(found, expected)


def test_inner_products() -> None:
    """Scaled maps keep inner products: the mean over seeds is within four standard errors."""
    torch.manual_seed(0)
    x = torch.nn.functional.normalize(torch.randn(2, N), dim=1)
    for name, function in MAPS.items():
        found = torch.stack([function(x, 64, seed=seed) for seed in range(100)])
        products = (found[:, 0] * found[:, 1]).sum(1)
        assert abs(float(products.mean() - x[0] @ x[1])) < 4 * float(products.std()) / 100**0.5, name


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1.0], 3), TypeError, "`x` is a list"),
        ((torch.tensor(1.0), 3), ValueError, r"has shape \(\)"),
        ((torch.ones(2, 3, dtype=torch.float64), 3), ValueError, r"x\.float\(\)"),
        ((torch.ones(2, 3), 0), ValueError, "proj_dim"),
        ((torch.ones(2, 3), 2, -1), ValueError, "seed"),
        ((torch.ones(2, 3), 2, 0, 3), ValueError, "nonzeros"),
    ],
)
def test_errors(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sjlt(*arguments)


def test_empty() -> None:
    assert sjlt(torch.empty(0, 5), K).shape == (0, K)
    assert torch.equal(sjlt(torch.empty(2, 0), K), torch.zeros(2, K))
