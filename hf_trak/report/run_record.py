"""`run.json`, the record of a saved run: its facts, and its files with their sizes and checksums.

    {
      "checksum": …, "format_version": 2,      see `hf_trak.store.sealed`
      "facts": {…},                            shown in the report, in this order
      "parts": "parts-<16 hex digits>",        directory of the files
      "previous": "parts-…" or null,           directory of the previous save, kept until the next save
      "files": {"scored/state.json": {"bytes": …, "xxh3_128": …}, …}
    }

Runs of format 1 have their files next to `run.json`, without checksums.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from hf_trak.errors import IncompleteStoreError, StoreError
from hf_trak.store.sealed import CHECKSUM_KEY, VERSION_KEY, check_seal, content_digest

RECORD = "run.json"
STATISTICS = "statistics.safetensors"
FORMAT_VERSION = 2
VIEWS = ("scored", "train")
"""Names of the datasets of a run, and of the directories next to `run.json` from which `datasets.load_from_disk` reads
the same rows."""

PARTS = re.compile(r"parts-[0-9a-f]{16}")
"""Pattern of the names of directories that saves write to."""

_FILE = re.compile(rf"(scored|train)/[A-Za-z0-9][A-Za-z0-9_.-]*|{re.escape(STATISTICS)}")
_MOST_BYTES = 16 << 20
REMEDY = "Restore it from a copy, or attribute again."


@dataclass(frozen=True)
class SavedFile:
    """Size in bytes and xxh3-128 digest of a file."""

    size: int
    digest: str

    @classmethod
    def of(cls, path: Path) -> "SavedFile":
        """Measure a file on disk.

        Raises:
            OSError: it cannot be read.
        """
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
            return cls(file.tell(), digest)


@dataclass(frozen=True)
class RunRecord:
    """The content of `run.json`. In a run of format 1, `parts` is `None` and `files` is empty."""

    facts: dict[str, Any]
    parts: str | None = None
    previous: str | None = None
    files: Mapping[str, SavedFile] = field(default_factory=dict)

    def content(self) -> bytes:
        """Serialize the record with its checksum. Facts keep their order, in which the report shows them.

        Raises:
            StoreError: the file would be larger than the largest that is read.
        """
        content: dict[str, Any] = {
            VERSION_KEY: FORMAT_VERSION,
            "parts": self.parts,
            "previous": self.previous,
            "files": {name: {"bytes": file.size, "xxh3_128": file.digest} for name, file in self.files.items()},
            "facts": self.facts,
        }
        text = json.dumps({CHECKSUM_KEY: content_digest(content), **content}, indent=2, allow_nan=False) + "\n"
        if len(text) > _MOST_BYTES:
            raise StoreError(
                f"The facts of the run and the list of its files make a {RECORD} of {len(text):,} bytes. Expected at "
                f"most {_MOST_BYTES:,}. Keep large values in a file of their own."
            )
        return text.encode()


def read_record(directory: Path) -> RunRecord | None:
    """Read `run.json` of a run.

    Returns:
        The record, or `None` if the file does not exist.

    Raises:
        StoreError: the file is damaged or of a later format.
    """
    path = directory / RECORD
    with unreadable(path):
        try:
            if (size := path.stat().st_size) > _MOST_BYTES:
                raise StoreError(f"{path} has {size:,} bytes. Expected at most {_MOST_BYTES:,}. {REMEDY}")
            data = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is no JSON ({str(error)[:200]}). Expected a JSON object. {REMEDY}") from error
    if not isinstance(content, dict):
        raise StoreError(f"{path} holds a JSON {type(content).__name__}. Expected an object. {REMEDY}")
    version = content.get(VERSION_KEY)
    if version not in (1, FORMAT_VERSION) or isinstance(version, bool):
        raise StoreError(
            f"{path} has format version {version!r}. Expected {FORMAT_VERSION}, or 1 without checksums. Read it with "
            "the version of hf_trak that wrote it, or attribute again."
        )
    try:
        check_seal(content, path, REMEDY)
    except (ValueError, RecursionError) as error:  # for values such as NaN, which hf_trak never writes
        raise StoreError(f"{path} is damaged ({str(error)[:200]}). Expected plain JSON. {REMEDY}") from error
    record = _parsed(content) if version == FORMAT_VERSION else _parsed_version_1(content)
    if record is None:
        raise StoreError(f"{path} does not say which files the run has, or has no facts. Expected both. {REMEDY}")
    return record


def _parsed(content: Mapping[str, Any]) -> RunRecord | None:
    facts, parts, previous, files = (content.get(name) for name in ("facts", "parts", "previous", "files"))
    if not isinstance(facts, dict) or not isinstance(files, dict) or not _is_parts(parts):
        return None
    if previous is not None and not _is_parts(previous):
        return None
    found = {}
    for name, entry in files.items():
        size, digest = (entry.get("bytes"), entry.get("xxh3_128")) if isinstance(entry, dict) else (None, None)
        if not isinstance(size, int) or not isinstance(digest, str) or not _FILE.fullmatch(name):
            return None
        found[name] = SavedFile(size, digest)
    return RunRecord(facts, parts, previous, found)


def _parsed_version_1(content: Mapping[str, Any]) -> RunRecord | None:
    facts = content.get("facts")
    return RunRecord(facts) if isinstance(facts, dict) and "parts" not in content else None


def _is_parts(name: object) -> bool:
    return isinstance(name, str) and PARTS.fullmatch(name) is not None


def parts_of(directory: Path) -> list[Path]:
    """List all directories that saves of a run have made."""
    return sorted(path for path in directory.glob("parts-*") if PARTS.fullmatch(path.name))


def is_dataset(path: Path) -> bool:
    """Tell whether a directory is a dataset with rows of its own, not a view."""
    return path.is_symlink() or any(path.glob("*.arrow"))


def find_run(directory: str | Path) -> Path:
    """Find a run in a directory: the directory itself, or the only run in its `scores/`.

    Raises:
        IncompleteStoreError: there is no run.
        ValueError: there are several runs.
    """
    directory = Path(directory)
    if (directory / "scored").is_dir() or parts_of(directory):
        return directory
    found = sorted(path for path in directory.glob("scores/*") if (path / RECORD).exists() or parts_of(path))
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"{directory} holds several runs. Expected one of {[str(path) for path in found]}.")
    if (directory / RECORD).exists():
        return directory
    raise IncompleteStoreError(
        f"{directory} holds no run. Expected a directory with `{RECORD}` or with the datasets `scored/` and `train/`, "
        "or the `output_dir` of `hf-trak attribute`. Run `hf-trak attribute`, or save one with `AttributionRun.save`."
    )


def check_file(path: Path, expected: SavedFile) -> None:
    """Compare a file with its size and checksum in `run.json`.

    Raises:
        IncompleteStoreError: the file is missing.
        StoreError: its size or checksum differs, or it cannot be read.
    """
    with unreadable(path):
        found = SavedFile.of(path)
    if found != expected:
        what = (
            f"it has {found.size:,} bytes instead of {expected.size:,}"
            if found.size != expected.size
            else f"its checksum is {found.digest} instead of {expected.digest}"
        )
        raise StoreError(f"{path} is damaged: {what}. Expected the file that {RECORD} describes. {REMEDY}")


def missing_file(path: Path, error: FileNotFoundError) -> IncompleteStoreError:
    """Make the error for a file of the run that does not exist: the one that `error` names, or else `path`."""
    return IncompleteStoreError(f"{error.filename or path} is missing. Expected a file that the run needs. {REMEDY}")


@contextlib.contextmanager
def unreadable(path: Path) -> Iterator[None]:
    """Turn the `OSError` for a file that cannot be read into a `StoreError`.

    Raises:
        IncompleteStoreError: the file does not exist.
        StoreError: the file cannot be read.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise missing_file(path, error) from error
    except OSError as error:
        raise StoreError(
            f"{path} cannot be read: {error}. Expected a file that this process may read. Get access to it, or "
            "attribute again."
        ) from error
