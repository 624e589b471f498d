"""Runs of sharded models, each process of a group calls `run`: features, scores and errors as JSON."""

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from store_jobs import start_group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trak_options import trak_config
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_trak import TrakAttributor
from hf_trak.featurize.exact import ExactScores

VOCABULARY = 40
# Two models have two layers, which are gathered one after the other; of the others the kinds of layers matter.


def gpt2() -> nn.Module:
    config = GPT2Config(
        n_embd=16, n_head=2, n_layer=2, vocab_size=VOCABULARY, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, max_position_embeddings=32, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def qwen_moe() -> nn.Module:
    config = Qwen2MoeConfig(
        hidden_size=16, intermediate_size=24, moe_intermediate_size=8, shared_expert_intermediate_size=8,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, num_experts=4, num_experts_per_tok=1,
        vocab_size=VOCABULARY, max_position_embeddings=32, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return Qwen2MoeForCausalLM(config)


def qwen3() -> nn.Module:
    config = Qwen3Config(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=VOCABULARY, max_position_embeddings=32, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def vit() -> nn.Module:
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4,
        num_channels=1, num_labels=3,
    )  # fmt: skip
    return ViTForImageClassification(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2, "llama": llama, "qwen_moe": qwen_moe, "qwen3": qwen3, "vit": vit,
}  # fmt: skip

_VIT = "vit.layers.*."
PLANS: dict[str, Any] = {
    "gpt2": {"transformer.wte": "embedding_rowwise", "lm_head": "colwise_gather_output"},
    "vit": {
        **{f"{_VIT}attention.{one}_proj": "colwise" for one in "qkv"},
        f"{_VIT}attention.o_proj": "rowwise", f"{_VIT}mlp.fc1": "colwise", f"{_VIT}mlp.fc2": "rowwise",
    },
}  # fmt: skip
"""Plans of tensor parallelism for models for which transformers has none."""


def made(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]().eval()


def rows(name: str, n: int = 7, seed: int = 1) -> Dataset:
    """Rows of one length, or of two."""
    generator = torch.Generator().manual_seed(seed)
    if name == "vit":
        pixels = torch.randn(n, 1, 8, 8, generator=generator)
        return Dataset.from_dict({"pixel_values": pixels.tolist(), "labels": [i % 3 for i in range(n)]})
    ids = [torch.randint(1, VOCABULARY, (6,), generator=generator).tolist() for _ in range(n)]
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def blocks(model: nn.Module) -> list[nn.Module]:
    """The layers that FSDP2 gathers one at a time."""
    found = [m for m in model.modules() if type(m).__name__ in ("GPT2Block", "ViTLayer")]
    return found + [m for m in model.modules() if type(m).__name__.endswith("DecoderLayer")]


def sharded(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    for block in blocks(model):
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def attributor(model: nn.Module, name: str, directory: Path, **options: Any) -> TrakAttributor:
    settings: dict[str, Any] = {
        "proj_dim": 32, "shard_size": 2, "per_device_batch_size": 2, "feature_dtype": "float32", "use_cpu": True,
        "curvature_rows": 6,
    }  # fmt: skip
    config = trak_config(output_dir=str(directory), **{**settings, **options})
    return TrakAttributor(model, config, train_dataset=rows(name))


def features(one: TrakAttributor, model_id: int = 0) -> torch.Tensor:
    return torch.cat([shard.grads for shard in one.features.store.train(model_id)])


def difference(given: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error of a row, relative to its norm."""
    return float(((given - expected).norm(dim=1) / expected.norm(dim=1)).max())


def run(job: Callable[[Path], Any], directory: Path) -> None:
    """Call a job in this process, and write what it returned; the group is given up at the end."""
    torch.set_num_threads(1)
    disable_progress_bars()
    rank = os.environ.get("RANK", "alone")
    try:
        result = {"value": job(directory)}
    except Exception as error:  # compared by tests
        result = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        print(result["traceback"], file=sys.stderr, flush=True)
    (directory / f"rank-{rank}.json").write_text(json.dumps(result))
    if torch.distributed.is_initialized() and "value" in result:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def in_group(directory: Path, job: Callable[[Path], Any]) -> list[Any]:
    """What both of two processes found that are forked: launched ones would import everything again."""
    group = start_group(directory, 2, run, job, directory, timeout=120)
    for one in group:
        one.wait(300)
    found = [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert all("value" in one for one in found), found
    return [one["value"] for one in found]


def tensor_parallel(name: str, directory: Path, fsdp_size: int) -> nn.Module:
    """The model of `made`, divided in two by the plan that transformers or `PLANS` has for it, and by FSDP2."""
    from transformers.distributed import DistributedConfig

    from hf_trak.runtime.processes import Processes

    def save() -> None:
        made(name).save_pretrained(directory)

    Processes(True).broadcast_from_main(save)
    config = DistributedConfig(tp_size=2, tp_plan=PLANS.get(name, "auto"), fsdp_size=fsdp_size)
    return type(made(name)).from_pretrained(directory, distributed_config=config).eval()


def compared(model: nn.Module, name: str, directory: Path, exact: bool = False) -> dict[str, Any]:
    """Features and scores of a divided model, computed twice, and of a whole one; also exact ones under EK-FAC."""
    ones = [attributor(model, name, directory / str(again)).featurize() for again in range(2)]
    one, whole = ones[0], attributor(made(name), name, directory / "whole").featurize()
    configs = [dict(a.features.store.config, model_name=None) for a in (one, whole)]

    def change(scores: Callable[[TrakAttributor], torch.Tensor]) -> float:
        expected = scores(whole)
        return float((scores(one) - expected).norm() / expected.norm())

    def attributed(options: dict[str, Any]) -> float:
        return change(lambda a: torch.tensor(a.attribute(rows(name, 3, 2), top_k=None, **options)["trak_scores"]))

    return {
        "difference": difference(features(one), features(whole)),
        "same bits": bool(torch.equal(features(one), features(ones[1]))),
        "same weights": whole.features.store.checkpoint_info(0)["fingerprint"]
        == one.features.store.checkpoint_info(0)["fingerprint"],
        "same definition": configs[0] == configs[1],
        "scores": attributed({}),
        "exact scores": attributed({"method": "exact"}) if exact else 0.0,
        "self-influence": change(lambda a: a.self_influence(method="exact")) if exact else 0.0,
        "curvature": change(eigenvalues) if exact else 0.0,
    }


def checkpointed(model: nn.Module, name: str, directory: Path) -> dict[str, Any]:
    """Features of a divided model whose blocks run again in the backward pass, and how often they do."""
    runs = {False: 0, True: 0}
    found = {}
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()  # type: ignore[operator]

        def count(*_: Any, checkpointing: bool = checkpointing) -> None:
            runs[checkpointing] += 1

        block = next(module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
        inner = next(module for module in block.modules() if not list(module.children()))
        handle = inner.register_forward_hook(count)
        found[checkpointing] = features(attributor(model, name, directory / str(checkpointing)).featurize())
        handle.remove()
    return {"same bits": bool(torch.equal(found[False], found[True])), "more runs": runs[True] - runs[False]}


def check_checkpointed(found: dict[str, Any]) -> None:
    assert found["same bits"] and found["more runs"] > 0


def eigenvalues(one: TrakAttributor) -> torch.Tensor:
    """All of the curvature's blocks, each divided by their norm."""
    values = [value.flatten() for _, value in ExactScores(one.fit_curvature().features).fitted(0).items()]
    return torch.cat([value / value.norm().clamp_min(1e-30) for value in values])


def few(directory: Path, n: int) -> float:
    """Rows of one repeated token each, so that most experts get none, alone in their batches, of other lengths."""
    ids = [[5 + 7 * i] * (3 + i) for i in range(n)]
    found = []
    for where, model in (("whole", made("qwen_moe")), ("divided", divided("qwen_moe", directory / "model"))):
        one = attributor(model, "qwen_moe", directory / where, per_device_batch_size=1)
        built = TrakAttributor(model, one.args, train_dataset=Dataset.from_dict({"input_ids": ids, "labels": ids}))
        found.append(features(built.featurize()))
    return difference(found[1], found[0])


def divided(name: str, directory: Path) -> nn.Module:
    return tensor_parallel(name, directory, int(os.environ["WORLD_SIZE"]) // 2)


def mesh_of_all(kind: str = "fsdp") -> Any:
    count = int(os.environ["WORLD_SIZE"])
    if kind == "hsdp":
        return init_device_mesh("cpu", (2, count // 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (count,), mesh_dim_names=("shard",))
