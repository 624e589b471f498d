"""The files of a curvature.

    <output_dir>/curvature/<model_id>/
      curvature.json                    identity, blocks, counts; written last: it makes the rest complete
      block-<index>.safetensors         `eigenvalues`, and `left_basis`, `right_basis` where the block has bases
      diagonal.safetensors              mean squared gradients of all other parameters, by index
      progress/                         sums of the passes over parts of the sample, until the curvature is complete

All files are written atomically, checked against a checksum when they are read, and say what they were computed from.
That of a block names its number and its parameter, since another block may have the same shape.
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_trak.curvature.blocks import CurvatureBlocks
from hf_trak.curvature.curvature import Curvature, KroneckerValues
from hf_trak.errors import ConfigMismatchError, StoreError
from hf_trak.store.atomic import differing, remove_stale_temporaries
from hf_trak.store.lease import Lease
from hf_trak.store.sealed import Finding, content_digest, read_sealed, unsealed, write_sealed
from hf_trak.store.shards import Identity, TensorSpec, read_header, read_tensors, write_tensors

CURVATURE_VERSION = 4
"""Raised whenever the same inputs give another curvature or other exact scores. It is part of their identity."""

CURVATURE_FILE = "curvature.json"


_REMEDY = "Delete the directory and fit the curvature again."

_VALUES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class BlockFile:
    """The file of a Kronecker block, or of all diagonal blocks.

    Attributes:
        name: its name.
        identity: what it says of itself.
        specs: its tensors.
    """

    name: str
    identity: Identity
    specs: Mapping[str, TensorSpec]

    @classmethod
    def of(cls, identity: Mapping[str, Any], blocks: CurvatureBlocks, index: int | None) -> "BlockFile":
        """Describe the file of Kronecker block `index`; `None` for that of all diagonal blocks.

        Args:
            identity: the identity of the curvature.
            blocks: its blocks.
            index: number of the block.
        """
        own = {"blocks": blocks.digest, "curvature": content_digest(identity)}
        if index is None:
            specs = {f"{i:05d}": TensorSpec((one.numel,), _VALUES) for i, one in enumerate(blocks.diagonal)}
            return cls("diagonal.safetensors", {**own, "part": "diagonal"}, specs)
        block = blocks.kronecker[index]
        rows, columns = block.shape
        specs = {"eigenvalues": TensorSpec((rows, columns), _VALUES)}
        if identity["kind"] != "diagonal":
            specs["left_basis"] = TensorSpec((rows, rows), _VALUES)
            specs["right_basis"] = TensorSpec((columns, columns), _VALUES)
        return cls(f"block-{index:05d}.safetensors", {**own, "part": f"{index}: {block.name}"}, specs)


class CurvatureFiles:
    """The directory of one curvature."""

    def __init__(self, directory: Path, identity: Mapping[str, Any]) -> None:
        """
        Args:
            directory: where the files are.
            identity: everything that the curvature depends on, as plain JSON.
        """
        self.directory = directory
        self.identity = dict(identity)
        self.digest = content_digest(self.identity)
        self._own = {"curvature": self.digest}
        self._lease: Lease | None = None

    # -- the finished curvature --------------------------------------------------------------------------------------

    def saved(self) -> dict[str, Any] | None:
        """Read the record of a complete curvature; `None` if there is none.

        Raises:
            ConfigMismatchError: it was fitted to other weights or parameters, or with other settings.
            StoreError: the record is damaged.
        """
        path = self.directory / CURVATURE_FILE
        if not path.exists():
            return None
        content = unsealed(read_sealed(path, _REMEDY))
        if changes := differing(content.get("identity", {}), self.identity):
            raise ConfigMismatchError(
                f"The curvature in {self.directory} was fitted to something else than what is given:\n  "
                + "\n  ".join(changes)
                + "\nExpected the same weights, parameters and settings. Use these, another `output_dir`, or delete "
                "that directory to fit again."
            )
        return content

    def finished(self) -> bool:
        """Tell whether the curvature is complete. Remove what a fit that was killed at its very end left.

        Raises as [`~CurvatureFiles.saved`].
        """
        if self.saved() is None:
            return False
        if self.progress.exists() and os.access(self.progress, os.W_OK):
            Lease(self.progress).end(remove=True)
        return True

    def write(self, blocks: CurvatureBlocks, rows: int, statistics: Mapping[str, Any]) -> None:
        """Write the record, which makes the curvature complete, and remove what only an unfinished fit needs."""
        content = {"identity": self.identity, "blocks": blocks.to_json(), "rows": rows, **statistics}
        write_sealed(self.directory / CURVATURE_FILE, content)
        self.release(remove=True)

    def read(
        self, chosen: Callable[[CurvatureBlocks], tuple[Collection[int], Collection[int]]] | None = None
    ) -> Curvature:
        """Read a complete curvature. Bases are memory-mapped.

        Args:
            chosen: chooses the Kronecker and the diagonal blocks to read, by index; `None` for all. The values of the
                others are on the meta device.

        Raises:
            StoreError: it is not there, or a file of it is missing or damaged.
            ConfigMismatchError: as [`~CurvatureFiles.saved`].
        """
        if (content := self.saved()) is None:
            raise StoreError(f"There is no curvature in {self.directory}. Call `fit_curvature()` first.")
        blocks = CurvatureBlocks.from_json(content["blocks"])
        kind = self.identity["kind"]
        counts = content["counts"]
        kronecker = []
        held, held_numbers = (
            (range(len(blocks.kronecker)), range(len(blocks.diagonal))) if chosen is None else chosen(blocks)
        )
        for index, (block, count) in enumerate(zip(blocks.kronecker, counts, strict=True)):
            if index not in held:
                kronecker.append(KroneckerValues(None, torch.empty(block.shape, device="meta"), count))
                continue
            found = self._read(BlockFile.of(self.identity, blocks, index))
            bases = None if kind == "diagonal" else (found["left_basis"], found["right_basis"])
            kronecker.append(KroneckerValues(bases, found["eigenvalues"], count))
        every = BlockFile.of(self.identity, blocks, None)
        held_specs = {name: spec for name, spec in every.specs.items() if int(name) in held_numbers}
        found = self._read(replace(every, specs=held_specs)) if held_specs else {}
        diagonal = tuple(
            found[f"{index:05d}"] if index in held_numbers else torch.empty(block.numel, device="meta")
            for index, block in enumerate(blocks.diagonal)
        )
        return Curvature(
            kind, blocks, tuple(kronecker), diagonal, content["rows"], content_digest(content), content["scale"]
        )

    def _read(self, file: BlockFile) -> dict[str, Tensor]:
        try:
            return read_tensors(self.directory / file.name, file.identity, file.specs)
        except StoreError as error:
            raise StoreError(
                f"The curvature in {self.directory} is damaged: {file.name} is missing or not as it was written. "
                f"Expected all its files. {_REMEDY}"
            ) from error

    def write_block(
        self, blocks: CurvatureBlocks, index: int, eigenvalues: Tensor, bases: tuple[Tensor, Tensor] | None
    ) -> None:
        """Write one Kronecker block."""
        tensors = {"eigenvalues": eigenvalues}
        if bases is not None:
            tensors |= {"left_basis": bases[0], "right_basis": bases[1]}
        file = BlockFile.of(self.identity, blocks, index)
        write_tensors(self.directory / file.name, tensors, file.identity)

    def write_diagonal(self, blocks: CurvatureBlocks, values: list[Tensor]) -> None:
        """Write all diagonal blocks."""
        if values:
            file = BlockFile.of(self.identity, blocks, None)
            write_tensors(self.directory / file.name, dict(zip(file.specs, values, strict=True)), file.identity)

    # -- what a fit leaves on its way --------------------------------------------------------------------------------

    @property
    def progress(self) -> Path:
        """Return the directory of unfinished work."""
        return self.directory / "progress"

    def prepare(self) -> None:
        """Begin, or go on. Remove what dead processes and fits of another identity have left.

        Raises:
            StoreError: a fit of another identity is running.
        """
        path, self._lease = self.progress / "identity.json", Lease(self.progress)
        if path.exists() and read_sealed(path, _REMEDY).get("digest") != self.digest:
            if not self.release(remove=True):
                raise StoreError(
                    f"A fit with other settings is running in {self.directory}. Expected one at a time. Wait for it, "
                    "or use another output directory."
                )
            self._lease = Lease(self.progress)
        remove_stale_temporaries(self.progress)
        remove_stale_temporaries(self.directory)
        if not path.exists():
            write_sealed(path, {"digest": self.digest})

    def release(self, remove: bool = False) -> bool:
        """End the use of the directory of unfinished work, see [`Lease.end`]."""
        lease, self._lease = self._lease, None
        return lease is not None and lease.end(remove)

    def read_blocks(self) -> CurvatureBlocks | None:
        """Read the division that the fit has come to so far."""
        path = self.progress / "blocks.json"
        return CurvatureBlocks.from_json(read_sealed(path, _REMEDY)) if path.exists() else None

    def write_blocks(self, blocks: CurvatureBlocks) -> None:
        """Write the division that the fit has come to."""
        write_sealed(self.progress / "blocks.json", blocks.to_json())

    def sums_path(self, stage: str, blocks: CurvatureBlocks, part: int, share: tuple[int, int] = (0, 1)) -> Path:
        """Return the file of the sums of one part of the sample. Sums of another division have another name.

        Args:
            stage, blocks, part: what the sums are of.
            share: `(index, count)`: of the sums only share `index` of `count`, which processes have divided.
        """
        own = "" if share[1] == 1 else f"-{share[0]}of{share[1]}"
        return self.progress / f"{stage}-{blocks.digest[:12]}-{part:03d}{own}.safetensors"

    def sums_paths(self, stage: str, blocks: CurvatureBlocks, part: int) -> list[Path]:
        """List the files that hold the sums of a part together; none if a share is missing."""
        if (whole := self.sums_path(stage, blocks, part)).exists():
            return [whole]
        counts = {int(path.stem.rpartition("of")[2]) for path in self.progress.glob(f"{whole.stem}-*of*.safetensors")}
        for count in sorted(counts):
            paths = [self.sums_path(stage, blocks, part, (index, count)) for index in range(count)]
            if all(path.exists() for path in paths):
                return paths
        return []

    def write_sums(self, path: Path, tensors: Mapping[str, Tensor], **extra: Any) -> None:
        """Write the sums of one part."""
        write_tensors(path, tensors, {**self._own, "kind": path.stem}, **extra)

    def read_extra(self, path: Path) -> dict[str, Any]:
        """Read what was written beside the sums of a part. Raises as [`read_header`]."""
        return read_header(path, {**self._own, "kind": path.stem}, {})

    def read_sums(self, path: Path, specs: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
        """Read some sums of one part. Raises as [`read_tensors`]."""
        return read_tensors(path, {**self._own, "kind": path.stem}, specs)


_FIT_AGAIN = "Delete its directory; `fit_curvature` fits it again."


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
    content = read_sealed(path, _FIT_AGAIN)
    try:
        identity = content["identity"]
        known = {name: identity[name] for name in ("kind", "labels")}
        return {"model_id": int(path.parent.name), **known, "rows": content["rows"]}
    except (KeyError, TypeError) as error:
        raise StoreError(f"{path} lacks {error}. Expected the record of a curvature. {_REMEDY}") from error


def verify_curvature(directory: Path) -> Iterator[Finding]:
    """Check a complete curvature.

    Args:
        directory: its directory.

    Returns:
        An iterator of one finding for each of its files, or of one for the whole of a damaged curvature.
    """
    record = directory / CURVATURE_FILE
    try:
        described_curvature(record)
        CurvatureFiles(directory, read_sealed(record)["identity"]).read()
    except StoreError as error:
        yield Finding(record, "damaged", str(error), _FIT_AGAIN)
        return
    for path in [record, *sorted(directory.glob("*.safetensors"))]:
        yield Finding(path, "intact")
