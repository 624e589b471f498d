"""Leftovers of saving a run: files of saves that were killed or replaced.

A save writes to a temporary directory `.hf_trak-tmp-…-<key>` (`hf_trak.store.leftovers` deals with those of killed
saves), moves its files to `parts-<key>`, writes `run.json`, which names these parts, and removes the temporary
directory. To find leftovers, first list the parts, then the temporary directories, and read `run.json` last: parts
that have no temporary directory, and that `run.json` does not name, will never be named.
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
    """Find parts that `run.json` does not name, and the files of a run of format 1 that was replaced.

    The parts of the previous save are among them, although saving keeps those for datasets in memory. Temporary files
    are not.

    Args:
        directory: the directory of the run.

    Returns:
        The leftovers. Those of a save in progress have a living writer. If `run.json` is damaged, the list is empty,
        since the parts that it named are unknown.
    """
    return _superseded(Path(directory), keep_previous=False)


def remove_superseded(directory: Path) -> None:
    """Remove, after a save, the parts of all replaced saves except the previous one.

    Parts and temporary files of killed saves are removed, too, if they are old enough for any run to remove them.
    """
    for one in _superseded(directory, keep_previous=True):
        if one.host is None or one.stale:
            one.remove()
    remove_stale(directory)


def old_layout(directory: Path) -> list[Path]:
    """List the datasets and statistics that a run of format 1 has next to `run.json`."""
    found = [directory / name for name in VIEWS if is_dataset(directory / name)]
    return [path for path in [*found, directory / STATISTICS] if path.exists() or path.is_symlink()]


def _superseded(directory: Path, keep_previous: bool) -> list[Leftover]:
    """Find parts that `run.json` does not name, in the order of steps that the docstring of the module explains."""
    found = parts_of(directory)
    writers = {one.path.name[-16:]: one for one in leftovers(directory) if TEMPORARY.fullmatch(one.path.name)}
    try:
        record = read_record(directory)
    except StoreError:
        return []
    result = []
    if record is not None and record.parts is not None:
        kept = {record.parts, record.previous} if keep_previous else {record.parts}
        found = [parts for parts in found if parts.name not in kept]
        result = [_leftover(path, None) for path in old_layout(directory)]
    return result + [_leftover(parts, writers.get(parts.name.removeprefix("parts-"))) for parts in found]


def _leftover(path: Path, writer: Leftover | None) -> Leftover:
    """Describe a leftover. Its writer has ended unless there is still a temporary directory of it, `writer`."""
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
