"""A process that reranks an index from the Hub: `torchrun remote_rerank_job.py WEIGHTS OUTPUT_DIR`."""

import json
import sys
from pathlib import Path

import torch
from digit_models import DigitNet, digits
from hub_server import TOKEN

from hf_trak import Rerank, TrakAttributor
from hf_trak.scores.scored_dataset import TOP_K_COLUMNS


def main(weights: str, output_dir: str) -> None:
    torch.set_num_threads(1)
    net = DigitNet()
    net.load_state_dict(torch.load(weights))
    options = {"use_cpu": True, "per_device_batch_size": 12, "output_dir": output_dir}
    one = TrakAttributor.from_pretrained("tester/index", net.eval(), token=TOKEN, **options)
    scored = one.attribute(digits(1000, 1003), top_k=3, method=Rerank(6))
    patch = one.verify(digits(1000, 1001), scored[0]["trak_indices"], similar=None)
    found = {name: scored[name][:] for name in (*TOP_K_COLUMNS, "trak_stage")}
    report = {"found": found, "change": patch.change, "downloads": one.train_dataset.remote.fetched}
    rank = one.features.processes.process_index
    Path(f"{output_dir}-{rank}.json").write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
