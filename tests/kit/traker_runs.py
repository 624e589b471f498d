"""Small runs of `TRAKer` whose gradients cost nothing, for tests that need hundreds of them."""

from pathlib import Path
from typing import Any

import torch
from data import format_1_traker as old
from torch import Tensor

from hf_trak.gradient_computers import AbstractGradientComputer
from hf_trak.projectors import AbstractProjector
from hf_trak.savers import MmapSaver, SafetensorsSaver
from hf_trak.store.shards import Finding
from hf_trak.store.verification import verify_store
from hf_trak.traker import TRAKer
from hf_trak.traker.savers.mmap_saver import read_scores, verify_mmap
from hf_trak.traker.savers.safetensors_saver import verify_traker

SAVERS = {"mmap": MmapSaver, "safetensors": SafetensorsSaver}
IDS = (0, 1, 2)
TARGETS = {"a": (old.N, old.N + old.M), "b": (old.N + old.M, old.N + 2 * old.M)}


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


def make(directory: Path, kind: str, **changes: Any) -> TRAKer:
    arguments: dict[str, Any] = {"use_half_precision": False, "lambda_reg": 0.05, "logging_level": 30, **changes}
    return TRAKer(
        torch.nn.Sequential(torch.nn.Linear(old.IN, 4)), "image_classification", old.N, directory, device="cpu",
        saver=SAVERS[kind], projector=Shortened(), gradient_computer=Elementwise, **arguments,
    )  # fmt: skip


class Shortened(AbstractProjector):
    """The first 8 of the 24 parameters."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(grad_dim=24, proj_dim=8, seed=seed, proj_type="first", device="cpu")

    def project(self, grads: Any, model_id: int) -> Tensor:
        return grads[:, :8]


def weights(member: int) -> dict[str, Tensor]:
    return {name: value for name, value in old.state(member).items() if name.startswith("0.")}


def featurize(traker: TRAKer, model_id: int, stop: int = old.N, shift: int = 0, weights_of: int = 0) -> None:
    traker.load_checkpoint(weights(model_id + weights_of), model_id)
    traker.featurize(old.rows(shift, stop + shift), inds=range(stop))


def score(traker: TRAKer, name: str, ids: tuple[int, ...], weights_of: int = 0) -> None:
    for model_id in ids:
        traker.start_scoring_checkpoint(name, weights(model_id + weights_of), model_id, old.M)
        traker.score(old.rows(*TARGETS[name]), inds=range(old.M))


def run(directory: Path, kind: str, **changes: Any) -> Tensor:
    """The whole script, over three checkpoints."""
    traker = make(directory, kind, **changes)
    for model_id in IDS:
        featurize(traker, model_id)
    traker.finalize_features()
    score(traker, "a", IDS)
    return traker.finalize_scores("a")


def half(directory: Path, kind: str, shift: int = 0, weights_of: int = 0, **changes: Any) -> TRAKer:
    """The same script, stopped before the third checkpoint was complete; with two experiments."""
    traker = make(directory, kind, **changes)
    for model_id in IDS[:2]:
        featurize(traker, model_id, shift=shift, weights_of=weights_of)
    featurize(traker, IDS[2], stop=6, shift=shift, weights_of=weights_of)
    traker.finalize_features(IDS[:2])
    for name in TARGETS:
        score(traker, name, IDS[:2], weights_of)
        traker.finalize_scores(name, IDS[:2])
    return traker


def read(directory: Path, kind: str, name: str) -> Tensor:
    if kind == "mmap":
        return read_scores(directory, name)
    return make(directory, kind).saver.read_scores(name)


def findings(directory: Path, kind: str) -> list[Finding]:
    configuration = directory / ("metadata.json" if kind == "mmap" else "trak_config.json")
    if not configuration.exists():
        return [Finding(configuration, "missing")]
    if kind == "mmap":
        return list(verify_mmap(directory))
    every = [*verify_store(directory), *verify_traker(directory)]
    return [one for one in every if one.path.name != "gram.safetensors"]  # TRAKer computes it as it goes
