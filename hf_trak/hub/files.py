"""The files of a published index: on the Hub and in its cache, or in a directory.

Only names that the library itself derives from the index's configuration are ever asked for. A repo is pinned to one
commit when it is opened, so that all files are of one upload.
"""

import contextlib
import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import REGEX_COMMIT_HASH

from hf_trak.errors import HfTrakError, HubAccessError, IncompleteStoreError, RefusedIndexError
from hf_trak.hub.manifest import MANIFEST_FILE, MAX_JSON_BYTES
from hf_trak.hub.redaction import address_without_secrets, without_secrets
from hf_trak.store.store import FeatureStore
from hf_trak.version import __version__

logger = logging.getLogger(__name__)

REPO_TYPE = "dataset"
DEFAULT_REVISION = "main"


class IndexFiles(Protocol):
    """Where the files of an index come from."""

    @property
    def name(self) -> str:
        """What to call the index in messages."""

    @property
    def root(self) -> Path:
        """The directory in which fetched files lie."""

    @property
    def work_dir(self) -> Path:
        """Where results computed with the index are kept unless the user names a directory: never among its files."""

    def names(self) -> set[str] | None:
        """Every file of the index, by its path with forward slashes; `None` if it was opened from the cache alone."""

    def size(self, path: str) -> int | None:
        """Bytes of a file, without fetching it; `None` if it is not there, or not known."""

    def fetch(self, path: str) -> Path:
        """The file on this machine, downloaded if need be."""

    def discard(self, path: str) -> None:
        """Forget the local copy of a file that turned out to be unusable."""


def hub_api(token: str | bool | None) -> HfApi:
    """The client for all calls. The token is passed on to it and kept nowhere else; it sends no telemetry."""
    return HfApi(token=token, library_name="hf_trak", library_version=__version__)


class HubFiles:
    """The files of one commit of a dataset repo, downloaded into the Hub's cache when they are asked for."""

    def __init__(
        self,
        repo_id: str,
        first: str,
        revision: str | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        check_size: Callable[[str, int], None] | None = None,
    ) -> None:
        """
        Args:
            repo_id: the dataset repo.
            first: the file by which a revision is found again offline; fetched at once.
            revision: a branch, tag or commit; `None` is the main branch.
            token: as in `huggingface_hub`: `None` takes the one of the login, `False` sends none.
            local_files_only: use what is in the cache and nothing else, as does the environment's `HF_HUB_OFFLINE`.
            check_size: called with `first` and its size before it is downloaded, to refuse it.

        Raises:
            HubAccessError: repo, revision or `first` cannot be had.
        """
        self.repo_id = repo_id
        self._api = hub_api(token)
        wanted = revision or DEFAULT_REVISION
        with access_errors(repo_id, revision):
            # A commit never changes: what is in the cache needs no question to the Hub.
            cached = try_to_load_from_cache(repo_id, first, revision=wanted, repo_type=REPO_TYPE)
        self._offline = local_files_only or constants.HF_HUB_OFFLINE
        self._sizes: dict[str, int] | None = None
        if isinstance(cached, str) and (self._offline or REGEX_COMMIT_HASH.fullmatch(wanted)):
            self.commit = Path(cached).parent.name
            self.root = Path(cached).parent
            return
        if self._offline:
            raise HubAccessError(
                f"{first!r} of the dataset repo {repo_id!r} at revision {wanted!r} is not in the cache, and offline "
                "mode (`local_files_only=True` or HF_HUB_OFFLINE) is on. Load the index once with a connection, or "
                "pass the path of a copy."
            )
        with access_errors(repo_id, revision):
            self.commit, self._sizes = self._list(wanted)
            if check_size is not None and first in self._sizes:
                check_size(first, self._sizes[first])
            path = Path(self._download(first, wanted))
        if path.parent.name != self.commit:
            raise HubAccessError(
                f"The dataset repo {repo_id!r} changed at revision {wanted!r} while it was opened ({self.commit} "
                f"became {path.parent.name}). Expected one commit. Load it again."
            )
        self.root = path.parent

    @property
    def name(self) -> str:
        return f"{self.repo_id}@{self.commit[:12]}"

    @property
    def work_dir(self) -> Path:
        """Where results computed with this commit are kept unless the user names a directory."""
        return Path(constants.HF_HOME) / "hf_trak" / self.repo_id.replace("/", "--") / self.commit

    def names(self) -> set[str] | None:
        return None if self._sizes is None else set(self._sizes)

    def size(self, path: str) -> int | None:
        local = self.root / path
        if local.exists():
            return local.stat().st_size
        return (self._sizes or {}).get(path)

    def fetch(self, path: str) -> Path:
        local = self.root / path
        if local.exists():
            return local
        if self._offline:
            raise HubAccessError(
                f"{path!r} of {self.name} is not in the cache, and offline mode (`local_files_only=True` or "
                "HF_HUB_OFFLINE) is on. Use it once with a connection, or fetch everything with `pull_index`."
            )
        with access_errors(self.repo_id, self.commit):
            return Path(self._download(path, self.commit))

    def discard(self, path: str) -> None:
        local = self.root / path
        if local.is_symlink():  # to a blob of the cache, which would otherwise be taken again
            (local.parent / local.readlink()).unlink(missing_ok=True)
        local.unlink(missing_ok=True)

    def _list(self, revision: str) -> tuple[str, dict[str, int]]:
        info = self._api.dataset_info(self.repo_id, revision=revision, files_metadata=True)
        if info.sha is None:
            raise HubAccessError(f"The Hub names no commit for {self.repo_id!r} at revision {revision!r}. Try again.")
        return info.sha, {file.rfilename: file.size or 0 for file in info.siblings or []}

    def _download(self, path: str, revision: str) -> str:
        return str(self._api.hf_hub_download(self.repo_id, path, repo_type=REPO_TYPE, revision=revision))


class LocalFiles:
    """The files of an index in a directory: a clone, what `pull_index` wrote, or a snapshot in the Hub's cache.

    They are somebody else's: they are only read, and none is reached through a link, except those from a snapshot in a
    Hub's cache to the blobs beside it.
    """

    def __init__(self, directory: Path) -> None:
        """
        Args:
            directory: it is only read.
        """
        self.root = directory

    @property
    def name(self) -> str:
        return str(self.root)

    @property
    def work_dir(self) -> Path:
        """By the name of the directory and a digest of its JSON files, which hold the checksums of all others.

        Raises:
            IncompleteStoreError: one of them is missing.
        """
        digest = hashlib.sha256()
        for name in (FeatureStore.CONFIG_FILE, MANIFEST_FILE):
            with self.fetch(name).open("rb") as file:
                digest.update(file.read(MAX_JSON_BYTES + 1))  # a longer one is refused
        folder = re.sub(r"[^A-Za-z0-9_.-]", "_", self.root.resolve().name).lstrip(".")[:100] or "index"
        return Path(constants.HF_HOME) / "hf_trak" / folder / digest.hexdigest()[:32]

    def names(self) -> set[str] | None:
        """Every file. Raises `RefusedIndexError` if a link is among them."""
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
                f"{local} is missing. Expected a whole copy of an index. Pull or clone it again."
            )
        return local

    def discard(self, path: str) -> None:
        """Nothing: the user's own files stay."""

    def _refuse_link(self, path: Path) -> None:
        if not path.is_symlink():
            return
        root = self.root.resolve()
        blobs = root.parents[1] / "blobs" if root.parent.name == "snapshots" else None
        if blobs is None or blobs.is_symlink() or path.resolve().parent != blobs:
            raise RefusedIndexError(
                f"{path} was refused: it is a link to {os.readlink(path)!r}. Expected files alone in an index that "
                "comes from somebody else. Remove the link, or pull the index again."
            )


@contextlib.contextmanager
def access_errors(repo_id: str, revision: str | None, repo_type: str = REPO_TYPE) -> Iterator[None]:
    """Turn what can go wrong between here and the Hub into a `HubAccessError` that says what to do.

    Raises:
        HubAccessError: a name is none of a repo; repo, revision or file does not exist or is not granted; the Hub
            cannot be reached; or a transfer broke off.
    """
    where = f"The {repo_type} repo {repo_id!r}" + (f" at revision {revision!r}" if revision else "")
    try:
        yield
    except HFValidationError as error:
        raise HubAccessError(
            f"{repo_id!r} is neither a directory nor the name of a repo ({error}). Expected a path that exists, or "
            "'user/name'."
        ) from error
    except GatedRepoError as error:
        raise HubAccessError(
            f"{where} is gated, and the token has not been granted access. Ask for access on its page, or pass the "
            "`token` of somebody who has it."
        ) from error
    except RepositoryNotFoundError as error:
        raise HubAccessError(
            f"{where} does not exist at {_endpoint()}, or is private and cannot be seen with the token in use. "
            "Check the name, and pass a `token` (or run `hf auth login`) that has access."
        ) from error
    except RevisionNotFoundError as error:
        raise HubAccessError(
            f"{where} does not exist: the repo is there, but this revision is not. Expected one of its branches, tags "
            "or commits."
        ) from error
    except (OfflineModeIsEnabled, LocalEntryNotFoundError) as error:
        raise _not_cached(where, error) from error
    except EntryNotFoundError as error:
        raise HubAccessError(f"{where} lacks a file that is needed ({_brief(error)}). Publish it again.") from error
    except HfHubHTTPError as error:
        raise HubAccessError(f"{where}: the Hub answered {_brief(error)}. {_remedy(error)}") from error
    except LocalTokenNotFoundError as error:
        raise HubAccessError(f"{where} needs a token: pass `token`, or run `hf auth login`.") from error
    except HTTPError as error:  # the transport: refused, reset, timed out
        raise HubAccessError(
            f"{where}: the connection to {_endpoint()} failed ({type(error).__name__}: {_brief(error)}). Try "
            "again; what was transferred is kept. `local_files_only=True` works with what is in the cache."
        ) from error
    except OSError as error:
        if isinstance(error, HubAccessError | FileNotFoundError | PermissionError):
            raise
        if constants.HF_HUB_OFFLINE and isinstance(error, ConnectionError):  # as `datasets` says that it is offline
            raise _not_cached(where, error) from error
        raise HubAccessError(
            f"{where}: a transfer broke off ({_brief(error)}). The incomplete file was not kept. Try again."
        ) from error
    except RuntimeError as error:  # how an upload's error arrives
        if isinstance(error, HfTrakError) or not isinstance(error.__cause__, HTTPError | OSError):
            raise
        raise HubAccessError(
            f"{where}: {_brief(error)} ({_brief(error.__cause__)}). Try again; what arrived is not sent again."
        ) from error


def _not_cached(where: str, error: BaseException) -> HubAccessError:
    mode = "offline mode (HF_HUB_OFFLINE) is on" if constants.HF_HUB_OFFLINE else "it could not be reached"
    return HubAccessError(
        f"{where} is not in the cache, or not whole, and {mode} ({_brief(error)}). Connect, unset HF_HUB_OFFLINE, or "
        "pass the path of a copy."
    )


def _remedy(error: HfHubHTTPError) -> str:
    status = error.response.status_code
    if status in (401, 403):
        return "Check that the token is valid and has the right to do this."
    if status in (409, 412):
        return "The repo has changed in the meantime, and nothing of that was overwritten. Run the same call again."
    return "Try again; what was transferred is not sent again."


def _brief(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return without_secrets(" ".join(lines))[:300] or type(error).__name__


def _endpoint() -> str:
    return address_without_secrets(constants.ENDPOINT)
