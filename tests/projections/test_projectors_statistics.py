"""The Johnson–Lindenstrauss property, measured on gradients of real layers, and the spectrum of R.

Theory: for unscaled entries with variance 1, ⟨xR, yR⟩ / k has mean ⟨x, y⟩ and variance (‖x‖²‖y‖² + ⟨x, y⟩² − c) / k,
where c is 2 Σ x_i² y_i² for ±1 entries and 0 for normal ones. Seeds are fixed, so each test either always passes or
always fails; standard errors are asserted too, so that "within 10 %" could not pass by chance.
"""

import math
from functools import cache

import peft
import pytest
import torch
from sklearn.datasets import load_digits
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from hf_trak.projectors import NormalProjector, RademacherProjector, SparseProjector

SAMPLES = 8
NO_SPECIAL = {"bos_token_id": None, "eos_token_id": None}
SMALL, LARGE = ("conv", "last_layer"), ("bert", "gpt2", "lora")


def per_sample_gradients(model, losses):
    """Normalized gradients `(B, P)` of a function of the sample's number, one backward pass each."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rows = []
    for index in range(SAMPLES):
        grads = torch.autograd.grad(losses(index), parameters, allow_unused=True)
        flat = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]
        rows.append(torch.cat([g.flatten() for g in flat]))
    grads = torch.stack(rows)
    return grads / grads.norm(dim=1, keepdim=True)


def conv_gradients():
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 16, 3), torch.nn.ReLU(), torch.nn.Flatten(),
        torch.nn.Linear(256, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(60):
        batch = slice(20 * step, 20 * step + 20)
        loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return per_sample_gradients(
        model, lambda i: torch.nn.functional.cross_entropy(model(images[i : i + 1]), labels[i : i + 1])
    )


def bert_gradients():
    config = BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=32,
    )  # fmt: skip
    model = BertForMaskedLM(config).eval()
    ids = torch.randint(0, 100, (SAMPLES, 24))
    return per_sample_gradients(model, lambda i: model(input_ids=ids[i : i + 1], labels=ids[i : i + 1]).loss)


def gpt2_gradients():
    config = GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=2, n_positions=32, **NO_SPECIAL)
    model = GPT2LMHeadModel(config).eval()
    ids = torch.randint(0, 100, (SAMPLES, 24))
    return per_sample_gradients(model, lambda i: model(input_ids=ids[i : i + 1], labels=ids[i : i + 1]).loss)


def last_layer_gradients():
    """5,010 parameters: outer products of a probability error and features, one of them much larger than the rest."""
    images = torch.tensor(load_digits().data, dtype=torch.float32)[:SAMPLES] / 16
    features = torch.relu(images @ torch.randn(64, 500) / 8)
    features[:, 17] *= 20
    head = torch.nn.Linear(500, 10)
    return per_sample_gradients(
        head, lambda i: torch.nn.functional.cross_entropy(head(features[i : i + 1]), torch.tensor([i]))
    )


def lora_gradients():
    """49,152 parameters: adapters of rank 8 on every projection of three blocks."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=128, n_layer=3, n_head=2, n_positions=32, **NO_SPECIAL))
    config = peft.LoraConfig(r=8, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True)
    model = peft.get_peft_model(model, config).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero before training, which would make half of the gradient zero
            torch.nn.init.normal_(parameter, std=0.02)
    ids = torch.randint(0, 100, (SAMPLES, 24))
    return per_sample_gradients(model, lambda i: model(input_ids=ids[i : i + 1], labels=ids[i : i + 1]).loss)


@cache
def gradients(name):
    torch.manual_seed(0)
    makers = {
        "conv": conv_gradients, "bert": bert_gradients, "gpt2": gpt2_gradients,
        "last_layer": last_layer_gradients, "lora": lora_gradients,
    }  # fmt: skip
    return makers[name]().detach()


def test_sizes_of_the_gradients():
    assert gradients("last_layer").shape == (SAMPLES, 5010)
    assert gradients("lora").shape == (SAMPLES, 49_152)
    for name in SMALL + LARGE:
        assert torch.isfinite(gradients(name)).all()


@cache
def projections(projector_class, names, k, seeds, nonzeros=1):
    """Features `(seed, B, k)` by name. Shorter gradients are padded with zeros, so that one pass serves all."""
    total = max(gradients(name).shape[1] for name in names)
    stacked = torch.zeros(SAMPLES * len(names), total)
    for index, name in enumerate(names):
        grads = gradients(name)
        stacked[SAMPLES * index : SAMPLES * (index + 1), : grads.shape[1]] = grads
    options = {"nonzeros": nonzeros} if projector_class is SparseProjector else {}
    features = torch.stack(
        [projector_class(total, k, seed, **options).project(stacked, seed % 3) for seed in range(seeds)]
    )
    return dict(zip(names, features.split(SAMPLES, dim=1), strict=True))


def deviations(features, grads, k):
    """⟨xR, yR⟩ / k − ⟨x, y⟩ in standard deviations of the dense theory, `(replicate, pair)`.

    Features of more than k columns give several replicates: any k columns of R are a matrix of the same kind.
    """
    seeds, rows, columns = features.shape
    groups = features.double().view(seeds, rows, columns // k, k)
    products = torch.einsum("sagk,sbgk->sgab", groups, groups).reshape(-1, rows, rows) / k
    exact = grads.double() @ grads.double().T
    first, second = torch.triu_indices(rows, rows)
    return (products - exact)[:, first, second], exact, (first, second)


def check_bias_and_variance(features, grads, k, subtract, lowest=0.9):
    errors, exact, (first, second) = deviations(features, grads, k)
    squares = grads.double() ** 2
    norms = squares.sum(1)
    variance = norms[first] * norms[second] + exact[first, second] ** 2
    variance = (variance - subtract * 2 * (squares @ squares.T)[first, second]) / k
    scaled = errors / variance.sqrt()
    count = len(scaled)
    z = scaled.mean(0) * math.sqrt(count)
    # 36 pairs: |z| > 4 has probability 0.2 % for all of them together.
    assert z.abs().max() < 4, f"biased: z = {z}"
    ratios = (scaled**2).mean(1)
    ratio, error = float(ratios.mean()), float(ratios.std() / math.sqrt(count))
    assert 3 * error < 0.1, f"too few replicates to tell: standard error {error:.3f}"
    assert lowest < ratio < 1.1, f"variance is {ratio:.3f} ± {error:.3f} times the theory"
    return ratio, error


@pytest.mark.slow
@pytest.mark.parametrize("k", [64, 512, 4096])
@pytest.mark.parametrize("name", SMALL)
def test_rademacher_inner_products(name, k):
    features = projections(RademacherProjector, SMALL, 4096, 130)[name]
    check_bias_and_variance(features, gradients(name), k, subtract=1)


@pytest.mark.slow
@pytest.mark.parametrize("k", [64, 512])
def test_normal_inner_products(k):
    features = projections(NormalProjector, ("last_layer",), 512, 100)["last_layer"]
    check_bias_and_variance(features, gradients("last_layer"), k, subtract=0)


@pytest.mark.slow
@pytest.mark.parametrize("k", [64, 512, 4096])
@pytest.mark.parametrize("name", LARGE)
def test_rademacher_inner_products_of_more_parameters(name, k):
    features = projections(RademacherProjector, LARGE, 4096, 130)[name]
    check_bias_and_variance(features, gradients(name), k, subtract=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_normal_inner_products_at_4096(name):
    features = projections(NormalProjector, SMALL, 4096, 130)[name]
    check_bias_and_variance(features, gradients(name), 4096, subtract=0)


@pytest.mark.slow
@pytest.mark.parametrize(("k", "nonzeros"), [(64, 1), (512, 1), (4096, 1), (512, 4)])
@pytest.mark.parametrize("name", [*SMALL, *(pytest.param(name, marks=pytest.mark.slow) for name in LARGE)])
def test_sjlt_inner_products(name, k, nonzeros):
    """The variance has the theory of independent buckets as its upper limit. It is lower for small P, since
    coordinates of one chunk collide less often than by chance."""
    seeds = 600 if k == 4096 else 300  # few, heavy collisions: the variance is harder to estimate
    unscaled = projections(SparseProjector, SMALL if name in SMALL else LARGE, k, seeds, nonzeros)[name]
    features = unscaled * math.sqrt(k / nonzeros)  # `deviations` divides by k
    check_bias_and_variance(features, gradients(name), k, subtract=1, lowest=0.2)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("height", "width", "k"),
    [
        *((10, 500, k) for k in (64, 512, 4096)),
        (16, 4096, 512),
        *(
            pytest.param(*shape, k, marks=pytest.mark.slow)
            for shape in ((100, 512), (16, 4096), (256, 256), (8, 768))
            for k in (64, 512, 4096)
            if (*shape, k) != (16, 4096, 512)
        ),
    ],
)
def test_sjlt_on_outer_products_with_outliers(height, width, k):
    """Rows of a layer's gradient that all peak at the same input feature: equally spaced spikes, which a layout of
    regular shifts would pile up. Four such layers in a row; norms must be as good as with independent buckets."""
    generator = torch.Generator().manual_seed(k)
    layers = []
    for _ in range(4):
        inputs = torch.randn(width, generator=generator)
        inputs[3] *= 30
        layers.append(torch.outer(torch.randn(height, generator=generator), inputs).flatten())
    x = torch.cat(layers)[None]
    x /= x.norm()
    seeds = 400
    norms = [SparseProjector(x.shape[1], k, seed).project(x, 0).square().sum() for seed in range(seeds)]
    errors = torch.stack(norms) - 1
    variance = 2 * (1 - float((x**4).sum())) / k
    scaled = errors.double() / math.sqrt(variance)
    assert abs(float(scaled.mean())) < 4 * float(scaled.std()) / math.sqrt(seeds)
    error = float((scaled**2).std()) / math.sqrt(seeds)
    assert float((scaled**2).mean()) < 1 + 3 * error
    assert float((scaled.abs() > 4).double().mean()) <= 0.01


def spectrum(projector_class, total, k):
    """Eigenvalues of RᵀR / P, from tiles."""
    projector = projector_class(total, k, 5)
    gram = torch.zeros(k, k)
    for start in range(0, total, 8192):
        rows = projector.matrix(start, min(8192, total - start), 1)
        gram.addmm_(rows.T, rows)
    return torch.linalg.eigvalsh(gram.double() / total)


def check_edges(eigenvalues, total, k):
    """Marchenko and Pastur: with independent entries the spectrum ends at (1 ± √(k / P))²."""
    upper, lower = (1 + math.sqrt(k / total)) ** 2, (1 - math.sqrt(k / total)) ** 2
    assert abs(float(eigenvalues[-1]) / upper - 1) < 0.05
    assert abs(float(eigenvalues[0]) / lower - 1) < 0.05


@pytest.mark.few(3)
@pytest.mark.parametrize("total", [5000, 50_000])
@pytest.mark.parametrize("projector_class", [RademacherProjector, NormalProjector])
def test_spectrum_ends_at_the_edge(projector_class, total):
    """Correlated columns show as a top eigenvalue up to 20 times the edge."""
    check_edges(spectrum(projector_class, total, 512), total, 512)


def test_spectrum_of_half_a_million_rows():
    """Correlated columns would show as a top eigenvalue beyond the edge."""
    check_edges(spectrum(RademacherProjector, 500_000, 256), 500_000, 256)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("projector_class", "total", "k"),
    [
        (RademacherProjector, 5000, 2048),
        (RademacherProjector, 50_000, 2048),
        (NormalProjector, 5000, 2048),
        (NormalProjector, 50_000, 2048),
        (
            NormalProjector,
            500_000,
            512,
        ),  # a quarter of the columns: normal entries cost about 32 times as much to generate
    ],
)
def test_spectrum_of_larger_maps(projector_class, total, k):
    """Correlated columns would show as a top eigenvalue beyond the edge."""
    check_edges(spectrum(projector_class, total, k), total, k)


@pytest.mark.parametrize(("total", "k"), [(5000, 512), (50_000, 512), (50_000, 2048)])
def test_sjlt_outputs_are_evenly_loaded(total, k):
    """RᵀR of a map with one entry per row is diagonal, with the number of coordinates per output: its top eigenvalue
    stays below the edge of a dense map."""
    projector = SparseProjector(total, k, 5)
    loads = torch.zeros(k)
    for start in range(0, total, 500):
        rows = torch.zeros(500, k)
        projector.accumulate(rows, torch.eye(500), start, 0)
        assert torch.equal(rows.abs().sum(1), torch.ones(500))
        loads += rows.abs().sum(0)
    assert float(loads.max()) * k / total <= (1 + math.sqrt(k / total)) ** 2 * 1.05
