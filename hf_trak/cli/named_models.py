"""Load the model that a command names, from a directory or from the Hub, without running code of a repo."""

from pathlib import Path

import torch
import transformers
from huggingface_hub import constants

from hf_trak.cli.stored_rows import check_exists
from hf_trak.errors import HubAccessError
from hf_trak.hub import safe_loading
from hf_trak.hub.access import without_secrets
from hf_trak.hub.names import shown

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
    """Load a model in the class of the task, or in the class that its config names. No code of a repo is run.

    Raises:
        FileNotFoundError: the name is a path that does not exist.
        HubAccessError: the model cannot be loaded from the Hub, or is not in the cache while offline.
        ValueError: the config names no class of transformers, and no task is given; or the repo refers to code or to
            files elsewhere, or is damaged.
    """
    return _load(name, revision, task, "model", may_be_adapter=True)


def _load(name: str, revision: str, task: str | None, what: str, may_be_adapter: bool) -> torch.nn.Module:
    check_exists(Path(name), name, what)
    try:
        return _load_model(name, revision, task, may_be_adapter)
    except OSError as error:
        # The second is from loading the base model of an adapter, which it names.
        if Path(name).is_dir() or isinstance(error, HubAccessError):
            raise
        offline = " HF_HUB_OFFLINE is set, so that only the cache is searched." if constants.HF_HUB_OFFLINE else ""
        reason = without_secrets(" ".join(str(error).split()))[:300]
        raise HubAccessError(
            f"The {what} {name!r} at revision {revision!r} could not be loaded: there is no such directory, and the "
            f"Hub or its cache gave: {reason}{offline} Expected a directory that `save_pretrained` wrote, or a model "
            "repo. Correct the name."
        ) from error


def _load_model(name: str, revision: str, task: str | None, may_be_adapter: bool) -> torch.nn.Module:
    if may_be_adapter:

        def load_base(base: str, base_revision: str | None) -> torch.nn.Module:
            return _load(base, base_revision or "main", task, "base model", may_be_adapter=False)

        adapter = safe_loading.load_adapter(name, revision, load_base)
        if adapter is not None:
            return adapter
    auto = AUTO_CLASSES.get(task or "")
    if auto is not None:
        return safe_loading.load_model(name, revision, getattr(transformers, auto))
    named = safe_loading.architectures(name, revision)
    found = map(safe_loading.model_class, named if isinstance(named, list) else [])
    kind = next((kind for kind in found if kind is not None), None)
    if kind is None:
        raise ValueError(
            f"The config of {name!r} names the classes {shown(named)}; transformers has none of them. Set `task` to "
            f"one of {sorted(AUTO_CLASSES)}."
        )
    return safe_loading.load_model(name, revision, kind)
