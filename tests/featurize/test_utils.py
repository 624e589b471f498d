"""The utilities that the `trak` API documents."""

import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import assert_within, product_bound

from hf_trak import utils

INT32_MAX = 2**31 - 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("blockwise", [False, True])
def test_matrix_product_is_accumulated_in_float32(dtype, blockwise):
    """A sum of 4096 terms of 2⁻⁹, which half-precision partial sums stop growing with long before the end."""
    features = torch.full((5, 4096), 1.0, dtype=dtype)
    targets = torch.full((3, 4096), 2**-9, dtype=dtype)
    product = utils.get_matrix_mult(features, targets, batch_size=2, use_blockwise=blockwise)
    assert product.dtype == dtype
    assert torch.equal(product, torch.full((5, 3), 8.0, dtype=dtype))
    wide = utils.get_matrix_mult(features * 100, targets * 100, torch.float32, use_blockwise=blockwise)
    assert wide.dtype == torch.float32 and torch.isfinite(wide).all()
    expected = (features * 100).double() @ (targets * 100).double().T
    assert torch.equal(wide.double(), expected)  # multiples of 2⁻⁵ below 2¹⁹ are exact in float32


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 9), m=st.integers(1, 9), bs=st.integers(1, 12))
def test_blockwise_and_standard_products_agree(n, m, bs):
    features, targets = torch.randn(n, 6), torch.randn(m, 6)
    expected, bound = features.double() @ targets.double().T, product_bound(features, targets.T)  # 6 products
    product = utils.get_matrix_mult_standard(features, targets, torch.float32)
    assert product.dtype == torch.float32
    assert_within(product, expected, bound)
    blocks = utils.get_matrix_mult_blockwise(features, targets, torch.float64, bs)
    assert blocks.dtype == torch.float64
    assert_within(blocks, expected, bound)


def test_factors_that_do_not_fit():
    for multiply in (
        lambda *args: utils.get_matrix_mult(*args),
        lambda *args: utils.get_matrix_mult_standard(*args, torch.float32),
        lambda *args: utils.get_matrix_mult_blockwise(*args, torch.float32, 4),
    ):
        with pytest.raises(ValueError, match=r"\(2, 3\) and \(4, 5\)"):
            multiply(torch.ones(2, 3), torch.ones(4, 5))
    with pytest.raises(ValueError, match="`bs` is 0"):
        utils.get_matrix_mult_blockwise(torch.ones(2, 3), torch.ones(4, 3), torch.float32, 0)


def test_output_memory_counts_in_python_integers():
    rows = torch.empty(1).expand(3_000_000, 1)  # no memory behind it
    assert utils.get_output_memory(rows, rows, torch.float32) == 4 * 9 * 10**12
    assert utils.get_output_memory(torch.ones(3, 2), torch.ones(5, 2), torch.float16) == 30


def test_free_memory():
    free = utils.get_free_memory("cpu")
    assert isinstance(free, int) and 0 < free < 2**50
    with pytest.raises(ValueError, match="meta"):
        utils.get_free_memory("meta")


@pytest.mark.gpu
def test_free_memory_of_a_gpu_falls_by_what_is_allocated():
    before = utils.get_free_memory("cuda")
    held = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    assert before - utils.get_free_memory("cuda") >= held.numel()


def test_number_of_parameters_counts_shared_ones_once():
    shared = torch.nn.Linear(3, 3)
    model = torch.nn.Sequential(shared, shared, torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    model[3].weight.requires_grad_(False)
    assert utils.get_num_params(model) == 12 + 6 + 8


class Sizes(torch.nn.Module):
    """Parameters of any sizes, without memory behind them."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        for index, size in enumerate(sizes):
            self.register_parameter(f"p{index}", torch.nn.Parameter(torch.empty(size, device="meta")))


@settings(max_examples=200, deadline=None)
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12), limit=st.integers(1, 30))
def test_chunks_are_never_empty_never_over_the_limit_and_lose_nothing(sizes, limit):
    batch_size = INT32_MAX // limit
    model = Sizes(sizes)
    maximum, chunks = utils.get_parameter_chunk_sizes(model, batch_size)
    assert maximum == INT32_MAX // batch_size and maximum * batch_size <= INT32_MAX
    assert all(0 < chunk <= maximum for chunk in chunks)
    assert sum(chunks) == utils.get_num_params(model)
    if max(sizes) <= maximum:  # then no parameter is cut
        edges, ends = set(np.cumsum(chunks).tolist()), set(np.cumsum(sizes).tolist())
        assert edges <= ends


def test_a_parameter_larger_than_the_limit_is_cut_at_the_limit():
    """The `trak` package makes an empty chunk of it and one over the limit, whose product with the batch size exceeds
    2³¹.
    """
    maximum, chunks = utils.get_parameter_chunk_sizes(Sizes([10, 5 * 10**8, 7]), 8)
    assert maximum == 268_435_455
    assert chunks == [10, 268_435_455, 500_000_000 - 268_435_455 + 7]
    assert utils.get_parameter_chunk_sizes(Sizes([10, 20]), 1) == (INT32_MAX, [30])
    for batch_size in (0, -1, 2**31):
        with pytest.raises(ValueError, match="`batch_size`"):
            utils.get_parameter_chunk_sizes(Sizes([10]), batch_size)


def test_is_not_buffer_tells_parameters_from_batch_statistics():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    names = list(model.state_dict())
    parameters = {name for name, _ in model.named_parameters()}
    assert {name for index, name in enumerate(names) if utils.is_not_buffer(index, names)} == parameters
    assert utils.is_not_buffer(7, {7: "layer.weight"}) and not utils.is_not_buffer(7, {7: "bn.running_var"})


def test_parameters_to_vector_takes_any_memory_layout():
    tensors = [torch.randn(2, 3).T, torch.randn(()), torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)]
    vector = utils.parameters_to_vector(iter(tensors))
    assert torch.equal(vector, torch.cat([torch.tensor(tensor.tolist()).flatten() for tensor in tensors]))
    leaf = torch.randn(3, requires_grad=True)
    assert utils.parameters_to_vector([leaf]).requires_grad
    with pytest.raises(ValueError, match="no parameters"):
        utils.parameters_to_vector([])


def test_vectorize():
    gradients = {
        "weight": torch.randn(3, 2, 2).transpose(1, 2),
        "scalar": torch.randn(3),
        "empty": torch.empty(3, 0),
        "bias": torch.randn(3, 2, dtype=torch.float64),
    }
    expected = torch.stack(
        [
            torch.tensor([*g["weight"].flatten(), g["scalar"], *g["bias"]], dtype=torch.float64)
            for g in ({name: value[row] for name, value in gradients.items()} for row in range(3))
        ]
    )
    result = utils.vectorize(gradients, device="cpu")
    assert result.dtype == torch.float64 and torch.equal(result, expected)
    given_array = torch.zeros(3, 7, dtype=torch.float32)
    assert utils.vectorize(gradients, given_array) is given_array  # the device argument then has no part
    assert torch.equal(given_array, expected.float())
    leaf = {"w": torch.randn(2, 2, requires_grad=True)}
    assert not utils.vectorize(leaf, device="cpu").requires_grad


def test_vectorize_refuses_what_does_not_fit():
    for gradients in ({"a": torch.ones(2, 1), "b": torch.ones(3, 1)}, {"a": torch.ones(())}):
        with pytest.raises(ValueError, match="batch sizes"):
            utils.vectorize(gradients, device="cpu")
    with pytest.raises(ValueError, match="no gradients"):
        utils.vectorize({}, device="cpu")
    with pytest.raises(ValueError, match=r"\(2, 5\). Expected \(2, 4\)"):
        utils.vectorize({"a": torch.ones(2, 4)}, torch.ones(2, 5))


def test_test_install_runs_trak_on_the_cpu_without_touching_a_gpu(monkeypatch, capsys, tmp_path):
    def touched(*args, **kwargs):
        raise AssertionError("a GPU was touched")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "_lazy_init", touched)
    monkeypatch.setitem(sys.modules, "fast_jl", None)
    monkeypatch.chdir(tmp_path)
    utils.test_install(use_fast_jl=False)
    assert "installed correctly" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_test_install_notices_wrong_scores(monkeypatch):
    from hf_trak.traker import TRAKer

    right = TRAKer.finalize_scores
    monkeypatch.setattr(TRAKer, "finalize_scores", lambda self, name: -torch.as_tensor(right(self, name)))
    with pytest.raises(RuntimeError, match="are wrong"):
        utils.test_install(use_fast_jl=False)


def test_test_install_says_how_to_get_fast_jl(monkeypatch):
    monkeypatch.setitem(sys.modules, "fast_jl", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install fast-jl.*use_fast_jl=False"):
        utils.test_install()
    monkeypatch.setitem(sys.modules, "fast_jl", types.ModuleType("fast_jl"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="no CUDA device"):
        utils.test_install(use_fast_jl=True)
