"""Errors of failed writes below a directory, with the name of the file that was being written."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from hf_trak.store.atomic import explained


@contextlib.contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn the error of a failed write into a `StoreError` that names the file and the free space.

    Errors that name a file elsewhere pass: such a file could not be read, for example an image that a row refers to.

    Args:
        path: the file, or a directory. If the error names no file, the newest file in the directory is the one that
            was being written.

    Raises:
        StoreError: a file could not be written.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        named = getattr(error, "filename", None)
        if isinstance(named, str) and not Path(named).is_relative_to(path.parent):
            raise
        with explained(Path(named) if isinstance(named, str) else _newest(path)):
            raise


def _newest(path: Path) -> Path:
    """Find the file below a directory that was written last."""
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else []
    return max(files, key=lambda file: file.stat().st_mtime_ns, default=path)
