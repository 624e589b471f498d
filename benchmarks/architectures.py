"""Engines for per-sample gradients of every architecture of transformers, and what a new release changes.

    python benchmarks/architectures.py                       # all heads, a Markdown table on stdout
    python benchmarks/architectures.py --only mixtral swin   # some model types
    python benchmarks/architectures.py --compare             # what differs from the stored table
    python benchmarks/architectures.py --curvature --json found.jsonl   # their curvature instead

Each architecture is built from a shrunken configuration (architectures_configs.py), gets a batch of four samples
(architectures_heads.py; a left-padded, a right-padded and two full ones if it takes a padding mask), and is
compared with one `autograd.grad` per sample. A run with `--json` writes what it finds to that file, and goes on from
there when it was interrupted; `--store` makes that the stored table, architectures.jsonl. `--compare` exits with 1 if
anything is worse than in the stored table. With `--curvature`, EK-FAC is fitted instead, see
architectures_curvature.py.
"""

import argparse
import logging
import math
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from architectures_curvature import HEADER, Findings, cells, examine
from architectures_heads import HEADS, Head, causal_lm, last_logits, not_tried
from architectures_table import STORED, changes, read, summary, write
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from hf_trak.errors import GradientEngineError
from hf_trak.gradient_computers.auto import AutoGradientComputer, engines_of
from hf_trak.gradient_computers.per_sample import function_task

__all__ = ["HEADS", "causal_lm", "gradients", "last_logits", "one_by_one", "relative_error"]


def one_by_one(model: nn.Module, batch: dict[str, Tensor], output_fn: Any) -> dict[str, Tensor]:
    """The truth: one forward pass and one `autograd.grad` per sample."""
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    rows = []
    for i in range(len(next(iter(batch.values())))):
        single = {key: value[i : i + 1] for key, value in batch.items()}
        f = output_fn(model(**single), single).sum()
        found = torch.autograd.grad(f, list(parameters.values()), allow_unused=True)
        rows.append([torch.zeros_like(p) if g is None else g for p, g in zip(parameters.values(), found, strict=True)])
    return {n: torch.stack(column) for n, column in zip(parameters, zip(*rows, strict=True), strict=True)}


def relative_error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """Largest error of a parameter's gradient for a sample, relative to that gradient.

    Gradients that vanish by symmetry (key biases) are measured against 1e-3 of the sample's whole gradient.
    """
    total = torch.stack([g.reshape(len(g), -1).norm(dim=1) for g in truth.values()]).norm(dim=0)
    worst = 0.0
    for name, gradient in truth.items():
        size = gradient.reshape(len(gradient), -1).norm(dim=1).maximum(1e-3 * total)
        error = float(((found[name] - gradient).reshape(len(gradient), -1).norm(dim=1) / size.clamp_min(1e-30)).max())
        if math.isnan(error):
            return error
        worst = max(worst, error)
    return worst


def gradients(
    model: nn.Module, batch: dict[str, Tensor], output_fn: Any, engine: str = "auto"
) -> tuple[dict[str, Tensor], AutoGradientComputer]:
    """Per-sample gradients, and the computer that took them."""
    computer = AutoGradientComputer(model, function_task(output_fn, model), None, None, None, None, engines_of(engine))
    size = len(next(iter(batch.values())))
    whole = torch.zeros(size, computer.layout.total)

    def sink(start: int, block: Tensor) -> None:
        whole[:, start : start + block.shape[1]] += block

    computer.stream(batch, sink)
    return {
        s.name: whole[:, s.offset : s.offset + s.numel].view(size, *s.shape) for s in computer.layout.slots
    }, computer


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise `TimeoutError` after so many seconds."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def main() -> int:
    """Try every architecture once, and print a table, or what differs from the stored one."""
    arguments = _arguments()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity(logging.CRITICAL)
    torch.set_num_threads(1)  # in models as tiny as these, threads only wait for each other
    if arguments.curvature:
        curvatures(arguments)
        return 0
    findings = Findings(arguments.json)
    found = {}
    if not arguments.compare:
        print("| head | architecture | engine | relative error | replayed or refused |\n|---|---|---|---|---|")
    for name, model_type in _wanted(arguments):
        if (name, model_type) not in findings:
            findings.add(name, model_type, _try(HEADS[name], model_type, arguments.engine, arguments.seconds))
        row = found[name, model_type] = findings[name, model_type]
        if not arguments.compare:
            error = "" if row["error"] is None else f"{row['error']:.1e}"
            print(f"| {name} | {model_type} | {row['engine']} | {error} | {row['note']} |", flush=True)
    print("\n" + summary(found, {name: head.auto for name, head in HEADS.items()}), file=sys.stderr)
    print(f"\ntransformers {transformers.__version__}, {sum(row['seconds'] for row in found.values()):.0f} s. Classes "
          f"that are not tried: {not_tried()}", file=sys.stderr)  # fmt: skip
    if arguments.store:
        write(STORED, found)
    return _compared(arguments, found) if arguments.compare else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", default=list(HEADS), choices=list(HEADS))
    parser.add_argument("--only", nargs="+", help="model types; default: all")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--seconds", type=int, default=60, help="limit per architecture")
    parser.add_argument("--compare", action="store_true", help="print what differs from the stored table")
    parser.add_argument("--store", action="store_true", help="make what is found the stored table")
    parser.add_argument("--curvature", action="store_true", help="fit a curvature instead of comparing gradients")
    parser.add_argument("--json", type=Path, help="file of what was found, from which an interrupted run goes on")
    return parser.parse_args()


def _wanted(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """List heads and model types."""
    for name in arguments.heads:
        for model_type in sorted(getattr(modeling_auto, HEADS[name].mapping)):
            if not arguments.only or model_type in arguments.only:
                yield name, model_type


def _compared(arguments: argparse.Namespace, found: dict[tuple[str, str], Any]) -> int:
    """Print what differs from the stored table, and return 1 if anything is worse."""
    stored = {
        key: row
        for key, row in read(STORED).items()
        if key[0] in arguments.heads and (not arguments.only or key[1] in arguments.only)
    }
    different = changes(stored, found)
    for title, lines in different._asdict().items():
        print(f"{title}: {len(lines)}")
        for line in lines:
            print(f"  {line}")
    return int(different.bad)


def curvatures(arguments: argparse.Namespace) -> None:
    """Fit a curvature to every architecture once, and print a table."""
    logging.getLogger("hf_trak").setLevel(logging.ERROR)  # four samples are few for every layer
    findings = Findings(arguments.json)
    counts: Counter[str] = Counter()
    print(HEADER, flush=True)
    for name, model_type in _wanted(arguments):
        if (name, model_type) not in findings:
            findings.add(name, model_type, _curvature(HEADS[name], model_type, arguments.seconds))
        row = findings[name, model_type]
        kind = "not built" if row.get("built") is False else "failed" if "error" in row else "fitted"
        counts[kind] += 1
        if kind != "not built" or arguments.only:
            print(f"| {name} | {model_type} | {' | '.join(cells(row))} |", flush=True)
    print("\n" + ", ".join(f"{count} {kind}" for kind, count in counts.items()), file=sys.stderr)


def _curvature(head: Head, model_type: str, seconds: int) -> dict[str, Any]:
    try:
        with time_limit(seconds):
            model, batch = head.build(model_type)
            head.output(model(**batch), batch)
    except Exception as error:  # a default configuration that cannot be shrunk is not this script's business
        return {"built": False, "error": _message(error, 150)}
    begun = time.perf_counter()
    try:
        with time_limit(seconds):
            found = examine(model, batch, head.output)
    except Exception as error:  # whatever fails belongs in the table
        return {"error": _message(error, 300)}
    return {**found, "seconds": round(time.perf_counter() - begun, 2)}


def _message(error: Exception, length: int) -> str:
    return f"{type(error).__name__}: {str(error)[:length]}".replace("\n", " ").replace("|", "/")


def _try(head: Head, model_type: str, engine: str, seconds: int) -> dict[str, Any]:
    """Return the engine, the relative error (`None` if there are no gradients), what was refused, and the time."""
    begun = time.perf_counter()

    def row(engine: str, error: float | None, note: str) -> dict[str, Any]:
        spent = round(time.perf_counter() - begun, 2)
        return {"engine": engine, "error": error, "note": note, "seconds": spent}

    try:
        with time_limit(seconds):
            model, batch = head.build(model_type)
            truth = one_by_one(model, batch, head.output)
            head.output(model(**batch), batch)
    except Exception as error:  # a configuration that cannot be built belongs in the table
        return row("not built", None, _message(error, 150))
    try:
        with time_limit(seconds):
            found, computer = gradients(model, batch, head.output, engine)
    except (GradientEngineError, TimeoutError) as error:
        return row("none", None, _message(error, 300))
    refused = " ".join(computer._refusals).replace("\n", " ").replace("|", "/")[:300]
    return row(str(computer.engine), float(f"{relative_error(found, truth):.1e}"), refused)


if __name__ == "__main__":
    sys.exit(main())
