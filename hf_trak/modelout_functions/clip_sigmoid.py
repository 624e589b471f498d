"""Image-text models trained with the sigmoid loss (SigLIP, arXiv 2303.15343).

That loss classifies every image with every text separately. With a = s φ·ψ + b for the similarity of the pair, b the
model's bias, and a_j = s φ·ψ_j + b, a'_j = s φ_j·ψ + b for the simulated negatives j ∈ B, the loss of a pair is

    L = softplus(−a) + ½ Σ_j [softplus(a_j) + softplus(a'_j)]

Each product of a pair with another one belongs to both, hence the half: summed over a batch in which each pair's
negatives are the other pairs, L is the batch's loss times its size. e^(−L) is the probability of classifying all of
them correctly, and TRAK's formula for a probability p (arXiv 2303.14186, Section 3.3) gives

    f = log(p / (1 − p)) = −log(e^L − 1)        q = 1 − p = 1 − e^(−L) = −∂L/∂f

s and b are constants in f, as f of the softmax loss has no scale: the towers are what is attributed.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from hf_trak.modelout_functions.base import Batch, Side, Tensors, call_model
from hf_trak.modelout_functions.clip import CLIPModelOutput, parameter_of, read_output
from hf_trak.weights.watch import model_tensors

_SMALL = -15.0
"""Below it softplus(x) and eˣ are the same in float32."""


class SigLIPModelOutput(CLIPModelOutput):
    """The task `siglip`: f and q of the sigmoid loss, for `SiglipModel` and open_clip models with a `logit_bias`.

    Batches, negatives and arguments are those of [`CLIPModelOutput`]. `temperature` replaces the model's scale s in f
    as well; the bias is always the model's.
    """

    def get_output(  # type: ignore[override]  # the base class offers it on the class too
        self, model: torch.nn.Module, weights: Tensors | None, buffers: Tensors | None, image: Tensor, label: Tensor
    ) -> Tensor:
        kwargs = {"image": image.unsqueeze(0), "text": label.unsqueeze(0)}
        found = call_model(model, weights, buffers, (), kwargs)
        return _minus_log_expm1(self._log_loss(found, {**model_tensors(model), **(weights or {})})).squeeze(0)

    def output(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        return _minus_log_expm1(self._log_loss(model_output, self._bound_tensors()))

    def _error_probability(self, model_output: Any, tensors: Mapping[str, Tensor] | None) -> Tensor:
        self._check_weights(tensors)
        return -torch.expm1(-self._log_loss(model_output, tensors).detach().exp())

    def _log_loss(self, model_output: Any, tensors: Mapping[str, Tensor] | None) -> Tensor:
        """Compute log L of every pair, `(B,)`: L itself underflows in float32 where the model is certain."""
        image, text, scale = read_output(model_output)
        image_negatives, text_negatives = self._negatives_like(image)
        scale = self._scale(scale, tensors).to(image.device)
        if (bias := parameter_of(tensors, "logit_bias")) is None:
            raise ValueError(
                "The model has no parameter `logit_bias` (or it no longer exists). Expected one, as models trained "
                "with the sigmoid loss have it. For a model trained with the softmax loss use the task 'clip'."
            )
        # The products of an autocast region would be rounded to half precision.
        with torch.autocast(image.device.type, enabled=False):
            image, text, bias = image.float(), text.float(), bias.to(image.device)
            true = scale * (image * text).sum(dim=-1, keepdim=True) + bias
            over_texts = scale * image @ text_negatives.T + bias
            over_images = scale * text @ image_negatives.T + bias
            halves = _log_softplus(torch.cat([over_texts, over_images], dim=-1)) - math.log(2.0)
            return torch.cat([_log_softplus(-true), halves], dim=-1).logsumexp(dim=-1)


def _log_softplus(x: Tensor) -> Tensor:
    """Compute log softplus(x), which tends to x on the left and to log x on the right; its gradient is finite."""
    return torch.where(x < _SMALL, x, softplus(x.clamp(min=_SMALL)).log())


def _minus_log_expm1(log_loss: Tensor) -> Tensor:
    """Compute −log(e^L − 1) from log L, which tends to −log L for small L and to −L for large L."""
    small, large = log_loss < _SMALL, log_loss > 3.0
    middle = log_loss.clamp(_SMALL, 3.0).exp().expm1().log()
    far = log_loss.clamp(min=3.0).exp()
    return -torch.where(small, log_loss, torch.where(large, far + torch.log1p(-torch.exp(-far)), middle))
