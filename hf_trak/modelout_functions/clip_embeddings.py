"""Embeddings of image-text pairs by one checkpoint, and the simulated negatives drawn from them."""

import inspect
import random
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_trak.errors import NonFiniteError
from hf_trak.modelout_functions.batches import LABEL_NAMES, as_sequence
from hf_trak.weights.watch import WeightsStamp, model_tensors


@dataclass(frozen=True)
class ClipEmbeddings:
    """Embeddings `(N, d)` of N pairs, float32 on the CPU, and the model they came from as it was then."""

    image: Tensor
    text: Tensor
    stamp: WeightsStamp
    model: weakref.ref[torch.nn.Module]

    def negatives(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        """Image and text embeddings `(count, d)` of the simulated negatives; a function of N, count and seed.

        Raises:
            ValueError: there are fewer than `count` embeddings.
        """
        rows = draw_rows(self.image.shape[0], count, seed)
        return self.image[rows], self.text[rows]


def draw_rows(total: int, count: int, seed: int) -> list[int]:
    """`count` of the numbers 0 … total − 1, uniformly without replacement, ascending.

    Raises:
        ValueError: `count` exceeds `total`.
    """
    if total < count:
        raise ValueError(
            f"`simulated_batch_size` is {count}, but there are only {total} pair(s) to draw simulated negatives from. "
            f"Expected at least {count}: embed more pairs, or construct the task with "
            f"`CLIPModelOutput(simulated_batch_size=…)` of at most {total}."
        )
    # Floyd's algorithm on `random()`, the one method whose sequence Python promises to keep from version to version.
    generator = random.Random(seed)
    chosen: set[int] = set()
    for last in range(total - count, total):
        row = int(generator.random() * (last + 1))
        chosen.add(last if row in chosen else row)
    return sorted(chosen)


def clip_inputs(batch: Any) -> dict[str, Any]:
    """The model's keyword arguments for a batch. `return_loss` asks for a loss that mixes the batch, and is left out
    as labels are.

    Raises:
        TypeError, ValueError: the batch is neither a mapping nor `(images, texts)`.
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
    """Image embeddings `(B, d)`, text embeddings `(B, d)`, and the logit scale where the model returns it.

    Raises:
        TypeError: they are not found.
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
    """Embed up to `size` pairs in evaluation mode; the model's mode is restored.

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
        finite = rows.isfinite().all(dim=1)
        if not bool(finite.all()):
            raise NonFiniteError(
                f"The {name} embedding of pair {int((~finite).nonzero()[0])} of the loader is NaN or infinite. "
                "Look at that input and at the checkpoint; a half-precision model may need float32."
            )
    return embeddings
