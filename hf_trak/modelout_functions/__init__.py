"""Model output functions: the tasks. Each defines the scalar f(z; θ) that is attributed, and q(z) = −∂L/∂f.

Start with `base` (the contract), then `classification` (the paper's example) over the numerics in `margins`, and
`aggregated` (samples of several labels) under the token tasks. `registry` turns what users pass as `task` into an
object, `inference` finds the task of a model, `function` says what identifies a task in a store.

May import `hf_trak.identity` (code and settings as plain JSON), `hf_trak.weights.watch` (which weights a CLIP task's
embeddings belong to), `hf_trak.weights.adapters` (what a wrapped model is inside) and `hf_trak.runtime`'s checks.
Knows no gradients, no projections, no files.
"""

from hf_trak.modelout_functions.aggregated import AggregatedModelOutput
from hf_trak.modelout_functions.base import AbstractModelOutput, Batch, BatchedModelOutput, Side
from hf_trak.modelout_functions.classification import (
    ClassificationModelOutput,
    ImageClassificationModelOutput,
    IterativeImageClassificationModelOutput,
    MultiLabelClassificationModelOutput,
    RegressionModelOutput,
    TextClassificationModelOutput,
)
from hf_trak.modelout_functions.clip import CLIPModelOutput, MissingEmbeddingsError
from hf_trak.modelout_functions.clip_sigmoid import SigLIPModelOutput
from hf_trak.modelout_functions.diffusion import DiffusionModelOutput
from hf_trak.modelout_functions.dpo import DPOModelOutput, ORPOModelOutput, RewardModelOutput
from hf_trak.modelout_functions.embedding_pairs import EmbeddingPairsModelOutput
from hf_trak.modelout_functions.embeddings import EmbeddingLossModelOutput
from hf_trak.modelout_functions.function import FunctionModelOutput
from hf_trak.modelout_functions.kto import KTOModelOutput
from hf_trak.modelout_functions.loss import GaussNewtonModelOutput, LossModelOutput
from hf_trak.modelout_functions.policy import GRPOModelOutput, PPOModelOutput
from hf_trak.modelout_functions.question_answering import QuestionAnsweringModelOutput
from hf_trak.modelout_functions.registry import TASK_TO_MODELOUT, get_task, infer_task
from hf_trak.modelout_functions.row_loss import RowLossModelOutput
from hf_trak.modelout_functions.seq2seq_lm import Seq2SeqLMModelOutput
from hf_trak.modelout_functions.text_pairs import TextPairsModelOutput
from hf_trak.modelout_functions.token_tasks import (
    CausalLMModelOutput,
    MaskedLMModelOutput,
    TokenClassificationModelOutput,
)
from hf_trak.modelout_functions.trainer_loss import TrainerLossModelOutput

__all__ = [
    "TASK_TO_MODELOUT", "AbstractModelOutput", "AggregatedModelOutput", "Batch", "BatchedModelOutput",
    "CLIPModelOutput", "CausalLMModelOutput", "ClassificationModelOutput", "DPOModelOutput", "DiffusionModelOutput",
    "EmbeddingLossModelOutput", "EmbeddingPairsModelOutput", "FunctionModelOutput", "GRPOModelOutput",
    "GaussNewtonModelOutput", "ImageClassificationModelOutput", "IterativeImageClassificationModelOutput",
    "KTOModelOutput", "LossModelOutput", "MaskedLMModelOutput", "MissingEmbeddingsError",
    "MultiLabelClassificationModelOutput", "ORPOModelOutput", "PPOModelOutput", "QuestionAnsweringModelOutput",
    "RegressionModelOutput", "RewardModelOutput", "RowLossModelOutput", "Seq2SeqLMModelOutput", "Side",
    "SigLIPModelOutput", "TextClassificationModelOutput", "TextPairsModelOutput", "TokenClassificationModelOutput",
    "TrainerLossModelOutput", "get_task", "infer_task",
]  # fmt: skip
