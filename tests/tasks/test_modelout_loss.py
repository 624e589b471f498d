"""The `loss` task, and the sign of scores, where the truth can be had by retraining."""

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.datasets import load_digits

from hf_trak.modelout_functions import (
    GaussNewtonModelOutput,
    ImageClassificationModelOutput,
    LossModelOutput,
    RegressionModelOutput,
)
from hf_trak.scores.ridge import RidgeSystem

RIDGE = 3.0
CLASSES = 3


@pytest.fixture(scope="module")
def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three classes of real digits: 60 train examples, 20 targets."""
    images, labels = load_digits(n_class=CLASSES, return_X_y=True)
    chosen = np.random.RandomState(0).permutation(len(labels))[:80]
    x, y = torch.tensor(images[chosen] / 16, dtype=torch.float64), torch.tensor(labels[chosen])
    y[:6] = (y[:6] + 1) % CLASSES  # some examples that do harm
    return x[:60], y[:60], x[60:], y[60:]


def fit(x: torch.Tensor, y: torch.Tensor, start: torch.nn.Linear | None = None) -> torch.nn.Linear:
    """The minimizer of Σ cross-entropy + RIDGE/2 ‖θ‖², by Newton's method, until the gradient vanishes."""
    model = torch.nn.Linear(64, CLASSES, dtype=torch.float64)
    theta = torch.zeros(CLASSES * 65, dtype=torch.float64)
    if start is not None:
        theta = torch.nn.utils.parameters_to_vector(start.parameters()).detach()

    def objective(theta: torch.Tensor) -> torch.Tensor:
        logits = x @ theta[: CLASSES * 64].reshape(CLASSES, 64).T + theta[CLASSES * 64 :]
        return torch.nn.functional.cross_entropy(logits, y, reduction="sum") + RIDGE / 2 * theta.square().sum()

    while (gradient := torch.func.grad(objective)(theta)).abs().max() > 1e-9:
        theta = theta - torch.linalg.solve(torch.func.hessian(objective)(theta), gradient)
    torch.nn.utils.vector_to_parameters(theta, model.parameters())
    return model


def gradients(task, model, batch, side) -> torch.Tensor:
    output = task.output(model(batch[0]), batch, side)
    rows = [torch.autograd.grad(f, list(model.parameters()), retain_graph=True) for f in output]
    return torch.stack([torch.cat([part.flatten() for part in row]) for row in rows]).detach()


@pytest.fixture(scope="module")
def truth(data) -> tuple[torch.nn.Linear, np.ndarray]:
    """The model, and for each train example and target how much the margin falls when the example is left out."""
    x, y, x_target, y_target = data
    task = ImageClassificationModelOutput()

    def margins(model: torch.nn.Linear) -> np.ndarray:
        return task.output(model(x_target), (x_target, y_target)).detach().numpy()

    model = fit(x, y)
    kept = [torch.arange(60) != left_out for left_out in range(60)]
    return model, np.stack([margins(model) - margins(fit(x[keep], y[keep], model)) for keep in kept])


@pytest.mark.slow
@pytest.mark.parametrize("formulation", ["loss", "margin"])
def test_positive_scores_mark_helpful_examples_as_leaving_them_out_shows(formulation, data, truth):
    """λ is that of the objective: XᵀX stands for the Hessian of the loss, up to the mean of p (1 − p) for margins."""
    x, y, x_target, y_target = data
    model, effect = truth
    p_wrong = ImageClassificationModelOutput().out_to_loss_grad(model(x), (x, y))
    task, lam = {
        "loss": (LossModelOutput(), RIDGE),
        "margin": (ImageClassificationModelOutput(), RIDGE / float((p_wrong * (1 - p_wrong)).mean())),
    }[formulation]
    features = gradients(task, model, (x, y), "train")
    targets = gradients(task, model, (x_target, y_target), "target")
    q = task.out_to_loss_grad(model(x), (x, y))
    scores = (features @ RidgeSystem(features.T @ features, lam).solve(targets).T * q.unsqueeze(1)).numpy()
    correlations = [spearmanr(scores[:, target], effect[:, target]).statistic for target in range(20)]
    assert np.mean(correlations) > 0.85 and min(correlations) > 0.75
    clear = np.abs(effect) > np.quantile(np.abs(effect), 0.9)
    assert np.mean(np.sign(scores[clear]) == np.sign(effect[clear])) > 0.98


def test_train_side_is_minus_the_loss_target_side_the_margin_and_q_is_one(data, truth):
    x, y, _, _ = data
    task, model = LossModelOutput(), truth[0]
    logits = model(x)
    loss = torch.nn.functional.cross_entropy(logits, y, reduction="none")
    torch.testing.assert_close(task.output(logits, (x, y), "train"), -loss)
    margin = ImageClassificationModelOutput().output(logits, (x, y))
    torch.testing.assert_close(task.output(logits, (x, y), "target"), margin)
    for side in ("train", "target"):
        q = task.out_to_loss_grad(logits, (x, y), side)
        assert torch.equal(q, torch.ones(60, dtype=torch.float64)) and not q.requires_grad
    sample = task.get_output(model, dict(model.named_parameters()), {}, x[0], y[0])
    torch.testing.assert_close(sample, -loss[0])


def test_loss_gradients_are_q_times_margin_gradients(data, truth):
    """−∇ℓ = (1 − p) ∇m: the two formulations differ by where q sits."""
    x, y, _, _ = data
    model = truth[0]
    margin_task = ImageClassificationModelOutput()
    q = margin_task.out_to_loss_grad(model(x), (x, y))
    torch.testing.assert_close(
        gradients(LossModelOutput(), model, (x, y), "train"),
        q.unsqueeze(1) * gradients(margin_task, model, (x, y), "train"),
    )


def test_gauss_newton_rows_are_loss_gradients_over_the_root_of_q_with_that_weight(data, truth):
    x, y, _, _ = data
    model, margin_task, task = truth[0], ImageClassificationModelOutput(), GaussNewtonModelOutput()
    task.bind(model)
    roots = task.out_to_loss_grad(model(x), (x, y))
    torch.testing.assert_close(
        roots.square(), margin_task.out_to_loss_grad(model(x), (x, y)).float(), rtol=1e-5, atol=1e-7
    )
    rows = gradients(task, model, (x, y), "train")
    torch.testing.assert_close(
        rows * roots.unsqueeze(1), gradients(LossModelOutput(), model, (x, y), "train"), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(
        gradients(task, model, (x, y), "target"), gradients(margin_task, model, (x, y), "target")
    )
    assert torch.equal(task.out_to_loss_grad(model(x), (x, y), "target"), torch.ones(60, dtype=torch.float64))


def test_gauss_newton_rows_of_a_regression_are_refused(truth):
    task = GaussNewtonModelOutput(of=RegressionModelOutput())
    with pytest.raises(TypeError, match="Use 'regression'"):
        task.bind(truth[0])


def test_labels_outside_the_classes_are_refused(truth):
    x = torch.zeros(2, 64, dtype=torch.float64)
    with pytest.raises(ValueError, match="Sample 1 of 2 has the label 3"):
        LossModelOutput().out_to_loss_grad(truth[0](x), (x, torch.tensor([0, 3])))
