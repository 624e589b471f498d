"""hf_trak as its README shows it."""

from typing import Any

import numpy as np
import torch
from datasets import disable_progress_bars

from comparison.job import Clock, Job, Scores, gradient_block
from hf_trak import TrakAttributor, TrakConfig
from hf_trak.projectors import make_projector


def attribute(job: Job, clock: Clock, **settings: Any) -> Scores:
    disable_progress_bars()
    settings = {"per_device_batch_size": job.batch_size, **settings}
    train, targets = job.case.dataset(job.case.train), job.case.dataset(job.case.targets)

    def attributor(**options: Any) -> TrakAttributor:
        config = TrakConfig(
            output_dir=str(job.directory),
            proj_dim=job.k,
            seed=job.seed,
            use_cpu=True,
            **{**settings, **options},
        )
        return TrakAttributor(job.models[0], config, train, task=job.case.task)

    def score(own: TrakAttributor) -> np.ndarray:
        scored = own.attribute(targets, top_k=None, name="targets", checkpoints=job.models, method="index")
        return np.stack(scored.with_format("numpy")["trak_scores"][:]).T.copy()

    own = attributor()
    clock.time("featurize", lambda: own.featurize(job.models))
    found = {"default": clock.time("score", lambda: score(own))}
    for relative in job.lambdas:
        found[f"{relative:g}"] = score(attributor(lambda_relative=relative))
    if job.timed:
        block = gradient_block(job.models)
        projector = make_projector("sjlt", grad_dim=block.shape[1], proj_dim=job.k, seed=job.seed, device="cpu")
        out = torch.zeros(len(block), job.k)
        projector.accumulate(out, block, 0, 0)
        clock.time("project", lambda: projector.accumulate(out, block, 0, 0))
    return found
