"""Links, paths and names in the Markdown files of the repository lead somewhere."""

import importlib
import os
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from doc_pages import PAGES, ROOT

_SKIPPED = {"build", "dist", "outputs", "site", "node_modules", "venv"}


def markdown_files() -> list[Path]:
    """Those of the repository; without the templates of cards in the package."""
    found = []
    for directory, below, names in os.walk(ROOT):
        below[:] = [name for name in below if not name.startswith(".") and name not in _SKIPPED]
        found += [Path(directory) / name for name in names if name.endswith(".md")]
    return sorted(path for path in found if not path.is_relative_to(ROOT / "hf_trak"))


FILES = markdown_files()

_CODE = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(?P<title>.+?) *$", re.MULTILINE)
_PATH = re.compile(r"`(?P<path>(?:hf_trak|recipes|tests|docs|cuda_ext|\.ci)/[^`\s]*)(?:[ :][^`]*)?`")
_NAME = re.compile(r"`(?P<name>hf_trak(?:\.[A-Za-z_][A-Za-z0-9_]*)+)[^`]*`")


def ids(files: list[Path]) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in files]


def without_code(path: Path) -> str:
    return _CODE.sub("", path.read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    """Anchors of the headings that Git hosts and mkdocs agree on."""
    found = set()
    for match in _HEADING.finditer(without_code(path)):
        title = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", match["title"]).lower()
        there = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
        ascii_only = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
        here = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_only).strip())
        if there == here:
            found.add(here)
    return found


def test_there_are_files() -> None:
    assert {"README.md", "CHANGELOG.md", "docs/index.md", "recipes/clip/README.md"} <= set(ids(FILES))


@pytest.mark.parametrize("path", FILES, ids=ids(FILES))
def test_links_lead_somewhere(path: Path) -> None:
    dead = []
    for match in _LINK.finditer(without_code(path)):
        target, _, anchor = match["target"].partition("#")
        if re.match(r"[a-z]+:", target):
            assert target.startswith("https://"), target
            continue
        file = (path.parent / target).resolve() if target else path
        leaves = path.is_relative_to(ROOT / "docs") and not file.is_relative_to(ROOT / "docs")
        if not file.exists() or leaves or (anchor and anchor not in anchors(file)):
            dead.append(match["target"])
    assert not dead


@pytest.mark.parametrize("path", FILES, ids=ids(FILES))
def test_paths_exist(path: Path) -> None:
    """What stands in backticks and looks like a file of the repository. `<name>` stands for any."""
    lost = []
    for match in _PATH.finditer(without_code(path)):
        pattern = re.sub(r"<[^>]*>", "*", match["path"]).rstrip("/")
        if not any(ROOT.glob(pattern)) and "…" not in pattern:
            lost.append(match["path"])
    assert not lost


def resolve(name: str) -> Any:
    """The module, class or function of a dotted name."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


def test_names_exist() -> None:
    """Dotted names in backticks."""
    pages = [*PAGES, *ROOT.glob("*/*/README.md")]
    named = {match["name"] for path in pages for match in _NAME.finditer(without_code(path)) if "…" not in match[0]}
    assert len(named) > 5
    lost = []
    for name in sorted(named):
        try:
            resolve(name)
        except (ModuleNotFoundError, AttributeError):
            lost.append(name)
    assert len(named) > 5
    assert not lost


def test_names_that_do_not_exist_are_noticed() -> None:
    with pytest.raises(AttributeError):
        resolve("hf_trak.gradient_computers.no_such_name")
