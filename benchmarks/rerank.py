"""Shortlist and rerank: the time of an answer for 10 targets, by the number of training rows.

    python benchmarks/rerank.py --dir /path/with/1/GB --rows 10000 100000 1000000

The model is a small GPT-2 with random weights, and its training rows are random tokens, by their numbers.
The index is synthetic, too: random int8 codes, since what is measured is time. Its Gram matrix and the curvature are
made beforehand, as `featurize` and `fit_curvature` make them once. All files are written to a temporary directory and
deleted afterwards. Printed are, for each number of rows, the bytes of the index, the seconds of the index' own answer
and of the reranked one, the rows whose gradients were computed for it, and what exact scores of all rows would take at
the same rate.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import Dataset as TorchDataset
from transformers import GPT2Config, GPT2LMHeadModel

from hf_trak import CurvatureConfig, Rerank, TrakAttributor, TrakConfig
from hf_trak.attributor import last_result
from hf_trak.store.shards import write_tensors

TOKENS = 64
VOCABULARY = 1000


class Texts(TorchDataset):
    """Rows of random tokens."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.fingerprint = f"random tokens, {rows} rows"

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        tokens = torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(row)).tolist()
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000], help="n, training rows")
    parser.add_argument("--rerank", type=int, default=100, help="rows on the shortlist, for each target and end")
    parser.add_argument("--targets", type=int, default=10)
    parser.add_argument("--proj-dim", type=int, default=512, help="k, bytes of a row of the index")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dir")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = tiny_model()
    print(f"{sum(value.numel() for value in model.parameters()):,} parameters, {TOKENS} tokens per row, "
          f"{args.targets} targets, rerank={args.rerank}, {args.threads} threads")  # fmt: skip
    print(
        "| rows | index | index' answer | reranked answer | rows reranked | exact scores of all rows | peak memory |"
    )
    print("|---|---|---|---|---|---|---|")
    for rows in args.rows:
        with tempfile.TemporaryDirectory(dir=args.dir) as directory:
            print(measured(Path(directory), model, rows, args), flush=True)


def tiny_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=96, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config).eval()


def measured(directory: Path, model: GPT2LMHeadModel, rows: int, args: argparse.Namespace) -> str:
    """Make an index, ask it twice, and describe the answers as a row of a table."""
    config = TrakConfig(
        output_dir=str(directory), proj_dim=args.proj_dim, feature_dtype="int8", shard_size=512, solver="primal",
        curvature=CurvatureConfig(rows=256), per_device_batch_size=16, use_cpu=True,
    )  # fmt: skip
    attributor = TrakAttributor(model, config, train_dataset=Texts(rows), task="causal_lm")
    write_index(attributor)
    attributor.fit_curvature()
    targets = Dataset.from_list([Texts(rows)[rows + number] for number in range(args.targets)])
    index_seconds = timed(attributor, targets, {"method": "index"})
    seconds = timed(attributor, targets, {"method": Rerank(args.rerank)})
    reranked = len(last_result(attributor).answer.rows)
    again = timed(attributor, targets, {"method": Rerank(args.rerank)})  # all gradients are there
    projected = rows * (seconds - again) / reranked
    size = sum(path.stat().st_size for path in directory.glob("checkpoint-0/train-*"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return (
        f"| {rows:,} | {size / 2**20:,.0f} MiB | {index_seconds:.1f} s | {seconds:.1f} s | {reranked:,} | "
        f"about {projected / 60:,.0f} min | {peak:.1f} GiB |"
    )


def timed(attributor: TrakAttributor, targets: Dataset, options: dict[str, Any]) -> float:
    begun = time.perf_counter()
    attributor.attribute(targets, top_k=20, **options)
    return time.perf_counter() - begun


def write_index(attributor: TrakAttributor) -> None:
    """Featurize one shard, whose rows are compared later, and write random codes in the place of all others."""
    store, generator = attributor.features.store, torch.Generator().manual_seed(0)
    attributor.featurize(part=(0, -(-len(attributor.train_dataset) // attributor.args.shard_size)))
    store, generator = attributor.features.store, torch.Generator().manual_seed(0)
    shards = store.train(0)
    assert shards.code_format is not None
    for index in shards.unwritten():
        rows = shards.plan.rows(index)
        codes = {
            name: torch.randint(0, 256, (len(rows), count), dtype=torch.uint8, generator=generator)
            for name, count in zip(shards.code_format.names, shards.code_format.block_bytes, strict=True)
        }
        tensors = {"scale": torch.rand(len(rows)), "out_to_loss": torch.rand(len(rows)), **codes}
        write_tensors(shards.path(index), tensors, shards.identity, start=rows.start, stop=rows.stop)
    attributor.features.scorer.prepare(0)


if __name__ == "__main__":
    main()
