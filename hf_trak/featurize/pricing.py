"""What a method costs beside the index, with what is there already taken off."""

from dataclasses import dataclass, replace

import torch

from hf_trak.curvature.files import CURVATURE_FILE, CurvatureFiles
from hf_trak.curvature.observation import decomposition_seconds
from hf_trak.errors import ConfigMismatchError, HfTrakError, StoreError
from hf_trak.featurize.exact import ExactScores
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.featurize.replaying import trained_with
from hf_trak.featurize.run_replaying import RunReplay
from hf_trak.methods import AnyMethod, Exact, Replay, Rerank
from hf_trak.trajectory.record import RECORD_FILE, RunRecord, trained_weights

_OF_INDEX = ("settings", "features", "targets", "solver")
"""Stages of an estimate that an index has in any case."""


@dataclass(frozen=True)
class Price:
    """The price of the scores of some targets.

    Attributes:
        passes (`int`): forward and backward passes of single rows, divided by the number of processes.
        disk (`int`): bytes that stay on disk.
        seconds (`float`): time for eigendecompositions, beside the passes.
    """

    passes: int
    disk: int = 0
    seconds: float = 0.0


def price(model: FeaturizedModel, method: AnyMethod, m: int, checkpoints: list[int], fit: bool = True) -> Price:
    """Work out the price of a method from its estimate. All processes call this together.

    Args:
        model: the featurized model.
        method: the method.
        m: number of targets.
        checkpoints: ids of the checkpoints to average over.
        fit: whether to count a curvature that is not fitted yet.

    Raises:
        HfTrakError: a run or a recipe is to be replayed that cannot be.
        StoreError: its record is damaged.
    """
    processes = model.processes.num_processes
    run = None
    if isinstance(method, Replay):
        checkpoints = checkpoints[-1:]
        if method.of == "run":
            run = RunReplay(model, method).summary()
        else:
            method = replace(method, steps=min(method.steps, trained_with(model).steps))
    stages = model.estimate(m, len(checkpoints), False, method, run).stages
    extra = {name: one for name, one in stages.items() if name not in _OF_INDEX}
    parts = [one for one in getattr(method, "methods", (method,)) if isinstance(one, Exact | Rerank)]
    if not fit or (parts and all(fitted(model, one, checkpoints) for one in parts)):
        extra.pop("curvature", None)
    passes = sum(one.passes for one in extra.values())
    seconds = max(model.processes.gather(decomposition_seconds(sum(one.cubes for one in extra.values()) / processes)))
    return Price(-(-passes // processes), sum(one.disk for one in extra.values()), seconds)


def fitted(model: FeaturizedModel, method: Exact | Rerank, checkpoints: list[int]) -> bool | None:
    """Tell whether the curvature of each checkpoint is fitted here; `None` if one is, and with other settings.

    Args:
        model: the featurized model.
        method: the method that takes the curvature.
        checkpoints: ids of the checkpoints.

    Raises:
        StoreError: the record of a curvature is damaged.
    """
    scores = ExactScores(model, method if isinstance(method, Exact) else method.exact)
    rows = scores.sample()
    written = [one for one in checkpoints if (scores.directory(one) / CURVATURE_FILE).exists()]
    try:
        for one in written:
            CurvatureFiles(scores.directory(one), scores.identity(one, rows)).saved()
    except ConfigMismatchError:
        return None
    return len(written) == len(checkpoints)


def recorded_run(model: FeaturizedModel) -> Replay | None:
    """Return the replay of the run that had the weights of a model, if it is recorded and can be replayed.

    These are its last weights, or the best ones, which `load_best_model_at_end` loads.

    Args:
        model: the featurized model.
    """
    weights: dict[str, torch.Tensor] = dict(model.model.named_parameters())
    for path in sorted((model.store.output_dir / "trajectory").glob(f"*/{RECORD_FILE}")):
        method = Replay(of="run", name=path.parent.name)
        try:
            record = RunRecord.open(path.parent)
            if record.layout != model.layout or not record.states():
                continue
            RunReplay(model, method)
            step = record.step_of(trained_weights(weights, record.layout))
        except StoreError as error:
            model.warn_once(f"The record in {path.parent} is left alone: {error}")
        except HfTrakError:
            continue
        else:
            if step:
                return method
    return None
