"""Engines for per-sample gradients of every architecture of transformers that can be built tiny.

    python recipes/benchmarks/architectures.py                      # all heads, a Markdown table on stdout
    python recipes/benchmarks/architectures.py --only mixtral swin  # some model types
    python recipes/benchmarks/architectures.py --curvature --json found.jsonl   # their curvature instead

Each architecture is built from a shrunken default configuration, gets a batch of four samples (a left-padded, a
right-padded and two full ones where there is a padding mask), and is compared with one `autograd.grad` per sample.
With `--curvature`, EK-FAC is fitted instead, see architectures_curvature.py; a run that was interrupted goes on with
what the file given as `--json` does not have yet.
"""

import argparse
import logging
import math
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from architectures_curvature import HEADER, Findings, cells, examine
from torch import Tensor, nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_trak.errors import GradientEngineError
from hf_trak.gradient_computers.auto import AutoGradientComputer, engines_of
from hf_trak.gradient_computers.per_sample import function_task


def _fields(value: int, names: str) -> dict[str, int]:
    return dict.fromkeys(names.split(), value)


TINY: dict[str, Any] = {
    **_fields(32, "hidden_size d_model n_embd dim embed_dim word_embed_proj_dim embedding_size emb_dim dim_model"),
    **_fields(32, "model_dim hidden_dim decoder_hidden_size encoder_hidden_size attention_hidden_size lru_width"),
    **_fields(32, "width output_hidden_size"),
    **_fields(2, "num_hidden_layers n_layer num_layers encoder_layers decoder_layers n_layers num_decoder_layers"),
    **_fields(2, "num_encoder_layers num_key_value_heads num_kv_heads n_kv_heads multi_query_group_num"),
    **_fields(4, "num_attention_heads n_head n_heads encoder_attention_heads decoder_attention_heads num_heads"),
    **_fields(8, "head_dim d_kv attention_head_size kv_channels"),
    **_fields(48, "intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim n_inner moe_intermediate_size"),
    **_fields(48, "ffn_hidden_size shared_expert_intermediate_size moe_shared_expert_intermediate_size"),
    "vocab_size": 99, "vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 8, "type_vocab_size": 2,
    **_fields(64, "max_position_embeddings n_positions max_target_positions max_source_positions n_ctx"),
    **_fields(64, "max_seq_len max_sequence_length max_seq_length"),
    **_fields(4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    **_fields(2, "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts"),
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "qk_head_dim": 8, "sliding_window": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "image_size": 32, "patch_size": 8, "num_labels": 3, "window_size": 4, "drop_path_rate": 0.0,
    "state_size": 8, "time_step_rank": 4, "n_groups": 1, "mamba_num_heads": 4, "mamba_head_dim": 16,
    "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_dt_rank": 4,
    "ssm_state_size": 8, "chunk_size": 8, "mamba_chunk_size": 8, "expand": 2, "rotary_dim": 4, "num_buckets": 4,
    "axial_pos_shape": (8, 8), "axial_pos_embds_dim": (8, 24), "use_cache": False, "pad_to_multiple_of": 8,
    "attention_types": [[["global", "local"], 1]], "sep_token_id": 3,
    "num_codevector_groups": 2, "num_codevectors_per_group": 8, "codevector_dim": 16, "proj_codevector_dim": 16,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "conv_depthwise_kernel_size": 3,
    "classifier_proj_size": 16, "num_mel_bins": 16, "max_length": 32, "time_stride": 8, "frequency_stride": 8,
}  # fmt: skip
"""Values for configuration fields, used where a configuration has the field."""

SPECIAL: dict[str, dict[str, Any]] = {
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
    "regnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4},
    "convnext": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
    "convnextv2": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
    "swin": {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "patch_size": 4, "window_size": 4},
    "swinv2": {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "patch_size": 4, "window_size": 4},
    "donut-swin": {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "patch_size": 4, "window_size": 4},
    "focalnet": {"embed_dim": 8, "depths": [1, 1],
                 "focal_levels": [2, 2], "focal_windows": [3, 3], "patch_size": 4,
                 "hidden_sizes": [8, 16]},
    "mobilenet_v1": {"depth_multiplier": 0.25, "min_depth": 4}, "mobilenet_v2": {"depth_multiplier": 0.25},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 32},
    "levit": {"hidden_sizes": [16, 24, 32], "depths": [1, 1, 1], "num_attention_heads": [2, 2, 2], "key_dim": [8] * 3,
              "patch_size": 16, "image_size": 64},
    "pvt": {"hidden_sizes": [8, 16, 16, 16], "num_attention_heads": [1, 2, 2, 2], "depths": [1] * 4,
            "patch_sizes": [4, 2, 2, 2],
            "image_size": 64},
    "pvt_v2": {"hidden_sizes": [8, 16, 16, 16], "num_attention_heads": [1, 2, 2, 2], "depths": [1] * 4,
            "mlp_ratios": [2] * 4,
               "image_size": 64},
    "segformer": {"hidden_sizes": [8, 16, 16, 16], "num_attention_heads": [1, 2, 2, 2], "depths": [1] * 4,
            "image_size": 64},
    "poolformer": {"hidden_sizes": [8, 16, 16, 16], "depths": [1] * 4},
    "cvt": {"embed_dim": [8, 16, 16], "num_heads": [1, 2, 2], "depth": [1, 1, 1]},
    "mobilevit": {"hidden_sizes": [16, 16, 16], "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 16], "patch_size": 2},
    "mobilevitv2": {"base_attn_unit_dims": [8, 8, 8], "n_attn_blocks": [1, 1, 1], "patch_size": 2},
    "swiftformer": {"embed_dims": [8, 16, 16, 16], "depths": [1] * 4},
    "van": {"hidden_sizes": [8, 8, 16, 16], "depths": [1] * 4},
    "dinat": {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2]},
    "hiera": {"embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 2], "image_size": (64, 64)},
    "bit": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_groups": 4},
    "wav2vec2": {"conv_dim": [8, 8], "conv_kernel": [10, 3], "conv_stride": [5, 2], "hidden_size": 32},
    "hubert": {"conv_dim": [8, 8], "conv_kernel": [10, 3], "conv_stride": [5, 2]},
    "mamba2": {"num_heads": 4, "head_dim": 16}, "gpt_neo": {"num_layers": 2}, "xlnet": {"d_head": 8, "d_inner": 48,
    "max_position_embeddings": ...},
    "falcon": {"head_dim": ...}, "funnel": {"num_hidden_layers": ..., "block_sizes": [1, 1], "d_inner": 48},
    "mpt": {"n_heads": 4}, "ctrl": {"dff": 48}, "openai-gpt": {"afn": "gelu"},
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 16},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8,
                   "share_att_key": True,
                   "norm_rel_ebd": "layer_norm"},
}  # fmt: skip
"""Values for single model types; `...` leaves a field as it is."""

MAX_PARAMETERS = 8_000_000


def tiny_config(model_type: str, **overrides: Any) -> Any:
    """The default configuration of a model type with every known size field made small."""
    config_class = CONFIG_MAPPING[model_type]
    default = config_class()
    values = {
        k: v for k, v in TINY.items() if getattr(default, k, None) is not None and not callable(getattr(default, k))
    }
    values = {
        k: v for k, v in values.items() if not isinstance(getattr(default, k), list | tuple) or isinstance(v, list)
    }
    values |= SPECIAL.get(model_type, {})
    values = {k: v for k, v in values.items() if v is not ...}
    config = config_class(**{**values, **overrides})
    if getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = 0
    for name, part in vars(config).items():  # text and vision parts of composite models
        if isinstance(part, transformers.PreTrainedConfig) and part.model_type in CONFIG_MAPPING:
            setattr(config, name, tiny_config(part.model_type))
    return config


def tokens(size: int = 4, length: int = 12, padded: bool = True) -> dict[str, Tensor]:
    """Random tokens with a padding mask: sample 1 padded on the right, sample 2 on the left."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 99, (size, length), generator=generator)
    mask = torch.ones(size, length, dtype=torch.long)
    if padded:
        mask[1, 8:] = 0
        mask[2, :3] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def images(config: Any, size: int = 4) -> dict[str, Tensor]:
    """Random images of the size that a configuration names."""
    side = getattr(config, "image_size", 32)
    height, width = (side, side) if isinstance(side, int) else tuple(side)
    generator = torch.Generator().manual_seed(0)
    return {"pixel_values": torch.randn(size, getattr(config, "num_channels", 3), height, width, generator=generator)}


def last_logits(result: Any, batch: Any) -> Tensor:
    """A margin-like scalar of logits `(B, *, classes)` that depends on all of them."""
    logits = result.logits.float()
    if logits.ndim > 2:
        mask = batch["attention_mask"] if "attention_mask" in batch else torch.ones(logits.shape[:2])
        mask = mask[:, -logits.shape[1] :].to(logits)
        picked = logits[..., 7 % logits.shape[-1]] - logits.logsumexp(-1)
        return (picked * mask).sum(1)
    return logits[:, 1] - logits.logsumexp(1)


def causal_lm(model_type: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A tiny causal language model and a batch for it."""
    return _built("AutoModelForCausalLM", tiny_config(model_type)), tokens()


def sequence_classification(model_type: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A tiny text classifier and a batch for it."""
    return _built("AutoModelForSequenceClassification", tiny_config(model_type)), tokens()


def image_classification(model_type: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A tiny image classifier and a batch for it."""
    config = tiny_config(model_type)
    return _built("AutoModelForImageClassification", config), images(config)


def seq2seq_lm(model_type: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A tiny encoder–decoder and a batch for it."""
    batch = tokens()
    decoder = torch.randint(5, 99, (4, 6), generator=torch.Generator().manual_seed(1))
    batch["decoder_input_ids"] = decoder
    batch["decoder_attention_mask"] = torch.ones_like(decoder)
    return _built("AutoModelForSeq2SeqLM", tiny_config(model_type)), batch


def masked_lm(model_type: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A tiny masked language model and a batch for it."""
    return _built("AutoModelForMaskedLM", tiny_config(model_type)), tokens()


def audio_classification(model_type: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A tiny audio classifier and a batch of waveforms."""
    waves = torch.randn(4, 400, generator=torch.Generator().manual_seed(0))
    return _built("AutoModelForAudioClassification", tiny_config(model_type)), {"input_values": waves}


def _built(auto: str, config: Any) -> nn.Module:
    torch.manual_seed(0)
    model = getattr(transformers, auto).from_config(config)
    count = sum(p.numel() for p in model.parameters())
    if count > MAX_PARAMETERS:
        raise ValueError(f"{count:,} parameters are too many for a tiny model")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # zero-initialized biases, scales and position tables would hide errors
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


HEADS: dict[str, tuple[str, Callable[[str], tuple[nn.Module, dict[str, Tensor]]]]] = {
    "causal-lm": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", causal_lm),
    "sequence-classification": ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", sequence_classification),
    "image-classification": ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", image_classification),
    "seq2seq-lm": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", seq2seq_lm),
    "masked-lm": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", masked_lm),
    "audio-classification": ("MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES", audio_classification),
}


def one_by_one(model: nn.Module, batch: dict[str, Tensor], output_fn: Any) -> dict[str, Tensor]:
    """The truth: one forward pass and one `autograd.grad` per sample."""
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    rows = []
    for i in range(len(next(iter(batch.values())))):
        single = {key: value[i : i + 1] for key, value in batch.items()}
        f = output_fn(model(**single), single).sum()
        found = torch.autograd.grad(f, list(parameters.values()), allow_unused=True)
        rows.append([torch.zeros_like(p) if g is None else g for p, g in zip(parameters.values(), found, strict=True)])
    return {n: torch.stack(column) for n, column in zip(parameters, zip(*rows, strict=True), strict=True)}


def relative_error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """Largest error of a parameter's gradient for a sample, relative to that gradient.

    Gradients that vanish by symmetry (key biases) are measured against 1e-3 of the sample's whole gradient.
    """
    total = torch.stack([g.reshape(len(g), -1).norm(dim=1) for g in truth.values()]).norm(dim=0)
    worst = 0.0
    for name, gradient in truth.items():
        size = gradient.reshape(len(gradient), -1).norm(dim=1).maximum(1e-3 * total)
        error = float(((found[name] - gradient).reshape(len(gradient), -1).norm(dim=1) / size.clamp_min(1e-30)).max())
        if math.isnan(error):
            return error
        worst = max(worst, error)
    return worst


def gradients(
    model: nn.Module, batch: dict[str, Tensor], output_fn: Any, engine: str = "auto"
) -> tuple[dict[str, Tensor], AutoGradientComputer]:
    """Per-sample gradients, and the computer that took them."""
    computer = AutoGradientComputer(model, function_task(output_fn, model), None, None, None, None, engines_of(engine))
    size = len(next(iter(batch.values())))
    whole = torch.zeros(size, computer.layout.total)

    def sink(start: int, block: Tensor) -> None:
        whole[:, start : start + block.shape[1]] += block

    computer.stream(batch, sink)
    return {
        s.name: whole[:, s.offset : s.offset + s.numel].view(size, *s.shape) for s in computer.layout.slots
    }, computer


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise `TimeoutError` after so many seconds."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def main() -> None:
    """Try every architecture once, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", default=list(HEADS), choices=list(HEADS))
    parser.add_argument("--only", nargs="+", help="model types; default: all")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--seconds", type=int, default=60, help="limit per architecture")
    parser.add_argument("--curvature", action="store_true", help="fit a curvature instead of comparing gradients")
    parser.add_argument("--json", type=Path, default=Path("curvature.jsonl"), help="what --curvature found")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    if arguments.curvature:
        curvatures(arguments)
        return
    counts: dict[str, int] = {}
    print("| head | architecture | engine | relative error | replayed or refused |\n|---|---|---|---|---|")
    for head in arguments.heads:
        mapping, build = HEADS[head]
        for model_type in sorted(getattr(modeling_auto, mapping)):
            if arguments.only and model_type not in arguments.only:
                continue
            row = _try(build, model_type, arguments.engine, arguments.seconds)
            counts[row[0]] = counts.get(row[0], 0) + 1
            if row[0] != "not built" or arguments.only:
                print(f"| {head} | {model_type} | {row[0]} | {row[1]} | {row[2]} |", flush=True)
    print("\n" + ", ".join(f"{count} {engine}" for engine, count in sorted(counts.items())), file=sys.stderr)


def curvatures(arguments: argparse.Namespace) -> None:
    """Fit a curvature to every architecture once, and print a table."""
    torch.set_num_threads(1)  # in models as tiny as these, threads only wait for each other
    logging.getLogger("hf_trak").setLevel(logging.ERROR)  # four samples are few for every layer
    findings = Findings(arguments.json)
    counts = {"fitted": 0, "failed": 0, "not built": 0}
    print(HEADER, flush=True)
    for head in arguments.heads:
        mapping, build = HEADS[head]
        for model_type in sorted(getattr(modeling_auto, mapping)):
            if arguments.only and model_type not in arguments.only:
                continue
            if (head, model_type) not in findings:
                findings.add(head, model_type, _curvature(build, model_type, arguments.seconds))
            row = findings[head, model_type]
            kind = "not built" if row.get("built") is False else "failed" if "error" in row else "fitted"
            counts[kind] += 1
            if kind != "not built" or arguments.only:
                print(f"| {head} | {model_type} | {' | '.join(cells(row))} |", flush=True)
    print("\n" + ", ".join(f"{count} {kind}" for kind, count in counts.items()), file=sys.stderr)


def _curvature(build: Any, model_type: str, seconds: int) -> dict[str, Any]:
    try:
        with time_limit(seconds):
            model, batch = build(model_type)
            last_logits(model(**batch), batch)
    except Exception as error:  # a default configuration that cannot be shrunk is not this script's business
        return {"built": False, "error": _message(error, 150)}
    begun = time.perf_counter()
    try:
        with time_limit(seconds):
            found = examine(model, batch, last_logits)
    except Exception as error:  # whatever fails belongs in the table
        return {"error": _message(error, 300)}
    return {**found, "seconds": round(time.perf_counter() - begun, 2)}


def _message(error: Exception, length: int) -> str:
    return f"{type(error).__name__}: {str(error)[:length]}".replace("\n", " ").replace("|", "/")


def _try(build: Any, model_type: str, engine: str, seconds: int) -> tuple[str, str, str]:
    try:
        with time_limit(seconds):
            model, batch = build(model_type)
            truth = one_by_one(model, batch, last_logits)
            last_logits(model(**batch), batch)
    except Exception as error:  # a default configuration that cannot be shrunk is not this script's business
        return "not built", "", f"{type(error).__name__}: {str(error)[:150]}".replace("\n", " ")
    begun = time.perf_counter()
    try:
        with time_limit(seconds):
            found, computer = gradients(model, batch, last_logits, engine)
    except (GradientEngineError, TimeoutError) as error:
        return "none", "", str(error).replace("\n", " ")[:300]
    note = f"{time.perf_counter() - begun:.1f} s"
    if computer._refusals:
        note = " ".join(computer._refusals).replace("\n", " ")[:300]
    return str(computer.engine), f"{relative_error(found, truth):.1e}", note


if __name__ == "__main__":
    main()
