"""Adapters of PEFT: only they are attributed, and their features follow from the weights that they amount to."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from datasets import Dataset
from peft import IA3Config, LoraConfig, PromptTuningConfig, TaskType
from torch import Tensor, nn
from trak_options import trak_config
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from hf_trak import TrakAttributor
from hf_trak.gradient_computers.environment import pass_settings
from hf_trak.modelout_functions import infer_task
from hf_trak.weights.adapters import check_adapter_config
from hf_trak.weights.checkpoints import load_into, loaded

N, LENGTH, VOCABULARY, RANK, ALPHA = 9, 7, 40, 3, 6


def base(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def rows(seed: int = 0) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCABULARY, (N, LENGTH), generator=generator)
    return Dataset.from_dict({"input_ids": tokens.tolist(), "labels": tokens.tolist()})


def shaken(model: nn.Module, seed: int = 1) -> nn.Module:
    """Adapters away from where they do nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def lora(seed: int = 1) -> nn.Module:
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["q_proj", "down_proj"], lora_dropout=0.1)
    return shaken(peft.get_peft_model(base(), config), seed)


def ia3() -> nn.Module:
    config = IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"])
    return shaken(peft.get_peft_model(base(), config))


def prompt_tuning() -> nn.Module:
    config = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4)
    return shaken(peft.get_peft_model(base(), config))


def make(model: nn.Module, directory: Path, **options: Any) -> TrakAttributor:
    settings = {"proj_dim": 256, "shard_size": 4, "per_device_batch_size": 4, "use_cpu": True}
    config = trak_config(output_dir=str(directory), **{**settings, **options})
    return TrakAttributor(model, config, train_dataset=rows())


def stored(attributor: TrakAttributor, model_id: int = 0) -> tuple[Tensor, Tensor]:
    shards = list(attributor.features.store.train(model_id))
    return torch.cat([s.grads for s in shards]), torch.cat([s.out_to_loss for s in shards])


def relative_error(given: Tensor, expected: Tensor) -> float:
    return float((given.double() - expected.double()).abs().max() / expected.double().abs().max())


def margins(logits: Tensor, tokens: Tensor) -> Tensor:
    """Σ over tokens of log(p / (1 − p)), one sequence, from the definition."""
    p = logits[:-1].softmax(dim=-1)[torch.arange(len(tokens) - 1), tokens[1:]]
    return torch.log(p / (1 - p)).sum()


def weight_gradients(merged: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """∇f by every weight of a model without adapters, float64, one sequence."""
    names, parameters = zip(*merged.named_parameters(), strict=True)
    f = margins(merged(input_ids=tokens[None]).logits[0], tokens)
    return dict(zip(names, torch.autograd.grad(f, parameters), strict=True))


def projected(attributor: TrakAttributor, gradients: list[dict[str, Tensor]]) -> Tensor:
    """Features from gradients by name, which must be those of all attributed parameters."""
    names = [slot.name for slot in attributor.features.layout.slots]
    assert all(set(row) == set(names) for row in gradients)
    flat = torch.stack([torch.cat([row[name].flatten() for name in names]) for row in gradients]).float()
    projector = attributor.features.projector()
    return projector.project(flat, 0) * projector.scale


def merged_lora(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).merge_and_unload().double().requires_grad_(True)


def test_lora_features_are_those_of_the_merged_weights(tmp_path: Path) -> None:
    """W' = W + (α/r) B A, so ∂f/∂A = (α/r) Bᵀ ∂f/∂W' and ∂f/∂B = (α/r) ∂f/∂W' Aᵀ. Nothing else counts."""
    model = lora()
    attributor = make(model, tmp_path).featurize()
    assert infer_task(model) == "causal_lm"
    parts = dict(model.named_parameters())
    trainable = {name: value for name, value in parts.items() if value.requires_grad}
    assert (
        attributor.features.layout.total
        == sum(value.numel() for value in trainable.values())
        == 2 * 2 * RANK * 16 + 2 * RANK * 40
    )
    merged = merged_lora(model)
    expected = []
    for row in torch.tensor(rows()["input_ids"][:]):
        gradients = weight_gradients(merged, row)
        found = {}
        for name in trainable:
            layer = name.removeprefix("base_model.model.").split(".lora_")[0]
            g = ALPHA / RANK * gradients[f"{layer}.weight"]
            a, b = (parts[f"base_model.model.{layer}.lora_{side}.default.weight"].double() for side in "AB")
            found[name] = b.T @ g if "lora_A" in name else g @ a.T
        expected.append(found)
    assert relative_error(stored(attributor)[0], projected(attributor, expected)) < 1e-4


def test_ia3_features_are_those_of_the_merged_weights(tmp_path: Path) -> None:
    """Attention: W' = diag(l) W, ∂f/∂l_i = Σ_j G_ij W_ij. Feed-forward: W' = W diag(l), ∂f/∂l_j = Σ_i G_ij W_ij."""
    model = ia3()
    attributor = make(model, tmp_path).featurize()
    parts = dict(model.named_parameters())
    trainable = {name: value for name, value in parts.items() if value.requires_grad}
    assert attributor.features.layout.total == sum(value.numel() for value in trainable.values()) == 2 * (8 + 8 + 24)
    merged = merged_lora(model)
    expected = []
    for row in torch.tensor(rows()["input_ids"][:]):
        gradients = weight_gradients(merged, row)
        found = {}
        for name in trainable:
            layer = name.removeprefix("base_model.model.").split(".ia3_")[0]
            product = gradients[f"{layer}.weight"] * parts[f"base_model.model.{layer}.base_layer.weight"].double()
            found[name] = product.sum(dim=0 if "down_proj" in layer else 1)
        expected.append(found)
    assert relative_error(stored(attributor)[0], projected(attributor, expected)) < 1e-4


def test_prompt_tuning_features_are_gradients_of_the_first_embeddings(tmp_path: Path) -> None:
    model = prompt_tuning()
    attributor = make(model, tmp_path).featurize()
    (name,) = [name for name, value in model.named_parameters() if value.requires_grad]
    assert attributor.features.layout.total == 4 * 16
    plain = base().double()
    expected = []
    for row in torch.tensor(rows()["input_ids"][:]):
        prompt = dict(model.named_parameters())[name].detach().double().requires_grad_()
        embedded = torch.cat([prompt, plain.get_input_embeddings()(row).detach()])[None]
        logits = plain(inputs_embeds=embedded).logits[0]
        # the last virtual token predicts the first of the row, in the loss of the model, too
        said = margins(logits[3:], torch.cat([row[:1], row]))
        expected.append({name: torch.autograd.grad(said, prompt)[0]})
    assert relative_error(stored(attributor)[0], projected(attributor, expected)) < 1e-4


@pytest.mark.few(2)
@pytest.mark.parametrize("adapter", [lora, ia3, prompt_tuning])
def test_the_base_is_neither_differentiated_nor_changed(adapter: Any, tmp_path: Path) -> None:
    """One sample at a time gives the same, so no sample sees another."""
    model = adapter()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    flags = {name: value.requires_grad for name, value in model.named_parameters()}
    results = [stored(make(model, tmp_path / str(size), per_device_batch_size=size).featurize()) for size in (1, 4)]
    assert relative_error(results[0][0], results[1][0]) < 1e-5
    assert relative_error(results[0][1], results[1][1]) < 1e-5
    assert {name: value.requires_grad for name, value in model.named_parameters()} == flags
    assert all(value.grad is None for value in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# -- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("adapter", [lora, ia3, prompt_tuning])
def test_adapter_directories_are_checkpoints(adapter: Any, tmp_path: Path) -> None:
    """`save_pretrained` of a `PeftModel` writes `adapter_model.safetensors`; the base comes from the model at hand."""
    models = [shaken(adapter(), seed) for seed in (5, 6)]
    paths = []
    for i, model in enumerate(models):
        model.save_pretrained(tmp_path / f"adapter-{i}")
        paths.append(tmp_path / f"adapter-{i}")
        assert (paths[i] / "adapter_model.safetensors").is_file()
    model = adapter()
    attributor = make(model, tmp_path / "trak").featurize(paths)
    for i, source in enumerate(models):
        expected = stored(make(source, tmp_path / f"alone-{i}", seed=0).featurize())
        if i == 0:  # the second checkpoint has a random matrix of its own
            assert relative_error(stored(attributor, i)[0], expected[0]) < 1e-6
        assert relative_error(stored(attributor, i)[1], expected[1]) < 1e-6
    again = make(adapter(), tmp_path / "trak")
    scores = np.asarray(again.attribute(rows(3), top_k=None, name="e")["trak_scores"][:])
    assert scores.shape == (N, N) and np.isfinite(scores).all() and np.abs(scores).max() > 0


def test_an_adapter_checkpoint_touches_the_adapter_alone(tmp_path: Path) -> None:
    """A base model of many gigabytes is neither copied nor written to."""
    source, model = lora(7), lora(8)
    source.save_pretrained(tmp_path)
    touched = {name for name, value in model.named_parameters() if value.requires_grad}
    versions = {name: (value.data_ptr(), value._version) for name, value in model.named_parameters()}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with loaded(model, tmp_path):
        for name, value in model.named_parameters():
            assert torch.equal(value, source.get_parameter(name)), name
            assert name in touched or versions[name] == (value.data_ptr(), value._version), name
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with loaded(model, source):  # a whole model replaces everything
        assert all(versions[name] != (value.data_ptr(), value._version) for name, value in model.named_parameters())


@pytest.mark.parametrize("options", [{"lora_alpha": 32}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 1}}])
def test_an_adapter_that_computes_something_else_from_its_weights_is_refused(
    options: dict[str, Any], tmp_path: Path
) -> None:
    settings = {"r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj", "down_proj"], **options}
    other, model = peft.get_peft_model(base(), LoraConfig(**settings)), lora()
    other.save_pretrained(tmp_path)
    for checkpoint in (other, tmp_path, tmp_path / "adapter_model.safetensors"):
        with pytest.raises(ValueError, match=next(iter(options))), loaded(model, checkpoint):
            pass
    with pytest.raises(ValueError, match=next(iter(options))):
        make(model, tmp_path / "trak").featurize([tmp_path])


def test_keys_that_change_nothing_in_what_is_computed_are_not_compared(tmp_path: Path) -> None:
    source, model = lora(7), lora(8)
    source.save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    changed = {"fan_in_fan_out": True, "lora_dropout": 0.5, "inference_mode": True, "tokenizer_name_or_path": "moved"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    with loaded(model, tmp_path):
        for name, value in source.named_parameters():
            assert torch.equal(value, model.get_parameter(name)), name
    model.active_adapter = ["default", "other"]  # which weights without a config do not ask for
    check_adapter_config(model, source.state_dict())


def test_a_checkpoint_goes_into_the_active_adapter(tmp_path: Path) -> None:
    source, model = lora(7), lora(8)
    source.save_pretrained(tmp_path)
    model.add_adapter("other", LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["q_proj", "down_proj"]))
    model.set_adapter("other")
    with loaded(model, tmp_path):
        for name, value in source.named_parameters():
            assert torch.equal(value, model.get_parameter(name.replace(".default.", ".other."))), name
        name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
        assert torch.equal(model.get_parameter(name), lora(8).get_parameter(name))


def test_a_merged_adapter_is_refused(tmp_path: Path) -> None:
    model = lora()
    model.merge_adapter()
    with pytest.raises(ValueError, match="unmerge_adapter"):
        make(model, tmp_path)
    model.unmerge_adapter()
    make(model, tmp_path)


def test_an_adapter_of_another_shape_is_refused(tmp_path: Path) -> None:
    config = LoraConfig(r=RANK + 1, target_modules=["q_proj", "down_proj"])
    peft.get_peft_model(base(), config).save_pretrained(tmp_path / "rank")
    config = LoraConfig(r=RANK, target_modules=["v_proj"])
    peft.get_peft_model(base(), config).save_pretrained(tmp_path / "modules")
    model = lora()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"of another shape.*lora_A.*\(4, 16\) instead of \(3, 16\)"):
        load_into(model, tmp_path / "rank")
    with pytest.raises(ValueError, match=r"names missing.*q_proj|names missing.*down_proj"):
        load_into(model, tmp_path / "modules")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match=r"adapter of PEFT.*PeftModel"):
        load_into(base(), tmp_path / "rank")


# -- other models ----------------------------------------------------------------------------------------------------


def test_adapters_of_a_classifier_with_its_head(tmp_path: Path) -> None:
    """`modules_to_save`: the head is trained beside the adapters, so it is attributed with them."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        num_labels=3,
    )  # fmt: skip
    adapters = LoraConfig(task_type=TaskType.SEQ_CLS, r=RANK, target_modules=["query", "value"])
    model = shaken(peft.get_peft_model(BertForSequenceClassification(config), adapters))
    dataset = rows().remove_columns("labels").add_column("label", [i % 3 for i in range(N)])
    settings = {"proj_type": "none", "use_cpu": True}
    attributor = TrakAttributor(model, trak_config(output_dir=str(tmp_path), **settings), dataset).featurize()
    trainable = {name: value for name, value in model.named_parameters() if value.requires_grad}
    assert any("classifier" in name for name in trainable)
    assert attributor.features.layout.total == sum(value.numel() for value in trainable.values())
    exact = copy.deepcopy(model).double()
    parameters = [dict(exact.named_parameters())[slot.name] for slot in attributor.features.layout.slots]
    expected = []
    for row in dataset:
        p = exact(input_ids=torch.tensor([row["input_ids"]])).logits[0].softmax(dim=0)[row["label"]]
        gradients = torch.autograd.grad(torch.log(p / (1 - p)), parameters)
        expected.append(torch.cat([gradient.flatten() for gradient in gradients]))
    assert relative_error(stored(attributor)[0], torch.stack(expected)) < 1e-4


def test_conv1d_layers_of_gpt2(tmp_path: Path) -> None:
    """Weights stored the other way round (`fan_in_fan_out`)."""
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=VOCABULARY, n_positions=16))
    model = shaken(peft.get_peft_model(gpt2, LoraConfig(r=RANK, target_modules=["c_attn"], fan_in_fan_out=True)))
    attributor = make(model, tmp_path).featurize()
    exact = copy.deepcopy(model).double()
    expected = []
    for row in torch.tensor(rows()["input_ids"][:]):
        f = margins(exact(input_ids=row[None]).logits[0], row)
        trainable = {name: value for name, value in exact.named_parameters() if value.requires_grad}
        expected.append(dict(zip(trainable, torch.autograd.grad(f, list(trainable.values())), strict=True)))
    assert relative_error(stored(attributor)[0], projected(attributor, expected)) < 1e-4


def test_answers_of_adapters_are_attributed(tmp_path: Path) -> None:
    """Generating leaves a method on the instance, which is no setting of the model."""
    adapter = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["q_proj"], task_type=TaskType.CAUSAL_LM)
    model = shaken(peft.get_peft_model(base(), adapter))
    attributor = make(model, tmp_path / "trak").featurize()
    answers = attributor.predict(rows(1).remove_columns("labels"), max_new_tokens=3)
    assert "prepare_inputs_for_generation" in vars(model.base_model)
    assert len(attributor.attribute(answers, top_k=3)) == N


def test_a_quantized_base(tmp_path: Path) -> None:
    """4-bit weights of bitsandbytes below trainable adapters: the adapters are attributed as with any other base."""
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    path = tmp_path / "base"
    base().save_pretrained(path)
    options = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    quantized = LlamaForCausalLM.from_pretrained(path, quantization_config=options, device_map={"": "cpu"})
    model = shaken(peft.get_peft_model(quantized, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["q_proj"])))
    assert any("4bit" in type(module).__name__ for module in model.modules())
    attributor = make(model, tmp_path / "trak").featurize()
    trainable = {name: value for name, value in model.named_parameters() if value.requires_grad}
    assert attributor.features.layout.total == sum(value.numel() for value in trainable.values())
    expected = []
    model.train()  # the same function, as nothing here draws; in evaluation some CPUs have the weights rewritten
    for row in torch.tensor(rows()["input_ids"][:]):
        f = margins(model(input_ids=row[None]).logits[0], row)
        expected.append(dict(zip(trainable, torch.autograd.grad(f, list(trainable.values())), strict=True)))
    model.eval()
    assert relative_error(stored(attributor)[0], projected(attributor, expected)) < 1e-3
    model.save_pretrained(tmp_path / "adapter")
    make(model, tmp_path / "trak").featurize([tmp_path / "adapter"])
    with pytest.raises(ValueError, match=r"`model_dtype` is 'bfloat16'.*quantized"):
        make(model, tmp_path / "cast", model_dtype="bfloat16").featurize()
    layer = next(module for module in model.modules() if "4bit" in type(module).__name__ and hasattr(module, "weight"))
    layer.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(ValueError, match=r"rewritten the 4-bit weights of .*q_proj"), pass_settings(model):
        pass
