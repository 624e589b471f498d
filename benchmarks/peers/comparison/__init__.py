"""Cases, ground truth, one worker for each library, judgement and tables of the benchmark beside other libraries."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "recipes"))  # for `kit`
