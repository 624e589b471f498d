"""What saves of a run have left behind: files of killed saves, and of those that were replaced.

A save writes to a temporary directory `.hf_trak-tmp-…-<key>` (see `hf_trak.store.leftovers` for those of killed
ones), moves its files to `parts-<key>`, has `run.json` name that, and removes the temporary directory. Whoever looks
for leftovers lists parts first, then temporary directories, and reads `run.json` last: parts without a temporary
directory, which `run.json` does not name, are parts that no `run.json` will ever name.
"""

import contextlib
import os
import time
from pathlib import Path

from hf_trak.errors import StoreError
from hf_trak.report.run_record import STATISTICS, VIEWS, is_dataset, parts_of, read_record
from hf_trak.store.atomic import TEMPORARY
from hf_trak.store.leftovers import Leftover, leftovers, remove_stale


def run_leftovers(directory: str | Path) -> list[Leftover]:
    """What belongs to no result beside temporary files: parts that `run.json` does not name, and the files of a run
    of format 1 that was replaced.

    The parts of the save before the current one count, although saving keeps them for datasets in memory.

    Args:
        directory: of the run.

    Returns:
        Leftovers whose writers live while a save is in progress. Nothing, where `run.json` is damaged: what it named
        cannot be known.
    """
    return _superseded(Path(directory), keep_previous=False)


def remove_superseded(directory: Path) -> None:
    """What a save removes when it is complete: parts of saves that were replaced, but for the one before it; parts
    and temporary files of killed saves that every run may remove.
    """
    for one in _superseded(directory, keep_previous=True):
        if one.host is None or one.stale:
            one.remove()
    remove_stale(directory)


def old_layout(directory: Path) -> list[Path]:
    """The datasets and statistics that a run of format 1 has beside `run.json`."""
    found = [directory / name for name in VIEWS if is_dataset(directory / name)]
    return [path for path in [*found, directory / STATISTICS] if path.exists() or path.is_symlink()]


def _superseded(directory: Path, keep_previous: bool) -> list[Leftover]:
    found = parts_of(directory)
    writers = {one.path.name[-16:]: one for one in leftovers(directory) if TEMPORARY.fullmatch(one.path.name)}
    try:
        record = read_record(directory)  # last, see above
    except StoreError:
        return []
    result = []
    if record is not None and record.parts is not None:
        kept = {record.parts, record.previous} if keep_previous else {record.parts}
        found = [parts for parts in found if parts.name not in kept]
        result = [_leftover(path, None) for path in old_layout(directory)]
    return result + [_leftover(parts, writers.get(parts.name.removeprefix("parts-"))) for parts in found]


def _leftover(path: Path, writer: Leftover | None) -> Leftover:
    """A leftover whose writer has ended, or the one whose temporary directory is there."""
    size = 0
    files = [os.path.join(place, name) for place, _, names in os.walk(path) for name in names]
    for file in files or [str(path)]:
        with contextlib.suppress(FileNotFoundError):  # another process may be removing it
            size += os.lstat(file).st_size
    if writer is not None:
        return Leftover(path, size, writer.age, writer.host, writer.alive)
    age = 0.0
    with contextlib.suppress(FileNotFoundError):
        age = max(0.0, time.time() - path.lstat().st_mtime)
    return Leftover(path, size, age, None, False)
