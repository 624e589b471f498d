"""Sealed files: JSON with a checksum of its own content, so that a changed byte is noticed.

{"checksum": xxh3-128 of all other keys as canonical JSON, "format_version": 1, …}

[`Finding`] is what a check says about any file, and [`judged`] makes one.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import xxhash

from hf_trak.errors import HfTrakError, StoreError
from hf_trak.store.atomic import create_bytes, json_bytes, plain_json, read_json, write_bytes

MANIFEST_FILE = "trak_index.json"
"""The sealed list of the files of a published index, whose copies may lack XᵀX and what only the writer reads."""

CHECKSUM_KEY = "checksum"
VERSION_KEY = "format_version"
SEALED_VERSION = 1
"""Version of everything that hf_trak writes, and the only one that it reads."""

State = Literal["intact", "damaged", "missing", "unchecked", "leftover"]

"""`unchecked`: nothing here says what the file must hold; `leftover`: not part of any result."""


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


def judged(path: Path, check: Callable[[], object], remedy: str = "") -> Finding:
    """Run the check of a file, and return what came of it.

    Args:
        path: the file.
        check: raises if the file is damaged or belongs elsewhere.
        remedy: how to repair it.
    """
    try:
        check()
    except (HfTrakError, OSError) as error:
        return Finding(path, "damaged", str(error), remedy) if path.exists() else Finding(path, "missing", "", remedy)
    return Finding(path, "intact")


def content_digest(content: Mapping[str, Any]) -> str:
    """Hash a JSON object without its checksum: xxh3-128, the same for every order of keys. 32 hex digits.

    Raises:
        TypeError, ValueError: the content is not plain JSON.
    """
    others = {key: value for key, value in content.items() if key != CHECKSUM_KEY}
    text = json.dumps(others, sort_keys=True, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass"))


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content with its format version and its checksum.

    Raises:
        TypeError, ValueError: the content is not plain JSON.
    """
    plain = plain_json({VERSION_KEY: SEALED_VERSION, **content})
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


def file_digest(path: Path) -> str:
    """Hash the bytes of a file: xxh3-128, 32 hex digits.

    Raises:
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def check_seal(content: Mapping[str, Any], path: Path | str, remedy: str = "") -> None:
    """Compare the checksum of a parsed file with its content.

    Args:
        content: the parsed file.
        path: the file, or a name for it in the error message.
        remedy: what to do about a damaged file, for the error message.

    Raises:
        StoreError: the checksum is missing, or does not fit the content.
    """
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


def read_sealed(path: Path, remedy: str = "") -> dict[str, Any]:
    """Read a sealed file, and compare its checksum with its content.

    Args:
        path: the file.
        remedy: what to do about a damaged file, for the error message.

    Returns:
        The content with all keys, `checksum` and `format_version` included.

    Raises:
        FileNotFoundError: the file does not exist.
        StoreError: it is not a JSON object, or is damaged, or of another format version.
    """
    content = read_json(path)
    version = content.get(VERSION_KEY)
    if version is None:
        check_seal(content, path, remedy)  # a damaged file rather than one of another version
    if type(version) is not int or version != SEALED_VERSION:
        raise StoreError(
            f"{path} has format version {version}, expected {SEALED_VERSION}: compute it again with this version of "
            "hf_trak, featurized rows with `featurize` in another output directory."
        )
    check_seal(content, path, remedy)
    return content


def unsealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content without `checksum` and `format_version`."""
    return {key: value for key, value in content.items() if key not in (CHECKSUM_KEY, VERSION_KEY)}
