"""The numbers of every optimizer step of a run, as a `Trainer` and its own optimizer and scheduler say them."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from hf_trak.errors import HfTrakError
from hf_trak.gradient_computers.layout import ParameterLayout
from hf_trak.trajectory.optimizer_steps import AdamStep, Number, OptimizerStep, SgdStep

_NOT_YET = (
    "Expected AdamW, Adam or SGD of `torch.optim`, whose steps have a derivative that is known here. Set `optim` of "
    "the training arguments to 'adamw_torch' for a run to be replayed, or score with `method='exact'`."
)


@dataclass(frozen=True)
class Hyperparameters:
    """The numbers of the steps of a run.

    Attributes:
        kind (`str`): `"adam"` or `"sgd"`.
        groups (`tuple[dict, ...]`): the numbers that stay, for each group of parameters.
        rates (`torch.Tensor`): learning rates, `(T, groups)`, float64.
        group_of (`torch.Tensor`): the group of every trainable parameter, `(P,)`, in the order of the layout.
        max_norm (`float`, *optional*): the norm to which gradients are clipped.
        rows (`int`): N, the rows of one step, over all processes and accumulated batches.
    """

    kind: str
    groups: tuple[dict[str, Any], ...]
    rates: Tensor
    group_of: Tensor
    max_norm: float | None
    rows: int

    @property
    def steps(self) -> int:
        """Return T, the number of steps."""
        return len(self.rates)

    def step(self, first: int, last: int | None = None) -> OptimizerStep:
        """Return step `first`, counted from 0, or one step for all from `first` to `last`, with the sum of their
        learning rates."""
        rule = AdamStep if self.kind == "adam" else SgdStep
        rates = self.rates[first : (first if last is None else last) + 1]
        flags = {name: value for name, value in self.groups[0].items() if isinstance(value, bool)}
        numbers: dict[str, Any] = {
            name: self._spread([group[name] for group in self.groups]) for name in self.groups[0] if name not in flags
        }
        numbers["rate"] = self._spread(rates.sum(0).tolist())
        return rule(max_norm=self.max_norm, together=len(rates), **numbers, **flags)

    def describe(self) -> dict[str, Any]:
        """Describe everything that steps depend on, as JSON."""
        return {
            "kind": self.kind,
            "groups": [dict(group) for group in self.groups],
            "members": torch.bincount(self.group_of, minlength=len(self.groups)).tolist(),
            "rates": self.rates.tolist(),
            "max_norm": self.max_norm,
            "rows": self.rows,
        }

    def _spread(self, values: Sequence[float]) -> Number:
        """Return one number where all groups have the same, or one for each parameter, `(P,)`."""
        if len(set(values)) == 1:
            return values[0]
        return torch.tensor(values, dtype=torch.float64, device=self.group_of.device)[self.group_of.long()]


def hyperparameters(trainer: Any, model: torch.nn.Module, layout: ParameterLayout) -> Hyperparameters:
    """Read the numbers of all steps of a run from its `Trainer`, which stays as it is.

    After training, the steps are those that were taken. A trainer that has not trained, such as one of a new process
    with the same arguments, tells those that it would take.

    Args:
        trainer (`transformers.Trainer`): the trainer.
        model (`torch.nn.Module`): its model, without wrappers.
        layout ([`ParameterLayout`]): the attributed parameters, which are to be the trained ones.

    Raises:
        HfTrakError: the optimizer, an option of it, or the scheduler is none whose steps are known here, or the
            attributed parameters are not the trained ones.
    """
    twin = copy.copy(trainer)  # `create_optimizer` and `create_scheduler` leave what they make in the trainer
    if twin.optimizer is None:
        twin.create_optimizer()
    optimizer = getattr(twin.optimizer, "optimizer", twin.optimizer)
    kind, groups = optimizer_groups(optimizer)
    steps, total = _steps(trainer)
    return Hyperparameters(
        kind,
        groups,
        _rates(twin, optimizer, steps, total),
        membership(optimizer, model, layout),
        trainer.args.max_grad_norm if (trainer.args.max_grad_norm or 0) > 0 else None,
        _rows(trainer.args),
    )


def optimizer_groups(optimizer: Any) -> tuple[str, tuple[dict[str, Any], ...]]:
    """Return the kind of an optimizer, and the numbers of each of its groups.

    Raises:
        HfTrakError: it is none whose steps are known here.
    """
    name = type(optimizer).__name__
    if type(optimizer) not in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
        raise HfTrakError(f"The optimizer of the run is {type(optimizer).__module__}.{name}. {_NOT_YET}")
    for option in ("amsgrad", "maximize"):
        if any(group.get(option, False) for group in optimizer.param_groups):
            raise HfTrakError(f"The optimizer of the run is {name} with `{option}=True`. {_NOT_YET}")
    kind, read = ("sgd", _sgd) if isinstance(optimizer, torch.optim.SGD) else ("adam", _adam)
    groups = tuple(map(read, optimizer.param_groups))
    if len({tuple(value for value in group.values() if isinstance(value, bool)) for group in groups}) > 1:
        raise HfTrakError(f"Groups of parameters of {name} have different options: {list(groups)}. {_NOT_YET}")
    return kind, groups


def _adam(group: dict[str, Any]) -> dict[str, Any]:
    beta1, beta2 = map(float, group["betas"])
    return {
        "decay": float(group["weight_decay"]),
        "beta1": beta1,
        "beta2": beta2,
        "eps": float(group["eps"]),
        "decoupled": bool(group["decoupled_weight_decay"]),
    }


def _sgd(group: dict[str, Any]) -> dict[str, Any]:
    momentum = float(group["momentum"])
    return {
        "decay": float(group["weight_decay"]),
        "momentum": momentum,
        "dampening": float(group["dampening"]) if momentum else 0.0,  # torch keeps no momentum then
        "nesterov": bool(group["nesterov"]),
    }


def _rows(args: Any) -> int:
    return int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size)


def _steps(trainer: Any) -> tuple[int, int]:
    """Return the number of steps that were taken, and the number that the schedule was made for."""
    if trainer.state.global_step:
        return trainer.state.global_step, trainer.state.max_steps
    args = trainer.args
    if args.max_steps > 0:
        return args.max_steps, args.max_steps
    cut: Callable[[float], int] = math.floor if args.dataloader_drop_last else math.ceil
    batches = cut(len(trainer.train_dataset) / (args.train_batch_size * args.world_size))
    steps = math.ceil(args.num_train_epochs * max(1, math.ceil(batches / args.gradient_accumulation_steps)))
    return steps, steps


def _rates(trainer: Any, optimizer: Any, steps: int, total: int) -> Tensor:
    """Return the learning rates of all steps, `(T, groups)`."""
    if trainer.lr_scheduler is None:
        trainer.create_scheduler(total, optimizer)
    scheduler = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)
    if not isinstance(scheduler, LambdaLR):
        raise HfTrakError(
            f"The scheduler of the run is {type(scheduler).__name__}. Expected one whose learning rates follow from "
            "the number of the step, as those of `transformers` but 'reduce_lr_on_plateau' and 'greedy'. Set "
            "`lr_scheduler_type`, or score with `method='exact'`."
        )
    pairs = list(zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True))
    rates = [[float(base) * float(factor(step)) for base, factor in pairs] for step in range(steps)]
    return torch.tensor(rates, dtype=torch.float64)


def membership(optimizer: Any, model: torch.nn.Module, layout: ParameterLayout) -> Tensor:
    """Return the group of every attributed parameter, `(P,)`.

    Raises:
        HfTrakError: the attributed parameters are not the trained ones.
    """
    places = {id(value): index for index, group in enumerate(optimizer.param_groups) for value in group["params"]}
    own = dict(model.named_parameters())
    trained = {name for name, value in own.items() if id(value) in places and value.requires_grad}
    if trained != set(layout.names):
        odd = sorted(trained.symmetric_difference(layout.names))
        raise HfTrakError(
            f"The optimizer of the run trains {len(trained)} parameters of the model, and {len(layout.names)} are "
            f"attributed; {odd[0]!r} is one of those that only one of both has. Expected the same ones. Leave "
            "`grad_wrt` out, and give the trainer's own model."
        )
    groups = [torch.full((slot.numel,), places[id(own[slot.name])], dtype=torch.uint8) for slot in layout.slots]
    return torch.cat(groups)
