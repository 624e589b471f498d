"""Trainings in which left-out rows weigh zero, compared with loops written by hand, and with the plain training."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

from hf_trak.evaluation import TrainerRetraining, evaluate_lds, random_subsets
from hf_trak.evaluation.trainer_retraining import mask_rows

N, LENGTH, VOCABULARY = 10, 6, 20
KEPT = np.array([1, 1, 0, 1, 0, 0, 0, 0, 1, 1], dtype=bool)
"""With batches of 4 in order, no row of the second one is left."""
LEARNING_RATE = 0.1


def bert(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, num_labels=3,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def gpt2(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=8, n_layer=1, n_head=2, n_positions=16, resid_pdrop=dropout, embd_pdrop=dropout,
        attn_pdrop=dropout, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


MODELS = {"bert": bert, "gpt2": gpt2}


def rows(kind: str) -> Dataset:
    """Texts of one length, some of whose labels are ignored already, as in prompts."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, VOCABULARY, (N, LENGTH), generator=generator)
    columns = {"input_ids": tokens.tolist(), "attention_mask": torch.ones_like(tokens).tolist(), "note": ["x"] * N}
    if kind == "bert":
        return Dataset.from_dict({**columns, "labels": [i % 3 for i in range(N)]})
    labels = tokens.clone()
    for row in range(N):
        labels[row, : row % 3] = -100
    return Dataset.from_dict({**columns, "labels": labels.tolist()})


def trainer(model: nn.Module, dataset: Any, directory: Path, **options: Any) -> Trainer:
    settings = {
        "per_device_train_batch_size": 4, "num_train_epochs": 2, "learning_rate": LEARNING_RATE, "optim": "sgd",
        "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "use_cpu": True, "report_to": "none",
        "save_strategy": "no", "train_sampling_strategy": "sequential",
    }  # fmt: skip
    return Trainer(model, TrainingArguments(str(directory), **{**settings, **options}), train_dataset=dataset)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def row_losses(kind: str, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Sums of the losses of the labels of each row, and how many labels each has: written out, no library's loss."""
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    labels = batch["labels"]
    numbers = labels.reshape(len(labels), -1).ne(-100).sum(1)  # as `Trainer` counts them for GPT-2, the first included
    if kind == "gpt2":
        logits, labels = logits[:, :-1], labels[:, 1:]
    else:
        logits, labels = logits[:, None], labels[:, None]
    counted = labels != -100
    own = logits.gather(2, labels.clamp_min(0)[..., None])[..., 0]
    losses = torch.where(counted, logits.logsumexp(2) - own, 0.0)
    return losses.sum(1), numbers


def by_hand(kind: str, kept: np.ndarray, batches_per_step: int = 1, dtype: torch.dtype = torch.float64) -> nn.Module:
    """SGD in the order of the rows; left-out rows are not in the sum of the losses, and are in its denominator."""
    model = MODELS[kind]().to(dtype).train()
    table = rows(kind).remove_columns("note").with_format("torch")
    starts = list(range(0, N, 4))
    for _ in range(2):
        for first in range(0, len(starts), batches_per_step):
            cuts = [range(start, min(start + 4, N)) for start in starts[first : first + batches_per_step]]
            parts = [(row_losses(kind, model, table[list(cut)]), torch.tensor(kept[list(cut)])) for cut in cuts]
            if kind == "gpt2":  # `Trainer` divides by the labels of all accumulated batches
                total = sum(int(count.sum()) for (_, count), _ in parts)
                loss = sum(losses[there].sum() for (losses, _), there in parts) / total
            else:  # BERT's loss is the mean of a batch, and `Trainer` adds up those of accumulated batches
                loss = sum(losses[there].sum() / len(there) for (losses, _), there in parts)
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= LEARNING_RATE * parameter.grad
    return model


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("accumulated", [1, 2])
def test_equals_a_loop_that_leaves_rows_out_of_the_loss(kind: str, accumulated: int, tmp_path: Path) -> None:
    masked = trainer(MODELS[kind]().double(), rows(kind), tmp_path, gradient_accumulation_steps=accumulated)
    mask_rows(masked, KEPT)
    masked.train()
    expected, plain = weights(by_hand(kind, KEPT, accumulated)), weights(by_hand(kind, np.ones(N, bool), accumulated))
    # Six steps. Models of transformers compute the loss of language models in float32, whatever the weights: sums over
    # the vocabulary. The rest are sums of at most some thousand float64 products of numbers of the size 1.
    bound = 6 * LEARNING_RATE * (VOCABULARY + 3) * 2**-24 if kind == "gpt2" else 1e-11
    torch.testing.assert_close(weights(masked.model), expected, rtol=0, atol=bound)
    assert (expected - plain).abs().max() > 1e-3  # the rows that are left out matter


OPTIONS = [{}, {"label_smoothing_factor": 0.1}, {"gradient_accumulation_steps": 2}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(kind, options, marks=pytest.mark.slow if options and kind != "bert" else [])
        for kind in MODELS
        for options in OPTIONS
    ],
    ids=str,
)
def test_without_left_out_rows_it_is_the_training_itself(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for masked in (False, True, True):
        set_seed(7)
        one = trainer(
            MODELS[kind](0.2), rows(kind), tmp_path, seed=7, train_sampling_strategy="random", optim="adamw_torch",
            max_grad_norm=1.0, **options,
        )  # fmt: skip
        if masked:
            mask_rows(one, np.ones(N, dtype=bool))
        set_seed(7)
        one.train()
        found.append(weights(one.model))
    assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2])


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_batches_and_dropout_are_those_of_the_whole_training(kind: str, tmp_path: Path) -> None:
    seen: list[list[Any]] = []
    for kept in (np.ones(N, dtype=bool), KEPT):
        set_seed(3)
        one = trainer(MODELS[kind](0.3), rows(kind), tmp_path, seed=3, train_sampling_strategy="random")
        drawn: list[Any] = []
        one.model.register_forward_pre_hook(
            lambda module, args, kwargs, drawn=drawn: (
                drawn.append(kwargs["input_ids"].tolist()) if module.training else None
            ),
            with_kwargs=True,
        )
        for module in one.model.modules():
            if isinstance(module, nn.Dropout):
                module.register_forward_hook(
                    lambda module, args, out, drawn=drawn: (
                        drawn.append((out == 0).tolist()) if module.training else None
                    )
                )
        mask_rows(one, kept)
        set_seed(3)
        one.train()
        seen.append(drawn)
    assert len(seen[0]) > 10
    assert seen[0] == seen[1]


class Regression(nn.Module):
    """y = wᵀx + b, with the mean squared error of a batch as its loss."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.linear(x.to(self.linear.weight.dtype))[:, 0]
        found = {} if labels is None else {"loss": nn.functional.mse_loss(logits, labels.to(logits))}
        return {**found, "logits": logits}


def squared_errors(output: Any, batch: Any) -> Tensor:
    return (output["logits"] - batch["labels"].to(output["logits"])) ** 2


def points(n: int, seed: int, noise: float = 0.5) -> Dataset:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 2))
    y = x @ [1.0, -2.0] + noise * rng.normal(size=n)
    return Dataset.from_dict({"x": x.tolist(), "labels": y.tolist()})


@pytest.mark.slow
def test_a_loss_that_ignores_no_label_is_refused_without_losses_of_rows(tmp_path: Path) -> None:
    one = trainer(Regression(2), points(8, 0), tmp_path)
    mask_rows(one, np.arange(8) > 3)
    with pytest.raises(ValueError, match=r"labels.*float.*row_losses"):
        one.train()


@pytest.mark.slow
def test_a_loss_with_another_normalization_is_refused(tmp_path: Path) -> None:
    """Class weights make the mean one over weights, which differ between the halves of a batch."""
    one = trainer(bert(), rows("bert"), tmp_path)
    one.compute_loss_func = lambda output, labels, num_items_in_batch=None: nn.functional.cross_entropy(
        output.logits, labels, weight=torch.tensor([1.0, 2.0, 5.0])
    )
    mask_rows(one, KEPT)
    with pytest.raises(ValueError, match=r"its two halves.*Expected a sum or a mean"):
        one.train()


@pytest.mark.parametrize(
    "kept, options, message",
    [
        (np.ones(3, dtype=bool), {}, r"shape \(3,\) for a training dataset of 10 rows"),
        (KEPT, {"train_sampling_strategy": "group_by_length"}, "group_by_length"),
    ],
)
def test_bad_input_is_refused(kept: np.ndarray, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        mask_rows(trainer(bert(), rows("bert"), tmp_path, **options), kept)


def test_losses_of_the_wrong_shape_are_refused(tmp_path: Path) -> None:
    one = trainer(Regression(2), points(8, 0), tmp_path)
    mask_rows(one, np.arange(8) > 3, lambda output, batch: output["loss"])
    with pytest.raises(ValueError, match=r"shape \(\) for 4 rows"):
        one.train()


def test_retraining_refuses_unknown_options() -> None:
    data = points(4, 0)
    with pytest.raises(ValueError, match="`drop` is 'row'"):
        TrainerRetraining(lambda rows, seed: None, data, data, drop="row")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'mask' only"):
        TrainerRetraining(lambda rows, seed: None, data, data, row_losses=squared_errors)


@pytest.mark.slow
@pytest.mark.parametrize("drop", ["rows", "mask"])
def test_exact_leave_one_out_predicts_a_linear_regression(drop: Any, tmp_path: Path) -> None:
    """A regression trained to convergence: the answer is known in closed form, for both protocols.

    Of n rows 5 % are left out; their effects, each alone and in closed form, add up to the effect of all but for terms
    of second order in the share that is left out.
    """
    n, m = 200, 8
    train, targets = points(n, 0), points(m, 1)

    def make_trainer(chosen: Any, seed: int) -> Trainer:
        return trainer(
            Regression(2).double(), chosen, tmp_path, seed=seed, max_steps=25, num_train_epochs=25,
            per_device_train_batch_size=n, learning_rate=0.4,
        )  # fmt: skip

    retrain = TrainerRetraining(
        make_trainer, train, targets, task=lambda output, batch: output["logits"], drop=drop, seed=0,
        row_losses=squared_errors if drop == "mask" else None,
    )  # fmt: skip
    masks = random_subsets(n, 12, fraction=0.95)
    outputs = np.stack([retrain(np.flatnonzero(mask), i) for i, mask in enumerate(masks)])

    def design(dataset: Dataset) -> np.ndarray:
        return np.column_stack([np.array(dataset["x"][:]), np.ones(len(dataset))])

    x, y, t = design(train), np.array(train["labels"][:]), design(targets)
    exact = np.stack([t @ np.linalg.lstsq(x[mask], y[mask], rcond=None)[0] for mask in masks])
    np.testing.assert_allclose(outputs, exact, rtol=0, atol=1e-6)  # trained to convergence
    whole = t @ np.linalg.lstsq(x, y, rcond=None)[0]
    alone = [np.delete(np.arange(n), i) for i in range(n)]
    scores = np.stack([whole - t @ np.linalg.lstsq(x[rest], y[rest], rcond=None)[0] for rest in alone])
    assert evaluate_lds(scores, masks, outputs, resamples=10).mean.value >= 0.99


@pytest.mark.slow
def test_one_seed_for_all_trainings(tmp_path: Path) -> None:
    """With `seed=` the number of the training changes nothing; without it, it does."""
    data = rows("bert")

    def make_trainer(chosen: Any, seed: int) -> Trainer:
        torch.manual_seed(seed)
        model = BertForSequenceClassification(bert(0.2).config)
        return trainer(model, chosen, tmp_path, seed=seed, train_sampling_strategy="random")

    same = TrainerRetraining(make_trainer, data, data, drop="mask", seed=5)
    own = TrainerRetraining(make_trainer, data, data, drop="mask")
    kept = np.flatnonzero(KEPT)
    assert np.array_equal(same(kept, 1), same(kept, 2))
    assert not np.array_equal(own(kept, 1), own(kept, 2))
    assert np.array_equal(own(kept, 5), same(kept, 1))
