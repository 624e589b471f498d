"""CPU time per pair of the features of preferences (DPO), beside the training step on the same batches.

    OMP_NUM_THREADS=1 python benchmarks/preferences.py

A step is forward and backward of DPO's loss on the batch that TRL's collator makes (chosen answers above rejected
ones), with the reference's log-probabilities as columns, and without the optimizer. Features are those of
`TrakAttributor.featurize` with k = 512. Both are measured in turn, round by round, in CPU time of the process; the
ratio is the median of those of the rounds. Needs `trl`.
"""

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset, concatenate_datasets, disable_progress_bars
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy, logsigmoid
from transformers import LlamaConfig, LlamaForCausalLM
from trl.trainer.dpo_trainer import DataCollatorForPreference

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.modelout_functions import DPOModelOutput

BETA = 0.1
SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}


def pairs(count: int, longest: int) -> Dataset:
    """Draw pairs of token sequences of unequal lengths."""
    generator = torch.Generator().manual_seed(0)

    def drawn(least: int) -> list[int]:
        length = least + int((longest - least) * torch.rand((), generator=generator) ** 2)
        return torch.randint(3, 1000, (length,), generator=generator).tolist()

    rows = [{"prompt_ids": drawn(8), "chosen_ids": drawn(4), "rejected_ids": drawn(4)} for _ in range(count)]
    references = {name: [-5.0 * len(row[f"{answer}_ids"]) for row in rows] for name, answer in (
        ("ref_chosen_logps", "chosen"), ("ref_rejected_logps", "rejected"))}  # fmt: skip
    made = Dataset.from_list(rows)
    for name, values in references.items():
        made = made.add_column(name, values)
    return made


def with_a_first_batch(rows: Dataset, size: int) -> Dataset:
    """Put a batch of copies of the longest row before the others: features take long rows first, and the first batch
    is left out of what is measured."""
    names = ("prompt_ids", "prompt_ids", "chosen_ids", "rejected_ids")
    lengths = [sum(len(row[name]) for name in names) for row in rows]
    longest = max(range(len(rows)), key=lengths.__getitem__)
    return concatenate_datasets([rows.select([longest] * size), rows])


def dpo_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Compute the mean loss of a batch of TRL's collator."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
    tokens, mask = batch["input_ids"][:, 1:], batch["completion_mask"][:, 1:]
    losses = cross_entropy(logits[:, :-1].flatten(0, 1), tokens.flatten(), reduction="none").view(tokens.shape)
    chosen, rejected = (-losses * mask).sum(1).chunk(2)
    margin = (chosen - batch["ref_chosen_logps"]) - (rejected - batch["ref_rejected_logps"])
    return -logsigmoid(BETA * margin).mean()


def step_seconds(model: Any, rows: Dataset, collator: Any, size: int) -> float:
    """Return the CPU seconds of forward and backward passes over all rows but those of the first batch."""
    seconds = 0.0
    for start in range(0, len(rows), size):
        batch = collator(list(rows.select(range(start, min(start + size, len(rows))))))
        began = time.process_time()
        dpo_loss(model, batch).backward()
        model.zero_grad()
        seconds += (time.process_time() - began) if start else 0.0
    return seconds


def feature_seconds(model: Any, rows: Dataset, collator: Any, size: int) -> float:
    """Return the CPU seconds of the features of all rows but those of the first batch, collation included."""
    with tempfile.TemporaryDirectory() as directory:
        config = TrakConfig(
            output_dir=directory, proj_dim=512, use_cpu=True, per_device_batch_size=size,
        )  # fmt: skip
        attributor = TrakAttributor(model, config, rows, collator, task=DPOModelOutput(BETA))
        done: list[float] = []
        attributor.features.batch_done = lambda rows: done.append(time.process_time())
        attributor.featurize()
        return done[-1] - done[0]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=64)
    parser.add_argument("--longest", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--multiple", type=int, help="Pad batches to a multiple of so many tokens.")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    disable_progress_bars()
    collator = DataCollatorForPreference(pad_token_id=0, pad_to_multiple_of=options.multiple)
    print(f"{options.pairs} pairs, {options.batch} in a batch")
    print(
        "| parameters | tokens per pair | step, ms per pair | features, ms per pair | ratio |\n|---|---|---|---|---|"
    )
    for longest in options.longest:
        rows = with_a_first_batch(pairs(options.pairs, longest), options.batch)
        pairs_of_rows = rows.select(range(options.batch, len(rows)))
        lengths = [
            2 * len(row["prompt_ids"]) + len(row["chosen_ids"]) + len(row["rejected_ids"]) for row in pairs_of_rows
        ]
        for name in ("all", "LoRA, r = 8"):
            torch.manual_seed(0)
            model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=1000, max_position_embeddings=1024, **SIZES)).eval()
            if name != "all":
                model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
                model.eval()
            measured = [
                [function(model, rows, collator, options.batch) for function in (step_seconds, feature_seconds)]
                for _ in range(options.rounds)
            ]
            count = len(rows) - options.batch
            step, features = (1000 * statistics.median(times) / count for times in zip(*measured, strict=True))
            ratio = statistics.median(after / before for before, after in measured)
            mean = statistics.mean(lengths)
            print(f"| {name} | {mean:.0f} | {step:.1f} | {features:.1f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
