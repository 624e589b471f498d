"""Files that recipes leave behind, each replaced at once."""

import json
from pathlib import Path
from typing import Any

from datasets import Dataset

from hf_trak.store.atomic import atomic_directory, write_bytes


def check_exists(path: Path, name: str, what: str, suffixes: tuple[str, ...] = ()) -> None:
    """Refuse the name of a file or directory that is not there, rather than ask the Hub for it.

    Args:
        path: of the name.
        name: as given. Those of repos have no such suffix, and do not start with a dot, a slash or `~`.
        what: what is wanted, for the error message.
        suffixes: of files that it may be.

    Raises:
        FileNotFoundError: there is nothing at the path.
    """
    local = name.startswith((".", "/", "~")) or path.suffix in suffixes
    if local and not path.exists():
        raise FileNotFoundError(
            f"There is no such file or directory: {name!r} (looked in {str(Path.cwd())!r}). Expected a {what} on this "
            "machine, or the name of one on the Hub, 'user/name'. Correct the path."
        )


def write_json(path: Path, content: Any) -> None:
    """Replace a JSON file at once. It is for people and their scripts: the library reads none of those back."""
    write_bytes(path, (json.dumps(content, indent=2) + "\n").encode())


def save_dataset(dataset: Dataset, path: Path) -> None:
    """Save a dataset with `save_to_disk`, such that nothing half-written is ever under that name."""
    with atomic_directory(path) as temporary:
        dataset.with_format(None).save_to_disk(temporary)
