"""What the solver of a large index keeps: published, so that nobody has to read all features to compute it again.

Up to some thousand features the solver of the ridge regression is XᵀX, `gram.safetensors`. Beyond that it may be the
largest eigenvalues of XᵀX, `low_rank-<rank>.safetensors`, which take several passes over all features to compute and
4 k · rank bytes to download. Solvers of few rows (`dual`) or of blocks of columns (`block`) read all features whenever
they are used, and keep matrices that may be larger than these: they are not published, but computed from them.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hf_trak.errors import IncompleteStoreError, StoreError
from hf_trak.hub.index_files import check_file, low_rank_bytes, low_rank_file
from hf_trak.hub.published import PublishedSolver
from hf_trak.scores.solver_choice import DEFAULT_RANK, PLAIN_PRIMAL, few_rows
from hf_trak.scores.subspace import ALGORITHM
from hf_trak.store.gram_file import FILE_NAME as GRAM_FILE
from hf_trak.store.shards import Identity, TensorSpec, read_header, read_tensors
from hf_trak.store.solver_files import SolverFiles
from hf_trak.store.store import FeatureStore

_LOW_RANK = re.compile(r"low_rank-(?P<rank>[1-9]\d{0,8})\.safetensors")


def stored_solver(store: FeatureStore, model_id: int) -> PublishedSolver | None:
    """Find what the solver of a checkpoint keeps, to be published.

    Args:
        store: a store whose shards are all written.
        model_id: the checkpoint.

    Returns:
        The eigenvalues, of the highest rank that there is, or the kind `"none"` of a solver that publishes nothing;
        `None` for the Gram matrix.

    Raises:
        IncompleteStoreError: no solver was prepared.
        StoreError: what it keeps is damaged.
    """
    directory = store.checkpoint_dir(model_id)
    if (directory / GRAM_FILE).exists() and store.read_gram(model_id) is not None:
        return None
    ranks = [int(found["rank"]) for path in directory.glob("low_rank-*") if (found := _LOW_RANK.fullmatch(path.name))]
    if ranks:
        path = directory / low_rank_file(max(ranks))
        return PublishedSolver("low_rank", max(ranks), check_low_rank(path, store, model_id, max(ranks)))
    files = SolverFiles(store, model_id)
    if files.exists("kernel") or any(directory.glob("gram_block-*.safetensors")):
        return PublishedSolver("none")
    raise IncompleteStoreError(
        f"Model id {model_id} has neither a Gram matrix nor what another solver keeps in {store.output_dir}. Run "
        "`featurize` again, which finishes it."
    )


def solver_settings(published: Sequence[PublishedSolver | None], n: int, k: int) -> dict[str, Any]:
    """Return the settings with which readers use what is published, where the choice `"auto"` might not.

    Args:
        published: what the solver of each checkpoint keeps.
        n: number of training rows.
        k: number of features.

    Returns:
        `solver` and `solver_rank`, or nothing.
    """
    if all(one is None for one in published):
        return {"solver": "primal"} if k > PLAIN_PRIMAL or few_rows(n, k) else {}
    ranks = {one.rank for one in published if one is not None and one.kind == "low_rank"}
    if len(ranks) == 1 and all(one is not None and one.kind == "low_rank" for one in published):
        rank = ranks.pop()
        return {"solver": "low_rank", "solver_rank": None if rank == min(DEFAULT_RANK, n, k) else rank}
    return {}


def check_low_rank(path: Path, store: FeatureStore, model_id: int, rank: int) -> str:
    """Check a file of eigenvalues as strictly as a shard.

    Args:
        path: the file.
        store: the store that it belongs to.
        model_id: the checkpoint.
        rank: number of eigenvalues.

    Returns:
        Its checksum.

    Raises:
        StoreError: it is not a file of these features. The message begins with "it", or with the path.
    """
    k = store.proj_dim
    check_file(path, low_rank_bytes(k, rank))
    specs = {
        "eigenvalues": TensorSpec((rank,), (torch.float64,)),
        "overlaps": TensorSpec((rank, rank), (torch.float64,)),
        "vectors": TensorSpec((k, rank), (torch.float32,)),
    }
    files = SolverFiles(store, model_id)
    identity: Identity = {
        **files.features,
        "algorithm": ALGORITHM,
        "kind": "low_rank",
        "rank": rank,
        "seed": int(store.config.get("seed", 0)),
    }
    header = read_header(path, identity, specs, files.version)
    facts = header.get("facts")
    for key in ("trace", "residual"):
        value = facts.get(key) if isinstance(facts, dict) else None
        if not isinstance(value, float) or not math.isfinite(value) or value < 0:
            raise StoreError(f"it says that `{key}` is {value!r}, not a finite number of at least 0")
    tensors = read_tensors(path, identity, specs, verify=True, version=files.version)
    for name, values in tensors.items():
        if not bool(torch.isfinite(values).all()):
            raise StoreError(f"`{name}` holds NaN or infinite values")
    if bool((tensors["eigenvalues"] < 0).any()):
        raise StoreError("`eigenvalues` holds numbers below 0")
    return str(header["checksum"])
