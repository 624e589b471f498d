"""Embeddings of image-text pairs by one checkpoint, and the simulated negatives drawn from them."""

import inspect
import random
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_trak.modelout_functions.batches import LABEL_NAMES, as_sequence
from hf_trak.runtime.finite import check_finite_rows
from hf_trak.weights.watch import WeightsStamp, model_tensors


@dataclass(frozen=True)
class ClipEmbeddings:
    """Embeddings `(N, d)` of N pairs, float32 on the CPU, and a stamp of the weights that they were computed with."""

    image: Tensor
    text: Tensor
    stamp: WeightsStamp
    model: weakref.ref[torch.nn.Module]

    def negatives(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return image and text embeddings `(count, d)` of the simulated negatives, drawn by N, count and seed alone.

        Raises:
            ValueError: there are fewer than `count` embeddings.
        """
        rows = draw_rows(self.image.shape[0], count, seed)
        return self.image[rows], self.text[rows]


def draw_rows(total: int, count: int, seed: int) -> list[int]:
    """Draw `count` of the numbers 0 … total − 1, uniformly without replacement, and return them ascending.

    Raises:
        ValueError: `count` exceeds `total`.
    """
    if total < count:
        raise ValueError(
            f"`simulated_batch_size` is {count}, but there are only {total} pair(s) to draw simulated negatives from. "
            f"Expected at least {count}: embed more pairs, or construct the task with `simulated_batch_size=…` of at "
            f"most {total}."
        )
    # Floyd's algorithm on `random()`, the one method whose sequence Python promises to keep from version to version.
    generator = random.Random(seed)
    chosen: set[int] = set()
    for last in range(total - count, total):
        row = int(generator.random() * (last + 1))
        chosen.add(last if row in chosen else row)
    return sorted(chosen)


def clip_inputs(batch: Any) -> dict[str, Any]:
    """Return the model's keyword arguments for a batch.

    Labels are left out, and so is `return_loss`, which asks for a loss that mixes the samples of the batch.

    Raises:
        TypeError: the batch is neither a mapping nor a sequence.
        ValueError: the batch is a sequence other than `(images, texts)`.
    """
    if isinstance(batch, Mapping):
        return {name: value for name, value in batch.items() if name not in (*LABEL_NAMES, "return_loss")}
    items = as_sequence(batch, "(images, texts)")
    if len(items) != 2:
        raise ValueError(
            f"The batch is a sequence of {len(items)} item(s). Expected two, (images, texts), or a mapping."
        )
    return {"image": items[0], "text": items[1]}


def read_output(model_output: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Find image embeddings `(B, d)`, text embeddings `(B, d)` and, if it is returned, the logit scale in an output.

    Raises:
        TypeError: no embeddings are found.
    """
    for image_name, text_name in (("image_features", "text_features"), ("image_embeds", "text_embeds")):
        if isinstance(model_output, Mapping) and image_name in model_output and text_name in model_output:
            return model_output[image_name], model_output[text_name], model_output.get("logit_scale")
    if isinstance(model_output, tuple | list) and len(model_output) >= 3:
        image, text, scale = model_output[:3]
        if isinstance(scale, Tensor) and scale.numel() == 1 and image.ndim == text.ndim == 2:
            return image, text, scale.reshape(())
    raise TypeError(
        f"The model returned a {type(model_output).__name__} in which no embeddings were found. Expected "
        "(image_features, text_features, logit_scale), or a mapping with `image_features` and `text_features` "
        "(open_clip) or `image_embeds` and `text_embeds` (transformers, `return_dict=True`). Load the model with both "
        "towers and their projections: `CLIPModel` or `SiglipModel`, not one tower alone."
    )


@torch.no_grad()
def embed(
    model: torch.nn.Module,
    loader: Iterable[Any],
    size: int,
    preprocess_fn_img: Callable[[Any], Tensor] | None = None,
    preprocess_fn_txt: Callable[[Any], Tensor] | None = None,
) -> ClipEmbeddings:
    """Embed up to `size` pairs in evaluation mode. The model's mode is restored afterwards.

    Args:
        model: the model, with the checkpoint's weights loaded.
        loader: yields `(images, texts)`, or mappings for the model.
        size: number of pairs after which to stop.
        preprocess_fn_img: applied to the images of each `(images, texts)` batch.
        preprocess_fn_txt: applied to the texts of each `(images, texts)` batch.

    Raises:
        ValueError: there is no pair, or preprocessing functions are given for batches that are mappings.
        TypeError: the batches are tuples, but the model is one of transformers and takes mappings.
        NonFiniteError: an embedding is NaN or infinite; names the pair.
    """
    device = next(model.parameters()).device
    modes = [(module, module.training) for module in model.modules()]
    images: list[Tensor] = []
    texts: list[Tensor] = []
    count = 0
    model.eval()
    try:
        for batch in loader:
            if count >= size:
                break
            inputs = clip_inputs(batch)
            if not isinstance(batch, Mapping) and "pixel_values" in inspect.signature(model.forward).parameters:
                raise TypeError(
                    f"The loader yields (images, texts), but {type(model).__name__} takes its inputs by other names. "
                    "Expected mappings, {'pixel_values': images, 'input_ids': texts, …}, as its processor makes them."
                )
            if isinstance(batch, Mapping) and (preprocess_fn_img or preprocess_fn_txt):
                raise ValueError(
                    "`preprocess_fn_img` and `preprocess_fn_txt` apply to (images, texts) batches, but the loader "
                    "yields mappings. Preprocess in its collator."
                )
            if preprocess_fn_img is not None:
                inputs["image"] = preprocess_fn_img(inputs["image"])
            if preprocess_fn_txt is not None:
                inputs["text"] = preprocess_fn_txt(inputs["text"])
            inputs = {name: item.to(device) if isinstance(item, Tensor) else item for name, item in inputs.items()}
            image, text, _ = read_output(model(**inputs))
            images.append(image[: size - count].float().cpu())
            texts.append(text[: size - count].float().cpu())
            count += images[-1].shape[0]
    finally:
        for module, training in modes:
            module.training = training
    if count == 0:
        raise ValueError(f"The loader gave no pairs to embed (`size` is {size}). Expected at least one.")
    embeddings = ClipEmbeddings(
        torch.cat(images), torch.cat(texts), WeightsStamp(model_tensors(model).values()), weakref.ref(model)
    )
    for name, rows in (("image", embeddings.image), ("text", embeddings.text)):
        remedy = "Look at that input and at the checkpoint; a half-precision model may need float32."
        check_finite_rows(rows, f"{name} embedding", unit="pair", remedy=remedy)
    return embeddings
