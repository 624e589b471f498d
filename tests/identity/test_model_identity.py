"""What a model computes apart from its weights: the same however it is loaded and used, another once it computes
something else."""

import argparse
import json
import sys
import textwrap
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from store_jobs import Job
from torch import nn
from work import counted_calls

from hf_trak.identity import config_identity, module_settings
from hf_trak.identity.model_identity import VERSIONED, model_changes, model_identity, version_changes, versions

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
VISION = {**SMALL, "image_size": 16, "patch_size": 8}
Built = tuple[nn.Module, dict[str, Any]]


def ids() -> torch.Tensor:
    return torch.randint(3, 50, (2, 7))


def pixels(size: int) -> dict[str, Any]:
    return {"pixel_values": torch.rand(2, 3, size, size), "labels": torch.tensor([0, 1])}


def gpt2(**options: Any) -> Built:
    config = tf.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50, n_positions=32, **options)
    return tf.GPT2LMHeadModel(config), {"input_ids": ids()}


def llama(**options: Any) -> Built:
    config = tf.LlamaConfig(**{**SMALL, "num_key_value_heads": 1, "vocab_size": 50, **options})
    return tf.LlamaForCausalLM(config), {"input_ids": ids()}


def dynamic_rope(**options: Any) -> Built:
    """Its rotary embeddings change while they run: longer inputs than the model was trained for."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    return llama(rope_parameters=rope, max_position_embeddings=4, **options)


def gemma3(**options: Any) -> Built:
    layers = ["sliding_attention", "full_attention"]
    given = {**SMALL, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 50, "sliding_window": 4}
    return tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**{**given, "layer_types": layers, **options})), {
        "input_ids": ids()
    }


def qwen3_moe(**options: Any) -> Built:
    experts = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 1}
    config = tf.Qwen3MoeConfig(**{**SMALL, **experts, "head_dim": 8, "vocab_size": 50, **options})
    return tf.Qwen3MoeForCausalLM(config), {"input_ids": ids()}


def bert(**options: Any) -> Built:
    model = tf.BertForSequenceClassification(tf.BertConfig(**{**SMALL, "vocab_size": 50, **options}))
    return model, {"input_ids": ids(), "labels": torch.tensor([0, 1])}


def t5(**options: Any) -> Built:
    config = tf.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, vocab_size=50, **options)
    config.decoder_start_token_id = 0
    return tf.T5ForConditionalGeneration(config), {"input_ids": ids(), "labels": ids()}


def vit(**options: Any) -> Built:
    return tf.ViTForImageClassification(tf.ViTConfig(**{**VISION, **options})), pixels(16)


def swin(**options: Any) -> Built:
    given = {
        "image_size": 32,
        "patch_size": 4,
        "embed_dim": 8,
        "depths": [1, 1],
        "num_heads": [2, 2],
        "window_size": 4,
    }
    return tf.SwinForImageClassification(tf.SwinConfig(**{**given, **options})), pixels(32)


def resnet(**options: Any) -> Built:
    config = tf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", **options)
    return tf.ResNetForImageClassification(config), pixels(32)


def clip(**options: Any) -> Built:
    text = {**SMALL, "vocab_size": 50, "eos_token_id": 2, **options}
    model = tf.CLIPModel(tf.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=8))
    return model, {"input_ids": ids(), "pixel_values": torch.rand(2, 3, 16, 16), "return_loss": True}


def whisper(**options: Any) -> Built:
    both = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    sizes = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 50, "num_mel_bins": 8}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    places = {"max_source_positions": 16, "max_target_positions": 16}
    config = tf.WhisperConfig(**{**both, **sizes, **tokens, **places, **options})
    return tf.WhisperForConditionalGeneration(config), {"input_features": torch.rand(2, 8, 32), "labels": ids()}


def wav2vec2(**options: Any) -> Built:
    convolutions = {"conv_dim": [8, 8], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_feat_extract_layers": 2}
    others = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8}
    model = tf.Wav2Vec2ForSequenceClassification(
        tf.Wav2Vec2Config(**{**SMALL, **convolutions, **others, "mask_time_length": 2, **options})
    )
    return model, {"input_values": torch.rand(2, 800), "labels": torch.tensor([0, 1])}


def mamba(**options: Any) -> Built:
    config = tf.MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=50, state_size=4, **options)
    return tf.MambaForCausalLM(config), {"input_ids": ids()}


def lora(**options: Any) -> Built:
    peft = pytest.importorskip("peft")
    model, batch = llama()
    config = peft.LoraConfig(**{"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], **options})
    return peft.get_peft_model(model, config), batch


def open_clip_model() -> Built:
    module = pytest.importorskip("open_clip.model")
    vision = {"image_size": 16, "layers": 2, "width": 16, "patch_size": 8, "head_width": 8}
    text = {"context_length": 7, "vocab_size": 50, "width": 16, "heads": 2, "layers": 2}
    model = module.CLIP(embed_dim=8, vision_cfg=vision, text_cfg=text, output_dict=True)
    return model, {"image": torch.rand(2, 3, 16, 16), "text": ids()}


def timm_model() -> Built:
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=2, depth=2, embed_dim=16, num_heads=2)
    return model, {"x": torch.rand(2, 3, 32, 32)}


def resnet18() -> Built:
    models = pytest.importorskip("torchvision.models")
    return models.resnet18(num_classes=3), {"x": torch.rand(2, 3, 32, 32)}


@dataclass
class Settings:
    width: int = 4
    slope: float = 0.1


class Layer(nn.Module):
    """A user's own, with settings of every kind, and state."""

    floor = 0.0

    def __init__(self, settings: Settings, gain: float = 1.0, function: Any = torch.tanh) -> None:
        super().__init__()
        self.linear = nn.Linear(settings.width, settings.width)
        self.settings = settings
        self.gain = gain
        self._hidden = gain + 1
        self.function = function
        self.table = torch.ones(3)
        self.register_buffer("mask", torch.arange(3.0), persistent=False)
        self.calls = 0
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._count(x)
        return self.function(self.linear(x)) * self.gain + self.settings.slope

    def _count(self, x: torch.Tensor) -> None:
        self.calls += 1
        self.kept = x.shape
        self._private_state = x.mean().item()


def own(**options: Any) -> Built:
    settings = Settings()
    layers = [Layer(settings, **options), Layer(settings)]
    return nn.Sequential(*layers, nn.LayerNorm(4)), {"input": torch.rand(2, 4)}


ALL: dict[str, Callable[..., Built]] = {
    function.__name__: function
    for function in (
        *(gpt2, llama, dynamic_rope, gemma3, qwen3_moe, bert, t5, vit, swin, resnet, clip, whisper, wav2vec2, mamba),
        *(lora, open_clip_model, timm_model, resnet18, own),
    )
}


def loss_of(output: Any) -> torch.Tensor:
    if getattr(output, "loss", None) is not None:
        return output.loss
    values = [output] if isinstance(output, torch.Tensor) else output.values()
    return sum(v.float().sum() for v in values if isinstance(v, torch.Tensor) and v.requires_grad)  # type: ignore[return-value]


def stored(model: nn.Module) -> dict[str, Any]:
    """As it comes back from a file."""
    return json.loads(json.dumps(model_identity(model), allow_nan=False))


@pytest.mark.few(3)
@pytest.mark.parametrize("name", list(ALL))
def test_use_leaves_the_identity_as_it_is(name: str, tmp_path: Path) -> None:
    """Forward and backward, modes, checkpointing, precision, storage."""
    model, batch = ALL[name]()
    expected = stored(model)
    model.train()
    loss_of(model(**batch)).backward()
    assert stored(model) == expected
    model.eval()
    with torch.no_grad():
        model(**batch)
    assert stored(model) == expected
    if getattr(model, "supports_gradient_checkpointing", False):
        model.train()
        model.gradient_checkpointing_enable()
        loss_of(model(**batch)).backward()
        assert stored(model) == expected
    model.to(torch.bfloat16)
    assert stored(model) == expected
    model.float()
    if isinstance(model, tf.PreTrainedModel):
        model.save_pretrained(tmp_path)
        assert stored(type(model).from_pretrained(tmp_path)) == expected
        assert stored(type(model).from_pretrained(tmp_path, dtype=torch.float16)) == expected
    again = ALL[name]()[0]
    assert stored(again) == expected, "other weights"
    assert model_changes(expected, stored(again)) == []


def test_adapters_come_back_from_files(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model, _ = lora(use_rslora=True)
    model.save_pretrained(tmp_path)
    for trainable in (False, True):
        loaded = peft.PeftModel.from_pretrained(llama()[0], str(tmp_path), is_trainable=trainable)
        assert model_changes(stored(model), stored(loaded)) == []
        assert stored(loaded) == stored(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [["gemma3", "bert", "lora", "own"], pytest.param(list(ALL), marks=pytest.mark.slow, id="all")]
)
@pytest.mark.usefixtures("jobs_with_one_thread")
def test_identities_are_the_same_in_a_new_process(names: list[str], tmp_path: Path) -> None:
    """Whatever its hash seed, which decides the order of sets: jobs have another one."""
    assert Job(tmp_path / "report.json", identities, names).wait() == {"value": identities(names)}


def identities(names: list[str]) -> dict[str, Any]:
    return {name: stored(ALL[name]()[0]) for name in names}


CHANGED: list[tuple[Callable[..., Built], dict[str, Any], list[str]]] = [
    (
        bert,
        {"layer_norm_eps": 0.01},
        [
            "config.layer_norm_eps: saved 1e-12, given 0.01",
            "torch.nn.modules.normalization.LayerNorm × 5: eps: saved 1e-12, given 0.01",
        ],
    ),
    (
        bert,
        {"hidden_act": "relu"},
        [
            'config.hidden_act: saved "gelu", given "relu"',
            "torch.nn.modules.activation.ReLU × 2: only in the given model",
            "transformers.activations.GELUActivation × 2: only in the saved model",
        ],
    ),
    (bert, {"num_attention_heads": 4}, ["config.num_attention_heads: saved 2, given 4"]),
    (bert, {"pad_token_id": 3}, ["config.pad_token_id: saved 0, given 3"]),
    (gpt2, {"scale_attn_weights": False}, ["config.scale_attn_weights: saved true, given false"]),
    (gpt2, {"layer_norm_epsilon": 0.1}, ["config.layer_norm_epsilon: saved 1e-05, given 0.1"]),
    (
        llama,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        ["config.rope_parameters.rope_theta: saved 10000.0, given 500.0"],
    ),
    (llama, {"rms_norm_eps": 0.1}, ["config.rms_norm_eps: saved 1e-06, given 0.1"]),
    (llama, {"num_attention_heads": 4}, ["config.num_attention_heads: saved 2, given 4"]),
    (gemma3, {"sliding_window": 8}, ["config.sliding_window: saved 4, given 8"]),
    (
        gemma3,
        {"layer_types": ["full_attention", "sliding_attention"]},
        ['config.layer_types: saved ["sliding_attention", "full_attention"], given '],
    ),
    (qwen3_moe, {"num_experts_per_tok": 1}, ["config.num_experts_per_tok: saved 2, given 1"]),
    (qwen3_moe, {"norm_topk_prob": True}, ["config.norm_topk_prob: saved false, given true"]),
    (t5, {"relative_attention_max_distance": 64}, ["config.relative_attention_max_distance: saved 128, given 64"]),
    (t5, {"feed_forward_proj": "gated-gelu"}, ['config.feed_forward_proj: saved "relu", given "gated-gelu"']),
    (vit, {"qkv_bias": False}, ["config.qkv_bias: saved true, given false"]),
    (swin, {"window_size": 2}, ["config.window_size: saved 4, given 2"]),
    (resnet, {"hidden_act": "gelu"}, ['config.hidden_act: saved "relu", given "gelu"']),
    (clip, {"hidden_act": "gelu"}, ['config.text_config.hidden_act: saved "quick_gelu", given "gelu"']),
    (clip, {"eos_token_id": 7}, ["config.text_config.eos_token_id: saved 2, given 7"]),
    (whisper, {"scale_embedding": True}, ["config.scale_embedding: saved false, given true"]),
    (wav2vec2, {"feat_extract_norm": "layer"}, ['config.feat_extract_norm: saved "group", given "layer"']),
    (mamba, {"time_step_floor": 0.1}, ["config.time_step_floor: saved 0.0001, given 0.1"]),
    (
        lora,
        {"lora_alpha": 8},
        [
            "adapters.default.lora_alpha: saved 4, given 8",
            "peft.tuners.lora.layer.Linear × 2: lora_alpha.default: saved 4, given 8; scaling.default: saved 2.0, "
            "given 4.0",
        ],
    ),
    (lora, {"use_rslora": True}, ["adapters.default.use_rslora: saved false, given true"]),
    (lora, {"use_dora": True}, ["adapters.default.use_dora: saved false, given true"]),
    (lora, {"target_modules": ["q_proj"]}, ["adapters.default.target_modules: saved "]),
    (own, {"gain": 2.0}, ["test_model_identity.Layer × 1: _hidden: saved 2.0, given 3.0; gain: saved 1.0, given 2.0"]),
    (
        own,
        {"function": torch.relu},
        [
            "test_model_identity.Layer × 1: function: saved torch._VariableFunctionsClass.tanh, given "
            "torch._VariableFunctionsClass.relu"
        ],
    ),
    (own, {"function": lambda x: x * 2}, ["test_model_identity.Layer × 1: function: saved torch._Var"]),
]


@pytest.mark.few(19)
@pytest.mark.parametrize("build, options, says", CHANGED)
def test_other_settings_are_said(build: Callable[..., Built], options: dict[str, Any], says: list[str]) -> None:
    lines = model_changes(stored(build()[0]), stored(build(**options)[0]))
    for expected in says:
        assert any(line.startswith(expected) for line in lines), (expected, lines)


def edited(build: Callable[..., Built], edit: Callable[[Any], Any]) -> list[str]:
    model = build()[0]
    before = stored(model)
    edit(model)
    return model_changes(before, stored(model))


def setting(path: str, name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(model.get_submodule(path), name, value)


@pytest.mark.slow
def test_edits_of_a_model_in_memory_are_seen() -> None:
    """With equal weights and shapes. Such edits need not be in a config."""

    def patched(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 3

    def hook(module: Any, inputs: Any, output: Any) -> Any:
        return output * 2

    def on(path: str, edit: Callable[[Any], Any]) -> Callable[[Any], None]:
        return lambda model: edit(model.get_submodule(path))

    def other_adapter(model: Any) -> None:
        model.add_adapter("b", model.peft_config["default"])
        model.set_adapter("b")

    def q_proj(model: Any) -> Any:
        return model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")

    edits: list[tuple[Callable[..., Built], Callable[[Any], Any], str]] = [
        (resnet18, setting("conv1", "stride", (1, 1)), r"Conv2d × 1: stride: saved [2, 2], given [1, 1]"),
        (resnet18, setting("conv1", "padding_mode", "circular"), 'padding_mode: saved "zeros", given "circular"'),
        (resnet18, setting("bn1", "eps", 0.5), "BatchNorm2d × 1: eps: saved 1e-05, given 0.5"),
        (resnet18, setting("maxpool", "ceil_mode", True), "MaxPool2d × 1: ceil_mode: saved false, given true"),
        (resnet18, setting("", "avgpool", nn.AdaptiveMaxPool2d(1)), "AdaptiveAvgPool2d × 1: only in the saved model"),
        (bert, setting("bert.embeddings.word_embeddings", "padding_idx", 5), "padding_idx: saved 0, given 5"),
        (bert, setting("bert.embeddings.word_embeddings", "max_norm", 1.0), "max_norm: saved null, given 1.0"),
        (bert, setting("", "a_scale", 2), "BertForSequenceClassification × 1: a_scale: saved nothing, given 2"),
        (open_clip_model, setting("transformer.resblocks.0.attn", "num_heads", 4), "num_heads: saved 2, given 4"),
        (open_clip_model, setting("", "output_dict", False), "output_dict: saved true, given false"),
        (lora, lambda m: m.base_model.disable_adapter_layers(), "_disable_adapters: saved false, given true"),
        (lora, lambda m: m.add_adapter("b", m.peft_config["default"]), "adapters.b: saved nothing, given "),
        (lora, other_adapter, '_active_adapter: saved ["default"], given ["b"]'),
        (lora, lambda m: q_proj(m).scaling.update(default=1.0), "scaling.default: saved 2.0, given 1.0"),
        (gpt2, on("transformer.h.0.mlp", lambda m: setattr(m, "forward", types.MethodType(patched, m))), "forward"),
        (gpt2, on("transformer.h.0.mlp", lambda m: m.register_forward_hook(hook)), "forward_hooks"),
        (gpt2, on("transformer.h.1.mlp", lambda m: m.register_forward_pre_hook(hook)), "forward_pre_hooks"),
        (own, lambda m: setattr(m[0].settings, "slope", 0.2), "settings: other code or content"),
        (own, lambda m: m[0].mask.add_(1), "mask: saved"),
        (own, lambda m: m[0].table.add_(1), "table: saved"),
        (own, lambda m: setattr(m[1], "floor", 1.0), "floor: saved nothing, given 1.0"),
        (own, lambda m: setattr(m[1], "limits", {"a": [1, float("inf")], "b": (2, None)}), "limits: saved nothing"),
        (own, lambda m: setattr(m[1], "options", argparse.Namespace(a=1)), "options: saved nothing"),
    ]  # fmt: skip
    for build, edit, expected in edits:
        lines = edited(build, edit)
        assert any(expected in line for line in lines), (build.__name__, expected, lines)


def test_what_a_user_edits_in_a_class_of_a_library_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt2()[0]
    before = stored(model)
    mlp = type(model.get_submodule("transformer.h.0.mlp"))
    monkeypatch.setattr(mlp, "forward", lambda self, x: x)
    (line,) = model_changes(before, stored(model))
    assert line == "transformers.models.gpt2.modeling_gpt2.GPT2MLP.forward: code of a user, in the given model alone"


def test_modules_of_the_same_settings_in_another_order_are_seen() -> None:
    norms = [nn.LayerNorm(4, eps=eps) for eps in (0.1, 0.2, 0.1)]
    first, second = nn.Sequential(*norms), nn.Sequential(norms[1], norms[0], norms[2])
    assert model_changes(stored(first), stored(second)) == [
        "modules: the same ones, with the same settings, in another order"
    ]
    shared = nn.Sequential(norms[0], norms[0])
    assert stored(shared) == stored(nn.Sequential(norms[2])) | {"order": stored(shared)["order"]}


SOURCE = """
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
    def forward(self, x):
        return helper(self.linear(x)) * 2
class Head(BertForSequenceClassification):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)
def helper(x):
    return x + 1
"""


def compiled(source: str) -> types.ModuleType:
    module = types.ModuleType("a_users_models")
    exec(compile(source, "models.py", "exec"), module.__dict__)
    return module


def test_the_code_of_a_users_model_is_compared() -> None:
    def change(old: str, new: str, name: str = "Net", *args: Any) -> list[str]:
        models = [getattr(compiled(text), name)(*args) for text in (SOURCE, SOURCE.replace(old, new))]
        return model_changes(stored(models[0]), stored(models[1]))

    assert change("nothing", "") == []
    assert change("def helper", "\n# Moved.\ndef helper") == []
    assert change("* 2", "* 3") == ["a_users_models.Net: other code"]
    assert change("x + 1", "x + 2") == ["a_users_models.Net: other code"]
    config = bert()[0].config
    assert change("super().forward", "type(self).__mro__[1].forward", "Head", config) == [
        "a_users_models.Head: other code"
    ]


def test_models_of_transformers_within_a_users_module_have_their_configs_compared() -> None:
    class Two(nn.Module):
        def __init__(self, theta: float) -> None:
            super().__init__()
            rope = {"rope_type": "default", "rope_theta": theta}
            self.text = llama(rope_parameters=rope)[0]
            self.blocks = nn.ModuleList([nn.Linear(2, 2), bert()[0]])

    first, second = (stored(Two(theta)) for theta in (1e4, 500.0))
    assert list(first["inner_configs"]) == ["text", "blocks.1"]
    assert model_changes(first, second) == [
        "inner_configs.text.rope_parameters.rope_theta: saved 10000.0, given 500.0"
    ]


def test_configs_of_a_users_model_are_compared() -> None:
    @dataclass
    class Config:
        eps: float = 0.1
        name: str = "x"

    for make in (lambda eps: Config(eps), lambda eps: {"eps": eps}, lambda eps: argparse.Namespace(eps=eps)):
        identities = []
        for eps in (0.1, 0.2):
            model = nn.Linear(2, 2)
            model.config = make(eps)
            identities.append(stored(model))
        assert "config.eps: saved 0.1, given 0.2" in model_changes(*identities)


@pytest.mark.slow
def test_mixed_precision_devices_and_compilation_are_no_part_of_a_model() -> None:
    """What accelerate and torch wrap around a model. The precision of a run is a setting of the run."""
    model = gpt2()[0]
    expected = stored(model)
    AcceleratorState._reset_state(reset_partial_state=True)  # a Trainer of another test may have set a precision
    prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert "forward" in vars(prepared)
    assert stored(prepared) == expected
    plain = own()[0]
    before = stored(plain)
    assert stored(nn.DataParallel(plain)) == before
    assert stored(torch.compile(plain)) == before


def test_left_out_settings_have_reasons() -> None:
    for reasons in (
        module_settings.VOLATILE,
        module_settings.LIBRARY_VOLATILE,
        config_identity.VOLATILE,
        config_identity.ADAPTER_VOLATILE,
    ):
        assert all(reasons.values())
    model = bert()[0]
    before = stored(model)
    model.config._attn_implementation = "eager"
    model.config.update({"use_cache": False, "output_attentions": True, "problem_type": "regression", "prefix": "x"})
    model.config._name_or_path = "elsewhere"
    model.config.id2label = {0: "cat", 1: "dog"}
    model.add_model_tags(["trl", "sft"])
    assert stored(model) == before


def test_versions_are_those_of_installed_packages() -> None:
    found = versions()
    assert found["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert found["torch"] == torch.__version__.partition("+")[0] and found["transformers"] == tf.__version__
    assert set(found) <= {"python", *VERSIONED}
    older = {**found, "transformers": "5.0.0", "gone": "1"}
    assert version_changes(older, found) == [f"transformers: saved 5.0.0, given {tf.__version__}"]
    found["torch"] = "0"
    assert versions()["torch"] != "0"


def test_between_versions_only_what_both_know_is_compared() -> None:
    """A new version of a library adds settings with defaults, and classes."""
    given = stored(bert()[0])
    saved = json.loads(json.dumps(given))
    saved["versions"]["transformers"] = "5.0.0"
    del saved["config"]["is_decoder"]
    norm = "torch.nn.modules.normalization.LayerNorm"
    ((text, count),) = saved["modules"][norm].items()
    older = json.loads(text)
    del older["elementwise_affine"]
    saved["modules"][norm] = {json.dumps(older): count}
    saved["modules"].pop("torch.nn.modules.activation.Tanh")
    assert model_changes(saved, given) == []
    saved["modules"][norm] = {json.dumps({**older, "eps": 0.5}): count}
    saved["config"]["layer_norm_eps"] = 0.5
    assert model_changes(saved, given) == [
        "config.layer_norm_eps: saved 0.5, given 1e-12",
        f"{norm} × 5: eps: saved 0.5, given 1e-12",
    ]
    saved["versions"] = given["versions"]
    assert len(model_changes(saved, given)) > 2


def test_bytecode_of_another_version_of_python_is_not_compared() -> None:
    given = stored(own()[0])
    saved = json.loads(json.dumps(given))
    for identity in saved["code"].values():
        identity |= {"code": "0" * 32, "python": "3.99"}
    saved["versions"]["python"] = "3.99"
    assert model_changes(saved, given) == []
    for identity in saved["code"].values():
        identity["python"] = given["versions"]["python"]
    assert model_changes(saved, given) == ["test_model_identity.Layer: other code"]


@pytest.mark.slow
def test_large_models_take_little_time_and_room() -> None:
    """22 calls per module, with room to spare."""
    config = tf.GPT2Config(n_embd=4, n_layer=200, n_head=2, vocab_size=50, n_positions=8)
    model = tf.GPT2LMHeadModel(config)
    assert counted_calls(lambda: model_identity(model))[1] < 40 * len(list(model.modules()))
    moved = nn.Sequential(*[nn.Dropout((i + 0.5 * (i == 4_000)) / 30_000) for i in range(5_000)])
    assert model_changes(check_size(5_000), stored(moved))


@pytest.mark.slow
def test_calls_grow_with_the_number_of_modules() -> None:
    check_size(50_000)


def check_size(count: int) -> dict[str, Any]:
    """Modules that are all alike, and such that all differ: 23 and 89 calls each. Returns that of the latter."""
    for modules in ([nn.Identity() for _ in range(count)], [nn.Dropout(i / (6 * count)) for i in range(count)]):
        identity, calls = counted_calls(lambda modules=modules: stored(nn.Sequential(*modules)))
        assert calls < 60_000 + 120 * count
        assert len(json.dumps(identity)) < 20_000
    return identity


def test_deep_models_are_walked_without_recursion() -> None:
    model: nn.Module = nn.Identity()
    for _ in range(5_000):
        model = nn.Sequential(model)
    assert model_identity(model)["modules"]["torch.nn.modules.container.Sequential"] == {"{}": 5_000}


def test_the_attributed_model_may_know_itself() -> None:
    """A module that refers to the model it is in, or to a function that does."""
    model = own()[0]
    model[0].owner = [model]
    model[1].function = lambda x: model[2](x)
    before = stored(model)
    with torch.no_grad():
        model[2].weight += 1
    assert stored(model) == before


def test_module_docstring_of_a_users_code_does_not_matter() -> None:
    moved = compiled(textwrap.dedent('"""Models."""\n') + SOURCE)
    assert stored(moved.Net()) == stored(compiled(SOURCE).Net())


@dataclass
class MatmulLtState:
    """Like that of bitsandbytes, whose 8-bit layers note in it what their last pass made."""

    threshold: float = 6.0
    has_fp16_weights: bool = False
    is_training: bool = True
    CB: torch.Tensor | None = None


def test_what_8_bit_layers_note_of_a_pass_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MatmulLtState, "__module__", "bitsandbytes.autograd._functions")

    def identity(**noted: Any) -> dict[str, Any]:
        layer = nn.Linear(3, 3)
        layer.state = MatmulLtState(**noted)  # type: ignore[assignment]
        return model_identity(nn.Sequential(layer))

    assert not model_changes(identity(), identity(is_training=False, CB=torch.ones(2)))
    assert model_changes(identity(), identity(threshold=0.0))
