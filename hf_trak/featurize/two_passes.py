"""Two passes over an index of codes: a shortlist from the first bytes of every row, scores from whole rows."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.runtime.checks import checked_int
from hf_trak.scores.first_pass import rescored, shortlist
from hf_trak.scores.groups import RowGroups
from hf_trak.scores.score_files import ScoreFiles
from hf_trak.scores.scorer import Scorer
from hf_trak.store.prefix import PrefixStore
from hf_trak.store.shard_set import ShardSet
from hf_trak.weights.checkpoints import Checkpoint

LEAST_CANDIDATES, CANDIDATES_PER_ROW = 1000, 50


def two_passes(
    model: FeaturizedModel,
    eval_dataset: Any,
    name: str | None,
    checkpoints: Checkpoint | Sequence[Checkpoint] | None,
    model_ids: Sequence[int] | None,
    groups: RowGroups | None,
    top_k: int,
    first_pass_bytes: int,
    candidates: int | None,
) -> tuple[str, Dataset]:
    """Score every row by its first bytes, and the best rows of this pass by all their bytes.

    Args:
        model: the model and its store of codes.
        eval_dataset, name, checkpoints, model_ids, groups: see [`FeaturizedModel.plan_scores`].
        top_k: rows to return for each target, from either end.
        first_pass_bytes: bytes of a row, rounded down to whole blocks.
        candidates: rows of the first pass whose whole features are read, for each target and end; `None` for 50 times
            `top_k`, and 1,000 at least.

    Returns:
        The name of the experiment, and the columns of a top-k result.

    Raises:
        ValueError: a number is out of range, or the store has no codes.
    """
    count = checked_int(first_pass_bytes, "first_pass_bytes", 1, type_error=ValueError)
    if candidates is None:
        candidates = max(LEAST_CANDIDATES, CANDIDATES_PER_ROW * top_k)
    candidates = checked_int(candidates, "candidates", top_k, type_error=ValueError)
    ids = model.scorer.ensemble(model_ids)
    for model_id in ids:
        model.store.train(model_id).names_within(count)  # an error before anything is computed
    targets = model.precondition(eval_dataset, name, checkpoints, ids, groups)
    args, processes = model.args, model.processes
    store = PrefixStore(model.store, count)
    # The first columns have no more eigenvalues than there are of them.
    rank = None if args.solver_rank is None else min(args.solver_rank, store.proj_dim, store.train_size)
    scorer = Scorer(store, processes, model.device, args.lambda_reg, args.lambda_relative, args.solver, rank)
    m = len(eval_dataset) if groups is None else len(groups)
    asked = [
        scorer.precondition(model_id, partial(_first_columns, shards, store.proj_dim, groups), m)
        for model_id, shards in zip(ids, targets.features, strict=True)
    ]
    directory = model.store.output_dir / "scores"
    n = model.store.train_size
    listed = shortlist(scorer.blocks(ids, asked), ScoreFiles(directory, "first-pass", processes, n, m), candidates)
    whole = [model.store.train(model_id) for model_id in ids]
    files = ScoreFiles(directory, "second-pass", processes, len(listed), m)
    return targets.name, rescored(whole, targets, listed, min(top_k, n), files)


def _first_columns(shards: ShardSet, columns: int, groups: RowGroups | None) -> Tensor:
    """The first columns of the features of targets, or of the means of groups of them."""
    parts = ((shard.start, shard.grads[:, :columns].float()) for shard in shards)
    return torch.cat([part for _, part in parts]) if groups is None else groups.means(parts)
