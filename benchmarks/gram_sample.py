"""XᵀX of a sample of the rows beside that of all rows: its error, what it does to scores, and the seconds it saves.

    python benchmarks/gram_sample.py --rows 1000000 --proj-dim 512 --sizes 10000 30000 100000 300000
    python benchmarks/gram_sample.py --store DIRECTORY
    python benchmarks/gram_sample.py --seconds --rows 1000000 --proj-dim 1024

The first takes rows with eigenvalues i⁻¹ in twenty clusters, and lengths that are log-normal; the second the rows of a
store. `error` is ‖(G + λI)^(−1/2) (Ĝ + λ̂I − G − λI) (G + λI)^(−1/2)‖₂, `halves` what two halves of the sample say of
it. Scores of rows drawn from the same source are compared by rank over all rows, and by the best 20.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_trak.runtime.processes import Processes
from hf_trak.scores.scorer import Scorer
from hf_trak.store.store import FeatureStore

RELATIVE = 0.3
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


def halves_of(rows: Tensor, likely: Tensor, draws: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the drawn rows of each half with the roots of their weights; rows that are certain are halved."""
    sure, half = likely >= 1, draws[:, 1] < 0.5
    taken = draws[:, 0] < likely
    for side in (half, ~half):
        part = sure | (taken & side)
        weight = torch.where(sure, 0.5, 1 / likely.clamp(min=1e-300))
        yield rows[part], weight[part].sqrt()


def errors(features: list[Tensor], targets: Tensor, sizes: list[int], relative: float) -> None:
    """Print what samples of some sizes do, of rows drawn alike, and drawn by their squared lengths."""
    n, k = sum(map(len, features)), features[0].shape[1]
    draws = torch.rand(n, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    gram, lengths = torch.zeros(k, k, dtype=torch.float64), []
    for rows in features:
        wide = rows.double()
        gram.addmm_(wide.T, wide)
        lengths.append(wide.square().sum(dim=1))
    system, squares = ridge(gram, relative), torch.cat(lengths)
    effective = float(torch.linalg.solve(system, gram).trace())
    spread = float(squares.square().mean() / squares.mean() ** 2)
    print(
        f"n = {n:,}, k = {k}, {len(targets)} targets, λ = {relative} of the mean eigenvalue, effective dimension "
        f"{effective:.0f}, mean of ‖x‖⁴ / (mean of ‖x‖²)² {spread:.1f}\n"
    )
    print("| drawn | rows | error | halves | change of λ | rank correlation | best 20 that stay |")
    print("|---|---|---|---|---|---|---|")

    def scored(inverse: Tensor) -> Tensor:
        solved = torch.linalg.solve(inverse, targets.double().T).float()
        return torch.cat([rows.float() @ solved for rows in features]).T

    whole, step = scored(system), max(1, n // 100_000)
    best, order = whole.topk(20).indices, ranks(whole[:, ::step])
    for name, weights in (("alike", torch.ones_like(squares)), ("by length", squares)):
        for size in sizes:
            sums, count, start = torch.zeros(2, k, k, dtype=torch.float64), 0, 0
            for rows in features:
                part = slice(start, start + len(rows))
                start += len(rows)
                likely = weights[part] * (size / float(weights.sum()))
                for half, (found, root) in enumerate(halves_of(rows, likely, draws[part])):
                    wide = found.double() * root[:, None]
                    sums[half].addmm_(wide.T, wide)
                    count += len(found)
            found = sums[0] + sums[1]
            sampled = ridge(found, relative)
            error, seen = whitened(sampled, sampled - system), whitened(sampled, sums[0] - sums[1])
            scores = scored(sampled)
            pairs = zip(scores.topk(20).indices, best, strict=True)
            kept = [len(set(one.tolist()) & set(other.tolist())) / 20 for one, other in pairs]
            both = [
                float(torch.corrcoef(torch.stack(pair))[0, 1])
                for pair in zip(order, ranks(scores[:, ::step]), strict=True)
            ]
            print(
                f"| {name} | {count:,} | {error:.3f} | {seen:.3f} | {float(found.trace() / gram.trace() - 1):+.2%} | "
                f"{sum(both) / len(both):.4f} | {sum(kept) / len(kept):.1%} |",
                flush=True,
            )


def seconds(rows: int, k: int, directory: str | None) -> None:
    """Print what XᵀX of a store of codes of 4 bits takes."""
    with tempfile.TemporaryDirectory(dir=directory) as found:
        config: dict[str, Any] = {
            "train_size": rows, "proj_dim": k, "feature_dtype": "int4", "shard_size": CHUNK,
            "rotation": "hadamard-1", "levels": "levels-1", "seed": 0,
        }  # fmt: skip
        store = FeatureStore.open(Path(found) / "store", config)
        store.register_checkpoint(0, "synthetic")
        shards = store.train(0)
        for index, chunk in enumerate(made(rows, k)):
            shards.write(index, chunk, torch.ones(len(chunk)))
        processes = Processes(use_cpu=True)
        scorer = Scorer(store, processes, processes.device, RELATIVE)
        begun, wall = time.process_time(), time.perf_counter()
        scorer._sum_gram(0)
        print(
            f"all rows: {time.process_time() - begun:.1f} s processor, {time.perf_counter() - wall:.1f} s", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--proj-dim", type=int, default=512)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 30_000, 100_000, 300_000])
    parser.add_argument("--relative", type=float, default=RELATIVE)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--targets", type=int, default=50)
    parser.add_argument("--seconds", action="store_true")
    parser.add_argument("--dir")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.seconds:
        seconds(given.rows, given.proj_dim, given.dir)
        return
    if given.store is None:
        features = [chunk.half() for chunk in made(given.rows + given.targets, given.proj_dim)]
    else:
        features = [shard.grads.half() for shard in FeatureStore.load(given.store).train(0)]
    targets = features[-1][-given.targets :]
    features[-1] = features[-1][: -given.targets]
    errors(features, targets, given.sizes, given.relative)


if __name__ == "__main__":
    main()
