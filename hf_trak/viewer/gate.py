"""The gate of the page: which requests reach Gradio, how large they may be, and how many of a visitor may wait."""

import logging
import os
import re
import traceback
from collections.abc import Callable
from http import HTTPStatus
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hf_trak.viewer.target_form import MOST_BYTES

logger = logging.getLogger(__name__)

MOST_KEPT_BYTES = 16 * MOST_BYTES
"""Most bytes of uploads and exports that are kept at a time; the oldest go first."""

MOST_WAITING = 4
"""Questions of one visitor that may wait at a time."""

_FORM_BYTES = 64 << 10  # beside the file, in an upload
_MOST_JSON_BYTES = 4 << 20
_POSTED = re.compile(r"/(login|gradio_api/(upload|queue/join|cancel|reset|call/(v2/)?attribute))/?$")

_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; media-src 'self' data: blob:; font-src 'self' data:; connect-src 'self' data: blob:; "
    "worker-src 'self' blob:; frame-src 'self'; object-src 'none'; base-uri 'self'; form-action 'self'"
)
_HEADERS = (
    (b"content-security-policy", _POLICY.encode()),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)


def is_loopback(place: str) -> bool:
    """Tell whether a name or an address, with or without a port, is that of this machine alone."""
    try:
        host = place if place == "::1" else urlsplit(f"//{place}").hostname or ""
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class Gate:
    """An ASGI application before another one: refuses what the page never sends, and adds headers to every answer."""

    def __init__(self, app: Any, alone: bool, files: Path) -> None:
        """
        Args:
            app: the application.
            alone: whether this machine alone is served, so that other names of it are those of strangers' pages.
            files: where uploads and exports are.
        """
        self._app = app
        self._alone = alone
        self._files = files
        self._arriving = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one request."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def with_headers(message: Any) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                names = {name for name, _ in _HEADERS}
                kept = [(name, value) for name, value in message["headers"] if name.lower() not in names]
                message = {**message, "headers": [*kept, *_HEADERS]}
            await send(message)

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        size = int(headers.get("content-length") or 0)
        if (refusal := self._refusal(scope, headers, size)) is not None:
            await _answer(with_headers, *refusal)
            return
        self._arriving += size
        try:
            await self._app(scope, receive, with_headers)
        except Exception as error:  # also of a visitor who went away; the server writes a trace of each otherwise
            tell_once(error)
            if not begun:
                await _answer(with_headers, HTTPStatus.INTERNAL_SERVER_ERROR, "The request cannot be answered.")
        finally:
            self._arriving -= size

    def _refusal(self, scope: Any, headers: dict[str, str], size: int) -> tuple[HTTPStatus, str] | None:
        """Say why a request is not let through; `None` where it is. Makes room for an upload."""
        if self._alone:
            host, origin = headers.get("host", ""), headers.get("origin")
            if not is_loopback(host):
                return HTTPStatus.MISDIRECTED_REQUEST, (
                    "This page is served to this machine alone. Open it as localhost, or start the viewer with --host."
                )
            if origin not in (None, f"http://{host}", f"https://{host}"):
                return HTTPStatus.FORBIDDEN, "This page takes no requests of other pages."
        if scope["method"] in ("GET", "HEAD"):
            return None
        if scope["method"] != "POST" or not _POSTED.search(scope["path"]):
            return HTTPStatus.NOT_FOUND, "The page has nothing of this name."
        if "content-length" not in headers:
            return HTTPStatus.LENGTH_REQUIRED, "The request does not say how long it is."
        upload = scope["path"].endswith("/upload")
        if size > (MOST_BYTES + _FORM_BYTES if upload else _MOST_JSON_BYTES):
            text = f"The request is too large. Expected at most {MOST_BYTES} bytes."
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text
        if upload and not self._has_room(size):
            return HTTPStatus.SERVICE_UNAVAILABLE, "Too many files arrive at a time. Try again."
        return None

    def _has_room(self, size: int) -> bool:
        """Remove the oldest files until another one fits."""
        found = [(status.st_mtime, status.st_size, path) for path in self._files.rglob("*") if (status := _file(path))]
        total = sum(bytes_ for _, bytes_, _ in found) + self._arriving + size
        for _, bytes_, path in sorted(found):
            if total <= MOST_KEPT_BYTES:
                break
            path.unlink(missing_ok=True)
            total -= bytes_
        return self._arriving + size <= MOST_KEPT_BYTES


def _file(path: Path) -> os.stat_result | None:
    try:
        return path.lstat() if path.is_file() else None
    except OSError:  # removed in the meantime
        return None


async def _answer(send: Any, status: HTTPStatus, text: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": int(status), "headers": headers})
    await send({"type": "http.response.body", "body": f"{text}\n".encode()})


def share_queue(queue: Any) -> None:
    """Let a visitor fill no more than a part of Gradio's queue.

    Args:
        queue: the `gradio.queueing.Queue` of a page.
    """
    push: Callable[..., Any] = queue.push

    async def shared(body: Any, request: Any, username: str | None) -> Any:
        mine = _visitor(request)
        events = [event for one in queue.event_queue_per_concurrency_id.values() for event in one.queue]
        if sum(_visitor(event.request) == mine for event in events) >= MOST_WAITING:
            return False, f"{MOST_WAITING} of your questions are waiting. Wait for an answer.", "queue_full"
        return await push(body=body, request=request, username=username)

    queue.push = shared


def _visitor(request: Any) -> str:
    """Return the address of a visitor. On a Space the proxy in front of it tells the address, last of a list."""
    forwarded = request.headers.get("x-forwarded-for") if os.environ.get("SPACE_ID") else None
    return forwarded.rpartition(",")[2].strip() if forwarded else str(request.client and request.client.host)


_TOLD = set[tuple[str, int]]()


def tell_once(error: BaseException) -> None:
    """Log an error with its trace, but once for each place that raises one."""
    places = traceback.extract_tb(error.__traceback__)
    place = (places[-1].filename, places[-1].lineno or 0) if places else (type(error).__name__, 0)
    if place not in _TOLD:
        _TOLD.add(place)
        logger.error("The viewer failed at a request; this is logged once.", exc_info=error)
