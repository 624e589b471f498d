"""Steps backwards, against finite differences through a training loop that is written out with `torch.optim`."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.func import functional_call, grad, jvp, vmap

from hf_trak.trajectory.optimizer_steps import AdamStep, Cotangents, Moments, OptimizerStep, SgdStep

ROWS, BATCH, EPOCHS, RATE = 12, 4, 4, 0.02
STEPS = ROWS // BATCH * EPOCHS


class Run:
    """A tiny network trained with a weight for each row, by `torch.optim` or by the steps of the library."""

    def __init__(self, dtype=torch.float64):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).to(dtype)
        self.names = [name for name, _ in self.model.named_parameters()]
        self.start = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        self.x, self.y = torch.randn(ROWS, 5, dtype=dtype), torch.randint(3, (ROWS,))
        self.new, self.label = torch.randn(2, 5, dtype=dtype), torch.tensor([0, 2])
        generator = torch.Generator().manual_seed(1)
        orders = [torch.randperm(ROWS, generator=generator).view(-1, BATCH) for _ in range(EPOCHS)]
        self.batches = [batch for order in orders for batch in order]
        self.numel = sum(value.numel() for value in self.start.values())
        self.is_bias = torch.cat([torch.full((self.start[n].numel(),), n.endswith("bias")) for n in self.names])

    def loss(self, flat, x, y):
        return torch.nn.functional.cross_entropy(functional_call(self.model, self.named(flat), (x[None],)), y[None])

    def mean_gradient(self, batch, flat):
        return grad(lambda flat: vmap(self.loss, (None, 0, 0))(flat, self.x[batch], self.y[batch]).mean())(flat)

    def named(self, flat):
        sizes = [self.start[name].numel() for name in self.names]
        return {n: part.view_as(self.start[n]) for n, part in zip(self.names, flat.split(sizes), strict=True)}

    def flat(self, named):
        return torch.cat([named[name].flatten() for name in self.names])

    def trained(self, optimizer, schedule, weights, max_norm=None):
        """Train by hand, and return the outputs of the two targets."""
        with torch.no_grad():
            for name, value in self.model.named_parameters():
                value.copy_(self.start[name])
        made = optimizer(self.model)
        rates = [group["lr"] for group in made.param_groups]
        for step, batch in enumerate(self.batches):
            for group, rate in zip(made.param_groups, rates, strict=True):
                group["lr"] = rate * schedule(step)
            losses = torch.nn.functional.cross_entropy(self.model(self.x[batch]), self.y[batch], reduction="none")
            made.zero_grad()
            (losses @ weights[batch] / BATCH).backward()
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
            made.step()
        with torch.no_grad():
            return -torch.nn.functional.cross_entropy(self.model(self.new), self.label, reduction="none")

    def states(self, rule: OptimizerStep, schedule, smooth):
        """Take the steps of the library, and list weights before, gradient, and state after each."""
        theta, found = self.flat(self.start), []
        moments = Moments.start(theta)
        for step, batch in enumerate(self.batches):
            rows = vmap(grad(self.loss), (None, 0, 0))(theta, self.x[batch], self.y[batch])
            gradient, variance = rows.mean(0), rows.var(0, correction=0) / BATCH if smooth else None
            now = replace(rule, rate=rule.rate * schedule(step))
            after, moments = now.forward(theta, moments, gradient, variance)
            found.append((now, theta, gradient, moments, batch))
            theta = after
        return theta, found

    def scores(self, rule: OptimizerStep, schedule=lambda step: 1.0, smooth=False, dtype=None):
        """Walk back through the run: the derivative of every target by every row's weight, `(ROWS, 2)`."""
        theta, states = self.states(rule, schedule, smooth)
        cotangents = Cotangents.of(-vmap(grad(self.loss), (None, 0, 0))(theta, self.new, self.label))
        if dtype is not None:
            cotangents = Cotangents.of(cotangents.weights.to(dtype))
        scores = torch.zeros(ROWS, 2, dtype=torch.float64)
        for now, theta, gradient, moments, batch in reversed(states):
            if dtype is not None:
                kept = (moments.first.to(dtype), moments.second.to(dtype), moments.noise.to(dtype))
                moments, gradient = Moments(*kept, moments.steps), gradient.to(dtype)
            gamma = now.backward(cotangents, moments, gradient, theta).to(theta.dtype)
            rows = vmap(grad(self.loss), (None, 0, 0))(theta, self.x[batch], self.y[batch])
            scores[batch] += rows @ gamma.T / BATCH
            curved = torch.stack([jvp(partial(self.mean_gradient, batch), (theta,), (one,))[1] for one in gamma])
            cotangents.weights += curved.to(cotangents.weights.dtype)
        return scores

    def differences(self, optimizer, schedule=lambda step: 1.0, max_norm=None, step=1e-5):
        """Measure the same derivatives by training again, with one row's weight a little larger and smaller."""
        found = torch.zeros(ROWS, 2, dtype=torch.float64)
        for row in range(ROWS):
            weights = torch.ones(ROWS, dtype=torch.float64)
            weights[row] = 1 + step
            above = self.trained(optimizer, schedule, weights, max_norm)
            weights[row] = 1 - step
            found[row] = (above - self.trained(optimizer, schedule, weights, max_norm)) / (2 * step)
        return found


def decay_groups(run, decay):
    """Decay and twice the rate for matrices, no decay and the rate for biases."""
    pairs = {"rate": (2 * RATE, RATE), "decay": (decay, 0.0)}
    numbers = {name: torch.tensor(pair, dtype=torch.float64)[run.is_bias.long()] for name, pair in pairs.items()}

    def groups(model):
        named = dict(model.named_parameters())
        biases = [value for name, value in named.items() if name.endswith("bias")]
        others = [value for name, value in named.items() if not name.endswith("bias")]
        return [{"params": others, "weight_decay": decay, "lr": 2 * RATE}, {"params": biases, "weight_decay": 0.0}]

    return groups, numbers


def linear(step):
    return 1 - step / STEPS


def warmup(step):
    return min(1.0, (step + 1) / 4) * linear(step)


CASES = {
    "adamw": (AdamStep, torch.optim.AdamW, {}, {"eps": 1e-3}, {"eps": 1e-3}, None, linear),
    "adamw, clipped": (
        AdamStep, torch.optim.AdamW, {}, {"betas": (0.8, 0.95)}, {"beta1": 0.8, "beta2": 0.95}, 0.2, warmup
    ),
    "adam, decay in the gradient": (
        AdamStep, torch.optim.Adam, {"decoupled": False}, {"eps": 1e-4}, {"eps": 1e-4}, 0.2, linear
    ),
    "sgd": (SgdStep, torch.optim.SGD, {}, {}, {}, None, linear),
    "sgd, momentum": (
        SgdStep, torch.optim.SGD, {}, {"momentum": 0.8, "dampening": 0.3}, {"momentum": 0.8, "dampening": 0.3}, 0.2,
        warmup,
    ),
    "sgd, nesterov": (
        SgdStep, torch.optim.SGD, {"nesterov": True}, {"momentum": 0.8, "nesterov": True}, {"momentum": 0.8}, 0.3,
        linear,
    ),
}  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize("case", CASES)
def test_derivatives_are_those_of_training_again(case):
    rule, optimizer, fixed, given, own, max_norm, schedule = CASES[case]
    run = Run()
    groups, numbers = decay_groups(run, 0.1)
    step = rule(**numbers, **fixed, **own, max_norm=max_norm)
    measured = run.differences(lambda model: optimizer(groups(model), lr=RATE, **given), schedule, max_norm)
    found = run.scores(step, schedule)
    assert measured.abs().max() > 1e-3
    torch.testing.assert_close(found, measured, rtol=1e-6, atol=1e-6 * float(measured.abs().max()))
    if max_norm is not None:  # clipping acted, and takes part
        assert all(one[0].share(one[2]) < 1 for one in run.states(step, schedule, False)[1][:2])
        assert not torch.allclose(run.scores(replace(step, max_norm=None), schedule), measured, rtol=1e-2)


@pytest.mark.parametrize("case", CASES)
def test_steps_forward_are_those_of_torch(case):
    rule, optimizer, fixed, given, own, max_norm, schedule = CASES[case]
    run = Run()
    groups, numbers = decay_groups(run, 0.1)
    run.trained(
        lambda model: optimizer(groups(model), lr=RATE, **given), schedule, torch.ones(ROWS).double(), max_norm
    )
    expected = run.flat({name: value.detach() for name, value in run.model.named_parameters()})
    found, _ = run.states(rule(**numbers, **fixed, **own, max_norm=max_norm), schedule, False)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("smooth", [False, True])
def test_cotangents_in_single_precision_lose_nothing(smooth):
    run = Run()
    step = AdamStep(rate=RATE, decay=0.1)
    whole = run.scores(step, linear, smooth)
    single = run.scores(step, linear, smooth, torch.float32)
    assert float((single - whole).norm() / whole.norm()) < 2e-5


def test_first_step_has_the_derivative_of_a_sign_unless_it_is_smoothed():
    # One step of Adam from zero moments is g / (|g| + ε): its derivative by g is ηε / (|g| + ε)², some 1e-8 of η/|g|.
    gradient = torch.tensor([0.3, -0.02, 5.0, 0.0])
    step = AdamStep(rate=1.0)
    _, moments = step.forward(torch.zeros(4), Moments.start(torch.zeros(4)), gradient)
    gamma = step.backward(Cotangents.of(torch.ones(1, 4)), moments, gradient, torch.zeros(4))[0]
    exact = -1e-8 / (gradient.double().abs() + 1e-8) ** 2
    torch.testing.assert_close(gamma[:3].double(), exact[:3], rtol=0, atol=1e-6)
    _, moments = step.forward(torch.zeros(4), Moments.start(torch.zeros(4)), gradient, gradient.square())
    gamma = step.backward(Cotangents.of(torch.ones(1, 4)), moments, gradient, torch.zeros(4))[0]
    # s = |g|√2, so −(1/D)(1 − |g|²/(s D))
    torch.testing.assert_close(gamma[:3], -(1 - 1 / 2) / (2**0.5 * gradient[:3].abs()), rtol=1e-5, atol=0)


def test_a_row_of_a_large_gradient_is_predicted_best_by_the_whole_variance():
    # The truth is the first step of Adam itself, with a row and without it, for targets of any direction.
    torch.manual_seed(0)
    rows = torch.randn(30, 2000, dtype=torch.float64) + 0.05
    rows[0] *= 5
    parts, targets, zero = rows / len(rows), torch.randn(300, 2000, dtype=torch.float64), torch.zeros(2000).double()
    gradient = parts.sum(0)
    variance = parts.square().sum(0) - gradient.square() / len(rows)

    def agreement(step: AdamStep) -> float:
        reached, moments = step.forward(zero, Moments.start(zero), gradient, variance)
        without = step.forward(zero, Moments.start(zero), gradient - parts[0], variance)[0]
        predicted = step.backward(Cotangents.of(targets), moments, gradient, zero) @ parts[0]
        return float(torch.corrcoef(torch.stack([predicted, targets @ (reached - without)]))[0, 1])

    found = agreement(AdamStep(rate=1e-3))
    assert found > 0.65
    assert all(agreement(AdamStep(rate=1e-3, smoothing=other)) < found - 0.05 for other in (0.0, 0.1, 10.0))


def test_targets_do_not_change_each_other():
    run = Run()
    step = AdamStep(rate=RATE, max_norm=0.2)
    _, states = run.states(step, linear, True)
    now, theta, gradient, moments, _ = states[-1]
    rows = torch.randn(3, run.numel, dtype=torch.float64)
    together = now.backward(Cotangents.of(rows), moments, gradient, theta)
    for one, row in zip(together, rows, strict=True):
        torch.testing.assert_close(now.backward(Cotangents.of(row[None]), moments, gradient, theta)[0], one)


def test_steps_taken_together_pass_all_of_a_gradient_on():
    # With constant gradients, ten steps as one have the sum of the derivatives of ten alone, if none overlap others.
    gradient, noise = torch.full((3,), 0.5).double(), torch.full((3,), 0.1).double()
    ends = {}
    for together in (1, 10):
        step = AdamStep(rate=0.01 * together, beta2=0.99, together=together)
        moments = step.settled(gradient, gradient, noise, 400)
        cotangents, total = Cotangents.of(torch.ones(1, 3).double()), torch.zeros(1, 3).double()
        for _ in range(10 // together):
            total += step.backward(cotangents, moments, gradient, gradient)
        while float(cotangents.second.abs().max()) > 1e-12:
            total += replace(step, rate=0.0).backward(cotangents, moments, gradient, gradient)
        ends[together] = total
    torch.testing.assert_close(ends[10], ends[1], rtol=1e-9, atol=0)


def test_sgd_steps_taken_together_pass_all_of_a_gradient_on():
    ends = {}
    for together in (1, 10):
        step = SgdStep(rate=0.01 * together, momentum=0.9, nesterov=True, together=together)
        moments = step.settled(torch.ones(3), torch.ones(3), torch.ones(3), 400)
        cotangents, total = Cotangents.of(torch.ones(1, 3).double()), torch.zeros(1, 3).double()
        for _ in range(10 // together):
            total += step.backward(cotangents, moments, torch.ones(3), torch.ones(3))
        while float(cotangents.first.abs().max()) > 1e-12:
            total += replace(step, rate=0.0).backward(cotangents, moments, torch.ones(3), torch.ones(3))
        ends[together] = total
    torch.testing.assert_close(ends[10], ends[1], rtol=1e-9, atol=0)
    torch.testing.assert_close(ends[1], torch.full((1, 3), -1.0).double(), rtol=1e-9, atol=0)  # −10η/(1 − .9)
