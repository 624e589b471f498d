"""The attributed output, from logits: a sum of margins (TRAK paper, Park et al. 2023, Section 3)."""

import torch
from torch import Tensor

IGNORED = -100


def label_tokens(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits `(B, t, C)`, labels and their validity `(B, t)`, beside each other.

    A classifier, logits `(B, C)`, predicts one label; a causal language model, logits `(B, T, C)`, every token from
    those before it.
    """
    if logits.ndim == 2:
        return logits[:, None], labels[:, None], torch.ones_like(labels[:, None], dtype=torch.bool)
    following = labels[:, 1:]
    return logits[:, :-1], following.clamp_min(0), following != IGNORED


def margins(logits: Tensor, labels: Tensor) -> Tensor:
    """f: Σ over labels of logit − logsumexp of the other logits, `(B,)`."""
    logits, labels, valid = label_tokens(logits, labels)
    own = logits.gather(-1, labels[..., None])[..., 0]
    others = logits.scatter(-1, labels[..., None], -torch.inf).logsumexp(-1)
    return ((own - others) * valid).sum(1)


def losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Σ over labels of the cross-entropy, `(B,)`."""
    logits, labels, valid = label_tokens(logits, labels)
    own = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    return -(own * valid).sum(1)


def probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over labels of the label's probability, `(B,)`; TRAK's q is 1 − this."""
    logits, labels, valid = label_tokens(logits, labels)
    own = logits.softmax(-1).gather(-1, labels[..., None])[..., 0]
    return (own * valid).sum(1) / valid.sum(1).clamp_min(1)
