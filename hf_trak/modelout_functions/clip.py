"""Contrastive image-text models (CLIP; TRAK paper, arXiv 2303.14186, Section 5.1).

With φ, ψ the image and text embedding of a pair, s the logit scale, and (φ_b, ψ_b), b ∈ B, the embeddings of a fixed
set of *simulated negatives*:

    f = −logsumexp_b(−φ·(ψ − ψ_b)) − logsumexp_b(−ψ·(φ − φ_b))
    q = 1 − ½ [ p(s φ·ψ | s φ·ψ_b) + p(s ψ·φ | s ψ·φ_b) ],      p(a | a_b) = eᵃ / (eᵃ + Σ_b e^{a_b})

B is drawn once, uniformly without replacement and with a seed, from embeddings computed with the same checkpoint, and
is the same for every pair. Neither f nor q of a pair depends on the other pairs in its batch.
"""

import inspect
import random
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_trak.errors import HfTrakError
from hf_trak.modelout_functions.base import Batch, BatchedModelOutput, Side, Tensors, call_model
from hf_trak.modelout_functions.batches import LABEL_NAMES, as_sequence, evaluating
from hf_trak.runtime.checks import check_finite_rows, checked_int, checked_positive
from hf_trak.weights.watch import WeightsStamp, model_tensors


@dataclass(frozen=True)
class ClipEmbeddings:
    """Embeddings `(N, d)` of N pairs, float32 on the CPU, and a stamp of the weights that they were computed with."""

    image: Tensor
    text: Tensor
    stamp: WeightsStamp
    model: weakref.ref[torch.nn.Module]


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


def embed(model: torch.nn.Module, loader: Iterable[Any], size: int, preprocess: Mapping[str, Any]) -> ClipEmbeddings:
    """Embed up to `size` pairs in evaluation mode. The model's mode is restored afterwards.

    Args:
        model: the model, with the checkpoint's weights loaded.
        loader: yields `(images, texts)`, or mappings for the model.
        size: number of pairs after which to stop.
        preprocess: a function, or `None`, for the `image` and for the `text` of each `(images, texts)` batch.

    Raises:
        ValueError: there is no pair, or preprocessing functions are given for batches that are mappings.
        TypeError: the batches are tuples, but the model is one of transformers and takes mappings.
        NonFiniteError: an embedding is NaN or infinite; names the pair.
    """
    device = next(model.parameters()).device
    images: list[Tensor] = []
    texts: list[Tensor] = []
    count = 0
    with evaluating(model):
        for batch in loader:
            if count >= size:
                break
            inputs = clip_inputs(batch)
            if not isinstance(batch, Mapping) and "pixel_values" in inspect.signature(model.forward).parameters:
                raise TypeError(
                    f"The loader yields (images, texts), but {type(model).__name__} takes its inputs by other names. "
                    "Expected mappings, {'pixel_values': images, 'input_ids': texts, …}, as its processor makes them."
                )
            if isinstance(batch, Mapping) and any(preprocess.values()):
                raise ValueError(
                    "`preprocess_fn_img` and `preprocess_fn_txt` apply to (images, texts) batches, but the loader "
                    "yields mappings. Preprocess in its collator."
                )
            for name, function in preprocess.items():
                if function is not None:
                    inputs[name] = function(inputs[name])
            inputs = {name: item.to(device) if isinstance(item, Tensor) else item for name, item in inputs.items()}
            image, text, _ = read_output(model(**inputs))
            images.append(image[: size - count].float().cpu())
            texts.append(text[: size - count].float().cpu())
            count += images[-1].shape[0]
    if count == 0:
        raise ValueError(f"The loader gave no pairs to embed (`size` is {size}). Expected at least one.")
    embeddings = ClipEmbeddings(
        torch.cat(images), torch.cat(texts), WeightsStamp(model_tensors(model).values()), weakref.ref(model)
    )
    for name, rows in (("image", embeddings.image), ("text", embeddings.text)):
        remedy = "Look at that input and at the checkpoint; a half-precision model may need float32."
        check_finite_rows(rows, f"{name} embedding", unit="pair", remedy=remedy)
    return embeddings


DEFAULT_SIMULATED_BATCH_SIZE = 300


class MissingEmbeddingsError(HfTrakError, AssertionError):
    """A CLIP task lacks embeddings of the current checkpoint. An `AssertionError` too, which the `trak` API raises."""


class ClassOrInstanceMethod:
    """A method that is bound to the instance, or to the class if it is called on the class."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__wrapped__ = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: type) -> Any:
        return self.__wrapped__.__get__(owner if instance is None else instance)


class ClassOrInstanceProperty(ClassOrInstanceMethod):
    """A read-only attribute computed from the instance, or from the class if it is read on the class."""

    def __get__(self, instance: Any, owner: type) -> Any:
        return self.__wrapped__(owner if instance is None else instance)


class CLIPModelOutput(BatchedModelOutput):
    """The task `clip`: batches are `(images, texts)`, or mappings of what the processor returned.

    For open_clip models (outputs as tuple or dict) and `transformers` models with `image_embeds`, `text_embeds` and a
    parameter `logit_scale`.

    `task.get_embeddings(model, …)` keeps embeddings on that task. `CLIPModelOutput.get_embeddings(model, …)`, as the
    `trak` API calls it, keeps them on the class as the default of tasks without their own. Either way they remember
    the weights that they were computed with, and a batch of a checkpoint with other weights is refused.
    """

    sim_batch_size: int = 0
    _embeddings: ClipEmbeddings | None = None

    def __init__(
        self,
        temperature: float | None = None,
        simulated_batch_size: int = DEFAULT_SIMULATED_BATCH_SIZE,
        seed: int | None = None,
    ) -> None:
        """
        Args:
            temperature (`float`, *optional*):
                Replaces the model's logit scale s in q: as in the `trak` API, it *multiplies* the similarities. `None`
                reads s from the model at every batch.
            simulated_batch_size (`int`, *optional*, defaults to 300):
                Number of simulated negatives.
            seed (`int`, *optional*):
                Seed of their draw, at least 0. `None` takes the seed of the run, or 0 outside of one.

        Raises:
            TypeError: `simulated_batch_size` or `seed` is not an integer.
            ValueError: an argument is out of range.
        """
        super().__init__()
        remedy = "It multiplies the similarities; `None` takes the model's own logit scale."
        self.temperature = None if temperature is None else checked_positive(temperature, "temperature", remedy)
        self.sim_batch_size = checked_int(simulated_batch_size, "simulated_batch_size", 1)
        self.seed = None if seed is None else checked_int(seed, "seed", 0)
        self._own_seed = seed is not None
        self._bound: weakref.ref[torch.nn.Module] | None = None
        self._negatives: tuple[ClipEmbeddings, Tensor, Tensor] | None = None

    @ClassOrInstanceProperty
    def image_embeddings(self: "CLIPModelOutput | type[CLIPModelOutput]") -> Tensor | None:
        """Return the image embeddings `(N, d)`; `None` before `get_embeddings`."""
        return None if self._embeddings is None else self._embeddings.image

    @ClassOrInstanceProperty
    def text_embeddings(self: "CLIPModelOutput | type[CLIPModelOutput]") -> Tensor | None:
        """Return the text embeddings `(N, d)`; `None` before `get_embeddings`."""
        return None if self._embeddings is None else self._embeddings.text

    @ClassOrInstanceProperty
    def num_computed_embeddings(self: "CLIPModelOutput | type[CLIPModelOutput]") -> int:
        """Return N; 0 before `get_embeddings`."""
        return 0 if self._embeddings is None else self._embeddings.image.shape[0]

    @ClassOrInstanceMethod
    def get_embeddings(
        self: "CLIPModelOutput | type[CLIPModelOutput]",
        model: torch.nn.Module,
        loader: Iterable[Any],
        batch_size: int | None = None,
        embedding_dim: int | None = None,
        size: int = 50_000,
        preprocess_fn_img: Callable[[Any], Tensor] | None = None,
        preprocess_fn_txt: Callable[[Any], Tensor] | None = None,
    ) -> None:
        """Embed the pairs from which the simulated negatives are drawn.

        Call it for each checkpoint, before its first batch. The model runs in evaluation mode (its mode is restored)
        and without gradients. Results are kept as `image_embeddings` and `text_embeddings` of the task, or of the
        class if this is called on the class.

        Args:
            model (`torch.nn.Module`):
                The model, with the checkpoint's weights loaded.
            loader (`Iterable`):
                Yields `(images, texts)`, or mappings for the model.
            batch_size (`int`, *optional*):
                Not used, since batches are counted as they come; part of the `trak` API.
            embedding_dim (`int`, *optional*):
                d; if it is given, the embeddings must have it.
            size (`int`, *optional*, defaults to 50000):
                Number of pairs after which to stop.
            preprocess_fn_img (`Callable`, *optional*):
                Applied to the images of each `(images, texts)` batch.
            preprocess_fn_txt (`Callable`, *optional*):
                Applied to the texts of each `(images, texts)` batch.

        Raises:
            TypeError: the loader yields `(images, texts)` and the model takes its inputs by other names.
            ValueError: the loader yields too few pairs, or the embeddings do not have `embedding_dim` columns.
            NonFiniteError: an embedding is NaN or infinite.
        """
        embeddings = embed(model, loader, size, {"image": preprocess_fn_img, "text": preprocess_fn_txt})
        if embedding_dim is not None and embedding_dim != embeddings.image.shape[1]:
            raise ValueError(
                f"`embedding_dim` is {embedding_dim}, but the model's embeddings have {embeddings.image.shape[1]} "
                "columns. Pass that number, or leave `embedding_dim` out."
            )
        if isinstance(self, CLIPModelOutput):
            draw_rows(len(embeddings.image), self.sim_batch_size, self.seed or 0)  # refuse too few pairs right away
            self.bind(model)
        self._embeddings = embeddings

    @ClassOrInstanceMethod
    def get_output(
        self: "CLIPModelOutput | type[CLIPModelOutput]",
        model: torch.nn.Module,
        weights: Tensors | None,
        buffers: Tensors | None,
        image: Tensor,
        label: Tensor,
    ) -> Tensor:
        """Compute f of one pair.

        Args:
            model (`torch.nn.Module`):
                Maps `image` and `text` to embeddings.
            weights (`Mapping[str, torch.Tensor]`, *optional*):
                Parameters that replace the model's own for this call.
            buffers (`Mapping[str, torch.Tensor]`, *optional*):
                Buffers that replace the model's own for this call.
            image (`torch.Tensor` of shape `(C, H, W)`):
                The image, without batch dimension.
            label (`torch.Tensor` of shape `(context length,)`):
                The tokens of the text.

        Returns:
            `torch.Tensor`: a scalar.

        Raises:
            MissingEmbeddingsError: `get_embeddings` has not been called.
        """
        task = self if isinstance(self, CLIPModelOutput) else self()
        kwargs = {"image": image.unsqueeze(0), "text": label.unsqueeze(0)}
        return task.output(call_model(model, weights, buffers, (), kwargs), ()).squeeze(0)

    def bind(self, model: torch.nn.Module) -> None:
        self._bound = weakref.ref(model)

    def use_seed(self, seed: int) -> None:
        if not self._own_seed:
            self.seed = seed

    def reference_rows(self, train_size: int) -> Sequence[int]:
        return draw_rows(train_size, self.sim_batch_size, self.seed or 0)

    def prepare(self, model: torch.nn.Module, loader: Iterable[Any]) -> None:
        self.get_embeddings(model, loader)

    def references(self) -> dict[str, Tensor]:
        embeddings = self._require_embeddings()
        return {"image_embeddings": embeddings.image, "text_embeddings": embeddings.text}

    def restore(self, model: torch.nn.Module, references: Mapping[str, Tensor]) -> None:
        given = {name: tuple(tensor.shape) for name, tensor in references.items()}
        image, text = (references.get(f"{kind}_embeddings") for kind in ("image", "text"))
        if image is None or text is None or image.ndim != 2 or image.shape != text.shape:
            raise ValueError(
                f"The references kept for a CLIP task are {given}. Expected `image_embeddings` and `text_embeddings` "
                "of one shape (N, d). Delete that file, and run the same command again."
            )
        draw_rows(len(image), self.sim_batch_size, self.seed or 0)
        self._embeddings = ClipEmbeddings(image, text, WeightsStamp(model_tensors(model).values()), weakref.ref(model))
        self.bind(model)

    def model_inputs(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (), clip_inputs(batch)

    def output(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        image, text, _ = read_output(model_output)
        over_texts, over_images = _contrasts(image, text, *self._negatives_like(image), scale=1.0)
        return over_texts + over_images

    def out_to_loss_grad(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        return self._error_probability(model_output, self._bound_tensors())

    def get_out_to_loss_grad(
        self, model: torch.nn.Module, weights: Tensors | None, buffers: Tensors | None, batch: Any
    ) -> Tensor:
        tensors = {**model_tensors(model), **(weights or {}), **(buffers or {})}
        with torch.no_grad():
            return self._error_probability(call_model(model, weights, buffers, *self.model_inputs(batch)), tensors)

    def _bound_tensors(self) -> Mapping[str, Tensor] | None:
        """Return the tensors of the model that the next batches go through; `None` if it no longer exists."""
        model = (self._bound or self._require_embeddings().model)()
        return None if model is None else model_tensors(model)

    def _check_weights(self, tensors: Mapping[str, Tensor] | None) -> None:
        """Raise `MissingEmbeddingsError` if the weights are known and the negatives were computed with others."""
        if tensors is not None and not self._require_embeddings().stamp.matches(tensors.values()):
            raise MissingEmbeddingsError(
                "The simulated negatives were computed with other weights than the model has now. Expected embeddings "
                "of the same checkpoint: call `get_embeddings` again after loading each checkpoint."
            )

    def _error_probability(self, model_output: Any, tensors: Mapping[str, Tensor] | None) -> Tensor:
        """Compute q of every pair, `(B,)`; `tensors` are the weights behind the output, if they are known."""
        self._check_weights(tensors)
        image, text, scale = read_output(model_output)
        image, text = image.detach(), text.detach()
        scale = self._scale(scale, tensors).to(image.device)
        over_texts, over_images = _contrasts(image, text, *self._negatives_like(image), scale=scale)
        return (torch.sigmoid(-over_texts) + torch.sigmoid(-over_images)) / 2

    def _scale(self, returned: Tensor | None, tensors: Mapping[str, Tensor] | None) -> Tensor:
        """Return s, the factor of the similarities: the one given to the task, or the model's own."""
        if self.temperature is not None:
            return torch.tensor(self.temperature)
        scale = logit_scale_of(tensors) if returned is None else returned
        return scale.detach().to(dtype=torch.float32)

    def _require_embeddings(self) -> ClipEmbeddings:
        if self._embeddings is None:
            raise MissingEmbeddingsError(
                "The CLIP task has no embeddings to draw simulated negatives from. Expected a call of "
                "`task.get_embeddings(model, loader)` after loading a checkpoint, before its first batch."
            )
        return self._embeddings

    def _negatives_like(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the negatives on the device of `features`."""
        embeddings = self._require_embeddings()
        cached = self._negatives
        if cached is None or cached[0] is not embeddings or cached[1].device != features.device:
            # Under `torch.func` transforms results come wrapped for the transform at hand; they must not outlive it.
            chosen = draw_rows(len(embeddings.image), self.sim_batch_size, self.seed or 0)
            image, text = (placed(rows[chosen], features) for rows in (embeddings.image, embeddings.text))
            self._negatives = cached = (embeddings, image, text)
        return cached[1:]


def placed(rows: Tensor, like: Tensor) -> Tensor:
    """Move rows that no transform of `torch.func` is about to the device of others.

    Args:
        rows: the rows.
        like: a tensor on that device.
    """
    return torch.func.debug_unwrap(rows.to(like.device), recurse=True)


def _contrasts(
    image: Tensor, text: Tensor, image_negatives: Tensor, text_negatives: Tensor, scale: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Compute log(eᵃ / Σ_b e^{a_b}) with a = s φ·ψ of every pair, over the texts and over the images, `(B,)` each.

    With s = 1 this is −logsumexp_b(−φ·(ψ − ψ_b)); sigmoid(−·) of it is 1 − p(a | a_b).
    """
    # The products of an autocast region would be rounded to half precision: at s = 100, an error of up to 1 in s φ·ψ.
    with torch.autocast(image.device.type, enabled=False):
        image, text = scale * image.float(), text.float()
        true = (image * text).sum(dim=-1)
        over_texts = true - (image @ text_negatives.T).logsumexp(dim=-1)
        over_images = true - (scale * text @ image_negatives.T).logsumexp(dim=-1)
    return over_texts, over_images


def parameter_of(tensors: Mapping[str, Tensor] | None, wanted: str) -> Tensor | None:
    """Find the scalar parameter of a name, in whatever submodule, or return `None`."""
    for name, tensor in (tensors or {}).items():
        if name.rpartition(".")[2] == wanted:
            return tensor.detach().float().reshape(())
    return None


def logit_scale_of(tensors: Mapping[str, Tensor] | None) -> Tensor:
    """Return exp of the parameter `logit_scale`: CLIP models learn the logarithm. Raises `ValueError` without it."""
    if (scale := parameter_of(tensors, "logit_scale")) is not None:
        return scale.exp()
    raise ValueError(
        "The model neither returns a logit scale nor has a parameter `logit_scale` (or it no longer exists). "
        "Construct the task with `temperature=…`, the factor by which the model multiplies similarities."
    )
