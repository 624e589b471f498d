"""Bounds on the rate of featurizing on a GPU that is not there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from digit_models import DigitNet, digits
from test_estimate import config
from torch import Tensor, nn

import hf_trak
from hf_trak.errors import HfTrakError
from hf_trak.featurize.batch_counts import featurizing_counts
from hf_trak.featurize.roofline import RATES, Roofline
from hf_trak.gradient_computers.layout import ParameterLayout
from hf_trak.gradient_computers.per_sample import function_task
from hf_trak.modelout_functions.base import AbstractModelOutput, call_model
from hf_trak.runtime.counting import Counts

ROWS, WIDTH, OUTPUTS = 16, 32, 8
TASK = "image_classification"


def counts(model: nn.Module, batch: Any, output_fn: Callable[[Any, Any], Tensor]) -> Counts:
    return featurizing_counts(model, function_task(output_fn, model), batch, ParameterLayout.from_model(model))


def test_a_layer_by_hand() -> None:
    """A product and its weights' gradient, then the gradients of all rows, all in numbers of 2 bytes."""
    layer = nn.Linear(WIDTH, OUTPUTS, bias=False)
    found = counts(layer, (torch.zeros(ROWS, WIDTH),), lambda output, batch: output.square().sum(1))
    assert found.flops == 2 * (2 * ROWS * WIDTH * OUTPUTS)
    assert found.launches["mm"] == 2 and found.launches["gradients and projections"] == 2
    assert found.work[-1] == (2 * ROWS * WIDTH * OUTPUTS * 2, 0)
    product = (2 * (ROWS * WIDTH + WIDTH * OUTPUTS + ROWS * OUTPUTS), 2 * ROWS * WIDTH * OUTPUTS)
    assert found.work.count(product) == 2


def test_tables_have_gradients_for_the_tokens_of_a_row_alone() -> None:
    table = nn.Sequential(nn.Embedding(1000, WIDTH))
    found = counts(table, (torch.zeros(ROWS, 5, dtype=torch.int64),), lambda output, batch: output.sum((1, 2)))
    assert found.work[-1][0] == 2 * 2 * ROWS * 5 * WIDTH


def test_each_part_can_bound_a_batch() -> None:
    rates = RATES["h200"]
    large, busy = (int(rates.bytes), 1), (1, int(2 * rates.flops))
    for work, launches, bound, seconds in (
        ([large, large, busy], 1, "memory", 4.0),
        ([large, busy], 1, "arithmetic", 3.0),
        ([large, busy], 2**18, "host", 2**18 * rates.launch),
    ):
        made = Counts(work=work)
        made.launches["mm"] = launches
        found = Roofline.of(made, 12, "h200")
        assert found.bound == bound and found.rows_per_second == pytest.approx(12 / seconds)
        assert f"bound by its {bound}" in str(found)


def test_an_estimate_for_a_gpu_leaves_the_model_alone() -> None:
    net = DigitNet().train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    found = hf_trak.estimate(net, digits(0, 61), config(per_device_batch_size=4), device="h200", task=TASK)
    assert found.roofline is not None and found.roofline.batch_size == 4
    assert found.rows_per_second == found.roofline.rows_per_second
    assert found.seconds == pytest.approx(61 / found.rows_per_second)
    assert str(found.roofline) in str(found)
    assert net.training and all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


class Gated(DigitNet):
    """Looks at the numbers of a batch."""

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Any:
        return super().forward(pixel_values if pixel_values.sum() > 0 else -pixel_values, labels)


class OneByOne(AbstractModelOutput):
    """A task of a single row."""

    def get_output(self, model: nn.Module, weights: Any, buffers: Any, *sample: Tensor) -> Tensor:
        return call_model(model, weights, buffers, sample[:1], {}).logits.sum()

    def get_out_to_loss_grad(self, model: nn.Module, weights: Any, buffers: Any, batch: Any) -> Tensor:
        return torch.ones(len(batch["labels"]))


def test_what_cannot_be_counted_is_refused() -> None:
    with pytest.raises(HfTrakError, match="looks at numbers of a batch"):
        hf_trak.estimate(Gated(), digits(0, 9), config(), device="h200", task=TASK)
    with pytest.raises(HfTrakError, match="takes rows one by one"):
        hf_trak.estimate(DigitNet(), digits(0, 9), config(), device="h200", task=OneByOne())
    with pytest.raises(ValueError, match="`device` is 'h200', but `train_dataset` is the number 9"):
        hf_trak.estimate(DigitNet(), 9, config(), device="h200")
    with pytest.raises(ValueError, match="Expected one of them"):
        hf_trak.estimate(DigitNet(), digits(0, 9), config(), device="h200", measure=True)
    with pytest.raises(ValueError, match="`device` is 'h2000'"):
        hf_trak.estimate(DigitNet(), digits(0, 9), config(), device="h2000", task=TASK)
