"""What happens before the first result: imports, and the passes of the first batch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import TOKEN, environment, serving
from report_runs import build
from torch import Tensor, nn

import hf_trak
from hf_trak import TrakAttributor, TrakConfig
from hf_trak.gradient_computers import (
    AutoGradientComputer,
    engine_check,
    register_layer_rule,
    unregister_layer_rule,
)
from hf_trak.gradient_computers.per_sample import function_task
from hf_trak.modelout_functions.base import AbstractModelOutput
from hf_trak.projectors import make_projector


def test_help_imports_nothing_heavy() -> None:
    """`import hf_trak` alone is tested with the layers."""
    code = "import sys; from hf_trak.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    done = subprocess.run(
        [sys.executable, "-c", code + "print(); print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    assert not {"torch", "transformers", "datasets", "accelerate", "numpy"} & {*done.stdout.splitlines()[-1].split()}


@pytest.mark.slow
def test_scores_of_a_small_model_import_neither_compiler_nor_sharding_nor_models(tmp_path: Path) -> None:
    """Each takes a second to import. A model that is compiled, sharded or of transformers has imported them before."""
    code = f"""
import sys, torch
from hf_trak import TrakAttributor, TrakConfig
rows = torch.utils.data.TensorDataset(torch.randn(8, 3), torch.arange(8) % 2)
config = TrakConfig({str(tmp_path)!r}, proj_dim=8, use_cpu=True)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
scores = TrakAttributor(model, config, rows, task="image_classification").featurize().attribute(rows, top_k=3)
assert len(scores) == 8
print(); print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not {"torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "transformers.models"} & {
        *done.stdout.splitlines()[-1].split()
    }


SLOW = {
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torchvision",
    "transformers.modeling_utils",
    "transformers.models",
}
"""Modules that take a second or more to import. Commands that load a model import some of them with it."""

NO_MODEL = SLOW | {
    "accelerate",
    "hf_trak.featurize.featurized",
    "hf_trak.gradient_computers.auto",
    "transformers.generation",
}


COMMANDS = {
    "parser": NO_MODEL | {"torch", "datasets", "transformers"},
    "report RUN": NO_MODEL | {"torch", "transformers"},
    **dict.fromkeys(
        ("inspect STORE", "inspect STORE --check", "export STORE --to NEW", "selftest", "convert"),
        NO_MODEL | {"datasets", "transformers"},
    ),
    "push STORE --repo_id me/index": NO_MODEL - {"accelerate"} | {"datasets", "transformers"},
    "evaluate": NO_MODEL - {"accelerate"} | {"transformers"},
    **dict.fromkeys(("attribute", "estimate", "featurize", "serve", "verify"), SLOW),
}
"""Modules of commands, or commands that run, and what they do not import."""

IN_FORKS = """
import contextlib, importlib, io, json, os, sys
from hf_trak.cli.main import main
for library, names in json.loads(sys.argv[1]):
    if library:
        importlib.import_module(library)
    for name in names:
        if os.fork() == 0:
            command, *rest = name.split()
            importlib.import_module(f"hf_trak.cli.{command}")
            with contextlib.redirect_stdout(io.StringIO()):
                failed = rest and main([command, *(sys.argv[2] + "/" + arg if arg.isupper() else arg for arg in rest)])
            print(json.dumps([name, failed or 0, *sys.modules]), flush=True)
            os._exit(0)
        os.wait()
"""
"""Imports modules and runs commands in forks of one process, after the libraries that all of them may import."""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The modules that each command imports."""
    place = tmp_path_factory.mktemp("startup")
    rows = torch.utils.data.TensorDataset(torch.randn(4, 5), torch.arange(4) % 3)
    config = TrakConfig(str(place / "STORE"), proj_dim=8, use_cpu=True)
    TrakAttributor(Net(), config, rows, task="image_classification").featurize()
    build(0).save(place / "RUN")
    stages: dict[str, list[str]] = {"": [], "torch": [], "datasets": []}
    for name, absent in COMMANDS.items():
        stages["" if "torch" in absent else "torch" if "datasets" in absent else "datasets"].append(name)
    command = [sys.executable, "-c", IN_FORKS, json.dumps([*stages.items()]), str(place)]
    with serving() as hub:
        variables = {**environment(hub, place / "home"), "HF_TOKEN": TOKEN}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=variables)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert not any(failed for _, failed, *_ in found), done.stderr
    return {name: {*modules} for name, _, *modules in found}


@pytest.mark.slow
@pytest.mark.parametrize("module", COMMANDS)
def test_commands_import_what_they_need(module: str, imported: dict[str, set[str]]) -> None:
    assert f"hf_trak.cli.{module.split()[0]}" in imported[module]
    assert not COMMANDS[module] & imported[module]


def test_all_public_names_are_listed_and_there() -> None:
    assert dir(hf_trak) == sorted(hf_trak.__all__)
    assert all(getattr(hf_trak, name) is not None for name in hf_trak.__all__)


class Net(nn.Module):
    """Counts its passes by the number of samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 3)
        self.passes: list[int] = []
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        self.passes.append(len(x))
        return self.second(torch.tanh(self.first(x)))


class Doubling(nn.Linear):
    """A layer whose rule is wrong."""


def f(logits: Tensor, batch: Any) -> Tensor:
    return logits.log_softmax(-1)[..., 0].reshape(len(logits), -1).sum(1)


def made(model: nn.Module) -> AutoGradientComputer:
    return AutoGradientComputer(model, function_task(f, model), dtype=None, device=None)


class Renewable:
    """Whole gradients of a batch, which can be forgotten."""

    def __init__(self, rows: int, total: int) -> None:
        self.shape = rows, total
        self.renewed = -1
        self.renew()

    def renew(self) -> None:
        self.total = torch.zeros(self.shape)
        self.renewed += 1

    def __call__(self, start: int, block: Tensor) -> None:
        self.total[:, start : start + block.shape[1]] += block


def whole(computer: AutoGradientComputer, batch: dict[str, Tensor]) -> Tensor:
    total = torch.zeros(len(batch["x"]), computer.layout.total)

    def sink(start: int, block: Tensor) -> None:
        total[:, start : start + block.shape[1]] += block

    computer.stream(batch, sink)
    return total


def batch_of(*shape: int) -> dict[str, Tensor]:
    return {"x": torch.randn(*shape, generator=torch.Generator().manual_seed(1))}


def test_the_first_batch_passes_through_the_model_once() -> None:
    """Besides it, two samples alone by plain autograd, and one that is traced."""
    model = Net()
    whole(made(model), batch_of(6, 5))
    assert sorted(model.passes) == [1, 1, 1, 6]


@pytest.mark.parametrize("shape", [(6, 5), (4, 9, 5)])
def test_the_kept_pass_has_the_bits_of_another_one(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(*shape)
    computer = made(Net())
    first = whole(computer, batch)
    assert torch.equal(first, whole(computer, batch))
    model = Net()
    monkeypatch.setattr("hf_trak.gradient_computers.auto.KEPT_BYTES", 0)
    assert torch.equal(first, whole(made(model), batch))
    assert model.passes.count(shape[0]) == 2


def test_factors_are_kept_as_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A projection that takes factors gets them from the kept pass, too, with the same bits."""
    model, batch = Net(), batch_of(4, 2, 5)
    projector = make_projector("sjlt", sum(p.numel() for p in model.parameters()), 64, 0, "cpu")
    handed: list[str] = []
    features = []
    computer = made(model)
    for _ in range(2):
        sink = projector.sink(4, 0, torch.device("cpu"))
        given = sink.add_outer
        monkeypatch.setattr(sink, "takes_outer", lambda left, right: True)
        monkeypatch.setattr(sink, "add_outer", lambda *args, given=given: (handed.append("outer"), given(*args))[1])
        computer.stream(batch, sink)
        features.append(sink.result())
    assert torch.equal(*features)
    assert len(handed) == 4  # two weights, twice
    assert model.passes.count(4) == 2


@pytest.mark.parametrize("again", [False, True], ids=["first", "late"])
def test_gradients_of_a_check_go_on_to_a_sink_that_can_forget_them(
    again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_trak.gradient_computers.auto.KEPT_BYTES", 0)
    model, batch = Net(), batch_of(6, 5)
    computer = made(model)
    expected = whole(made(Net()), batch)
    if again:
        whole(computer, batch)
        model.passes.clear()
        computer.check_again()
    sink = Renewable(6, computer.layout.total)
    computer.stream(batch, sink)
    assert torch.equal(sink.total, expected)
    assert model.passes.count(6) == 1
    assert sink.renewed == 0


def test_an_error_of_the_sink_is_no_error_of_the_engine() -> None:
    class Full(Renewable):
        def __call__(self, start: int, block: Tensor) -> None:
            raise ValueError("no place is left")

    computer = made(Net())
    with pytest.raises(ValueError, match="no place is left"):
        computer.stream(batch_of(6, 5), Full(6, computer.layout.total))
    assert computer.engine == "hooked"


def test_a_refused_engine_leaves_nothing_in_the_sink() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = Doubling(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    def wrong(call: Any) -> dict[str, Tensor]:
        return {"weight": 2 * torch.einsum("bi,bj->bij", call.grad, call.x), "bias": call.grad}

    register_layer_rule(Doubling)(wrong)
    try:
        batch, model = batch_of(4, 5), Model()
        computer = made(model)
        found = whole(computer, batch)
        assert computer.engine != "hooked"
        sink = Renewable(4, computer.layout.total)
        made(model).stream(batch, sink)
        assert sink.renewed == 1
        assert torch.equal(sink.total, found)
    finally:
        unregister_layer_rule(Doubling)
    assert torch.allclose(found, whole(made(model), batch), rtol=1e-5, atol=1e-6)


def test_too_many_bytes_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors may take more than the gradients; then the batch is computed again."""
    monkeypatch.setattr(engine_check, "KEPT_BYTES", 100)
    model, batch = Net(), batch_of(6, 5)
    found = whole(made(model), batch)
    assert model.passes.count(6) == 2
    monkeypatch.undo()
    assert torch.equal(found, whole(made(Net()), batch))


def test_samples_that_mix_are_found_by_the_pass_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ordinary pass of the whole batch is made only where f differs."""
    made_checks = []
    kept = engine_check.check_batch_independence
    monkeypatch.setattr(
        engine_check, "check_batch_independence", lambda *args: (made_checks.append(1), kept(*args))[1]
    )
    whole(made(Net()), batch_of(6, 5))
    assert not made_checks

    class Mixing(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + 0.1 * x.sum())

    with pytest.raises(engine_check.SamplesMixedError, match="depends on the other samples"):
        whole(made(Mixing()), batch_of(6, 5))
    assert made_checks


def test_an_engine_that_cannot_be_made_is_passed_over_without_a_check() -> None:
    """The hooked engine takes no task without a batched form."""

    class PerSample(AbstractModelOutput):
        def get_output(self, model: Any, weights: Any, buffers: Any, x: Tensor) -> Tensor:
            return torch.func.functional_call(model, (weights, buffers), (x[None],))[0, 0]

        def get_out_to_loss_grad(self, model: Any, weights: Any, buffers: Any, batch: Any) -> Tensor:
            return torch.ones(len(batch[0]))

    computer = AutoGradientComputer(Net(), PerSample(), dtype=None, device=None, self_check=False)
    computer.stream((batch_of(6, 5)["x"],), lambda start, block: None)
    assert computer.engine == "functional"
