"""Train an image classifier with `Trainer`, then show which training images taught it what it does.

    python recipes/image_classification/run.py
    accelerate launch recipes/image_classification/run.py --config recipes/image_classification/config.yaml

See README.md beside this file.
"""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from datasets import (
    Dataset,
    disable_progress_bars,
)
from image_data import DataArguments, load_splits
from PIL import Image as PILImage
from presentation import Attribution, present, save_dataset, write_json
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    PreTrainedModel,
    ResNetConfig,
    Trainer,
    TrainingArguments,
    ViTConfig,
    set_seed,
)

from hf_trak import TrakAttributor, TrakConfig
from hf_trak.checkpoints import load_into
from hf_trak.cli.parser import parse_yaml_and_args
from hf_trak.data import fingerprint_dataset

RECORD = "run.json"


@dataclass
class RecipeArguments:
    """How to train, and what to show. `DataArguments` and `RecipeTrakConfig` come beside these."""

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
    num_train_epochs: float = field(default=5.0, metadata={"help": "Passes over the training rows."})
    per_device_train_batch_size: int = field(default=32, metadata={"help": "Training batch size per process."})
    learning_rate: float = field(default=2e-3, metadata={"help": "Highest learning rate of AdamW, decaying to 0."})
    weight_decay: float = field(default=0.05, metadata={"help": "Weight decay of AdamW."})
    warmup_steps: float = field(default=0.1, metadata={"help": "Warmup steps, or below 1 their part of all steps."})
    save_steps: float = field(
        default=0.2, metadata={"help": "Steps between checkpoints, or below 1 their part of all steps."}
    )
    num_checkpoints: int = field(
        default=3,
        metadata={"help": "Attribute with this many checkpoints, from the first to the last of the training."},
    )
    seed: int = field(default=0, metadata={"help": "Seed of training and of the projection."})
    use_cpu: bool = field(default=False, metadata={"help": "Stay on the CPU even where there is an accelerator."})
    disable_tqdm: bool = field(default=False, metadata={"help": "Show no progress bars."})
    top_k: int = field(default=20, metadata={"help": "Training images to keep per target, from either end."})
    num_targets: int = field(default=6, metadata={"help": "Targets to print and draw, misclassified ones first."})
    images_per_side: int = field(default=5, metadata={"help": "Training images to print and draw on either side."})
    save_train_dataset: bool = field(
        default=True, metadata={"help": "Save the training rows that the scores refer to beside the scores."}
    )
    overwrite: bool = field(
        default=False, metadata={"help": "Delete what this recipe left in `output_dir` and start anew."}
    )

    def __post_init__(self) -> None:
        for name in ("num_checkpoints", "num_targets", "images_per_side", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}. Expected at least 1.")


@dataclass
class RecipeTrakConfig(TrakConfig):
    """`TrakConfig` with another default."""

    proj_dim: int = field(
        default=2048, metadata={"help": "Features per example (k). Above the 1,437 digits is enough."}
    )


# What a trained model depends on, besides the rows themselves.
TRAINING_FIELDS = (
    "model_name_or_path", "architecture", "image_size", "num_train_epochs", "per_device_train_batch_size",
    "learning_rate", "weight_decay", "warmup_steps", "save_steps", "seed",
)  # fmt: skip


def build_model(
    args: RecipeArguments, data: DataArguments, train: Dataset
) -> tuple[PreTrainedModel, Any, Callable[[Any], torch.Tensor]]:
    """The model to train, its processor if it has one, and what turns a list of images into `pixel_values`."""
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
    """The dataset with images turned into what the model takes, whenever rows are read."""

    def transform(rows: dict[str, list[Any]]) -> dict[str, Any]:
        return {"pixel_values": preprocess(rows[data.image_column]), "labels": rows[data.label_column]}

    return dataset.with_transform(transform)


def train_once(trainer: Trainer, settings: dict[str, Any]) -> list[str]:
    """Train, or finish an interrupted training, or take the finished one.

    Returns:
        The checkpoint directories, oldest first. The trainer's model has the weights of the last.
    """
    model_dir = Path(str(trainer.args.output_dir))
    record_path = model_dir / RECORD
    record = json.loads(record_path.read_text()) if record_path.is_file() else None
    saved = saved_checkpoints(model_dir)
    trainer.accelerator.wait_for_everyone()  # nobody writes before everybody has looked
    if record is None and saved:
        raise ValueError(f"{model_dir} holds checkpoints of another program. Set another `output_dir`.")
    if record is not None and record["settings"] != settings:
        changes = [
            f"{name}: {record['settings'].get(name)!r} there, {value!r} given"
            for name, value in settings.items()
            if record["settings"].get(name) != value
        ]
        raise ValueError(
            f"{model_dir} holds a model trained with other settings:\n  "
            + "\n  ".join(changes)
            + "\nExpected the same. Use them, or another `output_dir`, or `--overwrite` to start anew."
        )
    if record is not None and record["finished"]:
        load_into(trainer.model, saved[-1])
        return saved
    if trainer.is_world_process_zero():
        write_json(record_path, {"settings": settings, "finished": False})
    trainer.train(resume_from_checkpoint=saved[-1] if saved else None)
    if trainer.is_world_process_zero():
        write_json(record_path, {"settings": settings, "finished": True})
    trainer.accelerator.wait_for_everyone()
    return saved_checkpoints(model_dir)


def saved_checkpoints(model_dir: Path) -> list[str]:
    """Complete checkpoints by step: `Trainer` writes `trainer_state.json` last."""
    complete = [path.parent for path in model_dir.glob("checkpoint-*/trainer_state.json")]
    return [str(path) for path in sorted(complete, key=lambda path: int(path.name.split("-")[1]))]


def spread(checkpoints: list[str], count: int) -> list[str]:
    """`count` checkpoints from the first to the last, evenly spaced; the last alone if `count` is 1.

    Early ones matter: at the end of the training of a small network q = 1 − p is close to 0 for all but a few rows,
    and those few would be the answer for every target.
    """
    if count >= len(checkpoints):
        return checkpoints
    last = len(checkpoints) - 1
    return [checkpoints[round(i * last / (count - 1))] for i in range(count)] if count > 1 else checkpoints[-1:]


def main(argv: list[str] | None = None) -> None:
    kinds = (RecipeArguments, DataArguments, RecipeTrakConfig)
    args, data, trak = parse_yaml_and_args(kinds, argv, description=__doc__.splitlines()[0])
    if args.disable_tqdm:
        disable_progress_bars()
    output_dir = Path(args.output_dir)
    trak = replace(trak, output_dir=str(output_dir / "trak"))
    training = TrainingArguments(
        output_dir=str(output_dir / "model"),
        num_train_epochs=args.num_train_epochs,
        per_device_train_batch_size=args.per_device_train_batch_size,
        per_device_eval_batch_size=256,
        learning_rate=args.learning_rate,
        weight_decay=args.weight_decay,
        warmup_steps=args.warmup_steps,
        save_steps=args.save_steps,
        logging_strategy="epoch",
        seed=args.seed,
        use_cpu=args.use_cpu,
        disable_tqdm=args.disable_tqdm,
        dataloader_num_workers=trak.dataloader_num_workers,
        dataloader_pin_memory=trak.dataloader_pin_memory and torch.cuda.is_available() and not args.use_cpu,
        remove_unused_columns=False,  # the image column is what the transform reads
    )
    if args.overwrite and (output_dir / "model" / RECORD).is_file() and training.process_index == 0:
        for name in ("model", "trak", "scored", "train"):
            shutil.rmtree(output_dir / name, ignore_errors=True)
    clock = [time.perf_counter()]
    with training.main_process_first(desc="loading the dataset"):
        train, targets = load_splits(data)
    set_seed(args.seed)
    model, processor, preprocess = build_model(args, data, train)
    trainer = Trainer(
        model=model, args=training, train_dataset=with_pixels(train, preprocess, data), processing_class=processor
    )
    trainer.accelerator.wait_for_everyone()

    settings = {name: getattr(args, name) for name in TRAINING_FIELDS}
    settings |= {"label_column": data.label_column, "train_dataset": fingerprint_dataset(train)}
    checkpoints = spread(train_once(trainer, settings), args.num_checkpoints)
    seen_targets = with_pixels(targets, preprocess, data)
    prediction = trainer.predict(seen_targets)
    clock.append(time.perf_counter())

    attributor = TrakAttributor.from_trainer(trainer, args=trak)
    attributor.featurize(checkpoints=checkpoints)
    clock.append(time.perf_counter())
    scored = attributor.attribute(seen_targets, top_k=args.top_k)
    self_influence = attributor.self_influence()
    clock.append(time.perf_counter())
    stages = ("training", "featurizing", "scoring")
    seconds = {stage: round(b - a, 1) for stage, a, b in zip(stages, clock, clock[1:], strict=False)}

    if trainer.is_world_process_zero():
        if args.save_train_dataset:
            save_dataset(train, output_dir / "train")
        present(
            Attribution(train, scored, prediction.predictions, self_influence),
            data,
            output_dir,
            num_targets=args.num_targets,
            images_per_side=args.images_per_side,
            facts={
                "parameters": attributor.layout.total,
                "checkpoints": checkpoints,
                "seconds": seconds,
                "arguments": {**asdict(trak), **asdict(data), **asdict(args)},
            },
        )
        print(f"Seconds: {seconds}")
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
