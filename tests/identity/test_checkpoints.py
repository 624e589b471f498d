"""Checkpoints load from everything that Trainer users have, and never run code or leave traces."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from hf_trak.callbacks import _weight_files
from hf_trak.weights.checkpoints import fingerprint_state_dict, load_into, loaded, read_state_dict


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


def same(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def tiny_gpt2(seed: int = 0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=32))


@pytest.mark.parametrize("kind", ["module", "state_dict", ".safetensors", ".pt", ".pth", ".bin", "wrapped"])
def test_every_kind_of_checkpoint_loads(kind: str, tmp_path: Path) -> None:
    source, target = make_model(1), make_model(2)
    state = source.state_dict()
    path = tmp_path / f"weights{kind if kind.startswith('.') else '.pt'}"
    if kind == ".safetensors":
        save_file(state, path)
    elif kind.startswith("."):
        torch.save(state, path)
    elif kind == "wrapped":
        torch.save({"state_dict": state, "epoch": 3}, path)
    load_into(target, {"module": source, "state_dict": state}.get(kind, path))
    assert same(dict(target.state_dict()), dict(state))


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model", "module", "net"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "model.", "model._orig_mod."])
def test_checkpoints_of_ordinary_trainings(key: str, prefix: str, tmp_path: Path) -> None:
    """Weights beside an optimizer, under the names that wrappers and Lightning give them."""
    source, target = make_model(1), make_model(2)
    state = {prefix + name: value for name, value in source.state_dict().items()}
    beside = {
        "optimizer": torch.optim.AdamW(source.parameters()).state_dict(),
        "epoch": 3,
        "hyper_parameters": {"lr": 1},
    }
    torch.save({**beside, key: state}, tmp_path / "last.ckpt")
    load_into(target, tmp_path / "last.ckpt")
    assert same(dict(target.state_dict()), dict(source.state_dict()))


def test_names_inside_compiled_blocks_and_beside_a_loss(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hf_trak")
    source, target = make_model(1), make_model(2)
    weights = dict(source.state_dict())
    compiled = {name.replace("3.", "3._orig_mod.") if name[0] == "3" else name: one for name, one in weights.items()}
    load_into(target, compiled)
    assert same(dict(target.state_dict()), weights)
    lightning = {**{f"net.{name}": value for name, value in weights.items()}, "criterion.margin": torch.ones(2)}
    target = make_model(2)
    load_into(target, lightning)
    assert same(dict(target.state_dict()), weights)
    assert "weights below 'net.' are taken, and not ['criterion.margin']" in caplog.text


def test_two_models_in_one_file_are_refused(tmp_path: Path) -> None:
    state = make_model(1).state_dict()
    both = {f"{prefix}.{name}": value for name, value in state.items() for prefix in ("student", "teacher")}
    with pytest.raises(ValueError, match=r"under the names \['student\.', 'teacher\.'\]"):
        load_into(make_model(2), both)
    torch.save({"model": state, "net": state}, tmp_path / "two.pt")
    with pytest.raises(ValueError, match=r"holds weights under \['model', 'net'\]"):
        load_into(make_model(2), tmp_path / "two.pt")
    foreign = {f"other.{name}.deep": value for name, value in state.items()}
    with pytest.raises(ValueError, match="does not fit the model"):
        load_into(make_model(2), foreign)


@pytest.mark.parametrize("shard_size", ["10MB", "10KB"])
def test_save_pretrained_directories_load_with_tied_weights(shard_size: str, tmp_path: Path) -> None:
    source, target = tiny_gpt2(1), tiny_gpt2(2)
    source.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "10KB")
    load_into(target, tmp_path)
    assert same(dict(target.state_dict()), dict(source.state_dict()))
    assert target.lm_head.weight is target.transformer.wte.weight


def test_adapter_checkpoint_goes_into_the_adapter_only(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False)
    source, target = peft.get_peft_model(tiny_gpt2(1), config), peft.get_peft_model(tiny_gpt2(2), config)
    base = {name: value.clone() for name, value in target.state_dict().items() if "lora" not in name}
    source.save_pretrained(tmp_path)
    load_into(target, tmp_path)
    for name, value in target.state_dict().items():
        expected = source.state_dict()[name] if "lora" in name else base[name]
        assert torch.equal(value, expected), name


class Exploit:
    """Unpickling this runs a command."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.marker),)


def test_pickled_objects_are_refused_and_not_run(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2), "extra": Exploit(tmp_path / "ran")}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match=r"pickled Python objects.*safetensors"):
        read_state_dict(tmp_path / "evil.pt")
    assert not (tmp_path / "ran").exists()


def test_missing_damaged_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_state_dict(tmp_path / "nothing.pt")
    with pytest.raises(FileNotFoundError, match="holds no weights"):
        read_state_dict(tmp_path)
    (tmp_path / "short.safetensors").write_bytes(b"\x10")
    with pytest.raises(ValueError, match="damaged"):
        read_state_dict(tmp_path / "short.safetensors")
    torch.save(make_model().state_dict(), tmp_path / "cut.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "cut.pt").read_bytes()[:200])
    with pytest.raises(ValueError, match="damaged"):
        read_state_dict(tmp_path / "cut.pt")
    (tmp_path / "notes.txt").write_text("no weights")
    with pytest.raises(ValueError, match=r"suffix '\.txt'"):
        read_state_dict(tmp_path / "notes.txt")
    with pytest.raises(ValueError, match="Expected names"):
        read_state_dict({"weight": 3})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="int"):
        read_state_dict(3)  # type: ignore[arg-type]


def test_weights_of_another_architecture_are_refused_whole() -> None:
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    broken = {name: torch.zeros_like(value) for name, value in before.items()}
    broken["3.weight"] = torch.zeros(7, 4)
    del broken["0.bias"]
    with pytest.raises(ValueError, match=r"1 names missing.*0\.bias.*3\.weight: \(7, 4\)"):
        load_into(model, broken)
    assert same(dict(model.state_dict()), before)


@pytest.mark.parametrize("fail", [False, True])
def test_loaded_restores_weights_dtypes_and_modes(fail: bool) -> None:
    model = make_model(0)
    model[1].eval()
    model.train()
    model[2].eval()
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    other = make_model(1)
    try:
        with loaded(model, other, torch.bfloat16) as fingerprint:
            assert fingerprint == fingerprint_state_dict(other.state_dict())
            assert not any(module.training for module in model.modules())
            assert model[0].weight.dtype == torch.bfloat16
            assert torch.equal(model[0].weight, other[0].weight.to(torch.bfloat16))
            if fail:
                raise KeyError("stop")
    except KeyError:
        assert fail
    assert same(dict(model.state_dict()), before)
    assert [module.training for module in model.modules()] == modes


def test_fingerprint_depends_on_content_alone(tmp_path: Path) -> None:
    state = make_model(0).state_dict()
    fingerprint = fingerprint_state_dict(state)
    assert fingerprint_state_dict(dict(reversed(state.items()))) == fingerprint
    save_file({name: value.contiguous() for name, value in state.items()}, tmp_path / "x.safetensors")
    assert fingerprint_state_dict(read_state_dict(tmp_path / "x.safetensors")) == fingerprint
    for change in (
        {**state, "0.weight": state["0.weight"] + 1e-6},
        {**state, "0.weight": state["0.weight"].double()},
        {**state, "0.weight": state["0.weight"].reshape(3, 4)},
        {("a" if name == "0.bias" else name): value for name, value in state.items()},
    ):
        assert fingerprint_state_dict(change) != fingerprint


def test_index_that_names_a_missing_part(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match="model-00001-of-00002"):
        read_state_dict(tmp_path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"weight_map": {"a": ', "is not valid JSON"),
        ("\x80", "is not valid JSON"),
        ('{"metadata": {}}', r"has the keys \['metadata'\], and no usable `weight_map`"),
        ('{"weight_map": {"a": 3}}', ".* no usable `weight_map`"),
        ('{"weight_map": {}}', ".* no usable `weight_map`"),
        ("[]", "has a JSON list"),
    ],
)
def test_damaged_index_is_named(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=f"{path}' {says}.*Save the checkpoint anew"):
        read_state_dict(tmp_path)
    with pytest.raises(ValueError, match=f"{path}' {says}"):
        _weight_files(tmp_path)


class Quantized(Tensor):
    """Like weights of torchao: numbers and scales in one tensor, which knows few operations."""

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> "Quantized":
        return Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype)  # type: ignore[attr-defined]

    def __init__(self, numbers: Tensor, scale: Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].numbers, args[0].scale)
        raise NotImplementedError(str(func))


def test_fingerprints_of_quantized_weights() -> None:
    numbers, scale = torch.arange(6, dtype=torch.int8).view(2, 3), torch.tensor([0.5, 2.0])

    def fingerprint(numbers: Tensor, scale: Tensor) -> str:
        return fingerprint_state_dict({"weight": Quantized(numbers, scale)})

    found = {fingerprint(numbers, scale), fingerprint(numbers + 1, scale), fingerprint(numbers, 2 * scale)}
    assert len(found) == 3 and fingerprint(numbers.clone(), scale.clone()) in found
