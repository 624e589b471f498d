"""Time to project the gradients of a linear layer: `factored` from its factors, beside `sjlt` on the formed gradient.

    python benchmarks/factored.py layers
    python benchmarks/factored.py edge
    python benchmarks/factored.py model

`layers` measures layers of different sizes at different numbers of positions T, `edge` layers about as small as the
smallest that the map multiplies from both sides, `model` a whole pass of the hooked engine over a batch of a
Llama-style model. Every round measures `sjlt` and then each p, so that ratios come from the same stretch of time;
medians over rounds. What is timed begins with inputs and output gradients of the layer, as the engine has them, and
ends with features. Seconds are those of one thread, which other programs do not add to.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_trak.gradient_computers.hooked.computer import HookedGradientComputer
from hf_trak.gradient_computers.hooked.rules.linear import linear_pieces
from hf_trak.gradient_computers.hooked.workspace import Workspace
from hf_trak.modelout_functions import get_task
from hf_trak.projectors import BlockProjector, FactoredProjector, SparseProjector, factored
from hf_trak.projectors.factored import is_large, two_sided_matrices

K = 4096
SIZES = (64, 128, 256)
LAYERS = ((768, 768), (768, 3072), (2048, 2048), (4096, 4096))
TOKENS = (1, 8, 32, 128, 512)
EDGE = {64: (160, 288), 128: (312, 576), 256: (624, 1144)}
"""By p, widths of square layers whose factors take just as many multiplications, and half as many: the rule's."""
WIDTHS, SEQUENCES = (512, 1024), (32, 128)


def medians(runs: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Run everything in turn, `rounds` times after a first one that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            begun = time.thread_time()
            run()
            if turn:
                seconds[name].append(time.thread_time() - begun)
    return {name: statistics.median(found) for name, found in seconds.items()}


def of_layer(height: int, width: int, tokens: int, rows: int, sizes: Sequence[int], rounds: int) -> dict[str, float]:
    """Seconds per row of a layer, by map."""
    x, grad = torch.randn(rows, tokens, width), torch.randn(rows, tokens, height)
    workspace = Workspace()

    def run(projector: BlockProjector) -> None:
        sink = projector.sink(rows, 0, "cpu")
        for _, start, block in linear_pieces(x, grad, workspace, bias=False, takes_outer=sink.takes_outer):
            if isinstance(block, torch.Tensor):
                sink(start, block)
            else:
                sink.add_outer(start, block.left, block.right)
        sink.result()

    projectors: dict[str, BlockProjector] = {"sjlt": SparseProjector(height * width, K)}
    for size in sizes:
        if two_sided_matrices([(height, width)], size):
            shapes = [(height, width)]
            projectors[f"p = {size}"] = FactoredProjector(height * width, K, shapes=shapes, factored_dim=size)
    runs = {name: (lambda one=one: run(one)) for name, one in projectors.items()}
    return {name: seconds / rows for name, seconds in medians(runs, rounds).items()}


def of_model(width: int, tokens: int, rows: int, sizes: Sequence[int], rounds: int) -> dict[str, float]:
    """Seconds per row of a pass over a batch, forward and backward included, by map."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=4, num_attention_heads=8, vocab_size=8192,
        num_key_value_heads=8, max_position_embeddings=tokens, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(1, 8192, (rows, tokens))
    batch = {"input_ids": ids, "labels": ids}
    computer = HookedGradientComputer(model, get_task("causal_lm"), dtype=None, device="cpu")
    shapes, total = [slot.shape for slot in computer.layout.slots], computer.layout.total

    def run(projector: BlockProjector | None) -> None:
        if projector is None:
            model(**batch).loss.backward()
            model.zero_grad(set_to_none=True)
            return
        sink = projector.sink(rows, 0, "cpu")
        computer.stream(batch, sink)
        sink.result()

    projectors: dict[str, BlockProjector | None] = {"training step": None, "sjlt": SparseProjector(total, K)}
    for size in sizes:
        projectors[f"p = {size}"] = FactoredProjector(total, K, shapes=shapes, factored_dim=size)
    runs = {name: (lambda one=one: run(one)) for name, one in projectors.items()}
    return {name: seconds / rows for name, seconds in medians(runs, rounds).items()}


def line(first: str, found: dict[str, float], columns: Sequence[str]) -> None:
    """Print milliseconds per row, and of all but the first map the ratio to `sjlt`."""
    cells = []
    for name in columns:
        ratio = "" if name in ("sjlt", "training step") else f" (÷ {found['sjlt'] / found.get(name, 1.0):.1f})"
        cells.append(f"{1e3 * found[name]:.3g}{ratio}" if name in found else "too small")
    print(f"| {' | '.join([first, *cells])} |", flush=True)


def head(first: str, columns: Sequence[str]) -> None:
    print(f"\n| {' | '.join([first, *columns])} |\n|{'---|' * (len(columns) + 1)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["layers", "edge", "model"])
    parser.add_argument("--rows", type=int, default=4, help="rows per batch")
    parser.add_argument("--rounds", type=int, default=5, help="measurements; the median is shown")
    args = parser.parse_args()
    torch.set_num_threads(1)
    columns = ["sjlt", *(f"p = {size}" for size in SIZES)]
    if args.what == "layers":
        for height, width in LAYERS:
            head(f"{height} × {width}, T", columns)
            for tokens in TOKENS:
                line(f"{tokens}", of_layer(height, width, tokens, args.rows, SIZES, args.rounds), columns)
    elif args.what == "edge":
        for size, widths in EDGE.items():
            for width in widths:
                head(f"{width} × {width}, T", ["sjlt", f"p = {size}"])
                for tokens in (*TOKENS, 2048):
                    with mock.patch.object(factored, "is_large", lambda *_: True):
                        found = of_layer(width, width, tokens, args.rows, [size], args.rounds)
                    line(f"{tokens}", found, ["sjlt", f"p = {size}"])
    else:
        for width in WIDTHS:
            head(f"width {width}, T", ["training step", *columns])
            for tokens in SEQUENCES:
                sizes = [size for size in SIZES if is_large(width, width, size)]
                line(
                    f"{tokens}",
                    of_model(width, tokens, args.rows, sizes, args.rounds),
                    ["training step", *columns],
                )


if __name__ == "__main__":
    main()
