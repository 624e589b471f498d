"""Parts of files of a repo: HTTP requests for a range of bytes, of which no more is read than was asked for.

`HfFileSystem` reads ranges, too, but takes whatever the server sends: all of a file where ranges are not supported, or
more. Here the session, the retries, the addresses and the tokens are those of `huggingface_hub`, and the answer is
compared with the request before and while it is read.
"""

import logging
import time

from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

from hf_trak.errors import RefusedIndexError
from hf_trak.hub.access import REPO_TYPE
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
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return _downloaded(api, repo_id, commit, path, part, size)
        except HfHubHTTPError:
            raise
        except HTTPError as error:
            if attempt == _ATTEMPTS:
                raise
            logger.warning("Bytes %d to %d of %s: %s. Trying again.", part.start, part.stop, path, error)
            time.sleep(_PAUSE_SECONDS * attempt)
    raise AssertionError("unreachable")


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
