"""Tiny models of every kind of head, each with a batch of four samples and a scalar output."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import transformers
from architectures_configs import MAX_PARAMETERS, tiny_config
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

Batch = dict[str, Tensor]


def tokens(size: int = 4, length: int = 12, padded: bool = True) -> dict[str, Tensor]:
    """Random tokens with a padding mask: sample 1 padded on the right, sample 2 on the left."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 99, (size, length), generator=generator)
    mask = torch.ones(size, length, dtype=torch.long)
    if padded:
        mask[1, 8:] = 0
        mask[2, :3] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def images(config: Any, size: int = 4) -> dict[str, Tensor]:
    """Random images of the size that a configuration names."""
    side = getattr(config, "image_size", 32)
    height, width = (side, side) if isinstance(side, int) else tuple(side)
    generator = torch.Generator().manual_seed(0)
    return {"pixel_values": torch.randn(size, getattr(config, "num_channels", 3), height, width, generator=generator)}


def last_logits(result: Any, batch: Any) -> Tensor:
    """A margin-like scalar of logits `(B, *, classes)` that depends on all of them."""
    logits = (result.logits if hasattr(result, "logits") else result.last_hidden_state).float()
    if logits.ndim > 2:
        mask = batch["attention_mask"] if "attention_mask" in batch and "input_ids" in batch else None
        mask = torch.ones(logits.shape[:2]) if mask is None or mask.ndim != 2 else mask
        mask = mask[:, -logits.shape[1] :].to(logits)
        picked = logits[..., 7 % logits.shape[-1]] - logits.logsumexp(-1)
        return (picked * mask).sum(1)
    return logits[:, 1] - logits.logsumexp(1)


def everything(result: Any, batch: Any) -> Tensor:
    """A sum, with fixed weights, of every number of the output that belongs to a sample."""
    size = len(next(iter(batch.values())))
    total = torch.zeros(size)
    for value in result.values():
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim and len(value) == size:
            numbers = value.float().reshape(size, -1)
            total = total + numbers @ torch.cos(torch.arange(numbers.shape[1])) / numbers.shape[1] ** 0.5
    return total


def pair_similarity(result: Any, batch: Any) -> Tensor:
    """A score of each image-text pair alone, without the other pairs of the batch."""
    return everything({"one": result.image_embeds * result.text_embeds}, batch)


def random(*shape: int) -> Tensor:
    """Standard normal numbers, always the same."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def waves(config: Any) -> Batch:
    """Waveforms, or the spectrograms that a model takes in their place."""
    bins = getattr(config, "num_mel_bins", 16)
    match config.model_type:
        case "audio-spectrogram-transformer":
            return {"input_values": random(4, config.max_length, bins)}
        case "wav2vec2-bert":
            return {"input_features": random(4, 20, config.feature_projection_input_dim)}
        case "whisper":
            return {"input_features": random(4, bins, 2 * config.max_source_positions)}
        case "parakeet_ctc" | "lasr_ctc" | "parakeet_encoder":
            return {"input_features": random(4, 64, bins)}
    return {"input_values": random(4, 400)}


def sentences(config: Any) -> Batch:
    """Tokens, under the names that a model has for them."""
    batch = tokens()
    if config.model_type == "perceiver":
        batch["inputs"] = batch.pop("input_ids")
    return batch


def ended_sentences(config: Any) -> Batch:
    """Tokens whose last one ends the sentence, which is where some classifiers look."""
    batch = sentences(config)
    if config.model_type in ENDED:
        last = batch["attention_mask"].shape[1] - 1 - batch["attention_mask"].flip(1).argmax(1)
        batch["input_ids"][torch.arange(4), last] = config.eos_token_id
    return batch


ENDED = ("bart", "bigbird_pegasus", "mbart", "mt5", "mvp", "plbart", "t5", "umt5")


def pictures(config: Any) -> Batch:
    """Images, or what a model takes in their place."""
    match config.model_type:
        case "imagegpt":
            return {"input_ids": tokens(padded=False)["input_ids"]}
        case "perceiver":
            return {"inputs": images(config)["pixel_values"]}
        case "siglip2":
            vision = config.vision_config
            numbers = vision.num_channels * vision.patch_size**2
            return {
                "pixel_values": random(4, vision.num_patches, numbers),
                "pixel_attention_mask": torch.ones(4, vision.num_patches, dtype=torch.long),
                "spatial_shapes": torch.full((4, 2), int(vision.num_patches**0.5)),
            }
    return images(getattr(config, "vision_config", config))


def questions(config: Any) -> Batch:
    """Tokens of an encoder and of a decoder."""
    decoder = torch.randint(5, 99, (4, 6), generator=torch.Generator().manual_seed(1))
    return {**tokens(), "decoder_input_ids": decoder, "decoder_attention_mask": torch.ones_like(decoder)}


def choices(config: Any) -> Batch:
    """Two sentences for each sample."""
    first, second = tokens(8).items()
    return {first[0]: first[1].view(4, 2, -1), second[0]: second[1].view(4, 2, -1)}


def pairs(config: Any) -> Batch:
    """Images with sentences of the length that a model has."""
    text, vision = getattr(config, "text_config", config), getattr(config, "vision_config", config)
    batch = tokens(length=getattr(text, "max_position_embeddings", 12) if "siglip" in config.model_type else 12)
    batch["input_ids"][:, -1] = getattr(text, "eos_token_id", None) or 2
    return {**batch, **images(vision)}


IMAGE_TOKEN = 4
"""The token that stands for a part of an image; no sentence has it."""

IMAGE_TOKENS = (16, 17, 4, 1, 5, 64, 8, 2, 32, 9, 3, 6)
"""Numbers of tokens that stand for an image: how many a model wants depends on its configuration."""


def illustrated(config: Any) -> Iterator[Batch]:
    """Make sentences that begin with the places of an image, for each number of these and each layout of pixels."""
    pixels = images(getattr(config, "vision_config", config))["pixel_values"]
    sizes = torch.tensor(pixels.shape[-2:]).expand(4, 2)
    for image in (
        {"pixel_values": pixels},
        {"pixel_values": pixels, "image_sizes": sizes},
        {"pixel_values": pixels[:, None]},
        {"pixel_values": pixels[:, None], "image_sizes": sizes},
    ):
        for count in IMAGE_TOKENS:
            ids = torch.cat([torch.full((4, count), IMAGE_TOKEN), tokens(padded=False)["input_ids"]], 1)
            yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), **image}


def speech_questions(config: Any) -> Batch:
    """Spectrograms or waveforms for an encoder, and tokens of a decoder."""
    decoder = questions(config)["decoder_input_ids"]
    if config.model_type in ("speech-encoder-decoder", "speecht5", "moonshine"):
        return {"input_values": random(4, 4000), "decoder_input_ids": decoder}
    names = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim")
    bins = next((size for name in names if (size := getattr(config, name, None))), 16)
    if config.model_type == "whisper":
        return {"input_features": random(4, bins, 2 * config.max_source_positions), "decoder_input_ids": decoder}
    return {"input_features": random(4, 40, bins), "decoder_input_ids": decoder}


def past(config: Any) -> Batch:
    """Time series."""
    length = config.context_length + max(getattr(config, "lags_sequence", None) or [0])
    batch = {"past_values": random(4, length), "past_observed_mask": torch.ones(4, length)}
    batch["past_time_features"] = random(4, length, max(1, getattr(config, "num_time_features", 1)))
    return batch


def videos(config: Any) -> Batch:
    """Videos."""
    frames = getattr(config, "num_frames", 2)
    return {"pixel_values": images(config, 4 * frames)["pixel_values"].unflatten(0, (4, frames))}


def _built(auto: str, config: Any) -> nn.Module:
    torch.manual_seed(0)
    if auto == "AutoModelForCausalLM" and config.model_type.startswith("musicgen"):  # listed under the whole's type
        melody = "Melody" if config.model_type.endswith("melody") else ""
        model = getattr(transformers, f"Musicgen{melody}ForCausalLM")(config.decoder)
    else:
        model = getattr(transformers, auto).from_config(config)
    count = sum(p.numel() for p in model.parameters())
    if count > MAX_PARAMETERS:
        raise ValueError(f"{count:,} parameters are too many for a tiny model")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # zero-initialized biases, scales and position tables would hide errors
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


class Head(NamedTuple):
    """One kind of head."""

    mapping: str
    """Name of transformers' table of model types."""

    build: Callable[[str], tuple[nn.Module, Batch]]
    """Makes a tiny model of a type, and a batch."""

    output: Callable[[Any, Any], Tensor] = last_logits
    """f, of the model's output and the batch."""

    auto: str = ""
    """Name of the class in transformers."""


def _head(
    auto: str, mapping: str, batch: Callable[[Any], Batch], output: Callable[[Any, Any], Tensor] = last_logits
) -> Head:
    def build(model_type: str) -> tuple[nn.Module, Batch]:
        config = tiny_config(model_type)
        if model_type == "reformer" and auto != "AutoModelForCausalLM":
            config.is_decoder = False
        return _built(auto, config), batch(config)

    return Head(f"MODEL_FOR_{mapping}_MAPPING_NAMES", build, output, auto)


def _image_text_to_text(model_type: str) -> tuple[nn.Module, Batch]:
    """Take the first batch that a model accepts."""
    config = tiny_config(model_type)
    for name in ("image_token_id", "image_token_index"):
        if getattr(config, name, None) is not None:
            setattr(config, name, IMAGE_TOKEN)
    model = _built("AutoModelForImageTextToText", config)
    refused: list[Exception] = []
    for batch in illustrated(config):
        try:
            with torch.no_grad():
                model(**batch)
        except (ValueError, RuntimeError, IndexError, TypeError, AttributeError) as error:
            refused.append(error)
        else:
            return model, batch
    raise refused[0]


HEADS: dict[str, Head] = {
    "causal-lm": _head("AutoModelForCausalLM", "CAUSAL_LM", sentences),
    "sequence-classification": _head("AutoModelForSequenceClassification", "SEQUENCE_CLASSIFICATION", ended_sentences),
    "image-classification": _head("AutoModelForImageClassification", "IMAGE_CLASSIFICATION", pictures),
    "seq2seq-lm": _head("AutoModelForSeq2SeqLM", "SEQ_TO_SEQ_CAUSAL_LM", questions),
    "masked-lm": _head("AutoModelForMaskedLM", "MASKED_LM", sentences),
    "audio-classification": _head("AutoModelForAudioClassification", "AUDIO_CLASSIFICATION", waves),
    "token-classification": _head("AutoModelForTokenClassification", "TOKEN_CLASSIFICATION", sentences),
    "question-answering": _head("AutoModelForQuestionAnswering", "QUESTION_ANSWERING", ended_sentences, everything),
    "multiple-choice": _head("AutoModelForMultipleChoice", "MULTIPLE_CHOICE", choices, everything),
    "next-sentence-prediction": _head("AutoModelForNextSentencePrediction", "NEXT_SENTENCE_PREDICTION", sentences),
    "ctc": _head("AutoModelForCTC", "CTC", waves, everything),
    "audio-frame-classification": _head(
        "AutoModelForAudioFrameClassification", "AUDIO_FRAME_CLASSIFICATION", waves, everything
    ),
    "audio-xvector": _head("AutoModelForAudioXVector", "AUDIO_XVECTOR", waves, everything),
    "masked-image-modeling": _head("AutoModelForMaskedImageModeling", "MASKED_IMAGE_MODELING", pictures, everything),
    "semantic-segmentation": _head("AutoModelForSemanticSegmentation", "SEMANTIC_SEGMENTATION", pictures, everything),
    "depth-estimation": _head("AutoModelForDepthEstimation", "DEPTH_ESTIMATION", pictures, everything),
    "object-detection": _head("AutoModelForObjectDetection", "OBJECT_DETECTION", pictures, everything),
    "video-classification": _head("AutoModelForVideoClassification", "VIDEO_CLASSIFICATION", videos),
    "zero-shot-image-classification": _head(
        "AutoModelForZeroShotImageClassification", "ZERO_SHOT_IMAGE_CLASSIFICATION", pairs, pair_similarity
    ),
    "image-text-to-text": Head(
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", _image_text_to_text, last_logits, "AutoModelForImageTextToText"
    ),
    "speech-seq2seq": _head("AutoModelForSpeechSeq2Seq", "SPEECH_SEQ_2_SEQ", speech_questions),
    "text-encoding": _head("AutoModelForTextEncoding", "TEXT_ENCODING", sentences, everything),
    "time-series-prediction": _head("AutoModelForTimeSeriesPrediction", "TIME_SERIES_PREDICTION", past, everything),
}


def causal_lm(model_type: str) -> tuple[nn.Module, Batch]:
    """A tiny causal language model and a batch for it."""
    return HEADS["causal-lm"].build(model_type)


def not_tried() -> dict[str, int]:
    """Return the classes of transformers that no head is for, each with its number of architectures."""
    tried = {head.auto for head in HEADS.values()}
    classes = {name: getattr(modeling_auto, name) for name in dir(modeling_auto) if name.startswith("AutoModel")}
    return {
        name: len(found._model_mapping)
        for name, found in classes.items()
        if name not in tried and getattr(found, "_model_mapping", None)
    }
