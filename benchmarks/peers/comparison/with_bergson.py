"""bergson 2.5.1: its TRAK pipeline, on models and tokens in directories.

The pipeline (`bergson trak`) takes causal language models, and of those the linear layers. A classifier is given to it
as a language model of one token (label_as_token.py), which leaves nothing of it out but embeddings and norms.
"""

import contextlib
import copy
import io
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bergson import DataConfig, IndexConfig, PreprocessConfig, QuerySetConfig, load_gradients
from bergson.build import build
from bergson.cli.trak import trak
from bergson.collector.collector import project_global
from bergson.config.config import TrakConfig
from bergson.hessians.inversion import invert_psd_matrix
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from comparison.cases import Case
from comparison.job import Clock, Job, Scores, gradient_block
from comparison.label_as_token import GREYS, label_as_token
from comparison.objective import IGNORED

TOKENS = 2048
"""Tokens per batch, the library's default; it refuses more than the model has positions."""


def attribute(job: Job, clock: Clock) -> Scores:
    disable_progress_bars()
    logging.disable(logging.WARNING)
    directories = [job.directory / f"model-{index}" for index in range(len(job.models))]
    for model, directory in zip(job.models, directories, strict=True):
        save(job.case, model, directory)
    parts = {"train": job.directory / "train", "targets": job.directory / "targets"}
    for name, path in parts.items():
        documents(job.case, getattr(job.case, name)).save_to_disk(path)

    def config(name: str, part: str = "train", model: int = 0) -> IndexConfig:
        return IndexConfig(
            run_path=str(job.directory / name),
            model=str(directories[model]),
            data=DataConfig(dataset=str(parts[part])),
            projection_dim=job.k,
            projection_target="global",
            projection_seed=job.seed + model,
            include_bias=True,
            loss_fn="log_odds",
            token_batch_size=TOKENS,
        )

    def run() -> np.ndarray:
        several = [str(directory) for directory in directories] if len(directories) > 1 else []
        trak(config("run"), TrakConfig(query=QuerySetConfig(dataset=str(parts["targets"])), checkpoints=several))
        return read_scores(job.directory / "run" / "scores")

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        found = {"default": clock.time("all", run)}
        if job.lambdas:
            found |= ridges(job, config, len(directories))
        if job.timed:
            clock.time("featurize", lambda: build(config("features"), PreprocessConfig()))
            block = gradient_block(job.models)
            clock.time("project", lambda: project_global("block/single", block, job.k, "rademacher"))
    return found


def ridges(job: Job, config: Any, count: int) -> Scores:
    """Scores by λ, from the library's own features, inverse and weights, without its passes over rows for each λ."""
    parts = []
    for model in range(count):
        features = []
        for part in ("train", "targets"):
            name = f"{part}-{model}"
            build(config(name, part, model), PreprocessConfig())
            features.append(torch.tensor(np.array(load_gradients(job.directory / name))))
        parts.append(features)
    weights = np.load(job.directory / "run" / "scores" / "trak_weights.npy")
    found = {}
    for relative in job.lambdas:
        scores = np.zeros((len(weights), len(parts[0][1])))
        for train, targets in parts:
            damping = relative * job.k / min(train.shape)  # the library's unit is the mean eigenvalue, trace / k
            inverse = invert_psd_matrix(train.T @ train / len(train), damping_factor=damping)
            scores += (train @ (inverse / inverse.abs().mean()) @ targets.T).double().numpy()
        found[f"{relative:g}"] = scores / count * weights[:, None]
    return found


def read_scores(directory: Path) -> np.ndarray:
    """`(n, m)`."""
    info = json.loads((directory / "info.json").read_text())
    rows = np.memmap(directory / "scores.bin", dtype=info["dtype"], mode="r", shape=(info["num_rows"],))
    return np.stack([rows[f"score_{index}"] for index in range(info["num_scores"])], axis=1).astype(np.float64)


def save(case: Case, model: nn.Module, directory: Path) -> None:
    """The model and a tokenizer, which the library loads though the rows are tokens already."""
    if case.task == "causal_lm":
        longer(model).save_pretrained(directory)
    else:
        label_as_token(model).save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(directory)


def longer(model: Any) -> Any:
    """A GPT-2 with as many positions as a batch has tokens; those beyond a row's end are never used."""
    config = copy.deepcopy(model.config)
    config.n_positions = TOKENS
    bigger = type(model)(config)
    weights = dict(model.state_dict())
    places: Tensor = weights["transformer.wpe.weight"]
    weights["transformer.wpe.weight"] = torch.cat([places, torch.zeros(TOKENS - len(places), places.shape[1])])
    bigger.load_state_dict(weights)
    return bigger


def documents(case: Case, part: slice) -> Dataset:
    """Tokens and labels of each row."""
    labels = case.labels[part]
    if case.task == "causal_lm":
        counts = (labels != IGNORED).sum(1).tolist()
        rows = [row[:count] for row, count in zip(labels.tolist(), counts, strict=True)]
        return Dataset.from_dict({"input_ids": rows, "labels": rows})
    inputs = next(iter(case.inputs.values()))[part].flatten(1)
    if case.task == "image_classification":
        inputs = (inputs * (GREYS - 1)).round().long()
    beside = torch.full_like(inputs, IGNORED)
    return Dataset.from_dict(
        {
            "input_ids": torch.cat([inputs, labels[:, None]], dim=1).tolist(),
            "labels": torch.cat([beside, labels[:, None]], dim=1).tolist(),
        }
    )
