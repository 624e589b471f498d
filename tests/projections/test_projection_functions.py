"""The maps as functions of tensors: the same numbers as the projectors, derivatives, vmap, compilation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.func import jvp, vmap

from hf_trak.kernels import ops as _ops
from hf_trak.projectors import (
    make_projector,
    normal,
    normal_transposed,
    rademacher,
    rademacher_transposed,
    sjlt,
    sjlt_transposed,
)
from hf_trak.projectors.reference import matrix

MAPS: dict[str, Callable[..., Tensor]] = {"sjlt": sjlt, "rademacher": rademacher, "normal": normal}
TRANSPOSED: dict[str, Callable[..., Tensor]] = {
    "sjlt": sjlt_transposed,
    "rademacher": rademacher_transposed,
    "normal": normal_transposed,
}
CASES = [("sjlt", 1), ("sjlt", 3), ("rademacher", 1), ("normal", 1)]
N, K, SEED = 700, 37, 5


def reference(name: str, nonzeros: int, n: int = N) -> Tensor:
    extra = {"nonzeros": nonzeros} if name == "sjlt" else {}
    return torch.tensor(matrix(f"{name}-1", 0, n, K, seed=SEED, model_id=2, **extra))


def projected(name: str, nonzeros: int, x: Tensor, **options: Any) -> Tensor:
    extra = {"nonzeros": nonzeros} if name == "sjlt" else {}
    return MAPS[name](x, K, seed=SEED, model_id=2, **extra, **options)


@pytest.mark.few(2)
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


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "nonzeros", "n"),
    [
        pytest.param(*case, n, marks=pytest.mark.slow if n > 8192 and case[0] != "sjlt" else [])
        for case in CASES
        for n in (1, 511, 8192 + 700)
    ],
)
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


@pytest.mark.parametrize(("name", "nonzeros"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_transposed_function(name: str, nonzeros: int, dtype: torch.dtype) -> None:
    """It is y Rᵀ with the scale of x R, and each is the derivative of the other to the bit."""
    torch.manual_seed(0)
    n = 61
    extra = {"nonzeros": nonzeros} if name == "sjlt" else {}
    y = torch.randn(2, 3, K).to(dtype)
    found = TRANSPOSED[name](y, n, seed=SEED, model_id=2, **extra)
    scale = (nonzeros if name == "sjlt" else K) ** -0.5
    expected = y.double() @ reference(name, nonzeros, n).T * scale
    assert found.shape == (2, 3, n) and found.dtype == torch.float32
    assert float((found - expected).abs().max()) < K * 2**-22 * float(expected.abs().max())
    unscaled = TRANSPOSED[name](y, n, seed=SEED, model_id=2, scaled=False, **extra)
    assert torch.equal(unscaled * scale, found)
    x = torch.zeros(2, 3, n, requires_grad=True)
    (gradient,) = torch.autograd.grad(projected(name, nonzeros, x, scaled=False), x, y.float())
    assert torch.equal(gradient, unscaled)
    leaf = y.float().requires_grad_()
    out = TRANSPOSED[name](leaf, n, seed=SEED, model_id=2, scaled=False, **extra)
    (back,) = torch.autograd.grad(out, leaf, torch.ones_like(out))
    assert torch.equal(back, projected(name, nonzeros, torch.ones(2, 3, n), scaled=False))


@pytest.mark.few(1)
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
    extra = {"nonzeros": nonzeros} if name == "sjlt" else {}
    y = torch.randn(1, K, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda y: TRANSPOSED[name](y, 7, seed=SEED, **extra), (y,), eps=1.0, atol=1e-4, rtol=1e-4
    )
    value, change = jvp(function, (x.detach(),), (tangent,))
    assert torch.equal(value, function(x.detach()))
    assert torch.allclose(change, function(tangent), atol=1e-5)


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "nonzeros"), CASES)
def test_operators(name: str, nonzeros: int) -> None:
    x, y = torch.randn(3, 40, requires_grad=True), torch.randn(3, K, requires_grad=True)
    torch.library.opcheck(_ops.project, (x, K, name, SEED, 2, nonzeros))
    torch.library.opcheck(_ops.project_transposed, (y, 40, name, SEED, 2, nonzeros))


@pytest.mark.slow
def test_operators_that_accumulate() -> None:
    """The operators that change an argument in place, which projectors call."""
    out, block, settings = torch.zeros(3, K), torch.randn(3, 40), (5, SEED, 2)
    left, right = torch.randn(3, 2, 5), torch.randn(3, 2, 8)
    operators = torch.ops.hf_trak
    torch.library.opcheck(operators.sjlt_accumulate.default, (out, block, *settings, 3))
    torch.library.opcheck(operators.sjlt_accumulate_outer.default, (out, left, right, *settings, 1))
    torch.library.opcheck(operators.rademacher_accumulate.default, (out, block, *settings, 2))
    torch.library.opcheck(operators.normal_accumulate.default, (out, block, *settings))
    signs = torch.randint(-(2**31), 2**31, (2, 1)).to(torch.int32)
    torch.library.opcheck(operators.hadamard.default, (torch.randn(3, 48), signs, 32, [0, 16]))


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


def test_jacobians() -> None:
    """R itself, by either mode, and the second derivative of a sketched square."""
    torch.manual_seed(0)
    x, matrix = torch.randn(9), sjlt(torch.eye(9), K)
    assert torch.equal(torch.func.jacrev(lambda x: sjlt(x, K))(x).T, matrix)
    assert torch.equal(torch.func.jacfwd(lambda x: sjlt(x, K))(x).T, matrix)
    hessian = torch.func.hessian(lambda x: sjlt(x, K).square().sum())(x)
    assert torch.allclose(hessian, 2 * matrix @ matrix.T)
    nested = vmap(vmap(lambda x: sjlt_transposed(sjlt(x, K), 9)))(torch.randn(2, 3, 9))
    assert nested.shape == (2, 3, 9)


def test_without_data() -> None:
    """Shapes alone: FakeTensors, and tensors on the meta device."""
    with FakeTensorMode():
        assert rademacher(torch.empty(2, 3, N), K).shape == (2, 3, K)
        assert rademacher_transposed(torch.empty(2, 3, K), N).shape == (2, 3, N)
    sketch = normal(torch.empty(2, N, device="meta", dtype=torch.bfloat16), K)
    assert sketch.shape == (2, K) and sketch.device.type == "meta" and sketch.dtype == torch.float32


def test_exported() -> None:
    """A program with a free batch size, which gives the same bits as the module."""

    class Sketch(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return sjlt_transposed(sjlt(x, K, seed=1), N, seed=1)

    program = torch.export.export(
        Sketch(), (torch.randn(3, N),), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},)
    )
    x = torch.randn(5, N)
    assert torch.equal(program.module()(x), Sketch()(x))


@pytest.mark.slow
def test_compiled() -> None:
    """A compiled function gives the same bits, without a break of the graph, for several batch sizes."""

    def function(x: Tensor) -> Tensor:
        return torch.tanh(normal_transposed(sjlt(x, K, seed=3) + rademacher(x, K), 9))

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for size in (2, 5):
        x = torch.randn(size, N, requires_grad=True)
        assert torch.equal(compiled(x), function(x))
        found, expected = (torch.autograd.grad(one(x).sum(), x)[0] for one in (compiled, function))
        assert torch.equal(found, expected)


@pytest.mark.slow
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
        ((torch.ones(2, 3), 0), ValueError, "`k` is 0. Expected an integer from 1"),
        ((torch.ones(2, 3), 2, -1), ValueError, "seed"),
        ((torch.ones(2, 3), 2, 0, 3), ValueError, "nonzeros"),
    ],
)
def test_errors(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sjlt(*arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("sketch", 3), TypeError, "`y` is a str"),
        ((torch.tensor(1.0), 3), ValueError, r"`y` has shape \(\)"),
        ((torch.ones(2, 3, dtype=torch.int64), 3), ValueError, r"y\.float\(\)"),
        ((torch.ones(2, 0), 3), ValueError, r"`y.shape\[-1\]` is 0"),
        ((torch.ones(2, 3), -1), ValueError, "`n` is -1"),
        ((torch.ones(2, 3), 2.0), TypeError, "`n` is 2.0"),
        ((torch.ones(2, 3), 2, 0, 4), ValueError, "nonzeros"),
    ],
)
def test_errors_of_transposed(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sjlt_transposed(*arguments)


@pytest.mark.parametrize("name", list(MAPS))
def test_empty(name: str) -> None:
    """No rows, and no coordinates: forward, backward and transposed."""
    assert MAPS[name](torch.empty(0, 5), K).shape == (0, K)
    x = torch.empty(2, 0, requires_grad=True)
    found = MAPS[name](x, K)
    assert torch.equal(found, torch.zeros(2, K))
    found.sum().backward()
    assert x.grad is not None and x.grad.shape == (2, 0)
    assert TRANSPOSED[name](torch.empty(0, K), 5).shape == (0, 5)
    assert TRANSPOSED[name](torch.empty(2, K), 0).shape == (2, 0)


def test_one_dimension() -> None:
    """A vector is a batch of one without the dimension of the batch."""
    x = torch.randn(N)
    assert torch.equal(sjlt(x, K), sjlt(x[None], K)[0])
    assert torch.equal(sjlt_transposed(x[:K], 9), sjlt_transposed(x[None, :K], 9)[0])
