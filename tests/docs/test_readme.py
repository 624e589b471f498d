"""The README: its length, its picture, the command that CI takes from it, and its examples."""

import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import pytest
from doc_examples import sentences, trained_trainer, write_reviews
from doc_pages import ROOT, blocks_of, hf_trak_command, run_page
from hub_server import TOKEN, Hub, client, hub

__all__ = ["client", "hub"]  # fixtures

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


def after_three_lines(namespace: dict[str, Any]) -> None:
    scored = namespace["scored"]
    assert len(scored) == 6
    assert len(scored[0]["trak_indices"]) == 20
    assert scored[0]["trak_scores"][0] >= scored[0]["trak_scores"][1]


def after_publishing(namespace: dict[str, Any]) -> None:
    assert len(namespace["scored"]) == 5
    assert len(namespace["scored"][0]["trak_indices"]) == 10


def test_examples(hub: Hub, client: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    write_reviews(tmp_path)
    trainer = trained_trainer()
    for step in (100, 200):
        files = {path.name: path.read_bytes() for path in Path(f"out/checkpoint-{step}").iterdir()}
        kept = {name: files[name] for name in ("config.json", "model.safetensors")}
        hub.put("model", "me/my-model", kept, private=True).commit(f"step-{step}", kept)
    ran = []

    def command(argv: list[str]) -> None:
        if argv[0] == ".venv/bin/python":  # the recipe has a test of its own that runs it
            assert argv[1:] == ["recipes/image_classification/run.py"]
            assert importlib.util.spec_from_file_location("run", ROOT / argv[1]) is not None
            assert (ROOT / argv[1]).is_file()
        else:
            hf_trak_command(argv)
        ran.append(argv[:2])

    namespace = {"trainer": trainer, "eval_dataset": sentences(6), "my_examples": sentences(5)}
    checks = {"featurize(checkpoints=[": after_three_lines, "push_to_hub(": after_publishing}
    smaller = {  # systems of 4096 equations take most of a minute
        'TrakConfig(output_dir="trak")': 'TrakConfig(output_dir="trak", proj_dim=512)',
        "reviews.jsonl --output_dir": "reviews.jsonl --proj_dim 512 --output_dir",
    }
    run_page("README.md", namespace, command, smaller, checks)
    assert [argv[1] for argv in ran[1:]] == ["featurize", "attribute", "report"]
    assert (tmp_path / "reviews-trak/scores/mine/report.html").is_file()
