"""Tail removal on preferences: does training without the first pairs by score change what the model prefers?

    OMP_NUM_THREADS=1 python benchmarks/preference_removal.py --output_dir outputs/preference_removal

Trains a small language model by DPO on pairs of `recipes/dpo` (words of Python's documentation in order, rejected out
of order, the other way round for one package), once on all pairs and once without 5 % of them for every target and
method. The output is the margin of a held-out pair about that package. Every training starts at the same weights,
which are the reference, and takes the pairs in the same order, so that they differ by the removed pairs alone. Besides
TRAK (k = 1,024) and EK-FAC, over three checkpoints: random pairs, cosines of whole gradients of the last checkpoint,
and the share of words in common. The same command again goes on where it was interrupted.
"""

import argparse
import copy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, disable_progress_bars
from transformers import LlamaConfig, LlamaForCausalLM, default_data_collator

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
sys.path.insert(0, str(Path(__file__).parents[1] / "recipes" / "dpo"))
from kit.text_models import train_tokenizer
from preference_data import python_preferences

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.cli.stored_rows import evenly_spaced
from hf_trak.evaluation import evaluate_removal, masks_and_outputs, removal_plan, retrain_on_subsets
from hf_trak.gradient_computers import per_sample_gradients
from hf_trak.modelout_functions import DPOModelOutput

BETA, BATCH, EPOCHS, LEARNING_RATE, CHECKPOINTS = 0.5, 16, 2, 1e-3, 3


METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "TRAK, λ = 0.3": ("trak", {"lambda_relative": 0.3}),
    "TRAK, λ = 10": ("trak-10", {"lambda_relative": 10.0}),
    "EK-FAC": ("ekfac", {}),
}
"""Directories and settings of the methods; λ is relative to the mean eigenvalue of the Gram matrix."""


def scored(
    model: Any, rows: Dataset, targets: Dataset, checkpoints: list[Any], directory: Path, **settings: Any
) -> np.ndarray:
    """Score rows for targets, `(n, m)`."""
    config = TrakConfig(output_dir=str(directory), proj_dim=1024, use_cpu=True, **settings)
    attributor = TrakAttributor(model, config, rows, task=DPOModelOutput(BETA))
    exact = directory.name == "ekfac"
    (attributor.fit_curvature if exact else attributor.featurize)(checkpoints=checkpoints)
    found = attributor.attribute(targets, top_k=None, checkpoints=checkpoints, method="exact" if exact else "index")
    return np.array(found["trak_scores"][:]).T


def tokenized(rows: Dataset, tokenizer: Any) -> Dataset:
    """Make tokens of pairs."""
    return rows.map(
        lambda row: {
            "prompt_ids": tokenizer(row["prompt"])["input_ids"],
            **{f"{side}_ids": tokenizer(row[side])["input_ids"] for side in ("chosen", "rejected")},
        }
    )


def collated(rows: Dataset) -> dict[str, torch.Tensor]:
    """Pad tokens of pairs into a batch."""
    return DPOModelOutput(BETA).collator(default_data_collator)(list(rows))


def margins(task: DPOModelOutput, model: Any, rows: Dataset) -> torch.Tensor:
    """Compute h of rows, without a gradient."""
    batch = collated(rows)
    with torch.no_grad():
        return task.output(model(**task.model_inputs(batch)[1]), batch, "target")


def with_references(model: Any, rows: Dataset) -> Dataset:
    """Add the log-probabilities of the model that training starts from."""
    batch = collated(rows)
    task = DPOModelOutput(BETA)
    task.bind(model)
    with torch.no_grad():
        log_probs, mask = task.token_log_probs(model(**task.model_inputs(batch)[1]), batch)
    chosen, rejected = torch.where(mask, log_probs, 0.0).sum(2).unbind(1)
    rows = rows.add_column("ref_chosen_logps", chosen.tolist())
    return rows.add_column("ref_rejected_logps", rejected.tolist())


def train(start: Any, rows: Dataset, kept: np.ndarray) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """Train a copy of a model on some rows, and return it with copies of its weights on the way."""
    model = copy.deepcopy(start).train()
    task = DPOModelOutput(BETA)
    task.bind(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    generator = torch.Generator().manual_seed(0)
    order = torch.cat([torch.randperm(len(rows), generator=generator) for _ in range(EPOCHS)]).numpy()
    order = order[np.isin(order, kept)]
    batches = [order[first : first + BATCH] for first in range(0, len(order), BATCH)]
    saved = []
    for step, chosen in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * (1 - step / len(batches))
        batch = collated(rows.select(chosen))
        task.per_sample_loss(model(**task.model_inputs(batch)[1]), batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) * CHECKPOINTS // len(batches) > step * CHECKPOINTS // len(batches):
            saved.append(copy.deepcopy(model.state_dict()))
    return model.eval(), saved


def gradients(model: Any, rows: Dataset) -> torch.Tensor:
    """Compute normalized gradients of h, `(n, P)`."""
    task = DPOModelOutput(BETA)
    task.bind(model)
    parts = []
    for first in range(0, len(rows), BATCH):
        batch = collated(rows.select(range(first, min(first + BATCH, len(rows)))))
        found = per_sample_gradients(model, batch, task)
        parts.append(torch.cat([gradient.flatten(1) for gradient in found.values()], dim=1))
    return torch.nn.functional.normalize(torch.cat(parts), dim=1)


def words_in_common(rows: Dataset, targets: Dataset) -> np.ndarray:
    """Compute |A ∩ B| / |A ∪ B| of the words of rows and targets, `(n, m)`."""
    left, right = ([set(f"{row['prompt']}{row['chosen']}".split()) for row in given] for given in (rows, targets))
    return np.array([[len(a & b) / len(a | b) for b in right] for a in left])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="outputs/preference_removal")
    parser.add_argument("--pairs", type=int, default=320)
    parser.add_argument("--targets", type=int, default=12)
    parser.add_argument("--fraction", type=float, default=0.05)
    parser.add_argument("--draws", type=int, default=10)
    options = parser.parse_args()
    disable_progress_bars()
    given = python_preferences(1.0)
    rows, targets = evenly_spaced(given["train"], options.pairs), evenly_spaced(given["test"], options.targets)
    tokenizer = train_tokenizer(
        (row["prompt"] + row["chosen"] for row in given["train"]), vocab_size=600, max_length=128, pairs=False
    )
    torch.manual_seed(0)
    start = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0,
        )
    ).eval()  # fmt: skip
    rows, targets = (with_references(start, tokenized(part, tokenizer)) for part in (rows, targets))
    model, checkpoints = train(start, rows, np.arange(len(rows)))
    scores = {
        name: scored(model, rows, targets, checkpoints, Path(options.output_dir) / directory, **settings)
        for name, (directory, settings) in METHODS.items()
    }
    cosines = (gradients(model, rows) @ gradients(model, targets).T).numpy()
    controls = {"gradient cosine": cosines, "words in common": words_in_common(rows, targets)}
    plan = removal_plan(scores, (options.fraction,), controls=controls, random_draws=options.draws)
    task = DPOModelOutput(BETA)
    task.bind(model)
    trained = retrain_on_subsets(
        plan.masks,
        lambda kept, seed: margins(task, train(start, rows, kept)[0], targets).numpy(),
        Path(options.output_dir) / "trainings",
    )
    result = evaluate_removal(plan, *masks_and_outputs(trained))
    swapped = np.array(rows["swapped"][:])
    print(
        f"{len(rows)} pairs, {swapped.mean():.0%} swapped; {len(targets)} targets with a mean margin of "
        f"{margins(task, model, targets).mean():+.3f}"
    )
    for name, matrix in {**scores, **controls}.items():
        worst = np.argsort(matrix.mean(axis=1))[: len(swapped) // 20]
        print(f"{name}: of the {len(worst)} pairs of the lowest mean score, {swapped[worst].mean():.0%} are swapped")
    print(result)


if __name__ == "__main__":
    main()
