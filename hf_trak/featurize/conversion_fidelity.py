"""The fidelity of a converted store: its scores beside those of the store that it was converted from.

Training rows are drawn as targets, and the scores of all other training rows for them are computed from both stores,
each with its own Gram matrix and ridge. This takes no model. Features of targets are kept in float32 whatever the
storage of training rows is, so those of the source stand for the targets of both stores.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_trak.config import TrakConfig
from hf_trak.featurize.converting import scorer_of
from hf_trak.featurize.fidelity import Agreement
from hf_trak.runtime.checks import checked_int
from hf_trak.runtime.processes import Processes
from hf_trak.scores.scorer import Scorer
from hf_trak.store.store import FeatureStore

_TOP = 10
_MOST_ROWS = 1 << 20
_LEAST_ROWS = 4


@dataclass(frozen=True)
class ConversionFidelity:
    """How well scores of a converted store agree with those of its source.

    Attributes:
        before (`str`): storage of the features of the source.
        after (`str`): that of the converted ones.
        bytes_before (`int`): bytes of a row of features of the source, with its scale.
        bytes_after (`int`): those of a converted one.
        rows (`int`): number of training rows that were compared.
        targets (`int`): number of targets, which are other training rows.
        top (`int`): number of highest rows in the overlap.
        scores (`Agreement`): converted scores beside those of the source.
    """

    before: str
    after: str
    bytes_before: int
    bytes_after: int
    rows: int
    targets: int
    top: int
    scores: Agreement

    def to_dict(self) -> dict[str, Any]:
        """Return the measurement as plain JSON."""
        means = {"mean_spearman": self.scores.mean_spearman, "mean_overlap": self.scores.mean_overlap}
        return {**asdict(self), "scores": {**asdict(self.scores), **means}}

    def __str__(self) -> str:
        """Say in a sentence what was saved, and in another one what it costs."""
        error = f" ± {self.scores.standard_error:.3f}" if math.isfinite(self.scores.standard_error) else ""
        return "\n".join(
            [
                f"{self.before} to {self.after}: {self.bytes_before:,} to {self.bytes_after:,} bytes per row, "
                f"{self.bytes_before / self.bytes_after:.1f} times fewer.",
                f"Scores beside those before, {self.rows:,} training rows × {self.targets} others as targets: rank "
                f"correlation {self.scores.mean_spearman:.3f}{error}, {self.scores.mean_overlap:.0%} of the top "
                f"{self.top} (chance: 0, {self.top / self.rows:.0%}).",
            ]
        )


def compare_stores(
    source: FeatureStore,
    converted: FeatureStore,
    args: TrakConfig | None = None,
    processes: Processes | None = None,
    targets: int = 16,
    seed: int = 0,
) -> ConversionFidelity:
    """Compare the scores of a converted store with those of the store that it was converted from.

    All processes call this together.

    Args:
        source (`FeatureStore`):
            The store that was converted.
        converted (`FeatureStore`):
            The result of [`~hf_trak.featurize.converting.convert_store`], or a
            [`~hf_trak.store.prefix.PrefixStore`], the first bytes of the rows of `source`.
        args (`TrakConfig`, *optional*):
            Settings of the ridge regression. By default `TrakConfig()`.
        processes (`Processes`, *optional*):
            The processes that take part.
        targets (`int`, *optional*, defaults to 16):
            Number of training rows that are drawn as targets, half of all at most.
        seed (`int`, *optional*, defaults to 0):
            Seed of the draw.

    Returns:
        [`ConversionFidelity`]: rank correlations and overlaps of the highest rows.

    Raises:
        TypeError: a number is no integer.
        ValueError: a number is out of range, or there are fewer than 4 training rows.
        SingularGramError: the ridge is too small for these features.
    """
    args, processes = args or TrakConfig(), processes or Processes()
    rows, drawn = _sample(source.train_size, targets, seed)
    scores = []
    for store in (source, converted):
        scorer, ids = scorer_of(store, args, processes), converted.model_ids
        preconditioned = [
            scorer.precondition(model_id, _targets(source, store, model_id, drawn), len(drawn)) for model_id in ids
        ]
        scores.append(_scores_of(scorer, ids, preconditioned, rows, len(drawn)))
    before, after = scores
    top = min(_TOP, max(1, len(rows) // 4))
    return ConversionFidelity(
        str(source.config["feature_dtype"]),
        str(converted.config["feature_dtype"]),
        row_bytes(source),
        row_bytes(converted),
        len(rows),
        len(drawn),
        top,
        Agreement.of(after.double().numpy(), before.double().numpy(), top),
    )


def row_bytes(store: FeatureStore) -> int:
    """Number of bytes of a row of features, with its scale, without the weight q."""
    form = store.code_format
    return store.proj_dim * store.feature_dtype.itemsize if form is None else form.row_bytes + 4


def _sample(n: int, targets: int, seed: int) -> tuple[Tensor, list[int]]:
    """Draw targets among n training rows, and take the others to be compared, or a sample of very many."""
    count = checked_int(targets, "targets", 1)
    if n < _LEAST_ROWS:
        raise ValueError(f"There are {n} training rows. Expected at least {_LEAST_ROWS} to compare scores of.")
    order = np.random.Generator(np.random.Philox(checked_int(seed, "seed", 0))).permutation(n)
    count = min(count, n // 2)
    return torch.from_numpy(np.sort(order[count : count + _MOST_ROWS])), sorted(map(int, order[:count]))


def _targets(source: FeatureStore, store: FeatureStore, model_id: int, drawn: Sequence[int]) -> Callable[[], Tensor]:
    """Return what reads the features of the targets `(m, k)` in the coordinates of a store, float32."""

    def read() -> Tensor:
        shards = source.train(model_id)
        found = []
        for row in drawn:
            shard = shards.read(shards.plan.shard_of(row))
            found.append(shard.rows(row - shard.start, row - shard.start + 1).grads.float())
        features = torch.cat(found)
        rotation = store.rotation(model_id) if source.code_format is None else None
        # The first bytes of rows are a store of their first columns.
        return features[:, : store.proj_dim] if rotation is None else rotation.apply(features)

    return read


def _scores_of(scorer: Scorer, ids: Sequence[int], targets: Sequence[Any], rows: Tensor, m: int) -> Tensor:
    """Compute the scores of some training rows `(rows, m)`, float32, in every process."""
    result = torch.zeros(len(rows), m)
    with scorer.processes.all_or_none():
        for start, stop, block in scorer.blocks(ids, targets):
            first, last = torch.searchsorted(rows, torch.tensor([start, stop])).tolist()
            result[first:last] = block[rows[first:last] - start].cpu()
    return scorer.processes.add(result)  # every row comes from one process, the others add zeros
