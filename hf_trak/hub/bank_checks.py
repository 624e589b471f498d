"""The files of a published bank, and the checks of one that somebody else made.

A published bank has the files that `hf_trak.evaluation.bank_files` describes, without what building leaves behind, and
the sealed file `parts.json`, which names all parts, so that a copy or a cache that lacks one is noticed:

    {"kind": "published bank", "bank": digest of `bank.json`, "parts": ["drop-0.05", …]}

Only files of these parts are fetched. Their sizes follow from the numbers of rows, targets, subsets and repeats, and
are compared before a file is downloaded and before it is parsed; [`~hf_trak.evaluation.Bank`] checks what it reads.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hf_trak.errors import RefusedIndexError, StoreError
from hf_trak.evaluation.bank import Bank
from hf_trak.evaluation.bank_files import BANK, OUTPUTS, PART, SUBSETS, part_names, read_bank, read_part
from hf_trak.hub.files import HubFiles, IndexFiles
from hf_trak.hub.foreign_json import read_foreign_object, shown, too_large
from hf_trak.hub.index_files import MAX_HEADER_BYTES, check_file
from hf_trak.store.atomic import safe_name
from hf_trak.store.sealed import SEALED_VERSION, VERSION_KEY, check_seal, content_digest, sealed_bytes

PARTS = "parts.json"
PART_FILES = (PART, SUBSETS, OUTPUTS)
PART_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._+=-]{0,98}[A-Za-z0-9])?")
"""Names of published parts: file names on every system, and plain text in a terminal."""

MAX_JSON_BYTES = 16 << 20
"""Maximum bytes of a JSON file: room for a plan of a million removals."""
MAX_SUBSETS_BYTES = 256 << 20
"""Maximum bytes of the subsets of a part: 1,000 of two million rows. In memory they take eight times as much."""
MAX_OUTPUTS_BYTES = 1 << 30
"""Maximum bytes of the outputs of a part: 10 repeats of 1,000 subsets with 13,000 targets."""

_KIND = "published bank"
_LISTED_PART = re.compile(rf"(?P<name>[^/]+)/{PART}", re.DOTALL)


def most_bytes(path: str) -> int:
    """Return the maximum bytes of a file, by its path in the bank."""
    return {SUBSETS: MAX_SUBSETS_BYTES, OUTPUTS: MAX_OUTPUTS_BYTES}.get(path.rpartition("/")[2], MAX_JSON_BYTES)


def is_part_file(path: str) -> bool:
    """Whether a path in a repo is that of a file of a part."""
    name, _, file = path.partition("/")
    return file in PART_FILES and PART_NAME.fullmatch(name) is not None


def parts_file(described: Mapping[str, Any], names: list[str]) -> bytes:
    """Return the content of `parts.json`.

    Args:
        described: content of `bank.json`.
        names: names of all parts that are published.
    """
    return sealed_bytes({"kind": _KIND, "bank": content_digest(described), "parts": names})


def open_checked(files: IndexFiles) -> Bank:
    """Fetch and check all files of a bank, and open it.

    Args:
        files: the files, in a repo or in a directory. A directory may lack `parts.json`, files of parts that are being
            built, and may have more parts than `parts.json` names.

    Raises:
        HubAccessError: a file cannot be fetched.
        IncompleteStoreError: a directory holds no bank.
        RefusedIndexError: a file is missing, damaged or too large, is a link, or belongs to another bank.
        StoreError: a file in a directory is damaged.
    """
    listed = files.names()  # refuses links in a directory
    published = isinstance(files, HubFiles)
    names = _named_parts(files) if published or files.size(PARTS) is not None else []
    listed_parts = {match["name"] for path in listed or () if (match := _LISTED_PART.fullmatch(path))}
    if published:
        _refuse_others(files, listed_parts, names)
    with _discarded_if_refused(files, BANK):
        if published or files.size(BANK) is not None:  # where it is missing, `Bank` says so
            _read_json(files, BANK)
        bank = Bank(files.root)
        described = read_bank(files.root)
    if names:
        _check_same_bank(files, described)
    for name in names if published else sorted({*names, *part_names(files.root)}):
        _check_part(files, bank, name, described)
    if published:
        _refuse_others(files, set(bank.parts), names)  # another program may have put files into the cache
    for name in bank.parts:
        _check_repeat(files, bank, name)
    return bank


def _named_parts(files: IndexFiles) -> list[str]:
    """Read the names in `parts.json`."""
    where = f"{PARTS} of {files.name}"
    with _discarded_if_refused(files, PARTS):
        content = _read_json(files, PARTS)
        names = content.get("parts")
        if content.get("kind") != _KIND or not isinstance(names, list) or not names:
            raise refused(where, "it does not name the parts of a bank")
        for name in names:
            if not isinstance(name, str) or not PART_NAME.fullmatch(name):
                raise refused(where, f"it names the part {shown(name)}, which is no plain name of a directory")
        if len(set(names)) < len(names):
            raise refused(where, "it names a part twice")
        return names


def _check_same_bank(files: IndexFiles, described: Mapping[str, Any]) -> None:
    with _discarded_if_refused(files, PARTS, BANK):
        if _read_json(files, PARTS).get("bank") != content_digest(described):
            raise refused(f"{PARTS} of {files.name}", f"it belongs to another {BANK} than the one beside it")


def _refuse_others(files: IndexFiles, found: set[str], names: list[str]) -> None:
    if others := sorted(found - set(names)):
        raise refused(f"The bank {files.name}", f"it has a part {shown(others[0])}, which {PARTS} does not name")


def _check_part(files: IndexFiles, bank: Bank, name: str, described: Mapping[str, Any]) -> None:
    """Fetch and check the files of a part. In a directory it may be unfinished."""
    paths = [f"{name}/{file}" for file in PART_FILES]
    with _discarded_if_refused(files, *paths):
        try:
            safe_name(name)
        except ValueError as error:
            raise refused(f"The bank {files.name}", str(error)) from error
        content = _read_json(files, paths[0])
        repeated, removal = content.get("repeat_of"), content.get("removal")
        right = isinstance(content.get("bank"), str) and (repeated is None or isinstance(repeated, str))
        if not right or not (removal is None or isinstance(removal, dict)):
            raise refused(f"{paths[0]} of {files.name}", "`bank`, `repeat_of` or `removal` is of another type")
        part = read_part(files.root / name, described)
        subsets, repeats = part["subsets"], part["repeats"]
        sizes = {
            paths[1]: subsets * -(-described["rows"] // 8),
            paths[2]: 8 * repeats * subsets * (described["targets"] + 1),
        }
        unfinished = not isinstance(files, HubFiles) and files.size(paths[2]) is None
        for path, data in sizes.items():
            if not (unfinished and files.size(path) is None):
                _fetch_tensors(files, path, data)
        if not unfinished:
            bank.part(name)


def _check_repeat(files: IndexFiles, bank: Bank, name: str) -> None:
    """Check that the subsets of a repeat are those of the part that it repeats."""
    original = bank.description(name)["repeat_of"]
    if original is None or not (bank.is_complete(name) and original in bank.parts and bank.is_complete(original)):
        return
    repeat, repeated = bank.part(name), bank.part(original)
    if len(repeated.outputs) != 1 or not np.array_equal(repeated.masks[: len(repeat.masks)], repeat.masks):
        raise refused(f"The part {name!r} of {files.name}", f"it does not repeat subsets of {original!r}, as it says")


def _read_json(files: IndexFiles, path: str) -> dict[str, Any]:
    """Fetch a sealed JSON file, and check its size, its values and its checksum."""
    where = f"{path} of {files.name}"
    _check_listed(files, path, 2, MAX_JSON_BYTES)
    try:
        content = read_foreign_object(files.fetch(path), MAX_JSON_BYTES)
    except ValueError as error:
        raise refused(where, str(error)) from error
    if (version := content.get(VERSION_KEY)) != SEALED_VERSION:
        raise refused(
            where, f"it has format version {shown(version)}, and this version of hf_trak reads {SEALED_VERSION}"
        )
    check_seal(content, where)
    return content


def _fetch_tensors(files: IndexFiles, path: str, data: int) -> None:
    """Fetch a file of tensors that has `data` bytes besides its header."""
    if data > most_bytes(path):
        raise refused(f"{path} of {files.name}", too_large(data, most_bytes(path)))
    sizes = data + 8, data + 8 + MAX_HEADER_BYTES
    _check_listed(files, path, *sizes)
    local = files.fetch(path)
    try:
        check_file(local, sizes)
    except StoreError as error:
        raise refused(f"{path} of {files.name}", str(error)) from error


def _check_listed(files: IndexFiles, path: str, least: int, most: int) -> None:
    """Refuse a file that is missing, or whose size is wrong, before it is downloaded."""
    size = files.size(path)
    if size is None and files.names() is not None:
        raise refused(f"The bank {files.name}", f"the file {path!r} is missing")
    if size is not None and not least <= size <= most:
        raise refused(f"{path} of {files.name}", f"it has {size} bytes, not {least} to {most}")


@contextlib.contextmanager
def _discarded_if_refused(files: IndexFiles, *paths: str) -> Iterator[None]:
    """Turn damage of downloaded files into a refusal, and discard them, so that they are downloaded again."""
    try:
        yield
    except StoreError as error:
        if not isinstance(files, HubFiles):
            raise
        for path in paths:
            files.discard(path)
        if isinstance(error, RefusedIndexError):
            raise
        reason = re.split(r"\. (?:Expected|Delete)\b", str(error))[0]  # without advice on files of one's own
        raise refused(f"The bank {files.name}", reason) from error


def refused(where: str, reason: str) -> RefusedIndexError:
    """Make the error for a bank that is refused."""
    return RefusedIndexError(
        f"{where} was refused: {reason}. Expected a bank that `push_bank` has published. Use another revision, or ask "
        "its publisher for a new one."
    )
