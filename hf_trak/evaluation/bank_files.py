"""The files of a bank: subsets of training rows, and the outputs of models that were retrained on them.

    <bank>/
      bank.json                       numbers of rows n and targets m, fingerprints of both datasets, the recipe
      <part>/part.json                numbers of subsets s and repeats R, seed, protocol, and what the part is for
      <part>/subsets.safetensors      `subsets` (s, ⌈n/8⌉), uint8: bit i of a row, highest first, is training row i
      <part>/outputs.safetensors      `outputs` (R, s, m), float64, and `seeds` (R, s), int64
      <part>/retraining.json,         while a part is being built: one file per training, see
      <part>/trainings/               `hf_trak.evaluation.retraining_files`

JSON files are sealed (`hf_trak.store.sealed`); safetensors files carry a checksum and what they belong to
(`hf_trak.store.shards`). The files of a part depend on the bank and on the part alone, not on the processes that
built it or on interruptions.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_trak.errors import ConfigMismatchError, IncompleteStoreError, StoreError
from hf_trak.evaluation.retraining_files import RetrainingFiles, subset_digest, training_seed
from hf_trak.store.atomic import differing
from hf_trak.store.sealed import (
    SEALED_VERSION,
    VERSION_KEY,
    content_digest,
    create_sealed,
    read_sealed,
    unsealed,
)
from hf_trak.store.shards import TensorSpec, read_tensors, write_tensors

BANK = "bank.json"
PART = "part.json"
SUBSETS = "subsets.safetensors"
OUTPUTS = "outputs.safetensors"

_BANK_KEYS = {
    "kind": str,
    "rows": int,
    "targets": int,
    "rows_fingerprint": str,
    "targets_fingerprint": str,
    "recipe": dict,
}
_PART_KEYS = {"bank": str, "subsets": int, "repeats": int, "seed": int, "protocol": dict, "masks": str}


def create_described(path: Path, content: Mapping[str, Any], what: str) -> None:
    """Create a description unless it exists, in which case it must say the same.

    Args:
        path: the file.
        content: plain JSON.
        what: what is described, for the error message.

    Raises:
        ConfigMismatchError: the file says something else; shows both.
        StoreError: the file is damaged, or cannot be written.
    """
    create_sealed(path, content)
    if lines := differing(unsealed(read_sealed(path)), dict(content)):
        raise ConfigMismatchError(
            f"{path} describes another {what}. Expected the same rows, targets, subsets and settings; use another "
            "directory or another name.\n" + "\n".join(lines)
        )


def read_bank(directory: Path) -> dict[str, Any]:
    """Read `bank.json`.

    Raises:
        IncompleteStoreError: there is no bank in this directory.
        StoreError: the file is damaged, or of a newer version.
    """
    content = _described(directory / BANK, _BANK_KEYS, f"{directory} holds no bank: {BANK} is missing")
    if content["kind"] != "bank" or content["rows"] < 1 or content["targets"] < 1:
        raise StoreError(
            f"{directory / BANK} says the kind {content['kind']!r}, {content['rows']} rows and {content['targets']} "
            "targets. Expected a bank with at least one of each. Restore it from a copy."
        )
    return content


def part_names(directory: Path) -> list[str]:
    """Return the names of the parts of a bank, sorted."""
    return sorted(path.parent.name for path in directory.glob(f"*/{PART}"))


def read_part(directory: Path, bank: Mapping[str, Any]) -> dict[str, Any]:
    """Read `part.json` of one part.

    Args:
        directory: directory of the part.
        bank: what `bank.json` says.

    Raises:
        IncompleteStoreError: there is no such part.
        StoreError: the file is damaged, or belongs to another bank.
    """
    names = ", ".join(part_names(directory.parent)) or "none"
    content = _described(
        directory / PART, _PART_KEYS, f"The bank {directory.parent} has no part {directory.name!r} (it has: {names})"
    )
    if content["bank"] != content_digest(bank):
        raise StoreError(
            f"{directory / PART} belongs to another bank. Expected a part of {directory.parent}. Restore it from a "
            "copy."
        )
    if content["subsets"] < 1 or content["repeats"] < 1:
        raise StoreError(
            f"{directory / PART} says {content['subsets']} subsets and {content['repeats']} repeats. Expected at "
            "least one of each. Restore it from a copy."
        )
    return content


def _described(path: Path, keys: Mapping[str, type], absent: str) -> dict[str, Any]:
    try:
        saved = read_sealed(path, allow_unsealed=False)
    except FileNotFoundError as error:
        raise IncompleteStoreError(f"{absent}. Expected a directory that `Bank.create` made.") from error
    if (version := saved.get(VERSION_KEY)) != SEALED_VERSION:
        raise StoreError(
            f"{path} has format version {version!r}. Expected {SEALED_VERSION}, which this version of hf_trak reads. "
            "Use the version of hf_trak that wrote it."
        )
    content = unsealed(saved)
    if wrong := [name for name, kind in keys.items() if type(content.get(name)) is not kind]:
        raise StoreError(
            f"{path} has no valid {', '.join(wrong)}. Expected the file as hf_trak wrote it. Restore it from a copy, "
            "or use the version of hf_trak that wrote it."
        )
    return content


def write_subsets(directory: Path, part: Mapping[str, Any], masks: np.ndarray) -> None:
    """Write the subsets of a part, booleans `(s, n)`, unless they are there.

    Raises:
        StoreError: the file cannot be written.
    """
    if not (directory / SUBSETS).is_file():
        packed = torch.from_numpy(np.packbits(masks, axis=1))
        write_tensors(directory / SUBSETS, {"subsets": packed}, _identity("subsets", part))


def read_subsets(directory: Path, part: Mapping[str, Any], rows: int) -> np.ndarray:
    """Read the subsets of a part.

    Args:
        directory: directory of the part.
        part: what `part.json` says.
        rows: n.

    Returns:
        Booleans `(s, n)`.

    Raises:
        StoreError: the file is missing or damaged, or belongs to another part.
    """
    specs = {"subsets": TensorSpec((part["subsets"], -(-rows // 8)), (torch.uint8,))}
    packed = read_tensors(directory / SUBSETS, _identity("subsets", part), specs)["subsets"].numpy()
    masks = np.unpackbits(packed, axis=1, count=rows).astype(bool)
    if masks_digest(masks) != part["masks"]:
        raise StoreError(
            f"{directory / SUBSETS} holds other subsets than {PART} says. Expected those that the part was made with. "
            "Restore both from a copy."
        )
    return masks


def write_outputs(directory: Path, part: Mapping[str, Any], files: RetrainingFiles, masks: np.ndarray) -> bool:
    """Join all trainings of a part to one file, if they are done.

    Returns:
        Whether the file exists now.

    Raises:
        StoreError: a training is damaged, or the file cannot be written.
    """
    if (directory / OUTPUTS).is_file():
        return True
    s, repeats = part["subsets"], part["repeats"]
    if len(set(files.present()) & {(i, r) for i in range(s) for r in range(repeats)}) < s * repeats:
        return False
    digests = [subset_digest(mask) for mask in masks]
    outputs = [[files.read(i, r, digests[i])[0] for i in range(s)] for r in range(repeats)]
    seeds = [[training_seed(part["seed"], i, r) for i in range(s)] for r in range(repeats)]
    tensors = {"outputs": torch.from_numpy(np.array(outputs)), "seeds": torch.tensor(seeds)}
    write_tensors(directory / OUTPUTS, tensors, _identity("outputs", part))
    return True


def read_outputs(directory: Path, part: Mapping[str, Any], targets: int) -> tuple[np.ndarray, np.ndarray]:
    """Read the outputs of all trainings of a part.

    Args:
        directory: directory of the part.
        part: what `part.json` says.
        targets: m.

    Returns:
        Outputs `(R, s, m)`, float64, and seeds `(R, s)`, int64.

    Raises:
        IncompleteStoreError: some trainings are missing.
        StoreError: the file is damaged, or belongs to another part; an output is NaN or infinite.
    """
    path = directory / OUTPUTS
    shape = (part["repeats"], part["subsets"])
    if not path.is_file():
        done = len(list((directory / "trainings").glob("*.safetensors")))
        raise IncompleteStoreError(
            f"The part {directory.name!r} of the bank {directory.parent} has {done} of {shape[0] * shape[1]} "
            "trainings. Expected all of them. Call `Bank.build` again, with the same arguments."
        )
    specs = {"outputs": TensorSpec((*shape, targets), (torch.float64,)), "seeds": TensorSpec(shape, (torch.int64,))}
    found = read_tensors(path, _identity("outputs", part), specs)
    outputs = found["outputs"].numpy()
    if not np.isfinite(outputs).all():
        raise StoreError(f"{path} holds NaN or infinite outputs. Expected finite ones. Restore it from a copy.")
    return outputs, found["seeds"].numpy()


def masks_digest(masks: np.ndarray) -> str:
    """Hash the subsets `(s, n)` of a part."""
    return subset_digest(masks.reshape(-1))


def _identity(kind: str, part: Mapping[str, Any]) -> dict[str, str | int]:
    return {"kind": f"bank {kind}", "part": content_digest(part)}
