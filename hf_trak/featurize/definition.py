"""What defines the features of a row besides weights and task: settings, and what becomes of rows before the model."""

from typing import Any

import torch

from hf_trak.config import TrakConfig
from hf_trak.data.rows import RowBatches
from hf_trak.featurize.curvature_settings import whitening_settings
from hf_trak.gradient_computers.layout import ParameterLayout
from hf_trak.identity.collation import check_repeatable, collation_of
from hf_trak.store.configuration import code_settings
from hf_trak.version import __version__


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
        **({"factored_dim": args.factored_dim} if args.proj_type == "factored" else {}),
        **code_settings(args.storage),
        **whitening_settings(args, train_size),
        "train_size": train_size,
        "model_class": type(model).__name__,
        "model_name": getattr(config, "_name_or_path", None) or None,
        "model_revision": getattr(config, "_commit_hash", None),
    }


def collation_of_rows(batches: RowBatches) -> dict[str, Any]:
    """Describe what dataset, transforms, tokenizer and collator make of a few rows.

    Args:
        batches: collates the rows, see [`~hf_trak.data.rows.RowBatches.probe`]. Random ones are described in their
            first draw, with the number of `draws`.

    Raises:
        ValueError: the description is not the same each time.
    """
    collate, rows, drawn = batches.probe()
    if drawn:
        check_repeatable(collate, rows)
    description = collation_of(collate, rows)
    return {**description, "draws": batches.draws} if drawn else description
