"""What commands print: one JSON object for scripts, or lines for people, from the main process alone."""

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any


def answer(content: Mapping[str, Any], lines: Iterable[str], as_json: bool) -> None:
    """Print the outcome of a command, on the process of rank 0."""
    if int(os.environ.get("RANK", "0")) != 0:
        return
    if as_json:
        print(json.dumps(content, indent=2, ensure_ascii=False, default=str))
    else:
        for line in lines:
            print(line)


def table(rows: Mapping[str, Any]) -> list[str]:
    """Names and values in two columns."""
    width = max((len(name) for name in rows), default=0)
    return [f"{name:<{width}}  {value}" for name, value in rows.items()]


def size(count: float) -> str:
    """Bytes for people, in powers of 1000."""
    if count < 1000:
        return f"{count:.0f} bytes"
    unit = "kB"
    for larger in ("MB", "GB", "TB"):
        if count < 1e6:
            break
        count, unit = count / 1000, larger
    return f"{count / 1000:.1f} {unit}"
