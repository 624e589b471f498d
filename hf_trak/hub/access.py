"""Access to the Hub: one client for all calls, and every failure to reach the Hub as a `HubAccessError`."""

import contextlib
import os
import re
from collections.abc import Iterator

from huggingface_hub import HfApi, constants, errors

from hf_trak.errors import HfTrakError, HubAccessError
from hf_trak.version import __version__

_HIDDEN = "***"

_USER = re.compile(r"(?<=://)[^\s'\"<>?#]*@")

_QUERY = re.compile(r"(?P<address>[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>?#]*)[?#][^\s'\"<>]*")

_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{8,}")


def without_secrets(text: str) -> str:
    """Replace user names, passwords and queries in the addresses of a text, and all tokens of the Hub, by `***`."""
    text = _USER.sub(f"{_HIDDEN}@", text)
    text = _QUERY.sub(lambda match: f"{match['address']}?{_HIDDEN}", text)
    return _TOKEN.sub(f"hf_{_HIDDEN}", text)


def address_without_secrets(address: str) -> str:
    """Replace everything before the last `@` of an address, and its query, by `***`.

    Unlike in [`without_secrets`], the address may lack its scheme, as in an environment variable.
    """
    scheme, mark, rest = address.rpartition("://")
    _, at, place = rest.rpartition("@")
    host, *query = re.split(r"[?#]", place, maxsplit=1)
    return without_secrets(f"{scheme}{mark}{_HIDDEN + '@' if at else ''}{host}{'?' + _HIDDEN if query else ''}")


REPO_TYPE = "dataset"

"""Type of the repos that hold indexes and scores."""


def hub_api(token: str | bool | None) -> HfApi:
    """Make the client for calls to the Hub. It keeps the token in memory only and sends no telemetry."""
    return HfApi(token=token, library_name="hf_trak", library_version=__version__)


@contextlib.contextmanager
def access_errors(repo_id: str, revision: str | None, repo_type: str = REPO_TYPE) -> Iterator[None]:
    """Turn errors of `huggingface_hub` and of the connection into a `HubAccessError` that says what to do.

    Args:
        repo_id: name of the repo, for messages.
        revision: branch, tag or commit, for messages; `None` is the main branch.
        repo_type: `"dataset"` or `"model"`, for messages.

    Raises:
        HubAccessError: the name is not that of a repo; the repo, revision or file does not exist or access to it is
            refused; the Hub cannot be reached; or a transfer was interrupted.
    """
    where = f"The {repo_type} repo {repo_id!r}" + (f" at revision {revision!r}" if revision else "")
    try:
        yield
    except errors.HFValidationError as error:
        raise HubAccessError(
            f"{repo_id!r} is neither a directory nor the name of a repo ({error}). Expected a path that exists, or "
            "'user/name'."
        ) from error
    except errors.GatedRepoError as error:
        raise HubAccessError(
            f"{where} is gated, and the token has not been granted access. Ask for access on the page of the repo, or "
            "pass a `token` that has it."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise HubAccessError(
            f"{where} does not exist at {_endpoint()}, or is private and not visible with the token in use. "
            "Check the name, and pass a `token` (or run `hf auth login`) that has access."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubAccessError(
            f"{where} does not exist: the repo is there, but this revision is not. Expected one of its branches, tags "
            "or commits."
        ) from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        raise _not_cached(where, repo_id, error) from error
    except errors.EntryNotFoundError as error:
        raise HubAccessError(
            f"{where} lacks a file that is needed ({_one_line(error)}). Publish it again, or use another revision."
        ) from error
    except errors.HfHubHTTPError as error:
        raise HubAccessError(f"{where}: the Hub answered {_one_line(error)}. {_remedy(error)}") from error
    except errors.LocalTokenNotFoundError as error:
        raise HubAccessError(f"{where} needs a token: pass `token`, or run `hf auth login`.") from error
    except errors.HTTPError as error:  # the connection was refused, was reset or timed out
        raise HubAccessError(
            f"{where}: the connection to {_endpoint()} failed ({type(error).__name__}: "
            f"{_one_line(error)}){no_directory(repo_id)}. Try again; what was transferred is kept. "
            "`local_files_only=True` works with what is in the cache."
        ) from error
    except OSError as error:
        if isinstance(error, HubAccessError | FileNotFoundError | PermissionError):
            raise
        if constants.HF_HUB_OFFLINE and isinstance(error, ConnectionError):  # raised by `datasets` in offline mode
            raise _not_cached(where, repo_id, error) from error
        raise HubAccessError(
            f"{where}: a transfer was interrupted ({_one_line(error)}). The incomplete file was not kept. Try again."
        ) from error
    except RuntimeError as error:  # uploads wrap the error of the connection
        if isinstance(error, HfTrakError) or not isinstance(error.__cause__, errors.HTTPError | OSError):
            raise
        raise HubAccessError(
            f"{where}: {_one_line(error)} ({_one_line(error.__cause__)}). Try again; files that have arrived are not "
            "sent again."
        ) from error


def no_directory(name: str) -> str:
    """Say that a name, which may be meant for a path, is that of no directory; nothing if it is."""
    return "" if os.path.isdir(name) else "; there is no directory of this name either"


def _not_cached(where: str, repo_id: str, error: BaseException) -> HubAccessError:
    mode = "offline mode (HF_HUB_OFFLINE) is on" if constants.HF_HUB_OFFLINE else "it could not be reached"
    return HubAccessError(
        f"{where} is not in the cache, or only in part, and {mode} ({_one_line(error)})"
        f"{no_directory(repo_id)}. Connect, unset HF_HUB_OFFLINE, or pass the path of a copy."
    )


def _remedy(error: errors.HfHubHTTPError) -> str:
    status = error.response.status_code
    if status in (401, 403):
        return "Check that the token is valid and has the right to do this."
    if status in (409, 412):
        return "The repo has changed in the meantime, and that change was not overwritten. Run the same call again."
    return "Try again; files that have arrived are not sent again."


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return without_secrets(" ".join(lines))[:300] or type(error).__name__


def _endpoint() -> str:
    return address_without_secrets(constants.ENDPOINT)
