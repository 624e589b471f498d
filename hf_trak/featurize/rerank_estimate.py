"""Arithmetic of what a shortlist and exact scores of its rows take."""

from dataclasses import dataclass

from hf_trak.config import TrakConfig
from hf_trak.featurize.curvature_settings import sample_size
from hf_trak.runtime.checks import checked_int
from hf_trak.runtime.memory import byte_size
from hf_trak.runtime.progress import duration


@dataclass(frozen=True)
class RerankEstimate:
    """Cost of `attribute(..., rerank=...)`, stage by stage, over all checkpoints."""

    count: int
    """`rerank`: rows of the shortlist, for each target and end."""
    index_bytes: int
    """Features that the shortlist reads."""
    curvature_rows: int
    """Rows of the sample of a curvature that is not fitted yet."""
    target_gradients: int
    """Gradients of targets that are preconditioned."""
    row_gradients: int
    """Gradients of training rows, at most: those of lists that have no row in common."""
    scores_bytes: int
    """Disk: exact scores, 4 bytes for each of these rows and each target."""
    seconds: float | None
    """Seconds for these gradients at the rate of featurizing, where it was measured."""

    def __str__(self) -> str:
        time = "" if self.seconds is None else f", {duration(self.seconds)}"
        return (
            f"reranking {self.count:,} rows per target and end: shortlist from {byte_size(self.index_bytes)} of "
            f"features; curvature from {self.curvature_rows:,} rows, once; {self.target_gradients:,} preconditioned "
            f"targets; gradients of {self.row_gradients:,} rows at most{time}; disk "
            f"{byte_size(self.scores_bytes)} for scores"
        )


def estimate_rerank(
    args: TrakConfig,
    rerank: int,
    n: int,
    m: int,
    checkpoints: int,
    feature_bytes: int,
    processes: int,
    rows_per_second: float | None,
) -> RerankEstimate:
    """Work out what reranking takes.

    Args:
        args: the configuration.
        rerank: rows of the shortlist, for each target and end.
        n: number of training rows.
        m: number of targets.
        checkpoints: number of checkpoints.
        feature_bytes: bytes of the features of all checkpoints.
        processes: number of processes.
        rows_per_second: gradients per second of one process, where it was measured.

    Raises:
        ValueError: `rerank` is no number of rows.
    """
    count = checked_int(rerank, "rerank", 1, type_error=ValueError)
    rows = min(n, 2 * m * count)
    gradients = checkpoints * rows
    return RerankEstimate(
        count=count,
        index_bytes=feature_bytes,
        curvature_rows=checkpoints * sample_size(args, n),
        target_gradients=checkpoints * m,
        row_gradients=gradients,
        scores_bytes=4 * gradients * (m + 1),
        seconds=None if rows_per_second is None else (gradients + checkpoints * m) / rows_per_second / processes,
    )
