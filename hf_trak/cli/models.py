"""A model with its tokenizer or processor, from a directory or from the Hub."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import constants
from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, AutoTokenizer

from hf_trak.cli.files import check_exists
from hf_trak.errors import HubAccessError

AUTO_CLASSES = {
    "image_classification": "AutoModelForImageClassification",
    "iterative_image_classification": "AutoModelForImageClassification",
    "text_classification": "AutoModelForSequenceClassification",
    "regression": "AutoModelForSequenceClassification",
    "multi_label_classification": "AutoModelForSequenceClassification",
    "audio_classification": "AutoModelForAudioClassification",
    "clip": "AutoModel",
    "siglip": "AutoModel",
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "seq2seq_lm": "AutoModelForSeq2SeqLM",
    "token_classification": "AutoModelForTokenClassification",
    "question_answering": "AutoModelForQuestionAnswering",
}
"""The auto class of each task. A task without one takes the class that the model's config names."""


def load_model(name: str, revision: str, task: str | None) -> torch.nn.Module:
    """The model in the class of the task, or in the class that its config names. No code of a repo is run.

    Raises:
        FileNotFoundError: the name is a path, and there is nothing.
        HubAccessError: the model cannot be loaded from the Hub, or is not in the cache while offline.
        ValueError: the config names no class of transformers, and no task says which.
    """
    check_exists(Path(name), name, "model")
    if Path(name).is_dir():
        return _load_model(name, revision, task)
    try:
        return _load_model(name, revision, task)
    except OSError as error:
        if isinstance(error, HubAccessError):  # of the base of an adapter, which it names
            raise
        offline = " HF_HUB_OFFLINE is set, so only what is in the cache is found." if constants.HF_HUB_OFFLINE else ""
        reason = " ".join(str(error).split())[:300]
        raise HubAccessError(
            f"The model {name!r} at revision {revision!r} could not be loaded: there is no such directory, and the "
            f"Hub or its cache gave: {reason}{offline} Expected a directory that `save_pretrained` wrote, or a model "
            "repo. Correct the name."
        ) from error


def _load_model(name: str, revision: str, task: str | None) -> torch.nn.Module:
    adapter = _adapter(name)
    if adapter is not None:
        from peft import PeftModel

        base = load_model(str(adapter["base_model_name_or_path"]), str(adapter.get("revision") or "main"), task)
        return PeftModel.from_pretrained(base, name, is_trainable=True)
    kind = AUTO_CLASSES.get(task or "")
    if kind is None:
        named = AutoConfig.from_pretrained(name, revision=revision).architectures or []
        kind = next((known for known in named if hasattr(transformers, known)), None)
        if kind is None:
            raise ValueError(
                f"The config of {name!r} names the classes {named}, which transformers lacks. Set `task` to one of "
                f"{sorted(AUTO_CLASSES)}."
            )
    return getattr(transformers, kind).from_pretrained(name, revision=revision)


def _adapter(name: str) -> dict[str, Any] | None:
    path = Path(name) / "adapter_config.json"
    return json.loads(path.read_text()) if path.is_file() else None


def load_tokenizer(name: str, revision: str) -> Any:
    """The tokenizer of a model."""
    return AutoTokenizer.from_pretrained(name, revision=revision)


def load_image_processor(name: str, revision: str) -> Any:
    """The image processor of a model."""
    return AutoImageProcessor.from_pretrained(name, revision=revision)


def load_processor(name: str, revision: str) -> Any:
    """The processor of images and texts of a model."""
    return AutoProcessor.from_pretrained(name, revision=revision)
