"""Retrieve, then rerank: a shortlist from the features of an index, exact scores of the rows on it alone."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from torch import Tensor

from hf_trak.curvature.conjugate_gradients import Refinement
from hf_trak.data.rows import HeldRows, RowPart, forward_columns, row_count
from hf_trak.errors import ConfigMismatchError, HfTrakError
from hf_trak.featurize.exact import ExactScores
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.identity.collation import collation_changes, probe_rows
from hf_trak.runtime.checks import checked_int
from hf_trak.runtime.progress import RowProgress
from hf_trak.scores.groups import RowGroups
from hf_trak.scores.score_files import ScoreFiles
from hf_trak.scores.scored_dataset import (
    TOP_K_COLUMNS,
    IndexRanking,
    ScoreBlock,
    fixed_size_list,
    index_columns,
    reranked_columns,
)
from hf_trak.scores.scorer import Scorer
from hf_trak.scores.shortlist import fused_shortlist, rescored, shortlist, with_plain_targets
from hf_trak.store.revised import PrefixStore
from hf_trak.store.sealed import content_digest
from hf_trak.store.shard_set import ShardSet
from hf_trak.store.shards import TensorSpec, read_tensors, write_tensors
from hf_trak.store.store import FeatureStore
from hf_trak.weights.checkpoints import Checkpoint


def row_source(model: FeaturizedModel) -> Any:
    """Return the training rows, or what fetches them (with the attribute `remote`); `None` where they cannot be had.

    Args:
        model: the model and its training rows.
    """
    absent = getattr(model.train_dataset, "absent", False)
    return getattr(model.train_dataset, "remote", None) if absent else model.train_dataset


def fetched_rows(model: FeaturizedModel, source: Any, numbers: Sequence[int]) -> HeldRows:
    """Fetch rows of a dataset that is elsewhere. All processes call this together, and the main process fetches.

    Rows are compared with their digests. What becomes of them on the way to the model is compared on the same rows
    as for a dataset that is at hand as a whole, which are fetched as well.

    Args:
        model: the model, its collator and its store.
        source: what fetches the rows, a `hub.RemoteRows`.
        numbers: numbers of the rows.

    Raises:
        ConfigMismatchError: rows have changed, or the collator has.
        HubAccessError: they cannot be downloaded.
    """
    n = row_count(model.train_dataset, "train_dataset")
    if model.args.remove_unused_columns:
        collator = model.task.collator(model.data_collator)
        columns = [*forward_columns(model.model, model.args.label_names), *model.task.batch_columns]
        source.restrict([*columns, *getattr(collator, "columns", ())])
    probed = sorted({*numbers, *probe_rows(n)})
    model.processes.broadcast_from_main(lambda: source.fetch(probed))
    with model.processes.all_or_none():
        held = HeldRows(source.select(probed), probed, n)
        saved = model.store.config.get("collation")
        changes = [] if saved is None else collation_changes(saved, model.collation(held))
        if changes:
            raise ConfigMismatchError(
                "The training rows that were fetched do not become what the index was made from:\n  "
                + "\n  ".join(changes)
                + "\nExpected the same collator and the same preparation of rows. Pass the `data_collator=` and "
                "`processing_class=` that the index was made with, and rows as they were then."
            )
    return held


_DTYPES = (torch.int64, torch.float32, torch.int64, torch.float32)


class SavedShortlist:
    """The file of one shortlist: rows and scores of `count` rows from either end, for each of m targets."""

    def __init__(self, store: FeatureStore, name: str, identity: dict[str, Any], m: int, count: int) -> None:
        """
        Args:
            store: the feature store.
            name: name of the experiment.
            identity: everything that the scores depend on, as plain JSON.
            m: number of targets.
            count: rows from either end.
        """
        digest = content_digest({**identity, "count": count})
        self._identity = {"kind": "shortlist", "scores": digest}
        self._specs = {
            column: TensorSpec((m, count), (dtype,)) for column, dtype in zip(TOP_K_COLUMNS, _DTYPES, strict=True)
        }
        self.path: Path = store.experiment_dir(name) / f"shortlist-{digest[:12]}.safetensors"

    def read(self) -> Dataset:
        """Read the columns of a top-k result.

        Raises:
            StoreError: the file is missing or damaged.
        """
        found = read_tensors(self.path, self._identity, self._specs, verify=True)
        return Dataset(pa.table({name: fixed_size_list(found[name].numpy()) for name in TOP_K_COLUMNS}))

    def write(self, columns: Dataset) -> None:
        """Write the columns of a top-k result.

        Raises:
            StoreError: the file cannot be written.
        """
        listed = columns.with_format("numpy")
        tensors = {
            name: torch.from_numpy(np.ascontiguousarray(np.stack(listed[name][:]))).to(dtype)
            for name, dtype in zip(TOP_K_COLUMNS, _DTYPES, strict=True)
        }
        write_tensors(self.path, tensors, self._identity, self._version)


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
    scorer = Scorer(store, processes, model.device, None, args.lambda_relative, args.solver_kind, rank)
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


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RerankRequest:
    """The arguments of `attribute(..., rerank=...)`, as given.

    Attributes:
        eval_dataset, name, checkpoints, model_ids, groups: see [`FeaturizedModel.plan_scores`].
        top_k: rows to return for each target, from either end.
        count: rows of the index to score exactly, for each target and end.
        first_pass_bytes, candidates: see [`~hf_trak.featurize.reranking.two_passes`].
        refinement: how targets of exact scores are refined.
    """

    eval_dataset: Any
    name: str | None
    checkpoints: Checkpoint | Sequence[Checkpoint] | None
    model_ids: Sequence[int] | None
    groups: RowGroups | None
    top_k: int
    count: int
    first_pass_bytes: int | None = None
    candidates: int | None = None
    refinement: Refinement | None = None


@dataclass(frozen=True)
class Reranked:
    """A reranked result.

    Attributes:
        name: name of the experiment.
        columns: the columns of a top-k result, and [`~hf_trak.scores.scored_dataset.RERANK_COLUMNS`].
        rows: the training rows that were scored exactly; `None` where these were not at hand.
    """

    name: str
    columns: Dataset
    rows: RowPart | None


def check_rerank(rerank: Any, top_k: int | None, per: str, exact: bool) -> int:
    """Check the arguments of `attribute(..., rerank=...)`.

    Returns:
        `rerank`.

    Raises:
        ValueError: it is no number of rows, less than `top_k`, or does not go with the other arguments.
    """
    count = checked_int(rerank, "rerank", 1, type_error=ValueError)
    if top_k is None or per != "target":
        raise ValueError(
            f"`rerank` is {count}, with `top_k={top_k}` and `per={per!r}`. Reranking finds the best rows of each "
            "target, and scores no others. For scores of all rows, leave `rerank` out and set `exact=True`."
        )
    if exact:
        raise ValueError(
            f"`rerank` is {count}, with `exact=True`, which scores all rows exactly. Expected one of the two. Leave "
            "`exact` out to score the shortlist of the index alone, or leave `rerank` out."
        )
    if count < top_k:
        raise ValueError(
            f"`rerank` is {count}, less than `top_k`, which is {top_k}. Expected at least as many rows on the "
            "shortlist as are to be returned. Raise `rerank`, or lower `top_k`."
        )
    return count


def check_breakdown(rerank: Any) -> None:
    """Refuse to break reranked scores down by tokens.

    Raises:
        ValueError: `rerank` is given.
    """
    if rerank is not None:
        raise ValueError(
            f"`rerank` is {rerank!r}, for scores by label tokens, which are taken from those of all rows. Expected "
            "scores from features, or `exact=True`. Leave `rerank` out, or call `attribute` instead."
        )


def rerank_result(model: FeaturizedModel, request: RerankRequest) -> Reranked:
    """Score the rows that the index ranks first, for any target and at either end, with whole gradients.

    All processes call this together.

    Args:
        model: the model, its training rows and its store.
        request: the arguments of the call.

    Raises:
        ValueError: `curvature="hybrid"`, or an argument is out of range.
        IncompleteStoreError: nothing is featurized yet, or a checkpoint only in part.
        HfTrakError: the training rows come at random.
        ConfigMismatchError: rows that were fetched have changed, or the collator has.
        All that exact scores raise.
    """
    if model.args.curvature.kind == "hybrid":
        raise ValueError(
            "`curvature` is 'hybrid', whose scores come from one system over all training rows, and reranking scores "
            "some of them. Expected a curvature without such a system, such as 'ekfac'. Set one, or use `exact=True`."
        )
    if "draws" in model.store.config.get("collation", {}):
        raise HfTrakError(
            "The training rows come at random, and the seeds of their draws belong to row numbers, which are others "
            "among the rows of a shortlist. Expected rows that are always the same. Use `exact=True`, or the index "
            "alone."
        )
    ids = model.scorer.ensemble(model_ids=request.model_ids)
    source = row_source(model)
    if source is None:
        logger.warning(
            "The result is that of the index, and nothing is reranked: the training rows are not at hand, and no "
            "dataset repo is recorded to fetch them from. Pass `train_dataset=` to `from_pretrained`."
        )
        name, listed = _index_answer(model, request, ids)
        return Reranked(name, index_columns(listed, request.top_k), None)
    name, listed, numbers = _shortlist(model, request, ids)
    index = IndexRanking.of(listed)
    rows = _rows_at_hand(model, source, numbers)
    scores = ExactScores(model, rows, request.refinement)
    if model.processes.is_main_process:
        logger.info("Reranking %d of %d training rows with exact scores, %s.", len(rows), rows.total, scores.kind)
    try:
        plan = scores.plan(request.eval_dataset, name, request.checkpoints, ids, request.groups, everywhere=False)
        files = _score_files(model, request, "rerank", len(rows))
        found = files.columns(plan.blocks, min(request.top_k, len(rows)), "target")
    except HfTrakError as error:
        error.add_note(f"Training rows are counted among the {len(rows)} that are reranked, in ascending order.")
        raise
    stage = "exact" if request.refinement is None else "refined"
    return Reranked(name, reranked_columns(found, np.array(rows.numbers), index, stage), rows)


def _rows_at_hand(model: FeaturizedModel, source: Any, numbers: tuple[int, ...]) -> RowPart:
    """Return the rows of a shortlist, fetched where the dataset is elsewhere."""
    n = row_count(model.train_dataset, "train_dataset")
    if not getattr(source, "remote", False):
        return RowPart(numbers, n)
    return RowPart(numbers, n, fetched_rows(model, source, numbers))


def _shortlist(
    model: FeaturizedModel, request: RerankRequest, ids: Sequence[int]
) -> tuple[str, Dataset, tuple[int, ...]]:
    """List the rows that the index ranks first and last, and the rows to score.

    The latter come from two lists of the same features, see [`~hf_trak.scores.shortlist`]; of whitened ones, from
    inner products alone, which approximate the exact scores already.

    Returns:
        The name of the experiment, the columns of a top-k result of the index, and row numbers, ascending.
    """
    given = (request.eval_dataset, request.name, request.checkpoints, ids, request.groups)
    scorer, asked = model.scorer, model.precondition(*given)
    count, m = min(request.count, model.store.train_size), _target_count(request)
    groups = None if request.groups is None else request.groups.tag
    identity = {**scorer.identity(ids, asked.features), "groups": groups}
    if request.first_pass_bytes is not None:
        passes = {"first_pass_bytes": request.first_pass_bytes, "candidates": _candidates(request)}
        saved = SavedShortlist(model.store, asked.name, {**identity, **passes}, m, count)
        listed = _read_or_computed(model, saved, lambda: _index_answer(model, request, ids)[1])
        return asked.name, listed, IndexRanking.of(listed).rows

    def both_lists() -> Dataset:
        both = with_plain_targets(asked, scorer.device, request.groups)
        blocks = _shown(model, scorer.blocks(ids, both), f"{asked.name}, shortlist")
        directory, n = model.store.output_dir / "scores", model.store.train_size
        return ScoreFiles(directory, "shortlist", model.processes, n, 2 * m).columns(blocks, count, "target")

    saved = SavedShortlist(model.store, asked.name, {**identity, "lists": ["ridge", "plain"]}, 2 * m, count)
    read = _read_or_computed(model, saved, both_lists)
    ridge, plain = read.select(range(m)), read.select(range(m, 2 * m))
    lists = [plain] if model.args.curvature.whitened else [ridge, plain]
    return asked.name, ridge, tuple(fused_shortlist(lists, count).tolist())


def _read_or_computed(model: FeaturizedModel, saved: SavedShortlist, compute: Callable[[], Dataset]) -> Dataset:
    """Read a shortlist, or have all processes compute it together and keep it."""
    if not model.processes.broadcast_from_main(saved.path.exists):
        found = compute()
        model.processes.broadcast_from_main(lambda: saved.write(found))
    with model.processes.all_or_none():
        return saved.read()


def _candidates(request: RerankRequest) -> int:
    """Count the rows of a first pass whose whole features are read, for each target and end."""
    if request.candidates is not None:
        return request.candidates
    return max(LEAST_CANDIDATES, CANDIDATES_PER_ROW * request.top_k, request.count)


def _index_answer(model: FeaturizedModel, request: RerankRequest, ids: Sequence[int]) -> tuple[str, Dataset]:
    """List the rows that the index ranks first and last: the name of the experiment, and columns of a top-k result."""
    given = (request.eval_dataset, request.name, request.checkpoints, ids, request.groups)
    if request.first_pass_bytes is not None:
        return two_passes(model, *given, request.count, request.first_pass_bytes, _candidates(request))
    plan = model.plan_scores(*given, everywhere=False)
    blocks = _shown(model, plan.blocks, f"{plan.name}, scores of the index")
    files = _score_files(model, request, "shortlist", model.store.train_size)
    return plan.name, files.columns(blocks, min(request.count, model.store.train_size), "target")


def _shown(model: FeaturizedModel, blocks: Iterator[ScoreBlock], description: str) -> Iterator[ScoreBlock]:
    """Show the progress of a pass over the features."""
    plan, main = model.store.train(model.store.model_ids[0]).plan, model.processes.is_main_process
    rows = sum(len(plan.rows(index)) for index in model.processes.share(len(plan)))
    with RowProgress(
        rows,
        description,
        processes=model.processes.num_processes,
        show=main,
        announce=main,
    ) as progress:
        for start, stop, block in blocks:
            yield start, stop, block
            progress.update(stop - start)


def _target_count(request: RerankRequest) -> int:
    return len(request.eval_dataset) if request.groups is None else len(request.groups)


def _score_files(model: FeaturizedModel, request: RerankRequest, stem: str, rows: int) -> ScoreFiles:
    """Return what merges the lists of all processes; lists per target are not written."""
    m = _target_count(request)
    directory: Path = model.store.output_dir / "scores"
    return ScoreFiles(directory, stem, model.processes, rows, m)
