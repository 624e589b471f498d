"""Families of models, from configurations."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from datasets import Dataset

from ecosystem_cases.case import VOCABULARY, EcosystemCase, token_rows, tokenizer
from ecosystem_cases.truth import of_plain_trainer
from hf_trak import TrakAttributor, TrakConfig

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "kit"))
from vlm_models import image_rows, vlm, vlm_collator

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen3-MoE": (
        "qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    ),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
    "DeepSeek-V3": (
        "deepseek_v3",
        {
            "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
            "moe_intermediate_size": 16, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1,
        },
    ),
    "Mamba": ("mamba", {"state_size": 4, "time_step_rank": 4}),
    "Gemma 3": ("gemma3_text", {"head_dim": 8, "sliding_window": 8}),
    "Qwen3": ("qwen3", {"head_dim": 8}),
    "Phi-3": ("phi3", {}),
    "GPT-NeoX": ("gpt_neox", {}),
    "OPT": ("opt", {"ffn_dim": 32, "word_embed_proj_dim": 16}),
    "Falcon": ("falcon", {}),
    "Bloom": ("bloom", {"n_head": 2, "n_layer": 2}),
}  # fmt: skip


def causal(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {**SIZES, **options}
    return hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(kind, **sizes)).float().eval()


def llama(**options: Any) -> Any:
    return causal("llama", **options)


def llama_of_rewards() -> Any:
    torch.manual_seed(0)
    return hf.LlamaForSequenceClassification(hf.LlamaConfig(num_labels=1, **SIZES)).eval()


def language(directory: Path, args: TrakConfig, *, model: Any) -> TrakAttributor:
    rows = Dataset.from_dict({"input_ids": token_rows(6)})
    collator = hf.DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    return of_plain_trainer(model(), args, rows, collator)


def speech(directory: Path, args: TrakConfig) -> TrakAttributor:
    """Whisper, whose inputs have one length."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
    more = {"decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_source_positions": 20}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 1}
    config = hf.WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=8, max_target_positions=16, **sizes, **more, **tokens
    )
    sounds = torch.rand(6, 8, 40, generator=torch.Generator().manual_seed(0)).numpy()
    labels = [[3 + place, 4, 5, 6] for place in range(6)]
    rows = Dataset.from_dict({"input_features": sounds, "labels": labels})
    model = hf.WhisperForConditionalGeneration(config).eval()
    return of_plain_trainer(model, args, rows, hf.default_data_collator)


def images_and_text(directory: Path, args: TrakConfig, *, kind: str) -> TrakAttributor:
    args.remove_unused_columns = False
    return of_plain_trainer(vlm(kind), args, _Rows(image_rows(kind)), vlm_collator(kind), task="causal_lm")


class _Rows(torch.utils.data.Dataset):
    """Rows whose images stay arrays."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.rows[row]


VISION = {
    "Qwen2-VL": "qwen2_vl", "Qwen2.5-VL": "qwen2_5_vl", "Qwen3-VL": "qwen3_vl", "LLaVA": "llava",
    "PaliGemma": "paligemma", "Gemma 3 with images": "gemma3", "SmolVLM": "smolvlm",
}  # fmt: skip
LANGUAGE = (
    *(
        EcosystemCase(title, partial(language, model=partial(causal, kind, **options)))
        for title, (kind, options) in FAMILIES.items()
    ),
    EcosystemCase("Whisper", speech),
    *(EcosystemCase(title, partial(images_and_text, kind=kind)) for title, kind in VISION.items()),
)
