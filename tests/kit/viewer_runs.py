"""What tests of the viewer look at: an index of hostile texts with its model, images, and saved runs."""

import functools
import os
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import ClassLabel, Dataset, Features, Image, Value
from doc_examples import WORDS, word_tokenizer
from PIL import Image as PILImage
from test_report import HOSTILE, counted, with_scores
from transformers import (
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    set_seed,
)

from hf_trak.cli.main import main
from hf_trak.report import AttributionRun

TEMPLATES = [
    "${alert(1)}",
    "{{constructor.constructor('alert(1)')()}}",
    "@children <%= 7 * 7 %> `${1}`",
    "[a](javascript:alert(1))",
]
"""Texts that templates of a page would run."""

BAD = [*HOSTILE, *TEMPLATES]
QUICK = ("--use_cpu", "--proj_dim", "32", "--feature_dtype", "float32")
N = 40


def texts(n: int = N) -> list[str]:
    """Plain texts, and a hostile one after every second."""
    plain = [f"{WORDS[i % 7]} fox {WORDS[i % 5]} sleeps in the {WORDS[i % 11]} barn" for i in range(n)]
    return [f"{text} {BAD[i // 2 % len(BAD)]}" if i % 2 else text for i, text in enumerate(plain)]


def language_rows(directory: Path, n: int = N) -> None:
    """Write a tiny GPT-2 to `model/`, and texts to `rows.jsonl`."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=30, n_embd=8, n_layer=1, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=2)
    GPT2LMHeadModel(config).save_pretrained(directory / "model")
    tokenizer = word_tokenizer()
    tokenizer.model_max_length = 32
    tokenizer.save_pretrained(directory / "model")
    rows = {"text": texts(n), "topic": [f"<b>{'ab'[i % 2]}</b>" for i in range(n)]}
    Dataset.from_dict(rows).to_json(directory / "rows.jsonl")


def language_index(directory: Path) -> Path:
    """Featurize texts with a tiny GPT-2 from the command line. Returns the output directory."""
    language_rows(directory)
    arguments = ("--model", str(directory / "model"), "--train_dataset", str(directory / "rows.jsonl"))
    more = ("--text_columns", "text", "--output_dir", str(directory / "trak"), "--max_length", "32")
    assert main(["featurize", *arguments, *more, *QUICK, "--json"]) == 0
    return directory / "trak"


def review_index(directory: Path) -> Path:
    """Train a small GPT-2 on reviews in plain words, and featurize them from the command line."""
    set_seed(0)
    tokenizer = word_tokenizer()
    config = GPT2Config(vocab_size=30, n_embd=32, n_layer=2, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=2)
    model, words = GPT2LMHeadModel(config), ("good", "great", "bad", "dull")
    texts = [
        f"{a} {b} was {c}{d}"
        for a in ("the", "a")
        for b in ("film", "plot")
        for c in ("", "very ", "not ")
        for d in words
    ]
    rows = Dataset.from_dict({"text": texts, "source": ["praise" if text[-1] in "dt" else "blame" for text in texts]})
    ids = [tokenizer(text)["input_ids"] for text in texts]
    options: dict[str, Any] = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    arguments = TrainingArguments(str(directory / "out"), num_train_epochs=30, learning_rate=5e-3, **options)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    Trainer(model, arguments, collator, Dataset.from_dict({"input_ids": ids})).train()
    model.save_pretrained(directory / "model")
    tokenizer.model_max_length = 32
    tokenizer.save_pretrained(directory / "model")
    rows.to_json(directory / "rows.jsonl")
    arguments = ["--model", str(directory / "model"), "--train_dataset", str(directory / "rows.jsonl")]
    arguments += ["--text_columns", "text", "--output_dir", str(directory / "trak"), "--max_length", "32", "--use_cpu"]
    assert main(["featurize", *arguments, "--json"]) == 0
    return directory / "trak"


def image_index(directory: Path, n: int = 30) -> Path:
    """Featurize small pictures of two classes with a tiny ViT from the command line."""
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=16, patch_size=8, num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=8,
        id2label={0: "dark", 1: "light"}, label2id={"dark": 0, "light": 1},
    )  # fmt: skip
    ViTForImageClassification(config).save_pretrained(directory / "vit")
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(directory / "vit")
    features = Features({"image": Image(), "label": ClassLabel(names=["dark", "light"])})
    pictures = [picture(60 + 90 * (i % 2), i) for i in range(n)]
    Dataset.from_dict({"image": pictures, "label": [i % 2 for i in range(n)]}, features=features).save_to_disk(
        directory / "pictures"
    )
    arguments = ("--model", str(directory / "vit"), "--train_dataset", str(directory / "pictures"))
    assert main(["featurize", *arguments, "--output_dir", str(directory / "images"), *QUICK, "--json"]) == 0
    return directory / "images"


def picture(level: int, seed: int) -> PILImage.Image:
    """A picture of noise around a level."""
    rng = np.random.default_rng(seed)
    return PILImage.fromarray(rng.integers(level - 50, level + 50, (16, 16, 3), dtype=np.uint8))


@functools.cache
def hostile_run() -> AttributionRun:
    """A run of hostile texts and labels, with all scores but for the middle ones."""
    torch.manual_seed(0)
    count = 3 * len(BAD)
    scores = torch.randn(count, len(BAD))
    names = [f"<i>{text[:30]}" for text in BAD]
    features = Features({"text": Value("string"), "label": ClassLabel(names=[*map(repr, range(len(names)))])})
    rows = Dataset.from_dict({"text": BAD * 3, "label": [i % len(BAD) for i in range(count)]}, features=features)
    facts = {"model": HOSTILE[0], HOSTILE[1]: HOSTILE[2], "train_rows": count, "labels": names}
    targets = with_scores(rows.select(range(len(BAD))), scores)
    return AttributionRun(targets, rows, None, np.arange(count, dtype=np.float32), counted(scores), facts)


def wheel(directory: Path) -> Path:
    """Write a wheel of this repository, as `python -m build --wheel` makes it, but for the sizes and digests in it."""
    root, facts = Path(__file__).parents[2], "hf_trak-0.0.1.dist-info"
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    needs = [f"Requires-Dist: {one}\n" for one in project["dependencies"]]
    needs += [
        f"Requires-Dist: {one} ; extra == '{extra}'\n"
        for extra, ones in project["optional-dependencies"].items()
        for one in ones
    ]
    path = directory / "hf_trak-0.0.1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            f"{facts}/METADATA", f"Metadata-Version: 2.4\nName: hf_trak\nVersion: 0.0.1\n{''.join(needs)}"
        )
        for place, start in ((root / "hf_trak", root), (root / "cuda_ext", root)):
            for file in place.rglob("*"):
                if file.is_file() and file.suffix != ".pyc":
                    inside = file.relative_to(start)
                    archive.write(file, inside if place.name == "hf_trak" else Path("hf_trak") / inside)
    return path


def child_environment(**more: str) -> dict[str, str]:
    """Environment of a process that imports what this one does."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, *(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def no_network(name: str) -> Callable[..., Any]:
    """Stand in for a function that must not be called."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"{name} was called with {args} {kwargs}", sys.argv)

    return refuse
