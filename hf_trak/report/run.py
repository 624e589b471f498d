"""The result of an attribution, in memory and on disk: everything that a report needs, without model and features.

    run/
      run.json                what was attributed (model, checkpoints, projection, sizes), and all checksums
      scored/                 the targets with their score columns (`Dataset.save_to_disk`)
      train/                  the training rows that any score names, or all of them
      statistics.safetensors  self-influence of all training rows, distribution of each target's scores, and
                              `train_rows`, the numbers of the rows in `train/` if those are not all

A save is complete or has no effect, whenever it is killed and however many processes save at once (`run_record`).
`TrakAttributor.attribute` keeps full score matrices in `<output_dir>/scores/<name>`. [`AttributionRun.save`] can put
`run/` into the same directory, whose other files it does not touch.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, List, Value

from hf_trak.errors import StoreError
from hf_trak.report.content import as_row, is_tensor, raw
from hf_trak.report.distributions import ScoreDistributions
from hf_trak.report.run_record import (
    RUN,
    SELF_INFLUENCE,
    TRAIN_ROWS,
    SavedParts,
    check_parts,
    ends_of,
    find_run,
    parts_problem,
    read_run,
    scores_problem,
    write_run,
)
from hf_trak.runtime.progress import with_column
from hf_trak.scores.scored_dataset import TOP_K_COLUMNS
from hf_trak.version import __version__

if TYPE_CHECKING:  # slow to import, and not needed for runs that are read
    from hf_trak.featurize.featurized import FeaturizedModel

_SPARE_DEPTH = 50  # a margin, since a value that can just be written here cannot be read from a deeper call stack


def known_facts(attributor: "FeaturizedModel") -> dict[str, Any]:
    """Collect the facts that are known from the store and the configuration."""
    store, args = attributor.store, attributor.args
    config = store.config
    return {
        "model": config.get("model_name") or config.get("model_class"),
        "model_class": config.get("model_class"),
        "model_revision": config.get("model_revision"),
        "task": str((config.get("task") or {}).get("class", "")).rpartition(".")[2] or None,
        "parameters": attributor.layout.total,
        "checkpoints": checkpoint_names(attributor, store.model_ids),
        "projection": config.get("projection"),
        "features": attributor.proj_dim,
        "ridge": f"{args.lambda_relative:g} relative",
        "seed": args.seed,
        "train_rows": len(attributor.train_dataset),
        "train_fingerprint": config.get("train_fingerprint"),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "hf_trak_version": __version__,
    }


def checkpoint_names(features: "FeaturizedModel", ids: Sequence[int]) -> list[str]:
    """Name checkpoints by the directories that they come from.

    Args:
        features: the featurized model.
        ids: ids of checkpoints.
    """
    return [Path(str(features.store.checkpoint_info(one)["source"])).name for one in ids]


def plain_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Convert facts to plain JSON, in their order.

    Values that JSON does not have become text: NaN and infinities (`"NaN"`), and objects of other classes (as by
    `str`).

    Raises:
        ValueError: a fact contains itself, is nested too deeply, or has keys that are neither strings nor numbers.
    """
    plain = {}
    for name, value in facts.items():
        try:
            json.dumps(functools.reduce(lambda inner, _: [inner], range(_SPARE_DEPTH), value), default=str)
            plain[str(name)] = json.loads(json.dumps(value, default=str), parse_constant=str)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"The fact {str(name)[:80]!r} cannot be saved as JSON: {str(error)[:200]}. Expected plain values, "
                "lists and dictionaries. Convert it, or leave it out."
            ) from error
    return plain


_FULL_TOP = 50  # length of the top-k lists that are made of full score lists


def top_k_of_full(scored: Dataset, n: int) -> tuple[Dataset, ScoreDistributions]:
    """Convert full score lists to top-k columns and distributions.

    Args:
        scored: the result of `attribute(..., top_k=None, per="target")`.
        n: number of training rows.

    Returns:
        The rows with top-k columns of the 50 highest and lowest scores, and the distribution of every list.

    Raises:
        ValueError: the lists do not have n scores.
    """
    name = TOP_K_COLUMNS[1]
    if (length := scored.features[name].length) != n:
        raise ValueError(
            f"`{name}` holds {length} scores per row for {n} training rows. Expected the result of "
            "`attribute(..., top_k=None, per='target')`."
        )
    k = min(_FULL_TOP, n)
    import torch  # slow to import, and not needed for the lists of a top k

    ends: dict[str, list[Any]] = {column: [] for column in TOP_K_COLUMNS}
    parts = []
    for row in scored.select_columns([name]).with_format("numpy"):
        scores = row[name]
        order = np.argsort(-scores, kind="stable")
        best, worst = order[:k], order[::-1][:k]
        for column, values in zip(TOP_K_COLUMNS, (best, scores[best], worst, scores[worst]), strict=True):
            ends[column].append(values.tolist())
        block = [(0, n, torch.from_numpy(np.array(scores)[:, None]))]
        parts.append(ScoreDistributions.from_blocks(block, scores.min(keepdims=True), scores.max(keepdims=True)))
    merged = ScoreDistributions(
        **{f: np.concatenate([getattr(part, f) for part in parts]) for f in ScoreDistributions.__dataclass_fields__}
    )
    kept = scored.with_format(None).remove_columns([name])
    for column in TOP_K_COLUMNS:
        kind = Value("int64" if column.endswith("indices") else "float32")
        kept = with_column(kept, column, ends[column], feature=List(kind, length=k))
    return kept, merged


def with_scores_of(rows: Any, scored: Dataset) -> Dataset:
    """Convert the rows of any dataset to a `datasets.Dataset`, and add their scores.

    Args:
        rows: a map-style dataset with as many rows as `scored`.
        scored: the score columns.
    """
    shown = as_dataset([rows[i] for i in range(len(rows))])
    earlier = [name for name in TOP_K_COLUMNS if name in shown.column_names]  # scores of an earlier call
    shown = shown.remove_columns(earlier)
    for name in scored.column_names:
        if name not in shown.column_names:
            shown = with_column(shown, name, scored[name][:])
    return shown


def as_dataset(rows: Any) -> Dataset:
    """Convert rows of any kind to a `datasets.Dataset`, as far as they can be shown. A `datasets.Dataset` stays as is.

    Raises:
        ValueError: a column has values that Arrow cannot store in one column.
    """
    if isinstance(rows, Dataset):
        return rows
    named = [as_row(row) for row in rows]
    names = list(dict.fromkeys(name for row in named for name in row))
    try:
        return Dataset.from_dict({name: [_plain(row.get(name)) for row in named] for name in names})
    except (pa.ArrowException, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"The columns {names} of the rows cannot be saved: {str(error)[:200]}. Expected values of one type in "
            "each column. Give the rows as a `datasets.Dataset`."
        ) from error


def _plain(value: Any) -> Any:
    return value.tolist() if is_tensor(value) or isinstance(value, np.ndarray | np.generic) else value


OUTLIERS = 24

"""Number of training rows of the highest self-influence that a run keeps."""


@dataclass
class AttributionRun:
    """The result of an attribution: scores, the rows that they refer to, and statistics.

    Args:
        scored (`datasets.Dataset`):
            One row per target, with the columns of `attribute(..., top_k=...)`.
        train (`Dataset` or `None`):
            The training rows, or those listed in `train_rows`. `None` if they are not available.
        train_rows (`numpy.ndarray` of shape `(rows,)`, *optional*):
            Row numbers of the rows in `train`, ascending. By default `train` is the whole training set.
        self_influence (`numpy.ndarray` of shape `(n,)`, *optional*):
            τ(z_i, z_i) of every training row.
        distributions (`ScoreDistributions`, *optional*):
            Distributions of the scores of every target.
        facts (`dict`, *optional*):
            Facts that the report shows, as plain JSON.

    Raises:
        ValueError: `scored` lacks a score column.
    """

    scored: Dataset
    train: Any
    train_rows: np.ndarray | None = None
    self_influence: np.ndarray | None = None
    distributions: ScoreDistributions | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if missing := [name for name in TOP_K_COLUMNS if name not in self.scored.column_names]:
            raise ValueError(
                f"The scored dataset has the columns {self.scored.column_names}; {missing} are missing. Expected one "
                "row per target with these columns. Call `attribute(..., top_k=..., per='target')`."
            )

    def text_columns(self, rows: Any) -> list[str] | None:
        """Return the columns of text that the model read, those that rows have; `None` if the run names none of them.

        Args:
            rows: targets or training rows.
        """
        named, there = self.facts.get("text_columns"), getattr(rows, "features", {})
        if not isinstance(named, list):
            return None
        return [name for name in named if isinstance(name, str) and name in there] or None

    @classmethod
    def collect(
        cls,
        attributor: "FeaturizedModel",
        scored: Dataset,
        eval_dataset: Any = None,
        *,
        distributions: ScoreDistributions | None = None,
        self_influence: Any = None,
        facts: Mapping[str, Any] | None = None,
    ) -> "AttributionRun":
        """Combine a result of `attribute` with the training rows and facts of the attributor.

        Args:
            attributor (`FeaturizedModel`):
                The attributor, after `featurize`.
            scored (`datasets.Dataset`):
                The result of `attribute(eval_dataset, ...)`, one row per target, with `top_k` or with all scores.
            eval_dataset (`Dataset`, *optional*):
                The targets. Needed if they are no `datasets.Dataset`, since `scored` does not contain their rows then.
            distributions (`ScoreDistributions`, *optional*):
                Distributions of the scores. By default there are none, unless `scored` has all scores.
            self_influence (*optional*):
                Self-influence of the training rows, `(n,)`. By default none is shown.
            facts (`Mapping`, *optional*):
                Further facts to show, such as a measured linear datamodeling score.

        Returns:
            `AttributionRun`: the run.

        Raises:
            ValueError: `scored` has no score columns, or was made with `per="train"`.
        """
        n = len(attributor.train_dataset)
        if TOP_K_COLUMNS[0] not in scored.column_names and TOP_K_COLUMNS[1] in scored.column_names:
            scored, distributions = top_k_of_full(scored, n)
        if eval_dataset is not None and not isinstance(eval_dataset, Dataset):
            scored = with_scores_of(eval_dataset, scored)
        if self_influence is not None:
            self_influence = np.asarray(self_influence, dtype=np.float32)
        from hf_trak.hub.loading import AbsentRows  # a downloaded index comes without training rows
        from hf_trak.report.words import with_words  # loads tasks, which a run that is read does without

        train = None if isinstance(attributor.train_dataset, AbsentRows) else attributor.train_dataset
        every = {**known_facts(attributor), "targets": len(scored), **(facts or {})}
        run = cls(with_words(attributor, scored), train, None, self_influence, distributions, every)
        run.check_rows(n)
        return run

    @property
    def n_train(self) -> int:
        """Return the number of training rows, n.

        Raises:
            ValueError: nothing in the run tells the number.
        """
        if self.self_influence is not None:
            return len(self.self_influence)
        if self.train_rows is None and self.train is not None:
            return len(self.train)
        if TRAIN_ROWS not in self.facts:
            raise ValueError(
                "The run has neither all training rows nor their self-influence, so their number is unknown. Expected "
                f"the fact `{TRAIN_ROWS}`. Add it to `facts`."
            )
        return int(self.facts[TRAIN_ROWS])

    def train_place(self, index: int) -> int:
        """Find the position in `train` of a training row.

        Args:
            index (`int`):
                Number of the row in the whole training set.

        Raises:
            StoreError: the run does not keep this row.
        """
        if self.train_rows is None:
            return index
        place = int(np.searchsorted(self.train_rows, index))
        if place >= len(self.train_rows) or self.train_rows[place] != index:
            raise StoreError(
                f"The run keeps {len(self.train_rows)} of the training rows, and row {index} is not among them. "
                "Expected every row that a score names. Attribute again, or pass the training dataset."
            )
        return place

    def train_row(self, index: int) -> Any:
        """Read a training row. It is empty if the run has no training rows.

        Args:
            index (`int`):
                Number of the row in the whole training set.

        Raises:
            StoreError: the run does not keep this row.
        """
        return {} if self.train is None else self.train[self.train_place(index)]

    def outliers(self, count: int = OUTLIERS) -> list[tuple[int, float]]:
        """List the training rows of the highest self-influence, each as `(row, self-influence)`."""
        if self.self_influence is None:
            return []
        order = np.argsort(-self.self_influence, kind="stable")[:count]
        return [(int(i), float(self.self_influence[i])) for i in order]

    def check_rows(self, n_train: int) -> None:
        """Check that scores are finite and name training rows, unlike those of results whose rows are no targets.

        Raises:
            ValueError: a score is not finite or names no training row, or the score columns cannot be read.
        """
        if problem := scores_problem(raw(self.scored), n_train, None):
            raise ValueError(
                f"The scored dataset cannot be used: {problem}. Expected the result of `attribute(..., per='target')` "
                "for this training dataset."
            )

    # -- on disk -----------------------------------------------------------------------------------------------------

    def save(self, directory: str | Path, every_train_row: bool = False) -> Path:
        """Write the run into `directory/run`. A run that is there is replaced atomically; other files stay.

        Args:
            directory (`str` or `Path`):
                Where the directory `run` is made, see the docstring of the module.
            every_train_row (`bool`, *optional*, defaults to `False`):
                Keep the whole training set. By default, only the rows that a score or the list of outliers names are
                kept, so that the run is small.

        Returns:
            `Path`: `directory`.

        Raises:
            StoreError: a file cannot be written.
            ValueError: scores, rows and statistics do not fit each other, or a fact is no JSON.
        """
        directory = Path(directory)
        scored, train, rows = raw(self.scored), raw(self.train), self.train_rows
        if problem := scores_problem(scored, self.n_train, rows):
            raise ValueError(f"The run cannot be saved: {problem}. Expected the result of `attribute`.")
        if rows is None and train is not None and not every_train_row:
            rows = self._named_rows()
            train = train.select(rows) if isinstance(train, Dataset) else [train[int(i)] for i in rows]
        given = {} if rows is None else {TRAIN_ROWS: rows}
        if self.self_influence is not None:
            given[SELF_INFLUENCE] = self.self_influence
        if self.distributions is not None:
            given |= vars(self.distributions)
        tensors = {name: np.ascontiguousarray(value) for name, value in given.items()}
        kept = None if train is None else as_dataset(train)
        facts = plain_facts({TRAIN_ROWS: self.n_train, **self.facts})
        parts = SavedParts(scored, kept, tensors, facts, directory / RUN)
        if found := parts_problem(parts):
            raise ValueError(f"The run cannot be saved: {found[1]}. Expected the parts of one attribution.")
        write_run(parts)
        return directory

    @classmethod
    def load(cls, directory: str | Path, train_dataset: Dataset | None = None) -> "AttributionRun":
        """Read a run, and compare every file that is read with its checksum.

        Args:
            directory (`str` or `Path`):
                The directory that the run was saved to, or an `output_dir` with exactly one run.
            train_dataset (`datasets.Dataset`, *optional*):
                The whole training dataset. It replaces the rows that the run keeps, which are then not read.

        Raises:
            IncompleteStoreError: there is no run, or a part of it is missing.
            StoreError: a part is damaged or does not fit the others.
            ValueError: there are several runs below the directory, or `train_dataset` does not have as many rows as
                were attributed.
        """
        return read_run(find_run(directory), train_dataset is None, lambda parts: cls._of(parts, train_dataset))

    @classmethod
    def _of(cls, parts: SavedParts, train_dataset: Dataset | None) -> "AttributionRun":
        tensors = parts.tensors
        if train_dataset is not None:
            n_train = parts.facts.get(TRAIN_ROWS)
            if len(train_dataset) != n_train:
                raise ValueError(
                    f"`train_dataset` has {len(train_dataset)} rows; the run is about {n_train}. Expected the dataset "
                    "that was attributed. Pass that one, or none to see the rows that the run keeps."
                )
            tensors.pop(TRAIN_ROWS, None)
            parts = replace(parts, train=train_dataset)
        check_parts(parts)
        named = ScoreDistributions.__dataclass_fields__
        counted = "counts" in tensors
        distributions = ScoreDistributions(**{name: tensors[name] for name in named}) if counted else None
        influence = tensors.get(SELF_INFLUENCE)
        return cls(parts.scored, parts.train, tensors.get(TRAIN_ROWS), influence, distributions, parts.facts)

    def _named_rows(self) -> np.ndarray:
        """List the training rows that a score or the list of outliers names, ascending."""
        named = [np.unique(ends.rows) for ends in ends_of(raw(self.scored))]
        return np.unique(np.concatenate([[index for index, _ in self.outliers()], *named]).astype(np.int64))


def top_k_range(scored: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Return the lowest and the highest score of every target of a top-k result, `(m,)` each."""
    plain = scored.with_format(None)
    low, high = (np.array([scores[0] for scores in plain[TOP_K_COLUMNS[at]]], dtype=np.float64) for at in (3, 1))
    return low, high
