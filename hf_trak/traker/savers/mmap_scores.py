"""Reading the scores that a `MmapSaver` has saved."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hf_trak.errors import IncompleteStoreError, StoreError
from hf_trak.store.atomic import safe_name
from hf_trak.traker.savers.mmap_directory import EXPERIMENTS, MmapDirectory


def read_scores(save_dir: Path | str, exp_name: str) -> Tensor:
    """Read the scores of a finished experiment of a `MmapSaver`.

    Args:
        save_dir (`str` or `Path`):
            Directory of the saver.
        exp_name (`str`):
            Name of the experiment.

    Returns:
        `torch.Tensor` of shape `(n, m)`, float32, memory-mapped; writing into it does not change the file.

    Raises:
        IncompleteStoreError: the directory holds no results, or none of this experiment.
        StoreError: the file is damaged, or that of another experiment.
    """
    directory = MmapDirectory.load(Path(save_dir))
    entry = directory.read_experiments().get(safe_name(exp_name, "exp_name"), {})
    if not entry.get("scores_finalized"):
        raise IncompleteStoreError(
            f"Experiment {exp_name!r} in {save_dir} has no scores. Call `finalize_scores` for it first."
        )
    plan = directory.arrays.of_scores(exp_name, entry["num_targets"])
    try:
        file = plan.open("r")
    except FileNotFoundError as error:
        raise StoreError(f"{plan.path} is missing. {plan.remedy}") from error
    wrong, bare = file.compare(np.arange(plan.shape[0]), directory.scores_seed(exp_name, entry))
    if len(wrong) or len(bare):
        raise StoreError(
            f"{plan.path} is damaged, or holds other scores than {directory.save_dir / EXPERIMENTS} says: "
            f"{len(wrong) + len(bare)} of {plan.shape[0]} rows do not match their checksums. {plan.remedy}"
        )
    return torch.from_numpy(np.lib.format.open_memmap(plan.path, mode="c"))
