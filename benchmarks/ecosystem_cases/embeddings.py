"""sentence-transformers, and what is built on it."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from datasets import Dataset

from ecosystem_cases.case import VOCABULARY, EcosystemCase, texts, tokenizer
from ecosystem_cases.truth import of_model, of_trainer, with_truth, without_truth
from hf_trak import TrakAttributor, TrakConfig

LABELS = [0, 1, 1, 0, 1, 0]


def bert(**options: Any) -> hf.BertConfig:
    return hf.BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, pad_token_id=0, **options,
    )  # fmt: skip


def encoder(directory: Path) -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    torch.manual_seed(0)
    hf.BertModel(bert()).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    words = Transformer(str(directory))
    return SentenceTransformer(
        modules=[words, Pooling(words.get_embedding_dimension()), Normalize()], device="cpu"
    ).eval()


def columns(*names: str) -> dict[str, Any]:
    return {name: texts(6, place) for place, name in enumerate(names)}


def trained(directory: Path, args: TrakConfig, *, loss: str, names: tuple[str, ...], labels: bool = False) -> Any:
    import sentence_transformers as st
    from sentence_transformers.sentence_transformer import losses

    model = encoder(directory / "model")
    own = st.SentenceTransformerTrainingArguments(str(directory / "out"), use_cpu=True, report_to=[])
    rows = Dataset.from_dict({**columns(*names), **({"label": LABELS} if labels else {})})
    trainer = st.SentenceTransformerTrainer(model, own, train_dataset=rows, loss=getattr(losses, loss)(model))
    # negatives of a row are other rows
    return without_truth(trainer, args) if loss == "MultipleNegativesRankingLoss" else of_trainer(trainer, args)


def cross_encoder(directory: Path, args: TrakConfig) -> TrakAttributor:
    from sentence_transformers.cross_encoder import CrossEncoder

    torch.manual_seed(0)
    hf.BertForSequenceClassification(bert(num_labels=2)).save_pretrained(directory / "model")
    tokenizer().save_pretrained(directory / "model")
    made = CrossEncoder(str(directory / "model"), device="cpu")
    rows = Dataset.from_dict({**made.tokenizer(texts(6), texts(6, 1)), "labels": LABELS})
    return of_model(made[0].model, args, rows, processing_class=made.tokenizer)


def trained_pairs(directory: Path, args: TrakConfig, *, loss: str) -> TrakAttributor:
    from sentence_transformers import cross_encoder as ce

    torch.manual_seed(0)
    # Wide weights, so that texts have different scores: gradients of almost equal ones cancel out in a margin.
    config = bert(num_labels=2 if loss == "CrossEntropyLoss" else 1, initializer_range=0.3)
    hf.BertForSequenceClassification(config).save_pretrained(directory / "model")
    tokenizer().save_pretrained(directory / "model")
    model = ce.CrossEncoder(str(directory / "model"), device="cpu").eval()
    names = ("query", "good", "bad") if loss == "MarginMSELoss" else ("query", "other")
    labels = LABELS if loss == "CrossEntropyLoss" else [float(label) for label in LABELS]
    own = ce.CrossEncoderTrainingArguments(str(directory / "out"), use_cpu=True, report_to=[])
    rows = Dataset.from_dict({**columns(*names), "label": labels})
    trainer = ce.CrossEncoderTrainer(model, own, train_dataset=rows, loss=getattr(ce.losses, loss)(model))
    return of_trainer(trainer, args)


def few_shot(directory: Path) -> Any:
    """A trained model of setfit with a head of torch, its trainer, and its rows."""
    import setfit

    head = setfit.SetFitHead(in_features=16, out_features=2, device="cpu")
    model = setfit.SetFitModel(model_body=encoder(directory / "model"), model_head=head)
    rows = Dataset.from_dict({"text": texts(6), "label": LABELS})
    own = setfit.TrainingArguments(str(directory / "out"), max_steps=1, batch_size=4, report_to="none")
    trainer = setfit.Trainer(model, own, train_dataset=rows)
    trainer.train()
    model.model_body.eval()
    return model, trainer, rows


def few_shot_body(directory: Path, args: TrakConfig) -> TrakAttributor:
    _, trainer, _ = few_shot(directory)
    pairs = trainer.st_trainer.train_dataset
    # Pairs of a text with itself are exact already: their gradient is zero, and has no relative error.
    distinct = pairs.filter(lambda row: row["sentence_1"] != row["sentence_2"])
    return of_trainer(trainer.st_trainer, args, train_dataset=distinct)


def few_shot_head(directory: Path, args: TrakConfig) -> TrakAttributor:
    model, _, rows = few_shot(directory)
    embedded = model.model_body.encode(rows["text"][:], show_progress_bar=False)
    given = Dataset.from_dict({"features": embedded.tolist(), "labels": LABELS})
    own = TrakAttributor(model.model_head, args, given, task="text_classification")

    def loss(row: int) -> torch.Tensor:
        logits = model.model_head(torch.tensor([given[row]["features"]]))
        return torch.nn.functional.cross_entropy(
            logits[0] if isinstance(logits, tuple) else logits["logits"], torch.tensor([LABELS[row]])
        )

    return with_truth(own, loss)


EMBEDDINGS = (
    EcosystemCase(
        "`SentenceTransformerTrainer`: `MultipleNegativesRankingLoss`, pairs",
        partial(trained, loss="MultipleNegativesRankingLoss", names=("anchor", "positive")),
    ),
    EcosystemCase(
        "`SentenceTransformerTrainer`: `MultipleNegativesRankingLoss`, hard negatives",
        partial(trained, loss="MultipleNegativesRankingLoss", names=("anchor", "positive", "negative")),
    ),
    EcosystemCase(
        "`SentenceTransformerTrainer`: `CosineSimilarityLoss`",
        partial(trained, loss="CosineSimilarityLoss", names=("one", "other"), labels=True),
    ),
    EcosystemCase(
        "`SentenceTransformerTrainer`: `ContrastiveLoss`",
        partial(trained, loss="ContrastiveLoss", names=("one", "other"), labels=True),
    ),
    EcosystemCase(
        "`SentenceTransformerTrainer`: `TripletLoss`",
        partial(trained, loss="TripletLoss", names=("anchor", "positive", "negative")),
    ),
    *(
        EcosystemCase(f"`CrossEncoderTrainer`: `{loss}`", partial(trained_pairs, loss=loss))
        for loss in ("BinaryCrossEntropyLoss", "CrossEntropyLoss", "MSELoss", "MarginMSELoss")
    ),
    EcosystemCase("`CrossEncoder`", cross_encoder, "its `[0].model`, tokenized pairs"),
    EcosystemCase("setfit: the body, on its pairs", few_shot_body, "`from_trainer(trainer.st_trainer)`"),
    EcosystemCase(
        "setfit: a differentiable head", few_shot_head, 'rows of embeddings `features`, `task="text_classification"`'
    ),
)
