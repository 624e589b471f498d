"""Tiny vision-language models from configurations, rows of images and text, and batches as processors make them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

IMAGE, VIDEO, START, END, PAD = 90, 91, 92, 93, 0
LANGUAGE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": PAD,
}  # fmt: skip
ROPE: dict[str, Any] = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
PATCHES: dict[str, Any] = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
TOWER: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "text_config": {**LANGUAGE, "rope_parameters": ROPE},
        "vision_config": {**PATCHES, "depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2},
    },
    "qwen2_5_vl": {
        "text_config": {**LANGUAGE, "rope_parameters": ROPE},
        "vision_config": {
            **PATCHES, "depth": 2, "hidden_size": 16, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 24,
            "window_size": 16, "fullatt_block_indexes": [1],
        },
    },
    "qwen3_vl": {
        "text_config": {**LANGUAGE, "head_dim": 8, "rope_parameters": {**ROPE, "mrope_interleaved": True}},
        "vision_config": {
            **PATCHES, "depth": 2, "hidden_size": 16, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 24,
            "deepstack_visual_indexes": [0], "num_position_embeddings": 64,
        },
    },
    "llava": {
        "text_config": {**LANGUAGE, "model_type": "llama"},
        "vision_config": {**TOWER, "model_type": "clip_vision_model", "projection_dim": 32},
        "vision_feature_select_strategy": "default", "vision_feature_layer": -2,
    },
    "paligemma": {
        "text_config": {**LANGUAGE, "model_type": "gemma", "head_dim": 8},
        "vision_config": {**TOWER, "model_type": "siglip_vision_model", "projection_dim": 32}, "projection_dim": 32,
    },
    "gemma3": {
        "text_config": {**LANGUAGE, "model_type": "gemma3_text", "head_dim": 8, "sliding_window": 16},
        "vision_config": {**TOWER, "model_type": "siglip_vision_model"}, "mm_tokens_per_image": 4,
        "boi_token_index": START, "eoi_token_index": END,
    },
    "smolvlm": {
        "text_config": {**LANGUAGE, "model_type": "llama"},
        "vision_config": {**TOWER, "model_type": "smolvlm_vision", "max_num_images": 4}, "scale_factor": 2,
    },
}  # fmt: skip
PIXELS: dict[str, Any] = {
    "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 16, "max_pixels": 4096
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %} "
    "{{ c['text'] }}{% endif %}{% endfor %}{% endif %} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
TOKENS_PER_IMAGE = {"llava": 4, "paligemma": 4, "gemma3": 4, "smolvlm": 1}
NUMBERS = (1, 2, 1, 0, 2, 1)
"""Images of each row."""
SIZES = ((16, 16), (16, 24), (8, 8))
"""Height and width of the images of the models that take any size."""


def vlm(kind: str) -> nn.Module:
    """Make a model with random weights."""
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START}
    if not kind.startswith("qwen"):
        tokens = {"image_token_id": IMAGE, "image_token_index": IMAGE}
    config = AutoConfig.for_model(kind, **CONFIGS[kind], **tokens, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).float().eval()
    for parameter in model.parameters():
        if not parameter.any():  # biases, and matrices that begin at zero, through which no gradient goes
            nn.init.normal_(parameter, 0.0, 0.1)
    return model


def image_rows(kind: str, numbers: tuple[int, ...] = NUMBERS, seed: int = 0) -> list[dict[str, Any]]:
    """Rows with `images`, random pixels `(3, H, W)`, and `text`, token ids of different lengths."""
    rng = np.random.default_rng(seed)
    rows = []
    for place, number in enumerate(numbers):
        number = 1 if kind == "paligemma" else number
        sizes = [SIZES[(place + one) % 3] if kind.startswith("qwen") else (8, 8) for one in range(number)]
        images = [rng.integers(0, 255, (3, *size)).astype(np.uint8) for size in sizes]
        rows.append({"images": images, "text": rng.integers(1, 80, 4 + int(rng.integers(5))).tolist()})
    return rows


def vlm_collator(kind: str, keep: tuple[str, ...] = ()) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
    """Make a collator that lays images out as the processor of this model does."""
    processor = Qwen2VLImageProcessor(**PIXELS)

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        pixels, grids, texts = [], [], []
        for row in rows:
            tokens = [5, 6]
            for image in row["images"]:
                if kind.startswith("qwen"):
                    made = processor(images=[np.asarray(image, dtype=np.uint8)], return_tensors="pt")
                    grids.append(made["image_grid_thw"])
                    pixels.append(made["pixel_values"])
                    count = int(grids[-1].prod()) // 4
                else:
                    pixels.append(torch.tensor(np.asarray(image), dtype=torch.float32)[None] / 127.5 - 1)
                    count = TOKENS_PER_IMAGE[kind]
                tokens += [START, *[IMAGE] * count, END]
            texts.append([*tokens, *row["text"]])
        width = max(map(len, texts))
        ids = torch.tensor([text + [PAD] * (width - len(text)) for text in texts])
        mask = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in texts])
        labels = torch.where((mask == 0) | (ids >= IMAGE), -100, ids)
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        if kind.startswith("qwen"):
            batch["mm_token_type_ids"] = (ids == IMAGE).long()
        elif kind in ("gemma3", "paligemma"):
            batch["token_type_ids"] = (ids == IMAGE).long()
        if not pixels:
            return batch
        if kind == "smolvlm":
            return batch | _filled_up(rows, pixels)
        return batch | {"pixel_values": torch.cat(pixels)} | ({"image_grid_thw": torch.cat(grids)} if grids else {})

    return collate


def _filled_up(rows: list[dict[str, Any]], pixels: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Images in two dimensions, rows and places, with black images where a row has no more."""
    numbers = [len(row["images"]) for row in rows]
    filled = torch.zeros(len(rows), max(numbers), *pixels[0].shape[1:])
    mask = torch.zeros(len(rows), max(numbers), *pixels[0].shape[2:], dtype=torch.long)
    own = iter(pixels)
    for row, number in enumerate(numbers):
        for place in range(number):
            filled[row, place], mask[row, place] = next(own)[0], 1
    return {"pixel_values": filled, "pixel_attention_mask": mask}


def processor_of_words() -> Qwen2VLProcessor:
    """A processor of Qwen2-VL with a few words, whose tokens of images are those of the models here."""
    special = {
        "<|image_pad|>": IMAGE, "<|video_pad|>": VIDEO, "<|vision_start|>": START, "<|vision_end|>": END,
        "<|im_start|>": 94, "<|im_end|>": 95,
    }  # fmt: skip
    words = "user assistant what digit is this zero one two three four five six seven eight nine and ."
    known = {word: place for place, word in enumerate(["<pad>", "<s>", "</s>", *words.split()])} | special
    tokenizer = Tokenizer(WordLevel(known, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    return Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(**PIXELS),
        video_processor=Qwen2VLVideoProcessor(patch_size=4, merge_size=2, temporal_patch_size=2),
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", bos_token="<s>",
            extra_special_tokens=list(special),
        ),
        chat_template=TEMPLATE,
    )  # fmt: skip


def conversations(count: int) -> Dataset:
    """Prompts with one or two images each, and completions."""
    rng, made = np.random.default_rng(0), []
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven"]
    for row in range(count):
        pixels = [rng.integers(0, 255, (*SIZES[(row + one) % 3], 3), dtype=np.uint8) for one in range(1 + row % 2)]
        said = " and ".join(words[int(rng.integers(8))] for _ in pixels)
        asked = [*({"type": "image", "text": None} for _ in pixels), {"type": "text", "text": "what digit is this"}]
        made.append(
            {
                "images": [Image.fromarray(one) for one in pixels],
                "prompt": [{"role": "user", "content": asked}],
                "completion": [{"role": "assistant", "content": [{"type": "text", "text": said}]}],
            }
        )
    return Dataset.from_list(made)
