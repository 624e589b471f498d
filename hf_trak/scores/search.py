"""Interactive search: the best training rows for single targets, from an index of FAISS.

A score is an inner product: with features x_ci of training row i, weights q_ci and preconditioned targets A_cj of C
checkpoints,

    τ_ij = ⟨v_i, w_j⟩,    v_i = mean_c(q_ci) · (x_1i, …, x_Ci),    w_j = (A_1j, …, A_Cj) / C

so that any library for inner-product search finds the rows with the highest scores. It answers one target in 25 ms
for 290,000 rows of k = 512, and keeps all vectors in memory. The exact scan of `streaming` reads every row once
instead, for any number of targets.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_trak.errors import StoreError
from hf_trak.runtime.checks import required
from hf_trak.scores.shortlist import PreconditionedTargets
from hf_trak.scores.streaming import ScaledRows
from hf_trak.store.atomic import atomic_path
from hf_trak.store.sealed import Finding, content_digest, file_digest, read_sealed, write_sealed
from hf_trak.store.shard_set import ShardSet
from hf_trak.store.verification import judged

VECTORS_FILE, RECORD_FILE = "vectors.faiss", "search.json"

_TRAINING_ROWS = 1 << 16
"""Rows that an index is trained on, from the first shards, if its kind is trained at all."""

_PROBED = 8
"""An index of lists looks at one of so many lists, where FAISS itself looks at a single one
(`benchmarks/pages/faiss.md`)."""


def search_identity(factory: str, checkpoints: Sequence[ShardSet]) -> str:
    """Return what an index of a kind over the training features of some checkpoints is made from."""
    return content_digest({"factory": factory, "shards": [shards.content_hash for shards in checkpoints]})


class GradientSearch:
    """The training features of some checkpoints in an index of FAISS.

    Attributes:
        model_ids (`list[int]`):
            The checkpoints.
        identity (`str`):
            What the vectors were made from.
        index (`datasets.search.FaissIndex`):
            The vectors v_i.
    """

    def __init__(self, model_ids: Sequence[int], identity: str, index: Any) -> None:
        self.model_ids = list(model_ids)
        self.identity = identity
        self.index = index

    @classmethod
    def build(
        cls, checkpoints: Sequence[ShardSet], model_ids: Sequence[int], identity: str, factory: str
    ) -> "GradientSearch":
        """Read all features into an index.

        Args:
            checkpoints: the training features of each checkpoint.
            model_ids: their ids.
            identity: what the features are made from.
            factory: kind of the index, in the language of `faiss.index_factory`: `"Flat"` is exact, `"SQ8"` takes a
                quarter of its memory, `"IVF1024,SQ8"` looks at an eighth of the rows.

        Raises:
            ImportError: `faiss` is not installed.
            ValueError: FAISS knows no such kind.
            StoreError: the checkpoints are cut into shards differently, or a shard is damaged.
        """
        faiss = _faiss()
        from datasets.search import FaissIndex  # needs faiss

        width = sum(shards.width for shards in checkpoints)
        try:
            index = faiss.index_factory(width, factory, faiss.METRIC_INNER_PRODUCT)
        except (RuntimeError, TypeError) as error:
            raise ValueError(
                f"`factory` is {factory!r}, and FAISS says: {str(error).splitlines()[-1].strip()}. Expected a kind of "
                "index such as 'Flat', 'SQ8' or 'IVF1024,SQ8'."
            ) from error
        if not index.is_trained:
            index.train(_first(checkpoints, _TRAINING_ROWS))
        if (lists := faiss.try_extract_index_ivf(index)) is not None:
            lists.nprobe = max(1, lists.nlist // _PROBED)
        for vectors in _vectors(checkpoints):
            index.add(vectors)
        return cls(model_ids, identity, FaissIndex(custom_index=index))

    def best(self, targets: PreconditionedTargets, count: int, largest: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Find the rows with the highest or the lowest scores.

        Args:
            targets: preconditioned targets of the checkpoints of the index.
            count: number of rows for each target.
            largest: whether to find the highest scores.

        Returns:
            Row numbers, int64, and scores, float32, `(m, count)` each, best first. A row number is −1, and its score
            NaN, where an index that looks at a part of the rows found no more.
        """
        queries = np.concatenate([_plain(rows) for rows in targets.rows], axis=1) / np.float32(len(targets.rows))
        queries = np.ascontiguousarray(queries if largest else -queries)
        scores, rows = self.index.faiss_index.search(queries, min(count, self.index.faiss_index.ntotal))
        return rows, np.where(rows < 0, np.float32(np.nan), scores if largest else -scores)

    def save(self, directory: str | Path) -> None:
        """Write the index and what it was made from to a directory."""
        directory = Path(directory)
        with atomic_path(directory / VECTORS_FILE) as temporary:
            self.index.save(str(temporary))
            content = {"identity": self.identity, "model_ids": self.model_ids, "vectors": file_digest(temporary)}
        write_sealed(directory / RECORD_FILE, content)

    @classmethod
    def load(cls, directory: str | Path, identity: str) -> "GradientSearch":
        """Read an index that was saved on this machine.

        FAISS trusts its files, and a checksum does not tell who wrote them: load none from other people.

        Args:
            directory: the directory.
            identity: what the vectors must have been made from.

        Raises:
            ImportError: `faiss` is not installed.
            StoreError: there is none, it is damaged, or it was made from other features.
        """
        _faiss()
        from datasets.search import FaissIndex  # needs faiss

        directory = Path(directory)
        record = _intact_record(directory)
        if record.get("identity") != identity:
            raise StoreError(
                f"The search index in {directory} was made from {record.get('identity')}, the features at hand are "
                f"{identity}. Expected the same. Build it again."
            )
        return cls(record["model_ids"], identity, FaissIndex.load(str(directory / VECTORS_FILE)))


def _intact_record(directory: Path) -> dict[str, Any]:
    """Read the record of a saved index, and compare the vectors with their checksum. Raises `StoreError`."""
    try:
        record = read_sealed(directory / RECORD_FILE, "Build it again.")
    except FileNotFoundError as error:
        raise StoreError(f"{directory} holds no search index: {RECORD_FILE} is missing. Build one first.") from error
    path = directory / VECTORS_FILE
    try:
        found = file_digest(path)
    except OSError as error:
        raise StoreError(f"{path} cannot be read ({error}). Expected the vectors. Build it again.") from error
    if found != record.get("vectors"):
        raise StoreError(
            f"{path} is damaged: its checksum is {found}, and {RECORD_FILE} says {record.get('vectors')!r}. Expected "
            "the vectors as they were saved. Build it again in another directory."
        )
    return record


def verify_search(directory: Path) -> Iterator[Finding]:
    """Check the record and the vectors of a saved index: yield one finding for both."""
    remedy = "Delete the directory; `build_search` with the same arguments writes it."
    yield judged(directory / RECORD_FILE, lambda: _intact_record(directory), remedy)


def _faiss() -> Any:
    """Import `faiss`. Raises `ModuleNotFoundError` where it is not installed."""
    return required(
        "faiss",
        "Interactive search needs FAISS, which is not installed. Install it with `pip install faiss-cpu`, or use "
        "`attribute`, which needs none.",
    )


def _vectors(checkpoints: Sequence[ShardSet]) -> Iterator[np.ndarray]:
    """Yield the vectors v `(rows, C·k)` of every shard."""
    for index in range(len(checkpoints[0])):
        shards = [one.read(index) for one in checkpoints]
        weight = torch.stack([shard.out_to_loss for shard in shards]).mean(0).unsqueeze(1)
        yield torch.cat([shard.grads.float() * weight for shard in shards], dim=1).numpy()


def _first(checkpoints: Sequence[ShardSet], rows: int) -> np.ndarray:
    parts, count = [], 0
    for vectors in _vectors(checkpoints):
        parts.append(vectors)
        count += len(vectors)
        if count >= rows:
            break
    return np.concatenate(parts)


def _plain(rows: ScaledRows) -> np.ndarray:
    """Return the rows without their powers of two, float32."""
    if rows.exponents is None:
        return rows.values.cpu().numpy()
    wide = torch.ldexp(rows.values.double().cpu(), rows.exponents.cpu().unsqueeze(1)).float()
    if not bool(wide.isfinite().all()):
        raise StoreError(
            "Preconditioned targets exceed the range of float32, in which FAISS computes. Use `attribute` instead."
        )
    return wide.numpy()
