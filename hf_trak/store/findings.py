"""What a check of every byte found of one file."""

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
        remedy: what makes it right again, for example which call computes it anew.
    """

    path: Path
    state: State
    detail: str = ""
    remedy: str = ""
