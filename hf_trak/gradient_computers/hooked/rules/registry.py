"""The registry of layer rules: functions that compute the per-sample gradients of one layer from its input and its
output gradient.

A rule for a layer type of your own:

    @register_layer_rule(Scale, parameters=("scale",))
    def scale_rule(call):
        # y[b, ..., d] = scale[d] · x[b, ..., d]
        return {"scale": over_tokens(call.grad * call.x)}

The self-check of the engine compares it with plain autograd on the first batch.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from hf_trak._compat import has_foreign_forward, own_parameters
from hf_trak.gradient_computers.hooked.workspace import OuterBlock, TakesOuter, Workspace

Piece = tuple[str, int, Tensor | OuterBlock]
"""`(name, start, block)`: columns `start … start + n` of the flattened parameter `name`, for every sample: `(B,
n)`."""


@dataclass
class LayerCall:
    """One call of a layer in the batched forward pass.

    Attributes:
        module (`torch.nn.Module`): the layer, of a type that the rule is registered for.
        x (`torch.Tensor`): its first input, `(B, *)`, detached.
        grad (`torch.Tensor`): gradient of Σ_i f_i with respect to its output, `(B, *)`.
        wanted (`frozenset[str]`): names of the layer's own parameters that are attributed.
        workspace (`Workspace`): scratch memory for rules that give their result in slices.
        takes_outer (`Callable`, *optional*): predicate on two factors: pass this gradient on as factors instead of a
            dense block? `None` always forms the block.
    """

    module: Any
    x: Tensor
    grad: Tensor
    wanted: frozenset[str]
    workspace: Workspace
    takes_outer: TakesOuter | None = None


RuleResult = Mapping[str, Tensor] | Iterable[Piece]
LayerRule = Callable[[LayerCall], RuleResult]
"""Returns a dict of `(B, *shape)` by parameter name, or an iterable of [`Piece`]s for parameters cut into slices."""


@dataclass(frozen=True)
class RegisteredRule:
    """A rule and its conditions.

    Attributes:
        rule: the function.
        parameters: names of the parameters that it covers.
        rows: whether the layer takes exactly one leading dimension (convolutions, batch and group norms). Where a
            model folds further dimensions into it (windows, frames), the rule sees them as rows, and the engine adds
            up the rows of a sample.
        applies: a condition on the layer; `None` for always.
        on_host: whether the rule takes the layer's input in host memory, because its values decide which blocks exist.
            A copy is on its way from the forward pass on, so that nothing waits for the device.
    """

    rule: LayerRule
    parameters: frozenset[str]
    rows: bool
    applies: Callable[[nn.Module], bool] | None
    on_host: bool = False


_RULES: dict[type[nn.Module], RegisteredRule] = {}


def register_layer_rule(
    *types: type[nn.Module],
    parameters: Iterable[str] = ("weight", "bias"),
    rows: bool = False,
    applies: Callable[[nn.Module], bool] | None = None,
    on_host: bool = False,
) -> Callable[[LayerRule], LayerRule]:
    """Decorate a function that is the rule of these layer types, and of subclasses that keep their `forward`.

    Args:
        types (`type[torch.nn.Module]`): the layer types. A later registration replaces an earlier one.
        parameters (`Iterable[str]`, *optional*, defaults to `("weight", "bias")`): names of the layer's own parameters
            that the rule covers. A layer with another attributed one, or without one of these, goes without the
            rule.
        rows (`bool`, *optional*, defaults to `False`): whether the layer takes exactly one leading dimension, as
            convolutions do. A model that folds frames or windows into the batch dimension then still gets one
            gradient per sample.
        applies (`Callable`, *optional*): a condition on the layer, such as on its options. `None` applies the rule
            always.
        on_host (`bool`, *optional*, defaults to `False`): whether the rule takes `call.x` in host memory.

    Returns:
        `Callable`: the decorator, which returns the function as it is.
    """

    def decorator(rule: LayerRule) -> LayerRule:
        for layer_type in types:
            _RULES[layer_type] = RegisteredRule(rule, frozenset(parameters), rows, applies, on_host)
        return rule

    return decorator


def unregister_layer_rule(*types: type[nn.Module]) -> None:
    """Forget the rules of these layer types.

    Raises:
        KeyError: one of them has no rule.
    """
    for layer_type in types:
        del _RULES[layer_type]


def find_rule(module: nn.Module, wanted: frozenset[str]) -> RegisteredRule | None:
    """Find the rule for a layer.

    Args:
        module: the layer.
        wanted: names of its own parameters that are attributed.

    Returns:
        The rule, or `None` if none is exact for the layer: a subclass with a `forward` of its own, a parametrized
        layer (weight norm), or one whose attributed parameters are not all covered has no rule, whatever its base
        class.
    """
    if parametrize.is_parametrized(module) or has_foreign_forward(module):
        return None
    for base in type(module).__mro__:
        registered = _RULES.get(base)
        if registered is None:
            continue
        if type(module).forward is not getattr(base, "forward", None) or not wanted <= registered.parameters:
            return None
        if not registered.parameters <= own_parameters(module).keys():
            return None
        return registered if registered.applies is None or registered.applies(module) else None
    return None


def pieces_of(result: RuleResult) -> Iterator[Piece]:
    """Yield the pieces of a rule's result, whichever of its two forms it has."""
    if isinstance(result, Mapping):
        for name, gradient in result.items():
            yield name, 0, gradient.reshape(gradient.shape[0], -1)
    else:
        yield from result


def common(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Convert the input to the dtype of the gradient: under autocast, the dtype in which the layer computed."""
    return x.to(grad.dtype), grad


def over_tokens(values: Tensor, trailing: int = 1) -> Tensor:
    """Sum over all dimensions between the batch dimension and the last `trailing` ones: `(B, *trailing)`."""
    between = tuple(range(1, values.ndim - trailing))
    return values.sum(between) if between else values
