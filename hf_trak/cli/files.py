"""Files that recipes leave behind, each replaced at once."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from datasets import Dataset


def write_json(path: Path, content: Any) -> None:
    """Replace a JSON file at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(temporary, path)


def save_dataset(dataset: Dataset, path: Path) -> None:
    """`save_to_disk`, such that nothing half-written is ever under that name."""
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    dataset.with_format(None).save_to_disk(temporary)
    shutil.rmtree(path, ignore_errors=True)
    os.replace(temporary, path)
