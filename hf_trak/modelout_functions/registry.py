"""From a name, a function or a model to a task."""

from collections.abc import Callable
from typing import Any

import torch
from transformers.models.auto import modeling_auto

from hf_trak.modelout_functions.base import AbstractModelOutput
from hf_trak.modelout_functions.causal_lm import CausalLMModelOutput
from hf_trak.modelout_functions.classification import (
    ClassificationModelOutput,
    ImageClassificationModelOutput,
    IterativeImageClassificationModelOutput,
    TextClassificationModelOutput,
)
from hf_trak.modelout_functions.clip import CLIPModelOutput
from hf_trak.modelout_functions.clip_sigmoid import SigLIPModelOutput
from hf_trak.modelout_functions.function import FunctionModelOutput
from hf_trak.modelout_functions.loss import LossModelOutput
from hf_trak.modelout_functions.masked_lm import MaskedLMModelOutput
from hf_trak.modelout_functions.multi_label import MultiLabelClassificationModelOutput
from hf_trak.modelout_functions.positions import unwrapped
from hf_trak.modelout_functions.question_answering import QuestionAnsweringModelOutput
from hf_trak.modelout_functions.regression import RegressionModelOutput
from hf_trak.modelout_functions.seq2seq_lm import Seq2SeqLMModelOutput
from hf_trak.modelout_functions.token_classification import TokenClassificationModelOutput

TASK_TO_MODELOUT: dict[str, type[AbstractModelOutput]] = {
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
    "loss": LossModelOutput,
}
"""Task classes by name: the four of the seed API first."""

_CLIP_CLASSES = frozenset(
    {"CLIP", "CustomTextCLIP", "CLIPModel", "AltCLIPModel", "ChineseCLIPModel", "MetaClip2Model"}
    | {"SiglipModel", "Siglip2Model"}
)


_TASK_MAPPINGS = (
    # BART is listed as a masked language model, too: what is more special comes first.
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


def get_task(task: str | AbstractModelOutput | type[AbstractModelOutput] | Callable[..., Any]) -> AbstractModelOutput:
    """The task object for whatever a user may pass as `task`.

    Args:
        task: a name of [`TASK_TO_MODELOUT`], a task, a task class that needs no arguments, or a function
            `(model_output, batch) -> (B,)`, see [`FunctionModelOutput`].

    Raises:
        ValueError: the name is unknown.
        TypeError: it is none of these.
    """
    if isinstance(task, AbstractModelOutput):
        return task
    if isinstance(task, str):
        if task not in TASK_TO_MODELOUT:
            raise ValueError(
                f"The task {task!r} is unknown. Expected one of {sorted(TASK_TO_MODELOUT)}. For any other model "
                "output, pass a function (model_output, batch) -> tensor (B,), or an instance of your own "
                "`AbstractModelOutput` subclass."
            )
        return TASK_TO_MODELOUT[task]()
    if isinstance(task, type) and issubclass(task, AbstractModelOutput):
        return task()
    if callable(task) and not isinstance(task, type | torch.nn.Module):
        return FunctionModelOutput(task)
    raise TypeError(
        f"`task` is {task!r}. Expected one of {sorted(TASK_TO_MODELOUT)}, a function (model_output, batch) -> tensor "
        "(B,), or an instance of an `AbstractModelOutput` subclass."
    )


def infer_task(model: torch.nn.Module) -> str:
    """The task name that fits a model, from the name of its class (or of a class that it derives from) and its config.

    Raises:
        ValueError: no task is known for it.
    """
    task = known_task(model)
    if task is None:
        raise ValueError(
            f"No task is known for a {type(unwrapped(model)[1]).__name__}. Pass `task=`: one of "
            f"{sorted(TASK_TO_MODELOUT)}, a function (model_output, batch) -> tensor (B,), or an instance of an "
            "`AbstractModelOutput` subclass. Is it a model without a head? `AutoModelFor…` loads one with it."
        )
    return task


def known_task(model: torch.nn.Module) -> str | None:
    """[`infer_task`] that answers `None` where nothing is known."""
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
    """Classification heads serve three kinds of problem; the config says which, as for the models' own loss."""
    problem = getattr(config, "problem_type", None)
    if problem is None and getattr(config, "num_labels", None) == 1:
        problem = "regression"
    if problem in (None, "single_label_classification"):
        return task
    return problem if problem in ("regression", "multi_label_classification") else None


def _task_of_class(name: str, config: Any) -> str | None:
    """The task of a class of `transformers` by its name, after the lists by which `AutoModelFor…` finds it."""
    for task, mapping in _TASK_MAPPINGS:
        if name in getattr(modeling_auto, mapping, {}).values():
            if task == "causal_lm" and _is_encoder_decoder(config):
                return "seq2seq_lm"
            return task
    if "ForImageClassification" in name:
        return "image_classification"
    return "text_classification" if name.endswith("ForSequenceClassification") else None


def _is_encoder_decoder(config: Any) -> bool:
    configs = (config, getattr(config, "text_config", None))
    return any(getattr(each, "is_encoder_decoder", False) for each in configs)
