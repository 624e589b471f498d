"""The files that solvers of the ridge regression keep beside the features of a checkpoint.

    checkpoint-<model_id>/
      kernel.safetensors                            `kernel` (n, n), XXᵀ
      low_rank-<rank>.safetensors                   `vectors` (k, rank), `eigenvalues` (rank,), `overlaps` (rank, rank)
      low_rank-<rank>.passes.safetensors            the same while it is computed; removed at the end

The files lie in the output directory of the store, also where the features themselves are read from a published index.
As the Gram matrix does, each names in its identity the features that it was computed from, and has a checksum; files
of another identity, and damaged ones, are refused. Facts, plain numbers such as the trace, are in the metadata.
"""

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from hf_trak.errors import NonFiniteError, StoreError
from hf_trak.store.sealed import Finding, judged
from hf_trak.store.shards import Identity, TensorSpec, metadata_of, read_header, read_tensors, write_tensors
from hf_trak.store.store import FeatureStore

_NAMES = re.compile(r"(kernel|low_rank-\d+|low_rank-\d+\.passes)\.safetensors")
_REMEDY = "Delete it; `featurize`, or the next call that needs it, computes it again."


class SolverFiles:
    """The solver files of one checkpoint, whose features are all written."""

    def __init__(self, store: FeatureStore, model_id: int) -> None:
        """
        Args:
            store: the features.
            model_id: the checkpoint.
        """
        self.directory = store.output_dir / store.checkpoint_dir(model_id).name
        self._store = store
        self._model_id = model_id

    @cached_property
    def features(self) -> Identity:
        """Return what every file is computed from: the configuration, the weights and the rows themselves.

        Raises:
            IncompleteStoreError: shards are missing.
            StoreError: a shard is damaged.
        """
        shards = self._store.train(self._model_id)
        shards.require_complete("Featurize the remaining rows first.")
        return {**self._store.identity(self._model_id), "content": shards.content_hash}

    def path(self, name: str) -> Path:
        """Return the path of a file."""
        return self._store.solver_path(self._model_id, f"{name}.safetensors")

    def exists(self, name: str) -> bool:
        """Tell whether a file exists, whatever it contains."""
        return self.path(name).exists()

    def write(
        self, name: str, tensors: Mapping[str, Tensor], identity: Identity, facts: Mapping[str, float] | None = None
    ) -> None:
        """Write a file atomically.

        Args:
            name: its name, without the suffix.
            tensors: its tensors.
            identity: what it depends on beside the features.
            facts: numbers for its metadata.

        Raises:
            NonFiniteError: a number is NaN or infinite.
            StoreError: the file cannot be written.
        """
        numbers = {key: float(value) for key, value in (facts or {}).items()}
        whole = all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())
        if not whole or not all(map(math.isfinite, numbers.values())):
            raise NonFiniteError(
                f"What is to be saved in {self.path(name)} has NaN or infinite entries. Expected finite ones. Inspect "
                "the weights of this checkpoint, or compute features in float32."
            )
        write_tensors(self.path(name), tensors, {**self.features, **identity}, facts=numbers)

    def read(
        self, name: str, specs: Mapping[str, TensorSpec], identity: Identity, facts: Sequence[str] = ()
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Read a file; its tensors are memory-mapped.

        Args:
            name: its name, without the suffix.
            specs: the tensors that it must hold.
            identity: what it must depend on beside the features.
            facts: names of the numbers that its metadata must have.

        Returns:
            The tensors and the numbers, by name.

        Raises:
            StoreError: the file is missing or damaged, or was computed from something else.
        """
        found = self.facts(name, specs, identity, facts)
        return read_tensors(self.path(name), {**self.features, **identity}, specs), found

    def facts(
        self, name: str, specs: Mapping[str, TensorSpec], identity: Identity, facts: Sequence[str]
    ) -> dict[str, float]:
        """Read the numbers in the metadata of a file.

        Args:
            name, specs, identity, facts: see [`~SolverFiles.read`].

        Raises:
            StoreError: as there.
        """
        path = self.path(name)
        saved = read_header(path, {**self.features, **identity}, specs).get("facts")
        found = saved if isinstance(saved, dict) else {}
        for key in facts:
            value = found.get(key)
            if not isinstance(value, float) or not math.isfinite(value):
                raise StoreError(
                    f"{path} says that `{key}` is {value!r}. Expected a finite number. Delete this file and run the "
                    "same command again."
                )
        return {key: found[key] for key in facts}

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            self.path(name).unlink()

    def paths(self) -> list[Path]:
        """List the files that exist, finished or not."""
        return sorted(path for path in self.directory.glob("*.safetensors") if _NAMES.fullmatch(path.name))

    def findings(self, whole: bool) -> Iterator[Finding]:
        """Read every file, and compare its bytes with its checksum, and the features that it names with those here.

        Args:
            whole: whether all of the features are there and intact, without which files cannot be judged.

        Returns:
            An iterator of one finding per file that exists.
        """
        for path in self.paths():
            if whole:
                identity = {**_identity_of(path), **self.features}
                yield judged(path, partial(read_tensors, path, identity, {}, verify=True), _REMEDY)
            else:
                detail = "features that it was computed from are damaged or missing"
                yield Finding(path, "unchecked", detail, _REMEDY)


def _identity_of(path: Path) -> dict[str, str | int]:
    """Read what a file says that it was computed from."""
    try:
        found = metadata_of(path).get("identity")
    except StoreError:
        return {}  # which is said again when the file is read
    return found if isinstance(found, dict) else {}
