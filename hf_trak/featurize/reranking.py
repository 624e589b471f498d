"""Retrieve, then rerank: a shortlist from the features of an index, exact scores of the rows on it alone."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset

from hf_trak.data.rows import HeldRows, RowPart, forward_columns
from hf_trak.errors import ConfigMismatchError, HfTrakError
from hf_trak.featurize.exact import ExactScores
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.featurize.question import Answer, Question
from hf_trak.identity.collation import collation_changes, probe_rows
from hf_trak.methods import Index, Rerank
from hf_trak.runtime.checks import checked_int
from hf_trak.runtime.progress import RowProgress
from hf_trak.scores.groups import target_features
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
from hf_trak.store.shards import TensorSpec, read_tensors, write_tensors
from hf_trak.store.store import FeatureStore


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
    n = model.train_size
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
        write_tensors(self.path, tensors, self._identity)


LEAST_CANDIDATES, CANDIDATES_PER_ROW = 1000, 50


def two_passes(model: FeaturizedModel, question: Question, method: Index, top_k: int) -> Answer:
    """Score every row by its first bytes, and the best rows of this pass by all their bytes.

    Args:
        model: the model and its store of codes.
        question: the targets.
        method: the bytes of a first pass, rounded down to whole blocks, and the rows that are then read whole.
        top_k: rows to return for each target, from either end.

    Raises:
        ValueError: a number is out of range, or the store has no codes.
    """
    count = checked_int(method.first_pass_bytes, "first_pass_bytes", 1, type_error=ValueError)
    candidates = max(LEAST_CANDIDATES, CANDIDATES_PER_ROW * top_k) if method.candidates is None else method.candidates
    candidates = checked_int(candidates, "candidates", top_k, type_error=ValueError)
    ids, groups, m = question.ids, question.groups, question.m
    for model_id in ids:
        model.store.train(model_id).names_within(count)  # an error before anything is computed
    targets = model.precondition(question, method.lambda_relative)
    args, processes, ridge = model.args, model.processes, model.scorer_with(method.lambda_relative).lambda_relative
    store = PrefixStore(model.store, count)
    # The first columns have no more eigenvalues than there are of them.
    rank = None if args.solver_rank is None else min(args.solver_rank, store.proj_dim, store.train_size)
    scorer = Scorer(store, processes, model.device, ridge, args.solver_kind, rank)
    asked = [
        scorer.precondition(model_id, partial(target_features, shards, groups, store.proj_dim), m)
        for model_id, shards in zip(ids, targets.features, strict=True)
    ]
    directory = model.store.output_dir / "scores"
    n = model.store.train_size
    listed = shortlist(scorer.blocks(ids, asked), ScoreFiles(directory, "first-pass", processes, n, m), candidates)
    whole = [model.store.train(model_id) for model_id in ids]
    files = ScoreFiles(directory, "second-pass", processes, len(listed), m)
    columns = rescored(whole, targets, listed, min(top_k, n), files)
    return Answer(columns, method, lambda: model.plan(question, lambda_relative=method.lambda_relative).blocks)


logger = logging.getLogger(__name__)


def reranked(model: FeaturizedModel, question: Question, method: Rerank, top_k: int) -> Answer:
    """Score the rows that the index ranks first, for any target and at either end, with whole gradients.

    All processes call this together.

    Args:
        model: the model, its training rows and its store.
        question: the targets.
        method: the length of the shortlist, and how its rows are found and scored.
        top_k: rows to return for each target, from either end.

    Raises:
        ValueError: `curvature="hybrid"`, or an argument is out of range.
        HfTrakError: the training rows come at random.
        ConfigMismatchError: rows that were fetched have changed, or the collator has.
        All that exact scores raise.
    """
    if (method.curvature or model.args.curvature.kind) == "hybrid":
        raise ValueError(
            "`curvature` is 'hybrid', whose scores come from one system over all training rows, and reranking scores "
            "some of them. Expected 'ekfac', or another curvature without such a system. Set "
            "`method=Rerank(curvature='ekfac')`, or use `method='exact'`."
        )
    if "draws" in model.store.config.get("collation", {}):
        raise HfTrakError(
            "The training rows come at random, and the seeds of their draws belong to row numbers, which are others "
            "among the rows of a shortlist. Expected rows that are always the same. Use `method='exact'`, or the "
            "index alone."
        )
    shortlist = _Shortlist(model, question, method, top_k)
    source = row_source(model)
    if source is None:
        logger.warning(
            "The result is that of the index, and nothing is reranked: the training rows are not at hand, and no "
            "dataset repo is recorded to fetch them from. Pass `train_dataset=` to `from_pretrained`."
        )
        columns = index_columns(shortlist.of_index(), top_k)
        ridge = method.index.lambda_relative
        return Answer(columns, method, lambda: model.plan(question, lambda_relative=ridge).blocks)
    listed, numbers = shortlist.rows()
    index = IndexRanking.of(listed)
    held = fetched_rows(model, source, numbers) if getattr(source, "remote", False) else None
    rows = RowPart(numbers, model.train_size, held)
    scores = ExactScores(model, method.exact, rows)
    if model.processes.is_main_process:
        logger.info("Reranking %d of %d training rows with exact scores, %s.", len(rows), rows.total, scores.kind)
    try:
        plan = scores.plan(question, everywhere=False)
        files = ScoreFiles(model.store.output_dir / "scores", "rerank", model.processes, len(rows), question.m)
        found = files.columns(plan.blocks, min(top_k, len(rows)), "target")
    except HfTrakError as error:
        error.add_note(f"Training rows are counted among the {len(rows)} that are reranked, in ascending order.")
        raise
    stage = "exact" if method.refine is None else "refined"
    columns = reranked_columns(found, np.array(rows.numbers), index, stage)
    return Answer(columns, method, lambda: scores.plan(question).blocks, rows)


class _Shortlist:
    """The rows that the index ranks first and last, for the targets of a question."""

    def __init__(self, model: FeaturizedModel, question: Question, method: Rerank, top_k: int) -> None:
        self._model = model
        self._question = question
        self._count = min(method.rows, model.store.train_size)
        # Rows of a first pass whose whole features are read.
        least = max(LEAST_CANDIDATES, CANDIDATES_PER_ROW * top_k, method.rows)
        candidates = least if method.index.candidates is None else method.index.candidates
        self._two_passes = method.index.first_pass_bytes is not None
        self._index = replace(method.index, candidates=candidates) if self._two_passes else method.index

    def rows(self) -> tuple[Dataset, tuple[int, ...]]:
        """List the rows that the index ranks first and last, and the rows to score.

        The latter come from two lists of the same features, see [`~hf_trak.scores.shortlist`]; of whitened ones, from
        inner products alone, which approximate the exact scores already.

        Returns:
            The columns of a top-k result of the index, and row numbers, ascending.
        """
        model, question, count, m = self._model, self._question, self._count, self._question.m
        ridge = self._index.lambda_relative
        scorer, asked = model.scorer_with(ridge), model.precondition(question, ridge)
        identity = {**scorer.identity(question.ids, asked.features), "groups": question.tag}
        if self._two_passes:
            identity = {**asdict(self._index), **identity}
            listed = self._kept(SavedShortlist(model.store, question.name, identity, m, count), self.of_index)
            return listed, IndexRanking.of(listed).rows

        def both_lists() -> Dataset:
            both = with_plain_targets(asked, scorer.device, question.groups)
            return self._best(scorer.blocks(question.ids, both), "shortlist", 2 * m)

        identity |= {"lists": ["ridge", "plain"]}
        read = self._kept(SavedShortlist(model.store, question.name, identity, 2 * m, count), both_lists)
        ridge, plain = read.select(range(m)), read.select(range(m, 2 * m))
        lists = [plain] if model.args.curvature.whitened else [ridge, plain]
        return ridge, tuple(fused_shortlist(lists, count).tolist())

    def of_index(self) -> Dataset:
        """Return the columns of a top-k result of the index."""
        model, question = self._model, self._question
        if self._two_passes:
            return two_passes(model, question, self._index, self._count).columns
        plan = model.plan(question, everywhere=False, lambda_relative=self._index.lambda_relative)
        return self._best(plan.blocks, "scores of the index", question.m)

    def _kept(self, saved: SavedShortlist, compute: Callable[[], Dataset]) -> Dataset:
        """Read a shortlist, or have all processes compute it together and keep it."""
        processes = self._model.processes
        if not processes.broadcast_from_main(saved.path.exists):
            found = compute()
            processes.broadcast_from_main(lambda: saved.write(found))
        with processes.all_or_none():
            return saved.read()

    def _best(self, blocks: Iterator[ScoreBlock], what: str, m: int) -> Dataset:
        """List the best rows of m targets, whose blocks are computed with a progress bar."""
        store, processes = self._model.store, self._model.processes
        files = ScoreFiles(store.output_dir / "scores", "shortlist", processes, store.train_size, m)
        return files.columns(self._shown(blocks, f"{self._question.name}, {what}"), self._count, "target")

    def _shown(self, blocks: Iterator[ScoreBlock], description: str) -> Iterator[ScoreBlock]:
        """Show the progress of a pass over the features."""
        store, processes = self._model.store, self._model.processes
        plan = store.train(store.model_ids[0]).plan
        rows = sum(len(plan.rows(index)) for index in processes.share(len(plan)))
        with RowProgress.over(processes, rows, description) as progress:
            for start, stop, block in blocks:
                yield start, stop, block
                progress.update(stop - start)
