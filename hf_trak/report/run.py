"""The outcome of an attribution on disk: what a report is made of, without the model and without the features.

    <run>/
      run.json                    what was attributed: model, checkpoints, projection, sizes; written last
      scored/                     the targets with their score columns (`Dataset.save_to_disk`)
      train/                      the training rows that any score names, or all of them
      statistics.safetensors      self-influence of all training rows, distribution of each target's scores, and
                                  `train_rows`: which training rows `train/` holds, if not all

`TrakAttributor.attribute` keeps full score matrices in `<output_dir>/scores/<name>`, which is also where
[`AttributionRun.save`] is meant to put a run; it leaves other files of the directory alone. A directory that has just
`scored/` and `train/`, each written by `save_to_disk`, is a run too.
"""

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from datasets import Dataset, DatasetDict, load_from_disk
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hf_trak import __version__
from hf_trak.errors import IncompleteStoreError, StoreError
from hf_trak.report.content import as_row, raw
from hf_trak.report.distributions import ScoreDistributions
from hf_trak.savers.atomic import atomic_path
from hf_trak.scored_dataset import TOP_K_COLUMNS

if TYPE_CHECKING:
    from hf_trak.attributor import TrakAttributor

FORMAT_VERSION = 1
OUTLIERS = 24
"""Training rows of the highest self-influence that a run keeps."""

_FULL_TOP = 50
_STATISTICS = "statistics.safetensors"


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
        attributor: "TrakAttributor",
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
            scored, distributions = _from_full(scored, n)
        if eval_dataset is not None and not isinstance(eval_dataset, Dataset):
            scored = _beside(eval_dataset, scored)
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
            {**_known(attributor), "targets": len(scored), **(facts or {})},
        )
        run.check_rows(n)
        return run

    @property
    def n_train(self) -> int:
        """Number of training rows that were attributed to."""
        if self.self_influence is not None:
            return len(self.self_influence)
        if self.train_rows is None and self.train is not None:
            return len(self.train)
        return int(self.facts["train_rows"])

    def train_row(self, index: int) -> Any:
        """Training row `index`, counted in the whole training set; an empty one where rows are not at hand."""
        if self.train is None:
            return {}
        if self.train_rows is None:
            return self.train[index]
        place = int(np.searchsorted(self.train_rows, index))
        if place >= len(self.train_rows) or self.train_rows[place] != index:
            raise StoreError(
                f"The run keeps {len(self.train_rows)} of the training rows, and row {index} is not among them. "
                "Expected every row that a score names. Attribute again, or pass the training dataset."
            )
        return self.train[place]

    def outliers(self, count: int = OUTLIERS) -> list[tuple[int, float]]:
        """Training rows of the highest self-influence, and it."""
        if self.self_influence is None:
            return []
        order = np.argsort(-self.self_influence, kind="stable")[:count]
        return [(int(i), float(self.self_influence[i])) for i in order]

    def check_rows(self, n_train: int) -> None:
        """Raise `ValueError` if a score names a training row beyond the last: rows are no targets then."""
        highest = max((max(row[TOP_K_COLUMNS[0]], default=0) for row in _scores_of(self.scored)), default=0)
        if highest >= n_train:
            raise ValueError(
                f"A score names training row {highest}; there are {n_train}. Expected the result of "
                "`attribute(..., per='target')` for this training dataset."
            )

    # -- on disk -----------------------------------------------------------------------------------------------------

    def save(self, directory: str | Path, every_train_row: bool = False) -> Path:
        """Write the run; a run that is there already is replaced, other files stay.

        Args:
            directory: see the module's docstring.
            every_train_row: keep the whole training set. By default only the rows that a score or the list of
                outliers names, so that a run is small.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "run.json").unlink(missing_ok=True)
        rows, train = self.train_rows, raw(self.train)
        if rows is None and train is not None and not every_train_row:
            rows = np.array(sorted(self._named_rows()), dtype=np.int64)
            train = train.select(rows) if isinstance(train, Dataset) else [train[int(i)] for i in rows]
        if train is None:
            shutil.rmtree(directory / "train", ignore_errors=True)
        else:
            _save_dataset(_as_dataset(train), directory / "train")
        _save_dataset(_as_dataset(raw(self.scored)), directory / "scored")
        tensors = {} if rows is None else {"train_rows": torch.from_numpy(rows)}
        if self.self_influence is not None:
            tensors["self_influence"] = torch.from_numpy(np.ascontiguousarray(self.self_influence))
        if self.distributions is not None:
            tensors |= self.distributions.tensors()
        with atomic_path(directory / _STATISTICS) as temporary:
            save_file(tensors, temporary)
        content = {"format_version": FORMAT_VERSION, "facts": {"train_rows": self.n_train, **self.facts}}
        with atomic_path(directory / "run.json") as temporary:
            temporary.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
        return directory

    @classmethod
    def load(cls, directory: str | Path, train_dataset: Dataset | None = None) -> "AttributionRun":
        """Read a run.

        Args:
            directory: of the run, or an `output_dir` that holds exactly one.
            train_dataset: the whole training dataset, to be shown instead of the rows that the run keeps.

        Raises:
            IncompleteStoreError: there is no run, or a part of it is missing.
            StoreError: a part cannot be read.
            ValueError: there are several runs below the directory.
        """
        directory = find_run(directory)
        facts: dict[str, Any] = {}
        if (directory / "run.json").is_file():
            facts = _read_facts(directory / "run.json")
        elif (directory / _STATISTICS).is_file():
            raise IncompleteStoreError(
                f"{directory} lacks run.json, which is written last: saving the run was interrupted. Attribute again."
            )
        tensors: dict[str, np.ndarray] = {}
        if (directory / _STATISTICS).is_file():
            try:
                tensors = {name: value.numpy() for name, value in load_file(directory / _STATISTICS).items()}
            except SafetensorError as error:
                raise StoreError(f"{directory / _STATISTICS} is damaged ({error}). Attribute again.") from error
        rows = None if train_dataset is not None else tensors.get("train_rows")
        train = train_dataset
        if train is None and (not facts or (directory / "train").is_dir()):
            train = _load_dataset(directory / "train")
        if rows is not None and (train is None or len(rows) != len(train)):
            raise StoreError(f"{directory} keeps other training rows than its {_STATISTICS} names. Attribute again.")
        fields = ScoreDistributions.__dataclass_fields__
        distributions = ScoreDistributions(**{f: tensors[f] for f in fields}) if set(fields) <= set(tensors) else None
        return cls(
            _load_dataset(directory / "scored"), train, rows, tensors.get("self_influence"), distributions, facts
        )

    def _named_rows(self) -> set[int]:
        named = {index for index, _ in self.outliers()}
        for row in _scores_of(self.scored):
            named.update(row[TOP_K_COLUMNS[0]], row[TOP_K_COLUMNS[2]])
        return named


def find_run(directory: str | Path) -> Path:
    """The directory of a run: the given one, or the only one in its `scores/`.

    Raises:
        IncompleteStoreError: there is none.
        ValueError: there are several.
    """
    directory = Path(directory)
    if (directory / "scored").is_dir():
        return directory
    found = sorted(path.parent for path in directory.glob("scores/*/run.json"))
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"{directory} holds several runs. Expected one of {[str(path) for path in found]}.")
    raise IncompleteStoreError(
        f"{directory} holds no run. Expected a directory with `scored/` and `train/`, as `hf-trak attribute` and "
        "`AttributionRun.save` write it, or the `output_dir` of `hf-trak attribute`."
    )


def top_k_range(scored: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and the highest score of every target, `(m,)` each."""
    rows = list(_scores_of(scored))
    return (
        np.array([row[TOP_K_COLUMNS[3]][0] for row in rows], dtype=np.float64),
        np.array([row[TOP_K_COLUMNS[1]][0] for row in rows], dtype=np.float64),
    )


def score_distributions(
    attributor: "TrakAttributor",
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
    _, blocks = attributor._score_blocks(eval_dataset, name, None, model_ids)
    return ScoreDistributions.from_blocks(blocks, *top_k_range(scored))


def _scores_of(scored: Dataset) -> Iterable[Mapping[str, Any]]:
    return scored.with_format(None).select_columns(list(TOP_K_COLUMNS))


def _from_full(scored: Dataset, n: int) -> tuple[Dataset, ScoreDistributions]:
    """The ends of full score lists as top-k columns, and the distribution of every list."""
    name = TOP_K_COLUMNS[1]
    if (length := scored.features[name].length) != n:
        raise ValueError(
            f"`{name}` holds {length} scores per row for {n} training rows. Expected the result of "
            "`attribute(..., top_k=None, per='target')`."
        )
    k = min(_FULL_TOP, n)
    ends: dict[str, list[Any]] = {column: [] for column in TOP_K_COLUMNS}
    parts = []
    for row in scored.select_columns([name]).with_format("numpy"):
        scores = row[name]
        order = np.argsort(-scores, kind="stable")
        for indices, (rows, values) in zip(
            (order[:k], order[::-1][:k]), (TOP_K_COLUMNS[:2], TOP_K_COLUMNS[2:]), strict=True
        ):
            ends[rows].append(indices.tolist())
            ends[values].append(scores[indices].tolist())
        block = [(0, n, torch.from_numpy(np.array(scores)[:, None]))]
        parts.append(ScoreDistributions.from_blocks(block, scores.min(keepdims=True), scores.max(keepdims=True)))
    merged = ScoreDistributions(
        **{f: np.concatenate([getattr(part, f) for part in parts]) for f in ScoreDistributions.__dataclass_fields__}
    )
    kept = scored.with_format(None).remove_columns([name])
    for column in TOP_K_COLUMNS:
        kept = kept.add_column(column, ends[column])
    return kept, merged


def _beside(rows: Any, scored: Dataset) -> Dataset:
    """What can be shown of the rows of any dataset, and their scores."""
    shown = _as_dataset([rows[i] for i in range(len(rows))])
    for name in scored.column_names:
        if name not in shown.column_names:
            shown = shown.add_column(name, scored[name][:])
    return shown


def _as_dataset(rows: Any) -> Dataset:
    if isinstance(rows, Dataset):
        return rows
    named = [as_row(row) for row in rows]
    names = list(dict.fromkeys(name for row in named for name in row))
    return Dataset.from_dict({name: [_plain(row.get(name)) for row in named] for name in names})


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor | np.ndarray | np.generic) else value


def _known(attributor: "TrakAttributor") -> dict[str, Any]:
    """What the store and the configuration say about the scores."""
    config = attributor.store.config
    args = attributor.args
    return {
        "model": config.get("model_name") or config.get("model_class"),
        "model_class": config.get("model_class"),
        "model_revision": config.get("model_revision"),
        "task": config.get("task"),
        "parameters": attributor.layout.total,
        "checkpoints": [
            Path(str(attributor.store.checkpoint_info(i)["source"])).name for i in attributor.store.model_ids
        ],
        "projection": config.get("projection"),
        "features": attributor.proj_dim,
        "ridge": f"{args.lambda_reg:g}" if args.lambda_reg is not None else f"{args.lambda_relative:g} relative",
        "seed": args.seed,
        "train_rows": len(attributor.train_dataset),
        "train_fingerprint": config.get("train_fingerprint"),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "hf_trak_version": __version__,
    }


def _read_facts(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise StoreError(f"{path} is no JSON ({error}). Attribute again.") from error
    version = content.get("format_version") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        raise StoreError(
            f"{path} has format version {version!r}; this version of hf_trak reads {FORMAT_VERSION}. Use the version "
            "that wrote it, or attribute again."
        )
    facts = content.get("facts")
    return facts if isinstance(facts, dict) else {}


def _load_dataset(path: Path) -> Dataset:
    if not path.is_dir():
        raise IncompleteStoreError(f"{path} is missing. Expected a dataset written by `save_to_disk`.")
    dataset = load_from_disk(path)
    if isinstance(dataset, DatasetDict):
        raise StoreError(f"{path} holds the splits {list(dataset)}. Expected one dataset.")
    return dataset


def _save_dataset(dataset: Dataset, path: Path) -> None:
    """`save_to_disk`, such that nothing half-written is ever under that name."""
    temporary, old = (path.with_name(f".{path.name}.{kind}") for kind in ("tmp", "old"))
    for leftover in (temporary, old):
        shutil.rmtree(leftover, ignore_errors=True)
    dataset.save_to_disk(temporary)
    if path.exists():
        path.rename(old)
    temporary.rename(path)
    shutil.rmtree(old, ignore_errors=True)
