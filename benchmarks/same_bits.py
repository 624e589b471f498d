"""Compare the features, Gram matrices and scores of twelve runs between two checkouts, to the bit.

    OMP_NUM_THREADS=1 python benchmarks/same_bits.py --against /path/to/another/checkout

Each case runs in a process of its own in either checkout, and prints a digest of every tensor that it leaves: the
tensors in the shards of features, codes and Gram matrices, and all scores. A case of the other checkout is spelt with
the names that this checkout's `TrakConfig` had when the two were apart.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from safetensors import safe_open
from sklearn.datasets import load_digits
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.modeling_outputs import ImageClassifierOutput

import hf_trak
from hf_trak import TrakAttributor, TrakConfig, TRAKer

ROOT = Path(__file__).resolve().parents[1]
RENAMED = not hasattr(hf_trak, "Exact")
"""Whether this checkout still has the names from before `method` and `CurvatureConfig`."""

TRAIN, TARGETS = range(0, 200), range(1000, 1016)


class Digits(nn.Module):
    """Classify digits of 8 × 8 pixels: a perceptron, or a convolution in front of it."""

    def __init__(self, convolution: bool = False) -> None:
        super().__init__()
        width = 6 * 16 if convolution else 64
        front = [nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)] if convolution else []
        self.body = nn.Sequential(*front, nn.Flatten(), nn.Linear(width, 32), nn.Tanh(), nn.LayerNorm(32))
        self.head = nn.Linear(32, 10)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> ImageClassifierOutput:
        logits = self.head(self.body(pixel_values))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return ImageClassifierOutput(loss=loss, logits=logits)


def digits(rows: range) -> Dataset:
    """Return rows of scikit-learn's digits as a dataset."""
    data = load_digits()
    images = data.images[rows.start : rows.stop, None] / 16.0
    return Dataset.from_dict({"pixel_values": images, "labels": data.target[rows.start : rows.stop]})


def tokens(count: int, first: int, classes: int | None = None) -> Dataset:
    """Return rows of random token ids of lengths from 5 to 20, with a class or to be continued."""
    rng = np.random.default_rng(first)
    rows = [rng.integers(5, 60, int(rng.integers(5, 21))).tolist() for _ in range(count)]
    width = max(map(len, rows))
    ids = [row + [0] * (width - len(row)) for row in rows]
    mask = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
    if classes is not None:
        labels = [sum(row) % classes for row in rows]
    else:
        labels = [row + [-100] * (width - len(row)) for row in rows]
    return Dataset.from_dict({"input_ids": ids, "attention_mask": mask, "labels": labels})


def trained(model: nn.Module, rows: Dataset, steps: int = 20) -> nn.Module:
    """Train a model for a few steps on all rows, and return it."""
    batch = {name: torch.tensor(np.array(rows[name])) for name in rows.column_names}
    batch = {name: value.float() if value.is_floating_point() else value for name, value in batch.items()}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    return model.eval()


def config(directory: Path, **given: Any) -> TrakConfig:
    """Spell a configuration in the names of this checkout."""
    if RENAMED:
        kind, number, curvature = given.pop("proj_type", "sjlt"), None, given.pop("curvature", {})
        if "-" in kind:
            kind, number = kind.split("-")
        given |= {"proj_type": kind, "disable_tqdm": True}
        given |= {} if number is None else {"factored_dim" if kind == "factored" else "proj_nonzeros": int(number)}
        if isinstance(given.get("proj_dim"), str):
            given["bytes_per_row"] = int(given.pop("proj_dim")[:-1])
        names = {"kind": "curvature", "rows": "curvature_rows", "whitened": "whitened", "damping": "damping"}
        given |= {names[name]: value for name, value in curvature.items()}
    return TrakConfig(output_dir=str(directory), use_cpu=True, shard_size=64, **given)


def asked(attributor: TrakAttributor, targets: Dataset, method: str, **options: Any) -> Dataset:
    """Ask for all scores, or for the rows of a rerank, in the names of this checkout."""
    top_k = 8 if method == "rerank" else None
    if RENAMED:
        given = {"index": {}, "exact": {"exact": True}, "rerank": {"rerank": 24}}[method]
        return attributor.attribute(targets, top_k=top_k, **given, **options)
    refine = options.get("refine")
    chosen = {"exact": hf_trak.Exact(refine=refine), "rerank": hf_trak.Rerank(rows=24, refine=refine)}
    return attributor.attribute(targets, top_k=top_k, method=chosen.get(method, "index"))


def digest(value: Any) -> str:
    """Return a digest of the bytes of a tensor or array."""
    if isinstance(value, Tensor):
        value = value.contiguous().view(torch.uint8) if value.dim() else value.reshape(1).view(torch.uint8)
        return hashlib.blake2b(value.numpy().tobytes(), digest_size=8).hexdigest()
    return hashlib.blake2b(np.ascontiguousarray(value).tobytes(), digest_size=8).hexdigest()


def left_in(directory: Path) -> dict[str, str]:
    """Return the digests of all tensors of training features, codes and Gram matrices in a directory."""
    found = {}
    for path in sorted(directory.glob("checkpoint-*/*.safetensors")):
        if path.name.startswith(("train-", "gram")):
            with safe_open(path, framework="pt") as file:
                for name in sorted(file.keys()):
                    found[f"{path.parent.name}/{path.name}:{name}"] = digest(file.get_tensor(name))
    return found


def attributed(
    directory: Path, model: nn.Module, rows: Dataset, targets: Dataset, task: str, *methods: str, checkpoints: int = 1,
    refine: str | None = None, **options: Any,
) -> dict[str, str]:  # fmt: skip
    """Featurize, score by each method, and return the digests of what is there."""
    attributor = TrakAttributor(model, config(directory, **options), train_dataset=rows, task=task)
    states = [{name: value * (1 + 0.1 * i) for name, value in model.state_dict().items()} for i in range(checkpoints)]
    attributor.featurize(states if checkpoints > 1 else None)
    found = left_in(directory)
    given = {} if refine is None else {"refine": refine}
    for method in methods or ("index",):
        scored = asked(attributor, targets, method, **given)
        for name in scored.column_names:
            if name.startswith("trak_") and name != "trak_stage":
                column = np.asarray([[np.nan if x is None else x for x in row] for row in scored[name]], dtype="f8")
                found[f"{method}:{name.replace('opponent', 'harmful')}"] = digest(column)
    return found


def perceptron(directory: Path, *methods: str, **options: Any) -> dict[str, str]:
    """Run methods on a perceptron of digits."""
    rows = digits(TRAIN)
    return attributed(
        directory, trained(Digits(), rows), rows, digits(TARGETS), "image_classification", *methods, **options
    )


def convolution(directory: Path) -> dict[str, str]:
    """Run two checkpoints of a convolutional network, with codes of 8 bits."""
    rows = digits(TRAIN)
    options = {"checkpoints": 2, "proj_dim": 2048, "feature_dtype": "int8"}
    return attributed(directory, trained(Digits(True), rows), rows, digits(TARGETS), "image_classification", **options)


def language(directory: Path) -> dict[str, str]:
    """Run a language model, with codes of 512 bytes a row."""
    rows = tokens(80, 1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))
    options = {"proj_dim": "512B", "feature_dtype": "int1"}
    return attributed(directory, trained(model, rows), rows, tokens(10, 2), "causal_lm", "index", "exact", **options)


def sentences(directory: Path) -> dict[str, str]:
    """Run a classifier of texts, with the factored projection."""
    rows = tokens(80, 3, classes=3)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(vocab_size=64, num_labels=3, **sizes))
    options = {"proj_type": "factored-8", "proj_dim": 1024}
    return attributed(directory, trained(model, rows), rows, tokens(10, 4, 3), "text_classification", **options)


def pictures(directory: Path) -> dict[str, str]:
    """Run a vision transformer, with a sketch of four nonzeros a coordinate."""
    rows = digits(TRAIN)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=10, **sizes))
    options = {"proj_type": "sjlt-4", "proj_dim": 512}
    return attributed(directory, trained(model, rows), rows, digits(TARGETS), "image_classification", **options)


def traker(directory: Path) -> dict[str, str]:
    """Run TRAKer on two checkpoints of a perceptron of digits."""
    from hf_trak.savers import MmapSaver

    rows, data = digits(TRAIN), load_digits()
    wrapped = trained(Digits(), rows)
    net = nn.Sequential(wrapped.body, wrapped.head)
    states = [{name: value * (1 + 0.1 * i) for name, value in net.state_dict().items()} for i in range(2)]

    def batch(of: range) -> list[Tensor]:
        pixels = torch.tensor(data.images[of.start : of.stop, None] / 16.0, dtype=torch.float32)
        return [pixels, torch.tensor(data.target[of.start : of.stop])]

    made = TRAKer(
        net, "image_classification", len(rows), save_dir=str(directory), device="cpu", proj_dim=256, saver=MmapSaver,
        use_half_precision=False, lambda_reg=1e-2,
    )  # fmt: skip
    for i, state in enumerate(states):
        made.load_checkpoint(state, model_id=i)
        for start in range(0, len(rows), 40):
            made.featurize(batch(range(start, start + 40)), num_samples=40)
    made.finalize_features()
    for i, state in enumerate(states):
        made.start_scoring_checkpoint("test", state, model_id=i, num_targets=len(TARGETS))
        made.score(batch(TARGETS), num_samples=len(TARGETS))
    return {"scores": digest(np.array(made.finalize_scores("test"), dtype="f4"))}


CASES: Mapping[str, Callable[[Path], dict[str, str]]] = {
    "perceptron, default": lambda directory: perceptron(directory),
    "perceptron, rademacher, float32": lambda d: perceptron(d, proj_type="rademacher", proj_dim=512),
    "perceptron, normal, float16": lambda d: perceptron(d, proj_type="normal", proj_dim=256, feature_dtype="float16"),
    "perceptron, unprojected": lambda d: perceptron(d, proj_type="none"),
    "convolution, int8, two checkpoints": convolution,
    "language model, 512 bytes a row, EK-FAC": language,
    "texts, factored": sentences,
    "vision transformer": pictures,
    "perceptron, EK-FAC and rerank": lambda d: perceptron(
        d, "exact", "rerank", proj_dim=512, curvature={"kind": "ekfac", "rows": 128}
    ),
    "perceptron, hybrid": lambda d: perceptron(d, "exact", proj_dim=512, curvature={"kind": "hybrid"}),
    "perceptron, refined": lambda d: perceptron(d, "exact", proj_dim=512, refine="cg"),
    "TRAKer": traker,
}


def run(case: str) -> dict[str, str]:
    """Run one case of this checkout in a new directory."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        return CASES[case](Path(directory) / "run")


def main() -> None:
    """Compare all cases of two checkouts, and say which differ."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--against", type=Path, help="the other checkout")
    parser.add_argument("--case", help="run this case alone, and print its digests")
    given = parser.parse_args()
    if given.case is not None:
        print(json.dumps(run(given.case)))
        return
    different = []
    for case in CASES:
        found = []
        for root in (ROOT, given.against.resolve()):
            environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            command = [sys.executable, __file__, "--case", case]
            output = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
            if output.returncode:
                sys.exit(f"{case} in {root}:\n{output.stderr}")
            found.append(json.loads(output.stdout.splitlines()[-1]))
        one, other = found
        names = sorted(name for name in {*one, *other} if one.get(name) != other.get(name))
        different += [case] if names or not one else []
        print(f"{case:42} {len(one):3} tensors, {'the same bits' if not names else 'DIFFERENT: ' + ', '.join(names)}")
    sys.exit(f"{len(different)} of {len(CASES)} runs differ." if different else None)


if __name__ == "__main__":
    main()
