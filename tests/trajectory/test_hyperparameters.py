"""What a trainer's own optimizer and scheduler did in a run, against what is read from the trainer."""

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_trak.errors import HfTrakError
from hf_trak.gradient_computers.layout import ParameterLayout
from hf_trak.trajectory.hyperparameters import hyperparameters
from hf_trak.trajectory.optimizer_steps import AdamStep, SgdStep

N = 22


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.x, self.labels = torch.randn(N, 4, generator=generator), torch.randint(3, (N,), generator=generator)

    def __len__(self):
        return N

    def __getitem__(self, row):
        return {"x": self.x[row], "labels": self.labels[row]}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm, self.head = torch.nn.Linear(4, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 3)

    def forward(self, x, labels=None):
        logits = self.head(self.norm(self.inner(x)))
        if labels is None:
            return {"logits": logits}
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Seen(TrainerCallback):
    """Notes what the optimizer has before each of its steps."""

    def __init__(self):
        self.rates = []

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.rates.append([group["lr"] for group in optimizer.param_groups])


def make_trainer(tmp_path, model=None, optimizers=(None, None), **options):
    given = {
        "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "num_train_epochs": 3, "use_cpu": True,
        "report_to": [], "save_strategy": "no", "learning_rate": 1e-2, "disable_tqdm": True, **options,
    }  # fmt: skip
    seen = Seen()
    args = TrainingArguments(str(tmp_path), **given)
    model = Net() if model is None else model
    return Trainer(model, args, train_dataset=Rows(), callbacks=[seen], optimizers=optimizers), seen


def read(trainer):
    return hyperparameters(trainer, trainer.model, ParameterLayout.from_model(trainer.model))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": 0.1, "adam_beta2": 0.9},
        {"lr_scheduler_type": "cosine", "warmup_steps": 4, "max_steps": 9},
        {"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0},
        {"dataloader_drop_last": True, "gradient_accumulation_steps": 1, "num_train_epochs": 1.5},
    ],
)
def test_steps_are_those_of_the_run(tmp_path, options):
    trainer, seen = make_trainer(tmp_path, **options)
    before = read(trainer)
    assert trainer.optimizer is None and trainer.lr_scheduler is None  # the trainer stays as it was
    trainer.train()
    after = read(trainer)
    expected = torch.tensor(seen.rates, dtype=torch.float64)
    for found in (before, after):
        torch.testing.assert_close(found.rates, expected, rtol=1e-12, atol=0)
        assert found.steps == trainer.state.global_step
        assert found.rows == 3 * trainer.args.gradient_accumulation_steps
        assert found.max_norm == (trainer.args.max_grad_norm or None)
    assert before.describe() == after.describe()
    step = after.step(2)
    assert isinstance(step, SgdStep if options.get("optim") == "sgd" else AdamStep)
    assert step.rate == seen.rates[2][0]  # one number, since all groups have the same
    together = after.step(1, 3)
    assert together.together == 3
    assert together.rate == pytest.approx(sum(one[0] for one in seen.rates[1:4]), rel=1e-12)


@pytest.mark.slow
def test_decay_follows_the_trainers_own_groups(tmp_path):
    trainer, _ = make_trainer(tmp_path, weight_decay=0.1)
    trainer.train()
    layout, step = ParameterLayout.from_model(trainer.model), read(trainer).step(0)
    decays = set(trainer.get_decay_parameter_names(trainer.model))
    assert decays and len(decays) < len(layout.slots)
    for slot in layout.slots:
        part = step.decay[slot.offset : slot.offset + slot.numel]
        assert bool((part == (0.1 if slot.name in decays else 0.0)).all()), slot.name
    assert (step.beta1, step.beta2, step.eps, step.decoupled) == (0.9, 0.999, 1e-8, True)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda model: torch.optim.Adafactor(model.parameters()), "Adafactor"),
        (lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True), "amsgrad"),
        (lambda model: torch.optim.RMSprop(model.parameters()), "RMSprop"),
        (lambda model: torch.optim.SGD(model.head.parameters(), lr=0.1), "'inner"),
    ],
)
def test_other_optimizers_are_refused_by_name(tmp_path, make, named):
    model = Net()
    trainer, _ = make_trainer(tmp_path, model, (make(model), None))
    with pytest.raises(HfTrakError, match=named):
        read(trainer)


def test_a_scheduler_that_looks_at_evaluations_is_refused(tmp_path):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    trainer, _ = make_trainer(tmp_path, model, (optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)))
    with pytest.raises(HfTrakError, match="ReduceLROnPlateau"):
        read(trainer)
