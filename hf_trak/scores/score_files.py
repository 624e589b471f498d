"""Scores in Arrow files, written block by block, with each process writing its own rows.

A single process writes one file, `<stem>.arrow`. W processes write up to W files, `<stem>-<rank>-of-<W>.arrow`, whose
rows follow each other. A file appears under its name when it is complete. The stem contains a digest of everything
that the scores depend on: runs with different settings write different files, and runs with equal settings write
equal bytes.
"""

import io
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset, Features, List, Value, concatenate_datasets
from datasets.arrow_writer import ArrowWriter

from hf_trak.errors import StoreError
from hf_trak.runtime.processes import Processes
from hf_trak.scores.scored_dataset import TOP_K_COLUMNS, ScoreBlock, fixed_size_list
from hf_trak.scores.topk import PADDING, TopK
from hf_trak.store.atomic import atomic_path, explained, remove_stale_temporaries, safe_name, temporary_file
from hf_trak.store.sealed import file_digest

_GROUP_BYTES = 64 << 20


class ScoreFiles:
    """Writes the score columns of one result. All processes have to call every method."""

    def __init__(self, directory: Path, stem: str, processes: Processes, n_train: int, n_targets: int) -> None:
        """
        Args:
            directory: where files are written.
            stem: first part of their names.
            processes: the processes of the run. Each has the blocks of its own training rows, in order.
            n_train: number of training rows, n.
            n_targets: number of targets, m.
        """
        self.directory = directory
        self.stem = stem
        self.processes = processes
        self.n_train = n_train
        self.n_targets = n_targets

    def columns(self, blocks: Iterable[ScoreBlock], top_k: int | None, per: Literal["target", "train"]) -> Dataset:
        """Make the score columns, with one row per target or per training row.

        Args:
            blocks: scores of the training rows of this process, in order, see [`score_blocks`].
            top_k: number of highest and of lowest scores to keep per row, in the columns [`TOP_K_COLUMNS`]. `None`
                keeps all scores, in the column `trak_scores`.
            per: `"target"` for m rows, `"train"` for n rows.

        Returns:
            The rows, memory-mapped from files, except for top-k lists per target, which are in memory. Harmful rows
            are sorted from the lowest score up. Among equal scores, the lower index comes first.

        Raises:
            StoreError: a file cannot be written.
        """
        if top_k is not None:
            if per == "target":
                return self._top_k_per_target(blocks, top_k)
            return self._write((_extremes(block, top_k) for _, _, block in blocks), _top_k_features(top_k))
        if per == "train":
            tables = (_scores_table(block.cpu().numpy()) for _, _, block in blocks)
            return self._write(tables, _score_features(self.n_targets))
        return self._transposed(blocks)

    def _top_k_per_target(self, blocks: Iterable[ScoreBlock], top_k: int) -> Dataset:
        """Keep the best rows of each process and merge these lists, with memory O(m · top_k)."""
        best, worst = TopK(top_k, largest=True), TopK(top_k, largest=False)
        with self.processes.all_or_none():
            for start, _, block in blocks:
                best.update(start, block)
                worst.update(start, block)
        return top_k_columns(*(self._merged(top) for top in (best, worst)))

    def _merged(self, top: TopK) -> TopK:
        """Merge the lists of all processes. Lists with fewer than k rows are padded, so that all have one shape."""
        kept = torch.full((self.n_targets, top.k), PADDING)
        if not top.empty:
            keys = top.keys().cpu()
            kept[:, : keys.shape[1]] = keys
        merged = TopK(top.k, top.largest)
        for keys in self.processes.gather_tensors(kept):
            merged.merge(keys)
        return merged

    def _transposed(self, blocks: Iterable[ScoreBlock]) -> Dataset:
        """Write all scores with one row per target.

        One process alone writes its transposed blocks to their places in the file. Of several, each writes them to a
        scratch file, from which all processes then read the targets that they write.
        """
        if self.processes.num_processes == 1:
            return self._filled(blocks)
        with temporary_file(self.directory) as scratch:
            with self.processes.all_or_none(), explained(scratch), open(scratch, "wb") as file:
                rows = []
                for start, stop, block in blocks:
                    file.write(np.ascontiguousarray(block.cpu().numpy().T).data)
                    rows.append([start, stop])
            parts = self.processes.gather({"name": scratch.name, "rows": rows})
            return self._write(self._target_rows(parts), _score_features(self.n_train))

    def _filled(self, blocks: Iterable[ScoreBlock]) -> Dataset:
        """Write a file with one row per target and holes for the scores, and fill these block by block."""
        path = self.directory / f"{self.stem}.arrow"
        remove_stale_temporaries(self.directory)
        with atomic_path(path) as temporary:
            with open(temporary, "wb") as file:
                _write_tables(pa.PythonFile(_WithHoles(file), "w"), self._zeros(), _score_features(self.n_train))
                file.truncate()  # the last values may be a hole
            places = _places_of_rows(temporary)
            with open(temporary, "r+b") as file:
                for start, _, block in blocks:
                    for place, row in zip(places, np.ascontiguousarray(block.cpu().numpy().T), strict=True):
                        file.seek(place + 4 * start)
                        file.write(row.data)
        return Dataset.from_file(os.fspath(path))

    def _zeros(self) -> Iterator[pa.Table]:
        """Make the rows of all targets without scores, a group of targets at a time."""
        group = self._group()
        zeros = np.zeros((min(group, self.n_targets), self.n_train), dtype=np.float32)
        for first in range(0, self.n_targets, group):
            yield _scores_table(zeros[: self.n_targets - first])

    def _group(self) -> int:
        """Count the targets whose scores are in memory at a time."""
        return max(1, _GROUP_BYTES // (4 * self.n_train))

    def _target_rows(self, parts: list[dict[str, Any]]) -> Iterator[pa.Table]:
        """Assemble the rows of this process's targets from the scratch files, a group of targets at a time."""
        mine = self.processes.share(self.n_targets)
        group = self._group()
        for first in range(mine.start, mine.stop, group):
            count = min(group, mine.stop - first)
            matrix = np.empty((count, self.n_train), dtype=np.float32)
            for part in parts:
                if not part["rows"]:
                    continue
                begin = 0
                with open(self.directory / part["name"], "rb") as file:
                    for start, stop in part["rows"]:
                        width = stop - start
                        file.seek(4 * (begin + first * width))
                        values = np.fromfile(file, dtype=np.float32, count=count * width)
                        matrix[:, start:stop] = values.reshape(count, width)
                        begin += width * self.n_targets
            yield _scores_table(matrix)

    def _write(self, tables: Iterable[pa.Table], features: Features) -> Dataset:
        """Write the rows of this process, and return the rows of all processes."""
        rank, world = self.processes.process_index, self.processes.num_processes
        name = f"{self.stem}.arrow" if world == 1 else f"{self.stem}-{rank:05d}-of-{world:05d}.arrow"
        written = False
        with self.processes.all_or_none():
            remaining = iter(tables)
            for first in remaining:
                remove_stale_temporaries(self.directory)
                with atomic_path(self.directory / name) as temporary, open(temporary, "wb") as file:
                    _write_tables(file, chain([first], remaining), features)
                written = True
        names = [name for name in self.processes.gather(name if written else None) if name is not None]
        return concatenate_datasets([Dataset.from_file(os.fspath(self.directory / name)) for name in names])


class _WithHoles(io.RawIOBase):
    """A file in which zeros are not written but skipped: such holes take no time, and reading them gives zeros."""

    def __init__(self, file: BinaryIO) -> None:
        """
        Args:
            file: a new file, opened for writing. It stays open.
        """
        super().__init__()
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        given = np.frombuffer(data, dtype=np.uint8)
        if given.any():
            self._file.write(given.data)
        else:
            self._file.seek(len(given), os.SEEK_CUR)
        return len(given)


def _write_tables(stream: Any, tables: Iterable[pa.Table], features: Features) -> None:
    """Write tables as `datasets` does, with the features among the metadata."""
    writer = ArrowWriter(features=features, stream=stream)
    for table in tables:
        writer.write_table(table)
    writer.finalize(close_stream=False)


def _places_of_rows(path: Path) -> list[int]:
    """Find out where in a file of all scores the values of each row begin, in bytes."""
    places: list[int] = []
    with pa.memory_map(os.fspath(path)) as file:
        begin = file.read_buffer(1).address
        file.seek(0)
        for batch in pa.ipc.open_stream(file):
            (rows,) = batch.columns
            first = rows.buffers()[-1].address - begin + 4 * rows.offset * rows.type.list_size
            places += [first + 4 * rows.type.list_size * index for index in range(len(rows))]
    return places


_AGAIN = "Run `hf-trak attribute --all_scores` again."

SCORE_FILES = "score_files"
"""Key of the facts of a run under which its files with all scores are listed."""


def score_file_digests(scored: Dataset, directory: Path) -> dict[str, str]:
    """List the files in `directory` that hold all scores of a result.

    Args:
        scored: the result of `attribute(..., top_k=None, per="target")`.
        directory: the directory of the run.

    Returns:
        Names of the files, in the order of their rows, with their xxh3-128 digests.
    """
    paths = dict.fromkeys(Path(entry["filename"]) for entry in scored.cache_files)
    found = [path for path in paths if path.parent.resolve() == directory.resolve()]
    return {path.name: file_digest(path) for path in found if path.name.startswith("per-target-")}


def check_score_file(directory: Path, name: str, digest: str) -> Path:
    """Return the path of a file with all scores after comparing it with its digest.

    Args:
        directory: the directory of the run.
        name: name of the file.
        digest: its xxh3-128 digest.

    Raises:
        StoreError: it is missing or damaged.
    """
    path = directory / safe_name(name, "score file")
    if not path.is_file():
        raise StoreError(f"{path} is missing. Expected a file with the scores of the run. {_AGAIN}")
    if (found := file_digest(path)) != digest:
        raise StoreError(f"{path} is damaged: its checksum is {found}. Expected {digest}. {_AGAIN}")
    return path


def read_score_files(directory: Path, files: Mapping[str, str]) -> Dataset:
    """Read all scores of a run, one row per target.

    Args:
        directory: the directory of the run.
        files: names of the files with their xxh3-128 digests, see [`score_file_digests`].

    Returns:
        The column `trak_scores`, memory-mapped.

    Raises:
        StoreError: a file is missing or damaged.
    """
    parts = []
    for name, digest in files.items():
        path = check_score_file(directory, name, digest)
        try:
            parts.append(Dataset.from_file(os.fspath(path)))
        except (pa.ArrowInvalid, OSError) as error:
            raise StoreError(f"{path} is damaged ({error}). Expected an Arrow file of scores. {_AGAIN}") from error
    return concatenate_datasets(parts)


def _extremes(block: torch.Tensor, top_k: int) -> pa.Table:
    """Make top-k columns with the best and the worst targets of every training row of a block."""
    chosen = []
    for largest in (True, False):
        top = TopK(top_k, largest=largest)
        top.update(0, block.T)
        chosen.append(top)
    return _top_k_table(*chosen)


def top_k_columns(best: TopK, worst: TopK) -> Dataset:
    """Make the columns [`TOP_K_COLUMNS`] of the highest and the lowest scores, one row per target, in memory."""
    return Dataset(_top_k_table(best, worst))


def _top_k_table(best: TopK, worst: TopK) -> pa.Table:
    table = {}
    for top, (indices_name, scores_name) in ((best, TOP_K_COLUMNS[:2]), (worst, TOP_K_COLUMNS[2:])):
        scores, indices = top.result()
        table[indices_name] = fixed_size_list(indices.cpu().numpy())
        table[scores_name] = fixed_size_list(scores.cpu().numpy())
    return pa.table(table)


def _scores_table(values: np.ndarray) -> pa.Table:
    return pa.table({"trak_scores": fixed_size_list(np.ascontiguousarray(values))})


def _score_features(length: int) -> Features:
    return Features({"trak_scores": List(Value("float32"), length=length)})


def _top_k_features(length: int) -> Features:
    types = ("int64", "float32", "int64", "float32")
    return Features({name: List(Value(kind), length=length) for name, kind in zip(TOP_K_COLUMNS, types, strict=True)})
