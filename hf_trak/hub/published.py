"""The files of one checkpoint in the manifest of a published index: their checksums, and where the weights are."""

import re
from dataclasses import dataclass
from typing import Any, Literal

from hf_trak.config import BITS
from hf_trak.hub.foreign_json import shown
from hf_trak.hub.names import HubSource
from hf_trak.runtime.checks import is_int
from hf_trak.store.shards import ShardPlan

_DIGEST = re.compile(r"[0-9a-f]{32}")
_MAX_RANK = 1 << 20


@dataclass(frozen=True)
class PublishedCurvature:
    """The checksums of the files of a curvature, see `hf_trak.curvature.files`.

    Attributes:
        record: that of `curvature.json`.
        blocks: those of `block-00000.safetensors`, ….
        diagonal: that of `diagonal.safetensors`; `None` where there is none.
    """

    record: str
    blocks: tuple[str, ...]
    diagonal: str | None

    def to_json(self) -> dict[str, Any]:
        """Return the checksums as plain JSON."""
        return {"record": self.record, "blocks": list(self.blocks), "diagonal": self.diagonal}


@dataclass(frozen=True)
class PublishedSolver:
    """What the solver of a checkpoint without a Gram matrix keeps, see `hf_trak.hub.solver_state`.

    Attributes:
        kind: `"low_rank"`, or `"none"` where nothing is published.
        rank: number of eigenvalues.
        checksum: that of the file.
    """

    kind: Literal["low_rank", "none"]
    rank: int = 0
    checksum: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the entry as plain JSON."""
        return {"kind": "none"} if self.kind == "none" else vars(self).copy()


@dataclass(frozen=True)
class PublishedCheckpoint:
    """One checkpoint of an index.

    Attributes:
        fingerprint: digest of the weights.
        source: the model repo of the weights, if there is one.
        shards: the checksum of every feature shard.
        references: the checksum of the tensors that the task computed before its first batch; `None` for tasks that
            compute none.
        curvature: the files of its curvature, if one is published.
        solver: what its solver keeps; `None` for a Gram matrix.
        row_digests: the checksum of the digests of its rows, if there are some.
        converted_from: storage dtypes that its features had before they were converted.
    """

    fingerprint: str
    source: HubSource | None
    shards: tuple[str, ...]
    references: str | None = None
    curvature: PublishedCurvature | None = None
    solver: PublishedSolver | None = None
    row_digests: str | None = None
    converted_from: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the checkpoint as plain JSON."""
        content: dict[str, Any] = {
            "fingerprint": self.fingerprint,
            "source": None if self.source is None else str(self.source),
            "shards": list(self.shards),
            "references": self.references,
        }
        optional = {
            "solver": None if self.solver is None else self.solver.to_json(),
            "row_digests": self.row_digests,
            "converted_from": list(self.converted_from) or None,
            "curvature": None if self.curvature is None else self.curvature.to_json(),
        }
        return {**content, **{key: value for key, value in optional.items() if value is not None}}


def is_digest(value: Any) -> bool:
    """Tell whether a value is a digest as hf_trak writes it."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def checkpoint_from_json(key: str, value: Any, plan: ShardPlan) -> PublishedCheckpoint:
    """Check the entry of a checkpoint in a manifest from an untrusted source.

    Args:
        key: its id, for messages.
        value: the entry.
        plan: the division into shards that the index's configuration implies.

    Raises:
        ValueError: a value is one that this library does not write. The message begins with the value.
    """
    if not isinstance(value, dict):
        raise ValueError(f"checkpoint {key} is {shown(value)}, not an object")
    shards = value.get("shards")
    if not isinstance(shards, list) or len(shards) != len(plan):
        count = len(shards) if isinstance(shards, list) else shown(shards)
        raise ValueError(f"checkpoint {key} has {count} shards, not the {len(plan)} that the configuration implies")
    references, rows = value.get("references"), value.get("row_digests")
    for digest in (value.get("fingerprint"), *shards, *(one for one in (references, rows) if one is not None)):
        if not is_digest(digest):
            raise ValueError(f"checkpoint {key} has the digest {shown(digest)}, not 32 hex digits")
    source = value.get("source")
    return PublishedCheckpoint(
        value["fingerprint"],
        None if source is None else HubSource.parse(source, f"the source of checkpoint {key}"),
        tuple(shards),
        references,
        _curvature(key, value["curvature"]) if "curvature" in value else None,
        _solver(key, value["solver"]) if "solver" in value else None,
        rows,
        _history(key, value.get("converted_from", [])),
    )


def _solver(key: str, value: Any) -> PublishedSolver:
    if value == {"kind": "none"}:
        return PublishedSolver("none")
    known = isinstance(value, dict) and set(value) == {"kind", "rank", "checksum"} and value["kind"] == "low_rank"
    if not known or not is_int(value["rank"], 1, _MAX_RANK) or not is_digest(value["checksum"]):
        raise ValueError(f"the solver of checkpoint {key} is {shown(value)}, not one that hf_trak publishes")
    return PublishedSolver("low_rank", value["rank"], value["checksum"])


def _history(key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > len(BITS) or not all(name in BITS for name in map(str, value)):
        raise ValueError(f"checkpoint {key} was converted from {shown(value)}, not a list of storage dtypes")
    return tuple(map(str, value))


def _curvature(key: str, value: Any) -> PublishedCurvature:
    if not isinstance(value, dict) or set(value) != {"record", "blocks", "diagonal"}:
        raise ValueError(f"the curvature of checkpoint {key} is {shown(value)}, not an object of checksums")
    blocks, diagonal = value["blocks"], value["diagonal"]
    if not isinstance(blocks, list):
        raise ValueError(f"the curvature of checkpoint {key} has the blocks {shown(blocks)}, not a list of checksums")
    for digest in (value["record"], *blocks, *([] if diagonal is None else [diagonal])):
        if not is_digest(digest):
            raise ValueError(f"the curvature of checkpoint {key} has the digest {shown(digest)}, not 32 hex digits")
    return PublishedCurvature(value["record"], tuple(blocks), diagonal)
