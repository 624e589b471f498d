"""Small runs of `TRAKer`: of a model, and of gradients that cost nothing, for tests that need hundreds of them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_trak.gradient_computers import AbstractGradientComputer
from hf_trak.projectors import AbstractProjector
from hf_trak.store.sealed import Finding
from hf_trak.traker import TRAKer
from hf_trak.traker.savers.check import check_run
from hf_trak.traker.savers.mmap_directory import MmapDirectory

N, M, IN, CLASSES = 10, 3, 5, 3
IDS = (0, 1, 2)
TARGETS = {"a": (N, N + M), "b": (N + M, N + 2 * M)}


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(IN, 4), torch.nn.Tanh(), torch.nn.Linear(4, CLASSES))


def state(member: int) -> dict[str, Tensor]:
    """Weights of checkpoint `member`: multiples of 1/64, exact in every precision."""
    numbers = iter(range(10_000))
    return {
        name: torch.tensor(
            [((next(numbers) * (37 + 2 * member) + 11 * member) % 97 - 48) / 64 for _ in range(w.numel())]
        )
        .reshape(w.shape)
        .float()
        for name, w in model().state_dict().items()
    }


def rows(start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Images and labels of some rows; the targets are rows `N … N + M`."""
    pixels = [[((17 * i + 5 * j * j) % 31 - 15) / 16 for j in range(IN)] for i in range(start, stop)]
    return torch.tensor(pixels), torch.tensor([i % CLASSES for i in range(start, stop)])


class Elementwise(AbstractGradientComputer):
    """Rows have the same bits in every batch, and cost nothing."""

    def __init__(self, model: Any, task: Any, grad_dim: Any, dtype: Any, device: Any) -> None:
        super().__init__(model, task, grad_dim, dtype, device)

    def load_model_params(self, model: torch.nn.Module) -> None:
        self.weight = model[0].weight.detach()[:, :2].flatten()

    def compute_per_sample_grad(self, batch: Any) -> Tensor:
        first = batch[0][:, :1] * self.weight + batch[0][:, 1:2]
        return torch.cat([first, batch[0].repeat(1, 3)[:, :16] / 4], dim=1)

    def compute_loss_grad(self, batch: Any) -> Tensor:
        return batch[0][:, 2] + 2 + batch[1]


def make(directory: Path, **changes: Any) -> TRAKer:
    arguments: dict[str, Any] = {"use_half_precision": False, "lambda_reg": 0.05, "logging_level": 30, **changes}
    return TRAKer(
        torch.nn.Sequential(torch.nn.Linear(IN, 4)), "image_classification", N, directory, device="cpu",
        projector=Shortened(), gradient_computer=Elementwise, **arguments,
    )  # fmt: skip


class Shortened(AbstractProjector):
    """The first 8 of the 24 parameters."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(grad_dim=24, proj_dim=8, seed=seed, proj_type="first", device="cpu")

    def project(self, grads: Any, model_id: int) -> Tensor:
        return grads[:, :8]


def weights(member: int) -> dict[str, Tensor]:
    return {name: value for name, value in state(member).items() if name.startswith("0.")}


def featurize(traker: TRAKer, model_id: int, stop: int = N, shift: int = 0, weights_of: int = 0) -> None:
    traker.load_checkpoint(weights(model_id + weights_of), model_id)
    traker.featurize(rows(shift, stop + shift), inds=range(stop))


def score(traker: TRAKer, name: str, ids: tuple[int, ...], weights_of: int = 0) -> None:
    for model_id in ids:
        traker.start_scoring_checkpoint(name, weights(model_id + weights_of), model_id, M)
        traker.score(rows(*TARGETS[name]), inds=range(M))


def run(directory: Path, **changes: Any) -> Tensor:
    """The whole script, over three checkpoints."""
    traker = make(directory, **changes)
    for model_id in IDS:
        featurize(traker, model_id)
    traker.finalize_features()
    score(traker, "a", IDS)
    return traker.finalize_scores("a")


def half(directory: Path, shift: int = 0, weights_of: int = 0, **changes: Any) -> TRAKer:
    """The same script, stopped before the third checkpoint was complete; with two experiments."""
    traker = make(directory, **changes)
    for model_id in IDS[:2]:
        featurize(traker, model_id, shift=shift, weights_of=weights_of)
    featurize(traker, IDS[2], stop=6, shift=shift, weights_of=weights_of)
    traker.finalize_features(IDS[:2])
    for name in TARGETS:
        score(traker, name, IDS[:2], weights_of)
        traker.finalize_scores(name, IDS[:2])
    return traker


def read(directory: Path, name: str) -> Tensor:
    return MmapDirectory(directory).read_scores(name)


def findings(directory: Path) -> list[Finding]:
    if not (directory / "metadata.json").exists():
        return [Finding(directory / "metadata.json", "missing")]
    return list(check_run(directory))
