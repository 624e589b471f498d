"""dattri 0.3.0: TRAK, TracIn and EK-FAC as its examples have them (`experiments/`, `examples/`).

- TRAK: one projection of all parameters, no regularization. The number of features is 512 for classifiers and 2,048
  for language models, as in its benchmarks, but at most n / 2: without regularization more features have no inverse. A
  language model's f is there the margin of a row's mean loss, as if the row were one label.
- TracIn: losses at three checkpoints of one run, each weighing the learning rate, projected to 512 dimensions, which
  happens where no projection is named.
- EK-FAC: losses with the labels of the data, and linear layers only. Inputs `(B, T, d)` end in an `UnboundLocalError`.
  The library rotates gradients by the matrix of eigenvectors instead of its transpose, and so corrects eigenvalues in
  another basis than theirs. Its damping is 0 unless told otherwise, which divides by eigenvalues that are zero; .1 is
  what its own tests have.

The library draws the projection anew for every batch, and goes through all targets again for every batch of training
rows. Its examples have batches of 500 to 5,000 rows for that; here they are as large as memory allows.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from dattri.algorithm import trak as trak_module
from dattri.algorithm.influence_function import IFAttributorEKFAC
from dattri.algorithm.tracin import TracInAttributor
from dattri.algorithm.trak import TRAKAttributor
from dattri.task import AttributionTask
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import TrainingArguments

from quality_bench.job import BATCH, Cost, Job, Method, Scores, bare
from quality_bench.methods.large_model import is_large
from quality_bench.methods.linear_layers import trained_layers, without_conv1d
from quality_bench.objective import label_tokens, losses, margins, probabilities

BLOCK_BYTES = 2**28
"""Memory for the gradients of a batch."""
LARGEST_BATCH = 512

LAMBDAS = (0.01, 0.1, 0.3, 1.0, 3.0, 10.0)
"""λ of TRAK, relative to trace(XᵀX) / min(n, k)."""
WIDE = (2048, 4096)
"""Numbers of features k of further variants of TRAK: the most that its benchmarks have, and hf_trak's default. Large
models have the first one only."""

TESTED_DAMPING = 0.1
DAMPINGS = (1.0, 1e-2, 1e-3, 1e-4, 1e-5)
"""Further dampings of EK-FAC: what its benchmark searches for influence functions."""

OutputOf = Callable[[Tensor, Tensor], Tensor]
"""Logits and labels of some rows to one number for each, `(B,)`."""


def sequence_margins(logits: Tensor, labels: Tensor) -> Tensor:
    """log p − log(1 − p) of the geometric mean p of a row's probabilities, `(B,)`."""
    log = sequence_log_probabilities(logits, labels)
    return log - torch.log1p(-log.exp())


def sequence_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    return sequence_log_probabilities(logits, labels).exp()


def sequence_log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    return -losses(logits, labels) / label_tokens(logits, labels)[2].sum(1).clamp_min(1)


def of_row(model: nn.Module, output: OutputOf) -> Callable[[dict[str, Tensor], tuple[Tensor, ...]], Tensor]:
    """The output of one row, whose tensors have no batch dimension, as a function of the parameters."""
    mean = of_batch(model, output)
    return lambda parameters, row: mean(parameters, tuple(tensor.unsqueeze(0) for tensor in row))


def of_batch(model: nn.Module, output: OutputOf) -> Callable[[dict[str, Tensor], tuple[Tensor, ...]], Tensor]:
    """The mean output of a batch, as a function of the parameters."""

    def mean(parameters: dict[str, Tensor], batch: tuple[Tensor, ...]) -> Tensor:
        *inputs, labels = batch
        return output(torch.func.functional_call(model, parameters, tuple(inputs)), labels).mean()

    return mean


def rows(job: Job, part: str, model: nn.Module) -> DataLoader:
    inputs, labels = job.tensors(part)
    of_memory = BLOCK_BYTES // (4 * sum(parameter.numel() for parameter in model.parameters()))
    return DataLoader(TensorDataset(*inputs, labels), batch_size=min(max(of_memory, BATCH), LARGEST_BATCH))


def task(model: nn.Module, states: list[dict[str, Tensor]], function: Callable[..., Tensor]) -> AttributionTask:
    """The library copies one state after another into the model, which therefore must own none of them."""
    return AttributionTask(function, model, states)


def projection(job: Job, proj_dim: int, proj_type: str = "normal") -> dict[str, Any]:
    """All arguments are named every time: the library keeps what one attributor names for those after it."""
    return {
        "proj_dim": proj_dim,
        "proj_max_batch_size": 32,
        "proj_seed": job.seed,
        "proj_type": proj_type,
        "device": "cpu",
    }


@contextmanager
def recorded() -> Iterator[list[Tensor]]:
    """Features of batches in the order in which the library makes them; it keeps none."""
    kept: list[Tensor] = []
    random_project = trak_module.random_project

    def project(*given: Any, **options: Any) -> Callable[..., Tensor]:
        own = random_project(*given, **options)

        def keep(gradients: Tensor, ensemble_id: int = 0) -> Tensor:
            made = own(gradients, ensemble_id=ensemble_id)
            kept.append(made.double())
            return made

        return keep

    with mock.patch.object(trak_module, "random_project", project):
        yield kept


def trak(count: int) -> Method:
    """TRAK with this many independent models."""

    def attribute(job: Job, cost: Cost) -> Scores:
        model, states = bare(job), [bare(job, each).state_dict() for each in job.independent(count)]
        train, targets = (rows(job, part, model) for part in ("train", "targets"))
        n, language = len(job.case.train), job.case.task == "causal_lm"
        narrow = min(2048 if language else 512, n // 2)

        def run(outputs: tuple[OutputOf, OutputOf], proj_dim: int, spent: Cost, **options: Any) -> Scores:
            f, probability = (of_row(model, output) for output in outputs)
            given = {"projector_kwargs": projection(job, proj_dim), "device": "cpu"} | options
            own = TRAKAttributor(task(model, states, f), probability, **given)
            with recorded() as features:
                spent.time("fit", lambda: own.cache(train))
                found = {"default": spent.time("score", lambda: own.attribute(targets).double().numpy())}
            return found | regularized(torch.cat(features), count, n, own.Q.double().numpy())

        with torch.no_grad():
            of_labels = (margins, probabilities)
            recommended = (sequence_margins, sequence_probabilities) if language else of_labels
            found = run(recommended, narrow, cost)
            cost.bytes_per_row = 4.0 * (narrow * count + 1)
            if language and not is_large(model):
                found |= {f"sum of margins, {name}": scores for name, scores in run(of_labels, narrow, Cost()).items()}
            for k in WIDE[:1] if is_large(model) else WIDE:
                wide = run(recommended, k, Cost(), regularization=1.0)
                found |= {f"k = {k}, {name}": scores for name, scores in wide.items() if name != "default"}
        return found

    return attribute


def regularized(features: Tensor, count: int, n: int, q: np.ndarray) -> Scores:
    """X(XᵀX + λI)⁻¹tᵀ ∘ q = (XXᵀ + λI)⁻¹Xtᵀ ∘ q, averaged over models as the library does, `(n, m)`.

    Args:
        features: X `(n, k)` of each model, then t `(m, k)` of each model, one below the other.
        count: number of models.
        n: number of training rows.
        q: mean over models of 1 − p, `(n,)`.
    """
    found: Scores = {f"λ {relative:g}": np.zeros(()) for relative in LAMBDAS}
    of_train, of_targets = features[: count * n].chunk(count), features[count * n :].chunk(count)
    for x, t in zip(of_train, of_targets, strict=True):
        few_features = x.shape[1] < n
        values, vectors = torch.linalg.eigh(x.T @ x if few_features else x @ x.T)
        left, right = (x @ vectors, vectors.T @ t.T) if few_features else (vectors, vectors.T @ (x @ t.T))
        unit = values.sum() / len(values)
        for relative, name in zip(LAMBDAS, found, strict=True):
            solved = left @ (right / (values.clamp(min=0) + relative * unit)[:, None])
            found[name] = found[name] + solved.numpy() * q[:, None] / count
    return found


def tracin(job: Job, cost: Cost) -> Scores:
    """TracIn; its variants without projection, and of unit norm, which the library's benchmarks call cosines."""
    model, states = bare(job), [bare(job, each).state_dict() for each in job.of_one_run()]
    train, targets = (rows(job, part, model) for part in ("train", "targets"))
    function = task(model, states, of_row(model, losses))
    rate = job.case.training.get("learning_rate", TrainingArguments.learning_rate)

    def score(proj_type: str, normalized: bool) -> np.ndarray:
        weights = torch.full((len(states),), float(rate))
        own = TracInAttributor(function, weights, normalized, projection(job, 512, proj_type))
        return own.attribute(train, targets).double().numpy()

    with torch.no_grad():
        found = {"default": cost.time("score", lambda: score("normal", False))}
        found["not projected"] = score("identity", False)
        if not is_large(model):
            found["cosines, not projected"] = score("identity", True)
    return found


def ekfac(job: Job, cost: Cost) -> Scores:
    """EK-FAC at several dampings."""
    model = without_conv1d(bare(job))
    train, targets = (rows(job, part, model) for part in ("train", "targets"))
    layers = trained_layers(model, nn.Linear)
    function = task(model, [without_conv1d(bare(job)).state_dict()], of_batch(model, losses))
    own = IFAttributorEKFAC(function, layers, damping=TESTED_DAMPING)
    cost.time("fit", lambda: own.cache(train))

    def score(damping: float) -> np.ndarray:
        own.damping = damping
        with torch.no_grad():
            return own.attribute(train, targets).double().numpy()

    found = {"default": cost.time("score", lambda: score(own.damping))}
    return found | {f"damping {damping:g}": score(damping) for damping in DAMPINGS}


METHODS: dict[str, Method] = {"TRAK": trak(1), "TRAK × 3": trak(3), "TracIn": tracin, "EK-FAC": ekfac}
