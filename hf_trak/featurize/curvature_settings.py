"""The settings that a curvature follows from, with their defaults: of exact scores, and of whitened features."""

from collections.abc import Mapping
from typing import Any

from hf_trak.config import TrakConfig

CURVATURE_VERSION = 3
"""Raised whenever the same inputs give another curvature or other exact scores. It is part of their identity."""

DEFAULT_ROWS = 4096
"""Rows of the sample that a curvature is fitted to, where there are as many."""

DEFAULT_DAMPING = 0.1


def is_hybrid(args: TrakConfig) -> bool:
    """Whether exact scores are those of the hybrid."""
    return args.curvature in ("auto", "hybrid")


def fitted_kind(args: TrakConfig) -> str:
    """Return the kind of curvature that is fitted; the hybrid is one over EK-FAC."""
    return "ekfac" if args.curvature is None or is_hybrid(args) else args.curvature


def sample_size(args: TrakConfig, train_size: int) -> int:
    """Return the number of rows that a curvature is fitted to, of `train_size`."""
    return min(train_size, DEFAULT_ROWS if args.curvature_rows is None else args.curvature_rows)


def whitening_damping(args: TrakConfig) -> float:
    """Return the damping c of whitened features."""
    return DEFAULT_DAMPING if args.damping is None else args.damping


def whitening_settings(args: TrakConfig, train_size: int) -> dict[str, Any]:
    """Entries of a store's configuration that define whitened features; none for plain ones.

    Args:
        args: the configuration.
        train_size: n, the number of training rows.
    """
    if not args.whitened:
        return {}
    return {
        "whitening": {
            "version": CURVATURE_VERSION,
            "curvature": fitted_kind(args),
            "labels": args.curvature_labels,
            "rows": sample_size(args, train_size),
            "damping": whitening_damping(args),
        }
    }


def whitening_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `TrakConfig` that a store's configuration records of whitened features, unchecked.

    Args:
        config: the store's configuration.
    """
    recorded = config.get("whitening")
    if not isinstance(recorded, Mapping):
        return {}
    names = {"curvature": "curvature", "labels": "curvature_labels", "rows": "curvature_rows", "damping": "damping"}
    return {field: recorded[name] for name, field in names.items() if name in recorded}
