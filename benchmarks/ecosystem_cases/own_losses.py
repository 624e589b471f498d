"""Losses that trainers have of their own: weights, smoothing, several tasks, teachers, boxes."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import nn
from torch.nn import functional

from ecosystem_cases.case import CLASSES, EcosystemCase, tokenizer
from ecosystem_cases.language import causal, llama
from ecosystem_cases.others import Rows
from ecosystem_cases.preference_trainers import pairs, trainer_of
from ecosystem_cases.sft import TEMPLATE, sft
from ecosystem_cases.sft import rows as texts_of
from ecosystem_cases.transformers_tasks import BERT, bert, gpt2, labelled, seeded, t5
from ecosystem_cases.truth import of_trainer, with_truth
from hf_trak import TrakAttributor, TrakConfig

WEIGHTS = torch.tensor([1.0, 10.0, 0.1, 2.0])


class Weighted(hf.Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        losses = functional.cross_entropy(model(**inputs).logits, labels, reduction="none")
        return (losses * WEIGHTS[labels]).mean()


class Binary(hf.Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels").float() % 2
        return functional.binary_cross_entropy_with_logits(model(**inputs).logits.squeeze(-1), labels)


class Penalized(hf.Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **more)
        return loss + 0.1 * outputs.logits.logsumexp(-1).square().mean()


class TwoHeads(hf.BertPreTrainedModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bert, self.kind, self.size = hf.BertModel(config), nn.Linear(16, CLASSES), nn.Linear(16, 1)
        self.post_init()

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, **_: Any) -> Any:
        hidden = self.bert(input_ids, attention_mask=attention_mask).pooler_output
        return {"kind": self.kind(hidden), "size": self.size(hidden).squeeze(-1)}


class SeveralTasks(hf.Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        made = model(**inputs)
        return functional.cross_entropy(made["kind"], labels) + 0.5 * functional.mse_loss(made["size"], labels.float())


class WithTeacher(hf.Trainer):
    """Distillation of a classifier, from a teacher that is an attribute."""

    teacher: Any = None

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        with torch.no_grad():
            taught = self.teacher(**inputs).logits.log_softmax(-1)
        apart = functional.kl_div(outputs.logits.log_softmax(-1), taught, log_target=True, reduction="batchmean")
        return 0.5 * functional.cross_entropy(outputs.logits, inputs["labels"]) + 0.5 * apart


class Twice(hf.Trainer):
    """The model is called twice, as by R-Drop."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        first = model(**inputs)
        other = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"],
                      token_type_ids=torch.ones_like(inputs["input_ids"]))  # fmt: skip
        return first.loss + functional.mse_loss(first.logits, other.logits)


def focal(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logs = outputs.logits.log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
    return -((1 - logs.exp()) ** 2 * logs).sum() / (len(labels) if num_items_in_batch is None else num_items_in_batch)


class OwnForward(hf.BertForSequenceClassification):
    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, **_: Any) -> Any:
        made = super().forward(input_ids, attention_mask)
        if labels is not None:
            made["loss"] = (functional.cross_entropy(made.logits, labels, reduction="none") * WEIGHTS[labels]).mean()
        return made


def of_texts(
    directory: Path, args: TrakConfig, *, model: Any, kind: Any = hf.Trainer, rows: str = "class",
    collator: Any = None, function: Any = None, task: Any = None, **options: Any,
) -> TrakAttributor:  # fmt: skip
    own = hf.TrainingArguments(str(directory / "out"), use_cpu=True, report_to=[], **options)
    made = kind(
        model(), own, collator() if collator else None, labelled(rows), processing_class=tokenizer(),
        compute_loss_func=function,
    )  # fmt: skip
    if kind is WithTeacher:
        made.teacher = bert("SequenceClassification", hidden_size=32)
    return of_trainer(made, args, task=task)


def two_heads() -> Any:
    return seeded(lambda: TwoHeads(hf.BertConfig(**BERT)))


def own_forward() -> Any:
    return seeded(lambda: OwnForward(hf.BertConfig(**BERT)))


def experts() -> Any:
    more = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return causal("mixtral", router_aux_loss_coef=0.1, **more)


def distilled(directory: Path, args: TrakConfig) -> TrakAttributor:
    trainer, config = trainer_of("GKD")
    words = tokenizer()
    words.chat_template = TEMPLATE
    own = config(str(directory / "out"), use_cpu=True, bf16=False, report_to=[], max_length=None)
    teacher = causal("llama", intermediate_size=48)
    return of_trainer(
        trainer(llama(), teacher, args=own, train_dataset=texts_of("messages"), processing_class=words), args
    )


def preferred(directory: Path, args: TrakConfig, *, kind: str) -> TrakAttributor:
    trainer, config = trainer_of("CPO")
    own = config(
        str(directory / "out"), use_cpu=True, bf16=False, report_to=[], loss_type=kind, per_device_train_batch_size=2
    )
    return of_trainer(trainer(llama(), args=own, train_dataset=pairs(), processing_class=tokenizer()), args)


def adapted(directory: Path, args: TrakConfig) -> TrakAttributor:
    import peft

    model = peft.get_peft_model(
        llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return of_texts(
        directory, args, model=model.eval, rows="tokens of texts", collator=PLAIN, label_smoothing_factor=0.1
    )


def boxes(directory: Path, args: TrakConfig, *, task: Any = None) -> TrakAttributor:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "layer_type": "basic"}
    layers = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("attention_heads", "layers")}
    config = hf.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, d_model=16, num_queries=5,
        backbone_config=hf.ResNetConfig(out_features=["stage2"], **sizes), encoder_ffn_dim=16, decoder_ffn_dim=16,
        num_labels=3, **layers,
    )  # fmt: skip
    rows = Rows([
        {"pixel_values": torch.rand(3, 32, 32), "class_labels": torch.randint(0, 3, (count,)),
         "boxes": torch.rand(count, 4) * 0.4 + 0.3}
        for count in (1, 3, 2, 2, 1, 4)
    ])  # fmt: skip

    def collate(given: list[Any]) -> Any:
        labels = [{name: row[name] for name in ("class_labels", "boxes")} for row in given]
        return {"pixel_values": torch.stack([row["pixel_values"] for row in given]), "labels": labels}

    model = hf.DetrForObjectDetection(config).eval()
    plain = hf.TrainingArguments(str(directory / "out"), use_cpu=True, report_to=[], remove_unused_columns=False)
    own = of_trainer(hf.Trainer(model, plain, collate, rows), args, task=task)
    if task is not None:
        return own

    found = torch.tensor([len(row["class_labels"]) for row in rows])
    weights = found + config.eos_coefficient * (config.num_queries - found)

    def loss(row: int) -> torch.Tensor:
        # A batch divides the cross-entropy of its queries by the sum of their weights: a row's part of it, times the
        # number of rows, is the sum over its own queries by the mean weight of a row.
        outputs = model(**collate([rows[row]]))
        return outputs.loss + (weights[row] / weights.mean() - 1) * outputs.loss_dict["loss_ce"]

    return with_truth(own, loss)


PADDING = lambda: hf.DataCollatorWithPadding(tokenizer())  # noqa: E731
PLAIN = lambda: hf.DataCollatorForLanguageModeling(tokenizer(), mlm=False)  # noqa: E731
CLASSIFIER = partial(bert, "SequenceClassification")
ONE = partial(bert, "SequenceClassification", num_labels=1)
OWN_LOSSES = tuple(
    EcosystemCase(title, make)
    for title, make in {
        "`compute_loss` with weights of classes": partial(of_texts, kind=Weighted, model=CLASSIFIER),
        "`compute_loss_func`: a focal loss": partial(of_texts, model=CLASSIFIER, function=focal),
        "`label_smoothing_factor`: classes": partial(of_texts, model=CLASSIFIER, label_smoothing_factor=0.2),
        '`label_smoothing_factor`: classes, `task="loss"`': partial(
            of_texts, model=CLASSIFIER, label_smoothing_factor=0.2, task="loss"
        ),
        "`label_smoothing_factor`: a language model": partial(
            of_texts, model=gpt2, rows="tokens of texts", collator=PLAIN, label_smoothing_factor=0.2
        ),
        "`label_smoothing_factor`: T5": partial(
            of_texts, model=t5, rows="text", collator=lambda: hf.DataCollatorForSeq2Seq(tokenizer(), model=t5()),
            label_smoothing_factor=0.1,
        ),
        "`label_smoothing_factor`: LoRA": adapted,
        "`label_smoothing_factor`: tokens": partial(
            of_texts, model=partial(bert, "TokenClassification"), rows="tokens",
            collator=lambda: hf.DataCollatorForTokenClassification(tokenizer()), label_smoothing_factor=0.1,
        ),
        "one logit, `compute_loss` of two classes": partial(of_texts, kind=Binary, model=ONE),
        "the loss of the model and a penalty": partial(of_texts, kind=Penalized, model=CLASSIFIER),
        "two heads, the sum of their losses": partial(of_texts, kind=SeveralTasks, model=two_heads),
        "distillation of a classifier": partial(of_texts, kind=WithTeacher, model=CLASSIFIER),
        "the model called twice for a loss": partial(of_texts, kind=Twice, model=CLASSIFIER),
        "a model whose `forward` weighs classes": partial(of_texts, model=own_forward),
        "experts with the loss of their router": partial(
            of_texts, model=experts, rows="tokens of texts", collator=PLAIN
        ),
        "`SFTTrainer`: `loss_type=\"dft\"`": partial(sft, kind="text", loss_type="dft"),
        "`SFTTrainer`: `label_smoothing_factor`": partial(sft, kind="text", label_smoothing_factor=0.1),
        "`SFTTrainer`: `assistant_only_loss`, smoothed": partial(
            sft, kind="messages", assistant_only_loss=True, label_smoothing_factor=0.1
        ),
        "`GKDTrainer`, on its messages": distilled,
        "`CPOTrainer`": partial(preferred, kind="sigmoid"),
        "`CPOTrainer`: SimPO": partial(preferred, kind="simpo"),
        "DETR: boxes, in batches": boxes,
        'DETR: boxes, in batches, `task="row_loss"`': partial(boxes, task="row_loss"),
    }.items()
)  # fmt: skip
