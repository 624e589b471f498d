"""Normalization layers: y = w ∘ x̂ + b, so dw[b] = Σ_t grad ∘ x̂ and db[b] = Σ_t grad."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from hf_trak.gradient_computers.hooked.rules.registry import LayerCall, over_tokens, register_layer_rule


def scale_and_shift(normalized: Tensor, grad: Tensor, trailing: int) -> dict[str, Tensor]:
    """Compute the gradients of a scale and a shift over the last `trailing` dimensions."""
    return {"weight": over_tokens(grad * normalized, trailing), "bias": over_tokens(grad, trailing)}


def channel_scale_and_shift(normalized: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """Compute the gradients of a scale and a shift per channel (dimension 1), `(N, C)` each."""
    product = grad * normalized
    if grad.ndim > 2:
        return {"weight": product.flatten(2).sum(2), "bias": grad.flatten(2).sum(2)}
    return {"weight": product, "bias": grad}


@register_layer_rule(nn.LayerNorm)
def layer_norm(call: LayerCall) -> dict[str, Tensor]:
    """Compute the gradients of scale and shift with x̂ over the last dimensions."""
    module = call.module
    shape = list(module.normalized_shape)
    normalized = F.layer_norm(call.x, shape, None, None, module.eps)
    return scale_and_shift(normalized, call.grad, len(shape))


@register_layer_rule(nn.RMSNorm, parameters=("weight",))
def rms_norm(call: LayerCall) -> dict[str, Tensor]:
    """Compute the gradients of scale and shift with x̂ = x / rms(x) over the last dimensions."""
    module = call.module
    shape = list(module.normalized_shape)
    normalized = F.rms_norm(call.x, shape, None, module.eps)
    return scale_and_shift(normalized, call.grad, len(shape))


@register_layer_rule(nn.GroupNorm, rows=True)
def group_norm(call: LayerCall) -> dict[str, Tensor]:
    """Compute the gradients of scale and shift with x̂ over groups of channels."""
    module = call.module
    normalized = F.group_norm(call.x, module.num_groups, None, None, module.eps)
    return channel_scale_and_shift(normalized, call.grad)


def _evaluating(module: nn.Module) -> bool:
    return not module.training and getattr(module, "running_mean", None) is not None


@register_layer_rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, rows=True, applies=_evaluating)
def batch_norm(call: LayerCall) -> dict[str, Tensor]:
    """Compute the gradients of scale and shift with x̂ from the running statistics, so that samples do not mix."""
    module = call.module
    mean, variance = module.running_mean, module.running_var
    return running_scale_and_shift(call.x, call.grad, mean, variance, module.eps)


def running_scale_and_shift(x: Tensor, grad: Tensor, mean: Tensor, variance: Tensor, eps: float) -> dict[str, Tensor]:
    """Compute dw = (Σ grad·x − mean Σ grad) / √(variance + ε) and db. With constant statistics x̂ is not formed."""
    if grad.ndim > 2:
        shift = grad.flatten(2).sum(2)
        product = (grad * x).flatten(2).sum(2)
    else:
        shift, product = grad, grad * x
    return {"weight": (product - mean * shift) * torch.rsqrt(variance + eps), "bias": shift}


@register_layer_rule(
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, rows=True, applies=lambda m: not m.track_running_stats
)
def instance_norm(call: LayerCall) -> dict[str, Tensor]:
    """Compute the gradients of scale and shift with x̂ over the positions of each channel."""
    module = call.module
    return channel_scale_and_shift(F.instance_norm(call.x, eps=module.eps), call.grad)
