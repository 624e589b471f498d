"""A file of a repo as a Python file, of which only the bytes that are read are downloaded."""

import io
from collections.abc import Callable

Download = Callable[[range], bytes]
"""Returns some bytes of a file; may be called by several threads."""


class RangedFile(io.RawIOBase):
    """A file that downloads what is read of it, in one request for each read.

    Attributes:
        fetched (`int`): bytes that were downloaded.
    """

    def __init__(self, size: int, download: Download) -> None:
        """
        Args:
            size: bytes of the file.
            download: returns some of them.
        """
        super().__init__()
        self.fetched = 0
        self._size = size
        self._download = download
        self._place = 0

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def seekable(self) -> bool:
        """Say that it can be read from anywhere."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a byte, counted as in any file."""
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        return self._place

    def tell(self) -> int:
        """Return the number of the next byte."""
        return self._place

    def read(self, size: int | None = -1) -> bytes:
        """Download up to `size` bytes; all that are left by default."""
        stop = self._size if size is None or size < 0 else min(self._place + size, self._size)
        if stop <= self._place:
            return b""
        data = self._download(range(self._place, stop))
        self._place = stop
        self.fetched += len(data)
        return data

    def readall(self) -> bytes:
        """Download all that is left."""
        return self.read()
