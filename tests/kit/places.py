"""Where the tests are: the repository, and the path on which processes of their own find the modules of the tests."""

import os
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
FOLDERS = [TESTS / "kit", *sorted(path for path in TESTS.iterdir() if path.is_dir() and path.name != "kit")]
PYTHONPATH = os.pathsep.join(map(str, [ROOT, ROOT / "recipes", *FOLDERS]))
