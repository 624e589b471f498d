"""Models that ZeRO-3 of DeepSpeed partitions have the features of whole ones. Skipped without DeepSpeed."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import sharded_jobs
import torch
from datasets import Dataset
from sharded_jobs import attributor, check_checkpointed, checkpointed, compared, difference, features, made, rows
from test_sharded import ROUNDING, a_bad_row, launched, report_of
from torch import nn

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.data.rows import RowBatches
from hf_trak.gradient_computers.hooked import hooks
from hf_trak.weights.sharded import whole

pytestmark = [
    pytest.mark.slow,  # DeepSpeed takes seconds to import, in every process
    pytest.mark.distributed,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="ZeRO-3 is DeepSpeed's"),
]

SETTINGS: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 20},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
}
"""Norms and biases of up to 20 numbers stay whole between passes, as DeepSpeed keeps small parameters."""


@pytest.fixture(autouse=True)
def on_cpus(monkeypatch: pytest.MonkeyPatch, jobs_with_one_thread: None) -> None:
    """Processes find DeepSpeed where this one does, and leave GPUs alone."""
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None and spec.origin is not None
    monkeypatch.setenv("PYTHONPATH", str(Path(spec.origin).parents[1]), prepend=os.pathsep)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


def engine(model: nn.Module) -> Any:
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    return deepspeed.initialize(model=model, config=SETTINGS, model_parameters=model.parameters())[0]


def partitioned(name: str) -> nn.Module:
    return engine(made(name)).module.eval()


def held(model: nn.Module) -> int:
    """Numbers of a model's parameters that are in this process' memory beside its part of them."""
    return sum(parameter.numel() for parameter in model.parameters())


def models_job(directory: Path) -> dict[str, Any]:
    found = {}
    for name in ("gpt2", "llama", "vit"):
        model = partitioned(name)
        found[name] = compared(model, name, directory / name, name == "llama")
        found[name]["held"] = held(model)
    return found


def checkpointed_job(directory: Path) -> dict[str, Any]:
    return checkpointed(partitioned("llama"), "llama", directory)


def uneven(name: str, directory: Path, n: int) -> float:
    """Rows of one repeated token each, so that most experts get none, alone in their batches, of other lengths."""
    ids = [[5 + 7 * i] * (3 + i) for i in range(n)]
    found = []
    for where, model in (("whole", made(name)), ("parts", partitioned(name))):
        one = attributor(model, name, directory / where, per_device_batch_size=1)
        built = TrakAttributor(model, one.args, train_dataset=Dataset.from_dict({"input_ids": ids, "labels": ids}))
        found.append(features(built.featurize()))
    return difference(found[1], found[0])


def weights_job(directory: Path) -> dict[str, Any]:
    """Other weights for a while, as a state dict and from a directory; then the training goes on."""
    other = made("gpt2", seed=9)
    if os.environ["RANK"] == "0":
        other.save_pretrained(directory / "saved")
    zero = engine(made("gpt2"))
    one = attributor(zero, "gpt2", directory / "loaded").featurize([other.state_dict()])
    one.featurize({1: str(directory / "saved")})
    plain = attributor(other, "gpt2", directory / "whole").featurize()
    plain.featurize({1: str(directory / "saved")})
    before = [whole(p).clone() for p in zero.module.parameters()]
    kept = all(torch.equal(p, q) for p, q in zip(before, made("gpt2").parameters(), strict=True))
    ids = torch.tensor(rows("gpt2")["input_ids"][:2])
    zero.backward(zero(input_ids=ids, labels=ids).loss)
    zero.step()
    moved = [float((whole(p) - q).abs().max()) for p, q in zip(zero.module.parameters(), before, strict=True)]
    infos = [
        one.features.store.checkpoint_info(0),
        one.features.store.checkpoint_info(1),
        plain.features.store.checkpoint_info(0),
    ]
    return {
        "difference": max(difference(features(one, model_id), features(plain, model_id)) for model_id in (0, 1)),
        "fingerprints": len({info["fingerprint"] for info in infos}),
        "restored": kept,
        "moved": min(moved),
        "frozen": [name for name, p in zero.module.named_parameters() if not p.requires_grad],
    }


def errors_job(directory: Path) -> dict[str, Any]:
    """A row that cannot be had in the last process, and a rule that is wrong."""
    plain, emit = RowBatches.__dict__["iterate"], hooks._RuleHandler._emit

    def doubled(self: Any, x: Any, x_axis: Any, grad: Any, grad_axis: Any) -> None:
        emit(self, x, x_axis, grad * (2 if self.name == "lm_head" else 1), grad_axis)

    if os.environ["RANK"] == "1":
        RowBatches.iterate = a_bad_row  # type: ignore[method-assign]
    bad = report_of(attributor(partitioned("llama"), "llama", directory / "bad").featurize)
    RowBatches.iterate = plain  # type: ignore[method-assign]
    hooks._RuleHandler._emit = doubled  # type: ignore[method-assign]
    wrong = report_of(attributor(partitioned("llama"), "llama", directory / "wrong").featurize)
    return {"bad row": bad, "wrong rule": wrong}


def trainer_job(directory: Path) -> dict[str, Any]:
    """A training under ZeRO-3, and the lines of the README."""
    from transformers import Trainer, TrainingArguments

    settings = {**SETTINGS, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 1}
    settings["zero_force_ds_cpu_optimizer"] = False
    args = TrainingArguments(
        output_dir=str(directory / "out"), use_cpu=True, per_device_train_batch_size=2, max_steps=2,
        learning_rate=1e-2, report_to=[], deepspeed=settings, save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model=made("llama"), args=args, train_dataset=rows("llama"))
    trainer.train()
    eval_dataset = rows("llama", 3, 2)
    config = TrakConfig(
        output_dir=str(directory / "trak"), proj_dim=32, feature_dtype="float32", use_cpu=True, budget="fast"
    )

    attributor = TrakAttributor.from_trainer(trainer, args=config)
    attributor.featurize()
    scored = attributor.attribute(eval_dataset, top_k=3)

    trained = made("llama")
    names = dict(trained.named_parameters())
    trained.load_state_dict(
        {name: whole(p) for name, p in trainer.model.named_parameters() if name in names}, strict=False
    )
    plain = sharded_jobs.attributor(trained, "llama", directory / "plain", shard_size=512).featurize()
    infos = [one.features.store.checkpoint_info(0)["fingerprint"] for one in (attributor, plain)]
    return {
        "parts": [hasattr(p, "ds_id") for p in trainer.model.parameters()],
        "difference": difference(features(attributor), features(plain)),
        "fingerprints": len(set(infos)),
        "same": plain.attribute(eval_dataset, top_k=3)["trak_indices"][:] == scored["trak_indices"][:],
    }


def few_job(directory: Path) -> list[float]:
    return [uneven("qwen_moe", directory / str(n), n) for n in (1, 3)]


JOBS = {
    "models": models_job,
    "checkpointed": checkpointed_job,
    "few": few_job,
    "weights": weights_job,
    "errors": errors_job,
    "trainer": trainer_job,
}


def test_partitioned_models_have_the_features_of_whole_ones(tmp_path: Path) -> None:
    for found in launched(tmp_path, "models", 2, 400, __file__):
        for name, one in found.items():
            assert name
            assert one["difference"] <= ROUNDING and one["scores"] <= 1e-4 and one["curvature"] <= 1e-4
            # the inverse of a damped curvature multiplies rounding by up to max Λ / (c · mean Λ), about 10³
            assert max(one["exact scores"], one["self-influence"]) <= 1e-3
            assert one["same bits"] and one["same weights"] and one["same definition"]
            assert one["held"] == 0


def test_layers_are_checkpointed(tmp_path: Path) -> None:
    for found in launched(tmp_path, "checkpointed", 2, 300, __file__):
        check_checkpointed(found)


def test_an_expert_without_rows_in_one_process_does_not_hang(tmp_path: Path) -> None:
    """One row in all, so that the last process has none; then two rows and one, of three lengths."""
    for found in launched(tmp_path, "few", 2, 300, __file__):
        assert max(found) <= ROUNDING


def test_whole_weights_are_loaded_for_a_while_and_the_training_goes_on(tmp_path: Path) -> None:
    for found in launched(tmp_path, "weights", 2, 300, __file__):
        assert found["difference"] <= ROUNDING and found["fingerprints"] == 1
        assert found["restored"] and found["frozen"] == [] and found["moved"] > 0


def test_errors_are_said_by_all(tmp_path: Path) -> None:
    first, last = launched(tmp_path, "errors", 2, 300, __file__)
    assert "no such row" in last["bad row"] and not last["bad row"].startswith("PeerProcessError")
    assert first["bad row"].startswith("PeerProcessError: Process 1 of 2 failed")
    assert all("'lm_head.weight'" in one["wrong rule"] for one in (first, last))


def test_a_trainer_under_zero_3_and_the_lines_of_the_readme(tmp_path: Path) -> None:
    for found in launched(tmp_path, "trainer", 2, 300, __file__):
        assert all(found["parts"])
        assert found["difference"] <= ROUNDING and found["fingerprints"] == 1 and found["same"]


if __name__ == "__main__":
    sharded_jobs.run(JOBS[sys.argv[1]], Path(sys.argv[2]))
