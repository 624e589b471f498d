"""A batch's gradients and features are computed without waiting for the device.

On a GPU, an operator whose result has a size or a value that Python needs stops the queue of kernels. The same
operators run on a CPU, where they can be counted; with a GPU, CUDA itself tells about them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from hf_trak.gradient_computers import HookedGradientComputer
from hf_trak.gradient_computers.layout import ParameterLayout
from hf_trak.gradient_computers.per_sample import function_task
from hf_trak.projectors import make_projector

WAITING = {"_local_scalar_dense", "nonzero", "unique_consecutive", "_unique2", "unique_dim", "equal", "masked_select"}
"""Operators of ATen whose results reach Python, or whose results' sizes depend on values."""

Case = tuple[nn.Module, dict[str, Tensor], Callable[[Any, Any], Tensor]]


class Waits(TorchDispatchMode):
    """Counts the operators that wait, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        masks = [
            x for x in (args[1] if name.startswith("index") and isinstance(args[1], list) else []) if x is not None
        ]
        if name in WAITING or any(mask.dtype in (torch.bool, torch.uint8) for mask in masks):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def margin(result: Any, batch: Any) -> Tensor:
    return result.logits[:, 0] - result.logits[:, 1:].logsumexp(1)


def loss(result: Any, batch: Any) -> Tensor:
    labels = batch["input_ids"][:, 1:]
    picked = nn.functional.cross_entropy(result.logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="none")
    return picked.view(labels.shape).sum(1)


def gpt2() -> Case:
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=32, vocab_size=100, bos_token_id=0, eos_token_id=0)
    ids = torch.randint(0, 100, (4, 16))
    return GPT2LMHeadModel(config), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, loss


def bert() -> Case:
    config = BertConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=2, vocab_size=100
    )
    ids = torch.randint(1, 100, (4, 16))
    mask = torch.ones_like(ids)
    mask[1, 10:] = 0
    return BertForSequenceClassification(config), {"input_ids": ids * mask, "attention_mask": mask}, margin


def vit() -> Case:
    config = ViTConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=2, image_size=16, patch_size=4
    )
    return ViTForImageClassification(config), {"pixel_values": torch.randn(4, 3, 16, 16)}, margin


def resnet() -> Case:
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    return ResNetForImageClassification(config), {"pixel_values": torch.randn(4, 3, 32, 32)}, margin


def steps(case: Case, device: str) -> tuple[Callable[[], Tensor], Callable[[], None]]:
    """Featurizing one batch, and a plain training step on it."""
    model, batch, output_fn = case
    model.to(device).eval()
    batch = {name: value.to(device) for name, value in batch.items()}
    grad_dim = ParameterLayout.from_model(model).total
    projector = make_projector("sjlt", grad_dim=grad_dim, proj_dim=256, seed=0, device=device)
    computer = HookedGradientComputer(model, function_task(output_fn, model), None, None, None)

    def featurize() -> Tensor:
        sink = projector.sink(4, 0, device)
        computer.stream(batch, sink)
        return sink.result()

    def plain() -> None:
        output_fn(model(**batch), batch).sum().backward()

    return featurize, plain


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        # Which rows of an embedding table a batch looks up decides which blocks of its gradient exist.
        (gpt2, {"unique_consecutive": 1}),
        (bert, {"unique_consecutive": 2, "nonzero": 1}),
        (vit, {}),
        (resnet, {}),
    ],
)
def test_only_embedding_tables_wait(case: Callable[[], Case], expected: dict[str, int]) -> None:
    """Once per table, where a plain step does not: not once per layer, nor per sample."""
    featurize, plain = steps(case(), "cpu")
    features = featurize()  # the first batch is traced
    with Waits() as ours:
        again = featurize()
    with Waits() as theirs:
        plain()
    assert torch.equal(features, again)
    assert dict(ours.found - theirs.found) == expected


def test_what_waits_is_counted() -> None:
    """The test above can fail: each of these stops a GPU's queue."""
    x = torch.randn(8)
    for wait in (lambda: x.sum().item(), lambda: bool(x[0] > 0), lambda: x[x > 0], lambda: x.nonzero(), x.unique):
        with Waits() as waits:
            wait()
        assert waits.found.total() == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", [vit, resnet])
def test_nothing_waits_for_a_gpu(case: Callable[[], Case]) -> None:
    """CUDA raises an error at the first operator that would."""
    featurize, _ = steps(case(), "cuda")
    expected = featurize()
    featurize()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = featurize()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
