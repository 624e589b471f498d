"""Train or finetune an open_clip model with `Trainer`, then show which pairs taught it what it does.

    python recipes/clip/run.py
    accelerate launch recipes/clip/run.py --config recipes/clip/config.yaml

See README.md beside this file.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `kit`

import numpy as np
import open_clip
import torch
from datasets import Dataset
from kit.files import save_dataset, write_json
from kit.grid import image_grid
from kit.outcome import attributions, print_attributions, write_report
from kit.training import TrainingRecipeArguments, start, train_and_attribute
from open_clip.loss import SigLipLoss
from open_clip.transform import image_transform
from pair_data import SWAPPED, TRUE_CAPTION, DataArguments, load_pairs
from torch import Tensor
from transformers import Trainer, set_seed

from hf_trak import ImageTextCollator, TrakAttributor, TrakConfig
from hf_trak.cli.parser import parse_yaml_and_args
from hf_trak.data.rows import fingerprint_dataset
from hf_trak.modelout_functions import CLIPModelOutput, SigLIPModelOutput

SIDE, WIDTH, CONTEXT = 16, 32, 8
"""Sizes of the small model that is trained from scratch: pixels, width of both towers, tokens."""


@dataclass
class RecipeArguments(TrainingRecipeArguments):
    """Arguments of the model, its training and the output; `DataArguments` and `RecipeTrakConfig` hold the others."""

    COUNTS: ClassVar[tuple[str, ...]] = (*TrainingRecipeArguments.COUNTS, "simulated_negatives", "images_per_side")

    output_dir: str = field(
        default="outputs/clip",
        metadata={"help": "Checkpoints, features, scores and the picture go here. The same command again resumes."},
    )
    model_name: str | None = field(
        default=None, metadata={"help": "Model of open_clip, as `ViT-B-32`. `None` trains a small one from scratch."}
    )
    pretrained: str | None = field(
        default=None, metadata={"help": "Tag of its weights in open_clip, such as `laion2b_s34b_b79k`."}
    )
    loss: Literal["softmax", "sigmoid"] = field(
        default="softmax", metadata={"help": "Contrastive loss: CLIP's `softmax`, or the `sigmoid` of SigLIP."}
    )
    simulated_negatives: int = field(
        default=300, metadata={"help": "Training pairs that every pair is contrasted with, drawn once with `seed`."}
    )
    num_train_epochs: float = field(default=20.0, metadata={"help": "Passes over the training rows."})
    per_device_train_batch_size: int = field(default=64, metadata={"help": "Training batch size per process."})
    num_targets: int = field(default=6, metadata={"help": "Targets to print and draw, wrongly matched ones first."})
    images_per_side: int = field(default=5, metadata={"help": "Training pairs to print and draw on either side."})


@dataclass
class RecipeTrakConfig(TrakConfig):
    """`TrakConfig` with another default."""

    proj_dim: int = field(default=2048, metadata={"help": "Features per example (k)."})


class ContrastiveTrainer(Trainer):
    """A `Trainer` whose loss compares the pairs of a batch, over all processes."""

    def __init__(self, kind: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        world = {"rank": self.args.process_index, "world_size": self.args.world_size}
        if kind == "sigmoid":
            self.contrastive: Callable[..., Tensor] = SigLipLoss(**world)
        else:
            self.contrastive = open_clip.ClipLoss(local_loss=True, gather_with_grad=True, **world)

    def compute_loss(
        self, model: torch.nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, **_: Any
    ) -> Any:
        outputs = model(**inputs)
        loss = self.contrastive(**outputs)
        return (loss, outputs) if return_outputs else loss


def build_model(args: RecipeArguments) -> tuple[torch.nn.Module, Callable[..., Any], Callable[..., Any]]:
    """Load or make the model to train, its image transform, and its tokenizer."""
    bias = {"init_logit_scale": float(np.log(10)), "init_logit_bias": -10.0} if args.loss == "sigmoid" else {}
    if args.model_name is not None:
        model, _, preprocess = open_clip.create_model_and_transforms(
            args.model_name, pretrained=args.pretrained, output_dict=True, **bias
        )
        return model, preprocess, open_clip.get_tokenizer(args.model_name)
    model = open_clip.CLIP(
        embed_dim=WIDTH,
        vision_cfg={"image_size": SIDE, "patch_size": 4, "width": WIDTH, "head_width": WIDTH // 2, "layers": 2},
        text_cfg={"context_length": CONTEXT, "vocab_size": 49408, "width": WIDTH, "heads": 2, "layers": 2},
        output_dict=True,
        **bias,
    )
    # Random vectors tell words apart as well as learned ones. Trained, they would be nearly all of the parameters.
    model.token_embedding.requires_grad_(False)
    return model, image_transform(SIDE, is_train=False), open_clip.SimpleTokenizer(context_length=CONTEXT)


@torch.no_grad()
def matched_captions(
    model: torch.nn.Module, collator: ImageTextCollator, targets: Dataset, captions: list[str], device: torch.device
) -> list[str]:
    """Find for the image of each target the most similar caption among all distinct ones."""
    model.eval()
    distinct = sorted(set(captions))
    rows = list(targets)
    images, texts = [], []
    for first in range(0, max(len(rows), len(distinct)), 64):
        if part := rows[first : first + 64]:
            images.append(model.encode_image(collator(part)["image"].to(device), normalize=True))
        if words := distinct[first : first + 64]:
            tokens = collator([{**rows[0], collator.text_column: text} for text in words])["text"]
            texts.append(model.encode_text(tokens.to(device), normalize=True))
    best = (torch.cat(images) @ torch.cat(texts).T).argmax(dim=1)
    return [distinct[i] for i in best.tolist()]


def present(
    train: Dataset, scored: Dataset, matched: list[str], data: DataArguments, args: RecipeArguments, facts: dict
) -> None:
    """Write `scored/`, `train/`, `attribution.png` and `summary.json`, and print the essence."""
    output_dir = Path(args.output_dir)
    captions, train_captions = list(scored[data.caption_column]), list(train[data.caption_column])
    right = [guess == caption for guess, caption in zip(matched, captions, strict=True)]
    rows = sorted(range(len(scored)), key=lambda row: right[row])[: args.num_targets]

    targets = attributions(
        scored,
        rows,
        args.images_per_side,
        lambda row: {"caption": captions[row], "matched": matched[row]},
        lambda row: {"text": train_captions[row]},
    )
    accuracy = float(np.mean(right))
    write_json(output_dir / "summary.json", {"accuracy": accuracy, "attributions": targets, **facts})
    save_dataset(train, output_dir / "train")
    save_dataset(scored.add_column(f"{data.caption_column}_matched", matched), output_dir / "scored")
    picture = image_grid(
        scored,
        train,
        rows,
        output_dir / "attribution.png",
        image_column=data.image_column,
        label_column=data.caption_column,
        n=args.images_per_side,
        title=f"{Path(data.dataset_name).name}: which pairs taught the model this?",
    )
    print_attributions(
        targets,
        lambda entry: (
            repr(entry["caption"])
            + ("" if entry["matched"] == entry["caption"] else f" (MATCHED TO {entry['matched']!r})")
        ),
    )
    print(f"\n{len(train)} pairs, {len(scored)} targets, of which {accuracy:.1%} are matched with their caption.")
    print(f"Picture: {picture}\nScores:  {output_dir / 'scored'}")


def find_swapped(attributor: TrakAttributor, train: Dataset, data: DataArguments, top_k: int) -> dict[str, Any]:
    """Count the swapped pairs among the most harmful rows of the same image with the right caption."""
    swapped = [row for row, mark in enumerate(train[SWAPPED]) if mark]
    probes = train.select(swapped).remove_columns([data.caption_column, SWAPPED])
    probes = probes.rename_column(TRUE_CAPTION, data.caption_column)
    harmful = attributor.attribute(probes, top_k=top_k, method="index", name="swapped")["trak_harmful_indices"]
    ranks = [
        list(found).index(row) if row in list(found) else None for row, found in zip(swapped, harmful, strict=True)
    ]
    found = sum(rank is not None for rank in ranks)
    chance = min(1.0, top_k / len(train))
    print(
        f"\n{found} of {len(swapped)} training pairs with a swapped caption are among the {top_k} most harmful rows "
        f"of their image with the right caption, {sum(rank == 0 for rank in ranks)} of them in the first place; by "
        f"chance {chance * len(swapped):.1f} were."
    )
    return {"rows": swapped, "ranks": ranks, "top_k": top_k, "found": found, "by_chance": chance * len(swapped)}


def main(argv: list[str] | None = None) -> None:
    kinds = (RecipeArguments, DataArguments, RecipeTrakConfig)
    args, data, trak = parse_yaml_and_args(kinds, argv, description=__doc__.splitlines()[0])
    # The collator reads the image and the caption column, which the trainer would remove.
    training, trak = start(args, trak, remove_unused_columns=False)
    with training.main_process_first(desc="loading the dataset"):
        train, targets = load_pairs(data, args.seed)
    set_seed(args.seed)
    model, preprocess, tokenizer = build_model(args)
    collator = ImageTextCollator(
        data.image_column, data.caption_column, image_transform=preprocess, tokenizer=tokenizer
    )
    trainer = ContrastiveTrainer(args.loss, model=model, args=training, train_dataset=train, data_collator=collator)
    settings = args.settings("model_name", "pretrained", "loss")
    settings |= {"caption_column": data.caption_column, "train_dataset": fingerprint_dataset(train)}
    kind = SigLIPModelOutput if args.loss == "sigmoid" else CLIPModelOutput
    task = kind(simulated_batch_size=args.simulated_negatives)
    outcome = train_and_attribute(trainer, args, trak, settings, targets, task)
    attributor = outcome.attributor
    write_report(attributor, Path(args.output_dir), image_column=data.image_column, text_columns=[data.caption_column])
    found = {"swapped": find_swapped(attributor, train, data, args.top_k)} if data.swapped_captions else {}

    if trainer.is_world_process_zero():
        matched = matched_captions(
            attributor.model, collator, targets, list(targets[data.caption_column]), attributor.features.device
        )
        facts = {
            "train_rows": len(train), "targets": len(targets), **outcome.facts(trak, data, args), **found,
        }  # fmt: skip
        present(train, outcome.scored, matched, data, args, facts)
        print(f"Seconds: {outcome.seconds}")
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
