"""The viewer against visitors that mean harm, over HTTP: foreign pages, large forms, full queues, and what is left.

Needs Gradio, which `.ci/run` installs in a directory of its own.
"""

import http.client
import importlib.util
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from patience import patient
from viewer_runs import child_environment, hostile_run, image_index, language_index

pytest.importorskip("gradio")

from hf_trak.cli.main import main
from hf_trak.cli.serve import opened
from hf_trak.viewer import RunSession, serve
from hf_trak.viewer.app import import_gradio, private_directory
from hf_trak.viewer.gate import MOST_KEPT_BYTES, MOST_WAITING
from hf_trak.viewer.target_form import MOST_BYTES

BOUNDARY = "x" * 20


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the page of an index of texts."""
    directory = language_index(tmp_path_factory.mktemp("texts"))
    app = serve(opened(["--index", str(directory)])[0], port=None, block=False)
    yield app.local_url
    app.close(verbose=False)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the page of an index of pictures."""
    directory = image_index(tmp_path_factory.mktemp("pictures"))
    app = serve(opened(["--index", str(directory)])[0], port=None, block=False)
    yield app.local_url
    app.close(verbose=False)


def asked(
    url: str, path: str, body: bytes | None = None, method: str | None = None, **headers: str
) -> tuple[int, bytes]:
    """Send a request with any headers, and return the status and the body of the answer."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=patient(60))
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        connection.request(method or ("GET" if body is None else "POST"), path, body, named)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def form(*files: bytes) -> bytes:
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n'.encode()
    return b"".join(head + data + b"\r\n" for data in files) + f"--{BOUNDARY}--\r\n".encode()


def upload(url: str, body: bytes) -> int:
    try:
        return asked(url, "/gradio_api/upload", body, Content_Type=f"multipart/form-data; boundary={BOUNDARY}")[0]
    except ConnectionError:  # refused before all of it was sent
        return 413


def attribute(url: str, *data: Any) -> str:
    """Ask as a program does, and return the events of the answer."""
    body = json.dumps({"data": [*data, *[None, 3, "", None, 0, False, ""][len(data) - 1 :]]}).encode()
    status, answer = asked(url, "/gradio_api/call/attribute", body, Content_Type="application/json")
    assert status == 200, answer
    event = json.loads(answer)["event_id"]
    return asked(url, f"/gradio_api/call/attribute/{event}")[1].decode()


# -- foreign pages ---------------------------------------------------------------------------------------------------


def test_foreign_names_of_this_machine_are_refused(texts: str) -> None:
    """A page of a stranger whose name leads to 127.0.0.1 reads nothing."""
    port = urlsplit(texts).port
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}", "LOCALHOST"):
        assert asked(texts, "/config", Host=host)[0] == 200, host
    for host in (f"evil.example:{port}", "evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "", "["):
        for path in ("/", "/config", "/gradio_api/info", "/gradio_api/queue/data?session_hash=a"):
            status, body = asked(texts, path, Host=host)
            assert status in (400, 421) and b"fox" not in body, (host, path, status)
    body = json.dumps({"data": [{"text": "good fox"}]}).encode()
    assert asked(texts, "/gradio_api/call/attribute", body, Host="evil.example")[0] == 421


def test_forms_of_foreign_pages_are_refused(texts: str) -> None:
    host = urlsplit(texts).netloc
    for origin, expected in ((f"http://{host}", 200), ("http://evil.example", 403), ("null", 403)):
        named = {"Content_Type": f"multipart/form-data; boundary={BOUNDARY}", "Origin": origin}
        assert asked(texts, "/gradio_api/upload", form(b"a"), **named)[0] == expected


def test_what_the_page_does_not_use_is_not_there(texts: str) -> None:
    for path in ("/gradio_api/process_recording", "/gradio_api/run/attribute", "/gradio_api/vibe-edit", "/nothing"):
        assert asked(texts, path, b"{}", Content_Type="application/json")[0] == 404
    assert asked(texts, "/gradio_api/queue/join", b"{}", method="PUT")[0] == 404


# -- sizes -----------------------------------------------------------------------------------------------------------


def kept() -> int:
    return sum(path.stat().st_size for path in private_directory().rglob("*") if path.is_file())


def test_a_form_of_many_files_is_refused_as_a_whole(pictures: str) -> None:
    before = kept()
    assert upload(pictures, form(*[bytes(9 << 20)] * 4)) == 413
    assert asked(pictures, "/gradio_api/upload", iter([b"a"]), Transfer_Encoding="chunked")[0] == 411  # type: ignore
    assert kept() == before
    assert upload(pictures, form(bytes(9 << 20))) == 200


def test_uploads_are_bounded_in_total_and_private(pictures: str) -> None:
    for number in range(2 + MOST_KEPT_BYTES // MOST_BYTES):
        assert upload(pictures, form(number.to_bytes(4, "little") * (MOST_BYTES // 4))) == 200
    assert MOST_KEPT_BYTES // 2 < kept() <= MOST_KEPT_BYTES + (1 << 20)
    assert Path(os.environ["GRADIO_TEMP_DIR"]).is_relative_to(private_directory())
    assert stat.S_IMODE(private_directory().stat().st_mode) == 0o700


# -- the queue -------------------------------------------------------------------------------------------------------


def test_one_visitor_does_not_fill_the_queue(texts: str) -> None:
    """Of many questions at once a few wait, and the others are refused with a reason."""
    body = json.dumps({"data": [{"text": "good fox sleeps"}, None, 3, "", None, 0, False, ""]}).encode()
    answers = list[tuple[int, bytes]]()

    def ask() -> None:
        answers.append(asked(texts, "/gradio_api/call/attribute", body, Content_Type="application/json"))

    threads = [threading.Thread(target=ask) for _ in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused = [text for status, text in answers if status == 503]
    assert len(answers) == 40 and len(refused) >= 40 - 3 * MOST_WAITING
    assert all(b"of your questions are waiting" in text for text in refused)
    deadline = time.monotonic() + patient(60)
    while "event: complete" not in attribute_when_free(texts) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert time.monotonic() < deadline


def attribute_when_free(url: str) -> str:
    body = json.dumps({"data": [{"text": "good fox sleeps"}, None, 3, "", None, 0, False, ""]}).encode()
    status, answer = asked(url, "/gradio_api/call/attribute", body, Content_Type="application/json")
    return (
        asked(url, f"/gradio_api/call/attribute/{json.loads(answer)['event_id']}")[1].decode() if status == 200 else ""
    )


# -- what is logged, and what is left --------------------------------------------------------------------------------


def test_bad_requests_do_not_flood_the_log(texts: str, capfd: pytest.CaptureFixture[str]) -> None:
    bodies = [
        {"data": [{f"a{n}": "b" for n in range(7000)}, None, 3, "", None, 0, False, ""]},
        {"data": [{"text": "a"}, None, "many", "", None, 0, False, ""]},
        {"data": [["text"], None, 3, "", None, 0, False, ""]},
        {"data": [None]},
        {"data": [{"text": "good fox"}, 5, [1], {}, "x", "y", [], 7]},
        {"data": {"texts": 1}},
        {"data": [], "fn_index": 999, "session_hash": "a"},
        [],
    ]
    for attempt in range(3):
        for body in bodies:
            given = json.dumps(body).encode()
            status, answer = asked(texts, "/gradio_api/call/attribute", given, Content_Type="application/json")
            if status == 200:
                event = json.loads(answer)["event_id"]
                assert b"event: error" in asked(texts, f"/gradio_api/call/attribute/{event}")[1]
            joined = asked(texts, "/gradio_api/queue/join", given, Content_Type="application/json")[0]
            assert status in (200, 422, 503) and joined != 200
        with socket.create_connection((urlsplit(texts).hostname, urlsplit(texts).port)) as gone:
            gone.sendall(
                f"POST /gradio_api/upload HTTP/1.1\r\nHost: {urlsplit(texts).netloc}\r\nContent-Length: 100000\r\n"
                f"Content-Type: multipart/form-data; boundary={BOUNDARY}\r\n\r\n".encode()
                + form(b"a" * 100)[:-30]
            )
            time.sleep(0.2)
        time.sleep(1)
        said = capfd.readouterr().err
        assert "Traceback" not in said or attempt == 0, "each kind of error is traced once"


def test_a_page_that_is_ended_leaves_nothing(tmp_path: Path) -> None:
    """SIGTERM, as service managers send it, removes uploads and exports; no other user can read them before."""
    hostile_run().save(tmp_path / "run")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
    command = [sys.executable, "-m", "hf_trak", "serve", str(tmp_path / "run"), "--port", port]
    process = subprocess.Popen(
        command, env=child_environment(TMPDIR=str(temporary)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        said = ""
        while "The viewer is at" not in said:
            line = process.stdout.readline()
            assert line, said
            said += line
        assert upload(f"http://127.0.0.1:{port}/", form(b"secret")) == 200
        (private,) = temporary.glob("hf_trak-viewer-*")
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
        files = {path for path in temporary.rglob("*") if path.is_file()}
        assert files and all(path.is_relative_to(private) for path in files)
    finally:
        process.terminate()
        rest = process.communicate(timeout=patient(30))[0]
    assert process.returncode == -signal.SIGTERM and "Traceback" not in rest
    assert not list(temporary.glob("hf_trak-*")) and not [path for path in temporary.rglob("*") if path.is_file()]


def test_only_a_missing_gradio_is_called_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gradio.py").write_text("import nothing_of_this_name\n")
    command = [sys.executable, "-c", "from hf_trak.viewer.app import import_gradio; import_gradio()"]
    broken = child_environment(PYTHONPATH=os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])]))
    said = subprocess.run(command, env=broken, capture_output=True, text=True, check=False).stderr
    assert "nothing_of_this_name" in said and "not installed" not in said
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *of: None if name == "gradio" else find(name, *of))
    with pytest.raises(ImportError, match=re.escape("Install it with `pip install gradio`")):
        import_gradio()
    assert main(["serve", str(tmp_path / "nowhere")]) == 1
    assert "pip install gradio" in capsys.readouterr().err, "before anything is loaded"


def test_a_run_is_served_without_a_model() -> None:
    app = serve(RunSession(hostile_run()), port=None, block=False)
    try:
        assert asked(app.local_url, "/config")[0] == 200
    finally:
        app.close(verbose=False)
