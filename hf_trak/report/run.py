"""The outcome of an attribution on disk: what a report is made of, without the model and without the features.

    <run>/
      run.json                    what was attributed: model, checkpoints, projection, sizes; the checksums of all
                                  files of the run; written last
      parts-<16 hex digits>/      the files that `run.json` names
        scored/                   the targets with their score columns (`Dataset.save_to_disk`)
        train/                    the training rows that any score names, or all of them
        statistics.safetensors    self-influence of all training rows, distribution of each target's scores, and
                                  `train_rows`: which training rows `train/` holds, if not all
      scored/, train/             views of these datasets for `datasets.load_from_disk`; not read by `load`

A save is there whole or not at all, whenever it is killed and however many save at once (`run_writing`). The parts of
the save before are kept until the next one, because datasets in memory may refer to them.

`TrakAttributor.attribute` keeps full score matrices in `<output_dir>/scores/<name>`, which is also where
[`AttributionRun.save`] is meant to put a run; it leaves other files of the directory alone. A directory that has just
`scored/` and `train/`, each written by `save_to_disk`, is a run too, without checksums.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from hf_trak.errors import StoreError
from hf_trak.featurize.featurized import FeaturizedModel
from hf_trak.report.content import raw
from hf_trak.report.distributions import ScoreDistributions
from hf_trak.report.run_checks import (
    SELF_INFLUENCE,
    TRAIN_ROWS,
    check_parts,
    ends_of,
    scores_problem,
    sizes_problem,
    statistics_problem,
    train_sizes,
)
from hf_trak.report.run_facts import known_facts, plain_facts
from hf_trak.report.run_reading import SavedParts, read_parts
from hf_trak.report.run_record import find_run
from hf_trak.report.run_rows import as_dataset, beside, from_full
from hf_trak.report.run_verification import verify_run
from hf_trak.report.run_writing import write_run
from hf_trak.scores.scored_dataset import TOP_K_COLUMNS

__all__ = ["AttributionRun", "find_run", "score_distributions", "top_k_range", "verify_run"]

OUTLIERS = 24
"""Training rows of the highest self-influence that a run keeps."""


@dataclass
class AttributionRun:
    """Scores and the rows that they are about."""

    scored: Dataset
    """One row per target with the columns of `attribute(..., top_k=...)`."""
    train: Any
    """The training rows, or those that are in `train_rows`; `None` where they are not at hand."""
    train_rows: np.ndarray | None = None
    """Ascending row numbers of the rows in `train`; `None` if it is the whole training set."""
    self_influence: np.ndarray | None = None
    """τ(z_i, z_i) of every training row, `(n,)`."""
    distributions: ScoreDistributions | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """Plain JSON, shown as it is."""

    def __post_init__(self) -> None:
        if missing := [name for name in TOP_K_COLUMNS if name not in self.scored.column_names]:
            raise ValueError(
                f"The scored dataset has the columns {self.scored.column_names}; {missing} are missing. Expected one "
                "row per target, from `attribute(..., top_k=...)` with `per='target'`."
            )

    @classmethod
    def collect(
        cls,
        attributor: FeaturizedModel,
        scored: Dataset,
        eval_dataset: Any = None,
        *,
        distributions: ScoreDistributions | None = None,
        self_influence: Any = None,
        facts: Mapping[str, Any] | None = None,
    ) -> "AttributionRun":
        """Put together what `attribute` returned and what the attributor knows.

        Args:
            attributor: after `featurize`.
            scored: the result of `attribute(eval_dataset, ...)`, one row per target, with `top_k` or with all scores.
            eval_dataset: the targets, for a dataset that is no `datasets.Dataset`, whose rows `scored` lacks.
            distributions: of the scores, from [`ScoreDistributions.from_blocks`]. `None` shows none, unless `scored`
                has all scores.
            self_influence: of the training rows. `None` shows none.
            facts: more to be shown, such as a measured linear datamodeling score.

        Raises:
            ValueError: `scored` has no score columns, or was made with `per="train"`.
        """
        n = len(attributor.train_dataset)
        if TOP_K_COLUMNS[0] not in scored.column_names and TOP_K_COLUMNS[1] in scored.column_names:
            scored, distributions = from_full(scored, n)
        if eval_dataset is not None and not isinstance(eval_dataset, Dataset):
            scored = beside(eval_dataset, scored)
        if self_influence is not None:
            self_influence = np.asarray(self_influence, dtype=np.float32)
        from hf_trak.hub.loading import AbsentRows  # an index that was downloaded comes without training rows

        train = attributor.train_dataset
        run = cls(
            scored,
            None if isinstance(train, AbsentRows) else train,
            None,
            self_influence,
            distributions,
            {**known_facts(attributor), "targets": len(scored), **(facts or {})},
        )
        run.check_rows(n)
        return run

    @property
    def n_train(self) -> int:
        """Number of training rows that were attributed to. Raises `ValueError` if the run does not say."""
        if self.self_influence is not None:
            return len(self.self_influence)
        if self.train_rows is None and self.train is not None:
            return len(self.train)
        if TRAIN_ROWS not in self.facts:
            raise ValueError(
                "The run has neither all training rows nor their self-influence, so their number is unknown. Expected "
                f"it as the fact `{TRAIN_ROWS}`."
            )
        return int(self.facts[TRAIN_ROWS])

    def train_place(self, index: int) -> int:
        """Where training row `index`, counted in the whole training set, is in `train`.

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
        """Training row `index`, counted in the whole training set; an empty one where rows are not at hand.

        Raises:
            StoreError: the run does not keep this row.
        """
        return {} if self.train is None else self.train[self.train_place(index)]

    def outliers(self, count: int = OUTLIERS) -> list[tuple[int, float]]:
        """Training rows of the highest self-influence, and it."""
        if self.self_influence is None:
            return []
        order = np.argsort(-self.self_influence, kind="stable")[:count]
        return [(int(i), float(self.self_influence[i])) for i in order]

    def check_rows(self, n_train: int) -> None:
        """Raise `ValueError` if a score names a training row beyond the last: rows are no targets then."""
        try:
            highest = max((int(ends.rows.max(initial=0)) for ends in ends_of(self.scored)), default=0)
        except ValueError as error:
            raise ValueError(
                f"The scored dataset cannot be used: {error}. Expected what `attribute` returns."
            ) from error
        if highest >= n_train:
            raise ValueError(
                f"A score names training row {highest}; there are {n_train}. Expected the result of "
                "`attribute(..., per='target')` for this training dataset."
            )

    # -- on disk -----------------------------------------------------------------------------------------------------

    def save(self, directory: str | Path, every_train_row: bool = False) -> Path:
        """Write the run; a run that is there already is replaced at once when all is written, other files stay.

        Args:
            directory: see the module's docstring.
            every_train_row: keep the whole training set. By default only the rows that a score or the list of
                outliers names, so that a run is small.

        Returns:
            The directory.

        Raises:
            StoreError: a file cannot be written.
            ValueError: scores, rows and statistics do not fit each other, or a fact is no JSON.
        """
        directory = Path(directory)
        rows, train = self.train_rows, raw(self.train)
        if problem := self._scores_problem(rows):
            raise ValueError(f"The run cannot be saved: {problem}. Expected the result of `attribute`.")
        if rows is None and train is not None and not every_train_row:
            rows = self._named_rows()
            train = train.select(rows) if isinstance(train, Dataset) else [train[int(i)] for i in rows]
        tensors = {} if rows is None else {TRAIN_ROWS: torch.from_numpy(np.ascontiguousarray(rows))}
        if self.self_influence is not None:
            tensors[SELF_INFLUENCE] = torch.from_numpy(np.ascontiguousarray(self.self_influence))
        if self.distributions is not None:
            tensors |= self.distributions.tensors()
        arrays = {name: value.numpy() for name, value in tensors.items()}
        facts = plain_facts({TRAIN_ROWS: self.n_train, **self.facts})
        problem = statistics_problem(arrays, len(self.scored)) or sizes_problem(
            train_sizes(arrays, facts, train), rows, train
        )
        if problem:
            raise ValueError(f"The run cannot be saved: {problem}. Expected parts of one attribution.")
        kept = None if train is None else as_dataset(train)
        write_run(directory, as_dataset(raw(self.scored)), kept, tensors, facts)
        return directory

    @classmethod
    def load(cls, directory: str | Path, train_dataset: Dataset | None = None) -> "AttributionRun":
        """Read a run, comparing every file that is read with its checksum.

        Args:
            directory: of the run, or an `output_dir` that holds exactly one.
            train_dataset: the whole training dataset, to be shown instead of the rows that the run keeps, which are
                not read then.

        Raises:
            IncompleteStoreError: there is no run, or a part of it is missing.
            StoreError: a part is damaged, or does not fit the others.
            ValueError: there are several runs below the directory, or `train_dataset` has another number of rows than
                were attributed.
        """
        directory = find_run(directory)
        return read_parts(directory, train_dataset is None, lambda parts: cls._of(parts, train_dataset))

    @classmethod
    def _of(cls, parts: SavedParts, train_dataset: Dataset | None) -> "AttributionRun":
        check_parts(parts, train_dataset)
        tensors = parts.tensors
        named = set(ScoreDistributions.__dataclass_fields__)
        distributions = ScoreDistributions(**{f: tensors[f] for f in named}) if named <= set(tensors) else None
        kept = parts.train, tensors.get(TRAIN_ROWS)
        train, rows = kept if train_dataset is None else (train_dataset, None)
        return cls(parts.scored, train, rows, tensors.get(SELF_INFLUENCE), distributions, parts.facts)

    def _scores_problem(self, rows: np.ndarray | None) -> str | None:
        return scores_problem(raw(self.scored), self.n_train, rows)

    def _named_rows(self) -> np.ndarray:
        """Ascending numbers of the training rows that a score or the list of outliers names."""
        named = [np.unique(ends.rows) for ends in ends_of(raw(self.scored))]
        return np.unique(np.concatenate([[index for index, _ in self.outliers()], *named]).astype(np.int64))


def top_k_range(scored: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and the highest score of every target, `(m,)` each."""
    rows = list(scored.with_format(None).select_columns(list(TOP_K_COLUMNS)))
    return (
        np.array([row[TOP_K_COLUMNS[3]][0] for row in rows], dtype=np.float64),
        np.array([row[TOP_K_COLUMNS[1]][0] for row in rows], dtype=np.float64),
    )


def score_distributions(
    attributor: FeaturizedModel,
    scored: Dataset,
    eval_dataset: Any,
    name: str | None = None,
    model_ids: Sequence[int] | None = None,
) -> ScoreDistributions:
    """Count all scores of the targets in bins: one more pass over the features, at the cost of `attribute`'s.

    Args:
        attributor: what `scored` came from.
        scored: the result of `attribute(eval_dataset, top_k=...)`, whose ends say where the bins are.
        eval_dataset: the targets.
        name, model_ids: those given to `attribute`.
    """
    _, blocks = attributor.score_blocks(eval_dataset, name, None, model_ids)
    return ScoreDistributions.from_blocks(blocks, *top_k_range(scored))
