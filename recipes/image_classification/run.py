"""Train an image classifier with `Trainer`, then show which training images taught it what it does.

    python recipes/image_classification/run.py
    accelerate launch recipes/image_classification/run.py --config recipes/image_classification/config.yaml

See README.md beside this file.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `kit`

import numpy as np
import torch
from datasets import Dataset
from image_data import DataArguments, load_splits
from kit.files import save_dataset
from kit.outcome import write_report
from kit.training import TrainingRecipeArguments, start, train_and_attribute
from PIL import Image as PILImage
from presentation import Attribution, present
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    PreTrainedModel,
    ResNetConfig,
    Trainer,
    ViTConfig,
    set_seed,
)

from hf_trak import TrakConfig
from hf_trak.cli.parser import parse_yaml_and_args
from hf_trak.data.rows import fingerprint_dataset


@dataclass
class RecipeArguments(TrainingRecipeArguments):
    """Arguments of the model, its training and the output; `DataArguments` and `RecipeTrakConfig` hold the others."""

    COUNTS: ClassVar[tuple[str, ...]] = (*TrainingRecipeArguments.COUNTS, "images_per_side")

    output_dir: str = field(
        default="outputs/image_classification",
        metadata={"help": "Checkpoints, features, scores and the picture go here. The same command again resumes."},
    )
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Pretrained model to finetune. `None` trains `architecture` from scratch."}
    )
    architecture: Literal["resnet", "vit"] = field(
        default="resnet", metadata={"help": "Small network to train from scratch, of about 100,000 parameters."}
    )
    image_size: int | None = field(
        default=None,
        metadata={
            "help": "Side in pixels. `None` takes that of the pretrained processor, or the data's, within 16-64."
        },
    )
    num_targets: int = field(default=6, metadata={"help": "Targets to print and draw, misclassified ones first."})
    images_per_side: int = field(default=5, metadata={"help": "Training images to print and draw on either side."})
    save_train_dataset: bool = field(
        default=True, metadata={"help": "Save the training rows that the scores refer to beside the scores."}
    )


@dataclass
class RecipeTrakConfig(TrakConfig):
    """`TrakConfig` with another default."""

    proj_dim: int = field(
        default=2048, metadata={"help": "Features per example (k). Above the 1,437 digits is enough."}
    )


def build_model(
    args: RecipeArguments, data: DataArguments, train: Dataset
) -> tuple[PreTrainedModel, Any, Callable[[Any], torch.Tensor]]:
    """Load or make the model to train, its processor if it has one, and the function from images to `pixel_values`."""
    names = train.features[data.label_column].names
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    if args.model_name_or_path is not None:
        processor = AutoImageProcessor.from_pretrained(args.model_name_or_path)
        model = AutoModelForImageClassification.from_pretrained(
            args.model_name_or_path, **labels, ignore_mismatched_sizes=True, dtype=torch.float32
        )
        size = {} if args.image_size is None else {"size": {"height": args.image_size, "width": args.image_size}}

        def processed(images: list[PILImage.Image]) -> torch.Tensor:
            return processor([image.convert("RGB") for image in images], return_tensors="pt", **size)["pixel_values"]

        return model, processor, processed

    first = train[0][data.image_column]
    mode = "L" if first.mode in ("1", "L") else "RGB"
    # Upwards to a multiple of 8, so that the ViT's 8 × 8 patches fit.
    side = args.image_size or -(-min(64, max(16, *first.size)) // 8) * 8
    common: dict[str, Any] = {"num_channels": len(mode), **labels}
    if args.architecture == "resnet":
        config = ResNetConfig(embedding_size=32, hidden_sizes=[32, 64], depths=[1, 1], layer_type="basic", **common)
    else:
        config = ViTConfig(
            image_size=side, patch_size=side // 8, hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
            intermediate_size=128, **common,
        )  # fmt: skip

    def scaled(images: list[PILImage.Image]) -> torch.Tensor:
        resized = [image.convert(mode).resize((side, side), PILImage.Resampling.BILINEAR) for image in images]
        pixels = np.stack([np.asarray(image, dtype=np.float32).reshape(side, side, len(mode)) for image in resized])
        return torch.from_numpy(pixels / 127.5 - 1.0).permute(0, 3, 1, 2).contiguous()

    return AutoModelForImageClassification.from_config(config), None, scaled


def with_pixels(dataset: Dataset, preprocess: Callable[[Any], torch.Tensor], data: DataArguments) -> Dataset:
    """Turn images into what the model takes whenever rows of the dataset are read."""

    def transform(rows: dict[str, list[Any]]) -> dict[str, Any]:
        return {"pixel_values": preprocess(rows[data.image_column]), "labels": rows[data.label_column]}

    return dataset.with_transform(transform)


def main(argv: list[str] | None = None) -> None:
    kinds = (RecipeArguments, DataArguments, RecipeTrakConfig)
    args, data, trak = parse_yaml_and_args(kinds, argv, description=__doc__.splitlines()[0])
    output_dir = Path(args.output_dir)
    # The transform reads the image column, which the trainer would remove.
    training, trak = start(args, trak, remove_unused_columns=False)
    with training.main_process_first(desc="loading the dataset"):
        train, targets = load_splits(data)
    set_seed(args.seed)
    model, processor, preprocess = build_model(args, data, train)
    trainer = Trainer(
        model=model, args=training, train_dataset=with_pixels(train, preprocess, data), processing_class=processor
    )
    settings = args.settings("model_name_or_path", "architecture", "image_size")
    settings |= {"label_column": data.label_column, "train_dataset": fingerprint_dataset(train)}

    def with_guesses(_: PreTrainedModel) -> Dataset:
        guesses = trainer.predict(with_pixels(targets, preprocess, data)).predictions.argmax(axis=-1)
        feature = train.features[data.label_column]
        guessed = targets.add_column(f"{data.label_column}_predicted", guesses, feature=feature)
        return with_pixels(guessed, preprocess, data)

    outcome = train_and_attribute(trainer, args, trak, settings, with_guesses)
    logits = trainer.predict(outcome.targets).predictions
    self_influence = outcome.attributor.self_influence(method=outcome.method)
    columns = {"image_column": data.image_column, "label_column": data.label_column}
    write_report(outcome.attributor, output_dir, self_influence, **columns)

    if trainer.is_world_process_zero():
        if args.save_train_dataset:
            save_dataset(train, output_dir / "train")
        present(
            Attribution(train, outcome.scored, logits, self_influence),
            data,
            output_dir,
            num_targets=args.num_targets,
            images_per_side=args.images_per_side,
            facts=outcome.facts(trak, data, args),
        )
        print(f"Seconds: {outcome.seconds}")
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
