"""Changed weights are noticed, and contents are hashed only where something was written."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hf_trak.errors import CheckpointMismatchError
from hf_trak.weights import watch
from hf_trak.weights.checkpoints import fingerprint_state_dict
from hf_trak.weights.watch import LoadedWeights, WeightsStamp, model_tensors


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).eval()


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    calls: list[int] = []

    def counted(tensors: dict[str, torch.Tensor]) -> str:
        calls.append(len(tensors))
        return fingerprint_state_dict(tensors)

    monkeypatch.setattr(watch, "fingerprint_state_dict", counted)
    yield calls


def test_loaded_weights_are_hashed_once_while_nothing_is_written(model: Any, hashed: list[int]) -> None:
    loaded = LoadedWeights(model)
    assert loaded.fingerprint == fingerprint_state_dict(model.state_dict())
    model(torch.randn(4, 3)).sum().backward()
    loaded.verify()
    loaded.verify()
    assert len(hashed) == 1


def test_loaded_weights_notice_every_kind_of_change(model: Any, hashed: list[int]) -> None:
    loaded = LoadedWeights(model)
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight.clone())  # written to, with what it held
    loaded.verify()
    loaded.verify()
    assert len(hashed) == 2
    loaded = LoadedWeights(model)
    model[1].running_mean.add_(1)
    with pytest.raises(CheckpointMismatchError, match="were changed since"):
        loaded.verify()
    loaded = LoadedWeights(model)
    model[0].weight = torch.nn.Parameter(model[0].weight.detach() + 1)
    with pytest.raises(CheckpointMismatchError):
        loaded.verify()


def test_a_stamp_fits_equal_contents_only(model: Any, hashed: list[int]) -> None:
    stamp = WeightsStamp(model_tensors(model).values())
    assert stamp.matches(model_tensors(model).values())
    assert len(hashed) == 1
    copies = [tensor.detach().clone() for tensor in model_tensors(model).values()]
    assert stamp.matches(copies)
    assert stamp.matches(copies)
    assert len(hashed) == 2
    assert not stamp.matches(copies[:-1])
    copies[0].add_(1)
    assert not stamp.matches(copies)


def test_a_stamp_is_compared_under_transforms(model: Any) -> None:
    stamp = WeightsStamp(model_tensors(model).values())
    copies = [tensor.detach().clone() for tensor in model_tensors(model).values()]
    answers: list[bool] = []

    def loss(x: torch.Tensor) -> torch.Tensor:
        answers.append(stamp.matches(copies))
        return (x**2).sum()

    torch.func.grad(loss)(torch.ones(3))
    assert answers == [True]
