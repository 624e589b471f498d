"""f and q of the sigmoid loss (SigLIP): against the loss by which such models are trained, and far from 0."""

import numpy as np
import open_clip
import pytest
import torch
from open_clip.loss import SigLipLoss

from hf_trak.modelout_functions import MissingEmbeddingsError, SigLIPModelOutput, get_task

NEGATIVES = 5


class Given(torch.nn.Module):
    """Embeddings as they are given; a scale and a bias."""

    def __init__(self, scale: float, bias: float) -> None:
        super().__init__()
        self.logit_scale = torch.nn.Parameter(torch.tensor(scale).log())
        self.logit_bias = torch.nn.Parameter(torch.tensor(bias))

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"image_features": image, "text_features": text, "logit_scale": self.logit_scale.exp()}


def task_for(model: torch.nn.Module, image: torch.Tensor, text: torch.Tensor) -> SigLIPModelOutput:
    task = SigLIPModelOutput(simulated_batch_size=len(image))
    task.get_embeddings(model, [(image, text)])
    return task


def unit(*shape: int) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.randn(*shape), dim=-1)


def test_losses_of_pairs_add_up_to_the_loss_of_the_batch() -> None:
    """Every pair with the others of its batch as negatives: Σ L is open_clip's loss times the size of the batch."""
    model = Given(8.0, -3.0)
    image, text = unit(6, 4), unit(6, 4)
    total = 0.0
    for row in range(6):
        others = [i for i in range(6) if i != row]
        task = task_for(model, image[others], text[others])
        pair = image[row : row + 1], text[row : row + 1]
        f = task.output(model(*pair), pair)
        total += float(torch.nn.functional.softplus(-f.detach().double()))  # f = −log(e^L − 1)
    expected = SigLipLoss()(image, text, model.logit_scale.exp(), model.logit_bias) * 6
    assert total == pytest.approx(float(expected.detach()), rel=1e-5)


def test_q_is_minus_the_derivative_of_the_loss_by_f() -> None:
    """By finite differences along a random change of the embeddings, in float64."""
    model = Given(5.0, -2.0)
    image_b, text_b = unit(NEGATIVES, 4), unit(NEGATIVES, 4)
    task = task_for(model, image_b, text_b)
    pairs, step = (unit(7, 4), unit(7, 4)), (torch.randn(7, 4), torch.randn(7, 4))
    q = task.out_to_loss_grad(model(*pairs), pairs).double()

    def loss(h: float) -> torch.Tensor:
        phi, psi = (a.double() + h * b.double() for a, b in zip(pairs, step, strict=True))
        s, b, zero = 5.0, -2.0, torch.zeros((), dtype=torch.float64)
        wrong = torch.logaddexp(zero, s * phi @ text_b.T.double() + b)
        wrong = wrong + torch.logaddexp(zero, s * psi @ image_b.T.double() + b)
        return torch.logaddexp(zero, -(s * (phi * psi).sum(1) + b)) + wrong.sum(1) / 2

    h = 1e-6
    d_loss = (loss(h) - loss(-h)) / (2 * h)
    moved = tuple(part.clone().requires_grad_() for part in pairs)
    f = task.output(model(*moved), moved)
    gradients = torch.autograd.grad(f.sum(), moved)
    d_f = sum((g.double() * b.double()).sum(1) for g, b in zip(gradients, step, strict=True))
    torch.testing.assert_close(-d_loss / d_f, q, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(f.detach().double(), -torch.log(torch.expm1(loss(0.0))), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("similarity", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("negative", [-1.0, 1.0])
def test_finite_at_logits_of_60(dtype: torch.dtype, similarity: float, negative: float) -> None:
    """With p formed first, f is infinite from logits of about 17."""
    model = Given(60.0, 0.0)
    axis = torch.eye(4)[:1]
    task = task_for(model, negative * axis.expand(3, 4), negative * axis.expand(3, 4))
    image = axis.to(dtype).requires_grad_()
    f = task.output(model(image, similarity * axis.to(dtype)), ())
    (gradient,) = torch.autograd.grad(f.sum(), image)
    q = task.out_to_loss_grad(model(image, similarity * axis.to(dtype)), ())
    assert f.isfinite().all() and gradient.isfinite().all() and 0 <= float(q) <= 1
    over_texts, over_images = 60 * negative, 60 * negative * similarity
    loss = np.logaddexp(0, -60 * similarity) + 1.5 * (np.logaddexp(0, over_texts) + np.logaddexp(0, over_images))
    assert float(f) == pytest.approx(-np.log(loss) if loss < 1e-9 else -loss - np.log(-np.expm1(-loss)), rel=1e-3)
    assert float(q) == pytest.approx(-np.expm1(-loss), rel=1e-3)


def test_a_model_without_a_bias_and_a_task_without_negatives() -> None:
    vision = {"layers": 1, "width": 16, "head_width": 8, "patch_size": 4, "image_size": 8}
    text = {"context_length": 6, "vocab_size": 30, "width": 16, "heads": 2, "layers": 1}
    model = open_clip.CLIP(8, vision, text).eval()
    batch = torch.randn(4, 3, 8, 8), torch.randint(1, 29, (4, 6))
    task = get_task("siglip")
    with pytest.raises(MissingEmbeddingsError, match="get_embeddings"):
        task.output(model(*batch), batch)
    task = SigLIPModelOutput(simulated_batch_size=4)
    task.get_embeddings(model, [batch])
    with pytest.raises(ValueError, match=r"no parameter `logit_bias`.*use the task 'clip'"):
        task.output(model(*batch), batch)


def test_functional_form_is_the_batched_one() -> None:
    vision = {"layers": 1, "width": 16, "head_width": 8, "patch_size": 4, "image_size": 8}
    text = {"context_length": 6, "vocab_size": 30, "width": 16, "heads": 2, "layers": 1}
    model = open_clip.CLIP(8, vision, text, init_logit_bias=-4.0).eval()
    batch = torch.randn(4, 3, 8, 8), torch.randint(1, 29, (4, 6))
    task = SigLIPModelOutput(simulated_batch_size=4)
    task.get_embeddings(model, [batch])
    f = task.output(model(*batch), batch)
    weights, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    single = task.get_output(model, weights, buffers, batch[0][2], batch[1][2])
    torch.testing.assert_close(single, f[2])
    q = task.out_to_loss_grad(model(*batch), batch)
    torch.testing.assert_close(task.get_out_to_loss_grad(model, weights, buffers, batch), q)
