"""Verification of curvatures: every file is read and compared with its checksum (`hf-trak verify-store`)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_trak.curvature.files import CURVATURE_FILE, CurvatureFiles
from hf_trak.errors import StoreError
from hf_trak.store.findings import Finding
from hf_trak.store.sealed import read_sealed

_REMEDY = "Delete its directory; `fit_curvature` fits it again."


def curvature_records(output_dir: Path) -> list[Path]:
    """List the records of all complete curvatures below an output directory, by model id."""
    found = output_dir.glob(f"curvature/*/{CURVATURE_FILE}")
    return sorted((path for path in found if path.parent.name.isdecimal()), key=lambda path: int(path.parent.name))


def described_curvature(path: Path) -> dict[str, Any]:
    """Describe a curvature by its record alone.

    Args:
        path: the record.

    Returns:
        `model_id`, `kind`, `labels` and `rows`, as plain JSON.

    Raises:
        StoreError: the record is damaged.
    """
    content = read_sealed(path, _REMEDY, allow_unsealed=False)
    try:
        identity = content["identity"]
        return {
            "model_id": int(path.parent.name),
            **{name: identity[name] for name in ("kind", "labels")},
            "rows": content["rows"],
        }
    except (KeyError, TypeError) as error:
        raise StoreError(f"{path} lacks {error}. Expected the record of a curvature. {_REMEDY}") from error


def verify_curvatures(output_dir: Path) -> Iterator[Finding]:
    """Check all complete curvatures below an output directory.

    Args:
        output_dir: the directory of a store.

    Returns:
        An iterator of one finding for each file of an intact curvature, and of one for each damaged curvature.
    """
    for record in curvature_records(output_dir):
        try:
            described_curvature(record)
            CurvatureFiles(record.parent, read_sealed(record)["identity"]).read()
        except StoreError as error:
            yield Finding(record, "damaged", str(error), _REMEDY)
            continue
        for path in [record, *sorted(record.parent.glob("*.safetensors"))]:
            yield Finding(path, "intact")
