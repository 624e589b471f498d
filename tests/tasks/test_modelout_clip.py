"""The CLIP task on tiny open_clip and transformers models."""

import copy
import gc

import numpy as np
import open_clip
import pytest
import torch
from torch.func import grad, vmap
from transformers import CLIPConfig, CLIPModel

from hf_trak.errors import NonFiniteError
from hf_trak.modelout_functions import CLIPModelOutput, MissingEmbeddingsError, get_task
from hf_trak.modelout_functions.clip import draw_rows
from hf_trak.projectors import NoOpProjector
from hf_trak.traker import TRAKer

PAIRS, NEGATIVES = 20, 8


def open_clip_model(seed: int = 0, **kwargs) -> torch.nn.Module:
    torch.manual_seed(seed)
    vision = {"layers": 1, "width": 16, "head_width": 8, "patch_size": 4, "image_size": 8}
    text = {"context_length": 6, "vocab_size": 30, "width": 16, "heads": 2, "layers": 1}
    model = open_clip.CLIP(embed_dim=12, vision_cfg=vision, text_cfg=text, **kwargs).eval()
    with torch.no_grad():
        model.logit_scale.fill_(1.5)
    return model


def hf_model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    vision = {**sizes, "image_size": 8, "patch_size": 4}
    text = {**sizes, "vocab_size": 30, "max_position_embeddings": 6, "eos_token_id": 29}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=12, logit_scale_init_value=1.5)
    return CLIPModel(config).eval()


@pytest.fixture
def pairs() -> tuple[torch.Tensor, torch.Tensor]:
    texts = torch.randint(1, 29, (PAIRS, 6))
    texts[:, -1] = 29  # the highest token ends a text
    return torch.randn(PAIRS, 3, 8, 8), texts


def named(pairs: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"pixel_values": pairs[0], "input_ids": pairs[1]}


def rows(batch, chosen):
    if isinstance(batch, dict):
        return {name: tensor[chosen] for name, tensor in batch.items()}
    return tuple(tensor[chosen] for tensor in batch)


pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")

MODELS = {
    "open_clip tuple": (open_clip_model, lambda pairs: pairs),
    "open_clip dict": (lambda seed=0: open_clip_model(seed, output_dict=True), lambda pairs: pairs),
    "open_clip bias": (lambda seed=0: open_clip_model(seed, init_logit_bias=-2.0), lambda pairs: pairs),
    "open_clip names": (open_clip_model, lambda pairs: {"image": pairs[0], "text": pairs[1]}),
    "transformers": (hf_model, named),
}


@pytest.fixture(params=list(MODELS))
def case(request, pairs):
    """A model, a batch in its format, and a task with embeddings of that batch."""
    make, form = MODELS[request.param]
    model, batch = make(), form(pairs)
    task = CLIPModelOutput(simulated_batch_size=NEGATIVES, seed=3)
    task.get_embeddings(model, [rows(batch, slice(i, i + 7)) for i in range(0, PAIRS, 7)])
    return model, batch, task


def call(task, model, batch):
    args, kwargs = task.model_inputs(batch)
    return model(*args, **kwargs)


def features(model, batch) -> tuple[np.ndarray, np.ndarray]:
    """Normalized embeddings of the towers, called one by one."""
    with torch.no_grad():
        if isinstance(model, CLIPModel):
            towers = (
                model.get_image_features(batch["pixel_values"]).pooler_output,
                model.get_text_features(batch["input_ids"]).pooler_output,
            )
        else:
            images, texts = batch.values() if isinstance(batch, dict) else batch
            towers = model.encode_image(images), model.encode_text(texts)
    return tuple((tower / tower.norm(dim=-1, keepdim=True)).double().numpy() for tower in towers)


def paper(model, batch, scale: float, seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """f and q as TRAK's Section 5.1 has them, in float64, from the definition and with loops."""
    image, text = features(model, batch)
    chosen = draw_rows(PAIRS, NEGATIVES, seed)
    f, q = [], []
    for phi, psi in zip(image, text, strict=True):
        f.append(
            -np.log(sum(np.exp(-phi @ (psi - text[b])) for b in chosen))
            - np.log(sum(np.exp(-psi @ (phi - image[b])) for b in chosen))
        )
        true = np.exp(scale * phi @ psi)
        p_text = true / (true + sum(np.exp(scale * phi @ text[b]) for b in chosen))
        p_image = true / (true + sum(np.exp(scale * psi @ image[b]) for b in chosen))
        q.append(1 - (p_text + p_image) / 2)
    return np.array(f), np.array(q)


def test_f_and_q_are_those_of_the_paper(case):
    model, batch, task = case
    f, q = paper(model, batch, scale=np.exp(1.5))
    result = call(task, model, batch)
    np.testing.assert_allclose(task.output(result, batch).detach().numpy(), f, rtol=1e-5, atol=1e-5)
    weights = task.out_to_loss_grad(result, batch)
    assert not weights.requires_grad
    np.testing.assert_allclose(weights.numpy(), q, rtol=1e-5)
    np.testing.assert_allclose(task.get_out_to_loss_grad(model, None, None, batch).numpy(), q, rtol=1e-5)


class Given(torch.nn.Module):
    """Embeddings as they are given, and a scale."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.logit_scale = torch.nn.Parameter(torch.tensor(scale).log())

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"image_features": image, "text_features": text, "logit_scale": self.logit_scale.exp()}


def given_task(model: Given, image: torch.Tensor, text: torch.Tensor) -> CLIPModelOutput:
    """A task whose negatives are these embeddings."""
    task = CLIPModelOutput(simulated_batch_size=len(image))
    task.get_embeddings(model, [(image, text)])
    return task


@pytest.mark.parametrize("scale", [1.0, 7.0])
def test_q_is_minus_the_derivative_of_the_loss_as_both_contrasts_move_alike(scale):
    """By finite differences, in float64, of the contrastive loss of a pair among its negatives: (CE over the texts +
    CE over the images) / 2 of the logits s · φ·ψ.

    The images move at right angles to all negatives, so that the similarity of the true pair alone changes, and both
    contrasts with it. Then dL = −s q da and df = 2 da: −dL/df = q, up to s / 2, which is one number per checkpoint.
    """
    negatives, size = 5, 12

    def unit(count):
        return torch.nn.functional.normalize(torch.randn(count, size, dtype=torch.float64), dim=1)

    images_b, texts_b = unit(negatives), unit(negatives)
    image, text = unit(7), unit(7)
    basis, _ = torch.linalg.qr(texts_b.T)
    step = text - text @ basis @ basis.T
    model = Given(scale)
    task = given_task(model, images_b.float(), texts_b.float())
    kept_images, kept_texts = images_b.float().double(), texts_b.float().double()

    def loss(h):
        moved = image + h * step
        true = scale * (moved * text).sum(1)
        over = [scale * moved @ kept_texts.T, scale * text @ kept_images.T]
        terms = [torch.cat([true[:, None], others], 1) for others in over]
        first = torch.zeros(7, dtype=torch.long)
        return sum(torch.nn.functional.cross_entropy(logits, first, reduction="none") for logits in terms) / 2

    h = 1e-5
    moved = image.float().requires_grad_()
    f = task.output(model(moved, text.float()), ())
    (gradient,) = torch.autograd.grad(f.sum(), moved)
    d_f = (gradient.double() * step).sum(1)
    assert float(d_f.abs().min()) > 0.01
    slope = (loss(h) - loss(-h)) / (2 * h) / d_f
    q = task.out_to_loss_grad(model(image.float(), text.float()), ())
    torch.testing.assert_close(q.double(), -slope * 2 / scale, rtol=1e-4, atol=1e-6)
    assert float(q.max() - q.min()) > 0.05  # not the same number everywhere


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("true", [-60.0, 0.0, 60.0])
@pytest.mark.parametrize("negative", [-60.0, 60.0])
def test_f_and_q_are_finite_at_logits_of_60(dtype, true, negative):
    """With p formed first, f is infinite from contrasts of 17 (float32) or 6 (bfloat16)."""
    count, axis = 3, torch.eye(4)[:1]
    model = Given(1.0)
    task = given_task(model, negative * axis.expand(count, 4), negative * axis.expand(count, 4))
    image = axis.to(dtype).requires_grad_()
    text = axis.to(dtype) + true * torch.eye(4)[1:2].to(dtype)
    similar = image + torch.eye(4)[1:2].to(dtype)  # φ·ψ = 1 + true, φ·ψ_b = ψ·φ_b = negative
    result = model(similar, text)
    f = task.output(result, ())
    (gradient,) = torch.autograd.grad(f.sum(), image)
    contrast = 1 + true - (negative + np.log(count))
    assert float(f) == pytest.approx(2 * contrast, rel=1e-5, abs=1e-5)  # two logarithms near 60, off by 2e-6 each
    assert gradient.isfinite().all() and gradient.norm() > 0
    q = float(task.out_to_loss_grad(result, ()))
    assert q == pytest.approx(np.exp(-np.logaddexp(0, contrast)), rel=1e-4, abs=1e-37) and 0 <= q <= 1


def test_a_batch_of_one_gives_the_same_f_q_and_gradient(case):
    """With in-batch negatives, q of a batch of one is 0, and every score with it."""
    model, batch, task = case
    parameters = [parameter for name, parameter in model.named_parameters() if name != "logit_scale"]
    result = call(task, model, batch)
    f, q = task.output(result, batch), task.out_to_loss_grad(result, batch)
    for row in range(0, PAIRS, 6):
        single = rows(batch, slice(row, row + 1))
        alone = call(task, model, single)
        torch.testing.assert_close(task.output(alone, single), f[row : row + 1])
        torch.testing.assert_close(task.out_to_loss_grad(alone, single), q[row : row + 1])
        assert float(q[row]) > 0.1
        whole = torch.autograd.grad(f[row], parameters, retain_graph=True, allow_unused=True)
        one = torch.autograd.grad(task.output(alone, single).squeeze(0), parameters, allow_unused=True)
        for a, b in zip(whole, one, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_functional_form_under_vmap_equals_autograd(pairs):
    model = open_clip_model()
    task = CLIPModelOutput(simulated_batch_size=NEGATIVES)
    task.get_embeddings(model, [pairs])
    task = copy.copy(task)  # without what the first call keeps
    weights, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    vectorized = vmap(grad(task.get_output, argnums=1), in_dims=(None, None, None, 0, 0))
    gradients = vectorized(model, weights, buffers, *rows(pairs, slice(5)))
    f = task.output(model(*rows(pairs, slice(5))), pairs)
    for row in range(5):
        expected = torch.autograd.grad(f[row], list(weights.values()), retain_graph=True, allow_unused=True)
        for name, gradient in zip(weights, expected, strict=True):
            gradient = torch.zeros_like(weights[name]) if gradient is None else gradient
            torch.testing.assert_close(gradients[name][row], gradient, rtol=1e-4, atol=1e-5)
    single = task.get_output(model, weights, buffers, pairs[0][2], pairs[1][2])
    torch.testing.assert_close(single, f[2])


def test_batched_form_under_vmap_gives_the_same_q_and_leaves_nothing_wrapped(case):
    """The functional engine takes q within vmap(grad(·)); what the task keeps must be usable afterwards."""
    model, batch, task = case
    task = copy.copy(task)
    task._negatives = None

    def f_and_q(sample):
        single = {name: tensor.unsqueeze(0) for name, tensor in sample.items()}
        single = single if isinstance(batch, dict) else tuple(single.values())
        result = call(task, model, single)
        return task.output(result, single).squeeze(0), task.out_to_loss_grad(result, single).squeeze(0)

    sample = batch if isinstance(batch, dict) else dict(zip("ab", batch, strict=True))
    if isinstance(model, CLIPModel):
        with torch.no_grad():  # its text tower's mask code needs the engine's own context under vmap
            q = torch.stack([f_and_q(rows(sample, row))[1] for row in range(PAIRS)])
    else:
        images, texts = sample.values()
        keys = list(sample)
        vectorized = vmap(grad(lambda image, text: f_and_q(dict(zip(keys, (image, text), strict=True))), has_aux=True))
        _, q = vectorized(images, texts)
    np.testing.assert_allclose(q.numpy(), paper(model, batch, np.exp(1.5))[1], rtol=1e-5)
    assert all(torch.func.debug_unwrap(kept, recurse=True) is kept for kept in task._negatives[1:])
    assert task.output(call(task, model, batch), batch).isfinite().all()


def test_negatives_are_drawn_uniformly():
    """With weights proportional to the index, the first pair is never drawn, the last one most often."""
    counts = np.zeros(10)
    for seed in range(3000):
        chosen = draw_rows(10, 3, seed)
        assert chosen == sorted(set(chosen)) and len(chosen) == 3
        counts[chosen] += 1
    # 900 expected, standard deviation 25
    assert counts.min() > 800 and counts.max() < 1000


def test_negatives_are_a_function_of_the_seed_alone(pairs):
    model = open_clip_model()

    def f(seed: int) -> torch.Tensor:
        torch.manual_seed(torch.seed())
        task = CLIPModelOutput(simulated_batch_size=NEGATIVES, seed=seed)
        task.get_embeddings(model, [pairs])
        return task.output(model(*pairs), pairs)

    assert torch.equal(f(0), f(0))
    assert not torch.allclose(f(0), f(1), atol=1e-5)


def test_taking_the_reference_rows_first_gives_the_negatives_of_embedding_everything(case):
    """`prepare` needs only the rows that `reference_rows` names."""
    model, batch, task = case
    chosen = list(task.reference_rows(PAIRS))
    assert len(chosen) == NEGATIVES
    short = CLIPModelOutput(simulated_batch_size=NEGATIVES, seed=3)
    short.prepare(model, [rows(batch, chosen[:5]), rows(batch, chosen[5:])])
    result = call(task, model, batch)
    torch.testing.assert_close(short.output(result, batch), task.output(result, batch))
    torch.testing.assert_close(short.out_to_loss_grad(result, batch), task.out_to_loss_grad(result, batch))


def test_embeddings_live_on_the_task(pairs):
    """In a class attribute, those of the second model would replace those of the first."""
    models = open_clip_model(0), open_clip_model(1)
    tasks = [CLIPModelOutput(simulated_batch_size=NEGATIVES) for _ in models]
    for task, model in zip(tasks, models, strict=True):
        task.get_embeddings(model, [pairs])
    assert not torch.allclose(tasks[0].image_embeddings, tasks[1].image_embeddings)
    assert CLIPModelOutput.image_embeddings is None and CLIPModelOutput.text_embeddings is None
    assert CLIPModelOutput.num_computed_embeddings == 0 and CLIPModelOutput.sim_batch_size == 0
    for task, model in zip(tasks, models, strict=True):
        np.testing.assert_allclose(task.image_embeddings.numpy(), features(model, pairs)[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(task.text_embeddings.numpy(), features(model, pairs)[1], rtol=1e-4, atol=1e-5)
        assert task.num_computed_embeddings == PAIRS and task.sim_batch_size == NEGATIVES
        expected = paper(model, pairs, np.exp(1.5), seed=0)[0]
        np.testing.assert_allclose(task.output(model(*pairs), pairs).detach(), expected, rtol=1e-5, atol=1e-5)


def test_called_on_the_class_as_in_the_trak_api(pairs):
    """The default of tasks without embeddings of their own, and of the static form of `get_output`."""

    class Task(CLIPModelOutput):
        """Keeps on itself what this test leaves on a class."""

    model = open_clip_model()
    Task.get_embeddings(model, [pairs] * 20, batch_size=PAIRS, embedding_dim=12)
    assert Task.num_computed_embeddings == 20 * PAIRS and Task.image_embeddings.shape == (400, 12)
    assert CLIPModelOutput.image_embeddings is None
    task = Task()
    assert task.num_computed_embeddings == 400
    f = task.output(model(*pairs), pairs)
    weights, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    single = Task.get_output(model, weights, buffers, pairs[0][3], pairs[1][3])
    torch.testing.assert_close(single, f[3])
    own = Task(simulated_batch_size=NEGATIVES)
    own.get_embeddings(model, [pairs])
    assert own.num_computed_embeddings == PAIRS and Task.num_computed_embeddings == 400


def test_embeddings_of_another_checkpoint_are_refused(case):
    """The second checkpoint must not be featurized with the negatives of the first."""
    model, batch, task = case
    other = {name: weight + 0.01 * torch.randn_like(weight) for name, weight in model.state_dict().items()}
    original = copy.deepcopy(model.state_dict())
    task.out_to_loss_grad(call(task, model, batch), batch)
    model.load_state_dict(other)
    result = call(task, model, batch)
    for attempt in (
        lambda: task.out_to_loss_grad(result, batch),
        lambda: task.get_out_to_loss_grad(model, None, None, batch),
        lambda: task.get_out_to_loss_grad(model, dict(model.named_parameters()), dict(model.named_buffers()), batch),
        lambda: vmap(grad(lambda i: task.out_to_loss_grad(result, batch)[0] * i))(torch.ones(2)),
    ):
        with pytest.raises(MissingEmbeddingsError, match="other weights"):
            attempt()
    model.load_state_dict(original)  # the same weights again, if not the same versions of the tensors
    before = task.out_to_loss_grad(call(task, model, batch), batch)
    model.load_state_dict(original)
    result = call(task, model, batch)
    vmap(grad(lambda i: task.out_to_loss_grad(result, batch)[0] * i))(torch.ones(2))
    detached = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    torch.testing.assert_close(task.get_out_to_loss_grad(model, detached, {}, batch), before)
    model.load_state_dict(other)
    task.get_embeddings(model, [batch])
    assert not torch.allclose(task.out_to_loss_grad(call(task, model, batch), batch), before)


@pytest.mark.slow
def test_embeddings_of_another_model_object_are_refused_once_bound(pairs):
    first, second = open_clip_model(0), open_clip_model(1)
    task = CLIPModelOutput(simulated_batch_size=NEGATIVES)
    task.get_embeddings(first, [pairs])
    task.bind(second)
    with pytest.raises(MissingEmbeddingsError, match="other weights"):
        task.out_to_loss_grad(second(*pairs), pairs)
    task.bind(copy.deepcopy(first))
    gc.collect()
    task.out_to_loss_grad(first(*pairs), pairs)


def test_the_logit_scale_is_that_of_the_model_at_every_batch(case):
    """The temperature of the first batch must not be reused for other checkpoints."""
    model, batch, task = case
    first = task.out_to_loss_grad(call(task, model, batch), batch)
    with torch.no_grad():
        model.logit_scale.fill_(3.0)
    task.get_embeddings(model, [batch])
    second = task.out_to_loss_grad(call(task, model, batch), batch)
    np.testing.assert_allclose(second.numpy(), paper(model, batch, np.exp(3.0))[1], rtol=1e-4)
    assert task.temperature is None and not torch.allclose(first, second, atol=1e-2)


def test_a_given_temperature_takes_the_place_of_the_logit_scale(case):
    model, batch, _ = case
    task = CLIPModelOutput(temperature=7.0, simulated_batch_size=NEGATIVES, seed=3)
    task.get_embeddings(model, [batch])
    f, q = paper(model, batch, scale=7.0)
    result = call(task, model, batch)
    np.testing.assert_allclose(task.out_to_loss_grad(result, batch).numpy(), q, rtol=1e-5)
    np.testing.assert_allclose(task.output(result, batch).detach().numpy(), f, rtol=1e-5, atol=1e-5)


def test_q_stays_exact_where_the_pair_is_certain():
    """At a logit scale of 100, 1 − p formed from p is 0 in float32."""
    task = CLIPModelOutput(temperature=100.0, simulated_batch_size=2)
    axes = torch.eye(4)
    negatives = torch.stack([axes[1], axes[2]])

    class Identity(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = torch.nn.Parameter(torch.zeros(1))

        def forward(self, image, text):
            return image, text, torch.tensor(1.0)

    model = Identity()
    task.get_embeddings(model, [(negatives, negatives)])
    pair = (0.6 * axes[:1], 0.5 * axes[:1])
    q = task.out_to_loss_grad(model(*pair), pair)
    assert float(q) == pytest.approx(2 / (np.exp(30) + 2), rel=1e-4)


def test_autocast_does_not_round_the_contrasts(case):
    model, batch, task = case
    result = call(task, model, batch)
    expected = task.output(result, batch), task.out_to_loss_grad(result, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = task.output(result, batch), task.out_to_loss_grad(result, batch)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_attention_backends_and_training_mode_are_left_alone(case):
    """SDP settings are process-global."""
    model, batch, task = case
    cuda = torch.backends.cuda
    flags = (cuda.flash_sdp_enabled, cuda.math_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.cudnn_sdp_enabled)
    before = [flag() for flag in flags]
    model.train()
    part = next(model.children())
    part.eval()
    task.get_embeddings(model, [batch])
    task.out_to_loss_grad(call(task, model, batch), batch)
    assert [flag() for flag in flags] == before
    assert model.training and not part.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_without_embeddings_the_remedy_is_named(pairs):
    """An `AssertionError`, as in the `trak` API."""
    model = open_clip_model()
    task = get_task("clip")
    for attempt in (
        lambda: task.output(model(*pairs), pairs),
        lambda: task.out_to_loss_grad(model(*pairs), pairs),
        lambda: task.get_out_to_loss_grad(model, None, None, pairs),
        lambda: CLIPModelOutput.get_output(model, {}, {}, pairs[0][0], pairs[1][0]),
    ):
        with pytest.raises(AssertionError, match="get_embeddings"):
            attempt()


def test_preprocessing_and_size_as_in_the_trak_api(pairs):
    model = open_clip_model()
    raw = [(pairs[0][i : i + 7] * 2, [tuple(text.tolist()) for text in pairs[1][i : i + 7]]) for i in (0, 7, 14)]
    task = CLIPModelOutput(simulated_batch_size=NEGATIVES)
    task.get_embeddings(
        model,
        raw,
        batch_size=7,
        embedding_dim=12,
        size=17,
        preprocess_fn_img=lambda images: images / 2,
        preprocess_fn_txt=torch.tensor,
    )
    assert task.num_computed_embeddings == 17
    np.testing.assert_allclose(task.text_embeddings.numpy(), features(model, pairs)[1][:17], rtol=1e-4, atol=1e-5)


def test_bad_input_says_what_to_do(pairs):
    model = open_clip_model()
    task = CLIPModelOutput(simulated_batch_size=PAIRS + 1)
    for attempt, error, message in (
        (lambda: task.get_embeddings(model, [pairs]), ValueError, "only 20 pair"),
        (lambda: task.reference_rows(5), ValueError, "only 5 pair"),
        (lambda: task.get_embeddings(model, []), ValueError, "no pairs"),
        (lambda: task.get_embeddings(model, [pairs], embedding_dim=512), ValueError, "512.*12"),
        (lambda: task.get_embeddings(model, [pairs[0]]), TypeError, r"\(images, texts\)"),
        (lambda: task.get_embeddings(model, [(*pairs, pairs[1])]), ValueError, "3 item"),
        (lambda: task.get_embeddings(model, [named(pairs)], preprocess_fn_img=abs), ValueError, "mappings"),
        (lambda: task.get_embeddings(hf_model(), [pairs]), TypeError, "CLIPModel takes .*pixel_values"),
        (
            lambda: task.get_embeddings(torch.nn.Linear(1, 1), [{"input": torch.ones(2, 1)}]),
            TypeError,
            "image_features",
        ),
        (lambda: CLIPModelOutput(temperature=0.0), ValueError, "`temperature` is 0.0"),
        (lambda: CLIPModelOutput(simulated_batch_size=0), ValueError, "`simulated_batch_size` is 0"),
    ):
        with pytest.raises(error, match=message):
            attempt()
    broken = pairs[0].clone()
    broken[11] = float("nan")
    with pytest.raises(NonFiniteError, match="image embedding of pair 11 "):
        task.get_embeddings(model, [(broken, pairs[1])])
    assert task.image_embeddings is None


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 5])
def test_trak_end_to_end_does_not_depend_on_the_batch_size(batch_size, pairs, tmp_path):
    """Through the `trak` API: two checkpoints, batches of one and of five, against the closed form in float64."""
    model = open_clip_model()
    checkpoints = [open_clip_model(seed).state_dict() for seed in (0, 1)]
    names = ["visual.proj", "text_projection"]
    traker = TRAKer(
        model,
        CLIPModelOutput(simulated_batch_size=NEGATIVES),
        train_set_size=PAIRS,
        save_dir=str(tmp_path),
        device="cpu",
        projector=NoOpProjector(device="cpu"),
        proj_dim=model.visual.proj.numel() + model.text_projection.numel(),
        use_half_precision=False,
        grad_wrt=names,
        lambda_reg=1e-4,
    )
    products, qs = [], []
    for model_id, checkpoint in enumerate(checkpoints):
        traker.load_checkpoint(checkpoint, model_id)
        batches = [rows(pairs, slice(start, start + batch_size)) for start in range(0, PAIRS, batch_size)]
        with pytest.raises(MissingEmbeddingsError):  # none, or those of the checkpoint before
            traker.featurize(batches[0], inds=range(batch_size))
        traker.task.get_embeddings(model, batches)
        for batch in batches:
            traker.featurize(batch, num_samples=batch_size)
        f = traker.task.output(model(*pairs), pairs)
        parameters = [dict(model.named_parameters())[name] for name in names]
        rows_of_x = [torch.autograd.grad(value, parameters, retain_graph=True) for value in f]
        x = np.stack([np.concatenate([part.double().numpy().ravel() for part in row]) for row in rows_of_x])
        x /= np.sqrt(x.shape[1])
        inverse = np.linalg.inv(x.T @ x + 1e-4 * np.eye(x.shape[1]))
        products.append(x @ (inverse / np.abs(inverse).mean()) @ x[:4].T)
        qs.append(paper(model, pairs, np.exp(1.5), seed=0)[1])
    traker.finalize_features()
    for model_id, checkpoint in enumerate(checkpoints):
        traker.start_scoring_checkpoint("e", checkpoint, model_id, num_targets=4)
        traker.task.get_embeddings(model, [pairs])
        traker.score(rows(pairs, slice(4)), num_samples=4)
    scores = np.asarray(traker.finalize_scores("e"))
    expected = np.mean(products, axis=0) * np.mean(qs, axis=0)[:, None]
    assert np.abs(scores - expected).max() < 2e-3 * np.abs(expected).max()
