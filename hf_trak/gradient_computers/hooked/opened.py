"""Python functions of torch opened for torch-function modes: their inner operations are seen one by one.

`F.multi_head_attention_forward` takes the projections of `nn.MultiheadAttention` as arguments; a mode sees one opaque
call. `torch.autograd.backward` runs with the mode switched off, and with it whatever activation checkpointing
computes again.
"""

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812


def _never(*args: Any) -> bool:
    return False


def _opened(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, except that it does not begin by handing itself to the mode as a whole."""
    assert isinstance(function, types.FunctionType)
    names = {**function.__globals__, "has_torch_function": _never}
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


opened_attention = _opened(F.multi_head_attention_forward)
opened_backward = _opened(torch.autograd.backward)
