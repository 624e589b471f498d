"""Embeddings of texts, trained with in-batch negatives (InfoNCE; van den Oord et al., arXiv 1807.03748; Henderson et
al., arXiv 1705.00652): `MultipleNegativesRankingLoss` of sentence-transformers.

With a, p, n_h the embeddings of anchor, positive and hard negatives of a row, s the scale, ⟨·,·⟩ the similarity, and
d_b, b ∈ B, the embeddings of positives and hard negatives of a fixed set of *simulated negatives*,

    f = s ⟨a, p⟩ − log [ Σ_h e^{s ⟨a, n_h⟩} + w Σ_b e^{s ⟨a, d_b⟩} ]        q = 1 − P = σ(−f)        L = softplus(−f)

P being the probability of the positive among all candidates, as for classification (TRAK paper, arXiv 2303.14186,
Sections 3.3 and 5.1). w = (batch size − 1) / |B| makes the simulated negatives weigh as much as those of a batch of
the training. B is drawn once, uniformly without replacement and with a seed, from embeddings computed with the same
checkpoint. It is the same for every row, but for texts of the row itself: a simulated row with the same anchor or the
same positive is left out. Neither f nor q of a row depends on the other rows in its batch.
"""

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from hf_trak.modelout_functions.base import Batch, Side, checked_choice
from hf_trak.modelout_functions.batches import evaluating, first_marked
from hf_trak.modelout_functions.clip import MissingEmbeddingsError, draw_rows, placed
from hf_trak.modelout_functions.draws import Draws
from hf_trak.modelout_functions.embeddings import EmbeddingModelOutput, text_digests
from hf_trak.runtime.checks import check_finite_rows, checked_int, checked_positive
from hf_trak.weights.watch import WeightsStamp, model_tensors

DEFAULT_SIMULATED_BATCH_SIZE = 300

Similarity = Literal["cosine", "dot"]
Direction = Literal["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"]
Partition = Literal["joint", "per_direction"]
Contrast = Literal["simulated", "negatives"]

_LEFT_OUT = -1e30
"""Logit of candidates that do not count: finite, so that draws and gradients stay so."""


class _Bank:
    """Embeddings `(N, C, d)` of N rows of C texts, float32 on the CPU, with the digests of the texts `(N, C)`."""

    def __init__(self, embeddings: Tensor, digests: Tensor, model: torch.nn.Module) -> None:
        self.embeddings = embeddings
        self.digests = digests
        self.stamp = WeightsStamp(model_tensors(model).values())


class EmbeddingPairsModelOutput(EmbeddingModelOutput):
    """The task `embedding_pairs`: f is the logit by which a row's positive is found among simulated negatives.

    Rows are pairs or triplets of texts: anchor, positive, and hard negatives in any number.
    """

    def __init__(
        self,
        scale: float = 20.0,
        similarity: Similarity = "cosine",
        batch_size: int | None = None,
        simulated_batch_size: int | None = None,
        directions: Sequence[Direction] = ("query_to_doc",),
        partition: Partition = "joint",
        target: Contrast = "simulated",
        seed: int | None = None,
    ) -> None:
        """
        Args:
            scale (`float`, *optional*, defaults to 20.0):
                s, the inverse of the temperature.
            similarity (`str`, *optional*, defaults to `"cosine"`):
                `"cosine"`, or `"dot"` for the inner product.
            batch_size (`int`, *optional*):
                Rows in a batch of the training, at least 2. `None` counts every simulated row as one of a batch.
            simulated_batch_size (`int`, *optional*):
                Number of simulated rows. `None` takes 300, or all training rows if they are fewer.
            directions (`Sequence[str]`, *optional*, defaults to `("query_to_doc",)`):
                What is contrasted, as in the loss of sentence-transformers: anchors with documents (positives and
                hard negatives), with anchors (`"query_to_query"`), positives with anchors (`"doc_to_query"`) or
                documents (`"doc_to_doc"`).
            partition (`str`, *optional*, defaults to `"joint"`):
                `"joint"` has one softmax over the candidates of all directions, `"per_direction"` one for each; f is
                then the sum of their logits, and q the mean of their error probabilities.
            target (`str`, *optional*, defaults to `"simulated"`):
                f on the target side: `"simulated"` as for training rows, `"negatives"` for s ⟨a, p⟩ − log Σ_h e^{s
                ⟨a, n_h⟩}, which asks why a target's own negatives are ranked above or below its positive.
            seed (`int`, *optional*):
                Seed of the draw, at least 0. `None` takes the seed of the run, or 0 outside of one.

        Raises:
            TypeError: a number is of another type.
            ValueError: an argument is out of range.
        """
        super().__init__()
        self.similarity = checked_choice(similarity, "similarity", Similarity)
        self.target = checked_choice(target, "target", Contrast)
        self.partition = checked_choice(partition, "partition", Partition)
        unknown = [each for each in directions if each not in get_args(Direction)]
        if unknown or "query_to_doc" not in directions:
            raise ValueError(
                f"`directions` is {tuple(directions)!r}. Expected 'query_to_doc', which has the positive, and any of "
                f"{list(get_args(Direction))[1:]}."
            )
        if partition == "per_direction" and {"query_to_query", "doc_to_doc"} & set(directions):
            raise ValueError(
                f"`directions` is {tuple(directions)!r} with `partition='per_direction'`. Expected 'query_to_doc' and "
                "'doc_to_query', since the others have no positive of their own. Use `partition='joint'`."
            )
        self.scale = checked_positive(scale, "scale")
        self.batch_size = None if batch_size is None else checked_int(batch_size, "batch_size", 2)
        self.simulated_batch_size = (
            None if simulated_batch_size is None else checked_int(simulated_batch_size, "simulated_batch_size", 2)
        )
        self.directions = tuple(directions)
        self.seed = None if seed is None else checked_int(seed, "seed", 0)
        self._own_seed = seed is not None
        self._bank: _Bank | None = None
        self._bound: weakref.ref[torch.nn.Module] | None = None
        self._held: tuple[_Bank, Tensor, Tensor] | None = None

    # -- simulated negatives -----------------------------------------------------------------------------------------

    def bind(self, model: torch.nn.Module) -> None:
        self._bound = weakref.ref(model)

    def use_seed(self, seed: int) -> None:
        if not self._own_seed:
            self.seed = seed

    def reference_rows(self, train_size: int) -> Sequence[int]:
        count = self.simulated_batch_size
        count = min(DEFAULT_SIMULATED_BATCH_SIZE, train_size) if count is None else count
        return draw_rows(train_size, count, self.seed or 0)

    def prepare(self, model: torch.nn.Module, loader: Iterable[Any]) -> None:
        device = next(model.parameters()).device
        embeddings, digests = [], []
        with evaluating(model):
            for given in loader:
                batch = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in given.items()}
                args, kwargs = self.model_inputs(batch)
                embeddings.append(self.embeddings(model(*args, **kwargs), batch).float().cpu())
                digests.append(text_digests(batch).cpu())
        found = torch.cat(embeddings)
        check_finite_rows(found, "embedding", remedy="Look at that row and at the checkpoint.")
        self._bank = _Bank(found, torch.cat(digests), model)
        self.bind(model)

    def references(self) -> dict[str, Tensor]:
        bank = self._require_bank()
        return {"embeddings": bank.embeddings, "digests": bank.digests}

    def restore(self, model: torch.nn.Module, references: Mapping[str, Tensor]) -> None:
        embeddings, digests = references.get("embeddings"), references.get("digests")
        if embeddings is None or digests is None or embeddings.ndim != 3 or digests.shape != embeddings.shape[:2]:
            given = {name: tuple(tensor.shape) for name, tensor in references.items()}
            raise ValueError(
                f"The references kept for the task `embedding_pairs` are {given}. Expected `embeddings` (N, C, d) and "
                "`digests` (N, C). Delete that file, and run the same command again."
            )
        self._bank = _Bank(embeddings, digests, model)
        self.bind(model)

    def _require_bank(self) -> _Bank:
        if self._bank is None:
            raise MissingEmbeddingsError(
                "The task `embedding_pairs` has no embeddings for simulated negatives. Expected a call of "
                "`task.prepare(model, loader)` after loading a checkpoint, before its first batch."
            )
        return self._bank

    def _bank_like(self, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Return the embeddings and digests of the simulated rows on the device of `embeddings`."""
        bank = self._require_bank()
        if self._held is None or self._held[0] is not bank or self._held[1].device != embeddings.device:
            # Under `torch.func` transforms results come wrapped for the transform at hand; they must not outlive it.
            moved, digests = (placed(each, embeddings) for each in (bank.embeddings, bank.digests))
            moved = normalize(moved, dim=-1) if self.similarity == "cosine" else moved
            self._held = (bank, moved, digests)
        return self._held[1:]

    # -- f and q -----------------------------------------------------------------------------------------------------

    def output(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        if side == "target" and self.target == "negatives":
            return _logit(self._own_candidates(model_output, batch))
        logits = [_logit(candidates) for candidates in self._softmaxes(model_output, batch)]
        return logits[0] if len(logits) == 1 else torch.stack(logits).sum(dim=0)

    def out_to_loss_grad(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        with torch.no_grad():
            self._check_weights()
            if side == "target" and self.target == "negatives":
                return torch.sigmoid(-_logit(self._own_candidates(model_output, batch)))
            errors = [torch.sigmoid(-_logit(each)) for each in self._softmaxes(model_output, batch, check=True)]
            return torch.stack(errors).mean(dim=0)

    def per_sample_loss(self, model_output: Any, batch: Batch) -> Tensor:
        """Compute −log P of every row, the mean over directions, differentiable, shape `(B,)`."""
        losses = [softplus(-_logit(candidates)) for candidates in self._softmaxes(model_output, batch)]
        return torch.stack(losses).mean(dim=0)

    def sampled_log_likelihood(self, model_output: Any, batch: Batch, draws: Draws) -> Tensor:
        """Compute log P of a candidate of every row that is drawn from the model, differentiable, `(B,)`.

        Raises:
            TypeError: there are several softmaxes.
        """
        softmaxes = self._softmaxes(model_output, batch)
        if len(softmaxes) > 1:
            raise TypeError(
                f"`partition` is 'per_direction' with {len(softmaxes)} directions, so that a row has several labels. "
                'Expected one softmax. Use `curvature.labels="empirical"`.'
            )
        logits = softmaxes[0].unsqueeze(1)
        return draws.log_likelihoods(logits, torch.ones_like(logits[..., 0], dtype=torch.bool)).squeeze(1)

    def _own_candidates(self, model_output: Any, batch: Batch) -> Tensor:
        """Compute the logits of every row's own texts, `(B, C - 1)`, the positive first."""
        embeddings = self.embeddings(model_output, batch)
        if embeddings.shape[1] < 3:
            raise ValueError(
                f"`target` is 'negatives', and the rows have {embeddings.shape[1]} column(s) of texts. Expected "
                "anchor, positive, and one negative or more. Give targets a column `negative`."
            )
        with torch.autocast(embeddings.device.type, enabled=False):
            if self.similarity == "cosine":
                embeddings = normalize(embeddings, dim=-1)
            return self.scale * (embeddings[:, 1:] @ embeddings[:, 0].unsqueeze(-1)).squeeze(-1)

    def _softmaxes(self, model_output: Any, batch: Batch, check: bool = False) -> list[Tensor]:
        """Compute the logits of all candidates, one tensor `(B, 1 + …)` for each softmax, the positive first.

        Args:
            model_output: what the model returned.
            batch: the batch.
            check: refuse rows without any negative.
        """
        embeddings = self.embeddings(model_output, batch)
        if embeddings.shape[1] < 2:
            raise ValueError(
                f"The rows have {embeddings.shape[1]} column of texts. Expected anchor and positive, and hard "
                "negatives in any number. Give targets the columns of the training rows."
            )
        bank, digests = self._bank_like(embeddings)
        with torch.autocast(embeddings.device.type, enabled=False):
            if self.similarity == "cosine":
                embeddings = normalize(embeddings, dim=-1)
            anchor, positive, hard = embeddings[:, 0], embeddings[:, 1], embeddings[:, 2:]
            own = text_digests(batch)[:, None, :2]
            same = (own == digests[None, :, :2]).any(dim=-1)
            if check:
                _check_negatives(same, hard)
            weight = 0.0 if self.batch_size is None else math.log((self.batch_size - 1) / bank.shape[0])

            def contrast(side: Tensor, others: Tensor) -> Tensor:
                """Compute the logits of `side` with the simulated texts `(N, C', d)`, `(B, N · C')`."""
                logits = self.scale * (side @ others.flatten(0, 1).T) + weight
                return logits.masked_fill(same.repeat_interleave(others.shape[1], dim=1), _LEFT_OUT)

            true = self.scale * (anchor * positive).sum(dim=-1, keepdim=True)
            documents = [self.scale * (hard @ anchor.unsqueeze(-1)).squeeze(-1), contrast(anchor, bank[:, 1:])]
            candidates = {
                "query_to_doc": lambda: documents,
                "query_to_query": lambda: [contrast(anchor, bank[:, :1])],
                "doc_to_query": lambda: [true, contrast(positive, bank[:, :1])],
                "doc_to_doc": lambda: [contrast(positive, bank[:, 1:])],
            }
            chosen = {each: candidates[each]() for each in self.directions}
            if self.partition == "per_direction":
                made = [[true, *each] if name == "query_to_doc" else each for name, each in chosen.items()]
                return [torch.cat(each, dim=-1) for each in made]
            return [torch.cat([true, *(each for some in chosen.values() for each in some)], dim=-1)]

    def _check_weights(self) -> None:
        """Raise `MissingEmbeddingsError` if the negatives were computed with other weights than the model has."""
        model = None if self._bound is None else self._bound()
        if model is not None and not self._require_bank().stamp.matches(model_tensors(model).values()):
            raise MissingEmbeddingsError(
                "The simulated negatives were computed with other weights than the model has now. Expected embeddings "
                "of the same checkpoint: call `prepare` again after loading each checkpoint."
            )


def _logit(candidates: Tensor) -> Tensor:
    """Compute log P / (1 − P) of the first of all candidates, `(B,)`."""
    return candidates[:, 0] - candidates[:, 1:].logsumexp(dim=-1)


def _check_negatives(same: Tensor, hard: Tensor) -> None:
    if hard.shape[1] == 0 and (alone := first_marked(same.all(dim=-1))):
        raise ValueError(
            f"Row {alone[0]} of the batch shares its anchor or its positive with every simulated row, "
            "so that it has no negative. Expected rows with other texts among them. Raise `simulated_batch_size`, or "
            "use a task of another loss."
        )
