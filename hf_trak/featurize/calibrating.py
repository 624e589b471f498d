"""Calibration of a model: replay a few targets, compute their scores by cheaper methods, and keep the choice.

<output_dir>/calibration.json     sealed: what was calibrated, figures and choice
"""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from hf_trak.data.rows import row_count
from hf_trak.errors import HfTrakError
from hf_trak.featurize.answering import planned
from hf_trak.featurize.calibration import LEAST_TARGETS, Calibration, choose, named
from hf_trak.featurize.definition import drawn_rows
from hf_trak.featurize.exact import ExactScores
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.featurize.pricing import price
from hf_trak.featurize.question import Question
from hf_trak.methods import AnyMethod, Exact, Index, Replay
from hf_trak.modelout_functions.base import BatchedModelOutput, call_model
from hf_trak.modelout_functions.batches import evaluating
from hf_trak.modelout_functions.trainer_loss import TrainerLossModelOutput
from hf_trak.runtime.checks import checked_int
from hf_trak.runtime.progress import duration
from hf_trak.runtime.sharding import is_sharded
from hf_trak.store.atomic import differing
from hf_trak.store.sealed import write_sealed
from hf_trak.store.store import CALIBRATION_FILE
from hf_trak.trajectory.record import RECORD_FILE, RunRecord

logger = logging.getLogger(__name__)

CALIBRATION_VERSION = 2
"""Raised whenever other methods are judged, or in another way."""

RIDGES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""λ of the index that are tried beside that of the configuration."""

DAMPINGS = (0.1, 0.01, 1.0, 10.0)
"""Dampings of EK-FAC that are tried."""


def calibrate(model: FeaturizedModel, eval_dataset: Any, targets: int, by: Replay | None) -> Calibration:
    """Judge methods by a replay, and keep the choice, see [`~hf_trak.TrakAttributor.calibrate`].

    All processes call this together.

    Args:
        model: the featurized model.
        eval_dataset, targets, by: as there.

    Raises:
        As there.
    """
    targets = checked_int(targets, "targets", LEAST_TARGETS, type_error=ValueError)
    rows, name = (model.train_dataset, "train_dataset") if eval_dataset is None else (eval_dataset, "eval_dataset")
    m = row_count(rows, name)
    if m < LEAST_TARGETS:
        raise ValueError(f"`{name}` has {m} rows. Expected at least {LEAST_TARGETS} to calibrate with. Add some.")
    by = Replay(of="run") if by is None else by
    numbers = drawn_rows(m, targets, model.args.seed)
    drawn = rows.select(numbers) if hasattr(rows, "select") else Subset(rows, numbers)
    own = numbers if eval_dataset is None else []
    asked = model.question(drawn)
    last = model.question(drawn, checkpoints=asked.ids[-1:])
    allowed = price(model, by, asked.m, asked.ids).passes  # which refuses what cannot be replayed
    methods = _affordable(model, asked, allowed)
    rate = model.rate()
    time = "" if rate is None else f" and about {duration(allowed / rate)} at {rate:.3g} rows/s,"
    logger.info(
        "Calibrating with %d targets: %s row passes%s to replay them, and at most as many for other methods.",
        asked.m, f"{allowed:,}", time,
    )  # fmt: skip
    if doubts := planned(model, last, by).warnings:
        raise HfTrakError(
            f"The replay of {last.title} has signs that its scores are wrong ({doubts[0].split('. ')[0]}). Expected "
            "none in a replay that judges other methods. Follow its warning, or compare methods by retraining."
        )
    replayed = _table(model, last, by, own)
    tables = {method: _table(model, asked, method, own) for method in methods}
    passes = {method: price(model, method, asked.m, asked.ids).passes for method in methods}

    def keep() -> dict[str, Any]:
        found = choose(tables, passes, replayed, by)
        if not found.chosen.agrees:
            raise HfTrakError(
                f"No method agrees with the replay: the best is {str(found.chosen).strip()}. Expected a mean "
                "correlation of more than twice its error. Take more `targets`, or compare methods by retraining."
            )
        write_sealed(
            model.store.output_dir / CALIBRATION_FILE, {"identity": identity(model, asked.ids, by), **found.to_json()}
        )
        return found.to_json()

    return Calibration.from_json(model.processes.broadcast_from_main(keep))


def _affordable(model: FeaturizedModel, question: Question, allowed: int) -> list[Index | Exact]:
    """List the methods to judge: as many as take no longer together than the replay."""
    ridges = sorted({*RIDGES, model.args.lambda_relative})
    methods: list[Index | Exact] = [Index(lambda_relative=one) for one in ridges]
    curved = [Exact("ekfac", damping=one) for one in DAMPINGS]
    tried: list[Exact] = [curved[0], Exact("hybrid"), *curved[1:], Exact("ekfac", "cg")]
    left_out = []
    for method in tried:
        passes = price(model, method, question.m, question.ids).passes
        if passes <= allowed and possible(model, method):
            methods.append(method)
            allowed -= passes
        else:
            left_out.append(named(method))
    if left_out:
        logger.info(
            "Not judged, since they take longer than the replay or cannot be computed: %s.", ", ".join(left_out)
        )
    return methods


def possible(model: FeaturizedModel, method: AnyMethod) -> bool:
    """Tell whether a model and its task have exact scores by a method, as far as that is known beforehand."""
    if not isinstance(method, Exact):
        return True
    if method.curvature == "hybrid" and model.args.projection == "factored":
        return False
    draws = model.store.config.get("collation", {}).get("draws", 1)
    if method.refine is not None and (is_sharded(model.model) or draws > 1):
        return False
    try:
        ExactScores(model, method).curvature_tasks()
        if isinstance(task := model.task, TrainerLossModelOutput) and model.args.curvature.labels == "sampled":
            batch = model.featurizer().batches(model.train_dataset).alone(0)
            with evaluating(model.model):
                task.gauss_newton_weight(call_model(model.model, None, None, *task.model_inputs(batch)), batch)
    except TypeError:  # there are no labels to draw, or a loss has no curvature in the outputs of the model
        return False
    return isinstance(model.task, BatchedModelOutput)


def _table(
    model: FeaturizedModel, question: Question, method: Index | Exact | Replay, own: Sequence[int]
) -> np.ndarray:
    """Compute the scores of all training rows: `(n, m)`, float64; `(n - 1, m)` for targets that are rows themselves.

    Args:
        own: the number of each target among the training rows, whose score for itself would outweigh all others.
    """
    table = torch.cat([block.double().cpu() for _, _, block in planned(model, question, method).blocks]).numpy()
    return np.stack([np.delete(table[:, j], row) for j, row in enumerate(own)], axis=1) if own else table


# -- the file -------------------------------------------------------------------------------------------------------


def identity(model: FeaturizedModel, checkpoints: list[int], by: Replay) -> dict[str, Any]:
    """Describe what a calibration depends on: configuration and rows, weights, and the record of the run."""
    store = model.store
    described = {
        "checkpoints": {str(one): store.checkpoint_info(one)["fingerprint"] for one in checkpoints},
        "config": store.config_hash,
        "version": CALIBRATION_VERSION,
    }
    directory = store.output_dir / "trajectory" / by.name
    if by.of == "run" and (directory / RECORD_FILE).exists():
        record = RunRecord.open(directory)
        described["record"] = [record.digest, record.checksum(record.states()[-1])]
    return described


def read_calibration(model: FeaturizedModel, checkpoints: list[int]) -> Calibration | None:
    """Read the calibration of an index, and compare what it was made for with what is there.

    Args:
        model: the featurized model.
        checkpoints: ids of the checkpoints to average over.

    Returns:
        The calibration; `None` if there is none, or only one of other weights, rows or records, which is logged.

    Raises:
        StoreError: the file is damaged.
    """
    content = model.store.read_calibration()
    if content is None:
        return None
    found = Calibration.from_json(content)
    now, then = identity(model, checkpoints, found.by), dict(content["identity"])
    if "record" not in now:  # the index alone was published
        then.pop("record", None)
    if changes := differing(then, now):
        logger.warning("The calibration is not used: %s. Call `calibrate` again.", "; ".join(changes))
        return None
    return found
