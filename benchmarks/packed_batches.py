"""CPU time per document of padded, padding-free and packed batches, beside the training step of the same collator.

    OMP_NUM_THREADS=1 python benchmarks/packed_batches.py

A step is forward and backward of the loss on the batch that the collator makes, as `Trainer` computes it, without the
optimizer. Features are those of `TrakAttributor.featurize` with k = 512. Times are CPU time of the process, best of a
few rounds, without a first batch of copies of the longest row. Needs `trl`.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset, concatenate_datasets, disable_progress_bars
from transformers import DataCollatorForTokenClassification, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from hf_trak import TrakAttributor, TrakConfig

BATCH = 16


def documents(count: int, longest: int) -> list[list[int]]:
    """Draw documents of 8 tokens or more. Most are short."""
    generator = torch.Generator().manual_seed(0)
    lengths = (8 + (longest - 8) * torch.rand(count, generator=generator) ** 2).long().tolist()
    return [torch.randint(3, 1000, (length,), generator=generator).tolist() for length in lengths]


def packed(given: list[list[int]], width: int) -> Dataset:
    """Put documents into rows of at most so many tokens, in their order."""
    rows: list[list[list[int]]] = [[]]
    for document in given:
        if sum(map(len, rows[-1])) + len(document) > width:
            rows.append([])
        rows[-1].append(document)
    tokens = [[token for document in row for token in document] for row in rows]
    return Dataset.from_dict(
        {"input_ids": tokens, "labels": tokens, "seq_lengths": [[len(one) for one in row] for row in rows]}
    )


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0})), pad_token="<pad>")


def step_seconds(model: Any, rows: Dataset, collator: Callable[[list[Any]], Any], size: int) -> float:
    """Return the CPU seconds of forward and backward passes over all rows."""
    model.config.use_cache = False
    batches = [
        collator([rows[i] for i in range(start, min(start + size, len(rows)))]) for start in range(0, len(rows), size)
    ]
    began = time.process_time()
    for batch in batches:
        model(**batch).loss.backward()
        model.zero_grad()
    return time.process_time() - began


def feature_seconds(model: Any, rows: Dataset, collator: Callable[[list[Any]], Any], size: int) -> float:
    """Return the CPU seconds of the features of all rows, without the choice of an engine and its check.

    These belong to a first batch, of copies of the longest row: features take long rows first.
    """
    lengths = [len(row["input_ids"]) for row in rows]
    longest = max(range(len(rows)), key=lengths.__getitem__)
    rows = concatenate_datasets([rows.select([longest] * size), rows])
    with tempfile.TemporaryDirectory() as directory:
        config = TrakConfig(
            output_dir=directory, proj_dim=512, use_cpu=True, per_device_batch_size=size,
            remove_unused_columns=False,
        )  # fmt: skip
        attributor = TrakAttributor(model, config, rows, collator, task="causal_lm")
        done: list[float] = []
        attributor.features.batch_done = lambda rows: done.append(time.process_time())
        attributor.featurize()
        return done[-1] - done[0]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=256)
    parser.add_argument("--longest", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the model")
    options = parser.parse_args()
    disable_progress_bars()
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1000, max_position_embeddings=2048, **sizes)).eval()
    model.to(getattr(torch, options.dtype))
    given = documents(options.documents, options.longest)
    plain = Dataset.from_dict({"input_ids": given, "labels": given})
    rows = packed(given, 4 * options.longest)
    free = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    cases: dict[str, tuple[Dataset, Any, int]] = {
        "padded": (plain, DataCollatorForTokenClassification(tokenizer()), BATCH),
        "padding-free": (plain, free, BATCH),
        "packed": (rows, free, 4),
    }
    print(
        f"{len(given)} documents of {min(map(len, given))} to {max(map(len, given))} tokens; {len(rows)} packed rows"
    )
    print("| batches | step, ms per document | features, ms per document | ratio |\n|---|---|---|---|")
    for name, (data, collator, size) in cases.items():
        seconds = [
            min(function(model, data, collator, size) for _ in range(options.rounds))
            for function in (step_seconds, feature_seconds)
        ]
        step, features = (1000 * each / len(given) for each in seconds)
        print(f"| {name} | {step:.2f} | {features:.2f} | {features / step:.2f} |", flush=True)


if __name__ == "__main__":
    main()
