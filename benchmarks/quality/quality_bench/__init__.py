"""Cases from real data, methods of attribution, and a runner that judges every method on every case's bank."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "recipes"))  # for `kit`
