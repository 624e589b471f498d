"""kronfluence 1.0.1: EK-FAC with labels drawn from the model, as its example for GPT-2 has it.

`Conv1D` becomes an equal `nn.Linear`, as there. Its fastest settings that give the same numbers: covariances from as
many rows as bases need, and all targets in one pass over the training rows.
"""

from pathlib import Path

import torch
from kronfluence.analyzer import Analyzer, prepare_model
from kronfluence.arguments import FactorArguments, ScoreArguments
from kronfluence.score import pairwise
from kronfluence.task import Task
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers.pytorch_utils import Conv1D

from curvature_bench.measure import Meter
from curvature_bench.stages import BASES, EIGEN, EIGENVALUES, FIT, SCORES, SCORING, TARGETS
from curvature_bench.work import Work, linear_weights

Batch = dict[str, Tensor]

QUERIES = 20
"""Targets per batch. All of them are kept."""


class LanguageModeling(Task):
    """The summed loss of the next tokens."""

    def __init__(self, layers: list[str]) -> None:
        self.layers = layers

    def compute_train_loss(self, batch: Batch, model: nn.Module, sample: bool = False) -> Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        logits = logits.flatten(0, 1)
        labels = batch["labels"][:, 1:].flatten()
        if sample:
            with torch.no_grad():
                labels = torch.multinomial(logits.softmax(dim=-1), num_samples=1).flatten()
        return cross_entropy(logits, labels, reduction="sum")

    def compute_measurement(self, batch: Batch, model: nn.Module) -> Tensor:
        return self.compute_train_loss(batch, model)

    def get_influence_tracked_modules(self) -> list[str]:
        return self.layers


def run(work: Work, meter: Meter, directory: Path) -> None:
    """Fit all factors, and score all pairs."""
    model = work.model()
    task = LanguageModeling([name.removesuffix(".weight") for name in linear_weights(model)])
    train, targets = (part.with_format("torch") for part in work.datasets())
    analyzer = Analyzer(
        analysis_name="gpt2",
        model=prepare_model(_without_conv1d(model), task),
        task=task,
        cpu=True,
        output_dir=str(directory),
    )
    factors = FactorArguments("ekfac", covariance_max_examples=work.basis_rows())
    with (
        meter.stages(FIT),
        meter.calls(analyzer, "fit_covariance_matrices", BASES),
        meter.calls(analyzer, "perform_eigendecomposition", EIGEN),
        meter.calls(analyzer, "fit_lambda_matrices", EIGENVALUES),
    ):
        analyzer.fit_all_factors("ekfac", train, per_device_batch_size=work.batch_size, factor_args=factors)
    queries = min(QUERIES, work.targets)
    with meter.stages(SCORING, rest=TARGETS), meter.calls(pairwise, "compute_dot_products_with_loader", SCORES):
        analyzer.compute_pairwise_scores(
            scores_name="scores",
            factors_name="ekfac",
            query_dataset=targets,
            train_dataset=train,
            per_device_query_batch_size=queries,
            per_device_train_batch_size=work.batch_size,
            score_args=ScoreArguments(
                damping_factor=None, query_gradient_accumulation_steps=-(-work.targets // queries)
            ),
        )


@torch.no_grad()
def _without_conv1d(model: nn.Module) -> nn.Module:
    """The model with an equal `nn.Linear` in the place of every `Conv1D`."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            linear = nn.Linear(*module.weight.shape)
            linear.weight.copy_(module.weight.T)
            linear.bias.copy_(module.bias)
            model.set_submodule(name, linear)
    return model
