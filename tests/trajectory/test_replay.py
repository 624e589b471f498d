"""Replayed scores: against the recipe written out with dense matrices, and against training again."""

import numpy as np
import pytest
import torch
from test_hyperparameters import N, Rows, make_trainer
from torch.autograd.functional import hessian  # that of `torch.func` is wrong through LayerNorm (torch 2.15)
from torch.func import functional_call, grad, vmap
from transformers import Trainer, TrainingArguments

from hf_trak import Replay, TrakAttributor, TrakConfig
from hf_trak.errors import HfTrakError
from hf_trak.evaluation import TrainerRetraining, linear_datamodeling_score, random_subsets
from hf_trak.featurize import replaying

OPTIONS = {"weight_decay": 0.1, "lr_scheduler_type": "cosine", "adam_beta2": 0.95, "max_grad_norm": 0.5}


@pytest.fixture
def trained(tmp_path):
    trainer, _ = make_trainer(tmp_path / "run", **OPTIONS)
    trainer.train()
    return trainer


class Targets(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, row):
        return {"x": torch.tensor(self.rows[row]["x"]), "labels": torch.tensor(self.rows[row]["labels"])}


def random_targets(count):
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(4, generator=generator).tolist(), "labels": index % 3} for index in range(count)]


def attributor_of(trainer, path, **options):
    args = TrakConfig(str(path / "trak"), proj_dim=64, per_device_batch_size=4, budget="fast", **options)
    return TrakAttributor.from_trainer(trainer, args, task="image_classification")


def scores_of(attributor, targets, method, **options):
    scored = attributor.attribute(targets, top_k=None, method=method, **options)
    return torch.tensor(scored["trak_scores"][:], dtype=torch.float64).T


def written_out(trainer, targets):
    """Compute the recipe with dense matrices: the effect of the weight of every row on every margin, `(N, m)`."""
    model, rows = trainer.model.double(), Rows()
    names = [name for name, _ in model.named_parameters()]
    start = [value.detach() for _, value in model.named_parameters()]
    theta = torch.cat([value.flatten() for value in start])

    def named(flat):
        parts = flat.split([value.numel() for value in start])
        return {name: part.view_as(value) for name, part, value in zip(names, parts, start, strict=True)}

    def loss(flat, x, y):  # y is 1 at the label
        logits = functional_call(model, named(flat), (x[None],))["logits"][0]
        return -(logits.log_softmax(0) * y).sum()

    def margin(flat, x, y):
        found = -loss(flat, x, y)
        return found - torch.log1p(-found.exp())

    one_hot = torch.eye(3, dtype=torch.float64)
    x, y = rows.x.double(), one_hot[rows.labels]
    gradients = vmap(grad(loss), (None, 0, 0))(theta, x, y)
    curved = hessian(lambda flat: sum(loss(flat, *row) for row in zip(x, y, strict=True)) / N, theta)
    new = torch.stack([torch.tensor(one["x"]) for one in targets]).double()
    a = vmap(grad(margin), (None, 0, 0))(theta, new, one_hot[[one["labels"] for one in targets]])
    args, rows_per_step = trainer.args, 6
    mean, noise = gradients.mean(0), gradients.var(0, correction=0) / rows_per_step
    share = min(1.0, args.max_grad_norm / float((mean.square() + noise).sum().sqrt()))
    mean, noise, curved = share * mean, share**2 * noise, share * curved
    decays = set(trainer.get_decay_parameter_names(model))
    decay = torch.cat(
        [torch.full((v.numel(),), 0.1 * (n in decays)).double() for n, v in zip(names, start, strict=True)]
    )
    steps = trainer.state.global_step
    beta1, beta2, b, c, total = 0.9, 0.95, torch.zeros_like(a), torch.zeros_like(a), torch.zeros_like(a)
    for t in range(steps, 0, -1):
        rate = args.learning_rate * 0.5 * (1 + np.cos(np.pi * (t - 1) / steps))
        root = (mean.square() + noise + noise / t).sqrt()
        scale, correction = root + 1e-8, 1 - beta2**t
        b = b - a * rate / ((1 - beta1**t) * scale)
        c = c + a * rate * mean / (2 * correction * root * scale**2)
        gamma = (1 - beta1) * b + 2 * (1 - beta2) * (1 - 1 / rows_per_step) * mean * c
        total += gamma
        a, b, c = (1 - rate * decay) * a + gamma @ curved, beta1 * b, beta2 * c
    model.float()
    return gradients @ total.T * share / N


@pytest.mark.slow
def test_scores_are_the_recipe_written_out(trained, tmp_path):
    targets = random_targets(3)
    expected = written_out(trained, targets)
    found = scores_of(attributor_of(trained, tmp_path), Targets(targets), Replay(form="hessian", rows=N))
    assert float(expected.abs().max()) > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.slow
def test_forms_of_a_question_agree(trained, tmp_path):
    """Groups are walked back as one target, so that they have their own files and cost, and the same scores."""
    attributor, targets = attributor_of(trained, tmp_path), Targets(random_targets(5))
    whole = scores_of(attributor, targets, "replay")
    assert whole.shape == (N, 5)
    torch.testing.assert_close(scores_of(attributor, targets, "replay", per="train").T, whole)
    mean = scores_of(attributor, targets, "replay", group_by="all")
    torch.testing.assert_close(mean[:, 0], whole.mean(1), rtol=1e-4, atol=1e-6 * float(whole.abs().max()))
    best = attributor.attribute(targets, top_k=3, method=Replay())
    assert best[0]["trak_indices"] == whole[:, 0].argsort(descending=True)[:3].tolist()
    labels = Rows().labels.tolist()
    sums = attributor.group_scores(targets, labels, method="replay")
    expected = torch.stack([whole[torch.tensor(labels) == label].sum(0) for label in sums[0]["trak_groups"]], 1)
    torch.testing.assert_close(torch.tensor(sums["trak_group_scores"][:]).double(), expected, rtol=1e-4, atol=1e-5)
    assert len(attributor.select(4, targets, method="replay")) == 4


@pytest.mark.slow
def test_self_influence_is_the_diagonal_of_the_recipe(trained, tmp_path):
    rows = Rows()
    expected = written_out(trained, [{"x": rows.x[i].tolist(), "labels": int(rows.labels[i])} for i in range(N)])
    found = attributor_of(trained, tmp_path, shard_size=5).self_influence(Replay(form="hessian", rows=N))
    torch.testing.assert_close(found.double(), expected.diagonal(), rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.slow
def test_scores_belong_to_the_numbers_of_the_run(trained, tmp_path):
    targets = Targets(random_targets(2))
    first = scores_of(attributor_of(trained, tmp_path), targets, "replay")
    trained.args.weight_decay, trained.optimizer = 0.0, None
    second = scores_of(attributor_of(trained, tmp_path), targets, "replay")
    assert not torch.allclose(first, second, rtol=1e-4)
    for other in (Replay(rows=3), Replay(form="hessian"), Replay(steps=6)):
        assert not torch.allclose(scores_of(attributor_of(trained, tmp_path), targets, other), second, rtol=1e-4)


@pytest.mark.slow
def test_what_cannot_be_replayed_is_refused(trained, tmp_path):
    targets = Targets(random_targets(2))
    with pytest.raises(ValueError, match="`rows` is 0"):
        Replay(rows=0)
    with pytest.raises(ValueError, match="'fisher'"):
        Replay(form="fisher")
    args = TrakConfig(str(tmp_path / "other"), proj_dim=64, budget="fast")
    own = TrakAttributor(trained.model, args, Rows(), task="image_classification")
    with pytest.raises(HfTrakError, match="from_trainer"):
        own.attribute(targets, method="replay")
    args = TrakConfig(str(tmp_path / "lossless"), proj_dim=64, budget="fast")
    lossless = TrakAttributor.from_trainer(trained, args, task=lambda output, batch: output["logits"][:, 0])
    with pytest.raises(TypeError, match="per_sample_loss"):
        lossless.attribute(targets, method="replay")


@pytest.mark.slow
def test_steps_too_large_for_the_curvature_are_refused(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(replaying, "LARGEST_GROWTH", 0.5)  # the growth starts at 1
    attributor, targets = attributor_of(trained, tmp_path), Targets(random_targets(2))
    with pytest.raises(HfTrakError, match="Raise `steps`"):
        attributor.attribute(targets, method=Replay(steps=2))
    attributor.attribute(targets, method=Replay())  # steps as they were are a matter of the run: a warning


@pytest.mark.slow
def test_last_checkpoint_alone_is_replayed(trained, tmp_path):
    attributor, targets = attributor_of(trained, tmp_path), Targets(random_targets(2))
    early = {name: 0.5 * value for name, value in trained.model.state_dict().items()}
    attributor.featurize([early, trained.model.state_dict()])
    alone = scores_of(attributor_of(trained, tmp_path / "alone"), targets, "replay")
    torch.testing.assert_close(scores_of(attributor, targets, "replay"), alone, rtol=1e-5, atol=1e-8)
    first = scores_of(attributor, targets, "replay", checkpoints={0: early})
    assert not torch.allclose(first, alone, rtol=1e-2)


@pytest.mark.slow
def test_estimate_counts_passes(trained, tmp_path):
    found = attributor_of(trained, tmp_path).estimate(10, method=Replay(rows=4, steps=9))
    assert found.stages["moments"].passes == found.stages["exact scores"].passes == N
    assert found.stages["replay"].passes == 2 * 9 * 4 * 10


class Digits(torch.utils.data.Dataset):
    def __init__(self, rows):
        from sklearn.datasets import load_digits

        digits = load_digits()
        self.x, self.labels = torch.tensor(digits.data[rows] / 16).float(), torch.tensor(digits.target[rows])

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        return {"x": self.x[row], "labels": self.labels[row]}


class DigitNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 24), torch.nn.GELU(), torch.nn.Linear(24, 10))

    def forward(self, x, labels=None):
        found = {"logits": self.layers(x)}
        return (
            found if labels is None else {"loss": torch.nn.functional.cross_entropy(found["logits"], labels), **found}
        )


@pytest.mark.slow
def test_replay_predicts_retraining_better_than_the_index(tmp_path):
    rows, targets = Digits(range(200)), Digits(range(1000, 1024))

    def make(train, seed):
        args = TrainingArguments(
            str(tmp_path / "run"), per_device_train_batch_size=20, num_train_epochs=6, learning_rate=5e-3, seed=seed,
            use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        return Trainer(DigitNet(), args, train_dataset=train)

    trainer = make(rows, 1)
    trainer.train()
    masks = random_subsets(len(rows), 24, 0.9)
    retrain = TrainerRetraining(make, rows, targets, "image_classification", drop="mask", seed=1)
    truth = np.stack([retrain(np.flatnonzero(mask), 0) for mask in masks])
    args = TrakConfig(str(tmp_path / "trak"), proj_dim=1024)
    attributor = TrakAttributor.from_trainer(trainer, args, task="image_classification").featurize()
    found = {
        method: linear_datamodeling_score(scores_of(attributor, targets, method).numpy(), masks, truth).mean()
        for method in ("index", "replay")
    }
    assert found["replay"] > found["index"] + 0.1, found
