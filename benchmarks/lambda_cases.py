"""Four tasks to choose λ on: models retrained on random halves, and spectra of features of trained checkpoints.

Two image tasks (an MLP and a CNN on scikit-learn's digits), a text classifier (which package of the standard library a
documentation string is from) and a causal language model (Python's language reference), both one-block transformers
over words. Everything is trained here; no file is downloaded.
"""

import json
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from lambda_rules import Spectrum, spectrum
from lds_digits import NETWORKS, digits
from torch import Tensor, nn

from hf_trak.evaluation import model_outputs, random_subsets
from hf_trak.gradient_computers import make_gradient_computer
from hf_trak.gradient_computers.layout import ParameterLayout
from hf_trak.modelout_functions import get_task
from hf_trak.projectors import make_projector
from hf_trak.recipe_kit.python_text import python_packages, python_reference

PAD, UNKNOWN, IGNORED = 0, 1, -100
BATCH = 100
SEEDS = (0, 1)
"""Seeds of the projection: that of the scores, and another one to compare the first with."""


class Words(nn.Module):
    """Embeddings, one block of causal or full attention, and a head: on every word, or on the mean over words."""

    def __init__(self, vocabulary: int, outputs: int, length: int, causal: bool, width: int = 32) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.attention, self.back = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.head = nn.Linear(width, outputs)
        self.causal = causal

    def forward(self, input_ids: Tensor) -> Any:
        length = input_ids.shape[1]
        x = self.words(input_ids) + self.places(torch.arange(length))
        query, key, value = self.attention(self.first(x)).chunk(3, dim=-1)
        weights = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        hidden = (input_ids == PAD)[:, None, :]
        if self.causal:
            hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        x = x + self.back(weights.masked_fill(hidden, -1e9).softmax(-1) @ value)
        x = x + self.outer(torch.relu(self.inner(self.second(x))))
        if not self.causal:
            kept = (input_ids != PAD)[..., None]
            x = (x * kept).sum(1) / kept.sum(1)
        return SimpleNamespace(logits=self.head(x))


class Images(nn.Module):
    """A network of lds_digits.py."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.network = NETWORKS[name]()

    def forward(self, pixel_values: Tensor) -> Any:
        return SimpleNamespace(logits=self.network(pixel_values))


@dataclass
class Task:
    """A network with its data: the first `n` rows are trained on."""

    make: Callable[[], nn.Module]
    output: str
    inputs: Tensor
    labels: Tensor
    column: str
    n: int
    epochs: int

    def rows(self, start: int, stop: int) -> Dataset:
        chosen = {self.column: self.inputs[start:stop].numpy(), "labels": self.labels[start:stop].numpy()}
        return Dataset.from_dict(chosen)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """`(B,)`."""
        if logits.ndim == 2:
            return nn.functional.cross_entropy(logits, labels, reduction="none")
        each = nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none", ignore_index=IGNORED
        )
        return each.unflatten(0, (len(labels), -1)).sum(1) / 8


def images(name: str) -> Task:
    pixels, labels = digits()
    return Task(lambda: Images(name), "image_classification", pixels, labels, "pixel_values", 1000, 15)


def words(texts: list[str], length: int, vocabulary: int) -> tuple[Tensor, int]:
    """The first words of each text as numbers `(rows, length)`, and how many numbers there are."""
    split = [text.lower().split()[:length] for text in texts]
    common = [word for word, _ in Counter(word for text in split for word in text).most_common(vocabulary)]
    number = {word: index for index, word in enumerate(common, UNKNOWN + 1)}
    ids = [[number.get(word, UNKNOWN) for word in text] + [PAD] * (length - len(text)) for text in split]
    return torch.tensor(ids), len(common) + 2


def text() -> Task:
    rows = python_packages()["train"]
    ids, vocabulary = words(rows["text"][:], 24, 600)
    labels = torch.tensor(rows["label"][:])
    return Task(lambda: Words(vocabulary, 5, 24, False), "text_classification", ids, labels, "input_ids", 600, 12)


def language() -> Task:
    rows = python_reference()["train"]
    ids, vocabulary = words(rows["text"][:], 16, 300)
    labels = torch.where(ids == PAD, IGNORED, ids)
    return Task(lambda: Words(vocabulary, vocabulary, 16, True), "causal_lm", ids, labels, "input_ids", 600, 12)


TASKS: dict[str, Callable[[], Task]] = {
    "mlp": lambda: images("mlp"),
    "cnn": lambda: images("cnn"),
    "text": text,
    "language": language,
}


def train(task: Task, masks: Tensor, seed: int, ends: list[int] | None = None) -> list[nn.Module]:
    """Models trained at once, each on the rows of its mask, as they are after the epochs `ends`.

    Args:
        task: what is trained.
        masks: `(s, n)`, one row per model.
        seed: of the initial weights and of the order of rows.
        ends: in any order; the last epoch alone by default.

    Returns:
        s models for the first end, s for the second, and so on.
    """
    torch.manual_seed(seed)
    models = [task.make() for _ in masks]
    weights, _ = torch.func.stack_module_state(models)
    weights = {key: value.detach().requires_grad_() for key, value in weights.items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=3e-3, weight_decay=1e-2)

    def loss(parameters: dict[str, Tensor], keep: Tensor, x: Tensor, y: Tensor) -> Tensor:
        each = task.loss(torch.func.functional_call(models[0], parameters, (x,)).logits, y)
        return (each * keep).sum() / keep.sum().clamp_min(1)

    ends = [task.epochs] if ends is None else ends
    found: dict[int, list[nn.Module]] = {}
    for epoch in range(1, max(ends) + 1):
        for chosen in torch.randperm(task.n).split(100):
            optimizer.zero_grad()
            per_model = torch.func.vmap(loss, in_dims=(0, 0, None, None))(
                weights, masks[:, chosen].float(), task.inputs[chosen], task.labels[chosen]
            )
            per_model.sum().backward()
            optimizer.step()
        if epoch in ends:
            found[epoch] = []
            for index in range(len(masks)):
                model = task.make()
                model.load_state_dict({key: value[index].detach() for key, value in weights.items()})
                found[epoch].append(model.eval())
    return [model for end in ends for model in found[end]]


@dataclass
class Settings:
    """Settings that define the files of a task in the work directory."""

    work: Path
    ratios: list[float]
    """k ÷ n."""
    counts: list[int]
    targets: int
    subsets: int
    repeats: int
    rows: int | None = None
    """Training rows; `None` takes those of the task."""
    longer: float = 1.0
    """Factor of the number of epochs."""


@dataclass
class Checkpoint:
    """The data that all rules and scores are made from, for one checkpoint and one k."""

    features: Spectrum
    again: Spectrum | None
    """Those of another projection seed; of the first checkpoint alone."""
    outputs: np.ndarray
    """f of training rows `(n,)`."""
    target_outputs: np.ndarray
    """f of targets `(m,)`."""


class Prepared:
    """Retrained outputs and checkpoints of one task, kept in files and computed where those are missing."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name, self.settings = name, settings
        self.task = TASKS[name]()
        self.task.n = settings.rows or self.task.n
        self.task.epochs = max(1, round(self.task.epochs * settings.longer))
        left = len(self.task.inputs) - self.task.n
        if left < settings.targets:
            raise ValueError(
                f"{name} has {len(self.task.inputs)} rows, of which {left} are not trained on. Expected at least "
                f"--targets {settings.targets}. Choose fewer --rows or --targets."
            )
        tag = f"{name}-n{self.task.n}-e{self.task.epochs}-m{settings.targets}"
        self.directory = settings.work / tag
        self.directory.mkdir(parents=True, exist_ok=True)

    @property
    def n(self) -> int:
        return self.task.n

    @cached_property
    def targets(self) -> Dataset:
        return self.task.rows(self.n, self.n + self.settings.targets)

    @cached_property
    def train_rows(self) -> Dataset:
        return self.task.rows(0, self.n)

    @cached_property
    def masks(self) -> np.ndarray:
        """`(s, n)`: random halves."""
        return random_subsets(self.n, self.settings.subsets, seed=7)

    def dims(self) -> list[int]:
        return [max(1, round(ratio * self.n)) for ratio in self.settings.ratios]

    @property
    def kinds(self) -> list[str]:
        return ["independent", "one run"] if max(self.settings.counts) > 1 else ["independent"]

    def retrained(self) -> np.ndarray:
        """f of every target after training on every half, averaged over repeats: `(s, m)`."""
        runs = []
        for seed in range(self.settings.repeats):
            path = self.directory / f"outputs-s{self.settings.subsets}-seed{seed}.npy"
            if not path.is_file():
                with self._timed("retraining"):
                    models = train(self.task, torch.tensor(self.masks), seed)
                    found = [model_outputs(model, self.targets, self.task.output, batch_size=200) for model in models]
                    _save(path, np.stack(found))
            runs.append(np.load(path, allow_pickle=False))
        return np.mean(runs, axis=0)

    def checkpoints(self, kind: str, dim: int) -> list[Checkpoint]:
        """As many as the largest count, the first of them at the end of its training."""
        paths = [self._path(kind, dim, index) for index in range(max(self.settings.counts))]
        if not all(path.is_file() for path in paths):
            self._compute(kind)
        return [_load(path) for path in paths]

    def _path(self, kind: str, dim: int, index: int) -> Path:
        most = max(self.settings.counts)
        return self.directory / f"{kind.replace(' ', '-')}-{most}-k{dim}-{index}.npz"

    def _compute(self, kind: str) -> None:
        """Train the checkpoints, and write the spectra for every k."""
        most = max(self.settings.counts)
        with self._timed("training checkpoints"):
            if kind == "independent":
                models = train(self.task, torch.ones(most, self.n, dtype=torch.bool), 99)
            else:  # the last epoch first, so that one checkpoint is the trained model
                ends = np.linspace(self.task.epochs, 1, most).round().astype(int).tolist()
                models = train(self.task, torch.ones(1, self.n, dtype=torch.bool), 99, ends)
        for index, model in enumerate(models):
            seeds = SEEDS if index == 0 else SEEDS[:1]
            with self._timed("features"):
                rows = features(model, self.task.output, self.train_rows, self.dims(), seeds, index)
                targets = features(model, self.task.output, self.targets, self.dims(), seeds, index)
            for dim in self.dims():
                path = self._path(kind, dim, index)
                if path.is_file():
                    continue
                with self._timed("eigendecompositions"):
                    arrays = {"outputs": rows["f"], "target_outputs": targets["f"]}
                    for seed in seeds:
                        found = spectrum(rows[dim, seed], targets[dim, seed], rows["q"])
                        arrays |= {f"{key}-{seed}": value for key, value in found.to_arrays().items()}
                    _save(path, arrays)

    @contextmanager
    def _timed(self, what: str) -> Any:
        start = time.perf_counter()
        yield
        path = self.directory / "seconds.json"
        seconds = json.loads(path.read_text()) if path.is_file() else {}
        seconds[what] = seconds.get(what, 0.0) + time.perf_counter() - start
        path.write_text(json.dumps(seconds, indent=2) + "\n")

    def seconds(self) -> dict[str, float]:
        """Read how many seconds each stage of the files in the work directory took."""
        path = self.directory / "seconds.json"
        return json.loads(path.read_text()) if path.is_file() else {}


def features(
    model: nn.Module, output: str, rows: Dataset, dims: list[int], seeds: tuple[int, ...], model_id: int
) -> dict[Any, np.ndarray]:
    """Compute features `(rows, k)` by k and seed in one pass, as `TrakAttributor` does, and f and q `(rows,)`."""
    task = get_task(output)
    computer = make_gradient_computer("auto", model, task, device=torch.device("cpu"))
    total = ParameterLayout.from_model(model, None).total
    maps = {(dim, seed): make_projector("sjlt", total, dim, seed, "cpu") for dim in dims for seed in seeds}
    found: dict[Any, list[np.ndarray]] = {key: [] for key in [*maps, "f", "q"]}
    task.bind(model)
    tensors = rows.with_format("torch")
    for start in range(0, len(rows), BATCH):
        batch = tensors[start : start + BATCH]
        sinks = {key: projector.sink(len(batch["labels"]), model_id, "cpu") for key, projector in maps.items()}

        def sink(offset: int, block: Tensor, sinks: dict[Any, Any] = sinks) -> None:
            for each in sinks.values():
                each(offset, block)

        outputs = computer.stream(batch, sink, "train")
        for key, each in sinks.items():
            found[key].append((each.result() * maps[key].scale).numpy())
        found["f"].append(outputs.output.double().numpy())
        found["q"].append(outputs.out_to_loss.double().numpy())
    return {key: np.concatenate(parts) for key, parts in found.items()}


def _save(path: Path, content: np.ndarray | dict[str, np.ndarray]) -> None:
    temporary = path.with_name(f"writing-{path.name}")
    if isinstance(content, dict):
        np.savez(temporary, **content)  # type: ignore[arg-type]
    else:
        np.save(temporary, content)
    temporary.rename(path)


def _load(path: Path) -> Checkpoint:
    with np.load(path, allow_pickle=False) as arrays:
        again = Spectrum.from_arrays(arrays, "-1") if "q-1" in arrays else None
        return Checkpoint(Spectrum.from_arrays(arrays, "-0"), again, arrays["outputs"], arrays["target_outputs"])
