"""Scores on the Hub: a scored dataset is an ordinary dataset with typed columns, a card, and the rows at hand."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import (
    Dataset,
    DatasetDict,
    DatasetInfo,
    Features,
    List,
    concatenate_datasets,
)
from huggingface_hub import CommitInfo, constants

from hf_trak.errors import RefusedIndexError
from hf_trak.hub.cards import card_operations, render_card
from hf_trak.hub.files import REPO_TYPE, access_errors, hub_api
from hf_trak.hub.push import COMMIT_FIELDS
from hf_trak.hub.safe_loading import load_dataset, load_saved_dataset
from hf_trak.runtime.processes import Processes
from hf_trak.scores.scored_dataset import TOP_K_COLUMNS

_MEANINGS = {
    "target": {
        "trak_indices": "rows of the training dataset that helped this target most, best first",
        "trak_scores": "their scores",
        "trak_opponent_indices": "rows of the training dataset that harmed this target most, worst first",
        "trak_opponent_scores": "their scores",
    },
    "train": {
        "trak_indices": "targets that this training example helped most",
        "trak_scores": "its scores for them",
        "trak_opponent_indices": "targets that this training example harmed most",
        "trak_opponent_scores": "its scores for them",
    },
}
_FULL = {
    "target": "the score of every row of the training dataset for this target, in the order of the rows",
    "train": "the score of this training example for every target, in the order of the targets",
}


def push_scores(
    scored: Dataset,
    repo_id: str,
    *,
    per: Literal["target", "train"] = "target",
    config_name: str = "default",
    split: str | None = None,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    index: str | None = None,
    model_name: str | None = None,
    train_dataset: str | None = None,
) -> CommitInfo:
    """Publish scored rows, and a card that says what the columns mean. Of several processes the main one pushes.

    `scored.push_to_hub(...)` publishes the same data without the card's section. The index may be in the same repo.

    Args:
        scored: what [`TrakAttributor.attribute`] returned.
        repo_id: the dataset repo, created if need be.
        per: which orientation was asked of `attribute`.
        config_name, split: as in `datasets.Dataset.push_to_hub`.
        private: visibility of a repo that is created. `True` with a repo that is public is refused.
        token: as in `huggingface_hub`.
        revision: the branch.
        index: repo of the index that the scores were made with, for the card.
        model_name: name of the model, for the card.
        train_dataset: name of the training dataset, for the card.

    Returns:
        The commit of the card, or of the data where the card needed no change.

    Raises:
        ValueError: `scored` has no score columns of the right types, or the repo is public against `private=True`.
        HubAccessError: the repo cannot be written to, or the connection broke.
        PeerProcessError: the main process failed.
    """
    columns = check_scores(scored)
    if per not in ("target", "train"):
        raise ValueError(f"`per` is {per!r}. Expected 'target' or 'train', as it was given to `attribute`.")
    named = [("index", index), ("model", model_name), ("training dataset", train_dataset)]

    def push() -> dict[str, Any]:
        facts = {
            "subject": _subject(scored, columns, per),
            "columns": [[name, _FULL[per] if len(columns) == 1 else _MEANINGS[per][name]] for name in columns],
            "facts": [[name, value] for name, value in named if value],
        }
        title = f"Attribution scores of {model_name}" if model_name else "Attribution scores"
        commit = _push(scored, repo_id, config_name, split, private, token, revision, title, facts)
        return {name: getattr(commit, name) for name in COMMIT_FIELDS}

    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    return CommitInfo(**(Processes().broadcast_from_main(push) if together else push()))


def _subject(scored: Dataset, columns: Mapping[str, int], per: str) -> str:
    what = "target" if per == "target" else "training example"
    count = columns["trak_scores"]
    kept = f"all {count:,} scores" if len(columns) == 1 else f"the {count:,} highest and lowest scores"
    return f"one row per {what}, {len(scored):,} rows, with {kept} of each"


def _push(
    scored: Dataset,
    repo_id: str,
    config_name: str,
    split: str | None,
    private: bool | None,
    token: str | None,
    revision: str | None,
    title: str,
    facts: Mapping[str, Any],
) -> CommitInfo:
    api = hub_api(token)
    with access_errors(repo_id, revision):
        repo_id = api.create_repo(repo_id, repo_type=REPO_TYPE, private=private, exist_ok=True).repo_id
        if private and not api.dataset_info(repo_id).private:
            raise ValueError(
                f"The dataset repo {repo_id!r} exists and is public, but `private=True` was given. Nothing was "
                "uploaded. Expected a private repo: change its visibility in its settings, or push to another one."
            )
        commit = scored.push_to_hub(
            repo_id, config_name, split=split, token=token, revision=revision, commit_message="Upload TRAK scores"
        )
        # `Dataset.push_to_hub` writes the card's metadata, so the card comes second.
        info = api.dataset_info(repo_id, revision=revision)
        arguments = f'"{repo_id}"' if config_name == "default" else f'"{repo_id}", "{config_name}"'
        usage = (
            f'from hf_trak import load_scores\n\nscored = load_scores({arguments})\nprint(scored[0]["trak_scores"])'
        )
        new = render_card("scores", title, usage, facts, {})
        operations = card_operations(api, repo_id, info, new, "scores")
        if not operations:
            return commit
        return api.create_commit(
            repo_id,
            operations,
            commit_message="Describe the scores",
            repo_type=REPO_TYPE,
            revision=revision,
            parent_commit=info.sha,
        )


def load_scores(
    repo_or_path: str,
    config_name: str | None = None,
    *,
    split: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
) -> Dataset:
    """Scored rows from the Hub or from a directory that `save_to_disk` wrote, with their columns checked.

    Plain `datasets.load_dataset` gives the same rows.

    Args:
        repo_or_path: dataset repo or directory.
        config_name, split: which part of the repo; `split` may be left out where there is one.
        revision: branch, tag or commit.
        token: as in `huggingface_hub`.

    Raises:
        HubAccessError: repo or revision cannot be had.
        RefusedIndexError: there are no score columns, or they have other types, or values that are not finite.
        ValueError: there are several splits and none was chosen.
    """
    if Path(repo_or_path).is_dir():
        loaded: Any = load_saved_dataset(repo_or_path)
    else:
        with access_errors(repo_or_path, revision):
            # Answers at once, and in our words, where the repo or the revision is out of reach.
            if not constants.HF_HUB_OFFLINE:
                hub_api(token).dataset_info(repo_or_path, revision=revision)
            loaded = load_dataset(repo_or_path, config_name, revision=revision, token=token)
    if isinstance(loaded, DatasetDict):
        if split is None and len(loaded) == 1:
            split = next(iter(loaded))
        if split not in loaded:
            raise ValueError(f"`split` is {split!r}; {repo_or_path} has {sorted(loaded)}. Choose one of those.")
        loaded = loaded[split]
    try:
        for name in check_scores(loaded):
            _check_values(loaded, name)
    except ValueError as error:
        raise RefusedIndexError(f"{repo_or_path} was refused as a scored dataset: {error}") from error
    return loaded


def check_scores(scored: Dataset) -> dict[str, int]:
    """The score columns of a dataset, and the length of their lists.

    Raises:
        ValueError: there are none, or one is no fixed-size list of float32 scores or int64 indices.
    """
    names = [name for name in TOP_K_COLUMNS if name in getattr(scored, "column_names", ())]
    if names not in (list(TOP_K_COLUMNS), ["trak_scores"]):
        raise ValueError(f"it has the score columns {names}. Expected {list(TOP_K_COLUMNS)}, or 'trak_scores' alone.")
    lengths = {}
    for name in names:
        feature = scored.features[name]
        dtype = "int64" if name.endswith("indices") else "float32"
        inner = getattr(getattr(feature, "feature", None), "dtype", None)
        if not isinstance(feature, List) or feature.length < 1 or inner != dtype:
            raise ValueError(f"the column {name!r} is {feature}. Expected lists of one length, of {dtype}.")
        lengths[name] = feature.length
    if len(set(lengths.values())) != 1:
        raise ValueError(f"its score columns have the lengths {lengths}. Expected one.")
    return lengths


def with_training_rows(scored: Dataset, train_dataset: Dataset, columns: Sequence[str] | None = None) -> Dataset:
    """Put the training rows themselves beside the scores: `trak_rows[r]` is the row of `trak_indices[r]`.

    Args:
        scored: one row per target, with the top-k columns.
        train_dataset: the training rows, in the order in which they were attributed; a rawer version of them (texts
            before tokenization, images before resizing) does as well.
        columns: which of its columns; `None` takes all.

    Returns:
        `scored` with the columns `trak_rows` and `trak_opponent_rows`, lists of rows.

    Raises:
        ValueError: there are no top-k columns, a column is unknown, or an index is beyond the training rows.
    """
    if list(check_scores(scored)) != list(TOP_K_COLUMNS):
        raise ValueError("`scored` holds every score, without indices. Expected the result of `attribute(top_k=…)`.")
    kept = list(train_dataset.column_names) if columns is None else list(columns)
    if unknown := sorted(set(kept) - set(train_dataset.column_names)):
        raise ValueError(f"`columns` names {unknown}; the training dataset has {train_dataset.column_names}.")
    rows = train_dataset.select_columns(kept)
    parts = []
    for name in ("trak_indices", "trak_opponent_indices"):
        indices = np.asarray(scored.with_format("numpy")[name][:]).reshape(len(scored), -1)
        if indices.min() < 0 or indices.max() >= len(rows):
            raise ValueError(
                f"`{name}` goes from {indices.min()} to {indices.max()}; the training dataset has {len(rows)} rows. "
                "Expected the dataset that was attributed, or per='target' scores."
            )
        chosen = rows.select(indices.reshape(-1)).with_format("arrow")[:]
        arrays = [chosen[column].combine_chunks() for column in kept]
        structs = pa.StructArray.from_arrays(arrays, fields=[chosen.schema.field(column) for column in kept])
        lists = pa.FixedSizeListArray.from_arrays(structs, indices.shape[1])
        column = name.replace("indices", "rows")
        features = Features({column: List(dict(rows.features), length=indices.shape[1])})
        parts.append(Dataset(pa.table({column: lists}), info=DatasetInfo(features=features)))
    stale = [name for name in ("trak_rows", "trak_opponent_rows") if name in scored.column_names]
    return concatenate_datasets([scored.with_format(None).remove_columns(stale), *parts], axis=1)


def _check_values(scored: Dataset, name: str) -> None:
    """Scores are finite, indices not negative."""
    for table in scored.select_columns([name]).with_format("arrow").iter(batch_size=1000):
        column = table[name].combine_chunks()
        chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
        for values in (chunk.flatten() for chunk in chunks):
            good = pc.greater_equal(values, 0) if name.endswith("indices") else pc.is_finite(values)
            if values.null_count or not pc.all(good).as_py():
                raise ValueError(
                    f"the column {name!r} holds values that are missing, negative as a row, or not finite"
                )
