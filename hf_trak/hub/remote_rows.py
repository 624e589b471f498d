"""The training rows of an index, read by their numbers from a dataset repo, without downloading all of it."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetInfo, Features
from datasets.table import table_cast
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import RevisionNotFoundError

from hf_trak.errors import ConfigMismatchError, HubAccessError
from hf_trak.hub.access import access_errors, hub_api
from hf_trak.hub.names import checked_repo
from hf_trak.hub.parquet_rows import ParquetRows, RepoFile
from hf_trak.hub.safe_loading import load_dataset_builder
from hf_trak.identity.row_contents import RowContents

CONVERTED = "refs/convert/parquet"
"""The branch with the Parquet files that the Hub makes of datasets in other formats."""

_NAMED = 5
_RECENT = 64


class RemoteRows:
    """Rows of a dataset repo as a map-style dataset. A row is downloaded when it is read, with its row group.

    ```python
    rows = RemoteRows("user/reviews", split="train", prepare=lambda data: data.map(tokenize, batched=True))
    attributor = TrakAttributor.from_pretrained("user/reviews-trak", train_dataset=rows)
    scored = attributor.attribute(eval_dataset, top_k=20, rerank=2000)
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
        self.show = True
        self._count: int | None = None
        self._contents: Callable[[], RowContents | None] | None = None
        self._recorded: str | None = None
        self._commit = ""
        self._wanted: tuple[str, ...] | None = None
        self._files: ParquetRows | None = None
        self._features: Features | None = None
        self._recent: dict[int, Any] = {}

    def expect(self, count: int, contents: Callable[[], RowContents | None], commit: str | None) -> None:
        """Say what the rows have to be.

        Args:
            count (`int`):
                Their number.
            contents (`Callable`):
                Returns their digests, or `None` where there are none.
            commit (`str` or `None`):
                The commit of this repo that they came from, if it is known. Without digests it has to be this one.
        """
        self._count, self._contents, self._recorded = count, contents, commit

    def restrict(self, columns: Sequence[str]) -> None:
        """Download no other columns than these from now on, unless others were asked for or `prepare` takes them.

        Args:
            columns (`Sequence[str]`):
                Columns that reach the model, some of which may not exist.
        """
        if self.columns is None and self.prepare is None:
            self._wanted = tuple(columns)

    def __len__(self) -> int:
        return len(self._rows()) if self._count is None else self._count

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
        """Bytes that this object has downloaded, of footers and row groups."""
        return 0 if self._files is None else self._files.fetched

    def fetch(self, rows: Sequence[int]) -> None:
        """Download what some rows need, and keep it.

        Args:
            rows (`Sequence[int]`):
                Numbers of rows.

        Raises:
            HubAccessError: a file cannot be downloaded.
            ConfigMismatchError: the repo has another number of rows than expected.
        """
        files = self._rows()
        files.fetch(sorted(rows), self._to_read())

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
        files = self._rows()
        table = files.read(rows, self._to_read())
        features = Features(
            {name: kind for name, kind in self._known_features().items() if name in table.column_names}
        )
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

    def _known_features(self) -> Features:
        assert self._features is not None  # `_rows` has found the files
        return self._features

    def _to_read(self) -> list[str] | None:
        """Names of the columns to download; `None` for all."""
        if self.columns is not None:
            return list(self.columns)
        found = [name for name in self._known_features() if name in (self._wanted or ())]
        return found or None

    def _rows(self) -> ParquetRows:
        """Find the files of the split, once."""
        if self._files is None:
            api = hub_api(self.token)
            with access_errors(self.repo_id, self.revision):
                self._files, self._features = self._find(api)
        if self._count is not None and len(self._files) != self._count:
            raise ConfigMismatchError(
                f"The split {self.split!r} of {self.repo_id}@{self._commit[:12]} has {len(self._files)} rows, and the "
                f"index was made from {self._count}. Expected the same rows. Name the `config=`, `split=` and "
                "`revision=` that they came from."
            )
        return self._files

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
        rows = ParquetRows(api, self.repo_id, self._commit, files, directory, self.show)
        return rows, builder.info.features or Features.from_arrow_schema(rows.schema)

    def _converted(self, api: HfApi, config: str) -> tuple[Any, list[str]]:
        """Find the Parquet files that the Hub has made of a dataset in another format."""
        try:
            info = api.dataset_info(self.repo_id, revision=CONVERTED, files_metadata=True)
        except RevisionNotFoundError:
            info = None
        pattern = re.compile(rf"{re.escape(config)}/{re.escape(self.split)}/\d+\.parquet")
        paths = sorted(
            one.rfilename for one in (info.siblings or [] if info else []) if pattern.fullmatch(one.rfilename)
        )
        if not paths:
            raise HubAccessError(
                f"The dataset repo {self.repo_id!r} has no Parquet files of the split {self.split!r}, from which rows "
                f"could be read one by one, and no branch {CONVERTED} with such files. Expected one of the two. Load "
                "the dataset, and pass it as `train_dataset=`."
            )
        return info, paths
