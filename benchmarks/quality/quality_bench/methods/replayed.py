"""Replays of hf_trak: of the recorded run that made the model, and of its recipe, from the last weights alone.

Training is part of the seconds of `fit`: the record is written meanwhile. Bytes per row are those of the record.
"""

from dataclasses import replace

import numpy as np
from transformers import set_seed

from hf_trak import Replay, TrakAttributor, TrakCallback, TrakConfig
from quality_bench.banks import SEED
from quality_bench.job import BATCH, Cost, Job, Method, Scores


def replayed(method: Replay, variants: dict[str, Replay]) -> Method:
    """Make a method that trains once more as the bank did, and replays.

    Args:
        method: the replay.
        variants: others of the same training.
    """

    def attribute(job: Job, cost: Cost) -> Scores:
        recorded = method.of == "run"
        config = TrakConfig(output_dir=str(job.directory), seed=job.seed, per_device_batch_size=BATCH)
        set_seed(SEED)
        trainer = job.case.trainer(job.case.train, SEED)
        if recorded:
            trainer.add_callback(TrakCallback(config, record=True))
        cost.time("fit", trainer.train)
        if recorded:
            files = (job.directory / "trajectory").rglob("*")
            cost.bytes_per_row = sum(path.stat().st_size for path in files if path.is_file()) / len(job.case.train)
        own = TrakAttributor.from_trainer(trainer, config, job.case.task)

        def scores(one: Replay) -> np.ndarray:
            scored = own.attribute(job.case.targets, top_k=None, method=one)
            return np.stack(scored.with_format("numpy")["trak_scores"][:]).T.astype(np.float64)

        found = {"default": cost.time("score", lambda: scores(method))}
        return found | {name: scores(one) for name, one in variants.items()}

    return attribute


_RUN, _RECIPE = Replay(of="run"), Replay()

METHODS: dict[str, Method] = {
    "replayed run": replayed(_RUN, {"half of the rows in the curvature": replace(_RUN, hessian_share=0.5)}),
    "replayed run, Gauss-Newton": replayed(replace(_RUN, form="gauss-newton"), {}),
    "replayed recipe": replayed(_RECIPE, {"8 rows a step": replace(_RECIPE, rows=8)}),
}
