"""From a model to the name of its task: the table of tasks that models have, and the search for the one that fits."""

from typing import Any

import torch

from hf_trak.modelout_functions.base import AbstractModelOutput
from hf_trak.modelout_functions.batches import unwrapped
from hf_trak.modelout_functions.classification import (
    ClassificationModelOutput,
    ImageClassificationModelOutput,
    IterativeImageClassificationModelOutput,
    MultiLabelClassificationModelOutput,
    RegressionModelOutput,
    TextClassificationModelOutput,
)
from hf_trak.modelout_functions.clip import CLIPModelOutput
from hf_trak.modelout_functions.clip_sigmoid import SigLIPModelOutput
from hf_trak.modelout_functions.question_answering import QuestionAnsweringModelOutput
from hf_trak.modelout_functions.seq2seq_lm import Seq2SeqLMModelOutput
from hf_trak.modelout_functions.token_tasks import (
    CausalLMModelOutput,
    MaskedLMModelOutput,
    TokenClassificationModelOutput,
)

TASKS_OF_MODELS: dict[str, type[AbstractModelOutput]] = {
    "image_classification": ImageClassificationModelOutput,
    "iterative_image_classification": IterativeImageClassificationModelOutput,
    "text_classification": TextClassificationModelOutput,
    "clip": CLIPModelOutput,
    "siglip": SigLIPModelOutput,
    "audio_classification": ClassificationModelOutput,
    "causal_lm": CausalLMModelOutput,
    "masked_lm": MaskedLMModelOutput,
    "multi_label_classification": MultiLabelClassificationModelOutput,
    "question_answering": QuestionAnsweringModelOutput,
    "regression": RegressionModelOutput,
    "seq2seq_lm": Seq2SeqLMModelOutput,
    "token_classification": TokenClassificationModelOutput,
}
"""Task classes by name, all but `loss`, which wraps one of them."""

_CLIP_CLASSES = frozenset(
    {"CLIP", "CustomTextCLIP", "CLIPModel", "AltCLIPModel", "ChineseCLIPModel", "MetaClip2Model"}
    | {"SiglipModel", "Siglip2Model"}
)
"""Classes of contrastive image-text models, of open_clip and of `transformers`."""

_TASK_MAPPINGS = (
    # BART is listed as a masked language model, too: the more special kinds come first.
    ("seq2seq_lm", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    ("seq2seq_lm", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES"),
    ("masked_lm", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    ("causal_lm", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    ("causal_lm", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"),
    ("image_classification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
    ("image_classification", "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES"),
    ("audio_classification", "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES"),
    ("text_classification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"),
    ("text_classification", "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES"),
    ("text_classification", "MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING_NAMES"),
    ("token_classification", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES"),
    ("question_answering", "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES"),
)
"""Lists of class names in `transformers`, and the task of the models in each."""


def known_task(model: torch.nn.Module) -> str | None:
    """Find the task of a model by the name of its class, or of a class that it derives from, and by its config.

    Args:
        model: any model, also one wrapped by `accelerate`, `torch.compile` or PEFT.

    Returns:
        A name of [`TASKS_OF_MODELS`], or `None` where no task is known.
    """
    inner = unwrapped(model)[1]
    config = getattr(inner, "config", None)
    for cls in type(inner).__mro__:
        if cls.__name__ in _CLIP_CLASSES:
            return "clip" if getattr(inner, "logit_bias", None) is None else "siglip"
        task = _task_of_class(cls.__name__, config)
        if task in ("text_classification", "image_classification", "audio_classification"):
            return _of_problem(task, config)
        if task is not None:
            return task
    return None


def _of_problem(task: str, config: Any) -> str | None:
    """Tell apart the three kinds of problem of a classification head by the config, as the models' own loss does."""
    problem = getattr(config, "problem_type", None)
    if problem is None and getattr(config, "num_labels", None) == 1:
        problem = "regression"
    if problem in (None, "single_label_classification"):
        return task
    return problem if problem in ("regression", "multi_label_classification") else None


def _task_of_class(name: str, config: Any) -> str | None:
    """Look a class of `transformers` up by its name, in the lists by which `AutoModelFor…` finds it."""
    from transformers.models.auto import modeling_auto  # a second to import, which a task that is given need not wait

    for task, mapping in _TASK_MAPPINGS:
        if name in getattr(modeling_auto, mapping, {}).values():
            configs = (config, getattr(config, "text_config", None))
            two = task == "causal_lm" and any(getattr(each, "is_encoder_decoder", False) for each in configs)
            return "seq2seq_lm" if two else task
    if "ForImageClassification" in name:
        return "image_classification"
    return "text_classification" if name.endswith("ForSequenceClassification") else None
