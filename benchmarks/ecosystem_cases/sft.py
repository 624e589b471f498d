"""TRL's `SFTTrainer`, in its settings."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import trl
from datasets import Dataset

from ecosystem_cases.case import EcosystemCase, texts, tokenizer
from ecosystem_cases.language import llama
from ecosystem_cases.truth import of_trainer
from hf_trak import TrakAttributor, TrakConfig

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "kit"))
from vlm_models import conversations, processor_of_words, vlm

TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }} "
    "{% endgeneration %}{% else %}{{ message['content'] }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}and {% endif %}"
)


def rows(kind: str) -> Dataset:
    first, second = texts(6), texts(6, seed=1)
    if kind == "text":
        return Dataset.from_dict({"text": first})
    if kind == "prompt":
        return Dataset.from_dict({"prompt": first, "completion": [f" {one}" for one in second]})
    turns = [
        [{"role": "user", "content": one}, {"role": "assistant", "content": other}]
        for one, other in zip(first, second, strict=True)
    ]
    return Dataset.from_dict({"messages": turns})


def sft(directory: Path, args: TrakConfig, *, kind: str, **options: Any) -> TrakAttributor:
    words = tokenizer()
    words.chat_template = TEMPLATE
    own = trl.SFTConfig(
        str(directory / "out"), use_cpu=True, bf16=False, report_to=[], gradient_checkpointing=False,
        **{"max_length": None, **options},
    )  # fmt: skip
    trainer = trl.SFTTrainer(llama(), args=own, train_dataset=rows(kind), processing_class=words)
    return of_trainer(trainer, args)


def sft_of_images(directory: Path, args: TrakConfig) -> TrakAttributor:
    own = trl.SFTConfig(
        str(directory / "out"), max_length=None, use_cpu=True, bf16=False, report_to=[], gradient_checkpointing=False
    )
    model = vlm("qwen2_vl")
    model.config.pad_token_id = 0
    trainer = trl.SFTTrainer(model, args=own, train_dataset=conversations(6), processing_class=processor_of_words())
    return of_trainer(trainer, args)


SFT = (
    EcosystemCase("`SFTTrainer`: texts", partial(sft, kind="text")),
    EcosystemCase("`SFTTrainer`: messages", partial(sft, kind="messages")),
    EcosystemCase(
        "`SFTTrainer`: messages, `assistant_only_loss`", partial(sft, kind="messages", assistant_only_loss=True)
    ),
    EcosystemCase("`SFTTrainer`: prompts and completions", partial(sft, kind="prompt")),
    EcosystemCase(
        "`SFTTrainer`: `completion_only_loss=False`", partial(sft, kind="prompt", completion_only_loss=False)
    ),
    EcosystemCase("`SFTTrainer`: `padding_free`", partial(sft, kind="text", padding_free=True)),
    EcosystemCase("`SFTTrainer`: `packing`, by row", partial(sft, kind="text", packing=True, max_length=16)),
    EcosystemCase("`SFTTrainer`: images of different sizes (Qwen2-VL)", sft_of_images),
)
