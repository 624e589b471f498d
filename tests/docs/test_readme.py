"""The README: its length, its picture, the command that CI takes from it, and its examples."""

import subprocess
from pathlib import Path

import pytest
from doc_pages import ROOT, blocks_of, hf_trak_command, run_page

README = ROOT / "README.md"


def test_it_is_short() -> None:
    """As `wc -w` counts: code, tables and links included."""
    assert len(README.read_text(encoding="utf-8").split()) <= 900


def test_the_picture_is_small() -> None:
    picture = ROOT / "docs/images/digits.png"
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert picture.stat().st_size < 150_000


def test_ci_finds_the_test_command() -> None:
    """By the very program of .ci/run."""
    line = next(line for line in (ROOT / ".ci/run").read_text().splitlines() if line.startswith("command=$(awk"))
    script = f'{line}\nprintf "%s\\n" "$command"'
    found = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    marked = [block.code.strip() for block in blocks_of(README) if "pytest" in block.code]
    assert [found] == marked
    assert found.startswith("python3 -m venv .venv && ")


def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The model knows what it is asked about, and each target has rows with its own adjective's sign on top."""
    monkeypatch.chdir(tmp_path)
    namespace = run_page("README.md", {}, hf_trak_command)
    scored, labels = namespace["scored"], namespace["rows"]["labels"][:]
    logits = namespace["trainer"].predict(namespace["rows"].select([18, 22])).predictions
    assert (logits[0, 1] - logits[0, 0] > 2) and (logits[1, 0] - logits[1, 1] > 2)
    assert [[labels[row] for row in rows] for rows in scored["trak_indices"]] == [[1, 1, 1], [0, 0, 0]]
    assert "the end was good <- ['the " in capsys.readouterr().out
