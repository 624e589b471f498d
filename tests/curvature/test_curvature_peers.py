"""Exact scores and curvatures equal those of other libraries, where these compute the same.

Skipped where a library is missing. What differs between them, apart from rounding:

- kronfluence returns ⟨∇loss, P⁻¹∇measurement⟩, so that the sign is the opposite. Like curvlinops, it counts all
  positions in the covariances, also those that have no gradient (another one is the maximum of a pool; the last token
  of a causal language model, unless an attention mask leaves it out). Both average the groups of a convolution's
  channels.
- K-FAC's own eigenvalues λ_S λ_A are kronfluence's curvature of one position; bergson, curvlinops and hf_trak multiply
  them by the positions of a row. Corrected eigenvalues are the same everywhere.
- curvlinops sums over rows.
- bergson follows no output layer and, unless asked to, no bias. Its bases of whole gradients are those of a batch's
  gradient: of a row's where a batch has one row.
"""

import copy
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from curvature_runs import Rows, assembled, error, exact_scores, rows_of, written_curvature
from datasets import Dataset
from dense_curvature import log_odds
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2ForTokenClassification,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)
from transformers.pytorch_utils import Conv1D

from hf_trak.modelout_functions import CausalLMModelOutput

DAMPING = 0.1
TOLERANCE = 1e-5
"""Of the largest score. All compute in float32, in which products of a few hundred numbers differ by about 1e-6."""

LENGTH, VOCABULARY = 7, 30


def peer(name: str) -> ModuleType:
    """Import another library, or skip the test."""
    if name not in sys.modules and importlib.util.find_spec(name.split(".")[0]) is None:
        pytest.skip(f"{name.split('.')[0]} is not installed")
    return importlib.import_module(name)


# -- models ----------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A network with the calling convention of image classifiers."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.body(pixel_values)


def perceptron() -> tuple[nn.Module, tuple[int, ...]]:
    return Net(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5, bias=False)), (6,)


def convolutions() -> tuple[nn.Module, tuple[int, ...]]:
    layers = (
        nn.Conv2d(3, 4, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 6, 3, padding=1, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(96, 5),
    )
    return Net(*layers), (3, 7, 8)


NETWORKS = {one.__name__: one for one in (perceptron, convolutions)}


def classified(name: str, n: int = 120, m: int = 5) -> tuple[nn.Module, Rows, Rows]:
    """A network, its rows and targets."""
    model, shape = NETWORKS[name]()
    inputs, labels = torch.randn(n + m, *shape) + 0.3, torch.randint(5, (n + m,))
    rows = rows_of(pixel_values=inputs, labels=labels)
    return model, rows[:n], rows[n:]


def small_gpt2(kind: type[Any]) -> nn.Module:
    """A GPT-2 whose attention is not uniform."""
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=512, n_embd=12, n_layer=2, n_head=2, num_labels=4, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    model = kind(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".h." in name and parameter.ndim == 2:
                parameter.mul_(8)
    return model


def followed(model: nn.Module) -> list[str]:
    """Layers that all libraries follow: the linear ones but the tied output layer."""
    kinds = (nn.Linear, Conv1D)
    return [name for name, module in model.named_modules() if isinstance(module, kinds) and name != "lm_head"]


def parameters_of(model: nn.Module, layers: list[str], biases: bool = True) -> list[str]:
    """Names of the layers' parameters."""
    names = [name for name, _ in model.named_parameters() if name.rpartition(".")[0] in layers]
    return [name for name in names if biases or name.endswith("weight")]


@torch.no_grad()
def without_conv1d(model: nn.Module) -> nn.Module:
    """A copy with an equal `nn.Linear` in the place of every `Conv1D`."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            linear = nn.Linear(*module.weight.shape)
            linear.weight.copy_(module.weight.T)
            linear.bias.copy_(module.bias)
            model.set_submodule(name, linear)
    return model


# -- kronfluence -----------------------------------------------------------------------------------------------------

PerSample = Callable[[nn.Module, dict[str, Tensor]], Tensor]


class Kronfluence:
    """Pairwise scores of kronfluence with its own damping, a tenth of the mean eigenvalue, and the labels of the data.

    Args:
        loss: of rows, any shape.
        measurement: of targets, likewise.
        layers: names of the layers to follow.
        mask: marks the positions that count, `(B, T)`.
    """

    def __init__(
        self,
        loss: PerSample,
        measurement: PerSample,
        layers: list[str],
        mask: Callable[[dict[str, Tensor]], Tensor] | None = None,
    ) -> None:
        class Task(peer("kronfluence.task").Task):
            def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
                assert not sample
                return loss(model, batch).sum()

            def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
                return measurement(model, batch).sum()

            def get_influence_tracked_modules(self) -> list[str]:
                return layers

            def get_attention_mask(self, batch: Any) -> Tensor | None:
                return None if mask is None else mask(batch)

        self.task = Task()

    def scores(self, model: nn.Module, directory: Path, train: Rows, targets: Rows, strategy: str) -> Tensor:
        """Scores in hf_trak's sign, `(n_train, n_targets)`."""
        analyzers, arguments = peer("kronfluence.analyzer"), peer("kronfluence.arguments")
        analyzer = analyzers.Analyzer(
            analysis_name="peer",
            model=analyzers.prepare_model(copy.deepcopy(model), self.task),
            task=self.task,
            cpu=True,
            output_dir=str(directory / "kronfluence"),
        )
        analyzer.fit_all_factors(
            factors_name="factors",
            dataset=train,
            per_device_batch_size=40,
            factor_args=arguments.FactorArguments(strategy, use_empirical_fisher=True),
        )
        analyzer.compute_pairwise_scores(
            scores_name="scores",
            factors_name="factors",
            query_dataset=targets,
            train_dataset=train,
            per_device_query_batch_size=len(targets),
            per_device_train_batch_size=40,
            score_args=arguments.ScoreArguments(damping_factor=None),
        )
        return -analyzer.load_pairwise_scores("scores")["all_modules"].T


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("perceptron", "ekfac"),
        ("perceptron", "kfac"),  # not of convolutions: each has another number of positions
        ("perceptron", "diagonal"),
        ("convolutions", "ekfac"),
        ("convolutions", "diagonal"),
    ],
)
def test_classifiers_have_kronfluences_scores(tmp_path: Path, name: str, kind: str) -> None:
    model, train, targets = classified(name)
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    library = Kronfluence(
        lambda net, batch: nn.functional.cross_entropy(net(batch["pixel_values"]), batch["labels"], reduction="none"),
        lambda net, batch: log_odds(net(batch["pixel_values"]), batch["labels"]),
        layers,
    )
    theirs = library.scores(model, tmp_path, train, targets, kind)
    scores = exact_scores(
        model, tmp_path, train, targets, "image_classification",
        curvature=kind, curvature_labels="empirical", curvature_damping=DAMPING,
    )  # fmt: skip
    assert error(scores, theirs) < TOLERANCE


@pytest.mark.parametrize(("kind", "factor"), [("ekfac", 1), ("kfac", 1 / LENGTH), ("diagonal", 1)])
def test_a_token_classifier_has_kronfluences_scores(tmp_path: Path, kind: str, factor: float) -> None:
    """With a label for every token. K-FAC's eigenvalues are those of one token there, of a row here."""
    model = small_gpt2(GPT2ForTokenClassification)
    tokens, labels = torch.randint(VOCABULARY, (84, LENGTH)), torch.randint(4, (84, LENGTH))
    rows = rows_of(input_ids=tokens, labels=labels, attention_mask=torch.ones_like(tokens))
    layers = followed(model)

    def predictions(net: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return net(batch["input_ids"]).logits.flatten(0, 1), batch["labels"].flatten()

    library = Kronfluence(
        lambda net, batch: nn.functional.cross_entropy(*predictions(net, batch), reduction="none"),
        lambda net, batch: log_odds(*predictions(net, batch)),
        layers,
    )
    theirs = library.scores(without_conv1d(model), tmp_path, rows[:80], rows[80:], kind)
    scores = exact_scores(
        model, tmp_path, rows[:80], rows[80:], "token_classification",
        curvature=kind, curvature_labels="empirical", curvature_damping=DAMPING, grad_wrt=parameters_of(model, layers),
    )  # fmt: skip
    assert error(scores, factor * theirs) < TOLERANCE


def test_a_language_model_has_kronfluences_scores(tmp_path: Path) -> None:
    """The last token of a row predicts nothing and has no gradient: an attention mask takes it out there, too."""
    model = small_gpt2(GPT2LMHeadModel)
    tokens = torch.randint(VOCABULARY, (84, LENGTH))
    rows = rows_of(input_ids=tokens, labels=tokens, attention_mask=torch.ones_like(tokens))
    layers = followed(model)

    def predictions(net: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return net(batch["input_ids"]).logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()

    def all_but_last(batch: dict[str, Tensor]) -> Tensor:
        counted = torch.ones_like(batch["input_ids"])
        counted[:, -1] = 0
        return counted

    library = Kronfluence(
        lambda net, batch: nn.functional.cross_entropy(*predictions(net, batch), reduction="none"),
        lambda net, batch: log_odds(*predictions(net, batch)),
        layers,
        all_but_last,
    )
    theirs = library.scores(without_conv1d(model), tmp_path, rows[:80], rows[80:], "ekfac")
    scores = exact_scores(
        model, tmp_path, rows[:80], rows[80:], "causal_lm",
        curvature="ekfac", curvature_labels="empirical", curvature_damping=DAMPING,
        grad_wrt=parameters_of(model, layers),
    )  # fmt: skip
    assert error(scores, theirs) < TOLERANCE


# -- curvlinops ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ekfac", "kfac"])
@pytest.mark.parametrize("name", NETWORKS)
def test_curvatures_are_those_of_curvlinops(tmp_path: Path, name: str, kind: str) -> None:
    """Every element of the whole matrix, against a computation in float64."""
    curvlinops = peer("curvlinops")
    operators = {"ekfac": curvlinops.EKFACLinearOperator, "kfac": curvlinops.KFACLinearOperator}
    model, train, targets = classified(name)
    exact_scores(
        model, tmp_path, train, targets, "image_classification",
        curvature=kind, curvature_labels="empirical", curvature_damping=DAMPING,
    )  # fmt: skip
    ours = assembled(written_curvature(tmp_path))
    batch = tuple(torch.stack([row[column] for row in train]) for column in ("pixel_values", "labels"))
    precise = copy.deepcopy(model).double()
    operator = operators[kind](
        precise,
        nn.CrossEntropyLoss(reduction="sum"),
        list(precise.parameters()),
        [(batch[0].double(), batch[1])],
        fisher_type="empirical",
        separate_weight_and_bias=False,
        check_deterministic=False,
    )
    theirs = operator @ torch.eye(len(ours), dtype=torch.float64)
    assert error(ours, theirs / len(train)) < TOLERANCE


# -- bergson ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize(("method", "kind"), [("kfac", "ekfac"), ("shampoo", "shampoo")])
def test_a_language_model_has_bergsons_scores(tmp_path: Path, method: str, kind: str, biases: bool) -> None:
    bergson, config = peer("bergson"), peer("bergson.config.config")
    model = small_gpt2(GPT2LMHeadModel)
    tokens = torch.randint(VOCABULARY, (64, LENGTH))
    model.save_pretrained(tmp_path / "model")
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(tmp_path / "model")
    for part, ids in (("train", tokens[:60]), ("targets", tokens[60:])):
        Dataset.from_dict({"input_ids": ids.tolist(), "labels": ids.tolist()}).save_to_disk(tmp_path / part)
    run = bergson.IndexConfig(
        run_path=str(tmp_path / "bergson"),
        model=str(tmp_path / "model"),
        data=bergson.DataConfig(dataset=str(tmp_path / "train")),
        token_batch_size=LENGTH if method == "shampoo" else 512,
        include_bias=biases,
    )
    peer("bergson.hessians.pipeline").hessian_pipeline(
        run,
        config.HessianConfig(method, ev_correction=True, use_dataset_labels=True),
        config.ScoreConfig(),
        bergson.PreprocessConfig(),
        config.HessianPipelineConfig(
            query=bergson.QuerySetConfig(dataset=str(tmp_path / "targets")),
            inversion_cfg=config.InversionConfig(damping_factor=DAMPING),
        ),
    )
    written = peer("bergson.data").load_scores(tmp_path / "bergson" / "scores")
    theirs = torch.tensor(np.asarray(written[:], dtype=np.float64))

    rows = rows_of(input_ids=tokens, labels=tokens, attention_mask=torch.ones_like(tokens))
    scores = exact_scores(
        model, tmp_path / "trak", rows[:60], rows[60:], CausalLMModelOutput(unit_output="log_likelihood"),
        curvature=kind, curvature_labels="empirical", curvature_damping=DAMPING,
        grad_wrt=parameters_of(model, followed(model), biases),
    )  # fmt: skip
    assert error(scores, theirs) < TOLERANCE
