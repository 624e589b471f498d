"""kronfluence 1.0.1: EK-FAC influence as its examples have it (`examples/{cifar,glue,wikitext}/analyze.py`).

As there, the Fisher is estimated from labels that are drawn from the model, the measurement of a classifier is the
negative margin and that of a language model the loss. The library is used as it is; two things are done around it:

- It knows `nn.Linear` and `nn.Conv2d` alone. GPT-2's `Conv1D` becomes an equal `nn.Linear`, as in its example. Norms
  and embeddings are left out, and so is a head that shares the weight of an embedding, as in its examples.
- It follows every layer that it knows, also frozen ones. The task names those that were trained, so that of a LoRA
  model the adapters are followed and nothing else.
"""

from collections.abc import Callable

import numpy as np
import torch
from kronfluence.analyzer import Analyzer, prepare_model
from kronfluence.arguments import FactorArguments, ScoreArguments
from kronfluence.task import Task
from torch import Tensor, nn
from torch.utils.data import Dataset

from quality_bench.job import BATCH, Cost, Job, Method, Scores, bare
from quality_bench.methods.large_model import is_large
from quality_bench.methods.linear_layers import trained_layers, without_conv1d
from quality_bench.objective import IGNORED, losses, margins

SHIPPED_DAMPING = 1e-8
"""The default of `ScoreArguments`."""

DAMPINGS = (1e-4, 1e-2, 1e-6, 1e-3, 1e-1, 1.0)
"""Further absolute dampings, the same for every layer. Large models have the first two only."""

QUERY_BYTES = 2**30
"""Memory for the preconditioned gradients of a batch of targets, which one pass over the training rows serves."""

Batch = dict[str, Tensor]


class Rows(Dataset[Batch]):
    """Inputs in their order, and labels, of `"train"` or `"targets"`; one row is a dictionary."""

    def __init__(self, job: Job, part: str) -> None:
        inputs, self.labels = job.tensors(part)
        self.inputs = {f"input{index}": tensor for index, tensor in enumerate(inputs)}

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        return {name: tensor[index] for name, tensor in self.inputs.items()} | {"labels": self.labels[index]}


class CaseTask(Task):
    """Loss, measurement and layers of a case.

    Args:
        tracked: names of the layers to follow.
        measurement: of rows, from their logits and labels, `(B,)`.
    """

    def __init__(self, tracked: list[str], measurement: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.tracked, self.measurement = tracked, measurement

    def compute_train_loss(self, batch: Batch, model: nn.Module, sample: bool = False) -> Tensor:
        logits = _logits(batch, model)
        return losses(logits, _drawn(logits, batch["labels"]) if sample else batch["labels"]).sum()

    def compute_measurement(self, batch: Batch, model: nn.Module) -> Tensor:
        return self.measurement(_logits(batch, model), batch["labels"]).sum()

    def get_influence_tracked_modules(self) -> list[str]:
        return self.tracked


def _negative_margins(logits: Tensor, labels: Tensor) -> Tensor:
    return -margins(logits, labels)


def _logits(batch: Batch, model: nn.Module) -> Tensor:
    return model(*(batch[f"input{index}"] for index in range(len(batch) - 1)))


@torch.no_grad()
def _drawn(logits: Tensor, labels: Tensor) -> Tensor:
    """Labels from the model's own distribution; of a language model only where a token has a label."""
    drawn = torch.multinomial(logits.flatten(0, -2).softmax(-1), 1).view(logits.shape[:-1])
    if logits.ndim == 2:
        return drawn
    following = torch.cat([labels[:, :1], drawn[:, :-1]], dim=1)
    return torch.where(labels == IGNORED, labels, following)


class _Influence:
    """One model with its factors; scores under any damping."""

    def __init__(self, job: Job) -> None:
        self.train, self.targets = Rows(job, "train"), Rows(job, "targets")
        model = without_conv1d(bare(job))
        self.large = is_large(model)
        measurement = losses if job.case.task == "causal_lm" else _negative_margins
        self.task = CaseTask(trained_layers(model, nn.Linear, nn.Conv2d), measurement)
        self.weights = sum(model.get_submodule(name).weight.numel() for name in self.task.tracked)
        self.analyzer = Analyzer(
            analysis_name="case",
            model=prepare_model(model, self.task),
            task=self.task,
            output_dir=str(job.directory),
        )

    def fit(self) -> None:
        self.analyzer.fit_all_factors(
            factors_name="ekfac", dataset=self.train, per_device_batch_size=BATCH, factor_args=FactorArguments("ekfac")
        )

    def scores(self, damping: float | None) -> np.ndarray:
        """Scores `(n, m)`: the decrease of the measurement, so positive for helpful rows."""
        name = f"damping-{damping}"
        self.analyzer.compute_pairwise_scores(
            scores_name=name,
            factors_name="ekfac",
            query_dataset=self.targets,
            train_dataset=self.train,
            per_device_query_batch_size=max(1, min(len(self.targets), QUERY_BYTES // (4 * self.weights))),
            per_device_train_batch_size=BATCH,
            score_args=ScoreArguments(damping_factor=damping),
        )
        return self.analyzer.load_pairwise_scores(name)["all_modules"].double().T.numpy()


def _fitted(job: Job, cost: Cost) -> _Influence:
    torch.manual_seed(job.seed)
    influence = _Influence(job)
    cost.time("fit", influence.fit)
    return influence


def ekfac(job: Job, cost: Cost) -> Scores:
    """Damping of a tenth of the mean eigenvalue of each layer, which `damping_factor=None` is; other dampings."""
    influence = _fitted(job, cost)
    found = {"default": cost.time("score", lambda: influence.scores(None))}
    dampings = DAMPINGS[:2] if influence.large else DAMPINGS
    return found | {f"damping {damping:g}": influence.scores(damping) for damping in dampings}


def ekfac_as_shipped(job: Job, cost: Cost) -> Scores:
    """The damping that kronfluence has where nobody names one."""
    influence = _fitted(job, cost)
    return {"default": cost.time("score", lambda: influence.scores(SHIPPED_DAMPING))}


METHODS: dict[str, Method] = {"EK-FAC": ekfac, "EK-FAC, damping 1e-8": ekfac_as_shipped}
