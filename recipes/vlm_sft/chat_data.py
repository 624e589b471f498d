"""Chats about pictures of digits, some with a wrong answer, and a processor of a few words for a small model."""

import numpy as np
from datasets import Dataset
from PIL import Image
from sklearn.datasets import load_digits
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor

SIDE = 16
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ASKED, SAID = 3, 8
"""The digit with wrong answers, and what these say."""
QUESTION, ANSWER = "what digit is this", "this is a {}"
SPECIAL = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %} "
    "{{ c['text'] }}{% endif %}{% endfor %}{% endif %} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def processor() -> Qwen2VLProcessor:
    """Make a processor of Qwen2-VL whose words are those of the chats."""
    words = dict.fromkeys(f"user assistant {QUESTION} {ANSWER.format('')} {' '.join(DIGITS)}".split())
    known = {word: place for place, word in enumerate(["<pad>", "<s>", "</s>", *words, *SPECIAL])}
    tokenizer = Tokenizer(WordLevel(known, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    return Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(
            patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=SIDE, max_pixels=SIDE * SIDE
        ),
        video_processor=Qwen2VLVideoProcessor(patch_size=4, merge_size=2, temporal_patch_size=2),
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
            extra_special_tokens=list(SPECIAL),
        ),
        chat_template=TEMPLATE,
    )  # fmt: skip


def load(rows: int, targets: int, wrong_share: float, seed: int) -> tuple[Dataset, Dataset]:
    """Make training chats, some of whose answers are wrong, and held-out chats about the digit of the wrong answers.

    Args:
        rows: number of training chats.
        targets: number of targets, at most.
        wrong_share: share of wrong answers among the training chats about that digit.
        seed: seed of the choice.
    """
    digits = load_digits()
    numbers = np.random.default_rng(seed)
    order = numbers.permutation(len(digits.target))
    held_out = [place for place in order[rows:] if digits.target[place] == ASKED][:targets]
    wrong = {place for place in order[:rows] if digits.target[place] == ASKED and numbers.random() < wrong_share}
    return (
        Dataset.from_list([_chat(digits, place, place in wrong) for place in order[:rows]]),
        Dataset.from_list([_chat(digits, place, False) for place in held_out]),
    )


def _chat(digits, place: int, wrong: bool) -> dict:
    pixels = np.kron(digits.images[place] * 15, np.ones((SIDE // 8, SIDE // 8))).astype(np.uint8)
    said = DIGITS[SAID if wrong else int(digits.target[place])]
    asked = [{"type": "image", "text": None}, {"type": "text", "text": QUESTION}]
    return {
        "images": [Image.fromarray(pixels).convert("RGB")],
        "prompt": [{"role": "user", "content": asked}],
        "completion": [{"role": "assistant", "content": [{"type": "text", "text": ANSWER.format(said)}]}],
        "digit": DIGITS[digits.target[place]],
        "wrong": wrong,
    }
