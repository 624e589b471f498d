"""A local Hub for tests: repos in memory behind the HTTP API that `huggingface_hub` and `datasets` use.

The fixture `hub` starts one, `client` points this process at it with an empty cache, and `environment` returns the
environment variables for a subprocess.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from places import PYTHONPATH

TOKEN = "hf_0123456789abcdefSECRETghijklmnopqrstuv"
LFS = (".safetensors", ".parquet", ".arrow")
WHEN = "2026-01-01T00:00:00.000Z"


@dataclass
class Repo:
    """One repo: its commits by id, and the commits of its branches and pull requests."""

    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def commit(self, ref: str, files: dict[str, bytes]) -> str:
        names = "".join(f"{name}{hashlib.sha1(data).hexdigest()}" for name, data in sorted(files.items()))
        sha = hashlib.sha1(f"{ref}{len(self.commits)}{names}".encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.refs[ref] = sha
        return sha

    def find(self, revision: str) -> str | None:
        return self.refs.get(revision) or (revision if revision in self.commits else None)

    @property
    def main(self) -> dict[str, bytes]:
        return self.commits[self.refs["main"]]


@dataclass
class Request:
    """One entry of the server's log."""

    method: str
    path: str
    token: str | None
    status: int


@dataclass
class Fault:
    """A failure of the next `times` requests whose method and path match.

    Kinds: `drop` closes the connection after half of the answer, `half` sends half of a file as if it were the whole
    file, `flip` changes one bit of it, and a number is the HTTP status of an error.
    """

    method: str
    pattern: str
    kind: str | int
    times: int = 1_000_000
    skip: int = 0


class Hub:
    """The server, its repos, its log and its faults."""

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.log: list[Request] = []
        self.faults: list[Fault] = []
        self.lock = threading.RLock()
        handler = type("BoundHandler", (Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"

    def put(self, kind: str, name: str, files: dict[str, bytes], private: bool = False) -> Repo:
        """Make a repo, or a new commit of it, with exactly these files."""
        repo = self.repos.setdefault((kind, name), Repo(private))
        repo.commit("main", files)
        return repo

    def dataset(self, name: str) -> dict[str, bytes]:
        """Return the files of the main branch of a dataset repo."""
        return self.repos["dataset", name].main

    def requests(self, method: str, pattern: str) -> list[Request]:
        return [entry for entry in self.log if entry.method == method and re.search(pattern, entry.path)]

    def downloads(self, pattern: str = "") -> list[str]:
        """List the downloaded files by their paths in the repos, in order."""
        found = [re.search(r"/resolve/[^/]+/(.+)$", entry.path) for entry in self.requests("GET", "/resolve/")]
        return [match[1] for match in found if match and re.search(pattern, match[1])]

    def uploads(self) -> list[str]:
        """List the hashes of the uploaded large files, in order."""
        return [entry.path.rpartition("/")[2] for entry in self.requests("PUT", "^/lfs/") if entry.status == 200]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args: Any) -> None:
        """Write no log to stderr."""

    def do(self) -> None:
        data = self._body()
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        self.token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        with self.hub.lock:
            self.fault = self._fault()
            if self.fault == "drop" and self.command != "GET":
                self.hub.log.append(Request(self.command, self.path, self.token, 0))
                self.close_connection = True
                self.connection.close()
                return
            if isinstance(self.fault, int):
                return self.error(self.fault, "Injected", "an injected error")
            self._route(url.path, data)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do  # noqa: N815 (the names that http.server calls)

    # -- routes

    def _route(self, path: str, data: bytes) -> None:
        if path == "/api/whoami-v2":
            if self.token != TOKEN:
                return self.error(401, "", "Invalid credentials in Authorization header")
            access = {"accessToken": {"role": "write"}}
            return self.answer({"type": "user", "name": "tester", "orgs": [], "auth": access})
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self._create(json.loads(data))
        if match := re.fullmatch(r"/lfs/(?P<oid>[0-9a-f]{64})", path):
            if self.command == "PUT":
                if hashlib.sha256(data).hexdigest() != match["oid"]:
                    return self.error(400, "", "wrong hash")
                self.hub.blobs[match["oid"]] = data
            return self.answer({})
        repo_path = r"(?P<kind>dataset|model|space)?s?/?(?P<name>[^/]+/[^/]+)"
        if match := re.fullmatch(rf"/{repo_path}\.git/info/lfs/objects/batch", path):
            return self._batch(json.loads(data))
        if match := re.fullmatch(rf"/{repo_path}/resolve/(?P<rev>[^/]+)/(?P<file>.+)", path):
            repo = self._repo(match["kind"] or "model", match["name"])
            return None if repo is None else self._resolve(repo, unquote(match["rev"]), unquote(match["file"]))
        if match := re.fullmatch(r"/api/(?P<kind>dataset|model|space)s/(?P<name>[^/]+/[^/]+)(?:/(?P<rest>.*))?", path):
            repo = self._repo(match["kind"], match["name"])
            if repo is not None:
                self._api(repo, match["kind"], match["name"], match["rest"] or "", data)
            return None
        return self.error(404, "", "no such page")

    def _repo(self, kind: str, name: str) -> Repo | None:
        repo = self.hub.repos.get((kind, name))
        if repo is None or (repo.private and self.token != TOKEN):
            self.error(401 if self.token is None else 404, "RepoNotFound", "Repository not found")
            return None
        return repo

    def _create(self, wanted: dict[str, Any]) -> None:
        if self.token != TOKEN:
            return self.error(401, "", "Invalid username or password.")
        kind, name = wanted.get("type") or "model", f"{wanted.get('organization') or 'tester'}/{wanted['name']}"
        url = {"url": f"{self.hub.endpoint}/{'datasets/' if kind == 'dataset' else ''}{name}", "id": name}
        if (kind, name) in self.hub.repos:
            return self.answer({"error": "You already created this repo", **url}, 409)
        private = bool(wanted.get("private")) or wanted.get("visibility") == "private"
        self.hub.put(kind, name, {".gitattributes": b"*.safetensors filter=lfs\n"}, private)
        return self.answer(url)

    def _batch(self, wanted: dict[str, Any]) -> None:
        objects = []
        for item in wanted["objects"]:
            entry = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in self.hub.blobs:
                entry["actions"] = {"upload": {"href": f"{self.hub.endpoint}/lfs/{item['oid']}", "header": {}}}
            objects.append(entry)
        self.answer({"transfer": "basic", "objects": objects})

    def _resolve(self, repo: Repo, revision: str, path: str) -> None:
        sha = repo.find(revision)
        if sha is None:
            return self.error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        data = repo.commits[sha].get(path)
        if data is None:
            return self.error(404, "EntryNotFound", "Entry not found")
        headers = {"X-Repo-Commit": sha, "ETag": f'"{oid(path, data)}"', "Accept-Ranges": "bytes"}
        status = 200
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            first, last = int(match[1]), min(int(match[2] or len(data)), len(data) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            data, status = data[first : last + 1], 206
        if self.fault == "half" and self.command == "GET":
            data = data[: len(data) // 2]
        if self.fault == "flip":
            data = data[:-1] + bytes([data[-1] ^ 1])
        return self.answer(data, status, headers)

    def _api(self, repo: Repo, kind: str, name: str, rest: str, data: bytes) -> None:
        verb, _, rest = rest.partition("/")
        if verb in ("", "revision"):
            sha = repo.find(unquote(rest) or "main")
            if sha is None:
                return self.error(404, "RevisionNotFound", f"Invalid rev id: {rest}")
            files = [
                {
                    "rfilename": path,
                    **({"size": len(blob), "blobId": oid(path, blob)} if "blobs" in self.query else {}),
                }
                for path, blob in repo.commits[sha].items()
            ]
            facts = {"id": name, "_id": "0", "sha": sha, "private": repo.private, "gated": False, "disabled": False}
            dates = {"lastModified": WHEN, "createdAt": WHEN, "tags": [], "likes": 0, "downloads": 0}
            return self.answer({**facts, **dates, "siblings": files})
        if verb == "refs":
            branches = [
                {"name": ref, "ref": f"refs/heads/{ref}", "targetCommit": sha} for ref, sha in repo.refs.items()
            ]
            return self.answer({"branches": branches, "tags": [], "converts": [], "pullRequests": []})
        if verb == "tree":
            revision, _, folder = rest.partition("/")
            return self._tree(repo, unquote(revision), unquote(folder))
        if verb == "paths-info":
            return self._paths_info(repo, unquote(rest), data)
        if self.token != TOKEN:
            return self.error(403, "", "Forbidden: you need a token with the right to write.")
        if verb == "preupload":
            base = repo.commits[repo.find(unquote(rest)) or repo.refs["main"]]
            modes = [
                {
                    "path": item["path"],
                    "uploadMode": "lfs" if item["path"].endswith(LFS) else "regular",
                    "shouldIgnore": False,
                    "oid": oid(item["path"], base[item["path"]]) if item["path"] in base else None,
                }
                for item in json.loads(data)["files"]
            ]
            return self.answer({"files": modes})
        if verb == "branch":
            if unquote(rest) in repo.refs:
                return self.error(409, "", "Reference already exists")
            repo.refs[unquote(rest)] = repo.refs["main"]
            return self.answer({})
        if verb == "commit":
            return self._commit(repo, kind, name, unquote(rest), data)
        return self.error(404, "", "no such page")

    def _commit(self, repo: Repo, kind: str, name: str, revision: str, data: bytes) -> None:
        base = repo.find(revision)
        if base is None:
            return self.error(404, "RevisionNotFound", "Invalid rev id")
        files = dict(repo.commits[base])
        for line in data.splitlines():
            entry = json.loads(line)
            key, value = entry["key"], entry["value"]
            if key == "header" and value.get("parentCommit") not in (None, base):
                return self.error(412, "PreconditionFailed", "A commit has happened since. Please refresh.")
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
        url = f"{self.hub.endpoint}/{'datasets/' if kind == 'dataset' else ''}{name}"
        answer = {"success": True, "hookOutput": ""}
        if "create_pr" in self.query:
            number = 1 + sum(ref.startswith("refs/pr/") for ref in repo.refs)
            revision = f"refs/pr/{number}"
            answer["pullRequestUrl"] = f"{url}/discussions/{number}"
        answer["commitOid"] = repo.commit(revision, files)
        return self.answer({**answer, "commitUrl": f"{url}/commit/{answer['commitOid']}"})

    def _tree(self, repo: Repo, revision: str, folder: str) -> None:
        sha = repo.find(revision)
        if sha is None:
            return self.error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files, prefix = repo.commits[sha], f"{folder}/" if folder else ""
        inside = {path: blob for path, blob in files.items() if path.startswith(prefix)}
        if not inside:
            return self.error(404, "EntryNotFound", f"{folder} does not exist")
        deep = self.query.get("recursive", ["false"])[0].lower() in ("1", "true")
        found: dict[str, dict[str, Any]] = {}
        for path, blob in inside.items():
            parts = path[len(prefix) :].split("/")
            for depth in range(1, len(parts)):
                if deep or depth == 1:
                    directory = prefix + "/".join(parts[:depth])
                    found[directory] = {"type": "directory", "oid": "0" * 40, "size": 0, "path": directory}
            if deep or len(parts) == 1:
                found[path] = file_entry(path, blob)
        return self.answer(list(found.values()))

    def _paths_info(self, repo: Repo, revision: str, data: bytes) -> None:
        sha = repo.find(revision)
        if sha is None:
            return self.error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        is_json = "json" in (self.headers.get("Content-Type") or "")
        paths = json.loads(data)["paths"] if is_json else parse_qs(data.decode()).get("paths", [])
        files, found = repo.commits[sha], []
        for path in paths:
            if path in files:
                found.append(file_entry(path, files[path]))
            elif any(name.startswith(f"{path.rstrip('/')}/") for name in files):
                found.append({"type": "directory", "oid": "0" * 40, "size": 0, "path": path})
        return self.answer(found)

    # -- transport

    def answer(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        kind = "application/octet-stream" if isinstance(content, bytes) else "application/json"
        self.send_response(status)
        for key, value in {"Content-Type": kind, "Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        self.hub.log.append(Request(self.command, self.path, self.token, status))
        if self.command == "HEAD":
            return
        if self.fault == "drop":
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()
            return
        self.wfile.write(data)

    def error(self, status: int, code: str, message: str) -> None:
        self.answer({"error": message}, status, {"X-Error-Code": code, "X-Error-Message": message})

    def _body(self) -> bytes:
        if (self.headers.get("Transfer-Encoding") or "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().strip() or b"0", 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _fault(self) -> str | int | None:
        for fault in self.hub.faults:
            if fault.method == self.command and re.search(fault.pattern, self.path) and fault.times:
                if fault.skip:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                return fault.kind
        return None


def oid(path: str, data: bytes) -> str:
    """Return the id of a file: the hash of its content as git or git-lfs computes it."""
    if path.endswith(LFS):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def file_entry(path: str, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "oid": oid(path, data), "size": len(data), "path": path}
    if path.endswith(LFS):
        entry["lfs"] = {"oid": oid(path, data), "size": len(data), "pointerSize": 134}
    return entry


@contextmanager
def serving() -> Iterator[Hub]:
    """Start a Hub without repos."""
    server = Hub()
    thread = threading.Thread(target=server.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.server.shutdown()
        server.server.server_close()


@pytest.fixture
def hub() -> Iterator[Hub]:
    """Start a Hub without repos."""
    with serving() as server:
        yield server


@pytest.fixture
def client(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Point this process at the Hub, and return the directory of its empty cache. Retries do not wait."""
    from huggingface_hub import constants

    home = tmp_path / "home"
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.endpoint)
    for name, value in {
        "ENDPOINT": hub.endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": template,
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        "HF_TOKEN_PATH": str(home / "token"),
    }.items():
        monkeypatch.setattr(constants, name, value)
    import datasets

    for name, value in {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_OFFLINE": False,
        "HF_DATASETS_CACHE": home / "datasets",
    }.items():
        monkeypatch.setattr(datasets.config, name, value)
    for module in ("huggingface_hub.utils._http", "huggingface_hub.file_download"):
        monkeypatch.setattr(f"{module}.time", _Impatient())
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return home


class _Impatient:
    """The module `time` with a `sleep` that returns at once."""

    def __getattr__(self, name: str) -> Any:
        import time

        return (lambda seconds: None) if name == "sleep" else getattr(time, name)


def environment(hub: Hub, home: Path) -> dict[str, str]:
    """Return the environment variables for a subprocess that uses the Hub."""
    import os

    own = {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": PYTHONPATH,
        "TOKENIZERS_PARALLELISM": "false",
    }
    dropped = ("HF_TOKEN", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
    return {**{key: value for key, value in os.environ.items() if key not in dropped}, **own}
