"""Sweeps of runs with quadratic losses, where the curvature of every row is known. Truth: autograd through the run."""

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_trak.trajectory import sweep
from hf_trak.trajectory.hyperparameters import Hyperparameters
from hf_trak.trajectory.passes import RowGradients
from hf_trak.trajectory.record import MicroBatch, RecordedStep
from hf_trak.trajectory.states import RunPath
from hf_trak.trajectory.sweep import BackwardSweep, SweepOptions
from hf_trak.trajectory.swept_targets import SweptTargets

P, ROWS, BATCH, STEPS, TARGETS = 12, 20, 5, 12, 6
RATES = torch.linspace(0.2, 0.02, STEPS, dtype=torch.float64)

_GENERATOR = torch.Generator().manual_seed(0)
_ROOTS = 0.3 * torch.randn(ROWS, P, P, generator=_GENERATOR, dtype=torch.float64)
CURVATURES = _ROOTS @ _ROOTS.mT
SLOPES = torch.randn(ROWS, P, generator=_GENERATOR, dtype=torch.float64)
GRADIENTS = torch.randn(1, P, generator=_GENERATOR, dtype=torch.float64) + 0.3 * torch.randn(
    TARGETS, P, generator=_GENERATOR, dtype=torch.float64
)
ORDER = [torch.randperm(ROWS, generator=_GENERATOR)[:BATCH].tolist() for _ in range(STEPS)]


def trained(weights_of_rows: Tensor) -> list[Tensor]:
    """The weights before every step of SGD with momentum .5, and after the last one."""
    states, momentum = [torch.zeros(P, dtype=torch.float64)], torch.zeros(P, dtype=torch.float64)
    for rows, rate in zip(ORDER, RATES, strict=True):
        slopes = torch.einsum("ipq,q->ip", CURVATURES[rows], states[-1]) - SLOPES[rows]
        momentum = 0.5 * momentum + (weights_of_rows[rows, None] * slopes).sum(0) / BATCH
        states.append(states[-1] - rate * momentum)
    return states


def truth() -> Tensor:
    return torch.autograd.functional.jacobian(
        lambda given: GRADIENTS @ trained(given)[-1], torch.ones(ROWS, dtype=torch.float64)
    ).T


class Passes:
    """Rows' gradients and curvature, which are known. Counts the rows that directions are multiplied with."""

    def __init__(self) -> None:
        self.work = 0

    def put(self, weights: Tensor) -> None:
        self.weights = weights

    def fits(self, rows: int) -> bool:
        return True

    def rows(self, batches: Any) -> Iterator[RowGradients]:
        for one in batches:
            rows = list(one.rows)
            yield RowGradients(rows, (CURVATURES[rows] @ self.weights - SLOPES[rows]) / BATCH, 0.0)

    def curvature(self, batches: Any, chosen: Any, directions: Any, form: str) -> list[Tensor]:
        (batch,), (places,) = batches, chosen
        self.work += len(places) * sum(map(len, directions))
        of = CURVATURES[[batch.rows[place] for place in places]].sum(0) / BATCH
        return [one @ of for one in directions]


class OneOf:
    """One of several processes, which are threads here."""

    def __init__(self, rank: int, world: int, barrier: threading.Barrier, sent: list[Any]) -> None:
        self.process_index, self.num_processes, self._barrier, self._sent = rank, world, barrier, sent
        self.is_main_process = rank == 0

    def all_or_none(self) -> Any:
        self._barrier.wait()
        return nullcontext()

    def broadcast_from_main(self, function: Any) -> Any:
        return self._exchanged(function() if self.is_main_process else None)[0]

    def add(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._exchanged(tensor)).sum(0)

    def _exchanged(self, value: Any) -> list[Any]:
        self._sent[self.process_index] = value
        self._barrier.wait()
        found = list(self._sent)
        self._barrier.wait()
        return found


def swept(directory: Path, share: float = 1.0, seed: int = 0, world: int = 1) -> list[tuple[Tensor, int]]:
    """The scores of every process, and the rows that it has multiplied directions with."""
    numbers = Hyperparameters(
        "sgd", ({"momentum": 0.5},), RATES.unsqueeze(1), torch.zeros(P, dtype=torch.int64), None, BATCH
    )
    states, nan = trained(torch.ones(ROWS, dtype=torch.float64)), float("nan")
    steps = [RecordedStep((MicroBatch(tuple(rows), nan, nan),), (1.0,), nan) for rows in ORDER]
    barrier, sent, found = threading.Barrier(world, timeout=60), [None] * world, [None] * world

    def sweep_in(rank: int) -> None:
        passes, path = Passes(), RunPath(steps, numbers, range(STEPS + 1), states.__getitem__, [])
        targets = SweptTargets(directory, {"run": "quadratic"}, ROWS, STEPS, TARGETS)
        options, processes = SweepOptions(0.0, share, "hessian", seed), OneOf(rank, world, barrier, sent)
        BackwardSweep(path, options, passes, processes).run([(targets, GRADIENTS)], "sweep")  # type: ignore[arg-type]
        barrier.wait()
        found[rank] = targets.result().scores, passes.work  # type: ignore[call-overload]

    threads = [threading.Thread(target=sweep_in, args=(rank,)) for rank in range(world)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return found  # type: ignore[return-value]


def test_all_rows_give_the_derivative(tmp_path: Path) -> None:
    ((found, work),) = swept(tmp_path)
    torch.testing.assert_close(found, truth(), rtol=1e-10, atol=1e-12)
    assert work == STEPS * BATCH * TARGETS


@pytest.mark.slow
def test_parts_of_the_rows_give_it_in_the_mean_for_their_share_of_the_work(tmp_path: Path) -> None:
    found = []
    for seed in range(300):
        ((scores, work),) = swept(tmp_path / str(seed), 0.6, seed)
        assert work <= 0.61 * STEPS * BATCH * TARGETS
        found.append(scores)
    spread = torch.stack(found).std(0) / len(found) ** 0.5
    deviation = (torch.stack(found).mean(0) - truth()) / spread.clamp_min(1e-12)
    assert float(spread.max()) > 1e-3
    assert float(deviation.square().mean()) < 1.5


@pytest.mark.parametrize("share", [0.6, 1.0])
def test_processes_divide_products_and_give_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    monkeypatch.setattr(sweep, "TOGETHER", 2)
    ((alone, work),) = swept(tmp_path / "alone", share)
    for world in (2, 3):
        found = swept(tmp_path / str(world), share, world=world)
        assert all(torch.equal(scores, alone) for scores, _ in found)
        assert sum(part for _, part in found) == work
        assert max(part for _, part in found) < 0.8 * work
