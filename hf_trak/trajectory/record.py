"""The record of a training run: its weights on the way, and what every optimizer step was made of.

    <output_dir>/trajectory/<name>/
      record.json                   the optimizer's numbers, the parameters, clipping, processes: written at the start
      state-<step>.safetensors      the weights after so many steps, and the steps since the file before

A state and the steps that lead to it are one file, which is there as a whole or not at all, and names the checksum of
the file before. So a run that is killed leaves a record up to some step, one that is resumed goes on from there with
the same bytes, and files of two runs do not mix.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from hf_trak.errors import ConfigMismatchError, IncompleteStoreError, StoreError
from hf_trak.gradient_computers.layout import ParameterLayout, ParameterSlot
from hf_trak.store.atomic import differing, remove_stale_temporaries
from hf_trak.store.sealed import Finding, content_digest, create_sealed, read_sealed, unsealed
from hf_trak.store.shards import TensorSpec, read_header, read_tensors, write_tensors
from hf_trak.store.verification import judged
from hf_trak.trajectory.hyperparameters import Hyperparameters

RECORD_FILE = "record.json"

_COMPARED = 2**16
"""Weights of a state that are read to see whether it may be another one, before all of them."""

_STATE = re.compile(r"state-(\d{8})\.safetensors")

_AGAIN = "Train again with `TrakCallback(record=True)`; the weights on the way are nowhere else."


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward pass of the training.

    Attributes:
        rows (`tuple[int, ...]`): their numbers in the training dataset, in the order of the batch.
        loss (`float`): the loss that the model returned; NaN where it returned none.
        items (`float`): `num_items_in_batch` that the model was given; NaN where it was given none.
        scale (`float`): the factor of its loss in the loss of the step.
        random (`torch.Tensor`, *optional*): the state of the random generator before it, for a model with dropout.
    """

    rows: tuple[int, ...]
    loss: float
    items: float
    scale: float = 1.0
    random: Tensor | None = None


@dataclass(frozen=True)
class RecordedStep:
    """One step of the optimizer.

    Attributes:
        batches (`tuple[MicroBatch, ...]`): the passes whose gradients it added up, of all processes.
        rates (`tuple[float, ...]`): the learning rate of every group of parameters.
        norm (`float`): the norm of the gradient that the optimizer got, after clipping.
    """

    batches: tuple[MicroBatch, ...]
    rates: tuple[float, ...]
    norm: float

    @property
    def rows(self) -> list[int]:
        """Return the numbers of all rows."""
        return [row for batch in self.batches for row in batch.rows]

    @property
    def loss(self) -> float:
        """Return the loss; NaN where it is not known."""
        return sum(batch.scale * batch.loss for batch in self.batches)


def layout_of(parameters: Sequence[tuple[str, Sequence[int]]]) -> ParameterLayout:
    """Lay parameters out one after the other, given as names and shapes."""
    slots, offset = [], 0
    for name, shape in parameters:
        slots.append(ParameterSlot(name, tuple(shape), offset))
        offset += slots[-1].numel
    return ParameterLayout(tuple(slots))


def trained_weights(parameters: dict[str, Tensor], layout: ParameterLayout) -> Tensor:
    """Return the trained weights as one vector on the CPU, `(P,)`, in float32 or, if one has more bits, in float64.

    All processes call this together where the weights are divided over them.
    """
    from hf_trak.weights.sharded import whole  # `hf-trak inspect` reads records, and loads no processes

    values = [parameters[name].detach() for name in layout.names]
    dtype = torch.float64 if any(value.dtype == torch.float64 for value in values) else torch.float32
    return torch.cat([whole(value).reshape(-1).to("cpu", dtype) for value in values])


class RunRecord:
    """A record in a directory. It is written by the callback and read by the sweep.

    Attributes:
        directory (`Path`): the directory.
        description (`dict`): the content of `record.json`.
    """

    def __init__(self, directory: Path, description: dict[str, Any]) -> None:
        """
        Args:
            directory: the directory.
            description: what the run is, as plain JSON.
        """
        self.directory = directory
        self.description = description
        self.digest = content_digest(description)

    @classmethod
    def open(cls, directory: Path) -> "RunRecord":
        """Open a record.

        Raises:
            IncompleteStoreError: there is none.
            StoreError: its description is damaged.
        """
        path = directory / RECORD_FILE
        if not path.exists():
            raise IncompleteStoreError(
                f"{directory} has no record of a training run ({RECORD_FILE} is missing). Expected one that "
                "`TrakCallback(record=True)` wrote during the training. Train with it, or replay the recipe, which "
                "needs no record."
            )
        return cls(directory, unsealed(read_sealed(path, _AGAIN)))

    @classmethod
    def create(cls, directory: Path, description: dict[str, Any]) -> "RunRecord":
        """Write the description of a run that begins, or compare it with that of the run that goes on.

        Raises:
            ConfigMismatchError: the directory has the record of another run.
            StoreError: a file is damaged or cannot be written.
        """
        directory.mkdir(parents=True, exist_ok=True)
        remove_stale_temporaries(directory)
        if not create_sealed(directory / RECORD_FILE, description):
            saved = cls.open(directory)
            if changes := differing(saved.description, description):
                raise ConfigMismatchError(
                    f"{directory} has the record of another run ({'; '.join(changes)}). Expected the same run. Give "
                    "this run another `TrakCallback(name=...)`, or replace the record with "
                    "`TrakCallback(overwrite=True)`."
                )
            return saved
        return cls(directory, description)

    @cached_property
    def layout(self) -> ParameterLayout:
        """Return the trained parameters in their order."""
        return layout_of(self.description["parameters"])

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the recorded weights."""
        return getattr(torch, self.description["dtype"])

    def numbers(self, rates: Sequence[Sequence[float]], group_of: Tensor) -> Hyperparameters:
        """Return the optimizer's numbers of some steps.

        Args:
            rates: the learning rates of their groups.
            group_of: see [`group_of`].
        """
        described = self.description
        return Hyperparameters(
            described["kind"],
            tuple(described["groups"]),
            torch.tensor(rates, dtype=torch.float64),
            group_of,
            described["max_norm"],
            0,
        )

    @cached_property
    def group_of(self) -> Tensor:
        """Return the group of every parameter of the optimizer, `(P,)`."""
        groups = self.description["group_of"]
        return torch.cat(
            [torch.full((slot.numel,), groups[i], dtype=torch.uint8) for i, slot in enumerate(self.layout.slots)]
        )

    # -- states and steps --------------------------------------------------------------------------------------------

    def path(self, step: int) -> Path:
        """Return the file of the state after so many steps."""
        return self.directory / f"state-{step:08d}.safetensors"

    def states(self) -> list[int]:
        """List the steps after which weights are recorded."""
        matches = (_STATE.fullmatch(path.name) for path in self.directory.glob("state-*.safetensors"))
        return sorted(int(match[1]) for match in matches if match)

    def write(self, step: int, weights: Tensor, steps: Sequence[RecordedStep], planned: int) -> None:
        """Write the weights after so many steps, and the steps since the state before.

        Args:
            step: number of steps.
            weights: `(P,)`.
            steps: the last ones.
            planned: the number of steps that the run is to take.

        Raises:
            StoreError: the file cannot be written.
        """
        batches = [batch for one in steps for batch in one.batches]
        states = [batch.random for batch in batches if batch.random is not None]
        tensors = {
            "weights": weights,
            "rows": torch.tensor([row for batch in batches for row in batch.rows], dtype=torch.int64),
            "sizes": torch.tensor([len(batch.rows) for batch in batches], dtype=torch.int64),
            "batches": torch.tensor([len(one.batches) for one in steps], dtype=torch.int64),
            "losses": torch.tensor([batch.loss for batch in batches], dtype=torch.float64),
            "items": torch.tensor([batch.items for batch in batches], dtype=torch.float64),
            "rates": torch.tensor([rate for one in steps for rate in one.rates], dtype=torch.float64),
            "norms": torch.tensor([one.norm for one in steps], dtype=torch.float64),
            "random": torch.cat([torch.empty(0, dtype=torch.uint8), *states]),
        }
        counts = {name: len(value) for name, value in tensors.items()}
        first = step - len(steps)
        before = self.checksum(first) if steps else None
        facts = {"before": before, "counts": counts, "first": first, "planned": planned}
        write_tensors(self.path(step), tensors, self._identity(step), **facts)

    def _identity(self, step: int) -> dict[str, str | int]:
        return {"record": self.digest, "step": step}

    def checksum(self, step: int) -> str:
        """Read the checksum of a state from its header.

        Raises:
            StoreError: the file is missing or damaged, or belongs to another run.
        """
        return str(read_header(self.path(step), self._identity(step), {})["checksum"])

    def planned(self, step: int) -> int:
        """Read how many steps the run was to take when it wrote the state after so many of them.

        Raises:
            StoreError: the file is missing or damaged, or belongs to another run.
        """
        return int(read_header(self.path(step), self._identity(step), {}).get("planned", 0))

    def _read(self, step: int) -> tuple[int, dict[str, Tensor]]:
        """Read a state: the number of its first step, and its tensors."""
        path, identity = self.path(step), self._identity(step)
        header = read_header(path, identity, {})
        counts, first = header.get("counts"), header.get("first")
        if not isinstance(counts, dict) or counts.get("weights") != self.layout.total or not isinstance(first, int):
            raise StoreError(
                f"{path} has {counts!r} numbers from step {first!r} on. Expected {self.layout.total} weights and the "
                f"steps before. {_AGAIN}"
            )
        floats = dict.fromkeys(("losses", "items", "rates", "norms"), torch.float64)
        dtypes = {"weights": self.dtype, "random": torch.uint8, **floats}
        specs = {name: TensorSpec((count,), (dtypes.get(name, torch.int64),)) for name, count in counts.items()}
        return first, read_tensors(path, identity, specs)

    def weights(self, step: int) -> Tensor:
        """Read the weights after so many steps, `(P,)`.

        Raises:
            StoreError: the file is missing or damaged, or belongs to another run.
        """
        return self._read(step)[1]["weights"].clone()

    def step_of(self, weights: Tensor) -> int | None:
        """Return the last step after which the weights were these, `(P,)`; `None` if none is recorded.

        Raises:
            StoreError: a file is missing or damaged, or belongs to another run.
        """
        for step in reversed(self.states()):
            read_header(self.path(step), self._identity(step), {})  # which says what is damaged
            with safe_open(self.path(step), framework="pt") as file:
                first = file.get_slice("weights")[:_COMPARED]
            if torch.equal(first, weights[:_COMPARED]) and torch.equal(self.weights(step), weights):
                return step
        return None

    def steps(self) -> list[RecordedStep]:
        """Read all steps that are recorded.

        Raises:
            IncompleteStoreError: steps in the middle, or all of them, are missing.
            StoreError: a file is damaged or belongs to another run.
        """
        found: list[RecordedStep] = []
        states = self.states()
        for step in states:
            first, tensors = self._read(step)
            if first != len(found):
                raise IncompleteStoreError(
                    f"{self.directory} lacks the steps {len(found)} to {first - 1}: the state before step {step} is "
                    f"missing. Expected all files of the record. Restore them from a copy. {_AGAIN}"
                )
            self._check_link(step, first)
            found += self._taken_apart(tensors)
        if not found:
            raise IncompleteStoreError(
                f"{self.directory} has the record of a run without a complete step. Expected weights at the start and "
                f"after some steps. {_AGAIN}"
            )
        return found

    def _check_link(self, step: int, first: int) -> None:
        """Check that a state was written after the one before it.

        Raises:
            StoreError: it is of another run.
        """
        said = read_header(self.path(step), self._identity(step), {}).get("before")
        if said != (found := None if step == 0 else self.checksum(first)):
            raise StoreError(
                f"{self.path(step)} was written after a file with the checksum {said}, and that of "
                f"{self.path(first).name} is {found}. Expected files of one run. Restore them from a copy. {_AGAIN}"
            )

    def _taken_apart(self, tensors: dict[str, Tensor]) -> Iterator[RecordedStep]:
        """Take the steps of one state apart."""
        sizes, losses, items = (tensors[name].tolist() for name in ("sizes", "losses", "items"))
        rows = tensors["rows"].split(sizes)
        random = tensors["random"].reshape(len(sizes), -1).clone() if len(tensors["random"]) else [None] * len(sizes)
        norms = tensors["norms"].tolist()
        rates = tensors["rates"].reshape(len(norms), -1).tolist() if norms else []
        place = 0
        for index, count in enumerate(tensors["batches"].tolist()):
            batches = tuple(
                MicroBatch(tuple(rows[i].tolist()), losses[i], items[i], self._scale(items[i], count), random[i])
                for i in range(place, place + count)
            )
            place += count
            yield RecordedStep(batches, tuple(rates[index]), norms[index])

    def _scale(self, items: float, passes: int) -> float:
        """Return the factor of the loss of a pass, where a step has so many in all processes.

        `Trainer` divides by the number of passes unless the model has counted labels, of its own process or of all.
        """
        if not is_known(items):
            return 1.0 / passes
        return 1.0 if self.description["across_devices"] else 1.0 / self.description["processes"]

    def forget_after(self, step: int) -> None:
        """Remove the states after so many steps, which are trained again."""
        for later in self.states():
            if later > step:
                self.path(later).unlink(missing_ok=True)


def verify_record(directory: Path) -> Iterator[Finding]:
    """Check the record of a run.

    Args:
        directory: its directory.

    Returns:
        An iterator of one finding for each file.
    """
    path = directory / RECORD_FILE
    described = judged(path, lambda: RunRecord.open(directory), f"Restore it. {_AGAIN}")
    yield described
    if described.state != "intact":
        return
    record = RunRecord.open(directory)
    for step in record.states():

        def check(step: int = step) -> None:
            first, _ = record._read(step)
            if record.path(first).exists():
                record._check_link(step, first)

        one = judged(record.path(step), check, f"Restore it from a copy. {_AGAIN}")
        yield one
        if one.state == "intact" and not record.path(first := record._read(step)[0]).exists():
            yield Finding(record.path(first), "missing", f"the state before the steps from {first} on", _AGAIN)


def is_known(value: float) -> bool:
    """Tell whether a number is recorded."""
    return not math.isnan(value)
