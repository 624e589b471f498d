"""Recall and time of approximate indexes of FAISS beside the exact scan of codes.

    pip install --no-deps --target peers faiss-cpu
    PYTHONPATH=peers python benchmarks/faiss_search.py --store DIRECTORY
    PYTHONPATH=peers python benchmarks/faiss_search.py --rows 1000000 --proj-dim 256

Vectors are the rows q x, to be searched with t (XᵀX + λI)⁻¹, or the rows q x L⁻ᵀ, to be searched with t L⁻ᵀ, where
L Lᵀ = XᵀX + λI: inner products are the scores either way, but an index that rounds vectors errs in other directions.
Targets are the last rows, which are left out of the index. Recall is the share of the exact best 20 among the 20 that
are found.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import faiss
import torch
from gram_sample import made, new_store
from torch import Tensor

from hf_trak.scores.streaming import ScaledRows, score_blocks
from hf_trak.scores.topk import TopK
from hf_trak.store.shard_set import Shard
from hf_trak.store.store import FeatureStore

TOP = 20
PROBES = (1, 4, 16, 64, 256)


def exact(shards: list[Shard], targets: Tensor) -> tuple[Tensor, float]:
    """Return the best rows by the exact scan of the codes, `(m, 20)`, and its seconds."""
    begun = time.process_time()
    best, rows = TopK(TOP), ScaledRows.of(targets)
    for start, _, block in score_blocks([iter(shards)], [rows]):
        best.update(start, block)
    return best.result()[1], time.process_time() - begun


def searched(index: faiss.Index, queries: Tensor, best: Tensor) -> tuple[float, float]:
    """Return the recall of an index, and its median seconds for one target."""
    found, seconds = [], []
    for query in queries.float().split(1):
        begun = time.process_time()
        found.append(torch.from_numpy(index.search(query.numpy(), TOP)[1]))
        seconds.append(time.process_time() - begun)
    pairs = zip(torch.cat(found).tolist(), best.tolist(), strict=True)
    return statistics.mean(len(set(one) & set(other)) / TOP for one, other in pairs), statistics.median(seconds)


def indexes(vectors: Tensor, factories: list[str]) -> Iterator[tuple[str, faiss.Index, float, int]]:
    """Build indexes, and yield each with its seconds and bytes."""
    for factory in factories:
        begun = time.process_time()
        index = faiss.index_factory(vectors.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
        index.train(vectors[torch.randperm(len(vectors), generator=torch.Generator().manual_seed(0))[:40_000]].numpy())
        index.add(vectors.numpy())
        yield factory, index, time.process_time() - begun, len(faiss.serialize_index(index))


def compare(store: FeatureStore, m: int, factories: list[str]) -> None:
    shards = list(store.train(0))
    last = shards.pop()
    n = last.start
    targets = last.grads[-m:].double()
    features = torch.cat([shard.grads.float() for shard in shards])
    gram = sum((part.double().T @ part.double() for part in features.split(1 << 14)), torch.tensor(0.0))
    system = gram + 0.3 * gram.trace() / len(gram) * torch.eye(len(gram), dtype=torch.float64)
    factor = torch.linalg.cholesky(system)
    features *= torch.cat([shard.out_to_loss for shard in shards]).unsqueeze(1)
    solved = torch.cholesky_solve(targets.T, factor).T
    best, together = exact(shards, solved)
    alone = statistics.median(exact(shards, one)[1] for one in solved.split(1))
    size = sum(sum(tensor.nbytes for tensor in shard.coded.tensors().values()) for shard in shards if shard.coded)
    print(f"{n:,} rows, k = {store.proj_dim}, {m} targets; processor seconds, one thread\n")
    print("| index | vectors | bytes per row | built in, s | probes | recall at 20 | one target, ms |")
    print("|---|---|---|---|---|---|---|")
    print(
        f"| exact scan | codes | {size / n:.0f} | | | 1 | {1e3 * alone:.0f}; each of {m}: {1e3 * together / m:.1f} |"
    )
    inverse = torch.linalg.solve_triangular(factor, torch.eye(len(gram), dtype=torch.float64), upper=False).T.float()
    for name, vectors, queries in (
        ("x", features, solved),
        ("x L⁻ᵀ", features @ inverse, targets @ inverse.double()),
    ):
        for factory, index, seconds, taken in indexes(vectors, factories):
            lists = getattr(faiss.downcast_index(index), "nlist", 0)
            for probes in [one for one in PROBES if one <= lists] or [0]:
                if probes:
                    faiss.extract_index_ivf(index).nprobe = probes
                recall, each = searched(index, queries, best)
                said = f"{probes} of {lists}" if probes else ""
                row = (factory, name, f"{taken / n:.0f}", f"{seconds:.0f}", said, f"{recall:.3f}", f"{1e3 * each:.1f}")
                print("| " + " | ".join(row) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--proj-dim", type=int, default=256)
    parser.add_argument("--targets", type=int, default=50)
    parser.add_argument("--factories", nargs="+", default=["SQ8", "IVF512,SQ8", "IVF512,PQ128x4fs", "IVF512,RaBitQ"])
    parser.add_argument("--dir")
    given = parser.parse_args()
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    if given.store is not None:
        compare(FeatureStore.load(given.store), given.targets, given.factories)
        return
    with tempfile.TemporaryDirectory(dir=given.dir) as directory:
        store = new_store(Path(directory) / "store", given.rows, given.proj_dim, "int8")
        shards = store.train(0)
        for index, chunk in enumerate(made(given.rows, given.proj_dim)):
            shards.write(index, chunk, torch.ones(len(chunk)))
        compare(store, given.targets, given.factories)


if __name__ == "__main__":
    main()
