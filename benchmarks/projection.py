"""Time to project a batch of gradients on a CPU: this library's maps, memory bandwidth, and traker 0.3.2.

    pip install --no-deps --target peers traker==0.3.2
    python benchmarks/projection.py --traker peers

Every round measures everything once, in turn, so that all medians come from the same stretch of time. Without
`--traker` the peer is left out. Close other programs: with as many threads as cores, a busy core makes every number
worse. `--busy N` shows by how much: it measures everything again beside N processes that compute without a pause.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from busy import competing

from hf_trak.projectors import NormalProjector, RademacherProjector, SparseProjector

PEER = "traker 0.3.2 BasicProjector"
READ = "read the block once (sum)"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grad-dim", type=int, default=2**22, help="P, the number of parameters")
    parser.add_argument("--proj-dim", type=int, default=2048, help="k of the dense maps and of the peer")
    parser.add_argument(
        "--sjlt-dims", type=int, nargs="+", default=[512, 2048, 4096, 16384], help="k of the sparse map"
    )
    parser.add_argument("--batch-size", type=int, default=16, help="B")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument("--rounds", type=int, default=5, help="measurements per method; the median is shown")
    parser.add_argument("--dense-rounds", type=int, default=3, help="the same for the dense maps")
    parser.add_argument(
        "--peer-rounds", type=int, default=1, help="the same for traker, which takes minutes each time"
    )
    parser.add_argument("--busy", type=int, default=0, help="measure again beside so many competing processes")
    parser.add_argument("--normal", action="store_true", help="measure the `normal` map too")
    parser.add_argument("--traker", type=Path, help="directory that holds the `trak` package")
    parser.add_argument("--json", type=Path, help="file to write the medians to, in seconds")
    return parser.parse_args(arguments)


def methods(args: argparse.Namespace, grads: torch.Tensor) -> dict[str, tuple[int, Callable[[], object]]]:
    """Name → (rounds, what to time)."""
    out = {k: torch.zeros(len(grads), k) for k in {*args.sjlt_dims, args.proj_dim}}
    table: dict[str, tuple[int, Callable[[], object]]] = {READ: (args.rounds, grads.sum)}
    for k in args.sjlt_dims:
        sparse = SparseProjector(args.grad_dim, k)

        def warm(sparse: SparseProjector = sparse, k: int = k) -> None:
            sparse.accumulate(out[k], grads, 0, 0)

        def cold(sparse: SparseProjector = sparse, k: int = k) -> None:
            sparse.free_memory()
            sparse.accumulate(out[k], grads, 0, 0)

        table[f"sjlt k={k}"] = (args.rounds, warm)
        table[f"sjlt k={k}, bits not cached"] = (args.rounds, cold)
    dense: list[RademacherProjector | NormalProjector] = [RademacherProjector(args.grad_dim, args.proj_dim)]
    if args.normal:
        dense.append(NormalProjector(args.grad_dim, args.proj_dim))
    for projector in dense:

        def project(projector: RademacherProjector | NormalProjector = projector) -> None:
            projector.accumulate(out[args.proj_dim], grads, 0, 0)

        table[f"{projector.proj_type} k={args.proj_dim}"] = (args.dense_rounds, project)
    if args.traker is not None:
        sys.path.append(str(args.traker))
        from trak.projectors import BasicProjector, ProjectionType

        peer = BasicProjector(args.grad_dim, args.proj_dim, 0, ProjectionType.rademacher, "cpu")
        table[PEER] = (args.peer_rounds, lambda: peer.project(grads, 0))
    return table


def measure(table: dict[str, tuple[int, Callable[[], object]]]) -> dict[str, float]:
    """Median seconds per method; all methods take turns."""
    times: dict[str, list[float]] = {name: [] for name in table}
    for current in range(-1, max(rounds for rounds, _ in table.values())):
        for name, (rounds, run) in table.items():
            if current >= rounds or (current < 0 and name == PEER):
                continue
            begin = time.perf_counter()
            run()
            if current >= 0:  # the first round warms up
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in times.items()}


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    grads = torch.randn(args.batch_size, args.grad_dim)
    table = methods(args, grads)
    print(
        f"torch {torch.__version__}, {args.threads} threads, P = {args.grad_dim:,}, B = {args.batch_size}, float32; "
        f"medians of {args.rounds} rounds (dense: {args.dense_rounds}, peer: {args.peer_rounds})"
    )
    results = {}
    for processes in (0, args.busy) if args.busy else (0,):
        with competing(processes):
            results[processes] = measure(table)
        report(results[processes], processes, args)
    if args.json is not None:
        args.json.write_text(json.dumps(results[0], indent=2) + "\n")


def report(medians: dict[str, float], processes: int, args: argparse.Namespace) -> None:
    """Print a table of medians, beside so many competing processes."""
    print(f"beside {processes} other processes")
    print(f"{'':40}{'seconds':>10}{'of bandwidth':>14}{'vs peer':>10}")
    for name, seconds in medians.items():
        versus = f"{medians[PEER] / seconds:.1f}x" if PEER in medians else "-"
        print(f"{name:40}{seconds:10.4f}{medians[READ] / seconds:14.1%}{versus:>10}")
    sparse = [medians[f"sjlt k={k}"] for k in args.sjlt_dims]
    print(f"sjlt, slowest k ÷ fastest k: {max(sparse) / min(sparse):.2f}")


if __name__ == "__main__":
    main()
