"""`hf-trak selftest` and `hf-trak env`: check kernels, engines and a tiny run on this machine, and print versions."""

import importlib.metadata
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import hf_trak
from hf_trak.cli.parser import OutputArguments, answer, parse_yaml_and_args, table
from hf_trak.errors import HfTrakError
from hf_trak.hub.access import address_without_secrets
from hf_trak.projectors.factory import MapName, make_projector
from hf_trak.projectors.reference import matrix
from hf_trak.version import __version__

_ROWS, _TARGETS, _CLASSES, _WIDTH = 24, 3, 4, 12
_ENGINES = ("hooked", "functional", "iterative")
_MAPS: tuple[MapName, ...] = ("sjlt", "rademacher", "normal")
_PACKAGES = (
    "torch", "transformers", "datasets", "accelerate", "huggingface_hub", "safetensors", "peft", "open_clip_torch",
    "numpy", "pyarrow", "scipy", "jinja2", "pillow", "matplotlib",
)  # fmt: skip
_VARIABLES = ("HF_HUB_OFFLINE", "HF_ENDPOINT", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "WORLD_SIZE")


@dataclass
class Check:
    """The result of one check."""

    name: str
    passed: bool | None
    """`None` if it does not apply to this machine."""
    detail: str
    seconds: float


class TinyModel(nn.Module):
    """A convolution, a norm and a linear layer with the calling convention of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 3, 3)
        self.norm = nn.LayerNorm(_WIDTH - 2)
        self.head = nn.Linear(3 * (_WIDTH - 2), _CLASSES)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = torch.tanh(self.norm(self.conv(pixel_values[:, None])))
        return {"logits": self.head(hidden.flatten(1))}


def margins(outputs: Any, batch: Any) -> Tensor:
    """Return the logit of the label minus the logsumexp of the others, `(B,)`."""
    logits, labels = outputs["logits"], batch["labels"][:, None]
    others = logits.scatter(1, labels, -torch.inf).logsumexp(dim=1)
    return logits.gather(1, labels)[:, 0] - others


def run(argv: Sequence[str]) -> int:
    """Run every check. Returns the exit status, 1 if one fails."""
    (output,) = parse_yaml_and_args(
        OutputArguments,
        argv,
        prog="hf-trak selftest",
        description="Check that engines, projections, kernels and a tiny run give correct results on this machine.",
    )
    torch.manual_seed(0)
    checks = [_checked(f"engine {name}", partial(_engine, name)) for name in _ENGINES]
    checks += [_checked(f"projection {name}", partial(_projection, name)) for name in _MAPS]
    checks += [_checked(f"kernel {name}", partial(_kernel, name)) for name in _MAPS]
    checks.append(_checked("features to scores", _end_to_end))
    failed = [check for check in checks if check.passed is False]
    lines = [f"{_word(check):<8}{check.name}: {check.detail} ({check.seconds:.1f} s)" for check in checks]
    lines.append(f"{len(failed)} failed" if failed else "all passed")
    answer({"passed": not failed, "checks": [vars(check) for check in checks]}, lines, output.json)
    return 1 if failed else 0


def _word(check: Check) -> str:
    return {True: "ok", False: "FAILED", None: "skipped"}[check.passed]


def _checked(name: str, check: Callable[[], tuple[bool | None, str]]) -> Check:
    start = time.perf_counter()
    try:
        passed, detail = check()
    except (HfTrakError, RuntimeError, ValueError, OSError, ImportError) as error:
        passed, detail = False, f"{type(error).__name__}: {error}"
    return Check(name, passed, detail, time.perf_counter() - start)


def _rows(count: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "pixel_values": torch.randn(count, _WIDTH, generator=generator),
        "labels": torch.randint(_CLASSES, (count,), generator=generator),
    }


def _reference(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Compute gradients `(B, P)` by plain autograd, one sample at a time."""
    rows = []
    for i in range(len(batch["labels"])):
        single = {name: value[i : i + 1] for name, value in batch.items()}
        grads = torch.autograd.grad(margins(model(**single), single).sum(), list(model.parameters()))
        rows.append(torch.cat([grad.flatten() for grad in grads]))
    return torch.stack(rows)


def _engine(engine: str) -> tuple[bool, str]:
    model, batch = TinyModel().eval(), _rows(5)
    found = hf_trak.per_sample_gradients(model, batch, margins, engine=engine)
    ours = torch.cat([found[name].flatten(1) for name, _ in model.named_parameters()], dim=1)
    error = _relative(ours, _reference(model, batch))
    return error < 1e-4, f"differs from autograd by {error:.1e}"


def _projection(name: MapName) -> tuple[bool, str]:
    projector = make_projector(name, 300, 64, seed=7, device="cpu")
    grads = torch.randn(4, 300)
    expected = grads.double() @ torch.from_numpy(matrix(projector.algorithm, 0, 300, 64, 7, 3))
    error = _relative(projector.project(grads, 3), expected)
    return error < 1e-4, f"differs from its definition by {error:.1e}"


def _kernel(name: MapName) -> tuple[bool | None, str]:
    if not torch.cuda.is_available():
        return None, "no CUDA device"
    grads = torch.randn(40, 5000)
    results = [
        make_projector(name, 5000, 512, seed=7, device=device).project(grads.to(device), 1).cpu()
        for device in ("cpu", "cuda")
    ]
    error = _relative(results[1], results[0])
    return error < 1e-3, f"differs from the CPU by {error:.1e}"


def _end_to_end() -> tuple[bool, str]:
    """Compare unprojected scores with the paper's formula in float64."""
    from datasets import Dataset  # slow to import, and not for `env`

    model, train, targets = TinyModel().eval(), _rows(_ROWS), {k: v[:_TARGETS] for k, v in _rows(_ROWS).items()}
    with tempfile.TemporaryDirectory() as directory:
        config = hf_trak.TrakConfig(output_dir=directory, proj_type="none", use_cpu=True)
        rows = Dataset.from_dict({name: value.numpy() for name, value in train.items()})
        attributor = hf_trak.TrakAttributor(model, config, train_dataset=rows, task="image_classification")
        exam = rows.select(range(_TARGETS))
        scored = attributor.featurize().attribute(exam, top_k=None, method="index", name="selftest")
        ours = torch.tensor(scored["trak_scores"][:]).T.clone()
    features, goals = _reference(model, train).double(), _reference(model, targets).double()
    gram = features.T @ features
    ridge = config.lambda_relative * gram.trace() / min(_ROWS, len(gram))
    solved = torch.linalg.solve(gram + ridge * torch.eye(len(gram), dtype=torch.float64), goals.T)
    with torch.no_grad():
        logits = model(**train)["logits"].double()
    q = 1 - logits.softmax(dim=1).gather(1, train["labels"][:, None])
    error = _relative(ours, (features @ solved) * q)
    return error < 1e-3, f"scores differ from the formula by {error:.1e}"


def _relative(ours: Tensor, expected: Tensor) -> float:
    return float((ours.double() - expected.double()).norm() / expected.double().norm())


def run_env(argv: Sequence[str]) -> None:
    """Print versions, without paths, tokens, or passwords in addresses."""
    (output,) = parse_yaml_and_args(
        OutputArguments, argv, prog="hf-trak env", description="Print versions, to be pasted into a bug report."
    )
    content = {"hf_trak": __version__, "python": sys.version.split()[0], "platform": platform.platform()}
    for name in _PACKAGES:
        try:
            content[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            content[name] = "not installed"
    content["cpus"] = str(os.cpu_count())
    content["cuda"] = str(torch.version.cuda)
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    content["gpus"] = ", ".join(devices) or "none"
    content |= {name: address_without_secrets(os.environ[name]) for name in _VARIABLES if name in os.environ}
    answer(content, table(content), output.json)
