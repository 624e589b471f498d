"""dattri 0.3.0: `TRAKAttributor` with a target function and a probability, as in its examples."""

from typing import Any

import numpy as np
import torch
from dattri.algorithm.trak import TRAKAttributor
from dattri.func.projection import random_project
from dattri.task import AttributionTask
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from comparison.job import Clock, Job, Scores, gradient_block
from comparison.objective import margins, probabilities


def attribute(job: Job, clock: Clock) -> Scores:
    model = job.bare

    def logits(parameters: dict[str, Tensor], sample: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        *inputs, labels = (tensor.unsqueeze(0) for tensor in sample)
        return torch.func.functional_call(model, parameters, tuple(inputs)), labels

    def margin(parameters: dict[str, Tensor], sample: tuple[Tensor, ...]) -> Tensor:
        return margins(*logits(parameters, sample))[0]

    def probability(parameters: dict[str, Tensor], sample: tuple[Tensor, ...]) -> Tensor:
        return probabilities(*logits(parameters, sample))[0]

    task = AttributionTask(margin, model, job.states())
    projector = {"proj_dim": job.k, "proj_seed": job.seed, "device": "cpu"}

    def rows(part: slice) -> DataLoader:
        tensors = [tensor[part] for tensor in (*job.case.inputs.values(), job.case.labels)]
        return DataLoader(TensorDataset(*tensors), batch_size=job.batch_size)

    train, targets = rows(job.case.train), rows(job.case.targets)

    def attributor(regularization: float | None = None) -> Any:
        options = {} if regularization is None else {"regularization": regularization}
        return TRAKAttributor(task, probability, projector_kwargs=dict(projector), device="cpu", **options)

    def score(own: Any) -> np.ndarray:
        return own.attribute(targets).numpy()

    with torch.no_grad():
        own = attributor()
        clock.time("featurize", lambda: own.cache(train))
        found = {"default": clock.time("score", lambda: score(own))}
        if job.lambdas:
            unit = job.unit(features(own, task, train))
        for relative in job.lambdas:
            other = attributor(relative * unit)
            other.cache(train)
            found[f"{relative:g}"] = score(other)
        if job.timed:
            block = gradient_block(job.models)
            clock.time("project", lambda: random_project(block, len(block), **own.projector_kwargs)(block, 0))
    return found


def features(own: Any, task: Any, train: DataLoader) -> Tensor:
    """The features of the first checkpoint, made as `cache` makes them, which keeps none."""
    parameters, _ = task.get_param(ckpt_idx=0)
    made = []
    for batch in train:
        gradients = torch.nan_to_num(own.grad_loss_func(parameters, tuple(batch))) / own.norm_scaler
        made.append(random_project(gradients, len(gradients), **own.projector_kwargs)(gradients, ensemble_id=0))
    return torch.cat(made)
