"""Numerics of margins and error probabilities, against arithmetic with 60 digits."""

import decimal
from decimal import Decimal

import pytest
import torch
from torch.func import grad, vmap

from hf_trak.modelout_functions.margins import error_probability, log_likelihood, margin

decimal.getcontext().prec = 60
decimal.getcontext().Emin = -(10**6)


def exact(logits: torch.Tensor, label: int, temperature: float = 1.0) -> tuple[float, float, float]:
    """Margin, 1 − p_y and log p_y of one row of logits."""
    scaled = [Decimal(float(logit)) / Decimal(temperature) for logit in logits]
    true = scaled.pop(label).exp()
    others = sum((logit.exp() for logit in scaled), Decimal(0))
    return float((true / others).ln()), float(others / (true + others)), float((true / (true + others)).ln())


@pytest.mark.few(33)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("classes", [2, 3, 1000])
@pytest.mark.parametrize("scale", [0.0, 1.0, 6.0, 17.0, 100.0, 1000.0])
def test_margin_and_probabilities_are_exact_for_logits_of_any_size(dtype, classes, scale):
    """The difference log p − log(1 − p) is infinite from margins of 17 (float32) or 6 (bfloat16)."""
    logits = torch.randn(2, classes)
    logits[0, 1] += scale
    logits[1, 1] -= scale
    logits = logits.to(dtype)
    labels = torch.tensor([1, 1])
    tolerance = 1e-13 if dtype == torch.float64 else 2e-6
    margins, qs, likelihoods = (
        margin(logits, labels),
        error_probability(logits, labels),
        log_likelihood(logits, labels),
    )
    assert margins.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for row in range(2):
        m, q, likelihood = exact(logits[row], 1)
        size = max(1.0, float(logits[row].abs().max()))
        assert float(margins[row]) == pytest.approx(m, rel=tolerance, abs=tolerance * size)
        # q and log p are exact relative to themselves (an error δ of m changes them by a factor 1 + δ)
        assert float(qs[row]) == pytest.approx(q, rel=10 * tolerance * size, abs=1e-37)
        assert float(likelihoods[row]) == pytest.approx(likelihood, rel=10 * tolerance * size, abs=1e-37)


def test_probability_close_to_one_is_not_lost():
    """q = 1 − p formed from p would be 0 here."""
    logits = torch.tensor([[20.0, 0.0, 0.0]])
    q = float(error_probability(logits, torch.tensor([0])))
    assert q == pytest.approx(exact(logits[0], 0)[1], rel=1e-5)
    assert 1e-9 < q < 1e-8 and float(1 - logits.softmax(-1)[0, 0]) == 0


@pytest.mark.parametrize("temperature", [0.5, 1.0, 7.0])
def test_temperature_divides_logits(temperature):
    logits = torch.randn(4, 5)
    qs = error_probability(logits, torch.arange(4), temperature)
    for row in range(4):
        assert float(qs[row]) == pytest.approx(exact(logits[row], row, temperature)[1], rel=1e-5)


@pytest.mark.parametrize("size", [0.0, 30.0, 1000.0])
def test_gradients_are_those_of_the_formula_under_vmap(size):
    """∂m/∂logits is 1 at the label, minus the softmax over the others elsewhere; finite at any size."""
    logits = torch.randn(6, 4)
    logits[:, 2] += size
    labels = torch.tensor([0, 1, 2, 3, 2, 2])
    gradients = vmap(grad(lambda row, label: margin(row.unsqueeze(0), label.unsqueeze(0)).squeeze(0)))(logits, labels)
    for row, label in enumerate(labels.tolist()):
        others = torch.cat([logits[row, :label], logits[row, label + 1 :]]).double().softmax(0)
        expected = torch.cat([-others[:label], torch.ones(1, dtype=torch.float64), -others[label:]])
        torch.testing.assert_close(gradients[row].double(), expected, rtol=1e-4, atol=1e-6)
    likelihoods = vmap(grad(lambda row, label: log_likelihood(row.unsqueeze(0), label.unsqueeze(0)).squeeze(0)))
    q = error_probability(logits, labels)
    torch.testing.assert_close(likelihoods(logits, labels), q.unsqueeze(1) * gradients, rtol=1e-4, atol=1e-12)


def test_autocast_changes_nothing():
    logits, labels = torch.randn(5, 4) * 30, torch.tensor([0, 1, 2, 3, 0])
    functions = (margin, error_probability, log_likelihood)
    expected = [function(logits, labels) for function in functions]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [function(logits, labels) for function in functions]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
