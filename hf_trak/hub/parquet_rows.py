"""Rows of Parquet files of a dataset repo, read row group by row group, and kept in a directory."""

import logging
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import HfApi

from hf_trak.errors import HubAccessError
from hf_trak.hub.access import access_errors
from hf_trak.hub.ranged_file import RangedFile
from hf_trak.hub.ranges import download_range
from hf_trak.runtime.progress import RowProgress
from hf_trak.store.atomic import atomic_path
from hf_trak.store.sealed import content_digest

logger = logging.getLogger(__name__)

_THREADS = 8
"""Requests at a time: a row group is small, and most of the time of a request is that of its way."""

_MAX_GROUP_BYTES = 4 << 30
"""Maximum bytes of a row group when it is decoded, by its own account. Those that `datasets` writes have megabytes."""


@dataclass(frozen=True)
class RepoFile:
    """A Parquet file of a repo.

    Attributes:
        path: its path in the repo.
        size: its bytes.
    """

    path: str
    size: int


class ParquetRows:
    """The rows of some Parquet files, one after the other, of which a row group is the least that is downloaded.

    What was downloaded is kept in a directory, file by file: the same call after an interruption goes on.

    Attributes:
        fetched (`int`): bytes that were downloaded.
    """

    def __init__(
        self, api: HfApi, repo_id: str, commit: str, files: Sequence[RepoFile], directory: Path, show: bool = True
    ) -> None:
        """
        Args:
            api: the client, for its endpoint and token.
            repo_id: the dataset repo.
            commit: the commit.
            files: the files, in the order of the rows.
            directory: where what was downloaded is kept.
            show: whether to show a progress bar.
        """
        self.fetched = 0
        self._api = api
        self._repo_id = repo_id
        self._commit = commit
        self._files = list(files)
        self._directory = directory
        self._show = show

    @cached_property
    def _metadata(self) -> list[pq.FileMetaData]:
        """The footers of all files."""
        with ThreadPoolExecutor(_THREADS) as pool:
            return list(pool.map(self._footer, range(len(self._files))))

    @cached_property
    def _groups(self) -> list[tuple[int, int]]:
        """The file and the number of every row group."""
        return [(place, group) for place, one in enumerate(self._metadata) for group in range(one.num_row_groups)]

    @cached_property
    def _starts(self) -> list[int]:
        """The first row of every row group, and the number of all rows."""
        counts = (self._metadata[place].row_group(group).num_rows for place, group in self._groups)
        return [0, *accumulate(counts)]

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def schema(self) -> pa.Schema:
        """The columns of the first file."""
        return self._metadata[0].schema.to_arrow_schema()

    def fetch(self, rows: Sequence[int], columns: Sequence[str] | None = None) -> None:
        """Download the row groups of some rows, unless they are there.

        Args:
            rows: numbers of rows.
            columns: names of the columns; `None` for all.

        Raises:
            HubAccessError: a file cannot be downloaded, or is no Parquet file.
            RefusedIndexError: the server sends other bytes than those asked for.
        """
        wanted = sorted({self._group_of(row) for row in rows})
        missing = [index for index in wanted if not self._path(index, columns).exists()]
        if not missing:
            return
        before = self.fetched
        what = f"rows of {self._repo_id}"
        count = sum(self._starts[index + 1] - self._starts[index] for index in missing)
        with RowProgress(count, what, show=self._show) as progress, ThreadPoolExecutor(_THREADS) as pool:
            tasks = [pool.submit(self._fetch_group, index, columns) for index in missing]
            try:
                for index, task in zip(missing, tasks, strict=True):
                    task.result()
                    progress.update(self._starts[index + 1] - self._starts[index])
            finally:
                for task in tasks:
                    task.cancel()
        logger.info(
            "Downloaded %d row groups with %d rows of %s, %.1f MiB.",
            len(missing), count, self._repo_id, (self.fetched - before) / 2**20,
        )  # fmt: skip

    def read(self, rows: Sequence[int], columns: Sequence[str] | None = None) -> pa.Table:
        """Read rows, and download what is not there.

        Args:
            rows: numbers of rows, ascending.
            columns: names of the columns; `None` for all.

        Raises:
            As [`~ParquetRows.fetch`].
        """
        self.fetch(rows, columns)
        parts, numbers = [], np.array(rows, dtype=np.int64)
        for index in sorted({self._group_of(row) for row in rows}):
            start, stop = self._starts[index], self._starts[index + 1]
            inside = numbers[(numbers >= start) & (numbers < stop)] - start
            parts.append(self._kept_group(index, columns).take(pa.array(inside)))
        return pa.concat_tables(parts, promote_options="permissive")

    def _group_of(self, row: int) -> int:
        if not 0 <= row < len(self):
            raise IndexError(f"Row {row} does not exist. Expected a number from 0 to {len(self) - 1}.")
        return bisect_right(self._starts, row) - 1

    def _path(self, index: int, columns: Sequence[str] | None) -> Path:
        place, group = self._groups[index]
        name = content_digest({"file": self._files[place].path, "columns": None if columns is None else [*columns]})
        return self._directory / f"{name[:16]}-{group:06d}.parquet"

    def _kept_group(self, index: int, columns: Sequence[str] | None) -> pa.Table:
        """Read a row group that was downloaded; again, where the file is damaged or has gone."""
        path = self._path(index, columns)
        try:
            return pq.read_table(path)
        except (pa.ArrowInvalid, OSError):
            self._fetch_group(index, columns)
            return pq.read_table(path)

    def _fetch_group(self, index: int, columns: Sequence[str] | None) -> None:
        place, group = self._groups[index]
        metadata = self._metadata[place]
        if (size := metadata.row_group(group).total_byte_size) > _MAX_GROUP_BYTES:
            raise HubAccessError(
                f"Row group {group} of {self._files[place].path!r} of {self._repo_id} has {size} bytes. Expected at "
                f"most {_MAX_GROUP_BYTES}, of which memory has to hold some at a time. Load the dataset as a whole, "
                "and pass it as `train_dataset=`."
            )
        file = self._open(place)
        with self._errors(place):
            names = None if columns is None else [*columns]
            table = pq.ParquetFile(file, metadata=metadata, pre_buffer=True).read_row_group(group, columns=names)
        self.fetched += file.fetched
        with atomic_path(self._path(index, columns)) as temporary:
            pq.write_table(table, temporary, compression="zstd")

    def _footer(self, place: int) -> pq.FileMetaData:
        path = self._directory / f"{content_digest({'file': self._files[place].path})[:16]}.footer"
        try:
            return pq.read_metadata(path)
        except (pa.ArrowInvalid, OSError):  # not there, or damaged
            file = self._open(place)
            with self._errors(place):
                metadata = pq.ParquetFile(file).metadata
            self.fetched += file.fetched
            with atomic_path(path) as temporary:
                metadata.write_metadata_file(temporary)
            return metadata

    def _open(self, place: int) -> RangedFile:
        one = self._files[place]

        def download(part: range) -> bytes:
            return download_range(self._api, self._repo_id, self._commit, one.path, part, one.size)

        return RangedFile(one.size, download)

    @contextmanager
    def _errors(self, place: int) -> Iterator[None]:
        """Turn errors of a download, and of a file that is no Parquet file, into errors that name the file."""
        try:
            with access_errors(self._repo_id, self._commit):
                yield
        except pa.ArrowException as error:
            raise HubAccessError(
                f"{self._files[place].path!r} of {self._repo_id} cannot be read as Parquet "
                f"({' '.join(str(error).split())[:200]}). Expected rows as `datasets` writes them. Use another "
                "revision, or load the rows and pass them as `train_dataset=`."
            ) from error
