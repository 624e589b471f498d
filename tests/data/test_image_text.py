"""`ImageTextCollator`, and the errors for columns and inputs that it or the model cannot take."""

from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Image, Value
from PIL import Image as PILImage
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertTokenizerFast,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    RobertaConfig,
    RobertaForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
    default_data_collator,
)

from hf_trak import ImageTextCollator, TrakAttributor, TrakConfig
from hf_trak.data.batch_limits import BatchLimits
from hf_trak.modelout_functions import CLIPModelOutput

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "blue", "green", "square"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> BertTokenizerFast:
    path = tmp_path_factory.mktemp("words") / "vocab.txt"
    path.write_text("\n".join(WORDS))
    return BertTokenizerFast(vocab={word: i for i, word in enumerate(WORDS)}, model_max_length=6)


def processor(tokenizer: BertTokenizerFast, side: int = 8) -> CLIPProcessor:
    size = {"height": side, "width": side}
    images = CLIPImageProcessor(size=size, crop_size=size, do_center_crop=False)
    return CLIPProcessor(image_processor=images, tokenizer=tokenizer)


def clip(vocabulary: int = len(WORDS), side: int = 8, positions: int = 6) -> CLIPModel:
    torch.manual_seed(0)
    text = {**SIZES, "vocab_size": vocabulary, "max_position_embeddings": positions, "eos_token_id": 3}
    vision = {**SIZES, "image_size": side, "patch_size": 4}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).eval()


def squares(n: int = 8) -> Dataset:
    colors = ["red", "blue", "green"]
    images = [PILImage.new("RGB", (10, 12), colors[i % 3]) for i in range(n)]
    features = Features({"picture": Image(), "caption": Value("string")})
    captions = [f"a {colors[i % 3]}" + " square" * (i % 2) for i in range(n)]
    return Dataset.from_dict({"picture": images, "caption": captions}, features=features)


def attributor(model: torch.nn.Module, collator: Any, dataset: Dataset, directory: Any, **more: Any) -> TrakAttributor:
    config = TrakConfig(output_dir=str(directory), proj_dim=32, use_cpu=True, per_device_batch_size=3, budget="fast")
    task = more.pop("task", None) or CLIPModelOutput(simulated_batch_size=4)
    return TrakAttributor(model, config, dataset, collator, task=task, **more)


@pytest.mark.slow
def test_a_processor_makes_the_batches(tokenizer: BertTokenizerFast, tmp_path: Any) -> None:
    """Captions of different lengths are padded. The collator gets columns that `forward` does not take."""
    collator = ImageTextCollator("picture", "caption", processor=processor(tokenizer))
    batch = collator(list(squares()))
    assert batch["pixel_values"].shape == (8, 3, 8, 8) and batch["input_ids"].shape == (8, 5)
    assert batch["input_ids"][0].tolist() == [2, 5, 6, 3, 0] and batch["attention_mask"][0].tolist() == [1, 1, 1, 1, 0]
    scored = attributor(clip(), collator, squares(), tmp_path / "a").featurize().attribute(squares(2), top_k=3)
    assert scored.column_names[:2] == ["picture", "caption"]
    transformed = squares().with_transform(lambda rows: {"picture": rows["picture"], "caption": rows["caption"]})
    same = attributor(clip(), collator, transformed, tmp_path / "b").featurize().attribute(squares(2), top_k=3)
    assert same["trak_scores"][:] == scored["trak_scores"][:]


def test_arrays_are_images_too() -> None:
    collator = ImageTextCollator(image_transform=lambda image: torch.tensor(np.asarray(image)), tokenizer=len)
    pixels = np.arange(5 * 4 * 3, dtype=np.uint8).reshape(5, 4, 3)
    gray = np.arange(20, dtype=np.uint8).reshape(5, 4)
    values = [pixels, torch.tensor(pixels).permute(2, 0, 1), gray, gray[..., None], PILImage.fromarray(gray)]
    batch = collator([{"image": value, "text": "x"} for value in values])
    assert batch["text"] == 5 and batch["image"].shape == (5, 5, 4, 3)
    assert torch.equal(batch["image"][0], batch["image"][1]) and torch.equal(batch["image"][0], torch.tensor(pixels))
    assert all(torch.equal(batch["image"][i][..., 0], torch.tensor(gray)) for i in (2, 3, 4))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("images/1.png", r"'picture' holds 'images/1.png' \(a str\), which is no image.*cast_column\('picture'"),
        (None, r"'picture' holds None \(a NoneType\)"),
        ({"bytes": b"", "path": None}, r"\(a dict\), which is no image"),
        (np.zeros((4, 4, 3)), r"an array of float64 of the shape \(4, 4, 3\)"),
    ],
)
def test_an_image_column_that_holds_no_images(value: Any, message: str, tokenizer: BertTokenizerFast) -> None:
    collator = ImageTextCollator("picture", "caption", processor=processor(tokenizer))
    with pytest.raises(ValueError, match=message):
        collator([{"picture": value, "caption": "a red"}])


def test_captions_that_are_no_text_and_missing_columns(tokenizer: BertTokenizerFast, tmp_path: Any) -> None:
    collator = ImageTextCollator("picture", "caption", processor=processor(tokenizer))
    image = PILImage.new("RGB", (8, 8))
    with pytest.raises(ValueError, match=r"'caption' holds \['a', 'b'\] \(a list\).*one caption"):
        collator([{"picture": image, "caption": ["a", "b"]}])
    with pytest.raises(ValueError, match=r"A row has \['picture'\], not 'caption'"):
        collator([{"picture": image}])
    renamed = squares().rename_column("caption", "sentence")
    with pytest.raises(ValueError, match=r"not 'caption'. Expected the columns \['picture', 'caption'\]"):
        attributor(clip(), collator, renamed, tmp_path).featurize()


def test_processors_that_do_half_or_both(tokenizer: BertTokenizerFast) -> None:
    with pytest.raises(TypeError, match=r"BertTokenizer.*does not process both images and texts"):
        ImageTextCollator(processor=tokenizer)
    with pytest.raises(ValueError, match=r"was given \['tokenizer'\]. Expected `processor`"):
        ImageTextCollator(tokenizer=tokenizer)
    with pytest.raises(ValueError, match="was given nothing"):
        ImageTextCollator()
    with pytest.raises(ValueError, match=r"given \['processor', 'tokenizer'\]"):
        ImageTextCollator(processor=processor(tokenizer), tokenizer=tokenizer)


# -- a processor that does not match the model -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            clip(vocabulary=9),
            r"sample \d of the batch holds the token 9, but the token embedding of CLIPModel has 9 rows",
        ),
        (clip(side=16), r"shape \(channels, height, width\) = \(3, 8, 8\); CLIPModel takes \(3, 16, 16\)"),
        (clip(positions=4), r"`input_ids` has 5 tokens per sample, but CLIPModel has 4 positions"),
    ],
)
def test_a_processor_of_another_model(
    model: CLIPModel, message: str, tokenizer: BertTokenizerFast, tmp_path: Any
) -> None:
    collator = ImageTextCollator("picture", "caption", processor=processor(tokenizer))
    with pytest.raises(ValueError, match=message):
        attributor(model, collator, squares(), tmp_path).featurize()


def test_limits_of_other_models() -> None:
    bert = BertForSequenceClassification(BertConfig(**SIZES, vocab_size=20, max_position_embeddings=7))
    assert BatchLimits.of(bert) == BatchLimits(
        "BertForSequenceClassification", 20, 7, None, ("input_ids", "inputs_embeds")
    )
    BatchLimits.of(bert).check({"input_ids": torch.full((2, 7), 19)})
    for tokens in (torch.full((2, 7), 20), torch.full((2, 8), 19)):
        with pytest.raises(ValueError, match=r"Expected"):
            BatchLimits.of(bert).check({"input_ids": tokens})
    roberta = RobertaForSequenceClassification(
        RobertaConfig(**SIZES, vocab_size=20, max_position_embeddings=10, pad_token_id=1)
    )
    tokens = torch.full((1, 8), 5)
    BatchLimits.of(roberta).check({"input_ids": tokens})
    roberta(input_ids=tokens)  # ten rows: two come before the first position
    with pytest.raises(ValueError, match="8 positions"):
        BatchLimits.of(roberta).check({"input_ids": torch.full((1, 9), 5)})
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        roberta(input_ids=torch.full((1, 9), 5))
    assert BatchLimits.of(torch.nn.Linear(2, 2)) == BatchLimits("Linear")
    vit = ViTForImageClassification(ViTConfig(**SIZES, image_size=8, patch_size=4))
    pixels = torch.zeros(1, 3, 16, 16)
    BatchLimits.of(vit).check({"pixel_values": pixels, "interpolate_pos_encoding": True})
    with pytest.raises(ValueError, match=r"takes \(3, 8, 8\)"):
        BatchLimits.of(vit).check({"pixel_values": pixels})


# -- a model without the head ----------------------------------------------------------------------------------------


def test_a_model_without_the_needed_head(tokenizer: BertTokenizerFast, tmp_path: Any) -> None:
    vision = CLIPVisionModel(CLIPVisionConfig(**SIZES, image_size=8, patch_size=4)).eval()
    pixels = Dataset.from_dict({"pixel_values": torch.rand(8, 3, 8, 8).tolist(), "labels": [0, 1] * 4})
    with pytest.raises(TypeError, match=r"no embeddings were found.*`CLIPModel` or `SiglipModel`, not one tower"):
        attributor(vision, default_data_collator, pixels, tmp_path / "a").featurize()
    vit = ViTModel(ViTConfig(**SIZES, image_size=8, patch_size=4)).eval()
    with pytest.raises(ValueError, match=r"mapping with the keys .*Expected a tensor `logits`"):
        attributor(vit, default_data_collator, pixels, tmp_path / "b", task="image_classification").featurize()
    with pytest.raises(ValueError, match="No task is known for a ViTModel"):
        TrakAttributor(vit, TrakConfig(output_dir=str(tmp_path / "c")), pixels)
