"""Tasks of the example scripts of transformers, with the collators that these use."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from datasets import Dataset

from ecosystem_cases.case import CLASSES, VOCABULARY, EcosystemCase, token_rows, tokenizer
from ecosystem_cases.truth import of_trainer
from hf_trak import TrakConfig

ROWS = 6
BERT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 64, "num_labels": CLASSES,
}  # fmt: skip


def seeded(make: Any) -> Any:
    torch.manual_seed(0)
    return make().eval()


def bert(kind: str, **options: Any) -> Any:
    return seeded(lambda: getattr(hf, f"BertFor{kind}")(hf.BertConfig(**{**BERT, **options})))


def labelled(kind: str) -> Dataset:
    """Rows of tokens with labels of a kind."""
    ids = token_rows(ROWS)
    rows: dict[str, Any] = {"input_ids": ids}
    if kind == "class":
        rows["labels"] = [place % CLASSES for place in range(ROWS)]
    elif kind == "number":
        rows["labels"] = [float(place) for place in range(ROWS)]
    elif kind == "classes":
        rows["labels"] = [[float(place % 2), 1.0, 0.0, float(place % 3 == 0)] for place in range(ROWS)]
    elif kind == "tokens":
        rows["labels"] = [[-100, *(place % CLASSES for place in range(len(row) - 1))] for row in ids]
    elif kind == "span":
        rows |= {"start_positions": [1] * ROWS, "end_positions": [2] * ROWS}
    elif kind == "text":
        rows["labels"] = token_rows(ROWS, seed=1)
    elif kind == "same":
        rows["labels"] = ids
    return Dataset.from_dict(rows)


def trained(directory: Path, args: TrakConfig, *, model: Any, rows: Any, collator: Any, task: Any = None) -> Any:
    """The attributor of a `Trainer` with this model, these rows and this collator."""
    own = hf.TrainingArguments(str(directory / "out"), use_cpu=True, report_to=[])
    given = rows()
    trainer = hf.Trainer(
        model(), own, collator() if collator else None, given,
        processing_class=tokenizer() if "input_ids" in given.column_names else None,
    )  # fmt: skip
    return of_trainer(trainer, args, task=task)


def images() -> Dataset:
    pixels = torch.rand(ROWS, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    return Dataset.from_dict({"pixel_values": pixels.numpy(), "labels": [place % CLASSES for place in range(ROWS)]})


def vit() -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return seeded(
        lambda: hf.ViTForImageClassification(hf.ViTConfig(image_size=16, patch_size=8, num_labels=CLASSES, **sizes))
    )


def t5() -> Any:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return seeded(
        lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, pad_token_id=0, **sizes)
        )
    )


def gpt2() -> Any:
    return seeded(
        lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=64)
        )
    )


def case(title: str, model: Any, kind: str, collator: Any, needs: str = "", task: Any = None) -> EcosystemCase:
    rows = images if kind == "images" else partial(labelled, kind)
    return EcosystemCase(title, partial(trained, model=model, rows=rows, collator=collator, task=task), needs)


PADDING = lambda: hf.DataCollatorWithPadding(tokenizer())  # noqa: E731
TASKS = (
    case("run_glue: classes of texts, dynamic padding", partial(bert, "SequenceClassification"), "class", PADDING),
    case(
        "run_glue: STS-B, a number for each text",
        partial(bert, "SequenceClassification", num_labels=1), "number", PADDING,
    ),
    case(
        "several labels for each text",
        partial(bert, "SequenceClassification", problem_type="multi_label_classification"), "classes", PADDING,
    ),
    case(
        "run_ner: a label for each token", partial(bert, "TokenClassification"), "tokens",
        lambda: hf.DataCollatorForTokenClassification(tokenizer()),
    ),
    case("run_qa: answers with two ends", partial(bert, "QuestionAnswering", num_labels=2), "span", PADDING),
    case(
        "run_clm: `DataCollatorForLanguageModeling`", gpt2, "tokens of texts",
        lambda: hf.DataCollatorForLanguageModeling(tokenizer(), mlm=False),
    ),
    case("run_clm: `DataCollatorWithFlattening`", gpt2, "same", lambda: hf.DataCollatorWithFlattening()),
    case(
        "run_mlm: masks drawn at random", partial(bert, "MaskedLM"), "tokens of texts",
        lambda: hf.DataCollatorForLanguageModeling(tokenizer(), mlm_probability=0.4),
    ),
    case(
        "run_translation, run_summarization: `DataCollatorForSeq2Seq`", t5, "text",
        lambda: hf.DataCollatorForSeq2Seq(tokenizer()),
    ),
    case("run_image_classification", vit, "images", None),
)  # fmt: skip
