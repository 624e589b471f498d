"""Checks of batches against the sizes that are fixed in a model's weights.

They find a tokenizer or image processor that does not belong to the model. An index beyond the end of an embedding
raises an error without any names on the CPU, and on CUDA it ends the process; so batches are checked while they are
still on the CPU.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_trak.data.model_inputs import check_inputs, input_names


@dataclass(frozen=True)
class BatchLimits:
    """Sizes that are fixed in a model's weights. `None` stands for no limit, or none that is known."""

    model: str = ""
    vocabulary: int | None = None
    """Number of rows of the token embedding."""
    positions: int | None = None
    """Number of tokens for which the text has learned position embeddings."""
    image: tuple[int, int, int] | None = None
    """Channels, height and width of the images that the position embedding is made for."""
    inputs: tuple[str, ...] = ()
    """Names of inputs. Every batch has to have one of them, see [`input_names`]."""

    @classmethod
    def of(cls, model: torch.nn.Module) -> "BatchLimits":
        """Read the limits of a model of `transformers` or open_clip, also one wrapped by PEFT.

        Any other model has no limits.
        """
        wrapper: Any = model
        inner: Any = wrapper.get_base_model() if hasattr(wrapper, "get_base_model") else wrapper
        vocabulary, positions = _text_limits(inner)
        return cls(type(inner).__name__, vocabulary, positions, _image_limits(inner), input_names(inner))

    def check(self, batch: Any, columns: str = "") -> None:
        """Check a batch on the CPU.

        Args:
            batch: a batch from the collator.
            columns: the columns that it was made from, see [`stored_columns`], for the error message.

        Raises:
            ValueError: the batch has no input of the model, or a token id, the length of the texts or the size of the
                images exceeds the limits.
        """
        check_inputs(batch, self.inputs, self.model, columns)
        items = batch if isinstance(batch, Mapping) else {}
        if not isinstance(batch, Mapping) and isinstance(batch, list | tuple) and len(batch) == 2:
            items = {"image": batch[0], "text": batch[1]}
        for name in ("input_ids", "decoder_input_ids", "text"):
            tokens = items.get(name)
            if not isinstance(tokens, Tensor):
                continue
            if tokens.is_floating_point() or not tokens.numel():
                if name != "text" and self.vocabulary is not None:
                    raise ValueError(
                        f"`{name}` of a batch of {len(tokens)} rows is of {tokens.dtype} and the shape "
                        f"{tuple(tokens.shape)}. Expected integers, at least one token for each row. Leave rows "
                        "without tokens out."
                    )
                continue
            if tokens.ndim in (2, 3):  # pairs have two sequences each, `(B, 2, T)`
                self._check_tokens(name, tokens, items.get("position_ids"))
        for name in ("pixel_values", "image"):
            images = items.get(name)
            if isinstance(images, Tensor) and images.ndim == 4:
                self._check_images(name, images, bool(items.get("interpolate_pos_encoding", False)))

    def _check_tokens(self, name: str, tokens: Tensor, positions: Any) -> None:
        lowest, highest = (int(one) for one in tokens.aminmax())
        length = tokens.shape[-1]
        if isinstance(positions, Tensor) and positions.numel():  # of packed documents, which may be many
            length = min(length, int(positions.max()) + 1)
        if self.vocabulary is not None and (highest >= self.vocabulary or lowest < 0):
            outside = highest if highest >= self.vocabulary else lowest
            row = int((tokens == outside).flatten(1).any(dim=1).nonzero()[0])
            raise ValueError(
                f"`{name}` of sample {row} of the batch holds the token {outside}, but the token embedding of "
                f"{self.model} has {self.vocabulary} rows. Expected tokens 0 … {self.vocabulary - 1}. Load tokenizer "
                "and model from the same checkpoint, or resize the embedding as for the training "
                "(`model.resize_token_embeddings(len(tokenizer))`)."
            )
        if self.positions is not None and name != "decoder_input_ids" and length > self.positions:
            raise ValueError(
                f"`{name}` has {tokens.shape[-1]} tokens per sample, but {self.model} has {self.positions} positions. "
                "Expected at most as many tokens. Tokenize with `truncation=True` and "
                f"`max_length={self.positions}` (`--max_length` of commands), as for the training."
            )

    def _check_images(self, name: str, images: Tensor, interpolated: bool) -> None:
        given = tuple(images.shape[1:])
        if self.image is None or given == self.image or (interpolated and given[0] == self.image[0]):
            return
        raise ValueError(
            f"`{name}` has images of the shape (channels, height, width) = {given}; {self.model} takes {self.image}. "
            "Expected images of that shape. Load image processor and model from the same checkpoint, or set the "
            "processor's size to the model's."
        )


def _text_limits(model: Any) -> tuple[int | None, int | None]:
    if isinstance(getattr(model, "token_embedding", None), torch.nn.Embedding):  # open_clip
        return model.token_embedding.num_embeddings, getattr(model, "context_length", None)
    if not hasattr(model, "get_input_embeddings"):
        text = getattr(model, "text", None)  # open_clip's CustomTextCLIP
        return _text_limits(text) if isinstance(text, torch.nn.Module) else (None, None)
    owner = getattr(model, "text_model", model)
    try:
        tokens = owner.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return None, None
    if not isinstance(tokens, torch.nn.Embedding):
        return None, None
    siblings = next((m for m in owner.modules() if any(child is tokens for child in m.children())), None)
    for name in ("position_embeddings", "position_embedding", "wpe"):
        table = getattr(siblings, name, None)
        if isinstance(table, torch.nn.Embedding):
            offset = 0 if table.padding_idx is None else table.padding_idx + 1  # RoBERTa counts from there
            return tokens.num_embeddings, table.num_embeddings - offset
    return tokens.num_embeddings, None


def _image_limits(model: Any) -> tuple[int, int, int] | None:
    visual = getattr(model, "visual", None)
    if visual is not None:  # open_clip
        size = getattr(visual, "image_size", None)
        fixed = getattr(visual, "positional_embedding", None) is not None or hasattr(visual, "attnpool")
        return (3, *_pair(size)) if fixed and size is not None else None
    config = getattr(model, "config", None)
    if config is None or "interpolate_pos_encoding" not in inspect.signature(model.forward).parameters:
        return None
    vision = getattr(config, "vision_config", None) or config
    size = getattr(vision, "image_size", None)
    return None if size is None else (getattr(vision, "num_channels", 3), *_pair(size))


def _pair(size: Any) -> tuple[int, int]:
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return int(height), int(width)
