"""Turns paths of the repository in backticks into links to it; mkdocs.yml names this file."""

import os
import re
from typing import Any

_PATH = re.compile(r"(?<!\[)`((?:benchmarks|cuda_ext|hf_trak|recipes|tests)/[\w./-]+)`")
_FENCE = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """Link paths outside of fenced blocks, where `REPOSITORY_URL` says where the repository is."""
    if "REPOSITORY_URL" not in os.environ:
        return markdown
    link = rf"[`\1`]({config.repo_url.rstrip('/')}/blob/main/\1)"
    parts = _FENCE.split(markdown)
    return "".join(part if part.lstrip().startswith("```") else _PATH.sub(link, part) for part in parts)
