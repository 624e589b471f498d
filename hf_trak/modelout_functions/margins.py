"""Margins, probabilities and likelihoods of classification outputs, in a form that neither overflows nor cancels.

With m = logit_y − logsumexp(other logits):

    p_y = sigmoid(m)        log(p_y / (1 − p_y)) = m        1 − p_y = sigmoid(−m)        log p_y = −softplus(−m)

so everything follows from m, and 1 − p is never formed. (`log p − log(1 − p)` is infinite from m ≈ 17 in float32 and
from m ≈ 6 in bfloat16.) Half-precision logits are widened to float32 first. All functions run under `torch.func.vmap`
and `torch.func.grad`: there is no indexing by values and no `.item()`.
"""

import torch
from torch import Tensor


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute log(p_y / (1 − p_y)) of every sample (TRAK paper, arXiv 2303.14186, Section 3.3).

    Args:
        logits: `(B, C)`, floating point, C ≥ 2.
        labels: `(B,)`, integers in [0, C). Their values are not checked here; see `batches.check_labels`.

    Returns:
        `(B,)`, float32 (float64 for float64 logits), differentiable.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    is_label = torch.arange(logits.shape[-1], device=logits.device) == labels.unsqueeze(-1)
    correct = torch.where(is_label, logits, 0.0).sum(dim=-1)
    return correct - logits.masked_fill(is_label, -torch.inf).logsumexp(dim=-1)


def error_probability(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Compute q = 1 − softmax(logits / T)_y, exact to rounding however close to 1 the probability is. Shape `(B,)`."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.sigmoid(-margin(logits / temperature, labels))


def log_likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute log p_y of every sample, minus its cross-entropy loss. Shape `(B,)`."""
    return torch.nn.functional.logsigmoid(margin(logits, labels))
