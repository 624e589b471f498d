"""Files that recipes write, each replaced in one step."""

import json
from pathlib import Path
from typing import Any

from datasets import Dataset

from hf_trak.store.atomic import atomic_directory, write_bytes


def write_json(path: Path, content: Any) -> None:
    """Replace a JSON file in one step. It is for people and their scripts; the library does not read it back."""
    write_bytes(path, (json.dumps(content, indent=2) + "\n").encode())


def save_dataset(dataset: Dataset, path: Path) -> None:
    """Save a dataset with `save_to_disk`, such that nothing half-written is ever under that name."""
    with atomic_directory(path) as temporary:
        dataset.with_format(None).save_to_disk(temporary)
