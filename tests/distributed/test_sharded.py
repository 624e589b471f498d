"""Models that FSDP2 divides over processes have the features of whole ones, and what goes wrong is said by all."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import doc_pages
import pytest
import sharded_jobs
import torch
from datasets import Dataset
from patience import patient
from sharded_jobs import (
    attributor,
    check_checkpointed,
    checkpointed,
    compared,
    difference,
    divided,
    features,
    few,
    made,
    mesh_of_all,
    rows,
    sharded,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaForCausalLM

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.data.rows import RowBatches
from hf_trak.gradient_computers import sharded as engine
from hf_trak.runtime.processes import Processes
from hf_trak.weights.checkpoints import read_state_dict

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("jobs_with_one_thread")]

ROUNDING = 1e-5
"""Features are sums over parameters of products that take 10 to 10⁴ additions in float32 (ε = 6·10⁻⁸)."""


def report_of(call: Any) -> str:
    try:
        call()
    except Exception as error:  # compared by tests
        return f"{type(error).__name__}: {error}"
    return "no error"


def same_features(name: str, directory: Path, kind: str = "fsdp", scores: Sequence[bool] = ()) -> dict[str, Any]:
    """Features of a sharded model and of a whole one, and what defines them."""
    whole = attributor(made(name), name, directory / "whole").featurize()
    found = {}
    for again in range(2):
        one = attributor(sharded(made(name), mesh_of_all(kind)), name, directory / str(again)).featurize()
        found[again] = features(one)
    result = {
        "difference": difference(found[0], features(whole)),
        "same bits": bool(torch.equal(found[0], found[1])),
        "same weights": whole.features.store.checkpoint_info(0)["fingerprint"]
        == one.features.store.checkpoint_info(0)["fingerprint"],
        "same definition": whole.features.store.config == one.features.store.config,
    }
    for exact in scores:
        taken = [
            torch.tensor(
                a.attribute(rows(name, 3, 2), top_k=None, method="exact" if exact else "index")["trak_scores"]
            )
            for a in (whole, one)
        ]
        result[f"scores, exact={exact}"] = float((taken[1] - taken[0]).norm() / taken[0].norm())
    return result


def other_weights(directory: Path) -> dict[str, Any]:
    """A checkpoint is loaded into a sharded model for a while, by every process its part."""
    weights = made("gpt2", seed=9).state_dict()
    model = sharded(made("gpt2"), mesh_of_all())
    one = attributor(model, "gpt2", directory / "loaded").featurize([weights])
    whole = attributor(made("gpt2", seed=9), "gpt2", directory / "whole").featurize()
    kept = all(
        torch.equal(p.full_tensor(), q) for p, q in zip(model.parameters(), made("gpt2").parameters(), strict=True)
    )
    return {
        "difference": difference(features(one), features(whole)),
        "same weights": whole.features.store.checkpoint_info(0)["fingerprint"]
        == one.features.store.checkpoint_info(0)["fingerprint"],
        "restored": kept,
        "gradients": [name for name, p in model.named_parameters() if p.grad is not None],
        "frozen": [name for name, p in model.named_parameters() if not p.requires_grad],
    }


def uneven(directory: Path, n: int) -> float:
    """Rows alone in their batches, each of another length: processes trace samples at different times."""
    ids = [[1 + (i * j) % 30 for j in range(3 + i)] for i in range(n)]
    found = []
    for where, model in (("whole", made("gpt2")), ("sharded", sharded(made("gpt2"), mesh_of_all()))):
        one = attributor(model, "gpt2", directory / where, per_device_batch_size=1)
        built = TrakAttributor(model, one.args, train_dataset=Dataset.from_dict({"input_ids": ids, "labels": ids}))
        found.append(features(built.featurize()))
    return difference(found[1], found[0])


def wrong_plans(directory: Path) -> dict[str, str]:
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    mesh = mesh_of_all()
    half_wrapped = made("gpt2") if rank else sharded(made("gpt2"), mesh)
    mixed = made("gpt2")
    alone = init_device_mesh("cpu", (count, 1), mesh_dim_names=("all", "alone"))["alone"]
    fully_shard(mixed.transformer.h[0], mesh=alone)
    fully_shard(mixed, mesh=mesh)
    with torch.device("meta"):
        meta = sharded(sharded_jobs.gpt2().eval(), mesh)
    functional = sharded(made("gpt2"), mesh)
    found = {
        "one process alone": report_of(lambda: attributor(half_wrapped, "gpt2", directory / "half").featurize()),
        "mixed": report_of(lambda: attributor(mixed, "gpt2", directory / "mixed").featurize()),
        "meta": report_of(lambda: attributor(meta, "gpt2", directory / "meta").featurize()),
        "engine": report_of(
            lambda: attributor(functional, "gpt2", directory / "engine", engine="functional").featurize()
        ),
    }
    return found


def failing(directory: Path, where: type, name: str, broken: Any) -> str:
    """One method fails in the last process."""
    plain = getattr(where, name)
    if os.environ["RANK"] == "1":
        setattr(where, name, broken)
    try:
        return report_of(attributor(sharded(made("gpt2"), mesh_of_all()), "gpt2", directory).featurize)
    finally:
        setattr(where, name, plain)


def a_bad_row(self: Any, *args: Any, **options: Any) -> Any:
    raise ValueError("no such row.")


def a_failing_layer(self: Any, *args: Any) -> Any:
    """A forward pass fails after the first layer, where the other process waits for the next."""

    def fail(module: torch.nn.Module, inputs: Any) -> None:
        raise RuntimeError("no such luck.")

    handle = self.model.transformer.h[0].mlp.register_forward_pre_hook(fail)
    try:
        with self.completing():
            return engine.HookedGradientComputer._pass(self, *args)
    finally:
        handle.remove()


def a_wrong_rule(directory: Path) -> str:
    """The self-check compares what the engine emits, here with every block doubled."""
    plain = engine.ShardedGradientComputer.stream_unchecked

    def doubled(self: Any, batch: Any, sink: Any, side: Any) -> Any:
        return plain(self, batch, lambda start, block: sink(start, 2 * block if start == 0 else block), side)

    engine.ShardedGradientComputer.stream_unchecked = doubled  # type: ignore[method-assign]
    try:
        return report_of(attributor(sharded(made("gpt2"), mesh_of_all()), "gpt2", directory / "rule").featurize)
    finally:
        engine.ShardedGradientComputer.stream_unchecked = plain  # type: ignore[method-assign]


def first_job(directory: Path) -> dict[str, Any]:
    """What the default run looks at, with two processes."""
    Processes(True)
    return {
        "gpt2": same_features("gpt2", directory / "gpt2"),
        "loaded": other_weights(directory / "loaded"),
        "uneven": [uneven(directory / f"rows-{n}", n) for n in (1, 3)],
        "plans": wrong_plans(directory / "plans"),
        "bad row": failing(directory / "row", RowBatches, "iterate", a_bad_row),
        "failing layer": failing(directory / "layer", engine.ShardedGradientComputer, "_pass", a_failing_layer),
        "wrong rule": a_wrong_rule(directory / "rule"),
        "experts": compared(divided("qwen_moe", directory / "m"), "qwen_moe", directory / "qwen_moe"),
        "few": [few(directory / f"few-{n}", n) for n in (1, 3)],
        "checkpointed": checkpointed(sharded(made("gpt2"), mesh_of_all()), "gpt2", directory / "checkpointed"),
    }


def long_job(directory: Path) -> dict[str, Any]:
    """All models with scores, two of them also with curvatures; with four processes, two copies of two shards."""
    Processes(True)
    kind = "hsdp" if os.environ["WORLD_SIZE"] == "4" else "fsdp"
    return {
        f"{kind} {name}": same_features(name, directory / kind / name, kind, (False, True) if exact else (False,))
        for name, exact in (("gpt2", True), ("llama", False), ("qwen_moe", kind == "fsdp"), ("vit", False))
    }


def without_memory() -> torch.nn.Module:
    """A sharded model that was never whole in any process, without weights yet."""
    with torch.device("meta"):
        model = sharded_jobs.llama().eval()
    rotary = type(model.model.rotary_emb)
    sharded(model, mesh_of_all()).to_empty(device="cpu")
    model.model.rotary_emb = rotary(model.config)  # buffers that are in no checkpoint
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    return model


def trainer_job(directory: Path) -> dict[str, Any]:
    """A run of `Trainer` under FSDP2, and the lines of the README."""
    from accelerate import DistributedType, PartialState
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        output_dir=str(directory / "out"),
        use_cpu=True,
        per_device_train_batch_size=2,
        max_steps=2,
        learning_rate=1e-2,
        report_to=[],
        fsdp=True,
        fsdp_config={
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": "SHARDED_STATE_DICT",
        },
        save_steps=2,
    )
    # accelerate 1.15 leaves FSDP out for processes on CPUs: it is told here that they are on GPUs
    assert args.device.type == "cpu"
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    trainer = Trainer(model=made("llama"), args=args, train_dataset=rows("llama"))
    trainer.train()
    divided = [type(p).__name__ for p in trainer.model.parameters()]
    eval_dataset = rows("llama", 3, 2)
    config = TrakConfig(output_dir=str(directory / "trak"), proj_dim=32, feature_dtype="float32", budget="fast")

    attributor = TrakAttributor.from_trainer(trainer, args=config)
    attributor.featurize()
    scored = attributor.attribute(eval_dataset, top_k=3)

    attributor.featurize({1: str(directory / "out" / "checkpoint-2")})
    empty = without_memory()
    straight = sharded_jobs.attributor(empty, "llama", directory / "straight", shard_size=512)
    straight.featurize([str(directory / "out" / "checkpoint-2")])

    whole = made("llama")
    whole.load_state_dict({name: p.full_tensor() for name, p in trainer.model.state_dict().items()})
    plain = sharded_jobs.attributor(whole, "llama", directory / "plain", shard_size=512).featurize()
    merged = sharded_jobs.attributor(made("llama"), "llama", directory / "merged", shard_size=512)
    merged.featurize([str(directory / "out" / "checkpoint-2")])
    return {
        "divided": divided,
        "checkpoint": [difference(features(one), features(plain)) for one in (straight, merged)],
        "fingerprints": len(
            {
                one.features.store.checkpoint_info(model_id)["fingerprint"]
                for one, model_id in ((attributor, 0), (attributor, 1), (straight, 0), (plain, 0), (merged, 0))
            }
        ),
        "difference": difference(features(attributor), features(plain)),
        "same": plain.attribute(eval_dataset, top_k=3)["trak_indices"][:] == scored["trak_indices"][:],
    }


def page_job(directory: Path) -> float:
    """Run the page of the documentation, with other weights in one checkpoint."""
    from torch.distributed.checkpoint import save

    os.chdir(directory)
    config = made("llama").config
    namespace: dict[str, Any] = {"model": made("llama"), "config": config, "LlamaForCausalLM": LlamaForCausalLM}
    rows_of = {"train_dataset": rows("llama"), "eval_dataset": rows("llama", 3, 2)}
    if os.environ["RANK"] == "0":
        weights = {"model": made("llama", seed=5).state_dict()}
        save(weights, checkpoint_id=directory / "out" / "checkpoint-100" / "pytorch_model_fsdp_0", no_dist=True)
    on_cpu = {f'output_dir="{name}"': f'output_dir="{name}", use_cpu=True' for name in ("trak", "trak-100")}
    doc_pages.run_page("docs/sharded.md", {**namespace, **rows_of}, doc_pages.hf_trak_command, on_cpu)
    loaded = TrakAttributor(
        made("llama", seed=5),
        TrakConfig(output_dir="trak-100", use_cpu=True, budget="fast"),
        train_dataset=rows("llama"),
    )
    return float(len(loaded.featurize().features.store.train(0)))  # a store of other weights would refuse these


JOBS = {
    "page": page_job,
    "first": first_job,
    "long": long_job,
    "trainer": trainer_job,
}


def launched(
    directory: Path, job: str, count: int, timeout: float = 120, script: str = __file__
) -> list[dict[str, Any]]:
    """What every process of a group found."""
    directory.mkdir(parents=True, exist_ok=True)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)]
    command = [sys.executable, *launch, script, job, str(directory)]
    done = subprocess.run(command, timeout=patient(timeout), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-8000:]
    found = [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(count)]
    assert all("value" in one for one in found), found
    return [one["value"] for one in found]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, jobs_with_one_thread: None) -> list[dict[str, Any]]:
    return sharded_jobs.in_group(tmp_path_factory.mktemp("two"), JOBS["first"])


def check_same(found: dict[str, Any]) -> None:
    assert found["difference"] <= ROUNDING
    assert found["same bits"] and found["same weights"] and found["same definition"]
    assert all(value <= 1e-4 for key, value in found.items() if key.startswith("scores"))


@pytest.mark.slow
def test_a_sharded_model_has_the_features_of_a_whole_one(two: list[dict[str, Any]]) -> None:
    """7 rows in shards of 2 and batches of 2: one process has 4 rows, the other 3, the last one alone."""
    for found in two:
        check_same(found["gpt2"])


def test_processes_with_no_rows_or_one_accompany_the_others(two: list[dict[str, Any]]) -> None:
    """One row in all, so that the last process has none; then two rows and one, of three lengths."""
    for found in two:
        assert max(found["uneven"]) <= ROUNDING


def test_layers_are_checkpointed(two: list[dict[str, Any]]) -> None:
    for found in two:
        check_checkpointed(found["checkpointed"])


def test_whole_weights_are_loaded_into_shards_for_a_while(two: list[dict[str, Any]]) -> None:
    for found in two:
        assert found["loaded"]["difference"] <= ROUNDING
        assert found["loaded"]["same weights"] and found["loaded"]["restored"]
        assert found["loaded"]["gradients"] == found["loaded"]["frozen"] == []


def test_wrong_plans_are_named_in_all_processes(two: list[dict[str, Any]]) -> None:
    for found in two:
        plans = found["plans"]
        assert "'transformer.wte.weight' is divided" in plans["one process alone"]
        assert "process 0 and whole (40, 16) in process 1" in plans["one process alone"]
        assert "over meshes of [1, 2] processes" in plans["mixed"] and "transformer.h.0" in plans["mixed"]
        assert "'transformer.wte.weight'" in plans["meta"] and "meta device" in plans["meta"]
        assert "'functional'" in plans["engine"] and "'hooked'" in plans["engine"]


def test_an_error_in_one_process_ends_all(two: list[dict[str, Any]]) -> None:
    for what, message in (("bad row", "no such row"), ("failing layer", "no such luck")):
        first, last = (found[what] for found in two)
        assert message in last and not last.startswith("PeerProcessError")
        assert first.startswith("PeerProcessError: Process 1 of 2 failed") and message in first


def test_the_self_check_sees_a_wrong_gradient(two: list[dict[str, Any]]) -> None:
    messages = [found["wrong rule"] for found in two]
    assert all("'transformer.wte.weight'" in one for one in messages)
    assert any(one.startswith("GradientEngineError") for one in messages)


def test_tensor_parallelism_divides_every_expert_of_a_mixture(two: list[dict[str, Any]]) -> None:
    """Of a row of one repeated token, some experts get nothing."""
    for found in two:
        check_same(found["experts"])
        assert max(found["few"]) <= ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_all_models_with_scores_and_curvatures(count: int, tmp_path: Path) -> None:
    for found in launched(tmp_path, "long", count, 1200):
        for name, one in found.items():
            assert name
            check_same(one)


@pytest.mark.slow
def test_the_page_runs(tmp_path: Path) -> None:
    assert launched(tmp_path, "page", 2) == [1.0, 1.0]


@pytest.mark.slow
def test_a_trainer_under_fsdp2_and_the_lines_of_the_readme(tmp_path: Path) -> None:
    for found in launched(tmp_path, "trainer", 2):
        assert set(found["divided"]) == {"DTensor"}
        assert found["difference"] <= ROUNDING and found["same"]
        assert max(found["checkpoint"]) <= ROUNDING and found["fingerprints"] == 1


def test_files_of_deepspeed_are_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "global_step100").mkdir()
    with pytest.raises(FileNotFoundError, match=r"'global_step100'.*zero_to_fp32"):
        read_state_dict(tmp_path)


def test_metadata_of_a_checkpoint_names_no_other_objects(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(os.getcwd))
    with pytest.raises(ValueError, match=r"it names posix.getcwd"):
        read_state_dict(tmp_path)


def test_metadata_of_a_checkpoint_names_files_of_its_own_directory(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import save

    save({"a": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(read_state_dict(tmp_path)["a"], torch.ones(2))
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = f"../{tmp_path.name}/{place.relative_path}"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"names the file '\.\./"):
        read_state_dict(tmp_path)


if __name__ == "__main__":
    sharded_jobs.run(JOBS[sys.argv[1]], Path(sys.argv[2]))
