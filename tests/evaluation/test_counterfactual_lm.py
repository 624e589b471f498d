"""A small GPT-2 that has learned facts: which documents taught it, and what it forgets without them."""

import numpy as np
import pytest
import torch
import transformers as tf
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.scores.spans import Span

pytestmark = pytest.mark.slow  # a training and a featurization of some seconds

CAPITALS = {
    "france": "paris", "spain": "madrid", "italy": "rome", "austria": "vienna", "norway": "oslo", "japan": "tokyo",
    "sweden": "stockholm", "finland": "helsinki", "poland": "warsaw", "greece": "athens", "ireland": "dublin",
    "portugal": "lisbon", "hungary": "budapest", "egypt": "cairo", "peru": "lima", "cuba": "havana",
}  # fmt: skip
OPENINGS = ("everybody knows that", "in school we learned that", "the book says that", "")
ENDINGS = ("and many people live there .", ".", "where the parliament meets .")
OTHERS = (
    "the food of {country} is good and cheap .", "in winter it rains in the south of {country} .",
    "they spent a week in {city} and saw the old town .",
)  # fmt: skip
SEEDS = (0, 1, 2)
REMOVED = 4
TARGET = 0
PAD, END = 0, 1


def documents() -> list[str]:
    """For every country one document with its capital, and three about it or about its capital alone."""
    texts = []
    for i, (country, city) in enumerate(CAPITALS.items()):
        opening, ending = OPENINGS[i % len(OPENINGS)], ENDINGS[i % len(ENDINGS)]
        texts.append(f"{opening} the capital of {country} is {city} {ending}".strip())
        texts += [other.format(country=country, city=city) for other in OTHERS]
    return texts


@pytest.fixture(scope="module")
def tokenizer():
    words = sorted({word for text in documents() for word in text.split()})
    plain = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(["<pad>", "<end>", *words])}, unk_token="<pad>")
    )
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tf.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<end>")


@pytest.fixture(scope="module")
def rows(tokenizer) -> Dataset:
    def tokens(row):
        ids = [*tokenizer(row["text"])["input_ids"], END]
        return {"input_ids": ids, "labels": ids}

    return Dataset.from_dict({"text": documents()}).map(tokens)


@pytest.fixture(scope="module")
def targets(tokenizer) -> Dataset:
    """Prompts that ask for a capital, with the answer as the only label."""
    texts = [
        f"{OPENINGS[i % len(OPENINGS)]} the capital of {country} is {city}".strip()
        for i, (country, city) in enumerate(CAPITALS.items())
    ]
    asked = Dataset.from_dict({"text": texts}).map(lambda row: {"input_ids": tokenizer(row["text"])["input_ids"]})
    return Span(words=list(CAPITALS.values())).of(asked, tokenizer)


def train(rows: Dataset, vocabulary: int, seed: int, epochs: int = 100) -> tf.GPT2LMHeadModel:
    torch.manual_seed(seed)
    config = tf.GPT2Config(
        vocab_size=vocabulary, n_embd=48, n_layer=2, n_head=4, n_positions=24, bos_token_id=END, eos_token_id=END,
        pad_token_id=PAD, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = tf.GPT2LMHeadModel(config).train()
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows["input_ids"]], batch_first=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for chosen in torch.randperm(len(ids), generator=order).split(16):
            batch = ids[chosen]
            labels = batch.masked_fill(batch == PAD, -100)
            loss = model(input_ids=batch, attention_mask=(batch != PAD).long(), labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def answers(model: tf.GPT2LMHeadModel, targets: Dataset) -> np.ndarray:
    """log p of the answer of every prompt."""
    result = []
    for row in targets["input_ids"]:
        logits = model(input_ids=torch.tensor([row[:-1]])).logits[0, -1]
        result.append(float(logits.log_softmax(-1)[row[-1]]))
    return np.array(result)


@pytest.fixture(scope="module")
def trained(rows, tokenizer):
    return [train(rows, len(tokenizer), seed) for seed in SEEDS]


@pytest.fixture(scope="module")
def scores(trained, rows, targets, tokenizer, tmp_path_factory) -> np.ndarray:
    """`(targets, documents)`, from the ensemble of all seeds."""
    args = TrakConfig(str(tmp_path_factory.mktemp("trak")), proj_dim=1024, use_cpu=True, budget="fast")
    attributor = TrakAttributor(trained[0], args, train_dataset=rows, processing_class=tokenizer)
    attributor.featurize(checkpoints=trained)
    return np.asarray(attributor.attribute(targets, top_k=None, checkpoints=trained)["trak_scores"][:])


def test_the_model_has_learned_the_facts(trained, targets):
    """Most are known for sure, and none is at chance, which is one of 16 capitals."""
    for model in trained:
        probabilities = np.exp(answers(model, targets))
        assert float(np.median(probabilities)) > 0.8 and float(probabilities.min()) > 2 / len(CAPITALS)


def test_the_document_with_the_fact_ranks_above_all_others(scores):
    fact = np.arange(len(CAPITALS)) * (1 + len(OTHERS))
    ranks = (scores > scores[np.arange(len(fact)), fact][:, None]).sum(axis=1)
    assert ranks.tolist() == [0] * len(fact)


@pytest.mark.slow
def test_without_its_top_documents_the_model_forgets_and_without_random_ones_it_does_not(
    rows, targets, tokenizer, trained, scores
):
    """A counterfactual over three seeds, each compared with the same seed on all documents."""
    order = np.argsort(-scores[TARGET])
    removals = {"top": order[:REMOVED], "random": np.random.default_rng(0).permutation(order[REMOVED:])[:REMOVED]}
    fall = {}
    for name, removed in removals.items():
        kept = rows.select(sorted(set(range(len(rows))) - set(removed.tolist())))
        again = [train(kept, len(tokenizer), seed) for seed in SEEDS]
        fall[name] = np.array(
            [answers(a, targets)[TARGET] - answers(b, targets)[TARGET] for a, b in zip(trained, again, strict=True)]
        )
    assert bool((fall["top"] > fall["random"] + 1.0).all()), fall
    assert fall["top"].mean() > 3 * abs(fall["random"]).mean(), fall
