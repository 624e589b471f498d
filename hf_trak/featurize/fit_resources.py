"""A word before a curvature is fitted, where it takes more memory or disk than there is."""

import logging
import shutil
from pathlib import Path

from hf_trak.data.rows import row_count
from hf_trak.featurize.curvature_settings import fitted_kind
from hf_trak.featurize.exact_estimate import ExactEstimate, estimate_exact
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.featurize.fit_share import largest_share
from hf_trak.runtime.memory import byte_size, free_bytes
from hf_trak.runtime.sharding import is_sharded

logger = logging.getLogger(__name__)


def warn_of_shortage(model: FeaturizedModel) -> None:
    """Log a warning if a fit will take more memory than is free, or more disk than is there, with what to do.

    Args:
        model: the model and its rows. Its weights are in memory.
    """
    processes = model.processes
    if not processes.is_main_process:
        return
    n = row_count(model.train_dataset, "train_dataset")
    needed = estimate_exact(model.model, model.layout, model.args, n, 1, 0)
    holders = processes.num_processes if is_sharded(model.model) else 1
    shortages = _shortages(needed, holders, free_bytes(model.device), _free_disk(model.store.output_dir))
    if not shortages:
        return
    share = largest_share(model.model, model.layout, model.args, n)
    logger.warning(
        "A fit of the curvature %r takes %s.%s Attribute fewer parameters (`grad_wrt`), set "
        '`curvature="diagonal"`, or divide the model over more processes.',
        fitted_kind(model.args),
        " and ".join(shortages),
        "" if share is None else f" {share}.",
    )


def _shortages(needed: ExactEstimate, holders: int, memory: int, disk: int) -> list[str]:
    taken, written = needed.fit_memory // holders, needed.curvature_bytes + needed.progress_bytes
    found = []
    if taken > memory:
        found.append(f"about {byte_size(taken)} of memory beside the weights, of which {byte_size(memory)} are free")
    if written > disk:
        found.append(f"about {byte_size(written)} of disk, of which {byte_size(disk)} are free")
    return found


def _free_disk(directory: Path) -> int:
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).free
