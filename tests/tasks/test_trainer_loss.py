"""The task `trainer_loss`: the loss of a trainer against plain autograd on rows that its collator made alone."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from datasets import Dataset
from store_jobs import start_group
from test_row_loss import boxed, detection
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn import functional

from hf_trak import Span, TrakAttributor, TrakConfig
from hf_trak.errors import ConfigMismatchError
from hf_trak.evaluation.trainer_retraining import model_outputs
from hf_trak.modelout_functions import GaussNewtonModelOutput, TrainerLossModelOutput
from hf_trak.modelout_functions.draws import Draws
from hf_trak.modelout_functions.loss import MinusLossModelOutput

WEIGHTS = torch.tensor([1.0, 10.0, 0.1])
SIZES: dict[str, Any] = {
    "vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 32,
}  # fmt: skip
ROWS = 6


def tokenizer() -> hf.PreTrainedTokenizerFast:
    words = {word: place for place, word in enumerate(["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopq"])}
    made = Tokenizer(models.WordLevel(words, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def bert(kind: Any = hf.BertForSequenceClassification, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(hf.BertConfig(**{**SIZES, "num_labels": 3, **options})).eval()


def gpt2() -> Any:
    torch.manual_seed(0)
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=20, n_embd=16, n_layer=2, n_head=2, n_positions=32)).eval()


def llama() -> Any:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32, "num_hidden_layers": 2}
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=20, hidden_size=16, **heads)).eval()


def rows(**columns: Any) -> Dataset:
    """Rows of tokens of different lengths."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 20, (5 + 2 * (row % 3),), generator=generator).tolist() for row in range(ROWS)]
    return Dataset.from_dict({"input_ids": ids, **columns})


def classes() -> Dataset:
    return rows(labels=[row % 3 for row in range(ROWS)])


class Weighted(hf.Trainer):
    """The example of the documentation of transformers, whose mean divides the weights out of a row alone."""

    weights = WEIGHTS

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.CrossEntropyLoss(weight=self.weights)(outputs.logits.view(-1, 3), labels.view(-1))
        return (loss, outputs) if return_outputs else loss


class WeightedRows(hf.Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        losses = functional.cross_entropy(outputs.logits, inputs["labels"], reduction="none")
        loss = (losses * WEIGHTS[inputs["labels"]]).mean()
        return (loss, outputs) if return_outputs else loss


class Binary(hf.Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        logits = self.model(**inputs).logits.squeeze(-1)
        return functional.binary_cross_entropy_with_logits(logits, labels.float())


class Contrastive(hf.Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        inputs.pop("labels")
        vectors = functional.normalize(model(**inputs).logits, dim=-1)
        return functional.cross_entropy(vectors @ vectors.T / 0.1, torch.arange(len(vectors)))


class TwoCalls(hf.Trainer):
    """The model is asked twice, as by R-Drop."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        first = model(**inputs)
        kinds = torch.ones_like(inputs["input_ids"])
        second = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], token_type_ids=kinds)
        apart = functional.kl_div(
            first.logits.log_softmax(-1), second.logits.log_softmax(-1), log_target=True, reduction="batchmean"
        )
        return first.loss + 0.3 * apart


class TwoHeads(hf.BertPreTrainedModel):
    """A model with tasks of its own, whose trainer adds their losses."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bert, self.kind, self.size = hf.BertModel(config), nn.Linear(16, 3), nn.Linear(16, 1)
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Any:
        hidden = self.bert(input_ids, attention_mask=attention_mask).pooler_output
        return {"kind": self.kind(hidden), "size": self.size(hidden).squeeze(-1)}


class MultiTask(hf.Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        kinds, sizes = inputs.pop("labels"), inputs.pop("sizes")
        made = model(**inputs)
        return functional.cross_entropy(made["kind"], kinds) + 0.5 * functional.mse_loss(made["size"], sizes)


class OwnLoss(hf.BertForSequenceClassification):
    """A model whose own forward weighs classes."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None, **_: Any) -> Any:
        made = super().forward(input_ids, attention_mask)
        if labels is not None:
            made["loss"] = (functional.cross_entropy(made.logits, labels, reduction="none") * WEIGHTS[labels]).mean()
        return made


class OwnRare(OwnLoss):
    """A loss with a weight for each row, the same for the first two."""

    weights = torch.tensor([1.0, 1.0, 10.0])

    def forward(self, input_ids=None, attention_mask=None, labels=None, **_: Any) -> Any:
        made = super().forward(input_ids, attention_mask)
        if labels is not None:
            losses = functional.cross_entropy(made.logits, labels, reduction="none")
            made["loss"] = (losses * self.weights[labels]).mean()
        return made


class OwnWeights(OwnRare):
    """A cross-entropy with weights of classes, which a mean over one row divides out."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **_: Any) -> Any:
        made = super().forward(input_ids, attention_mask)
        if labels is not None:
            made["loss"] = nn.CrossEntropyLoss(self.weights)(made.logits, labels)
        return made


class OwnParts(OwnWeights):
    """A cross-entropy with weights of classes and a mean over rows without them, as of boxes beside their classes."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **_: Any) -> Any:
        made = super().forward(input_ids, attention_mask, labels)
        if labels is not None:
            made["loss"] = made["loss"] + (made.logits - 1).square().mean()
        return made


class NormalizedParts(OwnRare):
    """The same, with the weights divided by their sum by hand."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **_: Any) -> Any:
        made = super().forward(input_ids, attention_mask)
        if labels is not None:
            losses, weights = functional.cross_entropy(made.logits, labels, reduction="none"), self.weights[labels]
            made["loss"] = (losses * weights).sum() / weights.sum() + (made.logits - 1).square().mean()
        return made


class RowMeans(hf.BertForTokenClassification):
    """A mean over the rows of a batch of the means over their tokens."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **_: Any) -> Any:
        made = super().forward(input_ids, attention_mask)
        if labels is not None:
            losses = functional.cross_entropy(made.logits.transpose(1, 2), labels, reduction="none")
            made["loss"] = (losses.sum(1) / (labels != -100).sum(1)).mean()
        return made


class Referring(hf.Trainer):
    """Asks the model without derivatives first, as for the answers of a reference."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        with torch.no_grad():
            before = model(**inputs).logits
        logits = model(**inputs).logits
        return functional.cross_entropy(logits, labels) + (logits - 0.5 * before).square().mean()


class Masked(hf.Trainer):
    """Lets tokens of the prompt count a tenth, by a mask that its collator makes."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels, mask = inputs.pop("labels"), inputs.pop("completion_mask")
        losses = functional.cross_entropy(
            model(**inputs).logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none"
        )
        return (losses * (0.1 + 0.9 * mask[:, 1:])).sum() / len(labels)


def with_mask(rows: list[dict[str, Any]]) -> dict[str, Any]:
    batch = hf.DataCollatorForLanguageModeling(tokenizer(), mlm=False)(rows)
    mask = batch["attention_mask"].clone()
    mask[:, :3] = 0
    return {**batch, "completion_mask": mask}


def focal(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logs = outputs.logits.log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
    return -((1 - logs.exp()) ** 2 * logs).sum() / (len(labels) if num_items_in_batch is None else num_items_in_batch)


def made(tmp_path: Path, kind: Any, model: Any, given: Any, collator: Any = None, **options: Any) -> Any:
    own = {name: options.pop(name) for name in ("compute_loss_func",) if name in options}
    args = hf.TrainingArguments(str(tmp_path / "out"), use_cpu=True, report_to=[], **options)
    words = None if isinstance(given, list) else tokenizer()
    return kind(model, args, collator, given, processing_class=words, **own)


def boxes(tmp_path: Path) -> Any:
    torch.manual_seed(0)
    model, given, _ = detection()
    return made(tmp_path, hf.Trainer, model.eval(), given, boxed, remove_unused_columns=False)


def distilled(tmp_path: Path) -> Any:
    pytest.importorskip("trl")
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    words = tokenizer()
    words.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    said = [["a b", "c d e"], ["f g h", "b"], ["c", "d e f g"], ["a c", "i j k"]]
    chats = [[{"role": "user", "content": one}, {"role": "assistant", "content": other}] for one, other in said]
    args = GKDConfig(str(tmp_path / "out"), use_cpu=True, report_to=[], bf16=False, max_length=None)
    teacher = llama()
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.5)
    given = Dataset.from_dict({"messages": chats})
    return GKDTrainer(llama(), teacher, args=args, train_dataset=given, processing_class=words)


CASES: dict[str, Any] = {
    "weighted": lambda path: made(path, Weighted, bert(), classes()),
    "weighted rows": lambda path: made(path, WeightedRows, bert(), classes()),
    "focal": lambda path: made(path, hf.Trainer, bert(), classes(), compute_loss_func=focal),
    "smoothed": lambda path: made(path, hf.Trainer, bert(), classes(), label_smoothing_factor=0.2),
    "smoothed language model": lambda path: made(
        path, hf.Trainer, gpt2(), rows(), hf.DataCollatorForLanguageModeling(tokenizer(), mlm=False),
        label_smoothing_factor=0.2,
    ),
    "binary": lambda path: made(path, Binary, bert(num_labels=1), rows(labels=[0, 1, 1, 0, 1, 0])),
    "two calls": lambda path: made(path, TwoCalls, bert(), classes()),
    "two heads": lambda path: made(
        path, MultiTask, bert(TwoHeads), classes().add_column("sizes", [0.5, 1.0, -1.0, 2.0, 0.0, 3.0]),
        remove_unused_columns=False,
    ),
    "the model's own": lambda path: made(path, hf.Trainer, bert(OwnLoss), classes()),
    "the model's own, with a rare class": lambda path: made(path, hf.Trainer, bert(OwnRare), classes()),
    "a pass without derivatives first": lambda path: made(path, Referring, bert(), classes()),
    "a mask of the collator": lambda path: made(path, Masked, gpt2(), rows(), with_mask),
    "boxes": boxes,
    "distilled": distilled,
}  # fmt: skip


def config(tmp_path: Path, **options: Any) -> TrakConfig:
    return TrakConfig(
        str(tmp_path / "trak"), proj_type="none", feature_dtype="float32", use_cpu=True, budget="fast", **options
    )


def of_queries(trainer: Any) -> Any:
    """The mean over queries of a cross-entropy with weights of classes, divided by their mean over all rows."""
    means, real = list[Tensor](), functional.cross_entropy

    def seen(logits: Tensor, classes: Tensor, weight: Tensor) -> Tensor:
        means.append(weight[classes].mean())
        return real(logits, classes, weight)

    def of_a_row(logits: Tensor, classes: Tensor, weight: Tensor) -> Tensor:
        losses = -logits.log_softmax(1).gather(1, classes.unsqueeze(1)).squeeze(1)
        return (losses * weight[classes]).mean() / means[0]

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(functional, "cross_entropy", seen)
        trainer.compute_loss(trainer.model, dict(trainer.data_collator([*trainer.train_dataset])))
    return of_a_row


def alone(trainer: Any, row: int) -> Tensor:
    """Plain autograd of minus the trainer's loss of a row that its own collator made."""
    given = trainer.train_dataset[row]
    if isinstance(trainer.train_dataset, Dataset) and trainer.args.remove_unused_columns:
        trainer._set_signature_columns_if_needed()
        given = {name: value for name, value in given.items() if name in trainer._signature_columns}
    batch = dict(trainer.data_collator([given]))
    label = int(batch["labels"]) if type(trainer) is Weighted else None
    counted = trainer.get_batch_samples(iter([batch]), 1, torch.device("cpu"))[1]
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(trainer.model, hf.DetrForObjectDetection):
            patch.setattr(functional, "cross_entropy", of_queries(trainer))
        loss = trainer.compute_loss(
            trainer.model, batch, num_items_in_batch=None if counted is None else torch.tensor(1.0)
        )
    if label is not None:
        # which the mean over one row has divided out
        loss = loss * WEIGHTS[label] / WEIGHTS[torch.tensor(trainer.train_dataset["labels"][:])].mean()
    wanted = [p for p in trainer.model.parameters() if p.requires_grad]
    found = torch.autograd.grad(-loss, wanted, allow_unused=True, materialize_grads=True)
    return torch.cat([one.flatten() for one in found])


def features(own: TrakAttributor) -> Tensor:
    return torch.cat([shard.grads for shard in own.featurize().features.store.train(0)])


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("case", "task"),
    [
        *((case, None) for case in CASES),
        *(pytest.param(case, "loss", marks=[] if case == "weighted" else pytest.mark.slow) for case in CASES),
    ],
)
def test_features_are_the_gradients_of_minus_the_trainers_loss(case: str, task: Any, tmp_path: Path) -> None:
    trainer = CASES[case](tmp_path)
    expected = torch.stack([alone(trainer, row) for row in range(len(trainer.train_dataset))])
    own = TrakAttributor.from_trainer(trainer, config(tmp_path, per_device_batch_size=4), task=task)
    assert isinstance(own.task, TrainerLossModelOutput)
    error = (features(own) - expected).norm(dim=1) / expected.norm(dim=1)
    assert bool((expected.norm(dim=1) > 1e-4).all())
    assert float(error.max()) <= 1e-5


@pytest.mark.few(2)
@pytest.mark.parametrize("case", ["weighted", "focal", "smoothed", "binary", "two heads"])
def test_one_pass_serves_a_batch(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hf_trak"):
        TrakAttributor.from_trainer(CASES[case](tmp_path), config(tmp_path, per_device_batch_size=4)).featurize()
    assert "by the hooked engine" in caplog.text


class OfTokens(hf.Trainer):
    """A mean over the tokens of a batch, in which long rows count more."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        logits = model(**inputs).logits[:, :-1]
        return 0.5 * functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def tokens_weighed(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A loss that is given the number of items, and does not ask for it."""
    weights = torch.arange(1.0, 4.0)
    return nn.CrossEntropyLoss(weight=weights)(outputs.logits.flatten(0, 1), labels.flatten())


def tokens_summed(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A mean over the tokens of a batch, 0 without any."""
    losses = functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return losses / (labels != -100).sum().clamp(min=1)


def tagged(without: int | None = None) -> Dataset:
    """Rows with a label for each token but the first; one may have none."""
    given = rows()
    labels = [[-100, *(token % 3 for token in ids[1:])] for ids in given["input_ids"]]
    if without is not None:
        labels[without] = [-100] * len(labels[without])
    return given.add_column("labels", labels)


PER_TOKEN: dict[str, Any] = {
    "a language model": lambda path: made(
        path, OfTokens, gpt2(), rows(), hf.DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    ),
    "a language model, its shortest rows first": lambda path: made(
        path, OfTokens, gpt2(), rows().select([0, 3, 1, 4, 2, 5]),
        hf.DataCollatorForLanguageModeling(tokenizer(), mlm=False),
    ),
    "weights of classes": lambda path: made(
        path, hf.Trainer, bert(hf.BertForTokenClassification), tagged(),
        hf.DataCollatorForTokenClassification(tokenizer()), compute_loss_func=tokens_weighed,
    ),
    "weights of classes in the model": lambda path: made(path, hf.Trainer, bert(OwnWeights), classes()),
    "weights of classes beside another part": lambda path: made(path, hf.Trainer, bert(OwnParts), classes()),
    "means of rows in the model": lambda path: made(
        path, hf.Trainer, bert(RowMeans), tagged(), hf.DataCollatorForTokenClassification(tokenizer())
    ),
    "no labels in the first row": lambda path: made(
        path, hf.Trainer, bert(hf.BertForTokenClassification), tagged(without=0),
        hf.DataCollatorForTokenClassification(tokenizer()), compute_loss_func=tokens_summed,
    ),
    "no labels in the second row, batches of two": lambda path: made(
        path, hf.Trainer, bert(hf.BertForTokenClassification), tagged(without=1),
        hf.DataCollatorForTokenClassification(tokenizer()), compute_loss_func=tokens_summed,
        per_device_train_batch_size=2,
    ),
    "smoothed": lambda path: made(
        path, hf.Trainer, bert(hf.BertForTokenClassification), tagged(),
        hf.DataCollatorForTokenClassification(tokenizer()), label_smoothing_factor=0.1,
    ),
}  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("case", [*(sorted(CASES.keys() - {"boxes"})), *PER_TOKEN])
def test_rows_add_up_to_their_batch(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The gradient of the trainer's loss of all rows in one batch is the sum of the features, but for one factor."""
    trainer = {**CASES, **PER_TOKEN}[case](tmp_path)
    own = TrakAttributor.from_trainer(trainer, config(tmp_path))
    assert not [word for word in ("them weights", "no sum of theirs") if word in caplog.text]
    found = features(own).sum(0)
    trainer.args.per_device_eval_batch_size = len(trainer.train_dataset)
    (batch,) = trainer.get_eval_dataloader(trainer.train_dataset)
    counted = trainer.get_batch_samples(iter([batch]), 1, torch.device("cpu"))[1]
    loss = trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=counted)
    wanted = [p for p in trainer.model.parameters() if p.requires_grad]
    taken = torch.autograd.grad(-loss, wanted, allow_unused=True, materialize_grads=True)
    whole = torch.cat([one.flatten() for one in taken])
    torch.testing.assert_close(found / found.norm(), whole / whole.norm(), atol=1e-5, rtol=0)


def test_mean_weights_of_classes_are_those_of_the_same_rows_for_any_size_of_batches(tmp_path: Path) -> None:
    """They define the features, which a later trainer has, too."""
    found = []
    for size in (2, 8):
        trainer = made(tmp_path, hf.Trainer, bert(OwnParts), classes(), per_device_train_batch_size=size)
        found.append(TrakAttributor.from_trainer(trainer, config(tmp_path)).features.task.mean_weights)
    mean = float(OwnParts.weights[torch.tensor(classes()["labels"][:])].mean())
    assert found[0] == found[1] == (pytest.approx(mean, rel=1e-5),)


def test_a_batch_that_divides_a_part_of_its_loss_by_what_other_rows_have_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    TrakAttributor.from_trainer(made(tmp_path, hf.Trainer, bert(NormalizedParts), classes()), config(tmp_path))
    assert "The loss of some rows is no sum of theirs: `Trainer.compute_loss` weighs parts of a row" in caplog.text


def test_rows_that_the_dataset_pads_have_the_positions_of_the_training(tmp_path: Path) -> None:
    """GPT-2 counts positions over the padding unless it is told otherwise, and a trainer does not tell it."""
    ids = rows()["input_ids"][:]
    left = [12 - len(one) for one in ids]
    padded = Dataset.from_dict(
        {
            "input_ids": [[0] * count + one for count, one in zip(left, ids, strict=True)],
            "attention_mask": [[0] * count + [1] * len(one) for count, one in zip(left, ids, strict=True)],
            "labels": [[-100] * count + one for count, one in zip(left, ids, strict=True)],
        }
    )
    trainer = made(tmp_path, hf.Trainer, gpt2(), padded, hf.default_data_collator, label_smoothing_factor=0.1)
    expected = torch.stack([alone(trainer, row) for row in range(ROWS)])
    found = features(TrakAttributor.from_trainer(trainer, config(tmp_path, per_device_batch_size=4)))
    torch.testing.assert_close(found, expected, atol=1e-5 * float(expected.norm(dim=1).max()), rtol=0)


def test_rows_that_a_collator_pads_to_multiples_do_not_depend_on_their_batch(tmp_path: Path) -> None:
    words = tokenizer()
    words.padding_side = "left"

    def padded(given: list[dict[str, Any]]) -> Any:
        return hf.DataCollatorForLanguageModeling(words, mlm=False, pad_to_multiple_of=8)(given)

    found = []
    for size in (1, ROWS):
        trainer = made(tmp_path / str(size), hf.Trainer, gpt2(), rows(), padded, label_smoothing_factor=0.1)
        settings = config(tmp_path / str(size), per_device_batch_size=size)
        found.append(features(TrakAttributor.from_trainer(trainer, settings)))
    torch.testing.assert_close(*found, atol=1e-5 * float(found[0].norm(dim=1).max()), rtol=0)


def test_a_loss_of_single_rows_in_half_precision(tmp_path: Path) -> None:
    trainer = made(tmp_path, hf.Trainer, bert(OwnRare).bfloat16(), classes())
    expected = torch.stack([alone(trainer, row) for row in range(ROWS)]).float()
    found = features(TrakAttributor.from_trainer(trainer, config(tmp_path, per_device_batch_size=4)))
    assert float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max()) <= 0.02


class Normalized(hf.Trainer):
    """Weights of classes over their sum, by hand: a row alone has none of its weight."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        weights = WEIGHTS[inputs["labels"]]
        losses = functional.cross_entropy(model(**inputs).logits, inputs["labels"], reduction="none")
        return (losses * weights).sum() / weights.sum()


def test_weights_that_a_row_alone_loses_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also where most rows have the same label."""
    rare = Dataset.from_dict({"input_ids": [[3, 4, 5]] * 60, "labels": [int(row in (7, 29, 33)) for row in range(60)]})
    TrakAttributor.from_trainer(made(tmp_path, Normalized, bert(), rare), config(tmp_path))
    assert "In a batch of 8 rows, `Normalized.compute_loss` gives them weights from 0.059 to 0.59" in caplog.text


class OfColumns(hf.Trainer):
    """Weights over their sum, from a column of the rows."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        weights, labels = inputs.pop("weights"), inputs.pop("labels")
        losses = functional.cross_entropy(model(**inputs).logits, labels, reduction="none")
        return (losses * weights).sum() / weights.sum()


def test_weights_of_a_column_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = classes().add_column("weights", [1.0, 1.0, 1.0, 1.0, 3.0, 1.0])
    TrakAttributor.from_trainer(
        made(tmp_path, OfColumns, bert(), given, remove_unused_columns=False), config(tmp_path)
    )
    assert "In a batch of 6 rows, `OfColumns.compute_loss` gives them weights from 0.12 to 0.38" in caplog.text


class OfModes(hf.Trainer):
    """A loss that is tripled in training, and asks for the mode once more in vain."""

    factor = 3.0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        return super().compute_loss(model, inputs) * (self.factor if model.training else 1.0)


@pytest.mark.parametrize("factor", [3.0, 1.0])
def test_a_loss_of_the_training_alone_is_named(factor: float, tmp_path: Path, caplog: Any) -> None:
    trainer = made(tmp_path, OfModes, bert(), classes())
    trainer.factor = factor
    model = trainer.model.train()
    TrakAttributor.from_trainer(trainer, config(tmp_path))
    assert all(one.training for one in model.modules())
    assert ("`OfModes.compute_loss` asks for `training`" in caplog.text) == (factor == 3.0)


def prepared(self: Any, inputs: Any) -> Any:
    return {**inputs, "labels": 2 - inputs["labels"]}


@pytest.mark.parametrize("name", ["_prepare_inputs", "get_train_dataloader", "training_step"])
def test_steps_of_a_trainers_own_are_named(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kind = type("OwnSteps", (hf.Trainer,), {name: prepared})
    TrakAttributor.from_trainer(made(tmp_path, kind, bert(), classes()), config(tmp_path))
    assert f"OwnSteps has `{name}` of its own" in caplog.text


def test_a_trainer_with_the_loss_of_its_model_keeps_the_task_of_the_model(tmp_path: Path) -> None:
    for model, given, name in (
        (bert(), classes(), "TextClassificationModelOutput"),
        (bert(num_labels=1), rows(labels=[float(row) for row in range(ROWS)]), "RegressionModelOutput"),
        (
            bert(problem_type="multi_label_classification"),
            rows(labels=[[float(row % 2), 1.0, 0.0] for row in range(ROWS)]),
            "MultiLabelClassificationModelOutput",
        ),
    ):
        own = TrakAttributor.from_trainer(made(tmp_path, hf.Trainer, model, given), config(tmp_path))
        assert type(own.task).__name__ == name
    trainer = made(tmp_path, hf.Trainer, bert(), classes())
    assert isinstance(
        TrakAttributor.from_trainer(trainer, config(tmp_path), task="trainer_loss").task, TrainerLossModelOutput
    )


def test_another_task_is_taken_with_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = CASES["focal"](tmp_path)
    own = TrakAttributor.from_trainer(trainer, config(tmp_path), task="text_classification")
    assert type(own.task).__name__ == "TextClassificationModelOutput"
    assert "`compute_loss_func`" in caplog.text and "task='trainer_loss'" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_between_rows_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    trainer = made(tmp_path, Contrastive, bert().to(dtype), classes())
    with pytest.raises(ValueError, match=r"`Contrastive\.compute_loss` compares the rows of a batch"):
        TrakAttributor.from_trainer(trainer, config(tmp_path))


def test_a_trainer_that_changes_its_batches_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = distilled(tmp_path)
    TrakAttributor.from_trainer(trainer, config(tmp_path))
    assert "GKDTrainer has `training_step` of its own" in caplog.text


class OnPolicy(hf.Trainer):
    """A trainer whose batches are answers of the model, such as `DistillationTrainer`."""

    def _prepare_inputs(self, inputs: list[Any]) -> Any:
        return self.data_collator.of(self.model.generate(inputs))

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        return model(input_ids=inputs["completion_ids"]).logits.mean()


def test_answers_that_no_row_holds_are_refused(tmp_path: Path) -> None:
    trainer = made(tmp_path, OnPolicy, gpt2(), rows(), lambda given: given)
    with pytest.raises(
        ValueError, match=r"`OnPolicy.compute_loss` takes what `_prepare_inputs` makes, such as answers"
    ):
        TrakAttributor.from_trainer(trainer, config(tmp_path))


def test_the_trainer_is_left_as_it_was(tmp_path: Path) -> None:
    trainer = CASES["weighted"](tmp_path)
    trainer._set_signature_columns_if_needed()
    before, weights = dict(vars(trainer)), {n: p.clone() for n, p in trainer.model.named_parameters()}
    trainer.model.train()
    TrakAttributor.from_trainer(trainer, config(tmp_path))
    assert trainer.model.training and vars(trainer) == before
    assert all(torch.equal(p, weights[n]) and p.grad is None for n, p in trainer.model.named_parameters())


class Scaled(Weighted):
    def __init__(self, *args: Any, factor: float = 1.0, **more: Any) -> None:
        super().__init__(*args, **more)
        self.factor = factor
        self.weights = WEIGHTS.clone()

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        return self.factor * super().compute_loss(model, inputs, return_outputs, **more)


@pytest.mark.slow
def test_the_loss_is_part_of_the_identity_of_the_store(tmp_path: Path) -> None:
    first = made(tmp_path, partial(Scaled, factor=2.0), bert(), classes())
    TrakAttributor.from_trainer(first, config(tmp_path)).featurize()
    again = made(tmp_path, partial(Scaled, factor=2.0), bert(), classes())
    again.state.global_step, again.current_flos = 3, 7.0  # as after a training
    TrakAttributor.from_trainer(again, config(tmp_path)).featurize()
    other = made(tmp_path, partial(Scaled, factor=2.0), bert(), classes())
    other.weights[0] = 2.0
    smoothed = made(tmp_path, partial(Scaled, factor=2.0), bert(), classes(), label_smoothing_factor=0.1)
    for changed in (made(tmp_path, partial(Scaled, factor=3.0), bert(), classes()), other, smoothed):
        with pytest.raises(ConfigMismatchError, match="task"):
            TrakAttributor.from_trainer(changed, config(tmp_path)).featurize()


@pytest.mark.slow
def test_targets_have_the_task_of_the_model(tmp_path: Path) -> None:
    """The sum of the columns of a linear kernel: −∇L of rows against the margins of targets."""
    trainer = CASES["weighted"](tmp_path)
    own = TrakAttributor.from_trainer(trainer, config(tmp_path))
    found = features(own)
    batch = dict(trainer.data_collator([{n: trainer.train_dataset[1][n] for n in ("input_ids", "labels")}]))
    logits = trainer.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[0]
    margin = logits[1] - logits[[0, 2]].logsumexp(0)
    taken = torch.autograd.grad(margin, list(trainer.model.parameters()))
    target = torch.cat([one.flatten() for one in taken])
    scored = own.attribute(trainer.train_dataset.select([1]), top_k=ROWS, method="index")
    check_scores(own, found, target, scored)


def check_scores(own: TrakAttributor, found: Tensor, target: Tensor, scored: Dataset) -> None:
    """Compare the scores of a target with those of its gradient."""
    gram = found.T.double() @ found.double()
    ridge = own.args.lambda_relative * float(gram.trace()) / min(found.shape)
    expected = found.double() @ torch.linalg.solve(gram + ridge * torch.eye(len(gram)).double(), target.double())
    order = scored[0]["trak_indices"]
    torch.testing.assert_close(torch.tensor(scored[0]["trak_scores"]), expected[order].float(), rtol=1e-3, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("task", [None, "loss"])
def test_parts_of_targets_and_their_tokens(tmp_path: Path, task: Any) -> None:
    """The margins of two labels in the middle, against plain autograd; and all labels one by one."""
    trainer = CASES["smoothed language model"](tmp_path)
    own = TrakAttributor.from_trainer(trainer, config(tmp_path), task=task)
    found, chosen = features(own), trainer.train_dataset.select([1])
    ids = torch.tensor(chosen[0]["input_ids"])
    logits = trainer.model(input_ids=ids[None]).logits[0, :-1]
    logs = logits.log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
    margins = logs - torch.log1p(-logs.exp())
    taken = torch.autograd.grad(margins[1] + margins[2], list(trainer.model.parameters()))
    scored = own.attribute(chosen, top_k=ROWS, part=Span(tokens=(2, 4)))
    check_scores(own, found, torch.cat([one.flatten() for one in taken]), scored)
    whole = own.attribute(chosen, top_k=ROWS, per_token=True)[0]
    assert whole["trak_token_positions"] == list(range(1, len(ids)))
    parts = torch.tensor(whole["trak_token_scores"])
    torch.testing.assert_close(parts.sum(1), torch.tensor(whole["trak_scores"]), rtol=1e-4, atol=1e-7)


def test_a_target_of_one_number_has_no_parts(tmp_path: Path) -> None:
    trainer = CASES["two calls"](tmp_path)
    own = TrakAttributor.from_trainer(trainer, config(tmp_path)).featurize()
    chosen = trainer.train_dataset.select([1])
    with pytest.raises(TypeError, match=r"TrainerLossModelOutput. Expected .*several labels per target. Leave `part`"):
        own.attribute(chosen, part=Span(tokens=(0, 1)))
    with pytest.raises(
        TypeError, match=r"which has one number per target\. .* Leave `per_token` out, or pass `task=`"
    ):
        own.attribute(chosen, per_token=True)


@pytest.mark.parametrize("task", [None, "loss"])
def test_predictions_are_those_of_the_model(tmp_path: Path, task: Any) -> None:
    trainer = CASES["weighted"](tmp_path)
    own = TrakAttributor.from_trainer(trainer, config(tmp_path), task=task)
    wanted = trainer.predict(trainer.train_dataset).predictions.argmax(-1).tolist()
    assert own.predict(trainer.train_dataset)["labels"][:] == wanted


@pytest.mark.slow
def test_a_gauss_newton_matrix_of_the_trainers_loss(tmp_path: Path) -> None:
    """XᵀX of the task `gauss_newton` has the trace of Σ Jᵀ H J, which drawn outputs have on average."""
    trainer = CASES["weighted"](tmp_path)
    own = TrakAttributor.from_trainer(trainer, config(tmp_path), task="gauss_newton")
    assert isinstance(own.task, GaussNewtonModelOutput)
    found = features(own).double()
    task = TrainerLossModelOutput(trainer)
    model = trainer.model
    task.bind(model)
    expected = right = drawn = 0.0
    for row, given in enumerate(trainer.train_dataset):
        batch = dict(trainer.data_collator([{name: given[name] for name in ("input_ids", "labels")}]))
        result = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        chances = result.logits[0].softmax(0).detach().double()
        weight = float(WEIGHTS[int(batch["labels"])])
        curved = weight * (chances.diag() - torch.outer(chances, chances))
        rows_of_j = [
            torch.cat([one.flatten() for one in torch.autograd.grad(z, list(model.parameters()), retain_graph=True)])
            for z in result.logits[0]
        ]
        jacobian = torch.stack(rows_of_j).double()
        norms = jacobian @ jacobian.T
        slope = weight * (chances - functional.one_hot(batch["labels"][0], 3).double())
        expected += float(slope @ norms @ slope * curved.trace() / slope.square().sum())
        right += float((norms * curved).sum())
        for seed in range(200):
            f = task.sampled_log_likelihood(result, batch, Draws(seed, torch.tensor([row])))
            (along,) = torch.autograd.grad(f, result.logits, retain_graph=True)
            drawn += float(along[0].double() @ norms @ along[0].double()) / 200
    mean = float(WEIGHTS[torch.tensor(trainer.train_dataset["labels"][:])].mean())
    assert float(found.square().sum()) == pytest.approx(expected / mean, rel=1e-4)
    assert drawn == pytest.approx(right, rel=0.05)


def test_many_outputs_have_no_gauss_newton_weight(tmp_path: Path) -> None:
    trainer = CASES["smoothed language model"](tmp_path)
    own = TrakAttributor.from_trainer(trainer, config(tmp_path), task="gauss_newton")
    with pytest.raises(TypeError, match=r"depends on \d+ outputs of the model.*at most 64.*empirical"):
        own.featurize()


class Own(nn.Module):
    """A classifier of a class of its own, which computes its loss as models of `transformers` do."""

    def __init__(self, weight: Tensor | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.weight = nn.Embedding(20, 8), nn.Linear(8, 3), weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.embed(input_ids).mean(1))
        if labels is None:
            return {"logits": logits}
        return {"loss": functional.cross_entropy(logits, labels, weight=self.weight), "logits": logits}


@pytest.mark.parametrize("weight", [None, WEIGHTS])
def test_a_classifier_of_an_own_class(tmp_path: Path, weight: Tensor | None) -> None:
    """Its task is known by its loss, which is compared; any other stays the trainer's, and `auto` has scores of it."""
    ids, model = torch.randint(3, 20, (8, 5), generator=torch.Generator().manual_seed(1)), Own(weight)
    given = Dataset.from_dict({"input_ids": ids.tolist(), "labels": (ids[:, 0] % 3).tolist()})
    trainer = made(tmp_path, hf.Trainer, model, given, hf.default_data_collator)
    own = TrakAttributor.from_trainer(trainer, config(tmp_path))
    known = "TextClassificationModelOutput" if weight is None else "TrainerLossModelOutput"
    assert type(own.features.task).__name__ == known
    assert np.isfinite(own.featurize().attribute(given.select(range(2)), top_k=3)["trak_scores"][:]).all()
    minus = model_outputs(model, given, MinusLossModelOutput(of=own.features.task), hf.default_data_collator, 1)
    expected = functional.cross_entropy(model(ids)["logits"].detach(), ids[:, 0] % 3, weight, reduction="none")
    mean = 1.0 if weight is None else float(weight[ids[:, 0] % 3].mean())
    np.testing.assert_allclose(-minus, expected / mean, rtol=1e-5)


class Plain(nn.Module):
    """A network of numbers, with columns of its own, for classes or for one number."""

    def __init__(self, outputs: int, power: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.power = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs)), power

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.layers(x)
        if labels is None:
            return {"logits": logits}
        if logits.shape[1] > 1:
            rare = torch.tensor([1.0, 1.0, 10.0]) if self.power == 1 else None
            return {"loss": functional.cross_entropy(logits, labels, weight=rare), "logits": logits}
        errors = (logits.squeeze(1) - labels).abs()
        if self.power == 1:  # a square of small errors alone
            return {"loss": functional.huber_loss(errors, torch.zeros_like(errors), delta=5.0), "logits": logits}
        return {"loss": errors.pow(self.power).mean(), "logits": logits}


@pytest.mark.parametrize(
    ("outputs", "power", "known"),
    [
        (3, 2, "TextClassificationModelOutput"),
        (1, 2, "RegressionModelOutput"),
        (1, 3, "TrainerLossModelOutput"),  # another loss than the square
        (1, 1, "TrainerLossModelOutput"),
        (3, 1, "TrainerLossModelOutput"),  # the class of another weight is in no row
    ],
)
def test_a_network_of_numbers_of_an_own_class(tmp_path: Path, outputs: int, power: int, known: str) -> None:
    """Features are gradients of what the task says by plain autograd, and `review` has labels for the curvature."""
    x, model = torch.randn(12, 4, generator=torch.Generator().manual_seed(1)), Plain(outputs, power)
    labels = x[:, : outputs - (power == 1)].argmax(1) if outputs > 1 else x.sum(1)
    given = Dataset.from_dict({"x": x.tolist(), "labels": labels.tolist()})
    trainer = made(tmp_path, hf.Trainer, model, given, hf.default_data_collator)
    own = TrakAttributor.from_trainer(trainer, config(tmp_path))
    assert type(own.features.task).__name__ == known
    table = own.review(given.select(range(4)))
    assert np.isfinite(table["effect"][:]).all() and set(table["suggested_action"]) <= {"keep", "look", "relabel"}


class Gathering(WeightedRows):
    """Gathers its loss of all processes to log it, as trainers of TRL do."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.logged = self.accelerator.gather_for_metrics(loss.detach()).mean()
        self.logged += self.accelerator.gather(tensor=loss.detach()).mean()
        return loss


def scores_in_group(directory: str) -> list[list[float]]:
    """Score rows by a loss that goes through the model row by row, in one of several processes."""
    trainer = made(Path(directory), Gathering, bert(), classes().select(range(ROWS - 1)))
    attributor = TrakAttributor.from_trainer(trainer, config(Path(directory), per_device_batch_size=4))
    scored = attributor.featurize().attribute(classes().select(range(3)), top_k=None, method="index")
    return [list(row) for row in scored["trak_scores"]]


@pytest.mark.slow
@pytest.mark.distributed
def test_a_loss_that_gathers_what_it_logs_waits_for_no_other_process(tmp_path: Path) -> None:
    """Processes have three rows and two, so that each gathering would meet another collective, or none."""
    found = {}
    for world in (1, 2):
        place = tmp_path / str(world)
        place.mkdir()
        found[world] = [job.wait() for job in start_group(place, world, scores_in_group, str(place))]
    alone = found[1][0]
    assert alone is not None and "value" in alone, alone
    for one in found[2]:
        assert one is not None and np.allclose(one["value"], alone["value"], rtol=1e-4, atol=1e-6)
