"""What defines the features of a row besides weights and task: settings, and what becomes of rows before the model."""

import logging
from collections.abc import Callable
from typing import Any

import torch

from hf_trak.config import TrakConfig
from hf_trak.data.rows import RowBatches
from hf_trak.featurize.curvature_settings import whitening_settings
from hf_trak.gradient_computers.layout import ParameterLayout
from hf_trak.identity.collation import check_repeatable, collation_of, probe_rows
from hf_trak.store.configuration import code_settings
from hf_trak.version import __version__

logger = logging.getLogger(__name__)


def feature_settings(
    model: torch.nn.Module,
    args: TrakConfig,
    layout: ParameterLayout,
    projection: str,
    proj_dim: int,
    train_size: int,
) -> dict[str, Any]:
    """Entries of a store's configuration that describe the projection, the parameters and the files.

    Args:
        model: the model, for its class, name and revision, which are informational.
        args: the configuration.
        layout: the attributed parameters.
        projection: name and version of the algorithm that projects.
        proj_dim: k, the number of features of a row.
        train_size: n, the number of training rows.
    """
    config = getattr(model, "config", None)
    return {
        "hf_trak_version": __version__,
        "projection": projection,
        "proj_dim": proj_dim,
        "proj_nonzeros": args.proj_nonzeros,
        "seed": args.seed,
        "parameters": layout.to_list(),
        "parameters_fingerprint": layout.fingerprint,
        "feature_dtype": args.storage,
        "model_dtype": args.model_dtype,
        "shard_size": args.shard_size,
        **code_settings(args.storage),
        **whitening_settings(args, train_size),
        "train_size": train_size,
        "model_class": type(model).__name__,
        "model_name": getattr(config, "_name_or_path", None) or None,
        "model_revision": getattr(config, "_commit_hash", None),
    }


def collation_of_rows(batches: RowBatches, dataset: Any) -> dict[str, Any]:
    """Describe what dataset, transforms, tokenizer and collator make of a few rows.

    Each row is collated alone, since rows of different sizes need not fit into one batch. They are collated together
    if the collator takes no single row.

    Args:
        batches: collates rows of `dataset`.
        dataset: training rows or targets.

    Raises:
        ValueError: the description is not the same each time.
    """

    def alone(rows: list[int]) -> dict[str, Any]:
        return {f"row {row}": batches.collated([row]) for row in rows}

    rows = probe_rows(len(dataset), sequential=getattr(dataset, "sequential", False))
    collate: Callable[[list[int]], Any] = alone
    if len(rows) > 1:
        try:
            alone(rows[:1])
        except Exception as error:  # whatever a user's collator may raise; if it takes no rows at all, it raises again
            logger.debug("The collator takes no single row (%r): probed rows are collated together.", error)
            collate = batches.collated
    check_repeatable(collate, rows)
    return collation_of(collate, rows)
