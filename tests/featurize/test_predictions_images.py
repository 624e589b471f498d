"""What a vision-language model writes about images, as targets."""

from pathlib import Path
from typing import Any

import pytest
import torch
from vlm_models import conversations, processor_of_words, vlm

from hf_trak import TrakAttributor, TrakConfig

trl = pytest.importorskip("trl")

WORDS = range(8, 21)
"""Tokens that are words in the tokenizer of these tests."""


@pytest.fixture(scope="module")
def attributor(tmp_path_factory: pytest.TempPathFactory) -> TrakAttributor:
    directory: Path = tmp_path_factory.mktemp("images")
    args = trl.SFTConfig(
        str(directory / "out"), max_length=None, use_cpu=True, bf16=False, report_to=[], gradient_checkpointing=False
    )
    model = vlm("qwen2_vl")
    model.config.pad_token_id = 0
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    trainer = trl.SFTTrainer(model, args=args, train_dataset=conversations(6), processing_class=processor_of_words())
    config = TrakConfig(
        str(directory / "trak"), proj_dim=64, use_cpu=True, per_device_batch_size=3, budget="fast"
    )  # fmt: skip
    made = TrakAttributor.from_trainer(trainer, config)
    made.featurize()
    return made


def words_alone(attributor: TrakAttributor) -> dict[str, Any]:
    size = attributor.model.config.text_config.vocab_size
    return {"max_new_tokens": 3, "suppress_tokens": [token for token in range(size) if token not in WORDS]}


@pytest.mark.slow
def test_answers_are_those_of_the_model_to_the_prompt_and_its_images(attributor: TrakAttributor) -> None:
    asked = conversations(8).select([6, 7])  # one image, and two of different sizes
    options = words_alone(attributor)
    predicted = attributor.predict(asked, **options)
    processor = processor_of_words()
    for row, found in zip(asked, predicted, strict=True):
        inputs = processor(
            text=[processor.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)],
            images=row["images"],
            return_tensors="pt",
        )
        prompt = inputs["input_ids"].shape[1]
        with torch.no_grad():
            written = attributor.model.generate(**inputs, do_sample=False, **options)[0, prompt:]
        assert found["predicted"] == processor.decode(written, skip_special_tokens=True)
        assert found["completion"] == [
            {"role": "assistant", "content": [{"type": "text", "text": found["predicted"]}]}
        ]
        assert found["prompt"] == row["prompt"]


@pytest.mark.slow
def test_rows_without_answers_are_answered_and_scored(attributor: TrakAttributor) -> None:
    asked = conversations(8).select([6, 7])
    options = words_alone(attributor)
    with_answers = attributor.predict(asked, **options)
    predicted = attributor.predict(asked.remove_columns("completion"), **options)
    assert predicted["predicted"] == with_answers["predicted"]
    scored = attributor.attribute(predicted, top_k=2)
    assert [len(row["trak_indices"]) for row in scored] == [2, 2]
    assert attributor.attribute(with_answers, top_k=2)["trak_scores"] == scored["trak_scores"]


def test_chats_without_a_prompt_of_their_own_are_refused(tmp_path: Path) -> None:
    rows = conversations(4)
    rows = rows.map(
        lambda row: {"messages": row["prompt"] + row["completion"]}, remove_columns=["prompt", "completion"]
    )
    args = trl.SFTConfig(str(tmp_path / "out"), max_length=None, use_cpu=True, bf16=False, report_to=[])
    model = vlm("qwen2_vl")
    model.config.pad_token_id = 0
    trainer = trl.SFTTrainer(model, args=args, train_dataset=rows, processing_class=processor_of_words())
    chats = TrakAttributor.from_trainer(trainer, TrakConfig(str(tmp_path / "trak"), use_cpu=True))
    with pytest.raises(TypeError, match="Expected the columns `images` and `prompt`"):
        chats.predict(rows, max_new_tokens=2)
