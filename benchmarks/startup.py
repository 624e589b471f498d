"""Time from the call to the first score, for models so small that little else is in it, each in a fresh process.

    OMP_NUM_THREADS=1 python benchmarks/startup.py --rounds 5
    OMP_NUM_THREADS=1 python benchmarks/startup.py --rounds 5 --against /path/to/another/checkout

One process imports torch, transformers and datasets, then hf_trak, then makes the model and the rows, and then asks
for scores: `TrakAttributor(…).attribute(targets)`, which featurizes the training rows first. Imports are counted for
themselves. Times are medians over processes, in seconds: of the clock, and of the CPU, which other work on the
machine changes less. With `--against`, processes of both checkouts take turns, and the last column is the median of
the ratios of neighbours' CPU times. Needs scikit-learn for the digits.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CASES = {
    "digits": "CNN of 6 thousand parameters, 1,000 images of digits",
    "gpt2": "GPT-2 of 170 thousand parameters, 256 rows of 64 tokens",
    "widths": "the same GPT-2, 256 rows of 8 to 64 tokens",
}
ROOT = Path(__file__).resolve().parents[1]


def digits() -> tuple[Any, Any, Any, Any, str]:
    """Make a CNN, images of digits to train on and ten to ask about."""
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    loaded = load_digits()
    images, labels = torch.tensor(loaded.images, dtype=torch.float32)[:, None] / 16, torch.tensor(loaded.target)
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)]
    rows = [torch.utils.data.TensorDataset(images[part], labels[part]) for part in (slice(1000), slice(1500, 1510))]
    return nn.Sequential(*layers).eval(), *rows, None, "image_classification"


def gpt2(shortest: int = 64) -> tuple[Any, Any, Any, Any, str]:
    """Make a GPT-2, rows of random tokens and ten to ask about."""
    import torch
    from datasets import Dataset
    from transformers import DataCollatorForTokenClassification, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    config = GPT2Config(
        n_embd=64, n_layer=2, n_head=2, vocab_size=1000, n_positions=128, bos_token_id=1, eos_token_id=2
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_words(), pad_token="<pad>")
    lengths = torch.randint(shortest, 65, (266,)).tolist()
    rows = [torch.randint(3, 1000, (length,)).tolist() for length in lengths]
    data = Dataset.from_dict({"input_ids": rows, "labels": rows})
    parts = data.select(range(256)), data.select(range(256, 266))
    return GPT2LMHeadModel(config).eval(), *parts, DataCollatorForTokenClassification(tokenizer), "causal_lm"


def _words() -> Any:
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({"<pad>": 0}))


def run(case: str) -> dict[str, float]:
    """Time one case in this process."""
    seconds: dict[str, float] = {}

    def lap(name: str, since: tuple[float, float]) -> tuple[float, float]:
        now = time.perf_counter(), time.process_time()
        seconds[name], seconds[f"{name} cpu"] = now[0] - since[0], now[1] - since[1]
        return now

    clock = time.perf_counter(), time.process_time()
    import datasets
    import torch
    import transformers  # noqa: F401

    clock = lap("libraries", clock)
    from hf_trak import TrakAttributor, TrakConfig

    lap("hf_trak", clock)
    datasets.disable_progress_bars()
    torch.manual_seed(0)
    model, rows, targets, collator, task = digits() if case == "digits" else gpt2(64 if case == "gpt2" else 8)
    with tempfile.TemporaryDirectory() as directory:
        config = TrakConfig(output_dir=directory, proj_dim=512, use_cpu=True, per_device_batch_size=32)
        clock = time.perf_counter(), time.process_time()
        attributor = TrakAttributor(model, config, rows, collator, task=task)
        attributor.featurize()
        scores = attributor.attribute(targets, method="index")
        lap("first score", clock)
    assert len(scores) == len(targets)
    return seconds


def fresh(case: str, checkout: Path) -> dict[str, float]:
    """Time one case in a process of its own, with the package of a checkout."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, __file__, "--run", case]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"`{' '.join(command)}` failed:\n{done.stderr[-2000:]}")
    package, found = json.loads(done.stdout.splitlines()[-1])
    if Path(package).parent != checkout / "hf_trak":
        raise SystemExit(f"`import hf_trak` found {package} instead of the package in {checkout}.")
    return dict(found)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", type=Path, help="a checkout of another version")
    parser.add_argument("--run", choices=list(CASES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        found = run(options.run)
        print(json.dumps([sys.modules["hf_trak"].__file__, found]))
        return
    checkouts = {"this": ROOT} | ({"other": options.against.resolve()} if options.against else {})
    print("| case | version | import of the libraries, CPU | of hf_trak after it, CPU | first score | CPU | ratio |")
    print("|---|---|---|---|---|---|---|")
    for case in options.cases:
        measured = [{name: fresh(case, path) for name, path in checkouts.items()} for _ in range(options.rounds)]
        for name in checkouts:
            median = {key: statistics.median(each[name][key] for each in measured) for key in measured[0][name]}
            ratio = statistics.median(
                each[name]["first score cpu"] / each["this"]["first score cpu"] for each in measured
            )
            shown = ("libraries cpu", "hf_trak cpu", "first score", "first score cpu")
            cells = " | ".join(f"{median[key]:.2f}" for key in shown)
            print(f"| {CASES[case]} | {name} | {cells} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
