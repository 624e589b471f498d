"""Embeddings of texts: in-batch negatives, losses of single rows, and the trainer of sentence-transformers.

Model and trainer are small stand-ins here; `test_embeddings_trainer.py` has those of the package.
"""

from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import nn
from torch.nn import functional
from trak_options import trak_config
from transformers import Trainer, TrainingArguments

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.modelout_functions import EmbeddingLossModelOutput, EmbeddingPairsModelOutput, MissingEmbeddingsError
from hf_trak.modelout_functions.draws import Draws
from hf_trak.modelout_functions.embeddings import TextsCollator, stacked_texts, text_digests

WORDS = 20


class Encoder(nn.Module):
    """A `SentenceTransformer` as far as calls go: features in, features with an embedding out."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 6)
        self.out = nn.Linear(6, 5)

    def forward(self, input: dict[str, Any]) -> dict[str, Any]:
        mask = input["attention_mask"].unsqueeze(-1)
        mean = (torch.tanh(self.words(input["input_ids"])) * mask).sum(dim=1) / mask.sum(dim=1)
        return {**input, "sentence_embedding": self.out(mean)}


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Texts are words of digits and letters; columns come as the collator of sentence-transformers makes them."""
    batch: dict[str, Any] = {}
    for name in rows[0]:
        if name == "label":
            batch[name] = torch.tensor([row[name] for row in rows])
            continue
        tokens = [torch.tensor([int(word) for word in row[name].split()]) for row in rows]
        batch[f"{name}_input_ids"] = nn.utils.rnn.pad_sequence(tokens, True, 0)
        batch[f"{name}_attention_mask"] = nn.utils.rnn.pad_sequence([torch.ones_like(one) for one in tokens], True, 0)
        batch[f"{name}_modality"] = "text"
    return batch


def text_rows(
    count: int, names: tuple[str, ...] = ("anchor", "positive"), label: bool = False
) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(7)

    def text() -> str:
        length = int(torch.randint(2, 6, (1,), generator=generator))
        return " ".join(map(str, torch.randint(1, WORDS, (length,), generator=generator).tolist()))

    rows: list[dict[str, Any]] = [{name: text() for name in names} for _ in range(count)]
    if label:
        for place, row in enumerate(rows):
            row["label"] = place % 2 if label is True else label
    return rows


def model() -> Encoder:
    torch.manual_seed(0)
    return Encoder().eval()


def embedded(encoder: Encoder, row: dict[str, Any]) -> list[torch.Tensor]:
    """Embeddings of the texts of a row, each computed alone."""
    texts = [value for name, value in row.items() if name != "label"]
    tokens = [torch.tensor([[int(word) for word in text.split()]]) for text in texts]
    return [
        encoder({"input_ids": one, "attention_mask": torch.ones_like(one)})["sentence_embedding"][0] for one in tokens
    ]


def prepared(task: EmbeddingPairsModelOutput, encoder: Encoder, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Give the task its negatives, and return the batch of all rows."""
    own = TextsCollator(collate)
    task.prepare(encoder, [own(rows[:3]), own(rows[3:])])
    return own(rows)


# -- in-batch negatives ----------------------------------------------------------------------------------------------


def losses_by_hand(
    encoder: Encoder, rows: list[dict[str, Any]], scale: float, cosine: bool, directions: tuple[str, ...], joint: bool
) -> torch.Tensor:
    """The loss of every row of one batch: cross-entropy of its own positive."""
    texts = [torch.stack(column) for column in zip(*(embedded(encoder, row) for row in rows), strict=True)]
    texts = [functional.normalize(one, dim=-1) for one in texts] if cosine else texts
    anchors, positives, documents = texts[0], texts[1], torch.cat(texts[1:])
    count = len(rows)
    own = torch.eye(count, dtype=torch.bool)
    found = {
        "query_to_doc": anchors @ documents.T,
        "query_to_query": (anchors @ anchors.T).masked_fill(own, -torch.inf),
        "doc_to_query": positives @ anchors.T,
        "doc_to_doc": (positives @ documents.T).masked_fill(own.repeat(1, len(texts) - 1), -torch.inf),
    }
    scores = [scale * found[name] for name in directions]
    true = scores[0][:, :count].diagonal()
    if joint:
        return torch.cat(scores, dim=1).logsumexp(dim=1) - true
    return torch.stack([one.logsumexp(dim=1) for one in scores]).mean(dim=0) - true


@pytest.mark.parametrize("names", [("anchor", "positive"), ("anchor", "positive", "negative_1", "negative_2")])
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize(
    ("directions", "partition"),
    [
        (("query_to_doc",), "joint"),
        (("query_to_doc", "doc_to_query"), "joint"),
        (("query_to_doc", "doc_to_query"), "per_direction"),
        (("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"), "joint"),
    ],
)
def test_with_the_rows_of_the_batch_as_negatives_it_is_the_loss_of_the_batch(names, similarity, directions, partition):
    encoder, rows = model(), text_rows(6, names)
    task = EmbeddingPairsModelOutput(5.0, similarity, directions=directions, partition=partition)
    batch = prepared(task, encoder, rows)
    output = encoder(*task.model_inputs(batch)[0])
    expected = losses_by_hand(encoder, rows, 5.0, similarity == "cosine", directions, partition == "joint")
    torch.testing.assert_close(task.per_sample_loss(output, batch), expected, rtol=1e-5, atol=1e-5)
    if len(directions) == 1 or partition == "joint":
        torch.testing.assert_close(task.out_to_loss_grad(output, batch), 1 - (-expected).exp(), rtol=1e-5, atol=1e-5)
        odds = -torch.log(torch.expm1(expected))
        torch.testing.assert_close(task.output(output, batch), odds, rtol=1e-4, atol=1e-4)


def test_negatives_weigh_as_many_rows_as_a_batch_has():
    encoder, rows = model(), text_rows(7)
    task, weighted = EmbeddingPairsModelOutput(3.0), EmbeddingPairsModelOutput(3.0, batch_size=15)
    batch = prepared(task, encoder, rows)
    prepared(weighted, encoder, rows)
    output = encoder(*task.model_inputs(batch)[0])
    difference = task.output(output, batch) - weighted.output(output, batch)
    torch.testing.assert_close(difference, torch.full((7,), 14 / 7).log(), rtol=1e-5, atol=1e-5)


def test_simulated_rows_with_the_same_anchor_or_positive_are_left_out():
    encoder, rows = model(), text_rows(6)
    rows[4]["positive"] = rows[1]["positive"]
    rows[5]["anchor"] = rows[2]["anchor"]
    task = EmbeddingPairsModelOutput(2.0)
    batch = prepared(task, encoder, rows)
    output = encoder(*task.model_inputs(batch)[0])
    expected = losses_by_hand(
        encoder, [rows[1], rows[0], rows[2], rows[3], rows[5]], 2.0, True, ("query_to_doc",), True
    )
    torch.testing.assert_close(task.per_sample_loss(output, batch)[1], expected[0], rtol=1e-5, atol=1e-5)
    same = text_rows(1) * 3
    alone = EmbeddingPairsModelOutput()
    alone.prepare(encoder, [TextsCollator(collate)(same)])
    batch = TextsCollator(collate)(same)
    with pytest.raises(ValueError, match="shares its anchor or its positive with every simulated row"):
        alone.out_to_loss_grad(encoder(*alone.model_inputs(batch)[0]), batch)


def test_digests_know_tokens_and_not_padding():
    rows = [{"text": "1 2 3"}, {"text": "1 2 3 0"}, {"text": "3 2 1"}, {"text": "1 2"}]
    apart = [text_digests(TextsCollator(collate)([row])) for row in rows]
    together = text_digests(TextsCollator(collate)(rows))
    assert torch.equal(torch.cat(apart), together)
    assert len(set(together.flatten().tolist())) == 4
    left = {"input_ids": torch.tensor([[[9, 1, 2, 3]]]), "attention_mask": torch.tensor([[[0, 1, 1, 1]]])}
    assert int(text_digests(left)) == int(together[0])


def test_targets_can_be_asked_of_their_own_negatives_alone():
    encoder, rows = model(), text_rows(5, ("anchor", "positive", "negative_1", "negative_2"))
    task = EmbeddingPairsModelOutput(3.0, "dot", target="negatives")
    batch = prepared(task, encoder, rows)
    output = encoder(*task.model_inputs(batch)[0])
    anchor, positive, *others = (torch.stack(one) for one in zip(*(embedded(encoder, r) for r in rows), strict=True))
    negatives = torch.stack([3.0 * (anchor * other).sum(-1) for other in others])
    expected = 3.0 * (anchor * positive).sum(-1) - negatives.logsumexp(0)
    torch.testing.assert_close(task.output(output, batch, "target"), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        task.out_to_loss_grad(output, batch, "target"), (-expected).sigmoid(), rtol=1e-4, atol=1e-6
    )
    same = EmbeddingPairsModelOutput(3.0, "dot")
    prepared(same, encoder, rows)
    torch.testing.assert_close(task.output(output, batch), same.output(output, batch, "target"))
    pairs = TextsCollator(collate)(text_rows(3))
    with pytest.raises(ValueError, match="a column `negative`"):
        task.output(encoder(*task.model_inputs(pairs)[0]), pairs, "target")


@pytest.mark.slow
def test_labels_drawn_from_the_model_have_its_probabilities():
    encoder, rows = model(), text_rows(4)
    task = EmbeddingPairsModelOutput(3.0)
    batch = prepared(task, encoder, rows)
    output = encoder(*task.model_inputs(batch)[0])
    drawn = [task.sampled_log_likelihood(output, batch, Draws(seed, torch.arange(4))).detach() for seed in range(400)]
    share = (torch.stack(drawn) + task.per_sample_loss(output, batch).detach()).abs().lt(1e-5).float().mean(dim=0)
    expected = (-task.per_sample_loss(output, batch).detach()).exp()
    assert (share - expected).abs().max() < 5 * 0.5 / 20  # five standard errors
    two = EmbeddingPairsModelOutput(directions=("query_to_doc", "doc_to_query"), partition="per_direction")
    prepared(two, encoder, rows)
    with pytest.raises(TypeError, match="several labels"):
        two.sampled_log_likelihood(output, batch, Draws(0, torch.arange(4)))


def test_embeddings_of_other_weights_are_refused():
    encoder, rows = model(), text_rows(4)
    task = EmbeddingPairsModelOutput()
    batch = TextsCollator(collate)(rows)
    output = encoder(*task.model_inputs(batch)[0])
    with pytest.raises(MissingEmbeddingsError, match="no embeddings"):
        task.output(output, batch)
    prepared(task, encoder, rows)
    task.out_to_loss_grad(output, batch)
    with torch.no_grad():
        encoder.out.bias += 1
    with pytest.raises(MissingEmbeddingsError, match="other weights"):
        task.out_to_loss_grad(output, batch)
    with pytest.raises(ValueError, match="Expected `embeddings`"):
        task.restore(encoder, {"embeddings": torch.zeros(3, 2)})


# -- losses of single rows -------------------------------------------------------------------------------------------


def loss_by_hand(loss: str, distance: str, margin: float, texts: list[torch.Tensor], label: int) -> torch.Tensor:
    def far(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        if distance == "cosine":
            return 1 - one @ other / (one.norm() * other.norm())
        return (one - other).norm(p=2 if distance == "euclidean" else 1)

    if loss == "cosine_similarity":
        return (texts[0] @ texts[1] / (texts[0].norm() * texts[1].norm()) - label) ** 2
    if loss == "triplet":
        return torch.clamp(far(texts[0], texts[1]) - far(texts[0], texts[2]) + margin, min=0)
    near = far(texts[0], texts[1])
    return 0.5 * (near**2 if label else torch.clamp(margin - near, min=0) ** 2)


@pytest.mark.parametrize("distance", ["cosine", "euclidean", "manhattan"])
@pytest.mark.parametrize("loss", ["cosine_similarity", "contrastive", "triplet"])
def test_losses_of_rows(loss, distance):
    names = ("one", "other", "third") if loss == "triplet" else ("one", "other")
    encoder, rows = model(), text_rows(8, names, label=loss != "triplet")
    task = EmbeddingLossModelOutput(loss, distance, margin=0.7)
    batch = TextsCollator(collate)(rows)
    output = encoder(*task.model_inputs(batch)[0])
    expected = torch.stack(
        [loss_by_hand(loss, distance, 0.7, embedded(encoder, row), row.get("label", 0)) for row in rows]
    )
    # `pairwise_distance` adds 1e-6 to every difference
    torch.testing.assert_close(task.per_sample_loss(output, batch), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(task.output(output, batch), -expected, rtol=1e-4, atol=1e-5)
    assert task.out_to_loss_grad(output, batch).tolist() == [1.0] * 8
    if loss == "triplet":
        hinge = torch.clamp(0.7 - task.output(output, batch, "target"), min=0)
        torch.testing.assert_close(hinge, expected, rtol=1e-4, atol=1e-5)


def test_rows_of_other_columns_are_refused():
    encoder = model()
    batch = TextsCollator(collate)(text_rows(3))
    output = encoder(*EmbeddingLossModelOutput().model_inputs(batch)[0])
    with pytest.raises(ValueError, match=r"Expected 3 for the loss 'triplet'"):
        EmbeddingLossModelOutput("triplet").per_sample_loss(output, batch)
    with pytest.raises(ValueError, match="no labels"):
        EmbeddingLossModelOutput().per_sample_loss(output, batch)
    with pytest.raises(TypeError, match="without `sentence_embedding`"):
        EmbeddingLossModelOutput().per_sample_loss(torch.zeros(3, 2), batch)


# -- batches ---------------------------------------------------------------------------------------------------------


def test_texts_are_laid_beside_each_other():
    batch = TextsCollator(collate)([{"a": "1 2", "a_b": "3"}, {"a": "4", "a_b": "5 6 7"}])
    assert batch["input_ids"].tolist() == [[[1, 2, 0], [3, 0, 0]], [[4, 0, 0], [5, 6, 7]]]
    assert batch["attention_mask"].tolist() == [[[1, 1, 0], [1, 0, 0]], [[1, 0, 0], [1, 1, 1]]]
    assert set(batch) == {"input_ids", "attention_mask"}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"b_modality": "image"}, "the modality 'image'"),
        ({"b_task": "query"}, "the task 'query'"),
        ({"a_prompt_length": 3, "b_prompt_length": 4}, "`prompt_length` of"),
        ({"b_extra": torch.zeros(1, 2)}, "of only some of the columns"),
    ],
)
def test_columns_that_cannot_share_a_pass_are_refused(entries, message):
    given = {f"{name}_input_ids": torch.ones(1, 2, dtype=torch.long) for name in "ab"}
    with pytest.raises(ValueError, match=message):
        stacked_texts({**given, **entries})
    with pytest.raises(ValueError, match="no column of tokens"):
        stacked_texts({"pixel_values": torch.zeros(1)})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scale": 0.0}, "`scale`"),
        ({"similarity": "l2"}, "`similarity`"),
        ({"batch_size": 1}, "`batch_size`"),
        ({"directions": ("doc_to_query",)}, "query_to_doc"),
        ({"directions": ("query_to_doc", "doc_to_doc"), "partition": "per_direction"}, "positive of their own"),
        ({"partition": "both"}, "`partition`"),
        ({"target": "hard"}, "`target`"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        EmbeddingPairsModelOutput(**arguments)


# -- from rows to scores ---------------------------------------------------------------------------------------------


def config(path: Any, **options: Any) -> TrakConfig:
    common = {"proj_type": "none", "feature_dtype": "float32", "use_cpu": True}
    return trak_config(str(path), **{**common, "per_device_batch_size": 4, **options})


class SentenceTransformerTrainer(Trainer):
    """The trainer as far as the attribution looks at it."""

    def __init__(self, loss: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.loss = loss


SentenceTransformerTrainer.__module__ = "sentence_transformers.sentence_transformer.trainer"


def cos_sim(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    raise AssertionError("known by its name alone")


class MultipleNegativesRankingLoss(nn.Module):
    scale, similarity_fct = 4.0, staticmethod(cos_sim)
    directions, partition_mode = ("query_to_doc",), "joint"


class CoSENTLoss(nn.Module):
    pass


for _loss in (MultipleNegativesRankingLoss, CoSENTLoss):  # a loss of another module is the user's own
    _loss.__module__ = "sentence_transformers.sentence_transformer.losses"


def trained(tmp_path: Any, loss: Any, rows: list[dict[str, Any]]) -> SentenceTransformerTrainer:
    args = TrainingArguments(str(tmp_path / "out"), use_cpu=True, report_to=[], per_device_train_batch_size=5)
    return SentenceTransformerTrainer(
        loss, model=model(), args=args, train_dataset=Dataset.from_list(rows), data_collator=collate
    )


def test_features_of_a_trainer_are_gradients_of_single_rows(tmp_path):
    rows = text_rows(10)
    trainer = trained(tmp_path, MultipleNegativesRankingLoss(), rows)
    own = TrakAttributor.from_trainer(trainer, config(tmp_path / "trak")).featurize()
    assert (own.task.scale, own.task.batch_size) == (4.0, 5)
    features = torch.cat([shard.grads for shard in own.features.store.train(0)])
    encoder = model()
    bank = [[one.detach() for one in embedded(encoder, row)] for row in rows]
    for place, row in enumerate(rows):
        anchor, positive = embedded(encoder, row)
        scores = [4.0 * torch.cosine_similarity(anchor, other[1], dim=0) for other in bank]
        negatives = torch.stack([score for other, score in enumerate(scores) if other != place])
        f = 4.0 * torch.cosine_similarity(anchor, positive, dim=0) - (
            negatives.logsumexp(0) + torch.tensor(4 / 10).log()
        )
        expected = torch.cat([one.flatten() for one in torch.autograd.grad(f, list(encoder.parameters()))])
        assert (features[place] - expected).norm() < 1e-5 * expected.norm()
    scored = own.attribute([{"id": 1, "positive": rows[2]["positive"], "anchor": rows[2]["anchor"]}], top_k=3)
    assert scored[0]["trak_indices"][0] == 2
    third = {"negative": "1 2 3", **rows[2]}
    assert own.features.featurizer().batches([third]).collated([0])["input_ids"].shape[1] == 3
    with pytest.raises(ValueError, match=r"not \['positive'\]"):
        own.attribute([{"anchor": "1 2"}])


def test_negatives_stay_when_shards_are_computed_again(tmp_path):
    trainer = trained(tmp_path, MultipleNegativesRankingLoss(), text_rows(10))
    own = TrakAttributor.from_trainer(trainer, config(tmp_path / "trak", shard_size=4)).featurize()
    shards = own.features.store.train(0)
    before = [shard.grads.clone() for shard in shards]
    references = tmp_path / "trak" / "checkpoint-0" / "references.safetensors"
    content = references.read_bytes()
    shards.path(1).unlink()
    again = TrakAttributor.from_trainer(trainer, config(tmp_path / "trak", shard_size=4)).featurize()
    assert all(torch.equal(one, shard.grads) for one, shard in zip(before, again.features.store.train(0), strict=True))
    assert references.read_bytes() == content


def test_losses_of_batches_and_several_losses_are_refused(tmp_path):
    for loss, message in ((CoSENTLoss(), "compares the rows of a batch"), ({"a": CoSENTLoss()}, "a mapping of")):
        with pytest.raises(ValueError, match=message):
            TrakAttributor.from_trainer(trained(tmp_path, loss, text_rows(4)), config(tmp_path / "trak"))
    task = EmbeddingPairsModelOutput(simulated_batch_size=9)
    own = TrakAttributor.from_trainer(trained(tmp_path, CoSENTLoss(), text_rows(4)), config(tmp_path / "own"), task)
    with pytest.raises(ValueError, match="`simulated_batch_size` is 9"):
        own.featurize()
