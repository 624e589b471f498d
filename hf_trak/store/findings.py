"""The result of checking one file of a store, byte by byte."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

State = Literal["intact", "damaged", "missing", "unchecked", "leftover"]
"""`unchecked`: a file without checksums, from an older version; `leftover`: not part of any result."""


@dataclass(frozen=True)
class Finding:
    """The state of one file.

    Attributes:
        path: the file.
        state: see [`State`].
        detail: what is wrong with it; empty for intact files.
        remedy: how to repair it, for example the call that computes it again.
    """

    path: Path
    state: State
    detail: str = ""
    remedy: str = ""
