"""Compiled code on disk. It is read only where nobody but this user and root can have written it."""

import hashlib
import logging
import os
import stat
from pathlib import Path

from hf_trak.runtime.temporary import temporary_name

logger = logging.getLogger(__name__)

DIRECTORY_VARIABLE = "HF_TRAK_KERNEL_CACHE"

_ITSELF = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # follow no link, and wait for no pipe

_DIGEST = 64  # length of a SHA-256 in hexadecimal digits


def directory() -> Path | None:
    """Return `$HF_TRAK_KERNEL_CACHE`, or `hf_trak/kernels` in the user's cache directory; `None` without a home."""
    if given := os.environ.get(DIRECTORY_VARIABLE):
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "hf_trak" / "kernels"
    except RuntimeError:  # no HOME, and a user without an entry in the list of users
        return None


def read(name: str) -> bytes | None:
    """Read a file of the cache.

    The file is opened once, and what is returned is what was checked.

    Args:
        name: name of the file.

    Returns:
        Its content; `None` where it is missing or damaged, or where another user can have written it.
    """
    place = directory()
    try:
        if place is None or _strangers(place.stat()):
            return None
        with open(place / name, "rb", opener=lambda path, flags: os.open(path, flags | _ITSELF)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or _strangers(status):
                return None
            found = file.read()
    except OSError:
        return None
    content = found[_DIGEST:]
    return content if found[:_DIGEST] == _digest(content) else None


def write(name: str, content: bytes) -> None:
    """Write a file under a temporary name and rename it. Many processes may do this at once.

    Args:
        name: name of the file.
        content: its content, before which its digest is written.

    Raises:
        OSError: it cannot be written, or others could change it.
    """
    if (place := directory()) is None:
        raise OSError("there is no home directory")
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    if problem := _strangers(place.stat()):
        raise PermissionError(problem)
    temporary = place / temporary_name()
    try:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0)
        with open(os.open(temporary, flags, 0o600), "wb") as file:
            file.write(_digest(content) + content)
        os.replace(temporary, place / name)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def keep(name: str, content: bytes, what: str) -> None:
    """Write a file, and report once where that is impossible.

    Args:
        name: name of the file.
        content: its content.
        what: the code, for the message.
    """
    try:
        write(name, content)
    except OSError as error:
        logger.warning(
            "The compiled %s cannot be kept in %s (%s): it is compiled again in every process. Set %s to a directory "
            "of your own that nobody else can write to.",
            what, directory(), error, DIRECTORY_VARIABLE,
        )  # fmt: skip


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _strangers(status: os.stat_result) -> str:
    """Say who else can have written a file or directory; nothing where nobody can."""
    if not hasattr(os, "geteuid"):  # Windows keeps the directories of a user to that user
        return ""
    if status.st_uid not in (0, os.geteuid()):
        return f"it belongs to the user {status.st_uid}"
    return "others can write to it" if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else ""
