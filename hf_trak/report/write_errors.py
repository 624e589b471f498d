"""What the system says of a write that failed, in words that help."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from hf_trak.errors import StoreError


@contextlib.contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn what the system says of a write that failed into a `StoreError` that names the file and the free space.

    Errors that name a file elsewhere pass: that file could not be read, such as an image that a row refers to.

    Args:
        path: the file, or the directory whose newest file is the one that was being written.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        named = getattr(error, "filename", None)
        if isinstance(named, str) and not Path(named).is_relative_to(path.parent):
            raise
        file = named or _newest(path)
        raise StoreError(
            f"{file} cannot be written: {error}. Expected a directory that this process may write to, with enough "
            f"free space{_free(path)}. Free some or get access, or use another directory, and run the same command "
            "again; what was complete before stays as it was."
        ) from error


def _newest(path: Path) -> Path:
    """The file below a directory that was written last."""
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else []
    return max(files, key=lambda file: file.stat().st_mtime_ns, default=path)


def _free(path: Path) -> str:
    while not path.is_dir() and path != path.parent:
        path = path.parent
    try:
        return f" ({shutil.disk_usage(os.fspath(path)).free / 2**20:,.1f} MiB are free there)"
    except OSError:
        return ""
