"""Model output functions: what is attributed."""

from hf_trak.modelout_functions.base import AbstractModelOutput, Batch, BatchedModelOutput, Side
from hf_trak.modelout_functions.classification import (
    ClassificationModelOutput,
    ImageClassificationModelOutput,
    IterativeImageClassificationModelOutput,
    TextClassificationModelOutput,
)
from hf_trak.modelout_functions.clip import CLIPModelOutput, MissingEmbeddingsError
from hf_trak.modelout_functions.clip_sigmoid import SigLIPModelOutput
from hf_trak.modelout_functions.function import FunctionModelOutput
from hf_trak.modelout_functions.loss import LossModelOutput
from hf_trak.modelout_functions.registry import TASK_TO_MODELOUT, get_task, infer_task

__all__ = [
    "TASK_TO_MODELOUT",
    "AbstractModelOutput",
    "Batch",
    "BatchedModelOutput",
    "CLIPModelOutput",
    "ClassificationModelOutput",
    "FunctionModelOutput",
    "ImageClassificationModelOutput",
    "IterativeImageClassificationModelOutput",
    "LossModelOutput",
    "MissingEmbeddingsError",
    "SigLIPModelOutput",
    "Side",
    "TextClassificationModelOutput",
    "get_task",
    "infer_task",
]
