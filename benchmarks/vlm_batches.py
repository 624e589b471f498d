"""CPU time per row of images and text, beside the training step of the same collator.

    OMP_NUM_THREADS=1 python benchmarks/vlm_batches.py

A small Qwen2-VL on rows of one image each: all of one size, or of three sizes in turn, which features take in batches
of one size each, while a training step takes them as they come. A step is forward and backward of the loss of the
batch, without the optimizer. Features are those of `TrakAttributor.featurize` with k = 512. Times are CPU time of the
process, best of a few rounds, without the first batch.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from datasets import disable_progress_bars
from torch import nn
from torch.utils.data import Dataset

from hf_trak import TrakAttributor, TrakConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "kit"))
import vlm_models

BATCH = 16
SIDES = {"one size": ((40, 40),), "three sizes": ((40, 40), (40, 32), (32, 48))}


class Rows(Dataset[dict[str, Any]]):
    """Random images, and texts of 24 to 40 tokens."""

    def __init__(self, count: int, sides: tuple[tuple[int, int], ...]) -> None:
        rng = np.random.default_rng(0)
        self.rows = [
            {
                "images": [rng.integers(0, 255, (3, *sides[row % len(sides)])).astype(np.uint8)],
                "text": rng.integers(1, 80, int(rng.integers(24, 41))).tolist(),
            }
            for row in range(count)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.rows[row]


def model() -> nn.Module:
    """Two layers of patches, four of tokens: 0.9 million parameters."""
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
    rope = {**vlm_models.ROPE, "mrope_section": [8, 4, 4]}
    vlm_models.CONFIGS["qwen2_vl"]["text_config"] |= {**sizes, "rope_parameters": rope}
    vlm_models.CONFIGS["qwen2_vl"]["vision_config"] |= {"embed_dim": 64, "hidden_size": 128, "num_heads": 4}
    return vlm_models.vlm("qwen2_vl")


def step_seconds(own: Any, rows: Rows, collator: Any) -> float:
    """Return the CPU seconds of forward and backward passes over all rows."""
    own.config.use_cache = False
    batches = [collator([rows[row] for row in range(low, low + BATCH)]) for low in range(0, len(rows), BATCH)]
    began = time.process_time()
    for batch in batches:
        own(**batch).loss.backward()
        own.zero_grad()
    return time.process_time() - began


def feature_seconds(own: Any, rows: Rows, collator: Any) -> float:
    """Return the CPU seconds of the features of all rows, without the choice of an engine, its check and collation."""
    with tempfile.TemporaryDirectory() as directory:
        config = TrakConfig(
            directory, proj_dim=512, use_cpu=True, per_device_batch_size=BATCH,
            remove_unused_columns=False,
        )  # fmt: skip
        collating = [0.0]

        def timed(given: list[Any]) -> Any:
            began = time.process_time()
            batch = collator(given)
            collating[0] += time.process_time() - began
            return batch

        attributor = TrakAttributor(own, config, rows, timed, task="causal_lm")
        done: list[float] = []
        attributor.features.batch_done = lambda rows: done.append(time.process_time() - collating[0])
        attributor.featurize()
        return (done[-1] - done[0]) * len(done) / (len(done) - 1)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=192, help=f"a multiple of {BATCH}")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    disable_progress_bars()
    own, collator = model(), vlm_models.vlm_collator("qwen2_vl")
    print(f"{sum(one.numel() for one in own.parameters()):,} parameters, batches of {BATCH}")
    print("| images | step, ms per row | features, ms per row | ratio |\n|---|---|---|---|")
    for name, sides in SIDES.items():
        rows = Rows(options.rows, sides)
        pairs = [
            (step_seconds(own, rows, collator), feature_seconds(own, rows, collator)) for _ in range(options.rounds)
        ]
        step, features = (1000 * min(column) / len(rows) for column in zip(*pairs, strict=True))
        print(f"| {name} | {step:.2f} | {features:.2f} | {features / step:.2f} |", flush=True)


if __name__ == "__main__":
    main()
