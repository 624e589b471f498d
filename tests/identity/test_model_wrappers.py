"""Models as people hand them over: compiled, in place or not, and in wrappers of data parallelism."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_trak import TrakAttributor, TrakConfig, per_sample_gradients
from hf_trak.weights.adapters import without_wrappers


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(pixels)))


def rows(count: int = 7) -> list[tuple[torch.Tensor, int]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(6, generator=generator), i % 3) for i in range(count)]


def refused(module: nn.Module) -> Any:
    """Compile in place with a backend that must not be reached."""

    def backend(graph: Any, inputs: Any) -> Any:
        raise AssertionError("compiled code was called")

    module.compile(backend=backend)
    return module


@pytest.mark.few(2)
@pytest.mark.parametrize("engine", ["hooked", "functional", "iterative"])
def test_a_model_compiled_in_place_is_run_as_it_is_written(engine: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Network()
    expected = features(model, tmp_path / "plain", engine)
    refused(model)
    refused(model.body)
    assert torch.equal(features(model, tmp_path / "compiled", engine), expected)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):  # compiled as before, outside of our calls
        model(torch.randn(2, 6))


def features(model: nn.Module, directory: Path, engine: Any = "auto") -> torch.Tensor:
    config = TrakConfig(output_dir=str(directory), proj_dim=16, use_cpu=True, engine=engine)
    attributor = TrakAttributor(model, config, rows(), task="image_classification").featurize()
    return attributor.features.store.train(0).read(0).grads


def wrappers() -> dict[str, Any]:
    def compiled(model: nn.Module) -> Any:
        return torch.compile(model)

    return {
        "compiled": compiled,
        "data parallel": nn.DataParallel,
        "both": lambda model: compiled(nn.DataParallel(model)),
        "both the other way": lambda model: nn.DataParallel(compiled(model)),
    }


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", list(wrappers()))
def test_wrappers_are_taken_off(kind: str, tmp_path: Path) -> None:
    """Names, features and the store are those of the model itself."""
    torch.manual_seed(0)
    model = Network()
    expected = features(model, tmp_path / "store")
    wrapped = wrappers()[kind](model)
    assert torch.equal(features(wrapped, tmp_path / "store"), expected)  # the same store: nothing is refused
    assert torch.equal(features(wrapped, tmp_path / "other"), expected)
    config = TrakConfig(output_dir=str(tmp_path / "names"), proj_dim=16, use_cpu=True, grad_wrt=["head.weight"])
    attributor = TrakAttributor(wrapped, config, rows(), task="image_classification")
    assert attributor.model is model and attributor.features.layout.names == ["head.weight"]


def test_regional_compilation_is_taken_off() -> None:
    model = Network()
    outer = Network()
    vars(outer)["_orig_mod"] = model
    assert without_wrappers(outer) is model
    assert without_wrappers("a name") == "a name"


def test_gradients_of_a_compiled_model() -> None:
    model = Network()
    batch = (torch.randn(2, 6),)
    expected = per_sample_gradients(model, batch, lambda output, given: output[:, 0])
    found = per_sample_gradients(refused(model), batch, lambda output, given: output[:, 0])
    assert all(torch.equal(found[name], expected[name]) for name in expected)
