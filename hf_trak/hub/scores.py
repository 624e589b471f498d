"""Publishing and loading scored datasets, and showing the training rows beside their scores."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, DatasetDict, DatasetInfo, Features, List, concatenate_datasets
from huggingface_hub import CommitInfo, HfApi, constants

from hf_trak.errors import RefusedIndexError, StoreError
from hf_trak.hub.access import REPO_TYPE, access_errors, hub_api
from hf_trak.hub.cards import card_operations, render_card
from hf_trak.hub.files import download_range
from hf_trak.hub.parquet_groups import check_groups
from hf_trak.hub.push import Destination, create_repo, in_main_process
from hf_trak.hub.remote_rows import RangedFile
from hf_trak.hub.safe_loading import load_dataset, load_saved_dataset
from hf_trak.scores.scored_dataset import TOP_K_COLUMNS

_TOP_K_MEANINGS = {
    "target": {
        "trak_indices": "rows of the training dataset that helped this target most, best first",
        "trak_scores": "their scores",
        "trak_harmful_indices": "rows of the training dataset that harmed this target most, worst first",
        "trak_harmful_scores": "their scores",
    },
    "train": {
        "trak_indices": "targets that this training example helped most",
        "trak_scores": "its scores for them",
        "trak_harmful_indices": "targets that this training example harmed most",
        "trak_harmful_scores": "its scores for them",
    },
}
_FULL_MEANINGS = {
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
    private: bool = True,
    token: str | None = None,
    revision: str | None = None,
    index: str | None = None,
    model_name: str | None = None,
    train_dataset: str | None = None,
) -> CommitInfo:
    """Publish a scored dataset, with a card that says what the columns mean.

    `scored.push_to_hub(...)` publishes the same data without the card's section. The index may be in the same repo.
    In a distributed run every process calls this function, and the main process pushes.

    Args:
        scored (`datasets.Dataset`):
            The result of [`TrakAttributor.attribute`].
        repo_id (`str`):
            The dataset repo, created if need be.
        per (`str`, *optional*, defaults to `"target"`):
            `"target"` or `"train"`, as it was given to `attribute`.
        config_name (`str`, *optional*, defaults to `"default"`):
            Configuration of the dataset, as in `datasets.Dataset.push_to_hub`.
        split (`str`, *optional*):
            Split of the dataset, as in `datasets.Dataset.push_to_hub`.
        private (`bool`, *optional*, defaults to `True`):
            Create a private repo, and refuse a public one. `False` creates a public repo.
        token (`str`, *optional*):
            As in `huggingface_hub`; needs the right to write.
        revision (`str`, *optional*):
            The branch. By default the main branch.
        index (`str`, *optional*):
            Repo of the index that the scores were made with, for the card.
        model_name (`str`, *optional*):
            Name of the model, for the card.
        train_dataset (`str`, *optional*):
            Name of the training dataset, for the card.

    Returns:
        `huggingface_hub.CommitInfo`: the commit of the card, or that of the data if the card needs no change.

    Raises:
        ValueError: `scored` has no score columns of the right types, or the repo is public and `private=True` was
            given.
        HubAccessError: the repo cannot be written to, or the connection failed.
        PeerProcessError: the main process failed.
    """
    columns = check_scores(scored)
    if per not in ("target", "train"):
        raise ValueError(f"`per` is {per!r}. Expected 'target' or 'train', as it was given to `attribute`.")
    named = [("index", index), ("model", model_name), ("training dataset", train_dataset)]
    destination = Destination(repo_id, private, token, revision)
    facts = {
        "subject": _subject(scored, columns, per),
        "columns": [
            [name, _FULL_MEANINGS[per] if len(columns) == 1 else _TOP_K_MEANINGS[per][name]] for name in columns
        ],
        "facts": [[name, value] for name, value in named if value],
    }
    title = f"Attribution scores of {model_name}" if model_name else "Attribution scores"

    def push() -> CommitInfo:  # the data, and then the card, whose metadata `Dataset.push_to_hub` writes
        api = hub_api(token)
        with access_errors(repo_id, revision):
            repo = create_repo(api, destination)
            commit = scored.push_to_hub(
                repo, config_name, split=split, token=token, revision=revision, commit_message="Upload TRAK scores"
            )
            info = api.dataset_info(repo, revision=revision)
            arguments = f'"{repo}"' if config_name == "default" else f'"{repo}", "{config_name}"'
            usage = f"from hf_trak import load_scores\n\nscored = load_scores({arguments})"
            usage += '\nprint(scored[0]["trak_scores"])'
            operations = card_operations(api, repo, info, render_card("scores", title, usage, facts, {}), "scores")
            if not operations:
                return commit
            return api.create_commit(
                repo, operations, commit_message="Describe the scores", repo_type=REPO_TYPE, revision=revision,
                parent_commit=info.sha,
            )  # fmt: skip

    return in_main_process(push)


def _subject(scored: Dataset, columns: Mapping[str, int], per: str) -> str:
    what = "target" if per == "target" else "training example"
    count = columns["trak_scores"]
    kept = f"all {count:,} scores" if len(columns) == 1 else f"the {count:,} highest and lowest scores"
    return f"one row per {what}, {len(scored):,} rows, with {kept} of each"


def load_scores(
    repo_or_path: str,
    config_name: str | None = None,
    *,
    split: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
) -> Dataset:
    """Load a scored dataset from the Hub or from a directory that `save_to_disk` wrote, and check its columns.

    `datasets.load_dataset` gives the same rows without the check.

    Args:
        repo_or_path (`str`):
            The dataset repo or the directory.
        config_name (`str`, *optional*):
            Configuration of the dataset, as in `datasets.load_dataset`.
        split (`str`, *optional*):
            Name of the split. May be left out if there is only one.
        revision (`str`, *optional*):
            Branch, tag or commit. By default the main branch.
        token (`str` or `bool`, *optional*):
            As in `huggingface_hub`.

    Returns:
        `datasets.Dataset`: the rows with their score columns, as [`TrakAttributor.attribute`] returned them.

    Raises:
        HubAccessError: the repo or revision does not exist or cannot be reached.
        RefusedIndexError: score columns are missing, have other types, or hold values that are not finite.
        ValueError: there are several splits and none was chosen.
    """
    if Path(repo_or_path).is_dir():
        loaded: Any = load_saved_dataset(repo_or_path)
    else:
        with access_errors(repo_or_path, revision):
            # Fails at once, with a clear error, if the repo or the revision cannot be reached.
            if not constants.HF_HUB_OFFLINE:
                _check_files(hub_api(token), repo_or_path, revision)
            loaded = load_dataset(repo_or_path, config_name, revision=revision, token=token)
    if isinstance(loaded, DatasetDict):
        if split is None and len(loaded) == 1:
            split = next(iter(loaded))
        if split not in loaded:
            raise ValueError(f"`split` is {split!r}; {repo_or_path} has {sorted(loaded)}. Pass one of those.")
        loaded = loaded[split]
    try:
        for name in check_scores(loaded):
            _check_values(loaded, name)
    except ValueError as error:
        raise RefusedIndexError(f"{repo_or_path} was refused as a scored dataset. {error}") from error
    return loaded


def _check_files(api: HfApi, repo_id: str, revision: str | None) -> None:
    """Refuse Parquet files that would take much more memory than they have bytes."""
    info = api.dataset_info(repo_id, revision=revision, files_metadata=True)
    for name, size in [(file.rfilename, file.size or 0) for file in info.siblings or []]:
        if not name.endswith(".parquet"):
            continue
        file = RangedFile(size, partial(download_range, api, repo_id, str(info.sha), name, size=size))
        try:
            check_groups(file, size)
        except (StoreError, pa.ArrowException) as error:
            raise RefusedIndexError(
                f"{name!r} of {repo_id} was refused: {error}. Expected published scores."
            ) from error


def check_scores(scored: Dataset) -> dict[str, int]:
    """Check the types of the score columns of a dataset.

    Returns:
        The length of the lists in each score column, by the name of the column.

    Raises:
        ValueError: there are no score columns, or one is not a fixed-size list of float32 scores or int64 indices.
    """
    names = [name for name in TOP_K_COLUMNS if name in getattr(scored, "column_names", ())]
    if names not in (list(TOP_K_COLUMNS), ["trak_scores"]):
        raise ValueError(
            f"The score columns of the dataset are {names}. Expected {list(TOP_K_COLUMNS)}, or 'trak_scores' alone. "
            "Pass a dataset that `attribute` returned."
        )
    lengths = {}
    for name in names:
        feature = scored.features[name]
        dtype = "int64" if name.endswith("indices") else "float32"
        inner = getattr(getattr(feature, "feature", None), "dtype", None)
        if not isinstance(feature, List) or feature.length < 1 or inner != dtype:
            raise ValueError(
                f"The column {name!r} is {feature}. Expected lists of one length, of {dtype}. Pass a dataset that "
                "`attribute` returned."
            )
        lengths[name] = feature.length
    if len(set(lengths.values())) != 1:
        raise ValueError(
            f"The score columns hold lists of the lengths {lengths}. Expected the same length in all of them. Pass a "
            "dataset that `attribute` returned."
        )
    return lengths


def with_training_rows(scored: Dataset, train_dataset: Dataset, columns: Sequence[str] | None = None) -> Dataset:
    """Put the training rows beside their scores: `trak_rows[r]` is the training row number `trak_indices[r]`.

    Args:
        scored (`datasets.Dataset`):
            One row per target, with the four top-k columns.
        train_dataset (`datasets.Dataset`):
            The training rows in the order in which they were attributed. It may hold an earlier form of them, such as
            texts before tokenization or images before resizing.
        columns (`Sequence[str]`, *optional*):
            Names of the columns of `train_dataset` to show. By default all.

    Returns:
        `datasets.Dataset`: `scored` with the columns `trak_rows` and `trak_harmful_rows`, which are lists of k rows.

    Raises:
        ValueError: `scored` lacks top-k columns, `columns` names an unknown one, or an index is not that of a training
            row.
    """
    if list(check_scores(scored)) != list(TOP_K_COLUMNS):
        raise ValueError("`scored` holds all scores and no indices. Expected the result of `attribute(top_k=…)`.")
    kept = list(train_dataset.column_names) if columns is None else list(columns)
    if unknown := sorted(set(kept) - set(train_dataset.column_names)):
        raise ValueError(
            f"`columns` names {unknown}; the training dataset has {train_dataset.column_names}. Expected some of "
            "those."
        )
    rows = train_dataset.select_columns(kept)
    parts = []
    for name in ("trak_indices", "trak_harmful_indices"):
        indices = np.asarray(scored.with_format("numpy")[name][:]).reshape(len(scored), -1)
        if indices.min() == -1:
            raise ValueError(
                f"`{name}` has the row -1, where a search index that looks at a part of the rows found no more. "
                "Expected as many rows for every target. Search with a smaller `top_k`, or build it with fewer lists."
            )
        if indices.min() < 0 or indices.max() >= len(rows):
            raise ValueError(
                f"`{name}` goes from {indices.min()} to {indices.max()}; the training dataset has {len(rows)} rows. "
                "Expected the dataset that was attributed, and scores of `attribute(per='target')`."
            )
        # A column of lists of k rows, each a struct of the chosen columns, in Arrow's own layout.
        chosen = rows.select(indices.reshape(-1)).with_format("arrow")[:]
        arrays = [chosen[column].combine_chunks() for column in kept]
        structs = pa.StructArray.from_arrays(arrays, fields=[chosen.schema.field(column) for column in kept])
        lists = pa.FixedSizeListArray.from_arrays(structs, indices.shape[1])
        column = name.replace("indices", "rows")
        features = Features({column: List(dict(rows.features), length=indices.shape[1])})
        parts.append(Dataset(pa.table({column: lists}), info=DatasetInfo(features=features)))
    stale = [name for name in ("trak_rows", "trak_harmful_rows") if name in scored.column_names]
    return concatenate_datasets([scored.with_format(None).remove_columns(stale), *parts], axis=1)


def _check_values(scored: Dataset, name: str) -> None:
    """Check that scores are finite and indices not negative. Raises `ValueError`."""
    for table in scored.select_columns([name]).with_format("arrow").iter(batch_size=1000):
        for values in (chunk.flatten() for chunk in table[name].chunks):
            good = pc.greater_equal(values, 0) if name.endswith("indices") else pc.is_finite(values)
            if values.null_count or not pc.all(good).as_py():
                raise ValueError(
                    f"The column {name!r} holds values that are missing, negative as a row number, or not finite. "
                    "Compute the scores again with `attribute`."
                )
