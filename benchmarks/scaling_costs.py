"""What featurizing a Llama takes, by formulas that are checked on small models in the same run.

    python benchmarks/scaling_costs.py

The first table has predictions beside measurements: parameters, floating-point operations (counted by torch), bytes
that FSDP2 gathers (counted where two processes call for them), peak memory (resident, in a process of its own), and
bytes of an index. The second has the same formulas for 8 and 70 billion parameters. Nothing of it is a time: divide
operations by what your devices do per second, with `seconds`.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

HERE = Path(__file__).parent
SLICE_BYTES = 3 * 4 * 2**22
"""Temporary tensors of the margins, see `hf_trak/modelout_functions/sliced_margins.py`."""


@dataclass(frozen=True)
class Llama:
    """Sizes of a Llama, and the bytes of one of its numbers."""

    vocabulary: int
    width: int
    inner: int
    layers: int
    heads: int
    groups: int
    tied: bool
    itemsize: int = 2

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def layer_matrices(self) -> int:
        """Elements of the matrices of one layer: queries and output, keys and values, three of the MLP."""
        return self.width * (2 * self.width + 2 * self.groups * self.head_width + 3 * self.inner)

    @property
    def layer(self) -> int:
        return self.layer_matrices + 2 * self.width

    @property
    def outside(self) -> int:
        """Parameters outside of the layers: the embedding, the head, a norm."""
        return self.vocabulary * self.width * (1 if self.tied else 2) + self.width

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.outside


SHAPES = {
    "8B": Llama(128256, 4096, 14336, 32, 32, 8, False),
    "70B": Llama(128256, 8192, 28672, 80, 64, 8, False),
}


def operations(shape: Llama, tokens: int) -> int:
    """Count the floating-point operations of one row.

    Every matrix of I × O elements takes 2 · I · O per token three times: forward, for the gradient of its input, and
    for its own per-sample gradient. Attention takes two products of T × T × width forward and four backward. This is
    what a training step takes; a projection by `sjlt` adds one addition per parameter and row.
    """
    matrices = shape.layers * shape.layer_matrices + shape.vocabulary * shape.width
    return 6 * tokens * matrices + 12 * shape.layers * tokens**2 * shape.width


def gathered(shape: Llama, processes: int) -> int:
    """Count the bytes that a process receives in one pass over a batch under FSDP2.

    Layers are gathered for the forward and again for the backward pass, what is outside of them once.
    """
    whole = (2 * shape.layers * shape.layer + shape.outside) * shape.itemsize
    return whole * (processes - 1) // processes


def logits_memory(shape: Llama, rows: int, tokens: int, budget: int) -> int:
    """Bytes at the head: logits and their gradient, blocks of per-sample gradients, slices of margins.

    A block in half precision is converted for the projection, so that it is there three times.
    """
    blocks = 1 if shape.itemsize == 4 else 3
    return 2 * rows * tokens * shape.vocabulary * shape.itemsize + blocks * budget + SLICE_BYTES


def kept_activations(shape: Llama, rows: int, tokens: int) -> int:
    """Bytes of activations under activation checkpointing: the input of every layer."""
    return shape.layers * rows * tokens * shape.width * shape.itemsize


def rank_memory(shape: Llama, processes: int, rows: int, tokens: int, budget: int) -> dict[str, int]:
    """Bytes of one process under FSDP2 with activation checkpointing, by what takes them."""
    return {
        "shards": shape.parameters * shape.itemsize // processes,
        "gathered": (shape.outside + 2 * shape.layer) * shape.itemsize,  # one layer in use, the next one on its way
        "layer inputs": kept_activations(shape, rows, tokens),
        "head": logits_memory(shape, rows, tokens, budget),
    }


def index_bytes(rows: int, columns: int = 4096, bits: int = 4) -> int:
    """Bytes of the features of some rows: codes, their scale and q in float32. Headers of shards come on top."""
    return rows * (columns * bits // 8 + 4 + 4)


def seconds(count: float, per_second: float, devices: int = 1, share: float = 1.0) -> float:
    """Divide operations by the share of the peak of `devices` that a program reaches."""
    return count / (per_second * devices * share)


# -- measurements -----------------------------------------------------------------------------------------------------


def built(shape: Llama) -> nn.Module:
    """Make the model with random weights. Eager attention, whose operations torch can count."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.width, intermediate_size=shape.inner,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.groups,
        tie_word_embeddings=shape.tied, use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def batch_of(shape: Llama, rows: int, tokens: int) -> dict[str, Any]:
    ids = torch.randint(0, shape.vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def counted_operations(shape: Llama, rows: int, tokens: int) -> float:
    """Operations per row that torch counts, in the second batch: in the first one, a sample is traced."""
    from torch.utils.flop_counter import FlopCounterMode

    from hf_trak.gradient_computers.hooked.computer import HookedGradientComputer
    from hf_trak.modelout_functions import CausalLMModelOutput

    computer = HookedGradientComputer(built(shape), CausalLMModelOutput(), dtype=None, device="cpu")
    batch = batch_of(shape, rows, tokens)
    computer.stream(batch, lambda start, block: None)
    with FlopCounterMode(display=False) as counter:
        computer.stream(batch, lambda start, block: None)
    return counter.get_total_flops() / rows


def counted_index(shape: Llama, rows: int) -> int:
    """Bytes of the shards that featurizing some rows leaves on disk."""
    from datasets import Dataset

    from hf_trak import TrakAttributor, TrakConfig

    ids = batch_of(shape, rows, 4)["input_ids"].tolist()
    with tempfile.TemporaryDirectory(prefix="hf_trak-scaling-") as directory:
        config = TrakConfig(output_dir=directory, shard_size=rows, use_cpu=True)
        data = Dataset.from_dict({"input_ids": ids, "labels": ids})
        TrakAttributor(built(shape), config, train_dataset=data, task="causal_lm").featurize()
        return sum(path.stat().st_size for path in Path(directory).glob("checkpoint-*/train-*"))


class GatheredBytes(TorchDispatchMode):
    """Adds up what this process receives when tensors are gathered from all processes."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.c10d._allgather_base_:
            output, given = args[:2]
            self.total += (output.numel() - given.numel()) * output.element_size()
        return func(*args, **(kwargs or {}))


def counted_gathering(shape: Llama) -> dict[str, int]:
    """Bytes that each of this group's processes receives in one pass, and those of its shards."""
    from torch.distributed.fsdp import fully_shard

    from hf_trak.gradient_computers.sharded import ShardedGradientComputer
    from hf_trak.modelout_functions import CausalLMModelOutput
    from hf_trak.runtime.lockstep import Lockstep
    from hf_trak.runtime.processes import Processes

    processes = Processes(True)
    model: Any = built(shape)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    lockstep = Lockstep(processes)
    computer = ShardedGradientComputer(model, CausalLMModelOutput(), lockstep, device="cpu", self_check=False)
    batch = batch_of(shape, 2, 8)
    counter = GatheredBytes()
    with lockstep.region(lambda words: computer.accompany(words, lambda: batch, "train")):
        computer.stream(batch, lambda start, block: None)
        with counter:
            computer.stream(batch, lambda start, block: None)
    shards: list[Any] = list(model.parameters())
    return {"received": counter.total, "shards": sum(p.to_local().numel() * p.element_size() for p in shards)}


def in_two_processes(shape: Llama) -> dict[str, int]:
    with tempfile.TemporaryDirectory(prefix="hf_trak-scaling-") as directory:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        given = json.dumps(vars(shape))
        done = subprocess.run(
            [*command, "--child", directory, "--shape", given], env=environment, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise RuntimeError(f"The run with two processes failed:\n{done.stderr}")
        return json.loads(Path(directory, "counted.json").read_text())


def measured_peak(shape: Llama, rows: int, tokens: int, budget: int) -> int:
    """Peak memory above the model with whole logits, as sharded models have them, see `large_lm.py`."""
    case = {
        "vocabulary": shape.vocabulary, "width": shape.width, "tokens": tokens, "rows": rows, "tied": shape.tied,
        "layers": shape.layers, "dtype": "float32", "budget": budget, "threads": 1,
        "deferred": False,
    }  # fmt: skip
    return int(large_lm().measured("vocabulary", case)["peak"])


def large_lm() -> ModuleType:
    spec = importlib.util.spec_from_file_location("large_lm", HERE / "large_lm.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def comparisons(shape: Llama, tokens: int, memory: bool, processes: bool) -> list[tuple[str, float, float]]:
    """Pairs of predicted and measured numbers, with what they are."""
    model = built(shape)
    found: list[tuple[str, float, float]] = [
        ("parameters", shape.parameters, sum(parameter.numel() for parameter in model.parameters())),
        (f"operations per row of {tokens} tokens", operations(shape, tokens), counted_operations(shape, 2, tokens)),
        ("bytes of the index of 500 rows", index_bytes(500), counted_index(replace(shape, vocabulary=64), 500)),
    ]
    if processes:
        counted = in_two_processes(shape)
        found += [
            ("bytes of the shards of one of two processes", shape.parameters * shape.itemsize / 2, counted["shards"]),
            ("bytes that it receives per pass", gathered(shape, 2), counted["received"]),
        ]
    if memory:
        large = Llama(65536, 256, 512, 1, 4, 4, True, 4)
        predicted = logits_memory(large, 2, 512, 2**25)
        found.append(("peak bytes at a vocabulary of 65,536", predicted, measured_peak(large, 2, 512, 2**25)))
    return found


def table(rows: int, tokens: int, processes: int, budget: int) -> str:
    """The formulas for the large models, as a table in Markdown."""
    shapes = SHAPES.values()
    memories = [rank_memory(shape, processes, rows, tokens, budget) for shape in shapes]
    lines: list[tuple[str, list[str]]] = [
        ("parameters", [f"{shape.parameters:,}" for shape in shapes]),
        ("weights in bfloat16, GB", [f"{shape.parameters * 2 / 1e9:,.1f}" for shape in shapes]),
        (f"operations per row of {tokens:,} tokens", [f"{operations(shape, tokens):.3g}" for shape in shapes]),
        (f"received per process and pass, {processes} processes, GB",
         [f"{gathered(shape, processes) / 1e9:,.1f}" for shape in shapes]),
        *((f"memory of a process: {key}, GB", [f"{memory[key] / 1e9:,.2f}" for memory in memories])
          for key in memories[0]),
        ("together, GB", [f"{sum(memory.values()) / 1e9:,.1f}" for memory in memories]),
        ("index of a million rows, GB", [f"{index_bytes(10**6) / 1e9:,.2f}" for _ in shapes]),
    ]  # fmt: skip
    head = f"| batches of {rows} × {tokens:,} tokens | {' | '.join(SHAPES)} |\n|---|" + "---|" * len(SHAPES)
    return "\n".join([head, *(f"| {name} | {' | '.join(values)} |" for name, values in lines)])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4, help="rows of a batch in the second table")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--budget", type=int, default=2**28, help="max_block_bytes; 256 MiB on GPUs by default")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--shape", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if args.child:
        counted = counted_gathering(Llama(**json.loads(args.shape)))
        if os.environ["RANK"] == "0":
            (args.child / "counted.json").write_text(json.dumps(counted))
        torch.distributed.destroy_process_group()
        return
    shape = Llama(512, 64, 160, 3, 4, 2, False, 4)
    print("| | predicted | measured | measured ÷ predicted |\n|---|---|---|---|")
    for name, predicted, measured in comparisons(shape, 48, True, True):
        print(f"| {name} | {predicted:,.0f} | {measured:,.0f} | {measured / predicted:.4f} |", flush=True)
    print("\n" + table(args.rows, args.tokens, args.processes, args.budget))


if __name__ == "__main__":
    main()
