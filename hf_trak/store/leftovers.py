"""What processes that died have left behind, and who may remove it when.

Everything is written under a temporary name first, `.hf_trak-tmp-<host>-<pid>-<16 hex digits>`, beside the file that
it becomes. One policy holds for all of them:

* The process that wrote it removes it, unless it is killed.
* Every run removes what is in its output directory ([`remove_stale`]) if the writer is a dead process of this host
  and the last write is over an hour ago (process ids mean something else in another container of the same host name),
  or if the last write is over a week ago, whoever wrote: whether a process of another host lives cannot be seen.
* `hf-trak clean` shows all, and with `--remove` removes those of dead processes of this host whatever their age, and
  those of other hosts that are over a day old. Only `--everything` removes what a living process may be writing.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hf_trak.store.atomic import TEMPORARY, host_name, is_alive

DAY = 86_400.0
_OLD_TEMPORARIES = (".scored.tmp", ".scored.old", ".train.tmp", ".train.old")
"""Directories that version 0.1.0 left behind when saving a report run was interrupted."""


@dataclass(frozen=True)
class Leftover:
    """A temporary file or directory.

    Attributes:
        path: where it is.
        size: bytes.
        age: seconds since the last write.
        host: of the writer; `None` where the name does not say.
        alive: whether the writer lives; `None` where that cannot be seen from this host.
    """

    path: Path
    size: int
    age: float
    host: str | None
    alive: bool | None

    @property
    def removable(self) -> bool:
        """Whether it is safe to remove because somebody asks for it."""
        return self.alive is False or (self.alive is None and self.age > DAY)

    @property
    def stale(self) -> bool:
        """Whether any run may remove it without being asked."""
        return (self.alive is False and self.age > DAY / 24) or self.age > 7 * DAY

    def remove(self) -> bool:
        """Remove it. Says whether it is gone; another process may have been faster."""
        if self.path.is_dir() and not self.path.is_symlink():
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()
        return not os.path.lexists(self.path)


def leftovers(directory: Path) -> list[Leftover]:
    """All temporaries below a directory, sorted by path. Symbolic links to directories are not followed."""
    return sorted(_found(directory), key=lambda one: one.path)


def remove_stale(directory: Path) -> list[Leftover]:
    """Remove what any run may remove below a directory; see the module's docstring. Returns what was removed."""
    return [one for one in leftovers(directory) if one.stale and one.remove()]


def _found(directory: Path) -> Iterator[Leftover]:
    try:
        entries = list(os.scandir(directory))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    for entry in entries:
        match = TEMPORARY.fullmatch(entry.name)
        if match is None and entry.name not in _OLD_TEMPORARIES:
            if entry.is_dir(follow_symlinks=False):
                yield from _found(Path(entry.path))
            continue
        with contextlib.suppress(FileNotFoundError):  # finished meanwhile
            size, written = _extent(Path(entry.path))
            host = None if match is None else match["host"]
            alive = None if match is None or host != host_name() else is_alive(int(match["pid"]))
            yield Leftover(Path(entry.path), size, max(0.0, time.time() - written), host, alive)


def _extent(path: Path) -> tuple[int, float]:
    """Bytes, and the time of the last write, of a file or of everything in a directory."""
    status = path.lstat()
    size, written = status.st_size, status.st_mtime
    if path.is_dir() and not path.is_symlink():
        for folder, _, names in os.walk(path):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    status = os.lstat(os.path.join(folder, name))
                    size, written = size + status.st_size, max(written, status.st_mtime)
    return size, written
