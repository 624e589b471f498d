"""traker 0.3.2 as its documentation shows it: a named task for classifiers, a model output class for the rest."""

import copy
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from trak import TRAKer
from trak.modelout_functions import AbstractModelOutput
from trak.projectors import BasicProjector, ProjectionType

from comparison.job import Clock, Job, Scores, gradient_block
from comparison.objective import margins, probabilities


class LanguageModelOutput(AbstractModelOutput):
    """Margins of all tokens; the library has no such task, and says how to write one."""

    def __init__(self) -> None:
        super().__init__()

    @staticmethod
    def get_output(model: nn.Module, weights: Any, buffers: Any, *sample: Tensor) -> Tensor:
        *inputs, labels = (tensor.unsqueeze(0) for tensor in sample)
        return margins(torch.func.functional_call(model, (weights, buffers), tuple(inputs)), labels).sum()

    def get_out_to_loss_grad(self, model: nn.Module, weights: Any, buffers: Any, batch: list[Tensor]) -> Tensor:
        *inputs, labels = batch
        logits = torch.func.functional_call(model, (weights, buffers), tuple(inputs))
        return (1 - probabilities(logits, labels)).detach().unsqueeze(-1)


def attribute(job: Job, clock: Clock) -> Scores:
    named = job.case.task in ("image_classification", "text_classification")
    train, targets = (job.case.batches(part, job.batch_size) for part in (job.case.train, job.case.targets))
    model = copy.deepcopy(job.bare)
    states = job.states()

    def tracker(directory: Path, **options: Any) -> Any:
        return TRAKer(
            model=model,
            task=job.case.task if named else LanguageModelOutput(),
            train_set_size=job.case.train_rows,
            save_dir=str(directory),
            device="cpu",
            proj_dim=job.k,
            projector_seed=job.seed,
            use_half_precision=False,
            logging_level=logging.ERROR,
            **options,
        )

    def featurize(own: Any) -> None:
        for model_id, state in enumerate(states):
            own.load_checkpoint(state, model_id=model_id)
            for batch in train:
                own.featurize(batch=batch, num_samples=len(batch[0]))

    def score(own: Any) -> np.ndarray:
        own.finalize_features()
        for model_id, state in enumerate(states):
            own.start_scoring_checkpoint("targets", state, model_id, sum(len(batch[0]) for batch in targets))
            for batch in targets:
                own.score(batch=batch, num_samples=len(batch[0]))
        return np.array(own.finalize_scores("targets"))

    first = job.directory / "default"
    own = tracker(first)
    clock.time("featurize", lambda: featurize(own))
    for relative in job.lambdas:  # features are copied before they are made final
        shutil.copytree(first, job.directory / f"{relative:g}")
    unit = job.unit(torch.tensor(np.array(own.saver.current_store["grads"])))
    found = {"default": clock.time("score", lambda: score(own))}
    for relative in job.lambdas:
        other = tracker(job.directory / f"{relative:g}", lambda_reg=relative * unit)
        for model_id, state in enumerate(states):
            other.load_checkpoint(state, model_id=model_id)
        found[f"{relative:g}"] = score(other)
    if job.timed:
        block = gradient_block(job.models)
        projector = BasicProjector(block.shape[1], job.k, job.seed, ProjectionType.rademacher, "cpu")
        clock.time("project", lambda: projector.project(block, 0))
    return found
