"""Files that recipes write, each replaced in one step."""

import json
from pathlib import Path
from typing import Any

from datasets import Dataset

from hf_trak.store.atomic import atomic_directory, write_bytes


def check_exists(path: Path, name: str, what: str, suffixes: tuple[str, ...] = ()) -> None:
    """Refuse the name of a file or directory that does not exist, rather than ask the Hub for it.

    Args:
        path: the path that the name stands for.
        name: the name as given. Names of repos have none of the suffixes, and do not start with a dot, a slash or `~`.
        what: what is expected, for the error message.
        suffixes: suffixes of files.

    Raises:
        FileNotFoundError: nothing exists at the path.
    """
    local = name.startswith((".", "/", "~")) or path.suffix in suffixes
    if local and not path.exists():
        raise FileNotFoundError(
            f"There is no such file or directory: {name!r} (looked in {str(Path.cwd())!r}). Expected a {what} on this "
            "machine, or the name of one on the Hub, 'user/name'. Correct the path."
        )


def write_json(path: Path, content: Any) -> None:
    """Replace a JSON file in one step. It is for people and their scripts; the library does not read it back."""
    write_bytes(path, (json.dumps(content, indent=2) + "\n").encode())


def save_dataset(dataset: Dataset, path: Path) -> None:
    """Save a dataset with `save_to_disk`, such that nothing half-written is ever under that name."""
    with atomic_directory(path) as temporary:
        dataset.with_format(None).save_to_disk(temporary)
