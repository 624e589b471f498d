"""TRAK as the README of hf_trak shows it, and variants of it that may become its defaults.

With gradients X `(n, k)` of training rows, t `(m, k)` of targets, and weights q `(n,)`, for each checkpoint:

    τ = (mean X (XᵀX + λI)⁻¹ tᵀ) ∘ (mean q)        λ = relative λ · trace(XᵀX) / min(n, k)

The library computes the default variant; others are computed here from the features that it has written.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import disable_progress_bars
from torch import Tensor, nn

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.modelout_functions import LossModelOutput, get_task
from hf_trak.scores.ridge import RidgeSystem, ridge_lambda
from quality_bench.job import BATCH, Cost, Job, Method, Scores
from quality_bench.methods.coded import by_bytes
from quality_bench.methods.curved import exact
from quality_bench.methods.replayed import METHODS as REPLAYS

LAMBDAS = (0.03, 0.1, 1.0, 3.0, 10.0)
"""Relative λ beside the default."""

NARROW = (128, 256)
"""Numbers of features k that are small beside the number of training rows."""

_TARGETS = "targets"


@dataclass(frozen=True)
class Features:
    """Features of one checkpoint, float64: X `(n, k)`, t `(m, k)` and q `(n,)`."""

    rows: Tensor
    targets: Tensor
    q: Tensor

    @classmethod
    def of(cls, own: TrakAttributor, model_id: int) -> "Features":
        """Read the features of an attributor that has scored the targets."""
        shards = list(own.features.store.train(model_id))
        rows = torch.cat([shard.grads for shard in shards])
        q = torch.cat([shard.out_to_loss for shard in shards])
        targets = torch.cat([shard.grads for shard in own.features.store.saved_targets(_TARGETS, model_id)])
        return cls(rows.double(), targets.double(), q.double())

    def products(self, relative: Sequence[float]) -> list[Tensor]:
        """X (XᵀX + λI)⁻¹ tᵀ = (XXᵀ + λI)⁻¹ X tᵀ `(n, m)` for each relative λ, from the smaller system."""
        n, k = self.rows.shape
        trace = float(self.rows.square().sum())
        lambdas = [ridge_lambda(trace, n, k, value) for value in relative]
        if k < n:
            gram = self.rows.T @ self.rows
            return [self.rows @ RidgeSystem(gram, lam).solve(self.targets).T for lam in lambdas]
        gram, cross = self.rows @ self.rows.T, self.targets @ self.rows.T
        return [RidgeSystem(gram, lam).solve(cross).T for lam in lambdas]


def ridge_scores(checkpoints: Sequence[Features], relative: Sequence[float]) -> list[np.ndarray]:
    """τ `(n, m)` of an ensemble for each relative λ."""
    products = zip(*(each.products(relative) for each in checkpoints), strict=True)
    q = torch.stack([each.q for each in checkpoints]).mean(0)[:, None]
    return [(torch.stack(of_one_lambda).mean(0) * q).numpy() for of_one_lambda in products]


def last(job: Job) -> list[nn.Module]:
    return [job.model]


def independent(job: Job) -> list[nn.Module]:
    return job.independent(3)


def of_one_run(job: Job) -> list[nn.Module]:
    return job.of_one_run()


def trak(
    models: Callable[[Job], list[nn.Module]] = last,
    loss: bool = False,
    further: Callable[[int, int], dict[str, float]] = lambda n, k: {},
    **options: int,
) -> Method:
    """Make a method that the library has arguments for.

    Args:
        models: gives the checkpoints.
        loss: whether training rows have gradients of minus their loss and q = 1, instead of those of f and q = ∂L/∂f.
        further: gives relative λ by the name of a variant, from n and k.
        options: arguments of `TrakConfig`.
    """

    def attribute(job: Job, cost: Cost) -> Scores:
        checkpoints = models(job)
        own = attributor(job, checkpoints[0], loss, **options)
        cost.time("fit", lambda: own.featurize(checkpoints))
        scores = {"default": cost.time("score", lambda: library_scores(own, job, checkpoints))}
        cost.bytes_per_row = 4.0 * own.features.proj_dim * len(checkpoints)
        features = [Features.of(own, model_id) for model_id in range(len(checkpoints))]
        relative = {f"λ = {value:g}": value for value in LAMBDAS} | further(len(job.case.train), own.features.proj_dim)
        return scores | dict(zip(relative, ridge_scores(features, list(relative.values())), strict=True))

    return attribute


def attributor(job: Job, model: nn.Module, loss: bool, **options: Any) -> TrakAttributor:
    disable_progress_bars()
    config = TrakConfig(output_dir=str(job.directory), seed=job.seed, per_device_batch_size=BATCH, **options)
    task = get_task(job.case.task)
    return TrakAttributor(model, config, job.case.train, task=LossModelOutput(task) if loss else task)


def library_scores(own: TrakAttributor, job: Job, checkpoints: list[nn.Module]) -> np.ndarray:
    """All scores `(n, m)`, float64."""
    scored = own.attribute(job.case.targets, top_k=None, name=_TARGETS, checkpoints=checkpoints, method="index")
    return np.stack(scored.with_format("numpy")["trak_scores"][:]).T.astype(np.float64)


def rules(n: int, k: int) -> dict[str, float]:
    """Give λ that fall with k ≪ n; the first rule came out of an earlier sweep."""
    root = min(1.0, k / n) ** 0.5
    return {"λ = 0.5 √(k / n)": 0.5 * root, "λ = √(k / n)": root}


def changed(change: Callable[[Features], Features], models: Callable[[Job], list[nn.Module]] = last) -> Method:
    """Make a method of changed features, at the library's default λ.

    Each checkpoint's products are weighted by its own q. The cost includes the scores of unchanged features, since the
    library writes features of targets when it scores.
    """

    def attribute(job: Job, cost: Cost) -> Scores:
        checkpoints = models(job)
        own = attributor(job, checkpoints[0], loss=False)
        cost.time("fit", lambda: own.featurize(checkpoints))
        cost.time("score", lambda: library_scores(own, job, checkpoints))
        cost.bytes_per_row = 4.0 * own.features.proj_dim * len(checkpoints)
        features = [change(Features.of(own, model_id)) for model_id in range(len(checkpoints))]

        def scores(relative: Sequence[float]) -> list[np.ndarray]:
            of_checkpoints = zip(*(ridge_scores([each], relative) for each in features), strict=True)
            return [np.mean(of_one_lambda, axis=0) for of_one_lambda in of_checkpoints]

        default = cost.time("score", lambda: scores([own.args.lambda_relative])[0])
        return {"default": default} | dict(zip((f"λ = {value:g}" for value in LAMBDAS), scores(LAMBDAS), strict=True))

    return attribute


def weighted_gram(features: Features) -> Features:
    """Weight every row of the Gram matrix by its q: X (Xᵀ diag(q) X + λI)⁻¹ tᵀ ∘ q.

    The Gauss-Newton matrix of a classifier's loss weights a row by the curvature of its loss. The trace of that of the
    softmax, 1 − Σ_c p_c², is the mean of q = 1 − p_y over labels y that are drawn from the model. (For logistic
    regression the TRAK paper, arXiv 2303.14186, has the weight p (1 − p), which it leaves out of its estimator.)
    """
    root = features.q.sqrt()
    return Features(features.rows * root[:, None], features.targets, root)


def centred(features: Features) -> Features:
    """Subtract the mean gradient of training rows from all gradients, those of targets too."""
    mean = features.rows.mean(0)
    return Features(features.rows - mean, features.targets - mean, features.q)


def rows_centred(features: Features) -> Features:
    """Subtract the mean gradient of training rows from their own gradients."""
    return Features(features.rows - features.rows.mean(0), features.targets, features.q)


def unit_norm(features: Features) -> Features:
    """Give gradients of training rows norm 1, unless they are zero. A target's norm does not change its order."""
    norms = features.rows.norm(dim=1, keepdim=True)
    return Features(features.rows / torch.where(norms > 0, norms, 1.0), features.targets, features.q)


METHODS: dict[str, Method] = {
    "TRAK": trak(),
    "TRAK × 3": trak(independent),
    "TRAK, 3 of one run": trak(of_one_run),
    "TRAK, loss gradients": trak(loss=True),
    "TRAK, loss gradients × 3": trak(independent, loss=True),
    "TRAK, loss gradients, 3 of one run": trak(of_one_run, loss=True),
    **{f"TRAK, k = {k}": trak(further=rules, proj_dim=k) for k in NARROW},
    "TRAK, Gram weighted by q": changed(weighted_gram),
    "TRAK, Gram weighted by q, 3 of one run": changed(weighted_gram, of_one_run),
    "TRAK, centred": changed(centred),
    "TRAK, rows centred": changed(rows_centred),
    "TRAK, unit norm": changed(unit_norm),
    "EK-FAC": exact(attributor, last, "ekfac"),
    "EK-FAC, 3 of one run": exact(attributor, of_one_run, "ekfac"),
    "Shampoo": exact(attributor, last, "shampoo"),
    "TRAK, codes": by_bytes(attributor, last),
    "hybrid": exact(attributor, last, "hybrid"),
    "hybrid, 3 of one run": exact(attributor, of_one_run, "hybrid"),
    **REPLAYS,
}
