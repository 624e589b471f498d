"""Llama-style models from a configuration: whole in one process, or divided over processes and never whole in any."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

from hf_trak.runtime.processes import Processes
from hf_trak.runtime.sharding import flat_spans
from hf_trak.store.atomic import atomic_directory

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "1b": {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500000.0, "tie_word_embeddings": True,
    },
    "8b": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500000.0, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""The sizes of Llama 3.2 1B and Llama 3.1 8B, and one for tests."""

_RUN = 2**16  # elements that are drawn together, so that a shard draws little more than its own


def config_of(size: str, tokens: int) -> LlamaConfig:
    """Make the configuration of one of [`SIZES`] for sequences of up to `tokens` tokens."""
    return LlamaConfig(**SIZES[size], max_position_embeddings=tokens, use_cache=False)


def sharded_model(config: LlamaConfig, dtype: torch.dtype, device: torch.device, replicas: int) -> nn.Module:
    """Make a model with random weights, whose FSDP2 shard alone each process of the group holds.

    Args:
        config: the configuration.
        dtype: dtype of the weights.
        device: device of this process.
        replicas: groups of processes with a copy of the model each (HSDP); 1 divides it over all of them.

    Raises:
        ValueError: the number of processes is no multiple of `replicas`.
    """
    processes = dist.get_world_size()
    if replicas < 1 or processes % replicas:
        raise ValueError(f"`replicas` is {replicas}, with {processes} processes. Expected a divisor of their number.")
    if replicas == 1:
        mesh = init_device_mesh(device.type, (processes,))
    else:
        names = ("replicate", "shard")
        mesh = init_device_mesh(device.type, (replicas, processes // replicas), mesh_dim_names=names)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype).eval()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    with torch.device(device):  # buffers that are in no checkpoint
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.tie_weights()
    draw_weights(model)
    return model


def tensor_parallel_model(
    config: LlamaConfig, dtype: torch.dtype, processes: Processes, tp: int, directory: Path
) -> nn.Module:
    """Make a model with the same random weights, of whose matrices groups of processes have slices.

    transformers divides a model while it loads it, so the main process writes the random one first, and has it whole
    for that.

    Args:
        config: the configuration.
        dtype: dtype of the weights.
        processes: the processes. Where there are more than `tp`, FSDP2 divides the slices over the groups.
        tp: processes of a group.
        directory: where the model is written, unless it is there; or a checkpoint that `save_pretrained` wrote.

    Raises:
        ValueError: the number of processes is no multiple of `tp`.
    """
    count = processes.num_processes
    if count % tp:
        raise ValueError(f"`tp` is {tp}, with {count} processes. Expected a divisor of their number.")

    def save() -> None:
        if not directory.exists():
            with atomic_directory(directory) as temporary:
                whole_model(config, dtype, torch.device("cpu")).save_pretrained(temporary)

    processes.broadcast_from_main(save)
    divided = DistributedConfig(tp_size=tp, tp_plan="auto", fsdp_size=count // tp)
    return LlamaForCausalLM.from_pretrained(directory, config=config, dtype=dtype, distributed_config=divided).eval()


def whole_model(config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Make a model with the same random weights in one process."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype).eval()
    model.to_empty(device=device)
    with torch.device(device):
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.tie_weights()
    draw_weights(model)
    return model


def draw_weights(model: nn.Module) -> None:
    """Fill the parameters, or this process' shards of them: norms with 1, all others with N(0, 0.02²).

    An element depends on its parameter and its place alone, so that the weights are the same for any number of
    processes, and a run is resumed with another one.
    """
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            for start, values in flat_spans(parameter):
                if "norm" in name:
                    values.fill_(1.0)
                    continue
                for run in range(start // _RUN, -(-(start + values.numel()) // _RUN)):
                    generator = torch.Generator().manual_seed((number << 32) + run)
                    drawn = torch.randn(_RUN, generator=generator).mul_(0.02)
                    first, last = max(start, run * _RUN), min(start + values.numel(), (run + 1) * _RUN)
                    values[first - start : last - start] = drawn[first - run * _RUN : last - run * _RUN].to(values)
