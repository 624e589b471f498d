"""Directories of `TRAKer` and of retrainings in format 1, made by hf_trak 0.1.0 at commit 031fa76.

    git worktree add /tmp/format-1 031fa76
    PYTHONPATH=/tmp/format-1 HF_HUB_OFFLINE=1 python tests/data/format_1_traker.py tests/data/format-1

`traker-mmap/` and `traker-safetensors/` hold model ids 0 and 1 with scores, and model id 2 of which `HALF` rows were
featurized; `retraining/` three subsets, each trained twice; `traker-expected.json` the scores and outputs of that
version. Tests open them with the current version.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

N, M, IN, CLASSES, HALF = 10, 3, 5, 3, 6
SAVERS = {"traker-mmap": "MmapSaver", "traker-safetensors": "SafetensorsSaver"}
MASKS = [[1, 0, 1, 1, 0, 1, 0, 1], [0, 1, 1, 0, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0, 0, 1]]
SETTINGS = {"learning_rate": 0.5}


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(IN, 4), torch.nn.Tanh(), torch.nn.Linear(4, CLASSES))


def state(member: int) -> dict[str, torch.Tensor]:
    """Weights of checkpoint `member`: multiples of 1/64, exact in every precision."""
    numbers = iter(range(10_000))
    return {
        name: torch.tensor(
            [((next(numbers) * (37 + 2 * member) + 11 * member) % 97 - 48) / 64 for _ in range(w.numel())]
        )
        .reshape(w.shape)
        .float()
        for name, w in model().state_dict().items()
    }


def rows(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and labels of some rows; the targets are rows `N … N + M`."""
    pixels = [[((17 * i + 5 * j * j) % 31 - 15) / 16 for j in range(IN)] for i in range(start, stop)]
    return torch.tensor(pixels), torch.tensor([i % CLASSES for i in range(start, stop)])


def traker(directory: Path, saver: str) -> Any:
    import hf_trak.savers
    from hf_trak import TRAKer

    return TRAKer(
        model(), "image_classification", N, directory, device="cpu", saver=getattr(hf_trak.savers, saver), proj_dim=8,
        use_half_precision=False, lambda_reg=0.05, logging_level=30,
    )  # fmt: skip


def retrain(chosen: np.ndarray, seed: int) -> np.ndarray:
    """A training without randomness of any library: exact, and different for all rows and seeds."""
    return np.array([chosen.sum() + seed / 8, (chosen**2).sum() - seed / 4])


def main(directory: Path) -> None:
    from hf_trak.evaluation import retrain_on_subsets

    expected: dict[str, Any] = {}
    for name, saver in SAVERS.items():
        shutil.rmtree(directory / name, ignore_errors=True)
        own = traker(directory / name, saver)
        for member in range(3):
            own.load_checkpoint(state(member), member)
            for start in range(0, N if member < 2 else HALF, 2):
                own.featurize(rows(start, start + 2), inds=range(start, start + 2))
        own.finalize_features([0, 1])
        for member in range(2):
            own.start_scoring_checkpoint("golden", state(member), member, M)
            own.score(rows(N, N + M), num_samples=M)
        expected[name] = own.finalize_scores("golden", [0, 1]).tolist()
    shutil.rmtree(directory / "retraining", ignore_errors=True)
    found = retrain_on_subsets(MASKS, retrain, directory / "retraining", repeats=2, seed=3, settings=SETTINGS)
    expected["retraining"] = found["outputs"][:]
    (directory / "traker-expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
