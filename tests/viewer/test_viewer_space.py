"""`hf-trak push --space`: what the Space holds, whom it shows, and that it answers when it is started.

The last needs Gradio, which `.ci/run` installs in a directory of its own.
"""

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import Dataset
from hub_server import TOKEN, Hub, client, hub
from viewer_runs import QUICK, child_environment, language_rows, wheel

from hf_trak.cli.main import main
from hf_trak.hub.space import push_space

__all__ = ["client", "hub"]  # fixtures

INDEX, WHEEL = "tester/index", "hf_trak-0.0.1-py3-none-any.whl"


@pytest.fixture
def pushed(hub: Hub, client: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """An index whose rows come from the dataset repo `tester/rows`, pushed with its viewer."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    language_rows(tmp_path)
    weights = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    hub.put("model", "tester/model", weights)
    rows = Dataset.from_json(str(tmp_path / "rows.jsonl"), cache_dir=str(tmp_path / "cache"))
    rows.push_to_hub("tester/rows", token=TOKEN, private=False)
    directory = str(tmp_path / "published")
    model = ("--model", str(tmp_path / "model"), "--train_dataset", "tester/rows", "--text_columns", "text")
    assert main(["featurize", *model, "--output_dir", directory, "--max_length", "32", *QUICK, "--json"]) == 0
    push = ["push", directory, "--repo_id", INDEX, "--model_name", "tester/model", "--json"]
    push += ["--no_private", "--space", str(wheel(tmp_path))]
    assert main(push) == 0
    assert main(push) == 0, "the same command again"
    hub.put("space", INDEX, {**hub.repos["space", INDEX].main, "hf_trak-0.0.0-py3-none-any.whl": b"older"})
    assert main(push) == 0, "a newer wheel takes the place of an older one"
    return {"files": hub.repos["space", INDEX].main, "directory": directory}


def test_a_space_holds_a_program_its_requirements_and_a_card(pushed: dict[str, Any], hub: Hub) -> None:
    files = pushed["files"]
    assert set(files) == {
        ".gitattributes",
        "README.md",
        "app.py",
        "requirements.txt",
        "hf_trak-0.0.1-py3-none-any.whl",
    }
    card = files["README.md"].decode()
    metadata = yaml.safe_load(card.split("---\n")[1])
    assert (metadata["sdk"], metadata["app_file"], metadata["datasets"]) == ("gradio", "app.py", [INDEX])
    needed = [re.split("[>=]", line)[0] for line in files["requirements.txt"].decode().splitlines()]
    assert {"torch", "transformers", "datasets", "gradio", "pillow"} <= set(needed), "and all of them in registries"
    assert not {"hf_trak", "pytest", "trl"} & set(needed)
    for content in (content for name, content in files.items() if name != WHEEL):
        assert TOKEN.encode() not in content and pushed["directory"].encode() not in content
        assert b"sleeps in the" not in content, "no training row"
    namespace: dict[str, Any] = {"__name__": "app", "__file__": "app.py"}
    exec(compile(files["app.py"], "app.py", "exec"), namespace)
    assert namespace["ARGUMENTS"][:2] == ["serve", INDEX] and "--public_rows" in namespace["ARGUMENTS"]


def test_a_space_is_private_unless_that_is_said(hub: Hub, client: Path, tmp_path: Path) -> None:
    hub.put("dataset", INDEX, {"README.md": b""})
    push_space(INDEX, wheel(tmp_path), token=TOKEN)
    assert hub.repos["space", INDEX].private
    hub.put("dataset", "tester/open", {"README.md": b""})
    push_space("tester/open", wheel(tmp_path), token=TOKEN, private=False)
    assert not hub.repos["space", "tester/open"].private


def test_only_a_wheel_of_this_library_is_taken(hub: Hub, client: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.whl"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("other-1.dist-info/METADATA", "Name: other\n")
    for path, message in (
        (other, "that of 'other'"),
        (tmp_path, "python -m build"),
        (Path(__file__), "build --wheel"),
    ):
        with pytest.raises(ValueError, match=message):
            push_space(INDEX, path, token=TOKEN)
    assert ("space", INDEX) not in hub.repos


def test_the_space_of_a_private_index_is_private(hub: Hub, client: Path, tmp_path: Path) -> None:
    hub.put("dataset", "tester/secret", {"README.md": b""}, private=True)
    push_space("tester/secret", wheel(tmp_path), token=TOKEN, private=False)
    assert hub.repos["space", "tester/secret"].private
    assert b"HF_TOKEN" in hub.repos["space", "tester/secret"].main["README.md"]
    hub.put("dataset", "tester/hidden", {"README.md": b""}, private=True)
    hub.put("space", "tester/hidden", {"README.md": b"mine"})
    with pytest.raises(ValueError, match="exists and is public"):
        push_space("tester/hidden", wheel(tmp_path), token=TOKEN, private=False)
    assert hub.repos["space", "tester/hidden"].main == {"README.md": b"mine"}


@pytest.mark.parametrize("public", [True, False])
def test_a_downloaded_space_answers(pushed: dict[str, Any], hub: Hub, tmp_path: Path, public: bool) -> None:
    """Rows are shown where anybody may read them. Of private ones only the numbers are, whatever token there is."""
    if importlib.util.find_spec("gradio") is None:
        pytest.skip("no Gradio: `pip install gradio`")
    hub.repos["dataset", "tester/rows"].private = not public
    space = tmp_path / "space"
    space.mkdir()
    for name, content in pushed["files"].items():
        (space / name).write_bytes(content)
    with started(space, hub) as url:
        found = ask(url, {"text": "good fox sleeps in the film barn"})
    assert [row["end"] for row in found[:3]] == ["helped"] * 3
    assert all(isinstance(row["score"], float) for row in found)
    if public:
        assert all("sleeps" in row["text.text"] for row in found)
    else:
        assert all(set(row) == {"end", "rank", "row", "score"} for row in found)


@contextmanager
def started(space: Path, hub: Hub) -> Iterator[str]:
    """The address of a Space that runs in a process of its own."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    variables = {
        "GRADIO_SERVER_PORT": str(port), "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(space / "home"),
        "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1",
    }  # fmt: skip
    log = space / "log.txt"
    with log.open("w") as file:
        environment = child_environment(**variables)
        environment["PYTHONPATH"] = environment["PYTHONPATH"].partition(os.pathsep)[2]  # not this repository
        process = subprocess.Popen([sys.executable, "app.py"], cwd=space, env=environment, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 120
        while "The viewer is at" not in log.read_text() and time.monotonic() < deadline:
            assert process.poll() is None, log.read_text()[-3000:]
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/"
    finally:
        process.terminate()
        process.wait(timeout=30)


def ask(url: str, texts: dict[str, str]) -> list[dict[str, Any]]:
    """Ask over HTTP, as any program can."""
    data = [texts, None, 10, "", None, 0, False, ""]
    request = urllib.request.Request(f"{url}gradio_api/call/attribute", json.dumps({"data": data}).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as answer:
        event = json.load(answer)["event_id"]
    with urllib.request.urlopen(f"{url}gradio_api/call/attribute/{event}", timeout=60) as answer:
        text = answer.read().decode()
    assert "event: complete" in text, text
    (found,) = json.loads(text.partition("data: ")[2])
    return found
