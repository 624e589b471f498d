"""Sealed files: JSON with a checksum of its own content, so that a changed byte is noticed.

    {"checksum": xxh3-128 of all other keys as canonical JSON, "format_version": 2, …}

Files of format 1 have no checksum. They are still read, and recognized by lacking both keys (or by
`"format_version": 1`); a file that lacks only one of the keys is damaged.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from hf_trak.errors import StoreError
from hf_trak.store.atomic import create_bytes, json_bytes, read_json, write_bytes

CHECKSUM_KEY = "checksum"
VERSION_KEY = "format_version"
SEALED_VERSION = 2
"""Format version of files with a checksum; higher ones may follow."""


def content_digest(content: Mapping[str, Any]) -> str:
    """Hash a JSON object without its checksum: xxh3-128, the same for every order of keys. 32 hex digits.

    Raises:
        TypeError, ValueError: the content is not plain JSON.
    """
    others = {key: value for key, value in content.items() if key != CHECKSUM_KEY}
    text = json.dumps(others, sort_keys=True, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass"))


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content with its format version (2 unless it has one) and its checksum.

    Raises:
        TypeError, ValueError: the content is not plain JSON.
    """
    plain = json.loads(json_bytes({VERSION_KEY: SEALED_VERSION, **content}))
    return {**plain, CHECKSUM_KEY: content_digest(plain)}


def sealed_bytes(content: Mapping[str, Any]) -> bytes:
    """Return the bytes of a sealed file. Raises as [`sealed`]."""
    return json_bytes(sealed(content))


def write_sealed(path: Path, content: Mapping[str, Any]) -> None:
    """Write a sealed file atomically, replacing a file that exists.

    Raises:
        TypeError, ValueError: the content is not plain JSON.
        StoreError: the file cannot be written.
    """
    write_bytes(path, sealed_bytes(content))


def create_sealed(path: Path, content: Mapping[str, Any]) -> bool:
    """Create a sealed file unless it exists, and return whether this call did: of several processes, exactly one does.

    Raises:
        TypeError, ValueError: the content is not plain JSON.
        StoreError: the file cannot be written.
    """
    return create_bytes(path, sealed_bytes(content))


def is_sealed(content: Mapping[str, Any]) -> bool:
    """Whether the content must have a checksum: it does not if it lacks both keys, or if its version is 1."""
    return CHECKSUM_KEY in content or content.get(VERSION_KEY, 1) != 1


def check_seal(content: Mapping[str, Any], path: Path | str, remedy: str = "") -> None:
    """Compare the checksum of a parsed file with its content; files of format 1 have none and pass.

    Args:
        content: the parsed file.
        path: the file, or a name for it in the error message.
        remedy: what to do about a damaged file, for the error message.

    Raises:
        StoreError: the checksum is missing, or does not fit the content.
    """
    if not is_sealed(content):
        return
    remedy = remedy or "Restore it from a copy, or delete it and run the same command again."
    try:
        found = content_digest(content)
    except (ValueError, RecursionError) as error:  # NaN, or a number without end
        raise StoreError(f"{path} is damaged: {error}. Expected the file as hf_trak wrote it. {remedy}") from error
    if content.get(CHECKSUM_KEY) != found:
        raise StoreError(
            f"{path} is damaged: the checksum of its content is {found}, the file says "
            f"{content.get(CHECKSUM_KEY)!r}. Expected the file as hf_trak wrote it. {remedy}"
        )


def read_sealed(path: Path, remedy: str = "", allow_unsealed: bool = True) -> dict[str, Any]:
    """Read a sealed file, and compare its checksum with its content.

    Args:
        path: the file.
        remedy: what to do about a damaged file, for the error message.
        allow_unsealed: whether a file of format 1, which has no checksum, is accepted.

    Returns:
        The content with all keys, `checksum` and `format_version` included.

    Raises:
        FileNotFoundError: the file does not exist.
        StoreError: it is not a JSON object, or is damaged, or lacks the checksum that it must have.
    """
    content = read_json(path)
    check_seal(content, path, remedy)
    if not allow_unsealed and not is_sealed(content):
        raise StoreError(
            f"{path} has no checksum, like files of format 1, but lies in a directory of a later format. "
            f"{remedy or 'Restore it from a copy, or delete it and run the same command again.'}"
        )
    return content


def unsealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content without `checksum` and `format_version`."""
    return {key: value for key, value in content.items() if key not in (CHECKSUM_KEY, VERSION_KEY)}
