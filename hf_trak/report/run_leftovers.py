"""What saves of a run have left behind: files of killed saves, and of those that were replaced.

The files of a save are in `parts-<key>`. While it is in progress there is a temporary file `.hf_trak-tmp-…-<key>`,
made before that directory and removed after `run.json` names it. Whoever looks for leftovers lists directories first,
then temporary files, and reads `run.json` last: a directory without a temporary file that `run.json` does not name is
one that no `run.json` will ever name.
"""

import contextlib
import re
import shutil
import socket
import time
from pathlib import Path

import psutil

from hf_trak.errors import StoreError
from hf_trak.report.run_record import STATISTICS, VIEWS, is_dataset, parts_of, read_record
from hf_trak.savers.atomic import remove_stale_temporaries

_TEMPORARY = re.compile(r"\.hf_trak-tmp-(?P<host>.+)-(?P<pid>\d+)-[0-9a-f]{16}")
_STALE_SECONDS = 3600.0


def leftovers(directory: str | Path) -> list[Path]:
    """What belongs to no result: parts of killed and replaced saves, temporary files, and the files of a run of
    format 1 that was replaced.

    What a save in progress has made is left alone: one of a living process of this host, or one of another host in
    the last hour. The save before the current one, which saving keeps for datasets in memory, counts.

    Args:
        directory: of the run.

    Returns:
        Paths, directories before the temporary files that belong to them. Nothing, where `run.json` is damaged:
        what it named cannot be known.
    """
    directory = Path(directory)
    found = _superseded(directory, keep_previous=False)
    places = [directory, *(directory / name for name in VIEWS)]
    temporaries = [path for place in places for path in _temporaries(place) if not _at_work(path)]
    return list(dict.fromkeys([*found, *temporaries])) if found is not None else []


def remove_leftovers(directory: str | Path) -> list[Path]:
    """Remove what [`leftovers`] finds, and return it."""
    found = leftovers(directory)
    _remove(found)
    return found


def remove_superseded(directory: Path) -> None:
    """What a save removes when it is complete: parts of killed and replaced saves, but not the save before it."""
    _remove(_superseded(directory, keep_previous=True) or [])
    remove_stale_temporaries(directory)


def _superseded(directory: Path, keep_previous: bool) -> list[Path] | None:
    """Parts that no `run.json` names or will name, and files of format 1; `None` where `run.json` is damaged."""
    found = parts_of(directory)
    leases = {path.name[-16:]: path for path in _temporaries(directory)}
    try:
        record = read_record(directory)  # last, see above
    except StoreError:
        return None
    kept: set[str | None] = set()
    if record is not None:
        kept = {record.parts, record.previous} if keep_previous else {record.parts}
    result = old_layout(directory) if record is not None and record.parts is not None else []
    for parts in found:
        lease = leases.get(parts.name.removeprefix("parts-"))
        if parts.name in kept or (lease is not None and _at_work(lease)):
            continue
        result += [parts] if lease is None else [parts, lease]
    return result


def old_layout(directory: Path) -> list[Path]:
    """What a run of format 1 has beside `run.json`, and what its killed saves left there."""
    found = [directory / name for name in VIEWS if is_dataset(directory / name)]
    found += [directory / f".{name}.{kind}" for name in VIEWS for kind in ("tmp", "old")]
    return [path for path in [*found, directory / STATISTICS] if path.exists() or path.is_symlink()]


def _remove(paths: list[Path]) -> None:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)  # files that are in use stay, where the system protects them
        else:
            path.unlink(missing_ok=True)


def _temporaries(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob(".hf_trak-tmp-*") if _TEMPORARY.fullmatch(path.name))


def _at_work(temporary: Path) -> bool:
    match = _TEMPORARY.fullmatch(temporary.name)
    if match is not None and match["host"] == _this_host():
        return psutil.pid_exists(int(match["pid"]))
    with contextlib.suppress(FileNotFoundError):
        return time.time() - temporary.stat().st_mtime < _STALE_SECONDS
    return False


def _this_host() -> str:
    """As it stands in the names of temporary files, see `hf_trak.savers.atomic`."""
    return re.sub(r"[^A-Za-z0-9_.]", "_", socket.gethostname())[:64] or "unknown"
