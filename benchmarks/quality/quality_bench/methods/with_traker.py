"""traker 0.3.2 as its documentation shows it: a named task for classifiers, a model output class for the rest.

"default" has the library's own k = 2,048 and λ = 0, but single precision, since half precision is for GPUs. Other λ,
relative to trace(XᵀX) / min(n, k) of features X `(n, k)`, are given to the library's score computer together with the
features that it has stored.
"""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from trak import TRAKer
from trak.modelout_functions import AbstractModelOutput
from trak.score_computers import BasicScoreComputer

from quality_bench.job import Cost, Job, Logits, Method, Scores
from quality_bench.objective import margins, probabilities

ROWS = 256
"""Rows per batch. Without a GPU the library makes its random matrix anew for every batch, so that few are better."""

LAMBDAS = (0.03, 0.1, 1.0, 3.0, 10.0)
"""Relative λ beside the default."""

NARROW = 512
"""Features k beside the default."""

_TARGETS = "targets"


class LanguageModelOutput(AbstractModelOutput):
    """Margins of all tokens; the library has no such task, and says how to write one."""

    def __init__(self) -> None:
        super().__init__()

    @staticmethod
    def get_output(model: nn.Module, weights: Any, buffers: Any, *sample: Tensor) -> Tensor:
        *inputs, labels = (tensor.unsqueeze(0) for tensor in sample)
        return margins(torch.func.functional_call(model, (weights, buffers), tuple(inputs)), labels).sum()

    def get_out_to_loss_grad(self, model: nn.Module, weights: Any, buffers: Any, batch: list[Tensor]) -> Tensor:
        *inputs, labels = batch
        logits = torch.func.functional_call(model, (weights, buffers), tuple(inputs))
        return (1 - probabilities(logits, labels)).detach().unsqueeze(-1)


class BareLogits(Logits):
    """Logits of inputs by position, or by name, as the library's task of texts gives them.

    Frozen weights become buffers, since the library attributes to all parameters.
    """

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__(model, names)
        frozen = [name for name, weight in self.named_parameters(remove_duplicate=False) if not weight.requires_grad]
        for name in frozen:
            path, _, own = name.rpartition(".")
            module = self.get_submodule(path)
            weight = getattr(module, own).detach()
            delattr(module, own)
            module.register_buffer(own, weight)

    def forward(self, *tensors: Tensor, **named: Tensor) -> Tensor:
        return super().forward(*tensors, *(named[name] for name in self.names if name in named))


class Run:
    """One use of the library.

    Args:
        job: gives rows and models.
        count: of independent models.
        directory: of its files; must be new.
        options: of `TRAKer`, beside those that are the same for all uses.
    """

    def __init__(self, job: Job, count: int, directory: Path, **options: Any) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        names = list(job.case.inputs(job.case.train.select(range(1))))
        models = [BareLogits(model, names).to(device).eval() for model in job.independent(count)]
        self.states = [model.state_dict() for model in models[1:]]
        self.states.insert(0, {name: weight.clone() for name, weight in models[0].state_dict().items()})
        self.train, self.targets = (batches(job, part, device) for part in ("train", "targets"))
        self.directory = directory
        named = job.case.task in ("image_classification", "text_classification")
        self.traker = TRAKer(
            model=models[0],
            task=job.case.task if named else LanguageModelOutput(),
            train_set_size=len(job.case.train),
            save_dir=str(directory),
            device=device,
            projector_seed=job.seed,
            use_half_precision=False,
            logging_level=logging.ERROR,
            **options,
        )

    def fit(self) -> None:
        for model_id, state in enumerate(self.states):
            self.traker.load_checkpoint(state, model_id=model_id)
            for batch in self.train:
                self.traker.featurize(batch=batch, num_samples=len(batch[0]))
        self.traker.finalize_features()

    def score(self) -> np.ndarray:
        """`(n, m)`."""
        count = sum(len(batch[0]) for batch in self.targets)
        for model_id, state in enumerate(self.states):
            self.traker.start_scoring_checkpoint(_TARGETS, state, model_id, count)
            for batch in self.targets:
                self.traker.score(batch=batch, num_samples=len(batch[0]))
        return np.array(self.traker.finalize_scores(_TARGETS), dtype=np.float64)

    def ridges(self) -> list[np.ndarray]:
        """Scores `(n, m)` for all further λ, once there are some of the default."""
        found = []
        for relative in LAMBDAS:
            scores, weights = [], []
            for model_id in range(len(self.states)):
                features, targets = self._stored(model_id, "grads"), self._stored(model_id, f"{_TARGETS}_grads")
                unit = float(features.square().sum()) / min(features.shape)
                computer = BasicScoreComputer(torch.float32, "cpu", lambda_reg=relative * unit)
                features = computer.get_x_xtx_inv(features, computer.get_xtx(features))
                scores.append(torch.zeros(len(features), len(targets)))
                computer.get_scores(features, targets, scores[-1])
                weights.append(self._stored(model_id, "out_to_loss"))
            found.append((torch.stack(scores).mean(0) * torch.stack(weights).mean(0)).double().numpy())
        return found

    def bytes(self) -> int:
        """What is kept of training rows."""
        return sum(path.stat().st_size for path in self.directory.glob("[0-9]*/*.mmap"))

    def _stored(self, model_id: int, name: str) -> Tensor:
        return torch.tensor(np.load(self.directory / str(model_id) / f"{name}.mmap"))


def batches(job: Job, part: str, device: str) -> list[list[Tensor]]:
    """Inputs and labels, by batch."""
    inputs, labels = job.tensors(part)
    columns = [column.to(device).split(ROWS) for column in (*inputs, labels)]
    return [list(batch) for batch in zip(*columns, strict=True)]


def trak_scores(count: int) -> Method:
    """TRAK with this many independent models."""

    def attribute(job: Job, cost: Cost) -> Scores:
        own = Run(job, count, job.directory / "default")
        cost.time("fit", own.fit)
        cost.bytes_per_row = own.bytes() / len(job.case.train)
        found = {"default": cost.time("score", own.score)}
        narrow = Run(job, count, job.directory / "narrow", proj_dim=NARROW)
        narrow.fit()
        found[f"k = {NARROW}"] = narrow.score()
        for prefix, run in (("", own), (f"k = {NARROW}, ", narrow)):
            names = [f"{prefix}λ = {relative:g}" for relative in LAMBDAS]
            found |= dict(zip(names, run.ridges(), strict=True))
        return found

    return attribute


METHODS: dict[str, Method] = {"TRAK": trak_scores(1), "TRAK × 3": trak_scores(3)}
