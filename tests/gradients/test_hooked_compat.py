"""Tests of `hf_trak._compat`: the internals of other libraries are still what it takes them for."""

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_trak import _compat


class Seen(TorchFunctionMode):
    """Notes the names of the functions that a mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def attention_arguments() -> tuple[tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(8, 2).eval(), torch.randn(5, 3, 8)
    arguments = (x, x, x, 8, 2, layer.in_proj_weight, layer.in_proj_bias, None, None, False, 0.0)
    return (*arguments, layer.out_proj.weight, layer.out_proj.bias), {"training": False}


def test_attention_is_opened_to_modes_and_computes_the_same() -> None:
    args, kwargs = attention_arguments()
    with Seen() as closed:
        expected = F.multi_head_attention_forward(*args, **kwargs)
    with Seen() as opened:
        found = _compat.opened_attention(*args, **kwargs)
    assert closed.names == ["multi_head_attention_forward"]
    assert opened.names.count("linear") >= 2 and "multi_head_attention_forward" not in opened.names
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_modes_see_what_runs_during_an_opened_backward_pass() -> None:
    def recomputed(backward: Callable[..., None]) -> list[str]:
        x = torch.ones(3, requires_grad=True)
        y = x * 2
        y.register_hook(lambda grad: torch.cos(grad))
        with Seen() as mode:
            backward((y.sum(),))
        assert x.grad is not None and torch.equal(x.grad, 2 * torch.cos(torch.ones(3)))
        return mode.names

    assert "cos" in recomputed(_compat.opened_backward)
    assert "cos" not in recomputed(torch.autograd.backward)


def test_a_context_that_modes_do_not_see() -> None:
    with Seen() as mode:
        torch.sin(torch.ones(2))
        with _compat.unseen_by_modes():
            torch.cos(torch.ones(2))
    assert "sin" in mode.names and "cos" not in mode.names


def test_own_parameters_hold_those_that_are_switched_off() -> None:
    module = nn.Sequential(nn.Linear(2, 2, bias=False))
    assert _compat.own_parameters(module) == {}
    assert list(_compat.own_parameters(module[0])) == ["weight", "bias"]
    assert _compat.own_parameters(module[0])["bias"] is None


@pytest.mark.parametrize("padding", ["same", "valid", 1, (2, 1)])
def test_padding_of_both_sides(padding: Any) -> None:
    conv = nn.Conv2d(1, 1, (3, 4), padding=padding, dilation=(2, 1), padding_mode="circular")
    x = torch.randn(1, 1, 9, 9)
    padded = F.pad(x, _compat.padding_of_both_sides(conv), mode="circular")
    torch.testing.assert_close(conv(x), F.conv2d(padded, conv.weight, conv.bias, dilation=(2, 1)))


def test_a_replaced_forward_is_foreign_but_that_of_accelerate_is_not() -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    plain, replaced = nn.Linear(2, 2), nn.Linear(2, 2)
    replaced.forward = lambda x: x  # type: ignore[method-assign]
    wrapped = add_hook_to_module(nn.Linear(2, 2), ModelHook())
    assert "forward" in vars(wrapped)
    assert [_compat.has_foreign_forward(m) for m in (plain, replaced, wrapped)] == [False, True, False]


class Quantized(nn.Module):
    """A layer with the attributes of the 4-bit layers of bitsandbytes that count here."""

    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.support_avx512bf16_for_cpu = True
        self.weight = nn.Parameter(torch.zeros(2))
        self.weight.quant_state = types.SimpleNamespace(packing_format_for_cpu=packed)  # type: ignore[attr-defined]


def test_4bit_layers_keep_their_weights_inside_the_context_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", types.ModuleType("bitsandbytes"))
    model = nn.Sequential(nn.Linear(2, 2), Quantized(False), Quantized(True))
    assert _compat.packed_4bit_layer(model) == ("2", "support_avx512bf16_for_cpu")
    assert _compat.packed_4bit_layer(model[:2]) is None
    with pytest.raises(KeyError), _compat.keeping_4bit_weights(model):
        assert [model[i].support_avx512bf16_for_cpu for i in (1, 2)] == [False, False]
        raise KeyError
    assert [model[i].support_avx512bf16_for_cpu for i in (1, 2)] == [True, True]


def test_private_base_classes_are_those_of_the_public_layers() -> None:
    assert all(isinstance(layer(2), _compat.BatchNormBase) for layer in (nn.BatchNorm1d, nn.BatchNorm2d))


def test_trees_keep_tensors_as_leaves() -> None:
    tree: dict[str, Any] = {"a": [torch.zeros(2), None], "b": (3, torch.ones(1))}
    leaves, structure = _compat.tree_flatten(tree)
    assert sum(isinstance(leaf, Tensor) for leaf in leaves) == 2 == len([*filter(torch.is_tensor, leaves)])
    assert _compat.tree_unflatten(leaves, structure)["b"][0] == 3
    assert len(_compat.tree_leaves(tree)) == len(leaves)
