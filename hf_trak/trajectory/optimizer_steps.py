"""One step of an optimizer, forwards, and backwards for the derivatives of many targets.

With g the gradient of a batch, κ its factor by clipping, m and v the moments, and t the number of steps taken with
this one, Adam goes from θ to

    m' = β₁m + (1 − β₁)κg        v' = β₂v + (1 − β₂)(κg)²        c₁ = 1 − β₁ᵗ, c₂ = 1 − β₂ᵗ
    θ' = (1 − ηλ)θ − η(m'/c₁)/D        D = s + ε, s = √(v'/c₂ + r)

where r = 0. Backwards, with a, b, c the derivatives of a target by θ', m', v',

    b ← b − aη/(c₁D)        c ← c + aη(m'/c₁)/(2c₂sD²)
    γ = (1 − β₁)b + 2(1 − β₂)κg∘c,  and where clipping acted γ ← κ(γ − ĝ⟨ĝ, γ⟩)
    (a, b, c) ← ((1 − ηλ)a + Hγ, β₁b, β₂c)

γ is the derivative by g, and a weight w_i of row i in the loss gets ⟨∇ℓ_i, γ⟩/N of it. H is the Hessian of the
batch's loss. Whoever walks the run computes both, with γ from [`OptimizerStep.backward`], and adds Hγ to a.

*Smoothing.* The first updates of Adam are nearly sign(g), whose derivative is zero almost everywhere, while the
response to leaving rows out is not. So r is κ/t times the moving average of the variance of g, bias-corrected like v:
the derivative of the update's mean over batches like this one, for κ = 1. A single row may change g by as much as a
batch does that is drawn anew, and a smaller κ says too much of it. It acts in the backward direction alone.

Everything is a flat vector over the trainable parameters, `(P,)`, or one per target, `(m, P)`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Number = float | Tensor
"""One number for all parameters, or one for each, `(P,)`."""

SMOOTHING = 1.0
"""κ. A tenth predicts the removal of 1 % at random as well, and exaggerates the largest scores without warmup."""

_SLICE = 2**20
"""Parameters that are worked on at a time: factors are computed in float64, and need not all exist at once."""

_NORM_EPS = 1e-6
"""What `torch.nn.utils.clip_grad_norm_` adds to a norm."""


@dataclass(frozen=True)
class Moments:
    """The state of an optimizer after some steps.

    Attributes:
        first (`torch.Tensor`): m, or the momentum of SGD: `(P,)`.
        second (`torch.Tensor`): v, `(P,)`. Zero for SGD.
        noise (`torch.Tensor`): the moving average of the variance of g, `(P,)`, with the decay of v. Zero for SGD.
        steps (`int`): t, the number of steps taken.
    """

    first: Tensor
    second: Tensor
    noise: Tensor
    steps: int = 0

    @classmethod
    def start(cls, weights: Tensor) -> "Moments":
        """Make the state before the first step, in the dtype and on the device of weights `(P,)`."""
        zero = torch.zeros_like(weights)
        return cls(zero, zero, zero)


@dataclass
class Cotangents:
    """The derivatives of m targets by weights and moments, which a step backwards changes in place.

    Attributes:
        weights (`torch.Tensor`): a, `(m, P)`.
        first (`torch.Tensor`): b, `(m, P)`.
        second (`torch.Tensor`): c, `(m, P)`.
    """

    weights: Tensor
    first: Tensor
    second: Tensor

    @classmethod
    def of(cls, gradients: Tensor) -> "Cotangents":
        """Begin after the last step, with the gradients of the targets by the last weights, `(m, P)`."""
        return cls(gradients.clone(), torch.zeros_like(gradients), torch.zeros_like(gradients))


@dataclass(frozen=True, kw_only=True)
class OptimizerStep(ABC):
    """The numbers of one step. Subclasses are the update rules.

    Attributes:
        rate: η, the learning rate.
        decay: λ, the weight decay.
        max_norm: the norm to which gradients are clipped; `None` for no clipping.
        together: the number of steps of the run that are taken back as one, with the sum of their rates. Moments are
            those after the last of them.
    """

    rate: Number
    decay: Number = 0.0
    max_norm: float | None = None
    together: int = 1

    def share(self, gradient: Tensor) -> float:
        """Return κ, the factor of a gradient `(P,)` by clipping."""
        return 1.0 if self.max_norm is None else min(1.0, self.max_norm / (_norm(gradient) + _NORM_EPS))

    @abstractmethod
    def forward(
        self, weights: Tensor, moments: Moments, gradient: Tensor, variance: Tensor | None = None
    ) -> tuple[Tensor, Moments]:
        """Take the step.

        Args:
            weights: θ, `(P,)`.
            moments: the state before the step.
            gradient: g before clipping, `(P,)`.
            variance: the variance of g, that of the rows' gradients divided by their number: `(P,)`. `None` for no
                smoothing.

        Returns:
            θ' and the state after the step.
        """

    @abstractmethod
    def backward(self, cotangents: Cotangents, moments: Moments, gradient: Tensor, weights: Tensor) -> Tensor:
        """Take the derivatives of the targets back through the step, but for the curvature of the loss.

        Args:
            cotangents: those after the step, changed into those before it. Hγ is left to be added to `weights`.
            moments: the state *after* the step.
            gradient: g before clipping, `(P,)`.
            weights: θ, `(P,)`, which counts where weight decay is a part of the gradient.

        Returns:
            γ, the derivatives by g: `(m, P)`.
        """

    def settled(self, weights: Tensor, mean: Tensor, variance: Tensor, steps: int) -> Moments:
        """Return the expected state after some steps at the same weights.

        Args:
            weights: θ, `(P,)`.
            mean: the mean of g, `(P,)`.
            variance: the variance of g, `(P,)`.
            steps: t.
        """
        return replace(Moments.start(weights), steps=steps)  # SGD's momentum counts in no derivative

    def _unclipped(self, gamma: Tensor, gradient: Tensor) -> Tensor:
        """Take the derivatives by the clipped gradient, in place, to those by the gradient."""
        share = self.share(gradient)
        if share == 1.0:
            return gamma
        norm = _norm(gradient)
        for one in gamma:
            along = float(one.double() @ gradient.double()) / (norm * (norm + _NORM_EPS))
            one.sub_(gradient.to(one.dtype), alpha=along).mul_(share)
        return gamma


@dataclass(frozen=True, kw_only=True)
class AdamStep(OptimizerStep):
    """A step of AdamW, or of Adam, whose weight decay is a part of the gradient.

    Attributes:
        beta1, beta2, eps: as in `torch.optim.AdamW`.
        decoupled: whether weights decay beside the gradient.
        smoothing: the factor of the variance in r.
    """

    beta1: Number = 0.9
    beta2: Number = 0.999
    eps: Number = 1e-8
    decoupled: bool = True
    smoothing: float = SMOOTHING

    def forward(
        self, weights: Tensor, moments: Moments, gradient: Tensor, variance: Tensor | None = None
    ) -> tuple[Tensor, Moments]:
        share, steps = self.share(gradient), moments.steps + 1
        effective = gradient * share
        if not self.decoupled:
            effective = effective + self.decay * weights
        first = self.beta1 * moments.first + (1 - self.beta1) * effective
        second = self.beta2 * moments.second + (1 - self.beta2) * effective.square()
        noise = moments.noise
        if variance is not None:
            noise = self.beta2 * noise + (1 - self.beta2) * share**2 * variance
        scale = (second / (1 - self.beta2**steps)).sqrt() + self.eps
        kept = weights * (1 - self.rate * self.decay) if self.decoupled else weights
        return kept - self.rate / (1 - self.beta1**steps) * first / scale, Moments(first, second, noise, steps)

    def settled(self, weights: Tensor, mean: Tensor, variance: Tensor, steps: int) -> Moments:
        mean = mean if self.decoupled else mean + self.decay * weights
        noise = (1 - self.beta2**steps) * variance
        return Moments((1 - self.beta1**steps) * mean, (1 - self.beta2**steps) * mean.square() + noise, noise, steps)

    def backward(self, cotangents: Cotangents, moments: Moments, gradient: Tensor, weights: Tensor) -> Tensor:
        share, t = self.share(gradient), moments.steps
        gamma = torch.empty_like(cotangents.weights)
        for part in _slices(gamma.shape[1]):
            a, b, c = (one[:, part] for one in (cotangents.weights, cotangents.first, cotangents.second))
            rate, decay, beta1, beta2, eps = (
                _of(number, part) for number in (self.rate, self.decay, self.beta1, self.beta2, self.eps)
            )
            correction1, correction2 = 1 - beta1**t, 1 - beta2**t
            beta1, beta2 = beta1**self.together, beta2**self.together
            effective = gradient[part].double() * share
            if not self.decoupled:
                effective += decay * weights[part].double()
            smooth = self.smoothing / t * moments.noise[part].double()
            root = ((moments.second[part].double() + smooth) / correction2).sqrt()
            scale = root + eps
            # b and c get parts whose shares in γ nearly cancel where an update is nearly a sign. So this step's are
            # taken together, in float64 and once for all targets, before they are added to what steps behind left.
            direct = a * (rate / (correction1 * scale)).to(a)
            second = torch.where(root > 0, moments.first[part].double() / (2 * correction2 * root * scale), 0.0)
            both = 2 * (1 - beta2) * effective * second - (1 - beta1)
            found = b * _like(1 - beta1, b) + c * (2 * (1 - beta2) * effective).to(c) + direct * both.to(a)
            gamma[:, part] = found
            b.sub_(direct).mul_(_like(beta1, b))
            c.add_(direct.mul_(second.to(c))).mul_(_like(beta2, c))
            a.mul_(_like(1 - rate * decay, a)) if self.decoupled else a.add_(found * _like(decay, a))
        return self._unclipped(gamma, gradient)


@dataclass(frozen=True, kw_only=True)
class SgdStep(OptimizerStep):
    """A step of SGD. Weight decay is a part of the gradient.

    Attributes:
        momentum, dampening, nesterov: as in `torch.optim.SGD`. Its first step has no dampening.
    """

    momentum: Number = 0.0
    dampening: Number = 0.0
    nesterov: bool = False

    def forward(
        self, weights: Tensor, moments: Moments, gradient: Tensor, variance: Tensor | None = None
    ) -> tuple[Tensor, Moments]:
        effective = gradient * self.share(gradient) + self.decay * weights
        entering = 1.0 if moments.steps == 0 else 1 - self.dampening
        first = self.momentum * moments.first + entering * effective
        direction = effective + self.momentum * first if self.nesterov else first
        return weights - self.rate * direction, Moments(first, moments.second, moments.noise, moments.steps + 1)

    def backward(self, cotangents: Cotangents, moments: Moments, gradient: Tensor, weights: Tensor) -> Tensor:
        entering = 1.0 if moments.steps == 1 else 1 - self.dampening
        gamma = torch.empty_like(cotangents.weights)
        for part in _slices(gamma.shape[1]):
            a, b = cotangents.weights[:, part], cotangents.first[:, part]
            rate, decay, momentum, share = (_of(one, part) for one in (self.rate, self.decay, self.momentum, entering))
            if self.together > 1:  # what enters the momentum in all of the steps, of which each keeps a part
                share = share * (1 - momentum**self.together) / (1 - momentum)
            direct = a * _like(rate, a)
            b.sub_(direct * _like(momentum, a) if self.nesterov else direct)
            found = b * _like(share, a)
            if self.nesterov:
                found -= direct
            gamma[:, part] = found
            b.mul_(_like(momentum**self.together, a))
            a.add_(found * _like(decay, a))
        return self._unclipped(gamma, gradient)


def _norm(gradient: Tensor) -> float:
    return float(gradient.double().norm())


def _slices(count: int) -> Iterator[slice]:
    for start in range(0, count, _SLICE):
        yield slice(start, min(count, start + _SLICE))


def _of(number: Number, part: slice) -> Number:
    return number[part].double() if isinstance(number, Tensor) else number


def _like(number: Number, other: Tensor) -> Number:
    return number.to(other) if isinstance(number, Tensor) else number
