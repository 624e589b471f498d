"""A group of targets on their way back through the steps of a run, and its files.

<directory>/
  back-<step>.safetensors       derivatives of the targets and scores, when the steps from this one on are behind
  scores.safetensors            the result
"""

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hf_trak.store.atomic import remove_stale_temporaries
from hf_trak.store.shards import Identity, TensorSpec, read_tensors, write_tensors
from hf_trak.trajectory.optimizer_steps import Cotangents

_STEP_FILE = re.compile(r"(back|line|state)-(\d{8})\.safetensors")


@dataclass(frozen=True)
class SweepResult:
    """What a sweep found.

    Attributes:
        scores (`torch.Tensor`): the derivative of each target by the weight of each row, `(n, m)`, float64.
        growth (`torch.Tensor`): ‖a_t‖ before each step, the largest of all targets relative to the start, `(T,)`.
        forward (`torch.Tensor`): the loss of each step on the path, and by how much the steps that were taken again
            missed the known weights after it, `(2, T)`; NaN where none were, so everywhere on a path of lines.
        settings (`torch.Tensor`): d f / d ln η and d f / d ln λ of every step and target, `(2, T, m)`, float64; NaN
            where weight decay is a part of the gradient.
    """

    scores: Tensor
    growth: Tensor
    forward: Tensor
    settings: Tensor


class SweptTargets:
    """Targets that are swept together.

    Attributes:
        directory (`Path`): where files are kept.
        identity (`dict`): everything that the result depends on.
        behind (`int`): the steps from this one on are behind.
        cotangents ([`Cotangents`]): the derivatives of the targets before that step.
        scores (`torch.Tensor`): the scores so far, `(n, m)`.
        growth (`torch.Tensor`): ‖a_t‖ before each step, `(T,)`.
        settings (`torch.Tensor`): d f / d ln η and d f / d ln λ, `(2, T, m)`.
    """

    cotangents: Cotangents
    scores: Tensor
    growth: Tensor
    settings: Tensor

    def __init__(self, directory: Path, identity: Identity, train_rows: int, steps: int, targets: int) -> None:
        """
        Args:
            directory: where files are kept.
            identity: everything that the result depends on.
            train_rows: n.
            steps: T.
            targets: m.
        """
        self.directory, self.identity = directory, identity
        self.n, self.count, self.m, self.behind = train_rows, steps, targets, steps
        self._start = 1.0

    @property
    def result_path(self) -> Path:
        """Return the file of the result."""
        return self.directory / "scores.safetensors"

    def result(self) -> SweepResult:
        """Read the result.

        Raises:
            StoreError: it is missing or damaged.
        """
        return SweepResult(**read_tensors(self.result_path, self.identity, self._result_specs()))

    def _result_specs(self) -> dict[str, TensorSpec]:
        series = TensorSpec((self.count,), (torch.float64,))
        scores = TensorSpec((self.n, self.m), (torch.float64,))
        settings = TensorSpec((2, self.count, self.m), (torch.float64,))
        return {"scores": scores, "growth": series, "forward": self.forward_spec, "settings": settings}

    @property
    def forward_spec(self) -> TensorSpec:
        """Return what a file has of the way forwards."""
        return TensorSpec((2, self.count), (torch.float64,))

    def file(self, kind: str, step: int) -> Path:
        """Return the path of a file that a sweep needs on the way."""
        return self.directory / f"{kind}-{step:08d}.safetensors"

    def files(self, kind: str) -> list[int]:
        """Return the steps of such files, in their order."""
        found = (_STEP_FILE.fullmatch(path.name) for path in self.directory.glob(f"{kind}-*"))
        return sorted(int(one[2]) for one in found if one)

    def begin(self, targets: Tensor, forward: Tensor) -> None:
        """Read where an interrupted sweep was, or begin after the last step.

        Args:
            targets: the gradients of the targets by the last weights, `(m, P)`.
            forward: see [`SweepResult`], NaN where it is not known: filled with what is in the file, `(2, T)`.

        Raises:
            StoreError: a file is damaged.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        remove_stale_temporaries(self.directory)
        self._start = float(targets.double().norm(dim=1).max().clamp_min(1e-300))
        self.behind = self.count
        found = self.files("back")
        if not found:
            self.cotangents = Cotangents.of(targets)
            self.scores = torch.zeros(self.n, self.m, dtype=torch.float64)
            self.growth = torch.zeros(self.count, dtype=torch.float64)
            self.settings = torch.zeros(2, self.count, self.m, dtype=torch.float64)
            return
        self.behind = found[0]
        whole = TensorSpec(tuple(targets.shape), (targets.dtype,))
        specs = {**dict.fromkeys(("weights", "first", "second"), whole), **self._result_specs()}
        read = read_tensors(self.file("back", self.behind), {**self.identity, "step": self.behind}, specs)
        read = {name: tensor.clone() for name, tensor in read.items()}
        known = read.pop("forward")
        forward.copy_(torch.where(known.isnan(), forward, known))
        self.scores, self.growth, self.settings = (read.pop(name) for name in ("scores", "growth", "settings"))
        self.cotangents = Cotangents(**{name: value.to(targets.device) for name, value in read.items()})

    def keep(self, forward: Tensor) -> None:
        """Write where the sweep is, and remove the file before.

        Args:
            forward: see [`SweepResult`], `(2, T)`.

        Raises:
            StoreError: the file cannot be written.
        """
        tensors = {**vars(self.cotangents), **self._tensors(forward)}
        write_tensors(self.file("back", self.behind), tensors, {**self.identity, "step": self.behind})
        for later in self.files("back"):
            if later > self.behind:
                self.file("back", later).unlink(missing_ok=True)

    def _tensors(self, forward: Tensor) -> dict[str, Tensor]:
        return {"scores": self.scores, "growth": self.growth, "forward": forward, "settings": self.settings}

    def conclude(self, forward: Tensor) -> None:
        """Write the result of all steps.

        Args:
            forward: see [`SweepResult`], `(2, T)`.

        Raises:
            StoreError: the file cannot be written.
        """
        tensors = {**self._tensors(forward), "growth": self.growth / self._start}
        write_tensors(self.result_path, tensors, self.identity)

    def clean(self) -> None:
        """Remove what was needed on the way."""
        for kind in ("state", "line", "back"):
            for step in self.files(kind):
                self.file(kind, step).unlink(missing_ok=True)
