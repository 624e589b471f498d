"""Memory and time of featurizing language models with large vocabularies, long sequences, or a billion parameters.

    python benchmarks/large_lm.py --cases vocabulary small long
    python benchmarks/large_lm.py --cases 1b

Models are Llamas from a configuration with random weights. Every figure is taken in a process of its own: the highest
resident memory above what the process had once the model was made. `vocabulary`, `small`, `preferences` and `long`
time the gradients and their projection (k = 4096) of one batch, the trace of one sample included; `deferred` tells
whether logits are never formed. Rows of `preferences` are pairs of the task `dpo`, with a prompt of half their length.
`packed` is a sequence of 16,369 tokens that `DataCollatorWithFlattening` makes of 32 documents, which are cut apart.
`1b` calls `TrakAttributor.featurize` on one batch, the check of the first batch included, and prints what `estimate`
says. Seconds of the processor do not count what other programs take of it.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

K = 4096
BUDGET = 2**25

VOCABULARY: list[dict[str, Any]] = [
    {"vocabulary": 262144, "width": width, "tokens": tokens, "rows": 2, "dtype": dtype, "deferred": deferred}
    for width, dtype in ((512, "float32"), (2048, "bfloat16"))
    for tokens in (512, 2048)
    for deferred in (False, True)
]
SMALL: list[dict[str, Any]] = [
    {"vocabulary": vocabulary, "width": 256, "tokens": 256, "rows": 4, "deferred": deferred}
    for vocabulary in (4096, 32768)
    for deferred in (False, True)
]
PREFERENCES: list[dict[str, Any]] = [
    {"vocabulary": 262144, "width": 512, "tokens": 256, "rows": 2, "sequences": 2, "deferred": deferred}
    for deferred in (False, True)
]
LONG: list[dict[str, Any]] = [
    {"vocabulary": 1024, "width": 128, "tokens": tokens, "rows": rows, "layers": 4, "checkpointing": checkpointing}
    for tokens, rows in ((2048, 2), (8192, 2), (32768, 1), (65536, 1), (131072, 1))
    for checkpointing in (False, True)
]
PACKED: list[dict[str, Any]] = [
    {**LONG[0], "tokens": 768, "rows": 32, "flat": True, "checkpointing": checkpointing}
    for checkpointing in (False, True)
]
BILLION: list[dict[str, Any]] = [{"size": "1b", "tokens": 64, "rows": 2, "dtype": "bfloat16", "layers": 16}]
CASES = {
    "vocabulary": VOCABULARY,
    "small": SMALL,
    "preferences": PREFERENCES,
    "long": LONG,
    "packed": PACKED,
    "1b": BILLION,
}


def llama(case: dict[str, Any]) -> nn.Module:
    """Make a Llama with random weights, in its dtype from the start."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if case.get("size") == "1b":  # the sizes of Llama 3.2 1B: 1,235,814,400 parameters
        sizes: dict[str, Any] = {
            "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
            "num_key_value_heads": 8, "tie_word_embeddings": True,
        }  # fmt: skip
    else:
        heads = max(1, case["width"] // 64)
        sizes = {
            "vocab_size": case["vocabulary"], "hidden_size": case["width"], "intermediate_size": 2 * case["width"],
            "num_attention_heads": heads, "num_key_value_heads": heads, "tie_word_embeddings": case.get("tied", True),
        }  # fmt: skip
    config = LlamaConfig(**sizes, num_hidden_layers=case.get("layers", 1), max_position_embeddings=case["tokens"])
    dtype = getattr(torch, case.get("dtype", "float32"))
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    if case.get("checkpointing"):
        model.gradient_checkpointing_enable()
    return model


def memory(key: str) -> int:
    """Bytes of resident memory: now (`VmRSS`), or the highest since `peak_starts` (`VmHWM`)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def peak_starts() -> int:
    """Forget earlier peaks. Returns the resident memory now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def token_ids(vocabulary: int, case: dict[str, Any]) -> Tensor:
    shape = (case["rows"] * case.get("sequences", 1), case["tokens"])
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(0))


def flattened(ids: Tensor) -> dict[str, Tensor]:
    """Lay documents of a third to all of the tokens of a row end to end, and cut them apart as the featurizer does."""
    from transformers import DataCollatorWithFlattening

    from hf_trak.data.language import cut_at_rows

    count, longest = ids.shape
    lengths = [longest // 3 + row * (longest - longest // 3) // (count - 1) for row in range(count)]
    rows = [{"input_ids": row[:length].tolist()} for row, length in zip(ids, lengths, strict=True)]
    return cut_at_rows(DataCollatorWithFlattening()(rows), rows)


def batch_and_task(case: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """Make a batch of rows whose every token is predicted, or of pairs that share a prompt."""
    from hf_trak.modelout_functions import CausalLMModelOutput
    from hf_trak.modelout_functions.dpo import DPOModelOutput

    ids = token_ids(case["vocabulary"], case)
    if case.get("flat"):
        return flattened(ids), CausalLMModelOutput()
    if case.get("sequences", 1) == 1:
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}, CausalLMModelOutput()
    ids = ids.view(case["rows"], 2, -1)
    prompt = case["tokens"] // 2
    ids[:, 1, :prompt] = ids[:, 0, :prompt]
    completion = torch.zeros_like(ids)
    completion[..., prompt:] = 1
    references = {
        f"ref_{answer}_logps": torch.full((case["rows"],), -12.0 * prompt) for answer in ("chosen", "rejected")
    }
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": completion}
    return {**batch, **references}, DPOModelOutput()


def featurize_batch(case: dict[str, Any]) -> dict[str, Any]:
    """Project the gradients of one batch, without check and store."""
    from hf_trak.gradient_computers.hooked.computer import HookedGradientComputer
    from hf_trak.modelout_functions import deferred_logits
    from hf_trak.projectors.dense import SparseProjector

    if "deferred" in case:  # otherwise as the engine chooses
        deferred_logits.DEFERRED_FROM = 0 if case["deferred"] else 2**60
    model = llama(case)
    batch, task = batch_and_task(case)
    task.bind(model)
    computer = HookedGradientComputer(
        model, task, dtype=None, device="cpu", max_block_bytes=case.get("budget", BUDGET)
    )
    sink = SparseProjector(computer.layout.total, K).sink(case["rows"], 0, "cpu")
    before, start, used = peak_starts(), time.perf_counter(), time.process_time()
    computer.stream(batch, sink)
    features = sink.result()
    itemsize = next(model.parameters()).element_size()
    return {
        "weights": sum(p.numel() for p in model.parameters()) * itemsize,
        "logits": batch["input_ids"].numel() * case["vocabulary"] * itemsize,
        "peak": memory("VmHWM") - before,
        "seconds": time.perf_counter() - start,
        "processor seconds": time.process_time() - used,
        "features": features[:, :16].tolist(),
    }


def featurize_billion(case: dict[str, Any]) -> dict[str, Any]:
    """Featurize one batch with `TrakAttributor`, and ask `estimate` what it takes."""
    from datasets import Dataset

    from hf_trak import TrakAttributor, TrakConfig

    model = llama(case)
    ids = token_ids(model.config.vocab_size, case).tolist()
    rows = Dataset.from_dict({"input_ids": ids, "labels": ids})
    with tempfile.TemporaryDirectory(prefix="hf_trak-large-") as directory:
        config = TrakConfig(
            output_dir=directory, per_device_batch_size=case["rows"], shard_size=case["rows"], use_cpu=True,
        )  # fmt: skip
        attributor = TrakAttributor(model, config, train_dataset=rows, task="causal_lm")
        estimate = attributor.estimate()
        before, start = peak_starts(), time.perf_counter()
        attributor.featurize()
        seconds, peak = time.perf_counter() - start, memory("VmHWM") - before
        stored = sum(path.stat().st_size for path in Path(directory).glob("checkpoint-*/train-*"))
    return {
        "weights": sum(p.numel() * p.element_size() for p in model.parameters()),
        "parameters": sum(p.numel() for p in model.parameters()),
        "logits": case["rows"] * case["tokens"] * model.config.vocab_size * next(model.parameters()).element_size(),
        "peak": peak,
        "seconds": seconds,
        "stored": stored,
        "estimated parameters": estimate.parameters,
        "estimated feature_bytes": estimate.stages["features"].disk,
        "estimated featurize_memory": estimate.stages["features"].memory,
    }


def measured(name: str, case: dict[str, Any]) -> dict[str, Any]:
    """Measure a case in a process of its own."""
    # without the threshold glibc keeps freed tensors, and resident memory does not show what is in use
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, __file__, "--child", json.dumps([name, case])]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def row_of(case: dict[str, Any], found: dict[str, Any]) -> str:
    described = ", ".join(f"{key} {value}" for key, value in case.items())
    sizes = " | ".join(f"{found[key] / 1e6:,.0f}" for key in ("weights", "logits", "peak"))
    return f"| {described} | {sizes} | {found['seconds']:.1f} | {found.get('processor seconds', 0.0):.1f} |"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=["vocabulary", "long"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, help="layers of the model of `1b`, 16 by default")
    parser.add_argument("--tokens", type=int, nargs="+", help="lengths of `long` and `vocabulary`, all by default")
    parser.add_argument("--widths", type=int, nargs="+", help="widths of `vocabulary`, 512 and 2048 by default")
    parser.add_argument("--repeats", type=int, default=1, help="measure cases in turn so often, and take medians")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.child:
        name, case = json.loads(args.child)
        torch.set_num_threads(case.pop("threads"))
        print(json.dumps((featurize_billion if name == "1b" else featurize_batch)(case)))
        return
    if args.layers:
        BILLION[0]["layers"] = args.layers
    for name in args.cases:
        print("\n| case | weights, MB | logits, MB | peak above the model, MB | seconds | of the processor |")
        print("|---|---|---|---|---|---|")
        cases = [case for case in CASES[name] if wanted(name, case, args)]
        found = [measured(name, {**case, "threads": args.threads}) for _ in range(args.repeats) for case in cases]
        for index, case in enumerate(cases):
            runs = found[index :: len(cases)]
            middle = {key: statistics.median(run[key] for run in runs) for key in runs[0] if key != "features"}
            print(row_of(case, middle), flush=True)
            if name == "1b":
                print(
                    "\n".join(f"{key}: {value:,}" for key, value in middle.items() if key not in ("peak", "seconds"))
                )


def wanted(name: str, case: dict[str, Any], args: argparse.Namespace) -> bool:
    """Tell whether the arguments leave a case in."""
    chosen = args.tokens if name in ("vocabulary", "long") else None
    widths = args.widths if name == "vocabulary" else None
    return (not chosen or case["tokens"] in chosen) and (not widths or case["width"] in widths)


if __name__ == "__main__":
    main()
