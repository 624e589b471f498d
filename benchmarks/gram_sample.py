"""XᵀX of a sample of the rows beside that of all rows: its error, what it does to scores, and the seconds it saves.

    python benchmarks/gram_sample.py --rows 1000000 --proj-dim 512 --sizes 16384 65536 131072 262144
    python benchmarks/gram_sample.py --store DIRECTORY --sizes 16384 65536 131072
    python benchmarks/gram_sample.py --seconds --rows 1000000 --proj-dim 1024

The first writes a store of rows with eigenvalues i⁻¹ in twenty clusters, and lengths that are log-normal; the second
takes one that is there. `error` is ‖Ŝ^(−1/2) (Ĝ − G) Ŝ^(−1/2)‖₂, `stated` what the halves of the sample say of it, see
`hf_trak/scores/gram_sample.py`; rows drawn `alike` stand beside them. Scores of the last rows as targets are compared
by rank over all rows, and by the best 20.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_trak.runtime.processes import Processes
from hf_trak.scores.gram_sample import sample_size, sampled_gram
from hf_trak.scores.scorer import Scorer
from hf_trak.store.checkpoint_records import code_settings
from hf_trak.store.codes import CodedRows, CodeFormat
from hf_trak.store.shards import write_tensors
from hf_trak.store.store import FeatureStore, Gram

CHUNK = 1 << 15


def made(rows: int, k: int) -> Iterator[Tensor]:
    """Yield rows in chunks: twenty clusters, a spectrum that falls as 1 / i, and lengths that are log-normal."""
    scale = torch.arange(1, k + 1, dtype=torch.float32) ** -0.5
    centres = torch.randn(20, k, generator=torch.Generator().manual_seed(7))
    for start in range(0, rows, CHUNK):
        generator = torch.Generator().manual_seed(start + 1)
        count = min(CHUNK, rows - start)
        of = torch.randint(20, (count,), generator=generator)
        found = (torch.randn(count, k, generator=generator) + centres[of]) * scale
        yield found * torch.exp(torch.randn(count, 1, generator=generator))


def new_store(directory: Path, rows: int, k: int, dtype: str) -> FeatureStore:
    config = {"train_size": rows, "proj_dim": k, "feature_dtype": dtype, "shard_size": CHUNK, "seed": 0}
    store = FeatureStore.open(directory, {**config, **code_settings(dtype)})
    store.register_checkpoint(0, "synthetic")
    return store


def scorer_of(store: FeatureStore, relative: float) -> Scorer:
    processes = Processes(use_cpu=True)
    return Scorer(store, processes, processes.device, relative)


def ridge(gram: Tensor, relative: float) -> Tensor:
    """Return G + λI."""
    return gram + relative * gram.trace() / len(gram) * torch.eye(len(gram), dtype=torch.float64)


def whitened(system: Tensor, change: Tensor) -> float:
    """Return ‖S^(−1/2) Δ S^(−1/2)‖₂."""
    factor = torch.linalg.cholesky(system)
    left = torch.linalg.solve_triangular(factor, change, upper=False)
    return float(torch.linalg.eigvalsh(torch.linalg.solve_triangular(factor, left.T, upper=False)).abs().max())


def ranks(values: Tensor) -> Tensor:
    return values.argsort(dim=1).argsort(dim=1).double()


def alike(features: list[Tensor], n: int, size: int) -> Gram:
    """Estimate XᵀX from rows that are drawn with one probability."""
    k, counts = features[0].shape[1], [0, 0]
    sums, generator = torch.zeros(2, k, k, dtype=torch.float64), torch.Generator().manual_seed(3)
    for rows in features:
        draws = torch.rand(len(rows), generator=generator, dtype=torch.float64) * n / size
        for half in range(2):
            part = rows[(draws >= half / 2) & (draws < (half + 1) / 2)].double()
            sums[half].addmm_(part.T, part)
            counts[half] += len(part)
    one, two = (total * (n / count) for total, count in zip(sums, counts, strict=True))
    matrix = (one + two) / 2
    return Gram(matrix, float(matrix.trace()), n, sum(counts), (one - two) / 2)


def errors(store: FeatureStore, sizes: list[int], m: int, relative: float) -> None:
    """Print what samples of some sizes do."""
    scorer = scorer_of(store, relative)
    gram = scorer._sum_gram(0)
    features = [shard.grads.half() for shard in store.train(0)]
    n, k, targets = store.train_size, store.proj_dim, features[-1][-m:].double()
    system = ridge(gram, relative)
    effective = float(torch.linalg.solve(system, gram).trace())
    squares = torch.cat([rows.double().square().sum(dim=1) for rows in features])
    print(
        f"n = {n:,}, k = {k}, {m} targets, λ = {relative} of the mean eigenvalue, effective dimension "
        f"{effective:.0f}, mean of ‖x‖⁴ / (mean of ‖x‖²)² {float(squares.square().mean() / squares.mean() ** 2):.1f}\n"
    )
    print("| drawn | rows | error | stated | change of λ | rank correlation | best 20 that stay |")
    print("|---|---|---|---|---|---|---|")

    def scored(inverse: Tensor) -> Tensor:
        solved = torch.linalg.solve(inverse, targets.T).float()
        return torch.cat([rows.float() @ solved for rows in features]).T

    whole, step = scored(system), max(1, n // 100_000)
    best, order = whole.topk(20).indices, ranks(whole[:, ::step])
    ways: dict[str, Callable[[int], Gram]] = {
        "alike": lambda size: alike(features, n, size),
        "by length": lambda size: sampled_gram(store, 0, size, scorer._over, scorer.device),
    }
    for name, way in ways.items():
        for size in sizes:
            found = way(size)
            assert found.spread is not None
            sampled = ridge(found.matrix, relative)
            error, stated = whitened(sampled, found.matrix - gram), whitened(sampled, found.spread)
            scores = scored(sampled)
            pairs = zip(scores.topk(20).indices, best, strict=True)
            kept = [len(set(one.tolist()) & set(other.tolist())) / 20 for one, other in pairs]
            ranked = zip(order, ranks(scores[:, ::step]), strict=True)
            both = [float(torch.corrcoef(torch.stack(pair))[0, 1]) for pair in ranked]
            print(
                f"| {name} | {found.sample:,} | {error:.3f} | {stated:.3f} | "
                f"{found.trace / float(gram.trace()) - 1:+.2%} | {sum(both) / m:.4f} | {sum(kept) / m:.1%} |",
                flush=True,
            )


def seconds(directory: Path, rows: int, k: int, whole: bool) -> None:
    """Print what XᵀX of a store of codes of 4 bits takes. All shards have the same rows."""
    store = new_store(directory, rows, k, "int4")
    shards, weights = store.train(0), torch.ones(CHUNK)
    coded = CodedRows.encode(next(made(CHUNK, k)), CodeFormat(4, k))
    for index in range(len(shards)):
        part = shards.plan.rows(index)
        tensors = {**coded[: len(part)].tensors(), "out_to_loss": weights[: len(part)]}
        write_tensors(shards.path(index), tensors, shards.identity, start=part.start, stop=part.stop)
    scorer, size = scorer_of(store, 0.3), sample_size(rows, k)
    for shard in shards:  # compares the checksums
        shard.out_to_loss.sum()
    steps: dict[str, Callable[[], Any]] = {} if size is None else {
        "sample": lambda: sampled_gram(store, 0, size, scorer._over, scorer.device)
    }  # fmt: skip
    for name, step in {**steps, **({"all rows": lambda: scorer._sum_gram(0)} if whole else {})}.items():
        begun, wall = time.process_time(), time.perf_counter()
        step()
        print(
            f"| {rows:,} | {name} | {time.process_time() - begun:.1f} | {time.perf_counter() - wall:.1f} |", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--proj-dim", type=int, default=512)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16_384, 65_536, 131_072, 262_144])
    parser.add_argument("--relative", type=float, default=0.3)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--targets", type=int, default=20)
    parser.add_argument("--seconds", action="store_true")
    parser.add_argument("--only-sample", action="store_true", help="leave out the sum over all rows")
    parser.add_argument("--dir", help="where the temporary directory goes")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.store is not None:
        errors(FeatureStore.load(given.store), given.sizes, given.targets, given.relative)
        return
    with tempfile.TemporaryDirectory(dir=given.dir) as directory:
        if given.seconds:
            seconds(Path(directory) / "store", given.rows, given.proj_dim, not given.only_sample)
            return
        store = new_store(Path(directory) / "store", given.rows, given.proj_dim, "float16")
        shards = store.train(0)
        for index, chunk in enumerate(made(given.rows, given.proj_dim)):
            shards.write(index, chunk, torch.ones(len(chunk)))
        errors(store, given.sizes, given.targets, given.relative)


if __name__ == "__main__":
    main()
