"""The engines against one `autograd.grad` per sample, on tiny architectures of transformers, open_clip and torch."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

_SPEC = importlib.util.spec_from_file_location(
    "architectures", Path(__file__).parents[2] / "benchmarks" / "architectures.py"
)
assert _SPEC is not None and _SPEC.loader is not None
zoo = importlib.util.module_from_spec(_SPEC)
sys.modules["architectures"] = zoo
with pytest.MonkeyPatch.context() as patch:  # as for a script, whose neighbours can be imported
    patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    _SPEC.loader.exec_module(zoo)

TOLERANCE = 1e-4

QUICK = {
    "causal-lm": ["gpt2", "llama", "mixtral", "mamba"],
    "sequence-classification": ["albert", "deberta-v2"],
    "image-classification": ["convnext", "swin", "resnet"],
    "seq2seq-lm": ["t5"],
    "audio-classification": ["wav2vec2"],
}
MORE = {
    "causal-lm": [
        "bloom", "cohere2", "falcon", "gemma2", "gpt_neox", "gpt_oss", "gptj", "granitemoe", "jamba",
        "llama4_text", "mamba2", "mistral", "mpt", "olmo2", "olmoe", "opt", "phi3", "qwen2", "qwen2_moe", "qwen3",
        "starcoder2", "xglm",
    ],
    "sequence-classification": ["bert", "distilbert", "electra", "funnel", "mpnet", "roberta", "xlnet"],
    "masked-lm": ["bert", "modernbert", "deberta", "convbert"],
    "image-classification": [
        "beit", "convnextv2", "vit_msn", "dinov2", "mobilenet_v2", "poolformer", "pvt", "regnet", "swinv2", "vit",
    ],
    "seq2seq-lm": ["bart", "marian", "mt5", "switch_transformers"],
    "audio-classification": ["hubert"],
}  # fmt: skip


def check(model: nn.Module, batch: dict[str, Tensor], output_fn: Callable[..., Tensor], engine: str = "auto") -> Any:
    """Compare all gradients of all samples with the truth, and return the computer."""
    truth = zoo.one_by_one(model, batch, output_fn)
    before = {name: (p.requires_grad, p.grad) for name, p in model.named_parameters()}
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    found, computer = zoo.gradients(model, batch, output_fn, engine)
    assert list(found) == list(truth)
    assert zoo.relative_error(found, truth) < TOLERANCE
    assert {name: (p.requires_grad, p.grad) for name, p in model.named_parameters()} == before
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
    return computer


def cases(table: dict[str, list[str]]) -> list[Any]:
    return [pytest.param(head, kind, id=f"{kind}-{head}") for head, kinds in table.items() for kind in kinds]


@pytest.mark.few(2)
@pytest.mark.parametrize(("head", "model_type"), cases(QUICK))
def test_architecture(head: str, model_type: str) -> None:
    """Padding masks, tied and reused layers, experts, relative position biases."""
    computer = check(*zoo.HEADS[head][1](model_type), zoo.last_logits)
    assert computer.engine == "hooked"


@pytest.mark.few(2)
@pytest.mark.parametrize(("head", "model_type"), cases(MORE))
def test_more_architectures(head: str, model_type: str) -> None:
    check(*zoo.HEADS[head][1](model_type), zoo.last_logits)


def clip(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    text = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
            "vocab_size": 99, "max_position_embeddings": 16, "eos_token_id": 2, "bos_token_id": 1,
        "pad_token_id": 0}  # fmt: skip
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
              "image_size": 16, "patch_size": 8}  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision, projection_dim=8)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    length = 16 if kind.startswith("Siglip") else 8
    ids = torch.randint(5, 99, (3, length))
    ids[:, -1] = 2
    return model, {"input_ids": ids, "pixel_values": torch.randn(3, 3, 16, 16)}


def pair_similarity(result: Any, batch: Any) -> Tensor:
    """A score of each image-text pair alone."""
    return (result.image_embeds * result.text_embeds * torch.linspace(0.5, 1.5, result.text_embeds.shape[1])).sum(1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
def test_image_text_models(kind: str) -> None:
    model, batch = clip(kind)
    assert check(model, batch, pair_similarity).engine == "hooked"


def test_open_clip() -> None:
    """`nn.MultiheadAttention`, whose projections no module hook sees; parameters of the top module."""
    open_clip = pytest.importorskip("open_clip")
    torch.manual_seed(0)
    model = open_clip.model.CLIP(
        embed_dim=8,
        vision_cfg={"image_size": 16, "layers": 2, "width": 64, "patch_size": 8},
        text_cfg={"context_length": 8, "vocab_size": 60, "width": 16, "heads": 2, "layers": 2},
        output_dict=True,
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    batch = {"image": torch.randn(3, 3, 16, 16), "text": torch.randint(1, 60, (3, 8))}

    def output(result: Any, batch: Any) -> Tensor:
        similar = (result["image_features"] * result["text_features"] * torch.arange(1.0, 9.0)).sum(1)
        return result["logit_scale"] * similar

    assert check(model, batch, output).engine == "hooked"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "mobilenetv3_small_050", "vit_tiny_patch16_224", "efficientnet_b0"])
def test_timm(name: str) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    options = {"img_size": 32} if "vit" in name else {}
    model = timm.create_model(name, pretrained=False, num_classes=5, **options).eval()
    batch = (torch.randn(3, 3, 32, 32),)
    names = [n for n, _ in model.named_parameters()]

    def output(result: Tensor, batch: Any) -> Tensor:
        return result[:, 0] - result[:, 1:].logsumexp(1)

    from hf_trak.gradient_computers import per_sample_gradients

    found = per_sample_gradients(model, batch, output, "hooked")
    assert list(found) == names
    for i in range(3):
        f = output(model(batch[0][i : i + 1]), batch).sum()
        truth = torch.autograd.grad(f, list(model.parameters()))
        total = torch.stack([g.norm() for g in truth]).norm()
        for n, g in zip(names, truth, strict=True):
            assert float((found[n][i] - g).norm()) < TOLERANCE * float(g.norm() + 1e-3 * total), n


def test_sequence_first_attention() -> None:
    """Layouts with the batch in the second dimension, also where the length equals the number of samples."""
    torch.manual_seed(0)

    class SequenceFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(30, 12)
            self.layer = nn.TransformerEncoderLayer(12, 3, 20, dropout=0.0, batch_first=False)
            self.head = nn.Linear(12, 4)

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.head(self.layer(self.embed(input_ids).transpose(0, 1)).mean(0))

    for length in (4, 7):
        batch = {"input_ids": torch.randint(0, 30, (4, length))}
        model = SequenceFirst().eval()
        assert check(model, batch, lambda y, batch: y[:, 0] - y.logsumexp(1)).engine == "hooked"
