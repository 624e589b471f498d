"""Configurations of tiny models, by model type: common fields, and those of single model types."""

from typing import Any

import transformers
from transformers.integrations.heterogeneity.configuration_utils import AmbiguousGlobalPerLayerAttributeError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


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
    "tdnn_dim": [16] * 5, "xvector_output_dim": 16, "classifier_proj_size": 16, "num_mel_bins": 16,
    "max_length": 32, "time_stride": 8, "frequency_stride": 8,
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

_LATENT = {"head_dim": 4, "num_key_value_heads": 4}
"""Multi-head latent attention: rotations are of `qk_rope_head_dim` numbers, and all heads have keys."""

_WITHOUT_PER_LAYER = {"per_layer_config": None, "layer_types": ["sliding_attention", "full_attention"]}

_GEMMA_MODULE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                 "head_dim": 8, "intermediate_size": 48, "vocab_size": 99, "sliding_window": 4,
                 "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip

SPECIAL |= {
    "axk1": _LATENT, "axk2": _LATENT, "deepseek_v3": _LATENT, "deepseek_v32": _LATENT, "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _LATENT, "longcat_flash": _LATENT, "minicpm3": _LATENT, "mistral4": _LATENT, "youtu": _LATENT,
    "hunyuan_v1_dense": {"head_dim": 8}, "hunyuan_v1_moe": {"head_dim": 8}, "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    "deepseek_v2": {**_LATENT, "num_experts_per_tok": 2},
    "dots3_note_text": {"num_key_value_heads": 4, "per_layer_config": None},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
             "ffn_config": {"ffn_hidden_size": 48, "hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "zaya": {"num_experts_per_tok": 1}, "esmc": {"num_key_value_heads": 4},
    "zamba": {"layer_types": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4,
              "attention_hidden_size": 64, "attention_head_dim": 16,
              "n_mamba_heads": 2, "num_key_value_heads": 4, "use_mamba_kernels": False},
    "zamba2": {"layer_types": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4, "hybrid_layer_ids": [1, 3],
               "attention_head_dim": 16, "attention_hidden_size": 64,
               "num_key_value_heads": 4, "mamba_ngroups": 1, "n_mamba_heads": 4, "mamba_headdim": 16,
               "use_mamba_kernels": False},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8},
    "xlstm": {"embedding_dim": 32, "num_blocks": 2, "num_heads": 4, "qk_dim_factor": 1.0,
              "autocast_kernel_dtype": "float32"},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0,
                     "activation_sparsity_pattern": [0.0, 0.0], "laurel_rank": 4},
    "gemma4_text": _WITHOUT_PER_LAYER, "gemma4_unified_text": _WITHOUT_PER_LAYER,
    "neomme": {**_WITHOUT_PER_LAYER, "head_dim": 16},
    "cohere_compass_text": {"layer_types": ["full_attention", "sliding_attention"],
                            "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4}
                                                for kind in ("full_attention", "sliding_attention")}},
    "reformer": {"is_decoder": True, "axial_pos_shape": (8, 8), "axial_pos_embds_dim": (8, 24),
                 "attn_layers": ["local", "lsh"], "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4,
                 "feed_forward_size": 48},
    "roc_bert": {"pronunciation_vocab_size": 20, "shape_vocab_size": 20, "pronunciation_embed_dim": 8,
                 "shape_embed_dim": 8},
    "xmod": {"languages": ["en_XX", "de_DE"], "default_language": "en_XX"},
    "prophetnet": {"num_hidden_layers": ..., "num_encoder_layers": 2, "num_decoder_layers": 2,
                   "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4},
    "esm": {"vocab_size": 99, "mask_token_id": 4, "emb_layer_norm_before": True},
    "lilt": {"hidden_size": 48}, "luke": {"entity_vocab_size": 20, "entity_emb_size": 8},
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8, "input_size": 32, "patch_size": 8},
    "t5": {"decoder_start_token_id": 0}, "t5gemma": {"encoder": _GEMMA_MODULE, "decoder": _GEMMA_MODULE},
    "perceiver": {"d_model": 32, "d_latents": 32, "num_latents": 8, "num_self_attends_per_block": 2,
                  "num_self_attention_heads": 4, "num_cross_attention_heads": 4, "qk_channels": 32,
                  "v_channels": 32, "image_size": 16, "architectures": ["PerceiverForImageClassificationLearned"]},
    "blt": {"encoder_hash_byte_group_vocab": 30, "patch_in_forward": False},
    "deit": {"architectures": ["DeiTForImageClassification"]},
    "cvt": {"embed_dim": [8, 16, 16], "num_heads": [1, 2, 2], "depth": [1, 2, 3]},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320},
    "levit": SPECIAL["levit"] | {"drop_path_rate": 0, "architectures": ["LevitForImageClassification"]},
    "mobilevitv2": SPECIAL["mobilevitv2"] | {"image_size": 64},
    "hgnet_v2": {"embedding_size": 8, "depths": [1] * 4, "hidden_sizes": [16] * 4, "stem_channels": [3, 8, 8],
                 "stage_in_channels": [8, 16, 16, 16], "stage_mid_channels": [8] * 4, "stage_num_blocks": [1] * 4,
                 "stage_out_channels": [16] * 4, "stage_numb_of_layers": [2] * 4, "image_size": 64},
    "textnet": {"stem_out_channels": 8, "hidden_sizes": [8, 8, 16, 16, 16], "image_size": (64, 64)},
    "timesformer": {"drop_path_rate": 0}, "timm_wrapper": {"architecture": "test_vit", "image_size": 160},
    "sew": {"conv_dim": [8, 8], "conv_kernel": [10, 3], "conv_stride": [5, 2], "hidden_size": 32},
    "sew-d": {"conv_dim": [8, 8], "conv_kernel": [10, 3], "conv_stride": [5, 2], "hidden_size": 32,
              "position_buckets": 8},
    "whisper": {"max_source_positions": 16, "num_mel_bins": 16},
    "wav2vec2-bert": {"feature_projection_input_dim": 16, "vocab_size": 99},
    "wav2vec2-conformer": {"conv_dim": [8, 8], "conv_kernel": [10, 3], "conv_stride": [5, 2], "vocab_size": 99},
}  # fmt: skip

MAX_PARAMETERS = 24_000_000


def tiny_config(model_type: str, **overrides: Any) -> Any:
    """The default configuration of a model type with every known size field made small."""
    config_class = CONFIG_MAPPING[model_type]
    default = config_class()
    values = {name: value for name, value in TINY.items() if _fits(default, name, value)}
    values |= SPECIAL.get(model_type, {})
    values = {name: value for name, value in values.items() if value is not ...}
    config = config_class(**{**values, **overrides})
    if getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = 0
    for name, part in vars(config).items():  # text and vision parts of composite models
        if isinstance(part, transformers.PreTrainedConfig) and part.model_type in CONFIG_MAPPING:
            made = tiny_config(part.model_type)
            for field, value in vars(part).items():  # what only the whole model's configuration sets
                if getattr(made, field, None) is None and value is not None:
                    setattr(made, field, value)
            setattr(config, name, made)
    return config


def _fits(default: Any, name: str, value: Any) -> bool:
    """Tell whether a configuration has a field that can be set, and whose value is of the same kind."""
    found = getattr(type(default), name, None)
    if isinstance(found, property) and found.fset is None:
        return False
    try:
        given = getattr(default, name, None)
    except AmbiguousGlobalPerLayerAttributeError:  # layers differ: SPECIAL makes them equal
        return True
    if given is None or callable(given):
        return False
    return not isinstance(given, list | tuple) or isinstance(value, list)
