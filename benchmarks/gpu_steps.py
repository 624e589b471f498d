"""End-to-end work of the kernels on a GPU: features of a ResNet-18 and a GPT-2, and scores of features in RAM.

    python benchmarks/gpu_kernels.py        # runs this too

Every figure is a ratio of two steps that take turns in one process.
"""

from collections.abc import Callable, Iterator
from functools import partial

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers import GPT2Config, GPT2LMHeadModel

from hf_trak.gradient_computers import HookedGradientComputer
from hf_trak.gradient_computers.hooked.workspace import OuterBlock, default_block_bytes
from hf_trak.gradient_computers.layout import ParameterLayout
from hf_trak.gradient_computers.per_sample import function_task
from hf_trak.projectors import make_projector
from hf_trak.traker.score_computers import product_through_device

Step = Callable[[], object]

BLOCK_BYTES = default_block_bytes(torch.device("cuda"))


def fused_steps(k: int, device: torch.device) -> Iterator[tuple[str, dict[str, Step], float]]:
    """Layers of few tokens: `outer.cu` on factors, beside products in blocks and `sjlt.cu` on these.

    Yields:
        a name, the two steps, and the number of gradient elements.
    """
    for dtype in (torch.bfloat16, torch.float32):
        for size, tokens, height, width in (
            *((256, tokens, 768, 768) for tokens in (1, 4, 8, 16)),
            *((64, tokens, 3072, 768) for tokens in (1, 8)),
            *((64, tokens, 768, 3072) for tokens in (1, 8)),
            (64, 16, 512, 4608),  # the last convolutions of a ResNet-18 on images of 32 × 32, in two launches
        ):
            left = torch.randn(size, tokens, height, device=device).to(dtype)
            right = torch.randn(size, tokens, width, device=device).to(dtype)
            projector = make_projector("sjlt", height * width, k, 0, device)
            out = torch.zeros(size, k, device=device)
            steps: dict[str, Step] = {
                "fused": partial(torch.ops.hf_trak.sjlt_accumulate_outer, out, left, right, 0, 0, 0, 1),
                "unfused": partial(form_and_project, projector, out, left, right),
            }
            name = f"{str(dtype).removeprefix('torch.')} B={size} T={tokens} {height}x{width}"
            yield name, steps, float(size * height * width)


def form_and_project(projector: object, out: Tensor, left: Tensor, right: Tensor) -> None:
    """The layer rule's slices, each projected, as the hooked engine does without factors."""
    size, _, height = left.shape
    width = right.shape[2]
    rows = max(1, BLOCK_BYTES // (size * width * left.element_size()))
    for first in range(0, height, rows):
        block = OuterBlock(left[:, :, first : first + rows], right).dense()
        projector.accumulate(out, block, first * width, 0)  # type: ignore[attr-defined]


def resnet18() -> tuple[nn.Module, Tensor, Callable[..., Tensor]]:
    """ImageNet's shapes."""
    model = timm.create_model("resnet18", pretrained=False)
    return (
        model,
        torch.randn(64, 3, 224, 224),
        lambda output, batch: output.float().logsumexp(1) - output[:, 0].float(),
    )


def gpt2() -> tuple[nn.Module, Tensor, Callable[..., Tensor]]:
    """124M parameters, 512 tokens."""
    model = GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False))

    def loss(output: object, batch: tuple[Tensor]) -> Tensor:
        logits = output.logits[:, :-1].float()  # type: ignore[attr-defined]
        losses = F.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten(), reduction="none")
        return losses.view(len(logits), -1).sum(1)

    return model, torch.randint(0, 50257, (16, 512)), loss


def featurize_steps(k: int, device: torch.device) -> Iterator[tuple[str, dict[str, Step], float]]:
    """Forward and backward pass as in training, per-sample gradients alone, and features by the sparse map.

    Yields:
        a name, the steps, and the number of samples of a batch.
    """
    for name, make in (("ResNet-18", resnet18), ("GPT-2", gpt2)):
        model, data, output_fn = make()
        model = model.to(device=device, dtype=torch.bfloat16).eval()
        batch = (data.to(device=device, dtype=torch.bfloat16) if data.is_floating_point() else data.to(device),)
        total = ParameterLayout.from_model(model).total
        computer = HookedGradientComputer(model, function_task(output_fn, model), None, None, device)
        projector = make_projector("sjlt", total, k, 0, device)
        size = len(data)
        steps: dict[str, Step] = {
            "forward, backward": partial(train_step, model, batch, output_fn),
            "gradients per sample": partial(computer.stream, batch, ignore),
            "features (sjlt)": partial(features, computer, projector, batch, size, device),
        }
        yield f"{name} B={size}", steps, float(size)


def train_step(model: nn.Module, batch: tuple[Tensor], output_fn: Callable[..., Tensor]) -> None:
    model.zero_grad(set_to_none=True)
    output_fn(model(*batch), batch).sum().backward()


def ignore(start: int, block: Tensor) -> None:
    """A sink that drops what it is given."""


def features(
    computer: HookedGradientComputer, projector: object, batch: tuple[Tensor], size: int, device: torch.device
) -> None:
    sink = projector.sink(size, 0, device)  # type: ignore[attr-defined]
    computer.stream(batch, sink)
    sink.result()


def scoring_steps(k: int, device: torch.device) -> Iterator[tuple[str, dict[str, Step], float]]:
    """Features in RAM times targets: overlapped transfers beside plain ones, and beside the product alone.

    Yields:
        a name, the steps, and the bytes that go over the bus.
    """
    n, block = 200_000, 20_000
    host = torch.randn(n, k)
    for m in (10, 1000):
        targets = torch.randn(m, k)
        resident = torch.randn(block, k, device=device)
        on_device = targets.to(device)
        steps: dict[str, Step] = {
            "product alone": partial(products, resident, on_device, n // block),
            "overlapped": partial(product_through_device, host, targets, device, block),
            "plain": partial(plain_copies, host, on_device, block),
        }
        yield f"{n} x {k} features, {m} targets", steps, 4.0 * (n * k + n * m)


def products(rows: Tensor, targets: Tensor, count: int) -> None:
    for _ in range(count):
        rows @ targets.T


def plain_copies(features: Tensor, targets: Tensor, block: int) -> Tensor:
    result = torch.empty(len(features), len(targets))
    for start in range(0, len(features), block):
        rows = slice(start, start + block)
        result[rows] = (features[rows].to(targets.device) @ targets.T).cpu()
    return result
