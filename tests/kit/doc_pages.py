"""The pages of the documentation: their blocks of code, and how the examples in them are run."""

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_trak.cli.main import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUNNABLE = ("python", "bash")

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE)
_NOT_RUN = re.compile(r"<!-- not run: (?P<reason>[^\n]+) -->\s*\Z")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: the file.
        line: number of its first line of code.
        language: after the fence; empty where nothing stands there.
        code: its text.
        reason: why it is not run, from the comment before it; `None` if it is.
    """

    page: Path
    line: int
    language: str
    code: str
    reason: str | None

    @property
    def place(self) -> str:
        """For messages: page and line."""
        return f"{name_of(self.page)}:{self.line}"


def name_of(page: Path) -> str:
    """The path of a page inside the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        reason = _NOT_RUN.search(text, 0, match.start())
        line = text.count("\n", 0, match.start("code")) + 1
        found.append(Block(page, line, match["language"], match["code"], reason["reason"] if reason else None))
    return found


def run_page(
    page: str,
    namespace: dict[str, Any],
    command: Callable[[list[str]], None],
    replace: Mapping[str, str] | None = None,
    checks: Mapping[str, Callable[[dict[str, Any]], None]] | None = None,
) -> dict[str, Any]:
    """Run the blocks of a page one after the other: Python in one namespace, shell commands by `command`.

    Args:
        page: its path inside the repository.
        namespace: what the page takes for granted.
        command: runs one shell command, or fails.
        replace: text to put in the place of other text that occurs in the page, to make an example smaller.
        checks: by a piece of code that one block holds, what to assert of the namespace after that block.

    Returns:
        The namespace.
    """
    namespace.setdefault("__name__", "__main__")
    unused = {**(replace or {}), **(checks or {})}
    for block in blocks_of(ROOT / page):
        if block.reason is not None or block.language not in RUNNABLE:
            continue
        code = block.code
        for old, new in (replace or {}).items():
            if old in code:
                code = code.replace(old, new)
                unused.pop(old, None)
        if block.language == "bash":
            for line in code.splitlines():
                if argv := shlex.split(line, comments=True):
                    command(argv)
            continue
        # Empty lines in front, so that a traceback names the line of the page.
        exec(compile("\n" * (block.line - 1) + code, str(block.page), "exec"), namespace)
        for marker, check in (checks or {}).items():
            if marker in block.code:
                unused.pop(marker, None)
                check(namespace)
    assert not unused, f"{page} runs no block with {list(unused)}"
    return namespace


def hf_trak_command(argv: list[str]) -> None:
    """Run `hf-trak …` in this process. Anything else is an error of the page: it needs a comment that says why not."""
    assert argv[0] == "hf-trak", f"{argv} is no `hf-trak` command; mark its block with `<!-- not run: reason -->`"
    assert main(argv[1:]) == 0, argv
