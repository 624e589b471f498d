"""What any method has to beat: chance, similarity of words, of embeddings, and of plain gradients."""

import re
from collections.abc import Iterator

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor, nn

from hf_trak.gradient_computers import make_gradient_computer
from hf_trak.modelout_functions import LossModelOutput, get_task
from hf_trak.modelout_functions.base import BatchedModelOutput
from quality_bench.job import BATCH, Cost, Job, Method, Scores

BLOCK = 1 << 28
"""Entries of gradients that are held at a time for training rows, and as many again for targets."""


def chance(job: Job, cost: Cost) -> Scores:
    shape = len(job.case.train), len(job.case.targets)
    return {"default": cost.time("score", lambda: np.random.default_rng(job.seed).standard_normal(shape))}


def bm25(job: Job, cost: Cost) -> Scores:
    """Okapi BM25 of a training text, with a target's text as the query (Robertson & Zaragoza 2009).

    Raises:
        ValueError: the rows of the case have no texts.
    """
    from rank_bm25 import BM25Okapi  # no other baseline needs it

    if job.case.texts is None:
        raise ValueError(f"The rows of case {job.case.name!r} have no texts. BM25 compares words. Leave it out here.")
    texts = job.case.texts
    index = cost.time("fit", lambda: BM25Okapi([words(text) for text in texts(job.case.train)]))
    kept = sum(len(counts) for counts in index.doc_freqs)
    cost.bytes_per_row = 8.0 * kept / len(job.case.train)  # a word's number and its count, 4 bytes each
    queries = [words(text) for text in texts(job.case.targets)]
    return {"default": cost.time("score", lambda: np.stack([index.get_scores(query) for query in queries], axis=1))}


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def gradients(cosine: bool) -> Method:
    """Make a method that compares exact per-sample gradients at the trained model, without any curvature.

    By default both are those of the loss (Charpiat et al. 2019, Input Similarity from the Neural Network Perspective;
    TracIn with the last checkpoint alone, Pruthi et al. 2020).
    """

    def attribute(job: Job, cost: Cost) -> Scores:
        margin = get_task(job.case.task)
        assert isinstance(margin, BatchedModelOutput)  # as all tasks by name are
        loss = LossModelOutput(margin)
        return {
            "default": cost.time("score", lambda: products(job, loss, loss, cosine)),
            "margins of targets": products(job, loss, margin, cosine),
            "margins": products(job, margin, margin, cosine),
        }

    return attribute


def products(job: Job, of_rows: BatchedModelOutput, of_targets: BatchedModelOutput, cosine: bool) -> np.ndarray:
    """Inner products, or cosines, of gradients of training rows and of targets `(n, m)`.

    Both sides have gradients of what a task has for training rows, which is minus the loss for the task of losses.
    Gradients of training rows come block by block, for as many targets at a time as memory is set aside for.
    """
    found = []
    for targets in gradient_blocks(job, job.case.targets, of_targets, len(job.case.targets)):
        columns = (normalized(targets) if cosine else targets).T
        rows = gradient_blocks(job, job.case.train, of_rows, BATCH)
        found.append(torch.cat([((normalized(block) if cosine else block) @ columns).cpu() for block in rows]))
    return torch.cat(found, dim=1).double().numpy()


def gradient_blocks(job: Job, rows: Dataset, task: BatchedModelOutput, most: int) -> Iterator[Tensor]:
    """Gradients of rows as tensors `(B, P)`, of at most `most` rows and [`BLOCK`] entries unless a row has more."""
    model = job.model.to(device())
    task.bind(model)
    computer = make_gradient_computer("auto", model, task)
    size = max(1, min(most, BLOCK // computer.grad_dim))
    tensors = rows.with_format("torch")
    for start in range(0, len(rows), size):
        batch = {name: column.to(device()) for name, column in tensors[start : start + size].items()}
        whole = torch.zeros(min(size, len(rows) - start), computer.grad_dim, device=device())

        def sink(first: int, block: Tensor, whole: Tensor = whole) -> None:
            whole[:, first : first + block.shape[1]] += block

        computer.stream(batch, sink)
        yield whole


def normalized(rows: Tensor) -> Tensor:
    """Rows of norm 1, unless they are zero."""
    return rows / rows.norm(dim=1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)


def embeddings(cosine: bool) -> Method:
    """Make a method that compares the inputs of the model's head, averaged over positions of a language model."""

    def attribute(job: Job, cost: Cost) -> Scores:
        def vectors(rows: Dataset) -> Tensor:
            found = embedded(job, rows)
            return normalized(found) if cosine else found

        rows = cost.time("fit", lambda: vectors(job.case.train))
        cost.bytes_per_row = 4.0 * rows.shape[1]
        return {"default": cost.time("score", lambda: (rows @ vectors(job.case.targets).T).double().numpy())}

    return attribute


def embedded(job: Job, rows: Dataset) -> Tensor:
    """Embeddings of rows `(rows, D)`: the input of the case's head, averaged over positions. No row is padded.

    Raises:
        ValueError: the model has no module of that name.
    """
    model = job.model.to(device())
    modules = dict(model.named_modules())
    if job.case.head not in modules:
        raise ValueError(
            f"Case {job.case.name!r} names the head {job.case.head!r}, which {type(model).__name__} lacks. Expected "
            "the name of its last linear layer. Correct `Case.head`."
        )
    found: list[Tensor] = []

    def keep(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        states = given[0].detach().cpu()
        found.append(states if states.ndim == 2 else states.mean(1))

    modules[job.case.head].register_forward_pre_hook(keep)
    inputs = job.case.inputs(rows)
    with torch.no_grad():
        for start in range(0, len(rows), BATCH):
            model(**{name: column[start : start + BATCH].to(device()) for name, column in inputs.items()})
    return torch.cat(found)


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


METHODS: dict[str, Method] = {
    "random": chance,
    "BM25": bm25,
    "gradient dot": gradients(cosine=False),
    "gradient cosine": gradients(cosine=True),
    "embedding dot": embeddings(cosine=False),
    "embedding cosine": embeddings(cosine=True),
}
