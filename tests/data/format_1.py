"""A feature store and a published index in format 1, made by hf_trak 0.1.0 at commit 031fa76.

    git worktree add /tmp/format-1 031fa76
    PYTHONPATH=/tmp/format-1:/tmp/format-1/tests HF_HUB_OFFLINE=1 python tests/data/format_1.py tests/data/format-1

`store/` is the output directory of a run with two checkpoints and one experiment, `index/` a copy of its published
form, `expected.json` the scores that version gave. Tests open both with the current version.
"""

import json
import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

N, M, IN, HIDDEN, CLASSES = 10, 3, 5, 4, 3


class Net(torch.nn.Module):
    """A perceptron whose weights are a formula, so that no random generator has to stay the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(IN, HIDDEN)
        self.last = torch.nn.Linear(HIDDEN, CLASSES)

    def forward(self, pixel_values: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self.last(torch.tanh(self.first(pixel_values))))


def state(member: int) -> dict[str, torch.Tensor]:
    """Weights of checkpoint `member`: multiples of 1/64, exact in every precision."""
    numbers = iter(range(10_000))

    def weight() -> float:
        return ((next(numbers) * (37 + 2 * member) + 11 * member) % 97 - 48) / 64

    shapes = {name: value.shape for name, value in Net().state_dict().items()}
    return {
        name: torch.tensor([weight() for _ in range(shape.numel())]).reshape(shape) for name, shape in shapes.items()
    }


def network(member: int = 0) -> Net:
    model = Net()
    model.load_state_dict(state(member))
    return model.eval()


def rows(start: int, count: int) -> Any:
    from datasets import Dataset

    pixels = [[((17 * i + 5 * j * j) % 31 - 15) / 16 for j in range(IN)] for i in range(start, start + count)]
    return Dataset.from_dict({"pixel_values": pixels, "labels": [i % CLASSES for i in range(start, start + count)]})


def main(directory: Path) -> None:
    from hub_server import TOKEN, Hub

    server = Hub()
    threading.Thread(target=server.server.serve_forever, daemon=True).start()
    os.environ |= {"HF_ENDPOINT": server.endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "HF_TOKEN": TOKEN}
    os.environ["HF_HOME"] = tempfile.mkdtemp()  # before the Hub's client is imported
    from hf_trak import TrakAttributor, TrakConfig
    from hf_trak.hub import pull_index

    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    args = TrakConfig(
        output_dir=str(directory / "store"), proj_dim=8, shard_size=4, per_device_batch_size=4, use_cpu=True,
    )  # fmt: skip
    attributor = TrakAttributor(network(), args, train_dataset=rows(0, N), task="image_classification")
    attributor.featurize([state(0), state(1)])
    scores = attributor.attribute(rows(100, M), top_k=None, name="golden", checkpoints=[state(0), state(1)])
    expected = [list(row) for row in scores.with_format("numpy")["trak_scores"][:].tolist()]
    (directory / "expected.json").write_text(json.dumps(expected) + "\n")
    del scores
    shutil.rmtree(directory / "store" / "scores")
    attributor.push_to_hub("me/golden")
    pull_index("me/golden", directory / "index")
    shutil.rmtree(directory / "index" / "experiments", ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
