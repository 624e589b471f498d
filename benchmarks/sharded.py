"""Memory and time per process of featurizing a model that FSDP2 divides over processes, of fitting a curvature, or of
exact scores under a curvature that other processes have fitted before.

    python benchmarks/sharded.py
    python benchmarks/sharded.py --curvature --layers 6 --width 256
    python benchmarks/sharded.py --exact --layers 6 --width 256

The model is GPT-2's architecture with random weights, initialized on the meta device, so that no process ever holds
all of it. Peaks are those of resident memory above what the process had before the model was made; `parameters` is
what the shards take. One process alone has the whole model, and is the row to compare with.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

ROWS, TOKENS, TARGETS = 4, 64, 8


def config_of(layers: int, width: int) -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        n_layer=layers, n_embd=width, n_head=width // 64, vocab_size=4096, n_positions=TOKENS, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip


def model_of(layers: int, width: int, processes: int) -> nn.Module:
    """Make the model. Each process gets its shard alone."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(config_of(layers, width)).eval()
    if processes > 1:
        mesh = init_device_mesh("cpu", (processes,))
        for block in model.transformer.h:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    model.tie_weights()
    for number, parameter in enumerate(model.parameters()):
        local: Any = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        generator = torch.Generator().manual_seed(number * 1000 + int(os.environ.get("RANK", "0")))
        nn.init.normal_(local, std=0.02, generator=generator)
    return model


def high_water() -> int:
    """Highest resident memory of this process so far, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def measure(layers: int, width: int, directory: Path, what: str) -> dict[str, Any]:
    """What one process takes to compute features, to fit EK-FAC to all rows, or to compute exact scores under it."""
    from datasets import Dataset

    from hf_trak import TrakAttributor, TrakConfig
    from hf_trak.runtime.processes import Processes

    torch.set_num_threads(1)
    processes = Processes(True)
    before = psutil.Process().memory_info().rss
    model = model_of(layers, width, processes.num_processes)
    local = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    loaded = high_water() - before
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 4096, (ROWS * processes.num_processes, TOKENS), generator=generator).tolist()
    config = TrakConfig(
        output_dir=str(directory / "store"), per_device_batch_size=2, shard_size=ROWS, use_cpu=True,
    )  # fmt: skip
    attributor = TrakAttributor(model, config, train_dataset=Dataset.from_dict({"input_ids": ids, "labels": ids}))
    targets = torch.randint(0, 4096, (TARGETS, TOKENS), generator=generator).tolist()
    start = time.perf_counter()
    if what == "exact":
        attributor.attribute(Dataset.from_dict({"input_ids": targets, "labels": targets}), top_k=None, method="exact")
    elif what == "curvature":
        attributor.fit_curvature()
    else:
        attributor.featurize()
    return {
        "parameters": sum(p.numel() * p.element_size() for p in local),
        "after loading": loaded,
        "peak": high_water() - before,
        "seconds per row": (time.perf_counter() - start) / ROWS,
    }


def launched(count: int, options: list[str], passes: list[str]) -> list[dict[str, Any]]:
    """What each of `count` processes found in the last of some passes, which processes of their own make."""
    with tempfile.TemporaryDirectory() as directory:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)] if count > 1 else []
        command = [sys.executable, *launch, __file__, *options, "--out", directory]
        commands = [[*command, "--pass", one] for one in passes]
        # without the threshold glibc keeps freed tensors, and resident memory does not show what is in use
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
        for command in commands:
            subprocess.run(command, check=True, env=environment)
        return [json.loads(path.read_text()) for path in sorted(Path(directory).glob("rank-*.json"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--curvature", action="store_true", help="fit EK-FAC instead of computing features")
    parser.add_argument("--exact", action="store_true", help="exact scores of some targets instead of features")
    parser.add_argument("--out", help=argparse.SUPPRESS)
    parser.add_argument("--pass", dest="one_pass", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.out:
        found = measure(args.layers, args.width, Path(args.out), args.one_pass)
        (Path(args.out) / f"rank-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        return
    options = ["--layers", str(args.layers), "--width", str(args.width)]
    passes = ["curvature", "exact"] if args.exact else ["curvature"] if args.curvature else ["features"]
    print("| processes | parameters, MB | after loading, MB | peak, MB | seconds per row |\n|---|---|---|---|---|")
    for count in args.processes:
        ranks = launched(count, options, passes)
        worst = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
        sizes = " | ".join(f"{worst[key] / 1e6:.0f}" for key in ("parameters", "after loading", "peak"))
        print(f"| {count} | {sizes} | {worst['seconds per row']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
