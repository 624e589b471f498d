"""Deferred logits in tasks of preferences and policies: the gradients of each row's own loss, without whole logits."""

from typing import Any

import pytest
import torch
from test_preferences import CASES, batch_of, given, gradient_alone
from torch import Tensor, nn

from hf_trak.errors import GradientEngineError
from hf_trak.gradient_computers.auto import AutoGradientComputer
from hf_trak.gradient_computers.hooked.computer import HookedGradientComputer
from hf_trak.modelout_functions import deferred_logits
from hf_trak.modelout_functions import margins as deferred_margins
from hf_trak.modelout_functions.deferred_logits import deferring
from hf_trak.modelout_functions.margins import margin, margins_of

TASKS = [name for name in CASES if not name.startswith("reward")]  # a reward is one number


@pytest.fixture
def positions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Slices of a few words, and logits of any size deferred; the positions whose margins are taken."""
    monkeypatch.setattr(deferred_logits, "SLICE", 40)
    monkeypatch.setattr(deferred_logits, "LEAST_SLICE", 5)
    monkeypatch.setattr(deferred_logits, "DEFERRED_FROM", 0)
    found: list[int] = []
    original = deferred_margins._summed

    def counted(hidden: Tensor, *args: Any) -> Any:
        found.append(len(hidden))
        return original(hidden, *args)

    monkeypatch.setattr(deferred_margins, "_summed", counted)
    return found


@pytest.mark.few(3)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("name", TASKS)
def test_rows_have_the_gradient_of_their_own_loss(positions, name, kind, rows):
    task, loss_of = CASES[name]
    model, some = given(name, kind, torch.float64)
    some = some[:rows]
    task.bind(model)
    batch = batch_of(task, some)
    computer = HookedGradientComputer(model, task, dtype=None, device="cpu")
    whole = torch.zeros(rows, computer.layout.total, dtype=torch.float64)

    def sink(start: int, block: Tensor) -> None:
        whole[:, start : start + block.shape[1]] += block

    outputs = computer.stream(batch, sink)
    assert computer.defers and positions
    ids, mask = batch["input_ids"], batch["completion_mask"]
    tokens = ids[..., 1:].numel()
    needed = tokens if name == "orpo" else ids[..., 0].numel() * int(mask.sum(dim=-1).max())
    assert positions[-1] <= needed <= tokens  # q takes the values of f
    assert len(positions) == (1 if rows == 1 else 2)  # a sample is traced, and the batch
    for place, row in enumerate(some):
        expected = torch.cat([g.flatten() for g in gradient_alone(model, loss_of(model, row)).values()])
        found = -outputs.out_to_loss[place] * whole[place]
        # float64, but for the norms of Llama, which compute in float32
        assert float((found - expected).norm()) <= 1e-6 * float(expected.norm()) + 1e-9


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["dpo-sigmoid", "orpo", "grpo"])
def test_two_runs_have_the_same_bits(positions, name):
    task, _ = CASES[name]
    runs = []
    for _ in range(2):
        model, some = given(name, "full", torch.float32)
        task.bind(model)
        parts: list[tuple[int, Tensor]] = []
        computer = HookedGradientComputer(model, task, dtype=None, device="cpu")
        computer.stream(batch_of(task, some), lambda start, block, parts=parts: parts.append((start, block.clone())))
        runs.append(parts)
    assert all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(*runs, strict=True))


@pytest.mark.few(2)
@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("chunked_from", [0, 2**60])
@pytest.mark.parametrize("name", ["dpo-sigmoid", "kto", "orpo", "grpo", "ppo"])
def test_first_batch_is_checked(positions, monkeypatch, name, chunked_from, wrong):
    monkeypatch.setattr(deferred_logits, "CHUNKED_FROM", chunked_from)
    monkeypatch.setattr(deferred_margins, "CHUNK", 100)
    right = deferred_margins._gradient_of_slice
    if wrong:  # words 0, 5, 10, …
        monkeypatch.setattr(
            deferred_margins,
            "_gradient_of_slice",
            lambda *args: right(*args) * (torch.arange(args[3][1] - args[3][0]) != 0),
        )
    task, _ = CASES[name]
    model, some = given(name, "full", torch.float32)
    task.bind(model)
    computer = AutoGradientComputer(model, task, dtype=None, device="cpu", engines=("hooked",))
    if wrong:
        with pytest.raises(GradientEngineError, match="relative error"):
            computer.stream(batch_of(task, some), lambda start, block: None)
    else:
        computer.stream(batch_of(task, some), lambda start, block: None)
    assert positions


def test_values_are_those_of_the_same_scale(positions):
    """Margins of the same hidden states under another temperature are other numbers."""
    torch.manual_seed(0)
    head, hidden, labels = nn.Linear(4, 30), torch.randn(2, 5, 4), torch.randint(0, 30, (2, 5))
    with torch.no_grad():
        whole = head(hidden)
        with deferring(head):
            logits = head(hidden)
        for temperature, passes in ((1.0, 1), (0.5, 2), (2.0, 3), (0.5, 3)):
            found = margins_of(logits / temperature, labels)
            torch.testing.assert_close(found, margin(whole / temperature, labels))
            assert len(positions) == passes
