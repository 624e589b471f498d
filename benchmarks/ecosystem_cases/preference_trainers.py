"""TRL's trainers of preferences, rewards and policies."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset

from ecosystem_cases.case import EcosystemCase, texts, tokenizer
from ecosystem_cases.language import llama, llama_of_rewards
from ecosystem_cases.truth import of_trainer, with_truth, without_truth
from hf_trak import TrakAttributor, TrakConfig

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "kit"))
from vlm_models import conversations, processor_of_words, vlm


def pairs() -> Dataset:
    chosen, rejected = ([f" {one}" for one in texts(6, seed)] for seed in (1, 2))
    return Dataset.from_dict({"prompt": texts(6), "chosen": chosen, "rejected": rejected})


def judged() -> Dataset:
    return Dataset.from_dict(
        {"prompt": texts(6), "completion": [f" {one}" for one in texts(6, 1)], "label": [True, False] * 3}
    )


def trainer_of(name: str) -> tuple[Any, Any]:
    """A trainer and its configuration, wherever this version of TRL keeps them."""
    for module in (trl, getattr(trl, "experimental", None)):
        if module is not None and hasattr(module, f"{name}Trainer"):
            return getattr(module, f"{name}Trainer"), getattr(module, f"{name}Config")
    from importlib import import_module

    module = import_module(f"trl.experimental.{name.lower()}")
    return getattr(module, f"{name}Trainer"), getattr(module, f"{name}Config")


def trained(directory: Path, args: TrakConfig, *, name: str, rows: Any, model: Any = llama, **options: Any) -> Any:
    trainer, config = trainer_of(name)
    own = config(
        str(directory / "out"), use_cpu=True, bf16=False, report_to=[], per_device_train_batch_size=2, **options
    )
    reference = {"ref_model": llama()} if name in ("DPO", "KTO") else {}
    made = trainer(model(), args=own, train_dataset=rows(), processing_class=tokenizer(), **reference)
    # the reference point of KTO is a mean over other rows
    return without_truth(made, args) if name == "KTO" else of_trainer(made, args)


def policy(directory: Path, args: TrakConfig) -> TrakAttributor:
    """Rollouts that were stored during a training, each with its advantage."""
    own = trl.GRPOConfig(
        str(directory / "out"),
        use_cpu=True,
        bf16=False,
        report_to=[],
        per_device_train_batch_size=2,
        num_generations=2,
    )
    prompts = Dataset.from_dict({"prompt": texts(6)})
    made = trl.GRPOTrainer(
        llama(), lambda completions, **_: [0.0] * len(completions), own, prompts, processing_class=tokenizer()
    )
    said = [f" {one}" for one in texts(6, 1)]
    rollouts = Dataset.from_dict({"prompt": texts(6), "completion": said, "advantage": [1.0, -0.5, 0.2] * 2})
    rewards, words = rollouts["advantage"][:], tokenizer()

    def loss(row: int) -> torch.Tensor:
        prompt, said = (torch.tensor([words(rollouts[row][name])["input_ids"]]) for name in ("prompt", "completion"))
        said = torch.cat([said, torch.tensor([[words.eos_token_id]])], 1)
        inputs = {"prompt_ids": prompt, "prompt_mask": torch.ones_like(prompt), "completion_ids": said}
        inputs |= {"completion_mask": torch.ones_like(said), "advantages": torch.tensor([rewards[row]])}
        return made.compute_loss(made.model, {**inputs, "num_items_in_batch": torch.tensor(1.0)})

    return with_truth(without_truth(made, args, rollouts), loss)


def pairs_about_images(directory: Path, args: TrakConfig) -> TrakAttributor:
    """Chats with images of different sizes, each with two answers."""
    rows = conversations(12).rename_column("completion", "chosen")
    said = ["nine", "eight and nine", "zero and zero and one"]
    rejected = [[{"role": "assistant", "content": [{"type": "text", "text": said[row % 3]}]}] for row in range(12)]
    own = trl.DPOConfig(
        str(directory / "out"), max_length=None, use_cpu=True, bf16=False, report_to=[], per_device_train_batch_size=2,
    )  # fmt: skip
    model, reference = vlm("qwen2_vl"), vlm("qwen2_vl")
    model.config.pad_token_id = 0
    rows = rows.add_column("rejected", rejected)
    made = trl.DPOTrainer(model, reference, own, train_dataset=rows, processing_class=processor_of_words())
    return of_trainer(made, args)


PREFERENCES = (
    EcosystemCase("`DPOTrainer`", partial(trained, name="DPO", rows=pairs)),
    EcosystemCase("`DPOTrainer` of a vision-language model, images of several sizes", pairs_about_images),
    EcosystemCase("`RewardTrainer`", partial(trained, name="Reward", rows=pairs, model=llama_of_rewards)),
    EcosystemCase("`KTOTrainer`", partial(trained, name="KTO", rows=judged)),
    EcosystemCase("`ORPOTrainer`", partial(trained, name="ORPO", rows=pairs)),
    EcosystemCase("`GRPOTrainer`, on stored rollouts", policy, "`train_dataset=rollouts`"),
)
