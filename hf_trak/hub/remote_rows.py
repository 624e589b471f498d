"""The training rows of an index, read by their numbers from a dataset repo, without downloading all of it."""

import io
import logging
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from datasets import Dataset, DatasetInfo, Features
from datasets.table import table_cast
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import RevisionNotFoundError

from hf_trak.errors import ConfigMismatchError, HubAccessError, RefusedIndexError, StoreError
from hf_trak.hub.access import access_errors, hub_api
from hf_trak.hub.files import download_range
from hf_trak.hub.names import checked_repo
from hf_trak.hub.parquet_groups import read_group
from hf_trak.hub.safe_loading import load_dataset_builder
from hf_trak.identity.row_digest import RowContents
from hf_trak.runtime.progress import RowProgress
from hf_trak.store.atomic import write_bytes
from hf_trak.store.sealed import content_digest

Download = Callable[[range], bytes]

"""Returns some bytes of a file; may be called by several threads."""


class RangedFile(io.RawIOBase):
    """A file that downloads what is read of it, in one request for each read.

    Attributes:
        fetched (`int`): bytes that were downloaded.
    """

    def __init__(self, size: int, download: Download) -> None:
        """
        Args:
            size: bytes of the file.
            download: returns some of them.
        """
        super().__init__()
        self.fetched = 0
        self._size = size
        self._download = download
        self._place = 0

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def seekable(self) -> bool:
        """Say that it can be read from anywhere."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a byte, counted as in any file."""
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        return self._place

    def read(self, size: int | None = -1) -> bytes:
        """Download up to `size` bytes; all that are left by default."""
        stop = self._size if size is None or size < 0 else min(self._place + size, self._size)
        if stop <= self._place:
            return b""
        data = self._download(range(self._place, stop))
        self._place = stop
        self.fetched += len(data)
        return data


logger = logging.getLogger(__name__)


_THREADS = 8

"""Requests at a time: a row group is small, and most of the time of a request is that of its way."""


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
    """Rows of several Parquet files in order. Downloads whole row groups.

    What was downloaded is kept in a directory, file by file: the same call after an interruption goes on.

    Attributes:
        fetched (`int`): bytes that were downloaded.
    """

    def __init__(self, api: HfApi, repo_id: str, commit: str, files: Sequence[RepoFile], directory: Path) -> None:
        """
        Args:
            api: the client, for its endpoint and token.
            repo_id: the dataset repo.
            commit: the commit.
            files: the files, in the order of the rows.
            directory: where what was downloaded is kept.
        """
        self.fetched = 0
        self._api = api
        self._repo_id = repo_id
        self._commit = commit
        self._files = list(files)
        self._directory = directory

    @cached_property
    def _metadata(self) -> list[pq.FileMetaData]:
        """Read the footers of all files."""
        with ThreadPoolExecutor(_THREADS) as pool:
            return list(pool.map(self._footer, range(len(self._files))))

    @cached_property
    def _groups(self) -> list[tuple[int, int]]:
        """List the file and the number of every row group."""
        return [(place, group) for place, one in enumerate(self._metadata) for group in range(one.num_row_groups)]

    @cached_property
    def _starts(self) -> list[int]:
        """Return the first row of every row group, and the number of all rows."""
        counts = (self._metadata[place].row_group(group).num_rows for place, group in self._groups)
        return [0, *accumulate(counts)]

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def schema(self) -> pa.Schema:
        """Return the columns of the first file."""
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
        with RowProgress(count, what) as progress, ThreadPoolExecutor(_THREADS) as pool:
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
        return self._directory / f"{name}-{group:06d}.rows"

    def _kept_group(self, index: int, columns: Sequence[str] | None) -> pa.Table:
        """Read a row group that was downloaded; again, where the file is damaged or has gone."""
        data = self._kept(self._path(index, columns))
        return pq.read_table(pa.BufferReader(self._fetch_group(index, columns) if data is None else data))

    def _fetch_group(self, index: int, columns: Sequence[str] | None) -> bytes:
        place, group = self._groups[index]
        metadata = self._metadata[place]
        file = self._open(place)
        with self._errors(place):
            table = read_group(file, metadata, group, self._files[place].size, columns)
        self.fetched += file.fetched
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd")
        return self._keep(self._path(index, columns), sink.getvalue().to_pybytes())

    def _footer(self, place: int) -> pq.FileMetaData:
        path = self._directory / f"{content_digest({'file': self._files[place].path})}.footer"
        data: bytes | memoryview | None = self._kept(path)
        if data is None:
            file = self._open(place)
            with self._errors(place):
                metadata = pq.ParquetFile(file).metadata
            self.fetched += file.fetched
            metadata.write_metadata_file(sink := pa.BufferOutputStream())
            data = self._keep(path, sink.getvalue().to_pybytes())
        return pq.read_metadata(pa.BufferReader(data))

    def _checksum(self, path: Path, data: bytes | memoryview) -> bytes:
        """Hash what is kept under a name: 16 bytes."""
        digest = xxhash.xxh3_128(f"{self._repo_id}@{self._commit}/{path.name}\0".encode())
        digest.update(data)
        return digest.digest()

    def _keep(self, path: Path, data: bytes) -> bytes:
        """Write bytes to a file, their checksum first, and return them."""
        write_bytes(path, self._checksum(path, data) + data)
        return data

    def _kept(self, path: Path) -> memoryview | None:
        """Read bytes that were kept; `None` if they are not there, or are damaged or those of another file."""
        try:
            whole = memoryview(path.read_bytes())
        except OSError:
            return None
        return whole[16:] if whole[:16] == self._checksum(path, whole[16:]) else None

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
        except RefusedIndexError:
            raise  # of the server, which is named already
        except StoreError as error:
            raise HubAccessError(
                f"A row group of {self._files[place].path!r} of {self._repo_id} was refused: {error}. Expected rows "
                "as `datasets` writes them. Load the dataset as a whole, and pass it as `train_dataset=`."
            ) from error
        except pa.ArrowException as error:
            raise HubAccessError(
                f"{self._files[place].path!r} of {self._repo_id} cannot be read as Parquet "
                f"({' '.join(str(error).split())[:200]}). Expected rows as `datasets` writes them. Use another "
                "revision, or load the rows and pass them as `train_dataset=`."
            ) from error


CONVERTED = "refs/convert/parquet"

"""The branch with the Parquet files that the Hub makes of datasets in other formats."""


_NAMED = 5

_RECENT = 64


class RemoteRows:
    """Rows of a dataset repo as a map-style dataset. A row is downloaded when it is read, with its row group.

    ```python
    rows = RemoteRows("user/reviews", split="train", prepare=lambda data: data.map(tokenize, batched=True))
    attributor = TrakAttributor.from_pretrained("user/reviews-trak", train_dataset=rows)
    scored = attributor.attribute(eval_dataset, top_k=20, method=Rerank(rows=2000))
    ```

    What was downloaded is kept beside the Hub's cache, so that the same call after an interruption goes on, and the
    next one downloads what it lacks. The repo is pinned to one commit.

    Args:
        repo_id (`str`):
            The dataset repo, with Parquet files or with those that the Hub has made of it (`refs/convert/parquet`).
        config (`str`, *optional*):
            Configuration of the dataset, as in `datasets.load_dataset`.
        split (`str`, *optional*, defaults to `"train"`):
            The split.
        revision (`str`, *optional*):
            Branch, tag or commit.
        prepare (`Callable`, *optional*):
            Takes some of the rows as a `datasets.Dataset`, and returns as many as the model was featurized with, such
            as `lambda data: data.map(tokenize)`.
        columns (`Sequence[str]`, *optional*):
            Columns to download. By default all.
        token (`str` or `bool`, *optional*):
            As in `huggingface_hub`.
        cache_dir (`str` or `Path`, *optional*):
            Where downloaded rows are kept.

    Raises:
        ValueError: `repo_id` cannot be the name of a repo.
    """

    remote = True
    """Tells that rows are at hand one by one, and not as a whole."""

    def __init__(
        self,
        repo_id: str,
        config: str | None = None,
        split: str = "train",
        revision: str | None = None,
        *,
        prepare: Callable[[Dataset], Any] | None = None,
        columns: Sequence[str] | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
    ) -> None:
        self.repo_id = checked_repo(repo_id, "`repo_id`")
        self.config = config
        self.split = split
        self.revision = revision
        self.prepare = prepare
        self.columns = None if columns is None else tuple(columns)
        self.token = token
        self.cache_dir = None if cache_dir is None else Path(cache_dir)
        self._count: int | None = None
        self._contents: Callable[[], RowContents | None] | None = None
        self._recorded: str | None = None
        self._commit = ""
        self._wanted: tuple[str, ...] | None = None
        self._found: tuple[ParquetRows, Features] | None = None
        self._recent: dict[int, Any] = {}

    def expect(self, count: int, contents: Callable[[], RowContents | None], commit: str | None) -> None:
        """Say what the rows have to be.

        Args:
            count (`int`):
                Their number.
            contents (`Callable`):
                Returns their digests, or `None` without any.
            commit (`str` or `None`):
                The commit of this repo that they came from, if it is known. Without digests it has to be this one.
        """
        self._count, self._contents, self._recorded = count, contents, commit

    def restrict(self, columns: Sequence[str]) -> None:
        """Download no other columns than these from now on, unless others were asked for or `prepare` takes them.

        Args:
            columns (`Sequence[str]`):
                Columns that reach the model. Some may not exist.
        """
        if self.columns is None and self.prepare is None:
            self._wanted = tuple(columns)

    def __len__(self) -> int:
        return len(self._rows()[0]) if self._count is None else self._count

    def __getitem__(self, row: int) -> Any:
        """Return a row as `prepare` makes it, downloading its row group if need be.

        Raises:
            As [`~RemoteRows.select`].
        """
        if row not in self._recent:
            while len(self._recent) >= _RECENT:
                del self._recent[next(iter(self._recent))]
            self._recent[row] = self.select([row])[0]
        return self._recent[row]

    @property
    def fetched(self) -> int:
        """Return the bytes that this object has downloaded, of footers and row groups."""
        return 0 if self._found is None else self._found[0].fetched

    def fetch(self, rows: Sequence[int]) -> None:
        """Download what some rows need, and keep it.

        Args:
            rows (`Sequence[int]`):
                Numbers of rows.

        Raises:
            HubAccessError: a file cannot be downloaded.
            ConfigMismatchError: the repo has another number of rows than expected.
        """
        files, features = self._rows()
        files.fetch(sorted(rows), self._to_read(features))

    def select(self, rows: Sequence[int]) -> Dataset:
        """Return some rows as a dataset of their own, and compare them with what they have to be.

        Args:
            rows (`Sequence[int]`):
                Numbers of rows, ascending.

        Raises:
            HubAccessError: a file cannot be downloaded.
            ConfigMismatchError: a row has changed since features were computed from it, or the repo has another number
                of rows.
        """
        files, known = self._rows()
        table = files.read(rows, self._to_read(known))
        features = Features({name: kind for name, kind in known.items() if name in table.column_names})
        table = table_cast(table.select(list(features)), features.arrow_schema)
        found = Dataset(table, info=DatasetInfo(features=features))
        if self.prepare is not None:
            found = self.prepare(found)
        self._check(found, rows)
        return found

    def _check(self, found: Any, rows: Sequence[int]) -> None:
        """Compare rows with their digests."""
        if not isinstance(found, Dataset) or len(found) != len(rows):
            made = f"{len(found)} rows" if isinstance(found, Dataset) else f"a {type(found).__name__}"
            raise ConfigMismatchError(
                f"`prepare` made {made} of {len(rows)} rows of {self.repo_id}. Expected a `datasets.Dataset` of as "
                "many rows, in the same order. Use a function that neither drops nor adds rows."
            )
        if self._contents is None:
            return  # nothing is expected
        contents = self._contents()
        if contents is None:
            if self._commit == self._recorded:
                return
            raise ConfigMismatchError(
                f"The index has no digests of its training rows, and those of {self.repo_id}@{self._commit[:12]} may "
                f"be others. Expected the commit that it was made from, {self._recorded or 'which is unknown'}. "
                "Pass the whole dataset as `train_dataset=`, or publish the index again from rows that "
                "`load_dataset` gave."
            )
        wanted = self.columns or self._wanted or contents.columns
        lacking = [name for name in contents.columns if name in wanted and name not in found.column_names]
        if lacking:
            raise ConfigMismatchError(
                f"The rows of {self.repo_id} have the columns {found.column_names}, and the index was made from rows "
                f"with {lacking}, too. Expected rows as they were featurized. Pass "
                f"`train_dataset=RemoteRows({self.repo_id!r}, prepare=...)` with the function that made these columns."
            )
        if changed := contents.changed(found, rows):
            named = ", ".join(map(str, changed[:_NAMED])) + (", …" if len(changed) > _NAMED else "")
            raise ConfigMismatchError(
                f"{len(changed)} of {len(rows)} rows of {self.repo_id}@{self._commit[:12]} are not those that the "
                f"index was made from: training rows {named}. Expected the rows as they were featurized. Pass the "
                "`revision=` that they came from, or `prepare=` with the function that made their columns."
            )

    def _to_read(self, features: Features) -> list[str] | None:
        """Return the names of the columns to download, or `None` for all."""
        if self.columns is not None:
            return list(self.columns)
        found = [name for name in features if name in (self._wanted or ())]
        return found or None

    def _rows(self) -> tuple[ParquetRows, Features]:
        """Find the files of the split and its columns, once."""
        if self._found is None:
            with access_errors(self.repo_id, self.revision):
                self._found = self._find(hub_api(self.token))
        if self._count is not None and (count := len(self._found[0])) != self._count:
            raise ConfigMismatchError(
                f"The split {self.split!r} of {self.repo_id}@{self._commit[:12]} has {count} rows, and the "
                f"index was made from {self._count}. Expected the same rows. Name the `config=`, `split=` and "
                "`revision=` that they came from."
            )
        return self._found

    def _find(self, api: HfApi) -> tuple[ParquetRows, Features]:
        info = api.dataset_info(self.repo_id, revision=self.revision, files_metadata=True)
        builder = load_dataset_builder(self.repo_id, self.config, revision=info.sha, token=self.token)
        found = (builder.config.data_files or {}).get(self.split)
        if found is None:
            raise HubAccessError(
                f"The dataset repo {self.repo_id!r} has the splits {list(builder.config.data_files or {})}, not "
                f"{self.split!r}. Expected one of these. Pass it as `split=`."
            )
        paths: list[str] = [str(one).partition(f"{self.repo_id}@{info.sha}/")[2] for one in found]
        if builder.dataset_name is None or not all(path.endswith(".parquet") for path in paths):
            info, paths = self._converted(api, builder.config.name)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
        if missing := [path for path in paths if path not in sizes]:
            raise HubAccessError(
                f"The split {self.split!r} of the dataset repo {self.repo_id!r} has the file {missing[0]!r}, which is "
                "not in the repo. Expected Parquet files of its own. Load the dataset, and pass it as "
                "`train_dataset=`."
            )
        self._commit = str(info.sha)
        base = Path(constants.HF_HOME) / "hf_trak" / "rows" if self.cache_dir is None else self.cache_dir
        directory = base / self.repo_id.replace("/", "--") / self._commit
        files = [RepoFile(path, sizes[path]) for path in paths]
        rows = ParquetRows(api, self.repo_id, self._commit, files, directory)
        return rows, builder.info.features or Features.from_arrow_schema(rows.schema)

    def _converted(self, api: HfApi, config: str) -> tuple[Any, list[str]]:
        """Find the Parquet files that the Hub has made of a dataset in another format."""
        pattern, paths = re.compile(rf"{re.escape(config)}/{re.escape(self.split)}/\d+\.parquet"), []
        with suppress(RevisionNotFoundError):
            info = api.dataset_info(self.repo_id, revision=CONVERTED, files_metadata=True)
            paths = sorted(one.rfilename for one in info.siblings or [] if pattern.fullmatch(one.rfilename))
        if not paths:
            raise HubAccessError(
                f"The dataset repo {self.repo_id!r} has no Parquet files of the split {self.split!r}, from which rows "
                f"could be read one by one, and no branch {CONVERTED} with such files. Expected one of the two. Load "
                "the dataset, and pass it as `train_dataset=`."
            )
        return info, paths
