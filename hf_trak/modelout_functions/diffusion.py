"""The task `diffusion`: denoising models, as those of `diffusers`.

A row is an image or a latent x. Training draws a timestep t and noise ε, adds it, and has the model predict a
target y (Ho et al. 2020, arXiv 2006.11239; Salimans and Ho 2022, arXiv 2202.00512, for v):

    x_t = √ā_t x + √(1 − ā_t) ε
    y = ε  (`epsilon`),   √ā_t ε − √(1 − ā_t) x  (`v_prediction`),   x  (`sample`)
    L = mean over t and ε of ‖y − y_θ(x_t, t)‖² / d,    d numbers in a row

Two functions of a row are offered, both with q = 1 and the same f on both sides:

* `loss`: f = −L;
* `square`: f = mean over t and ε of ‖y_θ(x_t, t)‖² / d, the function of D-TRAK (Zheng et al., "Intriguing properties
  of data attribution on diffusion models", arXiv 2311.00500), which in their experiments says more about retrained
  models than the gradient of the loss does.

The sign of f does not matter, being the same on both sides: a positive score marks a row that changes f as the target
itself would.

The mean over t is one over K timesteps that are fixed: row after row and run after run the same ones. Noise is drawn
in the data collator, so that its seeds belong to row and draw as those of all random rows do, see
[`~hf_trak.data.drawn_rows`], and `num_draws` says over how many draws of it the features are a mean. A batch holds
the K noised copies of each row next to each other, `(B, K, …)`, and the model gets `(B K, …)`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hf_trak.modelout_functions.base import Batch, BatchedModelOutput, Collator, Side, WrappingCollator, checked_choice
from hf_trak.runtime.checks import checked_int

DiffusionFunction = Literal["loss", "square"]
PredictionType = Literal["epsilon", "v_prediction", "sample"]

NOISED, TIMESTEPS, WANTED = _ADDED = ("trak_noised", "trak_timesteps", "trak_wanted")
"""Entries of a batch: x_t `(B, K, …)`, t `(B, K)`, and y `(B, K, …)`."""


class DiffusionModelOutput(BatchedModelOutput):
    """The task `diffusion`: a function of the model's predictions for a noised row at K timesteps."""

    def __init__(
        self,
        scheduler: Any = None,
        function: DiffusionFunction = "loss",
        timesteps: int | Sequence[int] = 10,
        column: str = "pixel_values",
    ) -> None:
        """
        Args:
            scheduler (`SchedulerMixin`, *optional*):
                The noise scheduler of the training, of `diffusers`: its `alphas_cumprod` and
                `config.prediction_type` are read. Or a mapping of these two. A task without one cannot be run.
            function (`str`, *optional*, defaults to `"loss"`):
                `"loss"`, or `"square"` for D-TRAK's function.
            timesteps (`int` or `Sequence[int]`, *optional*, defaults to 10):
                K, which takes the middles of K equal parts of the schedule, or the timesteps themselves.
            column (`str`, *optional*, defaults to `"pixel_values"`):
                The column of images or latents. Other columns that the model takes (`class_labels`,
                `encoder_hidden_states`, …) are passed on by name.

        Raises:
            TypeError: `scheduler` has no `alphas_cumprod`.
            ValueError: another argument is out of range.
        """
        super().__init__()
        self.function = checked_choice(function, "function", DiffusionFunction)
        self.scheduler = None if scheduler is None else _described(scheduler)
        self.timesteps = timesteps if isinstance(timesteps, int) else [int(step) for step in timesteps]
        self.column = column
        self._steps = [] if self.scheduler is None else _chosen(timesteps, len(self.scheduler["alphas_cumprod"]))

    @property
    def batch_columns(self) -> Sequence[str]:  # type: ignore[override]  # the name is a setting
        """Name the column of images or latents, see [`AbstractModelOutput`]."""
        return (self.column,)

    def collator(self, collator: Collator) -> Collator:
        """Wrap a data collator so that it noises rows.

        Args:
            collator (`Callable`):
                Makes a batch of rows.

        Returns:
            `Callable`: makes a batch of noised rows.

        Raises:
            ValueError: the task has no scheduler.
        """
        if self.scheduler is None:
            raise ValueError(
                "The task 'diffusion' was given no scheduler, so that the noise of the training is unknown. Expected "
                "the noise scheduler of `diffusers`. Pass `task=DiffusionModelOutput(scheduler)`."
            )
        return NoisingCollator(collator, self)

    def noised(self, clean: Tensor) -> dict[str, Tensor]:
        """Add noise to rows, once for each of K timesteps, with torch's generator.

        Args:
            clean (`torch.Tensor` of shape `(B, …)`):
                Images or latents, floating point.

        Returns:
            `dict[str, torch.Tensor]`: the entries `NOISED`, `TIMESTEPS` and `WANTED` of a batch.
        """
        assert self.scheduler is not None
        clean = clean.unsqueeze(1)
        alphas = [self.scheduler["alphas_cumprod"][step] for step in self._steps]
        factors = torch.tensor([[math.sqrt(a), math.sqrt(1 - a)] for a in alphas], dtype=clean.dtype)
        signal, spread = factors.T.reshape(2, 1, -1, *[1] * (clean.ndim - 2))
        noise = torch.randn(clean.shape[0], len(alphas), *clean.shape[2:], dtype=clean.dtype)
        wanted = {
            "epsilon": noise,
            "v_prediction": signal * noise - spread * clean,
            "sample": clean.expand_as(noise),
        }[self.scheduler["prediction_type"]]
        steps = torch.tensor(self._steps).expand(len(noise), -1)
        return {NOISED: signal * clean + spread * noise, TIMESTEPS: steps.clone(), WANTED: wanted.clone()}

    def model_inputs(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        noised = _entry(batch, NOISED)
        assert isinstance(batch, Mapping)
        rows, copies = noised.shape[:2]
        conditions = {name: _repeated(value, rows, copies) for name, value in batch.items() if name not in _ADDED}
        return (noised.flatten(0, 1),), {"timestep": _entry(batch, TIMESTEPS).flatten(), **conditions}

    def per_sample_loss(self, model_output: Any, batch: Batch) -> Tensor:
        """Compute the mean squared error of the prediction of every row, differentiable.

        Args:
            model_output (`Any`):
                What the model returned for the batch.
            batch (`Batch`):
                The batch of noised rows.

        Returns:
            `torch.Tensor` of shape `(B,)`.
        """
        wanted = _entry(batch, WANTED)
        return _mean_square(_prediction(model_output, wanted) - wanted)

    def output(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        if self.function == "loss":
            return -self.per_sample_loss(model_output, batch)
        return _mean_square(_prediction(model_output, _entry(batch, WANTED)))

    def out_to_loss_grad(self, model_output: Any, batch: Batch, side: Side = "train") -> Tensor:
        wanted = _entry(batch, WANTED)
        return torch.ones(wanted.shape[0], device=wanted.device)


class NoisingCollator(WrappingCollator):
    """A data collator that adds noise to rows."""

    def __init__(self, collator: Collator, task: DiffusionModelOutput) -> None:
        """
        Args:
            collator: the inner collator.
            task: makes the noise, and names the column of images or latents.
        """
        super().__init__(collator)
        self.task = task

    def __call__(self, rows: list[Any]) -> dict[str, Any]:
        """Collate rows, and noise them.

        Raises:
            ValueError: the inner collator makes no batch with the column.
        """
        batch, column = self.collator(rows), self.task.column
        clean = batch.get(column) if isinstance(batch, Mapping) else None
        if not isinstance(clean, Tensor) or not clean.is_floating_point():
            given = list(batch) if isinstance(batch, Mapping) else type(batch).__name__
            found = "" if not isinstance(clean, Tensor) else f", and {column!r} is of {clean.dtype}"
            raise ValueError(
                f"The data collator made a batch with {given}{found}. Expected a float tensor {column!r} of images, "
                "scaled as for the training, or of latents. Name the column by `DiffusionModelOutput(…, column=…)`."
            )
        return self.task.noised(clean) | {name: value for name, value in batch.items() if name != column}


def _described(scheduler: Any) -> dict[str, Any]:
    """Read what the task needs of a scheduler as plain numbers, which identify the task and can be rebuilt from."""
    if isinstance(scheduler, Mapping):
        alphas, kind = scheduler.get("alphas_cumprod"), scheduler.get("prediction_type", "epsilon")
    else:
        alphas = getattr(scheduler, "alphas_cumprod", None)
        kind = getattr(getattr(scheduler, "config", None), "prediction_type", "epsilon")
    if alphas is None:
        raise TypeError(
            f"`scheduler` is a {type(scheduler).__name__} without `alphas_cumprod`. Expected a scheduler of "
            "`diffusers` that adds noise by ā_t, such as `DDPMScheduler`. For flow matching, write a task of your own."
        )
    if kind not in get_args(PredictionType):
        raise ValueError(
            f"The scheduler has the `prediction_type` {kind!r}. Expected one of {list(get_args(PredictionType))}."
        )
    values = [float(alpha) for alpha in alphas]
    if not values or not all(0 <= alpha <= 1 for alpha in values):
        raise ValueError("`alphas_cumprod` of the scheduler is empty, or has numbers outside of [0, 1].")
    return {"alphas_cumprod": values, "prediction_type": kind}


def _chosen(timesteps: int | Sequence[int], total: int) -> list[int]:
    """List the timesteps. Raises `ValueError` where the schedule does not have them."""
    if isinstance(timesteps, int):
        count = checked_int(timesteps, "timesteps", 1)
        if count <= total:
            return [(2 * place + 1) * total // (2 * count) for place in range(count)]
    elif len(timesteps) and all(0 <= step < total for step in timesteps):
        return [int(step) for step in timesteps]
    raise ValueError(
        f"`timesteps` is {timesteps!r}, and the schedule has {total}. Expected their number, or a list of some in "
        f"0 … {total - 1}."
    )


def _entry(batch: Batch, name: str) -> Tensor:
    value = batch.get(name) if isinstance(batch, Mapping) else None
    if not isinstance(value, Tensor):
        given = list(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(
            f"The batch has {given}, and no {name!r}. Expected a batch of noised rows, which "
            "`DiffusionModelOutput.collator` makes. Wrap your data collator by it."
        )
    return value


def _repeated(value: Any, rows: int, copies: int) -> Any:
    """Give each noised copy of a row the row's condition."""
    if isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == rows:
        return value.unsqueeze(1).expand(rows, copies, *value.shape[1:]).flatten(0, 1)
    return value


def _prediction(model_output: Any, like: Tensor) -> Tensor:
    """Find the prediction `(B, K, …)` in what a model returned, without the channels of a learned variance."""
    found: Any = model_output.get("sample") if isinstance(model_output, Mapping) else model_output
    found = found[0] if isinstance(found, tuple | list) else getattr(found, "sample", found)
    channels, size = like.shape[2], like.shape[3:]
    fits = isinstance(found, Tensor) and found.ndim == like.ndim - 1 and found.shape[2:] == size
    if fits and found.shape[1] in (channels, 2 * channels):
        kept: Tensor = found[:, :channels].reshape(like.shape)
        return kept.to(torch.promote_types(kept.dtype, torch.float32))
    given = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
    raise ValueError(
        f"The model returned a prediction of {given} for noised rows of {tuple(like.flatten(0, 1).shape)}. Expected "
        "the same shape, as `sample`, a tensor or the first of a tuple. Is this the model that removes the noise?"
    )


def _mean_square(values: Tensor) -> Tensor:
    return values.square().flatten(1).mean(dim=1)
