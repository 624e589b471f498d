"""The files of a published index: in a repo of the Hub and its cache, or in a directory.

Only file names that the library derives from the index's configuration are ever fetched. A repo is pinned to one
commit when it is opened, so that all files belong to the same upload.
"""

import contextlib
import hashlib
import logging
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from huggingface_hub.file_download import REGEX_COMMIT_HASH
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

from hf_trak.errors import HfTrakError, HubAccessError, IncompleteStoreError, RefusedIndexError, StoreError
from hf_trak.hub.access import REPO_TYPE, access_errors, hub_api, no_directory
from hf_trak.hub.manifest import MAX_JSON_BYTES, PublishedFile
from hf_trak.hub.names import read_foreign_object, shown, too_large
from hf_trak.store.atomic import read_json
from hf_trak.store.sealed import CHECKSUM_KEY, MANIFEST_FILE, SEALED_VERSION, VERSION_KEY, content_digest
from hf_trak.store.shards import TensorSpec, metadata_of
from hf_trak.store.store import FeatureStore
from hf_trak.version import __version__

logger = logging.getLogger(__name__)


_ATTEMPTS = 4

_PAUSE_SECONDS = 1.0

_CHUNK_BYTES = 1 << 16


def download_range(api: HfApi, repo_id: str, commit: str, path: str, part: range, size: int) -> bytes:
    """Download part of a file. A connection that breaks is tried again a few times.

    Args:
        api: the client, for its endpoint and token.
        repo_id: the dataset repo.
        commit: the commit.
        path: path of the file in the repo.
        part: the bytes, at least one.
        size: bytes of the whole file.

    Raises:
        RefusedIndexError: the server answers with other bytes than those asked for: all of the file, another range, or
            more or fewer of them.
        HTTPError: the connection failed, or the server answered with an error.
    """
    for attempt in range(1, _ATTEMPTS):
        try:
            return _downloaded(api, repo_id, commit, path, part, size)
        except HfHubHTTPError:
            raise
        except HTTPError as error:
            logger.warning("Bytes %d to %d of %s: %s. Trying again.", part.start, part.stop, path, error)
            time.sleep(_PAUSE_SECONDS * attempt)
    return _downloaded(api, repo_id, commit, path, part, size)


def _downloaded(api: HfApi, repo_id: str, commit: str, path: str, part: range, size: int) -> bytes:
    url = hf_hub_url(repo_id, path, repo_type=REPO_TYPE, revision=commit, endpoint=api.endpoint)
    headers = build_hf_headers(
        token=api.token,
        library_name="hf_trak",
        library_version=__version__,
        headers={"Range": f"bytes={part.start}-{part.stop - 1}", "Accept-Encoding": "identity"},
    )
    # Errors while the answer is read must not be retried within, where it has been handed out.
    request = http_stream_backoff(
        "GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT, retry_on_exceptions=()
    )
    with request as response:
        hf_raise_for_status(response)
        found = bytearray()
        expected = f"bytes {part.start}-{part.stop - 1}/{size}"
        said = response.headers.get("Content-Range")
        if response.status_code != 206 or said != expected or response.headers.get("Content-Encoding"):
            raise _refused(path, repo_id, commit, part, f"status {response.status_code}, Content-Range {said!r:.100}")
        for chunk in response.iter_raw(_CHUNK_BYTES):
            found += chunk
            if len(found) > len(part):
                raise _refused(path, repo_id, commit, part, f"more than {len(part)} bytes")
    if len(found) != len(part):
        raise _refused(path, repo_id, commit, part, f"{len(found)} bytes")
    return bytes(found)


def _refused(path: str, repo_id: str, commit: str, part: range, found: str) -> RefusedIndexError:
    return RefusedIndexError(
        f"Part of {path!r} of {repo_id}@{commit[:12]} was refused: the server answered {found} to a request for bytes "
        f"{part.start} to {part.stop - 1}. Expected exactly these, as the Hub sends them. Where a server or proxy "
        "cannot do that, copy the whole index with `pull_index`."
    )


INDEX = "an index that hf_trak has published"

MAX_HEADER_BYTES = 64 << 10
"""Maximum length of the header of a safetensors file. Headers that the store writes have about 500 bytes."""

_HEADER_BYTES_PER_TENSOR = 128
"""Maximum bytes of an entry in the header of a safetensors file. One with a name of five digits has about 90."""


@dataclass(frozen=True)
class Bounds:
    """Bounds on the size of a file.

    Attributes:
        least: minimum bytes.
        most: maximum bytes.
        header: maximum bytes of the header of a safetensors file.
    """

    least: int
    most: int
    header: int = MAX_HEADER_BYTES

    def check(self, size: int) -> None:
        """Raise `StoreError` for another size. The message begins with "it", so that the caller can name the file."""
        if not self.least <= size <= self.most:
            raise StoreError(f"it has {size} bytes, not {self.least} to {self.most}")


def tensor_bytes(specs: Mapping[str, TensorSpec]) -> Bounds:
    """Return the bounds on a file of tensors."""
    header = MAX_HEADER_BYTES + _HEADER_BYTES_PER_TENSOR * len(specs)
    sizes = [(prod(spec.shape), [dtype.itemsize for dtype in spec.dtypes]) for spec in specs.values()]
    least, most = (sum(count * end(bytes_each) for count, bytes_each in sizes) for end in (min, max))
    return Bounds(least + 8, most + 8 + header, header)


def check_file(path: Path, bounds: Bounds) -> None:
    """Check the size of a file of tensors and the length of its header before the file is parsed.

    Args:
        path: the file on this machine.
        bounds: what it may take.

    Raises:
        StoreError: the file is refused. The message begins with "it", so that the caller can name the file.
    """
    bounds.check(path.stat().st_size)
    with path.open("rb") as file:
        length, start = int.from_bytes(file.read(8), "little"), file.read(1)
    if length > bounds.header or start != b"{":
        raise StoreError(
            f"it is not a safetensors file of an index: it begins with a header of {length} bytes that starts with "
            f"{start!r} (at most {bounds.header} bytes, starting with b'{{', were expected)"
        )


def recorded_checksum(path: Path) -> str:
    """Return the checksum that an intact file of an index, of tensors or JSON, records of itself."""
    return str((read_json(path) if path.suffix == ".json" else metadata_of(path))[CHECKSUM_KEY])


def reason_of(error: HfTrakError) -> str:
    """Cut a message of the store down to its reason, without the advice on the user's own files."""
    text = str(error)
    return (text.partition(" cannot be used: ")[2] or text).partition(". Delete this file")[0]


def sealed_object(path: Path, most: int = MAX_JSON_BYTES, **limits: int) -> dict[str, Any]:
    """Read a sealed JSON file from an untrusted source.

    Args:
        path: the file on this machine.
        most, limits: see [`IndexFiles.read_json`].

    Raises:
        StoreError: it is not such a file. The message begins with "it", so that the caller can name the file.
    """
    try:
        content = read_foreign_object(path, most, **limits)
    except ValueError as error:
        raise StoreError(str(error)) from error
    version = content.get(VERSION_KEY)
    if version != SEALED_VERSION or isinstance(version, bool):
        raise StoreError(f"it has format version {shown(version)}, and this version of hf_trak reads {SEALED_VERSION}")
    if content.get(CHECKSUM_KEY) != content_digest(content):
        raise StoreError("its content has another checksum than the one that it records")
    return content


def refused(where: str, reason: str, wanted: str = INDEX) -> RefusedIndexError:
    """Make the error for files that are refused.

    Args:
        where: the file.
        reason: a clause that says what is wrong with it.
        wanted: the files that are expected.
    """
    return RefusedIndexError(
        f"{where} was refused: {reason}. Nothing of it was executed or kept. Expected {wanted}: use another revision, "
        "or ask its publisher for a new one."
    )


class IndexFiles(ABC):
    """A place that holds the files of an index or of a bank. Paths in it have forward slashes.

    Attributes:
        name (`str`): name in messages.
        root (`Path`): directory of the fetched files.
        wanted (`str`): the files that are expected, for messages.
        listed (`dict[str, PublishedFile]`): size and checksum of files by path, from the manifest.
    """

    name: str
    root: Path

    def __init__(self, wanted: str = INDEX) -> None:
        """
        Args:
            wanted: the files that are expected, for messages.
        """
        self.wanted = wanted
        self.listed: dict[str, PublishedFile] = {}
        self._checked: set[str] = set()

    @property
    @abstractmethod
    def work_dir(self) -> Path:
        """Return the default directory for results computed with the index, outside of its files."""

    @abstractmethod
    def names(self) -> set[str] | None:
        """List the paths of all files; `None` if the index was opened from the cache alone."""

    @abstractmethod
    def size(self, path: str) -> int | None:
        """Return the bytes of a file without fetching it; `None` if it does not exist, or the size is unknown."""

    @abstractmethod
    def fetch(self, path: str) -> Path:
        """Return the file on this machine, downloading it if need be."""

    @abstractmethod
    def is_local(self, path: str) -> bool:
        """Tell whether the file is on this machine as a whole."""

    @abstractmethod
    def fetch_range(self, path: str, start: int, stop: int) -> bytes:
        """Return the bytes `start … stop - 1` of a file, downloading no others, and keep nothing."""

    @abstractmethod
    def discard(self, path: str) -> None:
        """Remove the local copy of a file that turned out to be unusable."""

    def check_size(self, path: str, bounds: Bounds) -> None:
        """Compare the size of a file with its bounds and with the manifest. Fetches nothing.

        Args:
            path: the file.
            bounds: what it may take.

        Raises:
            StoreError: it is missing, or has another size. The message begins with "it".
        """
        size, entry = self.size(path), self.listed.get(path)
        if size is None and self.names() is not None:
            raise StoreError("it is missing" if entry is None else "it is missing, although the manifest lists it")
        for found in (size, None if entry is None else entry.size):
            if found is not None:
                bounds.check(found)
        if size is not None and entry is not None and size != entry.size:
            raise StoreError(f"it has {size} bytes, not {entry.size}, which the manifest says")

    def fetch_tensors(self, path: str, bounds: Bounds) -> Path:
        """Return a file of tensors, downloading it if need be. Its size and checksum are compared once.

        Args:
            path: the file.
            bounds: what it may take.

        Raises:
            StoreError: its size or header is another one, or its checksum is not that of the manifest. The message
                begins with "it".
            HubAccessError: it cannot be fetched.
        """
        local = self.fetch_bounded(path, bounds)
        if path not in self._checked:
            check_file(local, bounds)
            self.check_recorded(path, metadata_of(local).get(CHECKSUM_KEY))
            self._checked.add(path)
        return local

    def read_json(self, path: str, most: int = MAX_JSON_BYTES, **limits: int) -> dict[str, Any]:
        """Fetch a sealed JSON file, and check its size, its version and its checksum.

        Args:
            path: the file.
            most: maximum bytes.
            limits: `bytes_per_value` and `max_digits` of [`~hf_trak.hub.names.read_foreign_object`].

        Raises:
            StoreError: it is not such a file. The message begins with "it".
            HubAccessError: it cannot be fetched.
        """
        if (size := self.size(path)) is not None and size > most:
            raise StoreError(too_large(size, most))
        content = sealed_object(self.fetch_bounded(path, Bounds(2, most)), most, **limits)
        self.check_recorded(path, content[CHECKSUM_KEY])
        return content

    def check_recorded(self, path: str, found: Any) -> None:
        """Compare the checksum that a file records of itself with that of the manifest.

        Raises:
            StoreError: they differ.
        """
        entry = self.listed.get(path)
        if entry is not None and found != entry.checksum:
            raise StoreError(f"its checksum is {found}, the manifest says {entry.checksum}")

    def fetch_bounded(self, path: str, bounds: Bounds) -> Path:
        """Return a file of bounded size, downloading it if need be. Raises as [`check_size`]."""
        if path not in self._checked and not (self.is_local(path) and self.size(path) is None):
            self.check_size(path, bounds)
        return self.fetch(path)

    def refused(self, where: str, reason: str) -> RefusedIndexError:
        """Make the error for files that are refused."""
        return refused(where, reason, self.wanted)

    @contextlib.contextmanager
    def refused_if_damaged(self, *paths: str) -> Iterator[None]:
        """Turn a `StoreError` into a refusal of the first file, and discard all, so that they are downloaded again.

        Raises:
            RefusedIndexError: a file is damaged, or of another format.
        """
        try:
            yield
        except IncompleteStoreError:
            raise
        except StoreError as error:
            for path in paths:
                self._checked.discard(path)
                self.discard(path)
            if isinstance(error, RefusedIndexError):
                raise
            raise self.refused(f"{paths[0]} of {self.name}", reason_of(error)) from error


class HubFiles(IndexFiles):
    """The files of one commit of a dataset repo, downloaded into the Hub's cache when they are fetched."""

    def __init__(
        self,
        repo_id: str,
        first: str,
        revision: str | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        wanted: str = INDEX,
    ) -> None:
        """
        Args:
            repo_id: the dataset repo.
            first: a JSON file that is fetched at once; in the cache, it tells the commit of a revision.
            revision: a branch, tag or commit; `None` is the main branch.
            token: as in `huggingface_hub`: `None` uses that of the login, `False` sends none.
            local_files_only: use only what is in the cache, as the environment's `HF_HUB_OFFLINE` does.
            wanted: the files that are expected, for messages.

        Raises:
            RefusedIndexError: `first` is larger than a JSON file may be.
            HubAccessError: the repo, the revision or `first` does not exist or cannot be reached.
        """
        super().__init__(wanted)
        self.repo_id = repo_id
        self._api = hub_api(token)
        wanted = revision or "main"
        with access_errors(repo_id, revision):
            cached = try_to_load_from_cache(repo_id, first, revision=wanted, repo_type=REPO_TYPE)
        self._offline = local_files_only or constants.HF_HUB_OFFLINE
        self._sizes: dict[str, int] | None = None
        # A commit never changes, so one that is in the cache is used without asking the Hub.
        if isinstance(cached, str) and (self._offline or REGEX_COMMIT_HASH.fullmatch(wanted)):
            self._pin(Path(cached).parent.name, Path(cached).parent)
            return
        if self._offline:
            raise HubAccessError(
                f"{first!r} of the dataset repo {repo_id!r} at revision {wanted!r} is not in the cache, and offline "
                f"mode (`local_files_only=True` or HF_HUB_OFFLINE) is on{no_directory(repo_id)}. Load the index once "
                "with a connection, or pass the path of a copy."
            )
        with access_errors(repo_id, revision):
            commit, self._sizes = self._list(wanted)
            if (size := self._sizes.get(first, 0)) > MAX_JSON_BYTES:
                raise self.refused(f"{first} of {repo_id}", too_large(size, MAX_JSON_BYTES))
            path = Path(self._download(first, wanted))
        if path.parent.name != commit:
            raise HubAccessError(
                f"The dataset repo {repo_id!r} changed at revision {wanted!r} while it was opened ({commit} "
                f"became {path.parent.name}). Expected one commit. Load it again."
            )
        self._pin(commit, path.parent)

    def _pin(self, commit: str, root: Path) -> None:
        self.commit, self.root, self.name = commit, root, f"{self.repo_id}@{commit[:12]}"

    @property
    def work_dir(self) -> Path:
        """Return the default directory for results computed with this commit."""
        return Path(constants.HF_HOME) / "hf_trak" / self.repo_id.replace("/", "--") / self.commit

    def names(self) -> set[str] | None:
        return None if self._sizes is None else set(self._sizes)

    def size(self, path: str) -> int | None:
        local = self.root / path
        if local.exists():
            return local.stat().st_size
        if self._sizes is None and not self._offline:  # opened from the cache
            with access_errors(self.repo_id, self.commit):
                _, self._sizes = self._list(self.commit)
        return (self._sizes or {}).get(path)

    def fetch(self, path: str) -> Path:
        local = self.root / path
        if local.exists():
            return local
        self._require_connection(path)
        with access_errors(self.repo_id, self.commit):
            return Path(self._download(path, self.commit))

    def is_local(self, path: str) -> bool:
        return (self.root / path).exists()

    def fetch_range(self, path: str, start: int, stop: int) -> bytes:
        self._require_connection(path)
        size = self.size(path)
        if size is None or not 0 <= start < stop <= size:
            raise IncompleteStoreError(
                f"{path!r} of {self.name} has {size} bytes, and bytes {start} to {stop - 1} were asked for. Expected "
                "a complete index. Load it again, or use another revision."
            )
        with access_errors(self.repo_id, self.commit):
            return download_range(self._api, self.repo_id, self.commit, path, range(start, stop), size)

    def _require_connection(self, path: str) -> None:
        if self._offline:
            raise HubAccessError(
                f"{path!r} of {self.name} is not in the cache, and offline mode (`local_files_only=True` or "
                "HF_HUB_OFFLINE) is on. Use it once with a connection, or fetch everything with `pull_index`."
            )

    def discard(self, path: str) -> None:
        local = self.root / path
        if local.is_symlink():  # to a blob of the cache, which the next download would otherwise reuse
            (local.parent / local.readlink()).unlink(missing_ok=True)
        local.unlink(missing_ok=True)

    def _list(self, revision: str) -> tuple[str, dict[str, int]]:
        info = self._api.dataset_info(self.repo_id, revision=revision, files_metadata=True)
        if info.sha is None:
            raise HubAccessError(f"The Hub names no commit for {self.repo_id!r} at revision {revision!r}. Try again.")
        return info.sha, {file.rfilename: file.size or 0 for file in info.siblings or []}

    def _download(self, path: str, revision: str) -> str:
        return str(self._api.hf_hub_download(self.repo_id, path, repo_type=REPO_TYPE, revision=revision))


class LocalFiles(IndexFiles):
    """The files of an index in a directory: a clone, a directory that `pull_index` wrote, or a snapshot of the cache.

    The files may come from anybody. They are only read, and never through a link, except for the links that a
    snapshot of the Hub's cache has to the blobs beside it.
    """

    def __init__(self, directory: Path, wanted: str = INDEX) -> None:
        """
        Args:
            directory: the directory, which is only read.
            wanted: the files that are expected, for messages.
        """
        super().__init__(wanted)
        self.root = directory
        self.name = str(directory)

    @property
    def work_dir(self) -> Path:
        """Return the default directory for results, named by the directory and a digest of the two JSON files.

        The JSON files hold the checksums of all others, so other content has another directory.

        Raises:
            IncompleteStoreError: one of the JSON files is missing.
        """
        digest = hashlib.sha256()
        for name in (FeatureStore.CONFIG_FILE, MANIFEST_FILE):
            with self.fetch(name).open("rb") as file:
                digest.update(file.read(MAX_JSON_BYTES + 1))  # larger files are refused
        folder = re.sub(r"[^A-Za-z0-9_.-]", "_", self.root.resolve().name).lstrip(".")[:100] or "index"
        return Path(constants.HF_HOME) / "hf_trak" / folder / digest.hexdigest()[:32]

    def names(self) -> set[str] | None:
        """List the paths of all files. Raises `RefusedIndexError` if one is a link."""
        found = set()
        for directory, folders, files in os.walk(self.root):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in (*folders, *files):
                self._refuse_link(Path(directory, name))
            found |= {Path(directory, name).relative_to(self.root).as_posix() for name in files}
        return found

    def size(self, path: str) -> int | None:
        local = self.root / path
        return local.stat().st_size if local.is_file() else None

    def fetch(self, path: str) -> Path:
        local = self.root / path
        for part in (Path(path), *list(Path(path).parents)[:-1]):
            self._refuse_link(self.root / part)
        if not local.is_file():
            raise IncompleteStoreError(
                f"{local} is missing. Expected a complete copy of an index. Pull or clone it again."
            )
        return local

    def is_local(self, path: str) -> bool:
        """Return `True`: a file that is missing here is nowhere."""
        return True

    def fetch_range(self, path: str, start: int, stop: int) -> bytes:
        with self.fetch(path).open("rb") as file:
            file.seek(start)
            found = file.read(stop - start)
        if len(found) != stop - start:
            raise IncompleteStoreError(
                f"{self.root / path} ends before byte {stop}. Expected a complete copy of an index. Pull or clone it "
                "again."
            )
        return found

    def discard(self, path: str) -> None:
        """Do nothing: the user's own files stay."""

    def _refuse_link(self, path: Path) -> None:
        if not path.is_symlink():
            return
        root = self.root.resolve()
        blobs = root.parents[1] / "blobs" if root.parent.name == "snapshots" else None
        if blobs is None or blobs.is_symlink() or path.resolve().parent != blobs:
            raise RefusedIndexError(
                f"{path} was refused: it is a link to {os.readlink(path)!r}. Expected regular files in the copy of an "
                "index. Remove the link, or pull the index again."
            )
