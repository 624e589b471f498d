"""Arithmetic of what an index takes on several machines: bytes, seconds from stated rates, and money."""

import math
from dataclasses import dataclass

from hf_trak.featurize.estimation import Estimate
from hf_trak.runtime.checks import byte_size, checked_int
from hf_trak.runtime.progress import duration
from hf_trak.scores.gram_sample import sample_size

DECODE_SECONDS = 2.5e-10
"""Processor seconds to read a number of a row and decode it, with one thread (`benchmarks/pages/codes.md`)."""

MULTIPLY_SECONDS = 5.0e-11
"""Processor seconds to multiply a number of a row by that of a target and add it, with one thread (the same page)."""

GRAM_SECONDS = 9.0e-11
"""Processor seconds of a multiplication and addition of XᵀX, with one thread (`benchmarks/gram_sample.py`)."""


@dataclass(frozen=True)
class ClusterCost:
    """Cost of an index on machines that divide its rows, for all checkpoints.

    Attributes:
        nodes: machines.
        processes: processes on all machines, each with one thread.
        read_bandwidth: bytes that a machine reads per second.
        index_bytes: the features on disk.
        featurize_seconds: time to compute them; `None` if the rate of a process is not known.
        gram_seconds: time to sum XᵀX; 0 with another solver.
        read_seconds: time to read the features once, at the bandwidth of all machines.
        multiply_seconds: time to decode them and multiply them by the targets.
        price: price of a machine for an hour; `None` if it is not known.
    """

    nodes: int
    processes: int
    read_bandwidth: float
    index_bytes: int
    featurize_seconds: float | None
    gram_seconds: float
    read_seconds: float
    multiply_seconds: float
    price: float | None

    @property
    def score_seconds(self) -> float:
        """Return the time to score all targets together: rows are read while others are multiplied."""
        return max(self.read_seconds, self.multiply_seconds)

    @property
    def money(self) -> float | None:
        """Return the price of all machines for all of this, or `None` if it is not known."""
        if self.price is None or self.featurize_seconds is None:
            return None
        seconds = self.featurize_seconds + self.gram_seconds + self.score_seconds
        return self.price * self.nodes * seconds / 3600

    def __str__(self) -> str:
        featurized = "unknown" if self.featurize_seconds is None else duration(self.featurize_seconds)
        bound = "reading" if self.read_seconds >= self.multiply_seconds else "multiplying"
        money = "" if self.money is None else f"; {self.money:,.2f} at {self.price:,.2f} per node and hour"
        return (
            f"{self.nodes:,} nodes, {self.processes:,} processes: index {byte_size(self.index_bytes)}; featurize "
            f"{featurized}, XᵀX {duration(self.gram_seconds)}, score {duration(self.score_seconds)} ({bound}; the "
            f"bytes alone {duration(self.read_seconds)} at {self.read_bandwidth / 1e9:,.3g} GB/s per node){money}"
        )


def cluster_cost(estimate: Estimate, nodes: int, read_bandwidth: float, price: float | None = None) -> ClusterCost:
    """Work out what an index takes on several machines.

        featurize = C · (n + m) / processes / (rows per second of a process)
        XᵀX       = C · min(n, rows of a sample) · k² · GRAM_SECONDS / processes
        reading   = bytes / (nodes · bandwidth)
        multiply  = C · n · k · (DECODE_SECONDS + m · MULTIPLY_SECONDS) / processes

    Args:
        estimate ([`~hf_trak.featurize.estimation.Estimate`]):
            The rows, features, targets, and processes of all machines.
        nodes (`int`):
            Machines.
        read_bandwidth (`float`):
            Bytes that a machine reads per second.
        price (`float`, *optional*):
            Price of a machine for an hour, in any currency.

    Raises:
        ValueError: a number is out of range, or there are fewer processes than machines.
    """
    checked_int(nodes, "nodes", 1, type_error=ValueError)
    if nodes > estimate.processes:
        raise ValueError(
            f"`num_processes` is {estimate.processes}, and `nodes` is {nodes}. Expected the processes of all nodes "
            "together, at least one on each. Raise `num_processes`."
        )
    if not (math.isfinite(read_bandwidth) and read_bandwidth > 0):
        raise ValueError(f"`read_bandwidth` is {read_bandwidth}. Expected bytes per second, above 0, such as 5e9.")
    if price is not None and not (math.isfinite(price) and price >= 0):
        raise ValueError(f"`price_per_hour` is {price}. Expected a price of at least 0, or none.")
    n, k, m = estimate.train_size, estimate.proj_dim, max(1, estimate.n_targets)
    rows = (sample_size(n, k) or n) if estimate.solver.kind == "primal" else 0
    numbers, features = estimate.checkpoints * n * k, estimate.stages["features"]
    seconds = [estimate.stages[name].seconds for name in ("features", "targets")]
    return ClusterCost(
        nodes=nodes,
        processes=estimate.processes,
        read_bandwidth=read_bandwidth,
        index_bytes=features.disk,
        featurize_seconds=None if None in seconds else sum(one or 0.0 for one in seconds),
        gram_seconds=estimate.checkpoints * rows * k * k * GRAM_SECONDS / estimate.processes,
        read_seconds=features.disk / (nodes * read_bandwidth),
        multiply_seconds=numbers * (DECODE_SECONDS + m * MULTIPLY_SECONDS) / estimate.processes,
        price=price,
    )
