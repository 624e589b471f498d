"""How long the viewer takes to answer, from the question to the rows that it shows.

    python benchmarks/viewer.py --dir /path/with/200/MB --rows 10000

Two indexes with the default settings are made: texts under a small GPT-2, and handwritten digits of scikit-learn,
shifted and with noise, under a small ViT. Each is served as `hf-trak serve` does, in this process, and asked one
question after the other by what its page calls, and over HTTP. Needs the extras `viewer` and `recipes`.
"""

import argparse
import io
import json
import resource
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import ClassLabel, Dataset, Features, Image
from PIL import Image as PILImage
from sklearn.datasets import load_digits
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

from hf_trak.cli.main import main as hf_trak
from hf_trak.cli.serve import opened
from hf_trak.viewer import IndexSession, serve
from hf_trak.viewer.handlers import Handlers, Listing

WORDS = [f"word{i}" for i in range(1000)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000, help="n, training rows")
    parser.add_argument("--questions", type=int, default=15, help="number of later questions")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--proj-dim", type=int, help="k; by default that of `hf-trak featurize`")
    parser.add_argument("--dir")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print("| index | step | seconds |\n|---|---|---|")
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        place = Path(directory)
        measure("texts", text_rows(place, args.rows), args, text_targets)
        measure("digits", digit_rows(place, args.rows), args, digit_targets)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"\n{args.rows:,} rows, {args.threads} threads, peak {peak:.1f} GiB with featurizing.")


def measure(
    name: str,
    made: tuple[Path, Path, int],
    args: argparse.Namespace,
    targets: Callable[[int], list[dict[str, Any]]],
) -> None:
    """Featurize an index, serve it, and print the seconds of every step."""
    model, rows, parameters = made
    index = str(rows.parent / f"{name}-index")
    more = ["--use_cpu", "--per_device_batch_size", "32", "--json"]
    more += [] if args.proj_dim is None else ["--proj_dim", str(args.proj_dim)]
    printed = io.StringIO()
    begun = time.perf_counter()
    with redirect_stdout(printed):
        status = hf_trak(
            ["featurize", "--model", str(model), "--train_dataset", str(rows), "--output_dir", index, *more]
        )
    if status != 0:
        raise SystemExit(f"hf-trak featurize ended with {status}.")
    title = f"{name}: {parameters:,} parameters, k = {json.loads(printed.getvalue())['features']:,}"
    show(title, "featurize", time.perf_counter() - begun)
    begun = time.perf_counter()
    session = opened(["--index", index])[0]
    if not isinstance(session, IndexSession):
        raise SystemExit("The directory holds no index.")
    app = serve(session, port=None, block=False)
    show(title, "start of the viewer, model and rows included", time.perf_counter() - begun)
    handlers = Handlers(session, Path(tempfile.gettempdir()))
    seconds = [timed(partial(asked, handlers, values)) for values in targets(args.questions + 1)]
    show(title, "first question", seconds[0])
    show(title, f"later questions, median of {len(seconds) - 1}", statistics.median(seconds[1:]))
    show(title, "later questions, slowest", max(seconds[1:]))
    if not session.form.upload:
        over_http = [timed(partial(ask, app.local_url, values)) for values in targets(args.questions)]
        show(title, "over HTTP, tokens not marked, median", statistics.median(over_http))
    others(title, handlers, targets(1)[0])
    app.close(verbose=False)


def asked(handlers: Handlers, values: dict[str, Any]) -> str:
    """Ask as the page does: scores, shares of the tokens, and the rows laid out."""
    return handlers.answer(handlers.ask(values), Listing())


def others(title: str, handlers: Handlers, values: dict[str, Any]) -> None:
    """Time another λ, another filter of the same answer, and self-influence."""
    other = {**values, "ridge": 0.7}
    show(title, "another λ, first question", timed(partial(asked, handlers, other)))
    show(title, "another λ, second question", timed(partial(asked, handlers, other)))
    found = handlers.ask(other)
    keep = {"label": "7"} if handlers.session.rows.labels() else {"text": "word7"}
    show(title, "another filter of the same answer", timed(lambda: handlers.answer(found, Listing(**keep))))
    show(title, "self-influence of all rows, once", timed(handlers.session.self_influence))


def show(title: str, step: str, seconds: float) -> None:
    print(f"| {title} | {step} | {seconds:.2f} |", flush=True)


def timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


# -- texts ------------------------------------------------------------------------------------------------------------


def text_rows(place: Path, count: int) -> tuple[Path, Path, int]:
    """Write a small GPT-2, and texts of 20 to 60 words drawn at random."""
    torch.manual_seed(0)
    vocabulary = {word: number for number, word in enumerate(["<unk>", "<eos>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>"
    )
    tokenizer.model_max_length = 128
    config = GPT2Config(
        vocab_size=len(vocabulary), n_positions=128, n_embd=64, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1
    )
    model = GPT2LMHeadModel(config)
    model.save_pretrained(place / "gpt2")
    tokenizer.save_pretrained(place / "gpt2")
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, size=rng.integers(20, 60))) for _ in range(count)]
    Dataset.from_dict({"text": texts}).to_json(place / "texts.jsonl")
    return place / "gpt2", place / "texts.jsonl", model.num_parameters()


def text_targets(count: int) -> list[dict[str, Any]]:
    """Texts of 40 words, with their tokens marked."""
    rng = np.random.default_rng(1)
    return [{"text.text": " ".join(rng.choice(WORDS, size=40)), "tokens": True} for _ in range(count)]


def ask(url: str, values: dict[str, Any]) -> object:
    """Ask as a program does."""
    data = {"data": [{"text": values["text.text"]}, None, 10, "", None, 0, False, ""]}
    request = urllib.request.Request(f"{url}gradio_api/call/attribute", json.dumps(data).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=120) as answer:
        event = json.load(answer)["event_id"]
    with urllib.request.urlopen(f"{url}gradio_api/call/attribute/{event}", timeout=120) as answer:
        text = answer.read().decode()
    if "event: complete" not in text:
        raise SystemExit(f"The viewer answers {text[:300]}")
    return text


# -- digits -----------------------------------------------------------------------------------------------------------


def digit_rows(place: Path, count: int) -> tuple[Path, Path, int]:
    """Write a small ViT, and digits that are shifted and have noise."""
    torch.manual_seed(0)
    names = [str(number) for number in range(10)]
    config = ViTConfig(
        image_size=16, patch_size=8, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=128, id2label=dict(enumerate(names)),
        label2id={name: number for number, name in enumerate(names)},
    )  # fmt: skip
    model = ViTForImageClassification(config)
    model.save_pretrained(place / "vit")
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(place / "vit")
    digits, rng = load_digits(), np.random.default_rng(0)
    chosen = np.arange(count) % len(digits.images)
    shifted = [np.roll(digits.images[i], rng.integers(2), 1) + rng.normal(0, 1, (8, 8)) for i in chosen]
    images = [{"bytes": picture(pixels), "path": None} for pixels in shifted]
    features = Features({"image": Image(), "label": ClassLabel(names=names)})
    rows = Dataset.from_dict({"image": images, "label": digits.target[chosen].tolist()}, features=features)
    rows.save_to_disk(place / "digits")
    return place / "vit", place / "digits", model.num_parameters()


def picture(pixels: np.ndarray) -> bytes:
    """Encode a digit as PNG."""
    file = io.BytesIO()
    PILImage.fromarray((pixels.clip(0, 16) * 255 / 16).astype(np.uint8)).convert("RGB").save(file, "PNG")
    return file.getvalue()


def digit_targets(count: int) -> list[dict[str, Any]]:
    """Uploads of digits, which the model labels."""
    return [{"upload": picture(image)} for image in load_digits().images[-count:]]


if __name__ == "__main__":
    main()
