"""Adapters of PEFT on a small Llama."""

from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
import transformers as hf
from datasets import Dataset

from ecosystem_cases.case import EcosystemCase, token_rows, tokenizer
from ecosystem_cases.language import llama
from ecosystem_cases.truth import of_plain_trainer
from hf_trak import TrakAttributor, TrakConfig

LAYERS = ["q_proj", "v_proj"]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", {"r": 2, "target_modules": LAYERS}),
    "LoRA on embeddings and the head": ("LoraConfig", {"r": 2, "target_modules": ["embed_tokens", "lm_head"]}),
    "LoRA with trained layers beside (`modules_to_save`)": (
        "LoraConfig", {"r": 2, "target_modules": LAYERS, "modules_to_save": ["lm_head"]},
    ),
    "rsLoRA": ("LoraConfig", {"r": 2, "target_modules": LAYERS, "use_rslora": True}),
    "DoRA": ("LoraConfig", {"r": 2, "target_modules": LAYERS, "use_dora": True}),
    "AdaLoRA": ("AdaLoraConfig", {"init_r": 4, "target_r": 2, "total_step": 10, "target_modules": LAYERS}),
    "IA³": ("IA3Config", {"target_modules": LAYERS, "feedforward_modules": []}),
    "LoHa": ("LoHaConfig", {"r": 2, "target_modules": LAYERS}),
    "LoKr": ("LoKrConfig", {"r": 2, "target_modules": LAYERS}),
    "OFT": ("OFTConfig", {"oft_block_size": 4, "target_modules": LAYERS}),
    "BOFT": ("BOFTConfig", {"boft_block_size": 4, "target_modules": LAYERS}),
    "VeRA": ("VeraConfig", {"r": 2, "target_modules": LAYERS}),
    "HRA": ("HRAConfig", {"r": 2, "target_modules": LAYERS}),
    "FourierFT": ("FourierFTConfig", {"n_frequency": 8, "target_modules": LAYERS}),
    "VB-LoRA": ("VBLoRAConfig", {"r": 2, "num_vectors": 8, "vector_length": 4, "topk": 2, "target_modules": LAYERS}),
    "LN tuning": ("LNTuningConfig", {"target_modules": ["input_layernorm", "post_attention_layernorm"]}),
    "prompt tuning": ("PromptTuningConfig", {"num_virtual_tokens": 3}),
    "p-tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 3, "encoder_hidden_size": 8}),
    "prefix tuning": ("PrefixTuningConfig", {"num_virtual_tokens": 3}),
}  # fmt: skip


def adapted(directory: Path, args: TrakConfig, *, kind: str, options: dict[str, Any]) -> TrakAttributor:
    config = getattr(peft, kind)(task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(llama(), config).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:  # many begin at zero, where half of the gradients vanish
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    rows = Dataset.from_dict({"input_ids": token_rows(6)})
    collator = hf.DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    return of_plain_trainer(model, args, rows, collator)


ADAPTERS = tuple(
    EcosystemCase(title, partial(adapted, kind=kind, options=options)) for title, (kind, options) in KINDS.items()
)
