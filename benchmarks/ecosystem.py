"""Does it work with …? Every case is attributed as its users would, and compared with plain autograd.

    python benchmarks/ecosystem.py

Features are whole gradients of minus the loss, of batches of all rows, as `from_trainer` or `TrakAttributor` take
them; beside them, one `autograd.grad` of the trainer's own `compute_loss` for each row, which its own collator made
alone. The error is the largest of a row, relative to the norm of its gradient, after one factor for all rows where the
losses differ by one (shown as "times 2").
Where that is above 1e-5, rows are compared with `autograd.grad` of their outputs within the whole batch, too: the
slope of a ReLU whose input is about zero follows rounding, which is not the same for a batch. A case that is refused
is listed with the message. Cases of `bitsandbytes`, `torchao`, `lightning`, `diffusers`, `sentence_transformers` and
`setfit` need these packages.
"""

import argparse
import gc
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import disable_progress_bars
from ecosystem_cases import GROUPS, EcosystemCase
from ecosystem_cases.truth import by_loss

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.errors import HfTrakError
from hf_trak.gradient_computers.base import run_model
from hf_trak.gradient_computers.environment import pass_settings

BOUND = 1e-5
KINK = 2e-3
"""What the slope of a single ReLU changes, at most."""
HEAD = "| | with | engine | largest error |\n|---|---|---|---|"


announced: list[str] = []
"""What the choice of an engine has logged."""


class _Announcements(logging.Handler):
    """Keep the lines that name an engine."""

    def emit(self, record: logging.LogRecord) -> None:
        if " by the " in record.getMessage():
            announced.append(record.getMessage())


def by_autograd(own: TrakAttributor, together: bool = False) -> torch.Tensor:
    """Minus the gradient of the trainer's own loss of every row, collated alone: `(n, P)`.

    `together` takes the task of hf_trak within the batch of all rows, as do cases without a loss of a row.
    """
    parameters = dict(own.model.named_parameters())
    wanted = [parameters[name] for name in own.features.layout.names]
    outputs = of_task(own, together) if together or not hasattr(own, "loss_of") else None
    found = []
    for row in range(len(own.train_dataset)):
        with pass_settings(own.model), torch.enable_grad():
            output = -own.loss_of(row) if outputs is None else outputs(row)
            gradients = torch.autograd.grad(output, wanted, allow_unused=True, materialize_grads=True)
        found.append(torch.cat([one.detach().flatten().float() for one in gradients]))
    return torch.stack(found)


def of_task(own: TrakAttributor, together: bool) -> Callable[[int], torch.Tensor]:
    """What computes the output of the task for a row, alone or within the batch of all rows."""
    featurizer = own.features.featurizer()
    featurizer.prepare_task(0, own.args.per_device_batch_size)
    batches, task, model = featurizer.batches(own.train_dataset), featurizer.task, own.model

    def output(row: int) -> torch.Tensor:
        batch = next(batches.iterate([range(len(own.train_dataset))]))[1] if together else batches.alone(row)
        return task.output(run_model(task, model, batch), batch, "train")[row if together else 0]

    return output


def largest(features: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error of a row, relative to the norm of its gradient."""
    return float(((features - expected).norm(dim=1) / expected.norm(dim=1).clamp_min(1e-30)).max())


def factor(features: torch.Tensor, expected: torch.Tensor) -> float:
    """The one number by which the gradients of all rows differ: 2 where a loss is a square, and not half of it."""
    found = float((features * expected).sum() / features.square().sum().clamp_min(1e-30))
    return 1.0 if abs(found - 1) < 1e-4 else found


def outcome(case: EcosystemCase) -> tuple[bool, str]:
    """Whether a case is as it should be, and its line of the table."""
    with tempfile.TemporaryDirectory() as directory:
        args = TrakConfig(
            str(Path(directory) / "trak"), proj_type="none", feature_dtype="float32", use_cpu=True,
            per_device_batch_size=8,
        )  # fmt: skip
        announced.clear()
        try:
            own = by_loss(case.make(Path(directory), args)).featurize()
        except (HfTrakError, ValueError, TypeError, ImportError) as error:
            message = " ".join(str(error).split()).replace("|", "¦")
            fine = case.refused != "" and case.refused in message
            said = case.refused if fine else f"**{type(error).__name__}**: {message}"
            return fine, f"| {case.title} | {case.needs} | | refused: {said} |"
        features = torch.cat([shard.grads for shard in own.features.store.train(0)])
        expected = by_autograd(own)
        times = factor(features, expected)
        alone = error = largest(features * times, expected)
        if BOUND < alone <= KINK:
            error = largest(features * times, by_autograd(own, together=True) * times)
    engine = " ".join(announced[-1].split(" by the ")[1].split(" engine")[0].split()) if announced else ""
    fine = error <= BOUND
    shown = f"{error:.0e}" if fine else f"**{error:.0e}**"
    if times != 1:
        shown += f", times {times:.3g}"
    if not hasattr(own, "loss_of"):
        shown += ", the task alone"
    if alone != error:
        shown += f" in the batch, {alone:.0e} alone"
    return fine, f"| {case.title} | {case.needs} | {engine} | {shown} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--only", help="cases whose title has this text")
    args = parser.parse_args()
    logging.getLogger("hf_trak").setLevel(logging.ERROR)
    engines = logging.getLogger("hf_trak.gradient_computers.auto")
    engines.setLevel(logging.INFO)
    engines.propagate = False
    engines.addHandler(_Announcements())
    disable_progress_bars()
    fine = total = 0
    for group in args.groups:
        print(f"\n## {group}\n\n{HEAD}", flush=True)
        for case in GROUPS[group]:
            if args.only is None or args.only in case.title:
                good, line = outcome(case)
                fine, total = fine + good, total + 1
                print(line, flush=True)
                gc.collect()
    print(f"\n{fine} of {total} within {BOUND:g}.")


if __name__ == "__main__":
    main()
