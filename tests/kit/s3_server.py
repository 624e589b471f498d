"""A local object storage for tests: files of a directory behind the part of the API of S3 that readers use.

The fixture `storage` starts one for a module of tests, and has environment variables point clients at it.
"""

import hashlib
import re
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote
from xml.sax.saxutils import escape

import pytest
from hub_server import Handler, Hub

CLIENTS = {
    "AWS_ACCESS_KEY_ID": "tester",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
    "AWS_EC2_METADATA_DISABLED": "true",
    # Few attempts, or tests would wait for minutes.
    "AWS_MAX_ATTEMPTS": "2",
    "OBJECT_STORE_CLIENT_MAX_RETRIES": "2",
    "OBJECT_STORE_CLIENT_RETRY_TIMEOUT": "10",
}


class Storage(Hub):
    """The server; `s3://bucket/key` is the file `bucket/key` of its directory. Faults are those of the Hub."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.faults, self.log = directory, [], []
        self.lock = threading.RLock()
        handler = type("BoundHandler", (StorageHandler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"


class StorageHandler(Handler):
    hub: Storage

    def _route(self, path: str, data: bytes) -> None:
        place = self.hub.directory / unquote(path).strip("/")
        if self.command not in ("GET", "HEAD"):
            return self.error(405, "MethodNotAllowed", "this storage is only read")
        if "list-type" in self.query:
            return self._list(place)
        if not place.is_file():
            return self.error(404, "NoSuchKey", "The specified key does not exist.")
        content, status = place.read_bytes(), 200
        headers = {"ETag": f'"{hashlib.md5(content).hexdigest()}"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        size = len(content)
        if match := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range") or ""):
            first = int(match[1]) if match[1] else size - int(match[2])
            last = min(int(match[2]), size - 1) if match[1] and match[2] else size - 1
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
            content, status = content[first : last + 1], 206
        if self.fault == "half":
            content = content[: len(content) // 2]
        if self.fault == "flip":
            content = content[:-1] + bytes([content[-1] ^ 1])
        return self.answer(content, status, headers)

    def _list(self, bucket: Path) -> None:
        prefix, after = self.query.get("prefix", [""])[0], self.query.get("start-after", [""])[0]
        files, folders = dict[str, Path](), set[str]()
        for file in bucket.rglob("*"):
            name = str(file.relative_to(bucket))
            if not file.is_file() or not name.startswith(prefix) or name <= after:
                continue
            inside = name[len(prefix) :]
            if "/" in inside and "delimiter" in self.query:
                folders.add(f"{prefix}{inside.partition('/')[0]}/")
            else:
                files[name] = file
        found = [
            f"<Contents><Key>{escape(name)}</Key><Size>{file.stat().st_size}</Size><ETag>0</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified><StorageClass>STANDARD</StorageClass></Contents>"
            for name, file in sorted(files.items())
        ]
        found += [f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(folders)]
        self.answer(
            "<?xml version='1.0'?><ListBucketResult><IsTruncated>false</IsTruncated>"
            f"<KeyCount>{len(found)}</KeyCount>{''.join(found)}</ListBucketResult>".encode()
        )

    def error(self, status: int, code: str, message: str) -> None:
        self.answer(
            f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode(), status
        )


@pytest.fixture(scope="module")
def served_storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Storage]:
    """Start an empty storage. Lance keeps the address of the first that it sees."""
    storage = Storage(tmp_path_factory.mktemp("storage"))
    threading.Thread(target=storage.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**CLIENTS, "AWS_ENDPOINT_URL": storage.endpoint}.items():
            patch.setenv(name, value)
        yield storage
    storage.server.shutdown()
    storage.server.server_close()


@pytest.fixture
def storage(served_storage: Storage) -> Iterator[Storage]:
    """Return the storage without faults, with a log of its own."""
    served_storage.faults.clear()
    served_storage.log.clear()
    yield served_storage
    served_storage.faults.clear()
