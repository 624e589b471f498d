"""The task `diffusion`: features of noised rows against plain autograd, the same bits, and means over draws."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from sklearn.datasets import load_digits
from torch import Tensor, nn
from trak_options import trak_config
from transformers import default_data_collator

from hf_trak import TrakAttributor
from hf_trak.hub.loading import _task
from hf_trak.modelout_functions import DiffusionModelOutput
from hf_trak.modelout_functions.diffusion import NOISED, TIMESTEPS, WANTED
from hf_trak.modelout_functions.function import task_identity

SIDE = 8
TOTAL = 100


def alphas() -> list[float]:
    """ā_t of betas that grow linearly, as those of DDPM."""
    return torch.cumprod(1 - torch.linspace(1e-3, 0.08, TOTAL), 0).tolist()


def schedule(kind: str = "epsilon") -> dict[str, Any]:
    return {"alphas_cumprod": alphas(), "prediction_type": kind}


class Denoiser(nn.Module):
    """A small denoising network with classes, called as those of `diffusers`."""

    def __init__(self, learned_variance: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(1, 6, 3, padding=1)
        self.time = nn.Linear(2, 6)
        self.classes = nn.Embedding(10, 6)
        self.norm = nn.GroupNorm(2, 6)
        self.last = nn.Conv2d(6, 2 if learned_variance else 1, 3, padding=1)

    def forward(self, sample: Tensor, timestep: Tensor, class_labels: Tensor | None = None) -> Any:
        angle = timestep.to(sample.dtype) * (3.0 / TOTAL)
        shift = self.time(torch.stack([angle.sin(), angle.cos()], dim=1))
        if class_labels is not None:
            shift = shift + self.classes(class_labels)
        hidden = nn.functional.silu(self.norm(self.first(sample) + shift[:, :, None, None]))
        return (self.last(hidden),)


def images(count: int = 6, labels: bool = True, seed: int = 0) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    columns: dict[str, Any] = {"pixel_values": torch.randn(count, 1, SIDE, SIDE, generator=generator).tolist()}
    if labels:
        columns["class_labels"] = torch.randint(0, 10, (count,), generator=generator).tolist()
    return Dataset.from_dict(columns)


def attributor(directory: Path, rows: Any, task: Any = None, model: Any = None, **options: Any) -> TrakAttributor:
    settings = {"proj_type": "none", "use_cpu": True, "feature_dtype": "float32", **options}
    made = DiffusionModelOutput(schedule(), timesteps=4) if task is None else task
    config = trak_config(output_dir=str(directory), **settings)
    return TrakAttributor(Denoiser() if model is None else model, config, rows, task=made)


def features(made: TrakAttributor) -> Tensor:
    return torch.cat([shard.grads for shard in made.features.store.train(0)])


def expected_of(model: nn.Module, batch: Any, function: str) -> Tensor:
    """Plain autograd for a batch of one noised row, one timestep after the other."""
    total = torch.zeros(())
    conditions = {n: v for n, v in batch.items() if n not in (NOISED, TIMESTEPS, WANTED)}
    steps = batch[TIMESTEPS][0]
    for place, step in enumerate(steps):
        prediction = model(batch[NOISED][:, place], timestep=step[None], **conditions)[0][:, :1]
        error = batch[WANTED][:, place] - prediction
        total = total + (prediction.square().mean() if function == "square" else -error.square().mean())
    taken = torch.autograd.grad(total / len(steps), list(model.parameters()), allow_unused=True)
    filled = [torch.zeros_like(p) if g is None else g for g, p in zip(taken, model.parameters(), strict=True)]
    return torch.cat([gradient.flatten() for gradient in filled])


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("function", "kind", "labels"),
    [
        ("loss", "epsilon", True),
        ("square", "epsilon", False),
        ("loss", "v_prediction", True),
        ("loss", "sample", True),
    ],
)
def test_features_are_the_gradients_of_noised_rows(function: str, kind: str, labels: bool, tmp_path: Path) -> None:
    rows, task = images(labels=labels), DiffusionModelOutput(schedule(kind), function, timesteps=4)  # type: ignore[arg-type]
    model = Denoiser(learned_variance=kind == "sample")
    made = attributor(tmp_path, rows, task, model, num_draws=2, per_device_batch_size=3).featurize()
    batches = made.features.featurizer().batches(rows)
    expected = torch.stack(
        [sum(expected_of(model, batches.alone(row, draw), function) for draw in range(2)) / 2 for row in range(6)]
    )
    error = (features(made) - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(error.max()) <= 1e-5


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "sample"])
def test_noise_is_added_by_the_schedule(kind: str) -> None:
    collate = DiffusionModelOutput(schedule(kind), timesteps=[3, 50]).collator(default_data_collator)
    rows = [images()[row] for row in range(2)]
    torch.manual_seed(5)
    batch = collate(rows)
    torch.manual_seed(5)
    noise = torch.randn(2, 2, 1, SIDE, SIDE)
    clean = torch.tensor([row["pixel_values"] for row in rows])
    assert batch[TIMESTEPS].tolist() == [[3, 50], [3, 50]]
    for place, step in enumerate((3, 50)):
        signal, spread = alphas()[step] ** 0.5, (1 - alphas()[step]) ** 0.5
        torch.testing.assert_close(batch[NOISED][:, place], signal * clean + spread * noise[:, place])
        wanted = {
            "epsilon": noise[:, place],
            "v_prediction": signal * noise[:, place] - spread * clean,
            "sample": clean,
        }
        torch.testing.assert_close(batch[WANTED][:, place], wanted[kind])


@pytest.mark.slow
def test_two_runs_have_the_same_bits_and_other_seeds_others(tmp_path: Path) -> None:
    rows = images()
    torch.manual_seed(1)
    first = features(attributor(tmp_path / "a", rows).featurize())
    torch.manual_seed(2)
    assert torch.equal(features(attributor(tmp_path / "b", rows).featurize()), first)
    parts = attributor(tmp_path / "c", rows, shard_size=2)
    parts.featurize(part=(1, 2))
    torch.rand(3)
    again = attributor(tmp_path / "c", rows, shard_size=2).featurize()
    torch.testing.assert_close(features(again), first, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(features(attributor(tmp_path / "d", rows, seed=1).featurize()), first, rtol=1e-2)


@pytest.mark.slow
def test_the_cosine_of_two_seeds_rises_with_draws_as_theory_says(tmp_path: Path) -> None:
    """cos ≈ |μ|² / (|μ|² + σ²/D), μ and σ² being mean and variance over draws."""
    rows, model = images(4), Denoiser()
    task = DiffusionModelOutput(schedule(), timesteps=8)
    batches = attributor(tmp_path / "batches", rows, task, seed=7).featurize().features.featurizer().batches(rows)
    many = torch.stack(
        [torch.stack([expected_of(model, batches.alone(row, draw), "loss") for draw in range(64)]) for row in range(4)]
    ).double()
    variance = many.var(dim=1).sum(dim=-1)
    signal = many.mean(dim=1).square().sum(dim=-1) - variance / 64  # without the bias of the mean's own spread
    found = {}
    for draws in (1, 4, 16):
        pair = [
            features(attributor(tmp_path / f"{draws} {seed}", rows, task, num_draws=draws, seed=seed).featurize())
            for seed in range(4)
        ]
        cosines = [nn.functional.cosine_similarity(a, b) for i, a in enumerate(pair) for b in pair[:i]]
        found[draws] = float(torch.stack(cosines).mean())
        assert abs(found[draws] - float((signal / (signal + variance / draws)).mean())) < 0.1 / draws
    assert found[1] < found[4] < found[16]


@pytest.mark.slow
@pytest.mark.parametrize(("function", "first"), [("loss", 9), ("square", 10)])
def test_own_copies_come_first(function: str, first: int, tmp_path: Path) -> None:
    """Though the noise of targets is another one: by the error, of nine of ten rows at least."""
    digits = load_digits()
    pixels = torch.tensor(digits.images[:10], dtype=torch.float32)[:, None] / 8 - 1
    rows = Dataset.from_dict({"pixel_values": pixels.tolist(), "class_labels": digits.target[:10].tolist()})
    task = DiffusionModelOutput(schedule(), function)  # type: ignore[arg-type]
    made = attributor(tmp_path, rows, task, num_draws=32).featurize()
    best = [row["trak_indices"][0] for row in made.attribute(rows, top_k=1)]
    assert sum(found == row for row, found in enumerate(best)) >= first


def test_latents_and_embedded_prompts_are_columns(tmp_path: Path) -> None:
    class Conditional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner, self.read = Denoiser(), nn.Linear(5, 1)

        def forward(self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> Any:
            shift = self.read(encoder_hidden_states).mean(dim=1)[:, :, None, None]
            return (self.inner(sample + shift, timestep)[0],)

    rows = images(5, labels=False).rename_column("pixel_values", "latents")
    rows = rows.add_column("encoder_hidden_states", torch.randn(5, 3, 5).tolist())
    model, task = Conditional(), DiffusionModelOutput(schedule(), timesteps=4, column="latents")
    made = attributor(tmp_path, rows, task, model, per_device_batch_size=3).featurize()
    batches = made.features.featurizer().batches(rows)
    expected = torch.stack([expected_of(model, batches.alone(row), "loss") for row in range(5)])
    error = (features(made) - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(error.max()) <= 1e-5


def test_timesteps_are_the_middles_of_equal_parts() -> None:
    def steps(timesteps: Any) -> list[int]:
        collate: Any = DiffusionModelOutput(schedule(), timesteps=timesteps).collator(default_data_collator)
        return collate([{"pixel_values": torch.zeros(1, 2, 2)}])[TIMESTEPS][0].tolist()

    assert steps(4) == [12, 37, 62, 87]
    assert steps(1) == [50]
    assert steps([99, 0]) == [99, 0]
    assert steps(TOTAL) == list(range(TOTAL))


def test_what_cannot_be_noised_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"was given no scheduler.*DiffusionModelOutput\(scheduler\)"):
        attributor(tmp_path / "a", images(), "diffusion").featurize()
    with pytest.raises(TypeError, match="a dict without `alphas_cumprod`"):
        DiffusionModelOutput({"sigmas": [1.0]})
    with pytest.raises(ValueError, match="`prediction_type` 'flow'"):
        DiffusionModelOutput(schedule("flow"))
    with pytest.raises(ValueError, match="`function` is 'norm'"):
        DiffusionModelOutput(schedule(), "norm")  # type: ignore[arg-type]
    for wrong in (0, TOTAL + 1, [], [TOTAL]):
        with pytest.raises(ValueError, match="`timesteps`"):
            DiffusionModelOutput(schedule(), timesteps=wrong)
    collate = DiffusionModelOutput(schedule(), column="latents").collator(default_data_collator)
    with pytest.raises(ValueError, match=r"'class_labels'.*Expected a float tensor 'latents'"):
        collate([images()[0]])
    task = DiffusionModelOutput(schedule())
    with pytest.raises(ValueError, match=r"no 'trak_noised'"):
        task.model_inputs({"pixel_values": torch.zeros(1, 1, SIDE, SIDE)})
    batch = task.collator(default_data_collator)([images()[0]])
    with pytest.raises(ValueError, match="returned a prediction of "):
        task.output((torch.zeros(10, 5),), batch)


def test_an_index_knows_the_task_and_its_schedule() -> None:
    task = DiffusionModelOutput(schedule("v_prediction"), "square", timesteps=[3, 5], column="latents")
    index: Any = SimpleNamespace(store=SimpleNamespace(config={"task": task_identity(task)}), name="index")
    built = _task(index)
    assert task_identity(built) == task_identity(task)
    assert isinstance(built, DiffusionModelOutput) and built.function == "square"
