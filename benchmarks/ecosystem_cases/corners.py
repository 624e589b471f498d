"""Quantized bases, numbers of eight bytes, models random inside, and what has no loss of a row and says so."""

import multiprocessing
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from datasets import Dataset
from torch import nn

from ecosystem_cases.case import CLASSES, EcosystemCase, texts, token_rows, tokenizer
from ecosystem_cases.images import classifier, rows
from ecosystem_cases.language import causal, llama
from ecosystem_cases.others import Rows, numbers
from ecosystem_cases.preference_trainers import trainer_of
from ecosystem_cases.transformers_tasks import gpt2, labelled, seeded
from ecosystem_cases.truth import by_loss, of_plain_trainer, of_trainer
from hf_trak import TrakAttributor, TrakConfig

LAYERS = ["q_proj", "v_proj"]


def plain(given: list[Any]) -> Any:
    return hf.DataCollatorForLanguageModeling(tokenizer(), mlm=False)(given)


def base_of(kind: str, directory: Path) -> Any:
    """A small Llama from a directory, loaded as quantized as people do."""
    causal("llama", hidden_size=64, intermediate_size=64).save_pretrained(directory / "base")
    options: dict[str, Any] = {
        "8-bit": lambda: hf.BitsAndBytesConfig(load_in_8bit=True),
        "4-bit": lambda: hf.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
        "torchao": torchao_config,
    }
    return hf.AutoModelForCausalLM.from_pretrained(directory / "base", quantization_config=options[kind]())


def torchao_config() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return hf.TorchAoConfig(Int8WeightOnlyConfig())


def trainer_of_adapter(kind: str, directory: Path) -> Any:
    import peft

    model = peft.prepare_model_for_kbit_training(base_of(kind, directory), use_gradient_checkpointing=False)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=LAYERS, task_type="CAUSAL_LM")).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    own = hf.TrainingArguments(str(directory / "out"), use_cpu=True, report_to=[], max_steps=2, save_strategy="no")
    return hf.Trainer(model, own, plain, Dataset.from_dict({"input_ids": token_rows(6)}))


def features_elsewhere(kind: str, directory: Path, args: TrakConfig) -> None:
    """Write the features, in a process of its own."""
    by_loss(of_trainer(trainer_of_adapter(kind, directory), args)).featurize()


def quantized(directory: Path, args: TrakConfig, *, kind: str, when: str = "before") -> TrakAttributor:
    made = trainer_of_adapter(kind, directory)
    if when == "a new process":
        context = multiprocessing.get_context("spawn")
        first = context.Process(target=features_elsewhere, args=(kind, directory, args))
        first.start()
        first.join()
        written = list(Path(args.output_dir).rglob("*.safetensors"))
        if first.exitcode or not written:
            raise ValueError("the first process has failed")
    elif when == "after training":
        made.train()
        made.model.eval()  # bitsandbytes computes otherwise in training mode
    elif when == "after an evaluation":
        made.evaluate(made.train_dataset)
    return of_trainer(made, args)


def in_float64(directory: Path, args: TrakConfig) -> TrakAttributor:
    args.feature_dtype = None
    return of_plain_trainer(gpt2().double(), args, labelled("tokens of texts"), plain)


def shadowed(directory: Path, args: TrakConfig) -> TrakAttributor:
    import peft

    model = peft.get_peft_model(llama(), peft.ShadowConfig(task_type="CAUSAL_LM", r=2, init_weights=False)).eval()
    return of_plain_trainer(model, args, Dataset.from_dict({"input_ids": token_rows(6)}), plain)


def merged(directory: Path, args: TrakConfig) -> TrakAttributor:
    import peft

    model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=LAYERS, task_type="CAUSAL_LM")).eval()
    model.merge_adapter()
    given = Dataset.from_dict({"input_ids": token_rows(6)})
    own = by_loss(of_plain_trainer(model, args, given, plain)).featurize()
    own.attribute(given, method="index")
    return own


def masked_images(directory: Path, args: TrakConfig, *, kind: str) -> TrakAttributor:
    """`run_mim` gives a mask in `bool_masked_pos`; ViTMAE draws its own, or takes it as `noise`."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    shape = {"image_size": 16, "patch_size": 4}
    made: list[dict[str, Any]] = [{"pixel_values": one} for one in numbers(6, 3, 16, 16)]
    if kind != "mim":
        decoder = {f"decoder_{name}": value for name, value in sizes.items()}
        model = seeded(lambda: hf.ViTMAEForPreTraining(hf.ViTMAEConfig(**sizes, **shape, **decoder)))
        if kind == "noise":
            made = [{**row, "noise": noise} for row, noise in zip(made, numbers(6, 16), strict=True)]
    else:
        model = seeded(lambda: hf.ViTForMaskedImageModeling(hf.ViTConfig(encoder_stride=4, **sizes, **shape)))
        chosen = numbers(6, 16) < 0.5
        made = [{**row, "bool_masked_pos": mask} for row, mask in zip(made, chosen, strict=True)]

    def collate(given: list[Any]) -> Any:
        return {name: torch.stack([row[name] for row in given]) for name in given[0]}

    args.remove_unused_columns = False
    return of_plain_trainer(model, args, Rows(made), collate, task="row_loss")


def series(directory: Path, args: TrakConfig) -> TrakAttributor:
    config = hf.PatchTSTConfig(
        num_input_channels=2, context_length=16, patch_length=4, patch_stride=4, d_model=16, ffn_dim=16,
        num_hidden_layers=1, num_attention_heads=2, do_mask_input=True, norm_type="layernorm",
    )  # fmt: skip
    model = seeded(lambda: hf.PatchTSTForPretraining(config))
    made = [{"past_values": one} for one in numbers(6, 16, 2)]
    return of_plain_trainer(model, args, Rows(made), hf.default_data_collator, task="row_loss")


def panoptic(directory: Path, args: TrakConfig) -> TrakAttributor:
    backbone = hf.SwinConfig(
        image_size=32, patch_size=2, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=2,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = hf.Mask2FormerConfig(
        backbone_config=backbone, feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=16,
        encoder_layers=1, decoder_layers=2, num_attention_heads=2, dim_feedforward=16, num_queries=4, num_labels=3,
        train_num_points=16,
    )  # fmt: skip
    model = seeded(lambda: hf.Mask2FormerForUniversalSegmentation(config))
    masks = numbers(6, 2, 32, 32)
    made = [
        {"pixel_values": one, "masks": (mask > 0.5).float(), "kinds": torch.tensor([0, 2])}
        for one, mask in zip(numbers(6, 3, 32, 32), masks, strict=True)
    ]

    def collate(given: list[Any]) -> Any:
        return {
            "pixel_values": torch.stack([row["pixel_values"] for row in given]),
            "mask_labels": [row["masks"] for row in given], "class_labels": [row["kinds"] for row in given],
        }  # fmt: skip

    args.remove_unused_columns = False
    return of_plain_trainer(model, args, Rows(made), collate, task="row_loss")


def convolutions(*norm: nn.Module) -> Any:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), *norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES)
    )


def scripted() -> Any:
    return torch.jit.script(convolutions())


def traced() -> Any:
    return torch.jit.trace(convolutions(), numbers(2, 3, 64, 64))


def without_statistics() -> Any:
    return convolutions(nn.BatchNorm2d(4, track_running_stats=False))


def mixed(directory: Path, args: TrakConfig) -> TrakAttributor:
    """Mixup in the collator: pixels and labels of a row are drawn half from another."""
    from torch.utils.data import default_collate
    from torchvision.transforms import v2

    mix = v2.MixUp(num_classes=CLASSES)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, CLASSES))

        def forward(self, pixel_values: Any, labels: Any = None) -> Any:
            logits = self.layers(pixel_values)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    def collate(given: list[Any]) -> Any:
        return dict(zip(("pixel_values", "labels"), mix(*default_collate(given)), strict=True))

    torch.manual_seed(0)
    return of_plain_trainer(Model().eval(), args, rows(), collate, task="row_loss")


def on_policy(directory: Path, args: TrakConfig) -> TrakAttributor:
    """The student is taught on what it generates itself."""
    trainer, config = trainer_of("Distillation")
    own = config(str(directory / "out"), use_cpu=True, bf16=False, report_to=[], per_device_train_batch_size=2)
    prompts = Dataset.from_dict({"prompt": texts(6)})
    made = trainer(llama(), llama(), args=own, train_dataset=prompts, processing_class=tokenizer())
    return of_trainer(made, args)


IMAGES = '`task="image_classification"`'
ROW_LOSS = '`task="row_loss"`'
RANDOM = " draws random numbers in evaluation mode"
CORNERS = (
    EcosystemCase("a model in float64", in_float64),
    EcosystemCase("LoRA on an 8-bit base (bitsandbytes), before training", partial(quantized, kind="8-bit")),
    EcosystemCase("LoRA on an 8-bit base, after training", partial(quantized, kind="8-bit", when="after training")),
    EcosystemCase(
        "LoRA on an 8-bit base, features of another process", partial(quantized, kind="8-bit", when="a new process")
    ),
    EcosystemCase(
        "LoRA on a 4-bit base, after an evaluation", partial(quantized, kind="4-bit", when="after an evaluation")
    ),
    EcosystemCase("LoRA on a base of torchao, int8", partial(quantized, kind="torchao")),
    EcosystemCase("PEFT: Shadow", shadowed),
    EcosystemCase("PEFT: an adapter merged into its base", merged, "", "The adapter is merged into the base model"),
    EcosystemCase("run_mim: masks of the rows", partial(masked_images, kind="mim"), ROW_LOSS),
    EcosystemCase("ViTMAE, with `noise` in its rows", partial(masked_images, kind="noise"), ROW_LOSS),
    EcosystemCase("ViTMAE", partial(masked_images, kind="mae"), ROW_LOSS, f"ViTMAEForPreTraining{RANDOM}"),
    EcosystemCase("PatchTST", series, ROW_LOSS, f"PatchTSTForPretraining{RANDOM}"),
    EcosystemCase("Mask2Former", panoptic, ROW_LOSS, f"Mask2FormerForUniversalSegmentation{RANDOM}"),
    EcosystemCase("`torch.jit.script(model)`", partial(classifier, make=scripted), IMAGES, "`model` is TorchScript"),
    EcosystemCase("`torch.jit.trace(model, …)`", partial(classifier, make=traced), IMAGES, "`model` is TorchScript"),
    EcosystemCase(
        "BatchNorm without statistics", partial(classifier, make=without_statistics), IMAGES,
        "The BatchNorm layers 1 keep no statistics",
    ),
    EcosystemCase("Mixup in the collator", mixed, ROW_LOSS, "The data collator mixes rows"),
    EcosystemCase("`DistillationTrainer`", on_policy, "", "answers that the model generates during the training"),
)  # fmt: skip
