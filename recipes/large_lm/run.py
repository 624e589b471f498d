"""Features of a large causal language model that is divided over processes, and the rows that made it say something.

    python recipes/large_lm/run.py --size tiny
    torchrun --nproc_per_node 8 recipes/large_lm/run.py --size 8b --dtype bfloat16 --text corpus/*.txt

See README.md beside this file.
"""

import json
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `kit`

import torch
import torch.distributed as dist
from datasets import Dataset
from kit.files import save_dataset, write_json
from kit.splits import SplitArguments as DataArguments
from kit.splits import load_splits
from llama import SIZES, config_of, sharded_model, tensor_parallel_model, whole_model
from torch import nn
from transformers import AutoTokenizer

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.cli.parser import parse_yaml_and_args
from hf_trak.runtime.checks import checked_int
from hf_trak.runtime.processes import Processes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class RecipeArguments:
    """Arguments of model, rows and output; `DataArguments` and `TrakConfig` hold the others."""

    output_dir: str = field(
        default="outputs/large_lm",
        metadata={"help": "Features, scores and summary go here. The same command again resumes."},
    )
    size: str = field(default="tiny", metadata={"help": f"Size of the Llama: {', '.join(SIZES)}."})
    dtype: str = field(default="float32", metadata={"help": "Dtype of the weights: float32 or bfloat16."})
    checkpoint: str | None = field(
        default=None,
        metadata={"help": "Weights: safetensors, or a directory of torch.distributed.checkpoint. `None`: random."},
    )
    replicas: int = field(default=1, metadata={"help": "Groups of processes with a copy of the model each (HSDP)."})
    tp: int = field(
        default=1, metadata={"help": "Processes that have slices of the same matrices (tensor parallelism)."}
    )
    checkpointing: bool = field(
        default=False,
        metadata={"help": "Keep the inputs of layers alone, and compute the rest again in the backward pass."},
    )
    text: list[str] | None = field(
        default=None, metadata={"help": "Text files, one after the other. `None` with no dataset: random tokens."}
    )
    text_column: str = field(default="text", metadata={"help": "Column of the dataset with the text."})
    tokenizer: str | None = field(
        default=None, metadata={"help": "Tokenizer of the text. `None` takes bytes as tokens, for random weights."}
    )
    tokens: int = field(default=64, metadata={"help": "Tokens per row: text is laid end to end and cut."})
    rows: int = field(default=64, metadata={"help": "Random rows, if no text is given."})
    targets: int = field(default=2, metadata={"help": "Rows at the end that are explained instead of attributed to."})
    top_k: int = field(default=5, metadata={"help": "Rows to keep for each target and side."})

    def __post_init__(self) -> None:
        for name in ("tokens", "rows", "targets", "top_k", "replicas", "tp"):
            checked_int(getattr(self, name), name, 2 if name == "tokens" else 1)
        if self.tp > 1 and self.replicas > 1:
            raise ValueError(
                f"`tp` is {self.tp} and `replicas` is {self.replicas}. Expected one of them to be 1. With `tp`, more "
                "processes than that divide the slices between them."
            )
        for name, choices in (("size", SIZES), ("dtype", DTYPES)):
            if getattr(self, name) not in choices:
                raise ValueError(f"`{name}` is {getattr(self, name)!r}. Expected one of {list(choices)}.")


def token_rows(args: RecipeArguments, data: DataArguments) -> Dataset:
    """Lay the tokens of all texts end to end, and cut them into rows; draw tokens if there is no text.

    Raises:
        ValueError: there is text for fewer rows than one more than targets, or a token that the model does not know.
    """
    vocabulary = SIZES[args.size]["vocab_size"]
    if args.text is None and not data.dataset_name:
        shape = (args.rows + args.targets, args.tokens)
        ids = torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(0))
    else:
        flat = torch.tensor([token for text in texts(args, data) for token in tokenized(text, args)], dtype=torch.long)
        ids = flat[: len(flat) // args.tokens * args.tokens].view(-1, args.tokens)
        if len(ids) <= args.targets:
            raise ValueError(
                f"The text has {len(flat):,} tokens, for {len(ids)} rows of {args.tokens}. Expected more than the "
                f"{args.targets} targets. Give more text, or lower `tokens`."
            )
        if int(ids.max()) >= vocabulary:
            raise ValueError(
                f"The text has the token {int(ids.max())}, and the model {vocabulary:,} of them. Expected a "
                "tokenizer of the model. Set `tokenizer`, or another `size`."
            )
    return Dataset.from_dict({"input_ids": ids.tolist(), "labels": ids.tolist()})


def texts(args: RecipeArguments, data: DataArguments) -> list[str]:
    if args.text is not None:
        return [Path(path).read_text(encoding="utf-8") for path in args.text]
    return list(load_splits(data, {})[0][args.text_column])


def tokenized(text: str, args: RecipeArguments) -> list[int]:
    if args.tokenizer is None:
        return list(text.encode())
    return AutoTokenizer.from_pretrained(args.tokenizer)(text)["input_ids"]


def build_model(args: RecipeArguments, processes: Processes) -> nn.Module:
    config, device = config_of(args.size, args.tokens), processes.device
    if args.tp > 1:
        saved = Path(args.checkpoint or "")
        if not (saved / "config.json").is_file():  # nothing that transformers could divide while it loads it
            saved = Path(args.output_dir) / f"model-{args.size}-{args.dtype}"
        model = tensor_parallel_model(config, DTYPES[args.dtype], processes, args.tp, saved)
    elif dist.is_initialized() and dist.get_world_size() > 1:
        model = sharded_model(config, DTYPES[args.dtype], device, args.replicas)
    else:
        model = whole_model(config, DTYPES[args.dtype], device)
    if args.checkpointing:
        model.gradient_checkpointing_enable()
    return model


def main(argv: list[str] | None = None) -> None:
    kinds = (RecipeArguments, DataArguments, TrakConfig)
    args, data, trak = parse_yaml_and_args(kinds, argv, description=__doc__.splitlines()[0])
    processes = Processes(trak.use_cpu)
    output_dir = Path(args.output_dir)
    rows = token_rows(args, data)
    train, targets = (
        rows.select(range(len(rows) - args.targets)),
        rows.select(range(len(rows) - args.targets, len(rows))),
    )
    model = build_model(args, processes)
    attributor = TrakAttributor(
        model, replace(trak, output_dir=str(output_dir / "trak")), train_dataset=train, task="causal_lm"
    )
    attributor.featurize(None if args.checkpoint is None else [args.checkpoint])
    scored = attributor.attribute(targets, top_k=min(args.top_k, len(train)), method="index")
    if processes.is_main_process:
        finish(args, output_dir, train, scored, model)
    processes.wait_for_everyone()


def finish(args: RecipeArguments, output_dir: Path, train: Dataset, scored: Dataset, model: nn.Module) -> None:
    """Write `scored/`, `train/` and `summary.json`, and print the rows that helped each target most."""
    save_dataset(scored, output_dir / "scored")
    save_dataset(train, output_dir / "train")
    found: list[dict[str, Any]] = [
        {"rows": row["trak_indices"], "scores": row["trak_scores"]}
        for row in scored.select_columns(["trak_indices", "trak_scores"])
    ]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    facts = {"parameters": parameters, "train_rows": len(train), "processes": int(os.environ.get("WORLD_SIZE", "1"))}
    write_json(output_dir / "summary.json", {**facts, "arguments": vars(args), "targets": found})
    for index, target in enumerate(found):
        pairs = zip(target["rows"], target["scores"], strict=True)
        print(f"Target {index}: " + ", ".join(f"row {row} ({score:+.3g})" for row, score in pairs))
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
