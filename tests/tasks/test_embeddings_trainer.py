"""sentence-transformers itself: models, losses and trainers of the package beside the tasks."""

from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.modelout_functions.embeddings import stacked_texts

st = pytest.importorskip("sentence_transformers")
from sentence_transformers.cross_encoder import CrossEncoder  # noqa: E402
from sentence_transformers.sentence_transformer import losses  # noqa: E402
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer  # noqa: E402

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "far", "away", "home"]


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<pad>", "<unk>", *WORDS])}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, model_max_length=32, pad_token="<pad>", unk_token="<unk>", sep_token="on"
    )


def bert(**options: Any) -> BertConfig:
    return BertConfig(
        vocab_size=2 + len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, pad_token_id=0, **options,
    )  # fmt: skip


def encoder(directory: Any, **pooling: Any) -> Any:
    torch.manual_seed(0)
    BertModel(bert()).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    words = Transformer(str(directory))
    pool = Pooling(words.get_embedding_dimension(), **pooling)
    return st.SentenceTransformer(modules=[words, pool, Normalize()], device="cpu")


def texts(count: int, seed: int) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 8, (count,), generator=generator).tolist()
    return [
        " ".join(WORDS[i] for i in torch.randint(len(WORDS), (length,), generator=generator).tolist())
        for length in lengths
    ]


def columns(count: int, *names: str) -> dict[str, Any]:
    return {name: texts(count, place) for place, name in enumerate(names)}


def attributor(tmp_path: Any, model: Any, loss: Any, rows: dict[str, Any], **options: Any) -> TrakAttributor:
    args = st.SentenceTransformerTrainingArguments(
        str(tmp_path / "out"), use_cpu=True, report_to=[], per_device_train_batch_size=4, **options
    )
    trainer = st.SentenceTransformerTrainer(model, args, train_dataset=Dataset.from_dict(rows), loss=loss)
    trak = TrakConfig(
        str(tmp_path / "trak"), proj_type="none", feature_dtype="float32", use_cpu=True,
        per_device_batch_size=8,
    )  # fmt: skip
    return TrakAttributor.from_trainer(trainer, trak)


def loss_of(own: TrakAttributor, rows: int, alone: bool) -> torch.Tensor:
    featurizer = own.features.featurizer()
    batches = featurizer.batches(own.train_dataset)
    given = [batches.alone(row) for row in range(rows)] if alone else [batches.collated(range(rows))]
    task: Any = own.task
    return torch.cat([task.per_sample_loss(own.model(*task.model_inputs(batch)[0]), batch) for batch in given])


def features_by_autograd(own: TrakAttributor) -> torch.Tensor:
    batches, task = own.features.featurizer().batches(own.train_dataset), own.task
    found = []
    for row in range(len(own.train_dataset)):
        batch = batches.alone(row)
        args, _ = task.model_inputs(batch)
        f = task.output(own.model(*args), batch)[0]
        gradients = torch.autograd.grad(f, list(own.model.parameters()), allow_unused=True, materialize_grads=True)
        found.append(torch.cat([one.flatten() for one in gradients]))
    return torch.stack(found)


@pytest.mark.parametrize("symmetric", [False, True])
def test_ranking_loss(tmp_path, symmetric):
    model = encoder(tmp_path / "model")
    directions = ("query_to_doc", "doc_to_query") if symmetric else ("query_to_doc",)
    loss = losses.MultipleNegativesRankingLoss(
        model, directions=directions, partition_mode="per_direction" if symmetric else "joint"
    )
    own = attributor(tmp_path, model, loss, columns(4, "anchor", "positive", "negative"))
    own.featurize()
    expected = features_by_autograd(own)
    features = torch.cat([shard.grads for shard in own.features.store.train(0)])
    assert ((features - expected).norm(dim=1) < 1e-5 * expected.norm(dim=1)).all()
    # Four rows, all simulated: with the weight of a batch taken off, the loss of that batch.
    own.task.batch_size = None
    inputs = [{k: v for k, v in model.preprocess(column).items() if k != "modality"} for column in
              columns(4, "anchor", "positive", "negative").values()]  # fmt: skip
    with torch.no_grad():
        assert float(loss(inputs, None)) == pytest.approx(float(loss_of(own, 4, alone=False).mean()), abs=1e-5)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["CosineSimilarityLoss", "ContrastiveLoss", "TripletLoss"])
def test_losses_of_rows(tmp_path, kind):
    model = encoder(tmp_path / "model")
    rows = columns(5, "one", "two", "three") if kind == "TripletLoss" else columns(5, "one", "two")
    labels = None if kind == "TripletLoss" else [0, 1, 1, 0, 1]
    loss = getattr(losses, kind)(model)
    own = attributor(tmp_path, model, loss, rows if labels is None else {**rows, "label": labels})
    inputs = [model.preprocess(column) for column in rows.values()]
    given = None if labels is None else torch.tensor(labels)
    with torch.no_grad():
        alone, together = loss_of(own, 5, alone=True), loss_of(own, 5, alone=False)
        torch.testing.assert_close(alone, together, rtol=1e-5, atol=1e-6)
        assert float(loss(inputs, given)) == pytest.approx(float(together.mean()), abs=1e-5)


def test_prompts_of_columns(tmp_path):
    model = encoder(tmp_path / "model")
    loss = losses.MultipleNegativesRankingLoss(model)
    own = attributor(tmp_path, model, loss, columns(3, "anchor", "positive"), prompts={"anchor": "dog far "})
    tokens = own.features.featurizer().batches(own.train_dataset).alone(0)["input_ids"][0]
    assert tokens[0, :2].tolist() == tokenizer()("dog far")["input_ids"]
    assert tokens[1, :2].tolist() != tokens[0, :2].tolist()
    without = encoder(tmp_path / "model", include_prompt=False)
    made = attributor(tmp_path / "apart", without, losses.MultipleNegativesRankingLoss(without),
                      columns(3, "anchor", "positive"), prompts={"anchor": "dog far "})  # fmt: skip
    with pytest.raises(ValueError, match="prompt_length"):
        made.featurize()
    same = attributor(tmp_path / "same", without, losses.MultipleNegativesRankingLoss(without),
                      columns(3, "anchor", "positive"), prompts="dog far ")  # fmt: skip
    assert same.features.featurizer().batches(same.train_dataset).alone(0)["prompt_length"] == 2


def test_losses_of_batches_are_refused(tmp_path):
    model = encoder(tmp_path / "model")
    for kind in ("CoSENTLoss", "BatchAllTripletLoss"):
        with pytest.raises(ValueError, match="compares the rows of a batch"):
            attributor(tmp_path, model, getattr(losses, kind)(model), {**columns(3, "a", "b"), "label": [0, 1, 0]})
    with pytest.raises(ValueError, match="a MatryoshkaLoss"):
        inner = losses.MatryoshkaLoss(model, losses.MultipleNegativesRankingLoss(model), [8, 16])
        attributor(tmp_path, model, inner, columns(3, "a", "b"))
    own = type("TripletLoss", (losses.TripletLoss,), {"forward": lambda self, features, labels: features[0].sum()})
    with pytest.raises(ValueError, match=rf"a {__name__}\.TripletLoss"):
        attributor(tmp_path, model, own(model), columns(3, "a", "b", "c"))


def test_a_router_is_refused(tmp_path):
    from sentence_transformers.base.modules import Router

    model = encoder(tmp_path / "model")
    routed = st.SentenceTransformer(
        modules=[Router.for_query_document([model[0], model[1]], [model[0], model[1]])], device="cpu"
    )
    with pytest.raises(ValueError, match="Router"):
        attributor(
            tmp_path, routed, losses.MultipleNegativesRankingLoss(routed), columns(3, "anchor", "positive"),
            router_mapping={"anchor": "query", "positive": "document"},
        )  # fmt: skip
    with pytest.raises(ValueError, match="the task 'query'"):
        stacked_texts({"a_input_ids": torch.ones(1, 1, dtype=torch.long), "a_task": "query"})


@pytest.mark.parametrize("classes", [2, 1])
def test_a_cross_encoder_is_a_classifier_of_pairs(tmp_path, classes):
    torch.manual_seed(0)
    BertForSequenceClassification(bert(num_labels=classes)).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    cross = CrossEncoder(str(tmp_path / "model"), device="cpu")
    rows = columns(5, "one", "two")
    pairs = list(zip(*rows.values(), strict=True))
    tokens = cross.tokenizer(*rows.values(), truncation=True)
    labels = [0, 1, 1, 0, 1]
    dataset = Dataset.from_dict({**tokens, "labels": labels if classes == 2 else [[label] for label in labels]})
    trak = TrakConfig(str(tmp_path / "trak"), proj_type="none", feature_dtype="float32", use_cpu=True)
    task = None if classes == 2 else "multi_label_classification"
    own = TrakAttributor(cross[0].model, trak, dataset, processing_class=cross.tokenizer, task=task).featurize()
    features = torch.cat([shard.grads for shard in own.features.store.train(0)])
    for row, (pair, label) in enumerate(zip(pairs, labels, strict=True)):
        scores = cross[0].model(**cross.tokenizer(*pair, return_tensors="pt")).logits[0]
        margin = scores[label] - scores[1 - label] if classes == 2 else scores[0] * (2 * label - 1)
        gradients = torch.autograd.grad(margin, list(cross[0].model.parameters()))
        expected = torch.cat([one.flatten() for one in gradients])
        assert (features[row] - expected).norm() < 1e-5 * expected.norm()
