"""Models whose matrices tensor parallelism cuts into slices have the features of whole ones."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import sharded_jobs
import torch
from sharded_jobs import attributor, blocks, check_checkpointed, checkpointed, compared, divided, few, made
from test_sharded import ROUNDING, launched, report_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from hf_trak.runtime.processes import Processes
from hf_trak.runtime.sharding import flat_spans

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("jobs_with_one_thread")]


def mesh() -> Any:
    return init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]) // 2, 2), mesh_dim_names=("fsdp", "tp"))


def by_torch(model: nn.Module, left_out: str = "", elsewhere: Any = None) -> nn.Module:
    """Divide a Llama by `parallelize_module` of torch, and by FSDP2 from three processes on.

    Args:
        model: changed in place.
        left_out: a module that is not divided with the others.
        elsewhere: the mesh over which it is divided; `None` leaves it whole.
    """
    columns, rows_ = ColwiseParallel(), RowwiseParallel()
    plan: dict[str, Any] = {
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    }
    for i in range(2):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"model.layers.{i}.{name}"] = columns
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"model.layers.{i}.{name}"] = rows_
    whole_mesh = mesh()
    for name, where in ((left_out, elsewhere), *((key, whole_mesh["tp"]) for key in plan if key != left_out)):
        if where is not None:  # every process cuts its slices from its own copy
            parallelize_module(model, where, {name: plan[name]}, src_data_rank=None)
    if whole_mesh.size(0) > 1:
        for block in [*blocks(model), model]:
            fully_shard(block, mesh=whole_mesh["fsdp"])
    return model


def misplaced() -> list[str]:
    """Parts of tensors that hold their own positions, which `flat_spans` names otherwise."""
    wrong = []
    for shape in ((6, 4), (7, 5), (3, 8, 4), (5,)):
        for placement in (Shard(0), Shard(len(shape) - 1), _StridedShard(1, split_factor=2)):
            if placement.dim >= len(shape) or (isinstance(placement, _StridedShard) and len(shape) != 3):
                continue
            positions = torch.arange(float(torch.Size(shape).numel())).view(shape)
            module = nn.Module()
            module.weight = nn.Parameter(distribute_tensor(positions, mesh()["tp"], [placement]))
            if mesh().size(0) > 1:
                fully_shard(module, mesh=mesh()["fsdp"])
            found = flat_spans(module.weight)
            right = all(torch.equal(v.detach(), torch.arange(s, s + v.numel()).float()) for s, v in found)
            if not right or sum(v.numel() for _, v in found) != module.weight.to_local().numel():
                wrong.append(f"{shape} {placement}")
    return wrong


def refused(directory: Path) -> dict[str, str]:
    norms = parallelize_module(made("llama"), mesh()["tp"], {"model.norm": SequenceParallel()})
    without_plan = report_of(
        lambda: type(made("gpt2")).from_pretrained(
            directory, distributed_config={"tp_size": int(os.environ["WORLD_SIZE"]), "tp_plan": "auto"}
        )
    )
    return {
        "sequence": report_of(lambda: attributor(norms, "llama", directory / "norm").featurize()),
        "no plan": without_plan,
    }


def wrong_plans(directory: Path) -> dict[str, str]:
    """A module that one process has not divided, one that is divided over other processes, one without memory."""
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    name = "model.layers.1.mlp.down_proj"
    alone = init_device_mesh("cpu", (count, 1), mesh_dim_names=("all", "alone"))["alone"]
    with torch.device("meta"):
        meta = by_torch(sharded_jobs.llama().eval())
    models = {
        "left out in one process": by_torch(made("llama"), name if rank == count - 1 else ""),
        "two meshes": by_torch(made("llama"), name, alone),
        "meta": meta,
    }
    return {
        what: report_of(lambda model=model, what=what: attributor(model, "llama", directory / what).featurize())
        for what, model in models.items()
    }


def plans_job(directory: Path) -> dict[str, str]:
    Processes(True)
    return wrong_plans(directory)


def long_job(directory: Path) -> dict[str, Any]:
    """All models; with four processes, FSDP2 divides the slices of some again and two of them have other rows."""
    Processes(True)
    again = os.environ["WORLD_SIZE"] == "4"
    found: dict[str, Any] = {
        name: compared(divided(name, directory / name / "model"), name, directory / name, True)
        for name in ("llama", "gpt2", "qwen_moe", *(() if again else ("vit", "qwen3")))
    }
    found["torch"] = compared(by_torch(made("llama")), "llama", directory / "torch", True)
    return {
        "models": found,
        "spans": misplaced(),
        "few": [few(directory / f"few-{n}", n) for n in (1, 3)],
        "checkpointed": checkpointed(divided("llama", directory / "ckpt"), "llama", directory / "checkpointed"),
        "refused": refused(directory / "gpt2" / "model"),
    }


def check_same(found: dict[str, Any]) -> None:
    assert found["difference"] <= ROUNDING and found["scores"] <= 1e-4
    assert found["curvature"] <= 1e-4
    # the inverse of a damped curvature multiplies rounding by up to max Λ / (c · mean Λ), about 10³
    assert max(found["exact scores"], found["self-influence"]) <= 1e-3
    assert found["same bits"] and found["same weights"] and found["same definition"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_all_models_under_tensor_parallelism(count: int, tmp_path: Path) -> None:
    for found in launched(tmp_path, "long", count, 900, __file__):
        for name, one in found["models"].items():
            assert name
            check_same(one)
        check_checkpointed(found["checkpointed"])
        assert found["spans"] == [] and max(found["few"]) <= ROUNDING
        assert "GradientEngineError" in found["refused"]["sequence"] and "'model.norm'" in found["refused"]["sequence"]
        assert "GPT2LMHeadModel" in found["refused"]["no plan"] and "tp_plan" in found["refused"]["no plan"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_wrong_plans_are_named_in_all_processes(count: int, tmp_path: Path) -> None:
    for found in launched(tmp_path, "plans", count, 300, __file__):
        module = "'model.layers.1.mlp.down_proj.weight'"
        assert (
            module in found["left out in one process"]
            and f"in process {count - 1}" in found["left out in one process"]
        )
        assert module in found["two meshes"] and "over the processes" in found["two meshes"]
        assert "'model.embed_tokens.weight'" in found["meta"] and "meta device" in found["meta"]


if __name__ == "__main__":
    sharded_jobs.run({"long": long_job, "plans": plans_job}[sys.argv[1]], Path(sys.argv[2]))
