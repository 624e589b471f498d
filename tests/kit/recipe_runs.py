"""Running recipes in tests: as a script, and as the modules that Python finds beside it."""

import html
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from datasets import load_from_disk

ROOT = Path(__file__).parents[2]
CPU = ("--use_cpu",)


@contextmanager
def imported(recipe: Path) -> Iterator[ModuleType]:
    """The module `run` of a recipe; its modules are forgotten afterwards, as those of others have the same names."""
    sys.path.insert(0, str(recipe))
    try:
        yield importlib.import_module("run")
    finally:
        sys.path.remove(str(recipe))
        for path in recipe.glob("*.py"):
            sys.modules.pop(path.stem, None)


def run_script(recipe: Path, out: Path, *options: str) -> str:
    """Run a recipe as its README does, without a network, and return what it prints."""
    command = [sys.executable, str(recipe / "run.py"), *options, "--output_dir", str(out)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_HOME": str(out.parent / "cache")}
    result = subprocess.run(command, cwd=out.parent, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def commands_of(recipe: Path) -> list[list[str]]:
    """The arguments of every command in a recipe's README."""
    lines = (recipe / "README.md").read_text().splitlines()
    script = f"{recipe.name}/run.py"
    return [
        line.split(script, 1)[1].split() for line in lines if script in line and line.startswith(("python", "acc"))
    ]


def report_of(out: Path, scores: str = "scored", examples: int = 5) -> str:
    """The text of the report of a run, after a check that it names the rows of every target.

    Args:
        out: the output directory.
        scores: the directory with the scores of the report.
        examples: rows on either side.
    """
    page = (out / "report.html").read_text(encoding="utf-8")
    articles, scored = page.split('<article class="target"')[1:], load_from_disk(out / scores)
    assert len(articles) == len(scored) > 0
    for article, target in zip(articles, scored, strict=True):
        named = []
        for side, sign in (("trak_", 1), ("trak_harmful_", -1)):
            pairs = list(zip(target[f"{side}indices"], target[f"{side}scores"], strict=True))[:examples]
            named += [row for row, score in pairs if sign * score > 0]
        assert named and [f"row {row}</span>" in article for row in named] == [True] * len(named)
    return html.unescape(page)
