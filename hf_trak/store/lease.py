"""Directories of unfinished work that several runs may use at once, and that the last of them removes."""

import errno
import os
import shutil
from pathlib import Path

from hf_trak.store.atomic import explained

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_FILE = "in-use"


class Lease:
    """The use of a directory by this run, from the moment that this object is made. The system ends it with the
    process. Where the file system has no locks, every run is taken for the last one.

    Attributes:
        directory: the directory, which exists.
    """

    def __init__(self, directory: Path) -> None:
        """
        Args:
            directory: the directory; created if need be.

        Raises:
            StoreError: it cannot be written to.
        """
        self.directory = directory
        path = directory / _FILE
        with explained(path):
            while True:
                directory.mkdir(parents=True, exist_ok=True)
                try:
                    self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
                except FileNotFoundError:  # another run has just removed the directory
                    continue
                self._locks(shared=True)
                if path.exists() and path.stat().st_ino == os.fstat(self._descriptor).st_ino:
                    return
                os.close(self._descriptor)

    def _locks(self, shared: bool) -> bool:
        """Lock the file, shared with others or alone. Return `False` if another run uses it."""
        if fcntl is not None:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
                    raise
        return True

    def end(self, remove: bool = False) -> bool:
        """End the use.

        Args:
            remove: remove the directory, unless another run uses it.

        Returns:
            Whether it was removed.
        """
        try:
            if not remove or not self._locks(shared=False):
                return False
            shutil.rmtree(self.directory, ignore_errors=True)
            return True
        finally:
            os.close(self._descriptor)
