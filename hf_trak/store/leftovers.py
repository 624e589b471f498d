"""Temporary files that processes left behind when they died, and the policy by which they are removed.

Every file is first written under a temporary name, `.hf_trak-tmp-<host>-<pid>-<16 hex digits>`, beside its final name.
One policy holds for all temporary files:

* The process that wrote it removes it, unless it is killed.
* Every run removes from its output directory ([`remove_stale`]) what a dead process of this host wrote, if the last
  write is over an hour ago (a container of the same host name has other process ids), and what anybody wrote, if the
  last write is over a week ago (this host cannot see whether a process of another host is running).
* `hf-trak clean` shows all of them. With `--remove` it removes those of dead processes of this host whatever their
  age, and those of other hosts that are over a day old. Only `--everything` removes what a running process may write.
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
        host: host of the writer; `None` where the name does not say.
        alive: whether the writer is running; `None` where this host cannot see that.
    """

    path: Path
    size: int
    age: float
    host: str | None
    alive: bool | None

    @property
    def removable(self) -> bool:
        """Whether it may be removed on request."""
        return self.alive is False or (self.alive is None and self.age > DAY)

    @property
    def stale(self) -> bool:
        """Whether any run may remove it unasked."""
        return (self.alive is False and self.age > DAY / 24) or self.age > 7 * DAY

    def remove(self) -> bool:
        """Remove it, and return whether it is gone. Another process may have removed it first."""
        if self.path.is_dir() and not self.path.is_symlink():
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()
        return not os.path.lexists(self.path)


def leftovers(directory: Path) -> list[Leftover]:
    """List all temporary files below a directory, sorted by path. Links to directories are not followed."""
    return sorted(_found(directory), key=lambda one: one.path)


def remove_stale(directory: Path) -> list[Leftover]:
    """Remove what any run may remove below a directory, see the module's docstring, and return what was removed."""
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
        with contextlib.suppress(FileNotFoundError):  # finished in the meantime
            size, written = _extent(Path(entry.path))
            host = None if match is None else match["host"]
            alive = None if match is None or host != host_name() else is_alive(int(match["pid"]))
            yield Leftover(Path(entry.path), size, max(0.0, time.time() - written), host, alive)


def _extent(path: Path) -> tuple[int, float]:
    """Size in bytes and time of the last write of a file, or of everything in a directory."""
    status = path.lstat()
    size, written = status.st_size, status.st_mtime
    if path.is_dir() and not path.is_symlink():
        for folder, _, names in os.walk(path):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    status = os.lstat(os.path.join(folder, name))
                    size, written = size + status.st_size, max(written, status.st_mtime)
    return size, written
