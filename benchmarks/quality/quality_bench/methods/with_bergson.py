"""bergson 2.5.1: its pipelines, on models and tokens in directories.

They take causal language models, and of those the linear layers but the last one, without biases unless told
otherwise. A classifier is given to them as a language model of one token (label_as_token.py), whose last layer is one
of the others.

"default" has the settings of the library's board (`examples/compare_wikitext`, a GPT-2 on WikiText), where they can be
had here:

- TRAK: gradients of log odds, one projection of all layers together, the plain inverse of XᵀX. The board has 4,096
  dimensions for 4,608 rows. With fewer rows than dimensions there is no plain inverse, so here there are 512
  dimensions, as in the library's documentation, or for fewer rows the largest power of two of them.
- TrackStar: the gradient of every layer projected to p × p = 16 × 16, and all together to norm 1. On the board p = 64
  is better. By default the metric is a mixture of the covariances of training rows' and targets' gradients. With as
  few targets as here it becomes that of targets alone, against which the library advises; the variants do without.
- EK-FAC: damping by .1 of the mean eigenvalue, labels drawn from the model. On the board Shampoo's bases are better.

The pipelines go over the training rows once more to score them, and so keep nothing of each.

Scores are what the library writes, but for the variants of TRAK and TrackStar: those are computed from features that
it writes, since it would go over the rows again for each.
"""

import contextlib
import copy
import io
import logging
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from bergson import DataConfig, IndexConfig, PreprocessConfig, QuerySetConfig
from bergson.build import build
from bergson.cli.commands import Hessian
from bergson.cli.trackstar import trackstar
from bergson.cli.trak import trak
from bergson.config.config import (
    HessianConfig,
    HessianPipelineConfig,
    InversionConfig,
    ScoreConfig,
    TrackstarConfig,
    TrakConfig,
)
from bergson.data import load_module_gradients, load_scores
from bergson.hessians.pipeline import hessian_pipeline
from datasets import Dataset, disable_progress_bars
from peft import PeftModel
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from quality_bench.job import Cost, Job, Method, Scores
from quality_bench.methods.label_as_token import label_as_token
from quality_bench.objective import IGNORED

ROWS = 256
"""Rows per batch. The library makes its random matrices anew for every batch, so that few are better."""
LOGITS = 2**26
"""Logits per batch at most."""

Part = Literal["train", "targets"]
Features = dict[str, dict[Part, Tensor]]
"""By layer, or for all of them together: features of training rows `(n, k)` and of targets `(m, k)`."""


@dataclass(frozen=True)
class Inputs:
    """What the library reads.

    Attributes:
        directory: of runs and of the tokens of both parts.
        models: directories of models.
        tokens: per batch.
        biases: whether the models have trainable biases.
    """

    directory: Path
    models: list[Path]
    tokens: int
    biases: bool

    @classmethod
    def of(cls, job: Job, count: int = 1) -> "Inputs":
        """Write the rows, and the models of the seeds 0, 1, …"""
        rows = documents(job)
        for part, each in rows.items():
            each.save_to_disk(job.directory / part)
        length = len(rows["train"][0]["input_ids"])
        tokens = length * ROWS
        directories = [job.directory / f"model-{seed}" for seed in range(count)]
        biases = False
        for model, directory in zip(job.independent(count), directories, strict=True):
            tokens = min(tokens, LOGITS // classes(model))
            biases = any(name.endswith("bias") and weight.requires_grad for name, weight in model.named_parameters())
            save(job, model, directory, tokens)
        return cls(job.directory, directories, tokens, biases)

    @property
    def query(self) -> QuerySetConfig:
        return QuerySetConfig(dataset=str(self.directory / "targets"))

    def run(self, name: str, part: Part = "train", model: int = 0, **options: Any) -> IndexConfig:
        """A run of this name, which must be new, over all rows of a part."""
        return IndexConfig(
            run_path=str(self.directory / name),
            model=str(self.models[model]),
            data=DataConfig(dataset=str(self.directory / part)),
            token_batch_size=self.tokens,
            **options,
        )

    def features(self, name: str, model: int = 0, **options: Any) -> Features:
        """Projected gradients of all rows."""
        found: Features = {}
        parts: tuple[Part, Part] = ("train", "targets")
        for part in parts:
            config = self.run(f"{name}-{part}-{model}", part, model, **options)
            build(config, PreprocessConfig())
            gradients = load_module_gradients(config.run_path)
            for layer in gradients:
                found.setdefault(layer, {})[part] = torch.tensor(gradients[layer], dtype=torch.float64)
        return found


def trak_scores(count: int) -> Method:
    """TRAK with this many independent models."""

    def attribute(job: Job, cost: Cost) -> Scores:
        inputs = Inputs.of(job, count)
        common: dict[str, Any] = {"projection_target": "global", "loss_fn": "log_odds"}
        own = common | {"projection_dim": min(512, 2 ** int(math.log2(len(job.case.train))))}
        directories = [inputs.directory / "trak" / f"checkpoint_{model}" for model in range(count)]
        if count == 1:
            directories = [inputs.directory / "trak"]

        def fit() -> None:
            for model, directory in enumerate(directories):
                config = inputs.run(f"{directory}/train_hessian", model=model, projection_seed=job.seed + model, **own)
                Hessian(HessianConfig("autocorrelation", use_dataset_labels=True), config).execute()

        def score() -> np.ndarray:
            config = inputs.run("trak", projection_seed=job.seed, **own)
            several = [str(directory) for directory in inputs.models] if count > 1 else []
            trak(config, TrakConfig(query=inputs.query, checkpoints=several, resume=True))
            return written(config)

        with quiet():
            cost.time("fit", fit)
            found = {"default": cost.time("score", score)}
            weights = np.mean([np.load(each / "scores" / "trak_weights.npy") for each in directories], axis=0)
            variants = {"": own, "k = 2048, ": common | {"projection_dim": 2048}}
            if inputs.biases:
                variants["biases, "] = own | {"include_bias": True}
            for name, options in variants.items():
                seeds = [options | {"projection_seed": job.seed + model} for model in range(count)]
                features = [inputs.features(f"trak {name}", model, **seed) for model, seed in enumerate(seeds)]
                for damping in (0.01, 0.1, 1.0, 10.0):
                    parts = [ridge(next(iter(each.values())), damping) for each in features]
                    found[f"{name}damping {damping:g}"] = np.mean(parts, axis=0) * weights[:, None]
        return found

    return attribute


def ridge(features: dict[Part, Tensor], damping: float) -> np.ndarray:
    """X (XᵀX / n + λI)⁻¹ tᵀ of features X `(n, k)` and t `(m, k)`, with λ relative to the mean eigenvalue, `(n, m)`.

    Divided by the mean magnitude of the inverse, as the library does, so that models have equal weight.
    """
    train = features["train"]
    gram = train.T @ train / len(train)
    gram.diagonal().add_(damping * gram.diagonal().mean())
    inverse = torch.linalg.inv(gram)
    return (train @ (inverse / inverse.abs().mean()) @ features["targets"].T).numpy()


def trackstar_scores(job: Job, cost: Cost) -> Scores:
    """TrackStar."""
    inputs = Inputs.of(job)
    common: dict[str, Any] = {"projection_seed": job.seed}
    own = common | {"projection_dim": 16}

    def fit() -> None:
        Hessian(HessianConfig("autocorrelation"), inputs.run("trackstar/value_hessian", **own)).execute()

    def score() -> np.ndarray:
        config = inputs.run("trackstar", **own)
        preprocess = PreprocessConfig(unit_normalize=True)
        trackstar(config, TrackstarConfig(query=inputs.query, preprocess_cfg=preprocess, resume=True))
        return written(config)

    with quiet():
        cost.time("fit", fit)
        found = {"default": cost.time("score", score)}
        for proj_dim in (16, 32, 64):
            features = inputs.features(f"trackstar-{proj_dim}", **common, projection_dim=proj_dim)
            for damping in (0.01, 0.1, 1.0):
                found[f"p = {proj_dim}, metric of rows, damping {damping:g}"] = cosines(features, damping)
    return found


def cosines(features: Features, damping: float) -> np.ndarray:
    """Cosines up to a factor for each target, in the metric H⁻¹, H = XᵀX / n + λI for every layer, `(n, m)`.

    With K = XXᵀ / n, XH⁻¹tᵀ = (K + λI)⁻¹Xtᵀ, so that no matrix is larger than `(n, n)`.
    """
    products, norms = 0.0, 0.0
    for layer in features.values():
        train, targets = layer["train"], layer["targets"]
        values, vectors = torch.linalg.eigh(train @ train.T / len(train))
        inverse = 1 / (values.clamp(min=0) + damping * values.sum() / train.shape[1])
        products = products + vectors @ (inverse[:, None] * (vectors.T @ (train @ targets.T)))
        norms = norms + vectors.square() @ (inverse * values.clamp(min=0))
    return (products / norms.sqrt().clamp_min(1e-12)[:, None]).numpy()


def factored(method: Literal["kfac", "shampoo"]) -> Method:
    """Bases of Kronecker factors, with corrected eigenvalues."""

    def attribute(job: Job, cost: Cost) -> Scores:
        inputs = Inputs.of(job)
        hessian = HessianConfig(method, ev_correction=True)

        def fit(name: str, **options: Any) -> None:
            torch.manual_seed(job.seed)  # labels are drawn from the model
            Hessian(hessian, inputs.run(f"{name}/hessian/{method}", **options)).execute()

        def score(name: str, damping: float = 0.1, **options: Any) -> np.ndarray:
            config = inputs.run(name, **options)
            for of_damping in (f"{method}_query", "scores"):
                shutil.rmtree(Path(config.run_path) / of_damping, ignore_errors=True)
            pipeline = HessianPipelineConfig(
                query=inputs.query, inversion_cfg=InversionConfig(damping_factor=damping), resume=True
            )
            hessian_pipeline(config, hessian, ScoreConfig(), PreprocessConfig(), pipeline)
            return written(config)

        with quiet():
            cost.time("fit", lambda: fit("factors"))
            found = {"default": cost.time("score", lambda: score("factors"))}
            for damping in (0.01, 1.0, 10.0):
                found[f"damping {damping:g}"] = score("factors", damping)
            if not inputs.biases:
                return found
            fit("biases", include_bias=True)
            for damping in (0.1, 1.0):
                found[f"biases, damping {damping:g}"] = score("biases", damping, include_bias=True)
        return found

    return attribute


def written(config: IndexConfig) -> np.ndarray:
    """Scores that a run has written, `(n, m)`, positive for helpful rows."""
    return np.asarray(load_scores(Path(config.run_path) / "scores")[:], dtype=np.float64)


def documents(job: Job) -> dict[Part, Dataset]:
    """Tokens and labels of the rows, without padding.

    A classifier's row is its number among all rows, and its label.
    """
    parts: dict[Part, Dataset] = {"train": job.case.train, "targets": job.case.targets}
    if job.case.task == "causal_lm":
        return {name: part.with_format(None).select_columns(["input_ids", "labels"]) for name, part in parts.items()}
    found: dict[Part, Dataset] = {}
    for name, part in parts.items():
        first = len(job.case.train) if name == "targets" else 0
        pairs = list(enumerate(job.case.labels(part).tolist(), first))
        columns = {"input_ids": pairs, "labels": [(IGNORED, label) for _, label in pairs]}
        found[name] = Dataset.from_dict({column: [list(pair) for pair in rows] for column, rows in columns.items()})
    return found


def save(job: Job, model: nn.Module, directory: Path, tokens: int) -> None:
    """The model, and a tokenizer, which the library loads though the rows are tokens already."""
    if job.case.task != "causal_lm":
        train, targets = job.case.inputs(job.case.train), job.case.inputs(job.case.targets)
        inputs = {name: torch.cat([tensor, targets[name]]) for name, tensor in train.items()}
        label_as_token(model, job.case.make_model, inputs).save_pretrained(directory)
    elif isinstance(model, PeftModel):
        copy.deepcopy(model).unload().save_pretrained(directory / "base")
        model.active_peft_config.base_model_name_or_path = str(directory / "base")
        model.save_pretrained(str(directory))
    else:
        longer(model, tokens).save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(directory)


def classes(model: Any) -> int:
    """Size of the vocabulary, or number of labels."""
    config = getattr(model, "config", None)
    return getattr(config, "vocab_size", 1)


def longer(model: Any, positions: int) -> Any:
    """A GPT-2 with more positions, which a batch must not have more tokens than; they are never used."""
    missing = positions - model.config.n_positions
    if missing <= 0:
        return model
    config = copy.deepcopy(model.config)
    config.n_positions = positions
    bigger = type(model)(config)
    weights = dict(model.state_dict())
    places: Tensor = weights["transformer.wpe.weight"]
    weights["transformer.wpe.weight"] = torch.cat([places, places.new_zeros(missing, places.shape[1])])
    bigger.load_state_dict(weights)
    return bigger


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the library's progress."""
    disable_progress_bars()
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)


METHODS: dict[str, Method] = {
    "TRAK": trak_scores(1),
    "TRAK × 3": trak_scores(3),
    "TrackStar": trackstar_scores,
    "EK-FAC": factored("kfac"),
    "Shampoo": factored("shampoo"),
}
