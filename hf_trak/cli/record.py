"""The arguments of `hf-trak featurize`, recorded in its directory for later commands."""

from pathlib import Path
from typing import Any

from hf_trak.errors import IncompleteStoreError, StoreError
from hf_trak.hub.names import shown
from hf_trak.store.sealed import MANIFEST_FILE, read_sealed

RECORD = "featurize.json"
"""File beside the store's configuration with the arguments of `hf-trak featurize`, for later commands. It is sealed,
see `hf_trak.store.sealed`."""

_REMEDY = "Restore it from a copy, or run `hf-trak featurize` again with all arguments after deleting it."


def remembered(output_dir: str) -> dict[str, Any]:
    """Read the arguments of `hf-trak featurize`; empty if that command has not written this directory.

    Raises:
        IncompleteStoreError: the directory is a copy of an index that somebody else made.
        StoreError: the record is damaged.
    """
    require_own(output_dir)
    path = Path(output_dir) / RECORD
    if not path.is_file():
        return {}
    saved = read_record(path)
    return {**saved["arguments"], **{name: value for name, value in saved["trak"].items() if name != "output_dir"}}


def remembered_or_made(output_dir: str) -> dict[str, Any]:
    """Read the arguments of `hf-trak featurize`, or those that define the features of an index that Python made.

    Returns:
        The arguments by their names; empty if the directory has no index.

    Raises:
        As [`remembered`]; StoreError, too, if the configuration of the index is damaged.
    """
    if saved := remembered(output_dir):
        return saved
    from hf_trak.featurize.definition import recorded_arguments, whitening_arguments  # slow to import
    from hf_trak.store.store import FeatureStore

    if not (Path(output_dir) / FeatureStore.CONFIG_FILE).is_file():
        return {}
    config = FeatureStore.load(output_dir).config
    return {
        **recorded_arguments(config),
        "num_draws": config.get("collation", {}).get("draws", 1),
        "grad_wrt": [name for name, *_ in config["parameters"]],
        "curvature": {**whitening_arguments(config), "whitened": "whitening" in config},
    }


def is_copy(output_dir: str) -> bool:
    """Tell whether a directory is a copy of a published index."""
    return (Path(output_dir) / MANIFEST_FILE).exists()


def require_own(output_dir: str) -> None:
    """Refuse a copy of a published index as an output directory.

    Raises:
        IncompleteStoreError: the directory is such a copy.
    """
    if is_copy(output_dir):
        raise IncompleteStoreError(
            f"`output_dir` is {output_dir!r}, which is a copy of a published index (it holds {MANIFEST_FILE}). "
            "Expected a directory of your own for new results. Pass the copy as `--index`, and leave `--output_dir` "
            "out or name another directory."
        )


def read_record(path: Path) -> dict[str, Any]:
    """Read the record of a directory. Raises `StoreError` if it is damaged."""
    saved = read_sealed(path, _REMEDY)
    for name in ("arguments", "trak", "processing"):
        value = saved.setdefault(name, {}) or {}
        if not isinstance(value, dict):
            raise StoreError(f"{path} has {shown(value)} as `{name}`. Expected an object. {_REMEDY}")
        saved[name] = value
    return saved
